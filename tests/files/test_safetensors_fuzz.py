"""Fuzzing of the safetensors reader: it reads what the format's library reads, or raises a ModelError; nothing else."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.errors import ModelError
from genesis.files.safetensors import DTYPES, SafeTensors, load_file
from tests.files.st_files import file_bytes, header, library_read, save_file

# What parsing may take beside the tensors: a header of a few hundred bytes as bytes, text and Python objects.
OVERHEAD = 128 << 10
settings_200 = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def read_or_refuse(path: Path, content: bytes) -> bool:
    """Whether the reader took the file; it must then agree with the library, and take no more memory than the file."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with SafeTensors(path) as file:
            arrays = {name: file.read(name) for name in file.names}
        refusal = ""
    except ModelError as error:
        arrays, refusal = {}, str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(content) + OVERHEAD, f"{peak:,} bytes for a file of {len(content):,}"
    if refusal:
        assert refusal.isprintable()
        return False
    expected = library_read(content)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
        assert array.tobytes() == expected[name].tobytes()
    return True


def test_the_helper_sees_agreement_and_refusal(path: Path) -> None:
    assert read_or_refuse(path, file_bytes(header()))
    assert not read_or_refuse(path, file_bytes(header())[:-1])


def test_the_helper_fails_on_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SafeTensors, "read", lambda self, name: np.zeros(self.entries[name].shape, self.entries[name].dtype)
    )
    with pytest.raises(AssertionError):
        read_or_refuse(path, file_bytes(header()))


def test_the_helper_fails_on_too_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafeTensors, "read", lambda self, name: np.zeros(1 << 20))
    with pytest.raises(AssertionError, match="bytes for a file"):
        read_or_refuse(path, file_bytes(header()))


VALID = file_bytes(header())


@settings_200
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(-12, 12),
)
def test_bytes_changed_and_ends_moved(path: Path, changes: list[tuple[int, int]], more: int) -> None:
    content = bytearray(VALID)
    for place, value in changes:
        content[place] = value
    read_or_refuse(path, bytes(content[:more]) if more < 0 else bytes(content) + b" " * more)


@settings_200
@given(st.integers(0, len(VALID) - 1), st.integers(0, len(VALID)), st.integers(0, len(VALID)))
def test_pieces_moved(path: Path, start: int, stop: int, to: int) -> None:
    piece = VALID[start:stop]
    rest = VALID[:start] + VALID[stop:]
    read_or_refuse(path, rest[:to] + piece + rest[to:])


numbers: st.SearchStrategy[Any] = (
    st.integers(0, 40)
    | st.sampled_from([-1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**20, 1.0, 0.5, True, None, "1", [], {}])
    | st.sampled_from([float("nan"), float("inf")])
)
names = st.sampled_from(["a", "b", "__metadata__", "", "../x", "a\n", "é", "a" * 2000]) | st.text(max_size=5)
entries: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F32", "U8", "C64", "", None, 7]),
        "shape": st.lists(numbers, max_size=4) | numbers,
        "data_offsets": st.lists(numbers, max_size=3) | numbers,
    },
    optional={"more": numbers},
)


@settings_200
@given(st.dictionaries(names, entries | numbers, max_size=4), st.integers(0, 64), st.integers(-8, 8))
def test_headers_of_the_right_form(path: Path, head: dict[str, Any], data: int, shift: int) -> None:
    text = json.dumps(head)
    read_or_refuse(path, file_bytes(text, bytes(data), length=len(text) + (shift if shift > 4 else 0)))


@st.composite
def honest(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A header that is right in all but perhaps one number, and its data."""
    head: dict[str, Any] = {}
    stop = 0
    for i in range(draw(st.integers(0, 4))):
        code = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(np.prod(shape, dtype=int)) * DTYPES[code].itemsize
        head[f"t{i}"] = {"dtype": code, "shape": shape, "data_offsets": [stop, stop + size]}
        stop += size
    wrong: bool = draw(st.booleans())
    if head and wrong:
        entry = head[draw(st.sampled_from(sorted(head)))]
        field = entry[draw(st.sampled_from(["shape", "data_offsets"]))]
        if field:
            field[draw(st.integers(0, len(field) - 1))] += draw(st.sampled_from([-1, 1, 2, 8, 2**32]))
    return head, bytes(draw(st.lists(st.integers(0, 1), min_size=stop, max_size=stop)))


accepted: list[bool] = []


@settings_200
@given(honest())
def test_nearly_honest_files(path: Path, file: tuple[dict[str, Any], bytes]) -> None:
    accepted.append(read_or_refuse(path, file_bytes(*file)))


def test_the_honest_generator_hits_both_outcomes(path: Path) -> None:
    """Otherwise the property before this one would say little."""
    accepted.clear()
    test_nearly_honest_files(path)
    assert 40 < sum(accepted) < len(accepted) - 20


@st.composite
def array_dicts(draw: st.DrawFn) -> dict[str, Any]:
    result = {}
    for name in draw(
        st.lists(st.text("abc.é_/0", min_size=1, max_size=6).filter(lambda n: n[0] != "/"), unique=True, max_size=4)
    ):
        code = draw(st.sampled_from(list(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        size = int(np.prod(shape, dtype=int)) * DTYPES[code].itemsize
        top = 1 if code == "BOOL" else 255
        raw = (
            draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
            if size < 64
            else [i & top for i in range(size)]
        )
        result[name] = np.array(raw, np.uint8).view(DTYPES[code]).reshape(shape)
    return result


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array_dicts(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_what_is_saved_is_read_by_both(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    arrays = {name: array for name, array in arrays.items() if ".." not in name.split("/")}
    save_file(arrays, path, metadata)
    for found in (load_file(path), library_read(path.read_bytes())):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()
    with SafeTensors(path) as file:
        assert file.metadata == metadata

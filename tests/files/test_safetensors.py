"""Safetensors: equal to the format's library both ways, stricter on every claim of a header, frugal with memory."""

from __future__ import annotations

import errno
import json
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy

from genesis.errors import DiskError, DTypeError, ModelError, OutOfMemoryError, ShapeError
from genesis.files.filesystem import FileSystem
from genesis.files.safetensors import (
    DTYPES,
    HEADER_SIZE_CAP,
    SafeTensors,
    load_file,
    write_tensors,
)
from tests.files.faults import FailAt, Recorder
from tests.files.st_files import DATA, file_bytes, header, library_read, save_file, write

MIB = 1 << 20
Arrays = dict[str, npt.NDArray[Any]]


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Fails where the block takes more memory than `limit` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak:,} bytes were taken, over {limit:,}"


def test_peak_below_can_fail() -> None:
    with pytest.raises(AssertionError, match="bytes were taken"), peak_below(MIB):
        np.ones(2 * MIB, np.uint8)


def sample(code: str, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    """An array of every kind of bit pattern of a dtype."""
    dtype = DTYPES[code]
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, size, np.uint8)
    array: npt.NDArray[Any] = raw.view(dtype).reshape(shape)
    return array


def all_samples() -> Arrays:
    """Every dtype in several shapes, an unsorted order, and names beyond ASCII."""
    arrays = {
        f"{prefix}.{code}.{len(shape)}": sample(code, shape, i)
        for i, code in enumerate(DTYPES)
        for prefix, shape in (("z", (3, 5)), ("a", ()), ("é", (0, 2)), ("m", (7,)))
    }
    return {name: arrays[name] for name in sorted(arrays, key=lambda name: name[::-1])}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def refused(path: Path, *fragments: str) -> ModelError:
    """The error of opening the file, which must take no memory to speak of and hold all fragments."""
    with peak_below(MIB // 2), pytest.raises(ModelError) as caught:
        SafeTensors(path)
    error = caught.value
    assert error.exit_code == 5
    assert str(path) in error.where
    assert error.next
    assert str(error).isprintable() and len(str(error)) < 1000
    for fragment in fragments:
        assert fragment in error.what
    return error


class TestAgainstTheLibrary:
    """The same tensors from the same bytes, and the same bytes from the same tensors."""

    def test_reads_what_the_library_writes(self, tmp_path: Path) -> None:
        arrays = all_samples()
        safetensors.numpy.save_file(arrays, tmp_path / "x", metadata={"format": "pt", "note": "é\n"})
        assert_same(load_file(tmp_path / "x"), arrays)
        with SafeTensors(tmp_path / "x") as file:
            assert file.metadata == {"format": "pt", "note": "é\n"}

    def test_the_library_reads_what_we_write(self, tmp_path: Path) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "x", metadata={"format": "pt", "note": "é\n"})
        assert_same(library_read((tmp_path / "x").read_bytes()), arrays)
        plain = {name: array for name, array in arrays.items() if "F8" not in name}
        save_file(plain, tmp_path / "plain")
        assert_same(safetensors.numpy.load_file(tmp_path / "plain"), plain)
        with safetensors.safe_open(tmp_path / "x", framework="numpy") as file:
            assert file.metadata() == {"format": "pt", "note": "é\n"}

    def test_writes_the_same_bytes(self, tmp_path: Path) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "ours")
        safetensors.numpy.save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()

    def test_bf16_by_value(self, tmp_path: Path) -> None:
        values = np.array([0, -0.0, 1, -2.5, 3e38, 1e-40, np.inf, -np.inf], np.float32).astype(ml_dtypes.bfloat16)
        safetensors.numpy.save_file({"x": values}, tmp_path / "x")
        found = load_file(tmp_path / "x")["x"]
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.astype(np.float32), values.astype(np.float32))


BAD_DTYPES = ["F31", "f32", "F32 ", "", "C64", "F4", "OBJECT", "\x1b[31m", None, 1, 1.5, True, ["F32"], {"F32": 1}]
BAD_SIZES: list[object] = [-1, -0.0, 2.0, 2.5, 1e3, True, False, None, "2", [2], {}, 2**63, 2**64, 10**30]
BAD_SIZES += [float("nan"), float("inf")]
TENSORS = ["a.weight", "b", "empty", "scalar"]


class TestHostileHeaders:
    """Every field of a valid header mutated; the tensor is named and no memory is taken."""

    def test_the_header_to_mutate_is_valid(self, tmp_path: Path) -> None:
        with SafeTensors(write(tmp_path / "x", file_bytes(header()))) as file:
            assert file.names == ("a.weight", "b", "empty", "scalar")
            assert file.metadata == {"format": "pt"}
            base = 8 + len(json.dumps(header()))
            assert (file.entries["b"].start, file.entries["b"].stop) == (base + 24, base + 32)
            assert file.entries["b"].nbytes == 8
            assert file.read("a.weight").tobytes() == DATA[:24]
            assert file.read("scalar").item() == 32
            assert file.read("empty").shape == (0, 5)

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("dtype", BAD_DTYPES, ids=repr)
    def test_dtype(self, tmp_path: Path, name: str, dtype: object) -> None:
        head = header()
        head[name]["dtype"] = dtype
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", "unknown dtype")

    @pytest.mark.parametrize("name", ["a.weight", "b", "scalar"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtype_of_another_size(self, tmp_path: Path, name: str, dtype: str) -> None:
        head = header()
        if DTYPES[dtype].itemsize == DTYPES[head[name]["dtype"]].itemsize:
            return
        head[name]["dtype"] = dtype
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", "needs", dtype)

    @pytest.mark.parametrize("name, axis", [("a.weight", 0), ("a.weight", 1), ("b", 0), ("empty", 0), ("empty", 1)])
    @pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
    def test_size_of_a_dimension(self, tmp_path: Path, name: str, axis: int, size: object) -> None:
        head = header()
        head[name]["shape"][axis] = size
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", "shape")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize(
        "shape", [None, 6, "2,3", {}, True, [2, [3]], [7, 1], [1] * 33, [2**31, 2**31], [2**62, 2], [0, 2**62, 2**62]]
    )
    def test_shape(self, tmp_path: Path, name: str, shape: object) -> None:
        head = header()
        head[name]["shape"] = shape
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("end", [0, 1])
    @pytest.mark.parametrize("offset", [*BAD_SIZES, 34, 1000, 2**40, 2**63 - 1], ids=repr)
    def test_offset(self, tmp_path: Path, name: str, end: int, offset: object) -> None:
        head = header()
        head[name]["data_offsets"][end] = offset
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("offsets", [None, 0, "0", {}, [], [0], [0, 24, 24], [24, 0], [[0], [24]], [33, 34]])
    def test_offsets(self, tmp_path: Path, name: str, offsets: object) -> None:
        head = header()
        head[name]["data_offsets"] = offsets
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
    def test_fields_missing_twice_or_unknown(self, tmp_path: Path, name: str, field: str) -> None:
        head = header()
        value = head[name].pop(field)
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", "has the fields")
        head[name][field.upper()] = value
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", field.upper())
        text = json.dumps(header())
        twice = text.replace(f'"{name}": {{', f'"{name}": {{"{field}": {json.dumps(value)}, ')
        refused(write(tmp_path / "x", file_bytes(twice)), f"'{name}'", "has the fields")
        head = header()
        head[name]["more"] = 1
        refused(write(tmp_path / "x", file_bytes(head)), f"'{name}'", "'more'")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("value", [None, 1, "F32", [], ["F32", [2, 3], [0, 24]], {}])
    def test_a_tensor_that_is_no_object(self, tmp_path: Path, name: str, value: object) -> None:
        refused(write(tmp_path / "x", file_bytes(header() | {name: value})), f"'{name}'")

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "../b",
            "a/../b",
            "..",
            "/b",
            "..\\b",
            "a\\b",
            "a\nb",
            "a\x00b",
            "\x1b[31mb",
            "a\x7f",
            "\u202eb",
            "a" * 1025,
        ],
        ids=ascii,
    )
    def test_name(self, tmp_path: Path, name: str) -> None:
        head = {name if key == "b" else key: value for key, value in header().items()}
        error = refused(write(tmp_path / "x", file_bytes(head)), "name")
        assert name not in error.what or name in ("", "../b", "a/../b", "..", "/b", "..\\b", "a\\b")

    @pytest.mark.parametrize("name", ["encoder/layer_0/kernel", "a..b", "...", "x:0", "模型", "a b", "a" * 1024])
    def test_honest_names_are_read(self, tmp_path: Path, name: str) -> None:
        head = {name if key == "b" else key: value for key, value in header().items()}
        with SafeTensors(write(tmp_path / "x", file_bytes(head))) as file:
            assert file.read(name).tobytes() == DATA[24:32]

    def test_duplicate_names(self, tmp_path: Path) -> None:
        text = json.dumps(header())
        for name in TENSORS:
            twice = text[:-1] + f', "{name}": {json.dumps(header()[name])}}}'
            refused(write(tmp_path / "x", file_bytes(twice)), f"'{name}'", "twice")
        refused(write(tmp_path / "x", file_bytes(text[:-1] + ', "__metadata__": {}}')), "'__metadata__'", "twice")
        refused(write(tmp_path / "x", file_bytes(text.replace('"b"', '"a\\u002eweight"'))), "'a.weight'", "twice")

    @pytest.mark.parametrize(
        "metadata",
        [None, 1, "pt", [], {"a": 1}, {"a": None}, {"a": ["x"]}, {"a": {}}, {"a": True}, {"a": float("nan")}],
    )
    def test_metadata(self, tmp_path: Path, metadata: object) -> None:
        refused(write(tmp_path / "x", file_bytes(header() | {"__metadata__": metadata})), "'__metadata__'")

    def test_metadata_text(self, tmp_path: Path) -> None:
        for text in ('{"a": "x", "a": "y"}', '{"a": "\\ud800"}', '{"\\udfff": "x"}'):
            head = json.dumps(header()).replace('{"format": "pt"}', text)
            refused(write(tmp_path / "x", file_bytes(head)), "'__metadata__'")

    @pytest.mark.parametrize(
        "change, fragments",
        [
            (lambda head: head["b"].update(shape=[5], data_offsets=[22, 32]), ("'b'", "overlaps")),
            (lambda head: head["b"].update(shape=[3], data_offsets=[26, 32]), ("'b'", "gap")),
            (lambda head: head["a.weight"].update(shape=[5], data_offsets=[4, 24]), ("'a.weight'", "gap")),
            (lambda head: head["empty"].update(data_offsets=[30, 30]), ("'empty'", "overlaps")),
            (lambda head: head["scalar"].update(data_offsets=[0, 1]), ("'a.weight'", "overlaps")),
            (lambda head: head.pop("scalar"), ("1 bytes follow the last tensor",)),
            (lambda head: head.clear(), ("33 bytes follow",)),
        ],
    )
    def test_cover(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], object], fragments: tuple[str, ...]
    ) -> None:
        head = header()
        change(head)
        refused(write(tmp_path / "x", file_bytes(head)), *fragments)

    def test_trailing_and_missing_bytes(self, tmp_path: Path) -> None:
        refused(write(tmp_path / "x", file_bytes(header(), DATA + b"x")), "1 bytes follow")
        refused(write(tmp_path / "x", file_bytes(header(), DATA[:-1])), "'scalar'", "claims bytes 32 to 33 of 32")
        refused(write(tmp_path / "x", file_bytes(header(), b"")), "'a.weight'", "claims")

    @pytest.mark.parametrize("size", range(8))
    def test_a_file_too_short_for_a_length(self, tmp_path: Path, size: int) -> None:
        refused(write(tmp_path / "x", b"\1" * size), f"has {size} bytes")

    @pytest.mark.parametrize("length", [0, 1, 10**4, HEADER_SIZE_CAP + 1, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
    def test_header_length(self, tmp_path: Path, length: int) -> None:
        refused(write(tmp_path / "x", file_bytes(header(), length=length)), "header's length")

    def test_header_cap(self, tmp_path: Path) -> None:
        """A sparse file of which the header could be as long as it says."""
        path = write(tmp_path / "x", file_bytes(header(), length=HEADER_SIZE_CAP + 1))
        os.truncate(path, 1 << 33)
        refused(path, f"between 2 and {HEADER_SIZE_CAP:,}")
        path = write(tmp_path / "x", file_bytes(header()))
        size = len(json.dumps(header()))
        with pytest.raises(ModelError, match="header's length"):
            SafeTensors(path, header_size_cap=size - 1)
        SafeTensors(path, header_size_cap=size).close()

    @pytest.mark.parametrize("shift", range(-9, 10))
    def test_header_length_off_by_a_few(self, tmp_path: Path, shift: int) -> None:
        text = json.dumps(header())
        path = write(tmp_path / "x", file_bytes(text, b" " * 9 + DATA, length=len(text) + shift))
        if shift < 0:
            refused(path, "not JSON")
        elif shift < 9:
            refused(path, f"{9 - shift} bytes follow")
        else:
            SafeTensors(path).close()

    @pytest.mark.parametrize(
        "head, fragment",
        [
            (b"[]", "does not start with '{'"),
            (b' {"a": 1}', "does not start with '{'"),
            (b"\xef\xbb\xbf{}", "does not start with '{'"),
            (b"{}\n", "text after its JSON"),
            (b"{}\0\0", "text after its JSON"),
            (b"{}  {}", "text after its JSON"),
            (b"{} x ", "text after its JSON"),
            (b"{      ", "not JSON"),
            (b'{"a"}', "not JSON"),
            (b'{"\xff": 1}', "not JSON in UTF-8"),
            (b'{"\xed\xa0\x80": 1}', "not JSON in UTF-8"),
            (b'{"a": ' + b"[" * 100_000, "nested deeper"),
            (b'{"a": ' + b'{"a": ' * 8 + b"1" + b"}" * 9, "nested deeper"),
            (b'{"a": ' + b'{"a": ' * 7 + b"1" + b"}" * 8, "'a' has the fields"),
            (b'{"a": [' + b"{}," * 300_000 + b"{}]}", "more than"),
        ],
        ids=range(15),
    )
    def test_header_text(self, tmp_path: Path, head: bytes, fragment: str) -> None:
        path = write(tmp_path / "x", file_bytes(head, b""))
        with pytest.raises(ModelError, match=re.escape(fragment)), peak_below(4 * MIB):
            SafeTensors(path)

    @pytest.mark.parametrize(
        "digits", ["9" * 100_000, "-1", "00", "1.0", "1e0", "NaN", "Infinity", "-Infinity", "1E400"]
    )
    def test_numbers(self, tmp_path: Path, digits: str) -> None:
        text = json.dumps(header()).replace("[0, 24]", f"[{digits}, 24]")
        path = write(tmp_path / "x", file_bytes(text))
        with pytest.raises(ModelError) as caught, peak_below(2 * MIB):
            SafeTensors(path)
        assert digits == "00" or "'a.weight' has data_offsets" in caught.value.what
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("more", [0, 1, 10])
    def test_too_many_tensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
        monkeypatch.setattr("genesis.files.safetensors.MAX_TENSORS", 1000)
        entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        head = {f"{i}": entry for i in range(1000 + more)} | {"__metadata__": {}}
        path = write(tmp_path / "x", file_bytes(head, b""))
        if more:
            with pytest.raises(ModelError, match=f"{1001 + more:,} entries, more than 1,000"):
                SafeTensors(path)
        else:
            with SafeTensors(path) as file:
                assert len(file.names) == 1000

    def test_special_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", tmp_path, tmp_path / "nothing", Path("/dev/zero")):
            with pytest.raises(ModelError):
                SafeTensors(path)


class TestReading:
    """Reads are positional, complete and frugal."""

    def test_read_into(self, tmp_path: Path) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "x")
        with SafeTensors(tmp_path / "x") as file:
            for name, array in arrays.items():
                whole = np.zeros((3, *array.shape), array.dtype)
                file.read_into(name, whole[1, ...])
                nothing = bytes(array.nbytes)
                assert whole.tobytes() == nothing + array.tobytes() + nothing

    def test_read_part(self, tmp_path: Path) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "x")
        with SafeTensors(tmp_path / "x") as file:
            for name, array in arrays.items():
                flat = array.reshape(-1)
                for start in range(flat.size + 1):
                    part = np.empty(min(2, flat.size - start), array.dtype)
                    file.read_part(name, start, part)
                    assert part.tobytes() == flat[start : start + 2].tobytes()

    def test_read_part_refuses_what_lies_beyond(self, tmp_path: Path) -> None:
        with SafeTensors(write(tmp_path / "x", file_bytes(header()))) as file:
            for start, buffer in (
                (-1, np.zeros(2, np.float32)),
                (5, np.zeros(2, np.float32)),
                (0, np.zeros((1, 2), np.float32)),
                (0, np.zeros(8, np.float32)[::4]),
            ):
                with pytest.raises(ShapeError, match=r"'a\.weight', which has 6"):
                    file.read_part("a.weight", start, buffer)
            with pytest.raises(DTypeError, match="dtype float32, the buffer has int32"):
                file.read_part("a.weight", 0, np.zeros(2, np.int32))

    def test_read_into_refuses_another_buffer(self, tmp_path: Path) -> None:
        with SafeTensors(write(tmp_path / "x", file_bytes(header()))) as file:
            frozen = np.zeros((2, 3), np.float32)
            frozen.flags.writeable = False
            for buffer in (
                np.zeros((3, 2), np.float32),
                np.zeros((3, 2), np.float32).T,
                np.zeros(6, np.float32),
                frozen,
            ):
                with pytest.raises(ShapeError, match=r"'a\.weight' of shape \(2, 3\)"):
                    file.read_into("a.weight", buffer)
            with pytest.raises(DTypeError, match="dtype float32, the buffer has int32"):
                file.read_into("a.weight", np.zeros((2, 3), np.int32))

    @pytest.mark.parametrize("piece", [1, 3, 8])
    def test_short_reads_are_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "x")
        preadv = os.preadv
        calls = []

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return preadv(descriptor, [buffers[0][:piece]], offset)

        monkeypatch.setattr(os, "preadv", short)
        assert_same(load_file(tmp_path / "x"), arrays)
        assert len(calls) >= (tmp_path / "x").stat().st_size // piece

    def test_a_file_cut_after_opening_is_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x", file_bytes(header()))
        with SafeTensors(path) as file:
            os.truncate(path, path.stat().st_size - 5)
            with pytest.raises(ModelError, match="file ended while reading 'b'"):
                file.read("b")
            assert file.read("a.weight").tobytes() == DATA[:24]

    def test_an_error_of_the_disk_is_a_model_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with SafeTensors(write(tmp_path / "x", file_bytes(header()))) as file:

            def fail(descriptor: int, buffers: object, offset: int) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(os, "preadv", fail)
            with pytest.raises(ModelError, match="cannot read 'b': Input/output error"):
                file.read("b")

    def test_bool_bytes_other_than_0_and_1_are_refused(self, tmp_path: Path) -> None:
        head = {"mask": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}
        with SafeTensors(write(tmp_path / "x", file_bytes(head, b"\0\1\2"))) as file:
            with pytest.raises(ModelError, match="'mask' is BOOL but has bytes other than 0 and 1"):
                file.read("mask")
            with pytest.raises(ModelError, match="'mask'"):
                file.read_into("mask", np.zeros(3, np.bool_))
        with SafeTensors(write(tmp_path / "x", file_bytes(head, b"\0\1\1"))) as file:
            assert file.read("mask").tolist() == [False, True, True]

    def test_unknown_names_and_closed_files(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x", file_bytes(header()))
        with SafeTensors(path) as file, pytest.raises(ModelError, match=r"no tensor 'x\\x1b'"):
            file.read("x\x1b")
        with pytest.raises(ValueError, match="is closed"):
            file.read("b")

    def test_peak_memory_is_about_one_tensor(self, tmp_path: Path) -> None:
        arrays = {f"layer.{i}": np.full((512, 512), i, np.float32) for i in range(16)}
        save_file(arrays, tmp_path / "x")
        buffer = np.zeros((512, 512), np.float32)
        with SafeTensors(tmp_path / "x") as file:
            with peak_below(MIB + MIB // 4):
                for i in range(16):
                    assert file.read(f"layer.{i}")[0, 0] == i
            with peak_below(MIB // 8):
                for i in range(16):
                    file.read_into(f"layer.{i}", buffer)
                    assert buffer[-1, -1] == i

    def test_a_tensor_larger_than_memory_is_exit_7(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        size = 1 << 46
        head = {"huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        path = write(tmp_path / "x", file_bytes(head, b""))
        try:
            os.truncate(path, 8 + len(json.dumps(head)) + size)
        except OSError:
            size = 1 << 20
            head = {"huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
            write(path, file_bytes(head, bytes(size)))

        def no_room(*args: object) -> None:
            raise MemoryError

        monkeypatch.setattr(np, "empty", no_room)
        with SafeTensors(path) as file, pytest.raises(OutOfMemoryError, match="of the tensor 'huge'") as caught:
            file.read("huge")
        assert caught.value.exit_code == 7

    def test_descriptors_are_closed(self, tmp_path: Path) -> None:
        good = write(tmp_path / "good", file_bytes(header()))
        bad = write(tmp_path / "bad", file_bytes(header(), DATA + b"x"))
        before = len(os.listdir("/dev/fd"))
        for _ in range(3):
            load_file(good)
            with pytest.raises(ModelError):
                load_file(bad)
        assert len(os.listdir("/dev/fd")) == before


class TestWriting:
    """Files are deterministic, aligned and written without a copy of the tensors."""

    def test_the_order_given_does_not_matter(self, tmp_path: Path) -> None:
        arrays = all_samples()
        save_file(arrays, tmp_path / "x", {"b": "2", "a": "1"})
        save_file(dict(reversed(arrays.items())), tmp_path / "y", {"a": "1", "b": "2"})
        assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()

    def test_tensors_are_aligned(self, tmp_path: Path) -> None:
        save_file(all_samples(), tmp_path / "x")
        with SafeTensors(tmp_path / "x") as file:
            assert min(entry.start for entry in file.entries.values()) % 8 == 0
            for entry in file.entries.values():
                assert entry.start % entry.dtype.itemsize == 0, entry.name

    def test_views_with_strides(self, tmp_path: Path) -> None:
        base = np.arange(5 * 7 * 3, dtype=np.int32).reshape(5, 7, 3)
        views = {"t": base.T, "step": base[::2, 1::3], "back": base[::-1], "one": base[2, :, 1], "wide": base[:1].T}
        views["broadcast"] = np.broadcast_to(np.float32(2), (3, 4))
        views["none"] = base[:0].T
        save_file(views, tmp_path / "x")
        assert_same(load_file(tmp_path / "x"), {name: np.ascontiguousarray(view) for name, view in views.items()})

    def test_views_are_written_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("genesis.files.safetensors._WRITE_BYTES", MIB // 4)
        base = np.arange(4 * MIB, dtype=np.uint8).reshape(2048, 2048)
        with peak_below(MIB):
            save_file({"plain": base, "view": base.T}, tmp_path / "x")
        assert_same(load_file(tmp_path / "x"), {"plain": base, "view": np.ascontiguousarray(base.T)})

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "x", {})
        assert load_file(tmp_path / "x") == {}
        assert safetensors.numpy.load_file(tmp_path / "x") == {}

    @pytest.mark.parametrize("dtype", ["c8", "O", "S3", "U3", "M8[s]", ">f4", "g"])
    def test_unknown_dtypes(self, tmp_path: Path, dtype: str) -> None:
        with pytest.raises(DTypeError, match=r"no code for the dtype .* of 'x'"):
            save_file({"x": np.zeros(2, dtype)}, tmp_path / "f")
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", ["", "../x", "a\nb", "\ud800", "__metadata__"], ids=ascii)
    def test_names_that_reading_would_refuse(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ModelError):
            save_file({name: np.zeros(2)}, tmp_path / "x")
        assert os.listdir(tmp_path) == []

    def test_metadata_that_reading_would_refuse(self, tmp_path: Path) -> None:
        for metadata in ({"a": 1}, {"a": "\ud800"}, {"a": float("nan")}):
            with pytest.raises((ModelError, ValueError)):
                save_file({"x": np.zeros(2)}, tmp_path / "x", metadata)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []

    def test_a_failed_save_keeps_the_older_file(self, tmp_path: Path) -> None:
        save_file({"x": np.zeros(2)}, tmp_path / "x")
        recorder = Recorder()
        save_file({"x": np.ones(2)}, tmp_path / "probe", fs=FileSystem(recorder))
        renamed = next(i for i, call in enumerate(recorder.calls, 1) if call.op == "rename")
        assert renamed > 8
        for n in range(1, renamed + 1):
            with pytest.raises(DiskError):
                save_file({"x": np.ones(2)}, tmp_path / "x", fs=FileSystem(FailAt(n)))
            assert load_file(tmp_path / "x")["x"].tolist() == [0, 0]
        assert sorted(os.listdir(tmp_path)) == ["probe", "x"]

    def test_write_tensors_into_any_sink(self, tmp_path: Path) -> None:
        class Sink:
            data = b""

            def write(self, data: bytes | bytearray | memoryview) -> None:
                self.data += bytes(data)

        sink = Sink()
        write_tensors(sink, all_samples())
        save_file(all_samples(), tmp_path / "x")
        assert sink.data == (tmp_path / "x").read_bytes()

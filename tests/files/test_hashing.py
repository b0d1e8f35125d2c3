"""Hashes: of files as sha256sum gives them, of state by content and nothing else."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from genesis.errors import ModelError
from genesis.files.hashing import StateHash, sha256_file


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (5 << 20) + 3])
def test_sha256_file(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_sha256_file_refuses_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(ModelError):
            sha256_file(path)


def array_hash(array: npt.NDArray[Any], name: str = "w") -> str:
    state = StateHash()
    state.add_array(name, array)
    return state.hexdigest()


def json_hash(value: object) -> str:
    state = StateHash()
    state.add_json("s", value)
    return state.hexdigest()


BASE = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_layout_does_not_matter() -> None:
    wide = np.zeros((4, 6), np.float32)
    wide[::2, ::2] = BASE
    for same in (BASE.copy(), np.asfortranarray(BASE), wide[::2, ::2], BASE.astype(">f4")):
        assert array_hash(same) == array_hash(BASE)


@pytest.mark.parametrize(
    "other",
    [
        BASE.reshape(3, 2),
        BASE.reshape(6),
        BASE.astype(np.float64),
        BASE.view(np.int32),
        np.nextafter(BASE, 10),
        -BASE * 0 + BASE[::-1],
        BASE[:1],
        np.zeros((0, 3), np.float32),
    ],
)
def test_content_dtype_and_shape_matter(other: npt.NDArray[Any]) -> None:
    assert array_hash(other) != array_hash(BASE)


def test_bits_matter() -> None:
    assert array_hash(np.array([0.0])) != array_hash(np.array([-0.0]))
    nans = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64).view(np.float64)
    assert array_hash(nans[:1]) != array_hash(nans[1:])
    ones = [
        array_hash(np.ones(2, dtype)) for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_)
    ]
    assert len(set(ones)) == 4
    empty = [array_hash(np.zeros(shape, np.float32)) for shape in ((0, 2), (2, 0), (0,), ())]
    assert len(set(empty)) == 4


def test_order_of_adding_does_not_matter_but_names_do() -> None:
    one, other = StateHash(), StateHash()
    one.add_array("a", BASE)
    one.add_json("b", {"step": 1})
    other.add_json("b", {"step": 1})
    other.add_array("a", BASE)
    assert one.hexdigest() == other.hexdigest()
    assert array_hash(BASE, "a") != array_hash(BASE, "b")
    swapped = StateHash()
    swapped.add_array("b", BASE)
    swapped.add_json("a", {"step": 1})
    assert swapped.hexdigest() != one.hexdigest()


def test_json_by_value() -> None:
    assert json_hash({"a": 1, "b": [1, 2]}) == json_hash({"b": (1, 2), "a": 1})
    values: list[object] = [
        0,
        0.0,
        -0.0,
        False,
        None,
        "",
        "0",
        [],
        {},
        [0],
        [[]],
        {"a": 0},
        {"a": None},
        1,
        1.0,
        True,
        2**64,
    ]
    assert len({json_hash(value) for value in values}) == len(values)


def test_the_hash_is_the_same_on_every_machine_and_day() -> None:
    state = StateHash()
    state.add_array("model.weight", BASE)
    state.add_array("moment", np.arange(3).astype(ml_dtypes.bfloat16))
    state.add_json("rng", {"seed": 2**63, "lr": 0.1, "name": "é"})
    assert state.hexdigest() == "60f8dcb785c3f005b91c89370d22267273d8250364b4921bc35b6225f5cfd80e"
    # The same by hand, from the definition.
    items = {
        b'["array","model.weight"]': b'["float32",[2,3]]' + struct.pack("<6f", *range(6)),
        b'["array","moment"]': b'["bfloat16",[3]]' + bytes.fromhex("0000803f0040"),
        b'["json","rng"]': b'{"lr":0.1,"name":"\\u00e9","seed":9223372036854775808}',
    }
    total = hashlib.sha256(b"genesis state 1\0")
    for name, content in items.items():
        total.update(name + b"\0" + hashlib.sha256(content).digest())
    assert state.hexdigest() == total.hexdigest()


def test_misuse_is_refused() -> None:
    state = StateHash()
    state.add_array("a", BASE)
    with pytest.raises(ValueError, match="added before"):
        state.add_array("a", BASE)
    with pytest.raises(ValueError, match="Python objects"):
        state.add_array("o", np.array([None]))
    with pytest.raises(ValueError, match="not JSON compliant"):
        state.add_json("x", float("nan"))
    with pytest.raises(TypeError):
        state.add_json("x", {1: 2})
    with pytest.raises(TypeError):
        state.add_json("x", np.float64(1.0))

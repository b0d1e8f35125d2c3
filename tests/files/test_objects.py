"""genesis.save and genesis.load: what goes in comes out, files are plain safetensors, nothing read is believed."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file as library_load
from safetensors.numpy import save_file as library_save

import genesis
from genesis import nn, optim
from genesis.backend import Device
from genesis.errors import DiskError, DTypeError, ModelError, UsageError
from genesis.files.filesystem import FileSystem
from genesis.files.safetensors import SafeTensors
from genesis.saving import KEY, write_object
from genesis.tensor import Tensor
from tests.files.faults import FailAt, Recorder
from tests.files.st_files import save_file

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def same(a: Any, b: Any) -> bool:
    """Whether two objects have the same kinds and values, tensors their dtypes and bits, floats their bits."""
    if isinstance(a, Tensor):
        x, y = a.detach().cpu().array.numpy(), b.detach().cpu().array.numpy()
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


OBJECTS: dict[str, Any] = {
    "scalars": {
        "int": -3,
        "big": 1 << 900,
        "float": 0.1,
        "zero": -0.0,
        "nan": math.nan,
        "inf": -math.inf,
        "none": None,
    },
    "kinds": [1, True, 1.0, "1", None, (), [], {}, ('é\n"', [{}])],
    "keys": {0: "a", -7: "b", "0": "c", True: 1.5, None: 2, 2.5: 3, "": 4},
    "a number": 3,
    "a text": "\x00\u2028",
    "nothing": None,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_values_without_tensors_come_back(name: str, tmp_path: Path) -> None:
    genesis.save(OBJECTS[name], tmp_path / "x")
    assert same(OBJECTS[name], genesis.load(tmp_path / "x"))


def test_tensors_of_every_type_and_layout_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = {d: genesis.tensor(rng.integers(0, 2, (3, 4)), dtype=d) for d in DTYPES}
    base = whole["bfloat16"]
    obj = {
        **whole,
        "views": [base.T, base[1:, ::2], base[:1].expand(5, 4), base[0, 0], base[:0]],
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        "odd": {
            "../x": genesis.ones(1),
            "__metadata__": genesis.ones(2),
            "a.b": genesis.ones(3),
            "a": {"b": genesis.ones(4)},
        },
        "x" * 2000: genesis.ones(5),
    }
    genesis.save(obj, str(tmp_path / "x"))
    found = genesis.load(str(tmp_path / "x"))
    assert isinstance(found["numpy"], Tensor)
    assert same({**obj, "numpy": genesis.tensor(np.array(obj["numpy"]))}, found)


def test_one_tensor_and_a_gradients_wish(tmp_path: Path) -> None:
    weight = nn.Parameter(genesis.ones(2))
    genesis.save([weight, weight.detach(), weight], tmp_path / "x")
    first, second, third = genesis.load(tmp_path / "x")
    assert first is third and first.requires_grad and not second.requires_grad and type(first) is Tensor
    assert first.data_ptr() == second.data_ptr()
    genesis.save(genesis.arange(3), tmp_path / "y")
    assert genesis.load(tmp_path / "y").numpy().tolist() == [0, 1, 2]


def test_shared_memory_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    table = genesis.randn(64, 32)
    genesis.save({"embed": table, "head": table[:], "other": table.clone(), "part": table[:2]}, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 2 * 64 * 32 * 4 + 2 * 32 * 4 + 2000
    found = genesis.load(tmp_path / "x")
    assert found["head"] is found["embed"] and found["other"] is not found["embed"]
    found["embed"][0, 0] = 9.0
    assert found["head"][0, 0].item() == 9.0 != found["part"][0, 0].item()


def make() -> tuple[nn.Module, optim.AdamW, optim.LambdaLR]:
    genesis.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).bfloat16()
    optimizer = optim.AdamW(model.named_parameters(), betas=(0.8, 0.9))
    return model, optimizer, optim.LambdaLR(optimizer, lambda s: 0.9**s)


def test_a_training_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: optim.AdamW, scheduler: optim.LambdaLR) -> None:
        optimizer.zero_grad()
        model(genesis.ones(2, 4, dtype="bfloat16")).square().sum().backward()
        optimizer.step()
        scheduler.step()

    first, second = make(), make()
    step(*first)
    genesis.save([part.state_dict() for part in first], tmp_path / "x")
    loaded = genesis.load(tmp_path / "x")
    assert same([part.state_dict() for part in first], loaded)
    for part, state in zip(second, loaded, strict=True):
        part.load_state_dict(state)
    step(*first)
    step(*second)
    assert same([part.state_dict() for part in first], [part.state_dict() for part in second])


# --- Devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"device": "cuda"}, {"map_location": Device("cuda", 0)}])
def test_from_and_to_a_device(how: dict[str, Any], tmp_path: Path) -> None:
    obj = {"a": genesis.arange(4, device="cuda"), "b": genesis.ones(2, dtype="bfloat16")}
    genesis.save(obj, tmp_path / "x")
    assert {t.device.type for t in genesis.load(tmp_path / "x").values()} == {"cpu"}
    found = genesis.load(tmp_path / "x", **how)
    assert {t.device.type for t in found.values()} == {"cuda"} and same(obj, found)


# --- The format -------------------------------------------------------------------------------------------------------


def test_the_library_reads_our_tensors_and_we_read_its(tmp_path: Path) -> None:
    table = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    genesis.save({"model": {"w": genesis.tensor(table)}, "step": 3, "losses": [genesis.ones(2)]}, tmp_path / "x")
    found = library_load(tmp_path / "x")
    assert set(found) == {"model.w", "losses.0"} and found["model.w"].dtype == table.dtype
    np.testing.assert_array_equal(found["model.w"], table)
    library_save({"b": table, "a": np.array(True)}, tmp_path / "y", {"by": "another"})
    ours = genesis.load(tmp_path / "y")
    assert set(ours) == {"a", "b"} and ours["b"].dtype is genesis.bfloat16 and ours["a"].item() is True


def test_equal_objects_give_equal_bytes(tmp_path: Path) -> None:
    for name in "xy":
        genesis.save({"b": genesis.ones(3), "a": [1, genesis.zeros(2)]}, tmp_path / name)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


# --- Durable ----------------------------------------------------------------------------------------------------------


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    genesis.save({"a": genesis.ones(2)}, path)
    before = path.read_bytes()
    recorder = Recorder()
    write_object({"a": genesis.zeros(999)}, tmp_path / "y", fs=FileSystem(recorder))
    assert len(recorder.calls) > 5
    for number in range(1, len(recorder.calls) + 1):
        try:
            write_object({"a": genesis.zeros(999)}, path, fs=FileSystem(FailAt(number)))
        except DiskError:
            pass
        assert path.read_bytes() == before or genesis.load(path)["a"].shape == (999,)
        path.write_bytes(before)
    with pytest.raises(DiskError):
        genesis.save({}, tmp_path / "x" / "below a file")


class Slow(io.BytesIO):
    """Takes at most five bytes at a time, as a raw file may."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:5])


def test_file_objects_hold_what_files_do(tmp_path: Path) -> None:
    obj = {"a": genesis.arange(7, dtype="bfloat16"), "b": [1, genesis.tensor([True, False]), genesis.zeros(0)]}
    genesis.save(obj, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for file in (io.BytesIO(b"before"), Slow(b"before"), (tmp_path / "y").open("w+b")):
        with file:
            file.write(b"before")
            file.seek(6)
            genesis.save(obj, file)
            file.seek(6)
            assert file.read() == whole
            file.seek(6)
            assert same(obj, genesis.load(file, weights_only=False))
    for size in range(1, len(whole)):
        with pytest.raises(ModelError):
            genesis.load(io.BytesIO(whole[:size]))
    with open(tmp_path / "x", "rb") as file, pytest.raises(DiskError, match="saving to a file object"):
        genesis.save(obj, file)


@pytest.mark.parametrize("where", [{"cpu": "cpu"}, {"cuda:0": "cuda:1"}, lambda tensor, place: None, "cpu"])
def test_places_of_torch(where: Any) -> None:
    file = io.BytesIO()
    genesis.save({"a": genesis.ones(2)}, file)
    file.seek(0)
    assert genesis.load(file, where)["a"].device == Device("cpu")
    file.seek(0)
    assert genesis.load(file, lambda tensor, place: (tensor * 2, place))["a"][1] == "cpu"


# --- Refused ----------------------------------------------------------------------------------------------------------


class Thing:
    pass


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("obj", "error", "message"),
    [
        ({"a": [Thing()]}, UsageError, r"save: obj\['a'\]\[0\] is a Thing"),
        (nn.Linear(2, 2), UsageError, r"obj is a Linear.*save its state_dict\(\)"),
        ({"a": {1, 2}}, UsageError, "is a set"),
        ({"a": b"x"}, UsageError, "is a bytes"),
        ({"a": 1j}, UsageError, "is a complex"),
        ({(1, 2): 3}, UsageError, "a key of the type tuple"),
        (cycle, UsageError, "nested deeper than 40 levels"),
        ({"a": 1 << 2000}, UsageError, "more than 1024 bits"),
        ({"a": "\ud800"}, UsageError, "surrogate"),
        ({"a": np.array([1j])}, DTypeError, r"obj\['a'\] .* complex128"),
        ({"a": np.array([1], np.uint16)}, DTypeError, "uint16"),
        ({"a": np.array([Thing()])}, DTypeError, "object"),
    ],
)
def test_what_is_not_saved_is_named_and_leaves_no_file(
    obj: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        genesis.save(obj, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


PICKLES = {
    "protocol 2": b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.",
    "protocol 4": b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
    "protocol 5": b"\x80\x05\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s." + bytes(5000),
    "torch before 1.6": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(5000),
}


@pytest.mark.parametrize("kind", [*PICKLES, "torch's archive"])
def test_a_pickle_gets_one_clear_sentence(kind: str, tmp_path: Path) -> None:
    if kind in PICKLES:
        (tmp_path / "x.pt").write_bytes(PICKLES[kind])
    else:
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02}q\x00.")
    with pytest.raises(ModelError) as raised:
        genesis.load(tmp_path / "x.pt")
    assert "pickle" in raised.value.what
    assert "safetensors.torch.save_file" in raised.value.next


def test_a_header_that_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    for length in (0x0280, 0x0580):
        text = json.dumps({"__metadata__": {"a": "b"}}).encode().ljust(length)
        (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + text)
        assert genesis.load(tmp_path / "x") == {}


def test_calls_that_cannot_be_meant(tmp_path: Path) -> None:
    genesis.save({}, tmp_path / "x")
    np.savez(tmp_path / "y.npz", a=np.ones(2))
    (tmp_path / "z").write_bytes(b"GGUF\3\0\0\0\0")
    for call, error, message in (
        (lambda: genesis.load(tmp_path / "x", "cpu", device="cpu"), UsageError, "map_location or device"),
        (lambda: genesis.load(tmp_path / "x", 3), UsageError, "not a int"),
        (lambda: genesis.load(io.BytesIO()), ModelError, r"no bytes after its position \| call its seek"),
        (lambda: genesis.load(io.BytesIO(b"\x80\x02}q\x00.")), ModelError, "pickle"),
        (lambda: genesis.load(io.StringIO()), UsageError, 'open for text | .* "rb"'),
        (lambda: genesis.save({}, io.StringIO()), UsageError, 'open for text | .* "wb"'),
        (lambda: genesis.save({}, 3), UsageError, "a path or a binary file object, not a int"),
        (lambda: genesis.save({}, ""), UsageError, "is not a file path"),
        (lambda: genesis.load("a\0b"), UsageError, "is not a file path"),
        (lambda: genesis.save({}, tmp_path), DiskError, "is a folder, not a file"),
        (lambda: genesis.save({}, tmp_path / ("n" * 300)), DiskError, "File name too long"),
        (lambda: genesis.load(tmp_path / ("n" * 300)), ModelError, "File name too long"),
        (lambda: genesis.load(tmp_path / "z"), ModelError, r"safetensors file.* 9 bytes and starts with 'GGUF"),
        (lambda: genesis.load(tmp_path / "none"), ModelError, "cannot open"),
        (lambda: genesis.load(tmp_path), ModelError, r"is a folder \| genesis_models.load"),
        (lambda: genesis.load(tmp_path / "y.npz"), ModelError, "numpy.load reads it"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    "root",
    [
        "{}", "[]", '{"version":2,"value":1}', '{"version":1,"value":1}', '{"version":1,"value":{"tensor":"b"}}',
        '{"version":1,"value":{"tensor":["a"]}}', '{"version":1,"value":{"tensor":"a","grad":false}}',
        '{"version":1,"value":{"tensor":"a","more":1}}', '{"version":1,"value":{"tensor":"a","grad":true}}',
        '{"version":1,"value":{"dict":[["k",{"tensor":"a"}],["k",1]]}}', '{"version":1,"value":{"dict":[[1]]}}',
        '{"version":1,"value":{"dict":[[[1],2]]}}', '{"version":1,"value":{"list":{"tensor":"a"}}}',
        '{"version":1,"value":[{"tensor":"a"}]}', '{"version":1,"value":{"float":"1"}}', '{"version":1,"value":{}}',
        '{"version":1,"value":' + '{"list":[' * 70 + '{"tensor":"a"}' + "]}" * 70 + "}", '{"version":1,"value":NaN}',
    ],
)  # fmt: skip
def test_a_structure_that_is_not_ours_is_refused(root: str, tmp_path: Path) -> None:
    save_file({"a": np.arange(2)}, tmp_path / "x", {KEY: root})
    with pytest.raises(ModelError, match=r"\(|the structure|JSON|number"):
        genesis.load(tmp_path / "x")


def test_every_damaged_byte_of_the_header_is_an_error_or_another_value(tmp_path: Path) -> None:
    genesis.save({"a": genesis.ones(2), "b": [1, "text"]}, tmp_path / "x")
    with SafeTensors(tmp_path / "x") as file:
        assert file.names == ("a",)
    good = (tmp_path / "x").read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    for at in range(0, end, 3):
        for bit in (1, 64):
            bad = bytearray(good)
            bad[at] ^= bit
            (tmp_path / "y").write_bytes(bad)
            try:
                genesis.load(tmp_path / "y")
            except (ModelError, DTypeError):
                pass
    (tmp_path / "y").write_bytes(good[:-1])
    with pytest.raises(ModelError):
        genesis.load(tmp_path / "y")

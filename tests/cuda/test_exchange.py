"""Sharing memory with other libraries: DLPack and `__cuda_array_interface__`, both ways, and who frees what when."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import cuda
from genesis.backend import Device, backend_for, dlpack
from genesis.errors import DeviceError, DTypeError, GradientError

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def exported() -> int:
    gc.collect()
    dlpack.release_dropped()
    return len(dlpack._exported)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_shares_our_memory_and_we_share_numpys(dtype: str) -> None:
    ours = genesis.zeros(2, 3, dtype=dtype)
    theirs = np.from_dlpack(ours)
    assert theirs.dtype == np.dtype(dtype)
    theirs[1, 2] = 1
    assert ours.tolist()[1][2] == 1
    source = np.zeros((2, 3), dtype)
    back = genesis.from_dlpack(source)
    back[0, 1] = 1
    assert source[0, 1] == 1
    assert back.dtype.name == dtype


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_and_strides(shape: tuple[int, ...], device: str) -> None:
    x = genesis.tensor(np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape), device=device)
    for view in (x, x.T):
        got = genesis.from_dlpack(view)
        assert (got.shape, got.device) == (view.shape, view.device)
        assert got.cpu().tolist() == view.cpu().tolist()
        if x.numel():
            assert (got.data_ptr(), got.strides) == (view.data_ptr(), view.strides)


def test_memory_stays_after_our_tensor_is_gone_and_goes_with_the_last_view() -> None:
    before = exported()
    x = genesis.arange(1000.0)
    theirs = np.from_dlpack(x)
    del x
    assert exported() == before + 1
    genesis.arange(1000.0).fill_(-1)  # would reuse the block
    assert theirs[999] == 999
    view = theirs[10:20]
    del theirs
    assert exported() == before + 1
    del view
    assert exported() == before


def test_memory_of_others_goes_with_our_last_view() -> None:
    before = exported()
    x = genesis.from_dlpack(genesis.arange(10.0))  # only the capsule knew the first tensor
    assert exported() == before + 1
    part = x[2:5].numpy()
    del x
    assert part.tolist() == [2, 3, 4]
    assert exported() == before + 1
    del part
    assert exported() == before


def test_a_capsule_is_taken_once() -> None:
    for version in (None, (1, 0)):
        before = exported()
        capsule = genesis.ones(3).__dlpack__(max_version=version)
        taken = dlpack.take(capsule)
        with pytest.raises(ValueError, match="already taken"):
            dlpack.take(capsule)
        del capsule
        assert exported() == before + 1
        del taken
        assert exported() == before


def test_a_capsule_that_nobody_takes_lends_nothing_once_it_is_gone() -> None:
    before = exported()
    capsule = genesis.ones(3).__dlpack__()
    assert exported() == before + 1
    assert exported() == before + 1  # looking does not end it
    del capsule
    assert exported() == before


def test_a_consumer_that_fails_gets_its_own_error_and_keeps_nothing() -> None:
    """numpy destroys the capsule while its error is on the way up."""
    before = exported()
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported dtype"):
        np.from_dlpack(genesis.ones(3, dtype="bfloat16"))
    assert exported() == before


def test_a_thousand_exchanges_leave_nothing() -> None:
    before = exported()
    x = genesis.ones(100)
    for _ in range(1000):
        genesis.from_dlpack(np.from_dlpack(x))
        x.__dlpack__()
    assert exported() == before
    flat = cuda.leak_check(lambda: genesis.from_dlpack(genesis.ones(100, device="cuda")), 50)
    assert flat.growth == 0


def test_bfloat16_has_its_own_code() -> None:
    x = genesis.tensor([1.5, -2.0], dtype="bfloat16")
    taken = dlpack.take(x.__dlpack__(max_version=(1, 1)))
    assert taken.described.kind == (4, 16)
    assert taken.described.device == (dlpack.CPU, 0) == x.__dlpack_device__()
    got = genesis.from_dlpack(x)
    assert (got.dtype, got.data_ptr()) == (genesis.bfloat16, x.data_ptr())


def test_the_versioned_form_says_when_it_is_a_copy() -> None:
    x = genesis.ones(3, device="cuda")
    assert x.__dlpack_device__() == (dlpack.CUDA, 0)
    host = dlpack.take(x.__dlpack__(dl_device=(dlpack.CPU, 0), max_version=(1, 0)))
    assert host._struct.flags == 2
    assert host.described.device == (dlpack.CPU, 0)
    with pytest.raises(BufferError, match="without a copy"):
        x.__dlpack__(dl_device=(dlpack.CPU, 0), copy=False)
    with pytest.raises(BufferError, match="without a copy"):
        x.__dlpack__(dl_device=(dlpack.CUDA, 5))
    y = genesis.ones(3)
    copied = dlpack.take(y.__dlpack__(copy=True))
    assert copied.described.pointer != y.data_ptr()


def test_read_only_and_reversed_memory_is_copied() -> None:
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    mine = genesis.from_dlpack(fixed)
    mine[0] = 9
    assert fixed[0] == 0
    assert genesis.from_dlpack(np.arange(6.0).reshape(2, 3)[::-1, ::-1]).tolist() == [[5, 4, 3], [2, 1, 0]]


def test_errors_name_what_cannot_be_taken() -> None:
    with pytest.raises(DTypeError, match="of int"):
        genesis.from_dlpack(3)
    with pytest.raises(DTypeError, match="type 5 with 64 bits"):
        genesis.from_dlpack(np.ones(3, np.complex64))
    with pytest.raises(GradientError, match="requires a gradient"):
        genesis.ones(3, requires_grad=True).__dlpack__()


def test_streams_wait_for_each_other_and_our_memory_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backend_for(Device("cuda"))
    waits: list[int] = []
    monkeypatch.setattr(backend.driver, "wait_event", lambda stream, event: waits.append(stream), raising=True)
    x = genesis.ones(3, device="cuda")
    capsules = [x.__dlpack__(stream=s) for s in (None, 1, -1)]  # ours is the default stream, too
    assert waits == []
    theirs = cuda.Stream()
    capsules.append(x.__dlpack__(stream=theirs.cuda_stream))
    assert waits == [theirs.cuda_stream]
    assert x.array.storage.block.streams == {theirs.cuda_stream}
    with cuda.stream(theirs):
        x.__dlpack__(stream=1)
    assert waits == [theirs.cuda_stream, 0]


class Foreign:
    """Another library's CUDA array."""

    def __init__(self, x: genesis.Tensor, **changes: Any) -> None:
        self.x, self.changes = x, changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.x.__cuda_array_interface__ | self.changes


def test_cuda_array_interface_both_ways() -> None:
    x = genesis.arange(6.0, device="cuda").view(2, 3)
    facts = x.__cuda_array_interface__
    assert facts["version"] == 3
    assert (facts["typestr"], facts["strides"], facts["stream"]) == ("<f4", None, 1)
    assert x.T.__cuda_array_interface__["strides"] == (4, 12)
    for view in (x, x.T):
        got = genesis.as_tensor(Foreign(view))
        assert (got.data_ptr(), got.shape, got.strides) == (view.data_ptr(), view.shape, view.strides)
    got = genesis.as_tensor(Foreign(x))
    address = x.data_ptr()
    del x, view
    gc.collect()
    assert genesis.empty(2, 3, device="cuda").data_ptr() != address  # the foreign object keeps it
    got.fill_(4)
    assert got.cpu().tolist() == [[4, 4, 4]] * 2
    read_only = Foreign(got, data=(got.data_ptr(), True))
    assert genesis.as_tensor(read_only).data_ptr() != got.data_ptr()


def test_what_the_interface_cannot_say_is_absent() -> None:
    assert not hasattr(genesis.ones(3), "__cuda_array_interface__")
    assert not hasattr(genesis.ones(3, dtype="bfloat16", device="cuda"), "__cuda_array_interface__")
    x = genesis.ones(3, device="cuda")
    with pytest.raises(DTypeError, match="mask"):
        genesis.as_tensor(Foreign(x, mask=x))
    with pytest.raises(DeviceError, match="negative strides"):
        genesis.as_tensor(Foreign(x, strides=(-4,)))


def test_the_producers_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backend_for(Device("cuda"))
    waits: list[int] = []
    monkeypatch.setattr(backend.driver, "wait_event", lambda stream, event: waits.append(stream))
    genesis.as_tensor(Foreign(genesis.ones(3, device="cuda"), stream=cuda.Stream().cuda_stream))
    genesis.as_tensor(Foreign(genesis.ones(3, device="cuda"), stream=None))
    assert waits == [0]


def test_draws_compile_for_a_seed_of_one() -> None:
    """Triton turns an integer argument of 1 into a constant unless the kernel forbids it."""
    weights, draws = genesis.ones(8, device="cuda"), []
    for _ in range(2):
        genesis.manual_seed(1)
        draws.append(
            [
                genesis.rand(8, device="cuda").tolist(),
                genesis.randn(8, device="cuda").tolist(),
                genesis.randint(9, (8,), device="cuda").tolist(),
                genesis.bernoulli(weights / 2).tolist(),
                genesis.multinomial(weights, 4).tolist(),
                genesis.multinomial(weights, 4, replacement=True).tolist(),
                genesis.multinomial(weights, 1).tolist(),
                genesis.nn.functional.dropout(weights).tolist(),
            ]
        )
    assert draws[0] == draws[1]

"""Array: views, strides, exchange with numpy, and who owns the memory."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from genesis.array import Array, empty, from_numpy
from genesis.backend import CPU, Device, as_device, backend_for
from genesis.dtypes import ALL, as_dtype, bfloat16, float32
from genesis.errors import DeviceError, DTypeError
from tests.ops.layouts import place


def test_a_fresh_array() -> None:
    a = empty((2, 3, 4), float32)
    assert (a.shape, a.strides, a.offset, a.ndim, a.size, a.nbytes) == ((2, 3, 4), (12, 4, 1), 0, 3, 24, 96)
    assert a.dtype is float32 and a.device is CPU and a.is_contiguous
    assert repr(a) == "Array(shape=(2, 3, 4), strides=(12, 4, 1), dtype=genesis.float32, device=cpu)"


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_shapes_without_many_elements(shape: tuple[int, ...]) -> None:
    a = empty(shape, float32)
    assert a.view_np().shape == shape and a.is_contiguous
    assert isinstance(a.data_ptr(), int)


def test_a_view_shares_memory_and_counts_elements() -> None:
    a = from_numpy(np.arange(12.0).reshape(3, 4))
    v = a.view((2, 2), (4, 2), 5)
    assert v.numpy().tolist() == [[5, 7], [9, 11]]
    assert v.storage is a.storage and v.data_ptr() == a.data_ptr() + 40
    v.numpy()[0, 0] = -1
    assert a.numpy()[1, 1] == -1
    assert v.view((2,), (2,)).offset == 5, "the offset is kept unless given"


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (8, 2), False),
        ((3, 4), (0, 1), True),
        ((3, 4), (4, 0), True),
        ((1, 4), (0, 1), False),
        ((3, 4), (2, 1), True),
        ((3, 4), (3, 1), True),
        ((), (), False),
        ((5,), (1,), False),
        ((2, 3, 2), (6, 2, 1), False),
        ((2, 3, 2), (3, 2, 1), True),
    ],
)
def test_overlap(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    a = empty((200,), float32).view(shape, strides, 0)
    assert a.overlaps_itself() == overlaps
    reached = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)}
    assert (len(reached) < a.size) == overlaps, "the table is wrong"


# --- From numpy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_every_dtype_comes_back_as_it_went(dtype: object) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(as_dtype(dtype).numpy)
    a = from_numpy(values)
    assert a.dtype is dtype and a.numpy() is values
    copied = from_numpy(values, share=False)
    assert copied.numpy().dtype == values.dtype and np.array_equal(copied.numpy(), values)
    assert not np.shares_memory(copied.numpy(), values)


@pytest.mark.parametrize(
    "cut",
    [
        lambda v: v,
        lambda v: v[1:],
        lambda v: v[:, ::2],
        lambda v: v.T,
        lambda v: v[2],
        lambda v: v[1, 2],
        lambda v: v[:, 1:1],
        lambda v: v.reshape(2, 3, 5)[:, 1],
        lambda v: np.broadcast_to(v[:1], (4, 5)).copy().T,
    ],
)
def test_memory_is_shared_both_ways(cut: object) -> None:
    values = np.asarray(cut(np.arange(30.0).reshape(6, 5)))  # type: ignore[operator]
    a = from_numpy(values)
    rebuilt = Array(a.storage, a.shape, a.strides, a.dtype, a.device, a.offset).view_np()
    if not values.flags.writeable or values.base is None:
        assert np.array_equal(rebuilt, values)
        return
    assert np.array_equal(rebuilt, values) and (values.size == 0 or np.shares_memory(rebuilt, values))
    values[...] = 5
    assert (rebuilt == 5).all()
    rebuilt[...] = 6
    assert (values == 6).all()


@pytest.mark.parametrize("why", ["read-only", "negative stride", "misaligned"])
def test_memory_that_cannot_be_shared_is_copied(why: str) -> None:
    values = np.arange(6.0)
    if why == "read-only":
        values.flags.writeable = False
    elif why == "negative stride":
        values = values[::-1]
    else:
        values = np.zeros(49, np.uint8)[1:].view(np.float64)
    a = from_numpy(values)
    assert np.array_equal(a.numpy(), values) and not np.shares_memory(a.numpy(), values)
    a.numpy()[0] = 77
    assert values[0] != 77


def test_a_shared_array_keeps_the_numpy_array_alive() -> None:
    values = np.arange(1000.0)
    gone = weakref.ref(values)
    a = from_numpy(values)
    view = a.view((3,), (2,), 10)
    del values, a
    gc.collect()
    assert gone() is not None and view.numpy().tolist() == [10, 12, 14]
    del view
    gc.collect()
    assert gone() is None


def test_a_numpy_view_of_a_shared_array_keeps_the_memory_alive_by_itself() -> None:
    """Once arrays and storage are gone, a view that was handed out must not dangle."""
    values = np.arange(1000.0)
    gone = weakref.ref(values)
    out = from_numpy(values).view((3,), (2,), 10).numpy()
    del values
    gc.collect()
    churn = [np.full(1000, -1.0) for _ in range(50)]
    assert gone() is not None and out.tolist() == [10, 12, 14]
    del out, churn
    gc.collect()
    assert gone() is None


def test_subclasses_of_ndarray_lose_their_class() -> None:
    class Labelled(np.ndarray):
        pass

    a = from_numpy(np.arange(3.0).view(Labelled))
    assert type(a.numpy()) is np.ndarray


def test_types_that_genesis_lacks_are_refused() -> None:
    for values in (np.zeros(2, np.complex64), np.array(["a"]), np.zeros(2, ml_dtypes.float8_e4m3fn), np.array([None])):
        with pytest.raises(DTypeError, match="is not a dtype Genesis has"):
            from_numpy(values)


def test_bfloat16_round_trip() -> None:
    a = from_numpy(np.array([1.0, 3.140625, -0.0, np.inf], ml_dtypes.bfloat16))
    assert a.dtype is bfloat16 and a.numpy().astype(np.float32).tolist() == [1.0, 3.140625, -0.0, np.inf]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "step", "offset"])
def test_item_and_numpy_follow_the_layout(layout: str) -> None:
    values = np.arange(6.0).reshape(2, 3)
    a = place(values, layout)
    assert np.array_equal(a.numpy(), values)
    assert place(np.array(4.5), "offset" if layout == "offset" else "contiguous").item() == 4.5


# --- Devices ----------------------------------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    assert as_device(None) is CPU and as_device("cpu") is CPU and as_device(CPU) is CPU
    assert as_device("cuda") == Device("cuda", 0) and str(as_device("cuda:3")) == "cuda:3"
    for wrong in ("gpu", "cuda:x", "cuda:-1", "", 3):
        with pytest.raises(DeviceError, match="is not a device"):
            as_device(wrong)  # type: ignore[arg-type]


def test_a_device_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match="cuda:7") as caught:
        backend_for(Device("cuda", 7))
    assert caught.value.exit_code == 6 and caught.value.next

"""Creation: torch's default types, memory that is shared or copied, ranges, and moving between types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import genesis
from genesis.errors import DeviceError, DTypeError, GradientError, ShapeError
from genesis.functions import create, surface
from genesis.functions.create import tensor

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]

# --- From data --------------------------------------------------------------------------------------------------------

DATA: list[tuple[Any, str, tuple[int, ...]]] = [
    (1, "int64", ()),
    (1.5, "float32", ()),
    (True, "bool", ()),
    ([1, 2], "int64", (2,)),
    ([1, 2.5], "float32", (2,)),
    ([True, False], "bool", (2,)),
    ([True, 2], "int64", (2,)),
    ([[1, 2], [3, 4], [5, 6]], "int64", (3, 2)),
    (((1.0,),), "float32", (1, 1)),
    ([], "float32", (0,)),
    ([[], []], "float32", (2, 0)),
    (range(3), "int64", (3,)),
    (np.float64(2.5), "float64", ()),
    (np.int8(3), "int8", ()),
    (np.zeros((2, 3)), "float64", (2, 3)),
    (np.zeros(2, np.float16), "float16", (2,)),
    (np.zeros(2, ml_dtypes.bfloat16), "bfloat16", (2,)),
    ([np.zeros(2), np.ones(2)], "float64", (2, 2)),
    (np.array([True]), "bool", (1,)),
]


@pytest.mark.parametrize(("data", "dtype", "shape"), DATA)
def test_tensor_takes_the_type_torch_gives(data: Any, dtype: str, shape: tuple[int, ...]) -> None:
    made = tensor(data)
    assert (made.dtype.name, made.shape) == (dtype, shape)
    assert np.array_equal(made.numpy().astype(np.float64), np.asarray(data).astype(np.float64))
    assert made.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_converts(dtype: str) -> None:
    made = tensor([[0, 1], [2, 3]], dtype=dtype)
    assert made.dtype.name == dtype
    assert made.tolist() == np.array([[0, 1], [2, 3]]).astype(made.dtype.numpy).tolist()


def test_tensor_copies_and_shares_as_asked() -> None:
    values = np.arange(6.0).reshape(2, 3)
    copied, shared = tensor(values), genesis.from_numpy(values)
    values[0, 0] = 9.0
    assert copied[0, 0].item() == 0.0
    assert shared[0, 0].item() == 9.0
    shared[1, 2] = -1.0
    assert values[1, 2] == -1.0
    assert np.shares_memory(genesis.as_tensor(values).numpy(), values)
    assert genesis.as_tensor(shared) is shared
    assert genesis.as_tensor(values, dtype="float32").dtype is genesis.float32
    assert tensor(shared).array.storage is not shared.array.storage


def test_from_numpy_keeps_strides_and_copies_what_it_cannot_share() -> None:
    values = np.arange(12.0).reshape(3, 4)
    assert genesis.from_numpy(values.T).stride() == (1, 4)
    assert genesis.from_numpy(values[:, ::2]).stride() == (4, 2)
    with pytest.raises(ValueError, match="negative"):
        genesis.from_numpy(values[::-1])
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    genesis.from_numpy(frozen).fill_(7.0)
    assert frozen.tolist() == [0.0, 1.0, 2.0]


def test_requires_grad() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]
    assert genesis.ones(2, requires_grad=True).is_leaf
    with pytest.raises(GradientError, match="int64 tensors have no gradient"):
        tensor([1], requires_grad=True)


BAD_DATA = {
    "ragged": ([[1], [1, 2]], ShapeError, "equal lengths"),
    "text": (["a"], DTypeError, "from str values"),
    "bytes": (b"ab", DTypeError, "from bytes values"),
    "none": ([None], DTypeError, "from NoneType values"),
    "complex": ([1j], DTypeError, "from complex values"),
    "too large": ([2**70], DTypeError, "from int values"),
    "unsigned": (np.zeros(2, np.uint16), DTypeError, "uint16"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_what_holds_no_numbers_is_refused(name: str) -> None:
    data, kind, message = BAD_DATA[name]
    with pytest.raises(kind, match=message):
        tensor(data)


# --- Filled -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_filled(dtype: str | None) -> None:
    for made, value in [
        (genesis.zeros(2, 3, dtype=dtype), 0),
        (genesis.ones((2, 3), dtype=dtype), 1),
        (genesis.full((2, 3), 1, dtype=dtype or "float32"), 1),
        (genesis.zeros_like(genesis.ones(2, 3), dtype=dtype), 0),
        (genesis.ones_like(genesis.zeros(2, 3), dtype=dtype), 1),
        (genesis.full_like(genesis.zeros(2, 3), 1, dtype=dtype), 1),
        (genesis.zeros(1, dtype=dtype or "float32").new_zeros(2, 3), 0),
        (genesis.zeros(1, dtype=dtype or "float32").new_ones((2, 3)), 1),
        (genesis.zeros(1, dtype=dtype or "float32").new_full((2, 3), 1), 1),
        (genesis.zeros(1, dtype=dtype or "float32").new_tensor([[1] * 3] * 2), 1),
    ]:
        assert made.dtype.name == (dtype or "float32")
        assert made.shape == (2, 3)
        assert (made.numpy() == value).all()
    assert genesis.empty(2, 3, dtype=dtype).shape == genesis.empty_like(genesis.zeros(2, 3)).shape
    assert genesis.zeros(1).new_empty(2, dtype=dtype).shape == (2,)


def test_full_takes_the_type_of_its_value() -> None:
    assert genesis.full((2,), 3).dtype is genesis.int64
    assert genesis.full((2,), 3.0).dtype is genesis.float32
    assert genesis.full((), True).dtype is genesis.bool
    assert genesis.full(2, tensor(1.5)).tolist() == [1.5, 1.5]
    for sizes in [(-1,), (2, -3)]:
        for make in (genesis.zeros, genesis.empty):
            with pytest.raises(ShapeError, match="negative size"):
                make(*sizes)


def test_likes_keep_dtype() -> None:
    x = genesis.zeros(2, 3, dtype="bfloat16")
    for made in (genesis.ones_like(x), genesis.empty_like(x), genesis.full_like(x, 2)):
        assert made.dtype is genesis.bfloat16
        assert made.shape == x.shape


@pytest.mark.parametrize(("n", "m"), [(3, None), (2, 4), (4, 2), (0, None), (1, 3), (3, 0)])
def test_eye(n: int, m: int | None) -> None:
    assert np.array_equal(genesis.eye(n, m, dtype="int32").numpy(), np.eye(n, m, dtype=np.int32))


# --- Counted ----------------------------------------------------------------------------------------------------------

RANGES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((5,), {}, "int64"),
    ((2, 7), {}, "int64"),
    ((7, 2, -2), {}, "int64"),
    ((0, 10, 3), {}, "int64"),
    ((5.0,), {}, "float32"),
    ((0, 1, 0.25), {}, "float32"),
    ((1.0, 0.0, -0.3), {}, "float32"),
    ((3, 3), {}, "int64"),
    ((4,), {"dtype": "float64"}, "float64"),
    ((4,), {"dtype": "bfloat16"}, "bfloat16"),
]


@pytest.mark.parametrize(("bounds", "options", "dtype"), RANGES)
def test_arange(bounds: tuple[Any, ...], options: dict[str, Any], dtype: str) -> None:
    made = genesis.arange(*bounds, **options)
    assert made.dtype.name == dtype
    assert np.array_equal(made.numpy(), np.arange(*bounds, dtype=np.float64).astype(made.dtype.numpy))


def test_arange_by_name_and_large_integers() -> None:
    assert genesis.arange(start=1, end=4).tolist() == [1, 2, 3]
    assert genesis.arange(1, end=4).tolist() == [1, 2, 3]
    assert genesis.arange(0, 6, step=2).tolist() == [0, 2, 4]
    assert genesis.arange(2**60, 2**60 + 3).tolist() == [2**60, 2**60 + 1, 2**60 + 2]
    assert genesis.arange(tensor(3)).tolist() == [0, 1, 2]
    for bounds in [(3, 0), (0, 3, -1), (0, 3, 0), (), (1, 2, 3, 4)]:
        with pytest.raises(ShapeError, match="arange"):
            genesis.arange(*bounds)
    with pytest.raises(DTypeError, match="arange takes numbers"):
        genesis.arange("3")


@pytest.mark.parametrize(("start", "end", "steps"), [(0, 1, 11), (3.0, -2.0, 6), (2.0, 9.0, 1), (0, 1, 0), (-5, 5, 2)])
def test_linspace(start: float, end: float, steps: int) -> None:
    made = genesis.linspace(start, end, steps, dtype="float64")
    np.testing.assert_allclose(made.numpy(), np.linspace(start, end, steps), rtol=1e-15)
    assert genesis.linspace(start, end, steps).dtype is genesis.float32
    with pytest.raises(ShapeError, match="-1 elements"):
        genesis.linspace(0, 1, -1)


# --- Type and device --------------------------------------------------------------------------------------------------


def test_to_accepts_torchs_forms() -> None:
    x = genesis.ones(2)
    assert x.to("float32") is x
    assert x.to("cpu") is x
    assert x.to(x) is x
    assert x.to(genesis.Device("cpu")) is x
    assert x.to(genesis.float64).dtype is genesis.float64
    assert x.to("cpu", "int32").dtype is genesis.int32
    assert x.to(genesis.zeros(1, dtype="float16")).dtype is genesis.float16
    assert x.to(dtype="bfloat16", device="cpu").dtype is genesis.bfloat16
    copied = x.to("float32", copy=True)
    assert copied is not x
    assert copied.array.storage is not x.array.storage


def test_to_passes_gradients_back_in_the_source_type() -> None:
    x = genesis.ones(3, requires_grad=True)
    (x.to("float64") * tensor([1.0, 2.0, 3.0], dtype="float64")).sum().backward()
    assert x.grad.dtype is genesis.float32
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda d: tensor([1.0], device=d),
        lambda d: genesis.zeros(2, device=d),
        lambda d: genesis.empty(2, device=d),
        lambda d: genesis.arange(3, device=d),
        lambda d: genesis.linspace(0, 1, 3, device=d),
        lambda d: genesis.eye(2, device=d),
        lambda d: genesis.full_like(genesis.ones(2), 1.0, device=d),
        lambda d: genesis.ones(2).to(d),
        lambda d: genesis.as_tensor([1.0], device=d),
        lambda d: genesis.as_tensor(np.zeros(2), device=d),
    ],
)
def test_a_device_without_a_backend_is_refused(make: Any) -> None:
    assert make("cpu").device.type == "cpu"
    with pytest.raises(DeviceError, match="cuda:1"):
        make("cuda:1")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="'tpu' is not a device"):
        genesis.zeros(2, device="tpu")
    with pytest.raises(DTypeError, match="'tpu' is not a dtype"):  # a word that names no device is read as a dtype
        genesis.zeros(2).to("tpu")


def test_dlpack_both_ways() -> None:
    values = np.arange(6.0).reshape(2, 3)
    made = genesis.from_dlpack(values)
    made[0, 0] = 5.0
    assert values[0, 0] == 5.0
    back = np.from_dlpack(made)
    assert np.shares_memory(back, values)
    with pytest.raises(DTypeError, match="from_dlpack"):
        genesis.from_dlpack([1.0])


def test_the_public_names_are_functions_of_the_package() -> None:
    public = {**surface.methods, **surface.functions}
    names = {name for name, function in public.items() if function.__module__ == create.__name__}
    assert {"zeros", "new_zeros", "pin_memory", "from_numpy"} <= names
    for name in names:
        place = genesis if name in surface.functions else genesis.Tensor
        assert getattr(place, name) is getattr(create, name)

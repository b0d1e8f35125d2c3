"""Every public function and method on CUDA as on the CPU: what takes a call there takes it here, with equal results.

Calls are found by trying: of each function the first arguments, of many kinds, that the CPU accepts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import Tensor
from genesis.errors import DTypeError, ShapeError
from genesis.nn import functional

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return (RNG.integers(-6, 7, shape) / 2).astype(np.float32)


VALUES = {
    "x": floats(3, 4),
    "y": floats(3, 4),
    "square": floats(4, 4),
    "cube": floats(2, 3, 4),
    "cube_t": floats(2, 4, 3),
    "heads": floats(1, 2, 4, 8),
    "vector": floats(4),
    "none": floats(0, 4),
    "scalar": np.float32(1.5).reshape(()),
    "whole": RNG.integers(0, 3, (3, 4)),
    "places": RNG.integers(0, 3, 4),
    "rows": RNG.integers(0, 3, 3),
    "mask": RNG.random((3, 4)) < 0.5,
    "definite": (np.eye(4) * 9 + 1).astype(np.float32),
}


class Name(str):
    """A tensor of `VALUES`."""


(X, Y, SQUARE, CUBE, CUBE_T, HEADS, VECTOR, NONE, SCALAR, WHOLE, PLACES, ROWS, MASK, DEFINITE) = map(Name, VALUES)
FIRST = (X, WHOLE, MASK, NONE, SCALAR, VECTOR, CUBE, PLACES, HEADS, DEFINITE)
REST: tuple[tuple[Any, ...], ...] = (
    (-1.0, 1.0), (CUBE_T,),
    (0, ROWS, Y), (0, ROWS, 2.0), (-1, WHOLE, Y), (1, WHOLE, 2.0), (ROWS, -2), (PLACES, 1), (-1, PLACES), (0, ROWS),
    (-1, WHOLE), (MASK, Y), (MASK, 2.0), ((ROWS,), Y), ((ROWS, ROWS), SCALAR), (Y, 0.5), (Y, SQUARE), (SQUARE, SQUARE),
    (SQUARE, VECTOR), (CUBE, CUBE_T), (HEADS, HEADS), (-2, 1, 2), (0, 0, 2), (1, 0, 1), (1, (2, 2)), ((2,), (1,), 1),
    ((-2, -1), True), ((0, -1), True), (-1, True), (1, 0), (0, 1), (-2, -1), (0, 9), (Y,), (SQUARE,),
    (VECTOR,), (WHOLE,), (MASK,), (PLACES,), (SCALAR,), ((12,),), ((4, 3),), ((1, 1),), (4,), (8,), (-1,), (0,), (2,),
    (0.5,), (genesis.float16,), ("ij,jk", Y, SQUARE), (), (ROWS,), (VECTOR, VECTOR), (CUBE,), (VECTOR, 0, 1),
    (0, ROWS, Y, "amax"), (-1, WHOLE, Y, "sum"),
)  # fmt: skip

HOMES = ("genesis.functions", "genesis.nn", "genesis.tensor")
# What makes no result of tensors' values, or none that two devices could share.
APART = {
    "cpu", "cuda", "to", "backward", "numpy", "data_ptr", "is_pinned", "pin_memory", "empty_like", "new_empty",
    "new_empty_strided", "empty", "resize_as_",
    "register_hook", "record_stream", "from_numpy", "from_dlpack", "retain_grad", "stride",
    "storage_offset", "element_size", "share_memory_", "promote_types", "apply_", "get_device",
}  # fmt: skip
LEFT = {f"genesis.functions.{name}" for name in ("pointwise", "printing", "settings")}  # the last two: no values
# Made from sizes or by name alone, which the calls here do not have: the tests of their files are of both devices.
NO_CALL = {
    "einsum", "eye", "full", "ones", "rand", "randn", "randperm", "zeros", "randint", "arange", "linspace", "normal",
    "tensor", "as_tensor", "logspace", "range", "scalar_tensor", "empty_strided", "tril_indices", "triu_indices",
    "as_strided_scatter", "bilinear", "conv_transpose1d", "cosine_embedding_loss", "lu_solve", "orgqr",
    "nonzero_static", "empty_permuted", "polygamma", "multi_head_attention_forward", "frombuffer",
}  # fmt: skip
# With more operands than the calls here have; each is one op, which the op suite runs on both devices.
FUSED = {
    "attention", "attention_packed", "layer_norm", "linear_cross_entropy", "norm_linear", "norm_mlp", "norm_rope",
    "linear_distillation", "linear_loss_and_hits", "linear_token_log_probs", "packed_linear", "rms_norm", "rope",
    "addmv", "baddbmm",
}  # fmt: skip


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods of tensors, functions of `genesis`, functions of `nn.functional`; each once.

    Those that are an op under its name (`functions.pointwise`) are left to the op suite.
    """
    seen: set[int] = set()
    for place, names in ((Tensor, dir(Tensor)), (genesis, genesis.__all__), (functional, functional.__all__)):
        for name in names:
            found = inspect.getattr_static(place, name, None)
            home = getattr(found, "__module__", None) or ""
            is_ours = inspect.isfunction(found) and home.startswith(HOMES) and home not in LEFT
            if is_ours and not name.startswith("_") and name not in APART | NO_CALL and id(found) not in seen:
                seen.add(id(found))
                yield name, found


def made(given: Any, device: str) -> Any:
    if isinstance(given, Name):
        return genesis.tensor(VALUES[given], device=device)
    return tuple(made(g, device) for g in given) if isinstance(given, tuple) else given


def told(result: Any) -> list[Any]:
    """Tensors of a result as dtype, shape and float64 values, numbers as they are."""
    if isinstance(result, tuple | list):
        return [told(r) for r in result]
    if not isinstance(result, Tensor):
        return [result if isinstance(result, bool | int | float) else None]
    return [result.dtype, tuple(result.shape), result.cpu().numpy().astype(np.float64)]


def called(function: Callable[..., Any], args: tuple[Any, ...], device: str, into: bool = False) -> list[Any]:
    """The result, and the tensors among the arguments as the call leaves them."""
    genesis.manual_seed(0)
    given = made(args, device)
    with genesis.no_grad():
        result = function(*given)
        if into:
            memory = [genesis.zeros_like(each) for each in (result if isinstance(result, tuple) else (result,))]
            result = function(*given, out=tuple(memory) if isinstance(result, tuple) else memory[0])
    for each in result if isinstance(result, tuple | list) else (result,):
        assert not isinstance(each, Tensor) or each.device.type == device, f"the result is on {each.device}"
    return [told(result), told(given)]


def alike(a: Any, b: Any) -> bool:
    """Equal, floats to a few units in the last place of the sums of these few numbers."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    return bool(a == b or a != a or (isinstance(a, float) and abs(a - b) < 1e-5))


def problems(function: Callable[..., Any], most: int) -> tuple[int, list[str]]:
    """How many calls the CPU takes, of at most `most`, and what is wrong with them on CUDA."""
    count, found = 0, []
    for args in ((first, *rest) for first in FIRST for rest in REST):
        try:
            expected = called(function, args, "cpu")
        except Exception:  # no call of this function
            continue
        count += 1
        try:
            if not alike(called(function, args, "cuda"), expected):
                found.append(f"{args}: other values")
            has_out = "out" in inspect.signature(function).parameters and count == 1
            if has_out and not alike(called(function, args, "cuda", True), called(function, args, "cpu", True)):
                found.append(f"{args} into memory: other values")
        except Exception as error:
            found.append(f"{args}: {type(error).__name__}: {error}")
        if count == most:
            break
    return count, found


@pytest.mark.full
def test_every_public_function_works_on_cuda(request: pytest.FixtureRequest) -> None:
    most = 8 if request.config.getoption("--gpu") else 1
    wrong, unseen = [], set()
    for name, function in public():
        if most == 1 and name.endswith("_") and hasattr(Tensor, name[:-1]):  # the same kernels: on a GPU
            continue
        count, found = problems(function, most)
        wrong += [f"{name}{text}" for text in found]
        unseen |= set() if count else {name}
    assert not wrong, "\n".join(wrong)
    assert unseen <= FUSED, f"no call is found for {unseen - FUSED}: add arguments to REST"


def test_a_function_that_fails_or_differs_on_cuda_is_found() -> None:
    def fails(x: Tensor) -> Tensor:
        return x + genesis.ones(1)

    def differs(x: Tensor) -> Tensor:
        return x * (1 if x.device.type == "cpu" else 1.01)

    assert "DeviceError" in problems(fails, 1)[1][0]
    assert "other values" in problems(differs, 1)[1][0]
    assert problems(Tensor.exp, 1) == (1, [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_and_dimensions_are_integers(device: str) -> None:
    """Of numpy, or tensors without dimensions, too; a tensor that stayed a size broke every later allocation."""
    x = genesis.tensor(VALUES["cube"], device=device)
    for one in (np.int64(1), genesis.tensor(1, device=device)):
        values = x.topk(one, one).values
        assert type(values.shape[1]) is int
        assert np.array_equal(values.cpu().numpy()[:, 0], VALUES["cube"].max(1))
        assert x.cumsum(one).tolist() == VALUES["cube"].cumsum(1).tolist()
        assert x.argmax(one).tolist() == VALUES["cube"].argmax(1).tolist()
        assert x.sum(one).tolist() == VALUES["cube"].sum(1).tolist()
        assert x.tril(one).tolist() == np.tril(VALUES["cube"], 1).tolist()
    for call in (lambda: x.sum(0.5), lambda: x.cumsum(0.5), lambda: x.topk(1.5), lambda: x.sum((0, 1.0)),
                 lambda: x.normal_((1, 2)), lambda: x.random_(0.5), lambda: x.triu(0.5)):  # fmt: skip
        with pytest.raises(DTypeError):
            call()
    assert genesis.zeros(3, device=device).tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dimension_that_appears_twice_is_refused(device: str) -> None:
    """On CUDA such a sum read memory that is not the tensor's."""
    x = genesis.ones(3, 4, device=device)
    for dims in ((0, 0), [1, -1], (np.int64(0), 0), (genesis.tensor(0), genesis.tensor(0))):
        with pytest.raises(ShapeError, match="twice"):
            x.sum(dims)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_becomes_bool_is_true_where_it_is_not_0(device: str) -> None:
    def bools(*values: bool) -> Tensor:
        return genesis.tensor(values, device=device)

    places, halves = genesis.tensor([0, 1, 1], device=device), genesis.tensor([0.5, 1.0, -1.0], device=device)
    assert bools(False, False).fill_(0.5).tolist() == [True, True]
    assert genesis.full((2,), -0.25, dtype="bool", device=device).tolist() == [True, True]
    for before in (False, True):
        found = bools(before, before).index_put((places,), halves, accumulate=True)
        assert found.tolist() == [True, True]
    assert bools(False, True).index_add(0, places[:2], halves[:2]).tolist() == [True, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_swiglu_takes_floats_alone(device: str) -> None:
    x = genesis.ones(2, 3, device=device)
    for other in (x > 0, x.long()):
        for pair in ((other, x), (x, other)):
            with pytest.raises(DTypeError, match="swiglu takes float tensors"):
                functional.swiglu(*pair)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_repeat_interleave_by_a_tensor(device: str, dim: int | None) -> None:
    values = VALUES["x"]
    counts = np.arange(values.size if dim is None else values.shape[dim]) % 3
    for given in (counts, np.array([2]), np.array(2)):
        x = genesis.tensor(values, device=device, requires_grad=True)
        found = x.repeat_interleave(genesis.tensor(given, device=device), dim)
        expected = np.repeat(values, given, dim)
        assert found.device.type == device
        assert np.array_equal(found.detach().cpu().numpy(), expected)
        found.sum().backward()
        each = np.broadcast_to(given, counts.shape)
        shape = (-1,) if dim is None else tuple(-1 if d == dim % 2 else 1 for d in range(2))
        wide = each.reshape(values.shape) if dim is None else np.broadcast_to(each.reshape(shape), values.shape)
        assert np.array_equal(x.grad.cpu().numpy(), wide)
    assert genesis.zeros(0, 4, device=device).repeat_interleave(genesis.tensor([2], device=device), 0).shape == (0, 4)

"""Shape functions: torch's answers and refusals, views that share memory, and gradients through views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis.errors import DTypeError, GradientError, IndexRangeError, ShapeError
from genesis.functions import shape, surface
from genesis.functions.create import tensor
from tests.autograd.scenarios import gradcheck
from tests.functions.torch_tables import difference, load

INPUTS, CALLS = load("shape")


def counted(*sizes: int) -> Any:
    """0, 1, 2, … in float64."""
    return genesis.arange(int(np.prod(sizes)), dtype="float64").reshape(*sizes)


@pytest.mark.parametrize("name", sorted({call["call"] for call in CALLS}))
def test_agrees_with_torch(name: str) -> None:
    calls = [call for call in CALLS if call["call"] == name]
    found = [f"{c['x']}, {c['args']}: {wrong}" for c in calls if (wrong := difference(c, INPUTS))]
    assert not found, "\n".join(found)


def test_the_comparison_with_torch_can_fail() -> None:
    call = next(c for c in CALLS if c["call"] == "roll" and "grad" in c)
    assert not difference(call, INPUTS)
    for broken in (
        call | {"args": [2]},
        call | {"grad": np.zeros(INPUTS[call["x"]]["shape"]).tolist()},
        call | {"error": "RuntimeError"},
    ):
        assert difference(broken, INPUTS)


# --- Views share memory -----------------------------------------------------------------------------------------------

VIEWS = {
    "view": lambda x: x.view(6, 4),
    "reshape": lambda x: x.reshape(2, 12),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x.expand(5, 2, 3, 4),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "split": lambda x: x.split(2, 1)[1],
    "chunk": lambda x: x.chunk(2, 2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 3), (12, 4), 3),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory_and_see_changes(name: str) -> None:
    x = counted(2, 3, 4)
    view = VIEWS[name](x)
    assert view.array.storage is x.array.storage
    assert np.shares_memory(view.numpy(), x.numpy())
    x.mul_(-1.0)
    position = tuple(s // 2 for s in view.shape)
    assert view[position].item() <= 0
    assert np.array_equal(view.numpy(), VIEWS[name](x).numpy())


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("expand", "unfold")])
def test_a_change_through_a_view_changes_its_base(name: str) -> None:
    x = counted(2, 3, 4)
    view = VIEWS[name](x)
    seen = set(view.numpy().ravel().tolist())
    view.fill_(-1.0)
    changed = {i for i in range(24) if x.numpy().ravel()[i] == -1.0}
    assert changed == seen


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_through_views(name: str) -> None:
    x = tensor(np.random.default_rng(0).standard_normal((2, 3, 4)), requires_grad=True)
    assert gradcheck(lambda x: VIEWS[name](x) * 2.0, [x])
    turned = tensor(np.random.default_rng(0).standard_normal((4, 3, 2)), requires_grad=True)
    if name not in ("view", "as_strided"):
        assert gradcheck(lambda t: VIEWS[name](t.permute(2, 1, 0)) * 2.0, [turned])


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("expand", "unfold")])
def test_gradients_through_a_change_of_a_view(name: str) -> None:
    def function(x: Any, y: Any) -> Any:
        base = x * 1.0
        before = base[0]  # a view taken before the change sees it
        view = VIEWS[name](base)
        view.mul_(y)
        return base * base, before * 3.0

    rng = np.random.default_rng(1)
    x = tensor(rng.standard_normal((2, 3, 4)), requires_grad=True)
    y = tensor(rng.standard_normal(VIEWS[name](x).shape[-1:] or (1,)), requires_grad=True)
    y = y if VIEWS[name](x).shape else tensor(1.5, dtype="float64", requires_grad=True)
    assert gradcheck(function, [x, y])


def test_a_change_of_a_view_of_memory_in_another_order() -> None:
    """The base's strides are not row-major: its gradient must follow its own layout."""

    def gradient(order: Any) -> np.ndarray:
        x = genesis.from_numpy(np.array(np.arange(6.0).reshape(2, 3), order=order))
        weight = tensor(np.arange(6.0).reshape(2, 3) + 1.0, requires_grad=True)
        x.mul_(weight)
        x[0].mul_(5.0)
        x[:, 1].add_(1.0)
        (x * x).sum().backward()
        return np.array(weight.grad.numpy())

    # 2·x·dx/dw by hand: the first row was scaled by 5, column 1 then shifted by 1
    expected: list[list[float]] = [
        [0.0, 2 * (1 * 2 * 5 + 1) * 1 * 5, 2 * (2 * 3 * 5) * 2 * 5],
        [2 * 12 * 3, 2 * (20 + 1) * 4, 2 * 30 * 5],
    ]
    assert np.array_equal(gradient("C"), expected)
    assert np.array_equal(gradient("F"), expected)


def test_reshape_copies_only_where_it_must() -> None:
    x = counted(2, 3, 4)
    assert x.transpose(0, 1).reshape(24).array.storage is not x.array.storage
    assert x.transpose(0, 1).reshape(3, 2, 2, 2).array.storage is x.array.storage
    with pytest.raises(ShapeError, match=r"without a copy.*use reshape"):
        x.transpose(0, 1).view(24)


def test_contiguous_returns_the_tensor_itself() -> None:
    x = counted(2, 3)
    assert x.contiguous() is x
    turned = x.T.contiguous()
    assert turned.is_contiguous()
    assert turned.stride() == (2, 1)


def test_views_of_empty_tensors() -> None:
    x = genesis.zeros(3, 0, 4)
    for view in (x[1:, :, 2:], x.reshape(0, 5), x.permute(2, 1, 0), x.expand(2, 3, 0, 4), x[2], x.diagonal(5, 0, 2)):
        assert view.numel() == 0
        assert view.numpy().size == 0
        assert view.clone().shape == view.shape


# --- Joining, repeating, padding --------------------------------------------------------------------------------------


def test_cat_and_stack() -> None:
    x, y = counted(2, 3), counted(2, 1)
    assert np.array_equal(genesis.cat([x, y], 1).numpy(), np.concatenate([x.numpy(), y.numpy()], 1))
    assert genesis.cat([x, tensor([[1, 2, 3]])]).dtype is genesis.float64
    assert np.array_equal(genesis.stack([x, x], -1).numpy(), np.stack([x.numpy(), x.numpy()], -1))
    assert np.array_equal(genesis.cat([genesis.zeros(0), x], 1).numpy(), x.numpy())
    out = genesis.empty(4, 3, dtype="float64")
    assert genesis.cat([x, x], out=out) is out
    assert np.array_equal(out.numpy(), np.concatenate([x.numpy()] * 2))


def test_gradients_of_cat_stack_repeat_and_pad() -> None:
    rng = np.random.default_rng(2)
    x, y = (tensor(rng.standard_normal((2, 3)), requires_grad=True) for _ in range(2))
    assert gradcheck(lambda x, y: genesis.cat([x, y, x], 1), [x, y])
    assert gradcheck(lambda x, y: genesis.stack([x, y, x], 1), [x, y])
    assert gradcheck(lambda x: x.repeat(2, 2), [x])
    assert gradcheck(lambda x: x.repeat_interleave(tensor([2, 0, 1]), 1), [x])
    assert gradcheck(lambda x: shape.pad(x, (1, -1, 0, 2), value=3.0), [x])


def test_repeat_interleave_takes_one_count_for_each_slice() -> None:
    x = counted(2, 3)
    assert np.array_equal(x.repeat_interleave(tensor([2, 0, 1]), 1).numpy(), np.repeat(x.numpy(), [2, 0, 1], 1))
    assert np.array_equal(x.repeat_interleave(tensor([2])).numpy(), np.repeat(x.numpy(), 2))
    for wrong in (tensor([1, 2]), tensor([-1]), tensor([0.5])):
        with pytest.raises(ShapeError, match="repeat_interleave"):
            x.repeat_interleave(wrong, 1)
    scalar = tensor(3.0)
    assert [scalar.repeat_interleave(r, 0).tolist() for r in (2, tensor([2]))] == [[3, 3], [3, 3]]
    with pytest.raises(ShapeError, match="of size 1"):
        scalar.repeat_interleave(tensor([1, 2]), 0)


@pytest.mark.parametrize("widths", [(1, 2), (0, 1, 2, 0), (-1, 1), (1, 1, 1, 1, -1, -1), (), (-3, 0)])
def test_pad_lists_widths_from_the_last_dimension(widths: tuple[int, ...]) -> None:
    x = counted(3, 4, 5)
    pairs = [(0, 0)] * (3 - len(widths) // 2) + [widths[i : i + 2] for i in range(len(widths) - 2, -1, -2)]
    expected = np.pad(x.numpy(), [(max(a, 0), max(b, 0)) for a, b in pairs], constant_values=7.0)
    for axis, (before, after) in enumerate(pairs):
        size = expected.shape[axis]
        expected = np.take(expected, range(max(-before, 0), size - max(-after, 0)), axis)
    assert np.array_equal(shape.pad(x, widths, value=7.0).numpy(), expected)


# --- Errors -----------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "select": (lambda x: x.select(1, 3), IndexRangeError, "index 3 is out of range for dimension 1 of size 3"),
    "select of a scalar": (lambda x: x[0, 0].select(0, 0), IndexRangeError, "without dimensions"),
    "narrow": (lambda x: x.narrow(1, 2, 2), IndexRangeError, "2 from 2 on .* dimension 1 of size 3"),
    "dim": (lambda x: x.transpose(0, 2), IndexRangeError, "dimension 2 is out of range for 2 dimensions"),
    "reshape": (lambda x: x.reshape(4, 2), ShapeError, r"\(4, 2\) has 8 elements, the tensor has 6"),
    "two unknown sizes": (lambda x: x.view(-1, -1), ShapeError, "at most one -1"),
    "expand": (lambda x: x.expand(2, 4), ShapeError, r"\(2, 3\) does not expand to \(2, 4\)"),
    "expand a new size": (lambda x: x.expand(-1, 2, 3), ShapeError, "-1 keeps an existing size"),
    "permute": (lambda x: x.permute(0, 0), ShapeError, "does not name each of the 2 dimensions"),
    "flatten": (lambda x: x.flatten(1, 0), ShapeError, "start_dim 1 comes after end_dim 0"),
    "split": (lambda x: x.split([1, 1], 1), ShapeError, r"\[1, 1\] do not add up to dimension 1 of size 3"),
    "split by 0": (lambda x: x.split(0), ShapeError, "size 0"),
    "chunk": (lambda x: x.chunk(0), ShapeError, "got 0"),
    "t": (lambda x: x.reshape(1, 2, 3).t(), ShapeError, "at most 2 dimensions"),
    "diagonal": (lambda x: x[0].diagonal(), ShapeError, "at least 2 dimensions"),
    "as_strided": (lambda x: x.as_strided((9,), (1,)), ShapeError, "reach outside a storage of 6 elements"),
    "cat of nothing": (lambda x: genesis.cat([]), ShapeError, "at least one"),
    "cat of scalars": (lambda x: genesis.cat([x[0, 0]]), ShapeError, "use stack"),
    "cat of shapes": (lambda x: genesis.cat([x, x[0:1, :2]]), ShapeError, r"\(2, 3\) and \(1, 2\) differ"),
    "cat of numpy": (lambda x: genesis.cat([x, np.zeros(3)]), DTypeError, "cat takes a tensor, got ndarray"),
    "stack": (lambda x: genesis.stack([x, x[0]]), ShapeError, "tensors of one shape"),
    "repeat": (lambda x: x.repeat(2), ShapeError, r"\(2,\) .*\(2, 3\)"),
    "pad mode": (lambda x: shape.pad(x, (1, 1), mode="reflect"), ShapeError, "'reflect'"),
    "no tensor": (lambda x: shape.reshape([1, 2], 2), DTypeError, "reshape takes a tensor, got list"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call(counted(2, 3))


def test_every_method_is_a_function_of_the_same_name() -> None:
    methods = [name for name, function in surface.methods.items() if function.__module__ == shape.__name__]
    assert len(methods) == 36
    for name in (each for each in methods if hasattr(shape, each)):  # others are forms of these
        assert getattr(genesis.Tensor, name) is getattr(shape, name)
        assert getattr(shape, name).__doc__


def test_a_view_as_another_type_shares_bytes() -> None:
    x = genesis.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert x.view(genesis.int32)[0].tolist() == [0x3F800000, 0x40000000]
    halves = x[:, 1:].view(dtype=genesis.int16)
    assert halves.shape == (2, 2) and halves.stride() == (4, 1) and halves[0].tolist() == [0, 0x4000]
    assert genesis.equal(x.view(genesis.uint8).view(genesis.float32), x) and x.view(genesis.float64).shape == (2, 1)
    halves.zero_()
    assert x.tolist() == [[1.0, 0.0], [3.0, 0.0]]
    for wrong in (x.t(), x[:, :1].view(genesis.int16)[:, 1:], genesis.ones(3), genesis.tensor(1.0)):
        with pytest.raises(ShapeError):
            wrong.view(genesis.float64)
    with pytest.raises(GradientError):
        x.requires_grad_().view(genesis.float64)


def test_values_of_topk_and_sort_may_change_before_backward() -> None:
    x = genesis.tensor([1.0, 3.0, 2.0], requires_grad=True)
    best, order = genesis.topk(x, 2).values, x.sort().values
    best /= 2
    order *= 3
    (best.sum() + order.sum()).backward()
    assert x.grad.tolist() == [3.0, 3.5, 3.5]

"""In-place changes, views and item assignment on the tape, written against torch's interface.

Each scenario takes the library (`genesis`; torch made `fixtures/inplace.json`) and returns tensors and flags to
compare: results, gradients of the leaves, requires_grad. Leaves hold float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import genesis

__all__ = ["SCENARIOS"]

SCENARIOS: dict[str, Callable[[Any], list[Any]]] = {}


# Gradients are compared more strictly than by torch's defaults.
gradcheck = functools.partial(genesis.autograd.gradcheck, atol=1e-6, rtol=1e-5)


def scenario(function: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    SCENARIOS[function.__name__] = function
    return function


def leaf(lib: Any, *values: float) -> Any:
    return lib.tensor(list(values), dtype=lib.float64, requires_grad=True)


def squares(x: Any) -> Any:
    """A loss whose gradient shows each element's value."""
    return (x * x).sum()


@scenario
def mul_by_a_tensor_that_needs_a_gradient(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 4, 5, 6)
    h = a * 2
    h.mul_(b)
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def arithmetic_chain(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 4, 5, 6)
    h = a * 1.5
    h.add_(b, alpha=2.0).sub_(1.0).div_(b).mul_(2.0)
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def pow_of_a_saved_base(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 2, 1.5, 0.5)
    h = a * 2
    h.pow_(b)
    k = h + 1
    k.pow_(2)
    k.sum().backward()
    return [h, k, a.grad, b.grad]


@scenario
def unary_in_place(lib: Any) -> list[Any]:
    a = leaf(lib, 0.5, 1, 1.5)
    names = ["exp_", "log_", "sqrt_", "sigmoid_", "tanh_", "neg_", "abs_", "square_", "sin_"]
    names += ["reciprocal_", "rsqrt_", "erf_", "floor_"]
    results = [getattr(a * (i + 1), name)() for i, name in enumerate(names)]
    sum(r.sum() for r in results).backward()
    return [*results, a.grad]


@scenario
def clamp_and_masked_fill(lib: Any) -> list[Any]:
    a = leaf(lib, -2, 0.5, 3, 4)
    h = a * 1
    h.clamp_(-1, 3.5)
    h.masked_fill_(lib.tensor([False, True, False, False]), 7.0)
    squares(h).backward()
    return [h, a.grad]


@scenario
def zero_then_add(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2), leaf(lib, 3, 4)
    h = a * 2
    h.zero_()
    flag = h.requires_grad
    h.add_(b)
    squares(h).backward()
    return [flag, h, a.grad, b.grad]


@scenario
def fill_a_part(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    h = a * 2
    h[1:].fill_(5.0)
    squares(h).backward()
    return [h, a.grad]


@scenario
def copy_broadcasts_and_casts(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    b = lib.tensor([4.0, 5.0, 6.0], dtype=lib.float32, requires_grad=True)
    h = lib.zeros(2, 3, dtype=lib.float64) + a
    h.copy_(b)
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def change_through_a_view_reaches_the_base(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 10)
    h = a * 2
    v = h[1:]
    v.mul_(b)
    squares(h).backward()
    return [h, v, a.grad, b.grad]


@scenario
def change_of_the_base_reaches_a_view(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 4, 5, 6)
    h = a * 2
    v = h[1:]
    h.mul_(b)
    squares(v).backward()
    return [v, a.grad, b.grad]


@scenario
def sibling_views_see_each_other(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 5, 7)
    h = a * 2
    v, w = h[:2], h[1:]
    v.mul_(b)
    squares(w).backward()
    return [w, a.grad, b.grad]


@scenario
def changes_of_overlapping_views_in_turn(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3, 4), leaf(lib, 2, 3, 4)
    h = a * 1
    v, w = h[:3], h[1:]
    v.mul_(b)
    w.add_(b)
    v.mul_(2.0)
    squares(h).backward()
    return [h, v, w, a.grad, b.grad]


@scenario
def view_of_a_view(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3, 4, 5, 6), leaf(lib, 7, 8)
    h = a * 2
    t = h.view(2, 3).transpose(0, 1)
    t[1].mul_(b)
    squares(h).backward()
    return [h, t, a.grad, b.grad]


@scenario
def view_changed_twice_with_a_use_between(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    h = a * 2
    v = h[:2]
    v.add_(1.0)
    first = v + 0
    v.add_(1.0)
    (first.sum() + squares(h)).backward()
    return [first, h, a.grad]


@scenario
def squeezed_and_unsqueezed_views(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2), leaf(lib, 3, 4)
    h = a * 2
    h.unsqueeze(0).squeeze(0).mul_(b)
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def permuted_view(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3, 4, 5, 6), leaf(lib, 1, 2, 3)
    h = (a * 2).view(1, 2, 3)
    h.permute(2, 0, 1).mul_(b.view(3, 1, 1))
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def buffer_becomes_part_of_the_graph(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2)
    buffer = lib.zeros(4, dtype=lib.float64)
    view = buffer[2:]
    before = [buffer.requires_grad, view.requires_grad]
    buffer[1:3].copy_(a)
    after = [buffer.requires_grad, view.requires_grad]
    squares(view).backward()
    return [*before, *after, buffer, view, a.grad]


@scenario
def item_assignment(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 4)
    h = lib.zeros(4, dtype=lib.float64)
    h[1:] = a * 3
    h[0] = b[0]
    h[2] = 1.0
    h[-1] += b[0]
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def item_assignment_overwrites_history(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3), leaf(lib, 4, 5, 6)
    h = a * 2
    h[:] = b
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def assignment_by_mask_and_by_index(lib: Any) -> list[Any]:
    a, b = leaf(lib, 1, 2, 3, 4), leaf(lib, 5, 6)
    h = a * 2
    h[lib.tensor([True, False, False, False])] = 9.0
    h[lib.tensor([3, 1])] = b
    squares(h).backward()
    return [h, a.grad, b.grad]


@scenario
def rows_written_in_a_loop(lib: Any) -> list[Any]:
    a, w = leaf(lib, 1, 2), leaf(lib, 0.5, 3)
    out = lib.zeros(3, 2, dtype=lib.float64)
    h = a * 1
    for i in range(3):
        out[i] = h
        h = h * w
    squares(out).backward()
    return [out, a.grad, w.grad]


@scenario
def detached_values_are_shared_and_carry_no_gradient(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    h = a + 1
    d = h.detach()
    d.mul_(10.0)
    squares(h[:2]).backward()
    return [d.requires_grad, h, a.grad]


@scenario
def leaf_changed_without_recording(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    with lib.no_grad():
        a.mul_(2.0)
        a[0] = 5.0
    squares(a).backward()
    return [a.requires_grad, a, a.grad]


@scenario
def view_of_a_leaf_used_before_and_after(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2, 3)
    v = a[1:]
    y = v * 2
    with lib.no_grad():
        a.add_(1.0)
    (y.sum() + squares(v)).backward()
    return [v, y, a.grad]


@scenario
def result_without_saved_values_runs_backward_twice(lib: Any) -> list[Any]:
    a = leaf(lib, 1, 2)
    y = a + 1
    y.sum().backward()
    y.sum().backward()
    return [a.grad]

"""Gradients made in their slots: what a vjp may ask of the engine (`Context.gradient_slot`, `take_accumulated`), and
`Op.gradient_outputs`.

Every scenario runs on leaves whose gradients live in flat buffers and on leaves without slots. Values are small
whole numbers, so that sums are exact in any order, and both must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.array import Array, Spec
from genesis.autograd import apply, checkpoint, grad
from genesis.nn import Parameter
from genesis.nn import functional as F
from genesis.op import Context, Op, registry
from genesis.optim.flat import FlatBuffers

Leaves = dict[str, Any]


def whole(*shape: int, seed: int) -> Any:
    return genesis.tensor(np.random.default_rng(seed).integers(-3, 4, shape), dtype="float32")


def leaves() -> Leaves:
    """Weights of layers on 32 features: q, k, v and their biases lie next to each other, as does e."""
    shapes = {
        "q": (32, 32),
        "k": (32, 32),
        "v": (32, 32),
        "o": (32, 32),
        "s": (32,),
        "a": (32,),
        "b": (32,),
        "c": (32,),
    }
    found: Leaves = {n: Parameter(whole(*shape, seed=i)) for i, (n, shape) in enumerate(shapes.items())}
    found["frozen"] = whole(32, 32, seed=20)
    return found


def flat_leaves() -> tuple[Leaves, FlatBuffers]:
    found = leaves()
    return found, FlatBuffers([p for p in found.values() if p.requires_grad])


def x_of(seed: int = 30) -> Any:
    return whole(2, 3, 32, seed=seed)


SCENARIOS: dict[str, Callable[[Leaves], None]] = {}


def scenario(function: Callable[[Leaves], None]) -> Callable[[Leaves], None]:
    SCENARIOS[function.__name__] = function
    return function


def projected(p: Leaves, x: Any) -> Any:
    return F.packed_linear(x, [p["q"], p["k"], p["v"]], [p["a"], p["b"], p["c"]])


@scenario
def one_product(p: Leaves) -> None:
    F.linear(x_of(), p["q"], p["a"]).backward(whole(2, 3, 32, seed=31))


@scenario
def packed(p: Leaves) -> None:
    projected(p, x_of()).backward(whole(2, 3, 96, seed=31))


@scenario
def packed_with_a_frozen_weight(p: Leaves) -> None:
    F.packed_linear(x_of(), [p["q"], p["frozen"], p["v"]]).backward(whole(2, 3, 96, seed=31))


@scenario
def packed_with_one_weight_twice(p: Leaves) -> None:
    F.packed_linear(x_of(), [p["q"], p["q"], p["v"]]).backward(whole(2, 3, 96, seed=31))


@scenario
def packed_out_of_order(p: Leaves) -> None:
    F.packed_linear(x_of(), [p["v"], p["q"]], [p["b"], p["a"]]).backward(whole(2, 3, 64, seed=31))


@scenario
def a_second_gradient_is_added(p: Leaves) -> None:
    y = F.linear(x_of(), p["q"]) + F.linear(x_of(32), p["q"])
    y.backward(whole(2, 3, 32, seed=31))


@scenario
def gradients_of_ops_that_know_no_slots(p: Leaves) -> None:
    y = x_of() @ p["q"] + F.linear(x_of(32), p["q"]) + p["q"].sum() + x_of(33) @ p["q"]
    y.backward(whole(2, 3, 32, seed=31))


@scenario
def tied_weights(p: Leaves) -> None:
    hidden = F.embedding(genesis.tensor([[1, 5, 1], [31, 0, 2]], dtype="int64"), p["q"])
    F.linear(hidden, p["q"]).backward(whole(2, 3, 32, seed=31))


@scenario
def accumulation(p: Leaves) -> None:
    for seed in (31, 32, 33):
        projected(p, x_of(seed)).backward(whole(2, 3, 96, seed=seed))


@scenario
def accumulation_of_tied_weights(p: Leaves) -> None:
    for seed in (31, 32):
        y = F.linear(F.linear(x_of(seed), p["q"]), p["q"])
        y.backward(whole(2, 3, 32, seed=seed))


@scenario
def accumulation_of_some(p: Leaves) -> None:
    F.linear(x_of(), p["k"], p["b"]).backward(whole(2, 3, 32, seed=31))
    projected(p, x_of()).backward(whole(2, 3, 96, seed=31))


@scenario
def retained(p: Leaves) -> None:
    y = projected(p, x_of())
    y.backward(whole(2, 3, 96, seed=31), retain_graph=True)
    y.backward(whole(2, 3, 96, seed=32))


@scenario
def hooked(p: Leaves) -> None:
    seen: list[list[float]] = []
    p["q"].register_hook(lambda g: seen.append(g.sum().item()))
    p["k"].register_hook(lambda g: g * 2)
    for seed in (31, 32):
        projected(p, x_of(seed)).backward(whole(2, 3, 96, seed=seed))
    p["seen"] = genesis.tensor(seen)


@scenario
def post_hooked(p: Leaves) -> None:
    def use_up(leaf: Any) -> None:
        with genesis.no_grad():
            leaf.sub_(leaf.grad)
        leaf.grad = None

    p["q"].register_post_accumulate_grad_hook(use_up)
    for seed in (31, 32):
        projected(p, x_of(seed)).backward(whole(2, 3, 96, seed=seed))
    p["changed"] = p["q"].detach()


@scenario
def checkpointed(p: Leaves) -> None:
    checkpoint(lambda x: F.linear(projected(p, x)[..., :32], p["q"]), x_of()).backward(whole(2, 3, 32, seed=31))


@scenario
def residual_stream(p: Leaves) -> None:
    """x gets gradients from a norm, a product and the residual connection."""
    x = F.linear(x_of(), p["o"])
    y = F.linear(F.rms_norm(x, 32, p["s"], 0.0), p["q"], None, x)
    F.linear(y, p["o"], p["c"], y).backward(whole(2, 3, 32, seed=31))


@scenario
def fused_layer(p: Leaves) -> None:
    x = F.linear(x_of(), p["o"])
    y = F.norm_linear(x, p["s"], [p["q"]], [p["a"]], eps=1e-5)
    y = F.norm_mlp(y, p["s"], [p["q"], p["k"]], [p["a"], p["b"]], p["v"], p["c"], eps=1e-5, keep=False)
    F.norm_mlp(y, p["s"], [p["k"], p["o"]], [], p["v"], eps=1e-5).backward(whole(2, 3, 32, seed=31))


@scenario
def captured(p: Leaves) -> None:
    """grad() touches no leaf, and gives memory that later passes leave alone."""
    y = projected(p, x_of())
    found = grad(y, [p["q"], p["b"]], whole(2, 3, 96, seed=31))
    assert p["q"].grad is None
    one_product(p)
    p["found"], p["more"] = found


@scenario
def a_pass_inside_a_pass(p: Leaves) -> None:
    """A hook on an intermediate result runs another backward on the leaf that has a gradient underway."""

    def again(g: Any) -> None:
        with genesis.enable_grad():
            F.linear(x_of(34), p["q"]).backward(whole(2, 3, 32, seed=35))

    x = F.linear(x_of(), p["o"])
    x.register_hook(again)
    F.linear(x, p["q"]).backward(whole(2, 3, 32, seed=31))


def results(p: Leaves) -> dict[str, np.ndarray]:
    found = {f"{n}.grad": t.grad.numpy() for n, t in p.items() if getattr(t, "grad", None) is not None}
    return found | {n: t.numpy() for n, t in p.items() if not t.requires_grad}


@pytest.mark.parametrize("name", SCENARIOS)
def test_slots_change_no_bit(name: str) -> None:
    plain = leaves()
    SCENARIOS[name](plain)
    in_slots, buffers = flat_leaves()
    SCENARIOS[name](in_slots)
    expected, found = results(plain), results(in_slots)
    assert expected.keys() == found.keys()
    # Values that are no whole numbers show by a rounding in which products a sum was made.
    near = 1e-5 if name in ("fused_layer", "residual_stream") else 0.0
    for key, value in expected.items():
        assert np.abs(found[key] - value).max() <= near * np.abs(value).max(), key
    buffers.collect_gradients()
    for key, value in found.items():
        if key.endswith(".grad"):
            assert np.array_equal(in_slots[key.removesuffix(".grad")].grad.numpy(), value), key


@contextmanager
def copies() -> Iterator[list[str]]:
    """The ops that ran, by name."""
    from genesis.op import observe

    found: list[str] = []
    with observe(lambda op, inputs, outputs, attrs, seconds: found.append(op.name)):
        yield found


def test_gradients_are_written_where_they_stay() -> None:
    p, _ = flat_leaves()
    y, g = projected(p, x_of()), whole(2, 3, 96, seed=31)
    with copies() as ran:
        y.backward(g)
    assert ran == ["matmul", "sum_to_shape"]  # one product for three weights; nothing is copied
    y = projected(p, x_of())
    with copies() as ran:
        y.backward(g)
    assert ran == ["add_matmul", "sum_to_shape", "add"]
    assert p["q"].grad.array.storage is p["q"]._gradient_buffer.storage


def test_a_head_that_is_also_the_embedding_is_not_copied() -> None:
    p, _ = flat_leaves()
    ids = genesis.arange(6)
    log_probs = F.linear_token_log_probs(F.embedding(ids, p["q"]), p["q"], ids)
    with copies() as ran:
        log_probs.sum().backward()
    assert "copy" not in ran and ran[-2:] == ["linear_token_log_probs_backward", "embedding_add_"]
    assert p["q"].grad.array.storage is p["q"]._gradient_buffer.storage


def test_what_was_accumulated_is_added_in_the_same_op() -> None:
    p, _ = flat_leaves()
    x = whole(2, 3, 32, seed=30)
    x.requires_grad = True
    x = x * 1.0
    y = F.linear(F.rms_norm(x, 32, p["s"], 1e-5), p["q"], None, x)
    with copies() as ran:
        y.backward(whole(2, 3, 32, seed=31))
    assert ran[:3] == ["matmul", "matmul", "rms_norm_backward"]
    assert "add" not in ran


def test_a_vjp_works_outside_of_a_backward_pass() -> None:
    context = Context((None,), (None,), {}, (True,), (None,))
    assert context.gradient_slot(0) is None and context.take_accumulated(0) is None and not context.is_last


# --- Outputs made in a gradient slot ----------------------------------------------------------------------------------


@pytest.fixture
def head() -> Iterator[Op]:
    """y = Σ (x·w) over rows, with dw = x summed made along with it, as a fused loss does."""

    def reference(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, w: np.ndarray) -> None:
        out[0][...], out[1][...] = (x * w).sum(), x.sum(axis=0)

    def infer(x: Array, w: Array) -> tuple[Spec, Spec]:
        return Spec((), x.dtype), w.spec

    def vjp(ctx: Context, g: Array, _: None) -> tuple[Array | None, ...]:
        dw = ctx.outputs[1]
        so_far = ctx.take_accumulated(1)
        dw = registry["mul"](dw, g, out=dw if ctx.is_last else None)
        if so_far is None:
            return None, dw
        return None, registry["add"](so_far.array, dw, out=so_far.array if so_far.is_own else dw)

    op = Op("head", reference, infer, vjp, saves=("out",), auxiliary=(1,), gradient_outputs=((1, 1),))
    yield op
    del registry["head"]


def head_of(op: Op, w: Any, seed: int = 30) -> Any:
    return apply(op, whole(5, 32, seed=seed), w)[0]


def dw_of(seed: int = 30) -> np.ndarray:
    return np.asarray(whole(5, 32, seed=seed).numpy().sum(axis=0))


def test_an_output_is_made_in_the_slot(head: Op) -> None:
    p, _ = flat_leaves()
    loss = head_of(head, p["s"])
    assert np.array_equal(p["s"]._gradient_buffer.view_np(), dw_of())
    with copies() as ran:
        (loss * 2).backward()
    assert "copy" not in ran
    assert np.array_equal(p["s"].grad.numpy(), 2 * dw_of())
    assert p["s"].grad.array.storage is p["s"]._gradient_buffer.storage
    head_of(head, p["s"], 33).backward()  # accumulates: the slot is taken
    assert np.array_equal(p["s"].grad.numpy(), 2 * dw_of() + dw_of(33))


def test_a_forgotten_backward_keeps_nothing(head: Op) -> None:
    p, _ = flat_leaves()
    head_of(head, p["s"])
    loss = head_of(head, p["s"], 33)
    assert np.array_equal(p["s"]._gradient_buffer.view_np(), dw_of(33))
    loss.backward()
    assert np.array_equal(p["s"].grad.numpy(), dw_of(33))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_at_a_time(head: Op, order: tuple[int, int]) -> None:
    p, buffers = flat_leaves()
    losses = [head_of(head, p["s"]), head_of(head, p["s"], 33)]
    losses[order[0]].backward()
    assert np.array_equal(p["s"].grad.numpy(), dw_of((30, 33)[order[0]]))
    buffers.collect_gradients()
    p["s"].grad = None
    losses[order[1]].backward()
    assert np.array_equal(p["s"].grad.numpy(), dw_of((30, 33)[order[1]]))


def test_both_in_one_graph(head: Op) -> None:
    p, _ = flat_leaves()
    (head_of(head, p["s"]) + head_of(head, p["s"], 33) * 3).backward()
    assert np.array_equal(p["s"].grad.numpy(), dw_of() + 3 * dw_of(33))


def test_a_gradient_assigned_meanwhile_moves_what_is_in_its_slot(head: Op) -> None:
    p, buffers = flat_leaves()
    loss = head_of(head, p["s"])
    p["s"].grad = genesis.ones(32)
    buffers.collect_gradients()
    loss.backward()
    assert np.array_equal(p["s"].grad.numpy(), 1 + dw_of())


def test_another_backward_meanwhile_moves_it_too(head: Op) -> None:
    p, _ = flat_leaves()
    loss = head_of(head, p["s"])
    (p["s"] * 2).sum().backward()
    loss.backward()
    assert np.array_equal(p["s"].grad.numpy(), 2 + dw_of())


def test_retained_graphs_scale_once(head: Op) -> None:
    p, _ = flat_leaves()
    loss = head_of(head, p["s"]) * 2
    loss.backward(retain_graph=True)
    loss.backward()
    assert np.array_equal(p["s"].grad.numpy(), 4 * dw_of())


def test_grad_gives_memory_of_its_own(head: Op) -> None:
    p, _ = flat_leaves()
    (found,) = grad(head_of(head, p["s"]), [p["s"]])
    head_of(head, p["s"], 33).backward()
    assert np.array_equal(found.numpy(), dw_of())


def test_a_hook_sees_memory_of_its_own(head: Op) -> None:
    p, _ = flat_leaves()
    seen: list[Any] = []
    p["s"].register_hook(seen.append)
    for seed in (30, 33):
        head_of(head, p["s"], seed).backward()
        p["s"].grad = None
    assert np.array_equal(seen[0].numpy(), dw_of())


def test_in_a_checkpoint(head: Op) -> None:
    p, _ = flat_leaves()
    checkpoint(lambda x: apply(head, x, p["s"])[0], whole(5, 32, seed=30)).backward()
    assert np.array_equal(p["s"].grad.numpy(), dw_of())


def test_added_to_what_was_accumulated_before(head: Op) -> None:
    """The other use of the leaf comes later in recording, so its gradient is there first."""
    p, _ = flat_leaves()
    loss = head_of(head, p["s"])
    (loss + p["s"].sum()).backward()
    assert np.array_equal(p["s"].grad.numpy(), 1 + dw_of())


def test_without_gradients_nothing_is_leased(head: Op) -> None:
    p, _ = flat_leaves()
    before = p["s"]._gradient_buffer.view_np().copy()
    with genesis.no_grad():
        head_of(head, p["s"])
    assert np.array_equal(p["s"]._gradient_buffer.view_np(), before)


def test_a_vjp_that_breaks_its_promise_is_caught() -> None:
    def vjp(ctx: Context, g: Array) -> tuple[Array | None, ...]:
        ctx.take_accumulated(0)
        return (None,)

    op = Op("taker", lambda out, x: np.copyto(out, x), lambda x: x.spec, vjp)
    try:
        x = genesis.ones(3, requires_grad=True)
        y = x * 1.0
        with pytest.raises(AssertionError, match="took the gradient of input"):
            (apply(op, y) + y).sum().backward()
    finally:
        del registry["taker"]

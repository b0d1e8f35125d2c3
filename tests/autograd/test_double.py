"""Double backward: every op's gradient has a gradient, or backward refuses by the op's name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.autograd import Function, backward, grad, gradgradcheck
from genesis.autograd.function import once_differentiable
from genesis.errors import GradientError, UsageError
from genesis.nn import functional as F
from genesis.op import registry
from tests.autograd.scenarios import leaf
from tests.ops import conformance
from tests.ops.samples import all_rows

# Fused backward passes of models: their second derivative needs plain functions.
REFUSED = {
    "attention_packed",
    "digamma",
    "dora_factors",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_token_log_probs",
    "norm_mlp",
    "norm_rope",
}
SMALL = 12  # input elements; each costs two evaluations of the gradient


@functools.cache
def cases() -> dict[str, list[conformance.Variant]]:
    """The first small gradient samples of each op."""
    found: dict[str, list[conformance.Variant]] = {}
    for row in all_rows():
        op = registry.get(row.op)
        for v in conformance.variants(row, op) if op is not None and row.grads is not None else ():
            elements = sum(x.size for x in v.case.inputs if conformance.is_float(x))
            if v.check == "gradient" and 0 < elements <= SMALL and len(found.setdefault(row.op, [])) < 1:
                found[row.op].append(v)
    return found


def check(v: conformance.Variant) -> None:
    function, leaves = conformance._leaves(v)

    def differentiable(*values: Any) -> tuple[Any, ...]:
        return tuple(o for i, o in enumerate(function(*values)) if i not in v.op.auxiliary)

    gradgradcheck(differentiable, leaves, rtol=1e-4)


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.full)])
def test_every_gradient_has_a_gradient(most: int | None) -> None:
    assert len(cases()) > 80
    for name, variants in cases().items():
        for v in variants[:most]:
            if name not in REFUSED and "low_rank" not in v.case.attrs:
                check(v)


def test_a_fused_backward_pass_refuses_by_name() -> None:
    x, w = leaf(genesis, 1, 2).reshape(1, 2), genesis.randn(3, 2, dtype=genesis.float64)
    loss = F.linear_cross_entropy(x, w, genesis.tensor([1]))
    (first,) = grad(loss, x, create_graph=True)
    with pytest.raises(GradientError, match="linear_cross_entropy has no second derivative"):
        grad(first.sum(), x)


def test_powers_to_the_fourth_derivative() -> None:
    x = leaf(genesis, 2.0)
    y = x**5
    for expected in (80, 160, 240, 240):
        (y,) = grad(y, x, create_graph=True)
        assert y.item() == expected


def test_backward_with_create_graph_gives_differentiable_gradients() -> None:
    x, w = leaf(genesis, 1, 2), leaf(genesis, 3, 4)
    (x * x * w).sum().backward(create_graph=True)
    (x.grad * x.grad).sum().backward(inputs=[w])
    np.testing.assert_allclose(w.grad.detach().numpy(), [1 + 8 * 3, 4 + 8 * 4 * 4])


def test_a_gradient_penalty_trains_a_model() -> None:
    """The gradient of |dy/dx|² with respect to the weights, against differences."""
    genesis.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    x = genesis.randn(5, 3, dtype=genesis.float64, requires_grad=True)

    def penalty() -> Any:
        (slope,) = grad(model(x).sum(), x, create_graph=True)
        return (slope * slope).sum()

    weight = model[0].weight
    (found,) = grad(penalty(), weight)
    for place in ((0, 0), (3, 2)):
        ends = []
        for sign in (1e-6, -1e-6):
            with genesis.no_grad():
                weight[place] += sign
            ends.append(penalty().item())
            with genesis.no_grad():
                weight[place] -= sign
        assert found[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_through_its_formula(causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (genesis.tensor(rng.normal(size=(1, 2, 3, 2)), requires_grad=True) for _ in range(3))
    assert gradgradcheck(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), (q, k, v))


@pytest.mark.parametrize("window", [0, 2])
def test_attention_that_skips_keys_through_its_formula(window: int) -> None:
    """The last three tokens skip the second and the third; the formula has the gradients of the op."""
    rng = np.random.default_rng(0)
    q, k, v = inputs = [genesis.tensor(rng.normal(size=(1, 6, 1, 2)), requires_grad=True) for _ in range(3)]
    starts = genesis.tensor([[[0, 0, 0]] * 3 + [[0, 1, 3]] * 3])
    results = (F.attention(q, k, v, starts, window=window).square().sum() for _ in range(2))
    found = [grad(y, inputs, create_graph=by_formula) for y, by_formula in zip(results, (False, True), strict=True)]
    for one, other in zip(*found, strict=True):
        assert one.numpy() == pytest.approx(other.detach().numpy(), abs=1e-12)


def test_history_goes_through_views_and_in_place_changes() -> None:
    def function(x: Any) -> Any:
        y = x * x
        y[0].mul_(y[1])
        y[:, 1:] = x[:, :1] ** 3
        return y.transpose(0, 1).reshape(-1) * y.sum()

    assert gradgradcheck(function, genesis.tensor(np.arange(1.0, 5.0).reshape(2, 2), requires_grad=True))


def test_hooks_see_and_replace_recorded_gradients() -> None:
    x = leaf(genesis, 3.0)
    y = x * x
    y.register_hook(lambda g: g * x)
    (first,) = grad(y, x, create_graph=True)  # 2x·x
    assert first.requires_grad
    assert grad(first, x)[0].item() == 12


def test_functions_are_differentiated_twice_unless_they_refuse() -> None:
    class Exp(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.saved_tensors[0]

    class Once(Exp):
        backward = staticmethod(once_differentiable(Exp.backward))

    x = leaf(genesis, 0.5, -1)
    assert gradgradcheck(Exp.apply, x)
    (first,) = grad(Once.apply(x) * leaf(genesis, 1, 1), x, genesis.ones_like(x), create_graph=True)
    np.testing.assert_allclose(first.detach().numpy(), np.exp([0.5, -1]))
    with pytest.raises(GradientError, match="once_differentiable"):
        first.sum().backward()


def test_options_of_grad() -> None:
    x, other = leaf(genesis, 1, 2), leaf(genesis, 5)
    assert grad((x * x).sum(), [x, other], allow_unused=True)[1] is None
    assert grad((x * x).sum(), [x, other], materialize_grads=True)[1].tolist() == [0]
    with pytest.raises(GradientError, match="do not use"):
        grad((x * x).sum(), [x, other])
    for options in ({"is_grads_batched": True}, {"only_inputs": False}):
        with pytest.raises(UsageError):
            grad((x * x).sum(), x, **options)
    with pytest.raises(UsageError, match="materialize_grads"):
        grad(x.sum(), x, materialize_grads=True, allow_unused=False)
    backward([x.sum()], inputs=[x], grad_variables=[genesis.tensor(2.0, dtype=genesis.float64)])
    assert x.grad.tolist() == [2, 2]


def test_a_pass_that_is_not_recorded_has_no_history() -> None:
    x = leaf(genesis, 1, 2)
    (first,) = grad((x**3).sum(), x)
    assert not first.requires_grad
    y = (x**3).sum()
    y.backward()
    with pytest.raises(GradientError, match="second time"):
        y.backward()


def test_saved_tensors_are_packed_and_unpacked() -> None:
    x, packed = leaf(genesis, 1, 2), []

    def pack(tensor: Any) -> int:
        packed.append(tensor * 1)
        return len(packed) - 1

    with genesis.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        y = (x.exp() * x).sum()
    assert [t.tolist() for t in packed[1:]] == [np.exp([1, 2]).tolist(), [1, 2]]
    y.backward(create_graph=True)
    np.testing.assert_allclose(x.grad.detach().numpy(), np.exp([1, 2]) * [2, 3])
    with genesis.autograd.graph.save_on_cpu():
        (x * x).sum().backward(inputs=[x])
    (node, output), (other, _) = (x * genesis.ones(2)).grad_fn.next_functions
    assert (node is None, output, other) == (False, 0, None)


def _second_gradients(device: str) -> list[np.ndarray]:
    """A loss through many ops, its gradients, and the gradients of their squares."""
    rng = np.random.default_rng(0)
    x, w, b, e = (
        genesis.tensor(rng.normal(size=s).astype(np.float32)).to(device).requires_grad_()
        for s in ((2, 3, 4), (4, 4), (4,), (5, 4))
    )
    ids = genesis.tensor([[0, 0, 3], [1, 2, 2]]).to(device)
    h = F.layer_norm(F.gelu(F.linear(x + F.embedding(ids, e), w)), (4,), b, b)
    h = F.rms_norm(h, (4,), w[0]).reshape(2, 1, 3, 4)
    h = F.scaled_dot_product_attention(h, h, h, is_causal=True).reshape(6, 4)
    h = F.silu(h).softmax(-1) * h.std(0) + h[:, [0, 0, 1, 2]].cumsum(0)
    loss = F.cross_entropy(h, ids.reshape(-1)) + h.amax(1).prod() + h.logsumexp(0).sum()
    first = grad(loss, [x, w, b, e], create_graph=True)
    second = grad(sum((g * g).sum() for g in first), [x, w, b, e])
    return [t.detach().cpu().numpy() for t in (loss, *first, *second)]


def test_cuda_differentiates_twice_as_the_cpu_does() -> None:
    for on_cpu, on_cuda in zip(_second_gradients("cpu"), _second_gradients("cuda"), strict=True):
        np.testing.assert_allclose(on_cuda, on_cpu, rtol=1e-5, atol=1e-5 * np.abs(on_cpu).max())

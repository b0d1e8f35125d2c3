"""Modules called together give what they give one after the other: the same values, gradients, parameters, hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.nn import fused
from genesis.op import observe
from genesis.optim.flat import FlatBuffers


class Doubled(nn.Linear):
    """Another class in a layer's place, as an adapter is."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def parts(bias: bool = True) -> tuple[list[nn.Linear], nn.RMSNorm, nn.Linear]:
    genesis.manual_seed(3)
    layers = [nn.Linear(32, 64, bias=bias) for _ in range(2)]
    return layers, nn.RMSNorm(32, eps=1e-6), nn.Linear(64, 32, bias=bias)


def together(layers: list[nn.Linear], norm: nn.RMSNorm, down: nn.Linear, x: Any, recompute: bool) -> Any:
    return fused.gated_mlp(x, norm, layers, down, recompute)


def apart(layers: list[nn.Linear], norm: nn.RMSNorm, down: nn.Linear, x: Any) -> Any:
    normed = norm(x)
    packed = genesis.cat([layer(normed) for layer in layers], -1)
    return x + down(nn.functional.silu(packed[..., :64]) * packed[..., 64:])


def gradients(modules: list[nn.Module]) -> list[np.ndarray]:
    return [p.grad.numpy() for m in modules for p in m.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(bias: bool, is_flat: bool, recompute: bool) -> None:
    genesis.manual_seed(7)
    x, g = genesis.randn(2, 5, 32), genesis.randn(2, 5, 32)
    layers, norm, down = parts(bias)
    expected = apart(layers, norm, down, x)
    expected.backward(g)
    wanted = gradients([*layers, norm, down])
    layers, norm, down = parts(bias)
    if is_flat:
        FlatBuffers([p for m in (*layers, down) for p in m.parameters()])
    found = together(layers, norm, down, x, recompute)
    found.backward(g)
    np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients([*layers, norm, down]), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def names(function: Any) -> list[str]:
    ran: list[str] = []
    with observe(lambda op, inputs, outputs, attrs, seconds: ran.append(op.name)):
        function()
    return ran


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_the_same_to_the_bit_whatever_is_kept(bias: bool, is_flat: bool) -> None:
    genesis.manual_seed(7)
    x, g = genesis.randn(2, 5, 32, requires_grad=True), genesis.randn(2, 5, 32)
    found = []
    for recompute in (False, True):
        layers, norm, down = parts(bias)
        if is_flat:
            FlatBuffers([p for m in (*layers, down) for p in m.parameters()])
        x.grad = None
        together(layers, norm, down, x, recompute).backward(g)
        found.append([x.grad.numpy(), *gradients([*layers, norm, down])])
    for kept, made_again in zip(*found, strict=True):
        np.testing.assert_array_equal(kept, made_again)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("learns", ["x", "gate", "norm", "down"])
def test_gradients_where_one_part_alone_learns(learns: str, recompute: bool) -> None:
    genesis.manual_seed(7)
    x, g = genesis.randn(2, 5, 32), genesis.randn(2, 5, 32)

    def gradient(function: Any) -> np.ndarray:
        layers, norm, down = parts()
        chosen = {"x": x, "gate": layers[0].weight, "norm": norm.weight, "down": down.weight}[learns]
        for p in (x, *(p for m in (*layers, norm, down) for p in m.parameters())):
            p.requires_grad = p is chosen
        chosen.grad = None
        function(layers, norm, down, x).backward(g)
        return np.asarray(chosen.grad.numpy())

    found = gradient(lambda layers, norm, down, x: together(layers, norm, down, x, recompute))
    np.testing.assert_allclose(found, gradient(apart), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plain_mlp_is_one_op(recompute: bool) -> None:
    layers, norm, down = parts()
    x = genesis.randn(5, 32)
    assert names(lambda: together(layers, norm, down, x, recompute)) == ["norm_mlp"]


@pytest.mark.parametrize("recompute, expected", [(False, ["rms_norm", "packed_linear"]), (True, ["norm_linear"])])
def test_a_norm_that_is_made_again_is_one_op_with_its_products(recompute: bool, expected: list[str]) -> None:
    layers, norm, _ = parts()
    x = genesis.randn(5, 32)
    assert names(lambda: fused.packed_linear(x, layers, norm, recompute)) == expected


def test_what_a_plain_mlp_keeps() -> None:
    """Of the norm's and SwiGLU's results nothing where they are recomputed."""
    kept = []
    for recompute in (False, True):
        layers, norm, down = parts()
        context = together(layers, norm, down, genesis.randn(5, 32), recompute).node.saved.context
        kept.append([None if o is None else o.shape for o in context.outputs])
    assert kept == [[None, (5,), (5, 128), (5, 32), (5, 64)], [None, (5,), (5, 128)]]


def test_weights_next_to_each_other_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _, _ = parts()
    FlatBuffers([*(la.weight for la in layers), *(la.bias for la in layers if la.bias is not None)])
    calls: list[tuple[int, ...]] = []
    product = np.matmul

    def spy(x: np.ndarray, y: np.ndarray, **rest: Any) -> np.ndarray:
        calls.append(y.shape)
        return np.asarray(product(x, y, **rest))

    monkeypatch.setattr("genesis.ops.linalg.np.matmul", spy)
    fused.packed_linear(genesis.randn(5, 32), layers)
    assert calls == [(32, 128)]


@pytest.mark.parametrize("which", ["layer", "norm", "down"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_hook_sees_its_module_called(which: str, recompute: bool) -> None:
    layers, norm, down = parts()
    watched = {"layer": layers[1], "norm": norm, "down": down}[which]
    seen: list[tuple[int, ...]] = []
    watched.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    x = genesis.randn(5, 32)
    found = together(layers, norm, down, x, recompute)
    assert len(seen) == 1
    np.testing.assert_allclose(
        found.detach().numpy(), apart(layers, norm, down, x).detach().numpy(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_another_class_in_a_layers_place_is_called(recompute: bool) -> None:
    layers, norm, down = parts()
    layers[0].__class__ = Doubled
    down.__class__ = Doubled
    x = genesis.randn(5, 32)
    found = together(layers, norm, down, x, recompute).detach().numpy()
    np.testing.assert_allclose(found, apart(layers, norm, down, x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_layers_with_and_without_bias_are_called_one_by_one() -> None:
    layers = [nn.Linear(8, 4), nn.Linear(8, 3, bias=False)]
    x = genesis.randn(5, 8)
    found = fused.packed_linear(x, layers).detach().numpy()
    np.testing.assert_array_equal(found[:, 4:], layers[1](x).detach().numpy())


def head_norms(eps: tuple[float, float] = (1e-6, 1e-6)) -> tuple[nn.RMSNorm, nn.RMSNorm]:
    norms = [nn.RMSNorm(8, eps=e) for e in eps]
    for i, norm in enumerate(norms):
        assert norm.weight is not None
        norm.weight.data.copy_(genesis.arange(8) * 0.1 + 0.5 + i)
    return norms[0], norms[1]


def step_by_modules(qkv: Any, cache: Any, length: int, tables: Any, norms: Any) -> Any:
    """Attention of one token, module by module, over copies of what the cache holds."""
    q, k, v = qkv.unsqueeze(1).split([4, 2, 2], 2)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    if tables is not None:
        cos, sin = (t[length : length + 1] for t in tables)
        q, k = nn.functional.rope(q, cos, sin), nn.functional.rope(k, cos, sin)
    keys, values = (genesis.cat([x[:, :, :length].transpose(1, 2), y], 1) for x, y in zip(cache, (k, v), strict=True))
    return nn.functional.attention(q, keys, values, scale=0.4, causal=True)[:, 0]


@pytest.mark.parametrize("norms", [None, "plain", "hook", "other eps"])
@pytest.mark.parametrize("rotates", [False, True])
def test_a_step_over_a_cache(norms: str | None, rotates: bool) -> None:
    genesis.manual_seed(5)
    qkv, cache = genesis.randn(2, 8, 8), genesis.randn(2, 2, 2, 9, 8)
    angles = genesis.randn(9, 4)
    tables = (angles.cos(), angles.sin()) if rotates else None
    made = None if norms is None else head_norms((1e-6, 0.5) if norms == "other eps" else (1e-6, 1e-6))
    wanted = step_by_modules(qkv, cache, 6, tables, made)
    called: list[int] = []
    if made is not None and norms == "hook":
        made[1].register_forward_hook(lambda *args: called.append(1))
    with genesis.no_grad():
        found = fused.attention_step(qkv, cache, genesis.tensor([6, 6]), tables, made, scale=0.4)
    np.testing.assert_allclose(found.numpy(), wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert len(called) == (norms == "hook")


def test_a_step_of_plain_norms_is_one_op() -> None:
    names: list[str] = []
    angles = genesis.randn(9, 4)
    inputs = (genesis.randn(2, 8, 8), genesis.randn(2, 2, 2, 9, 8), genesis.tensor([6, 9]), (angles, angles))
    with genesis.no_grad(), observe(lambda op, *rest: names.append(op.name)):
        found = fused.attention_step(*inputs, head_norms(), genesis.tensor([1, 1]), scale=0.4)
    assert names[-1:] == ["attention_step"]
    assert names.count("rms_norm") == names.count("rope") == 0
    assert not found[1].numpy().any()

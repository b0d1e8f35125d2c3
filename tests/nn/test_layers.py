"""Layers: what they compute is tested with the functions; here are their parameters, modes and settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import genesis.nn as nn
from genesis.autograd import no_grad
from genesis.backend.cpu import CpuBackend
from genesis.dtypes import DType, bfloat16, float32, float64
from genesis.errors import GradientError, ShapeError, UsageError
from genesis.functions.create import ones, tensor
from genesis.functions.random import randn
from genesis.nn import functional as F
from genesis.random import Generator, manual_seed


def test_linear() -> None:
    manual_seed(0)
    layer = nn.Linear(100, 30)
    assert layer.weight.shape == (30, 100) and layer.bias.shape == (30,)
    values = layer.weight.detach().numpy()
    assert np.abs(values).max() <= 0.1 and values.std() == pytest.approx(0.1 / math.sqrt(3), rel=0.05)
    x = randn(2, 5, 100)
    expected = x.numpy() @ values.T + layer.bias.detach().numpy()
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, atol=1e-5)
    bare = nn.Linear(3, 2, bias=False, dtype="float64")
    assert bare.bias is None and bare.weight.dtype.name == "float64" and "bias=False" in repr(bare)
    assert nn.Linear(0, 2)(randn(3, 0)).shape == (3, 2)
    manual_seed(0)
    np.testing.assert_array_equal(nn.Linear(100, 30).weight.detach().numpy(), values)


def test_embedding() -> None:
    manual_seed(0)
    layer = nn.Embedding(50, 40, padding_idx=-1)
    assert layer.weight.detach().numpy()[:-1].std() == pytest.approx(1, rel=0.05)
    assert (layer.weight.detach().numpy()[49] == 0).all() and layer.padding_idx == 49
    ids = tensor([[1, 49], [3, 1]])
    found = layer(ids)
    assert found.shape == (2, 2, 40)
    found.sum().backward()
    assert layer.weight.grad.numpy().sum(1).tolist() == [{1: 80.0, 3: 40.0}.get(i, 0.0) for i in range(50)]
    assert "padding_idx=49" in repr(layer)
    with pytest.raises(ShapeError, match="padding_idx 50"):
        nn.Embedding(50, 4, padding_idx=50)


def test_norms() -> None:
    x = randn(3, 8)
    rms, layer = nn.RMSNorm(8, eps=1e-6), nn.LayerNorm(8)
    assert rms.weight.tolist() == [1.0] * 8 and layer.bias.tolist() == [0.0] * 8
    np.testing.assert_allclose((rms(x).detach().numpy() ** 2).mean(1), 1, atol=1e-4)
    np.testing.assert_allclose(layer(x).detach().numpy().mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(layer(x).detach().numpy().var(1), 1, atol=1e-3)
    assert list(nn.RMSNorm(8, elementwise_affine=False).parameters()) == []
    assert list(nn.LayerNorm(8, elementwise_affine=False).parameters()) == []
    assert [n for n, _ in nn.LayerNorm((8,), bias=False).named_parameters()] == ["weight"]
    np.testing.assert_allclose(nn.RMSNorm(8, elementwise_affine=False)(x).numpy(), nn.RMSNorm(8)(x).detach().numpy())
    np.testing.assert_allclose(nn.LayerNorm(8, bias=False)(x).detach().numpy(), layer(x).detach().numpy())
    assert "(8,), eps=1e-06" in repr(rms)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_default_eps_of_rms_norm_is_that_of_the_type_it_computes_in(dtype: str) -> None:
    x = tensor([[1e-3, 2e-3, -1e-3, 3e-3]], dtype=dtype)
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean() + eps)
    found = F.rms_norm(x, (4,)).double().numpy()
    np.testing.assert_allclose(found, expected, rtol=2**-8 if dtype == "bfloat16" else 1e-3)


def test_norms_over_several_dimensions() -> None:
    x = randn(4, 2, 8)
    values = x.numpy().astype(np.float64)
    layer, rms = nn.LayerNorm((2, 8)), nn.RMSNorm((2, 8), eps=1e-6)
    assert layer.weight.shape == layer.bias.shape == rms.weight.shape == (2, 8)
    with no_grad():
        for parameter in (layer.weight, layer.bias, rms.weight):
            parameter.copy_(randn(2, 8))
    weight, bias, scale = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.bias, rms.weight))
    mean, var = values.mean((1, 2), keepdims=True), values.var((1, 2), keepdims=True)
    wanted = (values - mean) / np.sqrt(var + 1e-5) * weight + bias
    np.testing.assert_allclose(layer(x).detach().numpy(), wanted, rtol=1e-5, atol=1e-5)
    wanted = values / np.sqrt((values**2).mean((1, 2), keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(rms(x).detach().numpy(), wanted, rtol=1e-5, atol=1e-5)
    layer(x).sum().backward()
    np.testing.assert_allclose(layer.weight.grad.numpy(), ((values - mean) / np.sqrt(var + 1e-5)).sum(0), atol=1e-4)
    assert layer.bias.grad.tolist() == [[4.0] * 8] * 2
    with pytest.raises(ShapeError, match=r"layer_norm over \(2, 8\) .*weight or bias of shape \(16,\)"):
        nn.functional.layer_norm(x, (2, 8), randn(16))


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.ReLU(), F.relu),
        (nn.SiLU(), F.silu),
        (nn.GELU(), F.gelu),
        (nn.GELU("tanh"), lambda x: F.gelu(x, "tanh")),
        (nn.Sigmoid(), F.sigmoid),
        (nn.Tanh(), F.tanh),
        (nn.Identity(), lambda x: x),
    ],
)
def test_activations_are_their_functions(module: nn.Module, function: Any) -> None:
    x = randn(3, 4)
    np.testing.assert_array_equal(module(x).numpy(), function(x).numpy())


def test_swiglu() -> None:
    gate, up = randn(3, 4), randn(3, 4)
    np.testing.assert_allclose(nn.SwiGLU()(gate, up).numpy(), (F.silu(gate) * up).numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [bfloat16, float32, float64], ids=str)
def test_a_norm_with_an_offset_multiplies_by_the_weight_that_it_has_now(dtype: DType) -> None:
    norm, x = nn.RMSNorm(8, eps=1e-6, offset=1.0, dtype=dtype), randn(3, 8).to(dtype)
    assert (norm.weight.detach().numpy() == 0).all()
    wide = float64 if dtype is float64 else float32
    for value in (0.0, 0.25, -0.5):
        with no_grad():
            norm.weight.fill_(value)
        y = norm(x)
        expected = F.rms_norm(x.to(wide), 8, (norm.weight.detach() + 0).to(wide) + 1, 1e-6).to(dtype)
        with no_grad():
            assert norm.scale() is norm.scale()  # made once
            for found in (y.detach(), norm(x)):
                assert found.dtype is dtype and found.numpy().tobytes() == expected.numpy().tobytes()
        y.sum().backward()
    assert norm.weight.grad.dtype is dtype and np.abs(norm.weight.grad.float().numpy()).max() > 0
    assert repr(norm) == "RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=1.0)"


def test_a_scale_made_within_a_graph_is_the_graphs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.RMSNorm(8, offset=1.0)
    with no_grad():
        monkeypatch.setattr(CpuBackend, "is_capturing", True)
        first = norm.scale()
        monkeypatch.undo()
        assert norm.scale() is not first
        kept = norm.scale()
        monkeypatch.setattr(CpuBackend, "is_capturing", True)
        assert norm.scale() is kept


def test_dropout_in_training_and_out() -> None:
    x = ones(20_000)
    layer = nn.Dropout(0.3, generator=Generator(1))
    found = layer(x).numpy()
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.7)}
    assert found.mean() == pytest.approx(1, abs=5 * math.sqrt(0.3 / 0.7 / 20_000))
    np.testing.assert_array_equal(nn.Dropout(0.3, generator=Generator(1))(x).numpy(), found)
    assert not np.array_equal(layer(x).numpy(), found)
    assert layer.eval()(x) is x
    with pytest.raises(UsageError, match=r"1\.5"):
        nn.Dropout(1.5)


def test_losses_are_their_functions() -> None:
    x, labels, target = randn(4, 5), tensor([1, 0, -100, 4]), randn(4, 5)
    chance, goal = F.sigmoid(x), (target > 0).float()
    weight, classes = tensor([2.0]), tensor([0.5, 1.0, 2.0, 0.0, 3.0])
    pairs = [
        (nn.CrossEntropyLoss()(x, labels), F.cross_entropy(x, labels)),
        (
            nn.CrossEntropyLoss(ignore_index=0, reduction="sum", label_smoothing=0.2, z_loss=0.1)(x, labels.abs() % 5),
            F.cross_entropy(x, labels.abs() % 5, ignore_index=0, reduction="sum", label_smoothing=0.2, z_loss=0.1),
        ),
        (nn.MSELoss(reduction="sum")(x, target), F.mse_loss(x, target, reduction="sum")),
        (nn.BCELoss()(chance, goal), F.binary_cross_entropy(chance, goal)),
        (nn.BCELoss(weight)(chance, goal), F.binary_cross_entropy(chance, goal, weight)),
        (nn.BCEWithLogitsLoss(weight)(x, goal), F.binary_cross_entropy_with_logits(x, goal, weight)),
        (nn.CrossEntropyLoss(classes)(x, labels), F.cross_entropy(x, labels, classes)),
        (nn.CrossEntropyLoss(classes, False)(x, labels), F.cross_entropy(x, labels, classes, reduction="sum")),
        (
            nn.BCEWithLogitsLoss(pos_weight=weight)(x, goal),
            F.binary_cross_entropy_with_logits(x, goal, pos_weight=weight),
        ),
    ]
    for found, expected in pairs:
        assert found.item() == expected.item() and math.isfinite(found.item()) and found.item() != 0
    assert nn.BCEWithLogitsLoss(pos_weight=weight).double().pos_weight.dtype.name == "float64"
    assert repr(nn.MSELoss(reduction="sum")) == "MSELoss()"


# --- Attention --------------------------------------------------------------------------------------------------------


def attend(**settings: Any) -> nn.Attention:
    manual_seed(3)
    return nn.Attention(12, 4, 2, head_dim=6, dtype="float64", **settings)


def test_attention_is_built_of_its_functions() -> None:
    layer = attend()
    x = randn(2, 5, 12, dtype="float64")
    q, k, v = (p(x).reshape(2, 5, -1, 6) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    cos, sin = F.rope_table(tensor(list(range(5))), 6)
    expected = layer.o_proj(F.attention(F.rope(q, cos, sin), F.rope(k, cos, sin), v).reshape(2, 5, 24))
    np.testing.assert_allclose(layer(x).detach().numpy(), expected.detach().numpy(), atol=1e-12)
    assert [tuple(p.shape) for p in layer.parameters()] == [(24, 12), (12, 12), (12, 12), (12, 24)]
    assert "num_kv_heads=2" in repr(layer)


def test_attention_in_pieces_with_a_cache_is_attention_at_once() -> None:
    layer = attend(window=4)
    x = randn(2, 9, 12, dtype="float64")
    with no_grad():
        whole = layer(x).numpy()
        cache = nn.KVCache()
        for _ in range(2):
            parts = [layer(x[:, a:b], cache=cache).numpy() for a, b in ((0, 3), (3, 4), (4, 8), (8, 9))]
            np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-12)
            assert cache.length == 9
            cache.reset()
        assert layer(x[:1], cache=cache).shape == (1, 9, 12)  # another batch after a reset
        with pytest.raises(ShapeError, match="reset"):
            layer(x, cache=cache)
    with pytest.raises(GradientError, match="no_grad"):
        layer(x, cache=nn.KVCache())


def test_documents_in_one_row_are_as_if_alone() -> None:
    layer = attend()
    a, b = randn(1, 3, 12, dtype="float64"), randn(1, 4, 12, dtype="float64")
    packed = tensor(np.concatenate([a.numpy(), b.numpy()], 1))
    positions, starts = tensor([[0, 1, 2, 0, 1, 2, 3]]), tensor([[0, 0, 0, 3, 3, 3, 3]])
    found = layer(packed, positions, starts).detach().numpy()
    np.testing.assert_allclose(found[:, :3], layer(a).detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(found[:, 3:], layer(b).detach().numpy(), atol=1e-12)


def test_attention_with_a_mask_and_without_rotation() -> None:
    layer = attend(rope_theta=None)
    x = randn(1, 5, 12, dtype="float64")
    causal = tensor(np.tril(np.ones((5, 5), bool)))
    np.testing.assert_allclose(layer(x, mask=causal).detach().numpy(), layer(x).detach().numpy(), atol=1e-12)
    assert layer.rope is None
    with pytest.raises(ShapeError, match="evenly"):
        nn.Attention(12, 4, 3)
    with pytest.raises(ShapeError, match="size 5"):
        nn.RoPE(5)


def test_attention_trains() -> None:
    layer = attend()
    x = randn(2, 4, 12, dtype="float64").requires_grad_()
    layer(x).sum().backward()
    assert all(p.grad is not None and np.abs(p.grad.numpy()).max() > 0 for p in layer.parameters())
    assert x.grad is not None

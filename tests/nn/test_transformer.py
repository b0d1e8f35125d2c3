"""Attention and transformer modules against the formula in numpy, and wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.nn import functional as F

T, S, B, E, H = 3, 4, 2, 6, 2
HIDDEN = np.triu(np.ones((T, S), dtype=bool), 2)
PADDED = np.array([[False] * S, [False, False, True, True]])


def attended(m: nn.MultiheadAttention, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Attention of float64 inputs [T, B, E] and [S, B, E], with a mask [B, H, T, S] to add."""
    p = {name: value.numpy() for name, value in m.state_dict().items()}
    parts = zip((q, k, v), np.split(p["in_proj_weight"], 3), np.split(p["in_proj_bias"], 3), strict=True)
    heads = [(x @ w.T + b).reshape(len(x), B, H, E // H).transpose(1, 2, 0, 3) for x, w, b in parts]
    scores = heads[0] @ heads[1].swapaxes(-1, -2) / np.sqrt(E // H) + mask
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y: np.ndarray = (weights @ heads[2]).transpose(2, 0, 1, 3).reshape(len(q), B, E)
    return y @ p["out_proj.weight"].T + p["out_proj.bias"]


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((T, B, E)), rng.standard_normal((S, B, E)), rng.standard_normal((S, B, E))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("masks", [(), ("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")])
def test_attention_is_the_formula(masks: tuple[str, ...], floats: bool) -> None:
    m = nn.MultiheadAttention(E, H, dtype=genesis.float64)
    given: dict[str, Any] = {"attn_mask": HIDDEN, "key_padding_mask": PADDED}
    if floats:
        given = {name: np.where(mask, -0.7, 0.3) for name, mask in given.items()}
    added = {name: mask if floats else np.where(mask, -np.inf, 0.0) for name, mask in given.items() if name in masks}
    total = added.get("attn_mask", np.zeros((T, S))) + added.get("key_padding_mask", np.zeros((B, S)))[:, None, None]
    expected = attended(m, *inputs(), np.broadcast_to(total, (B, H, T, S)))
    tensors = [genesis.tensor(x) for x in inputs()]
    how = {name: genesis.tensor(given[name]) for name in masks}
    y, weights = m(*tensors, **how)
    assert weights.shape == (B, T, S)
    assert np.allclose(y.detach().numpy(), expected, atol=1e-12)
    assert np.allclose(m(*tensors, need_weights=False, **how)[0].detach().numpy(), expected, atol=1e-12)
    m.batch_first = True  # the first sequence alone, without a batch
    if "key_padding_mask" in how:
        how["key_padding_mask"] = how["key_padding_mask"][0]
    assert np.allclose(m(*(x[:, 0] for x in tensors), **how)[0].detach().numpy(), expected[:, 0], atol=1e-12)


def test_the_hint_of_a_causal_mask_changes_nothing() -> None:
    x, mask = genesis.randn(5, 2, E), nn.Transformer.generate_square_subsequent_mask(5)
    m = nn.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, kdim=E, vdim=E)
    plain = nn.MultiheadAttention(E, H)
    hinted, masked = (plain(x, x, x, attn_mask=mask, need_weights=False, is_causal=c)[0] for c in (True, False))
    assert genesis.allclose(hinted, masked, atol=1e-6)
    assert m(x, x, x, average_attn_weights=False)[1].shape == (2, H, 5, 7)
    layer = nn.TransformerEncoderLayer(E, H, 8, 0.0)
    stack = nn.TransformerEncoder(layer, 2)
    found = [stack(x, mask), stack(x, mask, is_causal=True), stack(x, mask == -np.inf), stack(x, mask, is_causal=False)]
    assert all(genesis.allclose(y, found[0], atol=1e-6) for y in found)
    assert stack.layers[0].linear1.weight is not stack.layers[1].linear1.weight


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_is_its_parts(norm_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(E, H, 8, 0.0, nn.GELU(), norm_first=norm_first, dtype=genesis.float64)
    tgt, memory = genesis.tensor(inputs()[0]), genesis.tensor(inputs()[1])
    x = tgt
    for norm, part in (
        (layer.norm1, lambda x: layer.self_attn(x, x, x)[0]),
        (layer.norm2, lambda x: layer.multihead_attn(x, memory, memory)[0]),
        (layer.norm3, lambda x: layer.linear2(F.gelu(layer.linear1(x)))),
    ):
        x = x + part(norm(x)) if norm_first else norm(x + part(x))
    assert genesis.allclose(layer(tgt, memory), x, atol=1e-12)
    copied = nn.TransformerDecoder(layer, 1)
    assert isinstance(copied.layers[0].activation, nn.GELU)
    assert genesis.allclose(copied(tgt, memory), x, atol=1e-12)


def test_wrong_arguments_of_attention() -> None:
    m, x = nn.MultiheadAttention(E, H), genesis.ones(T, B, E)
    for error, how in (
        (ShapeError, {"attn_mask": genesis.ones(T, T + 1)}),
        (ShapeError, {"key_padding_mask": genesis.ones(B, T + 1)}),
        (DTypeError, {"key_padding_mask": genesis.ones(B, T, dtype=genesis.int64)}),
        (UsageError, {"is_causal": True}),
    ):
        with pytest.raises(error):
            m(x, x, x, **how)
    with pytest.raises(ShapeError):
        m(x, x[:, :1], x[:, :1])
    with pytest.raises(UsageError):
        nn.MultiheadAttention(5, 2)
    with pytest.raises(UsageError):
        nn.TransformerEncoderLayer(E, H, activation="tanh")
    with pytest.raises(ShapeError):
        nn.Transformer(E, H, 1, 1, 8)(genesis.ones(T, 1, E), x)


def test_norms_are_reset() -> None:
    for norm, start in ((nn.LayerNorm(2), 1.0), (nn.RMSNorm(2, offset=1.0), 0.0)):
        with genesis.no_grad():
            norm.weight.fill_(5)
        norm.reset_parameters()
        assert norm.weight.tolist() == [start, start]


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.1), nn.ReLU()]),
         "ModuleList(\n  (0-1): 2 x Dropout(p=0.1, inplace=False)\n  (2): ReLU()\n)"),
        (nn.LayerNorm(2, bias=False), "LayerNorm((2,), eps=1e-05, elementwise_affine=True, bias=False)"),
        (nn.Embedding(3, 2, 0, max_norm=1.0), "Embedding(3, 2, padding_idx=0, max_norm=1.0)"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (nn.Hardshrink(), "Hardshrink(0.5)"),
        (nn.RNNCell(2, 3, nonlinearity="relu"), "RNNCell(2, 3, nonlinearity=relu)"),
    ],
)  # fmt: skip
def test_modules_show_what_torch_shows(module: nn.Module, shown: str) -> None:
    assert repr(module) == shown

"""genesis.nn.functional against torch's results and gradients, and against formulas where torch has no such one."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from genesis import nn
from genesis.autograd import no_grad
from genesis.errors import ConfigError, DTypeError, ShapeError, UsageError
from genesis.functions.create import tensor
from genesis.functions.random import randn
from genesis.nn import functional as F
from genesis.tensor import Tensor
from tests.autograd.scenarios import gradcheck
from tests.nn.cases import FIXTURE, Call, calls


@pytest.fixture(scope="module")
def reference() -> Any:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        return dict(stored)


def as_tensor(value: Any, trained: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return tensor(value, requires_grad=trained and value.dtype == np.float64)


@pytest.mark.parametrize("call", calls(), ids=lambda c: c.name)
def test_values_and_gradients_are_torchs(call: Call, reference: Any) -> None:
    args = [as_tensor(a, True) for a in call.args]
    kwargs = {k: as_tensor(v, False) for k, v in call.kwargs.items()}
    result = getattr(F, call.function)(*args, **kwargs)
    np.testing.assert_allclose(result.detach().numpy(), reference[f"{call.name}/result"], rtol=1e-12, atol=1e-13)
    weights = np.cos(np.arange(result.numel())).reshape(result.shape)
    (result * tensor(weights)).sum().backward()
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.requires_grad:
            np.testing.assert_allclose(value.grad.numpy(), reference[f"{call.name}/grad{i}"], rtol=1e-11, atol=1e-12)


def test_every_array_of_the_fixture_is_used(reference: Any) -> None:
    assert {k.split("/")[0] for k in reference} == {c.name for c in calls()}
    assert sum("/grad" in k for k in reference) > len(calls())


# --- Losses -----------------------------------------------------------------------------------------------------------


def test_z_loss_is_the_square_of_the_log_normalizer() -> None:
    x = np.random.default_rng(0).standard_normal((4, 7))
    labels = tensor([1, 2, -100, 0])
    plain = F.cross_entropy(tensor(x), labels, reduction="none").numpy()
    with_z = F.cross_entropy(tensor(x), labels, reduction="none", z_loss=0.5).numpy()
    normalizer = np.log(np.exp(x).sum(1))
    np.testing.assert_allclose(with_z - plain, 0.5 * normalizer**2 * [1, 1, 0, 1], atol=1e-12)


def test_no_targets_is_nan_and_never_zero() -> None:
    nothing = tensor([-100, -100])
    assert math.isnan(F.cross_entropy(randn(2, 5), nothing).item())
    assert math.isnan(F.linear_cross_entropy(randn(2, 3), randn(5, 3), nothing).item())
    assert F.cross_entropy(randn(2, 5), nothing, reduction="sum").item() == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_is_the_composition(reduction: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (tensor(rng.standard_normal(s), requires_grad=True) for s in ((2, 3, 4), (9, 4)))
    labels = tensor([[1, -100, 8], [0, 3, 3]])
    fused = F.linear_cross_entropy(x, w, labels, reduction=reduction)
    (fused * 3).backward()
    grads = [x.grad.numpy().copy(), w.grad.numpy().copy()]
    x.grad = w.grad = None
    composed = F.cross_entropy(F.linear(x, w).reshape(-1, 9), labels.reshape(-1), reduction=reduction)
    (composed * 3).backward()
    assert fused.item() == pytest.approx(composed.item(), rel=1e-12)
    np.testing.assert_allclose(grads[0], x.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(grads[1], w.grad.numpy(), atol=1e-12)
    with no_grad():
        assert F.linear_cross_entropy(x, w, labels, reduction=reduction).item() == fused.item()


@pytest.mark.parametrize("count", [None, 5, "tensor"])
def test_linear_cross_entropy_of_the_next_token(count: int | str | None) -> None:
    """Each position is scored on the label after it, the last one on none."""
    rng = np.random.default_rng(1)
    x, w = (tensor(rng.standard_normal(s), requires_grad=True) for s in ((2, 4, 3), (7, 3)))
    labels = rng.integers(0, 7, (2, 4))
    labels[1, 2] = -100
    number = tensor(5) if count == "tensor" else count
    found = F.linear_cross_entropy(x, w, tensor(labels), shift=1, num_targets=number)
    found.backward()
    grads = [x.grad.numpy().copy(), w.grad.numpy().copy()]
    x.grad = w.grad = None
    logits = F.linear(x[:, :-1], w).reshape(-1, 7)
    total = F.cross_entropy(logits, tensor(labels[:, 1:].reshape(-1)), reduction="sum")  # of 5 targets
    (total / 5).backward()
    assert found.item() == pytest.approx(total.item() / 5, rel=1e-12)
    np.testing.assert_allclose(grads[0], x.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(grads[1], w.grad.numpy(), atol=1e-12)


def test_linear_cross_entropy_with_one_side_frozen() -> None:
    rng = np.random.default_rng(0)
    x, w = tensor(rng.standard_normal((3, 4)), requires_grad=True), tensor(rng.standard_normal((9, 4)))
    labels = tensor([1, 8, 0])
    assert gradcheck(lambda a: F.linear_cross_entropy(a, w, labels), [x])
    x.requires_grad_(False)
    w.requires_grad_()
    assert gradcheck(lambda b: F.linear_cross_entropy(x, b, labels), [w])


def test_binary_cross_entropy_at_the_ends() -> None:
    """Logs stop at -100, as in torch; a certain right answer costs nothing."""
    p, t = tensor([0.0, 1.0, 0.0, 1.0]), tensor([0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(F.binary_cross_entropy(p, t, reduction="none").numpy(), [0, 0, 100, 100])
    x = tensor([1e4, -1e4])
    np.testing.assert_allclose(
        F.binary_cross_entropy_with_logits(x, tensor([1.0, 1.0]), reduction="none").numpy(), [0, 1e4]
    )


def test_gradients_of_binary_cross_entropy_at_the_ends() -> None:
    """(p - t) / max(p·(1-p), 1e-12), as in torch: 0 for a certain right answer, finite for a wrong one."""
    p, t = tensor([0.0, 1.0, 0.0, 1.0, 0.25], requires_grad=True), tensor([0.0, 1.0, 1.0, 0.0, 1.0], requires_grad=True)
    F.binary_cross_entropy(p, t, reduction="sum").backward()
    np.testing.assert_allclose(p.grad.numpy(), [0, 0, -1e12, 1e12, -4], rtol=1e-6)
    np.testing.assert_allclose(t.grad.numpy(), [100, -100, 100, -100, math.log(3)], rtol=1e-6)


@pytest.mark.parametrize("pos_weight", [None, 3.0])
def test_the_gradient_of_a_logit_of_zero(pos_weight: float | None) -> None:
    """σ(0) - t: what a head that starts at zero learns from."""
    x, t = tensor([0.0, -0.0, 0.0], requires_grad=True), tensor([0.0, 1.0, 0.25])
    weight = None if pos_weight is None else tensor(pos_weight)
    F.binary_cross_entropy_with_logits(x, t, reduction="sum", pos_weight=weight).backward()
    w = 1.0 if pos_weight is None else pos_weight
    np.testing.assert_allclose(x.grad.numpy(), 0.5 * (1 - t.numpy()) - 0.5 * w * t.numpy())


# --- Attention --------------------------------------------------------------------------------------------------------


def by_formula(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float | None = None
) -> np.ndarray:
    """q `[B, T, Hq, D]`, k, v `[B, S, Hkv, D]`, visible `[B, T, S]`; in float64, head by head."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        scores = q[b, :, h] @ k[b, :, h // group].T * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = np.where(visible[b], np.exp(scores - scores.max()), 0)
        out[b, :, h] = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300) @ v[b, :, h // group]
    return out


def test_attention_is_cut_at_document_borders_and_windows() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 7, 4, 6)), rng.standard_normal((2, 7, 2, 6)), rng.standard_normal((2, 7, 2, 6))
    starts = np.array([[0, 0, 0, 3, 3, 3, 3], [0, 0, 2, 2, 2, 6, 6]])
    at = np.arange(7)
    causal = (at[:, None] >= at) & (at >= starts[:, :, None])
    for window in (0, 2):
        visible = causal if not window else causal & (at > at[:, None] - window)
        found = F.attention(tensor(q), tensor(k), tensor(v), tensor(starts), window=window)
        np.testing.assert_allclose(found.numpy(), by_formula(q, k, v, visible), atol=1e-12)


def test_attention_with_a_cache_sees_what_came_before() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (tensor(rng.standard_normal((1, 6, 2, 4))) for _ in range(3))
    whole = F.attention(q, k, v).numpy()
    np.testing.assert_allclose(F.attention(q[:, 4:], k, v).numpy(), whole[:, 4:], atol=1e-12)


def test_a_fully_masked_query_gives_zero_and_no_nan_gradient() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (tensor(rng.standard_normal((1, 1, 2, 4)), requires_grad=True) for _ in range(3))
    mask = tensor([[True, True], [False, False]])
    found = F.scaled_dot_product_attention(q, k, v, mask)
    assert (found.detach().numpy()[0, 0, 1] == 0).all() and (found.detach().numpy()[0, 0, 0] != 0).any()
    found.sum().backward()
    assert all(np.isfinite(x.grad.numpy()).all() for x in (q, k, v))


def test_attention_dropout_keeps_the_mean() -> None:
    q, k = randn(1, 1, 1, 4), randn(1, 1, 3000, 4) * 0
    ones = k * 0 + 1
    found = F.scaled_dot_product_attention(q, k, ones, dropout_p=0.25).numpy()
    assert np.abs(found - 1).max() < 5 * math.sqrt(0.25 / 0.75 / 3000)
    assert found.std() == 0 and found[0, 0, 0, 0] != 1


# --- Positions --------------------------------------------------------------------------------------------------------


def test_rope_turns_pairs_by_their_angle() -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 6))
    positions = np.array([0, 1, 5])
    cos, sin = F.rope_table(tensor(positions), 6, 100.0)
    angles = positions[:, None] * 100.0 ** (-np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles), atol=1e-7)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)[:, None]
    found = F.rope(tensor(x), cos.double(), sin.double()).numpy()
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_turns_what_lies_side_by_side(packed: bool) -> None:
    """As `rope` and attention one after the other; of the array as it came, backward keeps nothing."""
    x, g = (np.random.default_rng(1).standard_normal((2, 5, n, 4)).astype(np.float32) for n in (4, 2))
    starts = tensor([[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]) if packed else None
    tables = F.rope_table(tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]) if packed else tensor(list(range(5))), 4, 100.0)
    found = []
    for inside in (True, False):
        qkv = tensor(x, requires_grad=True)
        y = qkv if inside else F.rope(qkv, *tables, 3)
        o = F.attention_packed(y, 2, 1, starts, tables=tables if inside else None)
        if inside:
            assert o.node.saved.context.inputs[0] is None
        o.backward(tensor(g))
        found.append((o.detach().numpy(), qkv.grad.numpy()))
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_rope_table_is_exact_at_far_positions_and_takes_frequencies() -> None:
    far = 1_000_003
    cos, _ = F.rope_table(tensor([far]), 4, 10_000.0)
    np.testing.assert_allclose(cos.numpy(), [[math.cos(far), math.cos(far / 100)]], atol=1e-7)
    cos, sin = F.rope_table(tensor([[2, 3]]), 2, inverse_frequencies=tensor([0.5]))
    np.testing.assert_allclose(cos.numpy(), np.cos([[[1.0], [1.5]]]), atol=1e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin([[[1.0], [1.5]]]), atol=1e-7)


# --- Errors -----------------------------------------------------------------------------------------------------------

X, L = np.zeros((2, 3)), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.gelu(tensor(X), "other"), UsageError, "approximate"),
        (lambda: F.rms_norm(tensor(X), 4), ShapeError, r"rms_norm over \(4,\).*\(2, 3\)"),
        (lambda: F.layer_norm(tensor(X), (3, 2)), ShapeError, r"layer_norm over \(3, 2\).*\(2, 3\)"),
        (lambda: F.layer_norm(tensor(X), ()), ShapeError, r"layer_norm over \(\)"),
        (lambda: F.cross_entropy(tensor(X), tensor(L[:1])), ShapeError, r"\(2, 3\) and labels \(1,\)"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), label_smoothing=1.5), UsageError, "label_smoothing"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), reduction="max"), UsageError, "reduction"),
        (lambda: F.linear_cross_entropy(tensor(X), tensor(X), tensor(L), reduction="max"), UsageError, "reduction"),
        (
            lambda: F.linear_cross_entropy(tensor(X), tensor(X), tensor(L), shift=1, weight=tensor([1.0, 2.0])),
            UsageError,
            "shift and num_targets exclude",
        ),
        (
            lambda: F.linear_cross_entropy(tensor(X), tensor(X), tensor(L), reduction="sum", num_targets=3),
            UsageError,
            "num_targets",
        ),
        (lambda: F.linear_cross_entropy(tensor(X), tensor(X), tensor(L[:1])), ShapeError, r"target \(1,\)"),
        (lambda: F.linear_loss_and_hits(tensor(X), tensor(X), tensor([L])), ShapeError, r"target \(1, 2\)"),
        (lambda: F.linear_loss_and_hits(tensor(X), tensor(X), tensor(L), shift=-1), ShapeError, "shift -1"),
        (lambda: F.kl_div(tensor(X), tensor(X), reduction="rows"), UsageError, "reduction"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), -100), DTypeError, "weight is -100, not a tensor"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), tensor(X[0, :2])), ShapeError, r"shape \(2,\)"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), tensor([1, 2, 3])), DTypeError, "weight is a tensor of int64"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), tensor(X[0]), z_loss=0.1), UsageError, "weight or z_loss"),
        (lambda: F.cross_entropy(tensor(X), [1, 2]), DTypeError, "target is a list, not a tensor"),  # type: ignore
        (lambda: F.mse_loss(2.0, tensor(X)), DTypeError, "mse_loss: input is 2.0, not a tensor"),  # type: ignore
        (lambda: F.cross_entropy(tensor(X), tensor(L), None, tensor(X)), UsageError, "size_average is a Tensor, and"),
        (lambda: F.cross_entropy(tensor(X), tensor(X[0])), ShapeError, "probabilities"),
        (lambda: F.cross_entropy(tensor(X), tensor(L), None, "sum"), UsageError, "size_average is 'sum'"),
        (lambda: F.mse_loss(tensor(X), tensor(X), "none"), UsageError, "size_average is 'none'"),
        (lambda: F.binary_cross_entropy(tensor(X), tensor(X), "sum"), DTypeError, "weight is 'sum', not a tensor"),
        (lambda: F.binary_cross_entropy(tensor(X), tensor(X), tensor(X[:, :2])), ShapeError, "broadcast"),
        (lambda: F.binary_cross_entropy(tensor(X), tensor(X), tensor([X])), ShapeError, "the losses"),
        (
            lambda: F.binary_cross_entropy_with_logits(tensor(X), tensor(X), pos_weight=3.0),
            DTypeError,
            "pos_weight is 3.0, not a tensor",
        ),
        (lambda: F.mse_loss(tensor(L), tensor(L)), DTypeError, "int64"),
        (
            lambda: F.scaled_dot_product_attention(*[tensor(np.zeros((1, 1, 2, 4)))] * 3, None, 0.0, 0.5),
            DTypeError,
            "is_causal is 0.5",
        ),
        (lambda: F.embedding(tensor(L), tensor(X), 2), ShapeError, "padding_idx 2"),
        (lambda: nn.Linear(2, 2).train("no"), UsageError, "the mode 'no'"),  # type: ignore[arg-type]
        (lambda: nn.utils.clip_grad_norm_([], -1.0), ConfigError, "max_norm is -1.0"),
        (lambda: nn.utils.clip_grad_value_([], math.nan), ConfigError, "clip_value is nan"),
        (lambda: nn.utils.clip_scale(tensor(1.0), -1.0), ConfigError, "max_norm is -1.0"),
        (
            lambda: nn.Attention(4, 2)(tensor(X[None, :, :1]), mask=tensor([True]), starts=tensor([[0, 0]])),
            UsageError,
            "mask or starts",
        ),
        (
            lambda: nn.Attention(4, 2, window=3)(tensor(X[None, :, :1]), mask=tensor([True])),
            UsageError,
            "mask or a window of 3",
        ),
        (lambda: F.rope_table(tensor(L), 3), ShapeError, "size 3"),
        (
            lambda: F.scaled_dot_product_attention(*[tensor(np.zeros((1, 1, 2, 4)))] * 3, tensor(X), is_causal=True),
            UsageError,
            "a mask or is_causal",
        ),
        (
            lambda: F.scaled_dot_product_attention(
                tensor(np.zeros((1, 4, 2, 4))), *[tensor(np.zeros((1, 2, 2, 4)))] * 2
            ),
            ShapeError,
            "enable_gqa",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --- The order of arguments -------------------------------------------------------------------------------------------

# torch 2.13's positional parameters; what comes after the last that we have may be left out, and is then refused.
ORDER = {
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
    "mse_loss": "input target size_average reduce reduction weight",
    "binary_cross_entropy": "input target weight size_average reduce reduction",
    "binary_cross_entropy_with_logits": "input target weight size_average reduce reduction pos_weight",
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal",
    "gelu": "input approximate",
    "embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    "layer_norm": "input normalized_shape weight bias eps",
    "rms_norm": "input normalized_shape weight eps",
    "CrossEntropyLoss": "weight size_average ignore_index reduce reduction label_smoothing",
    "MSELoss": "size_average reduce reduction",
    "BCELoss": "weight size_average reduce reduction",
    "BCEWithLogitsLoss": "weight size_average reduce reduction pos_weight",
    "Linear": "in_features out_features bias device dtype",
    "Embedding": "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse "
    "_weight _freeze device dtype",
    "LayerNorm": "normalized_shape eps elementwise_affine bias device dtype",
    "RMSNorm": "normalized_shape eps elementwise_affine device dtype",
    "Dropout": "p inplace",
    "GELU": "approximate",
}


@pytest.mark.parametrize("name", ORDER)
def test_positional_arguments_are_torchs(name: str) -> None:
    called = getattr(F, name, None) or getattr(nn, name)
    own = [p.name for p in inspect.signature(called).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert own == ORDER[name].split()[: len(own)]

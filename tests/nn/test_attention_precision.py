"""One precision for all forms of attention: each is held to one bound, which follows from the dtype and the sizes.

The bound knows three errors. Scores, softmax and sums are float32 (float64), so that a weight p is off by a share
r = 2^-24·(2·(D + 2)·max Σ|q||k|·scale + 2·S + 8). A 2-byte type rounds by a share u of what it rounds: the weights
before P·V and before dV = Pᵀ·g, dS before its products, the result and the gradients. Where c = Σ g·o is made of the
rounded result, dS is off by p·u·Σ|g||o| besides. Scores in 2 bytes would add p·u·|s|, which for the scores of these
tests, up to 40, is many times the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import DTypeError, ShapeError
from genesis.functions.create import ones
from genesis.functions.random import dropout
from genesis.nn import functional as F
from genesis.tensor import Tensor
from tests.autograd.scenarios import gradcheck

DTYPES = ("bfloat16", "float16", "float32")
SHARPNESS = 6.0  # of queries, so that scores reach some 40
SEED = 5


@dataclass(frozen=True)
class Form:
    """Sizes and settings of a call."""

    name: str
    queries: int = 9
    keys: int = 9
    heads: int = 2
    key_heads: int = 2
    value_size: int = 16
    mask: tuple[int, ...] = ()
    kind: str = "bool"
    settings: dict[str, Any] = field(default_factory=dict)


FORMS = (
    Form("plain"),
    Form("causal", settings={"is_causal": True}),
    Form("causal, more keys", keys=13, settings={"is_causal": True}),
    Form("causal, more queries", queries=13, settings={"is_causal": True}),
    Form("one query", queries=1, keys=40),
    Form("shared heads", heads=4, settings={"is_causal": True}),
    Form("bool mask", mask=(9, 9)),
    Form("bool mask of keys, shared heads", heads=4, keys=11, mask=(2, 1, 1, 11)),
    Form("float mask of each head", mask=(1, 2, 9, 9), kind="float"),
    Form("wide values", value_size=24),
    Form("dropout", keys=12, settings={"dropout_p": 0.25}),
    Form("dropout and a mask, shared heads", heads=4, mask=(2, 1, 9, 9), settings={"dropout_p": 0.25}),
    Form("causal dropout, more queries", queries=11, settings={"is_causal": True, "dropout_p": 0.5}),
)
INTERPRETED = ("causal, more queries", "dropout and a mask, shared heads")
SIZE = 16


class Result(NamedTuple):
    """The output and the gradients, or bounds of their errors."""

    o: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def values(dtype: str, form: Form) -> list[np.ndarray]:
    """q, k, v, the gradient of the result, and the mask: numbers that the dtype holds, in float64."""
    rng = np.random.default_rng(SEED)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    found = []
    for heads, rows, size in (
        (form.heads, form.queries, SIZE),
        (form.key_heads, form.keys, SIZE),
        (form.key_heads, form.keys, form.value_size),
        (form.heads, form.queries, form.value_size),
    ):
        found.append(rng.standard_normal((2, heads, rows, size)))
    found[0] *= SHARPNESS
    mask = rng.standard_normal(form.mask) * 4 if form.kind == "float" else rng.random(form.mask) < 0.7
    if form.mask and form.mask[-2] > 1:
        mask[..., 3, :] = -np.inf if form.kind == "float" else False  # a query that sees no key
    return [x.astype(kind).astype(np.float64) for x in found] + [mask]


def exact(dtype: str, form: Form, kept: np.ndarray) -> tuple[Result, Result]:
    """Results in float64, and bounds of the errors; `kept` is 0 or 1/(1 - p) for each weight."""
    q, k, v, g, mask = values(dtype, form)
    group = form.heads // form.key_heads
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = SIZE**-0.5
    s = scale * (q @ k.mT)
    added = np.zeros((form.queries, form.keys))
    if form.settings.get("is_causal"):
        added = np.where(np.tri(form.queries, form.keys) > 0, 0.0, -np.inf)
    if form.mask:
        added = mask if form.kind == "float" else np.where(mask, 0.0, -np.inf)
    s = s + added
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    w = p * kept
    o, dv, dp = w @ v, w.mT @ g, (g @ v.mT) * kept
    c = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - c)
    u = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[dtype]
    tiny = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}[dtype]  # half of the smallest subnormal
    reach = scale * (abs(q) @ abs(k).mT).max() + np.abs(np.where(np.isinf(added), 0, added)).max()
    r = 2.0**-24 * (2 * (SIZE + 2) * reach + 2 * form.keys + 2 * form.queries + 2 * form.value_size + 8)
    bound_p = (u + r) * w + tiny
    wide_dp = (abs(g) @ abs(v).mT) * kept
    off = p * (r * (wide_dp + (p * wide_dp).sum(-1, keepdims=True)) + u * (abs(g) * abs(o)).sum(-1, keepdims=True))
    bound_ds = off + u * abs(ds) + tiny

    def shared(x: np.ndarray) -> np.ndarray:
        return x.reshape(2, form.key_heads, group, *x.shape[2:]).sum(2)

    result = Result(o, scale * ds @ k, shared(scale * ds.mT @ q), shared(dv))
    bounds = (
        bound_p @ abs(v),
        scale * bound_ds @ abs(k),
        shared(scale * bound_ds.mT @ abs(q)),
        shared(bound_p.mT @ abs(g)),
    )
    # 1 + 2^-4: products of two errors
    return result, Result(*((1 + 2.0**-4) * b + u * abs(x) + tiny for b, x in zip(bounds, result, strict=True)))


def computed(dtype: str, device: str, form: Form) -> tuple[Result, np.ndarray]:
    """What the call gives, and what dropout leaves of each weight."""
    *inputs, mask = values(dtype, form)
    q, k, v, g = (genesis.tensor(x, dtype=dtype, device=device) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    given = None
    if form.mask:
        given = genesis.tensor(mask, device=device, dtype="float32" if form.kind == "float" else "bool")
    genesis.manual_seed(SEED)
    o = F.scaled_dot_product_attention(q, k, v, given, enable_gqa=form.heads > form.key_heads, **form.settings)
    assert o.dtype is q.dtype
    o.backward(g)
    genesis.manual_seed(SEED)
    shape = (2, form.heads, form.queries, form.keys)
    kept = dropout(ones(*shape, device=device), form.settings.get("dropout_p", 0.0)).cpu().numpy()
    found = [x.detach().cpu().to("float64").numpy() for x in (o, q.grad, k.grad, v.grad)]
    return Result(*found), kept


def _runs() -> list[Any]:
    """Every form and dtype on the CPU and, on a GPU, there; a few in the interpreter."""
    found = []
    for form in FORMS:
        for dtype in DTYPES:
            found.append(pytest.param(form, dtype, "cpu", id=f"{form.name}-{dtype}-cpu"))
            is_short = dtype == "bfloat16" and form.name in INTERPRETED
            marks = () if is_short else (pytest.mark.gpu,)
            found.append(pytest.param(form, dtype, "cuda", id=f"{form.name}-{dtype}-cuda", marks=marks))
    return found


@pytest.mark.parametrize(("form", "dtype", "device"), _runs())
def test_every_form_keeps_one_bound(form: Form, dtype: str, device: str) -> None:
    found, kept = computed(dtype, device, form)
    right, bounds = exact(dtype, form, kept)
    for name, x, y, bound in zip(Result._fields, found, right, bounds, strict=True):
        error = np.abs(x - y)
        assert (error <= bound).all(), f"{name}: {np.nanmax(error / bound)} of the bound"


def test_the_bound_refuses_scores_in_two_bytes() -> None:
    form = FORMS[6]
    q, k, v, _, mask = values("bfloat16", form)
    right, bounds = exact("bfloat16", form, np.ones(()))
    s = (SIZE**-0.5 * q @ k.mT).astype(ml_dtypes.bfloat16).astype(np.float64)
    s = np.where(mask, s, -np.inf)[:, :, :3]
    p = np.exp(s - s.max(-1, keepdims=True))
    o = p / p.sum(-1, keepdims=True) @ v
    assert (np.abs(o - right.o[:, :, :3]) / bounds.o[:, :, :3]).max() > 3


@pytest.mark.parametrize("masked", [False, True])
def test_under_autocast_scores_are_float32_too(masked: bool) -> None:
    form = Form("autocast", mask=(9, 9) if masked else ())
    *inputs, mask = values("bfloat16", form)
    q, k, v = (genesis.tensor(x, dtype="float32") for x in inputs[:3])
    with genesis.autocast("cpu", "bfloat16"):
        o = F.scaled_dot_product_attention(q, k, v, genesis.tensor(mask) if masked else None)
    right, bounds = exact("bfloat16", form, np.ones(()))
    assert o.dtype is genesis.bfloat16
    assert (np.abs(o.to("float64").numpy() - right.o) <= bounds.o).all()


def test_the_block_with_a_mask_gives_what_it_gives_without_one() -> None:
    genesis.manual_seed(0)
    block = nn.Attention(16, 4, 2, dtype="bfloat16")
    x = genesis.randn(2, 7, 16, dtype="bfloat16") * 8
    causal = genesis.ones(7, 7, dtype="bool").tril()
    by_mask, fused = (y.detach().to("float64").numpy() for y in (block(x, mask=causal), block(x)))
    # Two results that are each within u of the weighted values, through one linear layer of 16 terms.
    weight = np.abs(block.o_proj.weight.detach().to("float64").numpy()).sum(1).max()
    top = np.abs(block.v_proj(x).detach().to("float64").numpy()).max()
    assert np.abs(by_mask - fused).max() <= 2 * (2 * 2.0**-8 * top * weight + 2.0**-8 * np.abs(fused).max())


# --- Edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_empty_inputs(sizes: tuple[int, int, int], mask: str | None, dropout_p: float) -> None:
    batch, queries, keys = sizes
    q = genesis.zeros(batch, 2, queries, 4, dtype="bfloat16", requires_grad=True)
    k = genesis.zeros(batch, 2, keys, 4, dtype="bfloat16", requires_grad=True)
    given = None if mask is None else genesis.zeros(queries, keys, dtype="bool" if mask == "bool" else "float32")
    o = F.scaled_dot_product_attention(q, k, k, given, dropout_p)
    o.sum().backward()
    assert tuple(o.shape) == (batch, 2, queries, 4) and (o.detach().to("float32").numpy() == 0).all()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_blind_query_gives_zero_whatever_the_keys_hold_and_passes_no_gradient(value: float) -> None:
    q, k = (genesis.full((1, 1, 2, 4), 1.0, dtype="bfloat16", requires_grad=True) for _ in range(2))
    v = genesis.full((1, 1, 2, 4), value, dtype="bfloat16", requires_grad=True)
    for mask in (genesis.tensor([[False, False], [False, False]]), genesis.full((2, 2), -np.inf)):
        o = F.scaled_dot_product_attention(q, k, v, mask)
        o.backward(genesis.ones_like(o))
        assert (o.detach().to("float32").numpy() == 0).all()
        assert (v.grad.to("float32").numpy() == 0).all()


def test_a_float_mask_gets_its_gradient() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (genesis.tensor(rng.standard_normal((1, 2, 3, 4))) for _ in range(3))
    mask = genesis.tensor(rng.standard_normal((3, 3)), requires_grad=True)
    assert gradcheck(lambda m: F.scaled_dot_product_attention(q, k, v, m), (mask,))


def test_leading_dimensions_and_masks_over_them() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (genesis.tensor(rng.standard_normal((2, 3, 2, 5, 4))) for _ in range(3))
    mask = genesis.tensor(rng.random((3, 1, 5, 5)) < 0.8)
    found = F.scaled_dot_product_attention(q, k, v, mask).numpy()
    alone = [
        [F.scaled_dot_product_attention(q[i, j], k[i, j], v[i, j], mask[j]).numpy() for j in range(3)] for i in range(2)
    ]
    np.testing.assert_array_equal(found, np.array(alone))
    two = F.scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], mask[0, 0]).numpy()
    np.testing.assert_allclose(two, found[0, 0, 0], atol=1e-15)


@pytest.mark.parametrize(
    ("shapes", "mask", "error", "message"),
    [
        (((1, 2, 3, 4),) * 3, Tensor, DTypeError, "int64"),
        (((1, 2, 3, 4),) * 3, (2, 3), ShapeError, r"mask of shape \(2, 3\) does not broadcast .* \(1, 2, 3, 3\)"),
        (((1, 2, 3, 4),) * 3, (4, 1, 3, 3), ShapeError, "does not broadcast"),
        (((2, 2, 3, 4), (3, 2, 3, 4), (3, 2, 3, 4)), None, ShapeError, "different batches"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)), (3, 3), ShapeError, r"got \(1, 2, 3, 4\), \(1, 2, 3, 5\)"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), (3, 3), ShapeError, "attention takes q"),
        (((4,), (4,), (4,)), None, ShapeError, "attention takes q"),
    ],
)
def test_what_does_not_belong_together(shapes: Any, mask: Any, error: type[Exception], message: str) -> None:
    q, k, v = (genesis.zeros(*shape) for shape in shapes)
    given = None if mask is None else genesis.zeros(*mask) if isinstance(mask, tuple) else genesis.zeros(3, 3).long()
    with pytest.raises(error, match=message):
        F.scaled_dot_product_attention(q, k, v, given)

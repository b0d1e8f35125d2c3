"""The language model head with cross-entropy beyond the small samples: many tiles, several chunks, labels that are
nearly certain or far below the largest logit, infinite logits, and its launches; also the order in which gradients of
the embedding are accumulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import genesis
import genesis.kernels.index.index as indexing
import genesis.kernels.loss.labelled as labelled
import genesis.kernels.loss.lm_head as head
import genesis.kernels.loss.loss as loss
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, as_dtype, bfloat16, float16, float32
from genesis.errors import IndexRangeError
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.tiles import GemmTile
from genesis.nn import Parameter
from genesis.nn import functional as F
from genesis.op import registry
from genesis.optim.flat import FlatBuffers
from tests.ops.samples.losses import (
    linear_cross_entropy_oracle,
    token_log_probs_backward_oracle,
    token_log_probs_oracle,
)

CUDA = Device("cuda", 0)
HALF_UNIT = {bfloat16: 2.0**-9, float16: 2.0**-12}  # relative
ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16


def on_device(values: np.ndarray, dtype: DType | None = None) -> Array:
    array = empty(values.shape, dtype or as_dtype(values.dtype), CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    """Launches that were recorded with other sizes must not be replayed."""
    yield
    backend: Any = backend_for(CUDA)  # the one backend: it owns the captures and the memory
    backend._calls.clear()
    backend._calls_into.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The kernels that the head launches from here on, with their arguments."""
    found: list[tuple[str, tuple[Any, ...]]] = []

    def spy(kernel: Any, grid: Any, *args: Any, **keywords: Any) -> None:
        found.append((kernel.fn.__name__, args))
        launch(kernel, grid, *args, **keywords)

    for module in (labelled, head, loss):
        monkeypatch.setattr(module, "launch", spy)
    return found


def distance(found: Array, expected: np.ndarray) -> float:
    """The norm of the error, relative to the norm of the expected values."""
    return float(np.linalg.norm(found.numpy().astype(np.float64) - expected) / np.linalg.norm(expected))


def errors(rows: int, classes: int, dtype: DType, size: float = 3.0, width: int = 32, **attrs: Any) -> list[float]:
    """Relative errors of the loss, dx and dweight against float64, for logits of about `size`."""
    rng = np.random.default_rng(classes)
    x = on_device(rng.standard_normal((rows, width)), dtype)
    weight = on_device(rng.standard_normal((classes, width)) * size / width**0.5, dtype)
    labels = rng.integers(0, classes, (2, rows // 2))
    labels[:, ::5] = -100
    attrs = {"ignore_index": -100, "with_grads": True, "mean": True, "shift": 1, **attrs}
    found = registry["linear_cross_entropy"](x, weight, on_device(labels), **attrs)
    wide_x, wide_weight = (a.numpy().astype(np.float64) for a in (x, weight))
    expected = linear_cross_entropy_oracle(wide_x, wide_weight, labels, **attrs)
    return [distance(f, e) for f, e in zip(found, expected, strict=True)]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("classes", (256, 301))
def test_gradients_are_rounded_three_times(classes: int, dtype: DType) -> None:
    """The exponential, a row of x by its sum and the result, by half an ulp each; the loss only in float32."""
    found = errors(100, classes, dtype)
    assert found[0] < 1e-6
    assert max(found[1:]) < 3 * HALF_UNIT[dtype]


@pytest.mark.full
def test_large_logits_keep_their_precision() -> None:
    """A logit of 300 in bfloat16 is off by up to 0.5, and its exponential by half of itself. Most rows overflow."""
    found = errors(100, 301, bfloat16, size=100.0)
    assert found[0] < 1e-6
    assert max(found[1:]) < 3 * HALF_UNIT[bfloat16]


def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)
    found = errors(260, 301, bfloat16)
    chunk = ["references_kernel", *["lm_head_exp_kernel", "finish_rows_kernel"] * 2, *["copy_rows_kernel"] * 2]
    assert [name for name, _ in launched] == ["list_rows_kernel", "divisor_kernel", *chunk * 3, "sum_losses_kernel"]
    assert found[0] < 1e-6
    assert max(found[1:]) < 5 * HALF_UNIT[bfloat16]  # dweight is rounded after each chunk


def test_without_gradients_no_logit_is_stored(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    x, weight = (on_device(np.random.default_rng(1).standard_normal((40, 16)), bfloat16) for _ in range(2))
    labels = on_device(np.arange(40))
    attrs: dict[str, Any] = {"ignore_index": -100}
    alone = registry["linear_cross_entropy"](x, weight, labels, with_grads=False, **attrs)
    assert [name for name, _ in launched] == [
        "list_rows_kernel",
        "references_kernel",
        *["lm_head_exp_kernel", "finish_rows_kernel"] * 2,
        "sum_losses_kernel",
    ]
    assert launched[2][1][2] is None
    assert registry["linear_cross_entropy"](x, weight, labels, with_grads=True, **attrs)[0].item() == alone.item()


@pytest.mark.sample
@pytest.mark.parametrize("is_exact", (False, True))
@pytest.mark.parametrize("size", (0.25, 8.0))
def test_hits_leave_the_bits_of_the_loss(monkeypatch: pytest.MonkeyPatch, size: float, is_exact: bool) -> None:
    """A label is a row's likeliest class, a later one of the same logit, in this tile or another, or drawn. With the
    larger size, most rows overflow. Sums of small integers are exact.
    """
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    rng = np.random.default_rng(1)
    classes = rng.integers(-4, 5, (64, 16))
    x = on_device(rng.integers(-4, 5, (132, 16)) * size, bfloat16)
    weight = on_device(np.concatenate([classes] * 3) * size, bfloat16)  # 192 classes in tiles of 128
    likeliest = (x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64).T).argmax(1)
    labels = on_device(np.choose(np.arange(132) % 4, [likeliest, likeliest + 64, likeliest + 128, rng.integers(192)]))
    attrs: dict[str, Any] = {"ignore_index": -100, "with_grads": False}
    with genesis.exact() if is_exact else nullcontext():
        alone = registry["linear_cross_entropy"](x, weight, labels, **attrs)
        found, hits = registry["linear_cross_entropy"](x, weight, labels, **attrs, with_hits=True)
    assert found.item() == alone.item()
    assert hits.item() == (labels.numpy() == likeliest).sum()


@pytest.mark.full
@pytest.mark.parametrize("dtype", (bfloat16, pytest.param(float32, marks=pytest.mark.full)))
def test_a_frozen_head_costs_no_gradient(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    """Of the GEMMs behind the logits one is left, and what is left is the same to the bit."""
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)
    products: list[Any] = []
    multiply = loss.matmul_into
    monkeypatch.setattr(loss, "matmul_into", lambda out, *a, **k: (products.append(out.shape), multiply(out, *a, **k)))
    x, weight = (on_device(np.random.default_rng(1).standard_normal((n, 16)), dtype) for n in (200, 40))
    labels = on_device(np.arange(200) % 40)
    attrs: dict[str, Any] = {"ignore_index": -100, "with_grads": True}
    learning = registry["linear_cross_entropy"](x, weight, labels, **attrs)
    counted = products.count((40, 16))
    products.clear()
    frozen = registry["linear_cross_entropy"](x, weight, labels, **attrs, weight_grad=False)
    assert (counted, products.count((40, 16))) == (2, 0)  # two chunks
    assert len(frozen) == 2
    for a, b in zip(frozen, learning, strict=False):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_label_out_of_range_is_reported_and_ignored() -> None:
    x, weight = on_device(np.ones((3, 16)), bfloat16), on_device(np.ones((5, 16)), bfloat16)
    labels = on_device(np.array([0, 5, 1]))
    found = registry["linear_cross_entropy"](x, weight, labels, ignore_index=-100, with_grads=True)
    with pytest.raises(IndexRangeError, match="linear_cross_entropy: index 5"):
        found[0].item()
    assert abs(found[0].item() - 2 * np.log(5)) < 1e-5
    assert not found[1].numpy()[1].any()


def test_a_tied_weight_gets_one_gradient_in_its_slot(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    """The head writes its gradient to the slot, backward does not rescale it, and the embedding adds its rows to it."""
    rng = np.random.default_rng(2)
    values, ids = rng.standard_normal((40, 16)), rng.integers(0, 40, (2, 9))
    weight = Parameter(genesis.tensor(values, dtype="bfloat16", device="cuda"))
    flat, tokens = FlatBuffers([weight]), genesis.tensor(ids, device="cuda")
    found = F.linear_cross_entropy(F.embedding(tokens, weight), weight, tokens, shift=1)
    assert [name for name, _ in launched].count("references_kernel") == 1
    found.backward()
    assert weight.grad.array.data_ptr() == flat.view(flat.gradients, 0).data_ptr()
    wide = weight.array.numpy().astype(np.float64)
    _, dx, dw = linear_cross_entropy_oracle(
        wide[ids].reshape(-1, 16), wide, ids, ignore_index=-100, with_grads=True, mean=True, shift=1
    )
    np.add.at(dw, ids.reshape(-1), dx)
    assert distance(weight.grad.array, dw) < 4 * HALF_UNIT[bfloat16]


# --- Rows without a label ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (bfloat16, pytest.param(float16, marks=pytest.mark.full)))
def test_rows_without_a_label_are_left_out(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    """They hold NaN, and calls with other counts repeat the same launches."""
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)
    rng = np.random.default_rng(13)
    x, weight = rng.standard_normal((140, 16)), on_device(rng.standard_normal((40, 16)), dtype)
    labels, g, wide_weight = rng.integers(0, 40, 140), rng.random(140), weight.numpy().astype(np.float64)
    attrs: dict[str, Any] = {"ignore_index": -100, "shift": 0, "temperature": 1.0}
    for count in (0, 1, 129) if dtype is bfloat16 else (0, 129):
        kept = np.sort(rng.permutation(139)[:count]) + 1  # of two chunks
        hidden, own, weights = np.full_like(x, np.nan), np.full(140, -100), np.full(140, np.nan, np.float32)
        hidden[kept], own[kept], weights[kept] = x[kept], labels[kept], g[kept]
        given = on_device(hidden, dtype), weight, on_device(own)
        log_probs = registry["linear_token_log_probs"](*given, **attrs, with_dx=False).numpy()
        backward = registry["linear_token_log_probs_backward"]
        dx, dw = (each.numpy() for each in backward(on_device(weights), *given, **attrs, needs=(True, True)))
        wide = given[0].numpy().astype(np.float64)[kept]
        d = -np.exp(wide @ wide_weight.T)
        d /= -d.sum(1, keepdims=True)
        d[np.arange(len(kept)), labels[kept]] += 1
        np.testing.assert_allclose(log_probs[kept], np.log1p(-d[np.arange(len(kept)), labels[kept]]), atol=1e-5)
        d *= weights[kept, None]
        for found, want in ((log_probs, 0), (dx, 0)):
            np.testing.assert_array_equal(np.delete(found, kept, 0).astype(np.float32), want)
        for found, want in (dx[kept], d @ wide_weight), (dw, d.T @ wide):
            assert np.linalg.norm(found - want) <= 5 * HALF_UNIT.get(dtype, 2.0**-22) * np.linalg.norm(want)


# --- Rows of given logits ---------------------------------------------------------------------------------------------


def of_logits(
    logits: np.ndarray, labels: np.ndarray, common: float = 0.0
) -> tuple[float, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Loss, dx and dweight of rows of logits in bfloat16, and the exact gradient of the logits [rows, classes] and dw.

    The weight begins with the identity, so dx is the logits' gradient. Behind it stands a vector, the same for all
    words, that adds `common` to every logit of a row: what is rounded there changes nothing that is expected.
    """
    rows, classes = logits.shape
    width, rng = classes + 64, np.random.default_rng(rows)
    x, weight = np.zeros((rows, width)), np.eye(classes, width)
    x[:, :classes], x[:, classes:] = logits, 1
    weight[:, classes:] = rng.standard_normal(64)
    weight[:, classes:] *= common / weight[0, classes:].sum() if common else 0
    x, weight = (on_device(a, bfloat16) for a in (x, weight))
    found = registry["linear_cross_entropy"](x, weight, on_device(labels), ignore_index=-100, with_grads=True)
    wide = x.numpy().astype(np.float64)
    with np.errstate(all="ignore"):  # an ignored row may hold anything
        p = np.exp(wide[:, :classes] - wide[:, :classes].max(axis=1, keepdims=True))
        d = p / p.sum(axis=1, keepdims=True)
    rest = d.copy()
    for i, label in enumerate(labels):  # p - 1 would cancel
        rest[i, label] = 0
        d[i, label] = -rest[i].sum()
        if label == -100:
            d[i], wide[i] = 0, 0
    return found[0].item(), found[1].numpy().astype(np.float64), found[2].numpy().astype(np.float64), (d, d.T @ wide)


def losses_of(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    wide = on_device(logits, bfloat16).numpy().astype(np.float64)
    top = wide.max(axis=1)
    return top + np.log(np.exp(wide - top[:, None]).sum(axis=1)) - wide[np.arange(len(labels)), labels]


def check(logits: np.ndarray, labels: np.ndarray, common: float = 0.0) -> None:
    """Each element of dx to three roundings: the exponential (for the label's, also those of its tile that it is the
    sum of) and the result. dweight to one more, of the rows of x by their sums.
    """
    loss, dx, dw, (d, expected_dw) = of_logits(logits, labels, common)
    counted = labels != -100
    size = np.abs(logits[counted]).max() + common
    np.testing.assert_allclose(loss, losses_of(logits[counted], labels[counted]).sum(), rtol=1e-6, atol=size * 1e-5)
    most = 3 * ROUNDING + size * 2.0**-22  # float32 logits, and their exponents, are rounded, too
    np.testing.assert_allclose(dx[:, : logits.shape[1]], d, rtol=most, atol=1e-30)
    np.testing.assert_array_equal(dx[~counted], 0)
    error = np.linalg.norm(dw - expected_dw, axis=1)
    assert (error <= (most + ROUNDING) * np.linalg.norm(expected_dw, axis=1)).all()


@pytest.mark.parametrize(("classes", "common"), [(200, 0.0), (200, 90.0), (256, 90.0)])
def test_a_label_that_is_nearly_certain(classes: int, common: float) -> None:
    """Probabilities of 1 - 1e-6: the label's gradient is as exact as any other, however its logit was rounded."""
    rng = np.random.default_rng(5)
    logits, labels = rng.standard_normal((20, classes)) / 4, rng.permutation(classes)[:20]
    logits[np.arange(20), labels] = np.log(classes * 1e6)
    check(logits, labels, common)


LOSSES = (30, 54, 57, 80, 88, 90, 200, 1000, 3e4)  # a row overflows from 80·ln 2 = 55.5 on; e^88.7 is ∞ in float32


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(("classes", "common"), [(200, 0.0), (256, 90.0)])
def test_a_label_far_below_the_largest_logit(classes: int, common: float) -> None:
    """Rows beside others of their block, and a block beside another."""
    rng = np.random.default_rng(6)
    logits, labels = rng.standard_normal((140, classes)), rng.integers(0, classes, 140)
    labels[20:50] = labels[130:135] = -100
    for i, size in enumerate(LOSSES):
        logits[i, labels[i]] = -size
    check(logits, labels, common)


@pytest.mark.full
def test_overflowed_rows_of_several_chunks(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(labelled, "MIN_ROWS", 256)
    rng = np.random.default_rng(7)
    logits, labels = rng.standard_normal((300, 64)), rng.integers(0, 64, 300)
    for i, size in (200, 500), (290, 100):
        logits[i, labels[i]] = -size
    check(logits, labels)
    assert [name for name, _ in launched].count("finish_rows_kernel") == 4


@pytest.mark.full
def test_all_rows_overflow() -> None:
    rng = np.random.default_rng(8)
    logits, labels = rng.standard_normal((130, 136)), rng.integers(0, 136, 130)
    logits[np.arange(130), labels] = -rng.uniform(70, 300, 130)
    check(logits, labels)


def test_any_reference_serves() -> None:
    """Losses are those of the logits whatever the references; only rows far from theirs are flagged."""
    rng = np.random.default_rng(9)
    x, weight = (on_device(rng.standard_normal((n, 16)), bfloat16) for n in (140, 150))
    labels = rng.integers(0, 150, 140)
    logits = x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64).T
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(140), labels]
    for moved, flags in (60, [0, 0, 0]), (150, [1, 0, 1]), (-150, [1, 0, 1]):
        settings = labelled.Labels(on_device(labels), 0, -100, 150)
        chosen = labelled.LabelledRows(settings, 140, 140, is_limited=True)
        found = head.Head(empty((140,), float32, CUDA), x, weight, chosen, False)
        found.begin(0)
        references = found.references.numpy().copy()
        references[130:] += moved
        backend_for(CUDA).from_numpy(references, found.references)
        found.forward(0)
        np.testing.assert_allclose(found.losses.numpy(), expected, rtol=1e-5)
        np.testing.assert_array_equal(found.overflow.numpy()[:3], flags)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
def test_an_ignored_row_may_hold_anything() -> None:
    rng = np.random.default_rng(10)
    logits, labels = rng.standard_normal((140, 136)), rng.integers(0, 136, 140)
    for i, value in (3, np.inf), (4, -np.inf), (5, np.nan), (135, np.inf):
        logits[i, 7], labels[i] = value, -100
    logits[6, labels[6]] = -200  # its block is recomputed
    logits[8], labels[8] = 500, -100
    check(logits, labels)


def far_apart() -> tuple[np.ndarray, np.ndarray]:
    """x and a weight whose first column makes products of 1e60 with x: class 3's logit is -∞, class 4's ∞."""
    rng = np.random.default_rng(11)
    x, weight = rng.standard_normal((140, 16)), rng.standard_normal((150, 16))
    x[:, 0] = weight[:, 0] = 0
    weight[3, 0], weight[4, 0] = -1e30, 1e30
    return x, weight


def test_classes_of_probability_0() -> None:
    """A logit of -∞ adds nothing; as the label's it makes the loss ∞, with a finite gradient."""
    x, weight = far_apart()
    weight[4, 0] = 0
    x[5:7, 0] = 1e30
    labels = np.full(140, 9)
    labels[6] = 3
    x, weight = on_device(x, bfloat16), on_device(weight, bfloat16)
    found = registry["linear_cross_entropy"](x, weight, on_device(labels), ignore_index=-100, with_grads=True)
    wide_x, wide_weight = (a.numpy().astype(np.float64) for a in (x, weight))
    logits = wide_x @ wide_weight.T
    d = np.exp(logits - logits.max(axis=1, keepdims=True))
    d /= d.sum(axis=1, keepdims=True)
    d[np.arange(140), labels] -= 1
    assert found[0].item() == np.inf
    for result, expected in (found[1], d @ wide_weight), (found[2], d.T @ wide_x):
        error = np.linalg.norm((result.numpy().astype(np.float64) - expected)[:, 1:], axis=1)
        assert (error <= 4 * ROUNDING * np.linalg.norm(expected[:, 1:], axis=1)).all()
    assert found[1].numpy()[6, 0] == wide_weight[3, 0] * -1


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("label", (4, 9))
def test_infinite_logits_give_nan(label: int) -> None:
    """As in the reference: ∞ - ∞, whether it is the label's or another's; in dweight every class gets it."""
    x, weight = far_apart()
    x[5, 0] = 1e30
    x, weight, labels = on_device(x, bfloat16), on_device(weight, bfloat16), on_device(np.full(140, label))
    loss, dx, dw = registry["linear_cross_entropy"](x, weight, labels, ignore_index=-100, with_grads=True)
    assert np.isnan(loss.item()) and np.isnan(dw.numpy().astype(np.float32)).all()
    is_nan = np.isnan(dx.numpy().astype(np.float32))
    assert is_nan[5].all() and not np.delete(is_nan, 5, 0).any()


# --- Row factors of a GEMM --------------------------------------------------------------------------------------------

TILES = (
    None,
    GemmTile(64, 64, 64, 4, 2),
    GemmTile(64, 64, 64, 4, 2, swapped=True),
    GemmTile(64, 64, 64, 4, 2, split=2),
    GemmTile(64, 64, 64, 4, 2, split=2, swapped=True),
)


@pytest.mark.sample
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", (136, 135))  # TMA needs a row stride that 16 bytes divide
def test_rows_of_a_gemm_are_scaled_before_rounding(k: int, tile: GemmTile | None) -> None:
    rng = np.random.default_rng(12)
    a, b = (rng.integers(-2, 3, shape).astype(np.float64) for shape in ((150, k), (k, 72)))
    row_scale, alpha = rng.uniform(1, 2, 300), np.float32(0.3)
    strided = on_device(row_scale.astype(np.float32)).view((150,), (2,))
    out = empty((150, 72), bfloat16, CUDA)
    x, y, scale = on_device(a, bfloat16), on_device(b, bfloat16), on_device(np.array([alpha]))
    matmul_into(out, x, y, alpha=scale, row_scale=strided, tile=tile)
    expected = a @ b * alpha * row_scale[::2, None]
    np.testing.assert_allclose(out.numpy().astype(np.float64), expected, rtol=ROUNDING + 2.0**-21)


# --- Embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(700,), (35, 20)])
def test_ids_are_sorted_in_order_of_position(shape: tuple[int, ...]) -> None:
    ids = np.random.default_rng(3).integers(0, 50, shape)
    ids[ids > 40] = 151_935
    stored = on_device(np.asfortranarray(ids).T)  # in memory the ids are transposed
    view = stored.view(shape, stored.strides[::-1])
    index = indexing.index_arrays("embedding", (view,), (151_936,), (1,), negative=False)
    found = indexing.sorted_index_keys(index, 151_936, 8)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(found.keys.numpy().reshape(-1), ids.reshape(-1)[order])
    assert found.order is not None
    np.testing.assert_array_equal(found.order.numpy().reshape(-1), order)


def test_only_rows_that_occur_are_written() -> None:
    total = np.full((50, 40), np.nan, np.float32)
    ids = np.array([7, 3, 7, 49, 7])
    total[ids] = 1
    g = np.arange(200.0, dtype=np.float32).reshape(5, 40)
    target = on_device(total)
    registry["embedding_add_"](target, on_device(g), on_device(ids))
    np.add.at(total, ids, g)
    np.testing.assert_array_equal(target.numpy(), total)


@pytest.mark.full
@pytest.mark.parametrize(
    ("classes", "width", "dtype"),
    [
        (300, 64, bfloat16),
        pytest.param(300, 64, float16, marks=pytest.mark.full),
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in (
                (151_936, 896, bfloat16),
                (128_256, 2048, bfloat16),
                (50_000, 512, float16),
                (9_000, 64, float32),
            )
        ),
    ],
)
def test_log_probabilities_have_the_same_bits_with_and_without_gradients(
    classes: int, width: int, dtype: DType
) -> None:
    """A reference is computed without gradients, and the policy with them."""
    genesis.manual_seed(0)
    x, weight = (genesis.randn(n, width, device=CUDA).mul_(0.3).to(dtype) for n in (200, classes))
    labels = genesis.randint(0, classes, (200,), device=CUDA)
    found = []
    for needs in ((False, False), (True, False), (True, True)):
        x.requires_grad_(needs[0])
        weight.requires_grad_(needs[1])
        found.append(F.linear_token_log_probs(x, weight, labels).detach().cpu().numpy())
    assert found[0].std() > 0.1
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("dtype", "needs"),
    [
        pytest.param(bfloat16, (True, True), marks=pytest.mark.full),
        pytest.param(float32, (True, True), marks=pytest.mark.full),
        (bfloat16, (False, True)),
    ],
)
def test_log_probabilities_of_labels_and_their_weighted_gradients(
    dtype: DType, needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks, with rows that overflow, weights of 0 and below, and a temperature."""
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)
    rng = np.random.default_rng(5)
    x = on_device(rng.standard_normal((260, 32)) * np.where(np.arange(260) % 3, 1, 30)[:, None], dtype)
    weight = on_device(rng.standard_normal((301, 32)) / 2, dtype)
    labels = rng.integers(0, 301, (2, 130))
    labels[:, ::7] = -100
    g = rng.standard_normal(260).astype(np.float32)
    g[::4] = 0
    attrs: dict[str, Any] = {"ignore_index": -100, "shift": 1, "temperature": 0.7}
    wide_x, wide_weight = (a.numpy().astype(np.float64) for a in (x, weight))
    tolerance = 1e-5 if dtype is float32 else 5 * HALF_UNIT[bfloat16]

    found, dx = registry["linear_token_log_probs"](x, weight, on_device(labels), **attrs, with_dx=True)
    expected, units = token_log_probs_oracle(wide_x, wide_weight, labels, **attrs, with_dx=True)
    assert distance(found, expected) < 1e-5
    assert distance(dx, units) < tolerance

    grads = registry["linear_token_log_probs_backward"](
        on_device(g), x, weight, on_device(labels), **attrs, needs=needs
    )
    oracle = token_log_probs_backward_oracle(g.astype(np.float64), wide_x, wide_weight, labels, **attrs, needs=needs)
    for ours, theirs in zip(*(each if all(needs) else (each,) for each in (grads, oracle)), strict=True):
        assert distance(ours, theirs) < tolerance

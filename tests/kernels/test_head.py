"""The head with cross entropy where small odd samples do not reach: many tiles, chunks, large logits, what it launches;
and the order in which the embedding's gradient is added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import genesis
import genesis.kernels.chunks as chunks
import genesis.kernels.embedding as embedding
import genesis.kernels.head as head
import genesis.kernels.loss as loss
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, as_dtype, bfloat16, float16
from genesis.errors import IndexRangeError
from genesis.nn import Parameter
from genesis.nn import functional as F
from genesis.op import registry
from genesis.optim.flat import FlatBuffers
from tests.ops.samples.fused import linear_cross_entropy_oracle

CUDA = Device("cuda", 0)
HALF_UNIT = {bfloat16: 2.0**-9, float16: 2.0**-12}  # relative


def on_device(values: np.ndarray, dtype: DType | None = None) -> Array:
    array = empty(values.shape, dtype or as_dtype(values.dtype), CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    """Launches that were recorded with other sizes must not be replayed."""
    yield
    backend: Any = backend_for(CUDA)  # not another one beside it: captures and memory must stay those of one backend
    backend._calls.clear()
    backend._plans.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The kernels that the head launches from here on, with their arguments."""
    found: list[tuple[str, tuple[Any, ...]]] = []

    def spy(kernel: Any, grid: Any, *args: Any, **keywords: Any) -> None:
        found.append((kernel.fn.__name__, args))
        launch(kernel, grid, *args, **keywords)

    for module in (head, loss):
        monkeypatch.setattr(module, "launch", spy)
    return found


def distance(found: Array, expected: np.ndarray) -> float:
    """The error's norm, relative to that of what is expected."""
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


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("classes", (256, 301))
def test_gradients_are_rounded_three_times(classes: int, dtype: DType) -> None:
    """The exponential, the logit's gradient and the result, by half a unit each; the loss only in float32."""
    found = errors(100, classes, dtype)
    assert found[0] < 1e-6
    assert max(found[1:]) < 3 * HALF_UNIT[dtype]


def test_large_logits_lose_nothing() -> None:
    """A logit of 300 in bfloat16 is off by up to 0.5, and its exponential by half of itself."""
    found = errors(100, 301, bfloat16, size=100.0)
    assert found[0] < 1e-6
    assert max(found[1:]) < 3 * HALF_UNIT[bfloat16]


def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    monkeypatch.setattr(loss, "WORKSPACE", 1)
    monkeypatch.setattr(chunks, "MIN_ROWS", 128)
    found = errors(260, 301, bfloat16)
    assert [name for name, _ in launched] == [
        "divisor_kernel", *["exponentials", "finish_rows", "gradient_tiles"] * 3, "total_kernel",
    ]  # fmt: skip
    assert found[0] < 1e-6
    assert max(found[1:]) < 5 * HALF_UNIT[bfloat16]  # dweight is rounded after each chunk


def test_without_gradients_no_logit_is_stored(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    x, weight = (on_device(np.random.default_rng(1).standard_normal((40, 16)), bfloat16) for _ in range(2))
    labels = on_device(np.arange(40))
    attrs: dict[str, Any] = {"ignore_index": -100}
    alone = registry["linear_cross_entropy"](x, weight, labels, with_grads=False, **attrs)
    assert [name for name, _ in launched] == ["exponentials", "finish_rows", "total_kernel"]
    assert launched[0][1][2] is None
    assert registry["linear_cross_entropy"](x, weight, labels, with_grads=True, **attrs)[0].item() == alone.item()


def test_a_label_out_of_range_is_reported_and_left_out() -> None:
    x, weight = on_device(np.ones((3, 16)), bfloat16), on_device(np.ones((5, 16)), bfloat16)
    labels = on_device(np.array([0, 5, 1]))
    found = registry["linear_cross_entropy"](x, weight, labels, ignore_index=-100, with_grads=True)
    with pytest.raises(IndexRangeError, match="linear_cross_entropy: index 5"):
        found[0].item()
    assert abs(found[0].item() - 2 * np.log(5)) < 1e-5
    assert not found[1].numpy()[1].any()


def test_a_tied_weight_gets_one_gradient_in_its_place(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    """The head's gradient is written where it stays, unscaled in backward, and the embedding's rows are added there."""
    rng = np.random.default_rng(2)
    values, ids = rng.standard_normal((40, 16)), rng.integers(0, 40, (2, 9))
    weight = Parameter(genesis.tensor(values, dtype="bfloat16", device="cuda"))
    flat, tokens = FlatBuffers([weight]), genesis.tensor(ids, device="cuda")
    found = F.linear_cross_entropy(F.embedding(tokens, weight), weight, tokens, shift=1)
    assert [name for name, _ in launched].count("exponentials") == 1
    found.backward()
    assert weight.grad.array.data_ptr() == flat.view(flat.gradients, 0).data_ptr()
    wide = weight.array.numpy().astype(np.float64)
    _, dx, dw = linear_cross_entropy_oracle(
        wide[ids].reshape(-1, 16), wide, ids, ignore_index=-100, with_grads=True, mean=True, shift=1
    )
    np.add.at(dw, ids.reshape(-1), dx)
    assert distance(weight.grad.array, dw) < 4 * HALF_UNIT[bfloat16]


# --- Embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(700,), (35, 20)])
@pytest.mark.parametrize("ranked", (True, False))
def test_ids_are_sorted_in_order_of_position(ranked: bool, shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(embedding, "RANKED", 1 << 20 if ranked else 0)
    ids = np.random.default_rng(3).integers(0, 50, shape)
    ids[ids > 40] = 151_935
    stored = on_device(np.asfortranarray(ids).T)  # ids lie the other way round in memory
    found = embedding._sorted_ids("embedding", stored.view(shape, stored.strides[::-1]), 151_936, 8)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(found.keys.numpy().reshape(-1), ids.reshape(-1)[order])
    assert found.order is not None
    np.testing.assert_array_equal(found.order.numpy().reshape(-1), order)


def test_only_rows_that_occur_are_touched() -> None:
    total = np.full((50, 40), np.nan, np.float32)
    ids = np.array([7, 3, 7, 49, 7])
    total[ids] = 1
    g = np.arange(200.0, dtype=np.float32).reshape(5, 40)
    target = on_device(total)
    registry["embedding_add_"](target, on_device(g), on_device(ids))
    np.add.at(total, ids, g)
    np.testing.assert_array_equal(target.numpy(), total)

"""Cross entropy of rows that a program reads in several steps, with and without the next one on its way."""

from __future__ import annotations

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import CPU, Device, backend_for
from genesis.dtypes import DType, bfloat16, float32, int64
from genesis.errors import UsageError
from genesis.kernels.loss import loss as kernels
from genesis.ops.loss import cross_entropy, linear_cross_entropy
from tests.ops.samples.losses import cross_entropy_oracle

CUDA = Device("cuda", 0)


def on_gpu(values: np.ndarray, dtype: DType, device: Device = CUDA) -> Array:
    array = empty(values.shape, dtype, device)
    backend_for(device).from_numpy(values, array)
    return array


@pytest.mark.parametrize("many", (1, kernels.MANY_ROWS))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_rows_of_several_steps(many: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MANY_ROWS", many)
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(4, 9001)) * 5).astype(np.float32)
    x[1] -= np.linspace(0, 300, 9001, dtype=np.float32)  # the maximum comes first, or last
    x[2] += np.linspace(0, 300, 9001, dtype=np.float32)
    if not smoothing:
        x[3, :5000] = -np.inf
    labels = np.array([0, 4096, 9000, 8191])
    attrs = {"ignore_index": -100, "label_smoothing": smoothing, "z_loss": 1e-4}
    got = cross_entropy(on_gpu(x, float32), on_gpu(labels, int64), **attrs)
    want = cross_entropy_oracle(np.maximum(x.astype(np.float64), -1e30), labels, **attrs)  # whose mean is finite
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6)


def test_logits_of_several_steps() -> None:
    rng = np.random.default_rng(5)
    x, weight = rng.normal(size=(3, 16)).astype(np.float32), rng.normal(size=(5003, 16)).astype(np.float32)
    labels = np.array([5002, 17, 4096])
    logits = x.astype(np.float64) @ weight.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    arrays = (on_gpu(v, t) for v, t in ((x, float32), (weight, float32), (labels, int64)))
    loss, dx, dw = linear_cross_entropy(*arrays, ignore_index=-100, with_grads=True)
    np.testing.assert_allclose(loss.numpy(), -np.log(p[range(3), labels]).sum(), rtol=2e-6)
    p[range(3), labels] -= 1
    np.testing.assert_allclose(dx.numpy(), p @ weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw.numpy(), p.T @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for infinite and NaN values
@pytest.mark.parametrize(("device", "dtype"), [(CPU, float32), (CUDA, float32), (CUDA, bfloat16)], ids=str)
def test_a_row_whose_loss_is_nan_has_no_hit(device: Device, dtype: DType) -> None:
    """All logits of row 2 are NaN. Those of class 5, the label of row 3, are infinite in rows 1 and 3, then NaN."""
    rng = np.random.default_rng(6)
    x, weight = rng.normal(size=(5, 16)), rng.normal(size=(40, 16))
    x[:, 0] = weight[:, 0] = 0
    labels = (x @ weight.T).argmax(1)
    labels[2], labels[3], x[1, 0], x[2], x[3, 0] = 0, 5, 1e30, np.nan, 1e30
    for value, expected in ((1e30, 2), (np.nan, 0)):
        weight[5, 0] = value
        arrays = [on_gpu(v, t, device) for v, t in ((x, dtype), (weight, dtype), (labels, int64))]
        loss, hits = linear_cross_entropy(*arrays, ignore_index=-100, with_grads=False, with_hits=True)
        assert np.isnan(loss.item()) and hits.item() == expected


def test_hits_are_not_counted_with_gradients() -> None:
    x, labels = (on_gpu(np.zeros(shape), dtype, CPU) for shape, dtype in (((2, 2), float32), (2, int64)))
    with pytest.raises(UsageError, match="with_grads or with_hits"):
        linear_cross_entropy(x, x, labels, ignore_index=-100, with_grads=True, with_hits=True)

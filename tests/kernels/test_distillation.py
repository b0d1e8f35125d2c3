"""The divergence between a student and a teacher on a device beyond the small samples: several chunks, many tiles,
logits that are far apart, a teacher that is the student, and what is counted as an agreement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis.kernels.loss.distillation as kernels
import genesis.kernels.loss.labelled as labelled
from genesis.array import Array, empty
from genesis.backend import CPU, Device, backend_for
from genesis.dtypes import DType, as_dtype, bfloat16, float32
from genesis.op import registry
from tests.ops.samples.distillation import distillation_oracle

CUDA = Device("cuda", 0)
HALF_UNIT = {bfloat16: 2.0**-9, float32: 2.0**-24}
ATTRS: dict[str, Any] = {"ignore_index": -100, "shift": 1, "with_grads": True}


def on(device: Device, values: np.ndarray, dtype: DType | None = None) -> Array:
    array = empty(values.shape, dtype or as_dtype(values.dtype), device)
    backend_for(device).from_numpy(values, array)
    return array


def inputs(dtype: DType, size: float = 2.0, device: Device = CUDA) -> list[Array]:
    """150 rows, of which some have no label, over 141 classes; the teacher has 11 classes more."""
    rng = np.random.default_rng(3)
    x, teacher_x = rng.standard_normal((150, 32)), rng.standard_normal((150, 24))
    weight, teacher_weight = rng.standard_normal((141, 32)), rng.standard_normal((152, 24))
    labels = rng.integers(0, 141, (2, 75))
    labels[:, ::4] = -100
    arrays = [x, weight * size / 32**0.5, teacher_x, teacher_weight * size / 24**0.5]
    return [*(on(device, a, dtype) for a in arrays), on(device, labels)]


def errors(found: tuple[Array, ...], arrays: list[Array], **attrs: Any) -> list[float]:
    """Norms of the errors relative to the norms of the expected values."""
    expected = distillation_oracle(*(a.numpy().astype(np.float64) for a in arrays[:4]), arrays[4].numpy(), **attrs)
    pairs = zip((each.numpy().astype(np.float64) for each in found), expected, strict=True)
    return [float(np.linalg.norm(f - e) / np.linalg.norm(e)) for f, e in pairs]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
def test_chunks_add_up(beta: float, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORKSPACE", 1)
    monkeypatch.setattr(kernels, "ROW_BLOCK", 64)  # several tiles in a row
    monkeypatch.setattr(labelled, "MIN_ROWS", 128)  # two chunks
    arrays, attrs = inputs(dtype), {**ATTRS, "beta": beta, "temperature": 1.5}
    found = errors(registry["linear_distillation"](*arrays, **attrs), arrays, **attrs)
    assert max(found[:2]) < 1e-6
    assert max(found[2:]) < 3 * HALF_UNIT[dtype] + 1e-6


@pytest.mark.sample
@pytest.mark.parametrize("device", (CPU, CUDA), ids=str)
@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
def test_far_logits_stay_finite(beta: float, device: Device) -> None:
    arrays = inputs(float32, size=100.0, device=device)
    attrs = {**ATTRS, "beta": beta, "temperature": 1.0}
    found = registry["linear_distillation"](*arrays, **attrs)
    assert all(np.isfinite(each.numpy()).all() for each in found)
    narrow = [each.numpy().astype(np.float64) for each in arrays[:4]]
    wide = registry["linear_distillation"](*(on(CPU, a) for a in narrow), on(CPU, arrays[4].numpy()), **attrs)
    for f, w in zip(found, wide, strict=True):
        # Where p is nearly 1 the gradient is a difference of equal terms, whose size the error is relative to.
        assert np.linalg.norm(f.numpy() - w.numpy()) < 1e-4 * (10 + np.linalg.norm(w.numpy()))


@pytest.mark.sample
@pytest.mark.parametrize("device", (CPU, CUDA), ids=str)
@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
def test_a_student_learns_nothing_from_itself(beta: float, device: Device) -> None:
    x, weight, _, _, labels = inputs(float32, device=device)
    found = registry["linear_distillation"](x, weight, x, weight, labels, **ATTRS, beta=beta, temperature=2.0)
    loss, figures, dx, dw = (each.numpy() for each in found)
    rows = int((labels.numpy()[:, 1:] >= 0).sum())
    assert abs(loss) < 1e-5
    assert figures[0] == figures[1]
    assert figures[2] == rows
    assert max(np.abs(dx).max(), np.abs(dw).max()) < 1e-5


@pytest.mark.parametrize("device", (CPU, CUDA), ids=str)
def test_agreements_are_rows_with_the_same_likeliest_class(device: Device) -> None:
    arrays = inputs(float32, device=device)
    found = registry["linear_distillation"](*arrays, **{**ATTRS, "with_grads": False}, beta=0.5, temperature=1.0)
    x, weight, teacher_x, teacher_weight, labels = (each.numpy() for each in arrays)
    likeliest = (x @ weight.T).argmax(1), (teacher_x @ teacher_weight[:141].T).argmax(1)
    agrees = np.equal(*likeliest).reshape(2, 75)[:, :-1] & (labels[:, 1:] >= 0)
    assert found[1].numpy()[2] == agrees.sum()

"""Operands side by side along k, and the product with low-rank pairs that they make one."""

from __future__ import annotations

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import bfloat16
from genesis.kernels.gemm.gated import adapted_gemm_swiglu_into
from genesis.kernels.gemm.low_rank import can_extend, concat_columns
from genesis.ops.low_rank import LowRank, Operands, Pair
from genesis.ops.shape import window

CUDA = Device("cuda", 0)


def on_gpu(values: np.ndarray) -> Array:
    array = empty(values.shape, bfloat16, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


@pytest.mark.parametrize(("rows", "width", "rank", "parts"), [(70, 136, 8, 1), (66, 120, 16, 2), (6, 3, 2, 3)])
def test_rows_are_side_by_side(rows: int, width: int, rank: int, parts: int) -> None:
    """Also where tiles divide nothing, an operand is a window, and memory held other values before."""
    rng = np.random.default_rng(0)
    x, u = on_gpu(rng.normal(size=(rows, width + 5))), on_gpu(rng.normal(size=(rows, rank)))
    x = window(x, 2, 2 + width)
    on_gpu(np.full((rows, width + parts * rank), np.nan))  # freed, and taken again by what follows
    found = wide(concat_columns(x, u, parts))
    want = np.zeros((rows, width + parts * rank))
    want[:, :width] = wide(x)
    for i in range(parts):
        part = slice(i * rows // parts, (i + 1) * rows // parts)
        want[part, width + i * rank : width + (i + 1) * rank] = wide(u)[part]
    np.testing.assert_array_equal(found, want)


def test_copies_must_be_shorter_than_what_they_save() -> None:
    assert can_extend(8192, 896, 32)
    assert not can_extend(512, 896, 32)
    assert not can_extend(8192, 896, 12)


def test_gate_and_up_with_pairs_are_one_product() -> None:
    """gate, up and silu(gate)·up are those of the formula, each rounded once."""
    m, f, k, r = 70, 72, 40, 8
    rng = np.random.default_rng(3)
    x, w, a, b = (
        on_gpu(rng.normal(size=shape) / np.sqrt(shape[-1]))
        for shape in ((m, k), (2 * f, k), (2 * r, k), (2 * f, r))
    )  # fmt: skip
    h, gate_up, u = (on_gpu(np.full((m, n), np.nan)) for n in (f, 2 * f, 2 * r))
    low_rank = LowRank((Pair(0, f, r, 2.0), Pair(f, 2 * f, r, 2.0)), 2)
    assert adapted_gemm_swiglu_into(h, gate_up, u, x, w, Operands([a], [b]), low_rank)
    np.testing.assert_allclose(wide(u), 2 * wide(x) @ wide(a).T, rtol=2.0**-8, atol=1e-5)
    want = wide(x) @ wide(w).T
    for i in range(2):
        part = slice(i * f, (i + 1) * f)
        want[:, part] += wide(u)[:, i * r : (i + 1) * r] @ wide(b)[part].T
    np.testing.assert_allclose(wide(gate_up), want, rtol=2.0**-8, atol=1e-5)
    gate, up = np.split(wide(gate_up), 2, -1)
    np.testing.assert_allclose(wide(h), gate / (1 + np.exp(-gate)) * up, rtol=1.01 * 2.0**-8, atol=1e-6)


@pytest.mark.parametrize("change", ["rank", "apart", "factors"])
def test_other_pairs_are_left_to_the_general_way(change: str) -> None:
    """Nothing is written then."""
    x, w, a, b = (on_gpu(np.ones(shape)) for shape in ((16, 8), (16, 8), (16, 8), (16, 8)))
    h, gate_up, u = (on_gpu(np.full((16, n), 7.0)) for n in (8, 16, 16))
    ranks = (12, 4) if change == "rank" else (8, 8)
    operands = Operands([a], [b, b] if change == "apart" else [b], b if change == "factors" else None)
    low_rank = LowRank((Pair(0, 8, ranks[0], 1.0), Pair(8, 16, ranks[1], 1.0)), 2)
    assert not adapted_gemm_swiglu_into(h, gate_up, u, x, w, operands, low_rank)
    assert (wide(h) == 7).all()
    assert (wide(gate_up) == 7).all()
    assert (wide(u) == 7).all()

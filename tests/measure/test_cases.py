"""Inputs made from a shape: every op in the table takes them, and what makes no sense is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

import genesis
from genesis.backend import CPU
from genesis.dtypes import DType, bfloat16, bool_, float32, int32
from genesis.errors import UsageError
from genesis.measure import cases
from genesis.measure.cases import (
    ALIASES,
    CATEGORIES,
    KINDS,
    SIZES,
    Case,
    choices,
    default_sizes,
    make_case,
    supported,
)
from genesis.op import execute, registry


def tiny(name: str, dtype: DType | None = None) -> Case:
    """The op's first case with no size above 16, of which products in 8-bit floats take multiples."""
    shape, axes = next(choices(name, CPU))
    return make_case(name, tuple(min(size, 16) for size in shape), axes, dtype, CPU)


def test_every_op_of_the_registry_is_made_and_run() -> None:
    """An op that is added without a kind fails here."""
    assert set(registry) <= set(supported())
    for name in supported():
        case = tiny(name)
        outputs = execute(case.op, case.inputs, dict(case.attrs))
        changed = [case.inputs[i] for i in case.op.mutates]
        assert outputs or changed, name
        assert all(np.isfinite(x.numpy().astype(np.float64)).all() for x in (*outputs, *changed)), name
        cost = case.op.cost(case.inputs, outputs, case.attrs)
        assert case.op.view is not None or cost.bytes > 0, name


def test_a_backward_op_is_called_as_the_gradient_calls_it() -> None:
    case = make_case("cross_entropy_backward", (3, 5), None, None, CPU)
    g, logits, labels, lse = case.inputs
    assert (g.shape, logits.shape, labels.shape, lse.shape) == ((3,), (3, 5), (3,), (3,))
    expected = np.log(np.exp(logits.numpy()).sum(-1))
    assert lse.numpy() == pytest.approx(expected, rel=1e-6)
    assert make_case("prod_backward", (3, 4), -1, None, CPU).attrs["axes"] == -1


def test_sizes_of_every_kind_fit_it_and_grow() -> None:
    for key, kind in KINDS.items():
        assert len(kind.sizes.split()) == len(SIZES) and kind.category in CATEGORIES
        shapes = [kind.shape_of(size) for size in SIZES]
        assert not kind.letters or {len(shape) for shape in shapes} <= {1, len(kind.letters)}
        if key in ("elementwise", "reduction", "attention", "rows by index", "swiglu"):
            small, medium, _, large, xlarge = map(math.prod, shapes)
            assert small < medium < large < xlarge


def test_every_axis_of_the_table_is_taken() -> None:
    """Counted on an op's shape alone: typical sizes are large."""
    reduced = {None: (), -1: (3, 4), (0, 1): (5,)}
    for name, kept in (("sum", reduced), ("argmax", {-1: (3, 4)}), ("softmax", {-1: (3, 4, 5)})):
        asked = [axes for _, axes in choices(name, CPU)]
        assert set(asked) == set(kept)
        for axes in set(asked):
            case = make_case(name, (3, 4, 5), axes, None, CPU)
            [out] = execute(case.op, case.inputs, dict(case.attrs))
            assert (case.axes, out.shape) == (axes, kept[axes])


def test_the_table_names_ops_of_the_registry() -> None:
    assert set(ALIASES.values()) <= set(registry)
    assert {name for kind in KINDS.values() for name in kind.calls} <= {*registry, *ALIASES}


def test_an_old_gpu_is_not_given_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = genesis.Device("cuda")
    assert make_case("quantize_rows", (2, 16), None, None, gpu).dtype is float32
    monkeypatch.setattr(cases, "get_device_capability", lambda device: (8, 0))
    for name in ("quantize_rows", "quantized_matmul"):
        with pytest.raises(UsageError, match=f"{name} needs compute capability 8.9, and cuda:0 has 8.0"):
            make_case(name, (16, 16, 16), None, None, gpu)
        make_case(name, (16, 16, 16), None, None, CPU)
    make_case("matmul", (16,), None, None, gpu)


def test_what_is_measured_when_no_shape_is_given() -> None:
    gpu = genesis.Device("cuda")
    assert [shape[0] for shape, _ in choices("add", CPU)] == [256, 1024, 4096]
    assert [shape[0] for shape, _ in choices("add", gpu)] == [256, 1024, 32, 4096, 8192]
    assert default_sizes(CPU, is_fast=True) == ("medium",) and default_sizes(gpu, is_fast=True) == ("large",)
    assert [axes for _, axes in choices("reduce_sum", CPU)][:3] == [None, -1, (0, 1)]
    assert list(choices("sum", CPU, [(3, 4)])) == [((3, 4), None)]
    assert list(choices("softmax", CPU, [(3, 4)])) == [((3, 4), -1)]
    assert list(choices("sum", CPU, [(3, 4)], [0])) == [((3, 4), 0)]


def test_the_dtype_is_the_first_that_the_op_takes() -> None:
    assert tiny("exp").dtype is float32
    assert tiny("bitwise_and").dtype is int32
    assert tiny("logical_and").dtype is float32
    assert tiny("exp", bfloat16).arrays[0].dtype is bfloat16
    assert tiny("sum", bool_).arrays[0].dtype is bool_


def test_operands_are_described_by_letters() -> None:
    x, gain, weight, none, gate, up = make_case("norm_mlp", (2, 3, 5), None, None, CPU).inputs
    assert none is None and [a.shape for a in (x, gain, weight, gate, up)] == [(2, 3), (3,), (3, 5), (5, 3), (5, 3)]
    assert np.abs(gate.numpy()).max() <= 3**-0.5
    step = make_case("adamw_split_step", (4,), None, None, CPU)
    assert [a.dtype.name for a in step.arrays] == ["bfloat16", "int16", "float32", "float32", "float32"]
    assert step.inputs[-3:] == (1e-3, 3, 1.0)


def test_an_embedding_reads_each_row_once() -> None:
    ids, _ = make_case("embedding", (6, 2), None, None, CPU).arrays
    assert sorted(ids.numpy().tolist()) == list(range(6))

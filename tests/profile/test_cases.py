"""Inputs made from a shape: every op in the table takes them, and what makes no sense is refused."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis.backend import CPU
from genesis.dtypes import DType, bfloat16, bool_, float32, int32
from genesis.errors import UsageError
from genesis.op import execute, registry
from genesis.profile import cases
from genesis.profile.cases import ALIASES, KINDS, Case, choices, kind_of, label_of, make_case, op_named, supported


def tiny(name: str, dtype: DType | None = None) -> Case:
    """The op's first typical case with no size above 16, of which products in 8-bit floats take multiples."""
    shape, axes = next(choices(name, CPU))
    return make_case(name, tuple(min(size, 16) for size in shape), axes, dtype, CPU)


@pytest.mark.parametrize("name", supported())
def test_every_op_takes_the_inputs_that_are_made_for_it(name: str) -> None:
    case = tiny(name)
    outputs = execute(case.op, case.inputs, dict(case.attrs))
    assert outputs
    assert all(np.isfinite(out.numpy().astype(np.float64)).all() for out in outputs)


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
    known = set(registry) | set(ALIASES)
    assert set(ALIASES.values()) <= set(registry)
    for kind in KINDS.values():
        assert set(kind.names) <= known


def test_every_elementwise_op_is_supported() -> None:
    ops = {o.name for o in registry.values() if o.elementwise and o.family in ("elementwise", "activation")}
    assert ops <= set(supported())


def test_the_issues_names_are_known() -> None:
    assert op_named("reduce_sum")[0] is registry["sum"]
    assert op_named("reduce_max")[0] is registry["amax"]
    assert op_named("transpose")[0] is registry["copy"]
    assert kind_of("transpose") is KINDS["transpose"]
    for name in ("linear", "rms_norm", "softmax", "attention", "swiglu", "rope", "embedding", "cross_entropy", "copy"):
        assert name in supported()


def test_an_old_gpu_is_not_given_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = genesis.Device("cuda")
    assert make_case("quantize_rows", (2, 16), None, None, gpu).dtype is float32
    monkeypatch.setattr(cases, "get_device_capability", lambda device: (8, 0))
    for name in ("quantize_rows", "quantized_matmul"):
        with pytest.raises(UsageError, match=f"{name} needs compute capability 8.9, and cuda:0 has 8.0"):
            make_case(name, (16, 16, 16), None, None, gpu)
        make_case(name, (16, 16, 16), None, None, CPU)
    make_case("matmul", (16,), None, None, gpu)


def test_typical_sizes_and_axes() -> None:
    assert list(choices("reduce_sum", CPU)) == [((4, 512, 896), axes) for axes in (None, -1, (0, 1))]
    assert [shape[0] for shape, _ in choices("add", CPU)] == [256, 512, 2048, 4096]
    assert [shape[0] for shape, _ in choices("add", genesis.Device("cuda"))][-1] == 8192
    assert [shape[0] for shape, _ in choices("matmul", CPU)] == [512, 1024]
    assert [shape[0] for shape, _ in choices("matmul", genesis.Device("cuda"))][-1] == 4096
    assert list(choices("sum", CPU, [(3, 4)])) == [((3, 4), None)]
    assert list(choices("softmax", CPU, [(3, 4)])) == [((3, 4), -1)]
    assert list(choices("sum", CPU, [(3, 4)], [0])) == [((3, 4), 0)]


def test_labels_say_what_was_asked() -> None:
    assert label_of("sum", (4, 512), None) == "4x512 over all"
    assert label_of("sum", (4, 512), (0, 1)) == "4x512 over 0,1"
    assert label_of("softmax", (4, 512), -1) == "4x512 over -1"
    assert label_of("add", (4,), None) == "4"


def test_the_dtype_is_the_first_that_the_op_takes() -> None:
    assert tiny("exp").dtype is float32
    assert tiny("bitwise_and").dtype is int32
    assert tiny("logical_and").dtype is float32
    assert tiny("exp", bfloat16).arrays[0].dtype is bfloat16
    assert tiny("sum", bool_).arrays[0].dtype is bool_


def test_a_transpose_is_not_contiguous() -> None:
    x = make_case("transpose", (3, 5), None, None, CPU).arrays[0]
    assert (x.shape, x.strides) == ((3, 5), (1, 3))


def test_values_differ_between_operands_and_not_between_cases() -> None:
    x, y = (a.numpy() for a in make_case("add", (50,), None, None, CPU).arrays)
    assert not np.array_equal(x, y)
    assert np.array_equal(x, make_case("add", (50,), None, None, CPU).arrays[0].numpy())


def test_an_embedding_reads_each_row_once() -> None:
    ids, _ = make_case("embedding", (6, 2), None, None, CPU).arrays
    assert sorted(ids.numpy().tolist()) == list(range(6))


@pytest.mark.parametrize(
    ("name", "shape", "axes", "dtype", "where", "what"),
    [
        ("matmul", (2, 3), None, None, "--shape", "N, or M,K,N"),
        ("rope", (1, 2, 3, 5), None, None, "--shape", "even head size"),
        ("sum", (2, 3), 2, None, "--axis", "out of range"),
        ("softmax", (2, 3), 5, None, "--axis", "out of range"),
        ("softmax", (2, 3), (0, 1), None, "--axis", "takes one axis"),
        ("sort", (2, 3), None, None, "--axis", "takes one axis"),
        ("sum", (2, 3), (0, 0), None, "--shape and --axis", ""),
        ("bitwise_and", (2,), None, float32, "--dtype", "does not take float32"),
        ("mean", (2,), None, int32, "--dtype", "takes float tensors"),
    ],
)
def test_what_an_op_does_not_take_is_a_usage_error(
    name: str, shape: tuple[int, ...], axes: int | tuple[int, ...] | None, dtype: DType | None, where: str, what: str
) -> None:
    with pytest.raises(UsageError) as error:
        make_case(name, shape, axes, dtype, CPU)
    assert error.value.where == where
    assert what in error.value.what


def test_an_unknown_op_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError) as error:
        op_named("reduce_summ")
    assert (error.value.what, error.value.next) == ("there is no op reduce_summ", "did you mean reduce_sum?")
    with pytest.raises(UsageError, match="ops: abs add"):
        op_named("qqqqqq")


def test_an_op_without_a_maker_says_which_have_one() -> None:
    with pytest.raises(UsageError) as error:
        op_named("adamw_step")
    assert error.value.what == "the inputs of adamw_step cannot be made from a shape"
    assert {"add", "reduce_sum", "matmul"} <= set(error.value.next.replace("\n", " ").split(" "))


def test_an_axis_for_an_op_that_has_none() -> None:
    with pytest.raises(UsageError, match="add has no axis"):
        list(choices("add", CPU, [(2,)], [0]))

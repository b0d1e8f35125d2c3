"""The Op record and dispatch: registration, out=, observers, costs, errors that name the op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from genesis.array import Array, Spec, empty, from_numpy
from genesis.backend import CPU, Device
from genesis.dtypes import bool_, float16, float32, float64, int64
from genesis.errors import DeviceError, DTypeError, GradientError, IndexRangeError, ShapeError
from genesis.op import Context, Cost, Op, common_device, observe, op, registry
from genesis.ops import elementwise
from genesis.ops.elementwise import add, exp, mul
from tests.ops.layouts import memory, place


def array(*values: float) -> Array:
    return from_numpy(np.array(values, np.float64))


@pytest.fixture
def temporary() -> Iterator[None]:
    """Ops registered by the test are forgotten after it."""
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


# --- Registration -----------------------------------------------------------------------------------------------------


def test_the_decorator_registers_under_the_modules_name(temporary: None) -> None:
    @op("halve", lambda x: Spec(x.shape, x.dtype))
    def halve(out: np.ndarray, x: np.ndarray) -> None:
        """Half of x."""
        out[...] = x / 2

    assert registry["halve"] is halve and halve.family == "test_op"
    assert halve(array(4, 6)).numpy().tolist() == [2, 3]
    with pytest.raises(AssertionError, match="op halve is registered twice"):
        op("halve", lambda x: Spec(x.shape, x.dtype))(halve.reference)


# --- Running ----------------------------------------------------------------------------------------------------------


def test_several_outputs(temporary: None) -> None:
    def reference(out: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> None:
        out[0][...], out[1][...] = x + 1, x > 1

    two = Op("two", reference, lambda x: (Spec(x.shape, x.dtype), Spec(x.shape, bool_)))
    first, second = two(array(1, 2))
    assert first.numpy().tolist() == [2, 3] and second.numpy().tolist() == [False, True]
    with pytest.raises(ShapeError, match="two has 2 outputs and takes no out="):
        two(array(1, 2), out=array(0, 0))


def test_an_op_that_mutates_raises_the_versions_of_what_it_changed(temporary: None) -> None:
    def reference(out: tuple[()], x: np.ndarray, step: np.ndarray) -> None:
        x -= step

    descend = Op("descend", reference, lambda x, step: (), mutates=(0,))
    x, step = array(1, 2), array(0.5, 0.5)
    assert descend(x, step) == ()
    assert x.numpy().tolist() == [0.5, 1.5]
    assert (x.storage.version, step.storage.version) == (1, 0)


def test_an_op_may_change_an_input_and_have_an_output(temporary: None) -> None:
    def reference(out: np.ndarray, total: np.ndarray, x: np.ndarray) -> None:
        total += x
        out[...] = total

    accumulate = Op("accumulate", reference, lambda total, x: Spec(x.shape, x.dtype), mutates=(0,))
    total, target = array(1, 2), empty((2,), float64)
    assert accumulate(total, array(1, 1)).numpy().tolist() == [2, 3] == total.numpy().tolist()
    assert accumulate(total, array(1, 1), out=target) is target
    assert target.numpy().tolist() == [3, 4] == total.numpy().tolist()
    assert accumulate(total, array(1, 1), out=(target,)) is target
    assert (total.storage.version, target.storage.version) == (3, 2)


def test_out_is_filled_and_returned() -> None:
    target = empty((2,), float64)
    assert add(array(1, 2), array(3, 4), out=target) is target
    assert target.numpy().tolist() == [4, 6] and target.storage.version == 1


def test_out_of_a_wider_type_is_cast_into() -> None:
    target = empty((2,), float64)
    add(from_numpy(np.array([1, 2], np.float32)), 0.5, out=target)
    assert target.numpy().tolist() == [1.5, 2.5]
    narrow = empty((2,), float16)
    add(array(1, 2), 1 / 3, out=narrow)
    assert narrow.numpy().tolist() == np.array([4 / 3, 7 / 3]).astype(np.float16).tolist()


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_out_may_overlap_an_input_in_any_way(shift: int) -> None:
    values = np.arange(10.0)
    base = from_numpy(values.copy())
    source, target = base.view((8,), (1,), 1), base.view((8,), (1,), 1 + shift)
    mul(source, 10.0, out=target)
    assert target.numpy().tolist() == (values[1:9] * 10).tolist()
    outside = sorted(set(range(10)) - set(range(1 + shift, 9 + shift)))
    assert base.numpy()[outside].tolist() == outside


def test_out_may_be_the_transpose_of_the_input() -> None:
    base = from_numpy(np.arange(9.0).reshape(3, 3))
    exp(base, out=base.view((3, 3), (1, 3)))
    np.testing.assert_array_equal(base.numpy(), np.exp(np.arange(9.0).reshape(3, 3)).T)


def test_a_refused_out_is_left_alone() -> None:
    target = place(np.zeros((2,)), "step")
    before = memory(target)
    for wrong, error, said in (
        ((array(1, 2, 3),), ShapeError, r"exp: the result has shape \(3,\), out has \(2,\)"),
        ((from_numpy(np.ones((2, 2))),), ShapeError, "exp: the result"),
    ):
        with pytest.raises(error, match=said):
            exp(*wrong, out=target)
    with pytest.raises(DTypeError, match=r"exp: a genesis\.float64 result does not fit into genesis\.int64"):
        exp(array(1, 2), out=empty((2,), int64))
    with pytest.raises(ShapeError, match="expanded view"):
        exp(array(1, 2), out=empty((1,), float64).view((2,), (0,)))
    assert memory(target) == before and target.storage.version == 0


def test_numbers_are_operands() -> None:
    assert add(array(1, 2), 1).numpy().tolist() == [2, 3]
    assert elementwise.sub(1, array(1, 2)).numpy().tolist() == [0, -1]
    assert add(from_numpy(np.array([250], np.uint8)), 10).numpy().tolist() == [4], "integers wrap around, as in torch"
    with pytest.raises(DTypeError, match="add: at least one operand must be a tensor"):
        add(1, 2)


def test_comparisons_round_a_number_to_the_tensors_type() -> None:
    """0.1 in float16 equals 0.1, as in torch."""
    for dtype in (np.float16, np.float32, np.float64):
        assert elementwise.eq(from_numpy(np.array([0.1], dtype)), 0.1).item() is True
    single, double = from_numpy(np.array([0.1], np.float32)), from_numpy(np.array(0.1))
    assert elementwise.eq(single, double).item() is True, "a 0-d operand does not widen"
    assert elementwise.eq(single, double.view((1,), (1,))).item() is False


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_errors_name_the_op_once() -> None:
    a, b = from_numpy(np.ones((2, 3))), from_numpy(np.ones((2, 4)))
    with pytest.raises(ShapeError) as caught:
        mul(a, b)
    assert caught.value.what == "mul: shapes (2, 3) and (2, 4) do not broadcast: dimension -1 is 3 against 4"
    with pytest.raises(DTypeError) as wrong:
        elementwise.bitwise_and(a, a)
    assert wrong.value.what.count("bitwise_and") == 1 and wrong.value.next


@pytest.mark.parametrize("kind", [ShapeError, DTypeError, IndexRangeError])
def test_the_name_is_added_where_it_is_missing(kind: Any, temporary: None) -> None:
    def infer(x: Array) -> Spec:
        raise kind("wrong", where="here", next="do this")

    broken = Op("broken", lambda out, x: None, infer)
    with pytest.raises(kind) as caught:
        broken(array(1))
    assert (caught.value.what, caught.value.where, caught.value.next) == ("broken: wrong", "here", "do this")


def test_devices_must_agree() -> None:
    a = array(1)
    elsewhere = Array(a.storage, a.shape, a.strides, a.dtype, Device("cuda", 1))
    with pytest.raises(DeviceError, match="add got tensors on cpu and on cuda:1"):
        add(a, elsewhere)
    with pytest.raises(DeviceError, match="add got tensors"):
        add(a, a, out=elsewhere)
    assert common_device("none", (1, 2.0)) is CPU
    with pytest.raises(DeviceError, match="cuda:7"):
        elementwise.fill(value=0, shape=(2,), dtype=float32, device=Device("cuda", 7))


def test_an_op_without_a_vjp_has_no_gradient() -> None:
    ctx = Context((), (), {}, (), ())
    with pytest.raises(GradientError, match="isnan has no gradient"):
        elementwise.isnan.gradient(ctx, array(1))


# --- What is kept for backward ----------------------------------------------------------------------------------------


def test_a_context_keeps_what_the_gradient_reads_and_no_more() -> None:
    x, y, out = array(1), array(2), array(2)

    def kept(o: Op, inputs: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
        ctx = o.context(inputs, (out,), {}, needs)
        return (*ctx.inputs, *ctx.outputs)

    assert kept(add, (x, y), (True, True)) == (None, None, None)
    assert kept(mul, (x, y), (True, True)) == (x, y, None)
    assert kept(mul, (x, y), (True, False)) == (None, y, None)
    assert kept(mul, (x, 3.0), (True, False)) == (None, 3.0, None)
    assert kept(exp, (x,), (True,)) == (None, out)
    assert kept(elementwise.pow, (x, y), (True, False)) == (x, y, None)
    assert kept(elementwise.pow, (x, y), (True, True)) == (x, y, out)
    ctx = mul.context((x, 3.0), (out,), {}, (True, False))
    assert ctx.input_specs == (Spec((1,), float64), None)


# --- Observing and counting -------------------------------------------------------------------------------------------


def test_observers_see_every_op_with_its_time() -> None:
    seen: list[tuple[str, int, float]] = []
    with observe(lambda o, inputs, outputs, attrs, seconds: seen.append((o.name, len(outputs), seconds))):
        y = mul(array(1, 2), 2.0)
        registry["reshape"](y, shape=(2, 1))
    mul(array(1), 1.0)
    assert [(name, count) for name, count, _ in seen] == [("mul", 1), ("reshape", 1)]
    assert all(0 <= seconds < 1 for _, _, seconds in seen)


def test_an_observer_is_removed_after_an_error() -> None:
    calls: list[int] = []
    with pytest.raises(ValueError, match="inside"), observe(lambda *a: calls.append(1)):
        raise ValueError("inside")
    mul(array(1), 1.0)
    assert not calls


def test_cost_counts_operations_and_bytes() -> None:
    x, y = from_numpy(np.ones((3, 4))), from_numpy(np.ones(4))
    out = mul(x, y)
    assert mul.cost((x, y), (out,), {}) == Cost(12, (12 + 4 + 12) * 8)
    assert exp.cost((x,), (out,), {}) == Cost(4 * 12, 24 * 8)
    assert registry["reshape"].cost((x,), (x,), {"shape": (12,)}) == Cost(0, 0)


def test_cost_counts_what_is_changed_in_place_twice_and_of_tables_what_is_touched() -> None:
    x, y = from_numpy(np.ones((3, 4))), from_numpy(np.ones((3, 4)))
    assert registry["sgd_step"].cost((x, y), (), {}).bytes == 3 * x.nbytes
    table, ids = from_numpy(np.ones((1000, 4))), from_numpy(np.array([1, 2, 2]))
    found = registry["embedding"](ids, table)
    assert registry["embedding"].cost((ids, table), (found,), {}).bytes == 2 * 3 * 32 + ids.nbytes
    assert registry["embedding_add_"].cost((table, found, ids), (), {}).bytes == 3 * 3 * 32 + ids.nbytes
    assert registry["index_get"].cost((table, ids), (found,), {"dims": (0,)}).bytes == 2 * 3 * 32 + ids.nbytes
    put = registry["index_put_"]
    assert put.cost((table, found, ids), (), {"dims": (0,)}).bytes == 2 * 3 * 32 + ids.nbytes
    assert put.cost((table, 1.0, ids), (), {"dims": (0,), "accumulate": True}).bytes == 2 * 3 * 32 + ids.nbytes

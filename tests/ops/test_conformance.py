"""The checks of the op suite are themselves checked: each must report an op that is wrong in the way it looks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import genesis.tensor  # noqa: F401  the class of which recorded results are made
from genesis.array import Array, Spec
from genesis.backend.cpu import CpuStorage, parallel
from genesis.dtypes import float32
from genesis.errors import ShapeError
from genesis.op import Op, registry
from genesis.ops.elementwise import mul
from tests.ops.comparing import compare, same_bits, tolerance
from tests.ops.conformance import Variant, problems, run, variants
from tests.ops.layouts import LAYOUTS, expandable, memory, place
from tests.ops.sampling import Case, Rows, normal

EPS = float(np.finfo(np.float64).eps)


def _double(out: np.ndarray, x: np.ndarray) -> None:
    out[...] = x * 2


def _same(x: Array) -> Spec:
    if not isinstance(x, Array):
        raise ShapeError(f"no array but {type(x).__name__}")
    return Spec(x.shape, x.dtype)


ROWS = Rows(
    "trial",
    lambda x: x * 2.0,
    lambda rng: [Case((normal(rng, 6, 4),)), Case((normal(rng, 5),)), Case((normal(rng),))],
    dtypes=("float64",),
    grads=lambda rng: [Case((normal(rng, 2, 3),))],
    errors=((Case(("text",)), ShapeError, "no array"),),
)


@contextmanager
def trial(reference: Callable[..., Any] = _double, infer: Any = _same, **rest: Any) -> Iterator[Op]:
    """A temporary op that doubles, or does so wrongly."""
    rest.setdefault("vjp", lambda ctx, g: (mul(g, 2.0),))
    op = Op("trial", reference, infer, **rest)
    try:
        yield op
    finally:
        del registry["trial"]


def failures(op: Op, row: Rows = ROWS) -> dict[str, list[str]]:
    """The messages of the checks that fail, by kind."""
    found: dict[str, list[str]] = {}
    for v in variants(row, op):
        try:
            run(v)
        except AssertionError as error:
            found.setdefault(v.check, []).append(str(error))
    return found


# --- Comparison -------------------------------------------------------------------------------------------------------


def test_tolerance_follows_its_formula() -> None:
    eps32, half = float(np.finfo(np.float32).eps), float(np.finfo(np.float16).eps)
    got = tolerance(np.array([3.0]), np.dtype(np.float32), 1, 1.0)
    assert got == pytest.approx(4 * eps32 * 3)
    got = tolerance(np.array([3.0]), np.dtype(np.float32), 16, 5.0)
    assert got == pytest.approx(4 * eps32 * (3 + 4 * 5))
    got = tolerance(np.array([3.0]), np.dtype(np.float16), 1, 1.0)
    assert got == pytest.approx(half / 2 * 3 + 4 * eps32 * 3, rel=1e-4)
    inner = tolerance(np.array([3.0]), np.dtype(np.float16), 16, 5.0, inner=2) - tolerance(
        np.array([3.0]), np.dtype(np.float16), 16, 5.0
    )
    assert inner == pytest.approx(2 * half / 2 * 5)
    wide = tolerance(np.array([3.0]), np.dtype(np.float32), 16, 5.0, inner=2)
    assert wide == tolerance(np.array([3.0]), np.dtype(np.float32), 16, 5.0)
    met = tolerance(np.array([3.0]), np.dtype(np.float32), 16, 5.0, inner=2, factors=np.dtype(np.float16))
    np.testing.assert_allclose(met - wide, 2.0**-11 * 2 * 5)


@pytest.mark.parametrize(
    ("actual", "expected", "options", "said"),
    [
        (np.ones(2), np.ones(3), {}, "shape"),
        (np.ones(2), np.ones(2, bool), {}, "result where"),
        (np.ones(2, bool), np.ones(2), {}, "result where"),
        (np.array([1.0, 1 + 8 * EPS]), np.ones(2), {}, r"element \(1,\)"),
        (np.array([1.0]), np.array([1 + 8 * EPS]), {"terms": 1, "scale": 100.0}, "element"),
        (np.array([1.0]), np.array([np.nan]), {}, "element"),
        (np.array([np.nan]), np.array([1.0]), {}, "element"),
        (np.array([np.inf]), np.array([1e308]), {}, "element"),
        (np.array([-np.inf]), np.array([np.inf]), {}, "element"),
        (np.array([65504.0], np.float16), np.array([70000.0]), {}, "element"),
        (np.array([1], np.int8), np.array([2]), {}, "element"),
        (np.array([True]), np.array([False]), {}, "element"),
        (np.array([-0.0]), np.array([0.0]), {"exact": True}, "element"),
        (np.array([1 + EPS]), np.array([1.0]), {"exact": True}, "element"),
        (np.array([1.001], np.float16), np.array([1.0]), {}, "element"),  # one unit in the last place, not half of one
    ],
)
def test_compare_reports(actual: np.ndarray, expected: np.ndarray, options: dict[str, Any], said: str) -> None:
    assert re.search(said, compare(actual, expected, **options))


@pytest.mark.parametrize(
    ("actual", "expected", "options"),
    [
        (np.array([1 + 2 * EPS, np.nan, np.inf]), np.array([1.0, np.nan, np.inf]), {}),
        (np.array([1 + 8 * EPS]), np.array([1.0]), {"terms": 4, "scale": 100.0}),
        (np.array([-0.0]), np.array([0.0]), {}),
        (np.array([np.inf], np.float16), np.array([70000.0]), {}),
        (np.array([-56], np.int8), np.array([200]), {}),  # integers wrap around
        (np.zeros((0, 3)), np.zeros((0, 3)), {}),
    ],
)
def test_compare_accepts(actual: np.ndarray, expected: np.ndarray, options: dict[str, Any]) -> None:
    assert not compare(actual, expected, **options)


def test_same_bits_sees_type_shape_and_sign() -> None:
    one = np.ones(2)
    assert same_bits(one, one.copy())
    assert not same_bits(one, np.ones(2, np.float32))
    assert not same_bits(one, np.ones((2, 1)))
    assert not same_bits(np.array([0.0]), np.array([-0.0]))


# --- Layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "strides", "offset"),
    [
        ("contiguous", (12, 4, 1), 0),
        ("transposed", (1, 2, 6), 0),
        ("step", (24, 8, 2), 1),
        ("offset", (12, 4, 1), 3),
        ("expanded", (0, 4, 1), 0),
    ],
)
def test_place_lays_values_out(layout: str, strides: tuple[int, ...], offset: int) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    if layout == "expanded":
        values = np.broadcast_to(values[:1], values.shape)
    array = place(values, layout)
    assert (array.strides, array.offset) == (strides, offset)
    assert np.array_equal(array.view_np(), values)
    assert (np.frombuffer(memory(array), np.uint8)[-8:] == 0xFF).all(), "the memory behind the values is no filler"


@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("shape", [(3,), (), (0, 3), (1, 5)])
def test_place_takes_any_shape(layout: str, shape: tuple[int, ...]) -> None:
    values = np.arange(float(np.prod(shape))).reshape(shape)
    assert np.array_equal(place(values, layout).view_np(), values)


def test_expandable_repeats_the_first_entry() -> None:
    repeated = expandable(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert repeated is not None and repeated.tolist() == [[1, 2], [1, 2]]
    assert expandable(np.ones((1, 3))) is None
    assert expandable(np.ones(())) is None


def test_memory_sees_what_is_written_beside_an_array() -> None:
    array = place(np.ones((2, 3)), "step")
    before = memory(array)
    storage = array.storage
    assert isinstance(storage, CpuStorage)
    storage.block[0] = 1
    assert memory(array) != before


# --- Checks of ops ----------------------------------------------------------------------------------------------------


def test_a_right_op_passes_and_every_kind_of_check_ran() -> None:
    with trial(elementwise=True) as op:
        assert failures(op) == {}
        kinds = {v.check for v in variants(ROWS, op)}
        assert kinds == {"value", "out", "alias", "threads", "gradient", "error"}
        assert any(v.number == -1 for v in variants(ROWS, op)), "no extreme values"
        assert {v.layout for v in variants(ROWS, op)} == set(LAYOUTS)


def test_a_value_wrong_in_the_last_places_is_found() -> None:
    with trial(lambda out, x: _double(out, x * (1 + 16 * EPS))) as op:
        assert "value" in failures(op)


def test_an_element_that_is_never_written_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        out.reshape(-1)[:-1] = x.reshape(-1)[:-1] * 2

    with trial(reference) as op:
        assert "nan" in failures(op)["value"][0]


def test_a_modified_input_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        _double(out, x)
        x += 1

    with trial(reference) as op:
        assert "input 0 was modified" in failures(op)["value"][0]


def test_memory_read_or_written_without_strides_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        flat = np.ndarray(x.size, x.dtype, np.lib.stride_tricks.as_strided(x, (x.size,), (x.itemsize,)))
        out[...] = flat.reshape(x.shape) * 2

    with trial(reference) as op:
        layouts = {m.split(":")[1].split()[-1] for m in failures(op)["value"]}
    assert {"transposed", "step", "expanded"} <= layouts
    assert "contiguous" not in layouts


@pytest.mark.parametrize(
    "infer", [lambda x: Spec((*x.shape, 1), x.dtype), lambda x: Spec(x.shape, float32)], ids=["shape", "dtype"]
)
def test_an_inferred_spec_that_the_oracle_contradicts_is_found(infer: Any) -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        out[...] = (x * 2).reshape(out.shape)

    with trial(reference, infer) as op:
        assert "value" in failures(op)


def test_a_result_that_differs_from_run_to_run_is_found() -> None:
    calls = [0]

    def reference(out: np.ndarray, x: np.ndarray) -> None:
        calls[0] += 1
        out[...] = x * 2 * (1 + calls[0] % 2 * EPS)

    with trial(reference) as op:
        assert any("second run" in m for m in failures(op)["value"])


def test_writing_beside_out_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        base = out.base
        assert isinstance(base, np.ndarray)
        base.view(np.uint8)[-1:] = 7  # the last byte of the whole block
        _double(out, x)

    with trial(reference) as op:
        assert any("beside" in m for m in failures(op)["out"])


def test_an_output_that_assumes_contiguous_out_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        out.reshape(-1)[...] = (x * 2).reshape(-1)  # a copy where out has gaps

    with trial(reference, elementwise=True) as op:
        assert any("other bits" in m for m in failures(op)["out"])


def test_reading_an_input_after_writing_over_it_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        out[...] = 2
        out *= x

    with trial(reference, elementwise=True) as op:
        assert set(failures(op)) == {"alias"}


def test_a_result_that_depends_on_the_split_is_found() -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        def work(start: int, stop: int) -> None:
            out[start:stop] = x[start:stop] * 2 * (1 + (start > 0) * EPS)

        if out.ndim:
            parallel(work, out.shape[0], out.size)
        else:
            _double(out, x)

    with trial(reference) as op:
        assert set(failures(op)) == {"threads"}


@pytest.mark.parametrize("factor", [2 * 1.0005, 2 * 0.9995, 0.0, float("nan")])
def test_a_gradient_that_is_wrong_by_a_little_is_found(factor: float) -> None:
    with trial(vjp=lambda ctx, g: (mul(g, factor),)) as op:
        assert "by backward" in failures(op)["gradient"][0]


def test_a_missing_gradient_is_found() -> None:
    with trial(vjp=lambda ctx, g: (None,)) as op:
        assert "gradient" in failures(op)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "raised nothing"),
        (TypeError("no array"), "raised TypeError"),
        (ShapeError("something else"), "does not match"),
    ],
)
def test_a_wrong_error_is_found(error: Exception | None, said: str) -> None:
    def infer(x: Any) -> Spec:
        if not isinstance(x, Array):
            if error is not None:
                raise error
            return Spec((), float32)
        return Spec(x.shape, x.dtype)

    def reference(out: np.ndarray, x: Any) -> None:
        if isinstance(x, np.ndarray):
            _double(out, x)

    with trial(reference, infer) as op:
        assert said in failures(op)["error"][0]


def test_a_failure_names_op_case_dtype_and_layout() -> None:
    with trial(lambda out, x: _double(out, x + 1)) as op:
        message = failures(op)["value"][0]
    assert message.startswith("trial: value of case 0 [(6, 4)] {} float64 contiguous: output 0: element (0, 0) is ")


# --- What must exist --------------------------------------------------------------------------------------------------


def _without(**fields: Any) -> Rows:
    return Rows(**{**ROWS.__dict__, **fields})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROWS], []),
        ([], ["trial has no samples"]),
        ([_without(cases=lambda rng: [])], ["trial has no samples"]),
        ([_without(grads=None)], ["trial has a gradient and no samples for it"]),
        ([_without(grads=lambda rng: [])], ["trial has a gradient and no samples for it"]),
        ([_without(errors=())], ["trial has no error case"]),
        ([ROWS, _without(op="trail")], ["rows name an op 'trail' that is not registered"]),
    ],
)
def test_an_op_without_samples_gradients_or_errors_is_reported(rows: list[Rows], said: list[str]) -> None:
    with trial() as op:
        assert problems({"trial": op}, rows) == said


def test_an_op_registered_without_samples_fails_the_registry_test() -> None:
    from tests.ops.test_registry import OPS
    from tests.ops.test_registry import ROWS as ALL_ROWS

    with trial():
        assert "trial has no samples" in problems(dict(registry), ALL_ROWS)
    assert "trial" not in OPS


def test_an_op_without_a_gradient_needs_no_gradient_samples() -> None:
    with trial(vjp=None) as op:
        assert problems({"trial": op}, [_without(grads=None)]) == []


def test_every_variant_says_what_it_is() -> None:
    with trial() as op:
        said = [str(v) for v in variants(ROWS, op)]
        assert len(said) == len(set(said))
        assert isinstance(next(variants(ROWS, op)), Variant)

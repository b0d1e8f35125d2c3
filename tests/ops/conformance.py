"""What every op must do, as checks that run one op on one case; `test_registry.py` runs them over the registry.

`variants` lists the checks of a row, and `run` does one. A check raises AssertionError with op, case, dtype and layout.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genesis.array import Array, Spec, from_numpy
from genesis.autograd import apply, grad, gradcheck
from genesis.autograd.record import TensorBase
from genesis.backend import CPU, cpu
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError, GenesisError, IndexRangeError, ShapeError
from genesis.op import Op
from tests.ops.comparing import compare, same_bits
from tests.ops.devices import current, moved, poisoned, using
from tests.ops.layouts import LAYOUTS, expandable, memory, place
from tests.ops.sampling import Case, Rows

__all__ = ["Variant", "main_dtype", "problems", "run", "variants"]


@dataclass(frozen=True)
class Variant:
    """One check of one case.

    Attributes:
        check: "value", "out", "alias", "threads", "gradient" or "error".
        number: the case's index, for messages; -1 for the extreme values.
    """

    row: Rows
    op: Op
    check: str
    case: Case
    number: int
    dtype: str = "float64"
    layout: str = "contiguous"

    def __str__(self) -> str:
        shapes = " ".join(str(x.shape) if isinstance(x, np.ndarray) else repr(x) for x in self.case.inputs)
        name = "extremes" if self.number < 0 else f"case {self.number}"
        return f"{self.op.name}: {self.check} of {name} [{shapes}] {self.case.attrs} {self.dtype} {self.layout}"


# --- Which checks there are -------------------------------------------------------------------------------------------


def generator(row: Rows) -> np.random.Generator:
    """Repeatable random numbers of a row."""
    return np.random.default_rng(zlib.crc32(row.op.encode()))


def is_float(x: Any) -> bool:
    """Whether an input of a case is one that takes the dtype under test."""
    return isinstance(x, np.ndarray) and x.dtype == np.float64


def variants(row: Rows, op: Op) -> Iterator[Variant]:
    """All checks of a row."""
    cases = [_with_arrays(case) for case in row.cases(generator(row))]
    for number, case in enumerate(cases):
        floats = any(is_float(x) for x in case.inputs)
        dtypes = (*row.dtypes, *row.int_dtypes)
        for dtype in dtypes if floats else dtypes[:1]:
            yield from _case_variants(row, op, case, number, dtype)
    if op.elementwise and row.extremes:
        for dtype in row.dtypes:
            extremes = extreme_case(row, cases, dtype)
            if extremes is not None:
                yield from (Variant(row, op, "value", extremes, -1, dtype, how) for how in ("contiguous", "step"))
    for number, case in enumerate(map(_with_arrays, row.grads(generator(row)) if row.grads is not None else ())):
        layouts = _layouts(row, case)[: 2 if number < 3 else 1]
        yield from (Variant(row, op, "gradient", case, number, layout=layout) for layout in layouts)
    for number, (case, _, _) in enumerate(row.errors):
        yield Variant(row, op, "error", case, number)


def main_dtype(v: Variant) -> str:
    """The dtype in which an op is checked most."""
    return "float32" if "float32" in v.row.dtypes else (*v.row.dtypes, *v.row.int_dtypes, "float64")[0]


def _with_arrays(case: Case) -> Case:
    """numpy's scalars, which its functions return for 0-d arrays, as 0-d arrays."""
    return Case(tuple(np.asarray(x) if isinstance(x, np.generic) else x for x in case.inputs), case.attrs)


def _case_variants(row: Rows, op: Op, case: Case, number: int, dtype: str) -> Iterator[Variant]:
    """Everything in float types; integers, whose arithmetic is exact, in two layouts and without threads."""
    floating = dtype in row.dtypes or not row.dtypes
    for layout in _layouts(row, case) if floating else _layouts(row, case)[:2]:
        yield Variant(row, op, "value", case, number, dtype, layout)
    if op.view is not None:
        return
    if not op.mutates:
        yield Variant(row, op, "out", case, number, dtype)
    if op.elementwise and floating and any(is_float(x) for x in case.inputs):
        yield Variant(row, op, "alias", case, number, dtype)
    if floating and number < 6:
        yield Variant(row, op, "threads", case, number, dtype, "step" if row.strided and number % 2 else "contiguous")


def _layouts(row: Rows, case: Case) -> list[str]:
    """The layouts that differ for this case."""
    arrays = [x for x in case.inputs if isinstance(x, np.ndarray)]
    found = ["contiguous"]
    if not row.strided or not arrays:
        return found
    if any(sum(s > 1 for s in x.shape) > 1 for x in arrays):
        found.append("transposed")
    if any(x.ndim for x in arrays):
        found.append("step")
    found.append("offset")
    if any(is_float(x) and expandable(x) is not None for x in arrays):
        found.append("expanded")
    assert set(found) <= set(LAYOUTS)
    return found


def extreme_case(row: Rows, cases: Sequence[Case], dtype: str) -> Case | None:
    """All combinations of the dtype's extreme values in the place of float arrays of the first case that has any."""
    template = next((c for c in cases if any(is_float(x) for x in c.inputs)), None)
    if template is None:
        return None
    info = np.finfo(np.float32) if dtype == "bfloat16" else np.finfo(dtype)
    largest = 3.3895313892515355e38 if dtype == "bfloat16" else float(info.max)
    subnormal = 2.0**-133 if dtype == "bfloat16" else float(info.smallest_subnormal)
    sizes = [0.0, subnormal, float(info.tiny), 0.75, 1.0, 3.0, largest, np.inf]
    values = np.array([*sizes, *(-s for s in sizes), np.nan])
    count = sum(is_float(x) for x in template.inputs)
    grid = iter(np.stack(np.meshgrid(*[values] * count, indexing="ij")).reshape(count, -1))
    length = len(values) ** count
    others = np.resize(np.array([True, False, False]), length)
    inputs = [
        next(grid) if is_float(x) else (np.resize(others, length).astype(x.dtype) if isinstance(x, np.ndarray) else x)
        for x in template.inputs
    ]
    return Case(tuple(inputs), template.attrs)


# --- Inputs -----------------------------------------------------------------------------------------------------------


def rounded(case: Case, dtype: str) -> list[Any]:
    """The inputs in the dtype under test: floats rounded to it, or to small integers."""
    target = as_dtype(dtype)

    def convert(x: np.ndarray) -> np.ndarray:
        if dtype == "bool":
            return np.asarray(x > 0)
        if not target.is_floating_point:
            x = np.rint(2 * x)
            x = np.abs(x) if dtype == "uint8" else x
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(target.numpy)

    return [convert(x) if is_float(x) else x for x in case.inputs]


def upcast(values: Sequence[Any]) -> list[Any]:
    """What the oracle gets: float64, int64 and bool arrays."""

    def widen(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.kind in "iu":
            return x.astype(np.int64)
        return x.copy() if x.dtype == np.bool_ else x.astype(np.float64)

    return [widen(x) for x in values]


def prepare(v: Variant) -> tuple[list[Any], list[Any]]:
    """The inputs of a variant as the oracle takes them (upcast) and as the op does (arrays in the variant's layout).

    Expanding repeats values: inputs under test take it where they have something to repeat; others are contiguous.
    """
    values = rounded(v.case, v.dtype)
    layouts = [v.layout] * len(values)
    if v.layout == "expanded":
        for i, x in enumerate(values):
            repeated = expandable(x) if is_float(v.case.inputs[i]) else None
            if repeated is not None:
                values[i] = repeated
            else:
                layouts[i] = "contiguous"
    arrays = [place(x, how) if isinstance(x, np.ndarray) else x for x, how in zip(values, layouts, strict=True)]
    return upcast(values), arrays


def outputs(op: Op, inputs: Sequence[Any], attrs: dict[str, Any]) -> tuple[Array, ...]:
    """Run an op; what it gives, and the inputs that it changed."""
    if current() != CPU and not any(isinstance(x, Array) for x in inputs):
        attrs = {**attrs, "device": current()}
    with poisoned():
        result = op(*inputs, **attrs)
    given = result if isinstance(result, tuple) else (result,)
    return (*given, *(inputs[i] for i in op.mutates))


def scales(op: Op, inputs: Sequence[Any], expected: np.ndarray) -> Any:
    """s of the tolerance: per element where the op is elementwise, else one number."""
    sizes = [np.abs(np.nan_to_num(x, nan=0, posinf=0, neginf=0)) for x in inputs if _numeric(x)]
    result = np.abs(np.nan_to_num(np.asarray(expected, np.float64), nan=0, posinf=0, neginf=0))
    if op.elementwise:
        return np.maximum(1.0, np.maximum.reduce([np.broadcast_to(s, result.shape) for s in (result, *sizes)]))
    return max(1.0, *(float(s.max()) for s in (result, *sizes) if np.size(s)), 1.0)


def _numeric(x: Any) -> bool:
    return (isinstance(x, np.ndarray) and x.dtype == np.float64) or isinstance(x, float)


# --- The checks -------------------------------------------------------------------------------------------------------


def run(v: Variant) -> None:
    """Do one check.

    Raises:
        AssertionError: naming op, case, dtype, layout, and what is wrong.
    """
    try:
        message = _CHECKS[v.check](v)
    except (GenesisError, TypeError, ValueError, IndexError) as error:
        raise AssertionError(f"{v}: raised {type(error).__name__}: {error}") from error
    assert not message, f"{v}: {message}"


def _rounded(v: Variant, inputs: Sequence[Any]) -> np.dtype | None:
    """The 2-byte type that a float32 operand is rounded to for a product with one of that type."""
    types = {x.dtype.numpy for x in inputs if isinstance(x, Array)} if v.row.narrows else set()
    return min(types, key=lambda t: t.itemsize) if len(types) > 1 else None


def check_value(v: Variant) -> str:
    """Values against the oracle; the spec as inferred; inputs untouched; a second run equal to the bit."""
    oracle_inputs, inputs = prepare(v)
    with np.errstate(all="ignore"):
        expected = v.row.oracle(*oracle_inputs, **v.case.attrs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    if v.op.view is not None and (refused := _refused_view(v, inputs)) is not None:
        return refused
    before = [memory(x) if isinstance(x, Array) else b"" for x in inputs]
    specs = v.op.infer(*inputs, **{k: a for k, a in v.case.attrs.items() if k != "device"})
    got = outputs(v.op, inputs, v.case.attrs)
    found = tuple(a.numpy() for a in got)
    found = found if v.row.seen is None else v.row.seen(found)
    if len(found) != len(expected):
        return f"{len(found)} outputs, the oracle has {len(expected)}"
    for i, (array, value) in enumerate(zip(found, expected, strict=True)):
        terms, scale = v.row.reduction(v.case), scales(v.op, oracle_inputs, value)
        exact = v.row.exact or v.op.view is not None
        inner = v.row.inner if current() != CPU else 0
        if wrong := compare(
            array, value, terms=terms, scale=scale, exact=exact, inner=inner, factors=_rounded(v, inputs)
        ):
            return f"output {i}: {wrong}"
    if wrong := _wrong_dtype(v, got):
        return wrong
    inferred = (specs,) if isinstance(specs, Spec) else tuple(specs)
    if inferred != (actual := tuple(Spec(a.shape, a.dtype) for a in got[: len(got) - len(v.op.mutates)])):
        return f"infer says {inferred}, the outputs are {actual}"
    for i, (x, old) in enumerate(zip(inputs, before, strict=True)):
        if isinstance(x, Array) and i not in v.op.mutates and memory(x) != old:
            return f"input {i} was modified"
    return _second_run(v, got) if v.layout == "contiguous" else ""


# Ops whose float results have a dtype of their own.
OWN_DTYPE = {
    "bincount": "sums of weights are float64, as in torch",
    "clip_factor": "the report is float32 for gradients of any dtype",
    "clip_factor_of_ranks": "the report is float32, and the figures float64",
    "total_norm": "one number for gradients of any dtype, at least float32",
}
# Outputs that are statistics or losses, by position: float32 for 2-byte inputs.
STATISTICS = {
    "attention": {1},
    "attention_packed": {1},
    "rms_norm": {1},
    "norm_linear": {1},
    "norm_mlp": {1},
    "norm_rope": {1},
    "layer_norm": {1, 2},
    "dora_factors": {1},
    "low_rank_backward": {3},  # of two pairs with factors
    "cross_entropy": {0, 1, 2},  # the third is the divisor of a mean
    "linear_token_log_probs": {0},
    "linear_cross_entropy": {0},
    "linear_distillation": {0, 1},
}


def _wrong_dtype(v: Variant, got: tuple[Array, ...]) -> str:
    """Float results have the dtype under test, or the one that the attribute `dtype` asks for."""
    if (
        v.row.seen is not None
        or v.dtype not in v.row.dtypes
        or v.op.name in OWN_DTYPE
        or not any(is_float(x) for x in v.case.inputs)
    ):
        return ""
    wanted = as_dtype(v.case.attrs.get("dtype") or v.dtype)
    wide = wanted if wanted.itemsize > 2 else as_dtype("float32")
    statistics = STATISTICS.get(v.op.name, set())
    expected = [wide if i in statistics else wanted for i in range(len(got))]
    pairs = zip(got, expected, strict=True)
    wrong = [a.dtype.name for a, dtype in pairs if a.dtype.is_floating_point and a.dtype is not dtype]
    return f"the result is {wrong[0]} for {v.dtype} inputs" if wrong else ""


def _second_run(v: Variant, first: tuple[Array, ...]) -> str:
    again = outputs(v.op, prepare(v)[1], v.case.attrs)
    differ = [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if not same_bits(a.numpy(), b.numpy())]
    return f"a second run gives other bits in outputs {differ}" if differ else ""


def _refused_view(v: Variant, inputs: list[Any]) -> str | None:
    """For a view op: empty where it rightly refuses this memory layout, None where it takes it and shares memory."""
    try:
        result = v.op(*inputs, **v.case.attrs)
    except ShapeError as error:
        try:
            with using(CPU):
                v.op.reference(prepare(v)[1][0].numpy(), **v.case.attrs)
        except ValueError:
            return ""
        return f"refused ({error}), but numpy can view it"
    return None if result.storage is inputs[0].storage else "the result of a view op does not share its input's memory"


def check_out(v: Variant) -> str:
    """out= gives the same bits, in contiguous memory and in memory with gaps, which stay as they are."""
    _, inputs = prepare(v)
    plain = outputs(v.op, inputs, v.case.attrs)
    if len(plain) != 1:
        return ""
    for layout in ("contiguous", "step", "transposed"):
        filler = np.frombuffer(b"\xff" * plain[0].dtype.itemsize, plain[0].dtype.numpy)[0]
        target = place(np.broadcast_to(filler, plain[0].shape), layout)
        version = target.storage.version
        result = v.op(*inputs, out=target, **v.case.attrs)
        if result is not target or target.storage.version != version + 1:
            return f"out= ({layout}) did not return its array with its version raised"
        if not same_bits(target.numpy(), plain[0].numpy()):
            return f"out= ({layout}) gives other bits"
        if memory(target) != memory(place(plain[0].numpy(), layout)):
            return f"out= ({layout}) wrote beside its elements"
    return ""


def check_alias(v: Variant) -> str:
    """An elementwise op may write over any input of the result's shape and dtype."""
    _, inputs = prepare(v)
    plain = outputs(v.op, inputs, v.case.attrs)[0]
    for i, x in enumerate(inputs):
        if isinstance(x, Array) and x.shape == plain.shape and x.dtype is plain.dtype:
            fresh = prepare(v)[1]
            if not same_bits(v.op(*fresh, out=fresh[i], **v.case.attrs).numpy(), plain.numpy()):
                return f"out= over input {i} gives other bits"
    return ""


def check_threads(v: Variant) -> str:
    """One thread and several give the same bits, also where pieces are of one row."""
    before = cpu._PARALLEL_FROM, cpu._workers.count
    results = []
    try:
        for count in (1, 2, 3):
            cpu._PARALLEL_FROM, cpu._workers.count = 1, count
            results.append([a.numpy().copy() for a in outputs(v.op, prepare(v)[1], v.case.attrs)])
    finally:
        cpu._PARALLEL_FROM, cpu._workers.count = before
    same = all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    return "" if same else "the number of threads changes bits"


def check_gradient(v: Variant) -> str:
    """The vjp through the tape, in float64: against central differences on the CPU, elsewhere against the CPU's."""
    function, checked = _leaves(v)
    if current() == CPU:
        gradcheck(function, checked, atol=1e-6, rtol=1e-5)
        return ""
    found = _gradients(function, checked)
    with using(CPU):
        expected = _gradients(*_leaves(v))
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        allowed = 1e-9 * (1 + float(np.abs(want).max(initial=0)))
        if not np.all(np.abs(got - want) <= allowed):
            return f"gradient {i} differs from the CPU's by {np.abs(got - want).max():.3g}"
    return ""


def _gradients(function: Any, leaves: list[TensorBase]) -> list[np.ndarray]:
    """Gradients of all leaves for fixed random gradients of the outputs."""
    outs = [o for o in function(*leaves) if o.array.dtype.is_floating_point and o.requires_grad]
    rng = np.random.default_rng(5)
    seeds = [TensorBase.wrap(moved(from_numpy(rng.standard_normal(o.array.shape)))) for o in outs]
    found = grad(outs, leaves, seeds, allow_unused=True)
    return [np.zeros(x.array.shape) if g is None else g.array.numpy() for g, x in zip(found, leaves, strict=True)]


def _leaves(v: Variant) -> tuple[Any, list[TensorBase]]:
    """The op as a function of the inputs to check, and those as leaves of the tape."""
    _, arrays = prepare(v)
    wanted = v.row.wrt if v.row.wrt is not None else tuple(i for i, x in enumerate(v.case.inputs) if is_float(x))
    checked = []
    for i in wanted:
        leaf = TensorBase.wrap(arrays[i])
        leaf._requires_grad = True
        checked.append(leaf)
    constants = [TensorBase.wrap(x) if isinstance(x, Array) else x for x in arrays]

    def function(*tensors: Any) -> Any:
        full = list(constants)
        for i, t in zip(wanted, tensors, strict=True):
            full[i] = t
        found = apply(v.op, *full, **v.case.attrs)
        outs = found if isinstance(found, tuple) else (found,)
        assert not any(o.requires_grad for i, o in enumerate(outs) if i in v.op.auxiliary), (
            "an auxiliary output requires a gradient"
        )
        return tuple(out for i, out in enumerate(outs) if i not in v.op.auxiliary)

    return function, checked


def check_error(v: Variant) -> str:
    """A wrong call raises the error that the row names, with a message that names the op."""
    _, kind, pattern = v.row.errors[v.number]
    attrs = {k: from_numpy(a) if isinstance(a, np.ndarray) else a for k, a in v.case.attrs.items()}
    inputs = [from_numpy(x) if isinstance(x, np.ndarray) else x for x in v.case.inputs]
    try:
        v.op(*inputs, **attrs)
    except kind as error:
        text = str(error)
    except Exception as error:
        return f"raised {type(error).__name__} ({error}), not {kind.__name__}"
    else:
        return f"raised nothing, expected {kind.__name__}"
    if not re.search(pattern, text):
        return f"the message {text!r} does not match {pattern!r}"
    named = kind not in (ShapeError, DTypeError, IndexRangeError) or v.op.name in text
    return "" if named else f"the message {text!r} does not name the op"


_CHECKS = {
    "value": check_value,
    "out": check_out,
    "alias": check_alias,
    "threads": check_threads,
    "gradient": check_gradient,
    "error": check_error,
}


# --- What rows must exist ---------------------------------------------------------------------------------------------


def problems(registry: dict[str, Op], rows: Sequence[Rows]) -> list[str]:
    """What is missing for every op to be tested: samples, gradient samples, an error case; and rows of unknown ops."""
    found = [f"rows name an op {row.op!r} that is not registered" for row in rows if row.op not in registry]
    for name, op in registry.items():
        mine = [row for row in rows if row.op == name]
        if not any(row.cases(generator(row)) for row in mine):
            found.append(f"{name} has no samples")
            continue
        if op.vjp is not None and not any(row.grads is not None and row.grads(generator(row)) for row in mine):
            found.append(f"{name} has a gradient and no samples for it")
        if not any(row.errors for row in mine):
            found.append(f"{name} has no error case")
    return found

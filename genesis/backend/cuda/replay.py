"""The fast path of an op on CUDA: the same call as before, on other operands, without deciding anything again.

A `Call` knows the layouts of an op's outputs and the plan of its launches. It is found under the op, the layouts of its
inputs and its other arguments; layouts are interned, so that the look-up compares a few addresses. When it comes back
it is written out: as a Python function without loops, because stepping through two operands and three addresses takes
longer than what is done with them. Calls of one form, on arrays of any size, share the source.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.memory import rounded
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.recording import Plan, watches

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.backend.cuda import CudaBackend
    from genesis.op import Op

__all__ = ["Call", "Layout", "call_key", "exact", "layout_of"]


class Layout:
    """Shape, strides, dtype and device of an array, and its address modulo 16; one object for each combination."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts


ABSENT = object()  # the layout of what is no array
LAYOUTS = 1 << 16  # that are told apart; sizes which depend on data would otherwise pile up
_layouts: dict[tuple[Any, ...], Layout] = {}


def layout_of(array: Array) -> Layout:
    """The layout of an array, remembered on it."""
    found: Layout | None = array.layout
    if found is None:
        parts = (array.shape, array.strides, array.dtype, array.device, array.data_ptr() & 15)
        found = _layouts.get(parts)
        if found is None:
            if len(_layouts) >= LAYOUTS:  # calls with layouts made again are recorded again
                _layouts.clear()
            found = _layouts.setdefault(parts, Layout(parts))
        array.layout = found
    return found


def exact(value: Any) -> Any:
    """A number with its type and sign, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    if value.__class__ is float:
        return (float, value.hex()) if value == 0 else value  # no int equals a float's key below
    return (value.__class__, value) if isinstance(value, int) else value


def call_key(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
    """All that an op's launches may depend on, besides where its outputs are.

    An array that stands in several places is told apart from equal layouts: in the plan they are one operand. Where an
    op changes its inputs, so is memory that two of them share: its twin may have to copy one first.
    """
    if len(inputs) == 2 and not attrs and not op.mutates and inputs[0] is not inputs[1]:  # what follows gives the same
        x, y = getattr(inputs[0], "layout", None), getattr(inputs[1], "layout", None)
        if x is not None and y is not None:
            return (op, allow_tf32.on, x, y)
    parts: list[Any] = [op, allow_tf32.on]
    seen: list[Any] = []
    for x in inputs:
        layout = getattr(x, "layout", ABSENT)
        if layout is ABSENT:
            parts.append(exact(x))
            continue
        parts.append(layout or layout_of(x))
        if op.mutates:
            parts.extend([(i, len(seen)) for i, other in enumerate(seen) if other.storage is x.storage])
        elif x in seen:
            parts.append((seen.index(x), len(seen)))
        seen.append(x)
    for name, value in attrs.items():
        parts.append(name)
        parts.append(exact(value))
    return tuple(parts)


class Call:
    """A repeatable call.

    Args:
        plan: what it launches, on its outputs and then on the arrays among its inputs.
        outputs: made afresh for every call, like these.
        mutates: which inputs it changes in place.

    Attributes:
        run: `run(inputs)` gives the outputs, or None where the call cannot be repeated just now.
    """

    __slots__ = ("plan", "run")
    run: Callable[[tuple[Any, ...]], tuple[Array, ...] | None]

    def __init__(
        self,
        backend: CudaBackend,
        plan: Plan,
        outputs: tuple[Array, ...],
        inputs: tuple[Any, ...],
        mutates: tuple[int, ...] = (),
    ) -> None:
        operands = tuple([(i, x.dtype.itemsize) for i, x in enumerate(inputs) if hasattr(x, "storage")])
        made = [(a.nbytes, rounded(a.nbytes), a.shape, a.strides, a.dtype, layout_of(a), a.spec) for a in outputs]
        types = (type(outputs[0]), type(outputs[0].storage)) if outputs else (None, None)

        def write_out(inputs: tuple[Any, ...]) -> tuple[Array, ...] | None:
            if not plan.is_prepared:
                return None
            places = tuple([tuple([(slot, p, delta != 0) for slot, p, delta in step.places]) for step in plan.steps])
            bind = _written(Form(len(made), operands, len(plan.sizes), places, mutates))
            self.run = bind(backend, plan, watches, *types, made)
            return self.run(inputs)

        self.plan, self.run = plan, write_out


class Form(NamedTuple):
    """What the source of a call depends on.

    Attributes:
        outputs, temporaries: how many the call takes memory for.
        operands: which inputs are arrays, each with the bytes of an element.
        places: by launch, which slots of its parameters take which address, those of outputs, operands and temporaries
            in turn, and whether something is added to it.
        mutates: which inputs are changed.
    """

    outputs: int
    operands: tuple[tuple[int, int], ...]
    temporaries: int
    places: tuple[tuple[tuple[int, int, bool], ...], ...]
    mutates: tuple[int, ...]


@functools.lru_cache(1024)
def _written(form: Form) -> Callable[..., Any]:
    """What makes the function of a call of this form from its backend, its plan and its outputs."""
    source = _source(form)
    name = f"<genesis call {hash(form):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    found: dict[str, Any] = {}
    exec(compile(source, name, "exec"), found)
    return found["bind"]  # type: ignore[no-any-return]


def _source(form: Form) -> str:
    """The source of `bind`, which names what stays the same, around `run`, which does what a call must do.

    Of an addition, p1 and p2 being addresses of its operands and p0 that of its output:

        block0 = take(size0, stream)
        p0 = block0.pointer
        array0 = Array(Storage(pool, block0, p0, nbytes0), shape0, strides0, dtype0, device)
        array0.layout, array0._spec = layout0, spec0
        x = inputs[0]
        p1 = x.storage.pointer + x.offset * 4
        x = inputs[1]
        p2 = x.storage.pointer + x.offset * 4
        lock.acquire()
        try:
            words0[1] = p0
            words0[2] = p1
            words0[0] = p2
            launch0(stream)
        finally:
            lock.release()
        return (array0, )
    """
    outputs, steps = range(form.outputs), range(len(form.places))
    temporaries = [form.outputs + len(form.operands) + i for i in range(form.temporaries)]
    bound = [f"nbytes{i}, size{i}, shape{i}, strides{i}, dtype{i}, layout{i}, spec{i}" for i in outputs]
    deltas = [f"delta{i}_{slot}" for i in steps for slot, _, moves in form.places[i] if moves]
    lines = [
        "def bind(backend, plan, watches, Array, Storage, made):",
        " pool, device, driver, lock = backend.pool, backend.device, backend.driver, plan.lock",
        " take, temporary = pool.take_rounded, plan.allocate",
        f" [{', '.join(f'({names})' for names in bound)}] = made",
        f" [{', '.join(f'size{i}' for i in temporaries)}] = plan.sizes",
        f" [{', '.join(f'words{i}' for i in steps)}] = [step.words for step in plan.steps]",
        f" [{', '.join(f'launch{i}' for i in steps)}] = [step.run for step in plan.steps]",
        f" [{', '.join(deltas)}] = [delta for step in plan.steps for _, _, delta in step.places if delta]",
        " def run(inputs):",
        "  if watches or driver.pending:",  # launches that somebody looks at, or that wait for a kernel
        "   return None",
        "  stream = backend.stream",
    ]
    for i in outputs:
        lines += [
            f"  block{i} = take(size{i}, stream)",
            f"  p{i} = block{i}.pointer",
            f"  array{i} = Array(Storage(pool, block{i}, p{i}, nbytes{i}), shape{i}, strides{i}, dtype{i}, device)",
            f"  array{i}.layout, array{i}._spec = layout{i}, spec{i}",
        ]
    for p, (i, itemsize) in enumerate(form.operands, start=form.outputs):
        lines += [f"  x = inputs[{i}]", f"  p{p} = x.storage.pointer + x.offset * {itemsize}"]
    for i in temporaries:  # freed at the end, reused in stream order
        lines += [f"  temporary{i} = temporary(size{i})", f"  p{i} = temporary{i}.pointer"]
    lines += ["  lock.acquire()", "  try:"]  # the parameter buffers are shared
    for i, places in enumerate(form.places):
        lines += [f"   words{i}[{slot}] = p{p}" + f" + delta{i}_{slot}" * moves for slot, p, moves in places]
        lines += [f"   launch{i}(stream)"]
    lines += ["   pass", "  finally:", "   lock.release()"]
    lines += [f"  inputs[{i}].storage.version += 1" for i in form.mutates]
    lines += [f"  return ({''.join(f'array{i}, ' for i in outputs)})", " return run"]
    return "\n".join(lines) + "\n"

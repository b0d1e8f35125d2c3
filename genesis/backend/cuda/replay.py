"""The fast path of an op on CUDA: the same call as before, on other operands, without deciding anything again.

A `Call` knows the layouts of an op's outputs and the plan of its launches. It is found under the op, the layouts of its
inputs and its other arguments; layouts are interned, so that the look-up compares a few addresses. When it comes back
it is written out as a function of its own (written.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genesis.backend.cuda.keys import exact
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.recording import Plan
from genesis.backend.cuda.written import Fresh, write_out
from genesis.shapes import contiguous_strides

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.backend.cuda import CudaBackend
    from genesis.op import Op

__all__ = ["Call", "Layout", "are_as_made", "call_key", "layout_of"]


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


def call_key(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
    """All that an op's launches may depend on, besides where its outputs are.

    An array that stands in several places is told apart from equal layouts: in the plan they are one operand. Where an
    op changes its inputs, so is memory that two of them share: its CUDA implementation may have to copy one first.
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


def are_as_made(op: Op, outputs: tuple[Array, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> bool:
    """Whether outputs are laid out as those of a call without `out` are: then the call may be remembered under its
    inputs alone. Memory that was given may be of another dtype, or stand elsewhere.
    """
    inferred = op.infer(*inputs, **attrs)
    specs: Any = (inferred,) if hasattr(inferred, "dtype") else inferred
    return len(specs) == len(outputs) and all(
        layout_of(a).parts == (s.shape, contiguous_strides(s.shape), s.dtype, a.device, 0)
        and not any(x is a for x in inputs)
        for a, s in zip(outputs, specs, strict=True)
    )


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
        made = [Fresh(a, layout_of(a)) for a in outputs]

        def first(inputs: tuple[Any, ...]) -> tuple[Array, ...] | None:
            if not plan.is_prepared:
                return None
            self.run = write_out(backend, plan, made, operands, mutates)
            return self.run(inputs)

        self.plan, self.run = plan, first

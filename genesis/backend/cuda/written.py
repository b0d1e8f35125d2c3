"""Calls written out: what a repeated call of an op does, as the source of a function without loops and conditions.

Stepping through two operands and three addresses takes Python longer than what is done with them, and a constructor's
call as long as all its assignments. So the source has a line for each, made for the form of a call; calls of one form,
on arrays of any size, share it.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.memory import rounded
from genesis.backend.cuda.recording import Plan, watches

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.replay import Layout

__all__ = ["Fresh", "write_out"]


class Fresh:
    """An output as every call makes it: its objects, and what they hold besides the block of memory.

    Attributes:
        size: bytes of the block.
        array, storage: the types.
        array_values, storage_values: by name, what is the same in every call.
    """

    def __init__(self, like: Array, layout: Layout) -> None:
        self.array, self.storage = type(like), type(like.storage)
        storage: Any = self.storage(like.storage.pool, None, 0, like.nbytes)  # type: ignore[call-arg, attr-defined]
        array = self.array(storage, like.shape, like.strides, like.dtype, like.device)
        array.layout, array._spec = layout, like.spec
        self.size = rounded(like.nbytes)
        self.array_values = _held(array, {"storage"})
        self.storage_values = _held(storage, {"block", "pointer"})


def _held(made: Any, apart: set[str]) -> dict[str, Any]:
    """What an object with slots holds, but for `apart`."""
    return {name: getattr(made, name) for name in type(made).__slots__ if name not in {"__weakref__", *apart}}


class Form(NamedTuple):
    """What the source of a call depends on.

    Attributes:
        outputs: made afresh; for each the names of what its array and its storage hold.
        operands: which inputs are arrays, each with the bytes of an element.
        temporaries: how many the call takes memory for.
        places: by launch, which slots of its parameters take which address, those of outputs, operands and temporaries
            in turn, and whether something is added to it.
        mutates: which inputs are changed.
    """

    outputs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    operands: tuple[tuple[int, int], ...]
    temporaries: int
    places: tuple[tuple[tuple[int, int, bool], ...], ...]
    mutates: tuple[int, ...]


def write_out(
    backend: CudaBackend,
    plan: Plan,
    outputs: Sequence[Fresh],
    operands: tuple[tuple[int, int], ...],
    mutates: tuple[int, ...],
) -> Callable[[tuple[Any, ...]], tuple[Array, ...] | None]:
    """The function of a call whose launches are prepared.

    It takes the inputs and gives fresh outputs; None, and nothing is done, while somebody watches launches or some wait
    for their kernel.

    Args:
        operands: which inputs are arrays, each with the bytes of an element.
        mutates: which inputs the call changes in place.
    """
    names = tuple([(tuple(fresh.array_values), tuple(fresh.storage_values)) for fresh in outputs])
    places = tuple([tuple([(slot, p, delta != 0) for slot, p, delta in step.places]) for step in plan.steps])
    bind = _binder(Form(names, operands, len(plan.sizes), places, mutates))
    return bind(backend, plan, outputs, watches)  # type: ignore[no-any-return]


@functools.lru_cache(1024)
def _binder(form: Form) -> Callable[..., Any]:
    source = "\n".join(_source(form)) + "\n"
    name = f"<genesis call {hash(form):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    found: dict[str, Any] = {}
    exec(compile(source, name, "exec"), found)
    return found["bind"]  # type: ignore[no-any-return]


def _source(form: Form) -> Iterator[str]:
    """`bind` names what stays the same, `run` inside it is the call. That of an addition:

    def run(inputs):
        if watches or driver.pending:
            return None
        stream = backend.stream
        block0 = take(size0, stream, owner)
        p0 = block0.pointer
        storage0 = new(Storage0)
        storage0.block, storage0.pointer = block0, p0
        storage0.nbytes = storage0_nbytes
        ...
        array0 = new(Array0)
        array0.storage = storage0
        array0.shape = array0_shape
        ...
        x = inputs[0]
        p1 = x.storage.pointer + x.offset * 4
        x = inputs[1]
        p2 = x.storage.pointer + x.offset * 4
        lock.acquire()
        try:
            words0[0] = p0
            words0[1] = p1
            words0[2] = p2
            launch0(stream)
        finally:
            lock.release()
        return (array0,)
    """
    temporaries = [len(form.outputs) + len(form.operands) + i for i in range(form.temporaries)]
    yield "def bind(backend, plan, outputs, watches):"
    yield (
        " driver, take, temporary, owner, lock, new = "
        "backend.driver, backend.pool.take_rounded, plan.allocate, plan.owner, plan.lock, object.__new__"
    )
    yield from _constants(form, temporaries)
    yield " def run(inputs):"
    yield "  if watches or driver.pending:"
    yield "   return None"
    yield "  stream = backend.stream"
    for i, (of_array, of_storage) in enumerate(form.outputs):
        yield f"  block{i} = take(size{i}, stream, owner)"
        yield f"  p{i} = block{i}.pointer"
        yield f"  storage{i} = new(Storage{i})"
        yield f"  storage{i}.block, storage{i}.pointer = block{i}, p{i}"
        yield from (f"  storage{i}.{name} = storage{i}_{name}" for name in of_storage)
        yield f"  array{i} = new(Array{i})"
        yield f"  array{i}.storage = storage{i}"
        yield from (f"  array{i}.{name} = array{i}_{name}" for name in of_array)
    for p, (i, itemsize) in enumerate(form.operands, start=len(form.outputs)):
        yield f"  x = inputs[{i}]"
        yield f"  p{p} = x.storage.pointer + x.offset * {itemsize}"
    for i in temporaries:  # freed at the end, reused in stream order
        yield f"  temporary{i} = temporary(size{i}, owner)"
        yield f"  p{i} = temporary{i}.pointer"
    yield "  lock.acquire()"  # the parameter buffers are shared
    yield "  try:"
    for i, places in enumerate(form.places):
        yield from (f"   words{i}[{slot}] = p{p}" + f" + delta{i}_{slot}" * moves for slot, p, moves in places)
        yield f"   launch{i}(stream)"
    if not form.places:
        yield "   pass"
    yield "  finally:"
    yield "   lock.release()"
    yield from (f"  inputs[{i}].storage.version += 1" for i in form.mutates)
    yield f"  return ({''.join(f'array{i}, ' for i in range(len(form.outputs)))})"
    yield " return run"


def _constants(form: Form, temporaries: list[int]) -> Iterator[str]:
    """What stays the same, by name."""
    for i, (of_array, of_storage) in enumerate(form.outputs):
        yield f" size{i}, Array{i}, Storage{i} = outputs[{i}].size, outputs[{i}].array, outputs[{i}].storage"
        yield f" [{', '.join(f'array{i}_{name}' for name in of_array)}] = outputs[{i}].array_values.values()"
        yield f" [{', '.join(f'storage{i}_{name}' for name in of_storage)}] = outputs[{i}].storage_values.values()"
    yield f" [{', '.join(f'size{i}' for i in temporaries)}] = plan.sizes"
    for i, places in enumerate(form.places):
        yield f" words{i}, launch{i} = plan.steps[{i}].words, plan.steps[{i}].run"
        deltas = [f"delta{i}_{slot}" for slot, _, moves in places if moves]
        yield f" [{', '.join(deltas)}] = [delta for _, _, delta in plan.steps[{i}].places if delta]"

"""CUDA graphs of tensors: a captured function, and one that is captured again when it must be, by sizes of buckets."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from genesis.autograd import no_grad
from genesis.autograd.autocast import resumed, settings
from genesis.backend.cuda import AnyDevice, find_backend
from genesis.backend.cuda.graph import WARM_UPS, RawGraph
from genesis.errors import DeviceError, ShapeError, UsageError
from genesis.functions.create import empty
from genesis.functions.elementwise import clone
from genesis.shapes import Shape
from genesis.tensor import Tensor

T = TypeVar("T")


class Graph(RawGraph):
    """The launches of a function, recorded once and replayed with one call.

    A replay reads and writes the memory that the capture saw: copy new inputs into those tensors (`copy_`), and keep
    them, and everything else that the function uses, alive. Its results are valid until the next replay of any graph of
    the device. Python numbers are part of the recording.

    Args:
        device: None is the current one.
    """

    def __init__(self, device: AnyDevice = None) -> None:
        super().__init__(find_backend(device))

    @contextmanager
    def _arena(self) -> Iterator[None]:
        """Casts that autocast keeps are the graph's own: replays make them again, of parameters that changed."""
        with super()._arena(), resumed(settings()):
            yield


class _Entry(NamedTuple):
    """One capture: static inputs, the graph, and its static results."""

    inputs: list[Tensor]
    graph: Graph
    results: Any


@dataclass(eq=False)
class Graphed:
    """A function of tensors that runs as CUDA graphs, captured `captures` times so far; see `make_graphed`."""

    function: Callable[..., Any]
    buckets: list[int] | None
    dim: int
    pad: float | int | Sequence[float | int]
    reads: list[Tensor]
    warm_ups: int
    copy_results: bool
    captures: int = 0
    _entries: dict[Any, _Entry] = field(default_factory=dict)
    _seen: tuple[Any, ...] = ()

    def __call__(self, *inputs: Tensor) -> Any:
        """The function's result on `inputs`.

        Raises:
            UsageError: for inputs that are not tensors on one CUDA device. ShapeError: larger than every bucket.
        """
        self._check(inputs)
        # Captures read the tensors of `reads` where they stood: another address or layout makes them invalid.
        seen = tuple((t.data_ptr(), t.shape, t.strides, t.dtype) for t in self.reads)
        if seen != self._seen:
            self._entries.clear()
            self._seen = seen
        size, bucket = self._bucket(inputs)
        shapes = tuple(self._padded(x.shape, bucket) for x in inputs)
        key = tuple((shape, x.dtype, x.device) for shape, x in zip(shapes, inputs, strict=True))
        entry = self._entries.get(key)
        if entry is None:
            static = [empty(*shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, inputs, strict=True)]
            self._fill(static, inputs, size)
            self.captures += 1
            graph = Graph(static[0].device)
            results = graph.capture(lambda: self.function(*static), self.warm_ups)
            entry = self._entries[key] = _Entry(static, graph, results)
        else:
            self._fill(entry.inputs, inputs, size)
        entry.graph.replay()
        return self._results(entry.results, size, bucket)

    def _check(self, inputs: tuple[Any, ...]) -> None:
        if not inputs or not all(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs):
            found = ", ".join(str(x.device) if isinstance(x, Tensor) else type(x).__name__ for x in inputs)
            raise UsageError(
                f"a graphed function takes CUDA tensors, got {found or 'nothing'}",
                next="pass numbers that change as 0-d tensors; other numbers belong into the function",
            )

    def _bucket(self, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
        """The inputs' size along `dim`, and the one it is rounded up to."""
        if self.buckets is None:
            return 0, 0
        sizes = {x.shape[self.dim] for x in inputs if x.shape}
        if len(sizes) != 1:
            raise ShapeError(f"inputs have sizes {sorted(sizes)} along dimension {self.dim}; buckets need one size")
        size = sizes.pop()
        at = bisect.bisect_left(self.buckets, size)
        if at == len(self.buckets):
            raise ShapeError(
                f"size {size} along dimension {self.dim} is beyond the largest bucket, {self.buckets[-1]}",
                next="add a bucket",
            )
        return size, self.buckets[at]

    def _padded(self, shape: Shape, bucket: int) -> Shape:
        if self.buckets is None or not shape:
            return shape
        dim = self.dim % len(shape)
        return (*shape[:dim], bucket, *shape[dim + 1 :])

    def _fill(self, static: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
        """Copy the inputs to the front of the static ones, and the padding behind them."""
        pads = self.pad if isinstance(self.pad, Sequence) else [self.pad] * len(inputs)
        with no_grad():
            for target, x, pad in zip(static, inputs, pads, strict=True):
                if target.shape == x.shape:
                    target.copy_(x)
                    continue
                target.narrow(self.dim, 0, size).copy_(x)
                target.narrow(self.dim, size, target.shape[self.dim] - size).fill_(pad)

    def _results(self, results: Any, size: int, bucket: int) -> Any:
        """The results without padding, in memory of their own unless `copy_results` is off."""
        if isinstance(results, Tensor):
            found = results.detach()
            if found.shape and size != bucket and found.shape[self.dim] == bucket:
                found = found.narrow(self.dim, 0, size)
            return clone(found) if self.copy_results else found
        if isinstance(results, tuple | list):
            return type(results)(self._results(r, size, bucket) for r in results)
        if isinstance(results, dict):
            return {name: self._results(r, size, bucket) for name, r in results.items()}
        if results is None:
            return None
        raise DeviceError(f"a graphed function returned a {type(results).__name__}", next="return tensors")


def make_graphed(
    function: Callable[..., Any],
    example_inputs: Sequence[Tensor] | None = None,
    *,
    buckets: Sequence[int] | None = None,
    dim: int = 0,
    pad: float | int | Sequence[float | int] = 0,
    reads: Iterable[Tensor] = (),
    warm_ups: int = WARM_UPS,
    copy_results: bool = True,
) -> Graphed:
    """A function that runs `function` as CUDA graphs: one for each combination of shapes and dtypes of its inputs.

    Inputs are copied into static tensors, so neither their values nor their addresses matter. No gradient is recorded
    through it; a function may run backward inside.

    Args:
        function: of CUDA tensors, to a tensor or tuples, lists and dicts of them. It runs `warm_ups` times when it is
            captured: what it changes besides its results, such as an optimizer's state, is changed each time.
        example_inputs: capture for these now, instead of at the first call.
        buckets: sizes to which dimension `dim` of all inputs is rounded up; results of that size along `dim` are cut
            back. Rows beyond the input hold `pad`, and the function must not let them change the others.
        pad: one number, or one for each input.
        reads: further tensors that the function uses, such as a model's parameters: when one of them has moved or has
            another dtype, everything is captured again. Other values are no reason.
        copy_results: False returns the static results, which the next call of any graph overwrites.
    """
    if buckets is not None and (not buckets or any(b < 1 for b in buckets)):
        raise UsageError(f"buckets are sizes of 1 and more, got {list(buckets)}")
    ordered = None if buckets is None else sorted(set(buckets))
    made = Graphed(function, ordered, dim, pad, list(reads), warm_ups, copy_results)
    if example_inputs is not None:
        made(*example_inputs)
    return made

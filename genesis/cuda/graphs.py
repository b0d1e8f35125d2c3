"""CUDA graphs of tensors: a captured function, and a wrapper that captures a graph for each bucket of input sizes."""

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
    """The launches of a function, captured once and replayed with one call.

    A replay reads and writes the memory of the capture: copy new inputs into those tensors (`copy_`), and keep alive
    the tensors that the function uses. Its results are valid until the next replay of any graph of the device. Python
    numbers are captured as constants.

    Args:
        device: device of the graph; None is the current device.
    """

    def __init__(self, device: AnyDevice = None) -> None:
        super().__init__(find_backend(device))

    @contextmanager
    def _arena(self) -> Iterator[None]:
        """Give the graph its own autocast casts: replays compute them again from parameters that changed."""
        with super()._arena(), resumed(settings()):
            yield


class _Entry(NamedTuple):
    """One capture: its static inputs, its graph, and its static results."""

    inputs: list[Tensor]
    graph: Graph
    results: Any


@dataclass(eq=False)
class Graphed:
    """A function of tensors that runs as CUDA graphs; see `make_graphed`. `captures` counts its captures."""

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
        """Run the function on `inputs`.
        Raises UsageError if an input is not a CUDA tensor, and ShapeError if a size exceeds every bucket.
        """
        self._check(inputs)
        # Captures contain the addresses and layouts of the tensors in `reads`: if one changes, they are invalid.
        seen = tuple((t.data_ptr(), t.shape, t.strides, t.dtype) for t in self.reads)
        if seen != self._seen:
            self._entries.clear()
            self._seen = seen
        # Each combination of padded shapes and dtypes has its own graph.
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
            kinds = ", ".join(str(x.device) if isinstance(x, Tensor) else type(x).__name__ for x in inputs)
            raise UsageError(
                f"a graphed function takes CUDA tensors, got {kinds or 'nothing'}",
                next="pass numbers that change as 0-d tensors; put constants into the function",
            )

    def _bucket(self, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
        """The size of the inputs along `dim`, and the bucket that it is rounded up to."""
        if self.buckets is None:
            return 0, 0
        sizes = {x.shape[self.dim] for x in inputs if x.shape}
        if len(sizes) != 1:
            raise ShapeError(f"inputs have sizes {sorted(sizes)} along dimension {self.dim}; buckets need one size")
        size = sizes.pop()
        at = bisect.bisect_left(self.buckets, size)
        if at == len(self.buckets):
            raise ShapeError(
                f"size {size} along dimension {self.dim} exceeds the largest bucket, {self.buckets[-1]}",
                next="add a larger bucket",
            )
        return size, self.buckets[at]

    def _padded(self, shape: Shape, bucket: int) -> Shape:
        if self.buckets is None or not shape:
            return shape
        dim = self.dim % len(shape)
        return (*shape[:dim], bucket, *shape[dim + 1 :])

    def _fill(self, static: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
        """Copy the inputs to the front of the static tensors and fill the remainder with padding."""
        pads = self.pad if isinstance(self.pad, Sequence) else [self.pad] * len(inputs)
        with no_grad():
            for target, x, pad in zip(static, inputs, pads, strict=True):
                if target.shape == x.shape:
                    target.copy_(x)
                    continue
                target.narrow(self.dim, 0, size).copy_(x)
                target.narrow(self.dim, size, target.shape[self.dim] - size).fill_(pad)

    def _results(self, results: Any, size: int, bucket: int) -> Any:
        """The results without padding, copied to new memory unless `copy_results` is off."""
        if isinstance(results, Tensor):
            result = results.detach()
            if result.shape and size != bucket and result.shape[self.dim] == bucket:
                result = result.narrow(self.dim, 0, size)
            return clone(result) if self.copy_results else result
        if isinstance(results, tuple | list):
            return type(results)(self._results(r, size, bucket) for r in results)
        if isinstance(results, dict):
            return {name: self._results(r, size, bucket) for name, r in results.items()}
        if results is None:
            return None
        raise DeviceError(f"a graphed function cannot return a {type(results).__name__}", next="return tensors")


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
    """Wrap `function` to run as CUDA graphs: one for each combination of shapes and dtypes of its inputs.

    Inputs are copied into static tensors, so their values and addresses may change. Gradients are not recorded through
    the wrapper, but the function may run backward itself.

    Args:
        function: takes CUDA tensors; returns a tensor, or tuples, lists and dicts of tensors. It runs `warm_ups` times
            before a capture. Each run changes its state, such as an optimizer's.
        example_inputs: inputs to capture for now, instead of at the first call.
        buckets: sizes that dimension `dim` of all inputs is rounded up to. Results of a bucket's size along `dim` are
            cut back. Rows beyond the input contain `pad`, and must not affect the other rows.
        pad: one number for all inputs, or one per input.
        reads: other tensors that the function uses, such as a model's parameters. When the address, layout or dtype of
            one changes, everything is captured again. New values do not require that.
        copy_results: whether to copy results. False returns the static results, which the next graph overwrites.
    """
    if buckets is not None and (not buckets or any(b < 1 for b in buckets)):
        raise UsageError(f"buckets must be sizes of at least 1, not {list(buckets)}")
    ordered = None if buckets is None else sorted(set(buckets))
    graphed = Graphed(function, ordered, dim, pad, list(reads), warm_ups, copy_results)
    if example_inputs is not None:
        graphed(*example_inputs)
    return graphed

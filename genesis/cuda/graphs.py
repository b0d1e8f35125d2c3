"""CUDA graphs of tensors, named as in torch, and a wrapper that keeps a graph for each of a list of batch sizes."""

from __future__ import annotations

import bisect
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from genesis import random
from genesis.autograd import Function, enable_grad, grad, no_grad
from genesis.autograd.autocast import resumed, settings
from genesis.backend import Device
from genesis.backend.cuda import AnyDevice, find_backend
from genesis.backend.cuda.graph import WARM_UPS, RawGraph, launches_block
from genesis.cuda.streams import Stream, current_stream
from genesis.cuda.streams import stream as on_stream
from genesis.dtypes import int64
from genesis.errors import DeviceError, ShapeError, UsageError
from genesis.functions.create import empty, zeros
from genesis.functions.elementwise import clone
from genesis.shapes import Shape
from genesis.tensor import Tensor

T = TypeVar("T")
_handles = itertools.count(1)  # of memory pools; 0 is the pool of the graphs of functions


class FunctionGraph(RawGraph):
    """The launches of a function, captured once and replayed with one call.

    A replay reads and writes the memory of the capture: copy new inputs into those tensors (`copy_`), and keep alive
    the tensors that the function uses. Its results are valid until the next replay of any such graph of the device.
    Python numbers are captured as constants.

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


# --- torch's form -----------------------------------------------------------------------------------------------------


class PoolHandle(NamedTuple):
    """The name of a memory pool that graphs share."""

    device: int
    number: int


def graph_pool_handle() -> PoolHandle:
    """Return the handle of a new memory pool; graphs that are captured with it share their memory.

    Such graphs must be replayed one after the other, in the order of their captures if one reads another's results.
    """
    return PoolHandle(0, next(_handles))


@dataclass
class _Drawn:
    """The draws of a graph from one generator.

    Attributes:
        draws: the number of counters that a replay uses.
        position: device words with the first counter and the seed; see `Generator.positioned_by`.
    """

    generator: random.Generator
    draws: int = 0
    position: Tensor | None = None
    _seed: int | None = None  # the seed's word in `position`

    def begin(self, device: Device) -> None:
        """Note the start of a capture."""
        if self.position is None:
            self.position = zeros((2,), dtype=int64, device=device)
        self._start, self._fixed = self.generator.offset, self.generator.fixed_draws

    def end(self) -> bool:
        """Return the generator to the start of the capture; return whether a replay would repeat one of its draws."""
        self.draws, self.generator.offset = self.generator.offset - self._start, self._start
        return self.generator.fixed_draws != self._fixed

    def send(self) -> None:
        """Write where the next replay's draws begin."""
        if self.draws and self.position is not None:
            offset, seed = self.generator.words()
            with no_grad():
                self.position[0].fill_(offset)
                if seed != self._seed:
                    self.position[1].fill_(seed)
            self._seed = seed


class CUDAGraph(RawGraph):
    """Work that is captured once inside `genesis.cuda.graph`, and run again by `replay`.

    Replays read and write the addresses of the capture: copy new values into the captured inputs. Run the work a few
    times before the capture, so that its kernels are compiled and its persistent memory is allocated. Every replay
    draws new random numbers: those that the same work would draw without a graph.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(find_backend(None), next(_handles))
        self._number = self.handle
        self._drawn = [_Drawn(random.default_generator)]
        self._before_replay: list[Callable[[], None]] = []
        self._open = ExitStack()

    def capture_begin(self, pool: PoolHandle | None = None, capture_error_mode: str = "global") -> None:
        """Begin to capture the work of the current stream, which must not be the default stream.

        Args:
            pool: from `graph_pool_handle` or another graph's `pool()`; None gives the graph its own pool.
            capture_error_mode: accepted as in torch; other threads never invalidate a capture.

        Raises:
            UsageError: the graph is captured already, another capture runs, or an argument is wrong.
        """
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise UsageError(
                f"capture_error_mode {capture_error_mode!r} is not known", next="use global, thread_local or relaxed"
            )
        if pool is not None and not isinstance(pool, tuple):
            raise UsageError(
                f"pool is a {type(pool).__name__}", next="pass graph_pool_handle() or another graph's pool()"
            )
        self._check_capturable()
        if self.backend.stream == 0:
            raise UsageError("the default stream cannot be captured", next="use `with genesis.cuda.graph(g):`")
        _ = self.backend.counters  # persistent memory is created outside the arena
        self.handle = pool[1] if pool is not None else self._number
        for each in self._drawn:
            each.begin(self.backend.device)
        self._open.enter_context(self._arena())
        self._open.callback(setattr, self.backend.pool, "before_replay", None)
        self._before_replay = self.backend.pool.before_replay = []
        self._open.enter_context(resumed(settings()))
        for each in self._drawn:
            self._open.enter_context(each.generator.positioned_by(each.position))
        try:
            self._begin()
        except BaseException:
            self._open.close()
            raise

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            DeviceError: the captured work drew random numbers on the CPU, which replays would repeat.
        """
        fixed = [each.end() for each in self._drawn]
        with self._open:
            if any(fixed):
                self._abandon()
                raise DeviceError(
                    "the captured work draws random numbers on the CPU, which every replay would repeat",
                    next="draw them on the graph's device, or before the capture",
                )
            self._end()

    def abandon(self) -> None:
        """End a capture whose work failed; the graph stays empty."""
        for each in self._drawn:
            each.end()
            each.draws = 0
        with self._open:
            self._abandon()

    def replay(self) -> None:
        """Run the captured work on the current stream. Raises UsageError before a capture and after `reset`.

        An optimizer whose step was captured counts the step and sends its learning rates first.
        """
        if self.is_captured:
            for prepare in self._before_replay:
                prepare()
            for each in self._drawn:
                each.send()
        super().replay()
        for each in self._drawn:
            each.generator.offset += each.draws

    def reset(self) -> None:
        """Destroy the captured work; the graph may be captured again."""
        self.close()
        for each in self._drawn:
            each.draws = 0

    def register_generator_state(self, generator: random.Generator) -> None:
        """Let the captured work draw from `generator`; the default generator is registered already."""
        if all(each.generator is not generator for each in self._drawn):
            self._drawn.append(_Drawn(generator))

    def pool(self) -> PoolHandle:
        """Return the handle of the memory pool, for the captures of other graphs."""
        return PoolHandle(0, self.handle)

    @property
    def memory_reserved(self) -> int:
        """The bytes that the graph's memory pool has reserved; graphs with the same pool share them."""
        arena = self.backend.pool.graph_arenas.get(self.handle)
        return 0 if arena is None else sum(block.size for block in arena.blocks.values())


class graph:  # noqa: N801  torch's name
    """`with genesis.cuda.graph(g):` captures the work of the block into the graph `g` instead of running it.

    Args:
        cuda_graph: the graph, a `CUDAGraph`.
        pool: memory pool of the capture; see `CUDAGraph.capture_begin`.
        stream: stream of the capture; None uses a new one.
        capture_error_mode: see `CUDAGraph.capture_begin`.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: PoolHandle | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if not isinstance(cuda_graph, CUDAGraph):
            raise UsageError(f"graph takes a CUDAGraph, got {type(cuda_graph).__name__}", next="pass CUDAGraph()")
        self.cuda_graph, self.pool, self.stream, self.mode = cuda_graph, pool, stream, capture_error_mode
        self._on_stream: Any = None

    def __enter__(self) -> None:
        if launches_block():
            raise DeviceError("a graph cannot be captured while launches block", next="unset CUDA_LAUNCH_BLOCKING")
        self.cuda_graph._check_capturable()
        before = current_stream()
        before.synchronize()
        gc.collect()
        target = Stream() if self.stream is None else self.stream
        target.wait_stream(before)
        self._before, self._target = before, target
        self._on_stream = on_stream(target)
        self._on_stream.__enter__()
        try:
            self.cuda_graph.capture_begin(self.pool, self.mode)
        except BaseException:
            self._on_stream.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.cuda_graph.capture_end()
            else:
                self.cuda_graph.abandon()
        finally:
            self._on_stream.__exit__(None, None, None)
            self._before.wait_stream(self._target)


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolHandle | None = None,
) -> Any:
    """Return versions of functions or modules whose forward and backward passes are CUDA graphs.

    Each graphed callable takes tensors with the shapes, dtypes and `requires_grad` of its sample arguments. Its
    results are overwritten by its next call. A module remains the same object: its new `forward` replays
    the graphs, or runs the old one if `training` has changed since the capture. Call them in the order in which you
    pass them.

    Args:
        callables: a function or module of positional tensors, or a tuple of them.
        sample_args: a tuple of tensors, or one tuple for each callable.
        num_warmup_iters: runs before the capture.
        allow_unused_input: whether an input may receive no gradient.
        pool: memory pool of the captures; None creates one that all share.
    """
    is_single = not isinstance(callables, tuple)
    functions, samples = ((callables,), (sample_args,)) if is_single else (callables, sample_args)
    if len(functions) != len(samples):
        raise UsageError(f"{len(functions)} callables have {len(samples)} tuples of sample arguments")
    shared = graph_pool_handle() if pool is None else pool
    captures = [_GraphedCall(f, tuple(a), allow_unused_input) for f, a in zip(functions, samples, strict=True)]
    with on_stream():
        for each in captures:
            each.warm_up(num_warmup_iters)
    for (
        each
    ) in captures:  # memory is reused between passes that follow one another: forward in order, backward reversed
        each.capture_forward(shared)
    for each in reversed(captures):
        each.capture_backward(shared)
    graphed = tuple(each.as_callable() for each in captures)
    return graphed[0] if is_single else graphed


class _GraphedCall:
    """The graphs of one callable's forward and backward pass, with their static tensors."""

    def __init__(self, function: Any, inputs: tuple[Any, ...], allow_unused: bool) -> None:
        if not all(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs):
            raise UsageError("sample_args must be CUDA tensors", next="move them with .cuda()")
        self.function, self.inputs, self.allow_unused = function, inputs, allow_unused
        self.is_module = hasattr(function, "parameters")
        self.parameters = tuple(function.parameters()) if self.is_module else ()
        self.operands = (*inputs, *self.parameters)
        self.forward_graph, self.backward_graph = CUDAGraph(), CUDAGraph()

    def _run(self) -> tuple[Tensor, ...]:
        results = self.function(*self.inputs)
        self.is_tuple = isinstance(results, tuple | list)
        return tuple(results) if self.is_tuple else (results,)

    def _gradients(self, results: Sequence[Tensor], seeds: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        wanted = [x for x in self.operands if x.requires_grad]
        differentiable = [y for y in results if y.requires_grad]
        if not wanted or not differentiable:
            return (None,) * len(self.operands)
        gradients = iter(grad(differentiable, wanted, list(seeds), allow_unused=self.allow_unused))
        return tuple(next(gradients) if x.requires_grad else None for x in self.operands)

    def warm_up(self, count: int) -> None:
        for _ in range(count):
            with enable_grad():
                results = self._run()
                seeds = [clone(y.detach()) for y in results if y.requires_grad]
                self._gradients(results, seeds)

    def capture_forward(self, pool: PoolHandle) -> None:
        with enable_grad(), graph(self.forward_graph, pool):
            self.results = self._run()

    def capture_backward(self, pool: PoolHandle) -> None:
        self.seeds = [clone(y.detach()) for y in self.results if y.requires_grad]
        with graph(self.backward_graph, pool):
            self.gradients = self._gradients(self.results, self.seeds)

    def as_callable(self) -> Any:
        call = self

        class Graphed(Function):
            @staticmethod
            def forward(context: Any, *operands: Tensor) -> Any:
                with no_grad():
                    for static, x in zip(call.inputs, operands, strict=False):
                        if static.data_ptr() != x.data_ptr():
                            static.copy_(x)
                call.forward_graph.replay()
                return tuple(y.detach() for y in call.results)

            @staticmethod
            def backward(context: Any, *seeds: Tensor) -> Any:
                used = [g for g, y in zip(seeds, call.results, strict=True) if y.requires_grad]
                with no_grad():
                    for static, g in zip(call.seeds, used, strict=True):
                        static.copy_(g)
                call.backward_graph.replay()
                return tuple(None if g is None else clone(g.detach()) for g in call.gradients)

        def graphed(*inputs: Tensor) -> Any:
            shapes = [(x.shape, x.dtype, x.requires_grad) for x in call.inputs]
            if [(x.shape, x.dtype, x.requires_grad) for x in inputs] != shapes:
                raise ShapeError("the inputs differ from the sample arguments", next="capture again for these inputs")
            results = Graphed.apply(*inputs, *call.parameters)
            return results if call.is_tuple else (results[0] if isinstance(results, tuple) else results)

        if not self.is_module:
            return graphed
        module, plain, was_training = self.function, self.function.forward, self.function.training

        def forward(*inputs: Tensor) -> Any:
            return graphed(*inputs) if module.training == was_training else plain(*inputs)

        module.forward = forward
        return module


# --- A list of batch sizes --------------------------------------------------------------------------------------------


def capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes 1, 2, 4 and the multiples of 8, up to `largest`, which is always included."""
    if largest < 1:
        raise UsageError(f"the largest batch is {largest}", next="pass at least 1")
    return sorted({*(n for n in (1, 2, 4, *range(8, largest + 1, 8)) if n <= largest), largest})


class _Entry(NamedTuple):
    """One capture: its static inputs, its graph, and its static results."""

    inputs: list[Tensor]
    graph: FunctionGraph
    results: Any


@dataclass(eq=False)
class GraphedBatches:
    """A function of tensors that runs as CUDA graphs; see `graph_batches`. `captures` counts its captures."""

    function: Callable[..., Any]
    buckets: list[int] | None
    padding: bool
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
        Raises UsageError if an input is not a CUDA tensor, and ShapeError if the inputs have batches of several sizes.
        """
        self._check(inputs)
        # Captures contain the addresses and layouts of the tensors in `reads`: if one changes, they are invalid.
        seen = tuple((t.data_ptr(), t.shape, t.strides, t.dtype) for t in self.reads)
        if seen != self._seen:
            self._entries.clear()
            self._seen = seen
        # Each combination of padded shapes and dtypes has its own graph.
        size, bucket = self._bucket(inputs)
        if bucket is None:
            return self.function(*inputs)
        shapes = tuple(self._padded(x.shape, bucket) for x in inputs)
        key = tuple((shape, x.dtype, x.device) for shape, x in zip(shapes, inputs, strict=True))
        entry = self._entries.get(key)
        if entry is None:
            static = [empty(*shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, inputs, strict=True)]
            self._fill(static, inputs, size)
            self.captures += 1
            graph = FunctionGraph(static[0].device)
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

    def _bucket(self, inputs: tuple[Tensor, ...]) -> tuple[int, int | None]:
        """The size of the inputs along `dim`, and the captured size for it; None runs the function without a graph."""
        if self.buckets is None:
            return 0, 0
        sizes = {x.shape[self.dim] for x in inputs if x.shape}
        if len(sizes) != 1:
            raise ShapeError(f"inputs have sizes {sorted(sizes)} along dimension {self.dim}; buckets need one size")
        size = sizes.pop()
        at = bisect.bisect_left(self.buckets, size)
        if at == len(self.buckets) or (not self.padding and self.buckets[at] != size):
            return size, None
        return size, self.buckets[at]

    @property
    def memory_reserved(self) -> int:
        """The bytes of device memory that the graphs of functions of this device have reserved together."""
        arena = find_backend(None).pool.graph_arenas.get(0)
        return 0 if arena is None else sum(block.size for block in arena.blocks.values())

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


def graph_batches(
    function: Callable[..., Any],
    sizes: Sequence[int] | None = None,
    *,
    largest: int | None = None,
    padding: bool = True,
    dim: int = 0,
    pad: float | int | Sequence[float | int] = 0,
    reads: Iterable[Tensor] = (),
    warm_ups: int = WARM_UPS,
    copy_results: bool = True,
) -> GraphedBatches:
    """Wrap `function` to run as CUDA graphs: one for each combination of shapes and dtypes of its inputs.

    Inputs are copied into static tensors, so their values and addresses may change. Gradients are not recorded through
    the wrapper, but the function may run backward itself.

    Args:
        function: takes CUDA tensors; returns a tensor, or tuples, lists and dicts of tensors. It runs `warm_ups` times
            before a capture. Each run changes its state, such as an optimizer's.
        sizes: sizes of dimension `dim` to capture, such as `capture_sizes(64)`. None captures every size that occurs,
            unless `largest` is given. A larger input runs without a graph.
        largest: the largest batch; `sizes` is then `capture_sizes(largest)`.
        padding: whether other sizes are rounded up to the next captured one, filled with `pad` and cut back; the
            filled rows must not affect the others. False runs them without a graph.
        dim: dimension of the batch in all inputs and results.
        pad: one number for all inputs, or one per input.
        reads: other tensors that the function uses, such as a model's parameters. When the address, layout or dtype of
            one changes, everything is captured again. New values do not require that.
        warm_ups: runs before a capture, at least 2.
        copy_results: whether to copy results. False returns the static results, which the next graph overwrites.
    """
    if largest is not None:
        sizes = capture_sizes(largest) if sizes is None else [n for n in sizes if n <= largest]
    if sizes is not None and (not sizes or any(n < 1 for n in sizes)):
        raise UsageError(f"sizes must be at least 1, not {list(sizes)}")
    ordered = None if sizes is None else sorted(set(sizes))
    return GraphedBatches(function, ordered, padding, dim, pad, list(reads), warm_ups, copy_results)

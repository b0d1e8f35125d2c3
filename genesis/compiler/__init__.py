"""`genesis.compile`: functions and modules whose chains of ops become few kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from genesis.compiler.compiled import Compiled, CompiledModule, compiled_functions
from genesis.compiler.fuse import Fusion, Group, split_totals
from genesis.compiler.graph import Call, Graph, Value, Windows
from genesis.compiler.program import BlockStep, Program, Step
from genesis.errors import UsageError
from genesis.keywords import check_calls
from genesis.nn.module import Module

MODES = ("default", "reduce-overhead", "max-autotune")


def schedule(name: str, graph: Graph) -> Program:
    """Return the program of a graph: kernels of fused calls on a GPU, blocks of fused calls on the CPU."""
    devices = {v.device.type for call in graph.calls for v in call.outputs}
    make: Callable[[Group, list[Value]], Step] = BlockStep
    if is_gpu := devices == {"cuda"}:
        from genesis.compiler.source import GroupStep, expression_of

        make = GroupStep

    def is_point(call: Call) -> bool:
        # What `tril` and `triu`, of the family "shape", keep depends on the place in the matrix.
        is_elementwise = call.op.elementwise and call.op.family != "shape" and len(call.outputs) == 1
        is_known = is_elementwise and (expression_of(call) is not None if is_gpu else not call.is_random)
        return is_known and call.outputs[0].size > 0

    graph = Windows(split_totals(graph), is_point).graph if is_gpu else graph
    units = Fusion(graph, is_point, is_gpu).ordered() if len(devices) == 1 else graph.calls
    in_memory = {*graph.results, *(v for unit in units for v in unit.reads)}
    # A group of one op runs the op's own kernel.
    steps = list[Step]()
    for unit in units:
        if isinstance(unit, Group) and (len(unit.calls) > 1 or unit.calls[0].op.family == "compiled"):
            steps.append(make(unit, [call.outputs[0] for call in unit.calls if call.outputs[0] in in_memory]))
        else:
            steps.append(Step(unit.calls, unit.calls[0].reads, unit.calls[0].outputs))
    return Program(name, graph, steps)


def compile(
    fn: Callable[..., Any] | None = None, *, mode: str = "default", dynamic: bool = False, fullgraph: bool = False,
    disable: bool = False, verify: int = 0,
) -> Any:  # fmt: skip
    """Return a function or module that computes the same as `fn` in fewer passes over memory; also a decorator.

    A call with arguments of new shapes, dtypes, strides or devices, or with other numbers, traces the function, and so
    does a call after a change of anything else that the function reads. docs/compile.md says what breaks a trace.

    Args:
        mode: "default"; "reduce-overhead" launches regions of many kernels as one CUDA graph, between copies of
            arguments and results; "max-autotune" does what the default does for now.
        dynamic: accepted; every shape still gets its own trace.
        fullgraph: raise an error where a call cannot be traced; otherwise such a call runs in Python, in pieces.
        disable: return `fn` itself.
        verify: trace the function again at every `verify`-th call, and raise an error if it now computes something
            else, because no guard detected a change. 0 disables this.

    Raises:
        UsageError: `fn` cannot be called, or `mode` is unknown. At a call with fullgraph: what cannot be traced; with
            verify: what changed.
    """
    if mode not in MODES:
        raise UsageError(f"{mode!r} is not a mode of compile", next=f"choose one of {', '.join(MODES)}")
    if fn is None:
        return partial(compile, mode=mode, dynamic=dynamic, fullgraph=fullgraph, disable=disable, verify=verify)
    if not callable(fn):
        raise UsageError(f"compile got a {type(fn).__name__}, which cannot be called", next="pass a function or module")
    if disable:
        return fn
    kind: Any = CompiledModule if isinstance(fn, Module) else Compiled
    return kind(fn, fullgraph=fullgraph, schedule=schedule, replays=mode == "reduce-overhead", verify=verify)


def reset() -> None:
    """Forget the traces of all compiled functions."""
    for each in tuple(compiled_functions):
        each.reset()


@dataclass(frozen=True)
class Kernel:
    """One step of a program.

    Attributes:
        ops: names of the ops that it computes.
        reads: bytes that it loads.
        writes: bytes that it stores.
        source: the generated source; empty for an op's own kernel.
    """

    ops: tuple[str, ...]
    reads: int
    writes: int
    source: str

    @classmethod
    def of(cls, step: Step) -> Kernel:
        reads, writes = (sum(v.nbytes for v in values) for values in (step.reads, step.results))
        return cls(tuple(call.op.name for call in step.calls), reads, writes, step.source)


@dataclass(frozen=True)
class Explanation:
    """The kernels of the newest trace of each call, and the breaks with file and line.

    Attributes:
        pieces: for functions with breaks, where and why each piece ends, and its kernels.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    breaks: tuple[str, ...]
    pieces: tuple[tuple[str, tuple[Kernel, ...]], ...] = ()

    @classmethod
    def of(cls, compiled: Compiled) -> Explanation:
        programs = [entry.region.programs for found in compiled.entries.values() for entry in found[:1]]
        forward = tuple(Kernel.of(step) for each in programs for step in each[0].steps)
        backward = tuple(Kernel.of(step) for each in programs for program in each[1:] for step in program.steps)
        breaks = tuple(dict.fromkeys(f"{b.line}: {b.reason}" for b in compiled.breaks.values()))
        pieces = [(f"{p.line}: {p.reason}", p.program) for p in compiled.lazy.pieces.values() if p.program is not None]
        return cls(forward, backward, breaks, tuple((end, tuple(map(Kernel.of, p.steps))) for end, p in pieces))

    def __str__(self) -> str:
        lines = []
        pieces = [(f"piece until {end}", kernels) for end, kernels in self.pieces]
        for title, kernels in (("forward", self.forward), ("backward", self.backward), *pieces):
            if kernels:
                lines.append(f"{title}: {len(kernels)} kernels")
            lines += [f"  {' '.join(k.ops):<60} reads {k.reads:,} bytes, writes {k.writes:,}" for k in kernels]
        lines += [f"break at {text}" for text in self.breaks]
        return "\n".join(lines)


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that takes the arguments of `fn`, runs it compiled, and describes its kernels."""

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        inner = getattr(fn, "_compiled", fn)
        compiled = inner if isinstance(inner, Compiled) else Compiled(fn, fullgraph=False, schedule=schedule)
        compiled.lazy.patience, before = 1, compiled.lazy.patience
        compiled(*args, **kwargs)
        compiled.lazy.patience = before
        return Explanation.of(compiled)

    return explained


check_calls(globals(), ("compile", "explain", "reset"))
compile.explain = explain  # type: ignore[attr-defined]

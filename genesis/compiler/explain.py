"""What a compiled function runs: its kernels with the bytes that they move, and what cannot be traced."""

from __future__ import annotations

from dataclasses import dataclass

from genesis.compiler.compiled import Compiled
from genesis.compiler.program import Program


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
        entries = [entry for found in compiled.entries.values() for entry in found[:1]]
        forward = tuple(k for e in entries for k in _kernels(e.region.program))
        backward = tuple(k for e in entries if e.region.backward for k in _kernels(e.region.backward_program))
        breaks = tuple(dict.fromkeys(f"{b.line}: {b.reason}" for b in compiled.breaks.values()))
        lazy = compiled.lazy.pieces.values()
        pieces = tuple((f"{p.line}: {p.reason}", tuple(_kernels(p.program))) for p in lazy if p.program is not None)
        return cls(forward, backward, breaks, pieces)

    def __str__(self) -> str:
        lines = []
        pieces = [(f"piece until {end}", kernels) for end, kernels in self.pieces]
        for title, kernels in (("forward", self.forward), ("backward", self.backward), *pieces):
            if kernels:
                lines.append(f"{title}: {len(kernels)} kernels")
            for k in kernels:
                lines.append(f"  {' '.join(k.ops):<60} reads {k.reads:,} bytes, writes {k.writes:,}")
        lines += [f"break at {text}" for text in self.breaks]
        return "\n".join(lines)


def _kernels(program: Program) -> list[Kernel]:
    found = []
    for step in program.steps:
        reads, writes = (sum(v.nbytes for v in dict.fromkeys(values)) for values in (step.reads, step.results))
        found.append(Kernel(tuple(call.op.name for call in step.calls), reads, writes, getattr(step, "source", "")))
    return found

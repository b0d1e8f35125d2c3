"""`mode="reduce-overhead"`: the launches of a compiled region as one CUDA graph."""

from __future__ import annotations

import threading
from typing import Any

from genesis.array import Array, empty
from genesis.compiler.program import Program
from genesis.op import Op, execute, registry

WARM_UP = 2  # calls before the capture, which compile kernels and show which inputs stay at their addresses


class Replayed:
    """Runs the op of a program, after some calls as a CUDA graph.

    A graph reads and writes fixed addresses. Inputs whose addresses change between calls, such as activations, are
    first copied to fixed addresses; parameters are read in place. Results are copied out, so that the next call does
    not overwrite them. A program runs without a graph if it has so few steps that the copies outweigh them, if it
    changes its inputs, and inside another capture.
    """

    def __init__(self, op: Op, program: Program) -> None:
        self.op, self.program, self.calls = op, program, 0
        self.is_profitable = len(program.steps) > len(program.results) + 1 and not op.mutates
        self.copied: set[int] = set()  # indices of inputs that are copied
        self.inputs: list[Array] = []  # what the graph reads; before the capture, the inputs of the last call
        self.results: tuple[Array, ...] = ()
        self.graph: Any = None
        self.lock = threading.Lock()  # calls share the graph's memory

    def __call__(self, inputs: tuple[Any, ...]) -> tuple[Array, ...]:
        """Return the results of the op."""
        backend = inputs[0].storage.backend if self.is_profitable and inputs else None
        if backend is None or inputs[0].device.type == "cpu" or backend.is_capturing:
            return self.program.launch(self.op, inputs)
        with self.lock:
            return self._run(inputs)

    def _run(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        moved = {i for i, (x, y) in enumerate(zip(inputs, self.inputs, strict=False)) if x.data_ptr() != y.data_ptr()}
        self.calls += 1
        if self.calls <= WARM_UP or moved - self.copied:
            self.copied |= moved
            self.graph, self.inputs, self.calls = None, list(inputs), min(self.calls, WARM_UP)
            return execute(self.op, inputs, {}, None)
        if self.graph is None:
            self._capture(inputs)
        copy = registry["copy"]
        for i in self.copied:
            copy(inputs[i], out=self.inputs[i])
        self.graph.replay()
        return tuple([copy(x) for x in self.results])

    def _capture(self, inputs: tuple[Array, ...]) -> None:
        from genesis.cuda import CUDAGraph, graph

        self.inputs = [
            empty(x.shape, x.dtype, x.device) if i in self.copied else x for i, x in enumerate(inputs)
        ]  # fmt: skip
        self.graph = CUDAGraph()
        with graph(self.graph):
            self.results = execute(self.op, tuple(self.inputs), {}, None)

"""Compiled chains on the CPU: activations as single steps, and values that overwrite others in a block's memory."""

from __future__ import annotations

import cProfile
from typing import Any

import pytest

import genesis
from genesis.compiler import explain, region
from genesis.nn import functional as F
from genesis.op import registry
from tests.compiler.test_compile import equal, gradients, ramp


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_an_activation_on_the_cpu_keeps_its_bits(name: str, dtype: str) -> None:
    """In one pass over memory; backward reads the exponential of forward. 2-byte floats are rounded once."""

    def function(x: Any) -> Any:
        return getattr(F, name)(x * 3) * x + 1

    x = ramp(3, 70_001).to(getattr(genesis, dtype))
    want, found = gradients(function, x)
    assert want.tobytes() == found.tobytes()
    assert equal(genesis.compile(function)(x), function(x))
    passes = explain(function)(x.requires_grad_())
    forward, backward = ([step for kernel in each for step in kernel.ops] for each in (passes.forward, passes.backward))
    assert len(passes.forward) == len(passes.backward) == 1
    assert (name in forward) == (dtype == "bfloat16")
    if name == "silu" and dtype != "bfloat16":
        assert "exp" in forward and "exp" not in backward


def test_blocks_overwrite_values_that_no_later_step_reads() -> None:
    compiled, x = genesis.compile(lambda x: (x * 2 + 1).tanh() * (x - 1).exp() - x), ramp(300, 1000)
    assert equal(compiled(x), (x * 2 + 1).tanh() * (x - 1).exp() - x)
    ((entry,),) = compiled.entries.values()
    (step,) = entry.region.programs[0].steps
    assert step.nbytes == 2 * 4  # two values of 4 bytes live at once


def test_the_compiler_names_ops_that_exist() -> None:
    assert registry.keys() >= region.CHEAP | region.COMPARISONS | region.SELECTIONS | region.ARITHMETIC


def test_a_call_of_a_program_costs_no_more_than_its_ops() -> None:
    """Counted in calls of functions, Python's and others. Two ops are the fewest that a program replaces."""
    tensors = [genesis.ones(16) for _ in range(3)]
    counts = []
    for function in (scaled := lambda x, y, z: x * y + z, genesis.compile(scaled, fullgraph=True)):
        function(*tensors)
        profile = cProfile.Profile()
        profile.runcall(function, *tensors)
        counts.append(sum(row.callcount for row in profile.getstats()))
    assert counts[1] < counts[0]

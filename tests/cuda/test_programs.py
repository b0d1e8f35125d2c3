"""What was called before changes no later result: random programs of dtypes, layouts, out= and calls in place."""

from __future__ import annotations

from typing import Any

import pytest

from genesis.array import Array
from genesis.backend import backend_for
from genesis.backend.cuda.dispatch import cuda_impl_named, cuda_impls
from genesis.op import registry
from tests.cuda.programs import Disagreement, Program
from tests.ops.devices import CUDA

STEPS = 40


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backend_for(CUDA)
    monkeypatch.setattr(backend, "_calls", {})
    monkeypatch.setattr(backend, "_calls_into", {})


# The first three fail where a copy is remembered with the type of its out, 110 where fill_(0.5) makes False.
@pytest.mark.parametrize("seed", [21, 71, 94, 110])
def test_programs_agree_with_the_cpu(seed: int, nothing_remembered: None) -> None:
    Program(seed).run(STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_programs_agree_with_the_cpu(first: int) -> None:
    for seed in range(first, first + 20):
        Program(seed).run(STEPS)


def test_a_call_that_is_remembered_with_its_outs_type_is_found(
    monkeypatch: pytest.MonkeyPatch, nothing_remembered: None
) -> None:
    monkeypatch.setattr("genesis.backend.cuda.has_default_layout", lambda *call: True)
    with pytest.raises(Disagreement, match=r"clone: dtype genesis\.float32, on the CPU genesis\.float16\nseed 71"):
        Program(71).run(STEPS)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch, nothing_remembered: None) -> None:
    right = cuda_impl_named("copy", "elementwise")

    def wrong(out: Array, x: Array, **attrs: Any) -> None:
        right(out, x, **attrs)
        if out.dtype.is_floating_point:
            registry["add"](out, 0.25, out=out)

    monkeypatch.setitem(cuda_impls, "copy", wrong)
    cuda_impl_named.cache_clear()
    try:
        with pytest.raises(Disagreement, match=r"(?s)gives .*, on the CPU .*seed 6"):
            Program(6).run(STEPS)
    finally:
        cuda_impl_named.cache_clear()

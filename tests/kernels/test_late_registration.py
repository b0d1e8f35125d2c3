"""What is registered after the kernels of its family were loaded has its CUDA implementation all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import genesis
import genesis.kernels.optim.optimizers  # loaded before the rule below is written
import genesis.kernels.pointwise.elementwise  # and before the op
from genesis.array import Array, Spec
from genesis.backend.cuda.dispatch import cuda_impl, cuda_impl_named, cuda_impls
from genesis.errors import DeviceError
from genesis.op import Op, registry
from genesis.ops.rule import RULES, Rule
from genesis.optim import Optimizer
from genesis.optim.flat import RuleCall
from genesis.shapes import Shape


@pytest.fixture
def forget() -> Iterator[None]:
    """Takes what a test has registered out of the tables again."""
    tables: tuple[dict[str, Any], ...] = (RULES, registry, cuda_impls)
    before = [set(table) for table in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        for name in table.keys() - names:
            del table[name]
    cuda_impl_named.cache_clear()


def constants(lr, step, scale, decay):  # type: ignore[no-untyped-def]
    return lr * scale, decay


def update(p, g, s, rate, decay):  # type: ignore[no-untyped-def]
    """s = d·s + g, p = p - lr·c·s."""
    s = s * decay + g
    return p - s * rate, s


@pytest.mark.parametrize("how", [{}, {"fused": True}])
def test_a_rule_that_is_written_late_runs_on_cuda(forget: None, how: dict[str, bool]) -> None:
    late = Rule("late", ("sum",), ("decay",), constants, update, flops=4)

    class Late(Optimizer):
        at_least_0 = ("lr", "decay")

        @classmethod
        def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
            return RuleCall(late, {"decay": group["decay"]})

    found = {}
    for device in ("cpu", "cuda"):
        x = genesis.tensor([1.0, -2.0, 3.0], device=device, requires_grad=True)
        optimizer = Late([x], {"lr": 0.5, "decay": 0.25}, **how)  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            (x * x).sum().backward()
            optimizer.step()
        found[device] = x.tolist()
    assert found["cuda"] == found["cpu"] == [-0.25, 0.5, -0.75]


def test_an_op_that_is_registered_late_runs_once_it_has_a_cuda_implementation(forget: None) -> None:
    late = Op("late", lambda out, x: None, lambda x: Spec(x.shape, x.dtype), family="elementwise")
    x = genesis.tensor([1.0, -2.0], device="cuda").array
    with pytest.raises(DeviceError, match="late has no CUDA kernel"):
        late(x)

    @cuda_impl("late")
    def negated(out: Array, x: Array) -> None:
        registry["neg"](x, out=out)

    assert late(x).numpy().tolist() == [-1.0, 2.0]

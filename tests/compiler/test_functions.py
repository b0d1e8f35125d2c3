"""Functions and modules as people write them: one trace, no breaks, and what eager code computes and changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.nn import functional as F


def masked_scores(x: Any) -> Any:
    return (x @ x.t()).masked_fill(genesis.ones(4, 4, device=x.device).triu(1) > 0, -9.0).tril(-1) * 2 + 1


def smoothed_labels(x: Any) -> Any:
    labels = (x[:, 0] > 0).long()
    target = genesis.full_like(x.detach(), 0.1).scatter_(1, labels[:, None], 0.9)
    target[:, -1] += F.one_hot(labels, 3)[:, 1]
    return -(target * x.log_softmax(-1)).sum()


def rotated(x: Any, turns: Any) -> Any:
    pairs, ones = genesis.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)), genesis.ones(3, device=x.device)
    return genesis.view_as_real(pairs * turns * genesis.polar(ones, ones)).flatten(1)


class Normalized(nn.Module):
    """Batch statistics in buffers, and a norm by a vector that backward reads as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(genesis.linspace(-1, 2, 18).reshape(3, 6)), nn.BatchNorm1d(3)
        self.register_buffer("u", genesis.ones(3))
        self.register_buffer("steps", genesis.zeros(()))

    def forward(self, x: Any) -> Any:
        before = self.u.clone()
        with genesis.no_grad():
            self.u.copy_(F.normalize(self.weight @ self.weight.t() @ self.u, dim=0))
            self.weight.clamp_(-1.5, 1.5)
            self.steps += 1
        return self.norm(x @ (self.weight / (self.weight * before[:, None]).sum()).t()) * self.u


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", genesis.zeros(5, 6))

    def forward(self, x: Any, places: Any) -> Any:
        with genesis.no_grad():
            self.rows[places] = x[:2]
        return (x * self.rows[:4]).sum(-1)


CASES: dict[str, Any] = {
    "masked scores": lambda: (masked_scores,), "smoothed labels": lambda: (smoothed_labels,),
    "complex rotation": lambda: (rotated, genesis.polar(genesis.ones(3), genesis.arange(3.0))),
    "normalized": lambda: (Normalized(),), "cache": lambda: (Cache(), genesis.tensor([3, 1])),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_one_trace_computes_and_changes_what_eager_code_does(name: str, device: str) -> None:
    found: list[list[Any]] = [[], []]
    for seen in found:
        genesis.manual_seed(5)
        x, (function, *others) = genesis.randn(4, 6, device=device, requires_grad=True), CASES[name]()
        leaves, others = [x], [each.to(device) for each in others]
        if isinstance(function, nn.Module):
            leaves += [*function.to(device).parameters(), *function.buffers()]
        compiled = genesis.compile(function, fullgraph=True) if seen is found[1] else function
        for i in range(3):
            y = compiled(x * (i + 1), *others)
            (y * y).sum().backward()
            seen.append(y)
        seen += [*leaves, *(t.grad for t in leaves if t.requires_grad)]
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got.numpy(force=True), want.numpy(force=True), rtol=2e-5, atol=2e-5)
    assert sum(map(len, getattr(compiled, "_compiled", compiled).entries.values())) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_are_put_into_the_memory_of_a_buffer(device: str) -> None:
    module, x = genesis.compile(Cache().to(device)), genesis.ones(4, 6, device=device)
    assert module(x, genesis.tensor([3, 1]).to(device)).tolist() == [0, 6, 0, 6]
    ((entry,),) = module._compiled.entries.values()
    program = entry.region.programs[0]
    (call,) = [each for step in program.steps for each in step.calls if each.op.name == "index_put"]
    assert program.in_place == {call.outputs[0]: call.inputs[0]}


def test_a_label_out_of_range_is_refused_by_a_trace() -> None:
    compiled = genesis.compile(lambda x: F.one_hot(x, 3), fullgraph=True)
    assert compiled(genesis.tensor([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]
    for label in (3, -1):
        with pytest.raises(genesis.errors.IndexRangeError, match=f"{label} is not between 0 and 2"):
            compiled(genesis.tensor([0, label]))


def test_an_argument_that_changes_with_a_gradient_is_a_break() -> None:
    def scaled(x: Any, total: Any) -> Any:
        total[0].mul_(x)
        return total.sum()

    x, total, compiled = genesis.ones(3, requires_grad=True), genesis.ones(2, 3), genesis.compile(scaled)
    compiled(x, total).backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert total.requires_grad
    assert len(compiled.breaks) == 1

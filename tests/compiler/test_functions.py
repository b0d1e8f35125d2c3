"""Functions and modules as people write them: one trace, no breaks, and what eager code computes and changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.nn import functional as F
from genesis.utils.checkpoint import checkpoint


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


@dataclass
class Batch:
    inputs: Any
    scale: float = 1.0

    def scaled(self) -> Any:
        return self.inputs * self.scale * FACTOR


def batched(x: Any, scale: float = 3.0) -> Any:
    return Batch(Batch(x, scale).scaled().exp(), scale)


def dropped(x: Any) -> Any:
    return x + checkpoint(lambda y: F.dropout(y.tanh(), 0.3), x, use_reentrant=False)


class Rotary(nn.Module):
    """Its table is made by the first call."""

    table: Any = None

    def forward(self, x: Any) -> Any:
        if self.table is None:
            self.table = genesis.arange(6, device=x.device).float().cos()
        return x * self.table


FACTOR = 2.0
CASES: dict[str, Any] = {
    "masked scores": lambda: (masked_scores,), "smoothed labels": lambda: (smoothed_labels,),
    "complex rotation": lambda: (rotated, genesis.polar(genesis.ones(3), genesis.arange(3.0))),
    "normalized": lambda: (Normalized(),), "cache": lambda: (Cache(), genesis.tensor([3, 1])),
    "dataclass": lambda: (lambda x: batched(x).inputs,), "dropout in a checkpoint": lambda: (dropped,),
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


def test_dataclasses_are_arguments_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = genesis.compile(lambda batch: Batch(batch.scaled() + 1, batch.scale))
    for factor, scale, traces in ((2.0, 1.0, 1), (2.0, 1.0, 1), (2.0, 4.0, 2), (3.0, 4.0, 3)):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        result = compiled(Batch(genesis.ones(2), scale))
        assert (type(result), result.scale, result.inputs.tolist()) == (Batch, scale, [factor * scale + 1] * 2)
        assert sum(map(len, compiled.entries.values())) == traces


def test_what_the_first_call_stores_is_read_by_the_trace_of_the_second() -> None:
    module, x = genesis.compile(Rotary()), genesis.ones(2, 6)
    for breaks in (1, 0, 0):
        assert (module(x)[1] == genesis.arange(6).cos()).all()
        assert len(module._compiled.breaks) == breaks
    assert len(module._compiled.entries) == 1


CHANGES: dict[str, Any] = {
    "pops": lambda batch: batch["x"] * batch.pop("y", 2), "appends": lambda batch: batch["list"].append(batch["x"] * 2),
    "replaces": lambda batch: batch.update(x=batch["x"] * 3),
    "sets": lambda batch: setattr(batch["record"], "scale", 5),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_containers_reach_the_caller(name: str) -> None:
    found = []
    for function in (CHANGES[name], genesis.compile(CHANGES[name])):
        batch = {"x": genesis.ones(2), "y": 3, "list": [1], "record": Batch(None)}
        found.append([str((function(batch), batch)) for _ in range(3)])
    assert found[0] == found[1]


def added(x: Any, total: Any) -> Any:
    before = x * 2
    with genesis.no_grad():
        total.add_(1)
    return before + x


def test_an_argument_that_changes_may_be_another_one_or_a_captured_tensor() -> None:
    found = []
    for wrap in (lambda f: f, genesis.compile):
        x, function = genesis.ones(4), wrap(added)
        captured = wrap(lambda total, x=x: added(x, total))
        calls = [function(x, genesis.ones(4)), function(x, x.detach()), captured(genesis.ones(4)), captured(x[:4])]
        found.append([y.tolist() for y in (*calls, function(x, genesis.ones(4)), captured(x))])
    assert found[0] == found[1]


def test_arguments_that_share_memory_and_do_not_change_are_traced() -> None:
    compiled = genesis.compile(lambda q, k: (q * k).exp().sum(-1), fullgraph=True)
    x = genesis.linspace(0, 1, 24).reshape(2, 12).requires_grad_()
    y = compiled(*x.chunk(2, -1))
    assert y.tolist() == pytest.approx((x[:, :6] * x[:, 6:]).exp().sum(-1).tolist())
    y.sum().backward()
    assert x.grad[0].tolist() == pytest.approx((x.roll(6, 1) * (x * x.roll(6, 1)).exp())[0].tolist())


def test_a_hook_reads_and_changes_what_it_encloses() -> None:
    module, seen, factors = nn.Linear(2, 2), [], [1.0]
    module.register_forward_hook(lambda module, arguments, y: y * factors[0])
    compiled = genesis.compile(module)
    for factors[0] in (1.0, 2.0):
        assert (compiled(genesis.ones(2)) == module(genesis.ones(2))).all()
    module.register_forward_hook(lambda module, arguments, y: seen.append(y))
    for _ in range(3):
        compiled(genesis.ones(2))
    assert len(seen) == 3


class Noisy(genesis.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * genesis.rand(3)


def test_backward_draws_new_numbers_at_each_call() -> None:
    found = []
    for function in (Noisy.apply, genesis.compile(lambda x: Noisy.apply(x))):
        genesis.manual_seed(3)
        for _ in range(2):
            x = genesis.ones(3, requires_grad=True)
            function(x).sum().backward()
            found.append(x.grad.tolist())
    assert found[:2] == found[2:]

"""Functions with breaks: their ops wait and run in pieces, and everything a user sees is as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.compiler import explain, lazy
from genesis.errors import IndexRangeError, NumericError, ShapeError
from genesis.kernels.gemm import linalg
from genesis.nn import functional as F
from genesis.nn import fused
from tests.compiler.test_compile import equal, ramp


def branch(x: Any) -> Any:
    y = (x * 2 + 1).tanh()
    if y.sum().item() > 0:
        y = y * 3 - x
    return (y.exp() + 1) * y


def runs(function: Callable[..., Any], *args: Any, calls: int = 3) -> tuple[Any, Any]:
    """Compare eager and compiled results of several calls; return the compiled function and its last result."""
    compiled = genesis.compile(function)
    for _ in range(calls):
        genesis.manual_seed(5)
        want = function(*args)
        genesis.manual_seed(5)
        got = compiled(*args)
        assert equal(want, got)
    assert compiled.breaks
    return compiled, got


def test_pieces_run_as_fused_programs_from_the_second_call_on() -> None:
    compiled, _ = runs(branch, ramp(6, 7))
    first, second = compiled.lazy.pieces.values()
    assert [[len(step.calls) for step in piece.program.steps] for piece in (first, second)] == [[3, 1], [5]]
    assert [len(first.program.results), len(second.program.results)] == [2, 1]  # what nothing refers to is not stored
    assert (first.reason, second.reason) == ("reads values on the host", "ends")
    assert first.line.rpartition("/")[2].startswith("test_lazy.py:")
    assert equal(compiled(-ramp(6, 7)), branch(-ramp(6, 7)))  # the other branch is a third piece
    assert [piece.runs for piece in compiled.lazy.pieces.values()] == [4, 3, 1]


def test_explain_shows_the_pieces() -> None:
    found = explain(branch)(ramp(4, 4))
    assert [[kernel.ops for kernel in kernels] for _, kernels in found.pieces] == [
        [("mul", "add", "tanh"), ("sum",)], [("mul", "sub", "exp", "add", "mul")],
    ]  # fmt: skip
    assert found.pieces[0][1][0].reads == 64
    assert "test_lazy.py" in found.pieces[0][0]
    assert "piece until" in str(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_hooks_and_changes_in_place(device: str) -> None:
    def work(x: Any, w: Any) -> Any:
        seen = []
        y = (x * w).tanh()
        y.register_hook(lambda g: (seen.append(1), g * 2)[1])
        z = y.clone()
        z[:, 1:].mul_(3)
        if z.sum().item() < -1e9:
            return z
        with genesis.no_grad():
            w_now = w.detach().clone()
            w_now.add_(1).mul_(0.5)
        loss = (z * w_now).exp().mean() + F.dropout(z, 0.5).sum()
        (inner,) = genesis.autograd.grad(loss, [y], retain_graph=True)
        return loss * 2 + inner.sum()

    compiled, found = genesis.compile(work), []
    for each in (work, compiled, compiled, compiled):
        genesis.manual_seed(1)
        x, w = (t.to(device).detach().requires_grad_() for t in (ramp(3, 5), ramp(3, 5) * 0.5))
        result = each(x, w)
        result.backward()
        found.append([t.detach().cpu().numpy() for t in (result, x.grad, w.grad)])
        assert genesis.random.default_generator.offset == found[0][0].size * 4
    for others in found[1:]:
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(found[0], others, strict=True))


def test_a_training_step_with_a_break() -> None:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        with genesis.autocast("cpu", dtype=genesis.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        if loss.item() > 1e9:
            return loss
        optimizer.step()
        return loss.detach()

    found = []
    for wrap in (lambda f: f, genesis.compile):
        genesis.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer = genesis.optim.AdamW(model.parameters(), lr=0.1)
        function = wrap(step)
        losses = [function(model, optimizer, ramp(3, 4) * i).item() for i in range(5)]
        found.append((losses, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1]


def test_a_piece_runs_under_the_settings_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are read inside no_grad, where the kernel would not store what backward reads."""
    norm, gate_up, down = nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 256, bias=False), nn.Linear(128, 64, bias=False)
    norm, gate_up, down = (each.to("cuda", genesis.bfloat16) for each in (norm, gate_up, down))

    def work(x: Any) -> Any:
        y = fused.gated_mlp(x + 1, norm, [gate_up], down)
        with genesis.no_grad():
            y.sum().item()
        return y.float().square().sum()

    found = []
    for each in (genesis.compile(work), work):
        x = genesis.linspace(-1, 1, 40 * 64, device="cuda").reshape(40, 64).bfloat16().requires_grad_()
        found.append(genesis.autograd.grad(each(x), [x, gate_up.weight]))
    assert all(equal(a, b) for a, b in zip(*found, strict=True))

    seen: list[tuple[bool, ...]] = []
    launch = linalg._launch_tma

    def spy(p: Any, e: Any, chain: Any, tile: Any) -> Any:
        with ThreadPoolExecutor(1) as another:
            seen.append((chain, allow_tf32.get(), another.submit(allow_tf32.get).result()))
        return launch(p, e, chain, tile)

    monkeypatch.setattr(linalg, "_launch_tma", spy)

    def settings(x: Any, w: Any) -> list[Any]:
        with genesis.exact():
            y = x @ w
        before = allow_tf32.set(True)
        z = x @ (w + 1)
        allow_tf32.set(before)
        return [y, z * x.sum().item()]

    genesis.compile(settings)(genesis.ones(24, 64, device="cuda"), genesis.ones(64, 24, device="cuda"))
    assert seen == [(True, False, False), (False, True, False)]  # another thread keeps its setting


def test_gradients_that_a_function_enables_inside_no_grad() -> None:
    def work(x: Any) -> Any:
        with genesis.enable_grad():
            return (x * 2).sum()

    x = ramp(3, grad=True)
    with genesis.no_grad():
        total = genesis.compile(work)(x)
    total.backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_results_of_an_op_without_memory_for_any(device: str) -> None:
    def work(x: Any, w: Any) -> Any:
        if x.sum().item() < 9:
            F.linear_token_log_probs(x * 2, w, genesis.tensor([1, 0], device=device)).sum().backward()
        return x.grad

    x, w = (ramp(2, 4, grad=True) if device == "cpu" else ramp(2, 4).cuda().requires_grad_() for _ in range(2))
    want = work(x, w).clone()
    x.grad = None
    assert np.allclose(genesis.compile(work)(x, w).numpy(force=True), want.numpy(force=True))


def test_memory_that_numpy_shares_is_read_at_once() -> None:
    values = np.ones(3, np.float32)
    kept = genesis.ones(3)
    view = kept.numpy()

    def work(x: Any) -> Any:
        values[:], view[:] = 1, 1
        a, b = genesis.from_numpy(values) * 2, kept * 2
        c = x + 0
        inside = c.numpy()
        d = c * 2
        values[:], view[:], inside[:] = 7, 7, 7
        return genesis.cat([a, b, c, d])

    compiled = genesis.compile(work)
    for _ in range(3):
        assert compiled(genesis.ones(3)).tolist() == [2] * 6 + [7] * 3 + [2] * 3
    assert compiled.breaks


def test_a_copy_from_another_device_waits_for_readers() -> None:
    def work(x: Any) -> Any:
        x.fill_(1)
        y = x + 1
        x.copy_(genesis.full((3,), 9.0))
        return y * 1 + 0 * y.sum().item()

    compiled, x = genesis.compile(work), genesis.ones(3, device="cuda")
    for _ in range(3):
        assert compiled(x).tolist() == [2, 2, 2]
        assert x.tolist() == [9, 9, 9]


def test_errors_for_values_come_from_their_line() -> None:
    def work(x: Any, i: Any) -> Any:
        y = x * 2 + x.sum().item()
        try:
            y = y[i]
        except IndexRangeError:
            y = y - 1
        try:
            i // (i - i)
        except NumericError:
            y = y * 3
        return y

    runs(work, ramp(3), genesis.tensor([0, 2]))
    runs(work, ramp(3), genesis.tensor([0, 5]))


def test_an_exception_leaves_what_was_done() -> None:
    def fails(x: Any, seen: list[Any]) -> Any:
        x.add_(1)
        seen.append(x * 2)
        F.dropout(x, 0.5)
        if x.sum().item() > -1e9:
            seen.append(seen[0] + 1)
            return x @ genesis.ones(7, 7)
        return x

    compiled, found = genesis.compile(fails), []
    for each in (fails, compiled, compiled, compiled):
        genesis.manual_seed(3)
        x, seen = ramp(3), []
        with pytest.raises(ShapeError, match="matmul"):
            each(x, seen)
        found.append((x.tolist(), [t.tolist() for t in seen], genesis.random.default_generator.offset))
    assert all(each == found[0] for each in found)


def test_numbers_that_change_with_every_call_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(x: Any, n: list[float]) -> Any:
        n[0] += 1
        return (x * n[0] + 1) * x.sum().item()

    compiled, n = genesis.compile(work), [0.0]
    for i in range(5):
        assert equal(compiled(ramp(4), n), (ramp(4) * (i + 1) + 1) * ramp(4).sum().item())
    assert not any(piece.program for piece in compiled.lazy.pieces.values())
    monkeypatch.setattr(lazy, "CALLS", len(compiled.lazy.calls))
    assert equal(compiled(ramp(4), n), (ramp(4) * 6 + 1) * ramp(4).sum().item())
    assert len(compiled.lazy.calls) == lazy.CALLS
    monkeypatch.setattr(lazy, "CALLS", 0)
    assert equal(compiled(ramp(5), n), (ramp(5) * 7 + 1) * ramp(5).sum().item())


def test_long_functions_run_in_several_pieces() -> None:
    def work(x: Any) -> Any:
        for _ in range(300):
            x = x * 0.99 + 0.01
        return x * x.sum().item() + 1

    compiled, _ = runs(work, ramp(4))
    assert {piece.reason for piece in compiled.lazy.pieces.values()} > {"ends", "has 256 ops"}


def test_a_second_derivative_inside() -> None:
    def work(x: Any) -> Any:
        y = (x**3).sum()
        (g,) = genesis.autograd.grad(y, [x], create_graph=True)
        if g.sum().item() > 0:
            g = g * 2
        return g.square().sum()

    compiled, found = genesis.compile(work), []
    for each in (work, compiled, compiled, compiled):
        x = ramp(4, grad=True)
        each(x).backward()
        found.append(x.grad)
    assert all(equal(g, found[0]) for g in found)


def test_ops_that_raise_errors_for_values_do_not_wait() -> None:
    index, label = genesis.tensor([9]), genesis.tensor([-9])
    x, whole = ramp(3, 4), genesis.tensor([1, 0])
    calls = {
        "index_get": lambda: x[index], "index_put": lambda: x.clone().index_put_((index,), ramp(1, 4)),
        "embedding": lambda: F.embedding(index, x), "bincount": lambda: label.bincount(),
        "floor_divide": lambda: whole // whole, "remainder": lambda: whole % whole,
        "bernoulli": lambda: (x * 9).bernoulli(), "multinomial": lambda: (-x).multinomial(1),
        "cross_entropy": lambda: F.cross_entropy(x[:1], index),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises((IndexRangeError, NumericError)):
            call()
        assert name in lazy.RAISING, name

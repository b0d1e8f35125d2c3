"""Random programs of ops, views, in-place changes, broadcasting, reductions and control flow, compiled and eager.

`python -m tests.compiler.programs --count 500 --device cuda` compares results and gradients with eager ones. CUDA means
Triton's interpreter if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import genesis
from genesis import Tensor


def first(x: Tensor) -> Tensor:
    """The first and the last element of each row."""
    index = (genesis.arange(2, device=x.device) * (x.shape[-1] - 1)).expand(*x.shape[:-1], 2)
    return x.gather(-1, index)


SHAPES = ((3, 5), (4, 1), (1, 6), (2, 3, 4), (7,), (2, 33), (1,), (5, 70), (2, 300))
UNARY: tuple[Callable[..., Any], ...] = (
    lambda x: x.tanh(), lambda x: x.sigmoid(), lambda x: (x * 0.3).exp(), lambda x: x.abs() + 0.5, lambda x: x * x,
    lambda x: -x, lambda x: x.clamp(-1, 1), lambda x: genesis.where(x > 0, x, x * 0.1), lambda x: x.relu(),
    lambda x: x.pow(3) * 0.1, lambda x: (x.abs() + 1).log(), lambda x: x.sin(), lambda x: x.float(),
    lambda x: genesis.nn.functional.gelu(x), lambda x: genesis.nn.functional.silu(x),
    lambda x: (x * 4.3 + 0.123).floor(),
    lambda x: genesis.nn.functional.dropout(x, 0.4), lambda x: x + genesis.rand_like(x),
)  # fmt: skip
REDUCTIONS: tuple[Callable[..., Any], ...] = (
    lambda x: x.sum(-1, keepdim=True), lambda x: x.mean(-1, keepdim=True), lambda x: x.amax(-1, keepdim=True),
    lambda x: x.sum(0, keepdim=True), lambda x: x.mean(), lambda x: x.sum(), lambda x: x.sum(-1),
    lambda x: x.var(-1, keepdim=True) if x.shape[-1] > 1 else x, lambda x: x.softmax(-1), lambda x: x.logsumexp(-1),
    lambda x: x.log_softmax(-1), lambda x: x.amin(0), lambda x: x.std(-1) if x.shape[-1] > 1 else x.sum(-1),
    lambda x: first(x.log_softmax(-1)), lambda x: first(x * 2),
)  # fmt: skip
VIEWS: tuple[Callable[..., Any], ...] = (
    lambda x: x.transpose(0, -1), lambda x: x.reshape(-1), lambda x: x[..., ::2], lambda x: x.unsqueeze(0),
    lambda x: x[:1], lambda x: x.expand(2, *x.shape), lambda x: x.squeeze(),
    lambda x: x[..., 1:] if x.shape[-1] > 1 else x,
    lambda x: x.transpose(0, -1).contiguous(), lambda x: x.flip(-1), lambda x: genesis.cat([x, x], -1),
)  # fmt: skip


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors broadcast to at most 4,000 elements."""
    try:
        return int(np.prod(np.broadcast_shapes(a.shape, b.shape))) <= 4000
    except ValueError:
        return False


GLOBAL = 1.0
WORLDS = ((1.0, 0.5, (1, 2)), (1.0, 0.5, (1, 2)), (2.0, 0.5, (1, 2)), (2.0, 0.25, (2, 1, 1)), (1.0, 0.5, (1, 2)))
HOST: tuple[Callable[..., Any], ...] = (
    lambda x: x.sum().item(), lambda x: float(x.float().mean()), lambda x: bool(x.any()), lambda x: x.tolist(),
    lambda x: x.detach().numpy(force=True).sum() if not x.is_cuda else x.sum().item(), lambda x: str(x),
    lambda x: x.nonzero().shape[0],
)  # fmt: skip
IN_PLACE: tuple[Callable[..., Any], ...] = (
    lambda y, s: y.mul_(s), lambda y, s: y.add_(1), lambda y, s: y[..., :1].mul_(2), lambda y, s: y.copy_(y.flip(-1)),
    lambda y, s: y[..., ::2].add_(y[..., :1]), lambda y, s: y.t().mul_(s) if y.ndim == 2 else y.zero_(),
)  # fmt: skip


class World:
    """What a program reads besides its arguments; it changes between calls."""

    def enter(self, world: tuple[Any, ...]) -> None:
        """Set a global, an attribute and a list."""
        global GLOBAL
        GLOBAL, self.scale, powers = world
        self.powers[:] = powers

    def __init__(self) -> None:
        self.scale, self.powers = 0.5, [1, 2]


def program(seed: int) -> tuple[Callable[..., Any], int, World]:
    """Return a random function of tensors, the number of its arguments, and what else it reads.

    Every second program reads values on the host, and its control flow depends on them.
    """
    rng = random.Random(seed)
    breaks, scale, world = seed % 2 == 1, rng.choice((1.0, 0.5, 2)), World()
    draws = tuple(rng.random() for _ in range(300))

    def host(left: Any, pick: Any, x: Tensor, args: tuple[Tensor, ...]) -> Any:
        found = pick(HOST)(x)
        kind = next(left)
        if kind < 0.15:  # change an argument
            with genesis.no_grad():
                y = pick(args).detach()
                pick(IN_PLACE)(y, scale)
            return x + y.sum()
        if kind < 0.4:  # control flow on values
            return x * 2 if x.detach().float().sum().item() > 1e-3 else -x
        if kind < 0.6 and isinstance(found, float) and np.isfinite(found):
            return x + min(max(found, -2), 2)
        if kind < 0.8:
            with genesis.no_grad():
                y = x.detach().clone()
                pick(IN_PLACE)(y if y.ndim else y.reshape(1), scale)
            return x + y
        return x * world.scale

    def run(*args: Tensor) -> Any:
        left = iter(draws)

        def pick(options: Any) -> Any:
            return options[int(next(left) * len(options))]

        values = list(args)
        for _ in range(3 + int(next(left) * 10)):
            kind, x = next(left), pick(values)
            if x.ndim == 0 and kind < 0.5:
                x = x.reshape(1)
            if kind < 0.25:
                y = pick(UNARY)(x)
            elif kind < 0.4:
                y = pick(REDUCTIONS)(x)
            elif kind < 0.5:
                y = pick(VIEWS)(x)
            elif kind < 0.6:
                y = x.clone()
                pick(IN_PLACE)(y if y.ndim else y.reshape(1), scale)
            elif kind < 0.65:
                y = x.detach() * scale if x.ndim > 1 else x + world.powers[0] * GLOBAL
            elif kind < 0.75:
                y = (
                    host(left, pick, x, args)
                    if breaks
                    else sum((x * p for p in world.powers), x * world.scale) + GLOBAL
                )
            else:
                other = pick([v for v in values if fits(x, v)] or [x])
                y = pick((
                    lambda a, b: a + b, lambda a, b: a - b * scale, lambda a, b: a * b, lambda a, b: a / (b.abs() + 1),
                    genesis.maximum, lambda a, b: genesis.where(a > b, a, b * 0.5), lambda a, b: a.lerp(b, 0.3),
                ))(x, other)  # fmt: skip
            if 0 < y.numel() <= 4000:
                values.append(y)
        results = values[len(args) :][-2:] or [values[0] * 1]
        return tuple(results) if next(left) < 0.5 else {"a": results[0], "n": len(results)}

    return run, rng.randint(1, 3), world


def outcome(function: Callable[..., Any], inputs: list[np.ndarray], device: str) -> list[np.ndarray]:
    """The results of a function, which then change in place, and the gradients of its float inputs."""
    genesis.manual_seed(len(inputs))
    tensors = [genesis.tensor(x).to(device).detach().requires_grad_() for x in inputs]
    results = function(*tensors)
    flat = [v for v in (results.values() if isinstance(results, dict) else results) if isinstance(v, Tensor)]
    found = [v.detach().cpu().numpy().copy() for v in flat]
    parts = [(v.float() * (i + 1)).sum() for i, v in enumerate(flat) if v.requires_grad]
    if parts:
        sum(parts[1:], parts[0]).backward()
    found.append(np.array(genesis.random.default_generator.offset))
    found += [np.zeros(t.shape) if t.grad is None else t.grad.cpu().numpy() for t in tensors]
    found += [t.detach().cpu().numpy() for t in tensors]
    with genesis.no_grad():  # results that share memory, share it in eager code too
        for v in flat:
            v.add_(1) if v.dtype is not genesis.bool and v.is_contiguous() else None
    return found + [v.detach().cpu().numpy() for v in flat]


def compare(seed: int, device: str, worlds: tuple[Any, ...] = WORLDS) -> str:
    """Compare a random program, called in several worlds, with its eager results. Returns "" or what differs."""
    function, count, world = program(seed)
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(SHAPES[rng.integers(len(SHAPES))]).astype(np.float32) for _ in range(count)]
    compiled = genesis.compile(function)
    for i, state in enumerate(worlds):
        world.enter(state)
        now = [x if i != 2 else -x for x in inputs]
        found: list[Any] = []
        for each in (function, compiled):
            try:
                found.append(outcome(each, now, device))
            except genesis.errors.GenesisError as error:
                found.append(error)
        text = differences(*found)
        if text:
            return f"seed {seed}, call {i}: {text}"
    reads = seed % 2 == 1  # of these programs, not all read values on the host
    return "" if reads or not compiled.breaks else f"seed {seed}: {[b.reason for b in compiled.breaks.values()]}"


def differences(want: Any, got: Any) -> str:
    """Describe how results differ from eager ones; "" if they agree."""
    if isinstance(want, Exception) or isinstance(got, Exception):
        return "" if type(want) is type(got) else f"eager {want!r}, compiled {got!r}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        scale = max(1.0, float(np.abs(a, where=np.isfinite(a), out=np.zeros(a.shape)).max(initial=0)))
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-4, atol=2e-5 * scale, equal_nan=True):
            return f"result {i} of shapes {a.shape} and {b.shape} differs\n{a}\n{b}"
    return ""


def checked(seed: int, device: str, worlds: tuple[Any, ...], until: float) -> str | None:
    """Compare a program. Returns "", what differs, or None after a time (`time.monotonic`)."""
    if time.monotonic() > until:
        return None
    try:
        return compare(seed, device, worlds)
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"


def main() -> int:
    """Run programs in processes; print at once those that differ, and their number so far every ten seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--worlds", type=int, default=len(WORLDS), help="calls of each program")
    options = parser.parse_args()
    began = told = time.monotonic()
    one = partial(checked, device=options.device, worlds=WORLDS[: options.worlds], until=began + options.seconds)
    seeds, count, different = range(options.seed, options.seed + options.count), 0, 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for text in pool.imap_unordered(one, seeds) if options.jobs > 1 else map(one, seeds):
            count, different = count + (text is not None), different + bool(text)
            if text:
                print(text, flush=True)
            if time.monotonic() > told + 10:
                told = time.monotonic()
                print(f"{count} programs in {told - began:.0f} s, {different} differ", flush=True)
    print(f"{count} programs, {different} differ")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())

"""Matmuls of few rows as a decoding step makes them: tiles side by side, and a chain of all layers' matmuls.

    python3 -m benchmarks.gpu.few_rows [--models qwen2.5-0.5b …] [--rows 1 8 32] [--tiles] [--weights bf16 fp8 int8]

Weights are windows of one gigabyte of random numbers, each call of a graph reads another one, so that they come from
memory and not from L2. Results are compared with torch's in float32 first. `chain`: norm + q|k|v, output + residual,
norm + gate|up + SwiGLU, down + residual of all layers in one graph, as the rule chooses tiles: with programmatic
dependent launch, also with W loaded before the wait ("early loads"), with the wait in the first instruction ("wait"),
and with plain edges ("plain"). --compile only compiles what a call without it would time, for many processes at once.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional as torch_functional

from benchmarks.gpu.timing import backend, gpu_us, shared_array, torch_gpu_us
from genesis.array import Array
from genesis.dtypes import float8_e4m3fn
from genesis.kernels.decode import few_rows
from genesis.kernels.decode.few_rows import (
    MMA_K,
    ONE_ROW_K,
    FewRowsTile,
    Norm,
    choose_fma_tile,
    choose_mma_tile,
    choose_one_row_tile,
    few_rows_into,
    few_rows_swiglu_into,
    held_registers,
)

EPS = 1e-6


class Model(NamedTuple):
    """Sizes of a model: layers, hidden, columns of q|k|v, of attention's result, width of the MLP, vocabulary."""

    layers: int
    hidden: int
    qkv: int
    attended: int
    mlp: int
    vocabulary: int


MODELS = {
    "qwen2.5-0.5b": Model(24, 896, 1152, 896, 4864, 151936),
    "qwen3-0.6b": Model(28, 1024, 4096, 2048, 3072, 151936),
    "llama-3.2-1b": Model(16, 2048, 3072, 2048, 8192, 128256),
}
TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Weights:
    """Windows of random memory, one after the other."""

    def __init__(self, kind: str, nbytes: int = 1 << 30) -> None:
        torch.manual_seed(0)
        self.kind, self.at = kind, 0
        values = torch.randn(nbytes // (2 if kind == "bf16" else 1), dtype=torch.bfloat16, device="cuda")
        self.memory = (values * 30).to(TYPES[kind]) if kind != "bf16" else values
        self.scale = torch.rand(400_000, device="cuda") / 500 + 1e-3

    def take(self, n: int, k: int) -> torch.Tensor:
        """The next `[n, k]`."""
        if self.at + n * k > self.memory.numel():
            self.at = 0
        found = self.memory[self.at : self.at + n * k].view(n, k)
        self.at += n * k
        return found

    def scales(self, n: int) -> torch.Tensor | None:
        return None if self.kind == "bf16" else self.scale[:n]


class Problem(NamedTuple):
    """A matmul of a layer: n rows of W `[n, k]` (SwiGLU: n of gate and n of up)."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False

    @property
    def halves(self) -> int:
        return 2 if self.swiglu else 1


def problems(model: Model) -> list[Problem]:
    h = model.hidden
    return [
        Problem("norm+qkv", model.qkv, h, norm=True),
        Problem("out+res", h, model.attended, residual=True),
        Problem("norm+gate|up", model.mlp, h, norm=True, swiglu=True),
        Problem("down+res", h, model.mlp, residual=True),
        Problem("head", model.vocabulary, h),
    ]


class Operands:
    """Everything that a problem reads and writes besides its weight."""

    def __init__(self, p: Problem, m: int, weights: Weights) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(torch.bfloat16)

        self.problem, self.weights = p, weights
        self.x, self.scale = random(m, p.k), random(p.k)
        self.residual = random(m, p.n) if p.residual else None
        self.out, self.h = random(m, p.halves * p.n), random(m, p.n)
        self.arrays = {n: shared_array(t) for n, t in vars(self).items() if isinstance(t, torch.Tensor)}

    def call(self, w: torch.Tensor, tile: FewRowsTile | None = None) -> Callable[[], None]:
        p, a, weight = self.problem, self.arrays, shared(w)
        norm = Norm(a["scale"], EPS) if p.norm else None
        scale = self.weights.scales(p.halves * p.n)
        w_scale = None if scale is None else shared_array(scale)
        if p.swiglu:
            gate, up = (weight.view((p.n, p.k), (p.k, 1), weight.offset + i * p.n * p.k) for i in range(2))
            return lambda: few_rows_swiglu_into(
                a["h"], a["out"], a["x"], gate, up, norm=norm, w_scale=w_scale, tile=tile
            )
        residual = a.get("residual")
        return lambda: few_rows_into(a["out"], a["x"], weight, norm=norm, residual=residual, w_scale=w_scale, tile=tile)

    def expected(self, w: torch.Tensor) -> torch.Tensor:
        """The result in float32."""
        p, x, wide = self.problem, self.x.float(), w.float()
        scale = self.weights.scales(w.shape[0])
        if scale is not None:
            wide = wide * scale[:, None]
        if p.norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.scale.float()
        y = x @ wide.T
        if p.swiglu:
            gate, up = y.chunk(2, -1)
            return torch_functional.silu(gate) * up
        return y if self.residual is None else y + self.residual.float()

    def error(self, w: torch.Tensor, tile: FewRowsTile | None) -> float:
        """The largest difference from float32, as a share of the largest value."""
        result = self.h if self.problem.swiglu else self.out
        result.fill_(float("nan"))
        torch.cuda.synchronize()
        self.call(w, tile)()
        backend.driver.synchronize()
        want = self.expected(w)
        return float(((result.float() - want).abs().max() / want.abs().max()).nan_to_num(nan=9.0))


def shared(w: torch.Tensor) -> Array:
    """A weight as an array; a tensor of Genesis has no 8-bit float type, an array has."""
    if w.dtype is not torch.float8_e4m3fn:
        return shared_array(w)
    codes = shared_array(w.view(torch.int8))
    return Array(codes.storage, codes.shape, codes.strides, float8_e4m3fn, codes.device)


def tiles(p: Problem, m: int, itemsize: int) -> Iterator[FewRowsTile]:
    """What is tried beside the rule's choice: on the CUDA cores, on the tensor cores, and both with early loads."""
    if m == 1:
        yield from _one_row_tiles(p, itemsize)
        return
    rule = choose_mma_tile(m, p.n, p.k, backend.driver.properties.sm_count, p.halves, p.norm)
    yield rule
    blocks = max(1, m // 8)
    for early, bn, warps, trips in itertools.product((False, True), (8, 16, 32), (4, 8), (1, 2, 3, 4)):
        steps, of_w = -(-p.k // (MMA_K * warps) // trips), p.halves * max(1, bn // 16) + p.norm
        registers = held_registers(blocks, bn, steps, p.halves, p.norm)
        shared_bytes = of_w * max(1, blocks // 2) * warps * (512 if blocks == 1 else 1024)
        fits = registers <= 190 and (registers + 40) * 32 * warps <= 65536 and shared_bytes <= 44 << 10
        if fits and MMA_K * warps <= p.k and (bn == rule.bn or not early):
            yield FewRowsTile(bn, MMA_K, warps, steps, early)


def _one_row_tiles(p: Problem, itemsize: int) -> Iterator[FewRowsTile]:
    sms = backend.driver.properties.sm_count
    yield choose_one_row_tile(p.n, p.k, itemsize, sms, p.halves, p.norm)._replace(early=True)
    yield choose_fma_tile(1, p.k, itemsize)._replace(early=True)
    for rows, warps, trips in itertools.product((4, 8, 16), (1, 2, 4, 8), (1, 2, 3)):
        steps = -(-p.k // (ONE_ROW_K * warps) // trips)
        registers = steps * (2 * itemsize * rows + 4 * (1 + p.norm)) + 4 * rows
        if registers <= 170 and ONE_ROW_K * warps < 2 * p.k:
            yield FewRowsTile(rows // p.halves, ONE_ROW_K, warps, steps, True, one_row=True)


def compare_tiles(name: str, model: Model, m: int, weights: Weights, only: list[str], compile_only: bool) -> None:
    """The rule's tile, the best one, and torch."""
    itemsize = weights.memory.element_size()
    for p in problems(model):
        if only and p.name not in only:
            continue
        nbytes = p.halves * p.n * p.k * itemsize
        n = min(32, max(3, (300 << 20) // nbytes))
        o = Operands(p, m, weights)
        drawn = [weights.take(p.halves * p.n, p.k) for _ in range(n)]
        tried = list(dict.fromkeys(tiles(p, m, itemsize)))
        for tile in tried:  # compiled side by side
            o.call(drawn[0], tile)()
        if compile_only:
            backend.driver.synchronize()
            continue
        times = {}
        for tile in tried:
            wrong = o.error(drawn[0], tile)
            times[tile] = gpu_us([o.call(w, tile) for w in drawn], n=n, replays=5) if wrong < 0.02 else 1e9 + wrong
        x, peer = o.x, 0.0
        if weights.kind == "bf16":
            peer = torch_gpu_us([functools.partial(torch_functional.linear, x, w) for w in drawn], n=n, replays=5)
        rows = sorted(times.items(), key=lambda each: each[1])
        rule = times[tried[0]]
        print(
            f"{name:13} {weights.kind} M {m:2} {p.name:13} torch {peer:6.2f}",
            f"rule {rule:6.2f} us {nbytes / rule / 1e3:5.0f} GB/s {tuple(tried[0])[:4]}  best",
            *(f"{t:.2f} {(*tile[:4], 'e' if tile.early else '')}" for tile, t in rows[:9]),
            f"worst {rows[-1][1]:.2f}",
            flush=True,
        )


@contextmanager
def launched_as(how: str) -> Iterator[None]:
    """The rules' tiles with another way to overlap."""

    def early(rule: Callable[..., FewRowsTile], *sizes: int) -> FewRowsTile:
        return rule(*sizes)._replace(early=True)

    with ExitStack() as patches:
        for name in ("choose_one_row_tile", "choose_mma_tile") if how == "early loads" else ():
            patches.enter_context(mock.patch.object(few_rows, name, functools.partial(early, getattr(few_rows, name))))
        if how in ("wait", "plain"):
            patches.enter_context(mock.patch.object(few_rows, "can_overlap", return_value=False))
        if how == "plain":
            patches.enter_context(mock.patch.object(backend.driver, "dependent", False))
        yield


def chain(name: str, model: Model, m: int, weights: Weights, compile_only: bool) -> None:
    """All layers' matmuls in one graph."""
    turns = []
    for _ in range(1 if compile_only else model.layers):
        for p in problems(model)[:4]:
            turns.append((Operands(p, m, weights), weights.take(p.halves * p.n, p.k)))
    nbytes = sum(w.numel() * w.element_size() for _, w in turns)
    times = {}
    for how in ("overlap", "early loads", "wait", "plain"):
        calls = [o.call(w) for o, w in turns]
        with launched_as(how):
            if not compile_only:
                times[how] = gpu_us(calls, n=len(calls), replays=9) * len(calls)
                continue
            for call in calls:
                call()
    if compile_only:
        backend.driver.synchronize()
        return
    count = len(turns)
    print(
        f"{name:13} {weights.kind} M {m:2} chain of {count}:",
        *(f"{how} {t:.0f} us, {t / count:.2f} a launch, {nbytes / t / 1e3:.0f} GB/s;" for how, t in times.items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=TYPES)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--compile", action="store_true")
    options: Any = parser.parse_args()
    for kind in options.weights:
        weights = Weights(kind)
        for name, m in itertools.product(options.models, options.rows):
            chain(name, MODELS[name], m, weights, options.compile)
        for name, m in itertools.product(options.models, options.rows) if options.tiles else ():
            compare_tiles(name, MODELS[name], m, weights, options.only, options.compile)


if __name__ == "__main__":
    main()

"""Attention of a generation step, by length, batch and heads of a model, in bf16, beside torch's; and a prompt's chunk.

    python -m benchmarks.gpu.attention_step [--tiles] [--long] [--models NAME …] [--no-chunks]
        [--compile K N]

A graph of steps over 24 layers' caches (fewer where they are large), which do not stay in L2; ours rotates, writes the
cache and attends in one launch, torch's scaled_dot_product_attention attends alone. `of copy` is the share of 4.3 TB/s
at which keys and values are read. `early` is a step of which qkv alone is new.
--tiles compares divisions of the work, early; --long adds what takes much memory; --no-chunks leaves prompts out;
--compile only compiles every N-th tile from the K-th on, for a cache that processes fill side by side.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF

from benchmarks.gpu.timing import gpu_us, shared_array, torch_gpu_graph
from genesis.array import empty
from genesis.dtypes import bfloat16
from genesis.kernels.decode.attention_step import StepTile, attention_step_into
from genesis.ops.attention import attention
from genesis.ops.attention_step import attention_step

COPY = 4.3e12  # bytes a second
NORMED, EPS = 128, 1e-6  # heads of this size are normalised
MODELS = {"Qwen2.5-0.5B": (14, 2, 64), "Llama-3.2-1B": (32, 8, 64), "Qwen3-0.6B": (16, 8, 128)}
SIZES = [(1, 128), (1, 400), (1, 900), (1, 8192), (8, 400), (8, 8192), (32, 400)]
LONG = [(1, 32768), (8, 32768), (32, 8192)]
MEMORY = 12 << 30  # of all caches of a graph


def mma(keys: int, part: int, splits: int, warps: int, cluster: int = 1) -> StepTile:
    """From registers."""
    return StepTile(keys, part, splits, min(splits // cluster, 32), warps, 1, True, cluster)


TILES = {
    64: [
        StepTile(128, 256, 32, 32, 4, 2), StepTile(64, 128, 32, 32, 4, 3),
        mma(512, 512, 1, 8), mma(256, 256, 32, 4), mma(128, 128, 64, 4), mma(512, 512, 32, 8),
        mma(128, 128, 4, 4, 4), mma(128, 128, 8, 4, 8), mma(256, 256, 8, 4, 8), mma(512, 512, 8, 8, 8),
        mma(256, 256, 32, 4, 8), mma(512, 512, 32, 8, 8),
    ],
    128: [
        StepTile(128, 128, 4, 4, 8, 2), StepTile(64, 128, 32, 32, 4, 3), StepTile(64, 128, 4, 4, 4, 3),
        mma(64, 64, 32, 4), mma(128, 128, 32, 8), mma(64, 64, 4, 4, 4), mma(128, 128, 4, 8, 4), mma(64, 64, 8, 4, 8),
        mma(128, 128, 8, 8, 8), mma(64, 64, 32, 4, 8),
    ],
}  # fmt: skip


class Steps:
    """Inputs of steps over the caches of several layers."""

    def __init__(self, heads: tuple[int, int, int], batch: int, length: int, layers: int = 24) -> None:
        q, k, d = heads
        self.heads, self.batch, self.length = heads, batch, length
        capacity = length + 64
        layers = max(2, min(layers, MEMORY // (4 * batch * k * capacity * d)))
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.caches = torch.randn(layers, 2, batch, k, capacity, d, **make)
        self.qkv = torch.randn(layers, batch, q + 2 * k, d, **make)
        self.lengths = torch.full((batch,), length, device="cuda")
        angles = torch.rand(capacity, d // 2, device="cuda") * 6
        self.tables = [torch.cos(angles), torch.sin(angles)]
        self.weights = [torch.rand(d, **make) + 0.5 for _ in range(2)] if d == NORMED else []
        shared = [shared_array(x) for x in (self.lengths, *self.tables, *self.weights)]
        self.inputs = [(shared_array(x), shared_array(y), *shared) for x, y in zip(self.qkv, self.caches, strict=True)]
        self.nbytes = 4 * batch * k * length * d

    def ours(self, tile: StepTile | None = None, early: bool = True) -> list[Callable[[], Any]]:
        how: dict[str, Any] = {"scale": self.heads[2] ** -0.5, "early": early, "eps": EPS}
        if tile is None:
            return [lambda x=x: attention_step(*x, **how) for x in self.inputs]  # type: ignore[misc]
        self.out = out = empty((self.batch, self.heads[0], self.heads[2]), bfloat16, self.inputs[0][0].device)
        return [lambda x=x: attention_step_into(out, *x, **how, tile=tile) for x in self.inputs]  # type: ignore[misc]

    def theirs(self) -> list[Callable[[], Any]]:
        q = self.heads[0]
        found = []
        for x, cache in zip(self.qkv, self.caches, strict=True):
            keys, values = cache[0, :, :, : self.length], cache[1, :, :, : self.length]
            rows = x[:, :q, None]
            found.append(
                lambda q=rows, k=keys, v=values: TF.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # type: ignore[misc]
            )
        return found

    def error(self, tile: StepTile | None = None) -> float:
        """The relative error of the first layer's step against the formula in float64."""
        wanted, made = self.by_formula(), self.ours(tile)[0]()
        found = (self.out if tile else made).numpy().astype(np.float64)
        return float((torch.tensor(found) - wanted).norm() / wanted.norm())

    def by_formula(self) -> torch.Tensor:
        """The first layer's step in float64, on the host."""
        q, k, d = self.heads
        x, cache = self.qkv[0].double(), self.caches[0].double()
        cos, sin = (t[self.length].double() for t in self.tables)
        for rows, weight in zip((x[:, :q], x[:, q : q + k]), self.weights, strict=False):
            rows *= torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight.double()
        left, right = x[:, : q + k].chunk(2, -1)
        rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        own = torch.stack([rotated[:, q:], x[:, q + k :]])[:, :, :, None]  # [2, B, K, 1, D]
        keys, values = torch.cat([cache[:, :, :, : self.length], own], 3)
        grouped = rotated[:, :q].view(self.batch, k, q // k, d)
        weights = (grouped @ keys.mT * d**-0.5).softmax(-1)
        return (weights @ values).view(self.batch, q, d).cpu()


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--no-chunks", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2)
    options = parser.parse_args()
    for name in options.models:
        heads = MODELS[name]
        for batch, length in [*SIZES, *(LONG if options.long else [])]:
            tiles = TILES[heads[2]] if options.tiles else []
            if options.compile:
                _compile(heads, batch, length, tiles[options.compile[0] :: options.compile[1]])
            else:
                _row(name, heads, batch, length, tiles)
            torch.cuda.empty_cache()
    if not options.no_chunks:
        _chunks()


def _compile(heads: tuple[int, int, int], batch: int, length: int, tiles: Sequence[StepTile]) -> None:
    steps = Steps(heads, batch, length, layers=2)
    for tile in tiles:
        steps.ours(tile.fitted(heads[2], heads[0] // heads[1], batch * heads[1], length + 64))[0]()


def _row(name: str, heads: tuple[int, int, int], batch: int, length: int, tiles: Sequence[StepTile]) -> None:
    steps = Steps(heads, batch, length)
    n = len(steps.inputs)
    fitted = [tile.fitted(heads[2], heads[0] // heads[1], batch * heads[1], length + 64) for tile in tiles]
    wrong = steps.error()
    assert wrong < 1e-2, (name, batch, length, wrong)
    us, early = gpu_us(steps.ours(early=False), n), gpu_us(steps.ours(), n)
    replay = torch_gpu_graph(steps.theirs(), n)
    torch_us = statistics.median(replay() for _ in range(12))
    share = steps.nbytes / early / 1e-6 / COPY
    print(f"{name:13} batch {batch:2} length {length:5}: {us:7.2f} us  early {early:7.2f} us  {share:4.0%} of copy"
          f"  torch {torch_us:7.2f} us  error {wrong:.1e}", flush=True)  # fmt: skip
    for tile in dict.fromkeys(fitted):
        wrong = steps.error(tile)
        assert wrong < 1e-2, (name, batch, length, tile, wrong)
        print(f"    {gpu_us(steps.ours(tile), n):7.2f} us  {tuple(tile)}", flush=True)


def _chunks() -> None:
    """A chunk of a prompt over the row of a cache that holds it, beside torch's over contiguous keys."""
    for name, (q, k, d) in MODELS.items():
        for begin, tokens in ((0, 1024), (1024, 1024), (7168, 1024), (8000, 192), (100, 412)):
            make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
            queries, cache = torch.randn(1, tokens, q, d, **make), torch.randn(2, 2, k, 8192, d, **make)
            end = begin + tokens
            row = cache[:, 1:2, :, :end]  # [2, 1, K, S, D]
            ours = [shared_array(x) for x in (queries, *(each.transpose(1, 2) for each in row))]
            whole = [x.contiguous() for x in (queries.transpose(1, 2), *row)]
            seen = torch.ones(tokens, end, dtype=torch.bool, device="cuda").tril(begin)
            wanted = TF.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=True).transpose(1, 2)
            o = attention(*ours, scale=d**-0.5)[0].numpy().astype(np.float64)
            off = float(np.linalg.norm(o - wanted.double().cpu().numpy()) / np.linalg.norm(o))
            assert off < 1e-2, (name, begin, tokens, off)
            us = gpu_us(functools.partial(attention, *ours, scale=d**-0.5))
            contiguous = [shared_array(x.transpose(1, 2).contiguous()) for x in whole]
            plain = gpu_us(functools.partial(attention, *contiguous, scale=d**-0.5))
            flops = 4 * q * d * tokens * (begin + tokens / 2)
            print(f"{name:13} {tokens:4} tokens after {begin:4}: {us:7.1f} us  {flops / us / 1e6:4.0f} TFLOP/s"
                  f"  contiguous {plain:7.1f} us", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

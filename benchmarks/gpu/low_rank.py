"""Thin products of a wide matrix: one pass over it (genesis/kernels/gemm/thin.py) and GEMMs, in microseconds.

    python -m benchmarks.gpu.low_rank [--ranks 16,64] [--rows 8192] [--cases pair,dora,one,u] [--only NAME]

Cases: "pair" is v = g·B and dB = gᵀ·u, "dora" the same with the sums of g∘z, "one" is vᵀ·x, "u" is x·Aᵀ. Every
result is checked against float32 first. Times are medians of graphs over sets of random inputs that L2 does not hold;
TB/s counts g alone, and z.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.timing import backend, gpu_us, shared_array
from genesis.array import Array
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.low_rank import gemm_products
from genesis.kernels.gemm.thin import ThinTile, thin_products_into
from genesis.kernels.gemm.tiles import GemmTile, choose
from genesis.ops.linalg import transposed
from genesis.ops.low_rank import Pair

L2 = 50 << 20
WIDTHS = {"gate|up": (4864, 4864), "q|k|v": (896, 128, 128), "o": (896,)}  # of the ranges of g
INPUTS = {"down": 4864, "o": 896}  # widths of x, for vᵀ·x
SCALE = 2.0
TILES = [
    ThinTile(64, 256, 4, 3, 2), ThinTile(64, 256, 8, 3, 2), ThinTile(64, 256, 8, 4, 1), ThinTile(64, 512, 8, 3, 1),
    ThinTile(64, 512, 8, 2, 1), ThinTile(64, 128, 4, 4, 1),
    ThinTile(64, 128, 4, 4, 2), ThinTile(64, 128, 4, 4, 3), ThinTile(128, 128, 4, 3, 2), ThinTile(128, 256, 8, 3, 1),
]  # fmt: skip
OF_U = [GemmTile(64, n, 128, 4, 4, ctas_per_sm=2) for n in (16, 32, 64)] + [GemmTile(64, n, 64, 4, 6) for n in (16, 64)]

Side = tuple[str, list[Callable[[], Any]], Callable[[], float]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want).norm() / want.norm())


class Pass:
    """Inputs of a case "pair" or "dora", with the sides that compute it."""

    def __init__(self, name: str, rows: int, rank: int, with_z: bool) -> None:
        sizes = WIDTHS[name]
        self.n, self.rank, ends = sum(sizes), rank, [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.ranges = list(itertools.pairwise(ends))
        self.sets = []
        for _ in range(max(1, -(-2 * L2 // (rows * self.n * 2)))):
            g, u, b = random(rows, self.n), random(rows, rank * len(sizes)), random(self.n, rank)
            more = (random(rows, self.n), torch.rand(self.n, device="cuda") + 0.5) if with_z else (None, None)
            self.sets.append((g, u, b, *more, torch.empty_like(u), torch.empty_like(b)))
        self.sums = torch.zeros(self.n, device="cuda")
        self.bytes = rows * self.n * 2 * (1 + with_z)

    def error(self) -> float:
        g, u, b, z, c, v, d = self.sets[0]
        c = torch.ones(self.n, device="cuda") if c is None else c
        worst = 0.0
        for i, (start, stop) in enumerate(self.ranges):
            mine = slice(i * self.rank, (i + 1) * self.rank)
            part, factors = g[:, start:stop].float(), c[start:stop, None]
            worst = max(worst, error(v[:, mine], SCALE * part @ (b[start:stop].float() * factors)))
            worst = max(worst, error(d[start:stop], factors * (part.T @ u[:, mine].float())))
        if z is not None:
            worst = max(worst, error(self.sums, (g.float() * z.float()).sum(0)))
        return worst

    def one_pass(self, tile: ThinTile | None) -> list[Callable[[], Any]]:
        def call(arrays: list[Array | None]) -> None:
            g, u, b, z, c, v, d = arrays
            assert g is not None and u is not None and b is not None and d is not None
            sums = None if z is None else shared_array(self.sums)
            found = thin_products_into(
                v, self.parts(d), g, self.parts(b), u, self.ranges, scale=SCALE, z=z, factors=c, sums=sums, tile=tile
            )  # fmt: skip
            assert found

        sets = [[None if x is None else shared_array(x) for x in each] for each in self.sets]
        return [functools.partial(call, arrays) for arrays in sets]

    def parts(self, x: Array) -> list[Array]:
        return [rows(x, start, stop) for start, stop in self.ranges]

    def gemms(self) -> list[Callable[[], Any]]:
        def call(arrays: list[Array]) -> None:
            g, u, b, v, d = arrays
            pairs = tuple(Pair(start, stop, self.rank, SCALE) for start, stop in self.ranges)
            gemm_products(v, self.parts(d), g, self.parts(b), u, pairs)

        sets = [[shared_array(x) for x in (*each[:3], *each[5:])] for each in self.sets]
        return [functools.partial(call, arrays) for arrays in sets]


def rows(x: Array, start: int, stop: int) -> Array:
    return x.view((stop - start, x.shape[1]), x.strides, x.offset + start * x.strides[0])


def passes(name: str, m: int, rank: int, with_z: bool) -> tuple[int, list[Side]]:
    case = Pass(name, m, rank, with_z)
    sides: list[Side] = [(str(tuple(t)), case.one_pass(t), case.error) for t in TILES]
    sides.append(("chosen", case.one_pass(None), case.error))
    if not with_z:
        sides.append(("GEMMs", case.gemms(), case.error))
    return case.bytes, sides


def one_product(name: str, m: int, rank: int) -> tuple[int, list[Side]]:
    """vᵀ·x: the gradient of A."""
    n = INPUTS[name]
    sets = [(random(m, n), random(m, rank)) for _ in range(max(1, -(-2 * L2 // (m * n * 2))))]
    d = torch.empty(rank, n, device="cuda", dtype=torch.bfloat16)
    out = shared_array(d)

    def check() -> float:
        return error(d, sets[0][1].float().T @ sets[0][0].float())

    def one_pass(x: Array, v: Array, tile: ThinTile | None) -> None:
        assert thin_products_into(None, [transposed(out)], x, [], v, [(0, n)], tile=tile)

    arrays = [(shared_array(x), shared_array(v)) for x, v in sets]
    sides: list[Side] = [
        ("chosen" if t is None else str(tuple(t)), [functools.partial(one_pass, *a, t) for a in arrays], check)
        for t in (*TILES, None)
    ]
    tile = choose("half", "tn", rank, n, m, 2, backend.driver.properties.shared_memory)
    calls = [functools.partial(matmul_into, out, transposed(v), x, tile=tile) for x, v in arrays]
    sides.append(("GEMM", [*calls], check))
    return m * n * 2, sides


def of_u(name: str, m: int, rank: int) -> tuple[int, list[Side]]:
    """x·Aᵀ: forward's u."""
    n = INPUTS[name]
    sets = [random(m, n) for _ in range(max(1, -(-2 * L2 // (m * n * 2))))]
    a, u = random(rank, n), torch.empty(m, rank, device="cuda", dtype=torch.bfloat16)
    right, out, arrays = shared_array(a), shared_array(u), [shared_array(x) for x in sets]
    sides: list[Side] = []
    for t in (None, *(t for t in OF_U if t.bn >= min(rank, 64))):
        calls: list[Callable[[], Any]]
        calls = [functools.partial(matmul_into, out, x, right, transpose_b=True, alpha=SCALE, tile=t) for x in arrays]
        label = "chosen" if t is None else str((t.bm, t.bn, t.bk, t.warps, t.stages, t.ctas_per_sm))
        sides.append((label, calls, lambda: error(u, SCALE * sets[0].float() @ a.float().T)))
    return m * n * 2, sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cases", default="pair,dora,one,u")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    cases: list[tuple[str, int, list[Side]]] = []
    for rank in map(int, given.ranks.split(",")):
        for kind in given.cases.split(","):
            for name in WIDTHS if kind in ("pair", "dora") else INPUTS:
                if given.only in name:
                    made = {
                        "pair": lambda n, r: passes(n, given.rows, r, False),
                        "dora": lambda n, r: passes(n, given.rows, r, True),
                        "one": lambda n, r: one_product(n, given.rows, r), "u": lambda n, r: of_u(n, given.rows, r),
                    }[kind](name, rank)  # fmt: skip
                    cases.append((f"{kind} {name} r {rank}", *made))
    started = time.perf_counter()
    failed: dict[tuple[str, str], str] = {}
    for title, _, sides in cases:  # all kernels are asked for first, so that they are compiled side by side
        for label, calls, _ in sides:
            attempt(failed, title, label, calls[0])
    attempt(failed, "all", "wait", backend.driver.synchronize)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for title, nbytes, sides in cases:
        for label, calls, check in sides:
            attempt(failed, title, label, calls[0])
            attempt(failed, title, label, backend.driver.synchronize)
            wrong = check()
            if (title, label) in failed or not wrong < 6e-3:
                print(f"{title:22} {label:26} failed {wrong:.1e} {failed.get((title, label), '')[:160]}", flush=True)
                continue
            us = gpu_us(calls, n=12, replays=7)
            print(f"{title:22} {label:26} {us:7.1f} us {nbytes / us / 1e6:5.2f} TB/s", flush=True)


def attempt(failed: dict[tuple[str, str], str], title: str, label: str, call: Callable[[], Any]) -> None:
    """Call, and keep what is raised."""
    try:
        call()
    except Exception as error:  # a tile that does not fit is a row of the table
        failed.setdefault((title, label), f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

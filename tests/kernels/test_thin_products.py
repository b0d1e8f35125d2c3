"""The products of low-rank pairs, whose result is a few columns wide: their tile, and what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import compile
from genesis.dtypes import bfloat16
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.low_rank import gemm_products
from genesis.kernels.gemm.tiles import GemmTile, Problem, choose
from genesis.ops.low_rank import Pair
from genesis.ops.shape import window
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper

CUDA = Device("cuda", 0)


def on_gpu(values: np.ndarray) -> Array:
    array = empty(values.shape, bfloat16, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def products(rows: int, width: int, rank: int) -> dict[str, tuple[Array, Array, Array, bool]]:
    """out, a, b and transpose_b of u = x·Aᵀ, of v = g·B for a window of g, and of dB = gᵀ·u."""
    rng = np.random.default_rng(0)
    g = window(on_gpu(rng.normal(size=(rows, 2 * width))), width, 2 * width)
    x, a, b, u = (on_gpu(rng.normal(size=s)) for s in ((rows, width), (rank, width), (width, rank), (rows, rank)))
    transposed = g.view((width, rows), (1, 2 * width), g.offset)
    few, many = empty((rows, rank), bfloat16, CUDA), empty((width, rank), bfloat16, CUDA)
    return {
        "u": (few, x, a, True), "v": (empty(few.shape, bfloat16, CUDA), g, b, False), "dB": (many, transposed, u, False)
    }  # fmt: skip


def check(out: Array, a: Array, b: Array, transposed: bool) -> None:
    right = wide(b).T if transposed else wide(b)
    want = wide(a) @ right
    sizes = np.abs(wide(a)) @ np.abs(right)
    np.testing.assert_array_less(np.abs(wide(out) - want), 2.0**-8 * np.abs(want) + 1e-5 * sizes + 1e-6)


@pytest.mark.parametrize("rank", [5, 16, 24, 64])
@pytest.mark.parametrize("product", ["u", "v", "dB"])
def test_a_tile_as_narrow_as_the_rank(product: str, rank: int) -> None:
    """Sizes that it does not divide."""
    out, a, b, transposed = products(88, 136, rank)[product]
    matmul_into(out, a, b, transpose_b=transposed, tile=GemmTile(64, 16, 128, 4, 4, split=2, ctas_per_sm=2))
    check(out, a, b, transposed)


def test_thin_products_have_tiles_as_narrow_as_they_are() -> None:
    for layout, m, k in (("nt", 8192, 896), ("nt", 2048, 896), ("tn", 4864, 8192)):
        tile = choose(Problem("half", layout, m, 16, k), H200.sm_count, H200.shared_memory)
        assert (min(tile.bm, tile.bn), tile.ctas_per_sm) == (16, 2)


def compiled(rank: int) -> list[list[str | int]]:
    """The kernels of products at full size; for a process without the interpreter, which changes Triton."""
    width = 4864
    with collecting(Hopper) as found:
        g = empty((8192, 2 * width), bfloat16, CUDA)
        x, a, b = (empty(shape, bfloat16, CUDA) for shape in ((8192, width), (rank, width), (width, rank)))
        u, v, d = (empty(shape, bfloat16, CUDA) for shape in ((8192, rank), (8192, rank), (width, rank)))
        part = window(g, width, 2 * width)
        matmul_into(u, x, a, transpose_b=True)
        matmul_into(v, part, b)
        matmul_into(d, part.view((width, 8192), (1, 2 * width), part.offset), u)
        gemm_products(v, [d], g, [b], u, (Pair(width, 2 * width, rank, 2.0),))
    return [
        [kernel.fn.__name__, compile.compile_kernel(kernel, signature, (9, 0)).shared]
        for kernel, signature in found.values()
    ]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "programs"), [(16, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in ((32, 2), (64, 1)))]
)
def test_they_compile_for_hopper(rank: int, programs: int) -> None:
    """With shared memory for as many programs an SM as their tile has."""
    assert choose(Problem("half", "nt", 8192, rank, 4864), H200.sm_count, H200.shared_memory).ctas_per_sm == programs
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = f"import json; from tests.kernels.test_thin_products import compiled; print(json.dumps(compiled({rank})))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert "gemm_tma" in [name for name, _ in rows]
    assert max(shared for _, shared in rows) <= H200.shared_memory // programs


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize(("rows", "width"), [(8192, 896), (8192, 4864), (5000, 1032)])
@pytest.mark.parametrize("product", ["u", "v", "dB"])
def test_products_of_full_size(product: str, rows: int, width: int, rank: int) -> None:
    out, a, b, transposed = products(rows, width, rank)[product]
    matmul_into(out, a, b, transpose_b=transposed)
    check(out, a, b, transposed)

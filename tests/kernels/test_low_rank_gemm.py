"""A product and that of its low-rank pairs in one GEMM."""

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
from genesis.dtypes import DType, bfloat16, float32
from genesis.kernels.gemm import low_rank_gemm
from genesis.kernels.gemm.low_rank_gemm import low_rank_gemm_into
from genesis.kernels.gemm.tiles import GemmTile
from genesis.ops.linear import linear, packed_linear
from genesis.ops.low_rank import LowRank, Pair, matmul_sum
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper
from tests.kernels.test_thin import launched

CUDA = Device("cuda", 0)
TILE = GemmTile(64, 64, 32, 4, 3, group=2)


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_gemm, "USED", True)


def on_gpu(values: np.ndarray, dtype: DType = bfloat16) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def check(m: int, n: int, k: int, rank: int, starts: tuple[int, ...], form: str, tile: GemmTile | None) -> None:
    """Of `form`: "nn" or "nt", behind it the operands of the epilogue, whose memory held other values."""
    rng, transposed, count = np.random.default_rng(rank), "nt" in form, len(starts)
    x, u = on_gpu(rng.normal(size=(m, k))), on_gpu(rng.normal(size=(m, rank * count)))
    y, w = (on_gpu(rng.normal(size=(n, size) if transposed else (size, n))) for size in (k, rank))
    c = on_gpu(rng.uniform(0.5, 2, size=n), float32) if "c" in form else None
    bias, residual = on_gpu(rng.normal(size=n)), on_gpu(rng.normal(size=(m, n)))
    out, z = on_gpu(np.full((m, n), np.nan)), on_gpu(np.full((m, n), np.nan)) if "z" in form else None
    assert low_rank_gemm_into(
        out, x, y, u, w, starts, transpose_b=transposed, z=z, factors=c, bias=bias if "b" in form else None,
        residual=residual if "r" in form else None, tile=tile,
    )  # fmt: skip
    right, low = (wide(a).T if transposed else wide(a) for a in (y, w))
    want, size = wide(x) @ right, np.abs(wide(x)) @ np.abs(right)
    for i, (start, stop) in enumerate(zip(starts, (*starts[1:], n), strict=True)):
        part = wide(u)[:, i * rank : (i + 1) * rank]
        want[:, start:stop] += part @ low[:, start:stop]
        size[:, start:stop] += np.abs(part) @ np.abs(low[:, start:stop])
    if z is not None:
        np.testing.assert_array_less(np.abs(wide(z) - want), 2.0**-8 * np.abs(want) + 1e-5 * size)
    if c is not None:
        want, size = want * wide(c), size * wide(c)
    want = want + wide(bias) * ("b" in form) + wide(residual) * ("r" in form)
    np.testing.assert_array_less(np.abs(wide(out) - want), 2.0**-8 * np.abs(want) + 1e-5 * (size + 1))


@pytest.mark.parametrize("form", ["nn", "nn r", "nt", "nt b", "nt c z b r"])
@pytest.mark.parametrize("rank", [8, 24])
def test_ranges_of_a_product(form: str, rank: int) -> None:
    """Where tiles divide neither rows, columns nor terms, with several ranges of what is K-major, and several boxes."""
    check(150, 200, 72, rank, (0, 64, 128) if "nt" in form else (0,), form, TILE._replace(ctas_per_sm=1 + rank // 24))


def test_what_it_does_not_take() -> None:
    """Few rows, tiles of two ranges, large ranks, ranks and widths that TMA cannot address: nothing is written."""

    def takes(m: int = 64, n: int = 128, rank: int = 8, starts: tuple[int, ...] = (0,), tiled: bool = True) -> bool:
        x, y, u = (on_gpu(np.ones(shape)) for shape in ((m, 64), (n, 64), (m, rank * len(starts))))
        w, out = on_gpu(np.ones((n, rank))), on_gpu(np.full((m, n), 7.0))
        found = low_rank_gemm_into(out, x, y, u, w, starts, transpose_b=True, tile=TILE if tiled else None)
        assert found or (wide(out) == 7).all()
        return found

    assert takes()
    assert takes(starts=(0, 64))
    assert not takes(tiled=False)
    assert not takes(starts=(0, 32))
    assert not takes(rank=72)
    assert not takes(rank=5)
    assert not takes(n=132)


def test_ops_of_many_rows_take_it() -> None:
    """Two pairs side by side, with factors, and the product of a backward pass."""
    rng = np.random.default_rng(0)
    x, weight, v, a = (on_gpu(rng.normal(size=s)) for s in ((1024, 64), (256, 64), (1024, 16), (16, 64)))
    b, c, residual = (
        on_gpu(rng.normal(size=(256, 8))),
        on_gpu(rng.uniform(0.5, 2, size=256)),
        on_gpu(np.ones((1024, 256))),
    )
    two, one = LowRank((Pair(0, 128, 8, 1.0), Pair(128, 256, 8, 1.0)), 2), LowRank((Pair(0, 256, 8, 1.0),), 3)
    with launched() as names:
        y, u = packed_linear(x, weight, a, b, low_rank=two)
        of_dora, of_its, z = linear(x, weight, None, residual, a.view((8, 64), (64, 1), 0), b, c, low_rank=one)
        dx = matmul_sum(y, weight, v, a, x)
    assert names.count("low_rank_gemm") == 3
    want = wide(x) @ wide(weight).T
    added = np.concatenate([wide(u)[:, i * 8 : i * 8 + 8] @ wide(b)[i * 128 : i * 128 + 128].T for i in range(2)], 1)
    near = {"rtol": 2.0**-7, "atol": 0.1}
    np.testing.assert_allclose(wide(y), want + added, **near)
    np.testing.assert_allclose(wide(z), want + wide(of_its) @ wide(b).T, **near)
    np.testing.assert_allclose(wide(of_dora), wide(z) * wide(c) + 1, **near)
    np.testing.assert_allclose(wide(dx), wide(y) @ wide(weight) + wide(v) @ wide(a) + wide(x), rtol=2.0**-7, atol=1)


def compiled() -> list[int]:
    """The shared memory that the kernel takes at full size; for a process without the interpreter."""

    def made(*shape: int) -> Array:
        return empty(shape, bfloat16, CUDA)

    rows: list[int] = []
    low_rank_gemm.USED = True
    with collecting(Hopper) as found:
        for rank in (16, 32, 64):
            out = made(8192, 896)
            assert low_rank_gemm_into(out, out, made(896, 896), made(8192, rank), made(rank, 896))
            assert low_rank_gemm_into(
                out, made(8192, 4864), made(896, 4864), made(8192, rank), made(896, rank), transpose_b=True, z=out,
                factors=empty((896,), float32, CUDA), residual=out,
            )  # fmt: skip
    for kernel, signature in found.values():
        rows.append(compile.compile_kernel(kernel, signature, (9, 0)).shared)
    return rows


@pytest.mark.slow
def test_it_fits_an_sm() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = "import json; from tests.kernels.test_low_rank_gemm import compiled; print(json.dumps(compiled()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(json.loads(done.stdout)) <= H200.shared_memory


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("m", "n", "k", "starts", "form"),
    [
        (8192, 896, 896, (0,), "nt r"), (8192, 896, 4864, (0,), "nt c z r"), (8192, 1152, 896, (0, 896, 1024), "nt b"),
        (8192, 1152, 896, (0, 896, 1024), "nt c z b"), (5000, 896, 896, (0,), "nn"), (8192, 896, 1152, (0,), "nn r"),
        (2048, 1024, 3072, (0,), "nt r"),
    ],
)  # fmt: skip
def test_products_of_full_size(m: int, n: int, k: int, starts: tuple[int, ...], form: str, rank: int) -> None:
    check(m, n, k, rank, starts, form, None)

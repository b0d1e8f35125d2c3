"""Both thin products of a wide matrix in one pass over it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compile
from genesis.backend.cuda.launch import KernelLaunch, watching_launches
from genesis.dtypes import DType, bfloat16, float32
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.thin import ThinTile, thin_products_into
from genesis.ops.linalg import transposed
from genesis.ops.low_rank import Pair, low_rank_backward
from genesis.ops.shape import window
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper

CUDA = Device("cuda", 0)
TILE = ThinTile(16, 32, 4, 2)


def on_gpu(values: np.ndarray, dtype: DType = bfloat16) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def check(m: int, sizes: tuple[int, ...], rank: int, with_z: bool, tile: ThinTile | None) -> None:
    """Of ranges behind a gap, with memory that held other values."""
    n, rng = sum(sizes) + 16, np.random.default_rng(rank)
    ends = np.cumsum([8, *sizes])
    ranges = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
    g, u, b = (on_gpu(rng.normal(size=s)) for s in ((m, n), (m, rank * len(sizes)), (sum(sizes), rank)))
    z = on_gpu(rng.normal(size=(m, n))) if with_z else None
    c = on_gpu(rng.uniform(0.5, 2, size=n), float32) if with_z else None
    v, d = on_gpu(np.full(u.shape, np.nan)), on_gpu(np.full(b.shape, np.nan))
    sums = on_gpu(np.full(n, 7.0), float32) if with_z else None
    parts = [[x.view((stop - start, rank), x.strides, (start - 8) * rank) for start, stop in ranges] for x in (d, b)]
    assert thin_products_into(v, parts[0], g, parts[1], u, ranges, scale=0.5, z=z, factors=c, sums=sums, tile=tile)
    factors = np.ones((n, 1)) if c is None else wide(c)[:, None]
    for i, (start, stop) in enumerate(ranges):
        mine, rows = slice(i * rank, (i + 1) * rank), slice(start - 8, stop - 8)
        part, scaled = wide(g)[:, start:stop], wide(b)[rows] * factors[start:stop]
        error = (2.0**-8 if with_z else 1e-5) * (np.abs(part) @ np.abs(scaled))  # c∘B is rounded once
        want = 0.5 * part @ scaled
        np.testing.assert_array_less(np.abs(wide(v)[:, mine] - want), 2.0**-8 * np.abs(want) + error)
        want, sizes_of = (part.T @ wide(u)[:, mine]), np.abs(part).T @ np.abs(wide(u)[:, mine])
        want, sizes_of = factors[start:stop] * want, factors[start:stop] * sizes_of
        np.testing.assert_array_less(np.abs(wide(d)[rows] - want), 2.0**-8 * np.abs(want) + 1e-5 * sizes_of)
    if sums is not None and z is not None:
        is_in = (np.arange(n) >= 8) & (np.arange(n) < ends[-1])
        want = np.where(is_in, (wide(g) * wide(z)).sum(0), 7)
        np.testing.assert_allclose(wide(sums), want, rtol=1e-5, atol=1e-5 * m)


@pytest.mark.sample
@pytest.mark.parametrize("with_z", [False, True])
@pytest.mark.parametrize(("sizes", "rank"), [((152,), 16), ((152, 40, 64), 5), ((64, 88), 24)])
@pytest.mark.parametrize("tile", [ThinTile(16, 32, 4, 2), ThinTile(64, 64, 4, 2, 2), ThinTile(64, 256, 4, 2)])
def test_both_products(sizes: tuple[int, ...], rank: int, with_z: bool, tile: ThinTile) -> None:
    """Where tiles divide neither rows nor columns."""
    check(200, sizes, rank, with_z, tile)


@pytest.mark.parametrize("accumulate", [False, True])
def test_one_product_alone(accumulate: bool) -> None:
    """gᵀ·u stored transposed, as the gradient of A."""
    rng = np.random.default_rng(0)
    g, u, before = on_gpu(rng.normal(size=(130, 72))), on_gpu(rng.normal(size=(130, 40))), rng.normal(size=(40, 72))
    d = on_gpu(before if accumulate else np.full((40, 72), np.nan))
    want = wide(u).T @ wide(g) + (wide(d) if accumulate else 0)
    turned = d.view((72, 40), (1, 72), 0)
    tile = ThinTile(16, 64, 4, 2)
    assert thin_products_into(None, [turned], g, [], u, [(0, 72)], accumulate=accumulate, tile=tile)
    np.testing.assert_allclose(wide(d), want, rtol=2.0**-8, atol=1e-4)


def test_sums_of_a_result_are_divided_by_its_factors() -> None:
    rng = np.random.default_rng(1)
    g, y, u, b = (on_gpu(rng.normal(size=s)) for s in ((130, 72), (130, 72), (130, 4), (72, 4)))
    c, sums = on_gpu(rng.uniform(0.5, 2, size=72), float32), on_gpu(np.full(72, np.nan), float32)
    v, d = on_gpu(np.full(u.shape, np.nan)), on_gpu(np.full(b.shape, np.nan))
    tile = ThinTile(16, 64, 4, 2)
    assert thin_products_into(v, [d], g, [b], u, [(0, 72)], z=y, factors=c, sums=sums, divides=True, tile=tile)
    np.testing.assert_allclose(wide(sums), (wide(g) * wide(y)).sum(0) / wide(c), rtol=1e-5, atol=1e-4)


def test_what_it_does_not_take_is_left_to_gemms() -> None:
    """Several ranks, too many ranges, few rows, what TMA cannot address: nothing is written."""
    g, u = on_gpu(np.ones((64, 64))), on_gpu(np.ones((64, 16)))

    def takes(g: Array, ranks: tuple[int, ...], tile: ThinTile | None = TILE) -> bool:
        size = g.shape[1] // len(ranks)
        d = [on_gpu(np.full((size, r), 7.0)) for r in ranks]
        ranges = [(i * size, (i + 1) * size) for i in range(len(ranks))]
        found = thin_products_into(on_gpu(np.ones((64, sum(ranks)))), d, g, d, u, ranges, tile=tile)
        assert found or all((wide(x) == 7).all() for x in d)
        return found

    assert takes(g, (4, 4))
    assert not takes(g, (4, 8))
    assert not takes(g, (4, 4, 4, 4))
    assert not takes(g, (128,))
    assert not takes(g, (4, 4), None)
    assert not takes(g.view((64, 8), (64, 1), 0), (4, 4))  # the second range starts at 4
    assert not takes(on_gpu(np.ones((64, 66))).view((64, 64), (66, 1), 0), (4, 4))


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_few_rows_take_one_pass(accumulate: bool) -> None:
    """vᵀ·x as `matmul_into` launches it, for v in a window; also added to what is there."""
    rng = np.random.default_rng(0)
    v, x, before = (on_gpu(rng.normal(size=s)) for s in ((2048, 24), (2048, 520), (16, 520)))
    v, want = window(v, 8, 24), wide(before) if accumulate else np.zeros((16, 520))
    want += wide(v).T @ wide(x)
    out = on_gpu(wide(before))
    with launched() as names:
        matmul_into(out, transposed(v), x, accumulate=accumulate)
    assert names == ["thin_kernel", "thin_reduce_kernel"]
    np.testing.assert_allclose(wide(out), want, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("with_z", [False, True])
def test_a_gradient_of_many_rows_takes_one_pass(with_z: bool) -> None:
    """`low_rank_backward` as backward passes call it; one launch more for all that is added up."""
    rng = np.random.default_rng(0)
    g, u, z = (on_gpu(rng.normal(size=(1024, n))) for n in (24, 8, 24))
    b, c = [on_gpu(rng.normal(size=(n, 4))) for n in (8, 16)], on_gpu(rng.uniform(0.5, 2, size=24), float32)
    pairs = Pair(0, 8, 4, 2.0), Pair(8, 24, 4, 2.0)
    with launched() as names:
        low_rank_backward(g, u, *b, *((c, z) if with_z else ()), pairs=pairs)
    assert names == ["thin_kernel", "thin_reduce_kernel"]


@contextmanager
def launched() -> Iterator[list[str]]:
    """The kernels that the block launches; those that wait for their compilation are launched at its end."""
    names: list[str] = []

    def note(made: KernelLaunch, stream: int) -> None:
        names.append(made.name)
        made.run(stream)

    driver = backend_of(CUDA).driver
    driver.synchronize()
    with watching_launches(note):
        yield names
        driver.synchronize()


def compiled(sizes: tuple[int, ...], rank: int) -> list[int]:
    """The shared memory that the kernel takes at full size; for a process without the interpreter."""
    m = 8192

    def made(*shape: int) -> Array:
        return empty(shape, bfloat16, CUDA)

    def numbers(n: int) -> Array:
        return empty((n,), float32, CUDA)

    n, ends = sum(sizes), [0, *itertools.accumulate(sizes)]
    ranges = list(itertools.pairwise(ends))
    with collecting(Hopper) as found:
        g, z, v = made(m, n), made(m, n), made(m, len(sizes) * rank)
        d, b = ([made(size, rank) for size in sizes] for _ in range(2))
        c, sums = numbers(n), numbers(n)
        assert thin_products_into(v, d, g, b, v, ranges)
        assert thin_products_into(v, d, g, b, v, ranges, z=z, factors=c, sums=sums, divides=True)
        assert thin_products_into(None, [made(n, rank)], g, [], made(m, rank), [(0, n)])
    thin = [each for each in found.values() if each[0].fn.__name__ == "thin_kernel"]
    return [compile.compile_kernel(kernel, signature, (9, 0)).shared for kernel, signature in thin]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rank"), [((4864, 4864), 64), pytest.param((896, 128, 128), 16, marks=pytest.mark.full)]
)
def test_it_fits_an_sm(sizes: tuple[int, ...], rank: int) -> None:
    """Its tiles are chosen by count: all compile, with the shared memory that a block can have."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = f"import json; from tests.kernels.test_thin import compiled; print(json.dumps(compiled({sizes}, {rank})))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(json.loads(done.stdout)) <= H200.shared_memory


class Small(Hopper):
    """A device of a later architecture whose blocks have less shared memory, as the GPUs of workstations."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.properties = H200._replace(capability=(12, 0), shared_memory=99 << 10)


def test_less_shared_memory_is_left_to_gemms() -> None:
    with collecting(Small) as found:
        g, u, b = (empty(shape, bfloat16, CUDA) for shape in ((2048, 64), (2048, 8), (64, 8)))
        assert not thin_products_into(u, [b], g, [b], u, [(0, 64)])
    assert not found


@pytest.mark.gpu
@pytest.mark.parametrize("with_z", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("sizes", [(4864, 4864), (896, 128, 128), (896,), (1032,)])
def test_products_of_full_size(sizes: tuple[int, ...], rank: int, with_z: bool) -> None:
    check(5000, sizes, rank, with_z, None)

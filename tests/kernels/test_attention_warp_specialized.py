"""The warp-specialized forward kernel of attention: compiled everywhere, correct on Hopper."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compile
from genesis.dtypes import DType, bfloat16, float16, float32, int64
from genesis.kernels.attention import attention as kernels
from genesis.kernels.attention import warp_specialized
from genesis.kernels.attention.problem import problem_of
from genesis.kernels.attention.warp_specialized import (
    column_in_round,
    forward_ws_into,
    persistent_tile,
    tile_count,
)
from genesis.ops.attention import parts_of
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper

CUDA = Device("cuda", 0)


def launched(q: Array, k: Array, window: int = 0) -> bool:
    """Whether the kernel is taken for these sizes."""
    problem = problem_of(0.1, True, window, None, q, k, k)
    o, lse = empty(q.shape, q.dtype, q.device), empty((q.shape[0], q.shape[2], q.shape[1]), float32, q.device)
    return forward_ws_into(o, lse, q, k, k, True, problem)


def compiled(count: int) -> list[dict[str, Any]]:
    """The kernel in its first forms; for a process without the interpreter, which changes Triton."""
    with collecting(Hopper) as found:

        def made(*shape: int, dtype: DType = bfloat16) -> Array:
            return empty(shape, dtype, CUDA)

        few = launched(made(1, 512, 12, 128), made(1, 512, 2, 128))
        small = launched(made(8, 1024, 12, 64), made(8, 1024, 2, 64))
        wide = launched(made(8, 1024, 12, 128, dtype=float32), made(8, 1024, 2, 128, dtype=float32))
        window = launched(made(8, 1024, 12, 128), made(8, 1024, 2, 128), 100)
        assert not found
        many = [
            launched(made(8, 1024, 12, 128), made(8, 1024, 2, 128)),
            launched(made(8, 1024, 12, 96, dtype=float16), made(8, 1024, 2, 96, dtype=float16)),
            launched(made(8, 512, 4, 256), made(8, 512, 1, 256)),  # a program an SM, as many as 64 queries each give
        ]
    rows: list[dict[str, Any]] = [{"few": few, "small": small, "wide": wide, "window": window, "many": many}]
    for kernel, signature in list(found.values())[:count]:
        binary = compile.compile_kernel(kernel, signature, (9, 0))
        rows.append({"name": binary.name, "warps": binary.warps, "shared": binary.shared})
    with collecting(Hopper) as found:  # as attention chooses
        q, k = made(8, 1024, 12, 128), made(8, 1024, 2, 128)
        o, lse = made(8, 1024, 12, 128), made(8, 12, 1024, dtype=float32)
        for starts in (None, made(8, 1024, dtype=int64)):
            kernels.attention((o, lse), q, k, k, starts, scale=0.1)
    return [*rows, {"taken": [kernel.fn.__name__ for kernel, _ in found.values()]}]


@pytest.mark.parametrize("count", [0, pytest.param(3, marks=pytest.mark.full)])
def test_it_compiles_and_is_chosen_where_profitable(count: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    module = "tests.kernels.test_attention_warp_specialized"
    program = f"import json; from {module} import compiled; print(json.dumps(compiled({count})))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    chosen, *made, last = json.loads(done.stdout)
    assert chosen == {"few": False, "small": False, "wide": False, "window": False, "many": [True] * 3}
    assert last == {"taken": ["attention_fwd_ws", "attention_fwd"]}
    assert [(row["name"], row["warps"]) for row in made] == [("attention_fwd_ws", 12)] * count
    assert max((row["shared"] for row in made), default=0) <= H200.shared_memory


@pytest.mark.parametrize(("blocks", "heads", "programs"), [(64, 32, 132), (8, 96, 132), (3, 50, 132), (7, 19, 20)])
def test_every_tile_is_computed_once(blocks: int, heads: int, programs: int) -> None:
    taken = []
    for i_program in range(programs):
        with mock.patch.multiple(
            "triton.experimental.gluon.language",
            program_id=lambda axis, i=i_program: i, num_programs=lambda axis: programs,
            where=lambda c, a, b: a if c else b,
        ), mock.patch.object(warp_specialized, "column_in_round", column_in_round.fn):  # fmt: skip
            taken += [persistent_tile.fn(i, blocks, heads) for i in range(tile_count.fn(blocks * heads))]
    assert sorted(taken) == [(i, j) for i in range(blocks) for j in range(heads)]


# --- On a GPU ---------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """A call, in which queries are the last of the keys' positions."""

    batches: int
    tokens: int
    heads: int
    key_heads: int
    keys: int
    size: int = 128
    causal: bool = True
    scale: float = 0.1


CALLS = [
    Sizes(2, 1024, 10, 2, 1024),
    Sizes(3, 333, 16, 16, 333),  # queries and keys that end inside a block
    Sizes(1, 100, 140, 7, 100, causal=False),  # fewer queries than a tile has
    Sizes(1, 4096, 16, 8, 4096),
    Sizes(2, 640, 15, 3, 640, causal=False),
    Sizes(4, 65, 34, 17, 200),
    Sizes(4, 200, 20, 20, 65),  # queries before the first key see none
    Sizes(2, 1024, 10, 2, 1024, size=72),
    Sizes(4, 700, 8, 2, 700, size=256),
    Sizes(1, 300, 24, 24, 700, size=192, causal=False),
    Sizes(2, 700, 12, 2, 700, scale=-0.2),
    Sizes(2, 700, 12, 2, 700, scale=0.0),
]
TOLERANCE = {bfloat16: 1e-2, float16: 1.5e-3}  # of the result, whose weights are rounded to the type, relative in norm


@pytest.fixture
def hopper() -> None:
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


def visible(s: Sizes) -> np.ndarray:
    """Which keys are visible to each query, `[T, S]`."""
    i_query, i_key = np.arange(s.tokens)[:, None] + s.keys - s.tokens, np.arange(s.keys)
    return (i_key <= i_query) | (not s.causal)


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """The result and the log of the softmax sums in float64, from the whole matrix of scores."""
    o, lse = np.zeros(q.shape), np.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        scores = np.where(seen, scale * (q[b, :, h] @ k[b, :, h // group].T), -np.inf)
        top = np.where(seen.any(1), scores.max(1), 0)[:, None]
        weights = np.exp(scores - top)
        total = weights.sum(1)
        some = total > 0
        o[b, some, h] = (weights @ v[b, :, h // group])[some] / total[some, None]
        lse[b, h, some] = top[some, 0] + np.log(total[some])
    return o, lse


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("s", CALLS, ids=str)
def test_forward(s: Sizes, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((s.batches, s.tokens, s.heads, s.size)).astype(dtype.numpy)
    k, v = (rng.standard_normal((s.batches, s.keys, s.key_heads, s.size)).astype(dtype.numpy) for _ in range(2))
    wanted, wanted_lse = expected(q, k, v, visible(s), s.scale)
    arrays = [on_gpu(x, dtype) for x in (q, k, v)]
    o = on_gpu(np.full(q.shape, np.nan).astype(dtype.numpy), dtype)
    lse = on_gpu(np.full(wanted_lse.shape, np.nan, np.float32), float32)
    problem = problem_of(s.scale, s.causal, 0, None, *arrays)
    assert forward_ws_into(o, lse, *arrays, s.causal, problem)
    found, found_lse = o.numpy().astype(np.float64), lse.numpy()
    assert np.linalg.norm(found - wanted) < TOLERANCE[dtype] * np.linalg.norm(wanted)
    np.testing.assert_array_equal(np.isfinite(found_lse), np.isfinite(wanted_lse))
    seen = np.isfinite(wanted_lse)
    assert (found_lse[~seen] == -np.inf).all()
    # a score is a sum of at most 128 products in float32, of numbers of 8 section: 128 · 2^-24 · 8 is 6e-5
    np.testing.assert_allclose(found_lse[seen], wanted_lse[seen], rtol=1e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_parts_of_a_packed_array_and_the_same_bits_again() -> None:
    rng = np.random.default_rng(1)
    packed = on_gpu(rng.standard_normal((4, 500, 12 + 2 * 4, 128)).astype(bfloat16.numpy), bfloat16)
    q, k, v = parts_of(packed, 12, 4)
    results = []
    for _ in range(3):
        o = on_gpu(np.full(q.shape, np.nan).astype(bfloat16.numpy), bfloat16)
        lse = empty((4, 12, 500), float32, CUDA)
        assert forward_ws_into(o, lse, q, k, v, True, problem_of(0.1, True, 0, None, q, k, v))
        results.append((o.numpy().tobytes(), lse.numpy().tobytes()))
    assert results[0] == results[1] == results[2]
    wanted, _ = expected(*(x.numpy() for x in (q, k, v)), visible(Sizes(4, 500, 12, 4, 500)), 0.1)
    assert np.linalg.norm(o.numpy().astype(np.float64) - wanted) < TOLERANCE[bfloat16] * np.linalg.norm(wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_nan_propagates() -> None:
    values = np.ones((2, 512, 40, 128), np.float32)
    q, v = on_gpu(values, bfloat16), on_gpu(values, bfloat16)
    values[0, 100, 3, 7] = np.nan
    k = on_gpu(values, bfloat16)
    o, lse = empty(q.shape, bfloat16, CUDA), empty((2, 40, 512), float32, CUDA)
    kernels.forward_into(o, lse, q, k, v, None, 0.1, True, 0)
    nan = np.isnan(o.numpy().astype(np.float32))
    assert nan[0, 100:, 3].all()
    assert not nan[0, :100, 3].any()
    assert not nan[1].any()
    assert not nan[0, :, :3].any()

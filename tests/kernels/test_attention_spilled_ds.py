"""Attention's backward with the gradient of the scores in memory: heads of 65 to 256 on GPUs of Hopper's kind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, compile
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float16, float32, int32
from genesis.errors import DeviceError
from genesis.kernels.attention import attention as kernels
from genesis.kernels.attention import spilled_ds
from genesis.kernels.attention.spilled_ds import (
    DS_TILE,
    MAX_CHUNK_BYTES,
    STORE_BY_4_WARPS,
    ds_buffer_shape,
    ds_chunks_of,
    ds_extent,
    permuted_column,
    tile_origin,
)
from tests.kernels.collecting import collecting
from tests.kernels.test_attention import CUDA, case, compare, on_gpu, run
from tests.kernels.test_gemm_warp_specialized import Hopper


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that attention launches from here on."""
    names: list[str] = []

    def spy(kernel: Any, *args: Any, **keywords: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args, **keywords)

    monkeypatch.setattr(kernels, "launch", spy)
    return names


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize(
    ("size", "dtype", "packed", "window", "tokens", "rotation", "chunk_bytes"),
    [
        (16, float32, False, 0, 257, None, MAX_CHUNK_BYTES),  # five blocks: the middle one has a row to itself
        (16, bfloat16, True, 0, 191, "position", MAX_CHUNK_BYTES),
        (32, float16, True, 70, 254, "token", MAX_CHUNK_BYTES),
        (16, float32, False, 0, 40, None, MAX_CHUNK_BYTES),  # one block
        (256, bfloat16, False, 0, 72, "token", MAX_CHUNK_BYTES),  # sums over queries transposed
        (16, float32, True, 0, 193, "token", 1),  # sequence by sequence
        (16, float32, "branches", 0, 350, "token", MAX_CHUNK_BYTES),
    ],
)
def test_gradients(
    size: int, dtype: DType, packed: bool | str, window: int, tokens: int, rotation: str | None, chunk_bytes: int,
    launched: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Small heads, for the interpreter's sake; shapes are no other test's, whose launches would be replayed."""
    if dtype is float32 and not is_interpreted():
        pytest.skip("a GPU spills 2-byte types")
    monkeypatch.setattr(kernels, "_spills_ds", lambda c: True)
    monkeypatch.setattr(spilled_ds, "MAX_CHUNK_BYTES", chunk_bytes)
    c = case(size, dtype, packed, True, window, tokens, rotation)
    o, _, dx = run(c)
    backward = ["attention_bwd_delta", "attention_bwd_dkdv", "attention_bwd_reduce_splits", "attention_bwd_dq_from_ds"]
    chunks = 1 if chunk_bytes == MAX_CHUNK_BYTES else 2
    names = [name.removesuffix("_wgmma") for name in launched]
    assert [n for n in names if n in {*backward, "attention_bwd_dq"}] == backward * chunks
    compare(c, o, dx)


def backward(shape: tuple[int, ...], dtype: DType = bfloat16, keys: int | None = None, causal: bool = True) -> None:
    batches, tokens, heads, size = shape
    q, k = empty(shape, dtype, CUDA), empty((batches, keys or tokens, heads, size), dtype, CUDA)
    lse = empty((batches, heads, tokens), float32, CUDA)
    kernels.backward_into((q, k, k), q, q, k, k, q, lse, None, 0.1, causal, 0)


def collected(compiled: int) -> None:
    """Which kernels some calls take, and that the code of the first of them is what it is written for; for a process of
    its own.

    Args:
        compiled: of how many calls.
    """
    delta, dq, dkdv = "attention_bwd_delta", "attention_bwd_dq", "attention_bwd_dkdv"
    spilled = [delta, f"{dkdv}_wgmma", f"{dq}_from_ds"]
    calls: tuple[tuple[list[str], dict[str, Any]], ...] = (
        (spilled, {"shape": (1, 1024, 4, 128)}),
        ([delta, dkdv, f"{dq}_from_ds"], {"shape": (1, 1024, 4, 256)}),
        (spilled, {"shape": (1, 1024, 4, 96), "dtype": float16}),
        ([f"{dq}_wgmma", f"{dkdv}_wgmma"], {"shape": (1, 1024, 4, 64)}),
        ([dq, dkdv], {"shape": (1, 1024, 4, 32)}),
        ([dq, dkdv], {"shape": (1, 1024, 4, 128), "dtype": float32}),
        ([dq, f"{dkdv}_wgmma"], {"shape": (1, 1024, 4, 128), "keys": 2048}),
        ([dq, f"{dkdv}_wgmma"], {"shape": (1, 1024, 4, 128), "causal": False}),
    )
    for number, (names, call) in enumerate(calls):
        with collecting(Hopper) as found:
            backward(**call)
        assert [kernel.fn.__name__ for kernel, _ in found.values()] == names, (call, found)
        if number < compiled:
            for kernel, signature in found.values():
                compile.compile_kernel(kernel, signature, (9, 0))


@pytest.mark.parametrize("count", [0, pytest.param(3, marks=pytest.mark.full)])
def test_it_is_chosen_where_profitable_and_compiles(count: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = f"from tests.kernels.test_attention_spilled_ds import collected; collected({count})"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_another_layout_is_an_error() -> None:
    """As the compiler writes it: the first line of the assembly, and the operands with their layout."""
    first = STORE_BY_4_WARPS.value.split("\n")[0]
    layout = first.partition(" for ")[2]
    line = f'%1 = tt.elementwise_inline_asm "{first}\\0A st;\\0A}}" %2, %3 : tensor<64x64xi64, #mma>, tensor<8xi8, #a>'
    compile._check_layouts(f"#mma = {layout}\n{line}\n", "attention_bwd_dkdv")
    with pytest.raises(DeviceError, match=r"attention_bwd_dkdv: Triton .* layout"):
        compile._check_layouts(f"#mma = {layout.replace('[4, 1]', '[2, 2]')}\n{line}\n", "attention_bwd_dkdv")


def test_values_of_a_thread_are_contiguous() -> None:
    """In the layout of a wgmma result, thread t of a row has columns 2t and 2t + 1 of each 8."""
    by_query = np.array([permuted_column.fn(i) for i in range(128)])
    np.testing.assert_array_equal(by_query[by_query], np.arange(128))
    columns = by_query.reshape(4, 4, 4, 2).transpose(0, 2, 1, 3).reshape(4, 4, 8)  # of each 32, by thread
    np.testing.assert_array_equal(columns, np.arange(128).reshape(4, 4, 8))


@triton.jit
def _origins(p_out, blocks, COUNT: tl.constexpr):
    i_key, i_query = tl.program_id(0) // COUNT, tl.program_id(0) % COUNT
    row, column = tile_origin(i_key, i_query, blocks)
    tl.store(p_out + 2 * tl.program_id(0), row)
    tl.store(p_out + 2 * tl.program_id(0) + 1, column)


@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
def test_tiles_fill_a_rectangle(blocks: int) -> None:
    out = empty((blocks, blocks, 2), int32, CUDA)
    launch(_origins, blocks * blocks, out, blocks, COUNT=blocks)
    found = {tuple(out.numpy()[j, i]) for j in range(blocks) for i in range(j, blocks)}
    rows, columns = ds_extent(blocks * DS_TILE - 1)
    origins = {(row, column) for row in range(0, rows, DS_TILE) for column in range(0, columns, DS_TILE)}
    assert len(found) == blocks * (blocks + 1) // 2 == len(found & origins)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((8, 1024, 12, 2), 1),
        ((2, 8192, 16, 16), 4),
        ((1, 8192, 40, 8), 3),
        ((1, 65536, 8, 2), 2),
        ((40, 8192, 2, 1), 6),
    ],
)
def test_chunks(sizes: tuple[int, int, int, int], count: int) -> None:
    batches, _, heads, key_heads = sizes
    found = ds_chunks_of(*sizes, 2)
    assert len(found) == count
    taken = np.zeros((batches, key_heads), np.int64)
    for part in found:
        taken[part] += 1
    assert (taken == 1).all()
    shape = ds_buffer_shape(*sizes, 2)
    assert shape[0] == max(taken[part].size for part in found) * heads // key_heads
    assert shape[0] == heads // key_heads or np.prod(shape) * 2 <= MAX_CHUNK_BYTES


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")


def gradients(inputs: tuple[Array, ...], lse: Array) -> list[np.ndarray]:
    g, q, k, v, o = inputs
    grads = tuple(on_gpu(np.full(x.shape, np.nan, x.dtype.numpy), x.dtype) for x in (q, k, v))
    kernels.backward_into(grads, g, q, k, v, o, lse, None, 0.09, True, 0)
    return [x.numpy().astype(np.float64) for x in grads]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 1500, 6, 2, 128), (3, 1024, 4, 4, 96), (1, 65, 2, 1, 128), (2, 700, 4, 2, 256)], ids=str
)
def test_gradients_match_the_kernels_that_recompute_scores(
    sizes: tuple[int, ...], dtype: DType, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, tokens, heads, key_heads, size = sizes
    monkeypatch.setattr(kernels, "forward_ws_into", lambda *args: False)  # racecheck reports it: docs/log.md
    rng = np.random.default_rng(5)
    g, q, k, v = (
        on_gpu(rng.standard_normal((batches, tokens, n, size)).astype(dtype.numpy), dtype)
        for n in (heads, heads, key_heads, key_heads)
    )
    o, lse = empty(q.shape, dtype, CUDA), empty((batches, heads, tokens), float32, CUDA)
    kernels.forward_into(o, lse, q, k, v, None, 0.09, True, 0)
    inputs = (g, q, k, v, o)
    found = gradients(inputs, lse)
    assert "attention_bwd_dq_from_ds" in launched
    monkeypatch.setattr(spilled_ds, "MAX_CHUNK_BYTES", 1)
    for whole, chunked in zip(found, gradients(inputs, lse), strict=True):  # sums over heads may be split differently
        assert np.linalg.norm(whole - chunked) <= 1e-3 * np.linalg.norm(whole)
    monkeypatch.setattr(kernels, "_spills_ds", lambda c: False)
    for one, other in zip(found, gradients(inputs, lse), strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_nan_propagates() -> None:
    rng = np.random.default_rng(6)
    values = rng.standard_normal((4, 1, 300, 2, 128)).astype(bfloat16.numpy)
    values[0, 0, 200, 1, 7] = np.nan  # of g: the gradients of that query, and of all keys that it sees
    g, q, k, v = (on_gpu(x, bfloat16) for x in values)
    o, lse = empty(q.shape, bfloat16, CUDA), empty((1, 2, 300), float32, CUDA)
    kernels.forward_into(o, lse, q, k, v, None, 0.09, True, 0)
    dq, dk, _ = gradients((g, q, k, v, o), lse)
    assert np.isnan(dq[0, 200, 1]).all() and np.isnan(dk[0, :201, 1]).all()
    assert np.isfinite(np.delete(dq[0, :, 1], 200, 0)).all()
    assert np.isfinite(dq[0, :, 0]).all() and np.isfinite(dk[0, :, 0]).all()

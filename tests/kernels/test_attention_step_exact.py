"""Exact steps of attention by four warps: they compile and, on Hopper, have the bits of the kernel with one warp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.autograd.modes import exact, no_grad
from genesis.backend import Device
from genesis.backend.cuda import backend_of, compile
from genesis.dtypes import bfloat16, float32, int64
from genesis.kernels.decode import attention_step
from tests.kernels.collecting import collecting
from tests.kernels.test_exact_rows import bits
from tests.kernels.test_gemm_warp_specialized import H200, Hopper
from tests.kernels.test_wide_rows import on_gpu

CUDA = Device("cuda", 0)


def compiled() -> list[Any]:
    """What the compiled kernel takes for an exact step of one row and for a plain step of many; for a process without
    the interpreter, which changes Triton.
    """
    rows = []
    for count, is_exact in ((1, True), (133, False)):
        with collecting(Hopper) as found, no_grad(), exact(is_exact):
            shapes = (count, 4, 128), (count, 8, 128), (2, count, 2, 512, 128)
            out, qkv, cache = (empty(s, bfloat16, CUDA) for s in shapes)
            tables, lengths = [empty((512, 64), float32, CUDA) for _ in range(2)], empty((count,), int64, CUDA)
            attention_step.attention_step_into(out, qkv, cache, lengths, *tables, scale=0.1, early=True)
        ((kernel, signature),) = found.values()
        made = compile.compile_kernel(kernel, signature, (9, 0))
        rows.append([kernel.fn.__name__, made.warps, made.shared])
    return rows


@pytest.mark.full
def test_it_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = "import json; from tests.kernels.test_attention_step_exact import compiled; print(json.dumps(compiled()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, warps, shared), resident in zip(json.loads(done.stdout), (1, 3), strict=True):
        assert (name, warps) == ("attention_step_exact_kernel", 4)
        assert resident * shared <= H200.shared_memory


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "group", "norms", "window", "times"), [
    (64, 7, False, 0, 1), (64, 16, False, 100, 1), (64, 7, False, 0, 9), (64, 4, False, 0, 17), (128, 2, True, 0, 1),
    (128, 2, True, 300, 17), (256, 4, True, 512, 1),
])  # fmt: skip
def test_it_has_the_bits_of_one_warp(
    size: int, group: int, norms: bool, window: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache held NaN behind the keys; one row is inactive."""
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")
    rng, lengths = np.random.default_rng(size), np.tile([0, 63, 64, 65, 511, 512, 1000, -1], times)

    def values(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) * np.exp(rng.normal(size=shape))

    past, qkv = values(2, len(lengths), 2, 1024, size), on_gpu(values(len(lengths), 2 * group + 4, size), bfloat16)
    for i, length in enumerate(lengths):
        past[:, i, :, max(length, 0) :] = np.nan
    counts = empty(lengths.shape, int64, CUDA)
    backend_of(CUDA).from_numpy(lengths, counts)
    tables = [on_gpu(rng.normal(size=(1024, size // 2)), float32) for _ in range(2)]
    weights = [on_gpu(values(size), bfloat16) if norms else None for _ in range(2)]
    results = list[tuple[Array, Array]]()
    for takes in (attention_step.takes_four_warps, lambda *arrays: False):
        monkeypatch.setattr(attention_step, "takes_four_warps", takes)
        out, cache = on_gpu(np.full((len(lengths), 2 * group, size), np.nan), bfloat16), on_gpu(past, bfloat16)
        with no_grad(), exact():
            attention_step.attention_step_into(
                out, qkv, cache, counts, *tables, *weights, scale=size**-0.5, window=window, eps=1e-6
            )
        results.append((out, cache))
    (found, cache), (wanted, wanted_cache) = results
    assert np.isfinite(found.numpy().astype(np.float32)).all()
    np.testing.assert_array_equal(bits(found), bits(wanted))
    np.testing.assert_array_equal(bits(cache), bits(wanted_cache))

"""GELU (the tanh form) in Triton and in CUDA C++, as a user would write it. Imported on a GPU only."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import genesis
from genesis.custom import UserOp, cdiv

SOURCE = """
extern "C" __global__ void gelu(float* __restrict__ out, const float* __restrict__ x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    float u = 0.79788456f * (v + 0.044715f * v * v * v);
    out[i] = 0.5f * v * (1.0f + tanhf(u));
}
"""


@triton.jit
def gelu(p_out, p_x, n, BLOCK: tl.constexpr):
    """out = GELU(x) of n elements, BLOCK to a program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    x = tl.load(p_x + i, mask=m)
    u = 0.79788456 * (x + 0.044715 * x * x * x)
    t = 1 - 2 / (tl.exp(2 * u) + 1)  # tanh u
    tl.store(p_out + i, 0.5 * x * (1 + t), mask=m)


def reference(x: np.ndarray) -> np.ndarray:
    """The same in numpy, for devices that run no machine code."""
    u = 0.79788456 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + np.tanh(u))


RULE: Any = {"inputs": ("x",), "out": lambda x: x, "reference": reference}


def in_cuda() -> UserOp:
    """GELU in CUDA C++: a thread for each element."""
    return genesis.cuda_op("gelu_in_cuda", SOURCE, grid=lambda out, x: cdiv(out.size, 256), block=256, **RULE)


def in_triton() -> UserOp:
    """GELU in Triton: a program for each tile of 1024 elements."""
    tile = {"BLOCK": 1024, "num_warps": 4}
    return genesis.triton_op("gelu_in_triton", gelu, grid=lambda out, x: cdiv(out.size, 1024), constants=tile, **RULE)

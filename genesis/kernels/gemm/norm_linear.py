"""The CUDA implementation of RMSNorm followed by linear layers: the norm to a buffer of its own, then the GEMM.

Plain reference: genesis/ops/norm_linear.py: `norm_linear`.
"""

from __future__ import annotations

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.kernels.gemm.linear import packed_linear
from genesis.kernels.norm.norm import rms_norm

__all__: list[str] = []


@cuda_impl("norm_linear")
def norm_linear(out: tuple[Array, Array], x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0) -> None:
    """`packed_linear(rms_norm(x), …)`, and r = 1 / sqrt(mean(x²) + eps)."""
    normed = empty(x.shape, x.dtype, x.device)
    rms_norm((normed, out[1]), x, scale, eps)
    packed_linear(out[0], normed, *parameters, fp8=fp8)

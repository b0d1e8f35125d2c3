"""The CUDA implementation of RMSNorm followed by linear layers: the norm to a buffer of its own, then the GEMM.

Few rows that are not recorded are normalised in the GEMM itself.

Plain reference: genesis/ops/norm_linear.py: `norm_linear`.
"""

from __future__ import annotations

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.kernels.decode.few_rows import Norm, few_rows_linear_into, is_for_few_rows
from genesis.kernels.gemm.linear import packed_linear
from genesis.kernels.norm.norm import rms_norm
from genesis.ops.linear import own_parameters, split_parameters
from genesis.ops.low_rank import LowRank
from genesis.ops.shape import contiguous


@cuda_impl("norm_linear")
def norm_linear(
    out: tuple[Array, ...], x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """`packed_linear(rms_norm(x), …)`, and r = 1 / sqrt(mean(x²) + eps)."""
    y, rstd, *more = out
    weights, biases = split_parameters(own_parameters(parameters, low_rank))
    if not more and not fp8 and is_for_few_rows(x, *weights):
        few_rows_linear_into(y, x, weights, biases, norm=Norm(contiguous(scale), eps, rstd))
        return
    normed = empty(x.shape, x.dtype, x.device)
    rms_norm((normed, rstd), x, scale, eps)
    packed_linear((y, *more) if more else y, normed, *parameters, fp8=fp8, low_rank=low_rank)

"""The CUDA twins of the ops, in Triton: one file for each file of `genesis.ops`, loaded at its first use on a GPU.

Names inside kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` tile. Every dimension that can overrun is
masked; offsets beyond 2^31 are computed in int64 where `WIDE` says so; sums are in float32 (float64 for float64).
"""

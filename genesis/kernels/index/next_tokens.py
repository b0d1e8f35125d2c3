"""What follows a draw, on the GPU; reference and meaning of all arrays: genesis/ops/next_tokens.py."""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous

ROWS = 32  # at a time


@triton.jit
def next_tokens_kernel(p_drawn, p_log_probs, p_stops, p_tokens, p_lengths, p_left, p_keys, p_seen, p_ring,
                       p_ring_log_probs, p_step, rows, places, vocabulary, STOPS: tl.constexpr,
                       HAS_LOG_PROBS: tl.constexpr, OVERLAP: tl.constexpr, N: tl.constexpr,
                       B: tl.constexpr):  # fmt: skip
    """One program of one warp; STOPS ids of each row in a tile N wide, a vocabulary of 0 where nothing is marked."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    step = tl.load(p_step)
    place = (step % places) * rows
    for start in range(0, rows, B):
        i_b = start + tl.arange(0, B)  # [B]
        m_b = i_b < rows
        token = tl.load(p_drawn + i_b, mask=m_b, other=-1)
        left = tl.load(p_left + i_b, mask=m_b, other=0)
        length = tl.load(p_lengths + i_b, mask=m_b, other=0)
        position = tl.load(p_keys + i_b * 3 + 2, mask=m_b, other=0)
        is_active = left > 0
        is_stop = token == -1
        if STOPS > 0:
            i_n = tl.arange(0, N)  # [N]
            m = m_b[:, None] & (i_n < STOPS)[None, :]
            stop = tl.load(p_stops + i_b[:, None] * STOPS + i_n[None, :], mask=m, other=-1)  # [B, N]
            is_stop = is_stop | (tl.max((stop == token[:, None]).to(tl.int32), 1) > 0)
        tl.debug_barrier()  # all is read before anything of it changes
        tl.store(p_ring + place + i_b, tl.where(is_active, token, -2), mask=m_b)
        if HAS_LOG_PROBS:
            log_prob = tl.load(p_log_probs + i_b, mask=m_b, other=0)
            found = tl.where(is_active, log_prob, float("nan"))
            tl.store(p_ring_log_probs + place + i_b, found, mask=m_b)
        tl.store(p_left + i_b, tl.where(is_stop, 0, left - 1), mask=m_b & is_active)
        m_token = m_b & is_active & (token != -1)
        tl.store(p_tokens + i_b, token, mask=m_token)
        tl.store(p_lengths + i_b, length + 1, mask=m_token)
        tl.store(p_keys + i_b * 3 + 2, position + 1, mask=m_token)
        if vocabulary > 0:
            marked = tl.full((B,), 1, tl.int1)
            tl.store(p_seen + i_b.to(tl.int64) * vocabulary + token, marked, mask=m_token)
    tl.debug_barrier()
    tl.store(p_step, step + 1)


@cuda_impl("next_tokens")
def next_tokens(
    out: tuple[()], drawn: Array, log_probs: Array, stops: Array, tokens: Array, lengths: Array, left: Array,
    keys: Array, seen: Array, ring: Array, ring_log_probs: Array, step: Array,
) -> None:  # fmt: skip
    """One launch."""
    (places, rows), (_, count) = ring.shape, stops.shape
    launch(
        next_tokens_kernel, 1, drawn, log_probs, stops, tokens, lengths, left, keys, seen, ring, ring_log_probs, step,
        rows, places, seen.shape[1], STOPS=count, HAS_LOG_PROBS=bool(log_probs.size), OVERLAP=can_overlap(drawn),
        N=max(2, triton.next_power_of_2(count)), B=min(ROWS, max(2, triton.next_power_of_2(rows))), num_warps=1,
    )  # fmt: skip

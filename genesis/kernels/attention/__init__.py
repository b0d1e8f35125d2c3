"""Attention and RoPE: forward, backward, and what their kernels share."""

"""RMSNorm and LayerNorm, RoPE, and RMSNorm followed by RoPE."""

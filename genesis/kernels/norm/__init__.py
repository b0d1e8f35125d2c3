"""RMSNorm and LayerNorm, alone and with RoPE behind them."""

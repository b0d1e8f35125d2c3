"""Optimizer steps, gradient norms, and the rounding of fp32 masters to bf16."""

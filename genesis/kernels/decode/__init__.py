"""Kernels of generation: matmuls with few rows, attention of one token, sampling. README.md lists when each runs."""

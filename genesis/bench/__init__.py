"""Measuring speed: how long a call takes and how sure that is, and what the machine could do at best.

What an op's figures mean is said by `genesis.profile`; benchmarks that compare with torch are in `benchmarks/`.
"""

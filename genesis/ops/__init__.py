"""Ops by family: what each computes (in numpy), its shape rule, gradient and cost. Kernels are in `genesis.kernels`.

A module registers its ops when it is imported; `genesis.op.registry` holds them all once `genesis` is imported.
"""

"""Ops by family: numpy reference, shape rule, gradient and cost. The kernels are in `genesis.kernels`.

A module registers its ops when it is imported; once `genesis` is imported, `genesis.op.registry` holds all of them.
"""

"""Elementwise ops, activations, copies, random numbers: each output element depends on few input elements."""

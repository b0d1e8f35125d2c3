"""Attention: forward and backward kernels, and the functions that they share."""

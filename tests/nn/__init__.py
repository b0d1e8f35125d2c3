"""Modules, layers, losses, initialization, clipping."""

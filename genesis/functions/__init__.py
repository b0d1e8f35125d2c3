"""User-level functions on tensors, by family. `surface.py` has the tables of what is public, and where."""

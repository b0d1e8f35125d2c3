"""User-level functions on tensors, by family. `surface.py` holds the tables of public functions and methods."""

"""User-level functions on tensors, by family. Each module lists in METHODS what Tensor also has as methods."""

"""Measures the training steps and the generation of a model, for `genesis bench-model`."""

"""Conformance of every registered op."""

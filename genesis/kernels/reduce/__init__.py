"""Reductions, scans and softmax over one or several dimensions."""

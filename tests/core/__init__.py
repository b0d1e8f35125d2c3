"""Tests of what stands below the ops: arrays, shapes, dtypes, random bits, memory, dispatch."""

"""Measuring: times, work and memory of calls, ops, steps and models, and the reports about them."""

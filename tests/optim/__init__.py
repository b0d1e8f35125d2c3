"""Optimizers, flat buffers, schedules, loss scaling."""

"""What a call of a module and its backward pass cost the host: launches, and Python calls within a margin."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.eager import host

# Launches and Python calls of one call, forward and backward. An embedding's keys and their sort are two launches: one
# kernel for both takes 7.4 us for 128 ids on an H200, the two 6.7 us (docs/log.md).
MOST = {
    "gelu": (2, 110), "softmax": (2, 120), "rms_norm": (3, 200), "layer_norm": (4, 250), "attention": (4, 240),
    "cross_entropy": (4, 200), "embedding": (6, 150), "linear": (7, 310), "broadcast": (12, 390),
    "mse": (6, 260),
}  # fmt: skip


@pytest.mark.parametrize("kind", MOST)
def test_a_call_takes_few_launches_and_calls(kind: str) -> None:
    found = host([kind], argparse.Namespace(seed=0, calls=0, verbose=0))[kind]
    launches, calls = MOST[kind]
    assert found["launches"] <= launches and found["calls"] <= calls, found

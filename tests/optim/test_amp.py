"""genesis.amp: torch's GradScaler."""

from __future__ import annotations

import math

import pytest

import genesis
from genesis import amp, nn, optim


def test_an_overflow_is_skipped_and_states_continue() -> None:
    w = nn.Parameter(genesis.ones(2))
    optimizer, scaler = optim.SGD([w], lr=0.5), amp.GradScaler("cpu", 8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale([w.sum() * (math.inf if step == 1 else 1.0)])[0].backward()
        if step == 3:
            scaler.unscale_(optimizer)
            assert w.grad.tolist() == [1.0, 1.0]
        assert scaler.step(optimizer) is None
        scaler.update()
    assert w.tolist() == [-0.5, -0.5] and scaler.get_scale() == 8.0
    other = amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and other.growth_interval == 2
    with pytest.raises(RuntimeError, match="disabled"):
        other.load_state_dict({})


def test_without_a_gpu_the_scaler_is_disabled() -> None:
    if not genesis.cuda.is_available():
        with pytest.warns(UserWarning, match="no GPU"):
            assert not amp.GradScaler().is_enabled()
    assert amp.is_autocast_available("cpu") and not genesis.is_autocast_enabled()

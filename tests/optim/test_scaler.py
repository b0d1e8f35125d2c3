"""Loss scaling: what it saves from underflow, what it skips, how the factor moves."""

from __future__ import annotations

import numpy as np
import pytest

from genesis import nn, optim
from genesis.errors import ConfigError, GradientError
from genesis.functions.create import tensor
from genesis.tensor import Tensor


def weight(dtype: str = "float32") -> Tensor:
    return tensor(np.ones(4), dtype=dtype, requires_grad=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_float16_gradients_survive_and_reach_the_masters(kind: dict[str, bool]) -> None:
    """A gradient of 2^-26 is 0 in float16, and exact when scaled by 2^16."""
    results = {}
    for enabled in (False, True):
        w = weight("float16")
        optimizer, scaler = optim.SGD([w], lr=2.0**20, **kind), optim.GradScaler(2.0**16, enabled=enabled)  # type: ignore[arg-type]
        scaler.scale((w.float() * 2.0**-26).sum()).backward()
        assert scaler.step(optimizer)
        scaler.update()
        results[enabled] = w.detach().to("float64").numpy()
    np.testing.assert_array_equal(results[False], 1.0)
    np.testing.assert_array_equal(results[True], 1 - 2.0**-6)


def test_an_overflow_skips_the_step_and_lowers_the_factor() -> None:
    w = weight()
    optimizer, scaler = optim.SGD([w], lr=1.0), optim.GradScaler(8.0, growth_interval=2)
    for bad in (np.inf, np.nan):
        w.grad = tensor([1.0, bad, 1.0, 1.0])
        assert not scaler.step(optimizer)
        scaler.update()
    np.testing.assert_array_equal(w.detach().numpy(), 1.0)
    assert scaler.get_scale() == 2.0
    for expected in (2.0, 4.0, 4.0, 8.0):
        w.grad = tensor([1.0] * 4)
        assert scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


def test_unscaled_gradients_can_be_clipped() -> None:
    w = weight()
    optimizer, scaler = optim.SGD([w], lr=1.0, fused=True), optim.GradScaler(1024.0)
    scaler.scale((w * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert w.grad.tolist() == [3.0] * 4
    norm = nn.utils.clip_grad_norm_([w], 1.0)
    assert norm.item() == 6.0
    scaler.step(optimizer)
    np.testing.assert_allclose(w.detach().numpy(), 0.5, atol=1e-6)


def test_clipping_on_the_fly_combines_with_the_factor() -> None:
    w = weight("float16")
    optimizer, scaler = optim.SGD([w], lr=1.0), optim.GradScaler(1024.0)
    scaler.scale((w.float() * 3).sum()).backward()
    norm = optimizer.grad_norm() / scaler.get_scale()
    scaler.step(optimizer, grad_scale=nn.utils.clip_scale(norm, 1.0))
    np.testing.assert_allclose(w.detach().to("float64").numpy(), 0.5, atol=2**-11)


def test_misuse() -> None:
    w = weight()
    optimizer, scaler = optim.SGD([w]), optim.GradScaler()
    with pytest.raises(GradientError, match=r"before step\(\)"):
        scaler.update()
    w.grad = tensor([1.0] * 4)
    scaler.unscale_(optimizer)
    with pytest.raises(GradientError, match="twice"):
        scaler.unscale_(optimizer)
    half = weight("float16")
    half.grad = half.detach()
    with pytest.raises(GradientError, match="underflow"):
        scaler.unscale_(optim.SGD([half]))
    with pytest.raises(ConfigError, match="growth_factor"):
        optim.GradScaler(growth_factor=1.0)
    with pytest.raises(ConfigError, match="init_scale"):
        optim.GradScaler(init_scale=0.0)


def test_state_round_trip() -> None:
    w = weight()
    optimizer, scaler = optim.SGD([w]), optim.GradScaler(4.0, growth_interval=3)
    for _ in range(2):
        w.grad = tensor([1.0] * 4)
        scaler.step(optimizer)
        scaler.update()
    other = optim.GradScaler(growth_interval=3)
    other.load_state_dict(scaler.state_dict())
    for s in (scaler, other):
        w.grad = tensor([1.0] * 4)
        s.step(optimizer)
        s.update()
    assert scaler.get_scale() == other.get_scale() == 8.0
    scaler.step(optimizer)
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0

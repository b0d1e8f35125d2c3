"""GradScaler: scales the loss so that small float16 gradients do not underflow, and skips steps that overflowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from genesis.dtypes import float16
from genesis.errors import ConfigError, GradientError
from genesis.optim.flat import check_range
from genesis.optim.optimizer import Optimizer
from genesis.optim.saving import check_saved
from genesis.tensor import Tensor


class GradScaler:
    """Scales losses by an adaptive factor (Micikevicius et al., "Mixed precision training", 2018), as in torch.

    Call `scale(loss).backward()`, then `step(optimizer)`, then `update()`. Call `unscale_(optimizer)` before `step` to
    clip true gradients. `step` synchronizes the host once, to check whether all gradients are finite.

    Args:
        init_scale: initial factor.
        growth_factor: multiplies the factor after `growth_interval` steps in a row without overflow.
        growth_interval: number of these steps.
        backoff_factor: multiplies the factor after an overflow.
        enabled: False makes the scaler pass everything through.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_range("init_scale", init_scale, math.ulp(0.0))
        check_range("growth_interval", growth_interval, 1)
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ConfigError(
                f"growth_factor {growth_factor} must be above 1 and backoff_factor {backoff_factor} between 0 and 1"
            )
        self._scale, self._streak = float(init_scale), 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.enabled = enabled
        self._unscaled: set[int] = set()
        self._overflowed: dict[int, bool] = {}

    def get_scale(self) -> float:
        """The current factor."""
        return self._scale if self.enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss * self._scale if self.enabled else loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the factor, at most once per step.

        Raises:
            GradientError: for a second call, or float16 gradients, which would underflow; pass `grad_scale` to `step`.
        """
        if not self.enabled:
            return
        if id(optimizer) in self._unscaled:
            raise GradientError("unscale_() was called twice since the last update()")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if any(g.dtype is float16 for g in grads):
            raise GradientError(
                "float16 gradients would underflow when unscaled in place",
                next="clip with optimizer.grad_norm() / scaler.get_scale() and pass grad_scale= to scaler.step()",
            )
        self._check(optimizer)
        optimizer.scale_gradients(1 / self._scale)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *, grad_scale: Tensor | float | None = None) -> bool:
        """Step unless a gradient is infinite or NaN.

        Args:
            grad_scale: an additional factor on the unscaled gradients, for clipping.

        Returns:
            Whether the optimizer stepped.
        """
        if not self.enabled:
            optimizer.step(grad_scale=grad_scale)
            return True
        if id(optimizer) not in self._unscaled:
            self._check(optimizer)
            inverse = 1 / self._scale
            grad_scale = inverse if grad_scale is None else grad_scale * inverse
        if self._overflowed[id(optimizer)]:
            return False
        optimizer.step(grad_scale=grad_scale)
        return True

    def _check(self, optimizer: Optimizer) -> None:
        self._overflowed[id(optimizer)] = not math.isfinite(optimizer.grad_norm(math.inf).item())

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the factor after the steps of all optimizers, or set it to `new_scale`."""
        if not self.enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._overflowed:
            raise GradientError("update() was called before step()", next="call step(optimizer) first")
        elif any(self._overflowed.values()):
            self._scale, self._streak = self._scale * self.backoff_factor, 0
        else:
            self._streak += 1
            grown = self._scale * self.growth_factor
            if self._streak == self.growth_interval:
                self._scale, self._streak = (grown if math.isfinite(grown) else self._scale), 0
        self._unscaled.clear()
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the number of steps in a row without overflow."""
        return {"scale": self._scale, "growth_tracker": self._streak}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        check_saved("a GradScaler's state", state_dict, ("scale", "growth_tracker"))
        self._scale, self._streak = float(state_dict["scale"]), int(state_dict["growth_tracker"])

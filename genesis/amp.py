"""Mixed precision with the names of torch.amp: `autocast`, and the scaler of losses.

>>> scaler = genesis.amp.GradScaler("cpu", init_scale=8.0)
>>> scaler.scale(genesis.tensor(2.0))
tensor(16.)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from genesis import cuda, optim
from genesis.autograd import autocast, get_autocast_dtype, is_autocast_enabled
from genesis.dtypes import DType, float64
from genesis.errors import GradientError
from genesis.optim import Optimizer
from genesis.optim.saving import check_saved
from genesis.tensor import Tensor

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")


def is_autocast_available(device_type: str) -> bool:
    """Whether autocast knows the device type."""
    return device_type in ("cpu", "cuda")


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: DType | None = None) -> Any:
    """Decorate `forward` of a `Function`, so that `custom_bwd` repeats its autocast in backward.

    Args:
        cast_inputs: inside autocast, cast float arguments on `device_type` except float64 to this type, and run
            `forward` without autocast.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx._autocast_dtype, is_on = get_autocast_dtype(device_type), is_autocast_enabled(device_type)
        ctx._used_autocast = is_on and cast_inputs is None
        if cast_inputs is None or not is_on:
            return fwd(ctx, *args, **kwargs)
        with autocast(device_type, enabled=False):
            cast = functools.partial(_cast, device_type=device_type, dtype=cast_inputs)
            return fwd(ctx, *cast(args), **cast(kwargs))

    return forward


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate `backward` of a `Function`, so that it runs with the autocast that `custom_fwd` noted in forward."""
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any) -> Any:
        with autocast(device_type, dtype=ctx._autocast_dtype, enabled=ctx._used_autocast):
            return bwd(ctx, *args)

    return backward


def _cast(value: Any, device_type: str, dtype: DType) -> Any:
    """Cast the tensors in a value, and in the dicts, lists and tuples that it holds."""
    cast = functools.partial(_cast, device_type=device_type, dtype=dtype)
    if isinstance(value, Tensor):
        takes_part = value.is_floating_point() and value.device.type == device_type and value.dtype is not float64
        return value.to(dtype) if takes_part else value
    if isinstance(value, dict):
        return {key: cast(each) for key, each in value.items()}
    return type(value)(map(cast, value)) if isinstance(value, list | tuple) else value


class GradScaler(optim.GradScaler):
    """The scaler of losses with torch's arguments and results; `step` returns what the optimizer's step returns.

    Without a GPU, a scaler for "cuda" is disabled.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and device == "cuda" and not cuda.is_available():
            warnings.warn("GradScaler for cuda is disabled, because no GPU was found", stacklevel=2)
            enabled = False
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self.enabled

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or the tensors of a list or tuple, times the factor."""
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(each) for each in outputs)
        return super().scale(outputs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless they are unscaled already, and step if all are finite."""
        if self.enabled and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        return None if self._overflowed.get(id(optimizer)) else optimizer.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the factors and the number of steps in a row without overflow; {} if disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self._scale,
            **{name: getattr(self, name) for name in _FACTORS},
            "_growth_tracker": self._streak,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if not self.enabled:
            return
        if not state_dict:
            raise GradientError("the state comes from a disabled GradScaler")
        check_saved("a GradScaler's state", state_dict, ("scale", *_FACTORS, "_growth_tracker"))
        self._scale, self._streak = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        for name in _FACTORS:
            setattr(self, name, state_dict[name])

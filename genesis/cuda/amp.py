"""torch.cuda.amp's older names for mixed precision on CUDA; `genesis.amp` and `genesis.autocast` have every device."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from genesis.autograd import autocast as _autocast
from genesis.dtypes import DType, float16

_amp = importlib.import_module("genesis.amp")  # in a layer above

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(_autocast):  # noqa: N801  torch's name
    """`genesis.autocast` for CUDA tensors, in float16 by default."""

    def __init__(self, enabled: bool = True, dtype: DType = float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class GradScaler(_amp.GradScaler):  # type: ignore[misc,name-defined]
    """`genesis.amp.GradScaler` for losses on CUDA."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def custom_fwd(fwd: Any = None, *, cast_inputs: DType | None = None) -> Any:
    """`genesis.amp.custom_fwd` for CUDA."""
    return _amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


custom_bwd = functools.partial(_amp.custom_bwd, device_type="cuda")

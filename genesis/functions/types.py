"""What public functions take and give, for their annotations; the stubs that `make stubs` writes have the same.

Tensor is defined above these functions, so its name is `Any` here, and the class in the stubs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from genesis.backend import Device
from genesis.dtypes import DType

Tensor: TypeAlias = Any
Operand: TypeAlias = Any  # a tensor or a number: `Tensor | float` in the stubs
Dims: TypeAlias = int | tuple[int, ...] | list[int] | None
Sizes: TypeAlias = int | Sequence[int]
DTypeLike: TypeAlias = DType | str | type[Any] | np.dtype[Any] | None
DeviceLike: TypeAlias = Device | str | None

"""Torch's older names of tensors by type: `genesis.LongTensor([1, 2])`, `isinstance(x, genesis.FloatTensor)`.

>>> genesis.LongTensor([1, 2]).dtype
genesis.int64
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.autograd.record import TensorBase, as_tensor
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError
from genesis.functions.create import empty, tensor
from genesis.functions.settings import set_default_dtype
from genesis.tensor import _TYPES


class TensorType(type):
    """The class of a type's name, such as `genesis.FloatTensor`: makes tensors on the CPU, and recognizes them."""

    dtype: Any

    def __call__(cls, *data: Any) -> Any:
        """Return a tensor of nested lists or an array, or of undefined contents in the given sizes."""
        given: Any = data[0] if len(data) == 1 else None
        if isinstance(given, TensorBase) and not cls.__instancecheck__(given):
            raise DTypeError(f"{cls.__name__} of a tensor of {given.array.dtype}", next="cast it with .to(...)")
        if isinstance(given, TensorBase):
            return as_tensor(given.array)
        if isinstance(given, (list, tuple, np.ndarray)):
            return tensor(given, dtype=cls.dtype)
        return empty(*data, dtype=cls.dtype)

    def __instancecheck__(cls, instance: Any) -> bool:
        is_tensor = isinstance(instance, TensorBase)
        return is_tensor and instance.array.dtype is cls.dtype and instance.array.device.type == "cpu"


for _name, _word in _TYPES.items():
    _made = TensorType(f"{_word}Tensor", (), {"dtype": as_dtype(_name), "__doc__": f"A tensor of {_name} on the CPU."})
    globals()[f"{_word}Tensor"] = _made


def set_default_tensor_type(t: Any) -> None:
    """Set the default float type: `genesis.DoubleTensor`, or its name "torch.DoubleTensor"."""
    kind = globals().get(t.rpartition(".")[2]) if isinstance(t, str) else t
    if not isinstance(kind, TensorType):
        raise DTypeError(f"set_default_tensor_type takes a type of tensors, got {t!r}", next="use set_default_dtype")
    set_default_dtype(kind.dtype)

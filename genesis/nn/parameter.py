"""Parameter: a tensor that a module registers as its own when it is assigned to an attribute."""

from __future__ import annotations

from typing import Any

from genesis.array import Array, label
from genesis.errors import DTypeError
from genesis.op import registry
from genesis.tensor import Tensor


class Parameter(Tensor):
    """A leaf tensor that belongs to a module and is trained.

    Args:
        data: its values; memory is shared.
        requires_grad: whether it is trained.
    """

    __slots__ = ()

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        if not isinstance(data, Tensor):
            raise DTypeError(
                f"a Parameter is made of a tensor, not of {type(data).__name__}", next="use genesis.tensor"
            )
        super().__init__(label(data.array, "parameter"), requires_grad=requires_grad)

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copied = Parameter(Tensor(registry["copy"](self.array)), self._requires_grad)
        memo[id(self)] = copied
        return copied


def replace_array(tensor: Tensor, array: Array) -> None:
    """Give a leaf other memory, for example on another device; who holds the tensor sees the new values."""
    tensor.array = label(array, "parameter") if isinstance(tensor, Parameter) else array
    tensor._accumulate = None  # it knows the old dtype
    tensor._gradient_buffer = None

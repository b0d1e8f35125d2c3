"""Hooks on what ops save for backward: pack it in another form in forward, and unpack it when backward needs it.

`genesis.autograd.graph` exports them, as torch does. What custom functions save is not packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis.array import Array
from genesis.autograd.graph import Saved
from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase, saving_calls
from genesis.errors import UsageError
from genesis.op import Context


class _Packed:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class saved_tensors_hooks:  # noqa: N801  torch's name
    """Inside the block, ops save `pack_hook(tensor)`, and backward reads `unpack_hook(packed)`.

    Example:
        >>> x = genesis.tensor([3.0], requires_grad=True)
        >>> with genesis.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t + 1):
        ...     y = x * x
        >>> y.sum().backward()
        >>> x.grad
        tensor([8.])
    """

    def __init__(self, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        self.pack_hook, self.unpack_hook = pack_hook, unpack_hook
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer.append(saving_calls.intercept)
        saving_calls.intercept = self._pack

    def __exit__(self, *error: object) -> None:
        saving_calls.intercept = self._outer.pop()

    def _pack(self, saved: Saved) -> Callable[[], Saved]:
        c = saved.context
        if c.leases:  # gradients in a flat buffer, which must stay where they are
            return lambda: saved

        def pack(x: Any) -> Any:
            return _Packed(self.pack_hook(TensorBase.wrap(x))) if isinstance(x, Array) else x

        def unpack(x: Any) -> Any:
            if not isinstance(x, _Packed):
                return x
            tensor = self.unpack_hook(x.value)
            if not isinstance(tensor, TensorBase):
                raise UsageError(f"unpack_hook returned a {type(tensor).__name__}, not a tensor")
            return tensor.array

        outer, saving_calls.intercept = saving_calls.intercept, None  # what the hooks compute is not packed
        try:
            with no_grad():
                inputs, outputs = tuple([pack(x) for x in c.inputs]), tuple([pack(x) for x in c.outputs])
        finally:
            saving_calls.intercept = outer
        attrs, needs, specs = c.attrs, c.needs, c.input_specs

        def take() -> Saved:
            with no_grad():
                read = tuple([unpack(x) for x in inputs]), tuple([unpack(x) for x in outputs])
            return Saved(Context(*read, attrs, needs, specs))

        return take


class save_on_cpu(saved_tensors_hooks):  # noqa: N801
    """Inside the block, keep what ops save for backward in host memory; `pin_memory` makes the copies faster."""

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        def pack(tensor: Any) -> Any:
            host = tensor.cpu() if tensor.device.type == device_type else tensor
            return tensor.device, host.pin_memory() if pin_memory and host is not tensor else host

        super().__init__(pack, lambda packed: packed[1].to(packed[0]))

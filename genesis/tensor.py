"""Tensor: an Array that the tape records, with torch's attributes and operators.

Its other methods are the functions of `genesis.functions`: function and method are the same object.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np

from genesis import autograd
from genesis.array import Array
from genesis.autograd.engine import backward as tape_backward
from genesis.autograd.graph import HookHandle
from genesis.autograd.record import TensorBase, as_gradient, as_tensor
from genesis.backend import Device
from genesis.dtypes import DType, Layout, default_dtype, float32, float64, strided
from genesis.errors import DeviceError, DTypeError, GradientError, IndexRangeError, ShapeError, UsageError
from genesis.functions import create as _create
from genesis.functions import elementwise as _elementwise
from genesis.functions import exchange as _exchange
from genesis.functions import pointwise as _pointwise
from genesis.functions import shape as _shape
from genesis.functions import transfer as _transfer
from genesis.functions.methods import Methods
from genesis.functions.printing import text_of as _text_of
from genesis.functions.storage import UntypedStorage
from genesis.functions.storage import window as _window
from genesis.functions.surface import formatted, normalized, sizes_of
from genesis.op import registry
from genesis.shapes import Shape, Size, normalize_axis, numel

# The types' names before "Tensor" in `Tensor.type`.
_TYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip


def _along(dim: builtins.int, ndim: builtins.int) -> builtins.int:
    if not ndim:
        raise IndexRangeError("a tensor without dimensions has no sizes")
    return normalize_axis(dim, ndim)


def _cast(x: Any, dtype: Any, memory_format: Any) -> Tensor:
    converted: Tensor = _create.to(x, dtype)
    return converted if memory_format is None else formatted(converted, memory_format, "to")


class Tensor(Methods, TensorBase, concrete=True):
    """A multi-dimensional array whose operations autograd may record.

    Create tensors with `genesis.tensor`, `genesis.zeros` and similar functions, or `genesis.from_numpy`.
    """

    __slots__ = ()
    __array_priority__ = 1000  # numpy's operators defer to ours

    @staticmethod
    def _array_of(*data: Any) -> Array:
        """Return float32 values of nested lists and arrays, a tensor's memory, or empty memory of given sizes."""
        if len(data) == 1 and isinstance(data[0], (TensorBase, list, tuple, np.ndarray)):
            (given,) = data
            return given.array if isinstance(given, TensorBase) else _create.tensor(given, dtype=default_dtype()).array
        for size in data:
            if type(size) is not builtins.int and not isinstance(size, (np.integer, TensorBase)):
                raise DTypeError(f"Tensor() does not take a {type(size).__name__}", next="use genesis.tensor()")
        return _create.empty(*data).array  # type: ignore[no-any-return]

    # --- Attributes --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Size:
        return Size(self.array.shape)

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def device(self) -> Device:
        return self.array.device

    @property
    def ndim(self) -> builtins.int:
        return len(self.array.shape)

    @property
    def strides(self) -> Shape:
        """Strides, in elements."""
        return self.array.strides

    @property
    def T(self) -> Tensor:  # noqa: N802  torch's name
        """The tensor with its dimensions in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The tensor with its last two dimensions swapped."""
        return self.transpose(-2, -1)

    mH = mT

    @property
    def H(self) -> Tensor:  # noqa: N802
        """A matrix with its dimensions swapped."""
        if self.ndim not in (0, 2):
            raise ShapeError(f"H of a tensor of shape {tuple(self.shape)}", next="use .mH")
        return self.T

    def dim(self) -> builtins.int:
        return self.ndim

    def size(self, dim: builtins.int | None = None) -> Any:
        return self.shape if dim is None else self.array.shape[_along(dim, self.ndim)]

    def stride(self, dim: builtins.int | None = None) -> Any:
        """Return the strides in elements, or the stride of one dimension."""
        return self.array.strides if dim is None else self.array.strides[_along(dim, self.ndim)]

    def storage_offset(self) -> builtins.int:
        """Return the number of elements between the start of the storage and the first element."""
        return self.array.offset

    ndimension = dim

    @property
    def _base(self) -> Any:
        """The tensor of which this one is a view, or None."""
        return self.base

    @property
    def itemsize(self) -> builtins.int:
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def layout(self) -> Layout:
        """How elements are stored: always `genesis.strided`."""
        return strided

    @property
    def real(self) -> Tensor:
        """The real parts: a real tensor itself."""
        return self

    is_meta = is_sparse = is_quantized = False

    @property
    def is_cpu(self) -> builtins.bool:
        return self.device.type == "cpu"

    def get_device(self) -> builtins.int:
        """Return the index of the CUDA device; -1 on the CPU."""
        return self.device.index if self.is_cuda else -1

    def numel(self) -> builtins.int:
        return self.array.size

    nelement = numel

    def element_size(self) -> builtins.int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> builtins.int:
        return self.array.nbytes

    def is_contiguous(self, memory_format: Any = None) -> builtins.bool:
        return self.array.is_contiguous

    def is_floating_point(self) -> builtins.bool:
        return self.dtype.is_floating_point

    def untyped_storage(self) -> UntypedStorage:
        """Return the memory that this tensor shares with its views."""
        return UntypedStorage(self.array.storage, self.device)

    def is_set_to(self, tensor: Tensor) -> builtins.bool:
        """Return whether both tensors show the same elements of the same memory."""
        a, b = self.array, tensor.array
        return a.storage is b.storage and (a.offset, a.shape, a.strides) == (b.offset, b.shape, b.strides)

    def set_(
        self,
        source: Tensor | UntypedStorage | None = None,
        storage_offset: builtins.int = 0,
        size: Any = None,
        stride: Any = None,
    ) -> Tensor:
        """Continue over the memory of `source`: a tensor's, or a storage's from `storage_offset` on; nothing empties.

        Raises ShapeError if the storage is too small.
        """
        if isinstance(source, TensorBase) and size is None:
            self.take_memory(source.array)
            return self
        self.take_memory(_window(self.array, source, storage_offset, size, stride))
        return self

    def resize_(self, *sizes: Any, memory_format: Any = None) -> Tensor:
        """Change the shape, row-major over the same memory; a larger one continues in new memory.

        Elements beyond the old ones are undefined. Raises GradientError if the tensor requires a gradient.
        """
        if self.requires_grad:
            raise GradientError("resize_ of a tensor that requires a gradient", next="use reshape, or detach() it")
        own, shape = self.array, sizes_of(sizes, "resize_")
        if any(s < 0 for s in shape):
            raise ShapeError(f"resize_: {shape} has a negative size")
        held = own.storage.nbytes // self.itemsize
        if own.offset + numel(shape) > held:
            grown = _create.empty(own.offset + numel(shape), dtype=own.dtype, device=own.device)
            grown[:held] = self.as_strided((held,), (1,), 0)
            self.take_memory(grown.array)
        return self.set_(self.untyped_storage(), own.offset, shape)

    def share_memory_(self) -> Tensor:
        """Return the tensor. CUDA memory counts as shared; on the CPU it raises, because ranks share no memory."""
        if not self.is_cuda:
            raise DeviceError("CPU memory cannot be shared between processes", next="save the tensor to a file")
        return self

    def data_ptr(self) -> builtins.int:
        return self.array.data_ptr()

    # --- Conversions -------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """Return the only element as a Python number. Raises ShapeError unless there is exactly one."""
        if self.array.size != 1:
            raise ShapeError(f"item() takes one element, got {self.array.size}", next="index it, or use tolist()")
        return self.array.item()

    def tolist(self) -> Any:
        return self.array.numpy().tolist()

    def numpy(self, *, force: builtins.bool = False) -> np.ndarray:
        """Return the values as numpy; on the CPU memory is shared. Raises GradientError if it requires a gradient.

        `force` detaches a tensor that requires a gradient.
        """
        if self.requires_grad and not force:
            raise GradientError("numpy() does not take a tensor that requires a gradient", next="use .detach().numpy()")
        return self.array.numpy()

    def __array__(self, dtype: Any = None, copy: builtins.bool | None = None) -> np.ndarray:
        values = self.numpy()
        return values if dtype is None and not copy else np.array(values, dtype=dtype, copy=True)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: builtins.bool | None = None
    ) -> Any:
        """Return a capsule over the same memory, for another library's `from_dlpack`; see `to_dlpack`."""
        if self.requires_grad:
            raise GradientError("DLPack cannot share a tensor that requires a gradient", next="use .detach()")
        return _exchange.to_dlpack(self.array, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[builtins.int, builtins.int]:
        return _exchange.dlpack_device(self.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface, on CUDA tensors only."""
        return _exchange.cuda_array_interface(self.array, self.requires_grad)

    def __float__(self) -> builtins.float:
        return builtins.float(self.item())

    def __int__(self) -> builtins.int:
        return builtins.int(self.item())

    def __bool__(self) -> builtins.bool:
        if self.array.size != 1:
            raise ShapeError(f"the truth of {self.array.size} elements is ambiguous", next="use .any() or .all()")
        return builtins.bool(self.item())

    def __index__(self) -> builtins.int:
        if self.dtype.is_floating_point:
            raise DTypeError(f"a {self.dtype} tensor cannot be an index")
        return builtins.int(self.item())

    def __len__(self) -> builtins.int:
        if not self.array.shape:
            raise UsageError("a tensor without dimensions has no len()")
        return self.array.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_shape.unbind(self, 0))

    def __contains__(self, element: Any) -> builtins.bool:
        """Whether any element equals a number or an element of a tensor, which broadcasts."""
        return builtins.bool(_pointwise.eq(self, element).any())

    def __pos__(self) -> Tensor:
        return self

    def __repr__(self) -> str:
        node = self.current_node()
        note = f"grad_fn=<{node.name}>" if node is not None else "requires_grad=True" if self.requires_grad else None
        return _text_of(self.array, () if note is None else (note,))

    def __format__(self, spec: str) -> str:
        """Format a 0-d tensor as its number, `f"{loss:.4f}"`; other tensors take no format."""
        if not self.array.shape:
            return format(self.item(), spec)
        if spec:
            raise DTypeError(
                f"the format {spec!r} does not apply to a tensor of shape {self.array.shape}",
                next="format its elements, or .mean()",
            )
        return str(self)

    def __reduce__(self) -> Any:
        raise DTypeError("tensors cannot be pickled, because unpickling can run code", next="use genesis.save()")

    def __copy__(self) -> Tensor:
        """Return another tensor over the same memory."""
        if not self.is_leaf:
            raise GradientError("only leaves can be copied", next="detach() it first, or clone() it")
        copied = object.__new__(type(self))
        copied._begin(self.array, None, 0)
        copied._requires_grad = self._requires_grad
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise GradientError("only leaves can be deep-copied", next="detach() it first")
        copied = Tensor(registry["copy"](self.array), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    # --- Autograd ----------------------------------------------------------------------------------------------------

    @property
    def grad_fn(self) -> Any:
        """Node of the graph that computed this tensor; None for leaves."""
        return self.current_node()

    @property
    def requires_grad(self) -> builtins.bool:
        return TensorBase.requires_grad.fget(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: builtins.bool) -> None:
        self.requires_grad_(value)

    def detach(self) -> Tensor:
        """Return a tensor over the same memory that is not recorded."""
        return Tensor(self.array)

    def detach_(self) -> Tensor:
        """Cut the tensor itself off its history, and return it. Raises GradientError for views."""
        if self.base is not None:
            raise GradientError("a view cannot be detached in place", next="use detach()")
        self.node, self.output, self._requires_grad = None, 0, False
        return self

    def apply_(self, callable: Callable[[Any], Any]) -> Tensor:
        """Replace each element by `callable` of it, a Python number; on the CPU only."""
        if self.is_cuda or self.requires_grad:
            what = "a CUDA tensor" if self.is_cuda else "a tensor that requires a gradient"
            raise DeviceError(f"apply_ does not take {what}", next="compute with functions of tensors")
        values = [callable(value) for value in self.array.view_np().ravel().tolist()]
        return self.copy_(_create.tensor(values, dtype=self.dtype).reshape(self.shape))

    @property
    def data(self) -> Tensor:
        """The same memory, not recorded. A tensor assigned to it hands over its memory, also to a leaf."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, TensorBase):
            raise DTypeError(f".data is set to a {type(value).__name__}", next="assign a tensor")
        self.take_memory(value.array)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: builtins.bool | None = None,
        create_graph: builtins.bool = False,
        inputs: Any = None,
    ) -> None:
        """Accumulate gradients into the leaves, or into `inputs` only; see `genesis.autograd.backward`."""
        tape_backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> HookHandle:
        """Call `hook(grad)` when this tensor's gradient is complete; a returned tensor replaces the gradient.

        Returns a handle whose `remove()` removes the hook.
        """
        edge = self.edge()
        if edge is None:
            raise GradientError("register_hook() needs a tensor that requires a gradient")

        def on_array(grad: Array) -> Array | None:
            replaced = hook(as_tensor(grad))
            if replaced is not None and not isinstance(replaced, TensorBase):
                raise UsageError(
                    f"a hook on a gradient returned a value of type {type(replaced).__name__}",
                    next="return a tensor, or None to keep the gradient",
                )
            return None if replaced is None else as_gradient(replaced)

        entry, hooks = (edge.output, on_array), edge.node.hooks
        # What retain_grad() keeps is the gradient after all hooks.
        at = next((i for i, (_, other) in enumerate(hooks) if getattr(other, "keeps", False)), len(hooks))
        hooks.insert(at, entry)
        return HookHandle(lambda: edge.node.hooks.remove(entry))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> HookHandle:
        """Call `hook(self)` after each update of this leaf's `.grad`. Returns a handle with `remove()`."""
        if not self.is_leaf:
            raise GradientError("post-accumulate hooks are for leaves", next="use register_hook")
        self._post_hooks += (hook,)

        def remove() -> None:
            at = self._post_hooks.index(hook)
            self._post_hooks = self._post_hooks[:at] + self._post_hooks[at + 1 :]

        return HookHandle(remove)

    def retain_grad(self) -> None:
        """Keep a non-leaf's gradient in `.grad`. Raises GradientError if the tensor does not require a gradient."""
        if not self.requires_grad:
            raise GradientError("retain_grad() needs a tensor that requires a gradient")
        if not self.is_leaf and not self.retains_grad:
            edge = self.edge()
            assert edge is not None

            def keep(array: Array) -> None:
                grad = as_tensor(array)
                self.grad = grad.clone() if self.grad is None else self.grad + grad

            keep.keeps = True  # type: ignore[attr-defined]
            edge.node.hooks.append((edge.output, keep))

    @property
    def retains_grad(self) -> builtins.bool:
        """Whether `retain_grad()` was called on this non-leaf."""
        node = None if self.is_leaf else self.current_node()
        hooks = () if node is None else node.hooks
        return any(output == self.output and getattr(hook, "keeps", False) for output, hook in hooks)

    # --- Placement and type ------------------------------------------------------------------------------------------

    def to(
        self,
        *args: Any,
        dtype: Any = None,
        device: Any = None,
        copy: builtins.bool = False,
        non_blocking: builtins.bool = False,
        memory_format: Any = None,
    ) -> Tensor:
        """Return the tensor with another dtype or on another device; itself if nothing changes (unless `copy`)."""
        moved: Tensor = _create.to(self, *args, dtype=dtype, device=device, copy=copy, non_blocking=non_blocking)
        return moved if memory_format is None else formatted(moved, memory_format, "to")

    def type(self, dtype: Any = None, non_blocking: builtins.bool = False) -> Any:
        """Return the name of the type, such as "torch.FloatTensor"; with `dtype`, a type or a name, convert to it."""
        place = "torch.cuda." if self.is_cuda else "torch."
        if dtype is None:
            return f"{place}{_TYPES[self.dtype.name]}Tensor"
        named = str(dtype).removesuffix("Tensor") if isinstance(dtype, str) else ""
        kind = next((own for own, name in _TYPES.items() if named in (f"torch.{name}", f"torch.cuda.{name}")), None)
        device = None if kind is None else "cuda" if ".cuda." in named else "cpu"
        return self.to(dtype=kind or dtype, device=device, non_blocking=non_blocking)

    def byte(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "uint8", memory_format)

    def char(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "int8", memory_format)

    def short(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "int16", memory_format)

    def float(self, memory_format: Any = None) -> Tensor:
        return _cast(self, float32, memory_format)

    def double(self, memory_format: Any = None) -> Tensor:
        return _cast(self, float64, memory_format)

    def half(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "float16", memory_format)

    def bfloat16(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "bfloat16", memory_format)

    def long(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "int64", memory_format)

    def int(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "int32", memory_format)

    def bool(self, memory_format: Any = None) -> Tensor:
        return _cast(self, "bool", memory_format)

    def type_as(self, other: Tensor) -> Tensor:
        return self.to(other.dtype)

    def cpu(self, memory_format: Any = None) -> Tensor:
        return self.to(device="cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: builtins.bool = False, memory_format: Any = None) -> Tensor:
        device = "cuda" if device is None else f"cuda:{device}" if isinstance(device, builtins.int) else device
        return self.to(device=device, non_blocking=non_blocking, memory_format=memory_format)

    @property
    def is_cuda(self) -> builtins.bool:
        return self.device.type == "cuda"

    def is_pinned(self, device: Any = None) -> builtins.bool:
        """Whether the tensor is in pinned host memory, which serves every device; see `pin_memory`."""
        return _transfer.is_pinned(self.array)

    def record_stream(self, s: Any) -> None:
        """Mark the memory as used by stream `s`: it is not reused before the work queued there is done."""
        _transfer.record_stream(self.array, s.handle)

    def where(self, condition: Tensor, other: Any) -> Tensor:
        """Return self where `condition` is true, else `other`."""
        return _elementwise.where(condition, self, other)  # type: ignore[no-any-return]

    __hash__ = TensorBase.__hash__


for _name, _method in list(vars(Tensor).items()):  # methods accept the same keywords as functions
    _code = _method.__code__ if isinstance(_method, FunctionType) and _name[0] != "_" else None
    if _code is not None and _code.co_argcount + _code.co_kwonlyargcount > 1:
        setattr(Tensor, _name, normalized(_method))
setattr(autograd, "Variable", Tensor)  # noqa: B010  torch's older name
Tensor.requires_grad_ = normalized(TensorBase.requires_grad_)  # type: ignore[method-assign]

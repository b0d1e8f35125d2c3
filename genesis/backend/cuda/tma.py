"""Tensor descriptors: regions of device memory that TMA copies in boxes.

A `Descriptor` is a kernel argument. Its machine form is a tensor map of 128 bytes that contains the address, so a
replayed launch needs another map for every new address. `Encoder` makes and caches the maps of one layout.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from genesis.backend import ArrayLike
from genesis.errors import DeviceError
from genesis.shapes import Shape

MAP_BYTES = 128
MAX_CACHED_MAPS = 1024  # maps that an encoder caches; the pool uses few addresses per layout
# Values of CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapL2promotion and CUtensorMapFloatOOBfill.
_FLOAT32, _TFLOAT32 = 7, 11
_NO_INTERLEAVE, _L2_128, _FILL_ZERO = 0, 2, 0
_TRITON_TYPES = {8: 10, 9: 8, 10: 9}  # element types for which Triton's number differs from the driver's


class Facts(NamedTuple):
    """The compiler's choices for one descriptor of a kernel.

    Attributes:
        swizzle: number of the swizzle mode.
        kind: Triton's number of the element type.
        item: bytes per element.
        box: elements of a box in each dimension.
    """

    swizzle: int
    kind: int
    item: int
    box: tuple[int, ...]


class Descriptor:
    """A kernel argument: a region of an array, loaded and stored in boxes of `block` elements.

    Reads outside `shape` return 0, and writes outside it are dropped.

    Args:
        array: provides the address and the dtype; its shape is not used.
        shape: size of the region, with at most 5 dimensions.
        strides: strides of the region in elements. The last one is 1; the others are multiples of 16 bytes.
        block: size of a box, a power of 2 in each dimension.
        tf32: round float32 to TF32 on the way to shared memory.
        layout: shared memory layout of a box, as a Gluon kernel names it; Triton kernels leave it empty.
    """

    __slots__ = ("array", "block", "layout", "shape", "strides", "tf32")

    def __init__(
        self, array: ArrayLike, shape: Shape, strides: Shape, block: Shape, tf32: bool = False, layout: str = ""
    ) -> None:
        assert len(shape) == len(strides) == len(block) <= 5, (shape, strides, block)
        assert is_describable(array, shape, strides), (shape, strides, array.dtype)
        self.array, self.shape, self.strides, self.block, self.tf32 = array, shape, strides, block, tf32
        self.layout = layout

    @property
    def values(self) -> Shape:
        """The kernel parameters that follow the map: shape and strides."""
        return (*self.shape, *self.strides)

    def interpreted(self, pointer: Any) -> Any:
        """The descriptor for Triton's interpreter, with `pointer` instead of the array."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(pointer, list(self.shape), list(self.strides), list(self.block))


def is_descriptor(value: object) -> bool:
    """Whether a kernel argument is a descriptor."""
    return isinstance(value, Descriptor)


def is_describable(array: ArrayLike, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether TMA can address a region: base and strides are multiples of 16 bytes, and the last stride is 1."""
    item = array.dtype.itemsize
    return (
        array.data_ptr() % 16 == 0
        and strides[-1] == 1
        and all(0 < size < 1 << 31 for size in shape)
        and all(st * item % 16 == 0 and 0 < st * item < 1 << 40 for st in strides[:-1])
    )


class Encoder:
    """Makes the tensor maps of one layout and caches the latest by address."""

    def __init__(self, facts: Facts, shape: Shape, strides: Shape, tf32: bool) -> None:
        kind = _TFLOAT32 if tf32 and facts.kind == _FLOAT32 else _TRITON_TYPES.get(facts.kind, facts.kind)
        self.what = f"a tensor map of shape {shape}, strides {strides}, box {facts.box}, type {kind}"
        rank = len(shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
        steps = (ctypes.c_uint64 * rank)(*(stride * facts.item for stride in reversed(strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(facts.box))
        ones = (ctypes.c_uint32 * rank)(*(1,) * rank)
        self._before = (kind, rank)
        self._after = (sizes, steps, box, ones, _NO_INTERLEAVE, facts.swizzle, _L2_128, _FILL_ZERO)
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) * facts.item
        self._small = reach + 1 < 128 << 10
        self._maps: dict[int, bytes] = {}

    def map(self, address: int) -> bytes:
        """The 128 bytes of the map at `address`. Raises DeviceError if the driver refuses the layout."""
        if (encoded := self._maps.get(address)) is not None:
            return encoded
        if len(self._maps) >= MAX_CACHED_MAPS:
            self._maps.pop(next(iter(self._maps)))
        encode, is_old = _entry()
        buffer = (ctypes.c_uint64 * (MAP_BYTES // 8 + 8))()  # the driver requires 64-byte alignment
        at = -(-ctypes.addressof(buffer) // 64) * 64
        code = encode(at, *self._before, address, *self._after)
        if code:
            raise DeviceError(f"{self.what} at {address:#x} failed with error {code}", next="report this as a bug")
        if is_old and self._small:  # these drivers mark regions under 128 KiB wrongly; CUTLASS clears the same bit
            ctypes.c_uint64.from_address(at + 8).value &= ~(1 << 21)
        encoded = self._maps[address] = ctypes.string_at(at, MAP_BYTES)
        return encoded


@functools.cache
def _entry() -> tuple[Callable[..., int], bool]:
    """cuTensorMapEncodeTiled, and whether the driver is 13.1 or older. cuda-python's wrapper does not align maps."""
    from cuda.bindings import driver as cuda

    code, pointer, _ = cuda.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if code or not pointer:
        raise DeviceError("the NVIDIA driver does not support TMA", next="install a driver for CUDA 12.0 or newer")
    u32, address = ctypes.c_uint32, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, address, u32, u32, address, *(address,) * 4, u32, u32, u32, u32)
    return kind(int(pointer)), int(cuda.cuDriverGetVersion()[1]) <= 13010


@functools.lru_cache(4096)
def encoder(facts: Facts, shape: Shape, strides: Shape, tf32: bool) -> Encoder:
    """The cached encoder of a layout."""
    return Encoder(facts, shape, strides, tf32)

"""Values of torch and Genesis side by side: copies of arguments in both libraries, and the comparison of results.

A copy keeps shapes, strides, offsets and shared storage, so that views and in-place functions meet the same memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import genesis

# Relative and absolute tolerance by type: torch's own for float64, twice torch's for shorter types.
TOLERANCES = {
    "float64": (1e-7, 1e-7),
    "complex128": (1e-7, 1e-7),
    "float32": (3e-6, 2e-5),
    "complex64": (3e-6, 2e-5),
    "bfloat16": (1.6e-2, 1e-2),
    "float16": (2e-3, 2e-3),
}


class Absent(Exception):
    """Genesis lacks a name, a type or a constant of torch."""


class Skipped(Exception):
    """Torch itself does not take the arguments, or they are outside what is compared."""


class Copies:
    """Copies of arguments in one library; arguments that share storage share it in the copy."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self.storages: dict[tuple[int, torch.dtype], Any] = {}
        self.tensors: dict[int, Any] = {}
        self.first: Any = None  # the copy of a call's first argument
        self.leaves: list[Any] = []  # tensors that require a gradient, in order

    def __call__(self, value: Any) -> Any:
        """Return the copy. Raises Absent, Skipped."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Size):
            return genesis.Size(value) if self.ours else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self, value))
        if isinstance(value, dict):
            return {key: self(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(self(value.start), self(value.stop), self(value.step))
        return translated(value) if self.ours else value

    def _tensor(self, value: torch.Tensor) -> Any:
        if id(value) in self.tensors:
            return self.tensors[id(value)]
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise Skipped(f"a tensor with {value.layout} on {value.device}")
        if value.ndim > 64:
            raise Skipped("numpy has at most 64 dimensions")
        plain = value.detach().resolve_conj().resolve_neg()
        key = (plain.untyped_storage().data_ptr(), plain.dtype)
        if key not in self.storages or not key[0]:
            whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage()).clone()
            self.storages[key] = ours_of(whole) if self.ours else whole
        base, shape, strides = self.storages[key], tuple(plain.shape), plain.stride()
        is_whole = plain.is_contiguous() and plain.numel() == base.shape[0] and not plain.storage_offset()
        copied = base.view(shape) if is_whole else base.as_strided(shape, strides, plain.storage_offset())
        if self.ours:
            copied = copied.detach()
        if value.requires_grad:
            copied.requires_grad_()
            self.leaves.append(copied)
        if isinstance(value, torch.nn.Parameter):
            copied = (genesis.nn if self.ours else torch.nn).Parameter(copied, value.requires_grad)
            self.leaves[-1:] = [copied] if value.requires_grad else self.leaves[-1:]
        self.tensors[id(value)] = copied
        return copied


def ours_of(value: torch.Tensor) -> Any:
    """Return a tensor of Genesis with the same values. Raises Absent for a type that Genesis lacks."""
    if not hasattr(genesis, _name(value.dtype)):
        raise Absent(f"type {_name(value.dtype)}")
    if value.is_complex():
        return genesis.view_as_complex(genesis.from_numpy(numbers(torch.view_as_real(value.resolve_conj()))))
    return genesis.from_numpy(numbers(value))


def numbers(value: Any) -> np.ndarray:
    """Return the values of a tensor of either library as numpy."""
    value = value.detach()
    if isinstance(value, torch.Tensor):
        value = value.cpu().resolve_conj().resolve_neg()
        value = value.clone() if value._is_zerotensor() else value
        if value.dtype == torch.bfloat16:
            return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()
    return np.asarray(value.cpu().numpy())


def _name(dtype: Any) -> str:
    return str(dtype).split(".")[-1]


_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def translated(value: Any) -> Any:
    """Return torch's type, device, function, module or constant as Genesis has it. Raises Absent."""
    if value in (torch.channels_last, torch.channels_last_3d):
        raise Skipped("a memory format of images")
    if isinstance(value, _CONSTANTS):
        return named(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return genesis.device(str(value))
    if isinstance(value, torch.Generator):
        return named("Generator")().manual_seed(value.initial_seed())
    if isinstance(value, types.BuiltinFunctionType) and hasattr(torch.nn.functional, value.__name__):
        return named(f"nn.functional.{value.__name__}")
    if isinstance(value, torch.nn.TransformerEncoderLayer):
        first = value.linear1
        settings = {"dropout": value.dropout.p, "batch_first": value.self_attn.batch_first}
        settings |= {"bias": first.bias is not None, "activation": translated(value.activation)}
        return named("nn.TransformerEncoderLayer")(
            first.in_features, value.self_attn.num_heads, first.out_features, norm_first=value.norm_first, **settings
        )
    if isinstance(value, torch.nn.Module):
        return named(f"nn.{type(value).__name__}")()
    if isinstance(value, types.FunctionType):
        module = value.__module__ or ""
        if value.__name__ != "<lambda>" and module.startswith("torch.") and "testing" not in module:
            return named(f"{module.removeprefix('torch.')}.{value.__name__}")
        return rebound(value)
    return value


def named(path: str) -> Any:
    """Return what Genesis has under torch's path, such as nn.functional.relu. Raises Absent."""
    value: Any = genesis
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise Absent(f"genesis.{path}") from None
    return value


def rebound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's tests whose global `torch` is Genesis; its helpers are rebound, too."""
    if not isinstance(function, types.FunctionType):
        return function
    replaced: dict[str, Any] = {}
    for name, value in function.__globals__.items():
        if value is torch or value is torch.nn.functional:
            replaced[name] = genesis if value is torch else genesis.nn.functional
    closure = tuple(types.CellType(_rebound_cell(cell.cell_contents)) for cell in function.__closure__ or ())
    bound = types.FunctionType(
        function.__code__, {**function.__globals__, **replaced}, function.__name__, function.__defaults__, closure
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _rebound_cell(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, torch.dtype)):
        return Copies(True)(value)
    if isinstance(value, types.FunctionType):
        return rebound(value)
    return value


def flat(value: Any) -> list[Any]:
    """Return the tensors and numbers of a nested result, in order."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (torch.Size, genesis.Size)):
        return [leaf for each in value for leaf in flat(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in flat(each)]
    return [value]


def difference(theirs: Any, ours: Any, *, values: bool = True, factor: float = 1.0) -> str:
    """Return how Genesis' result differs from torch's, empty if it does not.

    Args:
        theirs: torch's result.
        ours: result of Genesis.
        values: False compares shapes and types only.
        factor: multiplies the tolerances.
    """
    expected, found = flat(theirs), flat(ours)
    if len(expected) != len(found):
        return f"{len(found)} results, torch has {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        text = _difference(one, other, values, factor)
        if text:
            return text
    return ""


def _difference(theirs: Any, ours: Any, values: bool, factor: float) -> str:
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, genesis.Tensor):
            return f"{type(ours).__name__}, torch has a tensor"
        if _name(theirs.dtype) != ours.dtype.name:
            return f"type {ours.dtype.name}, torch has {_name(theirs.dtype)}"
        if tuple(theirs.shape) != tuple(ours.shape):
            return f"shape {tuple(ours.shape)}, torch has {tuple(theirs.shape)}"
        return _unequal(numbers(theirs), numbers(ours), _name(theirs.dtype), factor) if values else ""
    if isinstance(theirs, torch.dtype):
        return "" if _name(theirs) == _name(getattr(ours, "name", ours)) else f"{ours}, torch has {theirs}"
    if isinstance(theirs, torch.Size):
        return "" if tuple(theirs) == tuple(ours) else f"size {tuple(ours)}, torch has {tuple(theirs)}"
    if type(theirs) in (bool, int, float, complex, type(None), str):
        if type(ours) is not type(theirs):
            return f"{type(ours).__name__}, torch has {type(theirs).__name__}"
        if isinstance(theirs, (float, complex)):
            return _unequal(np.asarray(theirs), np.asarray(ours), "float32", factor) if values else ""
        return "" if not values or theirs == ours else f"{ours!r}, torch has {theirs!r}"
    return ""


def _unequal(theirs: np.ndarray, ours: np.ndarray, dtype: str, factor: float) -> str:
    if dtype not in TOLERANCES:
        differ = theirs != ours
    else:
        rtol, atol = TOLERANCES[dtype]
        wide = np.complex128 if "complex" in dtype else np.float64
        theirs, ours = theirs.astype(wide), ours.astype(wide)
        with np.errstate(all="ignore"):
            near = np.isclose(ours, theirs, rtol=rtol * factor, atol=atol * factor, equal_nan=True)
        differ = ~near
    if not differ.any():
        return ""
    place = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(differ)))
    one, other = np.atleast_1d(theirs)[place], np.atleast_1d(ours)[place]
    return f"{int(differ.sum())} of {differ.size} values: {other}, torch has {one}"

"""Loading a state dict: everything is compared first, and only a state that fits is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, from_numpy
from genesis.errors import ModelError, escape
from genesis.functions.transfer import moved
from genesis.op import registry
from genesis.tensor import Tensor

SHOWN = 10  # names in an error; a wrong folder would list thousands


class LoadResult(NamedTuple):
    """Names that the state lacked, and names that the module has no place for."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def listed(names: Sequence[str]) -> str:
    """At most ten names, then how many more there are."""
    shown = ", ".join(escape(n) for n in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _array(name: str, value: Any) -> Array:
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, np.ndarray):
        return from_numpy(value)
    raise ModelError(f"{escape(name)} is a {type(value).__name__}, not a tensor")


def _aliases(targets: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each name all names of the same tensor, itself included."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: by_tensor[id(tensor)] for name, tensor in targets.items()}


def _equal(a: Array, b: Array) -> bool:
    return a is b or np.array_equal(a.numpy(), b.numpy())


def load_state(owner: str, targets: Mapping[str, Tensor], given: Mapping[str, Any], strict: bool) -> LoadResult:
    """Copy `given` into `targets` (cast to their dtypes); see `Module.load_state_dict`."""
    if not isinstance(given, Mapping):
        raise ModelError(f"a state is a dict of tensors by name, not a {type(given).__name__}")
    arrays = {name: _array(name, value) for name, value in given.items()}
    aliases = _aliases(targets)
    missing = [n for n in targets if not any(a in arrays for a in aliases[n])]
    unexpected = [n for n in arrays if n not in targets]
    shapes = [
        f"{escape(n)} is {list(arrays[n].shape)}, expected {list(t.array.shape)}"
        for n, t in targets.items()
        if n in arrays and arrays[n].shape != t.array.shape
    ]
    problems = _counted("missing", missing, listed) + _counted("unexpected", unexpected, listed) if strict else []
    problems += _counted("of the wrong shape", shapes, _listed_shapes)
    if problems:
        raise ModelError(
            f"the state does not fit {owner}: {'; '.join(problems)}",
            next="load the weights of this architecture and these sizes",
        )
    for name in targets:
        first = next((a for a in aliases[name] if a in arrays), name)
        if name in arrays and not _equal(arrays[name], arrays[first]):
            raise ModelError(
                f"{escape(first)} and {escape(name)} are one tied parameter of {owner}, but the state holds two values",
                next="load it into a model with untied weights",
            )
    for name, tensor in targets.items():
        if name in arrays:
            registry["cast"](moved(arrays[name], tensor.device), dtype=tensor.array.dtype, out=tensor.array)
    return LoadResult(missing, unexpected)


def _listed_shapes(lines: Sequence[str]) -> str:
    shown = ", ".join(lines[:SHOWN])  # escaped already
    return shown if len(lines) <= SHOWN else f"{shown} and {len(lines) - SHOWN} more"


def _counted(kind: str, names: Sequence[str], show: Callable[[Sequence[str]], str]) -> list[str]:
    return [f"{len(names)} {kind}: {show(names)}"] if names else []

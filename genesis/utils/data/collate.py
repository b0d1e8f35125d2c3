"""How examples become a batch, and how batches are converted and pinned: one walk through nested containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np

import genesis
from genesis.errors import DTypeError, ShapeError
from genesis.tensor import Tensor

Convert = Callable[[Any], Any]


def _mapping(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `like`, or a dict if that type takes no items."""
    try:
        if isinstance(like, MutableMapping):
            clone = copy.copy(like)
            clone.update(items)
            return clone
        return type(like)(items)
    except TypeError:
        return items


def _sequence(like: Any, items: list[Any]) -> Any:
    """Return a sequence of the type of `like`, or a list if that type takes no items."""
    try:
        if isinstance(like, MutableSequence):
            clone = copy.copy(like)
            for i, item in enumerate(items):
                clone[i] = item
            return clone
        return type(like)(items)
    except TypeError:
        return items


def _is_text(data: Any) -> bool:
    """Whether an array holds texts or objects, or a numpy scalar is a text."""
    if isinstance(data, np.ndarray):
        return data.dtype.kind in "SUO"
    return isinstance(data, np.character)


def default_convert(data: Any) -> Any:
    """Return the data with numpy arrays and scalars as tensors, in nested containers, too; the rest is unchanged."""
    if isinstance(data, np.ndarray | np.generic):
        return data if _is_text(data) else genesis.as_tensor(data)
    if isinstance(data, Mapping):
        return _mapping(data, {key: default_convert(value) for key, value in data.items()})
    return _walk(data, default_convert, list)


def pin_memory(data: Any) -> Any:
    """Return the data with tensors in pinned memory; objects with a method `pin_memory` provide their own copy."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, Mapping):
        return _mapping(data, {key: pin_memory(value) for key, value in data.items()})
    return _walk(data, pin_memory, type(data))


def _walk(data: Any, convert: Convert, tuples: Callable[[Any], Any]) -> Any:
    """Convert the items of a sequence that is not a text; `tuples` makes the result of a plain tuple."""
    if isinstance(data, str | bytes | Tensor) or not isinstance(data, Sequence):
        return data
    items = [convert(each) for each in data]
    if isinstance(data, tuple):
        return type(data)(*items) if hasattr(data, "_fields") else tuples(items)
    return _sequence(data, items)


def default_collate(batch: Any) -> Any:
    """Stack a list of examples: tensors, arrays and numbers along a new first dimension, containers item by item.

    Texts stay a list, and tuples become a list of columns.

    >>> from genesis.utils.data import default_collate
    >>> default_collate([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}])
    {'x': tensor([1, 2]), 'y': ['a', 'b']}

    Raises:
        DTypeError: for values of other types.
        ShapeError: for sequences of different lengths.
    """
    first = batch[0]
    if isinstance(first, Tensor):
        return genesis.stack(list(batch), 0)
    if isinstance(first, np.ndarray) and not _is_text(first):
        return genesis.stack([genesis.as_tensor(each) for each in batch], 0)
    if isinstance(first, np.bool_ | np.number):
        return genesis.as_tensor(np.array(batch))
    if isinstance(first, float | int):
        return genesis.tensor(batch, dtype=genesis.float64 if isinstance(first, float) else None)
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return _mapping(first, {key: default_collate([each[key] for each in batch]) for key in first})
    if not isinstance(first, Sequence):
        kind = first.dtype if isinstance(first, np.ndarray) else type(first).__name__
        raise DTypeError(f"default_collate got examples with {kind}", next="pass a collate_fn")
    named = hasattr(first, "_fields")
    if not named and any(len(each) != len(first) for each in batch):
        raise ShapeError(f"a batch has sequences of {[len(each) for each in batch]} items", next="pass a collate_fn")
    columns = [default_collate(column) for column in zip(*batch, strict=False)]
    if isinstance(first, tuple):
        return type(first)(*columns) if named else columns
    return _sequence(first, columns)

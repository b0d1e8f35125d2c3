"""Lists and dicts of parameters that a module registers. Other values are stored unchanged."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from genesis.errors import DTypeError, IndexRangeError, UsageError
from genesis.nn.module import Module
from genesis.nn.parameter import Parameter
from genesis.tensor import Tensor


class _Values(Module):
    """Named values, in order; tensors become parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, None] = {}

    def _put(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value if isinstance(value, Parameter) else Parameter(value)
            if key not in self._keys:
                self._check_name(key, self._parameters)
        setattr(self, key, value)
        self._keys[key] = None

    def __len__(self) -> int:
        return len(self._keys)

    def extra_repr(self) -> str:
        lines = []
        for key in self._keys:
            value = getattr(self, key)
            text = f"Object of type: {type(value).__name__}"
            if isinstance(value, Tensor):
                kind = value.dtype if isinstance(self, ParameterList) else value.type()
                place = f" ({value.device})" if value.is_cuda else ""
                text = f"Parameter containing: [{kind} of size {'x'.join(map(str, value.shape))}{place}]"
            lines.append(f"  ({key}): {text}")
        return "\n".join(lines)


class ParameterList(_Values):
    """A list of values; its tensors become parameters named "0", "1", …"""

    def __init__(self, values: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.extend(() if values is None else values)

    def _name(self, index: Any) -> str:
        index, count = operator.index(index), len(self)
        if not -count <= index < count:
            raise IndexRangeError(f"value {index} does not exist: the list has {count}")
        return str(index % count)

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):
            return type(self)(list(self)[idx])
        return getattr(self, self._name(idx))

    def __setitem__(self, idx: int, param: Any) -> None:
        self._put(self._name(idx), param)

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, key) for key in self._keys])

    def __iadd__(self, parameters: Iterable[Any]) -> Self:
        return self.extend(parameters)

    def append(self, value: Any) -> Self:
        """Add a value at the end."""
        self._put(str(len(self)), value)
        return self

    def extend(self, values: Iterable[Any]) -> Self:
        """Add several values at the end."""
        if isinstance(values, Tensor) or not hasattr(values, "__iter__"):
            raise DTypeError(f"a ParameterList is extended by a {type(values).__name__}", next="pass a list")
        for value in values:
            self.append(value)
        return self


class ParameterDict(_Values):
    """A dict of values; its tensors become parameters. A plain dict is added in the order of its sorted keys."""

    def __init__(self, parameters: Any = None) -> None:
        super().__init__()
        self.update(() if parameters is None else parameters)

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str):
            raise DTypeError(f"the key {key!r} is not a text")
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise DTypeError(f"the key {key!r} is not a text")
        self._put(key, value)

    def __delitem__(self, key: str) -> None:
        del self._keys[key]
        delattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __or__(self, other: ParameterDict) -> ParameterDict:
        joined = self.copy()
        joined.update(other)
        return joined

    def __ror__(self, other: ParameterDict) -> ParameterDict:
        return ParameterDict(other) | self

    def __ior__(self, other: ParameterDict) -> Self:
        self.update(other)
        return self

    def update(self, parameters: Any) -> None:
        """Add or replace the values of a mapping, or of pairs of key and value."""
        if not hasattr(parameters, "__iter__"):
            raise DTypeError(f"a ParameterDict is updated by a {type(parameters).__name__}", next="pass a dict")
        if type(parameters) is dict:
            parameters = sorted(parameters.items())
        elif isinstance(parameters, (Mapping, ParameterDict)):
            parameters = list(parameters.items())
        for pair in parameters:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UsageError(f"a ParameterDict takes pairs of key and value, got {pair!r}")
            self[pair[0]] = pair[1]

    def copy(self) -> ParameterDict:
        """Return a dict of the same values."""
        return ParameterDict(list(self.items()))

    def fromkeys(self, keys: Iterable[str], default: Any = None) -> ParameterDict:
        """Return a dict with one value for all keys."""
        return ParameterDict([(key, default) for key in keys])

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if there is none."""
        return getattr(self, key) if key in self else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a value, which is `default` if there was none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str) -> Any:
        """Remove a value and return it."""
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last value and return it with its key."""
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Remove all values."""
        for key in list(self):
            del self[key]

    def keys(self) -> Iterable[str]:
        """The keys, in order."""
        return self._keys.keys()

    def values(self) -> Iterable[Any]:
        """The values, in order."""
        return (self[key] for key in self._keys)

    def items(self) -> Iterable[tuple[str, Any]]:
        """The keys and values, in order."""
        return ((key, self[key]) for key in self._keys)

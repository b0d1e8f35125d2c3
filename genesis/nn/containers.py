"""Modules that hold modules: Sequential, ModuleList, ModuleDict."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from genesis.errors import IndexRangeError, UsageError
from genesis.nn.module import Module


class _Numbered(Module):
    """Submodules named "0", "1", …"""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def _name(self, index: int) -> str:
        index, count = operator.index(index), len(self._modules)
        if not -count <= index < count:
            raise IndexRangeError(f"module {index} of {count}")
        return str(index % count)

    def append(self, module: Module) -> Any:
        """Add a module at the end."""
        self.add_module(str(len(self._modules)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> Any:
        """Add several modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> Any:
        """Add a module before `index`."""
        order: list[Module | None] = list(self._modules.values())
        order.insert(index, module)
        self.append(module)  # checks it and makes room
        self._modules.update({str(i): m for i, m in enumerate(order)})
        return self

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            chosen = list(self._modules.values())[index]
            return type(self)(*chosen) if isinstance(self, Sequential) else type(self)(chosen)  # type: ignore[arg-type]
        return self._modules[self._name(index)]

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, self._name(index), module)

    def __delitem__(self, index: int | slice) -> None:
        order: list[Module | None] = list(self._modules.values())
        del order[index]
        self._modules.clear()
        self._modules.update({str(i): m for i, m in enumerate(order)})

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __contains__(self, module: object) -> bool:
        return any(m is module for m in self._modules.values())


class Sequential(_Numbered):
    """Calls its modules, or those of one mapping of names to modules, in order, each on the result before it."""

    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(modules)

    def _name(self, index: int) -> str:
        return list(self._modules)[int(super()._name(index))]

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """A list of modules, whose parameters are found."""


class ModuleDict(Module):
    """A dict of modules, whose parameters are found."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> None:
        """Add or replace modules by name."""
        for name, module in modules.items():
            self[name] = module

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules:
            raise UsageError(f"no module {name!r}; there are {', '.join(self._modules) or 'none'}")
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._modules.keys()

    def values(self) -> Iterable[Any]:
        """The modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names with modules."""
        return self._modules.items()

    def pop(self, name: str) -> Any:
        """Remove a module and return it."""
        module = self[name]
        del self[name]
        return module

    def clear(self) -> None:
        """Remove all modules."""
        self._modules.clear()

"""What a function reads besides its arguments: closure cells, globals, attributes of modules and objects.

`State` visits the objects that a function's code names, and what they refer to. It collects the tensors that the
function can reach, and guards: facts under which a trace is valid. If one changes, the function is traced again.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genesis.autograd.record import TensorBase
from genesis.backend import Device
from genesis.compiler.trace import Break
from genesis.dtypes import DType
from genesis.nn.hooks import changes, everywhere
from genesis.nn.module import Module
from genesis.random import Generator, default_generator

_PACKAGE = str(Path(__file__).parents[1])
# Builtins and standard modules whose calls have effects on the host that a replay would leave out.
EFFECTS = frozenset((
    "print", "input", "open", "exec", "eval", "breakpoint", "globals", "locals", "vars", "dir", "id", "setattr",
    "delattr", "__import__",
))  # fmt: skip
EFFECT_MODULES = frozenset((
    "random", "time", "os", "sys", "logging", "datetime", "secrets", "subprocess", "warnings", "posix", "nt", "io",
    "_io", "uuid", "threading", "gc", "inspect",
))  # fmt: skip
# Attributes of tensors that guards do not check; an argument's stand-in in a trace lacks them.
TENSOR_STATE = frozenset(("grad", "grad_fn", "is_leaf", "retain_grad", "retains_grad", "_base"))
# Types without Python code that guards can check; an instance of any other such type is a break.
GUARDED = (object, list, tuple, dict, types.SimpleNamespace, BaseException)
ATOMS = (int, float, complex, bool, str, bytes, type(None), DType, Device, type(Ellipsis), slice, range)
LIMIT = 20_000  # objects; a function that reaches more is not traced
_COMPARED = frozenset((int, float, complex, bool, str, bytes, slice, range, DType, Device))
_Guard = tuple[Callable[..., Any], tuple[Any, ...], Any]  # a function, its arguments, and what it returned


def _all_hold(guards: list[_Guard]) -> bool:
    """Whether the functions still return the same objects, or numbers or strings of the same types that look equal."""
    try:
        for read, arguments, then in guards:
            now = read(*arguments)
            if now is not then and (
                type(now) is not type(then) or type(now) not in _COMPARED or repr(now) != repr(then)  # -0.0 is not 0.0
            ):
                return False
    except (AttributeError, ValueError):  # deleted
        return False
    return True


class State:
    """The facts that a function depends on besides its arguments.

    Args:
        function: the function or module.
        objects: arguments that are neither tensors nor numbers, such as the `self` of a method.

    Attributes:
        tensors: tensors that the function can reach, in the order in which they were found.
    """

    def __init__(self, function: Any, objects: Sequence[Any]) -> None:
        self.tensors: list[TensorBase] = []
        self._guards: list[_Guard] = []
        self._module_guards: list[_Guard] = []  # checked only when some module changed
        self._copies: list[tuple[Any, Any]] = []  # lists and dicts that the function reads, with their contents
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # keeps the objects alive whose ids are in `_seen`
        for table in everywhere.values():
            self._visit_hooks(table, frozenset())
        self._visit(function, frozenset())
        for x in objects:
            self._visit(x, names_of(function))
        self.version = changes.count
        self._facts = [_facts(t) for t in self.tensors]

    def tensors_hold(self) -> bool:
        """Whether a trace left the tensors' arrays, gradients and graph nodes unchanged."""
        pairs = zip(self.tensors, self._facts, strict=True)
        return not any(_facts(t)[i] is not facts[i] for t, facts in pairs for i in range(4))

    def holds(self) -> bool:
        """Whether no guarded fact has changed."""
        if not _all_hold(self._guards):
            return False
        if self.version != changes.count:
            if not _all_hold(self._module_guards):
                return False
            self.version = changes.count
        return True

    def restore(self) -> None:
        """Undo the changes of a trace that failed, because the function will run again."""
        for t, facts in zip(self.tensors, self._facts, strict=True):
            t.array, t._grad, t._requires_grad, t.node, t.output, t.history, t._view_history = facts
        for holder, then in self._copies:
            if isinstance(holder, list):
                holder[:] = then
            elif len(holder) != len(then) or any(holder.get(key, _ABSENT) is not x for key, x in then.items()):
                holder.clear()
                holder.update(then)
        for read, (owner, *rest), then in self._guards:
            if read is dict.get and owner.get(rest[0], _ABSENT) is not then:
                owner[rest[0]] = then
            elif read is getattr and not isinstance(owner, type):
                setattr(owner, rest[0], then)

    # --- The walk -----------------------------------------------------------------------------------------------------

    def _new(self, x: Any) -> bool:
        """Whether an object is seen for the first time."""
        if id(x) in self._seen:
            return False
        self._seen.add(id(x))
        self._kept.append(x)
        if len(self._kept) > LIMIT:
            raise Break(f"reaches more than {LIMIT:,} objects")
        return True

    def _guard(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Guard what `read` returns for these arguments, and return it."""
        value = read(*arguments)
        self._guards.append((read, arguments, value))
        return value

    def _guard_module(self, holder: dict[Any, Any], key: Any) -> None:
        self._module_guards.append((dict.get, (holder, key, _ABSENT), holder[key]))

    def _visit(self, x: Any, names: frozenset[str]) -> None:
        """Add the guards of an object that code with these names reads; the reference to it is guarded already."""
        if isinstance(x, ATOMS) or x is None:
            return
        if isinstance(x, TensorBase):
            if self._new(x):
                self.tensors.append(x)
        elif isinstance(x, types.MethodType):
            self._visit(x.__func__, names)
            self._visit(x.__self__, names | names_of(x.__func__))
        elif isinstance(x, types.FunctionType):
            self._visit_function(x)
        elif isinstance(x, Module):
            self._visit_module(x)
        elif isinstance(x, types.ModuleType):
            self._visit_namespace(x, names)
        elif isinstance(x, (list, tuple, dict)):
            self._visit_items(x, names)
        elif isinstance(x, Generator) and x is not default_generator:
            raise Break("draws from a generator of its own")
        elif isinstance(x, np.ndarray):
            raise Break("reads a numpy array, whose values no guard sees")
        elif isinstance(x, types.BuiltinFunctionType):
            if not isinstance(x.__self__, types.ModuleType):
                self._visit(x.__self__, names)
            elif x.__self__.__name__ in EFFECT_MODULES:
                raise Break(f"calls {x.__self__.__name__}.{x.__name__}, whose effects a trace cannot repeat")
        elif isinstance(x, functools.partial):
            self._visit_items((x.func, x.args, x.keywords), names)
        elif isinstance(x, type):
            self._visit_type(x, names)
        elif isinstance(x, Generator) or (_is_own(type(x)) and not type(x).__module__.startswith("numpy.random")):
            return
        elif hasattr(x, "__wrapped__") and callable(x):
            self._visit(x.__wrapped__, names)
        else:
            self._visit_object(x, names)

    def _visit_function(self, function: types.FunctionType) -> None:
        if _is_own(function) or not self._new(function):
            return
        if _is_standard(function.__code__.co_filename):
            if function.__module__.partition(".")[0] in EFFECT_MODULES:
                raise Break(f"calls {function.__module__}.{function.__name__}, whose effects a trace cannot repeat")
            return
        names = names_of(function)
        if names & TENSOR_STATE:
            where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
            raise Break(f"uses .{min(names & TENSOR_STATE)} of tensors", where)
        for name in sorted(names):
            if name in function.__globals__:
                self._visit(self._guard(dict.get, function.__globals__, name, _ABSENT), names)
            elif name in EFFECTS and hasattr(builtins, name):
                raise Break(f"calls {name}()", f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}")
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # a cell is empty until its variable has a value
                self._visit(self._guard(getattr, cell, "cell_contents"), names)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, names)

    def _visit_namespace(self, module: types.ModuleType, names: frozenset[str]) -> None:
        top = module.__name__.partition(".")[0]
        if top in EFFECT_MODULES and any(hasattr(module, name) for name in names):
            raise Break(f"uses the module {module.__name__}, whose effects a trace cannot repeat", module.__name__)
        path = getattr(module, "__file__", None) or ""
        if not path or path.startswith(_PACKAGE) or top in ("numpy", "triton") or _is_standard(path):
            return
        for name in sorted(names):
            if name in vars(module):
                self._visit(self._guard(dict.get, vars(module), name, _ABSENT), names)

    def _visit_module(self, module: Module) -> None:
        for each in module.modules():
            if not self._new(each):
                continue
            names = frozenset[str]()
            if not _is_own(type(each)):
                names = self._visit_type(type(each), frozenset(("forward",)))
            self._copies += [(x, dict(x)) for x in (vars(each), each._parameters, each._buffers, each._modules)]
            for name, value in vars(each).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    self._module_guards.append((len, (value,), len(value)))
                    for key, part in value.items():
                        self._guard_module(value, key)
                        if isinstance(part, TensorBase) and self._new(part):
                            self.tensors.append(part)
                elif name.endswith("_hooks") and isinstance(value, dict):
                    self._visit_hooks(value, names)
                else:
                    self._guard_module(vars(each), name)
                    if name in names or "getattr" in names or isinstance(value, (TensorBase, list, tuple, dict)):
                        self._visit(value, names)

    def _visit_hooks(self, table: dict[int, Any], names: frozenset[str]) -> None:
        self._guard(len, table)
        for key, hook in table.items():
            self._guard_module(table, key)
            self._visit(hook, names)

    def _visit_items(self, x: Any, names: frozenset[str]) -> None:
        """Guard the items of a list or dict, and visit them; a tuple needs no guards."""
        if not self._new(x):
            return
        if not isinstance(x, tuple):
            self._copies.append((x, x.copy()))
            self._guard(len, x)
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            if isinstance(x, dict):
                self._guard(dict.get, x, key, _ABSENT)
            elif isinstance(x, list):
                self._guard(list.__getitem__, x, key)
            self._visit(value, names)

    def _visit_object(self, x: Any, names: frozenset[str]) -> None:
        """Guard the attributes of a plain object that the code names, and visit the methods that it calls."""
        if not self._new(x):
            return
        fields = getattr(x, "__dict__", {})
        kind = type(x)
        if kind.__module__.partition(".")[0] in EFFECT_MODULES or any(
            base not in GUARDED and base.__flags__ & _IMMUTABLE for base in kind.__mro__
        ):
            raise Break(f"uses a {kind.__name__}, whose changes no guard sees")
        self._guard(len, fields)
        self._copies.append((fields, dict(fields)))
        names = self._visit_type(kind, names)
        for name in sorted(fields if "getattr" in names else names):
            if name in fields:
                self._visit(self._guard(dict.get, fields, name, _ABSENT), names)
            elif name in _slots(kind) and hasattr(x, name):
                self._visit(self._guard(getattr, x, name), names)

    def _visit_type(self, kind: type, names: frozenset[str]) -> frozenset[str]:
        """Visit the methods of a class that the code names or Python calls, and guard the attributes that it names.

        Returns `names` together with the names in those methods.
        """
        if _is_own(kind) or kind.__flags__ & _IMMUTABLE:
            return names
        special = {n for each in kind.__mro__ if not _is_own(each) for n in vars(each) if n.startswith("__")}
        found: list[types.FunctionType] = []
        for function in methods_of(type(kind), frozenset(("__call__",))):
            self._visit_function(function)
        while fresh := [f for f in methods_of(kind, names | special) if f not in found]:
            for function in fresh:
                self._visit_function(function)
                names = names | names_of(function)
            found += fresh
        for name in sorted(names - {"__class__", "__dict__"} - _slots(kind)):
            value = getattr(kind, name, None)
            if value is not None and not callable(value) and not isinstance(value, property):
                self._visit(self._guard(getattr, kind, name), names)
        return names


def _facts(t: TensorBase) -> tuple[Any, ...]:
    return (t.array, t._grad, t._requires_grad, t.node, t.output, t.history, t._view_history)


_ABSENT = object()
_STANDARD = str(Path(types.__file__).parent)
_IMMUTABLE = 1 << 8  # a class that Python code does not define


def _slots(kind: type) -> set[str]:
    return {name for each in kind.__mro__ for name in vars(each).get("__slots__", ())}


def _is_standard(path: str) -> bool:
    return path.startswith((_STANDARD, "<frozen")) and "site-packages" not in path


def _is_own(x: Any) -> bool:
    """Whether a function or class belongs to Genesis, whose code reads no state of the user's."""
    return str(getattr(x, "__module__", "")).partition(".")[0] in ("genesis", "genesis_models", "triton", "numpy")


def methods_of(kind: type, names: frozenset[str]) -> Iterator[types.FunctionType]:
    """The methods of a class that are named; the package's own do not count."""
    for name in sorted(names):
        function = getattr(kind, name, None)
        if isinstance(function, property):
            function = function.fget
        function = getattr(function, "__func__", function)  # of a class method
        if isinstance(function, types.FunctionType) and not _is_own(function):
            yield function


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of globals and attributes in the code of a function and of the functions inside it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return frozenset()
    found: set[str] = set()
    stack = [code]
    while stack:
        each = stack.pop()
        found.update(each.co_names)
        stack += [c for c in each.co_consts if isinstance(c, types.CodeType)]
    return frozenset(found)

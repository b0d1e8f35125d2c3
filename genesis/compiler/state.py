"""What a function reads besides its arguments: closure cells, globals, attributes of modules and objects.

`State` visits the objects that a function's code names, and what they refer to. It collects the tensors that the
function can reach, and guards: facts under which a trace is valid. If one changes, the function is traced again.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from genesis.autograd.record import TensorBase
from genesis.backend import Device
from genesis.compiler.trace import Break
from genesis.complexes import ComplexTensor
from genesis.dtypes import DType
from genesis.nn.hooks import changes, everywhere
from genesis.nn.module import Module
from genesis.random import Generator, default_generator

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
# Functions that look up names which the code computes: all attributes of an object count as read.
DYNAMIC = frozenset(("getattr", "attrgetter", "methodcaller"))
# Types without Python code that guards can check; an instance of any other such type is a break.
GUARDED = (
    object, list, tuple, dict, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace, BaseException,
)  # fmt: skip
ATOMS = (int, float, complex, bool, str, bytes, type(None), DType, Device, type(Ellipsis), slice, range)
LIMIT = 20_000  # objects; a function that reaches more is not traced
_Guard = tuple[Callable[..., Any], tuple[Any, ...], Any]  # a function, its arguments, and what it returned


def _all_hold(guards: list[_Guard]) -> bool:
    """Whether the functions still return the same objects, or numbers or strings of the same types that look equal."""
    try:
        for read, arguments, then in guards:
            now = read(*arguments)
            # Digits are compared because -0.0 equals 0.0.
            if now is not then and (type(now) is not type(then) or type(now) not in ATOMS or repr(now) != repr(then)):
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
        self._names = {"forward"}  # in all code that is found; any of it may look them up in any object
        known = 0
        while known < len(self._names):  # the walk finds code, and code adds names
            known = len(self._names)
            self.tensors: list[TensorBase] = []
            self._guards: list[_Guard] = []
            self._module_guards: list[_Guard] = []  # checked only when some module changed
            self._copies: list[tuple[Any, Any]] = []  # lists and dicts that the function reads, with their contents
            self._seen: set[int] = set()
            self._kept: list[Any] = []  # keeps the objects alive whose ids are in `_seen`
            for table in everywhere.values():
                self._guard_items(table, self._module_guards)
            for x in (*(hook for table in everywhere.values() for hook in table.values()), function, *objects):
                self._visit(x)
        self.version = changes.count
        self._facts = [tensor_facts(t) for t in self.tensors]

    def tensors_hold(self) -> bool:
        """Whether a trace left the tensors' arrays, gradients and graph nodes unchanged."""
        pairs = zip(self.tensors, self._facts, strict=True)
        return not any(tensor_facts(t)[i] is not facts[i] for t, facts in pairs for i in range(4))

    def holds(self) -> bool:
        """Whether no guarded fact has changed."""
        count = changes.count
        if self.version != count and _all_hold(self._module_guards):
            self.version = count
        return self.version == count and _all_hold(self._guards)

    def restore(self) -> None:
        """Undo the changes of a trace that failed, because the function will run again."""
        for t, facts in zip(self.tensors, self._facts, strict=True):
            for name, value in zip(_FACTS, facts, strict=True):
                setattr(t, name, value)
        for holder, then in self._copies:
            if isinstance(holder, list):
                holder[:] = then
            elif len(holder) != len(then) or any(holder.get(key, _ABSENT) is not x for key, x in then.items()):
                holder.clear()
                holder.update(then)
        for read, (owner, *rest), then in self._guards:
            if then is _ABSENT:
                owner.pop(rest[0], None)
            elif read is dict.get and owner.get(rest[0], _ABSENT) is not then:
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

    def _guard_items(self, x: dict[Any, Any], guards: list[_Guard]) -> None:
        """Guard all entries of a dict and their order."""
        self._copies.append((x, dict(x)))
        guards.append((_order, (x,), _order(x)))
        guards += [(dict.get, (x, key, _ABSENT), value) for key, value in x.items()]

    def _visit(self, x: Any) -> None:
        """Guard what the code may read of an object, and visit it. The reference to the object is guarded already."""
        if isinstance(x, ATOMS):
            return
        if isinstance(x, ComplexTensor):
            self._visit(x.pairs)
        elif isinstance(x, TensorBase):
            if self._new(x):
                self.tensors.append(x)
        elif isinstance(x, types.MethodType):
            self._visit_items((x.__func__, x.__self__))
        elif isinstance(x, types.FunctionType):
            self._visit_function(x)
        elif isinstance(x, Module):
            self._visit_module(x)
        elif isinstance(x, types.ModuleType):
            top = x.__name__.partition(".")[0]
            if top in EFFECT_MODULES and any(hasattr(x, name) for name in self._names):
                raise Break(f"uses the module {x.__name__}, whose effects a trace cannot repeat", x.__name__)
            if self._new(x):
                self._visit_fields(vars(x), False)
        elif isinstance(x, np.ndarray):
            raise Break("reads a numpy array, whose values no guard sees")
        elif isinstance(x, types.BuiltinFunctionType):
            if not isinstance(x.__self__, types.ModuleType):
                self._visit(x.__self__)
            elif x.__self__.__name__ in EFFECT_MODULES:
                raise Break(f"calls {x.__self__.__name__}.{x.__name__}, whose effects a trace cannot repeat")
        elif isinstance(x, functools.partial):
            self._visit_items((x.func, x.args, x.keywords))
        elif isinstance(x, type):
            self._visit_type(x)
        elif isinstance(x, property):
            self._visit(x.fget)
        elif isinstance(x, Generator) and x is not default_generator:
            raise Break("draws from a generator of its own")
        elif _is_own(type(x)) and not isinstance(x, tuple) and not type(x).__module__.startswith("numpy.random"):
            return
        elif hasattr(x, "__wrapped__") and callable(x):
            self._visit(x.__wrapped__)
        elif type(x) in (list, tuple, dict):
            self._visit_items(x)
        elif not (hasattr(type(x), "__get__") and type(x).__flags__ & _IMMUTABLE):  # not a method of a type like str
            self._visit_object(x)

    def _visit_fields(self, fields: dict[str, Any], is_every: bool) -> None:
        """Guard and visit the attributes of an object that the code names, or every one."""
        for name in sorted(fields if is_every else fields.keys() & self._names):
            self._visit(self._guard(dict.get, fields, name, _ABSENT))

    def _visit_function(self, function: types.FunctionType) -> None:
        if _is_own(function) or not self._new(function):
            return
        names = names_of(function)
        self._names |= names
        path = function.__code__.co_filename
        if path.startswith((_STANDARD, "<frozen")) and "site-packages" not in path:
            if function.__module__.partition(".")[0] in EFFECT_MODULES:
                raise Break(f"calls {function.__module__}.{function.__name__}, whose effects a trace cannot repeat")
            return
        code = self._guard(getattr, function, "__code__")
        line = f"{code.co_filename}:{code.co_firstlineno}"
        if names & TENSOR_STATE:
            raise Break(f"uses .{min(names & TENSOR_STATE)}, which no guard sees", line)
        assigned = _assigned(function)
        for name in sorted(names):
            if name in function.__globals__ or name in assigned or hasattr(builtins, name):
                value = self._guard(dict.get, function.__globals__, name, _ABSENT)
                if value is _ABSENT and name in EFFECTS:
                    raise Break(f"calls {name}()", line)
                self._visit(value)
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # a cell is empty until its variable has a value
                self._visit(self._guard(getattr, cell, "cell_contents"))
        for name in ("__defaults__", "__kwdefaults__"):
            self._visit(self._guard(getattr, function, name))
        self._guard(len, function.__dict__)
        self._visit_fields(function.__dict__, False)

    def _visit_module(self, module: Module) -> None:
        for each in module.modules():
            if not self._new(each):
                continue
            self._visit_type(type(each))
            self._guard_items(vars(each), self._module_guards)
            for name, value in vars(each).items():
                if name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks"):
                    self._guard_items(value, self._module_guards)
                    for part in value.values() if name != "_modules" else ():
                        self._visit(part)
                elif self._names & {name, *DYNAMIC} or isinstance(value, (TensorBase, list, tuple, dict)):
                    self._visit(value)

    def _visit_items(self, x: Any) -> None:
        """Guard the items of a list or dict and their order, and visit them; a tuple needs no guards."""
        if not self._new(x):
            return
        if isinstance(x, dict):
            self._guard_items(x, self._guards)
        elif isinstance(x, list):
            self._copies.append((x, list(x)))
            self._guards += [(len, (x,), len(x)), *((list.__getitem__, (x, i), value) for i, value in enumerate(x))]
        for value in tuple(x.values() if isinstance(x, dict) else x):
            self._visit(value)

    def _visit_object(self, x: Any) -> None:
        """Guard and visit an object's class, attributes, slots and items."""
        if isinstance(x, (list, tuple, dict)):
            self._visit_items(x)
        elif not self._new(x):
            return
        kind = type(x)
        if kind.__module__.partition(".")[0] in EFFECT_MODULES or any(
            base not in GUARDED and base.__flags__ & _IMMUTABLE for base in kind.__mro__
        ):
            raise Break(f"uses a {kind.__name__}, whose changes no guard sees")
        self._visit_type(kind)
        fields = getattr(x, "__dict__", {})
        self._copies.append((fields, dict(fields)))
        self._guard(len, fields)
        self._visit_fields(fields, bool(self._names & DYNAMIC))
        slots = {name for each in kind.__mro__ for name in vars(each).get("__slots__", ())}
        for name in sorted(slots & self._names - fields.keys()):
            if hasattr(x, name):
                self._visit(self._guard(getattr, x, name))

    def _visit_type(self, kind: type) -> None:
        """Guard what the code, or Python itself, may look up in a class, its bases and its metaclass, and visit it."""
        of_class: type = type(kind)
        for each in (*kind.__mro__, *of_class.__mro__):
            if _is_own(each) or each.__flags__ & _IMMUTABLE or not self._new(each):
                continue
            self._guard(len, vars(each))
            for name, value in vars(each).items():
                value = getattr(value, "__func__", value)  # of a static or class method
                if name in self._names or (name.startswith("__") and isinstance(value, types.FunctionType)):
                    self._guard(types.MappingProxyType.get, vars(each), name, _ABSENT)
                    self._visit(value)


_FACTS = ("array", "_grad", "_requires_grad", "node", "output", "history", "_view_history")
tensor_facts = attrgetter(*_FACTS)
_ABSENT = object()
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_STANDARD = str(Path(types.__file__).parent)
_IMMUTABLE = 1 << 8  # a class that Python code does not define


def _order(x: dict[Any, Any]) -> int:
    return hash(tuple(x))


def _is_own(x: Any) -> bool:
    """Whether a function or class belongs to Genesis, whose code reads no state of the user's."""
    return str(getattr(x, "__module__", "")).partition(".")[0] in ("genesis", "genesis_models", "triton", "numpy")


def names_of(function: types.FunctionType) -> set[str]:
    """The names of globals and attributes in the code of a function and of the functions inside it, and its strings."""
    codes = list(_codes(function.__code__))
    strings = {c for each in codes for c in each.co_consts if isinstance(c, str) and c.isidentifier()}
    return strings.union(*(each.co_names for each in codes))


def _assigned(function: types.FunctionType) -> set[str]:
    """The global variables that the same code assigns."""
    codes = (each for each in _codes(function.__code__) if _STORE_GLOBAL in each.co_code[::2])
    return {step.argval for each in codes for step in dis.get_instructions(each) if step.opcode == _STORE_GLOBAL}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)

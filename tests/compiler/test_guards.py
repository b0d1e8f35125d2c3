"""Whatever a compiled function reads may change between calls: it is traced again, or runs in Python."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from random import random
from typing import Any

import numpy as np
import pytest
from numpy.random import rand

import genesis
from genesis.errors import UsageError
from genesis.nn.modules.module import register_module_forward_hook
from tests.compiler.test_compile import equal, ramp

FACTOR = 1.0
ARRAY, SET, DEQUE, BYTES, COUNT = np.ones(3), {"a"}, collections.deque([1.0]), bytearray(b"\1"), itertools.count(1)
NUMBERS = array.array("f", [1.0])
TABLE: dict[str, Any] = {"a": {"b": [1.0]}}
SPACE = types.SimpleNamespace(inner=types.SimpleNamespace(value=1.0))


class Maker:
    def __init__(self) -> None:
        self.value = FACTOR


class Meta(type):
    def __call__(cls) -> Any:
        return FACTOR


class Made(metaclass=Meta):
    pass


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Special:
    kind: Any = 1.0
    items: Any = [1.0]  # noqa: RUF012

    @staticmethod
    def static() -> float:
        return FACTOR

    @classmethod
    def of_class(cls) -> Any:
        return cls.kind

    @property
    def computed(self) -> float:
        return FACTOR

    def __getitem__(self, i: int) -> float:
        return FACTOR

    def __len__(self) -> int:
        return int(FACTOR)

    def __iter__(self) -> Iterator[float]:
        return iter([FACTOR])

    def __contains__(self, x: object) -> bool:
        return FACTOR > 1

    def __enter__(self) -> float:
        return FACTOR

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> float:
        return FACTOR


class Base:
    kind = 1.0

    def scaled(self, x: Any) -> Any:
        return x * FACTOR


class Derived(Base):
    class Inner:
        value = 1.0

    def scaled(self, x: Any) -> Any:
        return super().scaled(x) + 1


class Table(dict[str, float]):
    def scaled(self, x: Any) -> Any:
        return x * FACTOR * self["a"]


class Chain(genesis.nn.Module):
    table: Any = [1.0]  # noqa: RUF012

    def forward(self, x: Any) -> Any:
        return self.first(x)

    def first(self, x: Any) -> Any:
        return self.second(x) * self.table[0]

    def second(self, x: Any) -> Any:
        return x * FACTOR


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args) * FACTOR

    return inner


@scaled
def decorated(x: Any) -> Any:
    return x


def entered(x: Any) -> Any:
    with SPECIAL as factor:
        return x * factor


def with_attribute(x: Any, factor: float = 1.0, *, more: float = 1.0) -> Any:
    return x * factor * more * with_attribute.scale  # type: ignore[attr-defined]


def in_order(x: Any) -> Any:
    for value in ORDERED.values():
        x = x * value + 1
    return x


def reads_pair(x: Any) -> Any:
    def second(x: Any) -> Any:
        return x * PAIR.second

    return second(x) * PAIR.first


with_attribute.scale = 1.0  # type: ignore[attr-defined]
ORDERED, PAIR, ZERO = {"a": 2.0, "b": 3.0}, types.SimpleNamespace(first=1.0, second=1.0), 0.0
DERIVED, DICT = Derived(), Table(a=2.0)
SPECIAL, SLOTTED = Special(), Slotted()
PARTIAL = functools.partial(lambda x, y: x * y * FACTOR, 2.0)


def set_factor() -> None:
    globals()["FACTOR"] = FACTOR + 1


GELU = genesis.nn.functional.gelu
WEIGHT, CHAIN, TANH, HOOKS = ramp(3), Chain(), genesis.nn.Tanh(), list[Any]()

CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "a numpy array": (lambda x: x * genesis.tensor(ARRAY), lambda: ARRAY.__setitem__(0, 9)),
    "an element of a numpy array": (lambda x: x * float(ARRAY[1]), lambda: ARRAY.__setitem__(1, 7)),
    "a set": (lambda x: x * (2 if "b" in SET else 3), lambda: SET.add("b")),
    "a deque": (lambda x: x * DEQUE[0], lambda: DEQUE.__setitem__(0, 9.0)),
    "an array": (lambda x: x * NUMBERS[0], lambda: NUMBERS.__setitem__(0, 9.0)),
    "a bytearray": (lambda x: x * BYTES[0], lambda: BYTES.__setitem__(0, 9)),
    "a nested list": (lambda x: x * TABLE["a"]["b"][0], lambda: TABLE["a"]["b"].__setitem__(0, 9.0)),
    "a key": (lambda x: x * len(TABLE["a"]), lambda: TABLE["a"].__setitem__("c", 1)),
    "an attribute of an attribute": (lambda x: x * SPACE.inner.value, lambda: setattr(SPACE.inner, "value", 3.0)),
    "getattr": (lambda x: x * getattr(SPACE.inner, "val" + "ue"), lambda: setattr(SPACE.inner, "value", 4.0)),
    "vars": (lambda x: x * vars(SPACE.inner)["value"], lambda: setattr(SPACE.inner, "value", 5.0)),
    "a slot": (lambda x: x * SLOTTED.value, lambda: setattr(SLOTTED, "value", 3.0)),
    "an attribute of a class": (lambda x: x * Special.of_class(), lambda: setattr(Special, "kind", 7.0)),
    "a list of a class": (lambda x: x * Special.items[0], lambda: Special.items.__setitem__(0, 7.0)),
    "globals": (lambda x: x * globals()["FACTOR"], set_factor),
    "a constructor": (lambda x: x * Maker().value, set_factor),
    "a metaclass": (lambda x: x * Made(), set_factor),
    "a static method": (lambda x: x * Special.static(), set_factor),
    "a property": (lambda x: x * SPECIAL.computed, set_factor),
    "__getitem__": (lambda x: x * SPECIAL[0], set_factor),
    "__len__": (lambda x: x * len(SPECIAL), set_factor),
    "__iter__": (lambda x: x * sum(SPECIAL), set_factor),
    "__contains__": (lambda x: x * (FACTOR if 3 in SPECIAL else 2), set_factor),
    "__enter__": (entered, set_factor),
    "__getattr__": (lambda x: x * SPECIAL.anything, set_factor),
    "a method that a method calls": (Chain(), set_factor),
    "a list of a module's class": (Chain(), lambda: Chain.table.__setitem__(0, 5.0)),
    "a partial function": (lambda x: PARTIAL(x), set_factor),
    "a decorator": (decorated, set_factor),
    "map": (lambda x: x * sum(map(lambda i: i * FACTOR, [1.0])), set_factor),  # noqa: C417
    "an attribute of a function": (with_attribute, lambda: setattr(with_attribute, "scale", 3.0)),
    "a default": (with_attribute, lambda: setattr(with_attribute, "__defaults__", (5.0,))),
    "a keyword's default": (with_attribute, lambda: with_attribute.__kwdefaults__.update(more=5.0)),
    "the order of a dict": (in_order, lambda: ORDERED.update(a=ORDERED.pop("a"))),
    "an attribute that only an inner function names": (reads_pair, lambda: setattr(PAIR, "second", 5.0)),
    "a method of a base class": (lambda x: DERIVED.scaled(x), set_factor),
    "a method that replaces another": (
        lambda x: DERIVED.scaled(x), lambda: setattr(Derived, "scaled", lambda self, x: x * 9)
    ),
    "a method of a dict": (lambda x: DICT.scaled(x), set_factor),
    "a class in a class": (lambda x: x * Derived.Inner.value, lambda: setattr(Derived.Inner, "value", 5.0)),
    "an attribute that hides that of a class": (lambda x: x * DERIVED.kind, lambda: setattr(DERIVED, "kind", 5.0)),
    "an attribute that hides that of a module's class": (CHAIN, lambda: setattr(CHAIN, "table", [6.0])),
    "a name that hides a builtin": (lambda x: x * abs(-3), lambda: globals().update(abs=lambda v: 9.0)),
    "a function of the library": (
        lambda x: genesis.nn.functional.gelu(x), lambda: setattr(genesis.nn.functional, "gelu", lambda x: x * 9)
    ),
    "the sign of 0": (lambda x: 1 / (x * ZERO), lambda: globals().update(ZERO=-0.0)),
    "attrgetter": (lambda x: x * operator.attrgetter("kind")(Base), lambda: setattr(Base, "kind", 3.0)),
    "a tensor's layout": (lambda x: x * WEIGHT, lambda: setattr(WEIGHT, "data", genesis.ones(3, 6).double()[:, 0])),
    "a tensor's requires_grad": (lambda x: x * WEIGHT, WEIGHT.requires_grad_),
    "a hook on all modules": (
        lambda x: TANH(x), lambda: HOOKS.append(register_module_forward_hook(lambda m, x, y: y + 1))
    ),
    "the default dtype": (
        lambda x: x.sum() * genesis.ones(2), lambda: genesis.set_default_dtype(genesis.float64)
    ),
    "the default device": (
        lambda x: genesis.full((2,), 3.0) * 2, lambda: genesis.set_default_device("cuda")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    function, change = CHANGES[name]
    compiled, x = genesis.compile(function), ramp(3)
    try:
        for _ in range(2):
            for _ in range(3):
                want, got = function(x), compiled(x)
                assert (got.dtype, got.device) == (want.dtype, want.device)
                assert got.requires_grad == want.requires_grad
                assert equal(got, want)
            change()
    finally:
        while HOOKS:
            HOOKS.pop().remove()
        genesis.set_default_dtype(genesis.float32)
        genesis.set_default_device("cpu")
        genesis.nn.functional.gelu = GELU
        globals().pop("abs", None)


def test_a_hook_that_replaces_another_is_seen() -> None:
    module, x = genesis.nn.Tanh(), ramp(3)
    compiled = genesis.compile(module)
    for factor in (2.0, 3.0):
        handle = module.register_forward_hook(lambda m, x, y, factor=factor: y * factor)
        assert equal(compiled(x), module(x)) and equal(compiled(x), x.tanh() * factor)
        handle.remove()


@pytest.mark.parametrize(
    "function",
    [lambda x: x * random(), lambda x: x * rand(), lambda x: x * np.random.rand(), lambda x: x * next(COUNT)],
)
def test_what_differs_in_every_call_is_a_break(function: Callable[..., Any]) -> None:
    compiled, x = genesis.compile(function), ramp(3)
    assert not equal(compiled(x), compiled(x))
    assert compiled.breaks


@pytest.mark.parametrize("setting", [genesis.no_grad, lambda: genesis.autocast("cpu"), lambda: genesis.device("cuda")])
def test_a_setting_gets_its_own_trace(setting: Callable[[], Any]) -> None:
    compiled, x = genesis.compile(lambda x: x @ x + genesis.zeros(3, 3).to(x.device)), ramp(3, 3, grad=True)
    compiled(x)
    with setting():
        assert equal(compiled(x), compiled.function(x))
        assert compiled(x).requires_grad == compiled.function(x).requires_grad
    assert sum(map(len, compiled.entries.values())) + len(compiled.breaks) == 2


EFFECTS: dict[str, Callable[[Any, Any], Any]] = {
    "clears a gradient": lambda x, w: (setattr(w, "grad", None), x * w)[1],
    "sets a gradient": lambda x, w: (setattr(w, "grad", genesis.ones(3)), x * w)[1],
    "reads a gradient": lambda x, w: x * w if w.grad is None else x - w.grad,
    "replaces data": lambda x, w: (setattr(w, "data", w.data * 2), x * w)[1],
    "runs backward": lambda x, w: ((x.detach() * w).sum().backward(), x * 2)[1],
    "changes requires_grad": lambda x, w: (w.requires_grad_(not w.requires_grad), x * w)[1],
    "records a change in place": lambda x, w: (w.detach().add_(1), (w * 1).mul_(x))[1],
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("is_argument", [True, False])
def test_effects_on_tensors_are_those_of_eager_code(name: str, is_argument: bool) -> None:
    found: list[list[Any]] = [[], []]
    for seen, wrap in zip(found, (lambda f: f, genesis.compile), strict=True):
        x, w, effect = ramp(3, grad=True), ramp(3, grad=True), EFFECTS[name]
        function = wrap(effect if is_argument else lambda x, w=w, effect=effect: effect(x, w))
        for _ in range(3):
            y = function(x, w) if is_argument else function(x)
            if y.requires_grad:
                y.sum().backward()
            seen += [t.tolist() for t in (y, w, x.grad, w.grad) if t is not None] + [w.requires_grad]
    assert found[0] == found[1]


def test_a_global_variable_that_the_function_makes() -> None:
    def counts(x: Any) -> Any:
        global made  # noqa: PLW0603
        try:
            made += 1
        except NameError:
            made = 1
        return x * 2

    def shadows(x: Any) -> Any:
        global hash  # noqa: PLW0603
        hash = hash + 1 if isinstance(hash, int) else 1
        return x + x.sum().item()

    for function, name in ((counts, "made"), (shadows, "hash")):
        compiled = genesis.compile(function)
        for _ in range(3):
            compiled(ramp(3))
        assert globals().pop(name) == 3


def test_a_failure_of_the_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("own")

    monkeypatch.setattr("genesis.compiler.compiled.trace_call", fails)
    compiled = genesis.compile(lambda x: x + 1)
    with pytest.warns(match=r"cannot be compiled \(KeyError: 'own'\) and runs uncompiled") as caught:
        assert [compiled(ramp(3)).tolist() for _ in range(2)] == [(ramp(3) + 1).tolist()] * 2
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(UsageError, match=r"cannot be compiled .*fullgraph=True"):
        genesis.compile(lambda x: x + 1, fullgraph=True)(ramp(3))

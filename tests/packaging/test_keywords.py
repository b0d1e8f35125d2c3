"""Misspelt keywords: everything public that can be called names the keyword that was meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import genesis
import genesis.cuda
import genesis.custom
from genesis import nn, optim
from genesis.errors import KeywordError
from genesis.keywords import check_calls, checked
from genesis.optim import lr_scheduler, swa_utils

MODULES = (
    genesis, genesis.autograd, genesis.cuda, genesis.custom, genesis.random, nn, nn.functional, nn.init, nn.utils,
    optim, lr_scheduler, swa_utils,
)  # fmt: skip
# What no rule of ours can be put before.
WITHOUT_KEYWORDS = {
    genesis.Size: "tuple's own constructor, for every shape",
    genesis.autograd.Function: "nobody makes one",
    genesis.Layout: "nobody makes one",
}


def published(modules: tuple[ModuleType, ...]) -> dict[str, Callable[..., Any]]:
    """What the modules export and can be called, by the name under which it comes first."""
    found: dict[str, Callable[..., Any]] = {}
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in found.values():
                found[f"{module.__name__}.{name}"] = value
    return found


CALLS = {name: value for name, value in published(MODULES).items() if value not in WITHOUT_KEYWORDS}


def parameters(value: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    made = value.__init__ if inspect.isclass(value) and value.__init__ is not object.__init__ else value
    return {k: v for k, v in inspect.signature(made).parameters.items() if k != "self"}


def needed(value: Callable[..., Any]) -> tuple[Any, ...] | None:
    """The arguments before any keyword is looked at: none, those of an optimizer, or None where keywords are data.

    `apply` and its like hand keywords on, to an op or to the user's function.
    """
    if all(each.kind is not each.VAR_KEYWORD for each in parameters(value).values()):
        return ()
    if inspect.isclass(value) and issubclass(value, optim.Optimizer):
        leaf = genesis.ones(4, 4, requires_grad=True)
        return ([leaf], {"lr": 0.1}) if value is optim.Optimizer else ([leaf],)
    return None


def faults(name: str, value: Callable[..., Any], given: tuple[Any, ...]) -> Iterator[str]:
    """What is wrong with the errors for keywords that `value` does not take."""

    def error(keyword: str) -> KeywordError | None:
        try:
            value(*given, **{keyword: 1})
        except KeywordError as error:
            return error
        except TypeError:
            return None
        return None

    other = error("zz_qq")
    if other is None:
        yield f"{name} says nothing of zz_qq"
        return
    if not re.fullmatch(r"\w+ takes no keyword 'zz_qq'", other.what) or other.what.split()[0] != value.__name__:
        yield f"{name}: {other.what}"
    listed = other.next.removeprefix("it takes ").split(", ")
    for meant in listed if listed != ["no keywords"] else ():
        found = error(meant + meant[-1])
        if found is None or found.next != f"did you mean {meant}?":
            yield f"{name}({meant}{meant[-1]}=1): {found}"
    own = {k for k, v in parameters(value).items() if v.kind in (v.POSITIONAL_OR_KEYWORD, v.KEYWORD_ONLY)}
    is_ours = not value.__module__.startswith("genesis.functions")  # whose errors show torch's names
    if is_ours and not given and not own - {"_cls", "x", "y", *getattr(value, "extras", ())} <= set(listed):
        # x and y are shown as input and other
        yield f"{name} takes {sorted(own)} and shows {listed}"


def test_a_misspelt_keyword_is_refused_with_the_nearest() -> None:
    calls = [(name, value, given) for name, value in CALLS.items() if (given := needed(value)) is not None]
    assert [fault for call in calls for fault in faults(*call)] == []


def test_few_calls_hand_their_keywords_on() -> None:
    assert {name for name, value in CALLS.items() if needed(value) is None} == {
        "genesis.autograd.apply",
        "genesis.autograd.apply_",
        "genesis.autograd.checkpoint",
        "genesis.nn.Identity",
    }
    assert len(CALLS) > 300


def test_a_call_without_the_rule_is_noticed() -> None:
    def plain(rate: float) -> None: ...

    assert list(faults("plain", plain, ())) == ["plain says nothing of zz_qq"]
    assert list(faults("plain", checked(plain), ())) == []


# --- The rule itself --------------------------------------------------------------------------------------------------


def test_only_the_calls_own_error_is_replaced() -> None:
    def body(rate: float = 1.0, *, other: Any = None) -> Any:
        """What it does."""
        return other(rtae=rate) if other else len(rate)  # type: ignore[arg-type]

    called = checked(body)
    assert inspect.signature(called) == inspect.signature(body) and called.__doc__ == body.__doc__
    for wrong in (lambda: called(1, 2), lambda: called(rate=1), lambda: called(other=body)):
        with pytest.raises(TypeError) as caught:
            wrong()
        assert not isinstance(caught.value, KeywordError)
    with pytest.raises(KeywordError, match="body takes no keyword 'rtae'") as caught:
        called(rtae=1)
    assert caught.value.__suppress_context__


def test_classes_speak_of_the_class_that_was_called() -> None:
    class Base:
        def __init__(self, rate: float = 1.0) -> None: ...

    class Same(Base): ...

    class Own(Base):
        def __init__(self) -> None:
            super().__init__(rtae=1)  # type: ignore[call-arg]

    check_calls({"Base": Base}, ["Base"])
    check_calls({"Base": Base}, ["Base"])  # nothing more happens
    assert list(inspect.signature(Base).parameters) == ["rate"] and Base(rate=2.0) and Same(2.0)
    for kind, name in ((Base, "Base"), (Same, "Same"), (Own, "Base")):
        with pytest.raises(KeywordError) as caught:
            kind(**({} if kind is Own else {"rtae": 1}))
        assert str(caught.value) == f"{name} takes no keyword 'rtae' | did you mean rate?"

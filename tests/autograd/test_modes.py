"""Switches of recording: nested, as decorators, on generators, in threads, after errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import genesis
from genesis.autograd import enable_grad, inference_mode, is_grad_enabled, no_grad, set_grad_enabled
from tests.autograd.scenarios import leaf


def test_nothing_is_recorded_inside_no_grad() -> None:
    a = leaf(genesis, 1, 2)
    with no_grad():
        assert not is_grad_enabled()
        y = a * 2
    assert is_grad_enabled()
    assert not y.requires_grad and y.is_leaf and y.grad_fn is None


def test_modes_nest() -> None:
    a = leaf(genesis, 1)
    seen = []
    with no_grad():
        seen.append((a * 1).requires_grad)
        with enable_grad():
            seen.append((a * 1).requires_grad)
            with set_grad_enabled(False):
                seen.append((a * 1).requires_grad)
                with set_grad_enabled(True):
                    seen.append((a * 1).requires_grad)
            seen.append((a * 1).requires_grad)
            with inference_mode():
                seen.append((a * 1).requires_grad)
        seen.append((a * 1).requires_grad)
    seen.append((a * 1).requires_grad)
    assert seen == [False, True, False, True, True, False, False, True]


def test_inference_mode_takes_a_switch() -> None:
    with inference_mode(False):
        assert is_grad_enabled()
    with inference_mode(True):
        assert not is_grad_enabled()


def test_an_error_inside_the_block_restores_the_mode() -> None:
    with pytest.raises(ValueError, match="inside"), no_grad():
        raise ValueError("inside")
    assert is_grad_enabled()


def test_one_object_may_be_entered_again_while_it_is_entered() -> None:
    mode = no_grad()
    with mode:
        with mode:
            assert not is_grad_enabled()
        assert not is_grad_enabled()
    assert is_grad_enabled()


@pytest.mark.parametrize(
    ("mode", "inside"),
    [(no_grad(), False), (enable_grad(), True), (inference_mode(), False), (set_grad_enabled(True), True)],
)
def test_as_a_decorator(mode: Any, inside: bool) -> None:
    @mode
    def function(x: int, *, y: int = 2) -> tuple[bool, int]:
        """Documented."""
        return is_grad_enabled(), x + y

    for outside in (True, False):
        with set_grad_enabled(outside):
            assert function(1, y=5) == (inside, 6)
            assert is_grad_enabled() == outside
    assert function.__name__ == "function" and function.__doc__ == "Documented."


def test_a_decorated_function_may_call_itself() -> None:
    @no_grad()
    def depth(n: int) -> list[bool]:
        return [is_grad_enabled(), *(depth(n - 1) if n else [])]

    assert depth(3) == [False] * 4
    assert is_grad_enabled()


def test_a_decorated_generator_switches_only_while_its_own_code_runs() -> None:
    @no_grad()
    def steps() -> Iterator[Any]:
        received = yield is_grad_enabled()
        while received != "stop":
            received = yield (received, is_grad_enabled())
        return "end"

    generator: Any = steps()
    assert next(generator) is False
    assert is_grad_enabled()
    with enable_grad():
        assert generator.send("a") == ("a", False)
    assert is_grad_enabled()
    with pytest.raises(StopIteration) as caught:
        generator.send("stop")
    assert caught.value.value == "end"


def test_a_decorated_generator_is_closed_with_its_wrapper() -> None:
    closed = []

    @no_grad()
    def steps() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(is_grad_enabled())

    generator: Any = steps()
    assert next(generator) == 1
    generator.close()
    assert closed and is_grad_enabled()


def test_modes_are_a_threads_own() -> None:
    seen = {}

    def work() -> None:
        seen["start"] = is_grad_enabled()
        with no_grad():
            inside.set()
            checked.wait(5)

    inside, checked = threading.Event(), threading.Event()
    with no_grad():
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(5)
    seen["main"] = is_grad_enabled()  # while the other thread is inside no_grad
    checked.set()
    thread.join()
    assert seen == {"start": True, "main": True}


def test_a_decorated_function_runs_in_two_threads_that_differ() -> None:
    """Each call restores the mode of its own thread, whichever ends first."""
    inside = threading.Barrier(2)
    result = {}

    @enable_grad()
    def function() -> None:
        inside.wait(5)

    def work(name: str, outer: bool) -> None:
        with set_grad_enabled(outer):
            function()
            result[name] = is_grad_enabled()

    for _ in range(20):
        threads = [threading.Thread(target=work, args=(str(o), o)) for o in (True, False)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert result == {"True": True, "False": False}


def test_detach_shares_memory_and_leaves_the_tape() -> None:
    a = leaf(genesis, 1, 2)
    h = a * 2
    for off in (h.detach(), h.data):
        assert not off.requires_grad and off.is_leaf and off.base is None
        assert off.array.storage is h.array.storage
    (h * h.detach()).sum().backward()
    assert a.grad.tolist() == [2 * 2, 2 * 4]


def test_a_result_cannot_stop_requiring_a_gradient() -> None:
    from genesis.errors import GradientError

    a = leaf(genesis, 1)
    with pytest.raises(GradientError, match="detach"):
        (a * 2).requires_grad_(False)
    a.requires_grad_(False)
    assert not (a * 2).requires_grad


# --- As torch takes them ----------------------------------------------------------------------------------------------


def test_set_grad_enabled_acts_at_the_call() -> None:
    try:
        set_grad_enabled(False)
        assert not is_grad_enabled()
        assert not (leaf(genesis, 1) * 2).requires_grad
        set_grad_enabled(True)
        assert is_grad_enabled()
    finally:
        set_grad_enabled(True)


def test_a_block_of_set_grad_enabled_ends_with_the_mode_before_the_call() -> None:
    switch = set_grad_enabled(False)
    assert not is_grad_enabled()
    with switch:
        assert not is_grad_enabled()
    assert is_grad_enabled()
    with switch:  # once more, from the mode that is now
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_set_grad_enabled_as_a_decorator_leaves_the_mode_alone() -> None:
    @set_grad_enabled(False)
    def function() -> bool:
        return is_grad_enabled()

    assert is_grad_enabled()
    assert function() is False
    assert is_grad_enabled()


@pytest.mark.parametrize("mode, inside", [(no_grad, False), (enable_grad, True), (inference_mode, False)])
def test_bare_decorators_are_those_with_parentheses(mode: Any, inside: bool) -> None:
    @mode
    def function(x: int, *, y: int = 2) -> tuple[bool, int]:
        """Documented."""
        return is_grad_enabled(), x + y

    @mode
    def steps() -> Iterator[bool]:
        yield is_grad_enabled()

    class Holder:
        @mode
        def method(self) -> bool:
            return is_grad_enabled()

    with set_grad_enabled(not inside):
        assert function(1, y=5) == (inside, 6)
        assert list(steps()) == [inside]
        assert Holder().method() is inside
        assert is_grad_enabled() is not inside
    assert function.__name__ == "function" and function.__doc__ == "Documented."


def test_an_error_thrown_into_a_decorated_generator_reaches_it() -> None:
    @no_grad
    def steps() -> Iterator[Any]:
        try:
            yield "waiting"
        except KeyError as error:
            yield error, is_grad_enabled()

    generator: Any = steps()
    next(generator)
    error = KeyError("thrown")
    assert generator.throw(error) == (error, False)
    assert is_grad_enabled()


def test_what_a_generator_does_when_it_is_closed_is_its_own_code() -> None:
    seen = []

    @no_grad
    def steps() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(is_grad_enabled())

    generator: Any = steps()
    next(generator)
    generator.close()
    assert seen == [False] and is_grad_enabled()


def test_decorators_of_generators_stack() -> None:
    @no_grad
    @enable_grad
    def inner() -> Iterator[bool]:
        yield is_grad_enabled()

    @enable_grad
    @no_grad
    def outer() -> Iterator[bool]:
        yield is_grad_enabled()

    assert [*inner(), *outer()] == [True, False]


def test_a_decorated_coroutine_switches_while_it_runs() -> None:
    import asyncio

    seen = []

    @no_grad
    async def work() -> str:
        seen.append(is_grad_enabled())
        await asyncio.sleep(0)
        seen.append(is_grad_enabled())
        return "done"

    async def both() -> str:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        seen.append(is_grad_enabled())
        return await task

    assert asyncio.run(both()) == "done"
    assert seen == [False, True, False]


@pytest.mark.parametrize("wrong", [None, "False", 2, 0.0])
def test_a_mode_that_is_no_bool_is_refused(wrong: Any) -> None:
    from genesis.errors import DTypeError

    for mode in (set_grad_enabled, inference_mode):
        with pytest.raises(DTypeError, match="takes True or False"):
            mode(wrong)
    assert is_grad_enabled()


def test_a_class_is_not_decorated() -> None:
    from genesis.errors import DTypeError

    class Holder:
        pass

    async def items() -> Any:
        yield 1

    for wrong in (Holder, items, 3):
        with pytest.raises(DTypeError, match="no_grad decorates functions"):
            no_grad()(wrong)  # type: ignore[arg-type]

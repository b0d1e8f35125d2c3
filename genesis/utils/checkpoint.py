"""Activation checkpoints with the arguments of torch.utils.checkpoint."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from genesis.autograd.checkpoint import Frame, run
from genesis.errors import UsageError
from genesis.nn import Sequential

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def noop_context_fn() -> Contexts:
    """Return two contexts that do nothing."""
    return nullcontext(), nullcontext()


def _is_reentrant(value: bool | None) -> bool:
    if value is None:
        warnings.warn("pass use_reentrant=False or True to checkpoint; None means True", stacklevel=3)
    return value is not False


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)` and keep only the arguments for backward, which calls it again.

    Without a function, return a decorator.

    >>> from genesis.utils.checkpoint import checkpoint
    >>> x = genesis.ones(2, requires_grad=True)
    >>> checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False).sum().backward()

    Args:
        use_reentrant: True refuses keywords and contexts, as torch does. Both values compute alike.
        preserve_rng_state: repeat the random draws in backward.
        context_fn: makes the contexts of the first call and of the repetition.
        determinism_check: "default" compares shapes and dtypes of both calls; "none" does not.
        debug: has no effect.
        early_stop: has no effect.
        respect_saved_tensors_hooks: has no effect.

    Raises:
        UsageError: for arguments that exclude each other.
        GradientError: in backward, if the second call records different ops or an argument was changed in place.
    """
    if function is None:
        given: dict[str, Any] = {"preserve_rng_state": preserve_rng_state, "context_fn": context_fn}
        given |= {"use_reentrant": use_reentrant, "determinism_check": determinism_check, **kwargs}
        return lambda decorated: functools.wraps(decorated)(functools.partial(checkpoint, decorated, **given))
    if determinism_check not in ("default", "none"):
        raise UsageError(f"determinism_check is {determinism_check!r}", next='pass "default" or "none"')
    if _is_reentrant(use_reentrant):
        if kwargs or context_fn is not noop_context_fn or debug:
            what = f"keywords {sorted(kwargs)}, context_fn or debug" if kwargs else "context_fn or debug"
            raise UsageError(f"a reentrant checkpoint takes no {what}", next="pass use_reentrant=False")
        determinism_check = "none"
    first, again = context_fn()
    with first:
        return run(Frame(function, args, kwargs, preserve_rng_state, determinism_check == "default", again))


def checkpoint_sequential(
    functions: Sequential | list[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Apply functions in order, in `segments` parts; all but the last are checkpointed.

    >>> from genesis.utils.checkpoint import checkpoint_sequential
    >>> checkpoint_sequential([genesis.exp, genesis.log], 2, genesis.ones(2), use_reentrant=False)
    tensor([1., 1.])
    """
    reentrant = _is_reentrant(use_reentrant)
    preserves = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise UsageError(f"checkpoint_sequential has no arguments {sorted(kwargs)}")
    steps = list(functions)
    size = len(steps) // segments
    starts = [size * i for i in range(segments)] if size else [0]
    for start, stop in itertools.pairwise(starts):
        part = functools.partial(functools.reduce, lambda x, f: f(x), steps[start:stop])
        input = checkpoint(part, input, use_reentrant=reentrant, preserve_rng_state=preserves)
    return functools.reduce(lambda x, f: f(x), steps[starts[-1] :], input)

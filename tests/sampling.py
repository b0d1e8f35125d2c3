"""The sample that `make unit` runs of a test with many cases; `make unit-full` runs the others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["covering", "leave_to_full", "some_full"]


def covering(cases: Sequence[Mapping[str, Any]], together: int = 1) -> list[int]:
    """Indices of cases with every value of every argument, or every combination of values of `together` arguments.

    The case with the most new combinations is chosen first; among equal ones, that with the least used values.
    """
    values = [[(name, _told_apart(value)) for name, value in case.items()] for case in cases]
    offered = [set(itertools.combinations(of, min(len(of), together))) for of in values]
    left, used, chosen = set[Any]().union(*offered), Counter[Any](), list[int]()
    while left:
        best = max(range(len(cases)), key=lambda i: (len(offered[i] & left), -sum(used[v] for v in values[i])))
        chosen.append(best)
        left -= offered[best]
        used.update(values[best])
    return sorted(chosen)


def _told_apart(value: Any) -> Any:
    """Something with a hash that differs where the value does; of a value without a hash, its place in memory."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def leave_to_full(items: Sequence[pytest.Item]) -> None:
    """Mark as `full` those cases of tests marked `sample` that are not in the sample.

    `sample(2)` asks for all pairs of values, `sample(cases=4)` for every nth case, so that there are at most 4.
    """
    tests: dict[Any, list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("sample")
            and not item.get_closest_marker("full")
        ):
            tests.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in tests.values():
        asked: Any = cases[0].get_closest_marker("sample")
        if most := asked.kwargs.get("cases"):
            chosen = list(range(0, len(cases), -(-len(cases) // most)))
        else:
            chosen = covering([case.callspec.params for case in cases], *asked.args)
        for i in set(range(len(cases))) - set(chosen):
            cases[i].add_marker(pytest.mark.full)


def some_full(values: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """Values of one argument, of which those outside of `daily` are `full`."""
    return [value if value in daily else pytest.param(value, marks=pytest.mark.full) for value in values]

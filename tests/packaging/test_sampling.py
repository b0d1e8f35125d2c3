"""Samples of a test's cases hold every value of every argument, and the suite leaves the other cases out."""

from __future__ import annotations

import itertools

import pytest

from tests.sampling import covering

CASES = [
    {"group": group, "size": size, "attrs": attrs}
    for group, size, attrs in itertools.product((1, 2, True), (64, 128), ({}, {"window": 1}))
]


@pytest.mark.parametrize(("together", "least"), [(1, 3), (2, 6), (3, 12), (4, 12)])
def test_every_combination_occurs(together: int, least: int) -> None:
    chosen = covering(CASES, together)
    assert least <= len(chosen) <= least + (together == 2)
    for names in itertools.combinations(CASES[0], min(together, 3)):
        kept, all_ = (
            {repr([case[n] for n in names]) for case in cases} for cases in ([CASES[i] for i in chosen], CASES)
        )
        assert kept == all_


def test_unordered_arguments_are_all_kept() -> None:
    assert covering([{"a": i, "b": i} for i in range(5)]) == [0, 1, 2, 3, 4]
    assert covering([{}]) == [0]


@pytest.mark.sample
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_other_cases_are_full(a: int, b: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("full") is None) == (a == b)


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("a", range(5))
def test_every_third_case_is_kept(a: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("full") is None) == (a % 3 == 0)

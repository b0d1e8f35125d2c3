"""Which ops are measured in which sizes, and that nothing that goes wrong in one ends the run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from genesis.backend import CPU, Device
from genesis.dtypes import bfloat16, bool_
from genesis.errors import OutOfMemoryError, UsageError
from genesis.measure.cases import ALIASES, KINDS, SIZES, default_sizes, kind_of, supported
from genesis.op import registry
from genesis.profile import op as measuring
from genesis.profile.op import Settings, profile_case
from genesis.profile.schema import Failure
from genesis.report import suite
from genesis.report.schema import Entry, Skipped
from genesis.report.suite import Job, category_of, jobs, names_of, run
from tests.measure.quick import PLAN, small_limits

QUICK = Settings(plan=PLAN)


def job(name: str, *shape: int, axes: int | None = None) -> Job:
    return Job(name, category_of(name), "small", shape, axes)


def test_all_ops_stand_for_themselves_once() -> None:
    names = names_of()
    assert len(names) == len(set(names))
    assert {"add", "sum", "matmul", "transpose", "softmax", "attention", "gelu"} <= set(names)
    assert not {"reduce_sum", "clone", "max"} & set(names)
    assert {ALIASES.get(name, name) for name in supported()} == {ALIASES.get(name, name) for name in names}
    assert names_of(["exp", "reduce_sum", "exp"]) == ["exp", "reduce_sum"]
    assert {category_of(name) for name in names_of(category="matmul")} == {"matmul"}
    assert [category_of(name) for name in ("copy", "exp", "gelu", "rms_norm")] == [
        "memory", "element", "activation", "reduction"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ops", "category", "where", "what"),
    [
        (["summ"], None, "--op", "no op summ"),
        ([], "fast", "--category", "'fast' is no category"),
        (["add"], "matmul", "--category", "no op of add is in the category matmul"),
    ],
)
def test_what_is_not_there_is_a_usage_error(ops: list[str], category: str | None, where: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        names_of(ops, category)
    assert error.value.where == where
    assert what in error.value.what


def test_jobs_are_each_size_over_each_axis() -> None:
    found = jobs(["sum", "add"], ["small", "large"], every_axis=True)
    assert [(each.name, each.size, each.axes) for each in found] == [
        *(("sum", size, axes) for size in ("small", "large") for axes in (None, -1, (0, 1))),
        ("add", "small", None), ("add", "large", None),
    ]  # fmt: skip
    assert [each.axes for each in jobs(["sum", "sort"], ["small"], every_axis=False)] == [None, -1]
    with pytest.raises(UsageError, match="'huge' is no size"):
        jobs(["add"], ["huge"], every_axis=True)


def test_sizes_when_none_is_asked_for() -> None:
    gpu = Device("cuda", 0)
    assert default_sizes(CPU, is_fast=True) == ("medium",)
    assert default_sizes(gpu, is_fast=True) == ("large",)
    assert set(default_sizes(CPU, is_fast=False)) < set(default_sizes(gpu, is_fast=False)) == set(SIZES)


def found_of(*planned: Job, settings: Settings = QUICK, **given: Any) -> list[Entry | Failure | Skipped]:
    with small_limits():
        return list(run(planned, CPU, given.get("dtype"), settings))


def test_a_case_becomes_an_entry() -> None:
    first, second = found_of(job("add", 2, 3), job("reduce_sum", 2, 3, axes=-1))
    assert isinstance(first, Entry) and isinstance(second, Entry)
    assert (first.title, first.category, first.size, first.row.dtype) == ("add 2x3", "element", "small", "float32")
    assert second.title == "reduce_sum 2x3 over -1"


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (OutOfMemoryError("no room"), "no room", 7),
        (MemoryError("none"), "the host has no memory: none", 7),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", 70),
    ],
)
def test_what_fails_does_not_end_the_run(
    error: Exception, text: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(case: Any, *rest: Any) -> Any:
        if case.name == "add":
            raise error
        return profile_case(case, *rest)

    monkeypatch.setattr(measuring, "profile_case", fails)
    first, second = found_of(job("add", 2), job("sub", 2))
    assert first == Failure(name="add", label="2", error=text, exit_code=code)
    assert isinstance(second, Entry)


def test_an_interrupt_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "profile_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found_of(job("add", 2))


def test_a_dtype_that_an_op_does_not_take_is_left_out() -> None:
    first, second = found_of(job("bitwise_and", 2), job("exp", 2), dtype=bfloat16)
    assert isinstance(first, Skipped) and "bfloat16" in first.reason
    assert isinstance(second, Entry) and second.row.dtype == "bfloat16"


def test_gradients_are_measured_where_there_are_any() -> None:
    backward = dataclasses.replace(QUICK, backward=True)
    with_gradient, none, of_integers = found_of(job("exp", 2), job("eq", 2), job("sum", 2), settings=backward)
    assert all(isinstance(each, Entry) for each in (with_gradient, none, of_integers))
    (flags,) = found_of(job("sum", 2), settings=backward, dtype=bool_)
    assert [bool(each.row.backward) for each in (with_gradient, none, flags)] == [True, False, False]  # type: ignore[union-attr]


def test_every_op_is_measured_in_a_size_of_its_own_form() -> None:
    """The first size of each kind, with no number above 16: the form of the table's shapes is right."""
    kinds = {id(kind_of(name)): name for name in names_of()}
    planned = jobs(kinds.values(), ["small"], every_axis=True)
    tiny = [each._replace(shape=tuple(min(size, 16) for size in each.shape)) for each in planned]
    found = found_of(*tiny)
    assert [each for each in found if not isinstance(each, Entry)] == []


def test_a_users_op_is_measured_as_an_elementwise_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(KINDS["elementwise"])  # a kind that is in no row
    monkeypatch.setattr(suite, "op_named", lambda name: (registry["exp"], own))
    assert names_of(["mine:squared"], "element") == ["mine:squared"]
    (found,) = jobs(["mine:squared"], ["small"], every_axis=True)
    assert (found.shape, found.axes) == ((256, 256), None)

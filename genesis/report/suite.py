"""Many ops measured: which, in which sizes, one after the other. A case that fails does not end the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from genesis.backend import Device
from genesis.dtypes import DType
from genesis.errors import GenesisError, UsageError
from genesis.files.paths import quote
from genesis.measure.cases import ALIASES, CATEGORIES, KINDS, SIZES, label_of, op_named, supported
from genesis.measure.factories import Axes
from genesis.measure.timing import Plan
from genesis.profile import op as measuring
from genesis.profile.schema import Failure
from genesis.report.schema import Entry, Skipped
from genesis.shapes import Shape

THOROUGH = Plan(seconds=0.5)
FAST = Plan(precision=0.05, seconds=0.12, warm_up=0.01)
EXIT_BUG = 70

# --- What is measured -------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One case to measure; `axes` are those of the op, None for all of them and where there are none."""

    name: str
    category: str
    size: str
    shape: Shape
    axes: Axes


def category_of(name: str) -> str:
    """One of `CATEGORIES`, for a name that `op_named` takes."""
    return op_named(name)[1].category


def names_of(ops: Sequence[str] = (), category: str | None = None) -> list[str]:
    """The ops that are asked for, each once, by category; all of them where none are named.

    Raises:
        UsageError: there is no such op or category, or no op of these is in the category.
    """
    if category is not None and category not in CATEGORIES:
        raise UsageError(
            f"{quote(category)} is no category", where="--category", next=f"use one of {', '.join(CATEGORIES)}"
        )
    for name in ops:
        op_named(name)
    # An alias is the same op again, unless it is of a kind of its own, as a transpose is.
    own = [name for name in supported() if name not in ALIASES or any(name in kind.names for kind in KINDS.values())]
    chosen = [name for name in dict.fromkeys(ops or own) if category in (None, category_of(name))]
    if not chosen:
        listed = ", ".join(ops)
        raise UsageError(f"no op of {listed} is in the category {category}", where="--category", next="leave it out")
    return sorted(chosen, key=lambda name: (CATEGORIES.index(category_of(name)), name))


def jobs(names: Iterable[str], sizes: Sequence[str], *, every_axis: bool) -> list[Job]:
    """The cases of these ops: each size, over each of the kind's axes or over the first of them.

    Raises:
        UsageError: there is no such size.
    """
    for size in sizes:
        if size not in SIZES:
            raise UsageError(f"{quote(size)} is no size", where="--size", next=f"use one of {', '.join(SIZES)}")
    found = []
    for name in names:
        kind = op_named(name)[1]
        axes = (kind.axes if every_axis else kind.axes[:1]) or (None,)
        found += [Job(name, category_of(name), size, kind.shape_of(size), over) for size in sizes for over in axes]
    return found


# --- Measuring --------------------------------------------------------------------------------------------------------


def run(
    planned: Iterable[Job], device: Device, dtype: DType | None, settings: measuring.Settings
) -> Iterator[Entry | Failure | Skipped]:
    """Each case measured, in order. What an op does not take is skipped, and whatever else goes wrong is a failure.

    Args:
        dtype: None takes the first of float32, int32 and bool that the op takes.
        settings: gradients are left out where an op has none.
    """
    for job in planned:
        try:
            yield _measured(job, device, dtype, settings)
        except UsageError as error:
            yield Skipped(name=job.name, label=label_of(job.name, job.shape, job.axes), reason=error.what)
        except Exception as error:  # a bug in one op must not hide the others
            code = error.exit_code if isinstance(error, GenesisError) else EXIT_BUG
            text = error.what if isinstance(error, GenesisError) else f"{type(error).__name__}: {error}"
            label = label_of(job.name, job.shape, job.axes)
            yield Failure(name=job.name, label=label, error=text, exit_code=code)


def _measured(job: Job, device: Device, dtype: DType | None, settings: measuring.Settings) -> Entry | Failure:
    op, kind = op_named(job.name)
    if settings.backward and op.vjp is None:
        settings = dataclasses.replace(settings, backward=False)
    axes = [job.axes] if kind.axes else []
    try:
        (found,) = measuring.profile_op(job.name, device, dtype, [job.shape], axes, settings)
    except UsageError as error:
        if error.where != "--backward":
            raise
        # Of this dtype the result has no gradient.
        return _measured(job, device, dtype, dataclasses.replace(settings, backward=False))
    return found if isinstance(found, Failure) else Entry(category=job.category, size=job.size, row=found)

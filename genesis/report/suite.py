"""Many ops measured: which, in which sizes, one after the other. A case that fails does not end the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from genesis.backend import CPU, Device
from genesis.dtypes import DType
from genesis.errors import GenesisError, UsageError
from genesis.files.paths import quote
from genesis.measure.timing import Plan
from genesis.profile import op as measuring
from genesis.profile.cases import ALIASES, KINDS, label_of, op_named, supported
from genesis.profile.factories import Axes
from genesis.profile.schema import Failure
from genesis.report.schema import CATEGORIES, CategoryName, Entry, Skipped
from genesis.shapes import Shape

THOROUGH = Plan(seconds=0.5)
FAST = Plan(precision=0.05, seconds=0.12, warm_up=0.01)
EXIT_BUG = 70

# --- What is measured -------------------------------------------------------------------------------------------------

# The sizes of each kind, in the order of the work they are. "batch" is a batch of a language model's tokens.
SIZES = ("small", "medium", "batch", "large", "xlarge")
_SQUARES: tuple[Shape, ...] = ((256, 256), (1024, 1024), (32, 512, 896), (4096, 4096), (8192, 8192))
_REDUCED: tuple[Shape, ...] = ((4, 64, 256), (4, 512, 896), (32, 512, 896), (8, 1024, 2048), (16, 2048, 4864))
_HEADS: tuple[Shape, ...] = (
    (1, 128, 14, 64),
    (1, 512, 14, 64),
    (32, 512, 14, 64),
    (4, 1024, 14, 64),
    (4, 4096, 14, 64),
)
_SHAPES: dict[str, tuple[Shape, ...]] = {
    "elementwise": _SQUARES,
    "fill": _SQUARES,
    "transpose": (*_SQUARES[:2], (16384, 896), *_SQUARES[3:]),
    "reduction": _REDUCED,
    "along one axis": _REDUCED,
    "sum to a shape": _REDUCED,
    "softmax": (*_SQUARES[:4], (16384, 16384)),
    "matmul": ((256,), (1024,), (2048, 896, 4864), (4096,), (8192,)),
    "linear": ((256,), (2048, 896, 896), (8192, 4864, 896), (2048, 896, 4864), (8192, 896, 4864)),
    "norm": ((1, 128, 896), (4, 512, 896), (32, 512, 896), (8, 2048, 896), (16, 4096, 896)),
    "attention": _HEADS,
    "rope": _HEADS,
    "swiglu": ((128, 4864), (512, 4864), (32, 512, 4864), (2048, 4864), (8192, 4864)),
    "embedding": ((1024, 896), (4096, 896), (16384, 896), (32768, 896), (151936, 896)),
    "cross entropy": ((128, 4096), (256, 16384), (4096, 32768), (256, 151936), (2048, 151936)),
    "linear cross entropy": (
        (128, 256, 4096), (256, 896, 4096), (2048, 896, 151936), (512, 896, 32768), (8192, 896, 151936)
    ),
}  # fmt: skip

_OF_KIND: dict[str, CategoryName] = {
    "fill": "memory",
    "transpose": "memory",
    "embedding": "memory",
    "reduction": "reduction",
    "along one axis": "reduction",
    "sum to a shape": "reduction",
    "norm": "reduction",
    "cross entropy": "reduction",
    "softmax": "activation",
    "swiglu": "activation",
    "rope": "element",
    "matmul": "matmul",
    "linear": "matmul",
    "attention": "matmul",
    "linear cross entropy": "matmul",
}
_MOVING = frozenset(("copy", "cast", "overwrite"))  # elementwise ops that compute nothing


class Job(NamedTuple):
    """One case to measure; `axes` are those of the op, None for all of them and where there are none."""

    name: str
    category: CategoryName
    size: str
    shape: Shape
    axes: Axes


def _key(name: str) -> str:
    """The kind's name in `KINDS`. A user's op is in none, and takes shapes as elementwise ones do."""
    kind = op_named(name)[1]
    return next((key for key, each in KINDS.items() if each is kind), "elementwise")


def category_of(name: str) -> CategoryName:
    """One of `CATEGORIES`, for a name that `op_named` takes."""
    op, known = op_named(name)[0], _OF_KIND.get(_key(name))
    if known is not None:
        return known
    return "memory" if op.name in _MOVING else "activation" if op.family == "activation" else "element"


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


def default_sizes(device: Device, *, is_fast: bool) -> tuple[str, ...]:
    """What is measured when no size is asked for: what shows the limit of a GPU takes a CPU too long."""
    if is_fast:
        return ("medium",) if device == CPU else ("large",)
    return ("small", "medium", "large") if device == CPU else SIZES


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
        kind, shapes = op_named(name)[1], dict(zip(SIZES, _SHAPES[_key(name)], strict=True))
        axes = (kind.axes if every_axis else kind.axes[:1]) or (None,)
        found += [Job(name, category_of(name), size, shapes[size], over) for size in sizes for over in axes]
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

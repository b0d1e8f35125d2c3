"""The text of tensors in torch's layout, and `set_printoptions`. Long tensors show the edges of each dimension."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend import as_device
from genesis.dtypes import bool_, default_dtype, int64
from genesis.errors import UsageError
from genesis.functions.surface import public


@dataclass(frozen=True)
class Options:
    """How tensors are printed; see `set_printoptions`."""

    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3
    linewidth: int = 80
    sci_mode: bool | None = None


_PROFILES = {
    "default": Options(),
    "short": Options(precision=2, edgeitems=2),
    "full": Options(threshold=math.inf),
}
_options = [Options()]


@public(method=False)
def set_printoptions(
    precision: int | None = None,
    threshold: float | None = None,
    edgeitems: int | None = None,
    linewidth: int | None = None,
    profile: str | None = None,
    sci_mode: bool | None = None,
) -> None:
    """Set how tensors are printed. Options that are None, except `sci_mode`, do not change.

    Args:
        precision: digits after the point.
        threshold: number of elements above which only edges are printed.
        edgeitems: elements printed at each edge of a dimension.
        linewidth: characters of a line.
        profile: "default", "short" or "full" to start from.
        sci_mode: whether to use exponents; None chooses by the values.

    >>> genesis.set_printoptions(precision=2)
    >>> genesis.tensor([1 / 3])
    tensor([0.33])
    >>> genesis.set_printoptions(profile="default")
    """
    if profile is not None and profile not in _PROFILES:
        raise UsageError(f"the profile is {profile!r}", next="use one of " + ", ".join(_PROFILES))
    given = {"precision": precision, "threshold": threshold, "edgeitems": edgeitems, "linewidth": linewidth}
    start = _options[0] if profile is None else _PROFILES[profile]
    chosen: Any = {name: value for name, value in given.items() if value is not None}
    _options[0] = replace(start, sci_mode=sci_mode, **chosen)


def text_of(array: Array, notes: Iterable[str]) -> str:
    """Return "tensor(…)" with the values, and device, size and dtype unless they are the default; then `notes`."""
    options, values = _options[0], array.numpy()
    notes, known = list(notes), [default_dtype(), int64, bool_]
    if not array.size:
        known = known[:1]
    if array.dtype not in known:
        notes.insert(0, f"dtype={array.dtype}")
    if not array.size and array.ndim != 1:
        notes.insert(0, f"size={array.shape}")
    if array.device.type != as_device(None).type:
        notes.insert(0, f"device='{array.device}'")
    text = _body(values, options) if array.size else "[]"
    # Start a new line before a note that would not fit.
    text, width = f"tensor({text}", len(text) - text.rfind("\n") + 1
    for note in notes:
        is_long = width + len(note) + 2 > options.linewidth
        text += ",\n" + " " * 7 + note if is_long else ", " + note
        width = 7 + len(note) if is_long else width + len(note) + 2
    return text + ")"


def _body(values: np.ndarray, options: Options) -> str:
    edges = options.edgeitems if values.size > options.threshold else sys.maxsize
    shown = values
    for axis, size in enumerate(values.shape):
        if size > 2 * edges:
            shown = np.take(shown, [*range(edges), *range(size - edges, size)], axis)
    return _nested(values, 7, edges, *_formatter(shown, options), options.linewidth)


def _nested(values: np.ndarray, indent: int, edges: int, show: Callable[[Any], str], width: int, linewidth: int) -> str:
    if not values.ndim:
        return show(values[()])
    size = len(values)
    at = list(range(size)) if size <= 2 * edges else [*range(edges), -1, *range(size - edges, size)]
    if values.ndim > 1:
        rows = ["..." if i < 0 else _nested(values[i], indent + 1, edges, show, width, linewidth) for i in at]
        return "[" + ("," + "\n" * (values.ndim - 1) + " " * (indent + 1)).join(rows) + "]"
    items = [" ..." if i < 0 else show(values[i]) for i in at] if edges else [" ..."]
    a_line = max(1, (linewidth - indent) // (width + 2))
    lines = [", ".join(items[i : i + a_line]) for i in range(0, len(items), a_line)]
    return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"


def _formatter(values: np.ndarray, options: Options) -> tuple[Callable[[Any], str], int]:
    """Return the function that formats one element, and the width of the widest value, to which it aligns."""
    if values.dtype.kind in "biu":
        width = max([len(str(v)) for v in values.ravel().tolist()], default=1)
        return lambda v: str(v).rjust(width), width
    digits = options.precision
    wide = values.astype(np.float64).ravel()
    wide = wide[np.isfinite(wide) & (wide != 0)]
    is_integral = bool((wide == np.ceil(wide)).all())
    is_scientific = False
    if wide.size:
        high, low = float(np.abs(wide).max()), float(np.abs(wide).min())
        is_scientific = high / low > 1000 or high > 1e8 or (low < 1e-4 and not is_integral)
        is_scientific = is_scientific if options.sci_mode is None else options.sci_mode
    style = f".{digits}e" if is_scientific else ".0f" if is_integral else f".{digits}f"
    point = int(is_integral and not is_scientific)  # whole numbers end in a point
    width = max([len(format(float(v), style)) + point for v in wide], default=1)

    def show(value: Any) -> str:
        value = float(value)
        if is_scientific:
            text = format(value, f".{digits}e")
        elif is_integral:
            text = format(value, ".0f") + ("." if math.isfinite(value) else "")
        else:
            text = format(value, f".{digits}f")
        return text.rjust(width)

    return show, width

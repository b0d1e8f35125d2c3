"""Measured numbers for people: three digits and the unit that suits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def format_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: "12.3 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds * 1e9)} ns"


def format_rate(number: float, unit: str) -> str:
    """Three digits with a decimal prefix: "26.1 GB/s"."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{_digits(number / size)} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def format_bytes(size: int) -> str:
    """Bytes with a binary prefix above 10 KiB: "7.0 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= (10 * unit if unit == 1 << 10 else unit):
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} bytes"


def format_ratio(ratio: float) -> str:
    """Two decimals, and below 0.1 as many as two digits take: "1.25", "0.0045"."""
    size = abs(ratio)
    decimals = 1 - math.floor(math.log10(size)) if 0 < size < 0.1 else 2
    return f"{ratio:.{decimals}f}"


def format_share(share: float) -> str:
    """Whole percents, and one more digit where that would be none: "83%", "0.4%", "<0.1%"; "0%" is nothing at all."""
    for text in (f"{share:.0%}", f"{share:.1%}"):
        if share == 0 or text.strip("-0.%"):
            return text
    return "<0.1%"


def _digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


def aligned(rows: Sequence[Mapping[str, str]], left: Sequence[str]) -> Iterator[str]:
    """Rows as lines of a table under the names of their cells; numbers to the right, the columns `left` to the left.

    A column that no row fills is left out.
    """
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for line in ({name: name for name in names}, *rows):
        yield "  ".join(line[n].ljust(widths[n]) if n in left else line[n].rjust(widths[n]) for n in names).rstrip()

"""Memory: a chain of ops that makes a new tensor each time, the same in place, and into a tensor of your own.

New memory costs its peak. It costs time where it is not in a cache yet, as memory that was just written is.
"""

from __future__ import annotations

from collections.abc import Iterator

import genesis
from genesis import Tensor
from genesis.demos.comparing import Setting, Way, compare, factor
from genesis.demos.schema import DemoRow, Section
from genesis.profile.format import format_bytes

# x -> x/2 + 1/2, twice: values go towards 1 however often it runs.


def in_new_memory(x: Tensor) -> Tensor:
    """Four tensors, of which two live at once."""
    x = x * 0.5
    x = x + 0.5
    x = x * 0.5
    return x + 0.5


def in_place(x: Tensor) -> Tensor:
    """The same over x itself, whose values are gone then."""
    x *= 0.5
    x += 0.5
    x *= 0.5
    x += 0.5
    return x


def into(x: Tensor, out: Tensor) -> Tensor:
    """The same over `out`; x stays."""
    genesis.mul(x, 0.5, out=out)
    genesis.add(out, 0.5, out=out)
    genesis.mul(out, 0.5, out=out)
    return genesis.add(out, 0.5, out=out)


def sections(setting: Setting) -> Iterator[Section]:
    """One table: time, and the peak of memory beyond x."""
    width = setting.square()
    x, worn, out = (genesis.ones(width, width, device=setting.device) for _ in range(3))
    ways = [
        Way("in new memory", lambda: in_new_memory(x)),
        Way("in place", lambda: in_place(worn)),
        Way("into a tensor of ours", lambda: into(x, out)),
    ]
    rows = compare(ways, setting, with_memory=True)
    yield Section(
        title=f"four ops on {width}x{width} {x.dtype.name}, {format_bytes(x.array.nbytes)}",
        rows=rows,
        sentences=_told(rows, x.array.nbytes),
        notes=[],
    )


def _told(rows: list[DemoRow], size: int) -> list[str]:
    new, own, into_own = rows
    sentences = [
        f"New memory takes {(new.peak_bytes or 0) / size:.1f} tensors besides the input at its peak, in place"
        f" {(own.peak_bytes or 0) / size:.1f}, a tensor of ours {(into_own.peak_bytes or 0) / size:.1f}."
    ]
    ratio = new.seconds / own.seconds
    if abs(ratio - 1) <= 0.05:
        sentences.append("They take the same time: they read and write the same bytes.")
    else:
        sentences.append(
            f"In place takes {factor(1 / ratio)} the time of new memory, though it reads and writes the same bytes."
        )
    return sentences

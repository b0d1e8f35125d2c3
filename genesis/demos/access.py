"""Access: the same copy of float32, from contiguous memory, with gaps, across rows, and in random order.

Memory comes in lines (64 bytes on most processors, sectors of 32 on a GPU). Of a line that is read, only what is used
counts here: so gaps cost what they skip.
"""

from __future__ import annotations

from collections.abc import Iterator

import genesis
from genesis.demos.comparing import Setting, Way, compare, factor
from genesis.demos.schema import DemoRow, Section


def sections(setting: Setting) -> Iterator[Section]:
    """One table; bytes are those of the elements that are used, and of the indices."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    rows = genesis.randperm(width, device=setting.device)
    elements = genesis.randperm(width * width // 8, device=setting.device)
    flat = x.view(-1)[: width * width // 8]
    ways = [
        Way("in a row", x.clone),
        Way("every 2nd element", x[:, ::2].contiguous),
        Way("every 16th element", x[:, ::16].contiguous),
        Way("transposed", x.t().contiguous),
        Way("rows in random order", lambda: x.index_select(0, rows)),
        Way("elements in random order", lambda: flat.index_select(0, elements)),
    ]
    found = compare(ways, setting, tolerance=None)
    yield Section(title=f"copies out of {width}x{width} float32", rows=found, sentences=_told(found), notes=[])


def _told(rows: list[DemoRow]) -> list[str]:
    straight, second, sixteenth, across, shuffled, scattered = rows

    def loss(row: DemoRow) -> str:
        return factor(straight.bytes_per_second / row.bytes_per_second)

    whole = ": a line is read whole, whatever is used of it" if sixteenth.share < second.share < straight.share else ""
    return [
        f"With gaps of one element a useful byte takes {loss(second)} as long as in a row, with gaps of fifteen"
        f" {loss(sixteenth)}{whole}.",
        f"Transposed it takes {loss(across)} as long, in rows of random order {loss(shuffled)}, in elements of random"
        f" order {loss(scattered)}.",
    ]

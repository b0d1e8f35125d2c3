"""Batching: many small products as one call, against a loop that makes a call for each.

A small product leaves most of a GPU idle, and each call costs the host time; a batch pays once.
"""

from __future__ import annotations

from collections.abc import Iterator

import genesis
from genesis import Tensor
from genesis.demos.comparing import Setting, Way, compare, factor
from genesis.demos.schema import DemoRow, Section
from genesis.profile.format import format_seconds


def looped(x: Tensor, y: Tensor) -> Tensor:
    """The products of x and y [B, n, n], one matrix after the other."""
    return genesis.stack([a @ b for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])


def sections(setting: Setting) -> Iterator[Section]:
    """One table, for matrices that are small on this device."""
    count, n = setting.size(gpu=(256, 128), cpu=(128, 64), fast=(64, 32), tiny=(2, 16))
    x, y = (genesis.randn(count, n, n, device=setting.device) for _ in range(2))
    rows = compare([Way("one by one", lambda: looped(x, y)), Way("batched", lambda: x @ y)], setting)
    yield Section(
        title=f"{count} products of {n}x{n} matrices, {x.dtype.name}", rows=rows, sentences=_told(rows, count), notes=[]
    )


def _told(rows: list[DemoRow], count: int) -> list[str]:
    one, batch = rows
    ratio = one.wall.seconds / batch.wall.seconds
    each = (one.wall.seconds - batch.wall.seconds) / count
    if ratio < 1:
        return [f"On this machine the batch takes {factor(1 / ratio)} as long as the loop: report it."]
    sentences = [f"By the clock the loop takes {factor(ratio)} as long: {format_seconds(each)} more for each product."]
    if one.gpu is not None and batch.gpu is not None:
        alone = one.gpu.seconds / batch.gpu.seconds
        host = one.wall.seconds / one.gpu.seconds
        sentences.append(
            f"On the GPU alone, with the host's work done ahead in a graph, it takes {factor(alone)} as long, as the"
            f" small products do not fill it; the clock shows {factor(host)} the loop's GPU time."
        )
    return sentences

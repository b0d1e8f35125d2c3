"""A tiny model and its steps, as `genesis.measure.run` measures them: without data, configuration and loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import genesis
from genesis import Tensor, nn
from genesis.backend import CPU, Device
from genesis.measure.run import Subject
from genesis.optim import AdamW
from genesis.train.captured import Captured

__all__ = ["Tiny", "captured_subject", "subject"]

Reads = Callable[[Tensor], object]


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tiny(nn.Module):
    """Two blocks; a batch is rows of numbers. `reads` is called in the middle of `loss`."""

    def __init__(self, width: int = 8, reads: Reads | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.reads = reads

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found = (x * x).mean()
        if self.reads is not None:
            self.reads(x)
        return found


def subject(device: Device = CPU, width: int = 8, reads: Reads | None = None) -> Subject:
    """Steps of a `Tiny` under AdamW in flat buffers."""
    genesis.manual_seed(0)
    model = Tiny(width, reads).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    rng = np.random.default_rng(0)

    def take(batches: Sequence[Any]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            model.loss(genesis.tensor(batch, device=device)).backward()
        optimizer.step()

    return Subject(
        model=model,
        device=device,
        batches=lambda: [rng.standard_normal((4, width)).astype(np.float32)],
        take=take,
        settle=_nothing,
        regions=[(model, "loss", "forward"), (optimizer, "zero_grad", "optimizer"), (optimizer, "update", "optimizer")],
    )


def captured_subject(device: Device, replays: int = 1) -> Subject:
    """The same steps, which become a CUDA graph: the first two run as they are, the third is captured.

    Args:
        replays: how often a step runs the graph.
    """
    under = subject(device)
    model: Any = under.model
    optimizer: Any = under.regions[1][0]
    x = genesis.zeros(4, 8, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(x).backward()
        optimizer.update()

    captured = Captured(step, device, lambda line: None)

    def take(batches: Sequence[Any]) -> None:
        x.copy_(genesis.from_numpy(batches[0]).pin_memory(device), non_blocking=True)
        optimizer.begin_step()
        for _ in range(replays):
            captured()

    return dataclasses.replace(under, take=take)


def _nothing() -> None:
    return None

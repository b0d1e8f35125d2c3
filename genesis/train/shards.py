"""One batch on several CPU threads: each runs the model forward and backward on its share of the rows.

Matmuls then use one thread each, and everything between them runs in parallel as well, without handing small pieces
back and forth. Shares are added in their order, so a run repeats bit by bit on the same number of threads. Few tokens
are not divided: threads take turns with Python itself, which is most of what little work takes. On other devices there
is one share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import genesis
from genesis.autograd import grad
from genesis.backend import Device
from genesis.backend.cpu import each_thread, threads
from genesis.data.loader import Batch
from genesis.random import default_generator
from genesis.tensor import Tensor
from genesis.train.state import LanguageModel

# Tokens of a share, at least. On two threads, for models of 0.1 to 12 million parameters, two shares of 128 take 1 to
# 1.6 times as long as one of 256, two of 256 0.8 to 1.2 times as long as one of 512, two of 1024 0.6 to 0.9.
SHARE = 256
# Counters between the random numbers of two shares: more than a run draws.
APART = 1 << 48


def share_count(rows: int, tokens: int) -> int:
    """How many CPU threads share a batch."""
    return max(1, min(threads(), rows, tokens // SHARE))


def _shares(batch: Batch, device: Device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(input ids, labels, position ids) of each thread's rows."""
    rows = len(batch.input_ids)
    parts = share_count(rows, batch.input_ids.size) if device.type == "cpu" else 1
    bounds = [rows * i // parts for i in range(parts + 1)]

    def on_device(values: np.ndarray) -> Tensor:
        return genesis.from_numpy(values).to(device=device)

    return [
        (on_device(batch.input_ids[a:b]), on_device(batch.labels[a:b]), on_device(batch.position_ids[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]


def _loss(model: LanguageModel, share: tuple[Tensor, Tensor, Tensor], num_targets: int) -> Tensor:
    input_ids, labels, position_ids = share
    return model.loss(input_ids, labels, position_ids=position_ids, num_targets=num_targets)


def trained_parameters(model: LanguageModel) -> list[Tensor]:
    """Those that get gradients."""
    return [p for _, p in model.named_parameters() if p.requires_grad]


def accumulate_gradients(model: LanguageModel, batch: Batch, num_targets: int, device: Device) -> float:
    """Add the gradients of the batch's summed loss / `num_targets` to `.grad` of the parameters; returns that loss."""
    shares = _shares(batch, device)
    if len(shares) == 1:
        loss = _loss(model, shares[0], num_targets)
        loss.backward()
        return float(loss.item())
    parameters = trained_parameters(model)
    for parameter in parameters:
        parameter.edge()  # made before threads share it
    found: list[tuple[float, Any]] = [(0.0, ())] * len(shares)
    begun = default_generator.offset
    ends = [begun] * len(shares)

    def work(index: int) -> None:
        # Dropout of each share is at a place of its own, whichever thread comes first.
        with default_generator.apart(begun + index * APART):
            loss = _loss(model, shares[index], num_targets)
            found[index] = float(loss.item()), grad(loss, parameters, allow_unused=True)
            ends[index] = default_generator.offset - index * APART

    _run(work, shares)
    default_generator.offset = max(ends)

    def add_up(index: int) -> None:
        for number in range(index, len(parameters), len(shares)):
            arrays = [gradients[number].array for _, gradients in found if gradients[number] is not None]
            if arrays:
                parameters[number].accumulate_grad(*arrays)

    _run(add_up, shares)
    return sum(loss for loss, _ in found)


def loss_and_hits(model: LanguageModel, batch: Batch, device: Device) -> tuple[float, float]:
    """The summed loss of the batch's targets, and how many of them are the likeliest token; without gradients."""
    shares = _shares(batch, device)
    figures = [(0.0, 0.0)] * len(shares)

    def work(index: int) -> None:
        with genesis.no_grad():  # the switch is per thread
            loss, hits = model.loss_and_hits(*shares[index]).tolist()
            figures[index] = loss, hits

    _run(work, shares)
    return sum(loss for loss, _ in figures), sum(hits for _, hits in figures)


def _run(work: Callable[[int], None], shares: Sequence[Any]) -> None:
    if len(shares) == 1:
        work(0)
    else:
        each_thread(work, len(shares))

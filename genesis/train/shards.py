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
from genesis.train.objective import LanguageModel, Objective

# Tokens of a share, at least. On two threads, for models of 0.1 to 12 million parameters, two shares of 128 take 1 to
# 1.6 times as long as one of 256, two of 256 0.8 to 1.2 times as long as one of 512, two of 1024 0.6 to 0.9.
SHARE = 256
# Counters between the random numbers of two shares: more than a run draws.
APART = 1 << 48


def share_count(rows: int, tokens: int) -> int:
    """How many CPU threads share a batch."""
    return max(1, min(threads(), rows, tokens // SHARE))


def _shares(fields: Sequence[np.ndarray], tokens: int, device: Device) -> list[list[Tensor]]:
    """The fields of each thread's rows, of a batch with so many tokens."""
    rows = len(fields[0])
    parts = share_count(rows, tokens) if device.type == "cpu" else 1
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [
        [genesis.from_numpy(values[a:b]).to(device=device) for values in fields] for a, b in itertools.pairwise(bounds)
    ]


def trained_parameters(model: LanguageModel) -> list[Tensor]:
    """Those that get gradients."""
    return [p for _, p in model.named_parameters() if p.requires_grad]


def accumulate_gradients(
    objective: Objective, model: LanguageModel, batch: Batch, num_targets: int, device: Device
) -> list[float]:
    """Add the gradients of the batch's summed loss / `num_targets` to `.grad` of the parameters.

    Returns:
        That loss, and the objective's figures.
    """
    shares = _shares(objective.fields(batch), batch.input_ids.size, device)
    if len(shares) == 1:
        loss, figures = objective.loss(model, shares[0], num_targets)
        loss.backward()
        return _numbers(loss, figures)
    parameters = trained_parameters(model)
    for parameter in parameters:
        parameter.edge()  # made before threads share it
    rows: list[list[float]] = [[]] * len(shares)
    gradients: list[Any] = [()] * len(shares)
    begun = default_generator.offset
    ends = [begun] * len(shares)

    def work(index: int) -> None:
        # Dropout of each share is at a place of its own, whichever thread comes first.
        with default_generator.apart(begun + index * APART):
            loss, figures = objective.loss(model, shares[index], num_targets)
            rows[index] = _numbers(loss, figures)
            gradients[index] = grad(loss, parameters, allow_unused=True)
            ends[index] = default_generator.offset - index * APART

    _run(work, shares)
    default_generator.offset = max(ends)

    def add_up(index: int) -> None:
        for number in range(index, len(parameters), len(shares)):
            arrays = [each[number].array for each in gradients if each[number] is not None]
            if arrays:
                parameters[number].accumulate_grad(*arrays)

    _run(add_up, shares)
    return [sum(column) for column in zip(*rows, strict=True)]


def measure(objective: Objective, model: LanguageModel, batch: Batch, device: Device) -> list[float]:
    """The summed loss of a batch's targets, and the sums of the objective's held-out figures; without gradients."""
    shares = _shares(objective.fields(batch), batch.input_ids.size, device)
    rows: list[list[float]] = [[]] * len(shares)

    def work(index: int) -> None:
        with genesis.no_grad():  # the switch is per thread
            rows[index] = objective.measure(model, shares[index]).tolist()

    _run(work, shares)
    return [sum(column) for column in zip(*rows, strict=True)]


def _numbers(loss: Tensor, figures: Tensor | None) -> list[float]:
    return [float(loss.item()), *([] if figures is None else figures.tolist())]


def _run(work: Callable[[int], None], shares: Sequence[Any]) -> None:
    if len(shares) == 1:
        work(0)
    else:
        each_thread(work, len(shares))

"""One optimizer step: micro-batches forward and backward, the gradient norm, clipping, the update.

It waits for the loss and the norm, which are checked before any weight changes. That costs nothing on the CPU; steps on
a GPU are those of `device_steps.py`.

Several CPU threads share the rows of a batch, each running the model forward and backward on its part. Matmuls then use
one thread each, and everything between them runs in parallel as well, without handing small pieces back and forth.
Shares are added in their order, so a run repeats bit by bit on the same number of threads. Few tokens are not divided:
threads take turns with Python itself, which is most of what little work takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import genesis
from genesis import random
from genesis.autograd import grad
from genesis.backend import Device
from genesis.backend.cpu import each_thread, threads
from genesis.data.loader import Batch
from genesis.errors import NumericError, escape
from genesis.random import default_generator
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, Objective
from genesis.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Figures of a step: the loss summed over its targets, their number, tokens, the gradient norm before clipping.

    `seconds` is set where the device measured it; `figures` are sums of the objective's own.
    """

    loss_sum: float
    targets: int
    tokens: int
    grad_norm: float
    seconds: float | None = None
    figures: tuple[float, ...] = ()


def take_step(
    state: TrainState, batches: Sequence[Batch], lr: float, max_grad_norm: float | None, device: Device
) -> StepResult:
    """Train on `batches` as if they were one big batch: the summed loss is divided by all their targets.

    Raises:
        NumericError: a loss or gradient is not finite. No weight was changed.
    """
    objective = state.objective
    targets = sum(map(objective.num_targets, batches))
    if state.ranks.size > 1:

        def accumulate(batch: Batch) -> list[float]:
            state.optimizer.zero_grad()
            return accumulate_gradients(objective, state.model, batch, targets, device)

        losses, *figures = gradients_of_ranks(state, batches, accumulate)
    else:
        state.optimizer.zero_grad()
        rows = [accumulate_gradients(objective, state.model, batch, targets, device) for batch in batches]
        losses, *figures = map(list, zip(*rows, strict=True))
    norm = state.optimizer.grad_norm().item()
    if not (math.isfinite(norm) and all(map(math.isfinite, losses))):
        raise not_finite(state, batches, losses, "the gradient norm overflows")
    state.optimizer.set_lr(lr)
    # torch's clip coefficient; the update multiplies by it on the fly, so clipping costs no pass over the gradients
    scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    state.optimizer.step(grad_scale=scale)
    state.step += 1
    tokens = sum(b.num_tokens for b in batches)
    state.num_tokens += tokens
    sums = tuple(map(math.fsum, figures))
    return StepResult(math.fsum(losses) * targets, targets, tokens, norm, figures=sums)


def gradients_of_ranks(
    state: TrainState, batches: Sequence[Batch], accumulate: Callable[[Batch], list[float]]
) -> list[list[float]]:
    """Rank r takes the batches r, r + W, …; after each, all exchange gradients.

    Args:
        accumulate: makes the gradients of a batch alone, and returns its loss and figures.

    Returns:
        The losses of all batches, then each figure of all batches.
    """
    ranks, generator, rows = state.ranks, random.default_generator, list[list[float]]()
    begun = generator.offset
    for number in range(ranks.rank, len(batches), ranks.size):
        at = begun + number * (state.draws or 0)
        while True:
            generator.offset = at
            row = accumulate(batches[number])
            if state.draws is None:  # known from the first batch, whose own draws may have been those of another
                state.draws = generator.offset - begun
                at = begun + number * state.draws
                if at != begun:
                    continue
            break
        rows.append(row)
        state.optimizer.exchange(adds=number >= ranks.size)
    generator.offset = begun + len(batches) * (state.draws or 0)
    state.optimizer.complete()
    return [ranks.in_turn(column) for column in zip(*rows, strict=True)]


def not_finite(state: TrainState, batches: Sequence[Batch], losses: Sequence[float], otherwise: str) -> NumericError:
    """Which tensor went bad first, and on which samples; `otherwise` where all of them are finite."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        culprit, batches = f"the loss of micro-batch {bad} is {losses[bad]}", [batches[bad]]
    else:
        name = _first_not_finite(state)
        culprit = otherwise if name is None else f"the gradient of {escape(name)} is not finite"
    samples = [line for batch in batches for line in state.loader.describe(batch)]
    shown = "; ".join(samples[:8]) + (f"; and {len(samples) - 8} more" if len(samples) > 8 else "")
    return NumericError(
        f"{culprit} in step {state.step + 1}; the weights are those of step {state.step}",
        where=f"samples: {shown}",
        next="start a new run with a lower optim.lr or with train.max_grad_norm; its model.path can be a checkpoint",
    )


def _first_not_finite(state: TrainState) -> str | None:
    """The first parameter with a gradient that is not finite; a call of all ranks."""
    named = list(state.model.named_parameters())
    if state.ranks.size == 1:
        found = (n for n, p in named if p.grad is not None and not np.isfinite(p.grad.numpy().astype(np.float64)).all())
        return next(found, None)
    bad = state.optimizer.first_not_finite()
    number = next((i for i, (_, p) in enumerate(named) if p is bad), len(named))
    least = int(state.ranks.least(number))
    return named[least][0] if least < len(named) else None


# --- Threads of the CPU -----------------------------------------------------------------------------------------------


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

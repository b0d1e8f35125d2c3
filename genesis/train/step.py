"""One optimizer step: micro-batches forward and backward, the gradient norm, clipping, the update.

It waits for the loss and the norm, which are checked before any weight changes. That costs nothing on the CPU; steps on
a GPU are those of `device_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from genesis import random
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.errors import NumericError, escape
from genesis.train.shards import accumulate_gradients
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

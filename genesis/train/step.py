"""One optimizer step: micro-batches forward and backward, the gradient norm, clipping, the update.

The step blocks for loss and norm and checks them before any weight changes, which costs nothing on the CPU. GPUs use
the steps of `device_steps.py` instead.

CPU threads split the rows of a batch. Each runs forward and backward on its share, so that everything runs in parallel,
and matmuls use one thread each. Shares are added in order, so a run is bitwise reproducible for the same number of
threads. Small batches are not split: the threads would mostly wait for Python's interpreter lock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """Figures of a step: sum of the loss, targets, tokens, gradient norm before clipping, seconds if the device
    measured them, and the sums of the objective's figures.
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
    """Train on `batches` as if they were one big batch: all their targets divide the summed loss.

    Raises:
        NumericError: a loss or gradient is not finite. No weight has changed.
    """
    objective = state.objective
    targets = sum(map(objective.num_targets, batches))
    # Accumulate the gradients of all micro-batches.
    if state.ranks.size > 1:

        def accumulate(batch: Batch) -> list[float]:
            state.optimizer.zero_grad()
            return accumulate_gradients(objective, state.model, batch, targets, device)

        losses, *figures = gradients_of_ranks(state, batches, accumulate)
    else:
        state.optimizer.zero_grad()
        rows = [accumulate_gradients(objective, state.model, batch, targets, device) for batch in batches]
        losses, *figures = map(list, zip(*rows, strict=True))
    # Check loss and norm before any weight changes.
    norm = state.optimizer.grad_norm().item()
    if not (math.isfinite(norm) and all(map(math.isfinite, losses))):
        raise not_finite(state, batches, losses, "the gradient norm overflows")
    state.optimizer.set_lr(lr)
    # torch's clip coefficient. The update multiplies by it, so clipping needs no pass over the gradients.
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
    """Accumulate the gradients of a step: rank r takes the batches r, r + W, …; after each, all exchange gradients.

    Args:
        accumulate: computes the gradients of one batch and returns its loss and figures.

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
            if state.draws is None:  # measure on the first batch, then run it again from its own draws
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
    """Return the error that names the first tensor that is not finite, and its samples; `otherwise` if none is."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        culprit, batches = f"the loss of micro-batch {bad} is {losses[bad]}", [batches[bad]]
    else:
        name = _first_not_finite(state)
        culprit = otherwise if name is None else f"the gradient of {escape(name)} is not finite"
    samples = [line for batch in batches for line in state.loader.describe(batch)]
    shown = "; ".join(samples[:8]) + (f"; and {len(samples) - 8} more" if len(samples) > 8 else "")
    return NumericError(
        f"{culprit} in step {state.step + 1}; the weights are those after step {state.step}",
        where=f"samples: {shown}",
        next="start a new run with a lower optim.lr or with train.max_grad_norm; its model.path can be a checkpoint",
    )


def _first_not_finite(state: TrainState) -> str | None:
    """Return the first parameter with a gradient that is not finite. All ranks must call it."""
    named = list(state.model.named_parameters())
    if state.ranks.size == 1:
        found = (n for n, p in named if p.grad is not None and not np.isfinite(p.grad.numpy().astype(np.float64)).all())
        return next(found, None)
    bad = state.optimizer.first_not_finite()
    number = next((i for i, (_, p) in enumerate(named) if p is bad), len(named))
    least = int(state.ranks.least(number))
    return named[least][0] if least < len(named) else None


# --- Threads of the CPU -----------------------------------------------------------------------------------------------


# Minimum tokens of a share. Time of two shares relative to one thread, for models of 0.1 to 12 million parameters:
# two shares of 128 tokens take 1 to 1.6 times as long, of 256 tokens 0.8 to 1.2, of 1024 tokens 0.6 to 0.9.
MIN_SHARE_TOKENS = 256
# Distance between the random counters of two shares: more than a run draws.
SHARE_DISTANCE = 1 << 48


def share_count(rows: int, tokens: int) -> int:
    """Return the number of CPU threads that share a batch."""
    return max(1, min(threads(), rows, tokens // MIN_SHARE_TOKENS))


def _shares(objective: Objective, batch: Batch, device: Device) -> list[list[Tensor]]:
    """Return the fields of each thread's rows of a batch."""
    fields = objective.fields(batch)
    rows = len(fields[0])
    is_divided = device.type == "cpu" and objective.divides_rows
    parts = share_count(rows, batch.input_ids.size) if is_divided else 1
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [
        [genesis.from_numpy(values[a:b]).to(device=device) for values in fields] for a, b in itertools.pairwise(bounds)
    ]


def trained_parameters(model: LanguageModel) -> list[Tensor]:
    """Return the parameters that need gradients."""
    return [p for _, p in model.named_parameters() if p.requires_grad]


def accumulate_gradients(
    objective: Objective, model: LanguageModel, batch: Batch, num_targets: int, device: Device
) -> list[float]:
    """Add the gradients of the batch's summed loss / `num_targets` to `.grad` of the parameters.

    Returns:
        This loss, then the objective's figures.
    """
    shares = _shares(objective, batch, device)
    if len(shares) == 1:
        loss, figures = objective.loss(model, shares[0], num_targets)
        loss.backward()
        return _numbers(loss, figures)
    parameters = trained_parameters(model)
    # Run forward and backward on each thread's share.
    for parameter in parameters:
        parameter.edge()  # created before the threads share it
    rows: list[list[float]] = [[]] * len(shares)
    gradients: list[Any] = [()] * len(shares)
    begun = default_generator.offset
    ends = [begun] * len(shares)

    def work(index: int) -> None:
        # The dropout of each share has its own position, whichever thread runs first.
        with default_generator.apart(begun + index * SHARE_DISTANCE):
            loss, figures = objective.loss(model, shares[index], num_targets)
            rows[index] = _numbers(loss, figures)
            gradients[index] = grad(loss, parameters, allow_unused=True)
            ends[index] = default_generator.offset - index * SHARE_DISTANCE

    _run(work, shares)
    default_generator.offset = max(ends)

    # Add the shares' gradients in order; each thread takes some of the parameters.
    def add_up(index: int) -> None:
        for number in range(index, len(parameters), len(shares)):
            arrays = [each[number].array for each in gradients if each[number] is not None]
            if arrays:
                parameters[number].accumulate_grad(*arrays)

    _run(add_up, shares)
    return [sum(column) for column in zip(*rows, strict=True)]


def measure(objective: Objective, model: LanguageModel, batch: Batch, device: Device) -> list[float]:
    """Return the summed loss of a batch's targets, and the sums of the held-out figures, without gradients."""
    shares = _shares(objective, batch, device)
    rows: list[list[float]] = [[]] * len(shares)

    def work(index: int) -> None:
        with genesis.no_grad():  # the mode is per thread
            rows[index] = objective.measure(model, shares[index]).tolist()

    _run(work, shares)
    return [sum(column) for column in zip(*rows, strict=True)]


def row_values(
    objective: Objective,
    batch: Batch,
    device: Device,
    values: Callable[[Sequence[Tensor]], Tensor],
    *,
    with_grad: bool = False,
) -> npt.NDArray[Any]:
    """Return `values` of a batch's fields, `[rows, …]`; CPU threads compute it for shares of the rows.

    Args:
        with_grad: record gradients, as a step does.
    """
    shares = _shares(objective, batch, device)
    rows = [np.empty(0)] * len(shares)

    def work(index: int) -> None:
        with genesis.set_grad_enabled(with_grad):
            rows[index] = values(shares[index]).numpy()

    _run(work, shares)
    return np.concatenate(rows)


def _numbers(loss: Tensor, figures: Tensor | None) -> list[float]:
    return [float(loss.item()), *([] if figures is None else figures.tolist())]


def _run(work: Callable[[int], None], shares: Sequence[Any]) -> None:
    if len(shares) == 1:
        work(0)
    else:
        each_thread(work, len(shares))

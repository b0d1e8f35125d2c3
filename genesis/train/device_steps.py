"""Optimizer steps on a GPU. Nothing in a step waits: losses and norms are read an interval later, all at once.

A step whose loss or gradient is not finite must change no weight, and no later step may either. So a number on the
device is 0 while all is well and NaN from the first bad step on; it is added to the clip scale, and a scale of NaN
leaves an update out. When the figures are read, the bad step is made once more, from the weights that it found, to say
what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from genesis import cuda
from genesis.autograd import no_grad
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.dtypes import float32
from genesis.errors import NumericError
from genesis.functions.create import empty, zeros
from genesis.nn.utils import clip_scale
from genesis.tensor import Tensor
from genesis.train.feed import Feed
from genesis.train.state import TrainState
from genesis.train.step import StepResult, not_finite

__all__ = ["DeviceSteps", "Reading"]


@dataclass(frozen=True)
class _Made:
    """What the host knows of a step it has launched.

    Attributes:
        before: steps done before it.
        batches: (epoch, index) of its batches.
        ended: its place in the stream.
    """

    before: int
    batches: tuple[tuple[int, int], ...]
    targets: int
    tokens: int
    ended: cuda.Event


class Reading:
    """Figures of some steps, on their way to the host."""

    def __init__(self, steps: DeviceSteps, begun: cuda.Event, made: Sequence[_Made], figures: Tensor) -> None:
        self._steps, self._begun, self._made = steps, begun, made
        self._host = empty(*figures.shape, dtype=float32).pin_memory(figures.device)
        self._host.copy_(figures, non_blocking=True)
        self._there = cuda.Event()
        self._there.record()

    def results(self) -> list[StepResult]:
        """Wait for the figures.

        Raises:
            NumericError: a loss or norm is not finite; the weights are those before that step.
        """
        self._there.synchronize()
        found, begun = [], self._begun
        for made, (loss, norm) in zip(self._made, self._host.numpy().tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._steps.explain(made.before, made.batches, loss, norm)
            seconds = begun.elapsed_time(made.ended) / 1e3
            found.append(StepResult(loss * made.targets, made.targets, made.tokens, norm, seconds))
            begun = made.ended
        return found


class DeviceSteps:
    """Makes the steps of a run on `device`.

    Args:
        state: the run.
        max_grad_norm: gradients are scaled down to it; None leaves them.
        every: how many steps lie between two readings, at most.
    """

    def __init__(self, state: TrainState, device: Device, max_grad_norm: float | None, every: int) -> None:
        self.state, self.device, self.max_grad_norm, self.every = state, device, max_grad_norm, every
        self._feed = Feed(device, state.loader.batch_size, state.loader.seq_len)
        self._guard = zeros((), device=device)
        self._made: list[_Made] = []
        self._figures, self._begun = self._fresh(), cuda.Event(enable_timing=True)

    def take(self, batches: Sequence[Batch], lr: float) -> None:
        """Launch a step on `batches` as if they were one big batch: the summed loss is divided by all their targets."""
        state, place = self.state, len(self._made)
        assert place < self.every, "figures are read before there is no room for more"
        if not self._made:
            self._begun.record()
        targets = sum(b.num_targets for b in batches)
        state.optimizer.zero_grad()
        loss = self._run(batches[0], targets)
        for batch in batches[1:]:
            loss = loss + self._run(batch, targets)
        norm = state.optimizer.grad_norm()
        with no_grad():
            self._guard.add_((loss + norm) * 0.0)  # infinity times 0 is NaN, too
            scale = self._guard + 1.0
            if self.max_grad_norm is not None:
                scale = clip_scale(norm, self.max_grad_norm) + self._guard
            self._figures[place, 0].copy_(loss)
            self._figures[place, 1].copy_(norm)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step(grad_scale=scale)
        tokens = sum(b.num_tokens for b in batches)
        ended = cuda.Event(enable_timing=True)
        ended.record()
        self._made.append(_Made(state.step, tuple((b.epoch, b.index) for b in batches), targets, tokens, ended))
        state.step += 1
        state.num_tokens += tokens

    def _run(self, batch: Batch, targets: int) -> Tensor:
        """Forward and backward of one batch: its part of the loss, on the device."""
        placed = self._feed.put(batch, targets)
        loss: Tensor = self.state.model.loss(
            placed.input_ids, placed.labels, position_ids=placed.position_ids, num_targets=placed.num_targets
        )
        loss.backward()
        return loss.detach()

    def reading(self) -> Reading:
        """The figures of the steps since the last call."""
        made, self._made = self._made, []
        figures, begun = self._figures, self._begun
        self._figures, self._begun = self._fresh(), cuda.Event(enable_timing=True)
        return Reading(self, begun, made, figures.narrow(0, 0, len(made)))

    def _fresh(self) -> Tensor:
        """Room for the loss and the gradient norm of each step, `[every, 2]`."""
        room: Tensor = empty(self.every, 2, dtype=float32, device=self.device)
        return room

    def explain(self, before: int, batches: Sequence[tuple[int, int]], loss: float, norm: float) -> NumericError:
        """Make a step without its update once more, and say what was not finite, and on which samples."""
        self.state.step = before
        self.state.optimizer.zero_grad()
        again = [self.state.loader.batch(epoch, index) for epoch, index in batches]
        targets = sum(b.num_targets for b in again)
        losses = [float(self._run(batch, targets).item()) for batch in again]
        return not_finite(self.state, again, losses, f"the loss was {loss} and the gradient norm {norm}")

"""Optimizer steps on a GPU, as CUDA graphs. A step never blocks: losses and norms are read one interval later.

`DeviceSteps` trains on one GPU. With several ranks, rank r takes the micro-batches r, r + W, … and exchanges gradients
after each. If the process group works in stream order, the collectives run inside the graphs and overlap with the
backward pass and the update (`OverlappedSteps`). Otherwise they run between the graphs and block (`BlockingSteps`).

After a step with a loss or gradient that is not finite, no weight may change. A mark on the device is therefore 0 until
the first bad step and NaN from then on. The clip scale includes it, and the kernels skip an update whose scale is
NaN. When the figures are read, the bad step runs again from unchanged weights to find out what is not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genesis import cuda, random
from genesis.array import Array
from genesis.autograd import no_grad
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.dtypes import DType, as_dtype, float32, float64, int64
from genesis.errors import NumericError
from genesis.functions.create import empty, zeros
from genesis.shapes import Shape, contiguous_strides
from genesis.tensor import Tensor
from genesis.train.captured import Captured
from genesis.train.state import TrainState
from genesis.train.step import StepResult, gradients_of_ranks, not_finite


@dataclass(frozen=True)
class _Step:
    """A step that the host has launched.

    Attributes:
        before: number of steps before it.
        batches: (epoch, index) of its batches.
        ended: event after it in the stream.
        drawn: state of the random generator before it.
    """

    before: int
    batches: tuple[tuple[int, int], ...]
    targets: int
    tokens: int
    ended: cuda.Event
    drawn: dict[str, int]


class Reading:
    """Figures of some steps while they are copied to the host."""

    def __init__(self, steps: DeviceSteps, begun: cuda.Event, launched: Sequence[_Step], figures: Tensor) -> None:
        self._steps, self._begun, self._launched = steps, begun, launched
        self._host = empty(*figures.shape, dtype=float32).pin_memory(figures.device)
        self._host.copy_(figures, non_blocking=True)
        self._arrived = cuda.current_stream(figures.device).record_event()

    def results(self) -> list[StepResult]:
        """Block until the figures have arrived, and return them.

        Raises:
            NumericError: a loss or norm is not finite. The weights are the ones before that step.
        """
        self._arrived.synchronize()
        step_results, begun = [], self._begun
        for step, (loss, norm, *figures) in zip(self._launched, self._host.numpy().tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._steps.explain(step, loss, norm)
            seconds = begun.elapsed_time(step.ended) / 1e3
            sums = self._steps.of_all_ranks(figures) if figures else ()
            step_results.append(StepResult(loss * step.targets, step.targets, step.tokens, norm, seconds, sums))
            begun = step.ended
        return step_results


class DeviceSteps:
    """Runs the steps of a run on `device` without other ranks; `steps_of` chooses the class.

    Args:
        state: the run.
        max_grad_norm: global norm to clip gradients to; None does not clip.
        every: maximum number of steps between two readings.
        note: called once with the reason if steps cannot be captured.

    Attributes:
        feed: copies the batches to the device.
    """

    def __init__(
        self,
        state: TrainState,
        device: Device,
        max_grad_norm: float | None,
        every: int,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.state, self.device, self.max_grad_norm, self.every = state, device, max_grad_norm, every
        optimizer = state.optimizer
        scalars = optimizer.device_scalars(device)
        fields = state.objective.fields(Batch.empty(state.loader.batch_size, state.loader.seq_len))
        self.feed = Feed(device, fields, scalars.array.size)
        scalars.read_from(self.feed.scalars)
        self._loss, self._report = zeros((), device=device), zeros(4, device=device)
        # Sums of the objective's figures over this rank's micro-batches.
        self._figure_sums = zeros(len(figures), device=device) if (figures := state.objective.figures) else None
        self._launched: list[_Step] = []
        self._figures, self._begun = self._fresh(), cuda.Event(enable_timing=True)
        self._is_first = True
        self._captures_update = optimizer.not_capturable is None
        if optimizer.not_capturable is not None:
            note(f"updates are not captured in a CUDA graph and take longer: {optimizer.not_capturable}")
        self._first, self._following, self._update, self._whole = self._parts = tuple(
            Captured(part, device, note, state.ranks.all)
            for part in (self._run_first, self._run_following, self._run_update, self._run_whole)
        )

    def take(self, batches: Sequence[Batch], lr: float) -> None:
        """Launch a step on `batches` as if they were one big batch: all their targets divide the summed loss."""
        state, slot = self.state, len(self._launched)
        assert slot < self.every, "the figures are read before the buffer is full"
        if self._is_first:  # gradients and optimizer state would keep segments of earlier tensors
            cuda.empty_cache(self.device)
            self._is_first = False
        stream = cuda.current_stream(self.device)
        if not self._launched:
            stream.record_event(self._begun)
        # Read what depends on the host: learning rate, update counts, position of the random draws.
        targets = sum(map(state.objective.num_targets, batches))
        state.optimizer.set_lr(lr)
        state.optimizer.begin_step()
        values, drawn = state.optimizer.step_scalars(), random.get_state()
        self._launch(batches, targets, values)

        with no_grad():
            self._figures[slot, :2].copy_(self._report[:2])
            if self._figure_sums is not None:
                self._figures[slot, 2:].copy_(self._figure_sums)
        tokens = sum(b.num_tokens for b in batches)
        ended = stream.record_event(cuda.Event(enable_timing=True))
        self._launched.append(
            _Step(state.step, tuple((b.epoch, b.index) for b in batches), targets, tokens, ended, drawn)
        )
        state.step += 1
        state.num_tokens += tokens

    def _launch(self, batches: Sequence[Batch], targets: int, values: Sequence[float]) -> None:
        self._put(batches[0], targets, values)
        if len(batches) == 1 and self._captures_update:
            self._whole()
        else:
            self._first()
            for batch in batches[1:]:
                self._put(batch, targets, values)
                self._following()
            self._finish()

    def _finish(self) -> None:
        if self._captures_update:
            self._update()
        else:
            self._run_update()

    def _put(self, batch: Batch, targets: int, values: Sequence[float]) -> None:
        self.feed.put(self.state.objective.fields(batch), targets, values, random.default_generator.words())

    # --- What is captured ---------------------------------------------------------------------------------------------

    def _run_whole(self) -> None:
        self._run_first()
        self._run_update()

    def _run_first(self) -> None:
        """Run the first micro-batch, whose gradients replace the previous ones."""
        self.state.optimizer.zero_grad()
        self._loss.copy_(self._run())

    def _run_following(self) -> None:
        self._loss.add_(self._run(adds=True))

    def _run(self, *, adds: bool = False) -> Tensor:
        """Run forward and backward on the batch in the feed; return its part of the loss. `adds` sums the figures."""
        feed = self.feed
        with random.default_generator.positioned_by(feed.position):
            loss, figures = self.state.objective.loss(self.state.model, feed.fields, feed.num_targets)
            loss.backward()
        if figures is not None and self._figure_sums is not None:
            keep = self._figure_sums.add_ if adds else self._figure_sums.copy_
            keep(figures.detach())
        return loss.detach()

    def _row(self, loss: Tensor) -> list[float]:
        """Return the loss and the figures of the last batch. It blocks until both are computed."""
        return [float(loss.item()), *([] if self._figure_sums is None else self._figure_sums.tolist())]

    def _run_update(self) -> None:
        """Clip and update, unless a loss or norm is not finite; `_report` receives both."""
        optimizer = self.state.optimizer
        scale = optimizer.clip_factor(self._report, self._loss, self.max_grad_norm)
        optimizer.update(grad_scale=scale)

    # --- Reading ------------------------------------------------------------------------------------------------------

    def reading(self) -> Reading:
        """Return the figures of the steps since the last call."""
        launched, self._launched = self._launched, []
        figures, begun = self._figures, self._begun
        self._figures, self._begun = self._fresh(), cuda.Event(enable_timing=True)
        return Reading(self, begun, launched, figures.narrow(0, 0, len(launched)))

    def _fresh(self) -> Tensor:
        """Allocate the buffer of loss, gradient norm and the objective's figures per step, `[every, 2 + k]`."""
        count = 2 + len(self.state.objective.figures)
        room: Tensor = empty(self.every, count, dtype=float32, device=self.device)
        return room

    def _keep_figures(self, figures: Sequence[Sequence[float]]) -> None:
        """Set the objective's figures of a step to the sums over all micro-batches. Only rank 0 holds them."""
        with no_grad():
            for number, values in enumerate(figures):
                assert self._figure_sums is not None
                self._figure_sums[number].fill_(math.fsum(values) if self.state.ranks.is_main else 0.0)

    def of_all_ranks(self, figures: Sequence[float]) -> tuple[float, ...]:
        """Return the sum over ranks of each figure. All ranks must call it."""
        ranks = self.state.ranks
        values = ranks.in_turn(figures)
        return tuple(math.fsum(values[i : i + ranks.size]) for i in range(0, len(values), ranks.size))

    def explain(self, step: _Step, loss: float, norm: float) -> NumericError:
        """Run a step again without its update; return an error that names what is not finite and in which samples."""
        for part in self._parts:
            part.close()
        cuda.empty_cache(self.device)  # the step needs the memory of the graphs
        self.state.step = step.before
        random.set_state(step.drawn)
        self.state.optimizer.zero_grad()
        micro_batches = [self.state.loader.batch(epoch, index) for epoch, index in step.batches]
        targets = sum(map(self.state.objective.num_targets, micro_batches))
        values = self.state.optimizer.step_scalars()

        def accumulate(batch: Batch) -> list[float]:
            if self.state.ranks.size > 1:
                self.state.optimizer.zero_grad()
            self._put(batch, targets, values)
            return [float(self._run().item())]

        if self.state.ranks.size > 1:
            (losses,) = gradients_of_ranks(self.state, micro_batches, accumulate)
        else:
            losses = [loss for batch in micro_batches for loss in accumulate(batch)]
        return not_finite(self.state, micro_batches, losses, f"the loss was {loss} and the gradient norm {norm}")


# --- The feed of batches ----------------------------------------------------------------------------------------------


class _Slot:
    def __init__(self, device: Device, size: int) -> None:
        self.host = empty(size, dtype=int64).pin_memory(device)
        self.staged = empty(size, dtype=int64, device=device)
        self.copied, self.read = cuda.Event(), cuda.Event()


class Feed:
    """Copies batches, and the device scalars of their steps, to `device`.

    They are written to pinned memory and copied on a separate stream through two slots, so that the copy of the next
    batch overlaps with the computation. The host blocks only when it is two batches ahead. Each batch ends up at the
    same address, which the CUDA graph of a step reads.

    Args:
        fields: fields of any batch, int64 or float64. All batches have these shapes and dtypes.
        scalars: number of device scalars.

    Attributes:
        fields: the latest batch on the device, in the order of the stream that called `put`.
        num_targets: divisor of its summed loss, 0-d int64.
        scalars: the device scalars, float64.
        position: start of the batch's random draws, int64 `[2]`; see `Generator.positioned_by`.
    """

    def __init__(self, device: Device, fields: Sequence[np.ndarray], scalars: int) -> None:
        assert all(values.dtype.itemsize == 8 for values in fields), "fields are int64 or float64"
        self.device = device
        self._copies = cuda.Stream(device)
        size = sum(values.size for values in fields)
        total = size + 3 + scalars
        self._slots = [_Slot(device, total) for _ in range(2)]
        self._words = empty(total, dtype=int64, device=device)
        begins = itertools.accumulate((values.size for values in fields), initial=0)
        self.fields = tuple(
            Tensor(self._part(at, values.shape, as_dtype(values.dtype)))
            for at, values in zip(begins, fields, strict=False)
        )
        self.num_targets = self._words[size]
        self.scalars = self._part(size + 1, (scalars,), float64)
        self.position = self._words[total - 2 :]

    def _part(self, at: int, shape: Shape, dtype: DType) -> Array:
        """Return the words from `at` on as an array of this dtype, which has 8 bytes per element."""
        words = self._words.array
        return Array(words.storage, shape, contiguous_strides(shape), dtype, self.device, words.offset + at)

    def put(
        self,
        fields: Sequence[np.ndarray],
        num_targets: int,
        scalars: Sequence[float],
        position: tuple[int, int] = (0, 0),
    ) -> None:
        """Copy a batch, its scalars and its position; work launched after this call finds it in `fields`."""
        compute, slot = cuda.current_stream(self.device), self._slots[0]
        self._slots.reverse()
        # Write the words of the batch to the older slot, once its last copy is done.
        slot.copied.synchronize()
        words, at = slot.host.numpy(), 0
        for values in fields:
            np.copyto(words[at : at + values.size].view(values.dtype).reshape(values.shape), values)
            at += values.size
        words[at] = num_targets
        words[at + 1 : -2].view(np.float64)[:] = scalars
        words[-2:] = position
        # Copy them on the side stream, then to their fixed address in the order of the current stream.
        self._copies.wait_event(slot.read)
        with cuda.stream(self._copies):
            slot.staged.copy_(slot.host, non_blocking=True)
            slot.copied.record(self._copies)
        compute.wait_event(slot.copied)
        self._words.copy_(slot.staged)
        slot.read.record(compute)


# --- Several ranks, each on its own GPU -------------------------------------------------------------------------------


class BlockingSteps(DeviceSteps):
    """Collectives run between the graphs and block."""

    def _launch(self, batches: Sequence[Batch], targets: int, values: Sequence[float]) -> None:
        def accumulate(batch: Batch) -> list[float]:
            self._put(batch, targets, values)
            self._first()
            return self._row(self._loss)

        losses, *figures = gradients_of_ranks(self.state, batches, accumulate)
        self._keep_figures(figures)
        total = np.float32(losses[0])
        for loss in losses[1:]:  # in the order in which one process adds them
            total += np.float32(loss)
        with no_grad():
            self._loss.fill_(float(total))
        self._finish()
        self.state.optimizer.share()


class OverlappedSteps(DeviceSteps):
    """Collectives are part of the graphs. After a process's first step nothing blocks on the device.

    The first step measures how many random numbers a micro-batch draws, which determines where each rank's draws start.
    """

    _losses: Tensor  # of all micro-batches of a step `[n]`; 0 for micro-batches of other ranks

    def __init__(self, state: TrainState, *rest: Any) -> None:
        super().__init__(state, *rest)
        self._losses = zeros(0, device=self.device)

    def _launch(self, batches: Sequence[Batch], targets: int, values: Sequence[float]) -> None:
        state, generator = self.state, random.default_generator
        if self._losses.shape[0] != len(batches):
            self._losses = zeros(len(batches), device=self.device)
        if state.draws is None:
            self._launch_first(batches, targets, values)
            return
        # Launch this rank's micro-batches, with their random draws at the positions that one process would use.
        mine, begun = range(state.ranks.rank, len(batches), state.ranks.size), generator.offset
        is_whole = len(mine) == 1 and self._captures_update
        for number in mine:
            generator.offset = begun + number * state.draws
            self._put(batches[number], targets, values)
            if is_whole:
                self._whole()
                break
            (self._first if number == mine[0] else self._following)()
            self._keep_loss(number)
        generator.offset = begun + len(batches) * state.draws
        if not is_whole:
            self._finish()

    def _launch_first(self, batches: Sequence[Batch], targets: int, values: Sequence[float]) -> None:
        """Launch the first step of the process, which is not captured; its collectives block."""

        def accumulate(batch: Batch) -> list[float]:
            self.state.optimizer.zero_grad()
            self._put(batch, targets, values)
            return self._row(self._run())

        losses, *figures = gradients_of_ranks(self.state, batches, accumulate)
        self._keep_figures(figures)
        ranks = self.state.ranks
        with no_grad():
            for number in range(ranks.rank, len(batches), ranks.size):
                self._losses[number].fill_(losses[number])
        self._run_update()

    def _keep_loss(self, number: int) -> None:
        with no_grad():
            self._losses[number].copy_(self._loss)

    # --- What is captured ---------------------------------------------------------------------------------------------

    def _run_whole(self) -> None:
        self._run_first()
        self._keep_loss(self.state.ranks.rank)
        self._run_update()

    def _run_first(self) -> None:
        self._run_and_exchange(adds=False)

    def _run_following(self) -> None:
        self._run_and_exchange(adds=True)

    def _run_and_exchange(self, adds: bool) -> None:
        """Run a micro-batch, whose gradients replace the previous ones; the optimizer holds their sums."""
        optimizer = self.state.optimizer
        optimizer.zero_grad()
        with optimizer.exchanging(adds):
            self._loss.copy_(self._run(adds=adds))

    def _run_update(self) -> None:
        optimizer = self.state.optimizer
        optimizer.complete()
        scale = optimizer.clip_factor(self._report, self._losses, self.max_grad_norm)
        optimizer.update(grad_scale=scale)
        optimizer.share()


def steps_of(state: TrainState) -> type[DeviceSteps]:
    """Return the class that runs the steps of a run on a GPU."""
    if state.ranks.size == 1:
        return DeviceSteps
    return OverlappedSteps if state.optimizer.overlaps_exchange else BlockingSteps

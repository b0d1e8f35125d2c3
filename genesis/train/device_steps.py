"""Optimizer steps on a GPU, as CUDA graphs. Nothing in a step waits: losses and norms are read an interval later.

`DeviceSteps` trains alone. Of several ranks, each on a GPU, rank r takes the micro-batches r, r + W, …, and after each
of them all exchange their gradients: inside the graphs, beside backward and the update, where their group works in
stream order (`OverlappedSteps`), else between the graphs (`BlockingSteps`).

A step whose loss or gradient is not finite must change no weight, and no later step may either. So a mark on the device
is 0 while all is well and NaN from the first bad step on; it becomes part of the clip scale, and a scale of NaN leaves
an update out. When the figures are read, the bad step is made once more, from the weights that it found, to say
what is wrong.
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
class _Made:
    """What the host knows of a step it has launched.

    Attributes:
        before: steps done before it.
        batches: (epoch, index) of its batches.
        ended: its position in the stream.
        drawn: the state of the random generator before it.
    """

    before: int
    batches: tuple[tuple[int, int], ...]
    targets: int
    tokens: int
    ended: cuda.Event
    drawn: dict[str, int]


class Reading:
    """Figures of some steps, on their way to the host."""

    def __init__(self, steps: DeviceSteps, begun: cuda.Event, made: Sequence[_Made], figures: Tensor) -> None:
        self._steps, self._begun, self._made = steps, begun, made
        self._host = empty(*figures.shape, dtype=float32).pin_memory(figures.device)
        self._host.copy_(figures, non_blocking=True)
        self._there = cuda.current_stream(figures.device).record_event()

    def results(self) -> list[StepResult]:
        """Wait for the figures.

        Raises:
            NumericError: a loss or norm is not finite; the weights are those before that step.
        """
        self._there.synchronize()
        found, begun = [], self._begun
        for made, (loss, norm, *figures) in zip(self._made, self._host.numpy().tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._steps.explain(made, loss, norm)
            seconds = begun.elapsed_time(made.ended) / 1e3
            sums = self._steps.of_all_ranks(figures) if figures else ()
            found.append(StepResult(loss * made.targets, made.targets, made.tokens, norm, seconds, sums))
            begun = made.ended
        return found


class DeviceSteps:
    """Makes the steps of a run on `device`, alone; `steps_of` chooses those of ranks.

    Args:
        state: the run.
        max_grad_norm: gradients are scaled down to it; None leaves them.
        every: how many steps lie between two readings, at most.
        note: called once with why steps cannot be captured, if so.

    Attributes:
        feed: what brings the batches.
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
        # The objective's figures, of this rank's micro-batches.
        self._of_objective = zeros(len(figures), device=device) if (figures := state.objective.figures) else None
        self._made: list[_Made] = []
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
        """Launch a step on `batches` as if they were one big batch: the summed loss is divided by all their targets."""
        state, place = self.state, len(self._made)
        assert place < self.every, "figures are read before there is no room for more"
        if self._is_first:  # gradients and optimizer state would keep segments of what came before
            cuda.empty_cache(self.device)
            self._is_first = False
        stream = cuda.current_stream(self.device)
        if not self._made:
            stream.record_event(self._begun)
        targets = sum(map(state.objective.num_targets, batches))
        state.optimizer.set_lr(lr)
        state.optimizer.begin_step()
        values, drawn = state.optimizer.step_scalars(), random.get_state()
        self._launch(batches, targets, values)

        with no_grad():
            self._figures[place, :2].copy_(self._report[:2])
            if self._of_objective is not None:
                self._figures[place, 2:].copy_(self._of_objective)
        tokens = sum(b.num_tokens for b in batches)
        ended = stream.record_event(cuda.Event(enable_timing=True))
        self._made.append(_Made(state.step, tuple((b.epoch, b.index) for b in batches), targets, tokens, ended, drawn))
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
        self.feed.put(self.state.objective.fields(batch), targets, values, random.default_generator.offset)

    # --- What is captured ---------------------------------------------------------------------------------------------

    def _run_whole(self) -> None:
        self._run_first()
        self._run_update()

    def _run_first(self) -> None:
        """The first micro-batch, whose gradients replace those before."""
        self.state.optimizer.zero_grad()
        self._loss.copy_(self._run())

    def _run_following(self) -> None:
        self._loss.add_(self._run(adds=True))

    def _run(self, *, adds: bool = False) -> Tensor:
        """Forward and backward of the batch in the feed: its part of the loss. Its figures are kept, or added."""
        feed = self.feed
        with random.default_generator.positioned_by(feed.position):
            loss, figures = self.state.objective.loss(self.state.model, feed.fields, feed.num_targets)
            loss.backward()
        if figures is not None and self._of_objective is not None:
            keep = self._of_objective.add_ if adds else self._of_objective.copy_
            keep(figures.detach())
        return loss.detach()

    def _row(self, loss: Tensor) -> list[float]:
        """This loss and the figures of the batch that ran last; it waits for both."""
        return [float(loss.item()), *([] if self._of_objective is None else self._of_objective.tolist())]

    def _run_update(self) -> None:
        """Clip and update, unless a loss or norm was not finite; `_report` says which."""
        optimizer = self.state.optimizer
        scale = optimizer.clip_factor(self._report, self._loss, self.max_grad_norm)
        optimizer.update(grad_scale=scale)

    # --- Reading ------------------------------------------------------------------------------------------------------

    def reading(self) -> Reading:
        """The figures of the steps since the last call."""
        made, self._made = self._made, []
        figures, begun = self._figures, self._begun
        self._figures, self._begun = self._fresh(), cuda.Event(enable_timing=True)
        return Reading(self, begun, made, figures.narrow(0, 0, len(made)))

    def _fresh(self) -> Tensor:
        """Room for the loss, the gradient norm and the objective's figures of each step, `[every, 2 + k]`."""
        count = 2 + len(self.state.objective.figures)
        room: Tensor = empty(self.every, count, dtype=float32, device=self.device)
        return room

    def _keep_figures(self, figures: Sequence[Sequence[float]]) -> None:
        """Set the objective's figures of a step to the sums over all its micro-batches, which rank 0 keeps alone."""
        with no_grad():
            for number, values in enumerate(figures):
                assert self._of_objective is not None
                self._of_objective[number].fill_(math.fsum(values) if self.state.ranks.is_main else 0.0)

    def of_all_ranks(self, figures: Sequence[float]) -> tuple[float, ...]:
        """The sum over ranks of each figure: a call of all ranks."""
        ranks = self.state.ranks
        values = ranks.in_turn(figures)
        return tuple(math.fsum(values[i : i + ranks.size]) for i in range(0, len(values), ranks.size))

    def explain(self, made: _Made, loss: float, norm: float) -> NumericError:
        """Make a step without its update once more, and say what was not finite, and on which samples."""
        for part in self._parts:
            part.close()
        cuda.empty_cache(self.device)  # of graphs, whose memory the step needs
        self.state.step = made.before
        random.set_state(made.drawn)
        self.state.optimizer.zero_grad()
        again = [self.state.loader.batch(epoch, index) for epoch, index in made.batches]
        targets = sum(map(self.state.objective.num_targets, again))
        values = self.state.optimizer.step_scalars()

        def accumulate(batch: Batch) -> list[float]:
            if self.state.ranks.size > 1:
                self.state.optimizer.zero_grad()
            self._put(batch, targets, values)
            return [float(self._run().item())]

        if self.state.ranks.size > 1:
            (losses,) = gradients_of_ranks(self.state, again, accumulate)
        else:
            losses = [loss for batch in again for loss in accumulate(batch)]
        return not_finite(self.state, again, losses, f"the loss was {loss} and the gradient norm {norm}")


# --- The feed of batches ----------------------------------------------------------------------------------------------


class _Slot:
    def __init__(self, device: Device, size: int) -> None:
        self.host = empty(size, dtype=int64).pin_memory(device)
        self.there = empty(size, dtype=int64, device=device)
        self.copied, self.read = cuda.Event(), cuda.Event()


class Feed:
    """Brings batches to `device`, and with each the device scalars of its step.

    They are written into pinned memory and copied on a stream of their own, two in turn: while one batch is computed
    on, the next one travels. The host waits only when it is two batches ahead. Each batch ends up at the same address,
    where a step that is a CUDA graph reads it.

    Args:
        fields: those of a batch, whose shapes and types all batches have: int64 or float64.
        scalars: how many.

    Attributes:
        fields: where those of the batch that was put last are, in the order of the stream it was put on.
        num_targets: what its summed loss is divided by, 0-d int64.
        scalars: where they are, float64.
        position: where random draws on the batch start, 0-d int64: see `Generator.positioned_by`.
    """

    def __init__(self, device: Device, fields: Sequence[np.ndarray], scalars: int) -> None:
        assert all(values.dtype.itemsize == 8 for values in fields), "fields are int64 or float64"
        self.device = device
        self._copies = cuda.Stream(device)
        size = sum(values.size for values in fields)
        total = size + 2 + scalars
        self._slots = [_Slot(device, total) for _ in range(2)]
        self._there = empty(total, dtype=int64, device=device)
        begins = itertools.accumulate((values.size for values in fields), initial=0)
        self.fields = tuple(
            Tensor(self._part(at, values.shape, as_dtype(values.dtype)))
            for at, values in zip(begins, fields, strict=False)
        )
        self.num_targets = self._there[size]
        self.scalars = self._part(size + 1, (scalars,), float64)
        self.position = self._there[total - 1]

    def _part(self, at: int, shape: Shape, dtype: DType) -> Array:
        """The words from `at` on as an array of this type, which takes 8 bytes an element."""
        there = self._there.array
        return Array(there.storage, shape, contiguous_strides(shape), dtype, self.device, there.offset + at)

    def put(self, fields: Sequence[np.ndarray], num_targets: int, scalars: Sequence[float], position: int = 0) -> None:
        """Bring a batch, its scalars and its position: work that is launched from now on finds it in `fields`."""
        compute, slot = cuda.current_stream(self.device), self._slots[0]
        self._slots.reverse()
        slot.copied.synchronize()
        words, at = slot.host.numpy(), 0
        for values in fields:
            np.copyto(words[at : at + values.size].view(values.dtype).reshape(values.shape), values)
            at += values.size
        words[at] = num_targets
        words[at + 1 : -1].view(np.float64)[:] = scalars
        words[-1] = position
        self._copies.wait_event(slot.read)
        with cuda.stream(self._copies):
            slot.there.copy_(slot.host, non_blocking=True)
            slot.copied.record(self._copies)
        compute.wait_event(slot.copied)
        self._there.copy_(slot.there)
        slot.read.record(compute)


# --- Several ranks, each on its own GPU -------------------------------------------------------------------------------


class BlockingSteps(DeviceSteps):
    """What ranks send each other is between graphs, and waits."""

    def _launch(self, batches: Sequence[Batch], targets: int, values: Sequence[float]) -> None:
        def accumulate(batch: Batch) -> list[float]:
            self._put(batch, targets, values)
            self._first()
            return self._row(self._loss)

        losses, *figures = gradients_of_ranks(self.state, batches, accumulate)
        self._keep_figures(figures)
        total = np.float32(losses[0])
        for loss in losses[1:]:  # as one process adds them
            total += np.float32(loss)
        with no_grad():
            self._loss.fill_(float(total))
        self._finish()
        self.state.optimizer.share()


class OverlappedSteps(DeviceSteps):
    """What ranks send each other is in the graphs: after the first step of a process nothing waits for the device.

    The first step learns how many random numbers a micro-batch draws, and so where those of each rank begin.
    """

    _losses: Tensor  # of all micro-batches of a step `[n]`; 0 where they are other ranks'

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
        """The first step of the process: nothing of it is captured, and what ranks exchange waits for backward."""

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
        """A micro-batch, whose gradients replace those before; their sums are in the optimizer."""
        optimizer = self.state.optimizer
        optimizer.zero_grad()
        with optimizer.exchanging(adds):
            self._loss.copy_(self._run(adds=adds))

    def _run_update(self) -> None:
        """Clip, update and share what was updated."""
        optimizer = self.state.optimizer
        optimizer.complete()
        scale = optimizer.clip_factor(self._report, self._losses, self.max_grad_norm)
        optimizer.update(grad_scale=scale)
        optimizer.share()


def steps_of(state: TrainState) -> type[DeviceSteps]:
    """Which steps a run on a GPU makes."""
    if state.ranks.size == 1:
        return DeviceSteps
    return OverlappedSteps if state.optimizer.overlaps_exchange else BlockingSteps

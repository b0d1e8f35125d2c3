"""Optimizer steps of several ranks on GPUs, each on its own: `DeviceSteps` with the exchange of gradients and weights.

Rank r takes the micro-batches r, r + W, …, and after each of them all ranks exchange their gradients. Where their group
works in stream order, that is part of the CUDA graphs and goes on beside backward and the update: `StepsBeside`. Where
it waits for the device, it is between the graphs: `StepsBetween`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genesis import random
from genesis.autograd import no_grad
from genesis.data.loader import Batch
from genesis.functions.create import zeros
from genesis.tensor import Tensor
from genesis.train.device_steps import DeviceSteps
from genesis.train.state import TrainState
from genesis.train.step import gradients_of_ranks


def steps_of(state: TrainState) -> type[DeviceSteps]:
    """Which steps a run on a GPU makes."""
    if state.ranks.size == 1:
        return DeviceSteps
    return StepsBeside if state.optimizer.exchanges_beside else StepsBetween


class StepsBetween(DeviceSteps):
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


class StepsBeside(DeviceSteps):
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

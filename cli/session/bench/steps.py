"""Taking training steps on random tokens as `genesis train` takes them: on a GPU as CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, cast

from genesis.backend import CPU, Device
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import ALONE, Ranks
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.cases import RandomTokens
from genesis_models.blocks import CausalLM

OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
EVERY = 64  # steps between two readings of their figures
UNTIL_CAPTURED = 4  # two as they are, one captured, one replayed


def new_state(model: CausalLM, batch: int, length: int, ranks: Ranks = ALONE) -> TrainState:
    """A run of `model` at its first step, with an optimizer of its own; of several ranks each has a batch of a step."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    optimizer = build_optimizer(optim, model.named_parameters(), 0, ranks.size, ranks.group)
    return TrainState(model, optimizer, loader, ranks=ranks)


class GraphSteps:
    """Each call takes a step. From the third on it is a CUDA graph, unless `notes` gets the reason why not."""

    def __init__(self, state: TrainState, device: Device, notes: list[str]) -> None:
        self._state, self._batches = state, cast(Any, state.loader).batches()
        self._steps = steps_of(state)(state, device, MAX_NORM, EVERY, notes.append)
        state.step = 0

    def __call__(self) -> None:
        self._steps.take(list(itertools.islice(self._batches, self._state.ranks.size)), LR)
        if self._state.step % EVERY == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the steps; raises NumericError where a loss was not finite."""
        self._steps.reading().results()


def taking(state: TrainState, device: Device, notes: list[str]) -> Callable[[], None]:
    """What takes a step on the device; on a GPU it is captured already."""
    if device == CPU:
        batches = cast(Any, state.loader).batches()

        def take() -> None:
            take_step(state, list(itertools.islice(batches, state.ranks.size)), LR, MAX_NORM, device)

        return take
    steps = GraphSteps(state, device, notes)
    for _ in range(UNTIL_CAPTURED + (state.ranks.size > 1)):  # ranks exchange after the first step's backward
        steps()
    return steps

"""Taking training steps on random tokens as `genesis train` takes them: on a GPU as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from genesis.backend import CPU, Device
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.cases import RandomTokens
from genesis_models.blocks import CausalLM

__all__ = ["LR", "MAX_NORM", "OPTIMIZER", "UNTIL_CAPTURED", "GraphSteps", "new_state", "taking"]

OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
EVERY = 64  # steps between two readings of their figures
UNTIL_CAPTURED = 4  # two as they are, one captured, one replayed


def new_state(model: CausalLM, batch: int, length: int) -> TrainState:
    """A run of `model` at its first step, with an optimizer of its own."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    return TrainState(model, build_optimizer(optim, model.named_parameters(), 0), loader)


class GraphSteps:
    """Each call takes a step. From the third on it is a CUDA graph, unless `notes` gets the reason why not."""

    def __init__(self, state: TrainState, device: Device, notes: list[str]) -> None:
        self._state, self._batches = state, cast(Any, state.loader).batches()
        self._steps = DeviceSteps(state, device, MAX_NORM, EVERY, notes.append)
        state.step = 0

    def __call__(self) -> None:
        self._steps.take([next(self._batches)], LR)
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
            take_step(state, [next(batches)], LR, MAX_NORM, device)

        return take
    steps = GraphSteps(state, device, notes)
    for _ in range(UNTIL_CAPTURED):
        steps()
    return steps

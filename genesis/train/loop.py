"""The training loop. Read `Training.run` top to bottom; everything else here is one of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from genesis.backend import Device
from genesis.backend.cpu import pool
from genesis.data.loader import Batch, PackedLoader
from genesis.data.pipeline import HeldOut
from genesis.errors import InterruptedRun, escape
from genesis.train.checkpoint import Checkpoints
from genesis.train.config import Config
from genesis.train.evaluation import Evaluation, evaluate
from genesis.train.metrics import MetricsWriter, read_metrics
from genesis.train.progress import Progress
from genesis.train.signals import Interrupts
from genesis.train.state import Interval, TrainState
from genesis.train.step import StepResult, take_step
from genesis.train.throughput import Throughput

__all__ = ["Summary", "Training", "total_steps"]


def total_steps(config: Config, loader: PackedLoader) -> int:
    """Optimizer steps of the run: `train.steps`, or as many as complete `train.epochs`."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None, "the schema asks for one of the two"
    whole, part = int(config.train.epochs), config.train.epochs % 1
    batches: float = sum(loader.num_batches(epoch) for epoch in range(whole))
    if part:
        batches += part * loader.num_batches(whole)
    return max(1, math.ceil(batches / config.train.accumulation_steps))


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    state_hash: str
    loss: float | None
    evaluation: Evaluation | None
    tokens_per_second: float | None
    seconds: float


@dataclass
class Training:
    """A run ready to go: its state and what it reports to.

    Attributes:
        lr_at: the learning rate of a step, counted from 0.
        sample: continues a prompt with the model as it is; for the text samples.
    """

    config: Config
    state: TrainState
    checkpoints: Checkpoints
    lr_at: Callable[[int], float]
    sample: Callable[[str], str]
    held_out: HeldOut | None
    open_metrics: Callable[[int | None], MetricsWriter]
    progress: Progress
    interrupts: Interrupts
    device: Device
    steps: int
    throughput: Throughput = field(default_factory=Throughput)
    saved_at: int = -1
    last_loss: float | None = None
    last_evaluation: Evaluation | None = None
    state_hash: str = ""
    metrics: MetricsWriter = field(init=False)
    resumed_at: int | None = None

    def continue_at(self, step: int) -> None:
        """The state was set to the checkpoint of `step`."""
        self.resumed_at = self.saved_at = self.progress.step = step

    def run(self) -> Summary:
        """Train to the last step, evaluating, logging and saving on the way.

        Raises:
            InterruptedRun: a signal came; the state was saved. NumericError: a loss or gradient is not finite.
        """
        started = time.perf_counter()
        self.state.model.train()
        with self.open_metrics(self.resumed_at) as self.metrics, self.progress:
            self._recall_evaluation()
            self._settle()  # a resumed run may owe an evaluation that a signal cut short
            while self.state.step < self.steps:
                self._report(self._step(self._batches()))
                self._settle()
        if not self.state_hash:  # the run was complete already
            self.state_hash = self.state.hash()
        speed = self.throughput.overall().get("perf/tokens_per_second")
        return Summary(
            self.state.step,
            self.state_hash,
            self.last_loss,
            self.last_evaluation,
            speed,
            time.perf_counter() - started,
        )

    def _recall_evaluation(self) -> None:
        """A run that was killed between an evaluation that it owed and its next save has the row already."""
        if self.resumed_at is not None:
            rows = read_metrics(self.metrics.path)
            if any(row["train/global_step"] == self.resumed_at and "eval/loss" in row for row in rows):
                self.state.evaluated_at = self.resumed_at

    def _batches(self) -> list[Batch]:
        return [next(self.state.loader) for _ in range(self.config.train.accumulation_steps)]

    def _step(self, batches: Sequence[Batch]) -> StepResult:
        state, train = self.state, self.config.train
        begun = time.perf_counter()
        result = take_step(state, batches, self.lr_at(state.step), train.max_grad_norm, self.device)
        self.throughput.add(result.tokens, time.perf_counter() - begun)
        state.interval.loss_sum += result.loss_sum
        state.interval.targets += result.targets
        return result

    def _settle(self) -> None:
        """What is due between two steps: evaluate, save, and stop if a signal came."""
        step, last = self.state.step, self.state.step == self.steps
        if step and self.state.evaluated_at != step and (last or _due(step, self.config.eval.every)):
            self._evaluate()
        if step and self.saved_at != step and (last or _due(step, self.config.checkpoint.every)):
            self._save()
        if self.interrupts.received is not None:
            self._stop(self.interrupts.received)

    def _report(self, result: StepResult) -> None:
        """Every `log.every` steps, and at the last one, a row of metrics."""
        state = self.state
        if state.step % self.config.log.every and state.step != self.steps:
            self.progress.update(state.step)
            return
        self.last_loss = state.interval.loss
        row: dict[str, float | None] = {
            "train/loss": state.interval.loss,
            "train/learning_rate": self.lr_at(state.step - 1),
            "train/grad_norm": result.grad_norm,
            "train/epoch": state.loader.epochs_done,
            "train/num_tokens": state.num_tokens,
            **self.throughput.interval(),
            "perf/mfu": None,  # the peak of a CPU is not known
            "memory/max_allocated": pool.max_allocated,
            "memory/max_reserved": pool.max_allocated + pool.cached,
        }
        self.metrics.write(state.step, row)
        self.progress.update(state.step, row)
        state.interval = Interval()

    def _evaluate(self) -> None:
        state, config = self.state, self.config
        if self.held_out is not None:
            found = evaluate(
                state.model,
                self.held_out,
                batch_size=config.eval_batch_size,
                seq_len=config.data.seq_len,
                max_batches=config.eval.max_batches,
                device=self.device,
                stop=lambda: self.interrupts.received is not None,
            )
            if found is None:
                return
            row: dict[str, float | int | None] = {
                "eval/loss": found.loss,
                "eval/perplexity": found.perplexity,
                "eval/bits_per_byte": found.bits_per_byte,
                "eval/gzip_bits_per_byte": self.held_out.gzip_bits_per_byte,
                "eval/num_tokens": found.targets,
            }
            self.metrics.write(state.step, row)
            self.progress.update(state.step, row)
            self.last_evaluation = found
        # Samples are for the eye: those that a signal cuts short are not owed, while the row must not come twice.
        state.evaluated_at = state.step
        for prompt in config.eval.prompts:
            if self.interrupts.received is not None:
                return
            self.progress.note(f"sample at step {state.step}:\n{prompt}{self.sample(prompt)}")

    def _save(self) -> None:
        self.metrics.sync()
        self.state_hash = self.checkpoints.save(self.state)
        self.saved_at = self.state.step
        self.progress.note(f"saved {self.checkpoints.folder(self.state.step)}")

    def _stop(self, signal: int) -> None:
        step = self.state.step
        if not step:
            next = "start it again with the same command"
            raise InterruptedRun(f"stopped by signal {signal} before the first step", signal=signal, next=next)
        if self.saved_at != step:
            self._save()
        raise InterruptedRun(
            f"stopped by signal {signal} after step {step}, which is saved",
            signal=signal,
            where=escape(self.checkpoints.folder(step)),
            next="continue with the same command and --resume",
        )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

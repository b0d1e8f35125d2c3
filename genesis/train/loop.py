"""The training loop. Read `Training.run` top to bottom; the other functions are its steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from signal import Signals
from typing import TYPE_CHECKING

from genesis.backend import CPU, Device
from genesis.backend.cpu import pool
from genesis.data.loader import Batch, PackedLoader
from genesis.data.pipeline import HeldOut
from genesis.errors import InterruptedRun, escape
from genesis.train.checkpoint import Checkpoints
from genesis.train.config import Config
from genesis.train.evaluation import Evaluation, evaluate
from genesis.train.metrics import STEP, Metrics, Sample, append_samples, keep_samples, read_metrics
from genesis.train.progress import Progress, Throughput
from genesis.train.ranks import SAMPLING_S
from genesis.train.saving import Saves
from genesis.train.signals import Interrupts
from genesis.train.state import Best, Interval, TrainState
from genesis.train.step import StepResult, take_step

if TYPE_CHECKING:
    from genesis.train.device_steps import DeviceSteps, Reading

Row = dict[str, float | None]
# On a device, the loss of this process's step PREVIEWED is requested early and read AHEAD steps later. The host is
# never that far ahead, so the read does not block.
PREVIEWED, AHEAD = 3, 5


def total_steps(config: Config, loader: PackedLoader) -> int:
    """Return the optimizer steps of the run: `train.steps`, or as many as complete `train.epochs`."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None, "the schema requires one of the two"
    epochs = Fraction(repr(config.train.epochs))  # exact: 0.07 of 100 batches are 7, not 7.000000000000001
    whole = math.floor(epochs)
    batches = Fraction(sum(loader.num_batches(epoch) for epoch in range(whole)))
    if epochs > whole:
        batches += (epochs - whole) * loader.num_batches(whole)
    return max(1, math.ceil(batches / config.train.accumulation_steps))


@dataclass(frozen=True)
class Summary:
    """The result of a run.

    Attributes:
        step: the last step.
        begun_at: the step from which this process continued; 0 for a new run.
        state_hash: state hash after the last step.
    """

    step: int
    begun_at: int
    state_hash: str
    loss: float | None
    evaluation: Evaluation | None
    best: Best
    tokens_per_second: float | None
    seconds: float


@dataclass
class Training:
    """A run that is ready to start: its state and the destinations of its reports.

    Attributes:
        lr_at: returns the learning rate of a step, counted from 0.
        sample: continues all of `eval.prompts` with the current model and returns the texts.
        joint: text printed between a prompt and its sample. A chat's answer starts on a new line.
    """

    config: Config
    state: TrainState
    checkpoints: Checkpoints
    lr_at: Callable[[int], float]
    sample: Callable[[], Sequence[str]]
    held_out: HeldOut | None
    open_metrics: Callable[[int | None], Metrics]
    progress: Progress
    interrupts: Interrupts
    device: Device
    steps: int
    joint: str = ""
    throughput: Throughput = field(default_factory=Throughput)
    saved_at: int = -1
    last_loss: float | None = None
    last_evaluation: Evaluation | None = None
    state_hash: str = ""
    metrics: Metrics = field(init=False)
    saves: Saves = field(init=False)
    resumed_at: int | None = None
    _grad_norm: float = math.nan  # of the last counted step
    _step_seconds: float | None = None
    _has_row: bool = False  # whether this process has written a row
    _rows: deque[tuple[int, Row | None, Reading]] = field(default_factory=deque)  # wait for a device's figures
    _on_device: DeviceSteps | None = None

    def __post_init__(self) -> None:
        self.saves = Saves(self.checkpoints, self.config.checkpoint.background, self.device, self.progress.note)
        if self.device != CPU:
            from genesis.train.device_steps import steps_of

            limit, every = self.config.train.max_grad_norm, self.config.log.every
            self._on_device = steps_of(self.state)(self.state, self.device, limit, every, self.progress.note)

    def continue_at(self, step: int) -> None:
        """Continue at `step`, whose checkpoint is loaded into the state."""
        self.resumed_at = self.saved_at = self.progress.step = step
        best = self.state.best
        if self.config.checkpoint.best and best.step >= 0 and not self._has_best():
            self.progress.note(
                f"checkpoint-{best.step}, which had the lowest eval/loss so far, is missing: the best step is chosen"
                " among the coming evaluations"
            )
            self.state.best = Best(since=best.since)

    def _has_best(self) -> bool:
        """Whether the checkpoint of the best evaluation exists. All ranks must call it."""
        is_main = self.state.ranks.is_main
        return bool(self.state.ranks.from_main("best", is_main and self.checkpoints.has(self.state.best.step)))

    def take_best(self) -> None:
        """Load the best checkpoint into the state, for the final model. All ranks must call it after `run`.

        Raises:
            ModelError: the checkpoint is damaged.
        """
        step = self.state.best.step
        if self.config.checkpoint.best and step not in (-1, self.state.step) and self._has_best():
            self.checkpoints.load(self.state, step)
            self.state_hash = self.state.hash()

    def open(self) -> Metrics:
        """Open the metrics and samples, truncated to the step the run continues from. The caller closes them.

        Raises:
            DataError: a file holds something other than metrics or samples.
            DeviceError: TensorBoard or W&B is missing or does not start.
            DiskError: a file cannot be opened.
        """
        self.metrics = self.open_metrics(self.resumed_at)
        if self.state.ranks.is_main:
            keep_samples(self.metrics.path.parent, self.resumed_at)
        return self.metrics

    def run(self) -> Summary:
        """Train to the last step; evaluate, log and save on the way. Call `open` first.

        Raises:
            InterruptedRun: a signal arrived; the state is saved.
            NumericError: a loss or gradient is not finite.
        """
        started = time.perf_counter()
        self.state.model.train()
        with self.progress, self.saves:
            self._recall_evaluation()
            self._settle()  # the evaluation before step 1, or one that a signal cut short in a resumed run
            is_first = True
            # Take the steps.
            while not self._is_complete:
                begun = time.monotonic()
                self._step(self._batches())
                self.state.ranks.record_seconds(time.monotonic() - begun)
                if is_first and self._saves_before_the_end():
                    self.saves.prepare(self.state)  # the first step has created the optimizer's states
                is_first = False
                self._report()
                self._settle()
            # Explain an early stop.
            if self.state.step < self.steps:
                best = self.state.best
                lowest = f"below {best.loss:.4f} (of step {best.step})" if best.step >= 0 else "that is finite"
                last = f"last {best.since} evaluations" if best.since > 1 else "last evaluation"
                self.progress.note(f"stopped early at step {self.state.step}: the {last} had no eval/loss {lowest}")
        if not self.state_hash:  # the run was complete already
            self.state_hash = self.state.hash()
        speed = self.throughput.overall().get("perf/tokens_per_second")
        return Summary(
            self.state.step,
            self.resumed_at or 0,
            self.state_hash,
            self.last_loss,
            self.last_evaluation,
            self.state.best,
            speed,
            time.perf_counter() - started,
        )

    def _recall_evaluation(self) -> None:
        """Judge the evaluation of a run that was killed after it wrote the row and before it saved."""
        if self.resumed_at not in (None, self.state.evaluated_at):
            rows = read_metrics(self.metrics.path) if self.state.ranks.is_main else []
            names = ("eval/loss", "eval/num_tokens")
            found = [[row.get(n) for n in names] for row in rows if row[STEP] == self.resumed_at and "eval/loss" in row]
            if found := self.state.ranks.from_main("evaluated", found):
                self.state.evaluated_at = self.state.step
                loss, targets = (value if type(value) in (int, float) else math.nan for value in found[0])
                self._judge(loss, 0 if math.isnan(targets) else int(targets))

    @property
    def _is_complete(self) -> bool:
        """Whether the run is complete: the last step is done, or `train.early_stop` ends the run."""
        patience = self.config.train.early_stop
        return self.state.step >= self.steps or (patience is not None and self.state.best.since >= patience)

    def _judge(self, loss: float, targets: int) -> None:
        """Record whether an evaluation is the best so far. Step 0 does not count because it has no checkpoint."""
        state = self.state
        if state.step:
            state.best = state.best.after(state.step, loss, targets)
        if self._is_best:
            self.saved_at = -1  # an existing checkpoint of this step does not record it as the best

    @property
    def _is_best(self) -> bool:
        return self.config.checkpoint.best and self.state.best.step == self.state.step

    def _batches(self) -> list[Batch]:
        return [next(self.state.loader) for _ in range(self.config.train.accumulation_steps)]

    def _step(self, batches: Sequence[Batch]) -> None:
        state, train = self.state, self.config.train
        lr = self.lr_at(state.step)
        if self._on_device is not None:
            self._on_device.take(batches, lr)
            return
        begun = time.perf_counter()
        result = take_step(state, batches, lr, train.max_grad_norm, self.device)
        self._count(replace(result, seconds=time.perf_counter() - begun))

    def _count(self, result: StepResult) -> None:
        if result.seconds is not None:
            self.throughput.add(result.tokens, result.seconds)
        self.state.interval.add(result.loss_sum, result.targets, result.figures)
        self._grad_norm, self._step_seconds = result.grad_norm, result.seconds

    def _settle(self) -> None:
        """Do what is due between two steps: evaluate, save, and stop if a signal arrived."""
        self.saves.poll()
        # Agree with the other ranks on what is due.
        step = self.state.step
        is_due = self._is_complete or _due(step, self.config.eval.every) if step else self.config.eval.at_start
        evaluates = is_due and self.state.evaluated_at != step
        stop = self._received()
        if evaluates or stop is not None or self._owes_save:  # only finite states are evaluated or saved
            self._catch_up()
        if evaluates:
            with self.state.ranks.during("evaluation"):
                self._evaluate()
        if saves := self._owes_save:
            self._save(waits=self._is_complete or stop is not None)
        # A signal that arrived during the evaluation or the save stops the run now.
        if evaluates or saves:
            stop = self._received()
        if stop is not None:
            self._stop(stop)

    @property
    def _owes_save(self) -> bool:
        is_due = self._is_complete or self._is_best or _due(self.state.step, self.config.checkpoint.every)
        return self.state.step > 0 and self.saved_at != self.state.step and is_due

    def _received(self) -> int | None:
        """Return the signal that any rank has received. All ranks must call it."""
        return self.state.ranks.agree(self.interrupts.received, self.state.step)

    def _report(self) -> None:
        """Write a row of metrics every `log.every` steps and at the last one; for a device, one interval late."""
        state = self.state
        if state.step % self.config.log.every and state.step != self.steps:
            self.progress.update(state.step)
            if not self._has_row:
                self._preview()
            return
        row: Row = {
            "train/learning_rate": self.lr_at(state.step - 1),
            "train/epoch": state.loader.epochs_done,
            "train/num_tokens": state.num_tokens,
        }
        if self._on_device is None:
            self._write(state.step, row)
            return
        self._rows.append((state.step, row, self._on_device.reading()))
        self._read_rows(keep=1)

    def _preview(self) -> None:
        """Show loss and speed of the first steps, before the first row; for a device, once the figures arrive."""
        done = self.state.step - (self.resumed_at or 0)
        if self._on_device is None:
            if done > 1:  # the first step of a process is not representative
                self._show_first(self.state.step)
        elif self.config.log.every > PREVIEWED + AHEAD and done == PREVIEWED:
            self._rows.append((self.state.step, None, self._on_device.reading()))
        elif done == PREVIEWED + AHEAD:
            self._read_rows(keep=0)

    def _show_first(self, step: int) -> None:
        seconds = {} if self._step_seconds is None else {"perf/step_ms": 1e3 * self._step_seconds}
        self.progress.preview(step, {"train/loss": self.state.interval.loss, **seconds})

    def _read_rows(self, keep: int) -> None:
        """Write the pending rows except for the last `keep`."""
        while len(self._rows) > keep:
            step, row, reading = self._rows.popleft()
            for result in reading.results():
                self._count(result)
            if row is None:
                self._show_first(step)
            else:
                self._write(step, row)

    def _catch_up(self) -> None:
        """Read the figures of all steps; this raises if one is not finite."""
        if self._on_device is not None:
            self._read_rows(keep=0)
            for result in self._on_device.reading().results():
                self._count(result)

    def _write(self, step: int, row: Row) -> None:
        interval = self.state.interval
        self.last_loss, self._has_row = interval.loss, True
        objective = self.state.objective
        sums = dict(zip(objective.figures, interval.figures, strict=True))
        allocated, reserved = _peak_memory(self.device)
        full: Row = {
            "train/loss": interval.loss,
            "train/grad_norm": self._grad_norm,
            **objective.means(sums, interval.targets),
            **row,
            **self.throughput.interval(),
            "perf/mfu": None,  # the device's peak is unknown
            "memory/max_allocated": allocated,
            "memory/max_reserved": reserved,
        }
        self.metrics.write(step, full)
        self.progress.update(step, full)
        self.state.interval = Interval()

    def _evaluate(self) -> None:
        state, config = self.state, self.config
        # Measure the held-out data, and write the row unless a signal interrupts.
        if self.held_out is not None:
            found = evaluate(
                state.objective,
                state.model,
                self.held_out,
                batch_size=config.eval_batch_size,
                seq_len=config.data.seq_len,
                max_batches=config.eval.max_batches,
                device=self.device,
                stop=lambda: self._received() is not None,
                ranks=state.ranks,
            )
            if found is None:
                return
            row = found.metrics()
            self.metrics.write(state.step, row)
            self.progress.update(state.step, row)
            self.last_evaluation = found
            self._judge(found.loss, found.targets)
        # Sample texts. A signal may cut them short; they are not repeated, because the row must not be written twice.
        state.evaluated_at = state.step
        if prompts := config.eval.prompts:
            with state.ranks.during("samples", SAMPLING_S), state.ranks.main_first("samples"):
                if state.ranks.is_main and self.interrupts.received is None:
                    samples = [Sample(state.step, *each) for each in zip(prompts, self.sample(), strict=True)]
                    for step, prompt, text in samples:
                        self.progress.note(f"sample at step {step}:\n{prompt}{self.joint}{text}")
                    append_samples(self.metrics.path.parent, samples)

    def _saves_before_the_end(self) -> bool:
        each = (self.config.checkpoint.every, self.config.eval.every if self.config.checkpoint.best else None)
        return any(every is not None and (self.steps - 1) // every * every >= self.state.step for every in each)

    def _save(self, *, waits: bool) -> None:
        """Save the state; `waits` blocks until it is written."""
        self.saves.wait(self.state)
        self.metrics.sync()  # a resumed run does not write these rows again
        state_hash = self.saves.save(self.state, waits=waits)
        if state_hash is not None:
            self.state_hash = state_hash
        self.saved_at = self.state.step

    def _stop(self, signal: int) -> None:
        step = self.state.step
        if not step:
            what, where = f"{Signals(signal).name} ended the run before the first step", None
            next = "start the same command again"
        else:
            if self.saved_at != step:
                self._save(waits=True)
            self.saves.wait(self.state)
            what = f"{Signals(signal).name} ended the run after step {step}, which is saved"
            where = self.checkpoints.folder(step)
            next = "continue with the same command and --resume"
        self.state.ranks.leave()
        stopped = InterruptedRun(what, signal=signal, where=escape(where or ""), next=next)
        stopped.is_echo = not self.state.ranks.is_main
        raise stopped


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _peak_memory(device: Device) -> tuple[int, int]:
    """Return the peak bytes (used by tensors, reserved from the system or the driver)."""
    if device == CPU:
        return pool.max_allocated, pool.max_allocated + pool.cached
    from genesis import cuda

    return cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)

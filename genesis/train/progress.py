"""Live progress of a run: a bar on a terminal, otherwise one line per interval; and its speed, `Throughput`."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from genesis.train.output import Output, printable, wrapped

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SPEED_NOTE = "tok/s and ETA count training steps only: warm-up, evaluation and saving are excluded"
LABEL, BAR_WIDTH = "train", 12
HISTORY, BARS = 24, "▁▂▃▄▅▆▇█"  # losses shown next to the newest one on a terminal, and their heights
MOST_DIGITS = 1e15  # larger numbers have an exponent
# Seconds between two redraws of a bar, and between two lines about tokenizing without a terminal.
REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0


class Progress:
    """Progress over training steps; a context manager.

    Args:
        total_steps: steps of the whole run.
        start_step: steps done before (a resumed run).
        stream: destination; if it is lost, the display ends and the run continues.
    """

    def __init__(self, total_steps: int, start_step: int = 0, stream: Output | TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._output = stream if isinstance(stream, Output) else Output(stream)
        self._bar = _bar(self._output, "{task.completed:.0f}/{task.total:.0f}") if draws(self._output) else None
        self._task: Any = None
        self._shown: dict[str, float] = {}
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._drawn_at = -math.inf

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(LABEL, total=self.total_steps, completed=self.step, text="")
        self.note(SPEED_NOTE)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float | int | None] | None = None) -> None:
        """Move to `step`. Metrics of training are shown; metrics of an evaluation are printed as a note."""
        self.step = step
        known = {name: float(value) for name, value in (metrics or {}).items() if value is not None}
        self._shown.update(known)
        if "train/loss" in known:
            self._losses.append(known["train/loss"])
        if evaluated := _evaluation(known):
            self.note(f"eval at step {step}: {evaluated}")
        if self._bar is None:
            if "train/loss" in known:
                self._output.line(f"step {step}/{self.total_steps}  {self._numbers()}")
        elif known or time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
            self._draw()

    def preview(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the figures before the first row: on a terminal from the next `update` on, otherwise in one line."""
        is_first = "train/loss" not in self._shown
        self._shown.update(metrics)
        if self._bar is None and is_first:
            self._output.line(f"step {step}/{self.total_steps}  {self._numbers()}")

    def note(self, text: str) -> None:
        """Print `text` (one or more lines) above the bar."""
        if self._bar is None:
            self._output.line(text)
            return
        from rich.text import Text

        columns = self._output.columns or self._bar.console.width
        self._bar.console.print(Text(wrapped(printable(text), columns)), soft_wrap=True)

    def _draw(self) -> None:
        assert self._bar is not None
        text = self._numbers()
        before = len(f"{LABEL}  {self.step}/{self.total_steps} ") + BAR_WIDTH
        room = self._bar.console.width - before - len(text) - 1
        history = history_line(self._losses)[-room:] if room > 0 else ""
        with suppress(UnicodeEncodeError, LookupError):
            if history.encode(self._output.encoding):
                text = f"{history} {text}"
        self._bar.update(self._task, completed=self.step, text=text)
        self._bar.refresh()
        self._drawn_at = time.monotonic()

    def _numbers(self) -> str:
        shown = self._shown
        parts = []
        for name, label, format in (
            ("train/loss", "loss", ".4f"),
            ("train/learning_rate", "lr", ".2e"),
            ("train/grad_norm", "grad", ".2f"),
        ):
            if name in shown:
                parts.append(f"{label} {shown[name]:{format}}")
        if "perf/tokens_per_second" in shown:
            parts.append(f"{shown['perf/tokens_per_second']:,.0f} tok/s")
        if "perf/step_ms" in shown:
            parts.append(f"ETA {duration((self.total_steps - self.step) * shown['perf/step_ms'] / 1000)}")
        return "  ".join(parts)


def history_line(values: Sequence[float]) -> str:
    """Return the values as bars of eight heights between their minimum and maximum; empty for fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values)


def _evaluation(metrics: Mapping[str, float]) -> str:
    """Return an evaluation as text; empty without one."""
    parts = [
        f"{label} {figure(metrics[name], format)}"
        for name, label, format in (
            ("eval/loss", "loss", ".4f"),
            ("eval/perplexity", "perplexity", ",.2f"),
            ("eval/bits_per_byte", "bits per byte", ".3f"),
            ("eval/gzip_bits_per_byte", "gzip -9 on the same files", ".3f"),
            ("eval/token_accuracy", "token accuracy", ".3f"),
            ("eval/rewards/margins", "margins", ".3f"),
            ("eval/rewards/accuracies", "accuracy", ".3f"),
            ("eval/margin", "margin", ".3f"),
            ("eval/accuracy", "accuracy", ".3f"),
        )
        if name in metrics
    ]
    of_sets = {name: value for name, value in metrics.items() if name.count("/") == 2 and name.endswith("/loss")}
    return "  ".join(parts) + "".join(f"\n  {name.split('/')[1]}: loss {value:.4f}" for name, value in of_sets.items())


def figure(value: float, form: str) -> str:
    """Return `value` in this format, or with an exponent if it has too many digits; zeros have no sign."""
    return format(value, f"z{form}" if abs(value) < MOST_DIGITS else ".3e")


def duration(seconds: float) -> str:
    """Return seconds as `m:ss` or `h:mm:ss`; "?" if unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def draws(output: Output) -> bool:
    """Whether the output is a terminal that can redraw a line and show colours."""
    return output.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _bar(output: Output, count: str) -> Bar:
    """Return a bar that only the caller's calls draw; a thread could write at a bad time."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(file=output, highlight=False, emoji=False, markup=False)  # type: ignore[arg-type]
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=BAR_WIDTH),
        TextColumn(count, markup=False, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    return Bar(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def tokenizing(label: str, stream: Output | TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show work other than training steps; yield a callback that takes (done, total) in any unit.

    It draws a bar on a terminal; otherwise it prints a line every five seconds and one at the end.
    """
    output = stream if isinstance(stream, Output) else Output(stream)
    started = time.monotonic()
    # Without a terminal, print lines; on a terminal, draw a bar.
    if not draws(output):
        printed_at = started

        def print_percent(done: int, total: int) -> None:
            nonlocal printed_at
            now = time.monotonic()
            if total and now - printed_at >= LINE_SECONDS:
                printed_at = now
                output.line(f"{label}: {100 * done / total:.0f} %")

        yield print_percent
    else:
        bar, drawn_at = _bar(output, "{task.percentage:3.0f} %"), -math.inf
        task = bar.add_task(printable(label), total=None, text="")

        def draw(done: int, total: int) -> None:
            nonlocal drawn_at
            bar.update(task, completed=done, total=total or None)
            if time.monotonic() - drawn_at >= REDRAW_SECONDS:
                drawn_at = time.monotonic()
                bar.refresh()

        bar.start()
        try:
            yield draw
        finally:
            bar.refresh()
            bar.stop()
    output.line(f"{label}: done in {duration(time.monotonic() - started)}")


# --- Speed ------------------------------------------------------------------------------------------------------------


# The first steps of a process are not timed, because they touch memory and caches for the first time.
WARMUP_STEPS = 3


class Throughput:
    """Tokens per second of training steps; the caller times neither evaluation nor saving."""

    def __init__(self) -> None:
        self._skip = WARMUP_STEPS
        self._total = [0, 0, 0.0]  # steps, tokens, seconds
        self._interval = [0, 0, 0.0]

    def add(self, tokens: int, seconds: float) -> None:
        """Count one training step of `tokens` tokens that took `seconds`."""
        if self._skip:
            self._skip -= 1
            return
        for sums in (self._total, self._interval):
            sums[0] += 1
            sums[1] += tokens
            sums[2] += seconds

    def interval(self) -> dict[str, float]:
        """Return `perf/tokens_per_second` and `perf/step_ms` since the last call; empty after only warm-up steps."""
        sums, self._interval = self._interval, [0, 0, 0.0]
        return _rates(*sums)

    def overall(self) -> dict[str, float]:
        """Return the same since the start of the process."""
        return _rates(*self._total)


def _rates(steps: float, tokens: float, seconds: float) -> dict[str, float]:
    if not steps or seconds <= 0:
        return {}
    return {"perf/tokens_per_second": tokens / seconds, "perf/step_ms": 1000 * seconds / steps}

"""Progress on a pipe and on a terminal, streams that fail, text that would drive a terminal, and the speed."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from genesis.train.output import Output, printable
from genesis.train.progress import SPEED_NOTE, WARMUP_STEPS, Progress, Throughput, duration, history_line, tokenizing

METRICS = {
    "train/loss": 3.25,
    "train/learning_rate": 3e-3,
    "train/grad_norm": 0.8,
    "perf/tokens_per_second": 12345.6,
    "perf/step_ms": 500.0,
}


def test_a_pipe_gets_one_plain_line_an_interval() -> None:
    stream = io.StringIO()
    with Progress(250, 100, stream) as progress:
        for step in range(101, 121):
            progress.update(step, METRICS if step % 10 == 0 else None)
    lines = stream.getvalue().splitlines()
    assert lines == [
        SPEED_NOTE,
        "step 110/250  loss 3.2500  lr 3.00e-03  grad 0.80  12,346 tok/s  ETA 1:10",
        "step 120/250  loss 3.2500  lr 3.00e-03  grad 0.80  12,346 tok/s  ETA 1:05",
    ]
    assert "warm-up, evaluation and saving are excluded" in SPEED_NOTE


def test_a_pipe_gets_one_line_before_the_first_interval() -> None:
    stream = io.StringIO()
    with Progress(250, 0, stream) as progress:
        progress.update(0, {"eval/loss": 2.5})  # of the model that came in
        for step in range(1, 11):
            progress.update(step, METRICS if step == 10 else None)
            if 2 <= step < 10:
                progress.preview(step, {"train/loss": 5.0 - step, "perf/step_ms": 1000.0})
    assert [line for line in stream.getvalue().splitlines() if line.startswith("step")] == [
        "step 2/250  loss 3.0000  ETA 4:08",
        "step 10/250  loss 3.2500  lr 3.00e-03  grad 0.80  12,346 tok/s  ETA 2:00",
    ]


def test_an_evaluation_is_a_line_of_its_own() -> None:
    stream = io.StringIO()
    with Progress(10, 0, stream) as progress:
        numbers = {
            "eval/loss": 2.5,
            "eval/perplexity": 12.1825,
            "eval/bits_per_byte": 1.9,
            "eval/gzip_bits_per_byte": 2.1,
            "eval/rewards/margins": -1e-9,
        }
        progress.update(10, numbers)
        progress.update(11, {"eval/loss": 247.0, "eval/perplexity": math.exp(247.0)})
    shown = "eval at step 10: loss 2.5000  perplexity 12.18  bits per byte 1.900  gzip -9 on the same files 2.100"
    shown += "  margins 0.000"
    diverged = "eval at step 11: loss 247.0000  perplexity 1.865e+107"
    assert stream.getvalue().splitlines()[1:] == [shown, diverged]


def test_numbers_that_are_not_known_yet_are_left_out() -> None:
    stream = io.StringIO()
    with Progress(10, 0, stream) as progress:
        progress.update(1, {"train/loss": float("nan"), "perf/mfu": None})
    assert stream.getvalue().splitlines()[1:] == ["step 1/10  loss nan"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (1e6, "277:46:40")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
    assert duration(float("inf")) == duration(float("nan")) == "?"


def test_notes_cannot_drive_a_terminal() -> None:
    stream = io.StringIO()
    with Progress(10, 0, stream) as progress:
        progress.note("one\n\ttwo \x1b[31m\x07\r \u202e [bold]x[/bold] :smile: é 😀")
    shown = "one\n\ttwo \\x1b[31m\\x07\\r \\u202e [bold]x[/bold] :smile: é 😀"
    assert stream.getvalue().split("\n", 1)[1] == shown + "\n"


def test_printable_keeps_text_and_escapes_controls() -> None:
    assert printable("a\tb\nc é 漢 👩‍🔬") == "a\tb\nc é 漢 👩‍🔬"
    for char in "\x00\x07\x08\x0b\r\x1b\x7f\x85\x9b\u200e\u2028\u202e\u2066\ud800":
        assert char not in printable(f"a{char}b")


class Failing(io.StringIO):
    """A stream that fails when it is written to, or when it is flushed."""

    def __init__(self, error: Exception, *, on_flush: bool) -> None:
        super().__init__()
        self.error, self.on_flush = error, on_flush

    def write(self, text: str) -> int:
        if not self.on_flush:
            raise self.error
        return len(text)

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize("on_flush", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("I/O operation on closed file")])
def test_a_stream_that_fails_ends_the_display_and_nothing_else(error: Exception, on_flush: bool) -> None:
    output = Output(Failing(error, on_flush=on_flush))
    with Progress(10, 0, output) as progress, tokenizing("x", output) as report:
        for step in range(1, 11):
            progress.update(step, METRICS)
            report(step, 10)
    assert output.lost
    assert not output.isatty()


def test_no_stream_at_all_is_no_problem() -> None:
    output = Output(None)
    with Progress(10, 0, output) as progress:
        progress.update(1, METRICS)
    assert output.lost
    with pytest.raises(OSError, match="no stream"):
        output.fileno()


def test_a_sound_stream_is_not_lost() -> None:
    output = Output(io.StringIO())
    output.line("x")
    assert not output.lost


def test_characters_that_an_encoding_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Output(stream).line("é 漢")
    assert raw.getvalue() == b"\\xe9 \\u6f22\n"


RUN = """
import pathlib, sys
from genesis.train.output import Output
from genesis.train.progress import Progress, tokenizing
output = Output(sys.stdout)
with tokenizing("tokenizing", output) as report:
    report(1, 2)
with Progress(500, 0, output) as progress:
    for step in range(1, 501):
        progress.update(step, {"train/loss": 3.0, "train/learning_rate": 1e-3, "perf/step_ms": 2.0})
        progress.note("a note of some length, so that buffers fill " * 4)
pathlib.Path(sys.argv[1]).write_text("trained")
"""


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("sink", ["closed pipe", "/dev/full", "closed"])
def test_training_goes_on_without_stdout(tmp_path: Path, sink: str) -> None:
    code = [sys.executable, "-W", "error", "-c", RUN, str(tmp_path / "done")]
    if sink == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(code, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
        os.close(writer)
    elif sink == "/dev/full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    else:
        closing = ["sh", "-c", 'exec "$@" >&-', "sh", *code]
        done = subprocess.run(closing, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "done").read_text() == "trained"


def on_terminal(code: str, *words: str, term: str = "xterm-256color", encoding: str = "utf-8") -> str:
    """What `code` writes to a terminal of 80 columns."""
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": encoding}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=other, stderr=subprocess.PIPE, env=environment
    )
    os.close(other)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(main)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    return shown.decode(encoding)


TERMINAL = """
import sys
from genesis.train.output import Output
from genesis.train.progress import Progress, tokenizing
with tokenizing("tokenizing", sys.stdout) as report:
    report(1, 4)
    report(4, 4)
with Progress(250, 100, Output(sys.stdout)) as progress:
    numbers = {"train/loss": 3.25, "train/learning_rate": 3e-3, "perf/tokens_per_second": 12345.6}
    numbers["perf/step_ms"] = 500.0
    for step in range(101, 131):
        progress.update(step, numbers if step % 10 == 0 else None)
    progress.note("[red]a sample[/red] \\x1b]0;title\\x07")
"""


def test_a_terminal_gets_a_bar_below_the_notes() -> None:
    shown = on_terminal(TERMINAL)
    assert "130/250 ▁▁▁ loss 3.2500  lr 3.00e-03  12,346 tok/s  ETA 1:00" in shown
    assert "━" in shown
    assert "[red]a sample[/red] \\x1b]0;title\\x07" in shown
    assert "\x07" not in shown
    assert "\x1b]0;" not in shown
    assert shown.rstrip().endswith("\x1b[?25h")
    assert "tokenizing: done in" in shown


def test_a_narrow_terminal_shows_fewer_losses_and_all_numbers() -> None:
    """Of 80 columns the losses take what the step, the numbers and the time left leave: here nothing."""
    code = TERMINAL.replace("if step % 10 == 0", 'if (numbers := numbers | {"train/grad_norm": 0.8})')
    shown = on_terminal(code)
    assert "130/250 loss 3.2500  lr 3.00e-03  grad 0.80  12,346 tok/s  ETA 1:00" in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    "values, line",
    [([], ""), ([1.0], ""), ([3.0, 2.0, 1.0], "█▅▁"), ([1.0, math.nan, 2.0], "▁!█"), ([2.0, 2.0], "▁▁")],
)
def test_the_last_losses_as_a_line(values: list[float], line: str) -> None:
    assert history_line(values) == line


def test_an_encoding_without_bars_gets_none() -> None:
    shown = on_terminal(TERMINAL, encoding="latin-1")
    assert "130/250 loss 3.2500" in shown


def test_a_terminal_that_cannot_redraw_gets_plain_lines() -> None:
    shown = on_terminal(TERMINAL, term="dumb")
    assert "▁" not in shown
    assert "\x1b" not in shown
    assert "step 130/250  loss 3.2500" in shown


def test_speed_leaves_the_first_steps_out() -> None:
    meter = Throughput()
    for _ in range(WARMUP_STEPS):
        meter.add(1000, 50.0)
    assert meter.interval() == meter.overall() == {}
    meter.add(1000, 0.5)
    meter.add(3000, 1.5)
    assert meter.interval() == {"perf/tokens_per_second": 2000.0, "perf/step_ms": 1000.0}
    assert meter.interval() == {}
    meter.add(1000, 1.0)
    assert meter.interval() == {"perf/tokens_per_second": 1000.0, "perf/step_ms": 1000.0}
    assert meter.overall() == {"perf/tokens_per_second": 5000 / 3, "perf/step_ms": 1000.0}


def test_long_tokenizing_on_a_pipe_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr("genesis.train.progress.time.monotonic", lambda: float(next(now)))
    stream = io.StringIO()
    with tokenizing("tokenizing \x1b", stream) as report:
        for done in range(1, 5):
            report(done, 4)
    assert stream.getvalue().splitlines() == [
        "tokenizing \\x1b: 50 %",
        "tokenizing \\x1b: 100 %",
        "tokenizing \\x1b: done in 0:15",
    ]

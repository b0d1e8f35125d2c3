"""Metrics of a run: rows of named numbers in metrics.jsonl, optionally sent to TensorBoard and W&B; and its samples.

A row is one JSON object on one line: `train/global_step` and the numbers measured at that step, in the order of steps.
A resumed run truncates the file to the step it resumes from, so that it ends with the rows of an uninterrupted run.
`samples.jsonl` has rows of step, prompt and text and is truncated in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

from genesis.errors import DataError, DeviceError, DiskError, InterruptedRun, escape
from genesis.files.atomic import atomic_file, write_file
from genesis.files.boundary import boundary, close_read
from genesis.files.filesystem import DEFAULT, Writer, disk_error
from genesis.files.paths import exists, open_regular
from genesis.files.strict_json import read_limited
from genesis.files.trust import run_file

FILE_NAME = "metrics.jsonl"
WANDB_ID = "genesis-run-id"  # in the folder `wandb` of a run
STEP = "train/global_step"
_OF_A_SET = re.compile(r"^eval/[^/]+/")
MAX_ROW_BYTES = 64 * 1024
MAX_INT_CHARS = 20
DRAWABLE = 1e100  # the largest number in a chart; sums and differences of such numbers are finite
_PIECE_BYTES = 1 << 20
# Every name that a row may have, with its unit. A named held-out set uses the `eval/` names as `eval/<name>/loss`, ….
NAMES = {
    STEP: "optimizer steps done",
    "train/loss": "nats per target token, mean since the last row",
    "train/learning_rate": "rate of the step",
    "train/grad_norm": "global norm before clipping",
    "train/epoch": "passes over the training data",
    "train/num_tokens": "tokens trained on since the start",
    "eval/loss": "nats per target token",
    "eval/perplexity": "exp(eval/loss)",
    "eval/bits_per_byte": "bits per predicted UTF-8 byte of held-out text",
    "eval/gzip_bits_per_byte": "the same for gzip -9, file by file; only for texts",
    "eval/token_accuracy": "share of target tokens that are the likeliest token",
    "eval/num_tokens": "target tokens; for preferences, pairs or judged answers",
    "perf/tokens_per_second": "tokens per second of training steps; without warm-up, evaluation and saving",
    "perf/step_ms": "milliseconds per training step; without warm-up, evaluation and saving",
    "perf/mfu": "model FLOPs over peak FLOPs",
    "memory/max_allocated": "bytes",
    "memory/max_reserved": "bytes",
}


class Sink(Protocol):
    """Another destination of rows."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Record finite numbers measured at `step`."""

    def close(self) -> None:
        """Send the remaining rows and close."""


class Metrics:
    """A destination of a run's rows; a context manager that closes it. This base class discards them."""

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(output_dir) / FILE_NAME

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Discard the row of `step`."""

    def sync(self) -> None:
        """Return at once; a writer blocks until its rows are on the disk."""

    def close(self) -> None:
        """Return at once; a writer closes its file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class MetricsWriter(Metrics):
    """Appends rows to `output_dir/metrics.jsonl`. Each row is passed to the system before `write` returns.

    Args:
        output_dir: the run's folder, which exists.
        resume_step: last step whose rows are kept; None starts an empty file.
        sinks: other destinations of rows; the writer closes them.
        more: names that rows may have in addition to `NAMES`.

    Raises:
        DataError: the file to resume holds something other than rows of metrics.
        DiskError: the file cannot be opened or written.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        resume_step: int | None = None,
        sinks: tuple[Sink, ...] = (),
        more: Iterable[str] = (),
    ) -> None:
        super().__init__(output_dir)
        self._sinks, self._known = sinks, {*NAMES, *more}
        self._file = _open(self.path)
        try:
            with boundary(DiskError, "reading the metrics", self.path):
                self._size = 0 if resume_step is None else _end_of_rows(self._file, self.path, resume_step)
            try:
                os.ftruncate(self._file.fileno(), self._size)
                self._file.seek(self._size)
            except OSError as error:
                raise disk_error(error, "truncate", self.path) from None
            self._last_step = -1 if resume_step is None else resume_step
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Append the row of `step`. Numbers that are not finite are null and listed in `nonfinite`, as JSON has no NaN.

        Raises:
            DiskError: the row cannot be written completely; the file still ends with the row before it.
            ValueError: a name is unknown, or the step is before the last one.
        """
        unknown = {_OF_A_SET.sub("eval/", name) for name in metrics.keys() - self._known} - self._known
        if unknown or step < self._last_step:
            raise ValueError(f"metrics of step {step} after {self._last_step}, unknown names {sorted(unknown)}")
        row, finite = _row(step, metrics)
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._last_step = step
        for sink in self._sinks:
            sink.write(step, finite)

    def sync(self) -> None:
        """Block until the rows are on the disk. Call it before a checkpoint that relies on them.

        If the file was removed, it is written again with all its rows.
        """
        if not os.path.lexists(self.path):
            with atomic_file(self.path) as file:
                for start in range(0, self._size, _PIECE_BYTES):
                    file.write(os.pread(self._file.fileno(), min(_PIECE_BYTES, self._size - start), start))
            gone, self._file = self._file, _open(self.path)
            gone.close()
            self._file.seek(self._size)
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, "fsync", self.path) from None

    def close(self) -> None:
        """Close the file and the sinks; a second call does nothing."""
        sinks, self._sinks = self._sinks, ()
        try:
            self._file.close()
        except OSError as error:
            raise disk_error(error, "close", self.path) from None
        finally:
            for sink in sinks:
                sink.close()

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
                self._file.seek(self._size)
            raise disk_error(error, "write", self.path, needed=len(line)) from None
        self._size += len(line)


def check_metrics(path: str | Path, last_step: int | None = None) -> None:
    """Refuse a metrics file that a run cannot continue; a missing file is fine. The file is not changed.

    Args:
        last_step: rows after this step are not checked; None checks all rows.

    Raises:
        DataError: a line is not a row of metrics; the error names its number.
        DiskError: the file is a link, not a regular file, or not readable.
    """
    path = Path(path)
    if os.path.lexists(path):
        with boundary(DiskError, "reading the metrics", path), _open(path, os.O_RDONLY) as file:
            for _, row in _rows(file, path):
                if last_step is not None and row[STEP] > last_step:
                    return


def _open(path: Path, mode: int = os.O_RDWR | os.O_CREAT) -> BinaryIO:
    # Links are not followed, because a planted one could redirect the writes. Opening a FIFO does not block.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, mode | flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DiskError("the metrics file is a symbolic link", where=escape(path), next="move it away") from None
        raise disk_error(error, "open", path) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DiskError("the metrics file is not a regular file", where=escape(path), next="move it away")
        return open(descriptor, "rb") if mode == os.O_RDONLY else open(descriptor, "r+b", buffering=0)
    except BaseException as error:
        close_read(descriptor)
        if isinstance(error, OSError) and not isinstance(error, DiskError):
            raise disk_error(error, "open", path) from None
        raise


def _row(step: int, metrics: Mapping[str, float | int | None]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the JSON row, and its finite numbers."""
    given = {name: value for name, value in metrics.items() if name != STEP}
    numbers = {n: v if isinstance(v, int) else float(v) for n, v in given.items() if v is not None}
    finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
    nonfinite = {name: str(number) for name, number in numbers.items() if name not in finite}
    row = {STEP: step, **{name: finite.get(name) for name in given}}
    return row | ({"nonfinite": nonfinite} if nonfinite else {}), finite


@dataclass
class RowOffset:
    """Position up to which a metrics file was read.

    Attributes:
        offset: bytes before the position.
        rows: rows before the position.
        line: the last of these rows. If the file has another line there, it was rewritten.
    """

    offset: int = 0
    rows: int = 0
    line: bytes = b""

    def is_in(self, path: Path) -> bool:
        """Whether the file still has the last row at the position. Raises: DiskError."""
        with boundary(DiskError, "reading the metrics", path), _open(path, os.O_RDONLY) as file:
            file.seek(self.offset - len(self.line))
            return file.read(len(self.line)) == self.line


def read_metrics(path: str | Path, position: RowOffset | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, in order, without a last line that a crash cut short.

    Args:
        position: position to start from; it advances with each row.

    Raises:
        DataError: a line is not a row of metrics; the error names its number.
        DiskError: the file cannot be read.
    """
    with boundary(DiskError, "reading the metrics", path), _open(Path(path), os.O_RDONLY) as file:
        file.seek(0 if position is None else position.offset)
        for _, row in _rows(file, Path(path), position):
            yield row


def _rows(file: BinaryIO, path: Path, position: RowOffset | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with the offset of the byte after it; `file` is at `position`, or at its start."""
    position = RowOffset() if position is None else position
    while line := file.readline(MAX_ROW_BYTES):
        if not line.endswith(b"\n") and len(line) < MAX_ROW_BYTES:
            return
        try:
            row = _DECODER.decode(line.decode())
            if type(row[STEP]) is not int or row[STEP] < 0:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            where = f"{escape(path)}:{position.rows + 1}"
            raise DataError("this line is not a row of metrics", where=where, next="move the file away") from None
        position.offset, position.rows, position.line = position.offset + len(line), position.rows + 1, line
        yield position.offset, row


def _int(text: str) -> int:
    if len(text) > MAX_INT_CHARS:  # counters have fewer digits and convert to float without overflow
        raise ValueError(f"an integer of {len(text)} characters")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_int)


def _end_of_rows(file: BinaryIO, path: Path, last_step: int) -> int:
    """Return the offset after the last row of `last_step` or an earlier step."""
    end = 0
    with open(os.dup(file.fileno()), "rb") as buffered:
        buffered.seek(0)
        for offset, row in _rows(buffered, path):
            if row[STEP] > last_step:
                break
            end = offset
    return end


def _missing(package: str, setting: str) -> DeviceError:
    what = f"{setting} is true, but the package {package} is not installed"
    next = f"pip install {package}, or set {setting}=false"
    return DeviceError(what, where=setting, next=next)


class TensorBoardSink:
    """Writes rows as scalars to TensorBoard event files in `folder`. Raises: DeviceError without the package."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise _missing("tensorboard", "log.tensorboard") from None
        self._writer = Writer(str(folder))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add one scalar per number."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """Sends rows to a Weights & Biases run of `project`; its files are in `folder`. wandb itself manages the login.

    Args:
        resumed: continue the run that a sink in this folder began. Rows of its existing steps remain unchanged, because
            W&B cannot remove rows.

    Raises:
        DeviceError: the package `wandb` is not installed, or wandb does not start (no login, no network).
    """

    def __init__(self, folder: str | Path, project: str, config: Mapping[str, Any], *, resumed: bool = False) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "log.wandb") from None
        # Send only the metrics and the configuration: no source, no console output, no state of a repository.
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True)
        own = Path(folder, "wandb")
        known = run_file(own, WANDB_ID) if resumed else None
        run = secrets.token_hex(4) if known is None else read_limited(known, 64, DataError).decode("ascii", "replace")
        DEFAULT.makedirs(own)
        write_file(own / WANDB_ID, run.encode())
        name = config.get("train", {}).get("name")  # None: the service chooses a name
        options: dict[str, Any] = {"id": run, "resume": "allow", "config": dict(config), "settings": settings}
        try:
            self._run = wandb.init(project=project, name=name, dir=str(folder), **options)
        except InterruptedRun:
            raise
        except Exception as error:
            what = f"Weights & Biases did not start: {escape(error)}"
            next = "log in with `wandb login`, or set log.wandb=false"
            raise DeviceError(what, where="log.wandb", next=next) from None

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log the row at `step`."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """End the run at the service."""
        self._run.finish()


# --- Samples ----------------------------------------------------------------------------------------------------------


SAMPLES_NAME = "samples.jsonl"
MOST_SAMPLES = 256 << 20  # bytes; a larger file is not read completely


class Sample(NamedTuple):
    """A prompt, the model's continuation, and the step of the model."""

    step: int
    prompt: str
    text: str


def append_samples(folder: Path, samples: list[Sample]) -> None:
    """Append samples to the file in a run's folder. Raises: DiskError."""
    lines = "".join(json.dumps(sample._asdict()) + "\n" for sample in samples)
    with Writer(DEFAULT, folder / SAMPLES_NAME, os.O_CREAT | os.O_APPEND) as writer:
        writer.write(lines.encode())


def keep_samples(folder: Path, step: int | None) -> None:
    """Drop the samples after `step`; None drops all.

    Raises:
        DataError: the file holds something other than samples.
        DiskError: the file cannot be written.
    """
    path = folder / SAMPLES_NAME
    with boundary(DiskError, "reading the samples", path):
        is_there = exists(path)
    if not is_there:
        return
    if step is None:
        DEFAULT.unlink(path)
        return
    kept = [sample for sample in read_samples(folder) if sample.step <= step]
    write_file(path, "".join(json.dumps(sample._asdict()) + "\n" for sample in kept).encode())


def read_samples(folder: Path, most: int | None = None) -> Iterator[Sample]:
    """Yield the samples of a run in the order of their steps, without a last line that a crash cut short.

    Args:
        most: bytes at the end of the file to read; None reads the whole file of at most `MOST_SAMPLES` bytes.

    Raises:
        DataError: a line is not a sample, or the file is a link or belongs to another user.
    """
    path = run_file(folder, SAMPLES_NAME)
    if path is None:
        return
    with boundary(DiskError, "reading the samples", path):
        is_whole = most is None or os.stat(path).st_size <= most
    if is_whole:
        data = read_limited(path, MOST_SAMPLES, DataError)

    else:
        with boundary(DiskError, "reading the samples", path), open(open_regular(path, DataError), "rb") as file:
            file.seek(-(most or 0), os.SEEK_END)
            data = file.read(most).partition(b"\n")[2]  # skip the rest of a sample
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            sample = Sample(row["step"], row["prompt"], row["text"])
            if type(sample.step) is not int or not all(type(text) is str for text in sample[1:]):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            where = f"{escape(path)}:{number}" if is_whole else escape(path)
            raise DataError("this line is not a sample", where=where, next="move the file away") from None
        yield sample

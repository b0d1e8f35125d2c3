"""metrics.jsonl: rows, not-a-numbers, resuming, full disks, planted files; the optional sinks."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genesis.errors import DataError, DeviceError, DiskError
from genesis.train.metrics import NAMES, MetricsWriter, TensorBoardSink, WandbSink, read_metrics


def run(folder: Path, steps: range, resume_step: int | None = None) -> None:
    """Writes what a run writes: a row of training each step, one of evaluation each third."""
    with MetricsWriter(folder, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"train/loss": 10 / step, "train/learning_rate": 1e-3, "train/num_tokens": 7 * step})
            if step % 3 == 0:
                writer.write(step, {"eval/loss": 11 / step, "eval/perplexity": math.exp(11 / step)})


def content(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def test_rows_are_json_objects_in_order(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    rows = [json.loads(line) for line in content(tmp_path).splitlines()]
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 3, 4]
    assert rows[1] == {
        "train/global_step": 2,
        "train/loss": 5.0,
        "train/learning_rate": 0.001,
        "train/num_tokens": 14,
    }
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == rows


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
        assert content(tmp_path).endswith(b'"train/loss": 1.0}\n')
        writer.sync()


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": math.nan, "train/grad_norm": -math.inf, "perf/mfu": None, "eval/loss": 2.0})
    assert b"NaN" not in content(tmp_path)
    assert json.loads(content(tmp_path)) == {
        "train/global_step": 1,
        "train/loss": None,
        "train/grad_norm": None,
        "perf/mfu": None,
        "eval/loss": 2.0,
        "nonfinite": {"train/loss": "nan", "train/grad_norm": "-inf"},
    }


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": np.float32(0.5), "train/grad_norm": np.float64("nan")})
    row = json.loads(content(tmp_path))
    assert (row["train/loss"], row["train/grad_norm"]) == (0.5, None)


@pytest.mark.parametrize(("step", "name"), [(4, "train/loss"), (6, "train/los"), (6, "loss")])
def test_a_wrong_name_or_an_earlier_step_is_our_bug(tmp_path: Path, step: int, name: str) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(5, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="unknown names"):
            writer.write(step, {name: 1.0})


def test_the_names_of_the_conventions_are_known() -> None:
    for name in ("train/loss", "train/learning_rate", "train/grad_norm", "train/epoch", "train/global_step"):
        assert name in NAMES
    for name in ("train/num_tokens", "eval/loss", "eval/perplexity", "perf/tokens_per_second", "perf/step_ms"):
        assert name in NAMES
    assert {"perf/mfu", "memory/max_allocated", "memory/max_reserved"} <= NAMES.keys()


@pytest.mark.parametrize("resume_step", [0, 1, 3, 6, 9, 10])
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(tmp_path: Path, resume_step: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    run(whole, range(1, 13))
    run(broken, range(1, 11))
    run(broken, range(resume_step + 1, 13), resume_step)
    assert content(broken) == content(whole)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path, cut: int) -> None:
    run(tmp_path, range(1, 6))
    whole = content(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-cut])
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 5
    run(tmp_path, range(5, 6), 4)
    assert content(tmp_path) == whole


def test_a_file_removed_in_mid_run_is_written_again_before_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 3.0})
        path.unlink()
        writer.write(2, {"train/loss": 2.0})
        writer.sync()
        writer.write(3, {"train/loss": 1.0})
    assert [(row["train/global_step"], row["train/loss"]) for row in read_metrics(path)] == [(1, 3.0), (2, 2.0), (3, 1)]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    run(tmp_path, range(1, 6))
    run(tmp_path, range(1, 3))
    assert content(tmp_path).count(b"\n") == 2


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"nonsense", b'{"train/global_step": "1"}', b"\xff", b"[" * 70_000])
def test_a_file_that_is_not_ours_is_not_cut(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b'{"train/global_step": 1}\n' + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(DataError) as caught:
        MetricsWriter(tmp_path, resume_step=5)
    assert caught.value.where == f"{path}:2"
    assert path.read_bytes() == before


def test_a_link_or_a_pipe_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(DiskError, match="symbolic link"):
        MetricsWriter(tmp_path)
    assert victim.read_text() == "precious"
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DiskError, match="not a regular file"):
        MetricsWriter(tmp_path)


def test_what_is_refused_stays_open_nowhere(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(DiskError, match="not a regular file"):
            MetricsWriter(tmp_path)
        with pytest.raises(DiskError, match="not a regular file"):
            list(read_metrics(tmp_path / "metrics.jsonl"))
    assert os.listdir("/dev/fd") == before


def test_a_missing_folder_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught:
        MetricsWriter(tmp_path / "gone")
    assert caught.value.exit_code == 8


class FullDisk:
    """A raw file that takes a few bytes and then has no room."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data))
        self.room -= taken
        return int(self.file.write(data[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_is_exit_8_and_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
        before = content(tmp_path)
        monkeypatch.setattr(writer, "_file", FullDisk(writer._file, 20))
        with pytest.raises(DiskError, match=r"needed \d+ bytes, free [\d,]+ bytes") as caught:
            writer.write(2, {"train/loss": 1.0})
        assert caught.value.exit_code == 8
        assert content(tmp_path) == before


def test_a_row_after_one_that_found_no_room_follows_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a resumed file, and where two writes fail one after the other."""
    run(tmp_path, range(1, 3))
    sink = Recorder()
    with MetricsWriter(tmp_path, resume_step=2, sinks=(sink,)) as writer:
        disk = FullDisk(writer._file, 20)
        monkeypatch.setattr(writer, "_file", disk)
        for room in (7, 20):
            disk.room = room
            with pytest.raises(DiskError):
                writer.write(3, {"train/loss": 3.0})
        disk.room = 1000
        writer.write(3, {"train/loss": 3.5})
        writer.sync()
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(row["train/global_step"], row["train/loss"]) for row in rows] == [(1, 10.0), (2, 5.0), (3, 3.5)]
    assert sink.rows == [(3, {"train/loss": 3.5})]


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FullDisk):
        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[:3]))

    with MetricsWriter(tmp_path) as writer:
        monkeypatch.setattr(writer, "_file", Slow(writer._file, 0))
        writer.write(1, {"train/loss": 1.0})
    assert content(tmp_path) == b'{"train/global_step": 1, "train/loss": 1.0}\n'


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.rows.append((step, dict(row)))

    def close(self) -> None:
        self.closed += 1


def test_sinks_get_finite_numbers_and_are_closed_once(tmp_path: Path) -> None:
    sink = Recorder()
    with MetricsWriter(tmp_path, sinks=(sink,)) as writer:
        writer.write(3, {"train/loss": math.nan, "train/grad_norm": 2.0, "perf/mfu": None})
        writer.close()
    assert sink.rows == [(3, {"train/grad_norm": 2.0})]
    assert sink.closed == 1


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_exit_6_and_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.summary", None)
    with pytest.raises(DeviceError, match=rf"log\.{package}") as caught:
        TensorBoardSink(tmp_path) if package == "tensorboard" else WandbSink(tmp_path, "genesis", {})
    assert caught.value.exit_code == 6
    assert f"pip install {package}, or set log.{package}=false" in caught.value.next


def test_tensorboard_gets_each_number_as_a_scalar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append("flush")

        def close(self) -> None:
            calls.append("close")

    summary = ModuleType("tensorboard.summary")
    summary.Writer = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"train/loss": 2.0, "train/grad_norm": 1.0})
    sink.close()
    assert calls == [str(tmp_path), ("train/loss", 2.0, 3), ("train/grad_norm", 1.0, 3), "flush", "close"]


def wandb_module(init: Any) -> ModuleType:
    module = ModuleType("wandb")
    module.init, module.Settings = init, SimpleNamespace  # type: ignore[attr-defined]
    return module


def test_wandb_gets_the_metrics_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    made: dict[str, Any] = {}

    def init(**options: Any) -> SimpleNamespace:
        made.update(options)
        return SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end"))

    monkeypatch.setitem(sys.modules, "wandb", wandb_module(init))
    sink = WandbSink(tmp_path, "genesis", {"train": {"name": "chats-2"}})
    sink.write(3, {"train/loss": 2.0})
    sink.close()
    assert logged == [(3, {"train/loss": 2.0}), "end"]
    assert (made["project"], made["name"], made["config"]) == ("genesis", "chats-2", {"train": {"name": "chats-2"}})
    assert vars(made["settings"]) == {"console": "off", "disable_code": True, "disable_git": True}


def test_wandb_goes_on_with_the_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", wandb_module(lambda **options: begun.append(options)))
    for resumed in (False, True, True, False, True):
        WandbSink(tmp_path, "genesis", {}, resumed=resumed)
    first, second, third, new, last = (options["id"] for options in begun)
    assert first == second == third != new == last
    assert {options["resume"] for options in begun} == {"allow"}
    file = tmp_path / "wandb" / "genesis-run-id"
    assert file.read_text() == last
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="symbolic link"):
        WandbSink(tmp_path, "genesis", {}, resumed=True)


def test_wandb_that_does_not_start_is_exit_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("no login")

    monkeypatch.setitem(sys.modules, "wandb", wandb_module(init))
    with pytest.raises(DeviceError, match="did not start: no login"):
        WandbSink(tmp_path, "genesis", {})

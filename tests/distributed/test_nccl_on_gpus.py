"""The group over NCCL itself, with as many GPUs as there are: its suite, graphs, its end, and ranks that are lost.

One GPU shows the start, every call, capture, replay and the end; two show the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from genesis import cuda
from tests.distributed import jobs
from tests.distributed.forks import ended
from tests.train.runs import make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(sys.platform != "linux", reason="NCCL is for Linux")]
PROGRAM = [sys.executable, "-m", "tests.distributed.nccl_program"]
SUITE = [sys.executable, "-m", "pytest", "tests/distributed/test_group.py", "--gpu", "-q", "-x", "-k", "gpus-"]
SUITE += ["-p", "no:xdist", "-p", "no:cacheprovider"]
# Each rank has its temporary folders in one of its own: pytest tidies the common one up, and two of them meet there.
APART = ["sh", "-c", 'exec "$@" --basetemp="$FOLDER/$RANK"', "sh"]


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("nccl", reason="the extra `distributed`")


def needs(count: int) -> None:
    if cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def finished(job: jobs.Job, within: float) -> int:
    """The exit code of a job that ends within so many seconds; nothing of it is left."""
    (launcher,) = ended([job.fork], within)
    assert job.left(5.0) == [] and launcher.code is not None, (job.out.read_text(), job.err.read_text())
    return launcher.code


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_suite(count: int, tmp_path: Path) -> None:
    """`test_group.py`, bit for bit."""
    needs(count)
    job = jobs.start(tmp_path, [*APART, *SUITE], count, GENESIS_NCCL_SUITE="1", FOLDER=str(tmp_path))
    assert finished(job, 300) == 0, job.out.read_text() + job.err.read_text()
    assert job.out.read_text().count(" passed") == count


@pytest.mark.parametrize("count", [1, 2])
def test_capture_replay_and_the_end(count: int, tmp_path: Path) -> None:
    needs(count)
    job = jobs.start(tmp_path, [*PROGRAM, "clean"], count)
    assert finished(job, 120) == 0, job.err.read_text()
    assert job.out.read_text().count("done") == count


STANDS = "of rank 0 has made no progress for"


@pytest.mark.parametrize(("how", "said"), [("kill", "rank 1"), ("hang", STANDS), ("load", STANDS), ("copies", STANDS)])
def test_a_rank_that_is_lost(how: str, said: str, tmp_path: Path) -> None:
    """The other one waits on the device, whatever else it does, and ends within 5 s of its limit; nothing is left."""
    needs(2)
    job = jobs.start(tmp_path, [*PROGRAM, how], 2)
    code = finished(job, 45)
    assert code == 10 and said in job.err.read_text() and "nobody ended" not in job.out.read_text()


def test_training_has_the_state_hash_of_one_gpu(tmp_path: Path) -> None:
    """Captured steps, in bfloat16 with split masters, sharded and not."""
    needs(2)
    recipe, hashes = make(tmp_path), []
    settings = ("train.device=cuda", "model.dtype=bfloat16", "train.accumulation_steps=4", "train.steps=20")
    for count, zero in ((1, 1), (2, 1), (2, 0)):
        words = ["train", str(recipe), *settings, f"train.zero={zero}", f"train.output_dir={tmp_path}/{count}-{zero}"]
        job = jobs.start(tmp_path, [sys.executable, "-m", "genesis_cli.main", *words], count)
        assert finished(job, 300) == 0, job.err.read_text()
        said = job.out.read_text()
        assert ("collectives: NCCL " in said) == (count == 2)
        hashes += [line for line in said.splitlines() if line.startswith("state hash: ")]
    assert len(hashes) == 3 and len(set(hashes)) == 1


def test_the_collectives_of_a_captured_step(tmp_path: Path) -> None:
    """Events in a graph of several streams: times are those of one step, and parts of what they are parts of."""
    needs(2)
    words = ["bench-model", "--size", "quickstart", "--batch-size", "8", "--seq-len", "256", "--device", "cuda"]
    job = jobs.start(tmp_path, [sys.executable, "-m", "genesis_cli.main", *words, "--fast", "--json", "-"], 2)
    assert finished(job, 300) == 0, job.err.read_text()
    found = {table["name"]: table["rows"] for table in json.loads(job.out.read_text())["tables"]}
    (row,), sent = found["ranks"], {each["name"]: each for each in found["collectives"]}
    assert list(sent) == ["reduce-scatter, gradients", "all-reduce, norm", "all-gather, weights"]
    assert sent["reduce-scatter, gradients"]["nbytes"] == sent["all-gather, weights"]["nbytes"]
    for each in sent.values():
        assert 0 <= each["exposed"] <= each["seconds"] < 2 * row["step"] and each["bus_rate"] > 0
        assert each["hidden"] == pytest.approx(each["seconds"] - each["exposed"])
    assert sent["all-reduce, norm"]["exposed"] > 0  # clipping waits for it
    assert 0 < row["computing"] < 2 * row["step"]

"""`genesis train --nproc`: one state hash at every number of ranks, and a known end for every fault.

A sample of `tests.distributed.full`, which `make ranks-faults` runs whole.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.train.checkpoint import optimizer_tensors
from genesis.train.ranks import Ranks, check_divides
from tests.distributed import jobs
from tests.distributed.cases import OF_BASE, SETTINGS, SIZES, Runs, faults, hash_of, run_fault, run_killed
from tests.distributed.forks import free_port
from tests.distributed.pairs import pairs
from tests.train.runs import Ended, Forks, checkpoints, memory_folder, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes and sockets in /proc")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as found:
        yield found


@pytest.fixture(scope="module")
def runs(forks: Forks) -> Iterator[Runs]:
    with memory_folder() as folder:
        yield Runs(forks, folder)


def evaluations(done: Ended) -> list[str]:
    """The lines of a run that tell no time, and name no folder."""
    starts = ("data:", "eval at", "sample at", "alpha", "held out:", "state hash:")
    return [line for line in done.out.splitlines() if line.startswith(starts)]


def test_one_state_hash(runs: Runs) -> None:
    """Also the metrics, the checkpoints and the model are those of one process."""
    settings = (*SETTINGS["float32"], "train.steps=5", "checkpoint.save_total_limit=null", "checkpoint.every=2")
    done = {n: runs.forks.run(*runs.words(f"plain-{n}", n, *settings)) for n in (1, 2, 4)}
    assert len({hash_of(each) for each in done.values()}) == 1
    for n in (2, 4):
        one, other = runs.folder / "plain-1", runs.folder / f"plain-{n}"
        assert rows(other) == rows(one)
        assert list(checkpoints(one)) == [2, 4, 5] and checkpoints(other) == checkpoints(one)
        assert (other / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
        # Only rank 0 prints, and what one process prints.
        assert done[n].out.startswith(f"ranks: {n} on one host, by --nproc\ndevice: ")
        assert evaluations(done[n]) == evaluations(done[1])
        assert done[n].err == ""


@pytest.mark.full
def test_saves_in_the_background(runs: Runs) -> None:
    """Of states that are in parts (ZeRO-1): the files of one process that waits for its saves, as the last one is."""
    settings = (*SETTINGS["masters"], "train.steps=4", "checkpoint.save_total_limit=null", "checkpoint.every=1")
    settings += ("eval.every=null",)
    found = []
    for n, background in ((1, "off"), (2, "on")):
        name = f"background-{background}"
        hash_of(runs.forks.run(*runs.words(name, n, *settings, f"checkpoint.background={background}")))
        files = sorted((runs.folder / name).glob("checkpoint-*/*"))
        found.append({f"{path.parent.name}/{path.name}": path.read_bytes() for path in files})
    before_last = [{n: data for n, data in each.items() if not n.startswith("checkpoint-4/")} for each in found]
    assert len(before_last[0]) > 24 and before_last[0] == before_last[1]


@pytest.mark.full
def test_each_rank_writes_some_of_a_checkpoint_that_training_waits_for(runs: Runs) -> None:
    """The tensors of one process, in a file of each rank; damage that one rank finds is every rank's error."""
    settings = (*SETTINGS["masters"], "train.steps=2", "checkpoint.every=1", "checkpoint.background=off")
    one, two = (runs.words(f"waited-{n}", n, *settings, "eval.every=null") for n in (1, 2))
    found = []
    for n, words in ((1, one), (2, two)):
        hash_of(runs.forks.run(*words))
        with optimizer_tensors(runs.folder / f"waited-{n}/checkpoint-1") as tensors:
            found.append({name: (each.shape, each.read_all().tobytes()) for name, each in tensors.items()})
    assert found[0] == found[1]
    folder = runs.folder / "waited-2/checkpoint-2"
    files = sorted(folder.glob("optimizer-*"))
    index = json.loads((folder / "optimizer.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found[0].keys() and {*index.values()} == {each.name for each in files}
    assert [each.name for each in files] == [f"optimizer-0000{n}-of-00002.safetensors" for n in (1, 2)]
    sizes = [each.stat().st_size for each in files]
    assert sizes[0] < sizes[1]  # rank 0 also writes the weights
    for path in files:
        kept = path.read_bytes()
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        done = runs.forks.run(*two, "--resume")
        assert done.code == 5 and f"the file '{path.name}' is damaged" in done.err and done.err.count("error:") == 1
        path.write_bytes(kept)


@pytest.mark.full
def test_ranks_without_optimizer_states_save_what_one_process_does(runs: Runs) -> None:
    settings = (*SIZES, "optim.name=sgd", "optim.momentum=0", "train.steps=2", "eval.every=null", "checkpoint.every=1")
    found = []
    for n in (1, 2):
        words = runs.words(f"without-states-{n}", n, *settings, "checkpoint.background=off")
        said = hash_of(runs.forks.run(*words))
        files = (runs.folder / f"without-states-{n}/checkpoint-1").iterdir()
        found.append((said, {path.name: path.read_bytes() for path in files}))
    assert found[0] == found[1] and "optimizer.safetensors" in found[0][1]


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_save_in_the_background(runs: Runs) -> None:
    """Of the second save's calls one; `tests.distributed.full` goes through all of them."""
    expected = runs.saving("waited-for", 1, "off")
    assert run_killed(runs, "on", "kill_in_save", 0, 20, expected) is None
    assert run_killed(runs, "off", "kill_at", 1, 7, expected) is None  # rank 1 writes its share of the second save


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("name", ["masters", "muon"])
def test_other_settings(name: str, runs: Runs) -> None:
    assert len(set(runs.hashes(name, SETTINGS[name], (1, 2), 4).values())) == 1


@pytest.mark.full
def test_adapters(forks: Forks) -> None:
    """With dropout, whose noise is that of the micro-batch and not of the rank."""
    with memory_folder() as folder:
        found = Runs(forks, folder, is_lora=True).hashes("lora", OF_BASE["lora with dropout"], (1, 2), 4)
    assert len(set(found.values())) == 1


@pytest.mark.full
def test_resume_with_other_ranks(runs: Runs) -> None:
    """1 → 2 → 4 → 1 ranks, with and without ZeRO."""
    at_once, in_legs = runs.resumed("masters", SETTINGS["masters"], [(1, 1), (2, 1), (4, 0), (1, 1)])
    assert in_legs == at_once


SAMPLE = [
    *("SIGKILL: step, rank 0", "exit 0: step, rank 1", "disk: saving, rank 0", "NaN"),
    *("SIGINT: evaluation, rank 1", "SIGSTOP: step, rank 1"),
]


@pytest.mark.parametrize("name", SAMPLE)
def test_faults(name: str, runs: Runs) -> None:
    """One block, the exit code of the cause, nothing left running, whole checkpoints."""
    number, fault = next((i, each) for i, each in enumerate(faults()) if each.name == name)
    assert run_fault(runs, fault, number) is None


def test_the_check_of_faults_sees_what_is_wrong(runs: Runs) -> None:
    """A run in which nothing happens does not end as after a fault."""
    fault = next(each for each in faults() if each.name == "NaN")
    fault = type(fault)("nothing", -1, ("limits", 60.0), fault.code, fault.said)
    assert "exit code 0, expected 9" in str(run_fault(runs, fault, 1000))


def ranks_alone(
    runs: Runs, count: int, ranks: list[int], output: str, *settings: str, faults: dict[int, list[object]] | None = None
) -> list[Ended]:
    """Ranks without our launcher, as torchrun starts them; each with a fault of its own."""
    port, started = str(free_port()), []
    for rank in ranks:
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "XDG_CACHE_HOME": str(runs.folder / "user")}
        words = runs.words(output, 1, *SIZES, *settings)[:-2]
        started.append(runs.forks.start(*words, environment=given, fault=(faults or {}).get(rank, ())))
    return [each.wait() for each in started]


def test_ranks_of_another_launcher(runs: Runs) -> None:
    """By torchrun's variables alone; the key is this user's."""
    zero, one = ranks_alone(runs, 2, [0, 1], "torchrun")
    assert (zero.code, one.code, one.out, one.err) == (0, 0, "", "")
    assert zero.out.startswith("ranks: 2 on one host, by torchrun's variables\n")


# Which of two corpora the other rank has, and what else is different there.
STARTS: dict[str, tuple[tuple[int, list[object]], str]] = {
    "other release": ((0, ["release", "0.0.1"]), "rank 1 runs Genesis 0.0.1"),
    "other data": ((1, ["limits", 60.0]), "the ranks differ in the data"),
}


@pytest.mark.parametrize("name", STARTS)
def test_ranks_that_differ(name: str, runs: Runs) -> None:
    """Refused before a step is made; 3."""
    folders = [runs.folder / "mine", runs.folder / "other"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for file in runs.folder.glob("doc*.txt"):
            shutil.copy(file, folder)
    (folders[1] / "doc01.txt").write_text("another text " * 20)
    (theirs, fault), said = STARTS[name]
    planted = {0: ["in_folder", str(folders[0])], 1: ["several", ["in_folder", str(folders[theirs])], fault]}
    cache = runs.folder / f"cache-{name.replace(' ', '-')}"
    words = ("data.train=[doc*.txt]", f"data.cache_dir={cache}")
    ended = ranks_alone(runs, 2, [0, 1], name.replace(" ", "-"), *words, faults=planted)
    assert [each.code for each in ended] == [3, 3], ended
    assert said in ended[0].err


def test_ranks_with_other_settings(runs: Runs) -> None:
    port, started = str(free_port()), []
    for rank, rate in enumerate(("1e-2", "1e-3")):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "GENESIS_JOB_KEY": "k" * 32}
        words = runs.words("settings", 1, *SIZES, f"optim.lr={rate}")[:-2]
        started.append(runs.forks.start(*words, environment=given))
    ended = [each.wait() for each in started]
    assert [each.code for each in ended] == [3, 3]
    assert "the ranks differ in the configuration" in ended[0].err and ended[1].err == ""


def test_a_rank_that_does_not_come(runs: Runs) -> None:
    (alone,) = ranks_alone(runs, 2, [0], "missing", faults={0: ["limits", 1.0]})
    assert alone.code == 10 and "rank 1 of 2 did not join" in alone.err


def test_a_port_that_is_taken(runs: Runs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(taken.getsockname()[1]), "GENESIS_JOB_KEY": "k" * 32}
        ended = runs.forks.run(*runs.words("taken", 1, *SIZES)[:-2], environment=given)
    assert ended.code == 10 and "rank 0 cannot listen" in ended.err


@pytest.mark.full
def test_two_jobs_in_one_folder(runs: Runs) -> None:
    """The second one is refused, on both ranks at once."""
    stops = ("on_rank", 0, "signal_in", "saving", signal.SIGSTOP)
    first = runs.forks.start(*runs.words("shared", 2, *SIZES), fault=stops)
    until = time.monotonic() + 20
    while not (runs.folder / "shared" / "metrics.jsonl").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    second = runs.forks.run(*runs.words("shared", 2, *SIZES))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert second.code == 11 and second.err.count("error:") == 1, second


@pytest.mark.parametrize(
    ("words", "environment", "code", "said"),
    [
        (["--nproc", "2"], {}, 3, "set train.accumulation_steps=4, or start 1 rank"),
        (["--nproc", "two"], {}, 2, "--nproc two is not a number"),
        (["--nproc", "0"], {}, 2, "--nproc 0 is not a number"),
        ([], {"RANK": "0"}, 2, "RANK is set, but not WORLD_SIZE"),
        ([], {"WORLD_SIZE": "2"}, 2, "WORLD_SIZE is set, but not RANK"),
    ],
)
def test_what_is_refused(
    words: list[str], environment: dict[str, str], code: int, said: str, runs: Runs, tmp_path: Path
) -> None:
    """Before any rank is started, and before anything is written."""
    line = ["train", str(runs.recipe), f"train.output_dir={tmp_path / 'run'}", "train.accumulation_steps=3", *words]
    done = runs.forks.run(*line, environment=environment)
    assert (done.code, done.err.count("error:")) == (code, 1), done
    assert said in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("ranks", "steps", "more", "fewer"), [(2, 1, 2, 1), (4, 6, 8, 3), (3, 8, 9, 2)])
def test_the_error_of_ranks_that_do_not_divide_a_step(ranks: int, steps: int, more: int, fewer: int) -> None:
    with pytest.raises(ValueError, match=f"accumulation_steps={more}, or start {fewer} rank"):
        check_divides(ranks, steps)
    check_divides(ranks, more)
    check_divides(fewer, steps)


def test_a_killed_launcher(runs: Runs, tmp_path: Path) -> None:
    """Real processes: nothing listens but on loopback, and no rank is left 1 s after the launcher was killed."""
    command = [sys.executable, "-P", "-m", "genesis_cli", *runs.words("real", 2, *SIZES, "train.steps=100000")[:-2]]
    job = jobs.start(tmp_path, command, 2)
    seen: set[str] = set()
    until = time.monotonic() + 30
    while "step 2/" not in job.out.read_text():
        assert time.monotonic() < until, job.err.read_text()
        seen |= jobs.listening([*job.processes(), job.fork.pid])
        time.sleep(0.02)
    assert seen == {"0100007F"}
    assert not jobs.listening([*job.processes(), job.fork.pid])
    job.fork.kill(signal.SIGKILL)
    assert job.end() == -9
    assert not job.left(1.0)


def test_how_long_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the slowest of the last ten steps, and never less than a minute."""
    from genesis.distributed import PeersGroup

    peers, other = pairs(2)
    ranks = Ranks(peers, PeersGroup(peers))
    ranks.record_seconds(200.0)
    assert peers.limit_s == 2000.0
    for _ in range(10):
        ranks.record_seconds(0.1)
    assert peers.limit_s == 60.0
    ranks.record_seconds(9.0)
    assert peers.limit_s == 90.0
    peers.abort()
    other.abort()

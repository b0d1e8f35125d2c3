"""What a group over NCCL does besides what `test_group.py` asks of every group: graphs, faults, deadlines, its end."""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, driver_for
from genesis.backend.cuda.graph import RawGraph
from genesis.distributed import Peers
from genesis.distributed import nccl as groups
from genesis.distributed.communicator import Communicator, Tuning
from genesis.distributed.group import StagedGroup
from genesis.distributed.nccl import NcclGroup
from genesis.distributed.watch import Deadline, Watch
from genesis.dtypes import as_dtype, bfloat16, float32
from genesis.errors import DeviceError, DistributedError
from genesis.train.signals import Interrupts
from tests.distributed import fake_nccl, jobs, nccl_ranks
from tests.distributed.forks import ended, start_ranks
from tests.distributed.test_group import expected_sum, of, values
from tests.train.runs import make

pytestmark = pytest.mark.host
CUDA = Device("cuda", 0)


def given(array: np.ndarray) -> Array:
    made = empty(array.shape, as_dtype(array.dtype), CUDA)
    backend_for(CUDA).from_numpy(array, made)
    return made


# --- Values -----------------------------------------------------------------------------------------------------------


def test_pieces_change_nothing(tmp_path: Path) -> None:
    """Parts that are longer than the staging memory travel in pieces, of which some ranks may have none."""
    parts = [1500, 0, 2600]

    def work(peers: Peers, group: NcclGroup) -> list[list[int]]:
        x, out = given(values(group.rank, 4100, bfloat16)), empty((parts[group.rank],), float32, CUDA)
        group.reduce_scatter(x, out, parts)
        group.all_reduce(x)
        return [of(out.numpy()), of(x.numpy())]

    start = 0
    for rank, each in enumerate(nccl_ranks.started(3, work, tmp_path)):
        assert each.code == 0, each.error
        total = expected_sum(3, 4100, bfloat16, float32)[start : start + parts[rank]]
        assert each.value == [of(total), of(expected_sum(3, 4100, bfloat16, bfloat16))]
        start += parts[rank]


def test_arrays_of_another_device(tmp_path: Path) -> None:
    from genesis.array import from_numpy

    def work(peers: Peers, group: NcclGroup) -> None:
        group.all_reduce(from_numpy(np.zeros(3, np.float32)))

    (found,) = nccl_ranks.started(1, work, tmp_path)
    assert found.error["kind"] == "DeviceError" and "arrays on cuda:0, and one is on cpu" in found.error["what"]


# --- Graphs -----------------------------------------------------------------------------------------------------------


def _captured(group: NcclGroup) -> tuple[RawGraph, Array, Array]:
    """A graph that exchanges, adds and gathers."""
    x, whole = given(np.zeros(64, np.float32)), empty((64,), float32, CUDA)
    part = empty((32,), float32, CUDA)
    graph = RawGraph(backend_of(CUDA))

    def step() -> None:
        group.reduce_scatter(x, part)
        group.all_reduce(part)
        group.all_gather(part, whole)

    graph.capture(step)
    return graph, x, whole


def test_a_captured_step_and_the_end(tmp_path: Path) -> None:
    """Replays compute with what is there then; `close` ends the graphs first, which somebody still holds."""

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        graph, x, whole = _captured(group)
        found: list[Any] = []
        for turn in (1, 2):
            backend_for(CUDA).from_numpy(np.arange(64, dtype=np.float32) * turn + group.rank, x)
            graph.replay()
            found.append(whole.numpy().tolist())
        group.close()
        found.append(graph.is_captured)
        return found

    for each in nccl_ranks.started(2, work, tmp_path, ends=False):
        assert each.code == 0, each.error
        for turn, got in zip((1, 2), each.value, strict=False):
            total = np.arange(64) * turn * 2 + 1
            assert got == [*(total[:32] + total[32:]), *(total[:32] + total[32:])]
        assert each.value[2] is False


def test_the_fake_refuses_to_end_before_graphs(tmp_path: Path) -> None:
    """The check of the order could fail."""

    def work(peers: Peers, group: NcclGroup) -> None:
        graph, _, _ = _captured(group)
        assert graph.is_captured
        group._nccl.close(5.0)

    for each in nccl_ranks.started(2, work, tmp_path, ends=False):
        assert each.code == 10 and "a graph still holds the communicator" in each.error["what"]


# --- Misuse -----------------------------------------------------------------------------------------------------------

MISUSE: dict[str, tuple[str, Callable[[NcclGroup], None]]] = {
    "another order": (
        "rank 1 calls|rank 0 calls",
        lambda g: [g.broadcast, lambda x: g.all_gather(x, given(np.zeros(16, np.float32)), [8, 8])][g.rank](
            given(np.zeros(8, np.float32))
        ),
    ),
    "other counts": ("bytes and collectives before", lambda g: g.all_reduce(given(np.zeros(8 + g.rank, np.float32)))),
}


@pytest.mark.parametrize("case", MISUSE)
def test_the_fake_refuses_misuse(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_nccl, "wait_s", 1.0)
    text, call = MISUSE[case]

    for each in nccl_ranks.started(2, lambda peers, group: call(group), tmp_path, ends=False):
        assert each.code == 10 and each.error["what"], each.error
        assert any(t in each.error["what"] for t in [*text.split("|"), "did not come"]), each.error


def test_calls_after_the_end(tmp_path: Path) -> None:
    """Nothing reaches NCCL any more; ending twice is well."""

    def work(peers: Peers, group: NcclGroup) -> str:
        group.abort()
        group.abort()
        assert group.fault() is None
        with pytest.raises(DistributedError, match="after the end of NCCL") as caught:
            group.all_reduce(given(np.zeros(3, np.float32)))
        group.close()
        with pytest.raises(fake_nccl.NCCLError, match="that is ended"):
            fake_nccl.comm_abort(group._nccl._handle)
        return str(caught.value.what)

    assert [each.code for each in nccl_ranks.started(2, work, tmp_path, ends=False)] == [0, 0]


# --- Faults -----------------------------------------------------------------------------------------------------------


def _watched(folder: Path, work: Callable[[Peers, NcclGroup], None], limit_s: float = 20.0) -> list[Any]:
    """Two ranks under a `Watch`, as a run has them."""

    def run(peers: Peers) -> None:
        group = nccl_ranks.fake_group(peers, folder)
        with Interrupts() as interrupts, Watch(peers, interrupts.interrupt) as watch:
            watch.collectives = group
            peers.barrier("ready")
            with peers.during("training"):
                work(peers, group)

    return ended(start_ranks(2, run, folder, limit_s=limit_s))


def test_a_rank_that_waits_for_a_dead_one(tmp_path: Path) -> None:
    """It waits on the device, where nothing tells it: the watch gives the collectives up, and names who is gone."""

    def work(peers: Peers, group: NcclGroup) -> None:
        if peers.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(given(np.zeros(3, np.float32)))
        raise AssertionError("nobody has answered")

    forks = _watched(tmp_path, work)
    assert forks[0].code == 10 and forks[0].error["kind"] == "PeerGoneError" and forks[0].error["rank"] == 1
    assert forks[0].seconds < 3


def test_an_error_of_nccl_itself(tmp_path: Path) -> None:
    """It comes at no call: the watch asks for it. The other rank ends as well."""

    def work(peers: Peers, group: NcclGroup) -> None:
        if peers.rank:
            group._nccl._handle.error = 6
        time.sleep(8)

    forks = _watched(tmp_path, work)
    assert [each.code for each in forks] == [10, 10]
    assert forks[1].error["what"] == "NCCL on rank 1 failed: RemoteError: the fake says so"
    assert forks[1].error["where"] == "training, step 0" and forks[0].error["rank"] == 1


class Slow:
    """A driver whose events happen when a test says so."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.happened: set[int] = set()
        self.made = 0

    def create_event(self, timing: bool) -> int:
        self.made += 1
        return self.made

    def record_event(self, event: int, stream: int) -> None:
        self.recorded.append(event)
        self.happened.discard(event)

    def has_happened(self, event: int) -> bool:
        return event in self.happened


def test_a_device_that_gets_on_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the last event that happened, however much is launched meanwhile."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    driver: Any = Slow()
    deadline = Deadline(driver)
    assert deadline.overdue() == 0
    deadline.mark(1)
    now[0] = 5.0
    deadline.mark(1)
    deadline.mark(1)
    assert driver.recorded == [1, 2, 2] and deadline.overdue() == 5.0
    driver.happened = {1}
    assert deadline.overdue() == 0.0
    now[0] = 8.0
    assert deadline.overdue() == 3.0  # the later marks are watched now
    driver.happened = {2}
    assert deadline.overdue() == 0.0
    now[0] = 99.0
    assert deadline.overdue() == 0.0  # nothing is left to do
    deadline.mark(1)
    now[0] = 100.0
    assert driver.recorded[-1] == 1 and deadline.overdue() == 1.0


def test_a_driver_that_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the device where the main thread loads a kernel: who watches does not wait with it."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    driver: Any = Slow()
    answers, asked = threading.Event(), list[int]()

    def blocks(event: int) -> bool:
        asked.append(event)
        answers.wait(20)
        return True

    driver.has_happened = blocks
    deadline = Deadline(driver)
    deadline.mark(1)
    for now[0] in (3.0, 70.0):
        assert deadline.overdue() == now[0]
    deadline.mark(1)  # the main thread does not wait for the answer, either
    answers.set()
    while deadline.overdue():
        pass
    assert asked[0] == 1 and driver.recorded == [1, 2]


def test_a_device_that_stands_still(tmp_path: Path) -> None:
    """The error names rank, step and phase; a device that fails says so elsewhere."""

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        said: list[Any] = []
        group._deadline = SimpleNamespace(overdue=lambda: 10.5)  # type: ignore[assignment]
        peers.step, peers.limit_s = 7, 11.0
        said.append(group.fault() is None)
        peers.limit_s = 10.0
        with peers.during("training"):
            fault = group.fault()
        said += [fault.what, fault.where, fault.exit_code] if fault is not None else []

        def fails() -> float:
            raise DeviceError("an illegal address")

        group._deadline = SimpleNamespace(overdue=fails)  # type: ignore[assignment]
        return [*said, group.fault() is None]

    (found,) = nccl_ranks.started(1, work, tmp_path)
    what = "cuda:0 of rank 0 has made no progress for 10.5 s"
    assert found.value == [True, what, "training, step 7", 10, True], found.error


def test_a_start_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone: the limit ends it, not the fake's patience."""
    fake_nccl.folder = tmp_path
    monkeypatch.setattr(fake_nccl, "wait_s", 0.6)
    with pytest.raises(DistributedError, match=r"did not start within 0\.1 s"):
        Communicator(
            fake_nccl, backend_of(CUDA).driver, 0, 2, bytes(fake_nccl.get_unique_id()), 0.1, Tuning(max_ctas=4)
        )


# --- The choice -------------------------------------------------------------------------------------------------------


def test_ranks_in_the_interpreter_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    group, line = groups.group_for(Peers(0, 1), CUDA, one_host=True)
    assert isinstance(group, StagedGroup) and line == ""


def _chosen(peers: Peers, folder: Path, loads: Callable[[], Any]) -> tuple[str, str]:
    fake_nccl.folder = folder
    groups.is_interpreted = lambda: False  # type: ignore[assignment]
    groups.bindings = loads  # type: ignore[assignment]
    group, line = groups.group_for(peers, CUDA, one_host=True)
    group.close()
    return type(group).__name__, line


def _missing() -> Any:
    raise ImportError("No module named 'nccl'")


def test_ranks_choose_the_same_group(tmp_path: Path) -> None:
    """All have NCCL; one lacks it; one has another version."""

    def other() -> Any:
        return SimpleNamespace(get_version=lambda: 22907)

    def chosen(name: str, of_rank_1: Callable[[], Any]) -> list[Any]:
        folder = tmp_path / name
        folder.mkdir()

        def work(peers: Peers) -> tuple[str, str]:
            return _chosen(peers, folder, of_rank_1 if peers.rank else lambda: fake_nccl)

        found = ended(start_ranks(2, work, folder))
        assert [each.code for each in found] == [0, 0], [each.error for each in found]
        assert found[0].value == found[1].value or name == "all"
        return list(found[0].value)

    name, line = chosen("all", lambda: fake_nccl)
    assert name == "NcclGroup" and line.startswith("collectives: NCCL 2.32.3, ")
    name, line = chosen("none", _missing)
    assert name == "StagedGroup" and line.startswith("warning: rank 1: NCCL is not installed (No module named 'nccl'; ")
    assert groups.INSTALL in line and "slowly" in line
    name, line = chosen("other", other)
    assert name == "StagedGroup" and "the ranks have NCCL 2.29.7 and 2.32.3, and need one version" in line


def test_ranks_copy_by_dma_engines_where_all_of_them_can(tmp_path: Path) -> None:
    """Linked by NVLink, on one host, with a new NCCL, and where the user has not set NCCL's policy or multicast."""

    def is_mapped(peers: Peers, folder: Path, **how: Any) -> bool:
        fake_nccl.folder = folder
        groups.is_interpreted = lambda: False  # type: ignore[assignment]
        nccl = SimpleNamespace(**{**vars(fake_nccl), "get_version": lambda: how.get("version", 23203)})
        groups.bindings = lambda: nccl  # type: ignore[assignment]
        linked = how.get("linked", [True, True])[peers.rank]
        driver_for(0).is_linked = lambda devices: linked and list(devices) == [0, 1]  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("NCCL_CTA_POLICY", raising=False)
            patch.setenv("NCCL_NVLS_ENABLE", "0")
            for name, value in how.get("variables", {}).items():
                patch.setenv(name, value)
            group, line = groups.group_for(peers, CUDA, one_host=how.get("one_host", True))
        assert isinstance(group, NcclGroup)
        found = group.buffer(64, bfloat16, "a test's", [[32, 32]]) is not None
        assert found == (" by DMA engines, " in line)
        group._nccl.close(10.0)
        return found

    def work(peers: Peers) -> list[bool]:
        ways: list[dict[str, Any]] = [
            *({}, {"linked": [True, False]}, {"version": 22708}, {"one_host": False}),
            *({"variables": {"NCCL_CTA_POLICY": "0"}}, {"variables": {"NCCL_NVLS_ENABLE": "1"}}),
        ]
        return [is_mapped(peers, tmp_path, **how) for how in ways]

    for each in ended(start_ranks(2, work, tmp_path)):
        assert each.value == [True, *[False] * 5], each.error


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package for it is named; where that one is installed already, all is well."""
    installed = {"nvidia-nccl-cu13": "2.30.7", "nccl4py": "0.6.1"}
    monkeypatch.setattr(groups, "bindings", lambda: fake_nccl)
    monkeypatch.setattr(groups, "_version", lambda name: installed.get(name, ""))
    driver: Any = SimpleNamespace(cuda_version=lambda: 12090)
    monkeypatch.setattr(groups, "driver_for", lambda index: driver)
    nccl, problem = groups._loaded(CUDA)
    assert nccl is None and "supports CUDA 12.9, nvidia-nccl-cu13 needs 13.0" in problem
    assert "pip install nvidia-nccl-cu12" in problem
    installed["nvidia-nccl-cu12"] = "2.30.7"
    assert groups._loaded(CUDA) == (fake_nccl, "")
    installed["nccl4py"] = "0.7.0"
    assert "nccl4py 0.7.0 is installed, and 0.6.x is needed" in groups._loaded(CUDA)[1]


def test_the_line_installs_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["optional-dependencies"]["distributed"]]
    assert [each.name for each in wanted] == ["nccl4py", "nvidia-nccl-cu13"]
    given = [Requirement(text) for text in shlex.split(groups.INSTALL.removeprefix("pip install "))]
    assert [each.name for each in given] == [each.name for each in wanted]
    assert given[0].specifier == wanted[0].specifier and groups._RELEASE[:-1] in str(given[0].specifier)


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.slow
def test_training_has_the_state_hash_of_one_process(tmp_path: Path) -> None:
    """Steps that are captured, over the fake: `genesis train` from its start to its end."""
    recipe = make(tmp_path)
    words = ["train", str(recipe), "train.device=cuda", "model.config.hidden_size=32", "train.accumulation_steps=2"]
    words += ["train.steps=4", "eval.every=null", "checkpoint.every=null"]
    hashes = []
    for count in (1, 2):
        program = [sys.executable, "-m", "tests.distributed.fake_nccl_training", str(tmp_path)]
        job = jobs.start(tmp_path, [*program, *words, f"train.output_dir={tmp_path / str(count)}"], count)
        (launcher,) = ended([job.fork], 300)
        said = job.out.read_text()
        assert launcher.code == 0, said + job.err.read_text()
        assert ("collectives: NCCL 2.32.3 by DMA engines, " in said) == (count == 2)
        hashes += [line for line in said.splitlines() if line.startswith("state hash: ")]
    assert len(hashes) == 2 and hashes[0] == hashes[1]


# --- The fake ---------------------------------------------------------------------------------------------------------


def test_the_fake_has_the_names_of_the_bindings() -> None:
    """Parameters in their order, and what is asked of the configuration and the errors."""
    pytest.importorskip("nccl", reason="the extra `distributed`")
    from nccl.bindings import nccl

    functions = [
        f for n, f in vars(fake_nccl).items()
        if inspect.isfunction(f) and f.__module__ == fake_nccl.__name__ and not n.startswith("_")
    ]  # fmt: skip
    assert len(functions) == 18
    for each in functions:
        real = inspect.signature(getattr(nccl, each.__name__))
        assert list(real.parameters) == list(inspect.signature(each).parameters), each.__name__
    config = nccl.Config()
    for name in Tuning._fields:
        setattr(config, name, 1)
    assert len(bytes(nccl.UniqueId())) == len(bytes(fake_nccl.get_unique_id()))
    assert bytes(nccl.UniqueId.from_buffer(bytes(128))) == bytes(128)
    assert issubclass(nccl.NCCLError, Exception)
    sizes = {nccl.DataType.Uint8: 1, nccl.DataType.Float32: 4, nccl.DataType.Bfloat16: 2, nccl.DataType.Int64: 8}
    assert all(fake_nccl.SIZES[int(kind)] == size for kind, size in sizes.items())
    assert int(nccl.Result.Success) == 0 and int(nccl.Result.InProgress) == 7 and int(nccl.DataType.Uint8) == 1

"""Workers compile what is asked for, leave nothing behind, and are done without where they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genesis.backend.cuda import compilations
from genesis.backend.cuda.compilations import Workers

pytest.importorskip("triton")
pytestmark = pytest.mark.host

SCRIPT = """
import json, sys
import triton, triton.language as tl
from genesis.backend.cuda import compilations
from genesis.backend.cuda.compile import Signature
from genesis.kernels.formulas import add_exact, mul_exact
from genesis.kernels.pointwise.elementwise import flat_kernel

how = sys.argv[1]
compilations.WORKER_THRESHOLD, compilations._work.workers.most = 1, 2
here, started = [], []
original, worker = compilations.compile_kernel, compilations._Worker.__init__
compilations.compile_kernel = lambda *args: here.append(1) or original(*args)

def start(self):
    worker(self)
    started.append(self.process)
    if how == "killed":
        self.process.kill()
    if how == "garbled":
        self.process.stdout = __import__("io").BytesIO(bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b"no answer" + bytes(8))

compilations._Worker.__init__ = start

@triton.jit
def own(x, y):
    return x + y

def ask(function):
    one = (("constexpr", 1),)
    types = (("*fp32:16",), ("*fp32:16",) * 2, "i32:16", ("i32:16",), one, (one, one))
    constants = dict(BLOCK=1024, F=function, INT64=False, SCALARS=0, WORK=tl.float32, FIRST=tl.float32)
    signature = Signature(types, tuple(sorted(constants.items())), (("num_warps", 4),))
    return compilations.compiling(flat_kernel, signature, (9, 0))

if how == "left":  # the process is killed while they have jobs
    worker_compile = compilations._Worker.compile
    compilations._Worker.compile = lambda self, job: print(self.process.pid, flush=True) or worker_compile(self, job)
made = [each.result() for each in [ask(function) for function in ((own,) if how == "own" else (add_exact, mul_exact))]]
compilations._work.threads.shutdown()
print(json.dumps(dict(here=len(here), started=len(started), running=[p.pid for p in started if p.poll() is None],
    sizes=[len(each.image) for each in made], most=compilations._work.workers.most)))
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    (folder / "cache").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), how]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, how: str) -> dict[str, Any]:
    job = start(folder, how)
    out, errors = job.communicate()
    assert job.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    assert found["running"] == [] and list((folder / "tmp").iterdir()) == []
    assert all(size > 1000 for size in found["sizes"])
    return found


def test_workers_compile_and_end(tmp_path: Path) -> None:
    found = run(tmp_path, "well")
    assert found["here"] == 0 and 1 <= found["started"] <= 2 and found["most"] == 2
    assert len(list((tmp_path / "cache" / "genesis" / "kernels").glob("*.kernel"))) == 2


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(
    ("how", "most"), [("killed", 0), pytest.param("garbled", 0, marks=pytest.mark.full), ("own", 2)]
)
def test_what_no_worker_can_do_is_compiled_here(tmp_path: Path, how: str, most: int) -> None:
    """A worker that ended by itself or gave no answer, and functions that others would not find by their names."""
    found = run(tmp_path, how)
    assert found["here"] >= 1 and found["most"] == most


def test_none_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    job = start(tmp_path, "left")
    assert job.stdout
    job.stdout.readline()  # one has a job
    children = [each.read_text().split() for each in Path(f"/proc/{job.pid}/task").glob("*/children")]
    workers = [int(pid) for each in children for pid in each]
    assert workers
    job.kill()
    job.communicate()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not [each for each in (tmp_path / "tmp").iterdir() if each.name.startswith("genesis-")]


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_those_stopped_at_work_leave_their_places_to_others(error: type[Exception], monkeypatch: Any) -> None:
    """The last of some kernels stops all workers, while the first of others has just taken one."""
    workers = Workers()
    workers.most = 2

    class Stopped:
        process = SimpleNamespace(terminate=lambda: None)

        def wait_or_kill(self) -> None: ...

        def compile(self, job: bytes) -> None:
            workers.end()
            raise error

    monkeypatch.setattr(compilations, "_Worker", Stopped)
    monkeypatch.setattr(compilations, "entry_name", lambda *_: "kernel")
    for _ in range(2):
        assert workers.compile(None, (), (9, 0), waiting=compilations.WORKER_THRESHOLD) is None  # type: ignore
    assert (workers.most, workers.running, workers._idle) == (2, 0, [])


@pytest.mark.parametrize(
    ("cores", "ranks", "most"), [(2, "", 0), (4, "", 3), (16, "", 12), (16, "4", 3), (16, "x", 12)]
)
def test_how_many_there_are(cores: int, ranks: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on a Mac
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert Workers().most == most

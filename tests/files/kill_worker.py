"""A process that saves as a training run does, is killed at each file-system call in turn, and looks at what is left.

Run as `python -m tests.files.kill_worker FOLDER`; prints one JSON object with what it found. It forks a child for each
kill, which is why it is a process of its own, without threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from genesis.errors import GenesisError
from genesis.files.atomic import AtomicFolder, FolderUpdate, remove_folder, sweep, verify_manifest, write_file
from genesis.files.filesystem import FileSystem
from tests.files.faults import KillAt, Recorder

VERSIONS = (1, 2, 3)


def checkpoint(step: int) -> str:
    return f"checkpoint-{step}"


def fill(folder: AtomicFolder, version: int) -> None:
    """Two files whose content tells the version."""
    folder.write("model.safetensors", f"weights {version}".encode() * 500)
    folder.write("state.json", f"state {version}".encode())


def train(out: Path, fs: FileSystem, committed: Callable[[str, int], None]) -> None:
    """Three saves with rotation, a folder replaced each time, a file rewritten and two files at the root updated."""
    for version in VERSIONS:
        with AtomicFolder(out / checkpoint(version), fs=fs, metadata={"version": version}) as folder:
            fill(folder, version)
        committed("checkpoint", version)
        if version > 1:
            remove_folder(out / checkpoint(version - 1), fs=fs)
        with AtomicFolder(out / "best", fs=fs, replace=True, metadata={"version": version}) as folder:
            fill(folder, version)
        committed("best", version)
        write_file(out / "state.txt", str(version).encode() * 1000, fs=fs)
        committed("file", version)
        with FolderUpdate(out, fs=fs) as update:
            update.write("a.txt", str(version).encode() * 1000)
            update.write("b.txt", str(version).encode() * 1000)
        committed("update", version)


def whole_version(folder: Path) -> int:
    """The version of a committed folder after all its bytes were checked."""
    version = verify_manifest(folder).metadata["version"]
    assert isinstance(version, int)
    assert (folder / "model.safetensors").read_bytes() == f"weights {version}".encode() * 500
    assert (folder / "state.json").read_bytes() == f"state {version}".encode()
    return version


def file_version(path: Path) -> int:
    """The version of a rewritten file, which must be whole."""
    text = path.read_text()
    assert text == text[0] * 1000, f"{path.name} is half made"
    return int(text[0])


def check(out: Path, reported: dict[str, int]) -> None:
    """Everything reported committed is there, whole, in this version or a later one; nothing half made is visible."""
    found = [int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")]
    for version in found:
        assert whole_version(out / checkpoint(version)) == version
    assert max(found, default=0) >= reported.get("checkpoint", 0), "a committed checkpoint is lost"
    for kind, names in {"best": ["best"], "file": ["state.txt"], "update": ["a.txt", "b.txt"]}.items():
        for name in names:
            path = out / name
            if kind in reported or path.exists():
                version = whole_version(path) if kind == "best" else file_version(path)
                assert reported.get(kind, 0) <= version <= reported.get(kind, 0) + 1, f"{name} has version {version}"
    hidden = [path.name for path in out.glob(".*")]
    assert not hidden, f"leftovers after the sweep: {hidden}"


def in_child(action: Callable[[int], None]) -> tuple[int, bytes]:
    """Run `action(pipe)` in a forked child; its wait status and all it wrote to the pipe."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        try:
            action(sink)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        said = pipe.read()
    return os.waitpid(pid, 0)[1], said


def killed_training(out: Path, n: int) -> tuple[bool, dict[str, int]]:
    """Train in a child that dies at call `n`: whether it was killed, and the last version of each kind it reported."""

    def action(pipe: int) -> None:
        def committed(kind: str, version: int) -> None:
            os.write(pipe, f"{kind} {version}\n".encode())

        train(out, FileSystem(KillAt(n)), committed)

    status, said = in_child(action)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL) and status != 0:
        raise RuntimeError(f"the child of call {n} ended with status {status}")
    lines = [line.split() for line in said.decode().splitlines()]
    return os.WIFSIGNALED(status), {kind: int(version) for kind, version in lines}


def killed_sweeps(out: Path, reported: dict[str, int]) -> int:
    """Kill the sweep itself at each of its calls, on copies of `out`; the next must mend all. Returns the kills."""

    def sweep_and_die(m: int) -> None:
        sweep(copy, fs=FileSystem(KillAt(m)))

    recorder = Recorder()
    copy = out.with_name("copy")
    shutil.copytree(out, copy)
    sweep(copy, fs=FileSystem(recorder))
    shutil.rmtree(copy)
    for m in range(1, len(recorder.calls) + 1):
        shutil.copytree(out, copy)
        status, _ = in_child(lambda _, m=m: sweep_and_die(m))  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"the sweep was not killed at call {m}"
        sweep(copy)
        check(copy, reported)
        shutil.rmtree(copy)
    return len(recorder.calls)


def main(folder: Path) -> dict[str, object]:
    """Kill at every call; returns counts and the problems found."""
    recorder = Recorder()
    train(folder / "probe", FileSystem(recorder), lambda kind, version: None)
    total = len(recorder.calls)
    problems: list[str] = []
    kills = sweep_kills = 0
    for n in range(1, total + 1):
        out = folder / f"run-{n}"
        out.mkdir()
        killed, reported = killed_training(out, n)
        kills += killed
        call = recorder.calls[min(n, total) - 1]
        try:
            # Only leftovers of a replacement or removal have more than one outcome; some of the others as a sample.
            if any(path.name.startswith((".old-", ".del-")) for path in out.glob(".*")) or n % 10 == 0:
                sweep_kills += killed_sweeps(out, reported)
            sweep(out)
            check(out, reported)
        except (AssertionError, GenesisError, OSError) as error:
            problems.append(f"killed at call {n} ({call.op} {call.path.name}): {error}")
        shutil.rmtree(out)
    return {"calls": total, "kills": kills, "sweep_kills": sweep_kills, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

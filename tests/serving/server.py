"""A server in processes of its own, for tests and measurements."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Server", "serving"]

START_S = 120


class Server:
    """`genesis serve` as it runs.

    Args:
        program: a module that takes its place, for measurements.

    Attributes:
        url: where it answers.
        told: what it wrote to stderr so far.
    """

    def __init__(self, folder: Path, *words: str, program: str = "genesis_cli.main") -> None:
        command = [sys.executable, "-m", program, "serve", str(folder), "--port", "0", *words]
        # Programs that a shell starts in the background ignore SIGINT, and so do their children: not this one.
        listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listens)  # noqa: PLW1509
        self.told, self.url = "", ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_S) or not self.url:
            self.process.kill()
            raise RuntimeError(self.told)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.told += line
                if found := re.search(r" at (http://\S+)/v1$", line.strip()):
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()

    def children(self) -> list[int]:
        """The processes that it has started."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def stop(self, number: int = signal.SIGINT) -> int:
        """Its exit code after a signal."""
        os.kill(self.process.pid, number)
        code = self.process.wait(30)
        self._reader.join(30)
        return code


@contextlib.contextmanager
def serving(folder: Path, *words: str, program: str = "genesis_cli.main") -> Iterator[Server]:
    """A server that is stopped in the end."""
    server = Server(folder, *words, program=program)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()

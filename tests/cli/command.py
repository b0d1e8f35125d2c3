"""Runs the command line, in a process of its own or in this one, also with a stand-in for the session module."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import genesis_cli
from genesis_cli.main import main

__all__ = ["FAKE_SESSION", "fake_session", "genesis", "genesis_with", "here", "printed"]

SESSION_PATH = [f"{Path(genesis_cli.__file__).parent}/session"]
# The models stay out of it, so that these tests are about the command line alone and start quickly.
FAKE_SESSION = """
import sys, types
session = types.ModuleType("genesis_cli.session")
exec(compile({source!r}, "session", "exec"), session.__dict__)
sys.modules["genesis_cli.session"] = session
from genesis_cli.main import main
sys.exit(main())
"""


def genesis(*words: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """`genesis words…`"""
    return _run([sys.executable, "-m", "genesis_cli.main", *words], cwd, options)


def genesis_with(source: str, *words: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same, with `source` as the module `genesis_cli.session`."""
    return _run([sys.executable, "-c", FAKE_SESSION.format(source=source), *words], cwd, options)


def here(*words: str, session: str = "") -> subprocess.CompletedProcess[str]:
    """The same in this process, which is ten times as fast: for what needs neither signals nor real streams."""
    stand_in = ModuleType("genesis_cli.session")
    stand_in.__path__ = SESSION_PATH  # its other modules are the real ones
    exec(compile(session, "session", "exec"), stand_in.__dict__)
    with fake_session(stand_in):
        return subprocess.CompletedProcess(words, *printed(*words))


def printed(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis words…` in this process, with the real session."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        code = main([str(word) for word in words])
    return code, out.getvalue(), told.getvalue()


@contextlib.contextmanager
def fake_session(stand_in: ModuleType) -> Iterator[None]:
    """`stand_in` as the module `genesis_cli.session` of this process."""
    with (
        mock.patch.dict(sys.modules, {"genesis_cli.session": stand_in}),
        mock.patch.object(genesis_cli, "session", stand_in, create=True),
    ):
        yield


def _run(command: list[str], cwd: Path | None, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    # A wide terminal, so that help is not broken in the middle of what tests look for.
    environment = {**os.environ, "COLUMNS": "120", **streams.pop("env", {})}
    return subprocess.run(
        command, text=True, encoding="utf-8", cwd=cwd, timeout=60, check=False, env=environment, **streams
    )

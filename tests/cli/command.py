"""Runs the command line, in a process of its own or in this one, also with a stand-in for the session module."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import genesis_models
from genesis_cli.main import main

__all__ = ["FAKE_SESSION", "genesis", "genesis_with", "here"]

# The models stay out of it, so that these tests are about the command line alone and start quickly.
FAKE_SESSION = """
import sys, types
from importlib.util import find_spec
session = types.ModuleType("genesis_models.session")
exec(compile({source!r}, "session", "exec"), session.__dict__)
found = find_spec("genesis_models").submodule_search_locations
models = sys.modules["genesis_models"] = types.ModuleType("genesis_models")
models.__path__ = found
models.session = sys.modules["genesis_models.session"] = session
from genesis_cli.main import main
sys.exit(main())
"""


def genesis(*words: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """`genesis words…`"""
    return _run([sys.executable, "-m", "genesis_cli.main", *words], cwd, options)


def genesis_with(source: str, *words: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same, with `source` as the module `genesis_models.session`."""
    return _run([sys.executable, "-c", FAKE_SESSION.format(source=source), *words], cwd, options)


def here(*words: str, session: str = "") -> subprocess.CompletedProcess[str]:
    """The same in this process, which is ten times as fast: for what needs neither signals nor real streams."""
    out, told = io.StringIO(), io.StringIO()
    models, stand_in = ModuleType("genesis_models"), ModuleType("genesis_models.session")
    models.__path__ = genesis_models.__path__  # the other modules are the real ones
    exec(compile(session, "session", "exec"), stand_in.__dict__)
    models.session = stand_in  # type: ignore[attr-defined]
    modules = {"genesis_models": models, "genesis_models.session": stand_in}
    with mock.patch.dict(sys.modules, modules), contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), told.getvalue())


def _run(command: list[str], cwd: Path | None, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    # A wide terminal, so that help is not broken in the middle of what tests look for.
    environment = {**os.environ, "COLUMNS": "120", **streams.pop("env", {})}
    return subprocess.run(
        command, text=True, encoding="utf-8", cwd=cwd, timeout=60, check=False, env=environment, **streams
    )

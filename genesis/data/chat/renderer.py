"""The parent of the process that renders templates: it sends jobs and receives renders or errors, in order.

A chat template is code from the model's publisher. It runs in jinja2's sandbox in a separate process without an
environment and open files, with limits on time, memory and output, and the answers are checked. If the process dies,
only the current conversation is lost.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.errors import ModelError, escape
from genesis.files.boundary import system_error

_CHILD = Path(__file__).with_name("child.py")
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20
_START_S = 60.0
# A template that ends the process for every conversation is not tried on all of them.
_MAX_DEATHS = 3
# A character takes at most six bytes of JSON, and every answer has a few more around its texts.
_BYTES_PER_CHAR = 6
_ANSWER_SLACK = 1 << 20
_MALFORMED = "the process that renders it sent a malformed answer"
_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True)
class Limits:
    """The limits of one conversation.

    Attributes:
        cpu_s: CPU seconds of one render.
        wall_s: seconds until the answer for a conversation, plus one for each of its turns.
        memory_bytes: address space of the process.
        output_chars: characters of a render and of an answer.
    """

    cpu_s: float = 2.0
    wall_s: float = 60.0
    memory_bytes: int = 1 << 30
    output_chars: int = 1 << 26


@dataclass(frozen=True, slots=True)
class Job:
    """Messages to render, and the turns whose prompts and ends are requested; as JSON."""

    data: bytes
    turns: Sequence[int]

    @classmethod
    def of(cls, messages: Sequence[Any], tools: Sequence[Any] | None, turns: Sequence[int]) -> Job:
        """Return the job for messages of plain JSON values.
        Raises: ValueError: half a surrogate pair or a number with thousands of digits. RecursionError: nested too deep.
        """
        value = {"messages": messages, "tools": tools, "turns": turns}
        return cls(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8"), turns)


@dataclass(frozen=True, slots=True)
class RenderError:
    """The reason for a missing render; the text may hold any characters."""

    what: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """The result of a job.

    Attributes:
        whole: the render of all messages.
        turns: for each turn, the render of what is before it with the generation prompt, and the render up to and
            including it; an error if the template refuses.
    """

    whole: str
    turns: Sequence[tuple[str | RenderError, str | RenderError]]


class _Dead(Exception):
    """The process ended, hangs or sends malformed answers."""


class Renderer:
    """A child process that renders one model's templates; a context manager.

    Args:
        templates: name -> Jinja text; `default`, and optionally `tool_use` for conversations with tools.
        variables: variables of the templates in addition to messages and tools, such as `bos_token`.
        where: name of the template in errors.

    Raises:
        ModelError: the template is not valid Jinja, or the process cannot be started.
    """

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, Any], *, where: str, limits: Limits | None = None
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self._where = where
        self._start = {
            "paths": _library_folders(),
            "templates": dict(templates),
            "variables": dict(variables),
            "cpu_s": self.limits.cpu_s,
            "memory_bytes": self.limits.memory_bytes,
            "output_chars": self.limits.output_chars,
        }
        self._deaths = 0
        self._process: _Process | None = self._start_process()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def render(self, jobs: Sequence[Job]) -> list[Rendered | RenderError]:
        """Return the result of each of `jobs`. Raises: ModelError as in `render_batches`."""
        [found] = self.render_batches([jobs])
        return found

    def render_batches(self, batches: Iterable[Sequence[Job]]) -> Iterator[list[Rendered | RenderError]]:
        """Yield the results of each batch; while the caller processes one, the process renders the next.

        Raises:
            ModelError: the process cannot be started again, or several conversations in a row end it.
        """
        waiting: Sequence[Job] | None = None
        try:
            for batch in batches:
                found = None if waiting is None else self._collect(waiting)
                waiting = batch
                self._submit(batch)
                if found is not None:
                    yield found
            if waiting is not None:
                found, waiting = self._collect(waiting), None
                yield found
        finally:
            if waiting is not None:
                self.close()  # it still sends answers that nobody reads

    def _submit(self, jobs: Sequence[Job]) -> None:
        if self._process is None:
            self._process = self._start_process()
        try:
            self._process.send(b"[" + b",".join(job.data for job in jobs) + b"]")
        except _Dead:  # not caused by a conversation
            self.close()

    def _collect(self, jobs: Sequence[Job]) -> list[Rendered | RenderError]:
        """Return the answers for submitted jobs; if one ends the process, the rest go to a new one."""
        results: list[Rendered | RenderError] = []
        while len(results) < len(jobs):
            if self._process is None:
                self._submit(jobs[len(results) :])
            try:
                for job in jobs[len(results) :]:
                    if self._process is None:
                        raise _Dead("the process that renders it ended at once")
                    results.append(_checked(self._process.receive(self.limits.wall_s + len(job.turns)), len(job.turns)))
                    self._deaths = 0
            except _Dead as death:
                self.close()
                self._deaths += 1
                if self._deaths == _MAX_DEATHS:
                    raise self._unusable(f"{death}, {_MAX_DEATHS} times in a row") from None
                results.append(RenderError(str(death)))
        return results

    def _start_process(self) -> _Process:
        process = _Process(self.limits)
        try:
            process.send(json.dumps(self._start).encode("utf-8"))
            answer = process.receive(_START_S)
            error = answer.get("error") if isinstance(answer, dict) else "the process sent a malformed answer"
        except _Dead as death:
            error = str(death)
        except BaseException:
            process.end()
            raise
        if error is None:
            return process
        process.end()
        raise self._unusable(error)

    def _unusable(self, why: str) -> ModelError:
        what = f"the chat template cannot be used: {escape(why)}"
        return ModelError(what, where=self._where, next="download the template again")


class _Process:
    """The child and its pipes; it ends at the latest with this object."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _LIBRARY_PATHS if name in os.environ},
                start_new_session=True,  # the parent handles an interrupt from the terminal
            )
        except OSError as error:
            raise system_error(error, ModelError, "starting Python for chat templates", sys.executable) from error
        assert self._child.stdin is not None and self._child.stdout is not None
        self._output = self._child.stdout.fileno()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # a larger pipe lets the child continue before its answers are read
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._buffer = bytearray()
        self.end = weakref.finalize(self, _end, self._child, self._selector)

    def send(self, data: bytes) -> None:
        """Write one frame. The child reads a complete frame before it answers, so this cannot deadlock."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, wall_s: float) -> Any:
        """Return the value of the next frame. Raises: _Dead."""
        deadline = time.monotonic() + wall_s
        size = int.from_bytes(self._take(_LENGTH_BYTES, deadline), "big")
        if size > self._limits.output_chars * _BYTES_PER_CHAR + _ANSWER_SLACK:
            raise _Dead(_MALFORMED)
        try:
            return json.loads(self._take(size, deadline).decode("utf-8"))
        except (ValueError, RecursionError):
            raise _Dead(_MALFORMED) from None

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise _Dead(f"rendering took more than {self._limits.wall_s:g} s")
            data = os.read(self._output, _READ_BYTES)
            if not data:
                raise self._death()
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _death(self) -> _Dead:
        try:
            status = self._child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return _Dead("the process that renders it closed its output")
        if status == -signal.SIGPROF:
            return _Dead(f"a render took more than {self._limits.cpu_s:g} s of CPU time")
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
        return _Dead(f"the process that renders it {how}")


def _end(child: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
    """Kill the child, reap it, and close the pipes; it has no state to save."""
    selector.close()
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(OSError):  # data that is not yet written
            pipe.close()
    child.wait()


def _checked(answer: Any, turns: int) -> Rendered | RenderError:
    """Return the answer for a job of so many turns, expanded. Raises: _Dead, if it is malformed."""
    match answer:
        case {"error": str(what)}:
            return RenderError(what)
        case {"whole": str(whole), "turns": list(pairs)} if len(pairs) == turns:
            parts = _expand(whole, pairs)
            return Rendered(whole, list(zip(parts[::2], parts[1::2], strict=True)))
    raise _Dead(_MALFORMED)


def _expand(whole: str, pairs: Sequence[Any]) -> list[str | RenderError]:
    """Return the consecutive renders of the turns from the short forms of `Child.answer`."""
    found: list[str | RenderError] = []
    last = whole
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _Dead(_MALFORMED)
        for part in pair:
            match part:
                case int(length):
                    found.append(whole[:length])
                case [int(same), str(rest)]:
                    last = last[:same] + rest
                    found.append(last)
                case {"error": str(what)}:
                    found.append(RenderError(what))
                case _:
                    raise _Dead(_MALFORMED)
    return found


def _library_folders() -> list[str]:
    """Return the folders of jinja2 for the child, which runs without paths from the environment or the user."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModelError(f"the package {name} is missing", where="the chat template", next="install Genesis again")
        folders.append(str(Path(spec.origin).parents[1]))
    return sorted(set(folders))

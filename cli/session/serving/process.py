"""`genesis serve`: this process runs the engine, which accepts requests while others run; a child serves HTTP."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from genesis.errors import DeviceError, GenesisError, InterruptedRun, OutOfMemoryError, UsageError, escape
from genesis.files.hf import read_chat_templates
from genesis.train.output import Output
from genesis.train.signals import SAME_SECONDS, Interrupts
from genesis_cli.session.generation import GENERATE, GENERATE_MEMORY
from genesis_cli.session.inference import opened, scores, template_folder
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.serving.link import GRACE_S, Message, failed, receive, send
from genesis_cli.session.serving.protocol import is_loopback
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import drawing_line, file_drawing
from genesis_models.engine import Request, Sampling, Token
from genesis_models.engine.engine import check_prompt
from genesis_models.engine.text import Runner
from genesis_models.generate import GPU_ROWS, ROWS, engine_for
from genesis_models.source import find_source


class Gone(Exception):
    """The HTTP process has ended."""


class Worker:
    """Runs an engine for the requests of a connection until it closes."""

    def __init__(self, connection: Connection, model: CausalLM, engine: Runner) -> None:
        self._connection, self._model, self._engine = connection, model, engine
        self._waiting: deque[Message] = deque()
        self._unscored: deque[Message] = deque()
        self._was_step = True  # since the last sequence was scored
        self._numbers: dict[int, int] = {}  # the engine's number of a request -> its id
        self._drawn: dict[int, tuple[int, list[int], str | None]] = {}  # by id, the tokens that are not sent yet
        self._arrived = select.poll()  # created once, unlike in Connection.poll
        self._arrived.register(connection.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the other process is gone."""
        while True:
            try:
                for token in self._engine.run(self):
                    self._take(token)
            except (Gone, EOFError, OSError):
                return
            except GenesisError as error:
                self._fail([*self._numbers.values()], error, is_ours=True)
            self._numbers.clear()

    def pause(self) -> None:
        """Send tokens and receive messages; the engine calls this before it waits for a step."""
        self._flush()
        self._poll()

    def __iter__(self) -> Iterator[Request | None]:
        """Yield the next request, or None when nothing is pending and others run."""
        number = 0
        while True:
            self.pause()
            if not self._waiting:
                yield None
                continue
            message = self._waiting.popleft()
            request = _request(message)
            try:
                check_prompt(self._model, request.ids)
                request.sampling.check()
            except GenesisError as error:
                self._fail([message["id"]], error, is_ours=False)
                continue
            self._numbers[number] = message["id"]
            number += 1
            yield request

    def _take(self, token: Token) -> None:
        """Keep a token until `pause`."""
        self._was_step = True
        id = self._numbers.get(token.request)
        if id is None:  # cancelled
            return
        _, ids, _ = found = self._drawn.get(id) or (id, [], None)
        if token.id is not None:
            ids.append(token.id)
        if token.finish is not None:
            self._numbers.pop(token.request, None)
            found = id, ids, token.finish
        self._drawn[id] = found

    def _flush(self) -> None:
        if self._drawn:
            send(self._connection, {"op": "tokens", "tokens": [*self._drawn.values()]})
            self._drawn = {}

    def _poll(self) -> None:
        """Receive messages, waiting if there is nothing to do, and score one sequence between two steps."""
        waits = not (self._numbers or self._waiting or self._unscored)
        while self._arrived.poll(None if waits else 0):
            waits = False
            try:
                message = receive(self._connection)
            except (EOFError, OSError):
                raise Gone from None
            if message["op"] == "new":
                self._waiting.append(message)
            elif message["op"] == "cancel":
                self._cancel(message["id"])
            else:
                self._unscored.append(message)
        if self._unscored and (self._was_step or not self._numbers):
            self._was_step = False
            self._score(self._unscored.popleft())

    def _cancel(self, id: int) -> None:
        self._waiting = deque(each for each in self._waiting if each["id"] != id)
        self._unscored = deque(each for each in self._unscored if each["id"] != id)
        self._drawn.pop(id, None)
        for number in [number for number, each in self._numbers.items() if each == id]:
            del self._numbers[number]
            self._engine.cancel(number)

    def _score(self, message: Message) -> None:
        try:
            [rows] = scores(self._model, [(message["ids"], 1)], message["top"])
        except GenesisError as error:
            self._fail([message["id"]], error, is_ours=isinstance(error, OutOfMemoryError))
            return
        send(self._connection, {"op": "scores", "id": message["id"], "rows": rows})

    def _fail(self, ids: list[int], error: GenesisError, *, is_ours: bool) -> None:
        """Report that requests have failed through their own fault, or through the model's or the machine's."""
        for id in ids:
            self._drawn.pop(id, None)
            send(self._connection, {"op": "failed", "id": id, "what": error.what, "is_ours": is_ours})


def _request(message: Message) -> Request:
    ids, sampling, stop = message["ids"], Sampling(**message["sampling"]), frozenset(message["stop"])
    return Request(ids, sampling, message["max_tokens"], stop, message["sequence"])


CONTEXT = 4096  # the most tokens of a sequence by default
ENDING_S = 4  # seconds within which the HTTP process ends after its last answer
MOST_KEY = 4096  # characters
ENGINE_S = 3  # seconds within which this process ends after that, unless its engine hangs


def serve(
    folder: str,
    *,
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    context: int | None,
    queue: int,
    most_bytes: int,
    base: str | None,
    device: str,
    dtype: str,
    kv_cache: Literal["auto", "fp8"],
) -> None:
    """Answer requests until a signal arrives.

    Args:
        api_key: key that clients must send; None requires none.
        name: name of the model for clients; the folder's name by default.
        context: the most tokens of a sequence, including its prompt.
        queue: the most requests that wait or run.
        most_bytes: the most bytes of a request's body.

    Raises:
        UsageError: no key for an address beyond loopback, a key that cannot be sent, or an impossible context.
            DeviceError: the address is in use, or the extra is not installed. InterruptedRun: a signal ended it.
    """
    _check_key(api_key)
    _check_extra()
    console = Output(sys.stderr)
    with phrased_for(GENERATE, memory=GENERATE_MEMORY), ExitStack() as stack:
        # Listen first, then load: a wrong address fails at once.
        listening = stack.enter_context(_listening(host, port, has_key=api_key is not None))
        bound = listening.getsockname()
        source = find_source(folder, base)
        console.line(str(source))
        if not read_chat_templates(template_folder(source)):
            console.line("the model has no chat template: only /v1/completions is served")
        model, _ = opened(source, resolve_device(device), dtype)
        longest = model.config.context_length
        if context is not None and context > longest:
            raise UsageError(f"--context {context} exceeds the model's {longest} positions", next="lower it")
        # Create an engine with rows for full contexts.
        if (line := drawing_line(source.folders)) is not None:
            console.line(line)
        context = min(CONTEXT, longest) if context is None else context
        rows = ROWS if resolve_device(device).type == "cpu" else GPU_ROWS
        whole = [Request([0], Sampling(0.0), context - 1)] * rows
        engine = engine_for(model, whole, cache=kv_cache)
        # Start the HTTP process, and serve until it ends or a signal arrives.
        served = name or Path(os.path.abspath(folder)).name
        settings = {
            "name": served,
            "created": int(time.time()),
            "context": context,
            "vocabulary": model.config.vocab_size,
            "hosts": [] if api_key else ["localhost", _in_url(host).lower()],
            "api_key": api_key or "",
            "most_bytes": most_bytes,
            "drawing": file_drawing(source.folders),
        }
        start: Message = {"folder": os.path.abspath(folder), "base": base, "settings": settings, "most": queue}
        connection, child = stack.enter_context(_http(listening, start))
        ending = _Ending(child, console)
        console.line(f"serving {escape(served)} at http://{_in_url(host)}:{bound[1]}/v1")
        Worker(connection, model, engine).run()
        if ending.received is not None:
            what = f"{signal.Signals(ending.received).name} ended the server"
            raise InterruptedRun(what, signal=ending.received)
    raise DeviceError("the HTTP process has ended", next="see its message above")


class _Ending:
    """Ends the server at a signal, independently of the engine, which may be busy; a second signal ends it at once.

    Attributes:
        received: number of the first signal.
    """

    def __init__(self, child: subprocess.Popen[bytes], console: Output) -> None:
        self._child, self._console = child, console
        self.received: int | None = None
        self._signals, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in Interrupts.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the number arrives through the pipe even during native code
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        number = self.received = os.read(self._signals, 1)[0]
        begun, child = time.monotonic(), self._child
        self._console.line(f"stopping: pending answers have {GRACE_S:.0f} s (again: stop now)")
        self._console.flush()
        child.send_signal(signal.SIGTERM)
        while child.poll() is None and time.monotonic() - begun < GRACE_S + ENDING_S:
            if select.select([self._signals], [], [], 0.05)[0]:
                repeated = os.read(self._signals, 1)[0]
                if repeated not in (number, signal.SIGHUP) or time.monotonic() - begun > SAME_SECONDS:
                    break
        child.kill()
        time.sleep(ENGINE_S)
        os._exit(128 + number)


def _check_key(key: str | None) -> None:
    """Raise UsageError if an HTTP header cannot hold the key."""
    is_latin = key is None or all(ord(each) < 256 for each in key)
    if key is not None and not (is_latin and key.isprintable() and key == key.strip() and 0 < len(key) <= MOST_KEY):
        wrong = "it is empty, too long, or has line ends, spaces at its ends or rare characters"
        what = f"clients cannot send the key: {wrong}"
        raise UsageError(what, where="--api-key, or GENESIS_API_KEY", next="use ASCII letters, digits and signs")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_extra() -> None:
    for package in ("starlette", "uvicorn"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            next = "install Genesis's extra `serve`: pip install starlette uvicorn"
            raise DeviceError(f"the package {package} is not installed", next=next) from None


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the socket address of a host; IPv4 takes precedence over IPv6. Raises: OSError."""
    with suppress(ValueError):
        ip_address(host)
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)
    family, *_, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return family, address


@contextmanager
def _listening(host: str, port: int, *, has_key: bool) -> Iterator[socket.socket]:
    """Yield a listening socket before anything is loaded.

    Raises:
        UsageError: other machines can reach the address, and there is no key. DeviceError: the address is unusable.
    """
    with ExitStack() as stack:
        try:
            # Bind the address that is checked: a name may resolve to another one the next time.
            family, address = _address(host, port)
            if not has_key and not is_loopback(address[0]):
                what = f"other machines can reach {escape(host)}, but no key is required"
                raise UsageError(what, where="--host", next="set --api-key, or remove --host")
            listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1024)
        except (OSError, UnicodeError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            reason = "is in use" if is_taken else f"cannot be used: {getattr(error, 'strerror', None) or error}"
            what = f"{escape(host)} port {port} {reason}"
            where, next = ("--port", "; 0 picks a free one") if is_taken else ("--host and --port", ", or remove it")
            raise DeviceError(what, where=where, next=f"choose another{next}") from None
        listening.setblocking(False)
        yield listening


@contextmanager
def _http(listening: socket.socket, start: Message) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """Start a child that serves HTTP, and yield the connection to it; from then on only the child listens.

    Raises:
        GenesisError: it cannot serve this model. DeviceError: it does not start.
    """
    ours, theirs = Pipe()
    words = [sys.executable, "-m", "genesis_cli.session.serving.http_process", str(listening.fileno())]
    child = subprocess.Popen(
        [*words, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(listening.fileno(), theirs.fileno()),
        start_new_session=True,  # only the parent handles an interrupt from the terminal
    )
    theirs.close()
    is_ready = False
    try:
        try:
            send(ours, start)
            answer = receive(ours)
        except (EOFError, OSError):
            raise DeviceError("the HTTP process does not start", next="see its message above") from None
        if answer["op"] == "failed":
            raise failed(answer)
        is_ready = True
        listening.close()
        yield ours, child
    finally:
        ours.close()  # makes the child end
        if not is_ready:  # the child has no answers to finish
            child.kill()
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

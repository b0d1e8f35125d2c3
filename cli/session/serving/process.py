"""`genesis serve`: the engine runs here, and HTTP in a child."""

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from genesis.errors import DeviceError, InterruptedRun, UsageError, escape
from genesis.files.hf import read_chat_templates
from genesis.train.output import Output
from genesis.train.signals import SAME_SECONDS, Interrupts
from genesis_cli.session.generation import GENERATE, GENERATE_MEMORY
from genesis_cli.session.inference import opened
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.serving.messages import GRACE_S, Message, failed, receive, send
from genesis_cli.session.serving.protocol import is_loopback
from genesis_cli.session.serving.worker import Worker
from genesis_cli.session.speaker import template_folder
from genesis_models.chat_files import drawing_line, file_drawing
from genesis_models.engine import Request, Sampling
from genesis_models.generate import GPU_ROWS, ROWS, engine_for
from genesis_models.source import find_source

CONTEXT = 4096  # tokens of a sequence where the model takes more and the user names no number
ENDING_S = 4  # in which the process of HTTP ends after its last answer
MOST_KEY = 4096  # characters
ENGINE_S = 3  # in which this process ends after that, unless its engine hangs


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
    """Answer requests until a signal comes.

    Args:
        api_key: what clients must send; None: nothing.
        name: of the model, for clients; None: the folder's.
        context: the most tokens of a sequence, its prompt included.
        queue: requests that may wait or run.
        most_bytes: of a request's body.

    Raises:
        UsageError: beyond loopback without a key, a key that cannot be sent, or an impossible context. DeviceError: the
            address is taken, or the extra is not installed. InterruptedRun: a signal ended it.
    """
    _check_key(api_key)
    _check_extra()
    console = Output(sys.stderr)
    with phrased_for(GENERATE, memory=GENERATE_MEMORY), ExitStack() as stack:
        listening = stack.enter_context(_listening(host, port, has_key=api_key is not None))
        bound = listening.getsockname()
        source = find_source(folder, base)
        console.line(str(source))
        if not read_chat_templates(template_folder(source)):
            console.line("it has no chat template: only /v1/completions is answered")
        model, _ = opened(source, resolve_device(device), dtype)
        longest = model.config.context_length
        if context is not None and context > longest:
            raise UsageError(f"--context {context} is beyond the model's {longest} positions", next="lower it")
        if (line := drawing_line(source.folders)) is not None:
            console.line(line)
        context = min(CONTEXT, longest) if context is None else context
        rows = ROWS if resolve_device(device).type == "cpu" else GPU_ROWS
        whole = [Request([0], Sampling(0.0), context - 1)] * rows
        engine = engine_for(model, whole, cache=kv_cache)
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
    raise DeviceError("the process of HTTP has ended", next="look for its message above")


class _Ending:
    """Ends the server at a signal, beside the engine, which may compute or hang: the second signal does not wait.

    Attributes:
        received: the number of the first signal.
    """

    def __init__(self, child: subprocess.Popen[bytes], console: Output) -> None:
        self._child, self._console = child, console
        self.received: int | None = None
        self._signals, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        for number in Interrupts.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the number comes through the pipe, whatever runs here
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        number = self.received = os.read(self._signals, 1)[0]
        begun, child = time.monotonic(), self._child
        self._console.line(f"stopping: answers under way have {GRACE_S:.0f} s (again: stop now)")
        self._console.flush()
        child.send_signal(signal.SIGTERM)
        while child.poll() is None and time.monotonic() - begun < GRACE_S + ENDING_S:
            if select.select([self._signals], [], [], 0.05)[0]:
                again = os.read(self._signals, 1)[0]
                if again not in (number, signal.SIGHUP) or time.monotonic() - begun > SAME_SECONDS:
                    break
        child.kill()
        time.sleep(ENGINE_S)
        os._exit(128 + number)


def _check_key(key: str | None) -> None:
    """Raises: UsageError for a key that no header can hold."""
    is_latin = key is None or all(ord(each) < 256 for each in key)
    if key is not None and not (is_latin and key.isprintable() and key == key.strip() and 0 < len(key) <= MOST_KEY):
        what = (
            "no client can send the key: it is empty, too long, or has line ends, spaces at its ends or rare characters"
        )
        raise UsageError(what, where="--api-key, or GENESIS_API_KEY", next="choose letters, digits and signs of ASCII")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_extra() -> None:
    """Raises: DeviceError."""
    for package in ("starlette", "uvicorn"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            what = f"the package {package} is not installed"
            raise DeviceError(
                what, next="pip install starlette uvicorn, which are the extra `serve` of Genesis"
            ) from None


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family of an address, and itself as sockets take it; of a name's IPv4 before IPv6. Raises: OSError."""
    with suppress(ValueError):
        ip_address(host)
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)
    family, *_, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return family, address


@contextmanager
def _listening(host: str, port: int, *, has_key: bool) -> Iterator[socket.socket]:
    """A socket that listens, before anything is loaded.

    Raises:
        UsageError: other machines can reach the address, and there is no key. DeviceError: it cannot be had.
    """
    with ExitStack() as stack:
        try:
            # What is bound is what was looked at: a name may lead elsewhere the next time.
            family, address = _address(host, port)
            if not has_key and not is_loopback(address[0]):
                what = f"{escape(host)} can be reached from other machines, and no key is asked for"
                raise UsageError(what, where="--host", next="set --api-key, or leave --host out")
            listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1024)
        except (OSError, UnicodeError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            reason = "is taken" if is_taken else f"cannot be used: {getattr(error, 'strerror', None) or error}"
            what = f"{escape(host)} port {port} {reason}"
            where, next = ("--port", "; 0 takes a free one") if is_taken else ("--host and --port", ", or leave it out")
            raise DeviceError(what, where=where, next=f"choose another{next}") from None
        listening.setblocking(False)
        yield listening


@contextmanager
def _http(listening: socket.socket, start: Message) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """A child that serves, and the connection to it. From then on the child alone listens.

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
        start_new_session=True,  # an interrupt from the terminal is the parent's to handle
    )
    theirs.close()
    is_ready = False
    try:
        try:
            send(ours, start)
            answer = receive(ours)
        except (EOFError, OSError):
            raise DeviceError("the process of HTTP does not start", next="look for its message above") from None
        if answer["op"] == "failed":
            raise failed(answer)
        is_ready = True
        listening.close()
        yield ours, child
    finally:
        ours.close()  # which tells it to end
        if not is_ready:  # there is nobody to say goodbye to
            child.kill()
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

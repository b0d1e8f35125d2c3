"""`genesis serve`: the engine runs here, and HTTP in a child."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from genesis.errors import DeviceError, UsageError, escape
from genesis.io.hf import read_chat_templates
from genesis.train.output import Output
from genesis_cli.session.generation import GENERATE, GENERATE_MEMORY
from genesis_cli.session.inference import opened
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.serving.messages import Message, failed, receive, send
from genesis_cli.session.serving.worker import Worker
from genesis_cli.session.speaker import template_folder
from genesis_models.chat_files import drawing_line, file_drawing
from genesis_models.engine import Request, Sampling
from genesis_models.generate import GPU_ROWS, ROWS, engine_for
from genesis_models.source import find_source

__all__ = ["CONTEXT", "HOST", "PORT", "serve"]

HOST, PORT = "127.0.0.1", 8000
CONTEXT = 4096  # tokens of a sequence where the model takes more and the user names no number
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENDING_S = 8


def serve(
    folder: str,
    *,
    host: str,
    port: int,
    api_key: str,
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
        name: of the model, for clients; None: the folder's.
        context: the most tokens of a sequence, its prompt included.
        queue: requests that may wait or run.
        most_bytes: of a request's body.

    Raises:
        UsageError: beyond loopback without a key, or an impossible context. DeviceError: the address is taken, or the
            extra is not installed.
    """
    if host not in LOOPBACK and not api_key:
        what = f"{escape(host)} can be reached from other machines, and no key is asked for"
        raise UsageError(what, where="--host", next="set --api-key, or leave --host out")
    _check_extra()
    console = Output(sys.stderr)
    with phrased_for(GENERATE, memory=GENERATE_MEMORY), ExitStack() as stack:
        listening = stack.enter_context(_listening(host, port))
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
            "hosts": [] if api_key else [_in_url(each) for each in LOOPBACK],
            "api_key": api_key,
            "most_bytes": most_bytes,
            "drawing": file_drawing(source.folders),
        }
        start: Message = {"folder": os.path.abspath(folder), "base": base, "settings": settings, "most": queue}
        connection = stack.enter_context(_http(listening, start))
        console.line(f"serving {escape(served)} at http://{_in_url(host)}:{listening.getsockname()[1]}/v1")
        Worker(connection, model, engine).run()
    raise DeviceError("the process of HTTP has ended", next="look for its message above")


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


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, before anything is loaded. Raises: DeviceError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
            what = f"{escape(host)} port {port} {reason}"
            raise DeviceError(what, where="--port", next="choose another; 0 takes a free one") from None
        listening.setblocking(False)
        yield listening


@contextmanager
def _http(listening: socket.socket, start: Message) -> Iterator[Connection]:
    """The connection to a child that serves.

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
        yield ours
    finally:
        ours.close()  # which tells it to end
        if not is_ready:  # there is nobody to say goodbye to
            child.kill()
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

"""The HTTP process. It inherits a listening socket and the connection to the engine, and receives a start message.

It ends with the engine's process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from genesis.data.chat import ChatPrompts
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DeviceError, GenesisError, ModelError
from genesis.files.boundary import boundary, system_error
from genesis.train.output import Output
from genesis_cli.session.inference import chat_prompts
from genesis_cli.session.serving.api import Api, Settings
from genesis_cli.session.serving.link import ENDS, GRACE_S, Link, Message, failure, receive, send
from genesis_models.source import find_source

HEAD_S = 30.0  # seconds within which the head of a connection's first request must arrive
SEND_S = 60.0  # seconds within which a client must read something of what is sent
READ_BYTES = 4096  # bytes of one read; then other clients are served
KEPT_S = 30  # seconds that a connection may be idle
CLOSING_S = 2  # seconds for the errors of answers that are cut off when the server ends
CONNECTIONS = 2048
WARN_EVERY_S = 60.0  # seconds between warnings


class _Protocol(H11Protocol):
    """Closes connections without a complete request, and connections whose client reads nothing.

    uvicorn waits for both forever.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout for the head of a request."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # a body may arrive in chunks of one byte, each of which takes 20 us
        transport.set_write_buffer_limits(high=0)  # makes `pause_writing` report any unread bytes
        self._timer = self.loop.call_later(HEAD_S, self._close)

    def data_received(self, data: bytes) -> None:
        """Pass the data on, and keep the timeout until the head is complete."""
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request
        is_asked = cycle is not None and not cycle.response_complete
        if is_asked and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_asked and self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts."""
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timeout for the client to read; nothing more is written until it has read everything."""
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_S, self._look, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the timeout: the client has read everything."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _look(self, before: int) -> None:
        """Cut off a client that has read nothing; a slow one gets the same time again."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._unread = self.loop.call_later(SEND_S, self._look, size)
        else:
            self.transport.abort()  # closing would wait for the client to read

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


class _LogLines(logging.Handler):
    """Prints log lines of uvicorn, asyncio and `_refused` that clients cause: at most one a minute for each place in
    the code, with the number of suppressed ones.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; `logging` calls this."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        at, more = self._last.get(place, (-WARN_EVERY_S, 0))
        is_due = now - at >= WARN_EVERY_S
        self._last[place] = (now, 0) if is_due else (at, more + 1)
        if is_due and not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)):
            suppressed = f" ({more:,} more since the last such line)" if more else ""
            Output(sys.stderr).line(f"warning: {self.format(record)}{suppressed}")


def _refused(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log connections that the system refuses, for example without free descriptors; the loop soon accepts again."""
    if isinstance(error := context.get("exception"), OSError):
        failure = system_error(error, DeviceError, "taking a connection")
        logging.getLogger(__name__).warning("%s; %s", failure.what, failure.next)
    else:
        loop.default_exception_handler(context)


class _Server(uvicorn.Server):
    """Ends after a signal, once pending answers are complete or cut off after `GRACE_S`."""

    def __init__(self, config: uvicorn.Config, link: Link) -> None:
        super().__init__(config)
        self._link, self._loop = link, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handle a signal without raising it again at the end, as uvicorn's own handler would."""
        if not self.should_exit:
            self.should_exit = True
            self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_S, self._cut)

    def _cut(self) -> None:
        if self._link.live:
            Output(sys.stderr).line(f"answers cut off: {len(self._link.live)}")
        self._link.close(ENDS)


def main(listening: int, link: int) -> None:
    """Serve until the engine's process ends.

    Args:
        listening: descriptor of a listening socket.
        link: descriptor of the connection to the engine.
    """
    connection = Connection(link)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a service manager sends it to all processes
    with ExitStack() as stack, suppress(EOFError, BrokenPipeError):  # the engine's process may have ended already
        start = receive(connection)
        try:
            texts = _texts(start, stack)
        except GenesisError as error:
            send(connection, failure(error))
            return
        asyncio.run(_serve(connection, socket.socket(fileno=listening), start, texts))


def _texts(start: Message, stack: ExitStack) -> tuple[Tokenizer, ChatPrompts | None, list[int]]:
    """Return tokenizer, chat renderer, and the ids that end an answer. Raises: GenesisError."""
    with boundary(ModelError, "reading the tokenizer and the chat template", start["folder"]):
        source = find_source(start["folder"], start["base"])
        tokenizer = Tokenizer.load(source.holding("tokenizer.json"))
        template, ends = chat_prompts(source, tokenizer, stack)
        return tokenizer, template, sorted(ends)


async def _serve(connection: Connection, listening: socket.socket, start: Message, texts: tuple[Any, ...]) -> None:
    server: uvicorn.Server | None = None
    asyncio.get_running_loop().set_exception_handler(_refused)
    logging.getLogger().addHandler(_LogLines())

    def ended() -> None:
        if server is not None:
            server.should_exit = True

    settings = Settings(**{**start["settings"], "hosts": frozenset(start["settings"]["hosts"])})
    link = Link(connection, start["most"], ended)
    config = uvicorn.Config(
        Api(settings, link, *texts).app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=int(GRACE_S) + CLOSING_S,
    )
    server = _Server(config, link)
    send(connection, {"op": "ready"})
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

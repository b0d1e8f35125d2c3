"""The process of HTTP: a listening socket and the connection to the engine come as descriptors, the rest as a message.

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

HEAD_S = 30.0  # in which the head of a connection's first request must come
SEND_S = 60.0  # in which a client must have read something of what is sent
READ_BYTES = 4096  # at a time, then others are served
KEPT_S = 30  # that a connection may be idle
CLOSING_S = 2  # for the errors of what is cut off when the server ends
CONNECTIONS = 2048
TOLD_S = 60.0  # between warnings


class _Protocol(H11Protocol):
    """Closes a connection on which no request comes, or only a part of one, and one whose client reads nothing.

    uvicorn waits for both without end.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the head of a request."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # a body may come in chunks of one byte, each of which takes 20 us
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of all that is not read at once
        self._timer = self.loop.call_later(HEAD_S, self._close)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest where this is less than a head."""
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request
        is_asked = cycle is not None and not cycle.response_complete
        if is_asked and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_asked and self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read; nothing more is written until it has read all."""
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_S, self._look, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """All is read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _look(self, before: int) -> None:
        """Cut off a client that has read nothing; one that is slow has as long again."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._unread = self.loop.call_later(SEND_S, self._look, size)
        else:
            self.transport.abort()  # to close it would wait for the rest to be read

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


class _Lines(logging.Handler):
    """What uvicorn, asyncio and `_refused` log, for which clients are to blame: a place in the code tells a line, and
    the next one a minute later at the earliest, with the number of those between.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: dict[tuple[str, int], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging` calls it."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        at, more = self._told.get(place, (-TOLD_S, 0))
        is_told = now - at >= TOLD_S
        self._told[place] = (now, 0) if is_told else (at, more + 1)
        if is_told and not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)):
            rest = f" ({more:,} more since the last such line)" if more else ""
            Output(sys.stderr).line(f"warning: {self.format(record)}{rest}")


def _refused(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tells of connections that the system refuses, such as for want of descriptors; the loop accepts again soon."""
    if isinstance(error := context.get("exception"), OSError):
        told = system_error(error, DeviceError, "taking a connection")
        logging.getLogger(__name__).warning("%s; %s", told.what, told.next)
    else:
        loop.default_exception_handler(context)


class _Server(uvicorn.Server):
    """Ends at a signal when the answers under way are given, or are cut off after `GRACE_S`."""

    def __init__(self, config: uvicorn.Config, link: Link) -> None:
        super().__init__(config)
        self._link, self._loop = link, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: object) -> None:
        """As uvicorn has it called; its own raises the signal again in the end."""
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
        listening: the descriptor of a socket that listens.
        link: that of the connection to the engine.
    """
    connection = Connection(link)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a service manager sends to all processes
    with ExitStack() as stack, suppress(EOFError, BrokenPipeError):  # the engine's process ended before this one began
        start = receive(connection)
        try:
            texts = _texts(start, stack)
        except GenesisError as error:
            send(connection, failure(error))
            return
        asyncio.run(_serve(connection, socket.socket(fileno=listening), start, texts))


def _texts(start: Message, stack: ExitStack) -> tuple[Tokenizer, ChatPrompts | None, list[int]]:
    """What turns requests into ids and ids into text, and the ids that end an answer. Raises: GenesisError."""
    with boundary(ModelError, "reading the tokenizer and the chat template", start["folder"]):
        source = find_source(start["folder"], start["base"])
        tokenizer = Tokenizer.load(source.holding("tokenizer.json"))
        template, ends = chat_prompts(source, tokenizer, stack)
        return tokenizer, template, sorted(ends)


async def _serve(connection: Connection, listening: socket.socket, start: Message, texts: tuple[Any, ...]) -> None:
    server: uvicorn.Server | None = None
    asyncio.get_running_loop().set_exception_handler(_refused)
    logging.getLogger().addHandler(_Lines())

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

"""The process of HTTP: a listening socket and the connection to the engine come as descriptors, the rest as a message.

It ends with the engine's process.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.tokenizer import Tokenizer
from genesis.io.hf import read_chat_templates
from genesis_cli.session.serving.api import Api, Settings
from genesis_cli.session.serving.link import Link
from genesis_cli.session.serving.messages import Message, receive, send
from genesis_cli.session.speaker import template_folder
from genesis_models.chat_files import stop_ids
from genesis_models.source import find_source

__all__ = ["main"]

HEAD_S = 30.0  # in which the head of a connection's first request must come
KEPT_S = 30  # that a connection may be idle
CLOSING_S = 5  # for what still runs when the server ends
CONNECTIONS = 2048


class _Protocol(H11Protocol):
    """Closes a connection on which no request comes, or only a part of one: uvicorn waits without end for the rest."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the head of a request."""
        super().connection_made(transport)
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
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def main(listening: int, link: int) -> None:
    """Serve until the engine's process ends.

    Args:
        listening: the descriptor of a socket that listens.
        link: that of the connection to the engine.
    """
    connection = Connection(link)
    start = receive(connection)
    with ExitStack() as stack:
        asyncio.run(_serve(connection, socket.socket(fileno=listening), start, stack))


async def _serve(connection: Connection, listening: socket.socket, start: Message, stack: ExitStack) -> None:
    source = find_source(start["folder"], start["base"])
    tokenizer, template = Tokenizer.load(source.holding("tokenizer.json")), None
    ends = {*stop_ids(source.folders, tokenizer)}
    if read_chat_templates(folder := template_folder(source)):
        template = stack.enter_context(ChatPrompts(tokenizer, ChatTemplate.read(str(folder))))
        ends |= {*template.end_of_turn_ids}
    server: uvicorn.Server | None = None

    def ended() -> None:
        if server is not None:
            server.should_exit = True

    settings = Settings(**{**start["settings"], "hosts": frozenset(start["settings"]["hosts"])})
    link = Link(connection, start["most"], ended)
    api = Api(settings, link, tokenizer, template, sorted(ends))
    config = uvicorn.Config(
        api.app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    server = uvicorn.Server(config)
    send(connection, {"op": "ready"})
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

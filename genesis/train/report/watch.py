"""The page of a run over HTTP while the run goes on: on loopback alone, to be looked at, with nothing to be changed."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from genesis.errors import DeviceError, GenesisError, escape
from genesis.train.report.page import page_of
from genesis.train.report.runs import FILES, RunReader, file_state

HOST, PORT = "127.0.0.1", 8377
REFRESH_S = 5
ENDING_S = 2.0
REFUSED_S = 0.1  # before a connection is taken again that the system refused
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watcher(ThreadingHTTPServer):
    """Serves the page of a run's folder.

    Args:
        port: 0 takes a free one.

    Raises:
        DataError: the folder is no run's. DeviceError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False  # a browser that keeps its connection does not keep the command
    allow_reuse_address = os.name == "posix"  # there it does not take a port that is in use

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._reader = RunReader(folder)
        self.answering: set[int] = set()  # threads
        self._made_of: tuple[object, ...] | None = None
        self._page = b""
        self.page()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            taken = "is taken" if error.errno == errno.EADDRINUSE else "is not for this user"
            raise DeviceError(
                f"port {port} {taken}", where="--port", next="choose another; 0 takes a free one"
            ) from None
        port = self.server_address[1]
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    def server_close(self) -> None:
        """Take no more requests, and wait `ENDING_S` for the answers under way."""
        super().server_close()
        deadline = time.monotonic() + ENDING_S
        while self.answering and time.monotonic() < deadline:
            time.sleep(0.02)

    def get_request(self) -> tuple[socket.socket, Any]:
        """As `socketserver` calls it. Where there are no descriptors left the socket asks again at once: wait."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(REFUSED_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show what went wrong in an answer, but nothing of a browser that did not wait for it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """The page of what is recorded by now; the last one where nothing has changed. Raises: GenesisError."""
        with self._lock:
            now = tuple(file_state(self._folder / name) for name in FILES)
            if now != self._made_of:
                self._page = page_of([self._reader.read()], refresh=REFRESH_S).encode()
                self._made_of = now
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    timeout = 30  # seconds of a request that does not come

    def do_GET(self) -> None:
        """The page, for a browser on this machine that was sent here by nobody else's page."""
        # A name that another's DNS points here, or a form on another's page, is refused.
        origin = self.headers.get("Origin")
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "unknown host")
        elif origin is not None and origin.lower() not in {f"http://{host}" for host in self.server.hosts}:
            self.send_error(HTTPStatus.FORBIDDEN, "another page asks")
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.server.answering.add(threading.get_ident())
            try:
                self._answer()
            finally:
                self.server.answering.discard(threading.get_ident())

    do_HEAD = do_GET

    def _answer(self) -> None:
        try:
            body = self.server.page()
        except GenesisError as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the run cannot be read", escape(error.what))
            return
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def version_string(self) -> str:
        """What the answer says about the server."""
        return "genesis"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is the run's."""

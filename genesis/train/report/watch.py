"""The read-only page of a run over HTTP while the run continues, on the loopback interface only."""

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
REFUSED_S = 0.1  # pause after the system has refused a connection
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
        port: 0 chooses a free one.

    Raises:
        DataError: the folder does not belong to a run.
        DeviceError: the port is in use.
    """

    daemon_threads = True
    block_on_close = False  # a browser with an open connection must not block the command
    allow_reuse_address = os.name == "posix"  # a port in use is still refused there

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._reader = RunReader(folder)
        self.answering: set[int] = set()  # threads
        self._page_state: tuple[object, ...] | None = None
        self._page = b""
        self.page()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            taken = "is in use" if error.errno == errno.EADDRINUSE else "is not permitted for this user"
            raise DeviceError(
                f"port {port} {taken}", where="--port", next="choose another; 0 chooses a free one"
            ) from None
        port = self.server_address[1]
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    def server_close(self) -> None:
        """Accept no more requests, and wait `ENDING_S` for running answers."""
        super().server_close()
        deadline = time.monotonic() + ENDING_S
        while self.answering and time.monotonic() < deadline:
            time.sleep(0.02)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Without free descriptors `socketserver` retries at once, so pause first."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(REFUSED_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error in an answer, but not a browser that closed its connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """Return the current page; the previous one if nothing has changed. Raises: GenesisError."""
        with self._lock:
            now = tuple(file_state(self._folder / name) for name in FILES)
            if now != self._page_state:
                self._page = page_of([self._reader.read()], refresh=REFRESH_S).encode()
                self._page_state = now
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    timeout = 30  # seconds without a request

    def do_GET(self) -> None:
        """Send the page to a browser on this machine, unless another site's page made the request."""
        # Refuse a host name whose DNS points here, and a form on another site's page.
        origin = self.headers.get("Origin")
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "unknown host")
        elif origin is not None and origin.lower() not in {f"http://{host}" for host in self.server.hosts}:
            self.send_error(HTTPStatus.FORBIDDEN, "request from another page")
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
        """Return the server's name for the answer's header."""
        return "genesis"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because the terminal belongs to the run."""

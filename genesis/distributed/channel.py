"""One connection between two ranks. It carries named frames of bytes, limits their size, and bounds every wait.

It uses the framing of `multiprocessing.connection` over a socket and never pickles. Socket timeouts bound each read and
write, so a peer that stops in the middle of a message cannot block this rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MESSAGE, FAILURE = 0, 1
Frame = tuple[int, str, bytes]  # kind, name, payload

MAX_PAYLOAD = 64 << 20
_MAX_NAME = 255
_BLOCK = "block"


class Late(Exception):
    """The peer did not read or write within the limit."""


@contextlib.contextmanager
def _raising_late() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise Late from error


class Channel:
    """The connection to rank `rank`. `fileno()` makes it usable with `poll` and `wait`."""

    def __init__(self, sock: socket.socket, rank: int = -1) -> None:
        """Take over the connection of `sock`, which is detached."""
        self.rank = rank
        self._limit = 0.0
        self._socket = socket.socket(fileno=sock.detach())
        # The challenges of `multiprocessing.connection` need a Connection, too. Each of the two objects owns and closes
        # its own descriptor.
        self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        if self._socket.family != socket.AF_UNIX:
            # Send small frames at once, and detect within 30 s that a host is gone.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                    self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_limit(self, seconds: float) -> None:
        """Set how long one read or write may wait."""
        if seconds == self._limit:
            return
        self._limit = seconds
        pause = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or int(seconds < 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pause)

    def send(self, name: str, payload: bytes = b"", kind: int = MESSAGE) -> None:
        """Send a frame. Raises OSError if the connection is closed, and Late."""
        head = name.encode()
        assert len(head) <= _MAX_NAME and len(payload) <= MAX_PAYLOAD
        with _raising_late():
            self.connection.send_bytes(bytes((kind, len(head))) + head + payload)

    def receive(self, limit: int = MAX_PAYLOAD) -> Frame:
        """Return the next frame, with at most `limit` bytes of payload.

        Raises EOFError or OSError if the connection is closed, OSError for a malformed frame, and Late.
        """
        with _raising_late():
            data = self.connection.recv_bytes(2 + _MAX_NAME + limit)
        if len(data) < 2 or data[0] not in (MESSAGE, FAILURE) or len(data) < 2 + data[1]:
            raise OSError("a malformed frame arrived")
        end = 2 + data[1]
        return data[0], data[2:end].decode("utf-8", "replace"), data[end:]

    def send_block(self, block: np.ndarray) -> None:
        """Send the memory of a contiguous array of bytes. Raises the errors of `send`."""
        self.send(_BLOCK)
        with _raising_late():
            self.connection.send_bytes(block.data)

    def receive_block(self, block: np.ndarray) -> Frame | None:
        """Fill a contiguous array of bytes, or return the frame that came instead. Raises the errors of `receive`."""
        frame = self.receive()
        if frame != (MESSAGE, _BLOCK, b""):
            return frame
        try:
            with _raising_late():
                size = self.connection.recv_bytes_into(block.data)
        except BufferTooShort as error:
            raise OSError(f"a block of over {block.nbytes} bytes arrived") from error
        if size != block.nbytes:
            raise OSError(f"a block of {size} bytes arrived, expected {block.nbytes}")
        return None

    def is_ending(self) -> bool:
        """Whether the peer has closed the connection or its next frame reports a failure. Reads nothing from it."""
        try:
            seen = self._socket.recv(5, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not seen or seen[4:] == bytes((FAILURE,))  # the length in 4 bytes, then the kind

    def close(self) -> None:
        """Close the connection. The peer can still read what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.connection.close()

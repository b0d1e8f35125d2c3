"""One connection between two ranks: frames of bytes with a name, sizes that are limited, and no wait without an end.

It is `multiprocessing.connection`'s framing over a socket. Nothing is ever pickled. The socket's own timeouts bound
each read and write, so that a peer that stops in the middle of a message holds nobody up.
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
    """The peer took or sent nothing within the limit."""


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise Late from error


class Channel:
    """The connection to the rank `rank`; `fileno()` lets it be waited for."""

    def __init__(self, sock: socket.socket, rank: int = -1) -> None:
        """Take the connection of `sock`, which is closed then."""
        self.rank = rank
        self._limit = 0.0
        self._socket = socket.socket(fileno=sock.detach())
        # For the challenges of `multiprocessing.connection`, too. It has a descriptor of its own, so that each of the
        # two can close what it owns.
        self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        if self._socket.family != socket.AF_UNIX:
            # Send small frames at once, and notice within half a minute that a host is gone.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                    self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_limit(self, seconds: float) -> None:
        """How long one read or write may wait."""
        if seconds == self._limit:
            return
        self._limit = seconds
        pause = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or int(seconds < 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pause)

    def send(self, name: str, payload: bytes = b"", kind: int = MESSAGE) -> None:
        """Send a frame. Raises: OSError: the connection is closed. Late."""
        head = name.encode()
        assert len(head) <= _MAX_NAME and len(payload) <= MAX_PAYLOAD
        with _in_time():
            self.connection.send_bytes(bytes((kind, len(head))) + head + payload)

    def receive(self, most: int = MAX_PAYLOAD) -> Frame:
        """The next frame, of at most `most` bytes of payload.

        Raises:
            EOFError: the connection is closed. OSError: as well, or it is no frame. Late.
        """
        with _in_time():
            data = self.connection.recv_bytes(2 + _MAX_NAME + most)
        if len(data) < 2 or data[0] not in (MESSAGE, FAILURE) or len(data) < 2 + data[1]:
            raise OSError("what came is no frame")
        end = 2 + data[1]
        return data[0], data[2:end].decode("utf-8", "replace"), data[end:]

    def send_block(self, block: np.ndarray) -> None:
        """Send the memory of a contiguous array of bytes. Raises: as `send`."""
        self.send(_BLOCK)
        with _in_time():
            self.connection.send_bytes(block.data)

    def receive_block(self, block: np.ndarray) -> Frame | None:
        """Fill a contiguous array of bytes; a frame that came in its place is returned. Raises: as `receive`."""
        frame = self.receive()
        if frame != (MESSAGE, _BLOCK, b""):
            return frame
        try:
            with _in_time():
                size = self.connection.recv_bytes_into(block.data)
        except BufferTooShort as error:
            raise OSError(f"a block of over {block.nbytes} bytes came") from error
        if size != block.nbytes:
            raise OSError(f"a block of {size} bytes came, expected {block.nbytes}")
        return None

    def is_ending(self) -> bool:
        """Whether the peer closed the connection, or says next that it fails; takes nothing from the connection."""
        try:
            seen = self._socket.recv(5, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not seen or seen[4:] == bytes((FAILURE,))  # 4 bytes of length, then the kind

    def close(self) -> None:
        """Close it; the peer sees that once it has read what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.connection.close()

"""The messages between the process of the engine and that of HTTP: JSON objects over a connection.

To the engine: "new" (id, ids, sampling, max_tokens, stop, sequence), "cancel" (id), "score" (id, ids, top).
From it: "tokens" (a list of [id, token, finish]), "scores" (id, rows), "failed" (id, what, is_ours).
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Message", "receive", "send"]

Message = dict[str, Any]


def send(connection: Connection, message: Message) -> None:
    """Raises: OSError where the other process is gone."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def receive(connection: Connection) -> Message:
    """The next message, waiting for it. Raises: EOFError, OSError where the other process is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message

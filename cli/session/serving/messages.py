"""The messages between the process of the engine and that of HTTP: JSON objects over a connection.

To the engine: "new" (id, ids, sampling, max_tokens, stop, sequence), "cancel" (id), "score" (id, ids, top).
From it: "tokens" (a list of [id, token, finish]), "scores" (id, rows), "failed" (id, what, is_ours).
First of all the engine's process sends what is to be served, and that of HTTP answers "ready", or "failed" (kind, what,
where, next) where it cannot serve it.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from genesis import errors
from genesis.errors import GenesisError

Message = dict[str, Any]
GRACE_S = 8.0  # for answers under way when a signal ends the server: less than a container's 10 s


def send(connection: Connection, message: Message) -> None:
    """Raises: OSError where the other process is gone."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def receive(connection: Connection) -> Message:
    """The next message, waiting for it. Raises: EOFError, OSError where the other process is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def failure(error: GenesisError) -> Message:
    """The message of an error, for the other process to raise."""
    return {
        "op": "failed",
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "next": error.next,
    }


def failed(message: Message) -> GenesisError:
    """The error of a message."""
    kind: type[GenesisError] = getattr(errors, message["kind"], GenesisError)
    return kind(message["what"], where=message["where"], next=message["next"])

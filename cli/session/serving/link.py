"""The connection between the engine's process and the HTTP process: its messages, and HTTP's side of it.

Messages are JSON objects. To the engine: "new" (id, ids, sampling, max_tokens, stop, sequence), "cancel" (id), "score"
(id, ids, top). From it: "tokens" (a list of [id, tokens, finish]), "scores" (id, rows), "failed" (id, what, is_ours).
First the engine's process sends what to serve. The HTTP process answers "ready", or "failed" (kind, what, where, next).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal

from genesis import errors
from genesis.errors import GenesisError
from genesis_cli.session.serving.protocol import BadRequest
from genesis_models.engine import Finish, Sampling

Message = dict[str, Any]
GRACE_S = 8.0  # seconds for pending answers when a signal ends the server: less than a container's 10 s


def send(connection: Connection, message: Message) -> None:
    """Raise OSError if the other process is gone."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def receive(connection: Connection) -> Message:
    """Wait for the next message. Raises: EOFError, OSError: the other process is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def failure(error: GenesisError) -> Message:
    """Return the message of an error, for the other process to raise."""
    return {
        "op": "failed",
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "next": error.next,
    }


def failed(message: Message) -> GenesisError:
    """Return the error of a message."""
    kind: type[GenesisError] = getattr(errors, message["kind"], GenesisError)
    return kind(message["what"], where=message["where"], next=message["next"])


JOINED_S = 0.02  # tokens that arrive within it are taken together: a wake-up costs more than they do
WAKE_S = 40e-6  # time of a wake-up
WAKING = 0.2  # largest share of the time spent on wake-ups: many readers are woken less often
Wakes = Literal["always", "joined", "last"]
STOPPED, ENDS = "the model no longer runs", "the server ends"


class _Inbox:
    """What has arrived for a request and is not taken yet.

    Args:
        wakes: which tokens wake the reader: each message's, those that arrive within `JOINED_S` together, or only the
            last. If they are joined, the first ones wake it, too.

    Attributes:
        ids: tokens.
        finish: why the text ends.
        answer: scores or a failure.
    """

    def __init__(self, wakes: Wakes) -> None:
        self.ids, self.answer = list[int](), dict[str, Any]()
        self.finish: Finish | None = None
        self.wakes, self.is_first, self._event = wakes, True, asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the last message has arrived."""
        return self.finish is not None or bool(self.answer)

    async def take(self) -> tuple[list[int], Finish | None]:
        """Wait, and return all pending tokens. Raises: BadRequest: the request has failed."""
        await self._event.wait()
        self._event.clear()
        if (found := self.answer).get("op") == "failed":
            raise BadRequest(found["what"], status=found.get("status", 500 if found["is_ours"] else 400))
        ids, self.ids = self.ids, []
        return ids, self.finish

    def put(self, ids: list[int], finish: Finish | None) -> None:
        """Add tokens."""
        self.ids += ids
        self.finish = finish
        if finish is not None or self.wakes == "always" or (self.is_first and self.wakes == "joined"):
            self._event.set()
            self.is_first = False

    def put_answer(self, message: Message) -> None:
        """Add scores or a failure."""
        self.answer = message
        self._event.set()

    def wake(self) -> None:
        """Wake the reader if it takes joined tokens, and there are some."""
        if self.ids and self.wakes == "joined":
            self._event.set()


class Link:
    """The connection, for the coroutines of one event loop.

    Args:
        most: the most requests that wait or run.
        ended: called in the loop when the engine's process is gone.

    Attributes:
        live: requests whose tokens or scores are awaited.
        taken: places of requests that wait or run.
    """

    def __init__(self, connection: Connection, most: int, ended: Callable[[], None]) -> None:
        self._connection, self._most, self._ended = connection, most, ended
        self._ids = itertools.count()
        self.live: dict[int, _Inbox] = {}
        self.taken = 0
        self._loop = asyncio.get_running_loop()
        self._out: SimpleQueue[Message | None] = SimpleQueue()
        self._gone: str | None = None  # why nothing runs any more
        self._woken_at, self._is_due = 0.0, False
        for work in (self._read, self._write):  # threads, so that neither blocks the loop
            threading.Thread(target=work, daemon=True).start()

    @contextlib.contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Reserve places for `count` requests until the answer to them is sent.

        Raises:
            BadRequest: so many places never exist (400), or are not free now (429).
        """
        if count > self._most:
            what = f"the request asks for {count} texts, over the limit of {self._most}; ask for fewer at a time"
            raise BadRequest(what, code="too_many_texts")
        if self.taken + count > self._most:
            what = f"{self.taken} requests wait or run, of at most {self._most}; try again later"
            raise BadRequest(what, status=429, code="too_many_requests")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def tokens(
        self, ids: Sequence[int], sampling: Sampling, sequence: int, max_tokens: int, stop: Sequence[int],
        *, wakes: Wakes = "joined",
    ) -> AsyncGenerator[tuple[list[int], Finish | None], None]:  # fmt: skip
        """Yield the tokens that continue ids, and the reason of the end; the request is cancelled when the consumer
        stops. `_Inbox` describes `wakes`.

        Raises:
            BadRequest: the request cannot run.
        """
        message = {"ids": list(ids), "sampling": asdict(sampling), "sequence": sequence, "max_tokens": max_tokens}
        with self._opened({"op": "new", **message, "stop": list(stop)}, wakes) as inbox:
            finish = None
            while finish is None:
                found, finish = await inbox.take()
                yield found, finish

    async def scores(self, ids: Sequence[int], top: int) -> list[Any]:
        """Return `scores` of the ids from the second on. Raises: BadRequest."""
        with self._opened({"op": "score", "ids": list(ids), "top": top}, "last") as inbox:
            await inbox.take()
            rows: list[Any] = inbox.answer["rows"]
            return rows

    @contextlib.contextmanager
    def _opened(self, message: Message, wakes: Wakes) -> Iterator[_Inbox]:
        """Send a request, and yield its inbox; cancel it if the block ends early."""
        if self._gone is not None:
            raise BadRequest(self._gone, status=503)
        id, inbox = next(self._ids), _Inbox(wakes)
        self.live[id] = inbox
        self._out.put({**message, "id": id})
        try:
            yield inbox
        finally:
            del self.live[id]
            if not inbox.is_over:
                self._out.put({"op": "cancel", "id": id})

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reading thread notices too
            while (message := self._out.get()) is not None:
                send(self._connection, message)

    def _read(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._deliver, receive(self._connection))
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self.close, STOPPED)

    def _deliver(self, message: Message) -> None:
        if self._gone is not None:  # all requests have their error already
            return
        if message["op"] != "tokens":
            self._put(message["id"], message)
            return
        for id, ids, finish in message["tokens"]:
            if (inbox := self.live.get(id)) is not None:
                inbox.put(ids, finish)
        if not self._is_due:
            self._is_due = True
            self._loop.call_at(self._woken_at + max(JOINED_S, len(self.live) * WAKE_S / WAKING), self._wake)

    def _wake(self) -> None:
        self._woken_at, self._is_due = self._loop.time(), False
        for inbox in self.live.values():
            inbox.wake()

    def _put(self, id: int, message: Message) -> None:
        if (inbox := self.live.get(id)) is not None:
            inbox.put_answer(message)

    def close(self, why: str) -> None:
        """End all requests, present and future, with an error."""
        self._gone = self._gone or why
        for id in self.live:
            self._put(id, {"op": "failed", "what": self._gone, "is_ours": True, "status": 503})
        self._ended()

"""The engine's side: takes requests while others run, and sends their tokens."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection

from genesis.errors import GenesisError, OutOfMemoryError
from genesis_cli.session.scoring import scores
from genesis_cli.session.serving.messages import Message, receive, send
from genesis_models.blocks import CausalLM
from genesis_models.engine import Request, Sampling, Token
from genesis_models.engine.engine import check_prompt
from genesis_models.engine.text import Runner


class Gone(Exception):
    """The process of HTTP has ended."""


class Worker:
    """Runs an engine for the requests of a connection until that is closed."""

    def __init__(self, connection: Connection, model: CausalLM, engine: Runner) -> None:
        self._connection, self._model, self._engine = connection, model, engine
        self._waiting: deque[Message] = deque()
        self._unscored: deque[Message] = deque()
        self._was_step = True  # since the last sequence was scored
        self._numbers: dict[int, int] = {}  # the engine's number of a request -> its id
        self._drawn: list[tuple[int, int | None, str | None]] = []  # that are not sent yet
        self._told: set[int] = set()  # the ids among them
        self._arrived = select.poll()  # made once: Connection.poll makes one for each question
        self._arrived.register(connection.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the other process is gone."""
        while True:
            try:
                for token in self._engine.run(self._requests()):
                    self._take(token)
            except (Gone, EOFError, OSError):
                return
            except GenesisError as error:
                self._fail([*self._numbers.values()], error, is_ours=True)
            self._numbers.clear()

    def _requests(self) -> Iterator[Request | None]:
        """What the engine takes: the next request; None while none waits and others run."""
        number = 0
        while True:
            self._flush()
            self._poll()
            if not self._waiting:
                yield None
                continue
            message = self._waiting.popleft()
            request = _request(message)
            try:
                check_prompt(self._model, request.ids)
                request.sampling.check()
            except GenesisError as error:
                self._fail([message["id"]], error, is_ours=False)
                continue
            self._numbers[number] = message["id"]
            number += 1
            yield request

    def _take(self, token: Token) -> None:
        """Keep a token until the others of its step are there."""
        self._was_step = True
        id = self._numbers.get(token.request)
        if id is None:  # cancelled
            return
        if id in self._told:
            self._flush()
            self._poll()
        self._told.add(id)
        self._drawn.append((id, token.id, token.finish))
        if token.finish is not None:
            self._numbers.pop(token.request, None)

    def _flush(self) -> None:
        if self._drawn:
            send(self._connection, {"op": "tokens", "tokens": self._drawn})
            self._drawn = []
            self._told.clear()

    def _poll(self) -> None:
        """Take what has come, waiting where there is nothing to do, and score one sequence between two steps."""
        waits = not (self._numbers or self._waiting or self._unscored)
        while self._arrived.poll(None if waits else 0):
            waits = False
            try:
                message = receive(self._connection)
            except (EOFError, OSError):
                raise Gone from None
            if message["op"] == "new":
                self._waiting.append(message)
            elif message["op"] == "cancel":
                self._cancel(message["id"])
            else:
                self._unscored.append(message)
        if self._unscored and (self._was_step or not self._numbers):
            self._was_step = False
            self._score(self._unscored.popleft())

    def _cancel(self, id: int) -> None:
        self._waiting = deque(each for each in self._waiting if each["id"] != id)
        self._unscored = deque(each for each in self._unscored if each["id"] != id)
        self._drawn = [each for each in self._drawn if each[0] != id]
        for number in [number for number, each in self._numbers.items() if each == id]:
            del self._numbers[number]
            self._engine.cancel(number)

    def _score(self, message: Message) -> None:
        try:
            [rows] = scores(self._model, [(message["ids"], 1)], message["top"])
        except GenesisError as error:
            self._fail([message["id"]], error, is_ours=isinstance(error, OutOfMemoryError))
            return
        send(self._connection, {"op": "scores", "id": message["id"], "rows": rows})

    def _fail(self, ids: list[int], error: GenesisError, *, is_ours: bool) -> None:
        """Tell that requests have ended by an error: theirs, or the model's and the machine's."""
        self._drawn = [each for each in self._drawn if each[0] not in ids]
        for id in ids:
            send(self._connection, {"op": "failed", "id": id, "what": error.what, "is_ours": is_ours})


def _request(message: Message) -> Request:
    return Request(
        message["ids"],
        Sampling(**message["sampling"]),
        message["max_tokens"],
        frozenset(message["stop"]),
        message["sequence"],
    )

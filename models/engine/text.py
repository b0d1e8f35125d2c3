"""Texts from the engine: characters come out as they complete, and stop strings end a text before themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from genesis.data.tokenizer import StreamDecoder, Tokenizer
from genesis_models.engine.engine import Finish, Request, Token


class Runner(Protocol):
    """What an engine does."""

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        """See `Engine.run`."""

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token adds to the text of a request.

    Attributes:
        request: its number.
        text: what is new, perhaps nothing.
        tokens: how many tokens were drawn for it so far, those of a stop string included.
        finish: why the text ends here, as of `Token`; None while it goes on.
        id, log_prob: of the token, as of `Token`.
    """

    request: int
    text: str
    tokens: int
    finish: Finish | None = None
    id: int | None = None
    log_prob: float | None = None


class StopText:
    """Holds text back while it may be the beginning of a stop string.

    Args:
        stops: what ends the text, and is no part of it; an empty string is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What is certain to be text, and whether it ends with a stop string behind it."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        longest = max(map(len, self._stops)) - 1
        for at in range(max(0, len(held) - longest), len(held)):
            if any(stop.startswith(held[at:]) for stop in self._stops):
                self._held = held[at:]
                return held[:at], False
        self._held = ""
        return held, False

    def finish(self) -> str:
        """What was held back."""
        rest, self._held = self._held, ""
        return rest


class RequestText:
    """The text of one request while its tokens come.

    Args:
        tokenizer: without one there is no text.
        prompt: the ids that it continues.
        stops: strings that end it, and are no part of it.
        special: special tokens are shown.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str], special: bool = False
    ) -> None:
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None:
            self._decoder = StreamDecoder(tokenizer, skip_special=not special, after=prompt)
        self._stop, self._tokens = StopText(stops), 0

    def push(self, token: Token) -> Piece:
        """What `token` adds."""
        new, is_stopped = "", False
        if token.id is not None:
            self._tokens += 1
            if self._decoder is not None:
                new, is_stopped = self._stop.push(self._decoder.push(token.id))
        finish: Finish | None = "stop" if is_stopped else token.finish
        if finish is not None and not is_stopped and self._decoder is not None:
            last, is_stopped = self._stop.push(self._decoder.finish())
            new, finish = new + last + ("" if is_stopped else self._stop.finish()), "stop" if is_stopped else finish
        return Piece(token.request, new, self._tokens, finish, token.id, token.log_prob)


def continue_texts(
    engine: Runner,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    stops: Sequence[str] = (),
    *,
    special: bool = False,
) -> Iterator[Piece]:
    """The texts that continue prompts, a piece for each token; each request has one last piece, which says why it ends.

    Arguments are those of `RequestText`, errors those of `Engine.run`.
    """
    texts: dict[int, RequestText] = {}
    for token in engine.run(requests):
        number = token.request
        if number not in texts:
            texts[number] = RequestText(tokenizer, requests[number].ids, stops, special)
        piece = texts[number].push(token)
        yield piece
        if piece.finish is not None:
            del texts[number]
            if token.finish is None:
                engine.cancel(number)

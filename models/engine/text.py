"""Turns an engine's tokens into text: complete characters are streamed, and stop strings end it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from genesis.data.tokenizer import StreamDecoder, Tokenizer
from genesis_models.engine.engine import Finish, Request, Token


class Runner(Protocol):
    """The interface of an engine."""

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        """See `Engine.run`."""

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that a token adds to a request.

    Attributes:
        request: number of the request.
        text: new text, possibly empty.
        tokens: tokens drawn for the request so far, including a stop string's.
        finish: why the text ends here, as in `Token`; None if it continues.
        id, log_prob: fields of the `Token`.
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
        stops: strings that end the text and are excluded from it; empty strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    @property
    def is_active(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain, and whether a stop string follows it."""
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
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return rest


class RequestText:
    """The text of one request while its tokens arrive.

    Args:
        tokenizer: decodes the tokens; None disables text.
        prompt: ids that the text continues.
        stops: strings that end the text and are excluded from it.
        special: whether to show special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str], special: bool = False
    ) -> None:
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None:
            self._decoder = StreamDecoder(tokenizer, skip_special=not special, after=prompt)
        self._stop, self._tokens = StopText(stops), 0

    def push(self, token: Token) -> Piece:
        """Return the text that `token` adds."""
        ids = [] if token.id is None else [token.id]
        text, _, finish = self.push_all(ids, token.finish)
        return Piece(token.request, text, self._tokens, finish, token.id, token.log_prob)

    def push_all(self, ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        """Return the text that the next tokens add, how many tokens it has, and why it ends.

        Args:
            finish: why the text ends after `ids`; None if it continues.
        """
        decoder, new, count, is_stopped = self._decoder, "", 0, False
        if decoder is None or not self._stop.is_active:
            new, count = "" if decoder is None else decoder.push_all(ids), len(ids)
        else:
            while count < len(ids) and not is_stopped:
                text, is_stopped = self._stop.push(decoder.push(ids[count]))
                new, count = new + text, count + 1
        self._tokens += count
        if is_stopped:
            return new, count, "stop"
        if finish is not None and decoder is not None:
            last, is_stopped = self._stop.push(decoder.finish())
            new, finish = new + last + ("" if is_stopped else self._stop.finish()), "stop" if is_stopped else finish
        return new, count, finish


def continue_texts(
    engine: Runner,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    stops: Sequence[str] = (),
    *,
    special: bool = False,
) -> Iterator[Piece]:
    """Yield the texts that continue prompts, a piece for each token; a request's last piece has the reason of its end.

    The arguments are as in `RequestText`, the errors as in `Engine.run`.
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

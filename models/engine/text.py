"""Texts from the engine: characters come out as they complete, and stop strings end a text before themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from genesis.data.stream_decoder import StreamDecoder
from genesis.data.tokenizer import Tokenizer
from genesis_models.engine.eager import EagerEngine
from genesis_models.engine.engine import Engine, Finish, Request

__all__ = ["Piece", "StopText", "continue_texts"]


@dataclass(frozen=True, slots=True)
class Piece:
    """More text of a request.

    Attributes:
        request: its number.
        text: what is new, perhaps nothing.
        tokens: how many tokens were drawn for it so far, those of a stop string included.
        finish: why the text ends here, as of `Token`; None while it goes on.
    """

    request: int
    text: str
    tokens: int
    finish: Finish | None = None


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
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        longest = max(map(len, self._stops), default=1) - 1
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


class _Text:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.decoder, self.stop, self.tokens = StreamDecoder(tokenizer), StopText(stops), 0


def continue_texts(
    engine: Engine | EagerEngine, requests: Sequence[Request], tokenizer: Tokenizer, stops: Sequence[str] = ()
) -> Iterator[Piece]:
    """The texts that continue prompts, piece by piece; each request has one last piece, which says why it ends.

    Args:
        stops: strings that end a text.

    Raises:
        As `Engine.run`.
    """
    texts: dict[int, _Text] = {}
    for token in engine.run(requests):
        text = texts.setdefault(token.request, _Text(tokenizer, stops))
        new, is_stopped = "", False
        if token.id is not None:
            text.tokens += 1
            new, is_stopped = text.stop.push(text.decoder.push(token.id))
        finish: Finish | None = "stop" if is_stopped else token.finish
        if finish is not None and not is_stopped:
            last, is_stopped = text.stop.push(text.decoder.finish())
            new, finish = new + last + ("" if is_stopped else text.stop.finish()), "stop" if is_stopped else finish
        if new or finish is not None:
            yield Piece(token.request, new, text.tokens, finish)
        if finish is not None:
            del texts[token.request]
            if token.finish is None:
                engine.cancel(token.request)

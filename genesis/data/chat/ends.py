"""How a template ends the assistant's turns, found by rendering small conversations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from genesis.data.chat.marks import Marked, Marker, MarksError
from genesis.data.chat.renderer import Job, Rendered, RenderError
from genesis.data.chat.turns import TurnError, TurnReader

__all__ = ["Ends", "probes", "read_ends"]

_ANSWER = "Fine, thanks."
_QUESTION = {"role": "user", "content": "How are you?"}
_TOOL = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "now", "arguments": {}}}


@dataclass(frozen=True)
class Ends:
    """What comes at the end of a turn.

    Attributes:
        tokens: the special tokens that end turns, the usual one first; "" among them where a turn ends without one.
        closing: what is only at the end of a whole render, after the turn's own end (Phi-3's end of text), or "".
    """

    tokens: tuple[str, ...]
    closing: str


def probes() -> list[Job]:
    """The jobs whose renders `read_ends` takes: an answer at the end, one that is followed, and a call."""
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    tools = [{"type": "function", "function": _TOOL}]
    return [
        Job.of([_QUESTION, answer], None, [1]),
        Job.of([_QUESTION, answer, _QUESTION], None, []),
        Job.of([_QUESTION, call], tools, [1]),
    ]


def read_ends(found: Sequence[Rendered | RenderError], marker: Marker) -> Ends:
    """What the renders of `probes` tell; no tokens where the template renders none of them."""
    last, followed, call = found
    closing = ""
    if isinstance(last, Rendered) and isinstance(followed, Rendered):
        closing = _closing(last.whole, followed.whole, marker)
    reader = TurnReader(marker, closing)
    tokens: list[str] = []
    for each, message in ((last, {"content": _ANSWER}), (call, {"tool_calls": [_CALL]})):
        with suppress(TurnError, MarksError):
            if isinstance(each, Rendered):
                tokens += [turn.end for turn in reader.read(each, {1: message}, "")]
    return Ends(tuple(dict.fromkeys(tokens)), closing)


def _closing(last: str, followed: str, marker: Marker) -> str:
    """What comes after the end of the turn in `last` alone, if both end it with the same special token."""
    tails = [text.rpartition(_ANSWER)[2] for text in (last, followed)]
    same = marker.specials(Marked(os.path.commonprefix(tails)))  # noqa: RUF071 - texts, no paths
    rest = tails[0][same[-1][1] :] if same else ""
    return rest if rest.strip() else ""

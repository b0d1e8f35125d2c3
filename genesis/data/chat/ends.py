"""How a template ends the assistant's turns, found by rendering small conversations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genesis.data.chat.marks import Marked, Marker
from genesis.data.chat.renderer import Job, Rendered, RenderError
from genesis.data.chat.turns import end_token

_ANSWER = "Fine, thanks."
_QUESTION = {"role": "user", "content": "How are you?"}
_TOOL: dict[str, Any] = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "now", "arguments": {}}}
_RESULT = {"role": "tool", "name": "now", "tool_call_id": "call00001", "content": "12:00"}
_ANSWERED = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
_CALLED: list[dict[str, Any]] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


@dataclass(frozen=True)
class Ends:
    """What comes at the end of a turn.

    Attributes:
        tokens: the special tokens that end turns, the usual one first; "" among them where a turn ends without one.
        closing: what is only at the end of a whole render, after the turn's own end (Phi-3's end of text), or "".
        opening: what is at the end of a prompt and before no answer (DeepSeek-R1's start of its reasoning), or "".
        following: what ends an answer, and a call, that the template ends with no special token: the next message's
            start, up to and with its first one (GLM-4's `<|user|>` and `<|observation|>`), or "".
    """

    tokens: tuple[str, ...]
    closing: str
    opening: str
    following: Sequence[str]


def probes() -> list[Job]:
    """The jobs whose renders `read_ends` takes: an answer at the end, one that is followed, and the same of a call."""
    tools = [{"type": "function", "function": _TOOL}]
    return [
        Job.of(_ANSWERED, None, [1]),
        Job.of([*_ANSWERED, _QUESTION], None, []),
        Job.of(_CALLED, tools, [1]),
        Job.of([*_CALLED, _RESULT], tools, []),
    ]


def read_ends(found: Sequence[Rendered | RenderError], marker: Marker) -> Ends:
    """What the renders of `probes` tell; no tokens where the template renders none of them."""
    last, followed, call, answered = found
    closing = opening = ""
    if isinstance(last, Rendered) and isinstance(followed, Rendered):
        closing = _closing(last.whole, followed.whole, marker)
    if isinstance(last, Rendered) and isinstance(asked := last.turns[0][0], str):
        before = last.whole.rpartition(_ANSWER)[0]
        opening = asked[len(before) :] if before and asked.startswith(before) else ""
    tokens: list[str] = []
    following = ["", ""]
    for kind, (each, longer, text) in enumerate(((last, followed, _ANSWER), (call, answered, _TOOL["name"]))):
        # A template that knows no calls writes the tool at the most, which the prompt has, too.
        prompt = each.turns[0][0] if isinstance(each, Rendered) else each
        if isinstance(each, Rendered) and isinstance(prompt, str) and each.whole.count(text) > prompt.count(text):
            end = end_token(marker, Marked(each.whole.removesuffix(closing)))[0]
            if not end:
                following[kind] = _following(each, longer, marker) or following[0]
            end = end or following[kind].strip()
            tokens += [end] if end or kind == 0 else []  # a call without an end is an error where there is one
    return Ends(tuple(dict.fromkeys(tokens)), closing, opening, following)


def _following(whole: Rendered, longer: Rendered | RenderError, marker: Marker) -> str:
    """What a longer conversation has after `whole`, up to and with a special token, where that comes at once; or ""."""
    if not isinstance(longer, Rendered) or not longer.whole.startswith(whole.whole):
        return ""
    rest = longer.whole[len(whole.whole) :]
    start, stop = next(iter(marker.specials(Marked(rest))), (0, 0))
    return "" if rest[:start].strip() else rest[:stop]


def _closing(last: str, followed: str, marker: Marker) -> str:
    """What comes after the end of the turn in `last` alone, if both end it with the same special token."""
    tails = [text.rpartition(_ANSWER)[2] for text in (last, followed)]
    same = marker.specials(Marked(os.path.commonprefix(tails)))  # noqa: RUF071 - texts, no paths
    rest = tails[0][same[-1][1] :] if same else ""
    return rest if rest.strip() else ""

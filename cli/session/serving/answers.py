"""What clients get: OpenAI's answers, chunks and log-probabilities as JSON."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from genesis.data.tokenizer import StreamDecoder, Tokenizer, token_bytes, token_text


@dataclass(slots=True)
class Choice:
    """A text that answers.

    Attributes:
        prompt: its ids.
        asked: the prompt as it was sent; None where that was ids.
        ids: of the text.
        finish: why it ends, in OpenAI's words.
        logprobs: as JSON, which is made choice by choice: all at once would keep the server busy.
    """

    prompt: Sequence[int]
    asked: str | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: bytes = b"null"


class Answer:
    """The frame of an answer, which all its chunks share."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._is_chat, self._model, self._created = is_chat, model, int(time.time())
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """All at once, as JSON."""
        frame = {**self._frame("chat.completion" if self._is_chat else "text_completion", []), "usage": usage(choices)}
        parts = b",".join(self._choice(i, each) for i, each in enumerate(choices))
        return _json(frame).replace(b'"choices":[]', b'"choices":[' + parts + b"]", 1)

    def begin(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def part(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A further chunk."""
        if not self._is_chat:
            return self._chunk(index, {"text": text}, finish)
        return self._chunk(index, {"delta": {"content": text} if text else {}}, finish)

    def end(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream that says what it took."""
        return {**self._frame(self._chunk_kind, []), "usage": usage(choices)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
        return self._frame(self._chunk_kind, [choice])

    def _choice(self, index: int, choice: Choice) -> bytes:
        text = {"message": {"role": "assistant", "content": choice.text}} if self._is_chat else {"text": choice.text}
        value = _json({"index": index, **text, "finish_reason": choice.finish})
        return value[:-1] + b',"logprobs":' + choice.logprobs + b"}"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens that were read and drawn; a prompt with several answers counts once."""
    prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
    read, drawn = sum(prompts.values()), sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def event(value: dict[str, Any] | None) -> bytes:
    """A server-sent event; None is the end."""
    return b"data: " + (b"[DONE]" if value is None else _json(value)) + b"\n\n"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any], is_chat: bool, echo: bool) -> bytes:
    """The log-probabilities of a choice as JSON.

    Args:
        rows: `worker.scores` of the prompt and the text.
        echo: whether the prompt's are told too; not of a chat.
    """
    if is_chat:
        return _json(_chat_logprobs(tokenizer, choice, rows))
    return _json(_completion_logprobs(tokenizer, choice, rows, echo=echo))


def _completion_logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any], *, echo: bool) -> dict[str, Any]:
    """Those of /v1/completions."""
    first = 0 if echo else len(choice.prompt)
    begins = _begins(tokenizer, choice)
    texts = [
        token_text(tokenizer, id, begins=each) for id, each in zip((*choice.prompt, *choice.ids), begins, strict=True)
    ]
    chances = [None, *(row[0] for row in rows)]
    tops = [None, *(_by_text(tokenizer, row[1], each) for row, each in zip(rows, begins[1:], strict=True))]
    return {
        "tokens": texts[first:],
        "token_logprobs": chances[first:],
        "top_logprobs": tops[first:],
        "text_offset": [*_offsets(tokenizer, choice, echo=echo)],
    }


def _begins(tokenizer: Tokenizer, choice: Choice) -> list[bool]:
    """Whether a text begins with each token: with the first, and behind a special one."""
    return [True, *(id in tokenizer.special_ids for id in (*choice.prompt, *choice.ids)[:-1])]


def _offsets(tokenizer: Tokenizer, choice: Choice, *, echo: bool) -> Iterator[int]:
    """Where each token begins in the text; one that gives no text, such as a first one of the model's, takes none."""
    at = 0
    shown = StreamDecoder(tokenizer, skip_special=choice.asked is not None)  # what was sent as text has no special ones
    drawn = StreamDecoder(tokenizer, after=choice.prompt)
    for ids, decoder in ((choice.prompt if echo else (), shown), (choice.ids, drawn)):
        for id in ids:
            yield at
            at += len(decoder.push(id))
        at += len(decoder.finish())


def _by_text(tokenizer: Tokenizer, top: Sequence[tuple[int, float]], begins: bool) -> dict[str, float]:
    """Of tokens that look alike, such as parts of characters, the likeliest."""
    found: dict[str, float] = {}
    for id, chance in top:
        found.setdefault(token_text(tokenizer, id, begins=begins), chance)
    return found


def _chat_logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any]) -> dict[str, Any]:
    """Those of /v1/chat/completions."""
    first = len(choice.prompt)
    drawn = zip(choice.ids, _begins(tokenizer, choice)[first:], rows[first - 1 :], strict=True)
    return {
        "content": [
            {
                **_token(tokenizer, begins, id, chance),
                "top_logprobs": [_token(tokenizer, begins, *each) for each in top],
            }
            for id, begins, (chance, top) in drawn
        ]
    }


def _token(tokenizer: Tokenizer, begins: bool, id: int, chance: float) -> dict[str, Any]:
    text, data = token_text(tokenizer, id, begins=begins), token_bytes(tokenizer, id, begins=begins)
    return {"token": text, "logprob": chance, "bytes": list(data)}

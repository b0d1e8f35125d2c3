"""OpenAI's interface as JSON: checks the bodies of requests, and builds answers, chunks and log-probabilities."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from genesis.data.record_formats import describe
from genesis.data.tokenizer import StreamDecoder, Tokenizer, token_bytes, token_text
from genesis.errors import escape, nearest
from genesis.train.bounds import BOUNDS
from genesis_models.engine import Sampling

T = TypeVar("T", bound="Body")
MOST_CHOICES = 128
MOST_VALUES = 500_000  # values in a body
MOST_PARTS = 50_000  # strings, lists and objects among them, keys included
TEXT, DIGITS = re.compile(rb'"[^"]*"'), re.compile(rb"[0-9]{100}")
MOST_STOPS, MOST_STOP_CHARS = 16, 1000
MOST_TOP = 20
# OpenAI's fields that do not change the answer.
IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# Unsupported fields that would change the answer -> the values that have no effect, in addition to null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
# Name of pydantic's error -> what is expected; its context is filled in.
WORDS: Mapping[str, str] = {
    "missing": "the field is missing",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_long": "at most {max_length} characters",
    "too_long": "at most {max_length} items, found {actual_length}",
    "too_short": "at least {min_length} item, found {actual_length}",
    "string_type": "expected a string, found {found}",
    "int_type": "expected a whole number, found {found}",
    "float_type": "expected a finite number, found {found}",
    "finite_number": "expected a finite number, found {found}",
    "bool_type": "expected true or false, found {found}",
    "list_type": "expected a list, found {found}",
    "dict_type": "expected an object, found {found}",
    "model_type": "expected an object, found {found}",
}


def _listed(value: Any) -> Any:
    """Wrap a single string in a list: a union would report an error for each alternative."""
    return value if value is None or isinstance(value, list) else [value]


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a value that may be one or several."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    for place, each in enumerate(several):
        if isinstance(each, str) or (isinstance(each, list) and each and {*map(type, each)} == {int}):
            continue
        wrong = "an empty list" if each == [] else describe(each)
        if isinstance(each, list) and each:
            at = next(at for at, token in enumerate(each) if type(token) is not int)
            wrong = f"a list with {describe(each[at])} at position {at}"
        what = f"expected a text, a list of token ids, or a list of either, but prompt {place} is {wrong}"
        raise PydanticCustomError("prompt", what)
    return several


class BadRequest(Exception):
    """A request that is answered with an error.

    Args:
        what: message for the client's user.
        param: the wrong field.
    """

    def __init__(self, what: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error in the form that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: StrictBool | None = None


Stop = Annotated[StrictStr, Field(max_length=MOST_STOP_CHARS)]


class Body(BaseModel):
    """Fields that both kinds of requests have."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: StrictStr
    temperature: Annotated[StrictFloat, Field(**BOUNDS["temperature"].limits)] | None = None
    top_p: Annotated[StrictFloat, Field(**BOUNDS["top_p"].limits)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=BOUNDS["top_k"].high)] | None = None
    min_p: Annotated[StrictFloat, Field(**BOUNDS["min_p"].limits)] | None = None
    repetition_penalty: Annotated[StrictFloat, Field(**BOUNDS["repetition_penalty"].limits)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(_listed)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Raise BadRequest if fields contradict each other."""

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [text for text in self.stop or [] if text]

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> Sampling:
        """Return the sampling settings: the request's, then `defaults`; without a seed a random one."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        if asked.get("top_k", 1) < 1:  # other servers use it for all tokens
            asked["top_k"] = None
        return Sampling(**{"temperature": 1.0, **(defaults or {}), **asked}, seed=seed)


class CompletionBody(Body):
    """Body of /v1/completions."""

    prompts: Annotated[list[str | list[int]], Field(alias="prompt"), PlainValidator(_prompts)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None

    def check(self) -> None:
        """Raise BadRequest if the body asks to draw more texts than it returns."""
        if self.best_of not in (None, self.choices):
            raise BadRequest("best_of must equal n: all drawn texts are returned", param="best_of")


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None

    def check(self) -> None:
        """Raise BadRequest if top_logprobs is given without logprobs."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")


def is_loopback(address: str) -> bool:
    """Whether an IP address can be reached only from this machine."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def parsed_json(data: bytes) -> Any:
    """Return the value of a body. Parsing blocks all clients, so its cost is bounded first.

    Raises:
        BadRequest.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # each remaining quote opens or closes a string
    parts = plain.count(b'"') // 2
    outside = TEXT.sub(b"", plain) if parts <= MOST_PARTS else b""
    if parts + outside.count(b"[") + outside.count(b"{") > MOST_PARTS or outside.count(b",") >= MOST_VALUES:
        what = f"the body has more than {MOST_PARTS:,} strings, lists and objects, or more than {MOST_VALUES:,} values"
        raise BadRequest(what, status=413)
    if DIGITS.search(outside):  # Python parses an integer in time quadratic in its digits
        raise BadRequest("the body has a number of 100 digits or more")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not UTF-8 JSON of plain values") from None


def _refuse(name: str) -> None:
    raise ValueError(name)


def parsed(kind: type[T], value: Any) -> T:
    """Return the body of a request. Raises: BadRequest: it names the first wrong field."""
    if isinstance(value, dict):
        _check_fields(kind, value)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, limits = [str(part) for part in first["loc"]], first.get("ctx", {}).items()
        context = {key: f"{value:.9g}" if isinstance(value, float) else value for key, value in limits}
        words = WORDS.get(first["type"], first["msg"].replace("{", "{{").replace("}", "}}"))
        what = f"{'.'.join(where) or 'body'}: {words.format(**context, found=describe(first['input']))}"
        raise BadRequest(what, param=where[0] if where else None) from None
    body.check()
    return body


def _check_fields(kind: type[Body], value: dict[str, Any]) -> None:
    """Refuse unknown fields: ignoring one could give another answer than the client asked for.

    Raises:
        BadRequest.
    """
    known = {field.alias or name for name, field in kind.model_fields.items()}
    for name, asked in value.items():
        if asked is None or name in known or name in IGNORED or asked in NEUTRAL.get(name, ()):
            continue
        meant = nearest(name[:100], known)
        hint = "" if meant is None else f", or write {meant}"
        raise BadRequest(f"{escape(name[:100])}: not supported; remove it{hint}", param=name[:100])


@dataclass(slots=True)
class Choice:
    """A text that answers a prompt.

    Attributes:
        prompt: ids of the prompt.
        asked: the prompt's text as it was sent; None if ids were sent.
        ids: ids of the text.
        finish: reason of its end in OpenAI's terms.
        logprobs: JSON, built choice by choice: building all at once would block the server.
    """

    prompt: Sequence[int]
    asked: str | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: bytes = b"null"


class Answer:
    """The frame of an answer that all its chunks share."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._is_chat, self._model, self._created = is_chat, model, int(time.time())
        self._chunk_kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the complete answer as JSON."""
        frame = {**self._frame("chat.completion" if self._is_chat else "text_completion", []), "usage": usage(choices)}
        parts = b",".join(self._choice(i, each) for i, each in enumerate(choices))
        return _json(frame).replace(b'"choices":[]', b'"choices":[' + parts + b"]", 1)

    def begin(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a chat's choice."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def part(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """Return a further chunk."""
        if not self._is_chat:
            return self._chunk(index, {"text": text}, finish)
        return self._chunk(index, {"delta": {"content": text} if text else {}}, finish)

    def end(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the last chunk of a stream with its usage."""
        return {**self._frame(self._chunk_kind, []), "usage": usage(choices)}

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
    """Return the numbers of prompt and drawn tokens; a prompt with several answers counts once."""
    prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
    read, drawn = sum(prompts.values()), sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def event(value: dict[str, Any] | None) -> bytes:
    """Return a server-sent event; None marks the end."""
    return b"data: " + (b"[DONE]" if value is None else _json(value)) + b"\n\n"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any], is_chat: bool, echo: bool) -> bytes:
    """Return the log-probabilities of a choice as JSON.

    Args:
        rows: `scores` of the prompt and the text.
        echo: include the prompt's; not for a chat.
    """
    if is_chat:
        return _json(_chat_logprobs(tokenizer, choice, rows))
    return _json(_completion_logprobs(tokenizer, choice, rows, echo=echo))


def _completion_logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any], *, echo: bool) -> dict[str, Any]:
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
    """Return for each token whether a text begins with it: the first token, and tokens after a special one."""
    return [True, *(id in tokenizer.special_ids for id in (*choice.prompt, *choice.ids)[:-1])]


def _offsets(tokenizer: Tokenizer, choice: Choice, *, echo: bool) -> Iterator[int]:
    """Yield the offset of each token in the text; a token without text, such as the first one, takes no characters."""
    at = 0
    shown = StreamDecoder(tokenizer, skip_special=choice.asked is not None)  # a prompt sent as text has no special ones
    drawn = StreamDecoder(tokenizer, after=choice.prompt)
    for ids, decoder in ((choice.prompt if echo else (), shown), (choice.ids, drawn)):
        for id in ids:
            yield at
            at += len(decoder.push(id))
        at += len(decoder.finish())


def _by_text(tokenizer: Tokenizer, top: Sequence[tuple[int, float]], begins: bool) -> dict[str, float]:
    """Return text -> log-probability; among tokens with the same text (parts of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for id, chance in top:
        found.setdefault(token_text(tokenizer, id, begins=begins), chance)
    return found


def _chat_logprobs(tokenizer: Tokenizer, choice: Choice, rows: Sequence[Any]) -> dict[str, Any]:
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

"""What clients may ask: OpenAI's bodies, checked. It knows no tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
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
from pydantic_core import ErrorDetails, PydanticCustomError

from genesis.data.messages import describe
from genesis.errors import escape, nearest
from genesis.train.bounds import BOUNDS
from genesis_models.engine import Sampling

T = TypeVar("T", bound="Body")
MOST_CHOICES = 128
MOST_VALUES = 500_000  # of a body
MOST_PARTS = 50_000  # strings, lists and objects among them, keys included
TEXT, DIGITS = re.compile(rb'"[^"]*"'), re.compile(rb"[0-9]{100}")
MOST_STOPS, MOST_STOP_CHARS = 16, 1000
MOST_TOP = 20
# Fields of OpenAI's that change no answer.
IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# Of fields that would change it and are not done: the values that ask for nothing, as null always does.
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
# What a value must be, by the name of pydantic's error, whose context is put in.
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
    """One string as a list of them: a union of the two has an error for each, and none says which was meant."""
    return value if value is None or isinstance(value, list) else [value]


def _prompts(value: Any) -> list[str | list[int]]:
    """Each prompt of a value that may be one or several."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    for place, each in enumerate(several):
        if (wrong := _no_prompt(each)) is not None:
            what = f"a text, a list of token ids, or a list of either is expected, and prompt {place} is {wrong}"
            raise PydanticCustomError("prompt", what)
    return several


def _no_prompt(value: Any) -> str | None:
    """What a value is that is no prompt; None for one."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list):
        return describe(value)
    if not {*map(type, value)} <= {int}:
        wrong = next(at for at, each in enumerate(value) if type(each) is not int)
        return f"a list with {describe(value[wrong])} at position {wrong}"
    return None if value else "an empty list"


class BadRequest(Exception):
    """A request that is answered with an error.

    Args:
        what: for the client's user.
        param: the field that is wrong.
    """

    def __init__(self, what: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream has besides its text."""

    include_usage: StrictBool | None = None


Stop = Annotated[StrictStr, Field(max_length=MOST_STOP_CHARS)]


class Body(BaseModel):
    """What both kinds of requests have."""

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
        """Raises: BadRequest for fields that do not go together."""

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [text for text in self.stop or [] if text]

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> Sampling:
        """How tokens are drawn: as the request says, then by `defaults`; without a seed by one that nobody chose."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        if asked.get("top_k", 1) < 1:  # other servers' word for all
            asked["top_k"] = None
        return Sampling(**{"temperature": 1.0, **(defaults or {}), **asked}, seed=seed)


class CompletionBody(Body):
    """Of /v1/completions."""

    prompts: Annotated[list[str | list[int]], Field(alias="prompt"), PlainValidator(_prompts)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None

    def check(self) -> None:
        """Raises: BadRequest for more texts drawn than given."""
        if self.best_of not in (None, self.choices):
            raise BadRequest("best_of: only as many texts are drawn as are given", param="best_of")


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None

    def check(self) -> None:
        """Raises: BadRequest for alternatives to tokens that are not told."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs: only with logprobs", param="top_logprobs")


def is_loopback(address: str) -> bool:
    """Whether an IP address leads to this machine alone."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def parsed_json(data: bytes) -> Any:
    """The value of a body. Nobody else is served while it is built, so what that takes is counted first.

    Raises:
        BadRequest.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left opens or closes a string
    parts = plain.count(b'"') // 2
    outside = TEXT.sub(b"", plain) if parts <= MOST_PARTS else b""
    if parts + outside.count(b"[") + outside.count(b"{") > MOST_PARTS or outside.count(b",") >= MOST_VALUES:
        what = f"the body has more than {MOST_PARTS:,} strings, lists and objects, or than {MOST_VALUES:,} values"
        raise BadRequest(what, status=413)
    if DIGITS.search(outside):  # Python's time for a whole number grows with the square of its digits
        raise BadRequest("the body has a number of 100 digits or more")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON in UTF-8 of plain values") from None


def _refuse(name: str) -> None:
    raise ValueError(name)


def parsed(kind: type[T], value: Any) -> T:
    """The body of a request. Raises: BadRequest, with the first field that is wrong."""
    if isinstance(value, dict):
        _check_fields(kind, value)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = [str(part) for part in first["loc"]]
        raise BadRequest(f"{'.'.join(where) or 'body'}: {_words(first)}", param=where[0] if where else None) from None
    body.check()
    return body


def _check_fields(kind: type[Body], value: dict[str, Any]) -> None:
    """A field that nobody reads is refused: without it the answer may be another than was asked for.

    Raises:
        BadRequest.
    """
    known = {field.alias or name for name, field in kind.model_fields.items()}
    for name, asked in value.items():
        if asked is None or name in known or name in IGNORED or asked in NEUTRAL.get(name, ()):
            continue
        meant = nearest(name[:100], known)
        hint = "" if meant is None else f", or write {meant}"
        raise BadRequest(f"{escape(name[:100])}: not served here; leave it out{hint}", param=name[:100])


def _words(error: ErrorDetails) -> str:
    if error["type"] not in WORDS:
        return error["msg"]
    limits = error.get("ctx", {}).items()
    context = {key: f"{value:.9g}" if isinstance(value, float) else value for key, value in limits}
    return WORDS[error["type"]].format(**context, found=describe(error["input"]))

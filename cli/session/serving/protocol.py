"""What clients may ask: OpenAI's bodies, checked. It knows no tokens."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from genesis.train.bounds import BOUNDS
from genesis_models.engine import Sampling

__all__ = ["BadRequest", "Body", "ChatBody", "CompletionBody", "parsed"]

T = TypeVar("T", bound="Body")
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOP = 20
Number = StrictInt | StrictFloat
Ids = Annotated[list[StrictInt], Field(min_length=1)]


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


class Body(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: StrictStr
    temperature: Annotated[Number, Field(**BOUNDS["temperature"].limits)] | None = None
    top_p: Annotated[Number, Field(**BOUNDS["top_p"].limits)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=BOUNDS["top_k"].high)] | None = None
    min_p: Annotated[Number, Field(**BOUNDS["min_p"].limits)] | None = None
    repetition_penalty: Annotated[Number, Field(**BOUNDS["repetition_penalty"].limits)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MOST_STOPS)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    # What is not done is refused, unless it asks for nothing.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in found if text]

    def sampling(self) -> Sampling:
        """How tokens are drawn; without a seed by one that nobody chose."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        return Sampling(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=None if self.top_p is None else float(self.top_p),
            seed=seed,
            min_p=float(self.min_p or 0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
        )


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: (
        StrictStr | Ids | Annotated[list[StrictStr], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of them."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


def parsed(kind: type[T], value: Any) -> T:
    """The body of a request. Raises: BadRequest, with the first field that is wrong."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = next((str(part) for part in first["loc"]), "")
        where = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or part.isidentifier())
        raise BadRequest(f"{where or 'body'}: {first['msg']}", param=field or None) from None
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.choices):
        raise BadRequest("best_of: only as many texts are drawn as are given", param="best_of")
    return body

"""The HTTP interface: OpenAI's paths over the engine. Clients that leave, are slow or ask too much harm no others."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from genesis.data.chat import ChatPrompts
from genesis.data.record_formats import read_messages
from genesis.data.records import Conversation, Defect, Position
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError, GenesisError
from genesis_cli.session.serving.link import JOINED_S, Link, Wakes
from genesis_cli.session.serving.protocol import (
    Answer,
    BadRequest,
    Body,
    ChatBody,
    Choice,
    CompletionBody,
    event,
    is_loopback,
    logprobs,
    parsed,
    parsed_json,
)
from genesis_models.engine.text import RequestText

BODY_S = 30.0  # seconds within which a body must arrive
FINISHES = {"stop": "stop", "length": "length", "context": "length"}
BODIES = 16  # bodies of the largest size that may be held at once
VALUES_A_TOKEN = 4  # the most values of messages per token of the context, keys included; a turn has fewer
MOST_LOG_PROBS = 1 << 19  # the most log-probabilities of an answer
HOST = re.compile(r"(\[[^\[\]]*\]|[^:]*)(?::\d*)?")  # a name, a port


@dataclass(frozen=True, slots=True)
class Settings:
    """What is served, and to whom.

    Attributes:
        name: name of the model.
        created: start of the server, in seconds.
        context: the most tokens of a sequence.
        vocabulary: number of the model's ids.
        hosts: names in Host headers that are accepted, on any port, in addition to loopback addresses; empty means all.
        api_key: key that clients must send; empty means none.
        most_bytes: the most bytes of a body.
        drawing: default sampling settings by the names of `Sampling`.
    """

    name: str
    created: int
    context: int
    vocabulary: int
    hosts: frozenset[str]
    api_key: str
    most_bytes: int
    drawing: Mapping[str, Any] = field(default_factory=dict)


class Api:
    """The application for a model's tokenizer and template.

    Args:
        ends: ids that end an answer.
        template: chat template; None disables chat.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        tokenizer: Tokenizer,
        template: ChatPrompts | None,
        ends: Sequence[int],
    ) -> None:
        self._settings, self._link, self._tokenizer = settings, link, tokenizer
        self._template, self._ends = template, ends
        self._starts = _starts(tokenizer)
        # Outside the loop, one thread renders conversations, one encodes prompts; requests take turns at each prompt.
        self._renders, self._encodes = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._held = 0  # bytes of arriving bodies
        self._parsing = asyncio.Lock()  # bodies are parsed one by one, and other requests are served in between
        calls = [
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("GET", "/health", self._health),
        ]
        self._served = ", ".join(f"{method} {path.replace(':path', '')}" for method, path, _ in calls)
        routes = [Route(path, self._guarded(answer), methods=[method]) for method, path, answer in calls]
        self.app = Starlette(routes=routes, exception_handlers={404: self._no_such_call, 405: self._no_such_call})

    # --- Requests and clients -------------------------------------------------------------------------------------

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._check_client(request)
                return await answer(request)
            except BadRequest as error:
                return _json(error.body(), error.status)
            except ClientDisconnect:
                return Response(status_code=499)
            except GenesisError as error:  # a problem of the machine or the model's files: keep serving others
                return _json(BadRequest(error.what, status=500).body(), 500)

        return guarded

    def _check_client(self, request: Request) -> None:
        """Raise BadRequest if a foreign page asks, the Host header is unknown, or the key is wrong.

        A foreign host name that resolves to this machine is DNS rebinding: a page asks this machine as if it were the
        page's own server. Ports may differ: 80 is omitted, and a forwarded port is not the bound one.
        """
        hosts, origin = self._settings.hosts, request.headers.get("origin")
        host = request.headers.get("host", "").lower()
        name = HOST.fullmatch(host)
        if hosts and (name is None or (name[1] not in hosts and not is_loopback(name[1].strip("[]")))):
            what = f"the Host header {host[:100]!r} names another server; without --api-key only loopback addresses"
            raise BadRequest(f"{what} and {', '.join(sorted(hosts))} are answered", status=403)
        if hosts and origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise BadRequest(f"the request comes from a page of another origin, {origin[:100]!r}", status=403)
        if self._settings.api_key:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            known = (self._settings.api_key.encode(form) for form in ("utf-8", "latin-1"))  # clients send either
            if not any(hmac.compare_digest(given.encode("latin-1"), each) for each in known):
                raise BadRequest("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _no_such_call(self, request: Request, error: Exception) -> Response:
        """Answer a call that is not served, in the form of OpenAI's errors."""
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path} is not served; use one of {self._served}"
        found = BadRequest(what, status=error.status_code)
        return _json(found.body(), found.status, headers=error.headers)

    async def _body(self, request: Request) -> Any:
        """Return the JSON value of a request. Raises: BadRequest."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            what = "the body's type is not application/json: send the header Content-Type: application/json"
            raise BadRequest(what, status=415)
        most, data = self._settings.most_bytes, bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    self._held += len(part)
                    if len(data) > most:
                        raise BadRequest(f"the body has more than {most:,} bytes", status=413)
                    if self._held > BODIES * most:
                        raise BadRequest("too many large bodies arrive at once; try again later", status=429)
            async with self._parsing:
                await asyncio.sleep(0)
                return parsed_json(bytes(data))
        except TimeoutError:
            raise BadRequest(f"the body did not arrive within {BODY_S:.0f} s", status=408) from None
        finally:
            self._held -= len(data)

    def _named(self, body: Body) -> None:
        if body.model != self._settings.name:
            what = f"the model {body.model[:100]!r} is not served here, only {self._settings.name!r}"
            raise BadRequest(what, status=404, param="model", code="model_not_found")

    # --- The paths ------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "requests": self._link.taken})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self._settings.name:
            raise BadRequest("this model is not served here", status=404, code="model_not_found")
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "id": settings.name,
            "object": "model",
            "created": settings.created,
            "owned_by": "genesis",
            "max_model_len": settings.context,
        }

    async def _completions(self, request: Request) -> Response:
        body = parsed(CompletionBody, await self._body(request))
        self._named(body)
        tokens = 16 if body.max_tokens is None else body.max_tokens
        if not tokens and not body.echo:
            raise BadRequest("max_tokens is 0, and echo is not set", param="max_tokens")
        if body.stream and (body.echo or body.logprobs is not None):
            raise BadRequest("echo and logprobs cannot be streamed", param="stream")
        with ExitStack() as places:
            places.enter_context(self._link.room(len(body.prompts) * body.choices))
            prompts = await self._encoded(body.prompts, tokens)
            return await self._run(request, body, prompts, tokens, places, body.logprobs, echo=bool(body.echo))

    async def _chat(self, request: Request) -> Response:
        body = parsed(ChatBody, await self._body(request))
        self._named(body)
        if self._template is None:
            raise BadRequest("the model has no chat template; use /v1/completions to continue a text", code="no_chat")
        if body.logprobs and body.stream:
            raise BadRequest("logprobs cannot be streamed", param="stream")
        self._check_messages(body.messages)
        with ExitStack() as places:
            places.enter_context(self._link.room(body.choices))
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._renders, self._rendered, body.messages)
            tokens = body.max_completion_tokens or body.max_tokens or max(self._settings.context - len(ids), 1)
            self._check_prompt(ids, 0, tokens, "messages")
            top = (body.top_logprobs or 0) if body.logprobs else None
            return await self._run(request, body, [(ids, None)], tokens, places, top)

    async def _encoded(self, prompts: Sequence[str | list[int]], tokens: int) -> list[tuple[list[int], str | None]]:
        """Return each prompt's ids and text; all ids are checked before any text is encoded. Raises: BadRequest."""
        for place, each in enumerate(prompts):
            if not isinstance(each, str):
                self._check_prompt(each, place, tokens, "prompt")
        loop, found = asyncio.get_running_loop(), []
        for place, each in enumerate(prompts):
            if isinstance(each, str):
                found.append(await loop.run_in_executor(self._encodes, self._text_ids, each, place))
                self._check_prompt(found[-1][0], place, tokens, "prompt")
            else:
                found.append((each, None))
        return found

    def _text_ids(self, text: str, place: int) -> tuple[list[int], str | None]:
        """Return the ids and the text of a prompt; None for a text that spells out the tokenizer's first token.

        Other special tokens in it are plain text.

        Raises: BadRequest.
        """
        if not text:
            raise BadRequest("the prompt is empty", param="prompt")
        start = next((each for each in self._starts if text.startswith(each)), "")  # clients such as lm-eval decode ids
        try:
            if self._tokenizer.is_beyond(text, context := self._settings.context):
                what = f"prompt {place} has more tokens than the context holds, {context}"
                raise BadRequest(what, param="prompt", code="context_length_exceeded")
            return self._tokenizer.prompt(text.removeprefix(start)), None if start else text
        except (UnicodeEncodeError, GenesisError):
            raise BadRequest("the prompt cannot be encoded", param="prompt") from None

    def _check_messages(self, messages: list[dict[str, Any]]) -> None:
        """Raise BadRequest if the messages have more values than a conversation within the context can have."""
        context, left, values, characters = self._settings.context, list[Any](messages), 0, 0
        while left:
            each, values = left.pop(), values + 1
            if isinstance(each, str):
                characters += len(each)
            elif isinstance(each, dict | list):
                left += [*each, *each.values()] if isinstance(each, dict) else each
            if values > VALUES_A_TOKEN * context + 1000 or characters > context * self._tokenizer.longest:
                what = f"the messages have at least {values:,} values and {characters:,} characters, which is more "
                what += f"than the context of {context} tokens holds"
                raise BadRequest(what, param="messages", code="context_length_exceeded")

    def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        assert self._template is not None
        try:
            read = read_messages(messages, Position("messages", 0))
            if read[-1]["role"] == "assistant":
                what = "the last message is the assistant's, and there is nothing to answer"
                raise BadRequest(what, param="messages")
            return self._template.encode(Conversation(read), most=self._settings.context)
        except Defect as error:
            raise BadRequest(f"{error.field}: {error.what}", param="messages") from None
        except DataError as error:
            raise BadRequest(error.what, param="messages") from None

    # --- Running --------------------------------------------------------------------------------------------------

    async def _run(
        self, request: Request, body: Body, prompts: Sequence[tuple[list[int], str | None]], tokens: int,
        places: ExitStack, top: int | None, *, echo: bool = False,
    ) -> Response:  # fmt: skip
        """Answer prompts.

        Args:
            prompts: ids of each prompt, and its text if it was sent as text.
            places: places of its choices in the queue; a stream keeps them until it ends.
            top: number of the likeliest ids for each token; None disables log-probabilities.
            echo: whether the prompt precedes the text.
        """
        if top is not None:
            asked = body.choices * (1 + top) * sum(tokens + echo * len(ids) for ids, _ in prompts)
            if asked > MOST_LOG_PROBS:
                limit = f"over the limit of {MOST_LOG_PROBS:,}; send fewer prompts"
                what = f"the request asks for {asked:,} log-probabilities, {limit}"
                raise BadRequest(what, param="logprobs", code="too_many_logprobs")
        answer = Answer(self._settings.name, is_chat=isinstance(body, ChatBody))
        choices = [Choice(*each) for each in prompts for _ in range(body.choices)]
        if body.stream:
            return _Stream(self, answer, choices, body, tokens, places.pop_all())
        works = (self._finish(i, each, body, tokens, top, echo) for i, each in enumerate(choices))
        await _unless_gone(request, _together(works))
        return Response(answer.whole(choices), media_type="application/json")

    async def _finish(self, number: int, choice: Choice, body: Body, tokens: int, top: int | None, echo: bool) -> None:
        """Draw a whole choice, and add the other fields; arguments as in `_run`."""
        async with aclosing(self.texts(number, choice, body, tokens)) as texts:
            async for text, finish in texts:
                choice.text, choice.finish = choice.text + text, finish
        if top is not None:
            rows = await self._link.scores([*choice.prompt, *choice.ids], top)
            is_chat = isinstance(body, ChatBody)
            choice.logprobs = await asyncio.to_thread(logprobs, self._tokenizer, choice, rows, is_chat, echo)
        if echo:
            asked = choice.asked
            shown = self._tokenizer.decode(choice.prompt, skip_special=False) if asked is None else asked
            choice.text = shown + choice.text

    def _check_prompt(self, ids: Sequence[int], place: int, tokens: int, param: str) -> None:
        """Raise BadRequest if the model cannot continue the prompt; checked before anything of the request is drawn."""
        context, vocabulary = self._settings.context, self._settings.vocabulary
        if len(ids) + tokens > context or len(ids) >= context + (not tokens):
            what = f"prompt {place} has {len(ids)} tokens, its answer up to {tokens}, but the context holds {context}"
            raise BadRequest(what, param="max_tokens", code="context_length_exceeded")
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            for position, id in ((at, each) for at, each in enumerate(ids) if not 0 <= each < vocabulary):
                what = f"the token id {id:,} at position {position} of prompt {place}"
                what += f" is not in the vocabulary of {vocabulary:,}, ids 0 to {vocabulary - 1:,}"
                raise BadRequest(what, param=param)

    async def texts(
        self, number: int, choice: Choice, body: Body, tokens: int
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Yield the texts of the request's choice `number` as they arrive, and the reason of its end."""
        if not tokens:  # echo of a prompt that fills the context, which the engine could not continue
            yield "", "length"
            return
        text, sampling = RequestText(self._tokenizer, choice.prompt, body.stops), body.sampling(self._settings.drawing)
        sequence = number % body.choices
        wakes: Wakes = "always" if body.stops else "joined" if body.stream else "last"
        found = self._link.tokens(choice.prompt, sampling, sequence, tokens, self._ends, wakes=wakes)
        async with aclosing(found):  # a stop string ends the text before the engine does
            async for ids, end in found:
                new, count, finish = text.push_all(ids, end)
                choice.ids += ids[:count]
                yield new, None if finish is None else FINISHES[finish]
                if finish is not None:
                    return


class _Stream(Response):
    def __init__(
        self, api: Api, answer: Answer, choices: list[Choice], body: Body, tokens: int, places: ExitStack
    ) -> None:
        super().__init__()
        self._api, self._answer, self._choices = api, answer, choices
        self._body, self._tokens, self._places = body, tokens, places
        self._queue: asyncio.Queue[tuple[int, str, str | None]] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until all choices have ended or the client has left; then free the places."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        with self._places, suppress(ClientDisconnect):
            work = asyncio.ensure_future(_together(self._draw(i, each) for i, each in enumerate(self._choices)))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                last = event(None)
                try:
                    await _unless_gone(Request(scope, receive), self._send_all(send, work))
                except BadRequest as error:
                    last = event(error.body()) + last
                await send({"type": "http.response.body", "body": last})
            finally:
                await _ended(work)

    async def _draw(self, number: int, choice: Choice) -> None:
        async with aclosing(self._api.texts(number, choice, self._body, self._tokens)) as texts:
            async for text, finish in texts:
                if text or finish is not None:
                    self._queue.put_nowait((number, text, finish))

    async def _send_all(self, send: Send, work: asyncio.Task[None]) -> None:
        if isinstance(self._body, ChatBody):
            await _send_events(send, [self._answer.begin(index) for index in range(len(self._choices))])
        left, loop, sent_at = len(self._choices), asyncio.get_running_loop(), 0.0
        while left:
            found = [await self._next(work)]
            # Without stop strings, the link has already joined tokens, and the other choices' texts follow at once.
            rest = sent_at + JOINED_S - loop.time() if self._body.stops else 0.0
            await asyncio.sleep(max(rest, 0.0))
            while not self._queue.empty():
                found.append(self._queue.get_nowait())
            joined: dict[int, tuple[str, str | None]] = {}
            for index, text, finish in found:
                joined[index] = joined.get(index, ("", None))[0] + text, finish
                left -= finish is not None
            await _send_events(send, [self._answer.part(index, *each) for index, each in joined.items()])
            sent_at = loop.time()
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            await _send_events(send, [self._answer.end(self._choices)])

    async def _next(self, work: asyncio.Task[None]) -> tuple[int, str, str | None]:
        """Return the next text; an error of any choice ends all."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        getting = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait({getting, work}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and (error := work.exception()) is not None:
                raise error
            return await getting
        finally:
            getting.cancel()  # the client may have left


def _starts(tokenizer: Tokenizer) -> list[str]:
    """Return the spellings of the first token in decoded texts; some tokenizers add a space after it."""
    ids = [*tokenizer.start_ids, *tokenizer.encode("x").tolist()]
    found = (tokenizer.decode(each, skip_special=False) for each in (ids, tokenizer.start_ids))
    return [text for each in found if (text := each.removesuffix("x"))]


async def _send_events(send: Send, values: Sequence[dict[str, Any]]) -> None:
    await send({"type": "http.response.body", "body": b"".join(map(event, values)), "more_body": True})


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all coroutines; the first error or a cancellation ends the others.

    Raises:
        The first error itself, unlike a `TaskGroup`, which would raise a group.
    """
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _ended(*tasks)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`; cancel it if the client leaves. Raises: ClientDisconnect, and what `work` raises."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        await _ended(task, gone)


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII, so that any text can be encoded."""
    return Response(json.dumps(value, separators=(",", ":")).encode(), status, headers, "application/json")

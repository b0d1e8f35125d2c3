"""The two processes' sides in one: an engine that never ends a text, so that only cancelling does."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

import genesis_models
from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.records import Conversation
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError, NumericError
from genesis_cli.session.serving import api as api_module
from genesis_cli.session.serving import http_process
from genesis_cli.session.serving import process as worker_module
from genesis_cli.session.serving.api import Api, Settings
from genesis_cli.session.serving.link import Link
from genesis_cli.session.serving.process import Worker
from genesis_cli.session.serving.protocol import BadRequest
from genesis_models.engine import Request, Sampling, Token
from genesis_models.engine.engine import Waiting

DRAW = Sampling(0.0)


class Endless:
    """An engine whose texts are 5, 5, 5, …; one that begins with 13 fails. At most `rows` run at a time."""

    def __init__(self) -> None:
        self.live: dict[int, Request] = {}
        self.ends: set[int] = set()  # whose text ends with the next step
        self.taken = self.steps = 0
        self.rows, self.waiting = 100, Waiting(())

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        waiting = self.waiting = Waiting(requests)
        self.live.clear()
        while waiting.is_more or self.live:
            for _ in range(min(3, self.rows - len(self.live))):  # asked for each row that is free, as an engine does
                if (found := waiting.take()) is None:
                    continue
                self.live[found[0]], self.taken = found[1], self.taken + 1
                if found[1].ids[0] == 13:
                    raise NumericError("logits are NaN")
            waiting.pause()
            self.steps += 1
            for number in [*self.live]:
                if number in self.ends and self.live.pop(number, None):
                    yield Token(number, 5, None, "stop")
                elif number in self.live:
                    yield Token(number, 5)

    def cancel(self, request: int) -> None:
        self.waiting.cancel(request)
        self.live.pop(request, None)


@pytest.fixture
def run(chat_model: Path) -> Callable[[Callable[[Link, Endless], Awaitable[None]]], None]:
    """Runs a test with a link whose engine is in another thread, which ends with the link."""
    model = genesis_models.load(chat_model)

    def run(test: Callable[[Link, Endless], Awaitable[None]]) -> None:
        engine, (ours, theirs) = Endless(), Pipe()
        thread = threading.Thread(target=Worker(theirs, model, engine).run)
        thread.start()

        async def with_link() -> None:
            try:
                await test(Link(ours, 10, lambda: None), engine)
            finally:
                with socket.socket(fileno=os.dup(ours.fileno())) as both:
                    both.shutdown(socket.SHUT_RDWR)  # as the end of a process does, whose threads wait for nobody

        asyncio.run(with_link())
        thread.join(10)
        for each in threading.enumerate():
            if "(_read)" in each.name:  # closed under a thread that reads, a connection fails in its own way
                each.join(10)
        ours.close()
        theirs.close()
        assert not thread.is_alive()

    return run


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def test_texts_that_nobody_takes_are_cancelled(run: Any) -> None:
    async def test(link: Link, engine: Endless) -> None:
        texts = [link.tokens([1, 2], DRAW, 0, 100, []) for _ in range(3)]
        for each in texts:
            assert (await anext(each))[0][0] == 5
        assert len(link.live) == 3
        with link.room(3), pytest.raises(BadRequest, match="3 requests wait or run, of at most 10"), link.room(8):
            pass
        for left, each in zip((2, 1, 0), texts, strict=True):
            await each.aclose()
            assert len(link.live) == left
            await until(lambda left=left: len(engine.live) == left)  # type: ignore[misc]

    run(test)


def test_a_whole_answer_wakes_its_reader_once(run: Any) -> None:
    async def test(link: Link, engine: Endless) -> None:
        text = link.tokens([1, 2], DRAW, 0, 100, [], wakes="last")
        asked = asyncio.ensure_future(anext(text))
        await until(lambda: len(link.live) == 1 and len(next(iter(link.live.values())).ids) > 20)
        assert not asked.done()
        engine.ends.add(0)
        ids, finish = await asked
        assert finish == "stop" and len(ids) > 20 and {*ids} == {5}
        with pytest.raises(StopAsyncIteration):
            await anext(text)

    run(test)


def test_a_text_that_waits_and_that_nobody_takes_never_runs(run: Any) -> None:
    async def test(link: Link, engine: Endless) -> None:
        engine.rows = 1
        running, left, kept = (link.tokens([first], DRAW, 0, 100, []) for first in (1, 2, 3))
        assert (await anext(running))[0][0] == 5
        asked = [asyncio.ensure_future(anext(each)) for each in (left, kept)]
        await until(lambda: len(link.live) == 3)
        asked[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        assert len(link.live) == 2
        before = engine.steps
        await until(lambda: engine.steps > before + 3)
        assert [each.ids[0] for each in engine.live.values()] == [1]
        await running.aclose()
        await until(asked[1].done)
        assert asked[1].result()[0][0] == 5
        assert [each.ids[0] for each in engine.live.values()] == [3] and engine.taken == 2
        await kept.aclose()

    run(test)


def test_a_failure_of_the_model_ends_what_runs_and_no_more(run: Any) -> None:
    async def test(link: Link, engine: Endless) -> None:
        first, bad = link.tokens([1], DRAW, 0, 100, []), link.tokens([13], DRAW, 0, 100, [])
        await anext(first)
        with pytest.raises(BadRequest, match="NaN") as failed:
            await anext(bad)
        assert failed.value.status == 500
        with pytest.raises(BadRequest, match="NaN"):
            async for _ in first:
                pass
        again = link.tokens([1], DRAW, 0, 100, [])
        assert (await anext(again))[0][0] == 5
        await again.aclose()
        with pytest.raises(BadRequest, match="token id 99,999") as failed:
            await anext(link.tokens([99_999], DRAW, 0, 100, []))
        assert failed.value.status == 400 and engine.taken == 3

    run(test)


async def asked(
    app: Any,
    parts: list[dict[str, Any]],
    sent: Callable[[dict[str, Any]], Awaitable[None]],
    path: str = "/v1/completions",
) -> None:
    """A request whose body comes as `parts`; then nothing comes any more."""
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
             "query_string": b"", "headers": [(b"content-type", b"application/json")], "root_path": ""}  # fmt: skip

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    await app(scope, receive, sent)


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "words", "max_tokens": 20, **more}).encode()


@pytest.fixture
def settings() -> Settings:
    return Settings("m", 0, 128, 10**6, frozenset(), "", 1000)


def test_a_body_that_does_not_come(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "BODY_S", 0.1)

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        got: list[dict[str, Any]] = []

        async def take(message: dict[str, Any]) -> None:
            got.append(message)

        await asked(app, [{"type": "http.request", "body": b"{", "more_body": True}], take)
        assert got[0]["status"] == 408

    run(test)


def test_a_client_that_does_not_read_is_cut_off(
    run: Any, chat_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_process, "SEND_S", 0.2)
    data = body(stream=True, n=10, max_tokens=10**6)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    async def test(link: Link, engine: Endless) -> None:
        app = Api(Settings("m", 0, 10**7, 320, frozenset(), "", 1000), link, Tokenizer.load(chat_model), None, []).app
        server = uvicorn.Server(uvicorn.Config(app, http=http_process._Protocol, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            client.connect(listening.getsockname())
            client.sendall(head % len(data) + data)
            await until(lambda: engine.taken == 10)
            await until(lambda: not (link.taken or engine.live or server.server_state.connections))
            server.should_exit = True
            await serving
        assert not caplog.records

    run(test)


def test_a_client_that_reads_slowly_is_waited_for() -> None:
    unread, cut, protocol = [50, 40, 40], [], http_process._Protocol.__new__(http_process._Protocol)
    transport = SimpleNamespace(get_write_buffer_size=lambda: unread.pop(0), abort=lambda: cut.append(True))
    protocol.transport, protocol.loop = cast("Any", transport), cast("Any", SimpleNamespace(call_later=lambda *_: None))
    for before, is_cut in ((60, False), (50, False), (40, True)):
        protocol._look(before)
        assert bool(cut) == is_cut


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The times at which `_LogLines` takes records from now on."""
    times, handler = list[float](), http_process._LogLines()
    monkeypatch.setattr(http_process, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    logging.getLogger().addHandler(handler)
    yield times
    logging.getLogger().removeHandler(handler)


def test_what_clients_cause_is_told_now_and_then(capsys: pytest.CaptureFixture[str], lines: list[float]) -> None:
    others: list[Any] = []
    loop: Any = SimpleNamespace(default_exception_handler=others.append)
    lines += [0.0, 1.0, 1.0, 59.0, 61.0, 62.0]
    uvicorn_log, full = logging.getLogger("uvicorn.error"), OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for _ in range(5):
        http_process._refused(loop, {"exception": full})
    uvicorn_log.warning("Invalid HTTP request received.")
    told = capsys.readouterr().err.splitlines()
    line = "warning: taking a connection failed: Too many open files; raise the limit on open files: ulimit -n"
    assert told == [line, f"{line} (3 more since the last such line)", "warning: Invalid HTTP request received."]
    http_process._refused(loop, {"exception": RuntimeError()})
    assert len(others) == 1


def test_a_body_in_tiny_chunks_is_read_in_turns_with_others(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, receive = list[int](), http_process._Protocol.data_received
    monkeypatch.setattr(
        http_process._Protocol, "data_received", lambda self, data: (sizes.append(len(data)), receive(self, data))
    )

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        server = uvicorn.Server(uvicorn.Config(app, http=http_process._Protocol, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            head = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 5000)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()
            server.should_exit = True
            await serving

    run(test)
    assert max(sizes) <= 4096


def test_requests_that_are_none_do_not_fill_the_terminal(
    run: Any, chat_model: Path, settings: Settings, capsys: pytest.CaptureFixture[str], lines: list[float]
) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        server = uvicorn.Server(uvicorn.Config(app, http=http_process._Protocol, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(b"no request\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
                writer.close()
            server.should_exit = True
            await serving

    lines += [0.0] * 20
    run(test)
    assert capsys.readouterr().err == "warning: Invalid HTTP request received.\n"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_under_way_are_given_and_then_cut_off(
    run: Any, chat_model: Path, settings: Settings, stream: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(http_process, "GRACE_S", 0.3)

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        config = uvicorn.Config(app, http=http_process._Protocol, lifespan="off", log_config=None)
        server = http_process._Server(config, link)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            address, clients, data = listening.getsockname(), [], body(stream=stream, max_tokens=100)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"
            for count in (1, 2):
                clients.append(await asyncio.open_connection(*address))
                clients[-1][1].write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
                await until(lambda count=count: len(engine.live) == count)  # type: ignore[misc]
            idle, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nHost: m\r\n\r\n")
            await idle.readuntil(b"}")
            for _ in range(2):  # the second comes from whoever ends all processes of a group
                server.handle_exit(15, None)
            engine.ends.add(min(engine.live))
            assert await idle.read() == b""
            given, cut = [await asyncio.wait_for(reader.read(), 10) for reader, _ in clients]
            for each in (writer, *(writer for _, writer in clients)):
                each.close()
            await asyncio.wait_for(serving, 10)
        assert b'"finish_reason":"stop"' in given and b"the server ends" not in given
        assert b"the server ends" in cut and (
            cut.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else b" 503 " in cut
        )
        assert capsys.readouterr().err == "answers cut off: 1\n"
        with pytest.raises(BadRequest, match="the server ends") as failed:
            await anext(link.tokens([1], DRAW, 0, 100, []))
        assert failed.value.status == 503

    run(test)


class Unusable:
    """A template whose process cannot be started again."""

    def encode(self, conversation: Conversation, *, most: int) -> list[int]:
        raise ModelError("starting Python for chat templates failed: Too many open files")


def test_an_error_of_this_machine_is_an_answer(run: Any, chat_model: Path, settings: Settings) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), cast("Any", Unusable()), []).app
        got: list[dict[str, Any]] = []

        async def take(message: dict[str, Any]) -> None:
            got.append(message)

        data = body(prompt=None, messages=[{"role": "user", "content": "words"}])
        await asked(app, [{"type": "http.request", "body": data}], take, "/v1/chat/completions")
        assert got[0]["status"] == 500 and b"Too many open files" in got[1]["body"]

    run(test)


def test_half_open_connections(run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_process, "HEAD_S", 0.3)
    health = b"GET /health HTTP/1.1\r\nHost: m\r\n\r\n"

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        config = uvicorn.Config(app, http=http_process._Protocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            port = listening.getsockname()[1]
            both = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for (_, writer), sent in zip(both, (b"", b"GET /hea", health, health), strict=True):
                writer.write(sent)
            for reader, _ in both[2:]:
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            both[2][1].write(health[:20])  # the head of a second request, which does not come
            await asyncio.sleep(0.1)
            both[3][1].write(health)
            async with asyncio.timeout(5):
                assert [await reader.read() for reader, _ in both[:3]] == [b""] * 3  # closed
            both[3][1].write(health)  # a connection that asks now and then stays
            for _ in range(2):
                assert (await both[3][0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
            for _, writer in both:
                writer.close()
            server.should_exit = True
            await serving

    run(test)


def test_clients_that_go(run: Any, chat_model: Path, settings: Settings) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app

        async def take(message: dict[str, Any]) -> None:
            pass

        for stream in (False, True):
            parts = [{"type": "http.request", "body": body(stream=stream, n=3)}, {"type": "http.disconnect"}]
            await asked(app, parts, take)
            await until(lambda: not engine.live and not link.live)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fails_ends_the_others_of_its_request(
    run: Any, chat_model: Path, settings: Settings, stream: bool
) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        got: list[dict[str, Any]] = []

        async def take(message: dict[str, Any]) -> None:
            got.append(message)

        data = body(prompt=[[1], [99_999], [2]], n=2, stream=stream)
        await asked(app, [{"type": "http.request", "body": data}], take)
        assert any(b"99,999" in each.get("body", b"") for each in got)
        assert not link.live
        await until(lambda: not engine.live)

    run(test)


async def together(app: Any, bodies: list[bytes]) -> tuple[list[asyncio.Task[None]], list[int]]:
    """Requests that arrive at once, and the statuses of those that are answered so far."""
    statuses: list[int] = []

    async def take(message: dict[str, Any]) -> None:
        if "status" in message:
            statuses.append(message["status"])

    parts = [[{"type": "http.request", "body": each}] for each in bodies]
    return [asyncio.ensure_future(asked(app, each, take)) for each in parts], statuses


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_come_at_once_get_no_more_places_than_there_are(
    run: Any, chat_model: Path, settings: Settings, stream: bool
) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        tasks, statuses = await together(app, [body(n=4, stream=stream)] * 5)
        await until(lambda: statuses.count(429) == 3 and len(engine.live) == 8)
        assert len(link.live) == 8
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine.live and not link.live)
        assert not link.taken

    run(test)


def test_a_request_for_more_than_all_places_is_wrong_and_not_early(
    run: Any, chat_model: Path, settings: Settings
) -> None:
    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        _, statuses = await together(app, [body(n=11), body(prompt=["a", "b", "c"], n=4)])
        await until(lambda: len(statuses) == 2)
        assert statuses == [400, 400] and not engine.taken

    run(test)


LONG = "some words to learn " * 50_000
CHAT = [{"role": "user", "content": "words"}]


COSTLY: list[tuple[str, dict[str, Any], int]] = [
    ("completions", {"prompt": [[1]] * 20_000, "n": 128}, 400),
    ("completions", {"prompt": ["words"] * 11}, 400),
    ("completions", {"prompt": ["words"] * 3, "n": 4}, 400),
    ("completions", {"prompt": LONG}, 400),
    ("completions", {"prompt": "a" * 500_000}, 400),
    ("completions", {"prompt": [*["words"] * 9, [1] * 129]}, 400),
    ("completions", {"prompt": [*["words"] * 9, [99_999_999]]}, 400),
    ("completions", {"prompt": "words", "stop": ["b" * 2000]}, 400),
    ("completions", {"prompt": "words", "metadata": [[]] * 60_000}, 413),
    ("chat/completions", {"messages": CHAT, "n": 11}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
    ("chat/completions", {"messages": CHAT * 2000}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]}, 400),
    ("chat/completions", {"messages": [{**CHAT[0], "x": [0] * 400_000}]}, 400),
    ("chat/completions", {"messages": [{**CHAT[0], "x": {LONG[:99] + str(i): 0 for i in range(999)}}]}, 400),
]


def test_what_a_request_costs_is_bounded_before_anything_is_encoded(
    run: Any, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    async def test(link: Link, engine: Endless) -> None:
        tokenizer = Tokenizer.load(chat_model)
        monkeypatch.setattr(tokenizer, "encode_batch", partial(_measured, encoded, tokenizer.encode_batch))
        with ChatPrompts(tokenizer, ChatTemplate.read(str(chat_model))) as template:
            api = Api(Settings("m", 0, 128, 320, frozenset(), "", 4 << 20), link, tokenizer, template, [])
            for path, fields, status in COSTLY:
                got: list[dict[str, Any]] = []
                encoded.clear()

                async def take(message: dict[str, Any], got: list[dict[str, Any]] = got) -> None:
                    got.append(message)

                data = json.dumps({"model": "m", **fields}).encode()
                async with asyncio.timeout(10):
                    await asked(api.app, [{"type": "http.request", "body": data}], take, f"/v1/{path}")
                assert (got[0]["status"], link.taken, engine.taken) == (status, 0, 0), (fields.keys(), got)
                assert sum(encoded) <= 4 * 128, fields.keys()

    run(test)


def _measured(encoded: list[int], encode: Any, texts: list[str], **how: Any) -> Any:
    encoded += map(len, texts)
    return encode(texts, **how)


def test_more_log_probabilities_than_an_answer_holds_are_refused(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "MOST_LOG_PROBS", 100)

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        _, statuses = await together(app, [body(logprobs=1, n=3), body(logprobs=5), body(max_tokens=0, echo=True, n=3,
                                                                                         logprobs=9)])  # fmt: skip
        await until(lambda: len(statuses) == 3)
        assert statuses == [400] * 3 and not engine.taken

    run(test)


def test_bodies_that_come_at_once_are_bounded_together(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "BODIES", 2)

    async def test(link: Link, engine: Endless) -> None:
        app = Api(settings, link, Tokenizer.load(chat_model), None, []).app
        statuses: list[int] = []

        async def take(message: dict[str, Any]) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        held = [[{"type": "http.request", "body": b" " * 900, "more_body": True}] for _ in range(4)]
        tasks = [asyncio.ensure_future(asked(app, each, take)) for each in held]
        await until(lambda: statuses == [429] * 2)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asked(app, [{"type": "http.request", "body": b" " * 900}], take)
        assert statuses[2:] == [400]

    run(test)


def test_a_long_text_is_encoded_beside_the_loop(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(link: Link, engine: Endless) -> None:
        tokenizer = Tokenizer.load(chat_model)
        encoding, ends = threading.Event(), threading.Event()

        def prompt(text: str) -> list[int]:
            encoding.set()
            assert ends.wait(10)
            return [1]

        monkeypatch.setattr(tokenizer, "prompt", prompt)
        tasks, _ = await together(Api(settings, link, tokenizer, None, []).app, [body()])
        await until(encoding.is_set)
        assert not engine.taken
        ends.set()
        await until(lambda: len(engine.live) == 1)
        tasks[0].cancel()

    run(test)


def test_scores_that_nobody_waits_for_are_not_made(
    run: Any, chat_model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, goes_on = [0], threading.Event()

    def scores(model: Any, sequences: Any, top: int) -> Iterator[list[Any]]:
        made[0] += 1
        assert goes_on.wait(10)
        yield [(0.0, [])] * 2

    monkeypatch.setattr(worker_module, "scores", scores)

    async def test(link: Link, engine: Endless) -> None:
        runs = link.tokens([1], DRAW, 0, 100, [])
        await anext(runs)
        first, *others = (asyncio.ensure_future(link.scores([1, 2, 3], 0)) for _ in range(5))
        await until(lambda: made[0] == 1)
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # for the cancellations to arrive
        goes_on.set()
        assert len(await first) == 2
        await anext(runs)
        assert len(await link.scores([1, 2, 3], 0)) == 2 and made[0] == 2
        await runs.aclose()

    run(test)


def test_texts_go_on_between_scores(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(link: Link, engine: Endless) -> None:
        steps: list[int] = []
        all_sent = threading.Event()

        def scores(model: Any, sequences: Any, top: int) -> Iterator[list[Any]]:
            assert all_sent.wait(10)
            steps.append(engine.steps)
            yield [(0.0, [])] * 2

        monkeypatch.setattr(worker_module, "scores", scores)
        runs = link.tokens([1], DRAW, 0, 100, [])
        await anext(runs)
        waiting = [asyncio.ensure_future(link.scores([1, 2, 3], 0)) for _ in range(5)]
        await asyncio.sleep(0.05)
        all_sent.set()
        await asyncio.gather(*waiting)
        await runs.aclose()
        assert len({*steps}) == 5, steps

    run(test)

"""`genesis serve` as clients see it: texts, streams, log-probabilities, errors, and what it keeps of those that go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis.errors import UsageError
from genesis_cli.session.inference import scores
from genesis_cli.session.serving import http_process, process
from genesis_cli.session.serving.protocol import is_loopback
from tests.cli.command import printed
from tests.serving.server import Server, serving

pytestmark = pytest.mark.xdist_group("serving")  # one server answers all
GREEDY = {"model": "model", "temperature": 0}


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Server]:
    with serving(chat_model, "--device", "cpu", "--queue", "40", "--max-body", "20000") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{path}", json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", f"/v1/{path}", json={**GREEDY, **body, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def is_idle(client: httpx.Client) -> bool:
    """Whether no request runs within a few seconds."""
    for _ in range(100):
        if client.get("/health").json()["requests"] == 0:
            return True
        time.sleep(0.05)
    return False


def has_ended(pid: int) -> bool:
    """Whether a process ends within a few seconds; one that nobody waits for stays as a zombie."""
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.1)
    return False


def test_texts_are_those_of_the_engine(client: httpx.Client, chat_model: Path) -> None:
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    prompts = ["words", "some words to learn", [3, 4, 5]]
    wanted = [model.generate(tokenizer.prompt(p) if isinstance(p, str) else p, max_tokens=12).text for p in prompts]
    for prompt, text in zip(prompts, wanted, strict=True):
        found = ask(client, "completions", prompt=prompt, max_tokens=12)
        [choice] = found["choices"]
        assert (choice["text"], choice["index"], choice["logprobs"]) == (text, 0, None)
        assert choice["finish_reason"] == "length" and found["object"] == "text_completion"
        count = len(tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt)
        assert found["usage"] == {"prompt_tokens": count, "completion_tokens": 12, "total_tokens": count + 12}
    several = ask(client, "completions", prompt=prompts[:2], max_tokens=12, n=2)
    assert [each["text"] for each in several["choices"]] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [each["index"] for each in several["choices"]] == [0, 1, 2, 3]


def test_a_chat_is_rendered_by_the_template(client: httpx.Client, chat_model: Path) -> None:
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    ids = [*tokenizer.encode("system: S"), 0, *tokenizer.encode("user: a<|endoftext|>b"), 0]
    ids += [*tokenizer.encode("assistant: ")]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a<|endoftext|>b"}]
    found = ask(client, "chat/completions", messages=messages, max_tokens=8)
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": model.generate(ids, max_tokens=8).text}
    assert found["usage"]["prompt_tokens"] == len(ids) and found["object"] == "chat.completion"
    parts = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a<|endoftext|>b"}]},
    ]
    again = ask(client, "chat/completions", messages=parts, max_completion_tokens=8)
    assert again["choices"] == found["choices"]
    whole = ask(client, "chat/completions", messages=messages)  # until the context is full
    assert whole["usage"]["total_tokens"] == 128 and whole["choices"][0]["finish_reason"] == "length"


def test_seeds_repeat_whatever_runs_beside(client: httpx.Client) -> None:
    how = {"prompt": "words", "max_tokens": 10, "temperature": 1.5, "seed": -7, "n": 3}
    first = ask(client, "completions", **how)
    assert len({each["text"] for each in first["choices"]}) == 3
    beside = ask(client, "completions", **{**how, "prompt": ["words", "some"]})
    assert [each["text"] for each in beside["choices"][:3]] == [each["text"] for each in first["choices"]]
    free = {ask(client, "completions", **{**how, "seed": None, "n": 1})["choices"][0]["text"] for _ in range(3)}
    assert len(free) == 3
    several = ask(client, "completions", prompt=["words"] * 3, max_tokens=10, temperature=1.5)
    assert len({each["text"] for each in several["choices"]}) == 3  # a seed of its own for each


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_join_to_the_whole(client: httpx.Client, path: str) -> None:
    asked = {"prompt": "words"} if path == "completions" else {"messages": [{"role": "user", "content": "words"}]}
    how = {**asked, "max_tokens": 30, "temperature": 1, "seed": 3, "n": 2}
    whole = ask(client, path, **how)
    found = events(client, path, **how, stream_options={"include_usage": True})
    assert found[-1]["choices"] == [] and found[-1]["usage"] == whole["usage"]
    assert len({each["id"] for each in found}) == 1
    texts, ends = ["", ""], [None, None]
    for [choice] in (each["choices"] for each in found[:-1]):
        text = choice["text"] if path == "completions" else choice["delta"].get("content", "")
        assert ends[choice["index"]] is None
        texts[choice["index"]] += text
        ends[choice["index"]] = choice["finish_reason"]
    assert ends == ["length", "length"]
    assert texts == [each["text"] if path == "completions" else each["message"]["content"] for each in whole["choices"]]
    if path != "completions":
        assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_stop_strings_end_a_text(client: httpx.Client) -> None:
    text = ask(client, "completions", prompt="words to", max_tokens=20)["choices"][0]["text"]
    assert len(text) > 4
    found = ask(client, "completions", prompt="words to", max_tokens=20, stop=["never", text[3]])
    assert found["choices"][0]["text"] == text[: text.index(text[3])]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert is_idle(client)


def test_log_probabilities_are_the_models(client: httpx.Client, chat_model: Path) -> None:
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    ids = tokenizer.prompt("some words")
    found = ask(client, "completions", prompt=ids, max_tokens=2, echo=True, logprobs=3)["choices"][0]
    drawn = model.generate(ids, max_tokens=2).ids
    with genesis.no_grad():
        logits = model(genesis.tensor([[*ids, *drawn]], dtype="int64")).numpy()[0].astype(np.float64)
    chances = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    rows = np.arange(len(ids) + 1)
    wanted = chances[rows, [*ids[1:], *drawn]]
    told = found["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert [max(each.values()) for each in told["top_logprobs"][1:]] == pytest.approx(
        chances[rows].max(1).tolist(), abs=1e-4
    )
    assert "".join(told["tokens"]) == found["text"] and told["text_offset"][1] == len(told["tokens"][0])
    text = ask(client, "completions", prompt=ids, max_tokens=2, logprobs=0)["choices"][0]
    assert text["logprobs"]["token_logprobs"] == pytest.approx(told["token_logprobs"][-2:], abs=1e-5)
    only = ask(client, "completions", prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    # BLAS may round a GEMM of other rows otherwise
    assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:-2], abs=1e-5)
    assert only["logprobs"]["token_logprobs"][0] is None
    as_text = ask(client, "completions", prompt="some words", max_tokens=2, echo=True, logprobs=0)["choices"][0]
    assert as_text["text"] == "some words" + text["text"]  # without the first token, which is the tokenizer's
    offsets, sent = as_text["logprobs"]["text_offset"], len("some words")
    assert len(tokenizer.start_ids) == 1 and offsets[:3] == [0, 0, 1] and offsets[len(ids)] == sent
    assert as_text["logprobs"]["token_logprobs"] == told["token_logprobs"]
    decoded = {"prompt": tokenizer.decode(ids, skip_special=False), "max_tokens": 2, "echo": True, "logprobs": 3}
    assert ask(client, "completions", **decoded)["choices"][0] == found  # the first token is not put before itself
    chat = ask(client, "chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=3, logprobs=True,
               top_logprobs=2)["choices"][0]["logprobs"]["content"]  # fmt: skip
    assert len(chat) == 3 and all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in chat)
    assert [*scores(model, [([1], 1)], 1)] == [[]]


BAD: list[tuple[str, Any, int, str]] = [
    ("completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [[1], []]}, 400, "prompt"),
    ("completions", {"prompt": [1, 99_999]}, 400, "token id 99,999 at position 1 of prompt 0"),
    ("completions", {"prompt": [1, 320]}, 400, "token id 320 at position 1 of prompt 0"),
    ("completions", {"prompt": [[1], [-1]], "stream": True}, 400, "token id -1 at position 0 of prompt 1"),
    ("completions", {"prompt": [[1, 2], [3, 99_999]], "n": 2, "stream": True}, 400, "vocabulary of 320, ids 0 to 319"),
    ("completions", {"prompt": [10**40], "stream": True}, 400, "vocabulary"),
    ("completions", {"prompt": [1, 10**40], "max_tokens": 0, "echo": True, "logprobs": 0}, 400, "token id"),
    ("completions", {"prompt": "a", "top_k": 10**40}, 400, "top_k"),
    ("completions", {"prompt": 5}, 400, "prompt"),
    ("completions", {"prompt": "a\ud800"}, 400, "prompt"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 128}, 400, "the context holds 128"),
    ("completions", {"prompt": [1] * 129, "max_tokens": 0, "echo": True}, 400, "the context holds 128"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "echo is not set"),
    ("completions", {"prompt": "a", "n": 129}, 400, "n:"),
    ("completions", {"prompt": "a", "n": 41}, 400, "41 texts, over the limit of 40"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of"),
    ("completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
    ("completions", {"prompt": "a", "logprobs": 1, "stream": True}, 400, "cannot be streamed"),
    ("completions", {"prompt": "a", "model": "other"}, 404, "is not served here"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role: "),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, 400,
     "messages[1].content: the content is missing or null"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages[0].content[0]: the part is 'image_url', but only text is supported"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, 400, "nothing to answer"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a " * 200}]}, 400, "the context holds 128"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}, 400,
     "response_format"),
    ("completions", [], 400, ""),
    ("embeddings", {"prompt": "a"}, 404, "POST /v1/embeddings is not served"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, status, what", BAD)
def test_what_is_refused(client: httpx.Client, path: str, body: Any, status: int, what: str) -> None:
    value = {**GREEDY, **body} if isinstance(body, dict) else body
    answer = client.post(f"/v1/{path}", content=json.dumps(value), headers={"Content-Type": "application/json"})
    assert (answer.status_code, what in answer.text) == (status, True), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "data, headers, status",
    [
        (b"{", {}, 400),
        (b"\xff", {}, 400),
        (b"[" * 10_000, {}, 400),
        (b'{"model": NaN}', {}, 400),
        (b"{" + b" " * 30_000 + b"}", {}, 413),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Host": "evil.example"}, 403),
        (b"{}", {"Origin": "http://evil.example"}, 403),
        (b"{}", {"Origin": "null"}, 403),
        (b"{}", {"Host": "evil.example:8000"}, 403),
        (b"{}", {"Host": "localhost.evil.example"}, 403),
        (b"{}", {"Host": "localhost:80@evil.example"}, 403),
        (b"{}", {"Host": "[::2]:8000"}, 403),
        (b"{}", {"Host": "128.0.0.1"}, 403),
        (b"{}", {"Host": "[::ffff:10.0.0.1]"}, 403),
        (b"{}", {"Host": "[::1"}, 403),
        (b"{}", {"Host": ""}, 403),
        (b"{}", {"Host": "localhost", "Origin": "http://localhost:3000"}, 403),  # a page of another server here
        (b"{}", {"Host": "localhost", "Origin": "http://127.0.0.1"}, 403),
        (b"{}", {"Host": "localhost", "Origin": "localhost"}, 403),
    ],
)
def test_bodies_and_headers_that_are_refused(
    client: httpx.Client, data: bytes, headers: dict[str, str], status: int
) -> None:
    found = client.post("/v1/completions", content=data, headers={"Content-Type": "application/json", **headers})
    assert found.status_code == status, found.text


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:9000", "127.0.0.2", "[::1]", "[::1]:8000", "[::ffff:7f00:1]"]
)
def test_names_of_this_machine_are_answered_on_any_port(client: httpx.Client, host: str) -> None:
    """Port 80 is not written, and a forwarded port is another than that which is bound."""
    for headers in (
        {"Host": host},
        {"Host": host, "Origin": f"http://{host}"},
        {"Host": host, "Origin": f"https://{host}"},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_models_are_listed(client: httpx.Client) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("model", "model", 128)
    assert client.get("/v1/models/model").json() == card
    assert client.get("/v1/models/other").status_code == 404
    refused = client.get("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert "is not served" in refused.json()["error"]["message"]


def test_a_client_that_goes_frees_its_place(client: httpx.Client, server: Server) -> None:
    body = {**GREEDY, "prompt": ["words"] * 20, "max_tokens": 100, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert is_idle(client)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        data = json.dumps({**body, "stream": False}).encode()
        host = server.url.removeprefix("http://")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert is_idle(client)
    assert ask(client, "completions", prompt="words", max_tokens=2)["choices"]


def test_beyond_loopback_only_with_a_key(chat_model: Path, tmp_path: Path) -> None:
    code, _, told = printed("serve", chat_model, "--host", "0.0.0.0", "--port", "0")
    assert code == 2 and "set --api-key" in told
    plain = shutil.copytree(chat_model, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.jinja"))
    with serving(plain, "--device", "cpu", "--host", "0.0.0.0", "--api-key", "käse", "--name", "tiny") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        for headers, status in (({}, 401), ({"Authorization": "Bearer other"}, 401),
                                ({"Authorization": "Bearer käse".encode()}, 200)):  # fmt: skip
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == status
        assert answer.json()["data"][0]["id"] == "tiny"
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=asked, headers=headers)
        assert refused.status_code == 400 and "no chat template; use /v1/completions" in refused.text
        assert "the model has no chat template: only /v1/completions is served\n" in server.told
        [child] = server.children()
        assert server.stop(signal.SIGTERM) == 143 and server.told.endswith("stopped: SIGTERM ended the server\n")
        assert has_ended(child)


@pytest.mark.parametrize(
    "key", ["", " ", " a", "a ", "a\n", "a\r\nb", "a\tb", "a\0", "\u043a\u043b\u044e\u0447", "a\ud800", "a" * 5000]
)
def test_a_key_that_no_client_can_send_is_refused(chat_model: Path, key: str) -> None:
    code, _, told = printed("serve", chat_model, "--port", "0", "--api-key", key)
    assert code == 2 and "--api-key" in told


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.1", "localhost", "box"]
)
def test_every_address_of_this_machine_alone_needs_no_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux" and host != "127.0.0.1":
        pytest.skip("other systems have fewer such addresses")
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
             (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # fmt: skip
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with process._listening(host, 0, has_key=False) as listening:
        assert is_loopback(listening.getsockname()[0])
        if host in ("localhost", "box"):
            assert listening.getsockname()[0] == "127.0.1.1"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::ffff:0.0.0.0", "::ffff:10.0.0.1", "128.0.0.1", "10.0.0.1", "fe80::1", "box", ""]
)
def test_every_other_address_needs_one(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with (
        pytest.raises(UsageError, match="other machines can reach"),
        process._listening(host, 0, has_key=False),
    ):
        pass


HANGS = """
import hashlib, os, subprocess, sys
from genesis.train.output import Output
from genesis_cli.session.serving import process
process.GRACE_S = process.ENDING_S = process.ENGINE_S = 0.1
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
process._Ending(child, Output(sys.stderr))
print(child.pid, flush=True)
hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)  # no handler of Python's runs meanwhile
"""


def test_processes_that_hang_are_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143 and told.startswith("stopping: pending answers have ")
    assert has_ended(child)


def test_what_a_server_does_not_start_with(chat_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, told = printed("serve", chat_model, "--port", str(port))
        assert code == 6 and f"port {port} is in use" in told
    code, _, told = printed("serve", chat_model, "--port", "0", "--context", "129")
    assert code == 2 and "--context 129 exceeds the model's 128 positions" in told


def test_what_the_process_of_http_cannot_read_is_told_by_the_engines(
    chat_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    code, _, told = printed("serve", folder, "--device", "cpu", "--port", "0")
    assert code == 5 and "the chat template cannot be used" in told and str(folder) in told
    assert "Traceback" not in capfd.readouterr().err


def test_an_engine_that_ends_first_is_no_error_of_http() -> None:
    ours, theirs = Pipe()
    ours.close()
    http_process.main(-1, os.dup(theirs.fileno()))


def test_nobody_answers_once_the_engines_process_was_killed(chat_model: Path) -> None:
    with serving(chat_model, "--device", "cpu") as server:
        [child] = server.children()
        server.stop(signal.SIGKILL)
        assert has_ended(child) and "Traceback" not in server.told


def test_ctrl_c_ends_the_server(server: Server, client: httpx.Client) -> None:
    """The last test of this server."""
    children = server.children()
    assert len(children) == 1 and server.stop() == 130
    assert server.told.count("\n") == 4 and server.told.endswith("stopped: SIGINT ended the server\n")
    assert not os.path.exists(f"/proc/{children[0]}")

"""Many requests to `genesis serve`, good and bad, after which nothing may have grown and all answers are as they were.

    .venv/bin/python -m tests.soak.serving --count 10000 --fuzz 100000 --large 10000

A tiny model on the CPU. Some clients stream, some leave before the end; fuzzed bodies are good ones
with parts changed, removed or cut, or with fields that multiply. Large bodies, up to the 4 MiB that a server takes, are
each sent alone first, while a process of its own asks for something small all the time: in the best of some tries
nobody may have waited more than 100 ms longer than with no such body. An answer of 5xx, a server that ends, or growth
of memory, descriptors or threads is a failure, and so is memory that does not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.cli.chat_model import write_chat_model
from tests.serving.server import Server, serving

CLIENTS = 24
GROWTH = 16.0  # MiB of a process between the first quarter and the end
SETTLED = 0.25
BACK = 200.0  # MiB of a process above its start, after all large bodies
DELAY_S, TRIES = 0.1, 5
BODY = 4_190_000  # bytes of a large body
TEXT = {"model": "model", "prompt": "a", "max_tokens": 1}
CHAT = {"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**40,
    "",
    "a\u0000b",
    "\ud800",
    [],
    {},
    [[]],
    "x" * 3000,
    [1] * 300,
    {"a": {}},
]


def good(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that is answered."""
    how: dict[str, Any] = {"model": "model", "seed": draw.randrange(100), "temperature": draw.choice([0, 0.5, 1.3])}
    if draw.random() < 0.5:
        text = "some words to learn "[: draw.randint(1, 20)] * draw.randint(1, 2)
        body = {**how, "prompt": draw.choice([text, [text, text], [1, 2, 3]]), "max_tokens": draw.randint(1, 8)}
        if draw.random() < 0.3:
            body |= {"logprobs": draw.randint(0, 3), "echo": draw.random() < 0.5}
        return "completions", body
    messages = [{"role": "user", "content": "words " * draw.randint(1, 3)}]
    body = {**how, "messages": messages, "max_tokens": draw.randint(1, 8), "n": draw.randint(1, 2)}
    return "chat/completions", {**body, **({"stop": ["o"]} if draw.random() < 0.3 else {})}


def filled(start: bytes, part: bytes, end: bytes, size: int) -> bytes:
    """A body of about so many bytes."""
    return start + b",".join([part] * max(1, (size - len(start)) // (len(part) + 1))) + end


def large(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies whose fields multiply: for each a path, and about `size` bytes."""
    prompt, text = b'{"model":"model","prompt":[', b'{"model":"model","prompt":"'
    chat = b'{"model":"model","messages":['
    user = b'{"role":"user","content":"'
    words = json.dumps("some words to learn " * (size // 20))[1:-1].encode()
    last = b'"' + words[: size // 3] + b'"'
    keys = b",".join(b'"k%06d":null' % number for number in range(size // 15))
    found = {
        "prompts × n": filled(prompt, b"[1]", b'],"n":128}', min(size, 80_000)),
        "lists": filled(prompt, b"[]", b"]}", size),
        "prompts of one id": filled(prompt, b"[1]", b"]}", size),
        "short texts": filled(prompt, b'"ab"', b"]}", size),
        "texts": filled(prompt, b'"' + words[: size // 100] + b'"', b"]}", size),
        "texts, the last too long": filled(prompt, b'"' + b"a" * 3000 + b'"', b"," + last + b"]}", size // 2),
        "ids": filled(prompt, b"300", b"]}", size),
        "ids of prompts": filled(prompt, b"[" + b",".join([b"300"] * 4000) + b"]", b",[99999]]}", min(size, 1_900_000)),
        "one letter": text + b"a" * size + b'"}',
        "words": text + words + b'"}',
        "spaces": text + b" " * size + b'"}',
        "spaces that a context could hold": text + b" " * min(size, 50_000) + b'"}',
        "escapes": text + b"\\u00e4" * (size // 6) + b'"}',
        "quotes": text + rb"\"[{," * (size // 5) + b'"}',
        "keys": b'{"model":"model","prompt":"a",' + keys + b"}",
        "digits": text + b'a","seed":' + b"9" * size + b"}",
        "brackets": b"[" * size,
        "stops": filled(text + b'a","stop":[', b'"' + b"a" * (size // 17) + b'b"', b"]}", size),
        "stop strings": filled(text + b'a","stop":[', b'"a"', b"]}", size),
        "log-probabilities": filled(prompt, b"[" + b",".join([b"5"] * 4000) + b"]", b'],"logprobs":20,"echo":true,'
                                    b'"max_tokens":0}', min(size, 400_000)),
        "logit_bias": text + b'a","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(size // 11)) + b"}}",
        "messages": filled(chat, user + b'a"}', b"]}", size),
        "messages, fewer": filled(chat, user + b'a"}', b"]}", min(size, 500_000)),
        "parts": filled(chat + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}", size),
        "values of a message": filled(chat + user + b'a","x":[', b"1", b"]}]}", min(size, 900_000)),
        "chat": chat + user + words + b'"}]}',
        "special tokens of a chat": chat + user + b"<|endoftext|>" * (size // 13) + b'"}]}',
        "special tokens that a context could hold": chat + user + b"<|endoftext|>" * min(size // 13, 4000) + b'"}]}',
        "tools": filled(chat + user + b'a"}],"tools":[', b'{"type":"function"}', b"]}", size),
    }  # fmt: skip
    return {
        name: ("chat/completions" if body.startswith(chat) else "completions", body) for name, body in found.items()
    }


def spoilt(draw: random.Random, body: dict[str, Any]) -> bytes:
    """A body that is wrong in some way, or by luck is not."""
    value = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(
            [*value, "stream", "top_p", "top_k", "min_p", "stop", "tools", "n", "messages", "prompt", "echo"]
        )
        if draw.random() < 0.2:
            value.pop(key, None)
        else:
            value[key] = draw.choice(ODD)
    if value.get("stream") is True:
        del value["stream"]
    data = json.dumps(value).encode()
    kind = draw.random()
    if kind < 0.1:
        return data[: draw.randrange(len(data))]
    if kind < 0.2:
        at = draw.randrange(len(data))
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data


def longer(folder: Path) -> Path:
    """The model with as many positions as a server takes by itself."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))
    return folder


def held(server: Server) -> dict[str, tuple[float, int, int]]:
    """Memory in MiB, descriptors and threads of the engine's process and of that of HTTP."""
    found = {}
    for name, pid in (("engine", server.process.pid), ("http", server.children()[0])):
        status = Path(f"/proc/{pid}/status").read_text()
        memory, threads = (int(status.split(f"{key}:")[1].split()[0]) for key in ("VmRSS", "Threads"))
        found[name] = memory / 1024, len([*Path(f"/proc/{pid}/fd").iterdir()]), threads
    return found


async def one(client: httpx.AsyncClient, draw: random.Random, counts: Counter[str], *, fuzz: bool) -> None:
    """One request."""
    path, body = good(draw)
    if fuzz:
        headers, data = {"Content-Type": "application/json"}, spoilt(draw, body)
        if draw.random() < 0.01:
            path, data = draw.choice([*large(draw.choice([1000, 30_000, 300_000])).values()])
        answer = await client.post(f"/v1/{path}", content=data, headers=headers)
        counts[f"{answer.status_code // 100}xx"] += 1
        if answer.status_code >= 500:
            print(answer.status_code, answer.text[:300], file=sys.stderr)
    elif "logprobs" not in body and draw.random() < 0.4:
        async with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as stream:
            counts[f"{stream.status_code // 100}xx"] += 1
            leaves = draw.random() < 0.3
            async for _ in stream.aiter_lines():
                if leaves:
                    counts["left"] += 1
                    break
    else:
        answer = await client.post(f"/v1/{path}", json=body)
        counts[f"{answer.status_code // 100}xx"] += 1


async def many(url: str, count: int, seed: int, counts: Counter[str], *, fuzz: bool) -> None:
    """So many requests by all clients together."""
    numbers = iter(range(count))

    async def client_of(number: int) -> None:
        draw = random.Random(f"{seed} {number} {fuzz}")
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for _ in numbers:
                try:
                    await one(client, draw, counts, fuzz=fuzz)
                except httpx.TransportError as error:
                    counts["5xx"] += 1
                    print(repr(error), file=sys.stderr)

    await asyncio.gather(*(client_of(number) for number in range(CLIENTS)))


def soak(server: Server, count: int, seed: int, *, fuzz: bool) -> int:
    """Requests, and what has gone wrong."""
    body = {"model": "model", "prompt": "some words", "max_tokens": 10, "temperature": 0}
    before = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    early = int(count * SETTLED)
    asyncio.run(many(server.url, early, seed, counts, fuzz=fuzz))
    settled = held(server)
    asyncio.run(many(server.url, count - early, seed + 1, counts, fuzz=fuzz))
    end, wrong = held(server), counts["5xx"]
    for name, (memory, descriptors, threads) in end.items():
        was = settled[name]
        held_now = f"{memory:.1f} MiB, descriptors {was[1]} to {descriptors}, threads {was[2]} to {threads}"
        print(f"{name}: {was[0]:.1f} to {held_now}")
        wrong += memory > was[0] + GROWTH or descriptors > was[1] + 2 or threads > was[2]
    after = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    wrong += after != before
    kind = "fuzzed requests" if fuzz else "requests"
    print(f"{count:,} {kind} in {time.monotonic() - begun:.0f} s: {dict(counts)}; {wrong} wrong", flush=True)
    return wrong


def probe(url: str) -> None:
    """In a process of its own: ask for something small until stdin ends, then tell how long each answer took."""
    took: list[float] = []

    async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any] | None) -> None:
        while True:
            begun = time.monotonic()
            await client.request("GET" if body is None else "POST", path, json=body)
            took.append(time.monotonic() - begun)
            await asyncio.sleep(0.005)

    async def ask_all() -> None:
        asks = [("/health", None), ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            tasks = [asyncio.ensure_future(ask(client, *each)) for each in asks]
            while len(took) < 30:
                await asyncio.sleep(0.01)
            took.clear()
            print("begun", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            for each in tasks:
                each.cancel()

    asyncio.run(ask_all())
    print(json.dumps(sorted(took)))


def probed(url: str, work: Callable[[], Any]) -> list[float]:
    """The seconds that small requests took while `work` went on, in order."""
    words = [sys.executable, "-m", "tests.soak.serving", "--probe", url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        work()
        found: list[float] = json.loads(process.communicate()[0])
        return found or [0.0]


def told(took: list[float]) -> str:
    """Percentiles in milliseconds."""
    return ", ".join(
        f"p{at:g} {1000 * took[min(len(took) - 1, int(len(took) * at / 100))]:.0f}" for at in (50, 99, 100)
    )


def send(url: str, path: str, body: bytes, statuses: list[int]) -> None:
    """One large body."""
    headers = {"Content-Type": "application/json"}
    statuses.append(httpx.post(f"{url}/v1/{path}", content=body, headers=headers, timeout=120).status_code)


def delays(server: Server) -> int:
    """How many large bodies keep others waiting for too long."""
    wrong = 0
    for name, (path, body) in large(BODY).items():
        best, loud = float("inf"), [0.0]
        for _ in range(TRIES):
            if best <= DELAY_S:
                break
            quiet = probed(server.url, lambda: time.sleep(0.5))

            status: list[int] = []
            loud = probed(server.url, partial(send, server.url, path, body, status))
            best = min(best, loud[-1] - quiet[-1])
        wrong += best > DELAY_S or status[0] >= 500
        print(f"{name}: {len(body):,} bytes, {status[0]}; others took {told(loud)} ms, {told(quiet)} with no such body")
    return wrong


def floods(server: Server, count: int, seed: int) -> int:
    """So many large bodies, by four clients, and what has gone wrong."""
    bodies, counts, begun, start = [*large(BODY).values()], Counter[str](), time.monotonic(), held(server)
    middle: list[dict[str, tuple[float, int, int]]] = []

    async def client_of(number: int, numbers: Any) -> None:
        draw = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for at in numbers:
                path, body = draw.choice(bodies)
                answer = await client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
                counts[f"{answer.status_code // 100}xx"] += 1
                if at == int(count * SETTLED):
                    middle.append(held(server))

    async def clients() -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(client_of(number, numbers) for number in range(4)))

    took = probed(server.url, lambda: asyncio.run(clients()))
    end, wrong = held(server), counts["5xx"]
    for name, (memory, descriptors, threads) in end.items():
        was, settled = start[name], middle[0][name]
        change = f"{was[0]:.1f} at the start, {settled[0]:.1f} after a quarter, {memory:.1f} MiB at the end"
        print(f"{name}: {change}; descriptors {descriptors}, threads {threads}")
        wrong += memory > was[0] + BACK or memory > settled[0] + GROWTH or descriptors > settled[1] + 2
    seconds = time.monotonic() - begun
    print(f"{count:,} large bodies in {seconds:.0f} s: {dict(counts)}; others took {told(took)} ms; {wrong} wrong")
    return wrong


def main() -> int:
    """Exit code 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--fuzz", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe", metavar="URL", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.probe:
        probe(chosen.probe)
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(write_chat_model(Path(folder) / "model"), "--device", "cpu") as server,
    ):
        wrong = soak(server, chosen.count, chosen.seed, fuzz=False) if chosen.count else 0
        wrong += soak(server, chosen.fuzz, chosen.seed, fuzz=True) if chosen.fuzz else 0
        code = server.stop()
    if chosen.large:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(longer(write_chat_model(Path(folder) / "model")), "--device", "cpu") as server,
        ):
            wrong += delays(server) + floods(server, chosen.large, chosen.seed)
    print(f"exit code {code}")
    return int(bool(wrong) or code != 130)


if __name__ == "__main__":
    sys.exit(main())

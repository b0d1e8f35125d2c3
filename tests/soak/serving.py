"""Many requests to `genesis serve`, good and bad, after which nothing may have grown and all answers are as they were.

    .venv/bin/python -m tests.soak.serving --count 10000 --fuzz 100000

A tiny model on the CPU. Some clients stream, some leave before the end; fuzzed bodies are good ones with parts changed,
removed or cut. An answer of 5xx, a server that ends, or growth of memory, descriptors or threads is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.cli.chat_model import write_chat_model
from tests.serving.server import Server, serving

CLIENTS = 24
GROWTH = 16.0  # MiB of a process between the first quarter and the end
SETTLED = 0.25
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
        headers = {"Content-Type": "application/json"}
        answer = await client.post(f"/v1/{path}", content=spoilt(draw, body), headers=headers)
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


def main() -> int:
    """Exit code 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--fuzz", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(write_chat_model(Path(folder) / "model"), "--device", "cpu") as server,
    ):
        wrong = soak(server, chosen.count, chosen.seed, fuzz=False) if chosen.count else 0
        wrong += soak(server, chosen.fuzz, chosen.seed, fuzz=True) if chosen.fuzz else 0
        code = server.stop()
    print(f"exit code {code}")
    return int(bool(wrong) or code != 130)


if __name__ == "__main__":
    sys.exit(main())

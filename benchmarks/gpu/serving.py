"""`genesis serve` under load: tokens a second with many clients against the engine's own, and the time to the first.

    python -m benchmarks.gpu.serving --size 0.5B --clients 64 --seconds 60 --out FILE
    python -m benchmarks.gpu.serving --size tiny --device cpu --seconds 10        # a check of this script

Weights are random. First the engine runs alone, in a process of its own, with as many rows as the server has and with
requests that always wait: the same prompts and lengths, so that prompts count in both; and a batch without prompts, for
comparison. Then clients ask the server, each its next question as soon as it has an answer: first for whole answers,
then for streams. Tokens are those of requests that end within the time, after a warm-up. `cpu` is the time that a token
costs the engine's process and that of HTTP: where HTTP's share of a second comes near to one, it is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import genesis_models
from benchmarks.results import columns, rows_table, write_report
from genesis.backend import as_device
from genesis.data.tokenizer import train_bpe
from genesis_cli.session.inference import opened
from genesis_cli.session.preparation import resolve_device
from genesis_models.engine import Request, Sampling
from genesis_models.generate import GPU_ROWS, ROWS, engine_for
from genesis_models.source import find_source
from tests.serving.server import Server, serving

TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, SHORTEST, LONGEST = 128, 64, 192  # tokens of a prompt; of an answer, drawn evenly between
CONTEXT = 512
QUESTIONS = 512  # different ones
WARM_UP_S = 5.0
WARM_UP_ROUNDS = 4  # requests of each row


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        processes: in which the clients run, so that they are not the limit.
    """

    folder: str
    device: str
    dtype: str
    clients: int
    processes: int
    seconds: float

    @property
    def rows(self) -> int:
        """As the server has."""
        return ROWS if self.device == "cpu" else GPU_ROWS


@dataclass(frozen=True)
class Done:
    """A request that has ended: when, its tokens, the seconds to its first text, and its chunks."""

    at: float
    tokens: int
    first: float
    chunks: int


def write_model(size: str, folder: Path) -> Path:
    """Random weights, in bfloat16 but for the tiny one's, and a tokenizer in which each id of the model is a text."""
    raw = TINY if size == "tiny" else genesis_models.preset(size)
    dtype = "float32" if size == "tiny" else "bfloat16"
    genesis_models.save(genesis_models.build(raw, seed=0, dtype=dtype), folder)
    files = train_bpe(["a few words"], vocab_size=257).files()
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"Ġw{id}": id for id in range(len(vocabulary), raw["vocab_size"])}
    for name, data in (files | {"tokenizer.json": json.dumps(content).encode()}).items():
        (folder / name).write_bytes(data)
    return folder


def questions(vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each answer has."""
    draw = np.random.default_rng(0)
    ids = draw.integers(1, vocab_size, (QUESTIONS, PROMPT)).tolist()
    return [*zip(ids, draw.integers(SHORTEST, LONGEST + 1, QUESTIONS).tolist(), strict=True)]


# --- The engine alone -------------------------------------------------------------------------------------------------


def engine_alone(job: Job) -> dict[str, float]:
    """Tokens a second of the engine: `with_prompts`, and in a batch of which all prompts are read."""
    model, _ = opened(find_source(job.folder), resolve_device(job.device), job.dtype)
    asked = questions(model.config.vocab_size)
    engine = engine_for(model, [Request([0], Sampling(0.0), CONTEXT - 1)] * job.rows)
    for _ in engine.run(Request(ids, Sampling(0.0), count) for ids, count in asked[: WARM_UP_ROUNDS * job.rows]):
        pass  # kernels are compiled, and graphs captured
    begun = time.perf_counter() + WARM_UP_S
    end = begun + job.seconds

    def requests() -> Iterator[Request]:
        number = 0
        while time.perf_counter() < end:
            ids, count = asked[number % QUESTIONS]
            yield Request(ids, Sampling(0.0), count)
            number += 1

    tokens = sum(begun <= time.perf_counter() < end for _ in engine.run(requests()))
    batch = [Request(ids, Sampling(0.0), LONGEST) for ids, _ in asked[: job.rows]]
    seen, times = set[int](), list[float]()
    for token in engine.run(batch):
        seen.add(token.request)
        if len(seen) == job.rows:
            times.append(time.perf_counter())
    return {"with_prompts": tokens / job.seconds, "batch": (len(times) - 1) / (times[-1] - times[0])}


# --- Clients ----------------------------------------------------------------------------------------------------------


def ask_on(url: str, first: int, count: int, end: float, vocab_size: int, stream: bool) -> list[Done]:
    """What `count` clients of one process get until `end`, in the seconds of `time.time`."""
    return asyncio.run(_ask_together(url, range(first, first + count), end, questions(vocab_size), stream))


async def _ask_together(
    url: str, numbers: range, end: float, asked: list[tuple[list[int], int]], stream: bool
) -> list[Done]:
    found: list[Done] = []

    async def client(number: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.time() < end:
            ids, count = asked[number * 7 % QUESTIONS]
            body = {"model": "model", "prompt": ids, "max_tokens": count, "temperature": 0, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            found.append(await _answer(reader))
            number += len(numbers) * 31 + 1
        writer.close()

    await asyncio.gather(*(client(number) for number in numbers))
    return found


async def _answer(reader: asyncio.StreamReader) -> Done:
    """One answer. Raises: AssertionError where it is an error."""
    begun = time.time()
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head + await reader.read(1000)
    if b"transfer-encoding: chunked" not in head:
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        value, now = json.loads(await reader.readexactly(length)), time.time()
        return Done(now, value["usage"]["completion_tokens"], now - begun, 0)
    first, chunks, last = 0.0, 0, b""
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size + 2)
        first = first or time.time() - begun
        chunks += 1
        last = data if b'"usage"' in data else last
    await reader.readline()
    event = next(line for line in last.split(b"\n\n") if b'"usage"' in line)
    usage = json.loads(event.strip().removeprefix(b"data: "))["usage"]
    return Done(time.time(), usage["completion_tokens"], first, chunks)


def cpu_seconds(server: Server) -> dict[str, float]:
    """What the engine's process and that of HTTP have used."""
    found = {}
    for name, pid in (("engine", server.process.pid), ("http", server.children()[0])):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def loaded(job: Job, server: Server, vocab_size: int, *, stream: bool) -> dict[str, Any]:
    """The server with all clients asking."""
    begun = time.time() + WARM_UP_S
    each = job.clients // job.processes
    with ProcessPoolExecutor(job.processes, multiprocessing.get_context("spawn")) as pool:
        work = [
            pool.submit(ask_on, server.url, n * each, each, begun + job.seconds, vocab_size, stream)
            for n in range(job.processes)
        ]
        time.sleep(max(0.0, begun - time.time()))
        before = cpu_seconds(server)
        time.sleep(max(0.0, begun + job.seconds - time.time()))
        after = cpu_seconds(server)
        done = [one for part in work for one in part.result() if begun <= one.at < begun + job.seconds]
    tokens = sum(one.tokens for one in done)
    first = [float(np.percentile([one.first for one in done], share)) for share in (50, 95, 99)]
    cpu = {name: after[name] - before[name] for name in after}
    return {
        "asked": "streamed" if stream else "whole answers",
        "requests": len(done),
        "tokens_per_second": tokens / job.seconds,
        **dict(zip(("first", "first_95", "first_99"), first, strict=True)),
        "tokens_per_chunk": tokens / max(sum(one.chunks for one in done), 1) if stream else None,
        "engine_cpu": cpu["engine"] / tokens,
        "http_cpu": cpu["http"] / tokens,
        "http_share": cpu["http"] / job.seconds,
    }


# --- All --------------------------------------------------------------------------------------------------------------


COLUMNS = columns(
    asked=("asked for", "text", "What clients ask the server for, or the engine alone."),
    requests=("requests", "count", "Requests that ended within the time."),
    tokens_per_second=("tokens/s", "token/s", "Of all rows."),
    share=("of the engine", "share", "Of the engine's rate alone, with prompts."),
    first=("first", "s", "Median time to the first text, or to the whole answer."),
    first_95=("95 %", "s", "The same for 95 of 100 requests."),
    first_99=("99 %", "s", "The same for 99 of 100 requests."),
    tokens_per_chunk=("tokens a chunk", "count", "Mean number of tokens that a chunk of a stream holds."),
    engine_cpu=("engine CPU", "s", "Processor time of the engine's process for a token."),
    http_cpu=("HTTP CPU", "s", "Processor time of the HTTP process for a token."),
    http_share=("HTTP of a core", "share", "Of one core that the HTTP process uses."),
)


def measured(job: Job, vocab_size: int) -> list[dict[str, Any]]:
    """The engine alone, and the server whole and streamed, with their shares of it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        alone = pool.submit(engine_alone, job).result()
    rows: list[dict[str, Any]] = [
        {"asked": "engine alone", "tokens_per_second": alone["with_prompts"], "share": 1.0},
        {"asked": "engine alone, without prompts", "tokens_per_second": alone["batch"]},
    ]
    words = ["--device", job.device, "--dtype", job.dtype, "--context", str(CONTEXT)]
    with serving(Path(job.folder), *words) as server:
        loaded(replace(job, seconds=WARM_UP_S), server, vocab_size, stream=False)
        for stream in (False, True):
            rows.append(loaded(job, server, vocab_size, stream=stream))
            rows[-1]["share"] = rows[-1]["tokens_per_second"] / alone["with_prompts"]
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B", help="a published one, or tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="in which the clients run")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    chosen = parser.parse_args()
    if chosen.clients % chosen.processes:
        parser.error("--processes must divide --clients")
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(chosen.size, Path(place) / "model")
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        job = Job(str(folder), chosen.device, chosen.dtype, chosen.clients, chosen.processes, chosen.seconds)
        made = rows_table("load", f"{chosen.clients} clients", COLUMNS, measured(job, vocab_size))
    settings = {"size": chosen.size, "clients": chosen.clients, "rows": job.rows}
    write_report(chosen.out, "serving", as_device(chosen.device), [made], settings)


if __name__ == "__main__":
    main()

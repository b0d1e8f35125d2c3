"""`genesis serve` under load: tokens a second compared with the engine alone, and the time to the first token.

    python -m benchmarks.gpu.serving --size 0.5B --clients 64 --seconds 60 --out FILE
    python -m benchmarks.gpu.serving --size tiny --device cpu --seconds 10        # a check of this script

Weights are random. First the engine runs alone in its own process, with as many rows as the clients can use in the
server, and with requests always waiting. It gets the same prompts and lengths as the server; then one batch is timed
without its prompts, for comparison. Then clients query the server, each sending its next request as soon as it has an
answer: first for whole answers, then for streams. After a warm-up, tokens count if their request ends within the time.
The CPU columns are the processor time of a token in the engine's and in the HTTP process. HTTP is the limit if it uses
nearly a whole core.
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
PROMPT, SHORTEST, LONGEST = 128, 64, 192  # tokens of a prompt; bounds of an answer's tokens
CONTEXT = 512
QUESTIONS = 512  # number of different prompts
WARM_UP_S = 5.0
WARM_UP_ROUNDS = 4  # requests per row


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        processes: number of processes that share the clients, so that clients are not the limit.
    """

    folder: str
    device: str
    dtype: str
    clients: int
    processes: int
    seconds: float

    @property
    def rows(self) -> int:
        """The rows of the server's engine that the clients can use."""
        return min(self.clients, ROWS if self.device == "cpu" else GPU_ROWS)


@dataclass(frozen=True)
class Done:
    """A request that has ended: time of its end, tokens, seconds to its first text, number of chunks."""

    at: float
    tokens: int
    first: float
    chunks: int


def write_model(size: str, folder: Path) -> Path:
    """Write random weights (bfloat16; float32 if tiny), and a tokenizer with a text for every id of the model."""
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
    """Prompts, each with the number of tokens of its answer."""
    draw = np.random.default_rng(0)
    ids = draw.integers(1, vocab_size, (QUESTIONS, PROMPT)).tolist()
    return [*zip(ids, draw.integers(SHORTEST, LONGEST + 1, QUESTIONS).tolist(), strict=True)]


# --- The engine alone -------------------------------------------------------------------------------------------------


def engine_alone(job: Job) -> dict[str, float]:
    """Tokens a second of the engine: `with_prompts`, and in a `batch` after all its prompts were processed."""
    model, _ = opened(find_source(job.folder), resolve_device(job.device), job.dtype)
    asked = questions(model.config.vocab_size)
    engine = engine_for(model, [Request([0], Sampling(0.0), CONTEXT - 1)] * job.rows)
    for _ in engine.run(Request(ids, Sampling(0.0), count) for ids, count in asked[: WARM_UP_ROUNDS * job.rows]):
        pass  # compiles kernels and captures graphs
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
    """The requests that `count` clients of one process end until `end`, in seconds of `time.time`."""
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
    """Read one answer. Raises: AssertionError: the server returned an error."""
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
    """CPU seconds that the engine's and the HTTP process have used."""
    found = {}
    for name, pid in (("engine", server.process.pid), ("http", server.children()[0])):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def loaded(job: Job, server: Server, vocab_size: int, *, stream: bool) -> dict[str, Any]:
    """Measure the server under the load of all clients."""
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
    asked=("asked for", "text", "What clients request from the server, or the engine alone."),
    requests=("requests", "count", "Requests that ended within the time."),
    tokens_per_second=("tokens/s", "token/s", "Tokens per second of all rows."),
    share=("of the engine", "share", "Rate as a share of the engine's alone, with prompts."),
    first=("first", "s", "Median time to the first text, or to the whole answer."),
    first_95=("95 %", "s", "Time within which 95 of 100 requests get it."),
    first_99=("99 %", "s", "Time within which 99 of 100 requests get it."),
    tokens_per_chunk=("tokens a chunk", "count", "Mean number of tokens in a chunk of a stream."),
    engine_cpu=("engine CPU", "s", "Processor time of the engine's process for a token."),
    http_cpu=("HTTP CPU", "s", "Processor time of the HTTP process for a token."),
    http_share=("HTTP of a core", "share", "Share of one core that the HTTP process uses."),
)


def measured(job: Job, vocab_size: int) -> list[dict[str, Any]]:
    """The rows: the engine alone, then the server with whole and with streamed answers."""
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
    parser.add_argument("--size", default="0.5B", help="a preset, or tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="processes that share the clients")
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

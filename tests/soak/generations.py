"""Many generations of mixed lengths, after which nothing may have grown: memory, descriptors, threads, objects, graphs.

    .venv/bin/python -m tests.soak.generations --count 10000 [--device cuda]

Runs a tiny model. Requests differ in the lengths of prompt and continuation, in how tokens are drawn, in how many run
together, in what ends them; some are cancelled, some fail, and some are left before their end, as by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

import genesis_models
from genesis import cuda
from genesis.backend.cpu import pool
from genesis.errors import UsageError
from genesis_models.engine import Request, Runner, Sampling
from genesis_models.generate import engine_for
from tests.models.golden import golden

__all__ = ["Held", "generations", "held"]

LONGEST, NEW, ROWS = 100, 12, 8  # tokens of a prompt and of its continuation, sequences together
MEBIBYTE = 1 << 20
GROWTH = 8.0  # MiB of the process between the middle and the end: allocators keep arenas


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    rss: float  # MiB
    descriptors: int
    threads: int
    objects: int
    pooled: int  # bytes of arrays that are in use
    allocated: int  # on the GPU
    reserved: int

    def __str__(self) -> str:
        return (
            f"{self.rss:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads, {self.objects:,} objects,"
            f" {self.pooled:,} bytes in arrays, {self.allocated:,} of {self.reserved:,} on the GPU"
        )

    def grown(self, before: Held, *, objects: int = 0) -> list[str]:
        """What there is more of than before; `objects` more are allowed."""
        allowed = Held(GROWTH, 0, 0, objects, 0, 0, 0)
        names = self.__dataclass_fields__
        return [
            f"{name}: {earlier} became {now}"
            for name, now, earlier, more in zip(names, astuple(self), astuple(before), astuple(allowed), strict=True)
            if now > earlier + more
        ]


def held(device: str) -> Held:
    """What this process holds now, after a collection."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE
    on_gpu = (cuda.memory_allocated(device), cuda.memory_reserved(device)) if device != "cpu" else (0, 0)
    descriptors, objects = len(os.listdir("/proc/self/fd")), len(gc.get_objects())
    return Held(resident, descriptors, threading.active_count(), objects, pool.allocated, *on_gpu)


def generations(
    model: genesis_models.CausalLM, start: int = 0, longest: int = LONGEST, new: int = NEW
) -> Iterator[int]:
    """Generates without end; gives how many requests are done after each round.

    Args:
        start: decides the first round.
        longest, new: tokens of a prompt and of its continuation are below these.
    """
    done = 0
    for number in itertools.count(start):
        rng = np.random.default_rng(number)
        requests = [_request(rng, model.config.vocab_size, longest, new) for _ in range(int(rng.integers(1, 2 * ROWS)))]
        engine = engine_for(model, requests, rows=ROWS)
        _run(engine, requests, number % 7)
        done += len(requests)
        yield done


def _request(rng: np.random.Generator, vocabulary: int, longest: int, new: int) -> Request:
    length, kind = int(rng.integers(1, longest)), int(rng.integers(4))
    sampling = (
        Sampling(0.0),
        Sampling(1.0, seed=int(rng.integers(100))),
        Sampling(0.8, top_k=9, top_p=0.9),
        Sampling(1.2, min_p=0.01, repetition_penalty=1.2),
    )[kind]
    ids, stop = rng.integers(0, vocabulary, length).tolist(), frozenset(rng.integers(0, vocabulary, 3).tolist())
    return Request(ids, sampling, int(rng.integers(0, new)), stop, int(rng.integers(10)))


def _run(engine: Runner, requests: list[Request], how: int) -> None:
    """All of them; or with a cancellation, a request that is refused, or an end in the middle."""
    if how == 1:
        requests = [*requests, Request([], Sampling(0.0), 1)]
    tokens = engine.run(iter(requests))
    with contextlib.suppress(UsageError):
        for count, token in enumerate(tokens):
            if how == 2 and count == 3 and token.finish is None:
                engine.cancel(token.request)
            if how == 3 and count == 5:
                tokens.close()  # type: ignore[attr-defined]
                break


def main() -> int:
    """Look at a tenth, and at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    model = genesis_models.load(golden("qwen3-tied").folder, device=given.device)
    early: Held | None = None
    for done in generations(model):
        if early is None and done >= given.count // 4:
            early = held(given.device)
            print(f"after {done:,}: {early}", flush=True)
        if done >= given.count:
            break
    assert early is not None
    last = held(given.device)
    print(f"after {done:,}: {last}")
    grown = last.grown(early, objects=200)
    print("\n".join(["grown:", *grown]) if grown else "nothing has grown")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())

"""The Genesis side of generation.py: the engine on a GPU, as `genesis generate` uses it."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import genesis
import genesis_models
from benchmarks.gpu.lora_genesis import config_of
from genesis import cuda
from genesis.backend import as_device
from genesis.measure.limits import copy_rate
from genesis_models.engine import Request, Sampling, device_rows
from genesis_models.engine.device import DeviceEngine
from genesis_models.weights import quantize

DRAWS = {"greedy": Sampling(0.0), "sampled": Sampling(0.8, top_k=50, top_p=0.95)}
WARM_UPS = 3  # the third pass over prompts is captured


def prepare(job: dict[str, Any]) -> None:
    """Write a model, with weights wide enough that greedy tokens vary."""
    model = genesis_models.build(config_of(job["size"]), seed=0, device=job["device"], dtype=job["dtype"])
    with genesis.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(3)
    genesis_models.save(model, Path(job["folder"]) / "base")


def prompts(case: dict[str, Any], vocabulary: int) -> np.ndarray:
    """Token ids `[batch, prompt]`, the same on all sides."""
    return np.random.default_rng(case["batch"]).integers(0, vocabulary, (case["batch"], case["prompt"]))


class Opened:
    """A model and its engines, one for each shape."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.on_gpu = job, job["device"] != "cpu"
        self.model: Any = genesis_models.load(Path(job["folder"]) / "base", device=job["device"], dtype=job["dtype"])
        if job["weights"] != "auto":
            quantize(self.model, job["weights"])
        self.bandwidth = copy_rate(as_device(job["device"]))
        self.key: tuple[int, int, str] | None = None  # of the previous case
        self.ends: list[cuda.Event] = []
        call = device_rows.Step.__call__

        def timed(step: Any) -> None:
            call(step)
            if self.on_gpu:
                self.ends.append(cuda.Event(enable_timing=True))
                self.ends[-1].record()

        device_rows.Step.__call__ = timed  # type: ignore[method-assign]

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """The times of a case. Calls before it capture the graphs of a new shape."""
        key = case["batch"], case["prompt"] + case["new"], case["draw"]
        if key != self.key:
            self.key = key
            for _ in range(WARM_UPS):
                self.run(case)
        found = self.run(case)
        if self.on_gpu:
            found["share"] = self.bytes(case) / found["token"] / self.bandwidth
        return found

    def engine(self, case: dict[str, Any]) -> DeviceEngine:
        """A new engine, which reuses the previous engine's graphs."""
        size = case["prompt"] + case["new"]
        how = {"cache": self.job["cache"], "exact": self.job["exact"]}
        return DeviceEngine(self.model, rows=case["batch"], capacity=size, **how)

    def requests(self, case: dict[str, Any]) -> list[Request]:
        ids = prompts(case, self.model.config.vocab_size).tolist()
        return [Request(each, DRAWS[case["draw"]], case["new"], sequence=i) for i, each in enumerate(ids)]

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Generate once; return times in seconds and tokens."""
        engine, requests = self.engine(case), self.requests(case)
        tokens: list[list[int]] = [[] for _ in requests]
        self.ends.clear()
        if self.on_gpu:
            cuda.synchronize()
        begun, first = time.perf_counter(), 0.0
        for drawn in engine.run(requests):
            first = first or time.perf_counter() - begun
            tokens[drawn.request].append(drawn.id if drawn.id is not None else -1)
        whole = time.perf_counter() - begun
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(self.ends)]
        token = statistics.median(times) / 1e3 if times else (whole - first) / (case["new"] - 1)
        return {"token": token, "whole": whole, "first": first, "tokens": tokens}

    def bytes(self, case: dict[str, Any]) -> float:
        """Bytes that a step reads halfway through generation: all weights, and the keys and values of all rows."""
        config, embedding = self.model.config, self.model.model.embed_tokens.weight
        weights = sum(each.nbytes for each in (*self.model.parameters(), *self.model.buffers()))
        if self.model.lm_head is not None:  # a step reads one embedding row per sequence
            weights -= embedding.nbytes
        size = 1 if self.job["cache"] == "fp8" else embedding.dtype.itemsize
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
        return weights + case["batch"] * token * (case["prompt"] + case["new"] / 2)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("prepare"):
        prepare(given)
        print("{}", flush=True)
    else:
        opened = Opened(given)
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(opened.answer(json.loads(line))), flush=True)

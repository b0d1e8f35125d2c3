"""The output head's losses and gradients where some rows have no label, on one GPU: milliseconds by graph replay.

    python -m benchmarks.gpu.head [--models 0.5B,1.7B,smol-135M] [--shares 1,0.7,0.3,0.05,0] [--out JSON]

A model is its width and vocabulary, with 16,384 tokens in rows of 4,096. Samples of 50 to 750 tokens begin with a
prompt without labels. One graph runs all shares, and its results must be those of a call without a graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import genesis
from benchmarks.gpu.lora_step import listed
from benchmarks.results import columns, rows_table, write_report
from genesis import cuda
from genesis.backend import as_device
from genesis.op import registry

MODELS = {"0.5B": (896, 151936), "1.7B": (2048, 151936), "smol-135M": (576, 49152)}  # width and vocabulary
ROWS, LENGTH, REPLAYS = 4, 4096, 7
ATTRS: dict[str, Any] = {"ignore_index": -100, "shift": 1}
COLUMNS = columns(
    model=("model", "text", "Width and vocabulary."),
    op=("op", "text", "Loss and gradients, gradients of log-probabilities, or log-probabilities alone."),
    share=("share", "ratio", "Share of a sample that has labels."),
    labels=("labels", "count", "Rows with a label, of 16,384."),
    time=("time", "s", "Median of the replays."),
    ratio=("ratio", "ratio", "Time / that of the first share."),
)


def labels_of(rng: np.random.Generator, share: float, classes: int) -> genesis.Tensor:
    """Labels `[ROWS, LENGTH]`; the first part of each sample has none."""
    found, at = rng.integers(0, classes, ROWS * LENGTH), 0
    while at < found.size:
        size = int(rng.integers(50, 751))
        found[at : at + round(size * (1 - share))] = -100
        at += size
    return genesis.from_numpy(found.reshape(ROWS, LENGTH)).to("cuda")


def case(name: str, op: str, shares: list[float]) -> list[dict[str, Any]]:
    """Capture an op once, replay it for each share, and return the rows."""
    width, classes = MODELS[name]
    genesis.manual_seed(0)
    rng = np.random.default_rng(0)
    x = genesis.randn(ROWS * LENGTH, width, device="cuda").to(dtype="bfloat16")
    weight = (genesis.randn(classes, width, device="cuda") * width**-0.5).to(dtype="bfloat16")
    g, labels = genesis.rand(ROWS * LENGTH, device="cuda"), labels_of(rng, 1, classes)
    calls: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "loss": ("linear_cross_entropy", (), {"with_grads": True, "mean": True}),
        "backward": ("linear_token_log_probs_backward", (g.array,), {"temperature": 1.0, "needs": (True, True)}),
        "log_probs": ("linear_token_log_probs", (), {"temperature": 1.0, "with_dx": True}),
    }
    kernel, first, attrs = calls[op]

    def call() -> list[genesis.Tensor]:
        found = registry[kernel](*first, x.array, weight.array, labels.array, **ATTRS, **attrs)
        return [genesis.Tensor.wrap(each) for each in found]

    call()
    graph, rows = cuda.CUDAGraph(), list[dict[str, Any]]()
    with cuda.graph(graph):
        results = call()
    for share in shares:
        labels.copy_(labels_of(rng, share, classes))
        seconds = []
        for _ in range(REPLAYS):
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # hides the time of launching the next one
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        if share and not all((a == b).all().item() for a, b in zip(results, call(), strict=True)):
            sys.exit(f"{name} {op} {share}: the graph's results are others than a call's")
        count, time = int((labels[:, 1:] >= 0).sum().item()), statistics.median(seconds)
        rows.append({"model": name, "op": op, "share": share, "labels": count, "time": time})
        rows[-1]["ratio"] = time / rows[0]["time"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ops", default="loss,backward,log_probs")
    parser.add_argument("--shares", default="1,0.7,0.3,0.05,0")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    shares, rows = [float(share) for share in listed(chosen.shares)], list[dict[str, Any]]()
    for name in listed(chosen.models):
        for op in listed(chosen.ops):
            rows += case(name, op, shares)
            cuda.empty_cache()
    made = rows_table("head", "The head where some rows have no label", COLUMNS, rows)
    write_report(chosen.out, "head", as_device("cuda"), [made])


if __name__ == "__main__":
    main()

"""Draws from the logits of large vocabularies, in a captured graph, beside torch's argmax, topk and sort + multinomial.

    python -m benchmarks.gpu.sample [--vocabularies V …] [--settings PART]

Tokens are checked against the reference first. Logits are bf16, eight sets in turn: a peaked row has a tail like that
of a language model (logits fall with the logarithm of the rank), a flat one is normal. Times are microseconds a call,
medians over replays of a graph; "next" is the op `next_tokens` after a draw.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.timing import backend, gpu_us, shared_array, torch_gpu_us
from genesis.array import Array, from_numpy
from genesis.ops.next_tokens import next_tokens
from genesis.ops.sample import sample

SETS = 8
SETTINGS = {  # temperature, top-p, min-p, penalty; top-k
    "greedy": ((0, 1, 0, 1), 0),
    "0.8, top-p 0.95, top-k 50": ((0.8, 0.95, 0, 1), 50),
    "temperature 1": ((1, 1, 0, 1), 0),
    "0.8, top-p 0.95": ((0.8, 0.95, 0, 1), 0),
    "1, top-k 300": ((1, 1, 0, 1), 300),
    "1, min-p 0.05": ((1, 1, 0.05, 1), 0),
    "1, top-k 5000": ((1, 1, 0, 1), 5000),
}


def peaked(rows: int, vocabulary: int) -> torch.Tensor:
    """Logits [rows, vocabulary] of ranks in random order."""
    ranks = torch.stack([torch.randperm(vocabulary, device="cuda") for _ in range(rows)]) + 1
    return (20 - 1.6 * torch.log(ranks.float()) + 0.7 * torch.randn(rows, vocabulary, device="cuda")).bfloat16()


def flat(rows: int, vocabulary: int) -> torch.Tensor:
    """Normal logits."""
    return torch.randn(rows, vocabulary, device="cuda").bfloat16()


def device_array(values: np.ndarray) -> Array:
    return shared_array(torch.from_numpy(np.ascontiguousarray(values)).cuda())


def arguments(rows: int, settings: tuple[float, ...], top_k: int) -> list[np.ndarray]:
    keys = np.stack([np.full(rows, 42), np.arange(rows), np.arange(rows) * 7 + 100], 1).astype(np.int64)
    return [keys, np.tile(np.asarray(settings, np.float64), (rows, 1)), np.full(rows, top_k, np.int64)]


def check(logits: Array, inputs: list[np.ndarray], name: str) -> None:
    """Raises: AssertionError where more than one row's token differs (by rounding at a border) from the reference's."""
    found = sample(logits, *map(device_array, inputs))[0].numpy()
    wanted = sample(from_numpy(logits.numpy()), *map(from_numpy, inputs))[0].numpy()
    assert (found != wanted).sum() <= 1, (name, found, wanted)


def sorted_draw(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0.8 and top-p 0.95 as in many sampling loops: a sort of the vocabulary."""
    probabilities, order = torch.softmax(logits.float() / 0.8, -1).sort(-1, descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities > 0.95] = 0
    return order.gather(-1, torch.multinomial(probabilities, 1))


def next_step(rows: int, vocabulary: int) -> Any:
    """A call of `next_tokens` on rows that go on."""
    zeros = np.zeros(rows, np.int64)
    state = [
        zeros, np.zeros(rows, np.float32), np.full((rows, 16), -1), zeros, zeros, np.full(rows, 1 << 40),
        np.zeros((rows, 3), np.int64), np.zeros((rows, vocabulary), bool), np.zeros((64, rows), np.int64),
        np.zeros((64, rows), np.float32), np.zeros(1, np.int64),
    ]  # fmt: skip
    arrays = [device_array(x) for x in state]
    return lambda: next_tokens(*arrays)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[151_936, 128_256])
    parser.add_argument("--settings", default="", help="only those whose names hold this")
    options = parser.parse_args()
    torch.manual_seed(0)
    for vocabulary in options.vocabularies:
        for rows in (1, 8, 32):
            for shape, make in (("peaked", peaked), ("flat", flat)):
                sets = [make(rows, vocabulary) for _ in range(SETS)]
                logits = [shared_array(x) for x in sets]
                line = []
                for name, (settings, top_k) in SETTINGS.items():
                    if options.settings not in name:
                        continue
                    inputs = arguments(rows, settings, top_k)
                    if vocabulary == 151_936 and rows == 8:  # the reference takes long
                        check(logits[0], inputs, name)
                    arrays = [device_array(x) for x in inputs]
                    calls = [lambda x=x, arrays=arrays: sample(x, *arrays) for x in logits]
                    line.append(f"{name} {gpu_us(calls, n=16, replays=7):.1f}")
                print(f"V {vocabulary} B {rows} {shape}: " + " | ".join(line), flush=True)
            if options.settings:
                continue
            seen = device_array(np.zeros((rows, vocabulary), bool))
            arrays = [device_array(x) for x in arguments(rows, (0.8, 0.95, 0, 1.1), 50)]
            calls = [lambda x=x, arrays=arrays, seen=seen: sample(x, *arrays, seen, log_probs=True) for x in logits]
            line = [f"penalty and log-probs {gpu_us(calls, n=16, replays=7):.1f}"]
            line.append(f"next {gpu_us(next_step(rows, vocabulary), n=16, replays=7):.1f}")
            for name, call in (
                ("torch argmax", lambda x: x.argmax(-1)),
                ("topk 50", lambda x: x.topk(50)),
                ("sort + multinomial", sorted_draw),
            ):
                theirs = torch_gpu_us([lambda x=x, call=call: call(x) for x in sets], n=8, replays=7)
                line.append(f"{name} {theirs:.1f}")
            print(f"V {vocabulary} B {rows}: " + " | ".join(line), flush=True)
    backend.driver.synchronize()


if __name__ == "__main__":
    main()

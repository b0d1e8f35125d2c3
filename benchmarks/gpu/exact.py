"""Counts results that differ inside `genesis.exact` on a GPU; none may differ: `python -m benchmarks.gpu.exact`.

Each check computes many rows at once, then some of them alone, in chunks, packed or checkpointed, and compares.
docs/decisions/0014-exact.md states the rules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import genesis
import genesis_models
from genesis import Tensor
from genesis.nn import functional as F
from genesis.op import registry
from genesis_models.registry import preset

ROWS = (1, 2, 3, 16, 17, 33, 64, 100, 300, 512, 1024, 2048, 4096, 6500)
MATMULS = {  # (output, input) features
    "0.5B": ((1152, 896), (896, 896), (896, 4864)), "1.5B": ((2048, 1536), (1536, 8960)), "qwen3": ((4096, 2048),),
    "llama": ((3072, 2048), (2048, 8192)), "gemma-3": ((1536, 1152), (1152, 6912)),
}  # fmt: skip
HEADS = ((896, 151936), (1152, 262144), (2048, 128256))  # hidden size and classes
DOCUMENTS = (1, 2, 63, 64, 65, 300, 700, 1000, 129)
RNG = np.random.default_rng(0)
differing, compared = Counter[str](), Counter[str]()


def rand(*shape: int, scale: float = 1.0, dtype: str = "bfloat16") -> Tensor:
    """Return values of many magnitudes: normal times e^normal."""
    x = genesis.randn(*shape, device="cuda")
    return (x * genesis.randn(*shape, device="cuda").exp() * scale).to(dtype=dtype)


def tally(kind: str, found: Tensor, expected: Tensor) -> None:
    differing[kind] += int((found.float() != expected.float()).sum().item())
    compared[kind] += found.numel()


def compare(kind: str, rows: int, compute: Callable[[int, int], Sequence[Tensor]]) -> None:
    """Compare `compute(begin, end)` for ranges of rows with the same rows of `compute(0, rows)`."""
    whole = compute(0, rows)
    for count in (each for each in ROWS if each <= rows):
        begin = int(RNG.integers(0, rows - count + 1))
        for found, expected in zip(compute(begin, begin + count), whole, strict=True):
            tally(kind, found, expected[begin : begin + count])


def matmuls() -> None:
    for name, sizes in MATMULS.items():
        for n, k in sizes:
            x, w, b, r = rand(8192, k), rand(n, k, scale=k**-0.5), rand(n), rand(8192, n)
            compare(f"matmul, {name}", 8192, lambda i, j, x=x, w=w, b=b: [F.linear(x[i:j], w, b)])
            compare(f"with residual, {name}", 8192, lambda i, j, x=x, w=w, r=r: [F.linear(x[i:j], w, None, r[i:j])])


def norms_and_mlps() -> None:
    for h in (64, 896, 1152, 2048, 5120):
        x, w = rand(8192, h), rand(h)
        compare("norm", 8192, lambda i, j, x=x, w=w: run("rms_norm", x[i:j], w, eps=1e-6))
    for h, f in ((896, 4864), (1536, 8960)):
        args = rand(h), rand(h, f, scale=f**-0.5), None, rand(2 * f, h, scale=4 * h**-0.5)
        x = rand(4096, h)
        compare("MLP", 4096, lambda i, j, x=x, args=args: run("norm_mlp", x[i:j], *args, eps=1e-6))
    for d in (64, 128, 256):
        x, q, k, tables = rand(1, 4096, 12, d), rand(d), rand(d), [rand(4096, d // 2, dtype="float32") for _ in "cs"]

        def rotated(i: int, j: int, x: Tensor = x, q: Tensor = q, k: Tensor = k, t: list[Tensor] = tables) -> Any:
            inputs = x[:, i:j], q, k, *(each[i:j] for each in t)
            return [run("norm_rope", *inputs, heads=8, key_heads=2, eps=1e-6)[0][0]]

        compare("norm and RoPE of heads", 4096, rotated)


def run(name: str, *inputs: Tensor | None, **attrs: Any) -> list[Tensor]:
    outputs = registry[name](*(None if x is None else x.array for x in inputs), **attrs)
    return [Tensor.wrap(each) for each in outputs]


def attention() -> None:
    for d, heads, key_heads in ((64, 14, 2), (128, 16, 8), (256, 4, 1)):
        for window in (0, 512):
            q, k, v = (rand(1, 3000, n, d) for n in (heads, key_heads, key_heads))
            whole = F.attention(q, k, v, window=window)
            for end in (1, 50, 64, 65, 1000, 2048, 2500, 3000):
                for t in (each for each in {1, 2, 16, 40, 64, 200, 1024, end} if each <= end):
                    found = F.attention(q[:, end - t : end], k[:, :end], v[:, :end], window=window)
                    tally(f"attention, heads of {d}", found, whole[:, end - t : end])


def heads() -> None:
    for h, classes in HEADS:
        x, w = genesis.randn(4096, h, device="cuda").to(dtype="bfloat16"), rand(classes, h, scale=h**-0.5)
        labels = genesis.from_numpy(RNG.integers(0, classes, 4096)).to("cuda")

        def scored(i: int, j: int, x: Tensor = x, w: Tensor = w, labels: Tensor = labels) -> list[Tensor]:
            return [F.linear_token_log_probs(x[i:j].reshape(-1, x.shape[1]), w, labels[i:j], temperature=0.7)]

        compare("log-probabilities", 4096, scored)


def models(size: str) -> None:
    """Compare each document alone with packed rows in training, under each activation checkpointing."""
    model = genesis_models.build(preset(size), 0, device="cuda", dtype="bfloat16").train()
    documents = [RNG.integers(0, 50000, n) for n in DOCUMENTS]
    alone = [scores(model, [each])[0] for each in documents]
    for order in (1, -1):
        for how in ("none", "selective", "full"):
            model.activation_checkpointing = how
            with genesis.enable_grad():
                packed = scores(model, documents[::order])[::order]
            for found, expected in zip(packed, alone, strict=True):
                tally(f"packed documents, {size}", found, expected)


def scores(model: genesis_models.CausalLM, documents: Sequence[np.ndarray]) -> list[Tensor]:
    """Pack documents into one row; return the log-probabilities of each document's tokens."""
    begins = np.cumsum([0, *(-(-len(each) // 64) * 64 for each in documents)])
    ids, positions = np.zeros((1, begins[-1]), np.int64), np.arange(begins[-1])[None].copy()
    for begin, each in zip(begins, documents, strict=False):
        ids[0, begin : begin + len(each)], positions[0, begin:] = each, np.arange(begins[-1] - begin)
    sent = [genesis.from_numpy(each).to("cuda") for each in (ids, positions, np.roll(ids, -1))]
    found = F.linear_token_log_probs(model.hidden_states(*sent[:2]), model.head_weight, sent[2]).detach()[0]
    return [found[begin : begin + len(each) - 1] for begin, each in zip(begins, documents, strict=False)]


def main() -> int:
    """Run all checks; return 1 if any bit differs."""
    with genesis.no_grad(), genesis.exact():
        for check in (matmuls, norms_and_mlps, attention, heads):
            check()
        models("0.5B")
        models("qwen3-0.6B")
    for kind, count in compared.items():
        print(f"{kind:32} {differing[kind]:>8,} of {count:>13,} differ")
    return int(any(differing.values()))


if __name__ == "__main__":
    sys.exit(main())

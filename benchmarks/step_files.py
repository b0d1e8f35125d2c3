"""Lists the files of Genesis that a CPU training step enters, which a reader opens to follow it. Run it as a module.

A file is entered when one of its functions is called. The step is the second step of a Qwen3 with two fused layers,
with AdamW, in one thread.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import genesis
import genesis_models
from genesis.backend import CPU
from genesis.backend.cpu import set_threads
from genesis.train.config import OptimConfig
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench_model import RandomTokens

__all__ = ["entered_files"]

ROOTS = {"genesis": genesis, "models": genesis_models}
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}


def entered_files() -> dict[str, int]:
    """Calls in each file, by its path in the repository."""
    set_threads(1)
    model = genesis_models.build(SHAPE)
    model.train()
    loader: Any = RandomTokens(2, 16, SHAPE["vocab_size"])
    state = TrainState(model, build_optimizer(OptimConfig(), model.named_parameters(), 0), loader)
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    batches = [loader.batch(0, index) for index in range(2)]
    take_step(state, batches[:1], 1e-3, 1.0, CPU)
    sys.setprofile(note)
    try:
        take_step(state, batches[1:], 1e-3, 1.0, CPU)
    finally:
        sys.setprofile(None)
    return dict(sorted(_genesis_files(calls).items()))


def _genesis_files(calls: Counter[str]) -> dict[str, int]:
    """Keep the files of Genesis."""
    found = {}
    for name, module in ROOTS.items():
        root = Path(str(module.__file__)).resolve().parent
        for file, count in calls.items():
            path = Path(file).resolve()
            if path.is_relative_to(root):
                found[f"{name}/{path.relative_to(root).as_posix()}"] = count
    return found


if __name__ == "__main__":
    entered = entered_files()
    for path, count in entered.items():
        print(f"{count:6}  {path}")
    print(f"{len(entered)} files, {sum(entered.values()):,} calls")

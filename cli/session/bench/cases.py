"""What is measured: the shape of a preset or a file, batches of random tokens, and the arithmetic of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from genesis.data.loader import Batch
from genesis.errors import UsageError, escape, nearest
from genesis.files.hf import read_json
from genesis_models.config import ModelConfig
from genesis_models.folder import read_config
from genesis_models.registry import PRESETS, parameter_count, preset

FORMULA = "tokens × (6 N + 6 L h S)"
DRAWN = 4  # batches that differ; steps take them in turn


def shape_of(size: str, option: str = "--size", others: Sequence[str] = ()) -> ModelConfig:
    """The shape that a preset, a config.json or a model folder describes; weights are not looked at.

    Args:
        option: where the name was given.
        others: names that the caller knows, for the error's advice.

    Raises:
        UsageError: there is no such size. ModelError: the file is malformed, or of a model that Genesis does not have.
    """
    path = Path(size)
    if size in PRESETS:
        config = ModelConfig.from_dict(preset(size), where=option)
    elif path.is_dir():
        config = read_config(path)
    elif path.is_file():
        config = ModelConfig.from_dict(read_json(path), where=escape(path))
    else:
        what = f"{escape(size)!r} is neither a model size nor a file"
        names = (*PRESETS, *others)
        raise UsageError(what, where=option, next=f"{_nearest(size, names)}sizes: {', '.join(names)}")
    return config


def _nearest(size: str, known: Sequence[str]) -> str:
    """The one whose name holds `size`, or is spelled most like it."""
    holding = [name for name in known if size and size.lower() in name.lower()]
    found = holding[0] if holding else nearest(size, known, 0.5)
    return f"did you mean {found}? " if found else ""


def check_lengths(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Raises: UsageError, for a length at which nothing can be predicted, or beyond the model's positions."""
    most = config.packed_length
    for length in lengths:
        if not 2 <= length <= most:
            what = f"a length of {length} is not between 2 and the model's {most} positions"
            raise UsageError(what, where="--seq-len", next="take lengths in that range")


def step_flops(config: ModelConfig, batch: int, length: int) -> int:
    """Arithmetic operations that a step needs: `FORMULA`, with what is computed again left out.

    N are all parameters (a tied head counts once), each used in a multiplication and an addition forward and in two of
    each backward. Attention takes 12·L·h·S a token, h being all heads' width, of which the causal half counts.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * length
    return batch * length * (6 * parameter_count(config) + attention)


class RandomTokens:
    """Stands for a run's loader: batches of random tokens, each row one document."""

    def __init__(self, batch_size: int, seq_len: int, vocab_size: int) -> None:
        self.batch_size, self.seq_len, self.vocab_size = batch_size, seq_len, vocab_size

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index`; there is no end."""
        b, t = self.batch_size, self.seq_len
        ids = np.random.default_rng((epoch, index)).integers(0, self.vocab_size, (b, t))
        positions = np.broadcast_to(np.arange(t), (b, t))
        return Batch(epoch, index, ids, ids, positions, b * (t - 1), b * t, np.zeros((0, 4), np.int64))

    def batches(self) -> Iterator[Batch]:
        """A few batches in turn, drawn before the first is given."""
        return itertools.cycle([self.batch(0, index) for index in range(DRAWN)])

    def describe(self, batch: Batch) -> list[str]:
        """What is in a batch, for an error about it."""
        return [f"random tokens, batch {batch.index}"]

"""Ranks on a device: the graphs of one process, and what ranks send each other between them, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.cases import Runs, hash_of
from tests.train.runs import Forks

pytestmark = [pytest.mark.host, pytest.mark.slow]

MODEL = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
SETTINGS = (
    f"model.config={json.dumps(MODEL)}",
    *("train.device=cuda", "model.dtype=bfloat16", "train.accumulation_steps=2", "train.batch_size=1"),
    *("data.seq_len=8", "train.steps=4", "data.eval_fraction=0", "eval.every=null", "eval.prompts=[]"),
    "checkpoint.every=null",
)


def test_captured_steps_of_two_ranks(tmp_path: Path) -> None:
    """In the interpreter, one device a process: steps 1 and 2 as they are, 3 captured, 4 replayed."""
    with Forks() as forks:
        runs = Runs(forks, tmp_path)
        found = []
        for ranks in (1, 2):
            fault = ("several", ["interpreted"], ["on_rank", -1, "interpreted"])
            done = runs.forks.run(*runs.words(f"run-{ranks}", ranks, *SETTINGS), fault=fault)
            assert "not captured" not in done.out
            found.append(hash_of(done))
    assert found[0] == found[1]

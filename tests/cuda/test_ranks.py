"""Ranks on a device: the graphs of one process, and what ranks send each other between them, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.cases import Runs, hash_of
from tests.train.runs import Forks

pytestmark = [pytest.mark.host, pytest.mark.slow]

SETTINGS = (
    *("train.device=cuda", "model.dtype=bfloat16", "train.accumulation_steps=2", "train.batch_size=1"),
    *("data.seq_len=16", "train.steps=4", "data.eval_fraction=0", "eval.every=null", "eval.prompts=[]"),
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

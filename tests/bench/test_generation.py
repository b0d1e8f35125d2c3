"""The benchmark of generation: its cases, what it says of rows, and both sides' tokens where torch is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.generation import cases, line, same_beginning
from benchmarks.gpu.generation_genesis import prepare
from benchmarks.gpu.generation_logits import compare, of_genesis

CHOSEN = {"batches": "1,8", "draws": "greedy,sampled", "prompt": 128, "new": 256, "first": 1024, "long": 8192}


def test_batches_of_both_draws_then_the_first_token_and_the_long_prompt() -> None:
    found = [(case["batch"], case["prompt"], case["draw"]) for case in cases(Namespace(**CHOSEN))]
    drawn = [(batch, 128, draw) for batch in (1, 8) for draw in ("greedy", "sampled")]
    assert found == [*drawn, (1, 1024, "greedy"), (1, 8192, "greedy")]
    assert len(cases(Namespace(**CHOSEN | {"first": 0, "long": 0}))) == 4


def test_the_equal_beginning_of_two_batches() -> None:
    assert same_beginning([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 0, 6]]) == 1.5


def test_rows_of_all_kinds() -> None:
    row: dict[str, Any] = {"size": "0.5B", "side": "genesis", "batch": 8, "prompt": 128, "new": 256, "draw": "greedy"}
    measured = row | {"ms": 0.5, "whole_ms": 140.0, "first_ms": 5.0, "share": 0.52, "same": 255.5}
    found = line(measured)
    assert "0.5000 ms/token" in found
    assert "52.0% of copy" in found
    assert "16000 tok/s" in found
    assert line(row).endswith("not run")
    assert line(row | {"error": "no answer in 3 s"}).endswith("no answer in 3 s")
    assert "head/matmul" in line({"kernel": "head/matmul", "us": 60.0, "calls": 1.0, "case": row})


def test_the_genesis_side_answers_a_case(tmp_path: Path) -> None:
    job = {
        "size": "tiny",
        "folder": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "cache": "auto",
        "weights": "int8",
    }
    case = {"batch": 2, "prompt": 5, "new": 4, "draw": "sampled"}
    command = [sys.executable, "-m", "benchmarks.gpu.generation_genesis"]
    for told, text in ((job | {"prepare": True}, ""), (job, json.dumps(case) + "\n")):
        ran = subprocess.run([*command, json.dumps(told)], input=text, capture_output=True, text=True, check=True)
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert [len(tokens) for tokens in answer["tokens"]] == [4, 4]
    assert answer["whole_ms"] >= answer["first_ms"] > 0


def test_distances_of_logits_at_each_position() -> None:
    reference = np.array([[[3.0, 4.0], [0.0, 1.0]]])
    ours, theirs = np.array([[[0.5, 0.0], [0.0, 0.1]]]), np.array([[[0.0, 0.25], [0.1, 0.0]]])
    found = compare(reference + ours, reference + theirs, reference)
    assert found["positions"] == 2
    assert (found["genesis"], found["torch"]) == pytest.approx((0.1, 0.075))
    assert (found["ratio_median"], found["ratio_most"]) == pytest.approx((1.5, 2.0))


def test_logits_of_the_engine_are_those_of_the_text(tmp_path: Path) -> None:
    job = {"size": "tiny", "folder": str(tmp_path), "device": "cpu", "dtype": "float32", "cache": "auto"}
    job["weights"] = "auto"
    prepare(job)
    found = of_genesis(job, {"batch": 2, "prompt": 5, "new": 4, "draw": "greedy"})
    assert found["text"].shape == (2, 9)
    assert np.array_equal(found["reference"].argmax(-1), found["text"][:, 5:])
    assert np.abs(found["ours"] - found["reference"]).max() < 1e-3 * np.abs(found["reference"]).max()

"""`genesis eval --task` against transformers and PEFT, item by item: a model's folder, an adapter's, a merged one's.

A sample; `tests.peers.eval_tasks` made the answers, and compares all golden models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import printed
from tests.cli.eval_tasks import FIXTURE, LARGEST, NEW, write_adapter, write_model, write_task

WANTED: dict[str, list[dict[str, Any]]] = json.loads(FIXTURE.read_text())


def check(name: str, folder: Path, place: Path) -> None:
    out, task = place / "rows.jsonl", write_task(place / "task.jsonl")
    code, _, told = printed("eval", folder, "--task", task, "--max-tokens", NEW, "--out", out, "--device", "cpu")
    assert code == 0, told
    for line, wanted in zip(out.read_text().splitlines(), WANTED[name], strict=True):
        row = json.loads(line)
        if "text" in wanted:
            assert row["text"] == wanted["text"]
        else:
            assert row["scores"] == pytest.approx(wanted["scores"], abs=LARGEST)
            assert row["chosen"] == wanted["scores"].index(max(wanted["scores"]))


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3"])
def test_a_model_answers_as_in_transformers(name: str, tmp_path: Path) -> None:
    check(name, write_model(name, tmp_path / "model"), tmp_path)


def test_an_adapter_and_its_merged_model_answer_as_in_peft(tmp_path: Path) -> None:
    name, merged = "qwen2-tied-dora", tmp_path / "merged"
    folder = write_adapter(name, write_model("qwen2-tied", tmp_path / "base"), tmp_path / "adapter")
    check(name, folder, tmp_path)
    code, _, told = printed("export", folder, "--merge", "--out", merged)
    assert code == 0, told
    check(name, merged, tmp_path)


def test_the_sample_is_of_all() -> None:
    from tests.adapters.golden import NAMES as ADAPTED
    from tests.cli.eval_tasks import ITEMS, MODELS

    assert set(WANTED) == {*MODELS, *ADAPTED} and all(len(rows) == len(ITEMS) for rows in WANTED.values())
    texts = {row["text"] for rows in WANTED.values() for row in rows if "text" in row}
    assert len(texts) > len(WANTED)  # the models say different things

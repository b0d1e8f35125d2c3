"""docs/generation.md: its commands and its code run one after the other, with tiny models for the real ones."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from tests.cli.command import printed
from tests.models.golden import golden
from tests.packaging.tree import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "generation.md").read_text()
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{{ 'assistant: ' }}"


def blocks(kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe(["class Queue: def f(import some words"] * 3, vocab_size=262)
    for name in ("runs/quickstart", "models/chat"):
        genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), name, tokenizer=tokenizer)
    Path("models/chat/chat_template.jinja").write_text(TEMPLATE)
    Path("questions.jsonl").write_text(blocks("jsonl")[0])
    return tmp_path


def test_the_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in blocks("")[0].splitlines() if "<" not in line]
    assert len(lines) == 3
    for line in lines:
        code, _, told = printed(*shlex.split(line)[1:], "--device", "cpu", "--max-tokens", "4")
        assert code == 0, told
    found = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [sorted(each) for each in found] == [
        ["completion", "finish", "prompt", "tokens"],
        ["completion", "finish", "messages", "tokens"],
    ]


def test_the_code_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "generation.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_the_table_has_the_options_of_the_command() -> None:
    _, shown, _ = printed("generate", "--help")
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", shown)) - {"--help", "--no-stream", "--debug"}
    assert options <= set(re.findall(r"--[a-z][\w-]+", GUIDE))

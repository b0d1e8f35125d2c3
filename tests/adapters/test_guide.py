"""docs/fine-tuning.md: its commands run one after the other, on its chats, with a tiny model for the real one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from genesis_cli.main import main
from tests.adapters.golden import logits
from tests.models.golden import FIXTURES
from tests.packaging.tree import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "fine-tuning.md").read_text()
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # a folder of this name goes before the hub
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What a tiny model on a CPU needs besides.
SMALL = {
    "train": ["train.steps=2", "train.epochs=null", "train.batch_size=2", "data.seq_len=256", "train.device=cpu"],
    "generate": ["--max-tokens", "2"],
    "eval": ["--seq-len", "256"],
}


def blocks(kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


def commands() -> list[list[str]]:
    """The commands of the guide that are ours, with what makes them quick."""
    lines = [line for block in blocks("") for line in re.findall(r'^genesis (?:"[^"]*"|[^\n"])*', block, re.MULTILINE)]
    words = [shlex.split(line)[1:] for line in lines]
    return [[*each, *SMALL.get(each[0], [])] for each in words]


@pytest.mark.full
def test_the_guide_to_fine_tuning_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe(["How long does an egg boil? Seven minutes. <|im_start|>user"] * 3, vocab_size=270)
    shape = {**genesis_models.load(FIXTURES / "qwen2-tied").config.raw, "max_position_embeddings": 1024}
    genesis_models.save(genesis_models.build(shape), MODEL, tokenizer=tokenizer)
    (tmp_path / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    shown = blocks("jsonl")[0]  # three chats are too few to hold some out
    Path("chats.jsonl").write_text("".join(shown.replace('"content": "', f'"content": "{i}. ') for i in range(8)))
    Path("chats.yaml").write_text(blocks("yaml")[0])
    pull, *found = commands()
    assert pull[0] == "pull"  # of the network; tests/cli/test_pull.py has it
    assert [each[0] for each in found] == ["data", "train", "generate", "eval", "export", "export"]
    for words in found:
        assert main(words) == 0, (words, capsys.readouterr())
    said = capsys.readouterr().out
    assert "wrote " + str(tmp_path / "runs" / "chats-merged") in said
    assert "the effect of rounding the weights to bfloat16" in said
    exec(compile(blocks("python")[2], "fine-tuning.md", "exec"), {})
    ids = np.arange(12)[None]
    one, other = (logits(genesis_models.load(name), ids) for name in ("merged", "runs/chats"))
    assert np.abs(one - other).max() < 1e-4

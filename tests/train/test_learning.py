"""A tiny Qwen3 learns to answer sums in chats, in full and with adapters, as a user would train it and a server ask it.

Its base (make_fixtures.py) has learned "3+4=" -> "7" from texts, for all pairs of digits, and never saw a chat. What is
learned is to talk: where the sum is in a rendered conversation, in six phrasings, and that a turn ends after the
answer. Held out are 80 of 600 chats: each asks for a pair in a phrasing in which that pair was not seen.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

import genesis_models
from genesis.files.hf import TOKENIZER_FILES
from genesis.files.safetensors import load_file
from genesis.train.output import Output
from genesis_cli.session.export import export
from genesis_models.adapters import ADAPTER_WEIGHTS
from genesis_models.engine import Engine, Request, Sampling
from tests.train.chats import chat, token, write_chats
from tests.train.make_fixtures import BASE
from tests.train.runs import load, rows, train

QUESTIONS = (
    "{}+{}",
    "What is {}+{}?",
    "Add {}+{} please",
    "The sum of {}+{}",
    "{}+{}=?",
    "{} plus {}",
)
HELD_OUT = 80
CHATS = """
model: {{path: "{folder}/base"}}
data:
  train: "{folder}/chats.jsonl"
  eval: "{folder}/held-out.jsonl"
  seq_len: 64
  template_args: {{enable_thinking: false}}
train: {{output_dir: "{folder}/chats", steps: 80, batch_size: 16, threads: 1}}
eval: {{every: null, prompts: []}}
checkpoint: {{every: null}}
log: {{every: 40}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base in `base`, chats, and the configuration `chats.yaml`, which trains on them."""
    folder = tmp_path_factory.mktemp("sums")
    shutil.copytree(BASE, folder / "base")
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chats = [chat(question.format(a, b), str(a + b)) for a, b in pairs for question in QUESTIONS]
    random.Random(5).shuffle(chats)
    write_chats(folder / "held-out.jsonl", chats[:HELD_OUT])
    write_chats(folder / "chats.jsonl", chats[HELD_OUT:])
    (folder / "chats.yaml").write_text(CHATS.format(folder=folder))
    return folder


def answers(model_folder: Path, talks_as: Path, held_out: Path, **args: Any) -> Iterator[tuple[str, str]]:
    """For each held-out chat the right answer and the model's, greedy, asked as a server asks.

    Args:
        talks_as: the folder with tokenizer, chat template and generation_config.
        args: of the template.
    """
    model = genesis_models.load(model_folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(talks_as / "tokenizer.json"))
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = jinja.from_string((talks_as / "chat_template.jinja").read_text())
    ends = json.loads((talks_as / "generation_config.json").read_text())["eos_token_id"]
    stop = frozenset(ends if isinstance(ends, list) else [ends])
    expected, requests = [], []
    for line in held_out.read_text().splitlines():
        *said, last = json.loads(line)["messages"]
        text = template.render(messages=said, add_generation_prompt=True, **args)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        requests.append(Request(prompt, Sampling(temperature=0.0), 5, stop, len(requests)))
        expected.append(last["content"])
    drawn: list[list[int]] = [[] for _ in requests]
    for found in Engine(model, rows=16, capacity=64).run(requests):
        if found.id is not None:
            drawn[found.request].append(found.id)
    return zip(expected, (tokenizer.decode(ids, skip_special_tokens=False) for ids in drawn), strict=True)


def sizes(checkpoint: Path) -> Iterator[int]:
    """The bytes of its files but those of the tokenizer."""
    return (path.stat().st_size for path in checkpoint.iterdir() if not TOKENIZER_FILES.fullmatch(path.name))


def right(found: Iterator[tuple[str, str]]) -> float:
    pairs = list(found)
    print([p for p in pairs if p[0] != p[1]])
    assert len(pairs) == HELD_OUT
    return sum(expected == answer for expected, answer in pairs) / HELD_OUT


def test_the_base_model_does_not_answer_in_chats(folder: Path) -> None:
    base = folder / "base"
    assert right(answers(base, base, folder / "held-out.jsonl", enable_thinking=False)) < 0.5


@pytest.mark.parametrize(
    ("kind", "settings"),
    [pytest.param("full", ("optim.lr=4e-3",), marks=pytest.mark.full), ("lora", ("optim.lr=1e-2", "lora={r: 16}"))],
    ids=["full", "lora"],
)
def test_held_out_chats_are_answered_right(folder: Path, kind: str, settings: tuple[str, ...]) -> None:
    run, held_out = folder / kind, folder / "held-out.jsonl"
    train(load(folder / "chats.yaml", kind, *settings))
    losses = [row["eval/loss"] for row in rows(run) if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < 0.5 * losses[0], "before the first step, and at the end"
    ends = json.loads((run / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [token(run, "<|im_end|>"), 0]
    assert right(answers(run, run, held_out)) >= 0.95
    if kind == "lora":
        assert sum(sizes(run / "checkpoint-80")) <= 16 * sum(v.size for v in load_file(run / ADAPTER_WEIGHTS).values())
        merged = export(str(run), merge=True, dtype=None, out=None, check=True, base=None, console=Output(None))
        assert right(answers(merged, merged, held_out)) >= 0.95

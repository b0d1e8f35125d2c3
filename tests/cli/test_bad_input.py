"""What is wrong with the input of fine-tuning: each has an exit code, and an error that says where and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import genesis_models
from genesis.data.chat import samples
from genesis.data.chat.renderer import Limits
from genesis_models.folder import read_config
from tests.cli.command import printed
from tests.train.chats import chat, make_chats, write_chats
from tests.train.runs import load, no_waiting, picture, train


class Bad(NamedTuple):
    """An input and how the command must end.

    Attributes:
        words: of the command; HERE is the folder of the test.
        what, where, next: what is in those lines of the error.
        make: puts what is wrong into the folder.
    """

    words: tuple[str, ...]
    code: int
    what: str
    where: str
    next: str
    make: Callable[[Path], object]


def lines(*records: Any) -> Callable[[Path], object]:
    """`mine.jsonl`: a good conversation in its first line, then these."""
    return lambda folder: write_chats(folder / "mine.jsonl", [chat("1", "one"), *records])


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "own.jinja").write_text(text)


def moved(folder: Path) -> None:
    (folder / "base").rename(folder / "moved")


def changed(folder: Path, **shape: int) -> None:
    raw = {**read_config(folder / "base").raw, **shape}
    genesis_models.save(genesis_models.build(raw, 1), folder / "other", source=folder / "base")


def wider(folder: Path) -> None:
    changed(folder, intermediate_size=48)


def notes(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "todo.txt").write_text("keep me")


def parquet(folder: Path) -> None:
    arrow, write = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet").write_table
    write(arrow.table({"asked": ["1"], "said": ["one"]}), folder / "mine.parquet")


TRAIN = ("train", "HERE/config.yaml", "train.output_dir=HERE/new")
MINE = (*TRAIN, "data.train=HERE/mine.jsonl")
OWN = (*TRAIN, "data.template=HERE/own.jinja")
RESUME = ("train", "HERE/config.yaml", "train.output_dir=HERE/run", "train.steps=1", "eval.every=null", "--resume")
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
USER, NO_ROLE, ROBOT = {"role": "user", "content": "2"}, {"content": "two"}, {"role": "robot", "content": "two"}
SKIP = "or leave such documents out with data.on_error=skip"
NOT_THE_BASE = "the model in HERE/other is not the base of this adapter, which was in HERE/base: its sha256 "
BAD = {
    "a base model that moved": Bad(
        RESUME,
        5,
        "the base model of the run is not in HERE/base: the folder HERE/base does not exist",
        "HERE/run/checkpoint-1",
        "restore it, or name its folder: model.path=FOLDER",
        moved,
    ),
    "a base model that moved, named wrongly": Bad(
        (*RESUME, "model.path=HERE/elsewhere"),
        5,
        "the base model of the run is not in HERE/elsewhere; the run began with it in HERE/base",
        "HERE/run/checkpoint-1",
        "restore it, or name its folder: model.path=FOLDER",
        moved,
    ),
    "a base model that changed": Bad(
        (*RESUME, "model.path=HERE/other"),
        5,
        NOT_THE_BASE,
        "HERE/run/checkpoint-1",
        "name the current folder of that base: model.path=FOLDER",
        changed,
    ),
    "an export onto a folder that is not ours": Bad(
        ("export", "HERE/run", "--out", "HERE/notes"),
        3,
        "HERE/notes holds files that are not an export's",
        "--out",
        "name a new or empty folder",
        notes,
    ),
    "a template that raises": Bad(
        OWN,
        4,
        "the template cannot render it: line 1: no system message, please",
        "HERE/chats.jsonl:1",
        "check what it requires, " + SKIP,
        template("{{ raise_exception('no system message, please') }}"),
    ),
    "a template that loops": Bad(
        OWN,
        5,
        "the chat template cannot be used: a render took more than 0.2 s of CPU time, 3 times in a row",
        "HERE/own.jinja",
        "download the template again",
        template(LOOP),
    ),
    "a template that is no Jinja": Bad(
        OWN,
        5,
        "the chat template cannot be used: line 1: Expected an expression",
        "HERE/own.jinja",
        "download the template again",
        template("{% if %}"),
    ),
    "a message without role": Bad(
        MINE,
        4,
        "the message has no 'role'; its fields: 'content'",
        "HERE/mine.jsonl:2: messages[1].role",
        "name the field with data.fields.role, " + SKIP,
        lines({"messages": [USER, NO_ROLE]}),
    ),
    "a message with an unknown role": Bad(
        MINE,
        4,
        "the role is 'robot'; it can be system, developer, user, assistant, tool",
        "HERE/mine.jsonl:2: messages[1].role",
        "change the role, " + SKIP,
        lines({"messages": [USER, ROBOT]}),
    ),
    "an empty conversation": Bad(
        MINE,
        4,
        "the conversation has no messages",
        "HERE/mine.jsonl:2: messages",
        "remove the record, " + SKIP,
        lines({"messages": []}),
    ),
    "a conversation that nobody answers": Bad(
        MINE,
        4,
        "the conversation has no assistant turn, so there is nothing to learn",
        "HERE/mine.jsonl:2: messages",
        "remove the record, " + SKIP,
        lines({"messages": [USER]}),
    ),
    "a conversation longer than the context": Bad(
        (*MINE, "data.too_long=fail"),
        4,
        "the sample has 188 tokens, more than the 64 of data.seq_len",
        "HERE/mine.jsonl:2",
        "raise data.seq_len, shorten the record, or set data.too_long to drop, truncate or split",
        lines(chat("2", "two " * 80)),
    ),
    "a Parquet file without the columns": Bad(
        (*TRAIN, "data.train=HERE/mine.parquet"),
        4,
        "fields match no format; its fields: 'asked', 'said'",
        "HERE/mine.parquet:1",
        "the formats are text: text; messages: messages; prompt_completion: prompt, completion; ",
        parquet,
    ),
    "an adapter that does not fit": Bad(
        (*TRAIN, "model.path=HERE/other", "lora={init_from: HERE/run}"),
        5,
        "layers.0.mlp.gate_proj.lora_B.weight has shape (32, 4), but the layer and its rank need (48, 4)",
        "HERE/run/adapter_model.safetensors",
        "use the adapter with the base that it was trained on",
        wider,
    ),
    "an adapter on another base": Bad(
        ("export", "HERE/run", "--base", "HERE/other"),
        5,
        NOT_THE_BASE,
        "HERE/run",
        "name the current folder of that base: --base=FOLDER",
        wider,
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, its chats and base model, and an adapter in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    train(load(make_chats(folder), "run", "train.steps=1", "eval.every=null"))
    return folder


@pytest.fixture
def folder(trained: Path) -> Iterator[Path]:
    """The same, to be changed."""
    before = set(trained.iterdir())
    yield trained
    if (trained / "moved").exists():
        (trained / "moved").rename(trained / "base")
    for path in set(trained.iterdir()) - before:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = BAD[name]
    bad.make(folder)
    monkeypatch.setattr(samples, "Limits", lambda: Limits(cpu_s=0.2))
    notes = picture(folder / "notes")
    with no_waiting():
        code, _, error = printed(*(word.replace("HERE", str(folder)) for word in bad.words))
    assert code == bad.code, error
    what, where, next, *more = error.splitlines()
    assert [line.partition(": ")[0] for line in (what, where, next)] == ["error", "  where", "  next"] and not any(more)
    for line, said in ((what, bad.what), (where, bad.where), (next, bad.next)):
        assert said.replace("HERE", str(folder)) in line, error
    assert not (folder / "new").exists() and picture(folder / "notes") == notes

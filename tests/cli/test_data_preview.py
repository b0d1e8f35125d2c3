"""`genesis data preview`: what it prints of texts and of samples with masks, in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

import genesis_models
from genesis.data.documents import TokenSet
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.train.output import Output
from genesis_cli.session.data_preview import _histogram, _Page
from tests.cli.command import printed
from tests.data.helpers import token_set
from tests.data.test_tokenizer_files import sentence_piece, write
from tests.models.golden import FIXTURES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(FIXTURES / "qwen3-tied"), folder, tokenizer=tokenizer)
    (folder / "model.safetensors").unlink()  # no weights are read
    return folder


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis data preview words…`."""
    return printed("data", "preview", *words)


def texts(folder: Path, *found: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    return path


def test_sources_are_shown_with_a_models_tokenizer(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, *("words " * n for n in range(1, 41)))
    code, out, told = run(path, "--model", model, "--seq-len", 32, "--samples", 2)
    assert code == 0, told
    lines = out.splitlines()
    assert lines[0] == "files read: 1 jsonl"
    assert lines[1] == "formats: 40 text" and lines[2].startswith("samples: 40 from 40 documents, ")
    assert any(line.startswith("packed: rows of 32 tokens: ") for line in lines)
    assert f"sample 1 from {path}:1: " in out and f"sample 40 from {path}:40: " in out and out.count("\nsample ") == 2
    assert "<|endoftext|>[[words <|endoftext|>]]" in lines
    assert not list(Path(tmp_path).glob("none*")), "there is no run"


def test_records_named_as_text_are_warned_of(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, "some words").rename(tmp_path / "a.txt")
    code, out, told = run(path, "--model", model, "--seq-len", 32, "--samples", 0)
    assert code == 0, told
    read = f"such as {path}, read as text; records are read from .jsonl, .json and .csv"
    assert f"warning: 1 file that begins like JSON or CSV, {read}" in out.splitlines()


def test_a_configuration_is_shown_as_a_run_would_see_it(model: Path, tmp_path: Path) -> None:
    texts(tmp_path, *(f"text {n}" for n in range(20)), *(f"{n} words to learn" * 9 for n in range(5)))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{preset: 0.5B}}\ndata: {{train: {tmp_path}/texts.jsonl, seq_len: 32, eval_fraction: 0.2}}\n"
        f"train: {{output_dir: {tmp_path}/run, steps: 1}}\n"
    )
    code, out, told = run(config, "--model", model, "data.too_long=drop", "--samples", 0)
    assert code == 0, told
    (note,) = (line for line in out.splitlines() if line.startswith("5 of 25 samples have more than 32 tokens and are"))
    assert " left out; the first: " in note and note.endswith("; see data.too_long")
    assert "held out samples: " in out and "\nsample " not in out and "[[" not in out
    assert not (tmp_path / "run").exists()


def test_chats_are_shown_with_what_is_learned_of_them(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a <|im_end|>\n<|endoftext|>?"}, {"role": "assistant", "content": "some words"}]
    records = [{"messages": chat}, {"instruction": "more", "output": "words"}, {"instruction": "x" * 99, "output": "y"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    weighted = f"data.train=[{{path: {path}, weight: 1.5}}]"
    code, out, told = run(path, "--model", model, "--seq-len", 96, "data.template=chatml", weighted)
    assert code == 0, told
    lines = out.splitlines()
    assert lines[1].startswith("1 of 3 samples have more than 96 tokens and are left out; the first: ")
    assert lines[2].endswith("such as <|endoftext|>; it is treated as plain text"), "no setting makes tokens of it"
    assert "formats: 2 alpaca, 1 messages" in lines and "weights: an epoch has about 3 samples" in lines
    asked = "<|im_start|>user\na <|im_end|>\n\\<|endoftext|>?<|endoftext|>\n<|im_start|>assistant\n"
    shown = f"{asked}[[some words<|endoftext|>]]"
    assert shown in out and "[[words<|endoftext|>]]" in out


def test_turns_that_are_not_learned_are_counted(model: Path, tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chats = [[asked, said], [asked, {**said, "weight": 0}, asked, {**said, "train": False}, asked, said]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = (path, "--model", model, "--seq-len", 96, "data.template=chatml", "data.eval_fraction=0")
    line = f"2 turns are read but not learned (weight 0 or train false); the first: {path}:2"
    code, out, told = run(*given)
    assert code == 0, told
    assert line in out.splitlines()
    _, out, _ = run(*given, "data.loss=all")
    assert "not learned" not in out


def test_what_data_hold_cannot_drive_the_terminal(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, "\x1b[31mred\a \u202e <|endoftext|> [[no target]]\r\nend\ttab")
    _, out, _ = run(path, "--model", model)
    shown = "[[\\x1b[31mred\\x07 \\u202e \\<|endoftext|> \\[[no target\\]]\\r\nend\\ttab<|endoftext|>]]"
    assert f"<|endoftext|>{shown}" in out
    assert all(char.isprintable() or char == "\n" for char in out)


def masked(tokenizer: Tokenizer, *parts: tuple[str, bool]) -> TokenSet:
    """A sample of texts that are targets or not; special tokens in them are special."""
    ids = [tokenizer.encode(text, parse_special=True) for text, _ in parts]
    is_target = np.repeat([target for _, target in parts], [len(part) for part in ids])
    tokens = token_set([len(is_target)], mask=lambda place: bool(is_target[place]))
    return TokenSet(**vars(tokens) | {"stream": np.concatenate(ids).astype(np.uint16)})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["pipe", "terminal", "no colour", "dumb"])
def test_targets_and_special_tokens_are_marked_or_coloured(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if kind == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    tokenizer = Tokenizer.load(model)
    tokens = masked(
        tokenizer, ("what? ä", False), ("w\u00f6rds", True), ("<|endoftext|>", True), ("\nmore", False), (" x", True)
    )
    stream = io.StringIO() if kind == "pipe" else Terminal()
    page = _Page(Output(stream), tokenizer)
    page.legend()
    page.show(tokens, 0)
    shown = stream.getvalue().partition(" targets\n")[2]
    if kind == "terminal":
        assert shown == "what? ä\x1b[32mwörds\x1b[0m\x1b[1;32m<|endoftext|>\x1b[0m\nmore\x1b[32m x\x1b[0m\n"
    else:
        assert shown == "what? ä[[wörds<|endoftext|>]]\nmore[[ x]]\n" and "\x1b" not in stream.getvalue()


def test_the_histogram_counts_every_sample() -> None:
    lengths = np.random.default_rng(0).integers(5, 1234, 1000)
    head, *bars = _histogram(lengths, 1024)
    assert head.startswith(f"lengths: {lengths.min()} to {lengths.max():,} tokens; half")
    assert head.endswith(f"; {(lengths > 1024).sum()} have more than the 1,024 of data.seq_len")
    assert len(bars) == 10 and sum(int(bar.split()[-1]) for bar in bars) == 1000
    for one in ([7], [7, 7], [1, 100_000]):
        assert sum(int(bar.split()[-1]) for bar in list(_histogram(np.array(one), 8))[1:]) == len(one)


def test_a_long_sample_is_cut_short(model: Path, tmp_path: Path) -> None:
    code, out, _ = run(texts(tmp_path, "words to learn " * 2000), "--model", model)
    assert code == 0 and len(out) < 12_000 and " more tokens\n" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("texts.jsonl",), 2, "--model"),
        (("data.seq_len=4",), 2, "no data are named"),
        (("texts.jsonl", "--model", "absent"), 5, "absent"),
        (("absent.jsonl", "--model", "MODEL"), 4, "matches no file"),
        (("texts.jsonl", "--model", "MODEL", "--seq-len", "1"), 3, "data.seq_len"),
        (("texts.jsonl", "--model", "MODEL", "--samples", "-1"), 2, "--samples"),
        (("texts.jsonl", "--model", "MODEL", "data.too_long=fail", "--seq-len", "8"), 4, "more than the 8"),
        (("texts.jsonl", "--model", "MODEL", "data.too_long=drop", "--seq-len", "4"), 4, "no sample of data.train"),
        (("absent.yaml",), 3, "the file or recipe does not exist"),
    ],
)
def test_what_is_wrong_has_its_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, "words to learn, and more words")
    found, _, told = run(*(str(model) if word == "MODEL" else word for word in words))
    assert (found, said in told) == (code, True), told


def test_the_spaces_of_a_sentence_piece_tokenizer_are_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "model", sentence_piece(), config={"eos_token_id": 2}))
    tokens = masked(tokenizer, ("a ab", False), ("</s>", True), ("b a", True), (" a b", False))
    stream = io.StringIO()
    _Page(Output(stream), tokenizer).show(tokens, 0)
    ids = tokens.stream.tolist()
    shown = stream.getvalue().partition(" targets\n")[2].rstrip("\n")
    assert shown.replace("[[", "").replace("]]", "") == tokenizer.decode(ids, skip_special=False)

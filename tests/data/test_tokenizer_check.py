"""Tokenizers that would end the process, or never end, are refused by a child with limits; others pay nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis.data import tokenizer_files
from genesis.data.pieces import KNOWN, PATTERN
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.data.tokenizer_files import is_bounded, user_cache
from genesis.errors import ModelError

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
END = {"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False}
END |= {"lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tokenizer_files, "CPU_SECONDS", 1)
    user_cache.cache_clear()
    yield tmp_path / "xdg/genesis/tokenizers"
    user_cache.cache_clear()


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def several(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def content(**parts: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2}, "merges": [], "unk_token": None}
    return {"version": "1.0", "added_tokens": [END], "model": model, **parts}


def load(folder: Path, **parts: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content(**parts)))
    return Tokenizer.load(folder)


REFUSED = {
    "doubling": ({"normalizer": several("normalizers", *[DOUBLE] * 40)}, "within|times as long"),
    "doubling a little": ({"normalizer": several("normalizers", *[DOUBLE] * 8)}, "64 times as long"),
    "prepending": (
        {"normalizer": several("normalizers", *[{"type": "Prepend", "prepend": "a" * 1000}] * 20)},
        "64 times as long",
    ),
    "a pattern that matches nothing": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b" * 1000}},
        "64 times as long",
    ),
    "backtracking": ({"pre_tokenizer": split("(a|a)*$|(a+)+b")}, "retry-limit-in-match"),
    "a deep pattern": ({"pre_tokenizer": split("(?:" * 4000 + "a" + ")*" * 4000)}, "parse depth limit"),
    "decoders": ({"decoder": several("decoders", *[DOUBLE] * 8)}, "64 times as long"),
    "an added token that is doubled": (
        {
            "normalizer": several("normalizers", *[DOUBLE] * 40),
            "added_tokens": [END, END | {"id": 3, "content": "aaaa", "normalized": True}],
        },
        "within|times as long",
    ),
}


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_end_the_process_is_refused(tmp_path: Path, name: str) -> None:
    parts, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason) as caught:
        load(tmp_path, **parts)
    assert caught.value.exit_code == 5 and caught.value.where == str(tmp_path / "tokenizer.json")


def test_a_good_one_is_tried_once(tmp_path: Path, verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = split("[a-z]+")
    first = load(tmp_path, pre_tokenizer=unknown)
    assert first.encode("ab").tolist() == [1, 2] and len(list(verdicts.iterdir())) == 1
    monkeypatch.setattr(tokenizer_files, "_try_in_child", lambda *_: pytest.fail("tried again"))
    load(tmp_path, pre_tokenizer=unknown)


def test_a_bad_one_is_not_remembered(tmp_path: Path, verdicts: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelError):
            load(tmp_path, pre_tokenizer=split("(a|a)*$"))
    assert not verdicts.exists() or not list(verdicts.iterdir())


def test_a_child_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="cannot be started: No such file"):
        load(tmp_path, pre_tokenizer=split("[a-z]+"))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTES, "decoder": BYTES},
        {"normalizer": several("normalizers", {"type": "Prepend", "prepend": "▁"}, SPACE)},
        {"decoder": several("decoders", {**SPACE, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"})},
        {"pre_tokenizer": several("pretokenizers", split(PATTERN), BYTES)},
        *({"pre_tokenizer": split(known)} for known in sorted(KNOWN)),
    ],
)
def test_the_usual_ones_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]) -> None:
    monkeypatch.setattr(tokenizer_files, "_try_in_child", lambda *_: pytest.fail("tried"))
    load(tmp_path, **parts)


def test_our_own_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "_try_in_child", lambda *_: pytest.fail("tried"))
    assert train_bpe(["some text, some more text"] * 4, vocab_size=300).vocab_size > 256


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": several("normalizers", *[DOUBLE] * 5)},
        {"normalizer": several("normalizers", *[{"type": "NFC"}] * 33)},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 65}},
        {"normalizer": {**SPACE, "pattern": {"Regex": " "}}},
        {"normalizer": {**SPACE, "pattern": {"String": " ", "Regex": " "}}},
        {"normalizer": {**SPACE, "pattern": " "}},
        {"pre_tokenizer": split(".")},
        {"decoder": several("decoders", several("decoders", *[DOUBLE] * 5))},
        {"added_tokens": [END | {"content": f"<{i}>"} for i in range(1 << 15)] + [END]},
        {"added_tokens": [END | {"content": "a" * (1 << 16)}] * 17},
    ],
)
def test_what_is_beyond_the_usual_is_tried(parts: dict[str, Any]) -> None:
    assert is_bounded(content()) and not is_bounded(content(**parts))

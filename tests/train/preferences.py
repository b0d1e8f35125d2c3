"""Pairs of answers and judged answers for tests, and recipes that train on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from genesis.data.documents import TokenSet
from tests.train.chats import make_chats, write_chats

__all__ = ["judged", "make_judged", "make_pairs", "pair", "plain", "sequences", "sums"]

SETTINGS = "\nobjective: {name}\n"


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    """A conversational pair with an explicit prompt."""
    answers = {"chosen": said("assistant", chosen), "rejected": said("assistant", rejected)}
    return {"prompt": said("user", prompt), **answers}


def judged(pairs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both answers of each pair as records with a label."""
    sides = ("chosen", "rejected")
    return [{"prompt": p["prompt"], "completion": p[s], "label": s == "chosen"} for p in pairs for s in sides]


def sums(count: int) -> list[dict[str, Any]]:
    """Pairs of lengths that differ: a sum, and words."""
    return [pair(f"{n} + {n}", str(2 * n), "one two three " * (1 + n % 3)) for n in range(count)]


def plain(count: int) -> list[dict[str, Any]]:
    """Pairs of texts of 6 to 20 tokens."""
    return [{"prompt": f"{n % 4} +", "chosen": " 1" * (n % 3 + 1), "rejected": f" two {n}"} for n in range(count)]


def make_pairs(folder: Path, name: str = "dpo", records: list[dict[str, Any]] | None = None) -> Path:
    """A base, pairs of answers, and a recipe that trains adapters on them with the objective `name`."""
    return _make(folder, name, sums(24) if records is None else records)


def make_judged(folder: Path, name: str = "kto", records: list[dict[str, Any]] | None = None) -> Path:
    """The same with judged answers."""
    return _make(folder, name, judged(sums(24) if records is None else records))


def _make(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    path = make_chats(folder)
    write_chats(folder / "chats.jsonl", records)
    text = path.read_text().replace("seq_len: 64", "seq_len: 128")
    path.write_text(text + SETTINGS.format(name=name))
    return path


def sequences(tokens: TokenSet, sample: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and mask of both sequences of a sample, each with its prompt."""
    assert tokens.splits is not None and tokens.mask is not None
    shared = 0 if tokens.shared is None else int(tokens.shared[sample])
    begin, end = int(tokens.starts[sample]), int(tokens.starts[sample] + tokens.lengths[sample])
    middle = begin + int(tokens.splits[sample])
    places = np.arange(begin, middle), np.r_[begin : begin + shared, middle:end]
    return [(tokens.stream[each].astype(np.int64), tokens.mask[each] != 0) for each in places]

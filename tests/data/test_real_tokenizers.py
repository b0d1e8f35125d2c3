"""Real tokenizers, cut down to what some texts need, against the ids that transformers gives with the whole ones.

`make_fixtures.py` made them, and compares the whole tokenizers where packages that carry them are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genesis.data.tokenizer import Tokenizer
from tests.data.make_fixtures import FIXTURE, TEXTS, folder_of

REAL: dict[str, dict[str, Any]] = json.loads(FIXTURE.read_text("utf-8"))


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer and what transformers made of `TEXTS` with it."""
    found = REAL[request.param]
    folder = folder_of(tmp_path_factory.mktemp("real") / request.param, found["content"], found["config"])
    return Tokenizer.load(folder), found


def test_prompts_have_the_ids_of_transformers(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, found = real
    assert [tokenizer.prompt(text) for text in TEXTS] == found["plain"]
    assert [tokenizer.prompt(text, parse_special=True) for text in TEXTS] == found["parsed"]


def test_documents_have_the_ids_of_transformers_and_end(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, found = real
    documents = [
        [*tokenizer.start_ids, *ids.tolist(), *tokenizer.document_end_ids] for ids in tokenizer.encode_batch(TEXTS)
    ]
    assert documents == [[*ids, tokenizer.eos_id] for ids in found["plain"]]


def test_pieces_of_a_long_document_have_the_ids_of_the_whole(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = real
    text = "\n".join(TEXTS * 9)
    pieces = tokenizer.pieces(text, 60, 30)
    assert len(pieces) > 20 and "".join(pieces) == text
    found = tokenizer.encode_batch(pieces, follows=[number > 0 for number in range(len(pieces))])
    assert [number for ids in found for number in ids.tolist()] == tokenizer.encode(text).tolist()


def test_a_text_that_fits_is_never_called_too_long(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = real
    longest = max((t for t in map(tokenizer.token, range(tokenizer.vocab_size)) if t), key=len)
    for text in [*TEXTS, "".join(TEXTS), "a" * 999, " " * 999, longest * 50, "e\u0301" * 300]:
        for most in (count := len(tokenizer.encode(text)), count + 1, 10 * count + 1):
            assert not tokenizer.is_beyond(text, most), (text[:20], most)
    assert tokenizer.is_beyond("".join(TEXTS) * 20, 8)


def test_what_differs_between_them_is_covered() -> None:
    starts = {name: bool(found["content"]["post_processor"]["type"] != "ByteLevel") for name, found in REAL.items()}
    assert starts == {"deepseek": False, "qwen": False, "smollm2": False, "mistral-v1": True, "mistral-v3": True}
    assert all(REAL[name]["config"]["bos_token"] for name in ("deepseek", "smollm2")), "named, and never added"
    assert any(
        plain != parsed
        for found in REAL.values()
        for plain, parsed in zip(found["plain"], found["parsed"], strict=True)
    )
    assert Path(FIXTURE).stat().st_size < 200 << 10

"""Streaming output: the pieces joined are the whole text, and no piece shows half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.stream_decoder import StreamDecoder
from genesis.data.tokenizer import Tokenizer
from tests.data.test_tokenizer_files import sentence_piece, write

TEXT = "def f():\n\treturn 'äß 漢字 🎈👩‍👩‍👧'  # end "


@given(ids=st.lists(st.integers(0, 325), max_size=60), skip_special=st.booleans())
def test_any_ids_give_the_same_text_in_pieces_as_at_once(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special=skip_special)


@given(st.text())
def test_no_piece_of_a_valid_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(int(i)) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_a_character_comes_out_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🎈").tolist()
    assert len(ids) == 4
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids] == ["", "", "", "🎈"]


def test_an_unfinished_character_is_replaced_and_the_decoder_starts_anew(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    for i in tokenizer.encode("a🎈").tolist()[:-1]:
        decoder.push(i)
    assert decoder.finish() == "\ufffd"
    assert decoder.push(int(tokenizer.encode("b")[0])) == "b"


@pytest.mark.parametrize("text", ["ab hello", "a  a ab", "é ab 🎈 漢", "🎈"])
def test_a_tokenizer_with_spaces_in_its_tokens_and_byte_fallback(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, sentence_piece()))
    assert not tokenizer.is_byte_level
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(int(i)) for i in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_never_become_a_character_do_not_hold_up_the_stream(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, sentence_piece()))
    broken = tokenizer.token_id("<0x80>")
    assert broken is not None
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(broken) for _ in range(40)]
    assert sum(map(len, pieces)) >= 36
    assert len(decoder._open) < 4

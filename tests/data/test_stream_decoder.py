"""Streaming output: the pieces joined are the whole text, and no piece shows half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.tokenizer import StreamDecoder, Tokenizer, token_bytes, token_text
from tests.data.test_tokenizer_files import metaspace, sentence_piece, write

TEXT = "def f():\n\treturn 'äß 漢字 🎈👩‍👩‍👧'  # end "


@given(ids=st.lists(st.integers(0, 325), max_size=60), skip_special=st.booleans())
def test_any_ids_give_the_same_text_in_pieces_as_at_once(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special=skip_special)
    half = len(ids) // 2
    assert [decoder.push_all(part) for part in (ids[:half], ids[half:])] == [
        "".join(pieces[:half]),
        "".join(pieces[half:]),
    ]


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


@pytest.fixture(params=[sentence_piece, metaspace])
def spaced(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts a space before each text, which decoding takes away."""
    return Tokenizer.load(write(tmp_path, request.param()))


def streamed(tokenizer: Tokenizer, ids: list[int], after: list[int]) -> str:
    decoder = StreamDecoder(tokenizer, after=after)
    return "".join(map(decoder.push, ids)) + decoder.finish()


@pytest.mark.parametrize("text", ["ab hello a", "a  a ab", "é ab 🎈 漢字 a", " 漢字"])
def test_a_continuation_is_what_it_adds_to_the_text_before_it(spaced: Tokenizer, text: str) -> None:
    ids = spaced.prompt(text)
    for cut in range(1, len(ids)):
        before = spaced.decode(ids[:cut])
        if not before.endswith("\ufffd"):
            assert streamed(spaced, ids[cut:], ids[:cut]) == spaced.decode(ids)[len(before) :], cut


def test_behind_a_special_token_a_text_begins(spaced: Tokenizer) -> None:
    """As transformers' streamer has it: the template of a chat ends so, and the answer is a text of its own."""
    answer = spaced.encode("hello a").tolist()
    chat = [*spaced.prompt("a b"), spaced.eos_id]
    assert streamed(spaced, answer, chat) == streamed(spaced, answer, []) == "hello a"
    assert streamed(spaced, answer, chat[:-1]) == " hello a"


def test_what_is_before_changes_no_byte_level_text(tokenizer: Tokenizer) -> None:
    for ids in (tokenizer.encode(TEXT).tolist(), tokenizer.encode("🎈").tolist()[2:]):
        assert streamed(tokenizer, ids, tokenizer.encode("a🎈").tolist()[:-1]) == streamed(tokenizer, ids, [])


def test_texts_of_tokens_join_to_the_text(spaced: Tokenizer) -> None:
    ids = spaced.encode("ab hello a").tolist()
    texts = [token_text(spaced, token, begins=not place) for place, token in enumerate(ids)]
    assert "".join(texts) == "ab hello a" and " a" in texts


@pytest.mark.parametrize("begins", [True, False])
def test_a_special_token_has_a_text_wherever_it_is(spaced: Tokenizer, tokenizer: Tokenizer, begins: bool) -> None:
    for each in (spaced, tokenizer):
        for token in each.special_ids:
            text = each.decode([token], skip_special=False)
            assert text.startswith("<")
            assert token_text(each, token, begins=begins) == text


def test_bytes_of_tokens_join_to_the_text(spaced: Tokenizer, tokenizer: Tokenizer) -> None:
    for each in (spaced, tokenizer):
        ids = each.encode("a é 漢").tolist()
        found = [token_bytes(each, token, begins=not place) for place, token in enumerate(ids)]
        assert b"".join(found).decode() == "a é 漢"
    last = [token_text(spaced, token, begins=False) for token in spaced.encode("漢").tolist()[-3:]]
    assert last == ["\ufffd"] * 3


def test_bytes_that_never_become_a_character_do_not_hold_up_the_stream(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, sentence_piece()))
    broken = tokenizer.token_id("<0x80>")
    assert broken is not None
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(broken) for _ in range(40)]
    assert sum(map(len, pieces)) >= 36
    assert len(decoder._open) < 4

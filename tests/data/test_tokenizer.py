"""Training, encoding and decoding: nothing lost, nothing special read from text, the same bytes everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.tokenizer import END_OF_TEXT, MIN_VOCAB, Tokenizer, _guard, train_bpe
from genesis.errors import ConfigError, DataError, ModelError
from tests.data.helpers import TEXTS, raised, run_python

TRAIN = """
import hashlib, json, sys
from genesis.data.tokenizer import train_bpe
from tests.data.helpers import TEXTS
tokenizer = train_bpe(iter(TEXTS), vocab_size=320)
ids = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
files = {name: hashlib.sha256(data).hexdigest() for name, data in tokenizer.files().items()}
print(json.dumps([files, tokenizer.fingerprint, hashlib.sha256(json.dumps(ids).encode()).hexdigest()]))
"""
FORK = """
import json, os
from genesis.data.tokenizer import train_bpe
from tests.data.helpers import TEXTS
tokenizer = train_bpe(TEXTS, vocab_size=320)
expected = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
pid = os.fork()
if pid == 0:
    same = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == expected
    os._exit(0 if same else 1)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


@given(st.text())
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert not len(ids) or (ids.min() > tokenizer.eos_id and ids.max() < tokenizer.vocab_size)


def test_training_merges_what_is_frequent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(TEXTS)
    assert sum(map(len, TEXTS)) / sum(map(len, ids)) > 2.5
    assert tokenizer.vocab_size == 320
    assert [tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id] == [0, None, 0]
    assert tokenizer.special_ids == {0}


@pytest.mark.parametrize("before", [" ", "(", ".", "\n", "4", "\t", "\u00e9 "])
def test_a_word_is_cut_off_from_all_but_a_space(tokenizer: Tokenizer, before: str) -> None:
    word = tokenizer.encode(" argument" if before.endswith(" ") else "argument").tolist()
    assert tokenizer.encode(f"{before}argument").tolist()[-len(word) :] == word


def test_numbers_are_cut_after_three_digits() -> None:
    tokenizer = train_bpe(["1234567 " * 50], vocab_size=300)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234567")] == ["123", "456", "7"]


def test_pairs_that_occur_once_are_not_merged() -> None:
    tokenizer = train_bpe(["abcd abce abc q"], vocab_size=300)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("abcd")] == ["abc", "d"]


@pytest.mark.parametrize("text", [END_OF_TEXT, f"a{END_OF_TEXT}b", f"{END_OF_TEXT}{END_OF_TEXT}"])
def test_special_tokens_written_in_text_are_plain_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_decode_to_nothing_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == f"ab{END_OF_TEXT}"
    assert tokenizer.decode([tokenizer.vocab_size + 5, 2**31]) == ""


def test_two_processes_with_other_threads_and_hash_seeds_train_the_same_bytes() -> None:
    first = run_python(TRAIN, PYTHONHASHSEED="1", RAYON_NUM_THREADS="1")
    second = run_python(TRAIN, PYTHONHASHSEED="2", RAYON_NUM_THREADS="4")
    serial = run_python(TRAIN, PYTHONHASHSEED="3", TOKENIZERS_PARALLELISM="false")
    assert first == second == serial


def test_a_forked_child_encodes_without_a_warning_or_a_deadlock() -> None:
    assert run_python(FORK, timeout=30, PYTHONWARNINGS="ignore::DeprecationWarning") == 0


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "model")
    for path in (tmp_path / "model", tmp_path / "model/tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.files() == tokenizer.files()
        assert [a.tolist() for a in loaded.encode_batch(TEXTS)] == [a.tolist() for a in tokenizer.encode_batch(TEXTS)]
        assert (loaded.eos_id, loaded.bos_id, loaded.pad_id) == (0, None, 0)
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_bytes())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["eos_token"] == config["pad_token"] == END_OF_TEXT and config["bos_token"] is None


def test_the_fingerprint_tells_tokenizers_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content, indent=7))
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    shorter = Tokenizer.load(tmp_path).fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    other_end = Tokenizer.load(tmp_path).fingerprint
    assert len({tokenizer.fingerprint, shorter, other_end}) == 3


@pytest.mark.parametrize("size", [0, MIN_VOCAB - 1, 1 << 30])
def test_a_vocabulary_without_room_for_all_bytes_is_refused(size: int) -> None:
    assert raised(lambda: train_bpe(TEXTS, vocab_size=size)) == "ConfigError 3"
    with pytest.raises(ConfigError, match="257 to"):
        train_bpe(TEXTS, vocab_size=size)


def test_the_smallest_vocabulary_is_all_bytes_and_the_end() -> None:
    tokenizer = train_bpe(["x"], vocab_size=MIN_VOCAB)
    assert tokenizer.vocab_size == MIN_VOCAB
    assert tokenizer.decode(tokenizer.encode("漢字 any")) == "漢字 any"


def test_training_on_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="no text"):
        train_bpe([], vocab_size=300)


def test_half_a_surrogate_pair_is_an_error_that_blames_the_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="surrogate") as caught:
        tokenizer.encode_batch(["fine", "\ud800"])
    assert caught.value.where == "text 1 of 2"


def test_a_panic_of_the_library_is_a_model_error() -> None:
    import tokenizers

    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    with pytest.raises(BaseException) as panic:  # noqa: PT011
        tokenizers.Tokenizer.from_str(json.dumps(content))
    assert not isinstance(panic.value, Exception), "the library mends its panics: the guard may go"
    with pytest.raises(ModelError, match="charsmap") as caught, _guard("here"):
        tokenizers.Tokenizer.from_str(json.dumps(content))
    assert caught.value.where == "here"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_the_guard_lets_through_what_is_not_the_tokenizers_fault(error: type[BaseException]) -> None:
    with pytest.raises(error), _guard("here"):
        raise error

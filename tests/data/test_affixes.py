"""What stands around a text: the tokenizer's own post-processor decides, for documents and for prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from genesis.data.pieces import _SPLITTING, KNOWN, PATTERN, CutRule, cut_rule, post_processor_affixes, start_template
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError
from tests.data.test_tokenizer_files import added, byte_level, sentence_piece, write

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
START = start_template("<|im_end|>", 320)


def template(*names: str) -> dict[str, Any]:
    """A template of `names`, where A is the text; the numbers are the ids of `byte_level`."""
    ids = {"<|endoftext|>": 0, "<|im_end|>": 320}
    single = [
        {"Sequence": {"id": name, "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in names
    ]
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


ROBERTA = {
    "type": "RobertaProcessing",
    "sep": ["<|endoftext|>", 0],
    "cls": ["<|im_end|>", 320],
    "trim_offsets": True,
    "add_prefix_space": False,
}
BERT = {"type": "BertProcessing", "sep": ["<|endoftext|>", 0], "cls": ["<|im_end|>", 320]}

# post-processor, ids before, ids after a document, ids after a prompt
CASES: list[tuple[Any, list[int], list[int], list[int]]] = [
    (None, [], [0], []),
    (BYTE_LEVEL, [], [0], []),
    (START, [320], [0], []),
    (template("<|im_end|>", "A", "<|endoftext|>"), [320], [0], []),
    (template("A", "<|endoftext|>"), [], [0], []),
    (template("A", "<|im_end|>"), [], [320, 0], [320]),
    (template("A", "<|im_end|>", "<|endoftext|>", "<|endoftext|>"), [], [320, 0, 0], [320]),
    (template("<|endoftext|>", "<|im_end|>", "A"), [0, 320], [0], []),
    (ROBERTA, [320], [0], []),
    (BERT, [320], [0], []),
    ({"type": "Sequence", "processors": [BYTE_LEVEL, START]}, [320], [0], []),
    ({"type": "Sequence", "processors": []}, [], [0], []),
]


@pytest.mark.parametrize("post_processor,start,document_end,prompt_end", CASES)
def test_documents_and_prompts_have_what_the_post_processor_adds(
    tokenizer: Tokenizer,
    tmp_path: Path,
    post_processor: Any,
    start: list[int],
    document_end: list[int],
    prompt_end: list[int],
) -> None:
    content = byte_level(tokenizer) | {"post_processor": post_processor}
    folder = write(tmp_path, content, tokenizer_config={"bos_token": "<|im_end|>", "eos_token": "<|endoftext|>"})
    loaded = Tokenizer.load(folder)
    assert list(loaded.start_ids) == start
    assert list(loaded.document_end_ids) == document_end
    text = loaded.encode("def area").tolist()
    assert loaded.prompt("def area") == [*start, *text, *prompt_end]
    # The library itself adds the same, before Genesis ends a document and opens a prompt.
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = library.encode("def area", add_special_tokens=True).ids
    assert [*start, *text, *document_end] in (ids, [*ids, 0])


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}])
def test_flags_of_tokenizer_config_have_no_say_beside_a_tokenizer_json_as_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path, flags: dict[str, bool]
) -> None:
    config = {"bos_token": "<|im_end|>", "eos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizer"} | flags
    for post_processor, start in ((None, ()), (START, (320,))):
        content = byte_level(tokenizer) | {"post_processor": post_processor}
        loaded = Tokenizer.load(write(tmp_path, content, tokenizer_config=config))
        assert (loaded.start_ids, loaded.document_end_ids) == (start, (0,))


def test_an_empty_prompt_starts_a_new_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.prompt("") == [0], "as every document of training begins"
    loaded = Tokenizer.load(write(tmp_path, byte_level(tokenizer)))
    assert loaded.prompt("") == [loaded.eos_id] and loaded.prompt("a") == loaded.encode("a").tolist()


def test_special_tokens_in_a_prompt_are_plain_text_unless_they_are_to_be_parsed(tokenizer: Tokenizer) -> None:
    text = "a<|endoftext|>b"
    assert tokenizer.prompt(text).count(0) == 1
    assert tokenizer.prompt(text, parse_special=True) == [0, *tokenizer.encode("a"), 0, *tokenizer.encode("b")]
    assert tokenizer.prompt(text).count(0) == 1, "parsing once changes nothing later"
    assert tokenizer.special_text(text) == "<|endoftext|>" and tokenizer.special_text("<|endoftext>") is None


def test_our_own_tokenizer_keeps_its_fingerprint_and_says_what_it_adds(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = byte_level(tokenizer)
    one = Tokenizer.load(write(tmp_path / "a", content | {"post_processor": BYTE_LEVEL}))
    two = Tokenizer.load(write(tmp_path / "b", content | {"post_processor": START}))
    assert one.fingerprint != two.fingerprint, "their documents differ"
    assert tokenizer.start_ids == tokenizer.document_end_ids == (0,)
    tokenizer.save(tmp_path / "own")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "own" / "tokenizer.json"))
    assert library.encode("def").ids == tokenizer.prompt("def")


MALFORMED: list[tuple[Any, str]] = [
    ([], "its type 'None'"),
    ({"type": "Mystery"}, "its type 'Mystery'"),
    ({"type": "TemplateProcessing"}, "no `single`"),
    ({"type": "TemplateProcessing", "single": [], "special_tokens": {}}, "holds 0 texts"),
    (template("A", "A"), "holds 2 texts"),
    (template("<nowhere>", "A"), "without ids"),
    ({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": []}}], "special_tokens": {}}, "without ids"),
    ({"type": "TemplateProcessing", "single": [3], "special_tokens": {}}, "without ids"),
    (template(*["<|im_end|>"] * 1025, "A"), "more than 1,024 ids"),
    ({"type": "BertProcessing", "sep": ["x"], "cls": ["x", 1]}, "a pair of a token and its id"),
    (start_template("<|im_end|>", 999), "an id that is not in the vocabulary"),
    ({"type": "Sequence", "processors": [{"type": "Mystery"}]}, "its type 'Mystery'"),
    ({"type": "Sequence"}, "its type 'Sequence'"),
    ({"type": "Sequence", "processors": [START, ROBERTA]}, "two of its parts"),
]


@pytest.mark.parametrize("post_processor,message", MALFORMED)
def test_a_post_processor_that_cannot_be_followed_is_a_model_error(
    tokenizer: Tokenizer, tmp_path: Path, post_processor: Any, message: str
) -> None:
    folder = write(tmp_path, byte_level(tokenizer) | {"post_processor": post_processor})
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(folder)


def test_nothing_is_added_where_there_is_no_post_processor() -> None:
    assert post_processor_affixes(None) == ((), ())


def rule(content: dict[str, Any], *, parse_special: bool = False) -> CutRule:
    return cut_rule(content, parse_special=parse_special)


def test_texts_are_cut_only_where_that_is_proven(tokenizer: Tokenizer) -> None:
    assert PATTERN in KNOWN and KNOWN <= _SPLITTING
    plain = byte_level(tokenizer)
    assert rule(plain).cut_points and not rule(plain).drops_prefix
    assert rule(sentence_piece()).drops_prefix
    assert rule(plain | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}).cut_points, "it splits"
    no_rule = [
        plain | {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        plain | {"normalizer": {"type": "Prepend", "prepend": "x"}},
        plain | {"pre_tokenizer": None},
        plain | {"pre_tokenizer": {"type": "Whitespace"}},
        plain | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        plain | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        plain | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".+"}, "behavior": "Isolated"}},
        sentence_piece() | {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}},
        sentence_piece() | {"normalizer": {"type": "Replace", "pattern": {"String": "\n"}, "content": "▁"}},
        sentence_piece() | {"model": sentence_piece()["model"] | {"byte_fallback": False}},
        sentence_piece() | {"model": sentence_piece()["model"] | {"ignore_merges": True}},
        sentence_piece() | {"model": sentence_piece()["model"] | {"vocab": {"a\n": 0, "\n": 1}}},
    ]
    for content in no_rule:
        assert not rule(content).cut_points
        assert list(rule(content).pieces("a b\nc d\n" * 9, 8, 4)) == ["a b\nc d\n" * 9]


@pytest.mark.parametrize("falls_back, times", [(True, 3), (False, 16)])
def test_a_text_too_long_for_its_tokens_is_told_by_its_length(tmp_path: Path, falls_back: bool, times: int) -> None:
    content = sentence_piece()
    content["model"]["byte_fallback"] = falls_back
    tokenizer = Tokenizer.load(write(tmp_path, content))
    assert tokenizer.longest == times * len("<0x00>")


def test_a_text_with_an_added_token_that_could_reach_over_a_cut_stays_whole(tokenizer: Tokenizer) -> None:
    text = "one two\nthree four\n" * 9
    content = byte_level(tokenizer)
    assert len(list(rule(content).pieces(text, 30, 15))) > 5
    content["added_tokens"].append(added(999, "two\nthree"))
    assert len(list(rule(content).pieces(text, 30, 15))) > 5, "it is special, and not parsed"
    assert list(rule(content, parse_special=True).pieces(text, 30, 15)) == [text]
    assert list(rule(sentence_piece(), parse_special=True).pieces(text + "<s>", 30, 15)) == [text + "<s>"]


def test_a_piece_without_a_place_in_its_window_goes_on_to_the_next() -> None:
    text = "x" * 50 + "\n" + "y" * 50 + " z"
    content = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "model": {}}
    assert list(rule(content).pieces(text, 20, 10)) == ["x" * 50 + "\n", "y" * 50, " z"]
    assert list(rule(content).pieces("x" * 90, 20, 10)) == ["x" * 90]

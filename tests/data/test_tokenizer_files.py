"""Tokenizer folders: which ids end, start and pad; what is written back; what is refused, and that nothing panics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.data import tokenizer_files
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError

FUZZ = Path(__file__).with_name("tokenizer_fuzz.py")


def added(number: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def byte_level(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json laid out as Qwen's: normalizer, post-processor, added tokens of both kinds."""
    content: dict[str, Any] = json.loads(tokenizer.files()["tokenizer.json"])
    content["normalizer"] = {"type": "NFC"}
    content["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    content["added_tokens"] += [added(320, "<|im_end|>"), added(321, "<think>", special=False)]
    return content


def sentence_piece() -> dict[str, Any]:
    """A tokenizer.json laid out as Llama 2's: spaces as a sign, bytes as a fallback, bos and eos."""
    words = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abcdehlo", "▁a", "ab"]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": ["▁ a", "a b"],
        },
    }


def metaspace() -> dict[str, Any]:
    """The same laid out as newer files: a pre-tokenizer and its inverse, and no normalizer."""
    part = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, part]}
    return {**sentence_piece(), "normalizer": None, "pre_tokenizer": part, "decoder": decoder}


def write(folder: Path, content: dict[str, Any], **companions: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name, value in companions.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def roles(tokenizer: Tokenizer) -> list[int | None]:
    return [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]


@pytest.mark.parametrize(
    "companions,expected",
    [
        ({}, [None, 0, 0]),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}, [None, 320, 0]),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}}, [None, 320, 320]),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, [None, 320, 320]),
        ({"generation_config": {"eos_token_id": [320, 0], "bos_token_id": 0, "pad_token_id": 0}}, [0, 320, 0]),
        ({"config": {"eos_token_id": 320, "pad_token_id": None}}, [None, 320, 320]),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 320}}, [None, 0, 0]),
        # What the tokenizer says of itself, also that it has no token, comes before what the model says.
        (
            {"tokenizer_config": {"bos_token": None}, "generation_config": {"bos_token_id": 0, "eos_token_id": 320}},
            [None, 320, 320],
        ),
        ({"config": {"eos_token_id": "0", "bos_token_id": 999, "pad_token_id": []}}, [None, 0, 0]),
    ],
)
def test_which_tokens_start_end_and_pad(
    tokenizer: Tokenizer, tmp_path: Path, companions: dict[str, Any], expected: list[int | None]
) -> None:
    folder = write(tmp_path / "source", byte_level(tokenizer), **companions)
    loaded = Tokenizer.load(folder)
    assert roles(loaded) == expected
    loaded.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert roles(again) == expected
    assert again.fingerprint == loaded.fingerprint


# Name -> side files, and what transformers 5 makes of them (`make peers-test` compares many more): the ids of
# SIDE_TOKENS, all special ids, and those of eos and pad.
SIDE_TOKENS = ("<tool>", "<pad>", "<new>", "<think>")
NEW, TOOL = {"content": "<new>", "special": True}, {"content": "<tool>", "normalized": True}
OWN = {"0": {"content": "<|endoftext|>", "special": True}, "320": {"content": "<|im_end|>", "special": True}}
GPT2, GENERIC = {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, {"tokenizer_class": "PreTrainedTokenizerFast"}
END = {"eos_token": "<|im_end|>"}
MAP_PAD = {"pad_token": {"content": "<pad>", "lstrip": True}}
SIDE_FILES_CASES: dict[str, tuple[dict[str, Any], list[int | None], list[int], int, int | None]] = {
    "an older list": ({"tokenizer_config": GENERIC | END, "added_tokens": {"<tool>": 322}},
                      [322, None, None, 321], [0, 320], 320, None),
    "its ids are not honoured": ({"tokenizer_config": GENERIC | END, "added_tokens": {"<tool>": 400, "<new>": 322}},
                                 [323, None, 322, 321], [0, 320], 320, None),
    "the config's list ends it": ({"tokenizer_config": GENERIC | END | {"added_tokens_decoder": {"322": NEW}},
                                   "added_tokens": {"<tool>": 322}, "special_tokens_map": MAP_PAD},
                                  [None, None, 322, 321], [0, 320, 322], 320, None),
    "the map before the config": ({"tokenizer_config": GENERIC | {"eos_token": "<|endoftext|>", "pad_token": "<new>"},
                                   "special_tokens_map": MAP_PAD | END},
                                  [None, 322, None, 321], [0, 320, 322], 320, 322),
    "extra and named ones": ({"tokenizer_config": GENERIC | END | {"additional_special_tokens": ["<tool>"],
                                                                  "image_token": "<new>"},
                              "special_tokens_map": {"additional_special_tokens": ["<pad>"]}},
                             [323, None, 322, 321], [0, 320, 322, 323], 320, None),
    "of the map alone": ({"tokenizer_config": GENERIC | END, "added_tokens": {"<pad>": 322},
                          "special_tokens_map": {"additional_special_tokens": ["<pad>"]}},
                         [None, 322, None, 321], [0, 320], 320, None),
    "an object of extra ones": ({"tokenizer_config": GENERIC | END | {"extra_special_tokens": {"t_token": "<tool>"}}},
                                [322, None, None, 321], [0, 320, 322], 320, None),
    "flags of the config's list": ({"tokenizer_config": GENERIC | END | {"added_tokens_decoder": OWN | {
        "321": {"content": "<think>", "special": True}, "322": TOOL}}},
                                   [322, None, None, 321], [0, 320, 321], 320, None),
    "a class that rebuilds": ({"tokenizer_config": GPT2 | END | {"added_tokens_decoder": OWN},
                               "config": {"model_type": "llama"}}, [None, None, None, None], [0, 320], 320, None),
    "a type that does not": ({"tokenizer_config": GPT2 | END | {"added_tokens_decoder": OWN},
                              "config": {"model_type": "phi3"}}, [None, None, None, 321], [0, 320], 320, None),
    "a class's own names": ({"config": {"model_type": "qwen3"}}, [None, None, None, 321], [0, 320], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", SIDE_FILES_CASES)
def test_tokens_that_side_files_name_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path, case: str) -> None:
    companions, ids, special, eos, pad = SIDE_FILES_CASES[case]
    loaded = Tokenizer.load(write(tmp_path / "source", byte_level(tokenizer), **companions))
    assert [loaded.token_id(token) for token in SIDE_TOKENS] == ids
    assert sorted(loaded.special_ids) == special
    assert (loaded.eos_id, loaded.pad_id) == (eos, eos if pad is None else pad)
    text = "a <tool>b <new>"
    found = loaded.encode(text, parse_special=True).tolist()
    assert [number in found for number in ids[::2] if number is not None] == [i is not None for i in ids[::2] if i]
    assert loaded.decode(found, skip_special=False) == text
    assert loaded.vocab_size == max(320, *special, *(i for i in ids if i)) + 1
    loaded.save(tmp_path / "saved")
    if "config" not in companions:
        assert Tokenizer.load(tmp_path / "saved").fingerprint == loaded.fingerprint


def test_a_token_of_a_side_file_is_found_where_special_text_is_parsed_and_only_there(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plain = Tokenizer.load(write(tmp_path / "plain", byte_level(tokenizer)))
    loaded = Tokenizer.load(write(tmp_path / "listed", byte_level(tokenizer), added_tokens={"<tool>": 322}))
    assert loaded.encode("<tool>").tolist() == [322] != plain.encode("<tool>").tolist()
    assert loaded.fingerprint != plain.fingerprint
    same = Tokenizer.load(write(tmp_path / "same", byte_level(tokenizer), added_tokens={"<think>": 321}))
    assert same.fingerprint == plain.fingerprint


def test_a_token_that_only_its_own_name_makes_special_is_a_normalized_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As in transformers: such a token of added_tokens.json comes behind those that are not normalized."""
    named = {"tokenizer_config": GENERIC | END | {"image_token": "<think>.."}, "added_tokens": {"<think>..": 322}}
    loaded = Tokenizer.load(write(tmp_path / "named", byte_level(tokenizer), **named))
    dots = loaded.encode("..").tolist()
    assert loaded.encode("<think>..", parse_special=True).tolist() == [321, *dots] and 322 in loaded.special_ids
    named["tokenizer_config"]["pad_token"] = "<think>.."  # one of the usual names
    loaded = Tokenizer.load(write(tmp_path / "usual", byte_level(tokenizer), **named))
    assert loaded.encode("<think>..", parse_special=True).tolist() == [322]


def test_files_are_written_back_as_they_were(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = write(tmp_path / "source", byte_level(tokenizer), special_tokens_map={"eos_token": "<|im_end|>"})
    config = b'{"eos_token":"<|im_end|>","pad_token":null,  "bos_token":null, "tokenizer_class":"Qwen2Tokenizer"}'
    (folder / "tokenizer_config.json").write_bytes(config)
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    Tokenizer.load(folder).save(tmp_path / "saved")
    names = {path.name for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == {
        name: (folder / name).read_bytes() for name in names
    }


def test_special_tokens_of_a_model_are_added_to_a_config_that_lacks_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = write(
        tmp_path / "source",
        byte_level(tokenizer),
        tokenizer_config={"model_max_length": 99},
        generation_config={"eos_token_id": 320},
    )
    config = json.loads(Tokenizer.load(folder).files()["tokenizer_config.json"])
    assert config == {"model_max_length": 99, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": None}


def test_added_tokens_that_are_not_special_are_read_from_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.load(write(tmp_path, byte_level(tokenizer)))
    assert loaded.encode("<think>").tolist() == [321]
    assert 320 not in loaded.encode("<|im_end|>")
    assert loaded.special_ids == {0, 320}
    assert loaded.vocab_size == 322


def test_what_would_change_the_ids_never_reaches_the_library(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = byte_level(tokenizer)
    plain = Tokenizer.load(write(tmp_path / "plain", content)).encode("def function")
    content["model"]["dropout"] = 0.5
    content["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
    content["padding"] = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    content["post_processor"] = sentence_piece()["post_processor"]
    changed = Tokenizer.load(write(tmp_path / "changed", content))
    for _ in range(5):
        assert changed.encode("def function").tolist() == plain.tolist()


def test_a_sentence_piece_tokenizer(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write(tmp_path, sentence_piece(), config={"bos_token_id": 1, "eos_token_id": 2}))
    assert roles(loaded) == [1, 2, 2]
    text = "ab hello é <s>"
    ids = loaded.encode(text)
    assert 1 not in ids
    assert loaded.decode(ids) == text


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


def put(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (without("model"), "`model` is missing"),
        (put([], "model"), "`model` is missing"),
        (without("model", "vocab"), "is missing"),
        (put({}, "model", "vocab"), "is missing"),
        (put("x", "model", "merges"), "is missing"),
        (put("Unigram", "model", "type"), "the model type is 'Unigram'"),
        (put("##", "model", "continuing_subword_prefix"), "continuing_subword_prefix"),
        (put("é#", "model", "end_of_word_suffix"), "end_of_word_suffix"),
        (put(-1, "model", "vocab", "a"), "the id of the token 'a' is '-1'"),
        (put(2**32 - 1, "model", "vocab", "a"), "not below 4,194,304"),
        (put(True, "model", "vocab", "a"), "the id of the token 'a' is 'true'"),
        (put(0, "model", "vocab", "\x1b[2J"), "two tokens have the same id"),
        (put(900, "model", "vocab", "x" * 70000), "more than 65,536 characters"),
        (put([["a", "zz"]], "model", "merges"), "zz"),
        (put(["a b c d"], "model", "merges"), "Merges"),
        (put([added(320, "")], "added_tokens"), "has no text"),
        (put([added(320, "x y"), added(321, "x y")], "added_tokens"), "has two ids"),
        (put([{"content": "x y"}], "added_tokens"), "has no id"),
        (put([added(0, "<|endoftext|>"), added(999, "x y")], "added_tokens"), "does not get its id"),
        (put({"type": "FixedLength", "length": 0}, "pre_tokenizer"), "of the type 'FixedLength'"),
        (put({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "normalizer"), "of the type 'Precompiled'"),
        (put({"type": ["NFC"]}, "normalizer"), "which is not supported"),
        (put(["NFC"], "normalizer"), "of the type 'null'"),
        (put({"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "normalizer"), "an empty pattern"),
        (put({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"}, "pre_tokenizer"), "cannot be used"),
        (put({"type": "Sequence", "decoders": [{"type": "CTC"}]}, "decoder"), "of the type 'CTC'"),
        (put({"type": "Sequence", "decoders": 3}, "decoder"), "of the type 'Sequence'"),
    ],
)
def test_a_malformed_tokenizer_is_a_model_error(
    tokenizer: Tokenizer, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = byte_level(tokenizer)
    change(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(write(tmp_path, content))
    assert message in str(caught.value)
    assert caught.value.exit_code == 5
    assert str(tmp_path / "tokenizer.json") in caught.value.where
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "data,message",
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b'{"model": {}, "model": {}}', "appears twice"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b'{"a": NaN}', "not finite"),
    ],
)
def test_a_file_that_is_no_strict_json_object_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "companions,message",
    [
        ({"tokenizer_config": {"pad_token": 3}}, "`pad_token` is or has '3'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<a>"}}}}, "'x', which names no token"),
        ({"tokenizer_config": {"extra_special_tokens": "<a>"}}, "which names no token"),
        ({"special_tokens_map": {"additional_special_tokens": [3]}}, "'3', which names no token"),
        ({"added_tokens": {"<tool>": "2.5"}}, "'2.5', which names no token"),
        (
            {"tokenizer_config": {"split_special_tokens": True}},
            "`split_special_tokens` of tokenizer_config.json is 'true'",
        ),
        ({"tokenizer_config": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}}, "`fast_tokenizer_files` of"),
        ({"tokenizer_config": []}, "not a JSON object"),
        ({"generation_config": "x"}, "not a JSON object"),
    ],
)
def test_malformed_companions_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, companions: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write(tmp_path, byte_level(tokenizer), **companions))


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = byte_level(tokenizer)
    content["added_tokens"] = []
    with pytest.raises(ModelError, match="names no end-of-text token"):
        Tokenizer.load(write(tmp_path, content))


def test_missing_large_and_special_files_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="no tokenizer exists at"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="FIFO"):
        Tokenizer.load(tmp_path)
    folder = write(tmp_path / "large", byte_level(tokenizer))
    (folder / "generation_config.json").symlink_to("/etc/hostname")
    with pytest.raises(ModelError, match="symbolic link"):
        Tokenizer.load(folder)
    (folder / "generation_config.json").unlink()
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ModelError, match="more than the 100 allowed"):
        Tokenizer.load(folder)


def test_a_model_config_that_vanishes_is_an_error(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the folder is listed, and after it."""
    write(tmp_path, byte_level(tokenizer))
    Tokenizer.load(tmp_path)
    with monkeypatch.context() as patch:
        listed = [*os.listdir(tmp_path), "config.json"]
        patch.setattr(os, "listdir", lambda path: listed)
        with pytest.raises(ModelError, match=r"config\.json"):
            Tokenizer.load(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"no config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_tokenizers_load_or_are_refused_and_never_panic(
    tokenizer: Tokenizer, tmp_path: Path, seed: int
) -> None:
    write(tmp_path, byte_level(tokenizer) if seed == 1 else sentence_piece())
    count = 150
    result = subprocess.run(
        [sys.executable, str(FUZZ), str(tmp_path), str(seed), str(count)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    outcome = json.loads(result.stdout)
    assert outcome["loaded"] + outcome["refused"] == count
    assert min(outcome.values()) > count // 20, "the mutations must be such that some pass and some do not"


def test_a_folder_without_a_tokenizer_says_where_one_may_be_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == str(tmp_path) and "data.tokenizer" in caught.value.next
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer\.model is not supported") as caught:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in caught.value.next

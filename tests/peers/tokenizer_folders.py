"""Tokenizer folders whose side files contradict each other: ids and special tokens are those of transformers.

Run with `make peers-test`. Each folder is drawn at random: which tokens tokenizer.json, `tokenizer_config.json` (roles,
lists old and new, tokens with names of their own), `special_tokens_map.json` and `added_tokens.json` name, at which
ids, with which flags, for which class and model type. In one folder a token has the same flags
wherever it is named in full: of two definitions transformers takes one or the other by the order in which it happens to
add them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import GenesisError

FOLDERS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
TOKENS = ["<a>", "<b>", "<c>", "<tool>", "<pad>", "<x>", "hello", "<a><b>"]
TEXT = "the <a> sea<b>and<c>hello <tool>x<pad> <x><a><b> <|endoftext|>hello"
CLASSES = ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend", "LlamaTokenizerFast"]
TYPES = ["llama", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2"]
Files = dict[str, dict[str, Any]]


def drawn(rng: random.Random, base: dict[str, Any]) -> Files:
    """The files of a folder by name."""
    flags = {token: {k: rng.random() < 0.3 for k in ("lstrip", "rstrip")} | {"single_word": False} for token in TOKENS}
    special = {token: rng.random() < 0.6 for token in TOKENS}

    def full(token: str) -> dict[str, Any]:
        return {"content": token, "special": special[token], "normalized": not special[token], **flags[token]}

    def named() -> Any:
        return rng.choice(
            [token for token in TOKENS if not any((flags[token]["lstrip"], flags[token]["rstrip"]))] or [""]
        )

    def some(most: int) -> list[str]:
        return rng.sample(TOKENS, rng.randint(1, most))

    content, last = json.loads(json.dumps(base)), len(base["model"]["vocab"])
    content["added_tokens"] += [{"id": last + i, **full(token)} for i, token in enumerate(some(3)) if token != "hello"]
    for i, token in enumerate(content["added_tokens"][1:]):
        token["id"] = last + i
    after = last + len(content["added_tokens"]) - 1
    config: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if rng.random() < 0.8:
        config["tokenizer_class"] = rng.choice(CLASSES)
    for role in ("pad_token", "unk_token", "image_token"):
        if rng.random() < 0.2 and (token := named()):
            config[role] = token
    if rng.random() < 0.3:
        kept = rng.choice([content["added_tokens"], content["added_tokens"][:1]])
        more = [token for token in some(3) if token not in [each["content"] for each in kept]]
        listed = {str(each["id"]): {k: each[k] for k in each if k != "id"} for each in kept}
        config["added_tokens_decoder"] = listed | {str(after + 2 * i): full(token) for i, token in enumerate(more)}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if rng.random() < 0.2:
            config[key] = [token for token in some(2) if special[token] and not any(flags[token].values())]
    files: Files = {"tokenizer.json": content, "config.json": {"model_type": rng.choice(TYPES)}}
    if rng.random() < 0.9:
        files["tokenizer_config.json"] = config
    if rng.random() < 0.3:
        files["special_tokens_map.json"] = {"eos_token": "<|endoftext|>"} | ({"pad_token": t} if (t := named()) else {})
    if rng.random() < 0.4:
        files["added_tokens.json"] = {token: after + i + rng.choice([0, 0, 3]) for i, token in enumerate(some(3))}
    return files


def theirs(folder: Path) -> tuple[list[int], list[int], str | None]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return ids, sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special), tokenizer.eos_token


def ours(folder: Path) -> tuple[list[int], list[int], str | None]:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT, parse_special=True).tolist()
    return ids, sorted(tokenizer.special_ids), tokenizer.token(tokenizer.eos_id)


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers

    transformers.logging.set_verbosity_error()
    trained = train_bpe(["the sea and the land, the tool and think, hello world " * 20], vocab_size=300)
    base, wrong, skipped = json.loads(trained.files()["tokenizer.json"]), 0, 0
    with tempfile.TemporaryDirectory() as root:
        for number in range(FOLDERS):
            folder = Path(root) / str(number)
            folder.mkdir()
            files = drawn(random.Random(number), base)
            for name, value in files.items():
                (folder / name).write_text(json.dumps(value))
            try:
                expected = theirs(folder)
            except Exception:  # a folder that transformers refuses, in whatever way
                skipped += 1
                continue
            try:
                found: Any = ours(folder)
            except GenesisError as error:
                found = str(error)
            if found != expected and (expected[2] is not None or found[:2] != expected[:2]):
                wrong += 1
                files["tokenizer.json"] = {"added_tokens": files["tokenizer.json"]["added_tokens"]}
                print(f"folder {number}: {json.dumps(files)}\n  transformers {expected}\n  genesis      {found}")
    print(f"{FOLDERS} tokenizer folders, {skipped} of which transformers does not load: {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

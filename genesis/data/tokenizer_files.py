"""The files of a tokenizer folder, read strictly: what passes here is a BPE that the tokenizers library can run.

The library ends in a panic on some malformed files, and obeys others that would drop text, pad it or encode it by
chance. So the parts that it may see are listed here; truncation, padding, dropout and post-processors never reach it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from genesis.data import added_tokens
from genesis.data.added_tokens import all_added_tokens, rebuilding_class, tokenizer_settings
from genesis.data.tokenizer_cache import CheckedTokenizer, cached_tokenizer
from genesis.errors import ModelError, escape
from genesis.files import strict_json
from genesis.files.boundary import boundary
from genesis.files.hf import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER_CONFIG
from genesis.files.paths import exists, is_folder, quote, safe_join
from genesis.files.strict_json import parse_object, read_limited

TOKENIZER_NAME = "tokenizer.json"
SENTENCE_PIECE = "tokenizer.model"
MAPPING_NAME = "special_tokens_map.json"
ADDED_NAME = "added_tokens.json"
MODEL_CONFIG = "config.json"
_SIDE_FILES = (TOKENIZER_CONFIG, MAPPING_NAME, ADDED_NAME)
_MODEL_FILES = (GENERATION_CONFIG, MODEL_CONFIG)  # read for the roles of tokens, and no files of the tokenizer

MAX_TOKENIZER_BYTES = 64 << 20
MAX_COMPANION_BYTES = 4 << 20
MAX_VOCAB = 1 << 22
MAX_TOKEN_CHARS = 1 << 16

ROLES = ("bos", "eos", "pad")
# Names under which tokenizers that say nothing else keep their end of text, the likeliest first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# Part of a tokenizer.json -> where a Sequence keeps its members, and the types that BPEs of supported models use.
_TYPES: Mapping[str, tuple[str, frozenset[str]]] = {
    "normalizer": (
        "normalizers",
        frozenset(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "Strip", "StripAccents"]),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        frozenset(["ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"]),
    ),
    "decoder": ("decoders", frozenset(["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"])),
}
_CODE = (
    Path(__file__),
    Path(added_tokens.__file__),
    Path(strict_json.__file__),
)  # what decides what is made of the files
_NEXT = "take the tokenizer again from its source, or leave data.tokenizer out to train one on the data"


@dataclass(frozen=True)
class TokenizerFiles:
    """A checked tokenizer.

    Attributes:
        checked: what the checks made of the files.
        files: name -> bytes of every file to write back, as they were found.
        where: how errors name the tokenizer.
    """

    checked: CheckedTokenizer
    files: Mapping[str, bytes]
    where: str

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The whole tokenizer.json with all added tokens, parsed when it is first asked for: a large one takes as long
        as to load.
        """
        added = {key: value for key, value in self.checked.parts.items() if key == "added_tokens"}
        return {**parse_object(self.files[TOKENIZER_NAME], where=self.where), **added}


@boundary(ModelError, "reading the tokenizer")
def read_tokenizer(path: str | os.PathLike[str]) -> TokenizerFiles:
    """The tokenizer in the folder `path`, or of the tokenizer.json at `path` with the files next to it.

    Raises:
        ModelError: missing, too large, malformed, of a kind that is not supported, or without an end-of-text token.
    """
    path = Path(path)
    folder, name = (path, TOKENIZER_NAME) if is_folder(path) or not exists(path) else (path.parent, path.name)
    where = escape(folder / name)
    if not is_folder(folder):
        raise ModelError(f"there is no tokenizer at {quote(os.fspath(path), 400)}", next="check data.tokenizer")
    if not exists(folder / name):
        raise _without_tokenizer(folder)
    files = {TOKENIZER_NAME: read_limited(safe_join(folder, name, where=where), MAX_TOKENIZER_BYTES)}
    for companion in (TOKENIZER_CONFIG, MAPPING_NAME, ADDED_NAME, CHAT_TEMPLATE, GENERATION_CONFIG, MODEL_CONFIG):
        if (data := _companion(folder, companion)) is not None:
            files[companion] = data
    checked = cached_tokenizer(files, _CODE, lambda: _checked(files, folder, where))
    return TokenizerFiles(checked, {k: v for k, v in files.items() if k not in _MODEL_FILES}, where)


def checked_content(content: Mapping[str, Any], specials: Mapping[str, str | None], last_id: int) -> CheckedTokenizer:
    """What is kept of a tokenizer.json, whose ids go up to `last_id`."""
    model = {"type": "BPE", **content["model"], "dropout": None}
    seen = {name: content.get(name) for name in ("version", "added_tokens", *_TYPES)}
    runnable = {**seen, "model": model, "truncation": None, "padding": None, "post_processor": None}
    # Compact: the library parses 150,000 tokens in two thirds of the time that escapes and spaces take.
    text = json.dumps(runnable, ensure_ascii=False, separators=(",", ":"))
    parts = {**content, "model": {key: value for key, value in model.items() if key not in ("vocab", "merges")}}
    return CheckedTokenizer(text, parts, specials, last_id + 1)


def _checked(files: Mapping[str, bytes], folder: Path, where: str) -> CheckedTokenizer:
    content = parse_object(files[TOKENIZER_NAME], where=where)
    _checked_ids(content, where)
    _check_parts(content, where)
    beside = {n: parse_object(files[n], where=escape(folder / n)) for n in (*_SIDE_FILES, *_MODEL_FILES) if n in files}
    config, mapping, listed = (beside.get(name, {}) for name in _SIDE_FILES)
    if config.get("split_special_tokens") or config.get("fast_tokenizer_files", [TOKENIZER_NAME]) != [TOKENIZER_NAME]:
        key = "split_special_tokens" if config.get("split_special_tokens") else "fast_tokenizer_files"
        raise _malformed(f"`{key}` of {TOKENIZER_CONFIG} is {quote(config[key])}, which is not supported", where)
    decoder = content.get("decoder")
    is_byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
    rebuilt = rebuilding_class(config, beside.get(MODEL_CONFIG, {}).get("model_type"), is_byte_level)
    settings, own = tokenizer_settings(config, mapping, rebuilt, escape(folder)), _added(content, where)
    tokens = all_added_tokens(own, content["model"]["vocab"], settings, listed, rebuilt, escape(folder))
    if tokens != own:
        content["added_tokens"] = tokens
    ids = _checked_ids(content, where)
    models = [beside[name] for name in _MODEL_FILES if name in beside]
    return checked_content(content, _specials(content, settings, models, ids, escape(folder)), max(ids.values()))


def _without_tokenizer(folder: Path) -> ModelError:
    """The error of a folder that has no tokenizer.json."""
    what, next = f"{escape(folder)} has no {TOKENIZER_NAME}", f"put the model's {TOKENIZER_NAME} there"
    if exists(folder / SENTENCE_PIECE):
        what += f", and {SENTENCE_PIECE} is not read"
        next += " (transformers' AutoTokenizer writes one: save_pretrained)"
    return ModelError(what, where=escape(folder), next=f"{next}, or name a folder that has one as data.tokenizer")


def _companion(folder: Path, name: str) -> bytes | None:
    if not exists(folder / name):
        return None
    return read_limited(safe_join(folder, name, where=escape(folder)), MAX_COMPANION_BYTES)


def _checked_ids(content: Mapping[str, Any], where: str) -> dict[str, int]:
    """Token -> id of the vocabulary and the added tokens; every id is used once."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise _malformed("there is no `model`", where)
    if model.get("type", "BPE") != "BPE":
        raise _malformed(f"the model type is {quote(model['type'])}; Genesis reads BPE tokenizers", where)
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise _malformed(f"`model.{affix}` is set, which no supported model uses", where)
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not vocab:
        raise _malformed("`model.vocab` or `model.merges` is missing", where)
    ids = dict(vocab)
    for token in _added(content, where):
        if ids.setdefault(token["content"], token["id"]) != token["id"]:
            raise _malformed(f"the added token {quote(token['content'])} has two ids", where)
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < MAX_VOCAB:
            raise _malformed(f"the id of the token {quote(token)} is {quote(number)}, not below {MAX_VOCAB:,}", where)
        if len(token) > MAX_TOKEN_CHARS:
            raise _malformed(f"the token {quote(token)} has more than {MAX_TOKEN_CHARS:,} characters", where)
    if len(set(ids.values())) < len(ids):
        raise _malformed("two tokens have the same id", where)
    return ids


def _added(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise _malformed("an entry of `added_tokens` has no text", where)
        if type(token.get("id")) is not int:
            raise _malformed(f"the added token {quote(token['content'])} has no id", where)
    return list(added) if isinstance(added, list) else []


def _check_parts(content: Mapping[str, Any], where: str) -> None:
    """Refuse normalizers, pre-tokenizers and decoders that are not listed, and patterns that match nothing at all."""
    for name, (members, types) in _TYPES.items():
        for part in _members(content.get(name), members):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in types:
                raise _malformed(f"the {name} has a part of the type {quote(kind)}, which is not supported", where)
            pattern = part.get("pattern")
            if isinstance(pattern, dict) and "" in pattern.values():
                raise _malformed(f"the {name} has an empty pattern", where)


def _members(part: Any, key: str) -> Iterator[Any]:
    """The parts below `part`, with sequences opened; their depth is limited by the JSON's."""
    if isinstance(part, dict) and part.get("type") == "Sequence" and isinstance(part.get(key), list):
        for member in part[key]:
            yield from _members(member, key)
    elif part is not None:
        yield part


def _specials(
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    models: list[dict[str, Any]],
    ids: Mapping[str, int],
    where: str,
) -> dict[str, str | None]:
    """The texts of bos, eos and pad: by the tokenizer's own files, else by the model's, else by the usual names."""
    by_id = {number: token for token, number in ids.items()}
    found: dict[str, str | None] = {}
    for role in ROLES:
        named = settings.get(key := f"{role}_token")
        found[role] = named["content"] if isinstance(named, Mapping) else named
        if key not in settings:
            found[role] = next((by_id[i] for config in models if (i := _id_of(config, role)) in by_id), None)
    if found["eos"] is None:
        texts = {token["content"] for token in _added(content, where)}
        found["eos"] = next((token for token in END_TOKENS if token in texts), None)
    if found["eos"] is None:
        what = "the tokenizer names no end-of-text token, which training needs after each document"
        raise ModelError(what, where=where, next=f"name it as eos_token in {TOKENIZER_CONFIG}")
    return found


def _id_of(config: Mapping[str, Any], role: str) -> int:
    """The id of `role` in a model's config, of a list the first; -1 where there is none."""
    value = config.get(f"{role}_token_id")
    if isinstance(value, list) and value:
        value = value[0]
    return value if type(value) is int else -1


def _malformed(what: str, where: str) -> ModelError:
    return ModelError(f"the tokenizer cannot be used: {what}", where=where, next=_NEXT)

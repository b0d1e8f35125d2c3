"""The files of a tokenizer folder, read strictly: only a BPE that the tokenizers library can run is accepted.

The library panics on some malformed files, and others make it drop, pad or randomly encode text. The parts that it may
receive are therefore listed here; truncation, padding, dropout and post-processors never reach it. A child process
first tries parts whose time or memory is not bounded.

The user's cache stores the results for large files. Each start reads and hashes the files, so that a changed one is
checked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from genesis.data.pieces import KNOWN
from genesis.errors import ModelError, escape
from genesis.files import strict_json
from genesis.files.boundary import boundary
from genesis.files.cache import Cache, user_folder
from genesis.files.hf import CHAT_TEMPLATE, GENERATION_CONFIG, INDEX_NAME, TOKENIZER_CONFIG, WEIGHTS_NAME
from genesis.files.paths import exists, is_folder, quote, safe_join
from genesis.files.strict_json import parse_object, read_limited

TOKENIZER_NAME = "tokenizer.json"
SENTENCE_PIECE = "tokenizer.model"
MAPPING_NAME = "special_tokens_map.json"
ADDED_NAME = "added_tokens.json"
MODEL_CONFIG = "config.json"
_SIDE_FILES = (TOKENIZER_CONFIG, MAPPING_NAME, ADDED_NAME)
_MODEL_FILES = (GENERATION_CONFIG, MODEL_CONFIG)  # read for the roles of tokens; not part of the tokenizer

MAX_TOKENIZER_BYTES = 64 << 20
MAX_COMPANION_BYTES = 4 << 20
MAX_VOCAB = 1 << 22
MAX_TOKEN_CHARS = 1 << 16

ROLES = ("bos", "eos", "pad")
# Names of the end of text in tokenizers that do not define it, the likeliest first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# Part of a tokenizer.json -> the key of a Sequence's members, and the types that BPEs of supported models use.
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
_CODE = (Path(__file__), Path(strict_json.__file__))  # the code that determines the result of the checks
_REMEDY = "download the tokenizer again, or remove data.tokenizer to train one on the data"


@dataclass(frozen=True)
class TokenizerFiles:
    """A checked tokenizer.

    Attributes:
        checked: result of the checks.
        files: name -> original bytes of every file to write back.
        where: name of the tokenizer in errors.
    """

    checked: CheckedTokenizer
    files: Mapping[str, bytes]
    where: str

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The complete tokenizer.json with all added tokens. It is parsed on first use, because that is slow."""
        added = {key: value for key, value in self.checked.parts.items() if key == "added_tokens"}
        return {**parse_object(self.files[TOKENIZER_NAME], where=self.where), **added}


@boundary(ModelError, "reading the tokenizer")
def read_tokenizer(path: str | os.PathLike[str]) -> TokenizerFiles:
    """Read the tokenizer in the folder `path`, or the tokenizer.json at `path` with the files next to it.
    Raises: ModelError: it is missing, too large, malformed or not supported, or has no end-of-text token.
    """
    path = Path(path)
    folder, name = (path, TOKENIZER_NAME) if is_folder(path) or not exists(path) else (path.parent, path.name)
    where = escape(folder / name)
    if not is_folder(folder):
        raise ModelError(f"no tokenizer exists at {quote(os.fspath(path), 400)}", next="check data.tokenizer")
    if not exists(folder / name):
        raise _without_tokenizer(folder)
    # A file that is listed but vanishes before it is read is an error: the tokenizer would differ without it.
    names = set(os.listdir(folder))
    if MODEL_CONFIG not in names and names & {WEIGHTS_NAME, INDEX_NAME}:
        raise ModelError(f"the model folder has no {MODEL_CONFIG}", where=escape(folder), next=_REMEDY)
    files = {TOKENIZER_NAME: read_limited(safe_join(folder, name, where=where), MAX_TOKENIZER_BYTES)}
    for companion in (TOKENIZER_CONFIG, MAPPING_NAME, ADDED_NAME, CHAT_TEMPLATE, GENERATION_CONFIG, MODEL_CONFIG):
        if companion in names:
            files[companion] = read_limited(safe_join(folder, companion, where=escape(folder)), MAX_COMPANION_BYTES)
    checked = cached_tokenizer(files, _CODE, lambda: _checked(files, folder, where))
    return TokenizerFiles(checked, {k: v for k, v in files.items() if k not in _MODEL_FILES}, where)


def checked_content(content: Mapping[str, Any], specials: Mapping[str, str | None], last_id: int) -> CheckedTokenizer:
    """Return what is kept of a tokenizer.json, whose ids go up to `last_id`."""
    model = {"type": "BPE", **content["model"], "dropout": None}
    seen = {name: content.get(name) for name in ("version", "added_tokens", *_TYPES)}
    runnable = {**seen, "model": model, "truncation": None, "padding": None, "post_processor": None}
    # Compact JSON: the library parses 150,000 tokens in two thirds of the time that escapes and spaces take.
    text = json.dumps(runnable, ensure_ascii=False, separators=(",", ":"))
    parts = {**content, "model": {key: value for key, value in model.items() if key not in ("vocab", "merges")}}
    return CheckedTokenizer(text, parts, specials, last_id + 1)


def _checked(files: Mapping[str, bytes], folder: Path, where: str) -> CheckedTokenizer:
    # Check tokenizer.json, then combine it with the side files.
    content = parse_object(files[TOKENIZER_NAME], where=where)
    _checked_ids(content, where)
    _check_parts(content, where)
    beside = {n: parse_object(files[n], where=escape(folder / n)) for n in (*_SIDE_FILES, *_MODEL_FILES) if n in files}
    config, mapping, listed = (beside.get(name, {}) for name in _SIDE_FILES)
    if config.get("split_special_tokens") or config.get("fast_tokenizer_files", [TOKENIZER_NAME]) != [TOKENIZER_NAME]:
        key = "split_special_tokens" if config.get("split_special_tokens") else "fast_tokenizer_files"
        raise refused(f"`{key}` of {TOKENIZER_CONFIG} is {quote(config[key])}, which is not supported", where)
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
    what, next = f"{escape(folder)} has no {TOKENIZER_NAME}", f"put the model's {TOKENIZER_NAME} there"
    if exists(folder / SENTENCE_PIECE):
        what += f", and {SENTENCE_PIECE} is not supported"
        next += " (transformers' AutoTokenizer writes one: save_pretrained)"
    return ModelError(what, where=escape(folder), next=f"{next}, or set data.tokenizer to a folder that has one")


def _checked_ids(content: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return token -> id of the vocabulary and the added tokens; every id is unique."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise refused("`model` is missing", where)
    if model.get("type", "BPE") != "BPE":
        raise refused(f"the model type is {quote(model['type'])}; Genesis reads BPE tokenizers", where)
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise refused(f"`model.{affix}` is set, which no supported model uses", where)
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not vocab:
        raise refused("`model.vocab` or `model.merges` is missing", where)
    ids = dict(vocab)
    for token in _added(content, where):
        if ids.setdefault(token["content"], token["id"]) != token["id"]:
            raise refused(f"the added token {quote(token['content'])} has two ids", where)
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < MAX_VOCAB:
            raise refused(f"the id of the token {quote(token)} is {quote(number)}, not below {MAX_VOCAB:,}", where)
        if len(token) > MAX_TOKEN_CHARS:
            raise refused(f"the token {quote(token)} has more than {MAX_TOKEN_CHARS:,} characters", where)
    if len(set(ids.values())) < len(ids):
        raise refused("two tokens have the same id", where)
    return ids


def _added(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise refused("an entry of `added_tokens` has no text", where)
        if type(token.get("id")) is not int:
            raise refused(f"the added token {quote(token['content'])} has no id", where)
    return list(added) if isinstance(added, list) else []


def _check_parts(content: Mapping[str, Any], where: str) -> None:
    for name, (members, types) in _TYPES.items():
        for part in _members(content.get(name), members):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in types:
                raise refused(f"the {name} has a part of the type {quote(kind)}, which is not supported", where)
            pattern = part.get("pattern")
            if isinstance(pattern, dict) and "" in pattern.values():
                raise refused(f"the {name} has an empty pattern", where)


def _members(part: Any, key: str) -> Iterator[Any]:
    """Yield the parts below `part`, with sequences expanded; the JSON reader limits their depth."""
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
    """Return the texts of bos, eos and pad from the tokenizer's own files, else the model's, else by usual names."""
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
    """Return the id of `role` in a model's config, the first one of a list; -1 without one."""
    value = config.get(f"{role}_token_id")
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int else -1


def refused(what: str, where: str) -> ModelError:
    """Return the error of a tokenizer that cannot be used."""
    return ModelError(f"the tokenizer cannot be used: {what}", where=where, next=_REMEDY)


# --- Added tokens -----------------------------------------------------------------------------------------------------
# Precedence and ids follow transformers (5.x): a new token takes the next free id, whatever id a side file gives it.


_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_LISTED, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
# transformers' classes that only read vocabulary and merges of tokenizer.json, with their default special tokens.
_END = "<|endoftext|>"
_REBUILT: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GemmaTokenizer": {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}
# The class by the model's type: defaults if the config names none, and overrides ("" for a class that is not above).
_USUAL = {"gemma3_text": "GemmaTokenizer", "qwen3": "Qwen2Tokenizer"}
_FIXED = {"qwen2": "Qwen2Tokenizer", "granite": "", "mistral": "", "olmo2": "", "phi3": ""}


def rebuilding_class(config: Mapping[str, Any], model_type: object, is_byte_level: bool) -> str | None:
    """Return transformers' class for a tokenizer if it ignores the added tokens of tokenizer.json, else None."""
    kind = str(model_type)
    name = _FIXED.get(kind, str(config.get("tokenizer_class") or _USUAL.get(kind)).removesuffix("Fast"))
    return None if name not in _REBUILT or (name == "LlamaTokenizer" and is_byte_level) else name


def tokenizer_settings(
    config: Mapping[str, Any], mapping: Mapping[str, Any], rebuilt: str | None, where: str
) -> dict[str, Any]:
    """Return `tokenizer_config.json`, overridden by `special_tokens_map.json` unless it lists added tokens.
    `rebuilt` comes from `rebuilding_class`.
    """
    settings = {**_REBUILT.get(rebuilt or "", {}), **config}
    if _OLD_EXTRA in settings and not settings.get(_EXTRA):
        settings[_EXTRA] = settings.pop(_OLD_EXTRA)
    if isinstance(settings.get(_EXTRA), Mapping):
        settings |= settings.pop(_EXTRA)
    for key, value in mapping.items() if _LISTED not in settings else ():
        if key == _EXTRA and isinstance(value, Mapping):
            settings |= value
        elif key == _EXTRA:
            settings[key] = [*_typed(settings.get(key), list, where), *map(_special, _typed(value, list, where))]
        else:
            settings[key] = _special(value)
    return settings


def all_added_tokens(
    kept: Sequence[dict[str, Any]],
    vocabulary: Mapping[str, int],
    settings: Mapping[str, Any],
    listed: Mapping[str, Any],
    rebuilt: str | None,
    where: str,
) -> list[dict[str, Any]]:
    """Return the added tokens of tokenizer.json, followed by those that only other files name.

    Args:
        kept: checked tokens of tokenizer.json.
        vocabulary: token -> id of its model.
        settings: see `tokenizer_settings`.
        listed: `added_tokens.json`: token -> id. It applies if the settings list no added tokens.
        rebuilt: see `rebuilding_class`.

    Raises:
        ModelError: a file names a token in an unknown form.
    """
    # Collect the named tokens of the settings.
    usual = [_token(settings[key], where, key) for key in _NAMED if settings.get(key) is not None]
    others = [key for key in settings if key.endswith("_token") and key not in _NAMED]  # may be something else
    named = [*usual, *(_token(settings[key], where, key) for key in others if isinstance(settings[key], str | Mapping))]
    extra = [_token(each, where) for each in _typed(settings.get(_EXTRA, settings.get(_OLD_EXTRA)), list, where)]
    special = {token["content"] for token in named}
    # List the added tokens by id, then the named ones that are new.
    if _LISTED in settings:
        by_id = {_id(key, where): _token(each, where) for key, each in _typed(settings[_LISTED], dict, where).items()}
    else:
        known = {token["content"] for token in (*usual, *(extra if _EXTRA in settings else ()))}
        by_id = {_id(i, where): _token({"content": t, "special": t in known}, where) for t, i in listed.items()}
        by_id |= {token["id"]: token for token in kept}
    found = {} if rebuilt else {token["content"]: token for token in kept}
    added = {token["content"]: token for _, token in sorted(by_id.items())}
    for token in (*named, *extra):
        if token["content"] not in found:
            added.setdefault(token["content"], token)
    if rebuilt == "Qwen2Tokenizer":  # it adds its special tokens again
        added |= {token["content"]: _token(token["content"], where) for token in (*named, *extra)}
    # Give new tokens the next free ids.
    after = max([len(vocabulary), *(token["id"] + 1 for token in found.values())])
    for text, token in added.items():
        number = found[text]["id"] if text in found else vocabulary.get(text, after)
        after = max(after, number + 1)
        new = {**token, "id": number, "special": bool(token.get("special")) or text in special}
        if any(new.get(key) != found.get(text, {}).get(key) for key in (*_FLAGS, "special")):
            found[text] = new
    return list(found.values())


def _special(value: Any) -> Any:
    return {**value, "special": True} if isinstance(value, Mapping) else value


def _token(value: Any, where: str, key: str = "added_tokens") -> dict[str, Any]:
    """Return a text or a side file's object as a token of tokenizer.json, without an id."""
    given = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str) or not given["content"]:
        raise _unknown(value, where, key)
    special = bool(given.get("special"))
    flags = {key: bool(given.get(key, key == "normalized" and not special)) for key in _FLAGS}
    return {"id": -1, "content": given["content"], **flags, "special": special}


def _typed(value: Any, kind: type, where: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise _unknown(value, where)
    return value or kind()


def _id(value: Any, where: str) -> int:
    if not str(value).isdecimal():
        raise _unknown(value, where)
    return int(value)


def _unknown(value: Any, where: str, key: str = "added_tokens") -> ModelError:
    what = f"the tokenizer cannot be used: `{escape(key)[:80]}` is or has {quote(value)}, which names no token"
    return ModelError(what, where=where, next=f"correct {TOKENIZER_CONFIG} and the files next to it")


# --- Results of earlier checks ----------------------------------------------------------------------------------------


MIN_BYTES = 1 << 20  # smaller files get no entry; checking 1 MiB takes 0.1 s
MAX_BYTES = 128 << 20  # size of an entry


@dataclass(frozen=True)
class CheckedTokenizer:
    """The parts of a tokenizer's files that are needed to run it.

    Attributes:
        runnable: the tokenizer.json for the library, reduced to the encoding and decoding of plain text.
        parts: the parsed tokenizer.json, without the vocabulary and the merges.
        specials: bos, eos and pad -> the token's text; None if the tokenizer has none.
        vocab_size: the largest id + 1: the rows that an embedding needs.
    """

    runnable: str
    parts: Mapping[str, Any]
    specials: Mapping[str, str | None]
    vocab_size: int


@cache
def user_cache() -> Cache:
    """Return the user's cache of results about tokenizers."""
    return Cache.of_user(user_folder("tokenizers"))


def cached_tokenizer(
    files: Mapping[str, bytes], code: Collection[Path], check: Callable[[], CheckedTokenizer]
) -> CheckedTokenizer:
    """Return the result of `check()` for `files`, or an earlier process's result for the same bytes; `code` lists the
    source files that determine it.
    """
    if sum(map(len, files.values())) < MIN_BYTES:
        return check()
    contents = {**files, **{f"code {os.fspath(path)}": path.read_bytes() for path in code}}
    hashes = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    name = f"{hashlib.sha256(json.dumps(hashes).encode()).hexdigest()}.checked"
    if (entry := user_cache().find(name, limit=MAX_BYTES)) is not None:
        return CheckedTokenizer(str(entry.part("runnable"), "utf-8"), **json.loads(bytes(entry.part("rest"))))
    found = check()
    rest = {"parts": found.parts, "specials": found.specials, "vocab_size": found.vocab_size}
    user_cache().put(name, {"runnable": found.runnable.encode(), "rest": json.dumps(rest).encode()})
    return found


# --- Limits of the library --------------------------------------------------------------------------------------------
# A kilobyte of normalizers can double a text forty times. The library then ends the process, because its failed
# allocations raise no exception. For most tokenizers the structure of the parts bounds the cost. Any other is tried in
# a child process with limits on time and memory, and the result is cached by the content's hash.


MAX_PARTS = 32  # of a sequence of normalizers, pre-tokenizers or decoders
MAX_GROWTH = 16.0  # bytes after all replacements per byte before them
MAX_PREPENDED = 64  # characters
MAX_ADDED, MAX_ADDED_CHARS = 1 << 15, 1 << 20

MEMORY_BYTES = 2 << 30  # plus 32 for every byte of the file
CPU_SECONDS = 2  # plus one for every 2 MiB of the file
GROWTH_TRIED = 64  # limit of growth in the child


def check_bounded(content: Mapping[str, Any], runnable: str, where: str, library: ModuleType) -> None:
    """Check that the tokenizers `library` can safely run `runnable`, which was made from the tokenizer.json `content`.
    Raises: ModelError: a child that tried it reached the limits, or the library ended it.
    """
    if is_bounded(content):
        return
    name = f"{hashlib.sha256(f'1 {library.__version__} {runnable}'.encode()).hexdigest()}.tried"
    if user_cache().find(name, limit=4096) is not None:
        return
    if reason := _try_in_child(runnable, Path(str(library.__file__)).parents[1]):
        raise refused(reason, where)
    user_cache().put(name, {"ok": b""})


def is_bounded(content: Mapping[str, Any]) -> bool:
    """Whether the structure bounds the parts' cost: linear in the text, with a small factor."""
    for part, (members, _) in _TYPES.items():
        leaves = [leaf for leaf in _members(content.get(part), members) if isinstance(leaf, dict)]
        growth, prepended = 1.0, 0
        for leaf in leaves:
            pattern = leaf.get("pattern")
            if isinstance(pattern, dict):
                kind, text = next(iter(pattern.items()), ("", ""))
                if not isinstance(text, str) or not text or len(pattern) != 1 or kind not in ("String", "Regex"):
                    return False
                if kind == "Regex" and not (leaf.get("type") == "Split" and text in KNOWN):
                    return False
                growth *= max(1.0, len(str(leaf.get("content", "")).encode(errors="replace")) / len(text.encode()))
            elif pattern is not None:
                return False
            prepended += len(str(leaf.get("prepend", "")))
        if len(leaves) > MAX_PARTS or growth > MAX_GROWTH or prepended > MAX_PREPENDED:
            return False
    added = content.get("added_tokens")
    tokens = [str(t.get("content")) for t in (added if isinstance(added, list) else ()) if isinstance(t, dict)]
    return len(tokens) <= MAX_ADDED and sum(map(len, tokens)) <= MAX_ADDED_CHARS


# Runs without site packages and environment. It tries texts that repeat what the parts replace, and common characters.
_CHILD = """
import json, resource, sys
memory, seconds, growth = map(int, sys.argv[2:])
for what, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
    try:
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    except (OSError, ValueError):
        pass
sys.path.insert(0, sys.argv[1])
import tokenizers
text = sys.stdin.buffer.read().decode()
found, left = [], [json.loads(text)[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
while left:
    part = left.pop()
    left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if isinstance(part, str) and len(found) < 64:
        found.append(part[:256])
tokenizer = tokenizers.Tokenizer.from_str(text)
tokenizer.encode_special_tokens = True
runs = ["a" * 4096, " " * 4096, "1" * 4096, "\\n" * 1024, "aA1 -\\n" * 512, "a" * 512 + "!", "\\ufdfa" * 256]
probes = ["Probe: 0123 \\xe4\\xdf\\u6f22\\u5b57\\n\\tend. ", *runs]
probes = [*found, *probes, *(one * (1 + 1024 // len(one)) for one in found if one)]
for probe in probes:
    room = growth * len(probe) + 4096
    if tokenizer.normalizer is not None and len(tokenizer.normalizer.normalize_str(probe)) > room:
        sys.exit("grows")
    ids = tokenizer.encode(probe, add_special_tokens=False).ids
    plain = sum(len(tokenizer.id_to_token(i) or "") for i in ids)
    if len(tokenizer.decode(ids, skip_special_tokens=False)) > growth * plain + 4096:
        sys.exit("grows")
print("ok")
"""


def _try_in_child(runnable: str, library: Path) -> str:
    """Return why the library must not run it, or an empty text if a child ran it without problems."""
    data = runnable.encode()
    seconds, memory = CPU_SECONDS + (len(data) >> 21), MEMORY_BYTES + 32 * len(data)
    environment = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    words = [sys.executable, "-I", "-S", "-c", _CHILD, str(library), str(memory), str(seconds), str(GROWTH_TRIED)]
    limits = f"{seconds} s and {memory >> 30} GiB"
    try:
        done = subprocess.run(
            words, input=data, env=environment, capture_output=True, check=False, timeout=10 * seconds, close_fds=True
        )
    except subprocess.TimeoutExpired:
        return f"it does not encode a few lines of text within {limits}"
    except OSError as error:
        return f"its parts must be tried in a child process, which cannot be started: {error.strerror}"
    if done.returncode == 0 and done.stdout == b"ok\n":
        return ""
    if done.stderr.startswith(b"grows"):
        return f"its parts make a text more than {GROWTH_TRIED} times as long"
    if done.returncode < 0 or b"MemoryError" in done.stderr:
        return f"it does not encode a few lines of text within {limits}"
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last[:300] or f"the library ends with code {done.returncode}"

"""The added tokens of a tokenizer folder: those of tokenizer.json, and those that only the files beside it name.

The order of precedence and the ids are transformers' (5.x): a token that is new takes the next free id, whatever id a
side file gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genesis.errors import ModelError, escape
from genesis.files.hf import TOKENIZER_CONFIG
from genesis.files.paths import quote

_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_LISTED, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
# transformers' classes that read only vocabulary and merges of tokenizer.json, with their default special tokens.
_END = "<|endoftext|>"
_REBUILT: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GemmaTokenizer": {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}
# The class by the type of the model: where the config names none, and whatever it names ("" for one that is not above).
_USUAL = {"gemma3_text": "GemmaTokenizer", "qwen3": "Qwen2Tokenizer"}
_FIXED = {"qwen2": "Qwen2Tokenizer", "granite": "", "mistral": "", "olmo2": "", "phi3": ""}


def rebuilding_class(config: Mapping[str, Any], model_type: object, is_byte_level: bool) -> str | None:
    """transformers' class for a tokenizer, where it is one that does not keep the added tokens of tokenizer.json."""
    kind = str(model_type)
    name = _FIXED.get(kind, str(config.get("tokenizer_class") or _USUAL.get(kind)).removesuffix("Fast"))
    return None if name not in _REBUILT or (name == "LlamaTokenizer" and is_byte_level) else name


def tokenizer_settings(
    config: Mapping[str, Any], mapping: Mapping[str, Any], rebuilt: str | None, where: str
) -> dict[str, Any]:
    """`tokenizer_config.json`, overridden by `special_tokens_map.json` unless the config lists its added tokens.

    Args:
        rebuilt: see `rebuilding_class`.
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
    """The added tokens as tokenizer.json has them, with those that only other files name behind them.

    Args:
        kept: those of tokenizer.json, checked.
        vocabulary: token -> id, of its model.
        settings: see `tokenizer_settings`.
        listed: `added_tokens.json`: token -> id. It counts where the settings list no added tokens.
        rebuilt: see `rebuilding_class`.

    Raises:
        ModelError: a file names a token in a form that is not known.
    """
    names = [*_NAMED, *(key for key in settings if key.endswith("_token") and key not in _NAMED)]
    named = [_token(settings[key], where, key) for key in names if _may_name(key, settings.get(key))]
    extra = [_token(each, where) for each in _typed(settings.get(_EXTRA, settings.get(_OLD_EXTRA)), list, where)]
    special = {token["content"] for token in named}
    if _LISTED in settings:
        by_id = {_id(key, where): _token(each, where) for key, each in _typed(settings[_LISTED], dict, where).items()}
    else:
        known = special | ({token["content"] for token in extra} if _EXTRA in settings else set())
        by_id = {_id(i, where): _token({"content": t, "special": t in known}, where) for t, i in listed.items()}
        by_id |= {token["id"]: token for token in kept}
    found = {} if rebuilt else {token["content"]: token for token in kept}
    added = {token["content"]: token for _, token in sorted(by_id.items())}
    for token in (*named, *extra):
        if token["content"] not in found:
            added.setdefault(token["content"], token)
    if rebuilt == "Qwen2Tokenizer":  # it adds its special tokens once more
        added |= {token["content"]: _token(token["content"], where) for token in (*named, *extra)}
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


def _may_name(key: str, value: Any) -> bool:
    """Whether a setting names a token: of the usual ones any value does, others may be something else."""
    return value is not None if key in _NAMED else isinstance(value, str | Mapping)


def _token(value: Any, where: str, key: str = "added_tokens") -> dict[str, Any]:
    """A token as tokenizer.json has it, without an id, of a text or of the object of a side file."""
    given = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str) or not given["content"]:
        raise _unknown(value, where, key)
    special = bool(given.get("special"))
    flags = {key: bool(given.get(key, key == "normalized" and not special)) for key in _FLAGS}
    return {"id": -1, "content": given["content"], **flags, "special": special}


def _typed(value: Any, kind: type, where: str) -> Any:
    """A list or an object of tokens; null is empty."""
    if value is not None and not isinstance(value, kind):
        raise _unknown(value, where)
    return value or kind()


def _id(value: Any, where: str) -> int:
    if not str(value).isdecimal():
        raise _unknown(value, where)
    return int(value)


def _unknown(value: Any, where: str, key: str = "added_tokens") -> ModelError:
    what = f"the tokenizer cannot be used: `{escape(key)[:80]}` is or has {quote(value)}, which names no token"
    return ModelError(what, where=where, next=f"correct {TOKENIZER_CONFIG} and the files beside it")

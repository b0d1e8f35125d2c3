"""The added tokens of a tokenizer folder: those of tokenizer.json, and those that only the files beside it name.

The order of precedence and the ids are transformers' (5.x): a token that is new takes the next free id, whatever id a
side file gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genesis.errors import ModelError, escape
from genesis.io.hf import TOKENIZER_CONFIG
from genesis.io.paths import quote

__all__ = ["all_added_tokens", "rebuilding_class", "tokenizer_settings"]

_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_TYPE = "__type"  # what an object of tokenizer_config.json has that is a token
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

    Raises:
        ModelError: tokens that are not a list.
    """
    settings = {**_REBUILT.get(rebuilt or "", {}), **config}
    if _OLD_EXTRA in settings and not settings.get(_EXTRA):
        settings[_EXTRA] = settings.pop(_OLD_EXTRA)
    if isinstance(settings.get(_EXTRA), Mapping):
        settings |= settings.pop(_EXTRA)
    if _LISTED not in settings:
        for key, value in mapping.items():
            if isinstance(value, Mapping) and key != _EXTRA:
                settings[key] = {**value, "special": True, _TYPE: None}
            elif isinstance(value, Mapping):
                settings |= value
            elif key == _EXTRA:
                more = [each | {"special": True} if isinstance(each, dict) else each for each in _list(value, where)]
                settings[key] = [*_list(settings.get(key), where), *more]
            else:
                settings[key] = value
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
    own = {token["content"]: token for token in kept}
    keys = [key for key in settings if key.endswith("_token") and isinstance(settings[key], str | Mapping)]
    keys = [*(key for key in _NAMED if settings.get(key) is not None), *(key for key in keys if key not in _NAMED)]
    named = [_token(settings[key], where, key) for key in keys]
    extra = [_token(each, where) for each in _list(settings.get(_EXTRA, settings.get(_OLD_EXTRA)), where)]
    special = {token["content"] for token in named}
    by_id: dict[int, dict[str, Any]] = {}
    if _LISTED in settings:
        by_id = {_id(key, where): _token(each, where) for key, each in _object(settings[_LISTED], where).items()}
    else:
        # transformers looks before it knows which objects of the config are tokens.
        given = [*(settings.get(key) for key in _NAMED), *_list(settings.get(_EXTRA), where)]
        known = {
            _text(each)
            for each in given
            if isinstance(each, str) or (isinstance(each, Mapping) and not each.get(_TYPE))
        }
        by_id = {
            _id(i, where): _token({"content": text, "special": text in known}, where) for text, i in listed.items()
        }
        by_id |= {token["id"]: token for token in own.values()}
    found = {} if rebuilt else dict(own)
    added = {token["content"]: token for _, token in sorted(by_id.items())}
    for token in (*named, *extra):
        if token["content"] not in found:
            added.setdefault(token["content"], token)
    if rebuilt == "Qwen2Tokenizer":  # it adds its special tokens once more
        added |= {token["content"]: _token(token["content"], where) for token in (*named, *extra)}
    for text, token in added.items():
        after = max(len(vocabulary), 1 + max((each["id"] for each in found.values()), default=-1))
        number = found[text]["id"] if text in found else vocabulary.get(text, after)
        new = {**token, "id": number, "special": bool(token.get("special")) or text in special}
        if any(new.get(key) != found.get(text, {}).get(key) for key in (*_FLAGS, "special")):
            found[text] = new
    return list(found.values())


def _text(value: Any) -> Any:
    return value.get("content") if isinstance(value, Mapping) else value


def _token(value: Any, where: str, key: str = "added_tokens") -> dict[str, Any]:
    """A token as tokenizer.json has it, without an id, of a text or of the object of a side file."""
    given = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str) or not given["content"]:
        raise _unknown(value, where, key)
    special = bool(given.get("special"))
    flags = {key: bool(given.get(key, key == "normalized" and not special)) for key in _FLAGS}
    return {"id": -1, "content": given["content"], **flags, "special": special}


def _list(value: Any, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _unknown(value, where)
    return value or []


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise _unknown(value, where)
    return value or {}


def _id(value: Any, where: str) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, str) and value.isascii())):
        raise _unknown(value, where)
    try:
        return int(value)
    except ValueError:
        raise _unknown(value, where) from None


def _unknown(value: Any, where: str, key: str = "added_tokens") -> ModelError:
    what = f"the tokenizer cannot be used: `{escape(key)[:80]}` is or has {quote(value)}, which names no token"
    return ModelError(what, where=where, next=f"correct {TOKENIZER_CONFIG} and the files beside it")

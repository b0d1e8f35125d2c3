"""The files of a model folder that generation and chats use: sampling settings, the ids that end a text, and the chat
template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError, UsageError, escape
from genesis.files.boundary import boundary
from genesis.files.hf import CHAT_TEMPLATE, GENERATION_CONFIG, TEMPLATE_FOLDER, TOKENIZER_CONFIG, read_json
from genesis.files.paths import exists, quote, safe_join
from genesis.files.strict_json import indented_bytes, parse_object
from genesis.train.bounds import BOUNDS
from genesis_models.config import ModelConfig

_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
# transformers' defaults for a generation_config.json that enables sampling without its settings.
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": 0.0}
_SILENT = {("top_k", None), ("top_p", None), ("min_p", 0.0), ("repetition_penalty", 1.0)}
# Settings that change a text but are not applied here, unless they are 0, 1 or empty.
_UNAPPLIED = (
    *("num_beams", "num_beam_groups", "no_repeat_ngram_size", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("encoder_repetition_penalty", "exponential_decay_length_penalty", "penalty_alpha", "guidance_scale"),
    *("min_length", "min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("stop_strings", "forced_bos_token_id", "forced_eos_token_id"),
)


def end_ids(raw: Mapping[str, Any], where: str) -> list[int]:
    """Return the ids of `eos_token_id` in a `generation_config.json` or `config.json`; an empty list if it has none.

    Raises:
        ModelError: the value is neither an id nor a list of ids.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        what = f"`eos_token_id` is {quote(value)}, which is neither an id nor a list of ids"
        raise ModelError(what, where=where, next="repair the file")
    return ids


def stop_ids(folders: str | os.PathLike[str] | Iterable[Path] | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a text: every `eos_token_id` in generation_config.json and config.json of a model's
    folders, otherwise the tokenizer's.

    Raises:
        ModelError: an `eos_token_id` is neither an id nor a list of ids.
    """
    listed = [] if folders is None else [Path(folders)] if isinstance(folders, str | os.PathLike) else folders
    found: set[int] = set()
    for folder in listed:
        for name in (GENERATION_CONFIG, "config.json"):
            if _has(folder, name):
                where = escape(folder / name)
                found.update(end_ids(read_json(safe_join(folder, name, where=where)), where))
    return frozenset(found) or frozenset(() if tokenizer is None else {tokenizer.eos_id})


def file_drawing(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the sampling settings of the first generation_config.json in a model's folders, under the names of
    `Sampling`; an empty dict if it has none.

    As in transformers, `do_sample: false` takes the likeliest token, and a setting that is absent although another one
    exists has transformers' default. As in vLLM, temperature, top_k, top_p and min_p also count without `do_sample`.

    Raises:
        ModelError: a value is not within `BOUNDS`.
    """
    content, where = _generation_config(folders)
    named = {name: content[name] for name in (*_DRAWN, "repetition_penalty") if content.get(name) is not None}
    for name, neutral in (("top_k", (0, -1)), ("top_p", (1,))):  # other values that keep all tokens
        if named.get(name) in neutral:
            named[name] = None
    try:
        named = {name: BOUNDS[name].checked(value, f"`{name}`", where=where) for name, value in named.items()}
    except UsageError as error:
        raise ModelError(error.what, where=where, next=f"repair the file: {error.next}") from None
    if content.get("do_sample") or named.keys() & _DRAWN.keys():
        named = {**_DRAWN, **named}
    return {**named, "temperature": 0.0} if content.get("do_sample") is False else named


def drawing_line(folders: Iterable[Path], given: Mapping[str, Any] | None = None) -> str | None:
    """Return a line about the settings of `file_drawing` that `given` does not override and about those not applied."""
    listed, known = [*folders], given or {}
    found, (content, where) = file_drawing(listed), _generation_config(listed)
    # At temperature 0 only the repetition penalty has an effect.
    idle = ("top_k", "top_p", "min_p") if {**found, **known}.get("temperature") == 0 else ()
    effective = [(name, value) for name, value in found.items() if name not in (*known, *idle)]
    shown = [f"{name} {value:g}" for name, value in effective if (name, value) not in _SILENT]
    ignored = [name for name in _UNAPPLIED if content.get(name) not in (None, 0, 1, [], {})]
    parts = [", ".join(shown)] * bool(shown) + [f"not applied: {', '.join(ignored)}"] * bool(ignored)
    return f"sampling: {'; '.join(parts)} ({where})" if parts else None


def _generation_config(folders: Iterable[Path]) -> tuple[dict[str, Any], str]:
    """Return the content of the first generation_config.json, and its path for errors. Raises: ModelError."""
    for folder in folders:
        if _has(folder, GENERATION_CONFIG):
            where = escape(folder / GENERATION_CONFIG)
            return read_json(safe_join(folder, GENERATION_CONFIG, where=where)), where
    return {}, ""


def new_tokens(tokenizer: Tokenizer, config: ModelConfig) -> list[str]:
    """Return the added tokens that have no row in the model's embedding."""
    return [token["content"] for token in tokenizer.added_tokens if token["id"] >= config.vocab_size]


def check_ids(tokenizer: Tokenizer, config: ModelConfig, where: str, *, only_new: bool = True) -> None:
    """Refuse a tokenizer of another model. Raises: ModelError: it has ids that the model lacks.

    Args:
        only_new: accept such ids of added tokens.
    """
    if tokenizer.vocab_size - config.vocab_size > (len(new_tokens(tokenizer, config)) if only_new else 0):
        what = f"the tokenizer has {tokenizer.vocab_size:,} ids, but the embedding has {config.vocab_size:,} rows"
        raise ModelError(what, where=where, next="use the tokenizer and the config.json of the same model")


def generation_config(
    config: ModelConfig,
    source: str | os.PathLike[str] | None = None,
    ends: Sequence[int] = (),
    default: int | None = None,
) -> bytes:
    """Return a `generation_config.json` that lists the tokens at which generation stops.

    transformers, vLLM and Genesis stop at each id of a list. The ids in the source's file therefore remain, after the
    trained ones; so do all its other keys.

    Args:
        config: the model's config; its ids are used if the source has no such file.
        source: folder that may have such a file.
        ends: ids that end what the model was trained to generate.
        default: the only id if neither the source nor `ends` has one; it takes precedence over the config's.

    Raises:
        ModelError: the source's file is malformed.
    """
    content, where = {role: config.raw[role] for role in _ROLES if config.raw.get(role) is not None}, "config.json"
    if source is not None and _has(source, GENERATION_CONFIG):
        where = escape(Path(source) / GENERATION_CONFIG)
        content = read_json(safe_join(source, GENERATION_CONFIG, where=escape(source)))
    elif default is not None and not ends:
        content["eos_token_id"] = default
    # transformers ignores all other keys of a file with this mark.
    content.pop("_from_model_config", None)
    found = list(dict.fromkeys([*ends, *end_ids(content, where)]))
    if found:
        content["eos_token_id"] = found[0] if len(found) == 1 else found
    return indented_bytes(content)


@boundary(ModelError, "looking for a file")
def _has(folder: str | os.PathLike[str], name: str) -> bool:
    return exists(Path(folder) / name)


def chat_files(texts: Mapping[str, str], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tokenizer's files with the chat templates `texts` in every place where readers look for them.

    `chat_template.jinja` takes precedence over the same text in `tokenizer_config.json`, which older readers use.

    Args:
        texts: name -> Jinja text; one of the names is "default".
        files: name -> bytes of a tokenizer's files.

    Raises:
        ModelError: `tokenizer_config.json` is malformed.
    """
    others = {name: text for name, text in texts.items() if name != "default"}
    old = files.get(TOKENIZER_CONFIG)
    config = {} if old is None else parse_object(old, where=TOKENIZER_CONFIG)
    named = [{"name": name, "template": texts[name]} for name in ("default", *sorted(others))]
    config["chat_template"] = named if others else texts["default"]
    found = {name: data for name, data in files.items() if not name.startswith(f"{TEMPLATE_FOLDER}/")}
    found[TOKENIZER_CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    found[CHAT_TEMPLATE] = texts["default"].encode()
    return found | {f"{TEMPLATE_FOLDER}/{name}.jinja": text.encode() for name, text in others.items()}

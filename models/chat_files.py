"""The files of a model folder that texts and chats depend on: the ids that end one, and the chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError, escape
from genesis.io.boundary import boundary
from genesis.io.hf import CHAT_TEMPLATE, GENERATION_CONFIG, TEMPLATE_FOLDER, TOKENIZER_CONFIG, read_json
from genesis.io.paths import exists, quote, safe_join
from genesis.io.strict_json import indented_bytes, parse_object
from genesis_models.config import ModelConfig

__all__ = ["chat_files", "check_ids", "end_ids", "generation_config", "stop_ids"]

_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")


def end_ids(raw: Mapping[str, Any], where: str) -> list[int]:
    """The ids of `eos_token_id` in a `generation_config.json` or `config.json`; none where it names none.

    Raises:
        ModelError: it is neither an id nor a list of ids.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        what = f"`eos_token_id` is {quote(value)}, which is neither an id nor a list of ids"
        raise ModelError(what, where=where, next="repair the file")
    return ids


def stop_ids(folders: str | os.PathLike[str] | Iterable[Path] | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a text: every `eos_token_id` of the generation_config.json and config.json in the folders of a
    model; the tokenizer's, where they name none and there is one.

    Raises:
        ModelError: an `eos_token_id` that is neither an id nor a list of ids.
    """
    listed = [] if folders is None else [Path(folders)] if isinstance(folders, str | os.PathLike) else folders
    found: set[int] = set()
    for folder in listed:
        for name in (GENERATION_CONFIG, "config.json"):
            if _has(folder, name):
                where = escape(folder / name)
                found.update(end_ids(read_json(safe_join(folder, name, where=where)), where))
    return frozenset(found) or frozenset(() if tokenizer is None else {tokenizer.eos_id})


def check_ids(tokenizer: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raises: ModelError where the tokenizer has ids that the model has not."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model's embedding {config.vocab_size:,} rows",
            where=where,
            next="use the tokenizer and the config.json of the same model",
        )


def generation_config(
    config: ModelConfig,
    source: str | os.PathLike[str] | None = None,
    ends: Sequence[int] = (),
    default: int | None = None,
) -> bytes:
    """A `generation_config.json` that names the tokens at which generation stops.

    transformers, vLLM and Genesis stop at each id of a list, so those that the source's file names stay, behind the
    trained ones, as all its other keys do.

    Args:
        config: of the model, whose ids are taken where there is no source's file.
        source: a folder that may have such a file.
        ends: the ids that end what the model was trained to generate.
        default: the only id where neither the source nor `ends` names one, before the config's.

    Raises:
        ModelError: the source's file is malformed.
    """
    content, where = {role: config.raw[role] for role in _ROLES if config.raw.get(role) is not None}, "config.json"
    if source is not None and _has(source, GENERATION_CONFIG):
        where = escape(Path(source) / GENERATION_CONFIG)
        content = read_json(safe_join(source, GENERATION_CONFIG, where=escape(source)))
    elif default is not None and not ends:
        content["eos_token_id"] = default
    # With this mark transformers takes no other key from the file.
    content.pop("_from_model_config", None)
    found = list(dict.fromkeys([*ends, *end_ids(content, where)]))
    if found:
        content["eos_token_id"] = found[0] if len(found) == 1 else found
    return indented_bytes(content)


@boundary(ModelError, "looking for a file")
def _has(folder: str | os.PathLike[str], name: str) -> bool:
    return exists(Path(folder) / name)


def chat_files(texts: Mapping[str, str], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tokenizer's files `files` with the chat templates `texts`, wherever readers look for them.

    `chat_template.jinja` goes before the same text in `tokenizer_config.json`; older readers know the latter alone.

    Args:
        texts: name -> Jinja text, of which "default" is one.
        files: name -> bytes of a tokenizer's files.

    Raises:
        ModelError: `tokenizer_config.json` is malformed.
    """
    others = {name: text for name, text in texts.items() if name != "default"}
    old = files.get(TOKENIZER_CONFIG)
    config = {} if old is None else parse_object(old, where=TOKENIZER_CONFIG)
    config["chat_template"] = texts["default"] if not others else _named(texts)
    found = {name: data for name, data in files.items() if not name.startswith(f"{TEMPLATE_FOLDER}/")}
    found[TOKENIZER_CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    found[CHAT_TEMPLATE] = texts["default"].encode()
    return found | {f"{TEMPLATE_FOLDER}/{name}.jinja": text.encode() for name, text in others.items()}


def _named(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in _default_first(texts)]


def _default_first(texts: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return sorted(texts.items(), key=lambda item: (item[0] != "default", item[0]))

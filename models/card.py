"""The model card of an export: `README.md` with what the hub reads of it in its head, and how the model was made."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from genesis import __version__
from genesis.errors import ConfigError, ModelError, escape
from genesis.files.cards import README, read_head, with_head
from genesis.files.hf import CHECKPOINT, read_json
from genesis.files.hub_cache import DATA_SOURCE, hub_name, local_path, name_of
from genesis.files.manifest import MANIFEST_NAME, read_manifest
from genesis.files.paths import exists, safe_join
from genesis.files.strict_json import read_limited
from genesis.files.trust import run_file
from genesis.train.checkpoint import TRAINER
from genesis.train.config_file import RESOLVED, parse_config
from genesis.train.strict_yaml import MAX_BYTES, emit
from genesis_models.source import ModelSource

LARGEST = 1 << 20  # of a README, in bytes
TEXTS = {("data", "template_args"), ("data", "fields"), ("eval", "prompts")}  # settings that hold no paths
LICENSE = ("license", "license_name", "license_link")


def card_of(source: ModelSource, base: str | None, *, merged: bool, dtype: str | None) -> bytes:
    """The README of an export: of what no run of Genesis made its own one as it is, else a model card.

    Args:
        base: what an adapter calls its base.
    """
    saved = Path(os.path.abspath(source.adapter or source.folder))
    is_checkpoint = CHECKPOINT.fullmatch(saved.name) is not None
    run = saved.parent if is_checkpoint else saved
    record = run_file(run, RESOLVED)
    if record is None and not merged and exists(saved / README):
        return read_limited(safe_join(saved, README), LARGEST)
    config, sources = None, list[Any]()
    if record is not None:
        with suppress(ConfigError):  # a record of another version of Genesis
            config = parse_config(read_limited(record, MAX_BYTES), RESOLVED)
            sources = [
                DATA_SOURCE.fullmatch(each if isinstance(each, str) else each.path) for each in config.data.train
            ]
    is_adapter, folder = source.adapter is not None and not merged, source.folder
    if base is None and config is not None and config.model.path is not None:
        base, folder = config.model.path, Path(local_path(config.model.path))
    kind, name = "adapter" if is_adapter else "model", escape(run.name)
    head = ({} if base is None else _head_of_base(base, folder)) | {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "datasets": sorted({found[1] for found in sources if found}),
        "tags": ["genesis", *(["lora"] if source.adapter is not None else [])],
    }
    rows = {"Genesis": __version__, "base model": base and public(base), **({} if record is None else _state(saved))}
    text = f"# {name}\n\nThis {kind} was written by Genesis.\n\n| | |\n|---|---|\n"
    text += "".join(f"| {key} | {escape(value).replace('|', '/')} |\n" for key, value in rows.items() if value)
    flags = " --merge" * merged + (f" --dtype {dtype}" if dtype else "")
    commands = f"    genesis export {name}{f'/{saved.name}' * is_checkpoint}{flags}\n"
    if config is not None:
        commands = f"    genesis train config.yaml\n{commands}\nIn `config.yaml`, absolute paths are cut:\n\n"
        commands += textwrap.indent(emit(_without_places(config.model_dump())), "    ")
    return with_head(head, f"{text}\n## How it was made\n\n{commands}")


def _state(saved: Path) -> dict[str, str]:
    """What the files of a run say of its data, steps and weights; those of another version say less."""
    if (path := run_file(saved, TRAINER)) is None:
        return {}
    state = read_json(path)
    about = (read_manifest(saved).metadata if exists(saved / MANIFEST_NAME) else state).get("data")
    data = about if isinstance(about, dict) else {}
    values = (*map(data.get, ("documents", "tokens", "targets")), state.get("step"), state.get("num_tokens"))
    counts = [f"{value:,}" if type(value) is int else "?" for value in values]
    return {
        "data": "{} documents, {} tokens, {} of them learned".format(*counts) if data else "",
        "trained": "{3} steps, {4} tokens".format(*counts),
        "state hash": str(state.get("state_hash", "")),
    }


def _head_of_base(base: str, folder: Path) -> dict[str, Any]:
    """The base's name on the hub, where it has one, and the license that its own card names."""
    pulled = name_of(folder)
    try:
        card = read_head(folder)
    except ModelError:
        card = {}
    named = pulled.id if pulled is not None else None if exists(Path(base)) or hub_name(base) is None else base
    return {"base_model": named} | {key: card[key] for key in LICENSE if isinstance(card.get(key), str)}


def public(text: str) -> str:
    """A path without what it says of the machine: the name on the hub of what was pulled, else its last part."""
    pulled = name_of(text) if os.path.isabs(text) else None
    says = os.path.isabs(text) or ".." in PurePath(text).parts
    return pulled.id if pulled is not None else PurePath(text).name if says else text


def _without_places(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Settings with `public` paths."""
    if isinstance(value, Mapping) and path not in TEXTS:
        return {key: _without_places(each, (*path, key)) for key, each in value.items()}
    if isinstance(value, list) and path not in TEXTS:
        return [_without_places(each, path) for each in value]
    return public(value) if isinstance(value, str) else value

"""The model card of an export: `README.md` with what the hub reads of it in its head, and how the model was made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from genesis import __version__
from genesis.errors import ConfigError, ModelError, escape
from genesis.io.cards import README, read_head, with_head
from genesis.io.files import MANIFEST_NAME, read_manifest
from genesis.io.hf import CHECKPOINT, read_json
from genesis.io.hub_cache import DATA_SOURCE, local_path, name_of
from genesis.io.owner import run_file
from genesis.io.paths import exists, safe_join
from genesis.io.strict_json import read_limited
from genesis.train.checkpoint import TRAINER
from genesis.train.config import Config
from genesis.train.config_file import RESOLVED, parse_config
from genesis.train.strict_yaml import MAX_BYTES, emit
from genesis_models.source import ModelSource

__all__ = ["LARGEST", "card_of", "public"]

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
    config = None if record is None else _config(read_limited(record, MAX_BYTES))
    is_adapter = source.adapter is not None and not merged
    folder = source.folder if base is not None else None
    if config is not None and config.lora is None and config.model.path is not None:
        base, folder = config.model.path, Path(local_path(config.model.path))
    head = _base_head(base, folder) | {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "datasets": [] if config is None else _datasets(config),
        "tags": ["genesis", *(["lora"] if source.adapter is not None else [])],
    }
    name = escape(run.name)
    rows = {"Genesis": __version__, "base model": base and public(base), **_state(saved)}
    table = "".join(f"| {key} | {escape(value).replace('|', '/')} |\n" for key, value in rows.items() if value)
    text = f"# {name}\n\n{'An adapter' if is_adapter else 'A model'}, written by Genesis.\n\n| | |\n|---|---|\n{table}"
    flags = " --merge" * merged + (f" --dtype {dtype}" if dtype else "")
    commands = [f"genesis export {name}{f'/{saved.name}' * is_checkpoint}{flags}"]
    if config is not None:
        commands.insert(0, "genesis train config.yaml")
    text += "\n## How it was made\n\n" + "".join(f"    {line}\n" for line in commands)
    if config is not None:
        lines = emit(_without_places(config.model_dump())).splitlines()
        text += "\nThis is `config.yaml`; of absolute paths it has the last parts.\n\n"
        text += "".join(f"    {line}\n" for line in lines)
    return with_head(head, text)


def _config(record: bytes) -> Config | None:
    """A run's configuration; None for one of another version of Genesis."""
    try:
        return parse_config(record, RESOLVED)
    except ConfigError:
        return None


def _state(saved: Path) -> dict[str, str]:
    """What the files of a run say of its data, steps and weights; those of another version say less."""
    if (path := run_file(saved, TRAINER)) is None:
        return {}
    state = read_json(path)
    about = read_manifest(saved).metadata if exists(saved / MANIFEST_NAME) else state
    data = about["data"] if isinstance(about.get("data"), dict) else {}
    documents, tokens, targets, step, seen = (
        f"{value:,}" if type(value) is int else "?"
        for value in (*map(data.get, ("documents", "tokens", "targets")), state.get("step"), state.get("num_tokens"))
    )
    return {
        "data": f"{documents} documents, {tokens} tokens, {targets} of them learned" if data else "",
        "trained": f"{step} steps, {seen} tokens",
        "state hash": str(state.get("state_hash", "")),
    }


def _datasets(config: Config) -> list[str]:
    paths = [each if isinstance(each, str) else each.path for each in config.data.train]
    return sorted({found[1] for path in paths if (found := DATA_SOURCE.fullmatch(path))})


def _base_head(base: str | None, folder: Path | None) -> dict[str, Any]:
    """What the head says of the base: its name on the hub, and the license that its own card names."""
    if base is None or folder is None:
        return {}
    pulled = name_of(folder)
    named = pulled.id if pulled is not None else None if os.path.isabs(base) else base
    try:
        card = read_head(folder)
    except ModelError:
        card = {}
    return {"base_model": named} | {key: card[key] for key in LICENSE if isinstance(card.get(key), str)}


def public(text: str) -> str:
    """A path without what it says of the machine: the name on the hub of what was pulled, else its last part."""
    if not os.path.isabs(text):
        return PurePath(text).name if ".." in PurePath(text).parts else text
    pulled = name_of(text)
    return PurePath(text).name if pulled is None else pulled.id


def _without_places(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Settings with `public` paths."""
    if path in TEXTS:
        return value
    if isinstance(value, Mapping):
        return {key: _without_places(each, (*path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each, path) for each in value]
    return public(value) if isinstance(value, str) else value

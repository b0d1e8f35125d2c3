"""A trained model or adapter as a folder for other programs: whole, merged, or as the adapter that it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from genesis.dtypes import as_dtype
from genesis.errors import ConfigError, ModelError, UsageError, escape
from genesis.files.atomic import AtomicFolder
from genesis.files.boundary import boundary
from genesis.files.cards import README
from genesis.files.hashing import sha256_file
from genesis.files.hub_cache import hub_name
from genesis.files.manifest import MANIFEST_NAME, read_manifest
from genesis.files.paths import exists, is_folder, list_folder, safe_join
from genesis_models.adapters import BASE_NAME, base_of, write_adapter
from genesis_models.blocks import CausalLM
from genesis_models.card import card_of, public
from genesis_models.folder import side_bytes, write_model
from genesis_models.source import ModelSource

EXPORT = "export"  # in the metadata of an export's manifest; what has it may be written over


def write_export(model: CausalLM, source: ModelSource, target: Path, *, merge: bool, dtype: str | None) -> None:
    """Write the folder `target`, which appears whole; an export there is replaced.

    Args:
        model: of the source, loaded as float32 or in the type that it has there.
        merge: write an adapter merged into the weights of its base.
        dtype: "float32", "bfloat16" or "float16": of whole weights; None: of each tensor the one that it has.

    Raises:
        UsageError: there is nothing to merge, or a dtype for an adapter. ConfigError: as in `check_target`.
        NumericError: float16 is too narrow for a weight. DiskError: writing failed; what was there is intact.
    """
    if merge and source.adapter is None:
        raise UsageError(
            f"{escape(source.folder)} is a whole model: there is no adapter to merge", next="leave --merge out"
        )
    is_whole = merge or source.adapter is None
    if dtype is not None and not is_whole:
        raise UsageError("an adapter is written in float32", next="leave --dtype out, or merge it: --merge")
    check_target(target, source)
    with boundary(ConfigError, "looking at the folder", target):
        if is_folder(target) and not list_folder(target):
            os.rmdir(target)
    card = card_of(source, None if source.adapter is None else _base_name(source), merged=merge, dtype=dtype)
    about: dict[str, Any] = {"merged": merge, "dtype": dtype, "from": public(str(source.adapter or source.folder))}
    with AtomicFolder(target, replace=True, metadata={EXPORT: about}) as writer:
        own = {} if source.adapter is None else side_bytes(source.adapter)
        if is_whole:
            kind = None if dtype is None else as_dtype(dtype).name
            write_model(model, writer, source=source.folder, extra_files=own, dtype=kind)
        else:
            write_adapter(model, writer, base=_base_name(source))
            writer.write(BASE_NAME, base_of(source.folder, source.base).to_json())
            for name, data in own.items():
                writer.write(name, data)
        writer.write(README, card)


def _base_name(source: ModelSource) -> str:
    """The base's name on the hub where the adapter has that, else the base's folder."""
    named = None if source.config is None else source.config.base
    is_hub = named and hub_name(named) is not None and not os.path.lexists(named)
    return named if named and is_hub else os.fspath(source.folder)


def check_target(target: Path, source: ModelSource) -> None:
    """Refuse a folder that an export must not be written to: only a new or empty one, and an earlier export, is ours.

    Raises:
        ConfigError: what is there is something else, or a part of what is exported.
    """
    where, next = "--out", "name a new or an empty folder"
    real = Path(os.path.realpath(target))
    for folder in source.folders:
        other = Path(os.path.realpath(folder))
        if real == other or other.is_relative_to(real) or real.is_relative_to(other):
            what = f"{escape(target)} and {escape(folder)}, which is exported, are in one another"
            raise ConfigError(what, where=where, next=next)
    with boundary(ConfigError, "looking at the folder", target):
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not is_folder(target):
            raise ConfigError(f"{escape(target)} is no plain folder", where=where, next=next)
        names = set(list_folder(target))
        if names and not _is_export(target, names):
            what = f"{escape(target)} holds files of something else than an export"
            raise ConfigError(what, where=where, next=next)


def _is_export(folder: Path, names: set[str]) -> bool:
    """Whether an export wrote the folder, and all that is in it; the card is one's own once it was changed."""
    if not exists(folder / MANIFEST_NAME):
        return False
    try:
        manifest = read_manifest(folder)
        if README in names and sha256_file(safe_join(folder, README)) != manifest.files[README].sha256:
            return False
    except (ModelError, KeyError):
        return False
    return EXPORT in manifest.metadata and names == {name.partition("/")[0] for name in manifest.files} | {
        MANIFEST_NAME
    }

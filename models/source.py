"""What a folder that a user names stands for: a model folder, or an adapter with the model folder of its base."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.hf import CHECKPOINT, INDEX_NAME, WEIGHTS_NAME
from genesis.files.hub_cache import local_path
from genesis.files.manifest import MANIFEST_NAME
from genesis.files.paths import exists, is_folder, list_folder, quote
from genesis.files.trust import check_owner
from genesis_models.adapters import (
    ADAPTER_CONFIG,
    AdapterConfig,
    Base,
    base_of,
    check_same_base,
    is_adapter,
    read_adapter,
    read_base,
)
from genesis_models.recognition import check_model_folder, hub_advice

_NEXT = "name the folder of its base model: --base FOLDER"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        folder: of the model, or of an adapter's base.
        adapter: the folder of the adapter, if it is one.
        config: that adapter's.
        base: what the adapter says about its base beside the path, where a run of ours saved it.
    """

    folder: Path
    adapter: Path | None = None
    config: AdapterConfig | None = None
    base: Base | None = None

    @property
    def folders(self) -> Iterator[Path]:
        """The adapter's folder, whose tokenizer and generation files go before the base's; then the model's."""
        if self.adapter is not None:
            yield self.adapter
        yield self.folder

    def holding(self, name: str) -> Path:
        """The first folder that has a file of this name; the model's where none has."""
        with boundary(ModelError, "looking for a file"):
            return next((folder for folder in self.folders if exists(folder / name)), self.folder)

    def __str__(self) -> str:
        if self.config is None:
            return f"model {escape(self.folder)}"
        kind = "DoRA" if self.config.use_dora else "rsLoRA" if self.config.use_rslora else "LoRA"
        return f"adapter {escape(self.adapter)} ({kind}, r {self.config.r}) on {escape(self.folder)}"


def find_source(path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> ModelSource:
    """What `path` stands for.

    A base's path in an adapter is taken as it is, from the adapter's folder, or from the current one. Names on the hub
    stand for what was pulled of them.

    Args:
        base: the folder of an adapter's base, instead of the one that the adapter names.

    Raises:
        ModelError: `path` is neither a model nor an adapter; an adapter's base is missing, or not the model that it was
            trained on, with both paths.
    """
    path = local_path(path)
    if not _is_adapter_alone(path):
        check_model_folder(path)
        if base is not None:
            what = f"{escape(path)} is a model, not an adapter, and has no base"
            raise ModelError(what, next="leave --base out, or name an adapter")
        return ModelSource(Path(path))
    config, known = read_adapter(path), read_base(path)
    folder = _named_base(Path(path), config) if base is None else Path(local_path(base))
    if is_adapter(folder) and _is_adapter_alone(folder):
        what = f"the base of the adapter in {escape(path)} would be {escape(folder)}, which is an adapter, too"
        raise ModelError(
            what, next="merge that one first (genesis export --merge), and name the merged folder with --base"
        )
    check_model_folder(folder)
    if known is not None:
        check_same_base(base_of(folder, known), known, escape(path))
    return ModelSource(folder, Path(path), config, known)


def _is_adapter_alone(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter and no whole model, which would go before it."""
    folder = Path(path)
    with boundary(ModelError, "looking for the model", folder):
        if not is_folder(folder) or not is_adapter(folder):
            return False
        has_weights = exists(folder / WEIGHTS_NAME) or exists(folder / INDEX_NAME)
        return not (has_weights and exists(folder / "config.json"))


def _named_base(adapter: Path, config: AdapterConfig) -> Path:
    """The folder of the base that an adapter names. Raises: ModelError."""
    where = escape(adapter / ADAPTER_CONFIG)
    if not config.base:
        raise ModelError(f"the adapter in {escape(adapter)} names no base model", where=where, next=_NEXT)
    named, shown = Path(config.base), config.base
    # A run that goes another way moves its later checkpoints one folder down.
    moved = [adapter.parent] if adapter.parent.name.startswith("abandoned-") else []
    with boundary(ModelError, "looking for the base model", named):
        for start in (adapter, *moved):
            if is_folder(start / named):
                return Path(os.path.realpath(start / named))
        for folder in (named, Path(local_path(config.base))):
            if is_folder(folder):
                return folder
    advice = hub_advice(config.base)
    if config.base.startswith(os.pardir):
        shown = os.path.realpath(adapter / named)
    what = f"the adapter in {escape(adapter)} is of the base model {quote(shown, 300)}, which is not there"
    raise ModelError(what, where=where, next=_NEXT if advice is None else f"{_NEXT}; {advice}")


@boundary(ModelError, "looking for the model")
def saved_model(path: str | os.PathLike[str]) -> Path:
    """The folder `path` itself, or the newest complete checkpoint of a run that has no final model yet."""
    folder = Path(local_path(path))
    has_weights = any(exists(folder / name) for name in (WEIGHTS_NAME, INDEX_NAME, ADAPTER_CONFIG))
    return folder if has_weights else newest_checkpoint(folder) or folder


@boundary(ModelError, "looking for checkpoints")
def newest_checkpoint(run: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in the folder of a run; None where it has none.

    Raises:
        ModelError: another user than this one and the folder's has put it there.
    """
    folder = Path(run)
    if not is_folder(folder):
        return None
    steps = sorted((int(match[1]) for match in map(CHECKPOINT.fullmatch, list_folder(folder)) if match), reverse=True)
    names = (folder / f"checkpoint-{step}" for step in steps)
    newest = next((path for path in names if exists(path / MANIFEST_NAME)), None)
    if newest is not None:
        check_owner(newest, next="name a checkpoint of your own, or remove it", trusted=os.stat(folder).st_uid)
    return newest

"""Finds the model that a path means: a model folder, or an adapter with the model folder of its base.

For any other path the error says what it holds and how to get a folder that Genesis can load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.files.atomic import MANIFEST_NAME
from genesis.files.boundary import boundary
from genesis.files.hf import CHECKPOINT, INDEX_NAME, WEIGHTS_NAME, read_json
from genesis.files.hub import hub_name, local_path, pull_advice
from genesis.files.paths import exists, is_folder, list_folder, quote, safe_join
from genesis.files.trust import check_owner
from genesis_models import adapters

_NEXT = "name the folder of its base model: --base FOLDER"
CONFIG, RESOLVED = "config.json", "config.resolved.yaml"
NEEDED = f"{CONFIG} and safetensors weights"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = 'in Python: AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW", safe_serialization=True)'
MAX_LISTED = 10_000


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The folders of a model.

    Attributes:
        folder: model folder, or the folder of an adapter's base.
        adapter: adapter folder, or None.
        config: the adapter's config, or None.
        base: what Genesis recorded about the adapter's base in addition to its path, or None.
    """

    folder: Path
    adapter: Path | None = None
    config: adapters.AdapterConfig | None = None
    base: adapters.Base | None = None

    @property
    def folders(self) -> Iterator[Path]:
        """The adapter's folder, whose tokenizer and generation files take precedence, then the model's."""
        if self.adapter is not None:
            yield self.adapter
        yield self.folder

    def holding(self, name: str) -> Path:
        """Return the first folder that has a file of this name, or the model's if none has."""
        with boundary(ModelError, "looking for a file"):
            return next((folder for folder in self.folders if exists(folder / name)), self.folder)

    def __str__(self) -> str:
        if self.config is None:
            return f"model {escape(self.folder)}"
        kind = "DoRA" if self.config.use_dora else "rsLoRA" if self.config.use_rslora else "LoRA"
        return f"adapter {escape(self.adapter)} ({kind}, r {self.config.r}) on {escape(self.folder)}"


def find_source(path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> ModelSource:
    """Return the model that `path` means.

    A relative base path in an adapter is looked up from the adapter's folder, then from the current one. A name on the
    hub means the pulled copy.

    Args:
        base: folder of an adapter's base, instead of the one that the adapter names.

    Raises:
        ModelError: `path` is neither a model nor an adapter, or an adapter's base is missing or not the model that it
            was trained on; the error has both paths.
    """
    path = local_path(path)
    if not _is_adapter_alone(path):
        check_model_folder(path)
        if base is not None:
            what = f"{escape(path)} is a model, not an adapter, so it has no base"
            raise ModelError(what, next="remove --base, or name an adapter")
        return ModelSource(Path(path))
    config, known = adapters.read_adapter(path), adapters.read_base(path)
    folder = _named_base(Path(path), config) if base is None else Path(local_path(base))
    if _is_adapter_alone(folder):
        what = f"the base of the adapter in {escape(path)} is {escape(folder)}, which is an adapter too"
        next = "merge that adapter first (genesis export --merge), and name the merged folder with --base"
        raise ModelError(what, next=next)
    check_model_folder(folder)
    if known is not None:
        adapters.check_same_base(adapters.base_of(folder, known), known, escape(path))
    return ModelSource(folder, Path(path), config, known)


def _is_adapter_alone(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter but no whole model, which would take precedence."""
    folder = Path(path)
    with boundary(ModelError, "looking for the model", folder):
        if not is_folder(folder) or not adapters.is_adapter(folder):
            return False
        has_weights = exists(folder / WEIGHTS_NAME) or exists(folder / INDEX_NAME)
        return not (has_weights and exists(folder / "config.json"))


def _named_base(adapter: Path, config: adapters.AdapterConfig) -> Path:
    """Return the folder of the base that an adapter names. Raises: ModelError."""
    where = escape(adapter / adapters.ADAPTER_CONFIG)
    if not config.base:
        raise ModelError(f"the adapter in {escape(adapter)} names no base model", where=where, next=_NEXT)
    named, shown = Path(config.base), config.base
    # A run that continues from an earlier checkpoint moves its later ones one folder down.
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
    what = f"the base model {quote(shown, 300)} of the adapter in {escape(adapter)} does not exist"
    raise ModelError(what, where=where, next=_NEXT if advice is None else f"{_NEXT}; {advice}")


@boundary(ModelError, "looking for the model")
def saved_model(path: str | os.PathLike[str]) -> Path:
    """Return the folder `path` itself, or the newest complete checkpoint of a run without a final model."""
    folder = Path(local_path(path))
    has_weights = any(exists(folder / name) for name in (WEIGHTS_NAME, INDEX_NAME, adapters.ADAPTER_CONFIG))
    return folder if has_weights else newest_checkpoint(folder) or folder


@boundary(ModelError, "looking for checkpoints")
def newest_checkpoint(run: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a run's folder, or None.

    Raises:
        ModelError: it belongs to another user than this one or the folder's owner.
    """
    folder = Path(run)
    if not is_folder(folder):
        return None
    steps = sorted((int(match[1]) for match in map(CHECKPOINT.fullmatch, list_folder(folder)) if match), reverse=True)
    names = (folder / f"checkpoint-{step}" for step in steps)
    newest = next((path for path in names if exists(path / MANIFEST_NAME)), None)
    if newest is not None:
        check_owner(newest, next="name one of your own checkpoints, or remove it", trusted=os.stat(folder).st_uid)
    return newest


def check_model_folder(path: str | os.PathLike[str]) -> None:
    """Check whether `path` can be a model folder; only file names are read.

    Raises:
        ModelError: it does not exist, or it is a hub id, a file, an adapter, a run without its final model, pickled or
            GGUF weights, or a folder of model folders.
    """
    folder = Path(path)
    with boundary(ModelError, "looking for the model", folder):
        is_there, is_a_folder = exists(folder), is_folder(folder)
    if not is_there:
        if (advice := hub_advice(os.fspath(path))) is None:
            raise ModelError(f"the folder {escape(path)} does not exist", next=f"name a model folder: {NEEDED}")
        what = f"the folder {escape(path)} does not exist; it looks like a Hugging Face model that is not on this"
        raise ModelError(f"{what} machine, and Genesis downloads only on request", next=advice)
    if not is_a_folder:
        raise _a_file(folder)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for _, entry in zip(range(MAX_LISTED), entries, strict=False))
    except OSError as error:
        what = f"{escape(folder)} cannot be listed: {error.strerror}"
        raise ModelError(what, next="check its permissions") from error
    has_weights = WEIGHTS_NAME in names or INDEX_NAME in names
    if CONFIG in names and has_weights:
        return
    if (found := next(_other_contents(folder, names), None)) is not None:
        raise found
    if CONFIG not in names:
        raise ModelError(f"{escape(folder)} has no {CONFIG}", next=f"name a model folder: {NEEDED}")


def hub_advice(name: str) -> str | None:
    """Return how to get the Hugging Face model of this name; None if it is not such a name."""
    found = hub_name(name)
    return None if found is None else pull_advice(found)


def _a_file(path: Path) -> ModelError:
    name, where, magic = path.name.lower(), escape(path), b""
    with suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                magic = file.read(4)
    if name.endswith(".gguf") or magic == b"GGUF":
        return _gguf(where)
    if name.endswith(_PICKLES):
        return _pickle(where)
    if name == CONFIG or name.endswith((".safetensors", ".safetensors.index.json")):
        return ModelError(f"{where} is one file of a model", next=f"name its folder: {escape(path.parent)}")
    return ModelError(f"{where} is not a folder", next=f"name a model folder: {NEEDED}")


def _gguf(where: str) -> ModelError:
    what = f"{where} holds GGUF, the format of llama.cpp, which Genesis cannot read"
    return ModelError(what, next=f"use the model's original folder: {NEEDED}")


def _pickle(where: str) -> ModelError:
    what = f"{where} holds pickled weights, which can run code when they are loaded; Genesis reads safetensors"
    return ModelError(what, next=f"use a version with safetensors, or convert it with transformers, {_CONVERT}")


def _other_contents(folder: Path, names: list[str]) -> Iterator[ModelError]:
    """Yield an error for each thing that a folder holds instead of a model, the most certain first."""
    where = escape(folder)
    # An adapter.
    if adapters.ADAPTER_CONFIG in names:
        base = read_json(safe_join(folder, adapters.ADAPTER_CONFIG, where=where)).get("base_model_name_or_path")
        of = f", base model {escape(base)[:200]}" if isinstance(base, str) and base else ""
        next = "name its base, or merge the two: genesis export --merge; init_from continues its training"
        yield ModelError(f"{where} is a PEFT adapter{of}, but this needs a whole model", next=next)
    # A run: with complete checkpoints, or without.
    steps = [int(m[1]) for m in map(CHECKPOINT.fullmatch, names) if m]
    complete = [step for step in steps if (folder / f"checkpoint-{step}" / MANIFEST_NAME).is_file()]
    if complete:
        next = f"name its newest checkpoint: {escape(folder / f'checkpoint-{max(complete)}')}"
        yield ModelError(f"{where} is a run without a final model", next=next)
    if RESOLVED in names:
        what = f"{where} is a run that has neither a model nor a complete checkpoint yet"
        yield ModelError(what, next="continue it (genesis train CONFIG --resume), or name another folder")
    # Weights in another format.
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.lower().endswith(".gguf") for name in names):
            yield _gguf(where)
        if any(name.lower().endswith(_PICKLES) and name != "training_args.bin" for name in names):
            yield _pickle(where)
    # A folder of model folders.
    if CONFIG not in names:  # it may hold several models, or the `snapshots` folder of the hub's cache
        snapshots = folder / "snapshots"
        inside = sorted(snapshots.iterdir()) if snapshots.is_dir() else [folder / name for name in names[:1000]]
        if found := [path for path in inside if (path / CONFIG).is_file()]:
            shown = ", ".join(escape(path) for path in found[:3]) + (", …" if len(found) > 3 else "")
            what = f"{where} is not a model folder, but holds {len(found):,}"
            yield ModelError(what, next=f"name one: {shown}")

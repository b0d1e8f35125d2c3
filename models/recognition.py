"""What a path holds that is no model folder which Genesis loads: one sentence about it, and the way to one that is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.hf import CHECKPOINT, INDEX_NAME, WEIGHTS_NAME, read_json
from genesis.files.hub_cache import hub_name, pull_advice
from genesis.files.manifest import MANIFEST_NAME
from genesis.files.paths import exists, is_folder, safe_join
from genesis_models.adapters import ADAPTER_CONFIG

CONFIG, RESOLVED = "config.json", "config.resolved.yaml"
NEEDED = f"{CONFIG} and safetensors weights"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = 'in Python: AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW", safe_serialization=True)'
MAX_LISTED = 10_000


def check_model_folder(path: str | os.PathLike[str]) -> None:
    """Look at names only: whether `path` can be a model folder.

    Raises:
        ModelError: it is something else: nothing, a hub id, a file, an adapter, a run without its final model, a folder
            of pickled or GGUF weights, or a folder that holds model folders.
    """
    folder = Path(path)
    with boundary(ModelError, "looking for the model", folder):
        is_there, is_a_folder = exists(folder), is_folder(folder)
    if not is_there:
        raise _nothing_there(os.fspath(path))
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
    checks: tuple[Callable[[Path, list[str]], ModelError | None], ...]
    checks = (_adapter, _unfinished_run, _other_weights, _parent)
    for check in checks:
        if (found := check(folder, names)) is not None:
            raise found
    if CONFIG not in names:
        raise ModelError(f"{escape(folder)} has no {CONFIG}", next=f"name a model folder: {NEEDED}")


def _nothing_there(name: str) -> ModelError:
    """A path that does not exist: perhaps a hub id."""
    next = hub_advice(name)
    if next is None:
        return ModelError(f"there is no folder {escape(name)}", next=f"name a model folder: {NEEDED}")
    return ModelError(
        f"there is no folder {escape(name)}; it looks like a model of the Hugging Face hub that is not on this machine,"
        " and Genesis downloads nothing unasked",
        next=next,
    )


def hub_advice(name: str) -> str | None:
    """How to come by the model that the Hugging Face hub has under this name; None where it is no such name."""
    found = hub_name(name)
    return None if found is None else pull_advice(found)


def _a_file(path: Path) -> ModelError:
    name, where = path.name.lower(), escape(path)
    if name.endswith(".gguf") or _begins_with(path, b"GGUF"):
        return _gguf(where)
    if name.endswith(_PICKLES):
        return _pickle(where)
    if name == CONFIG or name.endswith((".safetensors", ".safetensors.index.json")):
        return ModelError(f"{where} is one file of a model", next=f"name its folder: {escape(path.parent)}")
    return ModelError(f"{where} is no folder", next=f"name a model folder: {NEEDED}")


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def _gguf(where: str) -> ModelError:
    return ModelError(
        f"{where} holds GGUF, the format of llama.cpp, which Genesis does not read",
        next=f"take the model's original folder: {NEEDED}",
    )


def _pickle(where: str) -> ModelError:
    return ModelError(
        f"{where} holds pickled weights, which can run code when they are read; Genesis reads safetensors",
        next=f"take a version with safetensors, or convert it with transformers, {_CONVERT}",
    )


def _adapter(folder: Path, names: list[str]) -> ModelError | None:
    if ADAPTER_CONFIG not in names:
        return None
    base = read_json(safe_join(folder, ADAPTER_CONFIG, where=escape(folder))).get("base_model_name_or_path")
    of = f", base model {escape(base)[:200]}" if isinstance(base, str) and base else ""
    return ModelError(
        f"{escape(folder)} is a PEFT adapter{of}, and a whole model is needed here",
        next="name its base, or merge the two: genesis export --merge; a run trains it further with init_from",
    )


def _unfinished_run(folder: Path, names: list[str]) -> ModelError | None:
    """A run's folder without a final model: its newest complete checkpoint is one."""
    found = [int(m[1]) for m in map(CHECKPOINT.fullmatch, names) if m]
    complete = [step for step in found if (folder / f"checkpoint-{step}" / MANIFEST_NAME).is_file()]
    if complete:
        newest = escape(folder / f"checkpoint-{max(complete)}")
        return ModelError(
            f"{escape(folder)} is a run without a final model", next=f"name its newest checkpoint: {newest}"
        )
    if RESOLVED in names:
        what = f"{escape(folder)} is a run that has no model and no complete checkpoint yet"
        return ModelError(what, next="go on with it (genesis train CONFIG --resume), or name another folder")
    return None


def _other_weights(folder: Path, names: list[str]) -> ModelError | None:
    """Weights in a form that is not read, in a folder without safetensors."""
    if any(name.endswith(".safetensors") for name in names):
        return None
    if any(name.lower().endswith(".gguf") for name in names):
        return _gguf(escape(folder))
    if any(name.lower().endswith(_PICKLES) and name != "training_args.bin" for name in names):
        return _pickle(escape(folder))
    return None


def _parent(folder: Path, names: list[str]) -> ModelError | None:
    """A folder that holds model folders: of several models, or `snapshots` of the hub's cache."""
    if CONFIG in names:
        return None
    snapshots = folder / "snapshots"
    inside = sorted(snapshots.iterdir()) if snapshots.is_dir() else [folder / name for name in names[:1000]]
    found = [path for path in inside if (path / CONFIG).is_file()]
    if not found:
        return None
    shown = ", ".join(escape(path) for path in found[:3]) + (", …" if len(found) > 3 else "")
    return ModelError(f"{escape(folder)} is no model folder, but holds {len(found):,}", next=f"name one: {shown}")

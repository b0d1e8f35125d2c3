"""Reads and writes adapter folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Adapters are shared, so their files must not reveal the machine: `adapter_config.json` has the base's name on the hub,
or its path relative to the adapter. `base.json`, next to an adapter that a run saved, has the sha256 of the base's
config and weight files, so that nothing continues from another base. Hashing gigabytes at every resume would be slow,
so the user's cache stores each file's device, inode, size, mtime and ctime next to the digest. If none of them changed,
the contents did not change either: every write moves the ctime, and nobody can set it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from genesis import Tensor, nn, no_grad
from genesis.backend import backend_for
from genesis.dtypes import bfloat16, float16, float32, float64
from genesis.errors import ModelError, escape
from genesis.files.atomic import FolderWriter
from genesis.files.boundary import boundary
from genesis.files.cache import Cache, user_folder
from genesis.files.hashing import sha256_file
from genesis.files.hf import WeightFolder, list_names, read_json
from genesis.files.hub import ADAPTER_CONFIG, hub_name, name_of
from genesis.files.paths import exists, is_folder, safe_join
from genesis.files.safetensors import SafeTensors, TensorSource, write_tensors
from genesis.files.strict_json import canonical_bytes, indented_bytes
from genesis.random import Generator
from genesis_models.adapters.config import AdapterConfig, adapter_json, read_adapter_config
from genesis_models.adapters.layers import (
    EMBEDDING,
    HEAD,
    Target,
    adapt,
    adapted_layers,
    adapter_of,
    adapter_parameters,
    saved_modules,
    targets,
)

BASE_NAME, ADAPTER_WEIGHTS = "base.json", "adapter_model.safetensors"
MAX_ENTRY = 1 << 20  # bytes of a cache entry
_FLOATS = [d.numpy for d in (float64, float32, float16, bfloat16)]
_PREFIX = "base_model.model."  # PEFT's prefix of a module's name
_MAGNITUDE = "lora_magnitude_vector"  # PEFT saves its parameter without `.weight`

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Base:
    """The base model on which an adapter was trained.

    Attributes:
        path: its absolute folder, or its name on the hub; only errors use it.
        sha256: digest of the names and contents of its config and weight files.
    """

    path: str
    sha256: str

    def to_json(self) -> bytes:
        """Return the content of `base.json`."""
        return indented_bytes({"sha256": self.sha256})


@cache
def _hashed_bases() -> Cache:
    """The user's cache of base digests, keyed by the identity of the base's files."""
    return Cache.of_user(user_folder("bases"))


@boundary(ModelError, "reading the base model")
def base_of(folder: str | os.PathLike[str], known: Base | None = None) -> Base:
    """Return the base model in `folder`.

    Args:
        known: a base whose sha256 is reused if the user's cache says that it has the files of `folder`, unchanged.

    Raises:
        ModelError: `folder` is not a model folder, or cannot be read.
    """
    with WeightFolder(folder) as weights:
        names = sorted(["config.json", *weights.files])
    paths = {name: safe_join(folder, name, where=escape(folder)) for name in names}
    identities = {name: _identity(path) for name, path in paths.items()}
    files, place = (
        canonical_bytes(identities),
        "{:x}-{:x}".format(*identities["config.json"]),
    )  # each copy has its entry
    entry = None if known is None else _hashed_bases().find(f"{known.sha256}-{place}.base", limit=MAX_ENTRY)
    if known is not None and entry is not None and bytes(entry.part("files")) == files:
        return Base(os.path.realpath(folder), known.sha256)
    digest = hashlib.sha256(canonical_bytes({name: sha256_file(path) for name, path in paths.items()})).hexdigest()
    _hashed_bases().put(f"{digest}-{place}.base", {"files": files})
    return Base(os.path.realpath(folder), digest)


def _identity(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def base_name(base: str | os.PathLike[str], adapter: str | os.PathLike[str]) -> str:
    """Return how the adapter in the folder `adapter` refers to a base: its hub name, or a path relative to the adapter.

    The path is relative to real folders, because the system follows links before it resolves `..`.
    """
    pulled = name_of(base)
    return pulled.id if pulled is not None else os.path.relpath(os.path.realpath(base), os.path.realpath(adapter))


def read_base(folder: str | os.PathLike[str]) -> Base | None:
    """Return the base on which the adapter in `folder` was trained, or None if it is not recorded.

    Raises:
        ModelError: `base.json` is malformed.
    """
    where = escape(Path(folder) / BASE_NAME)
    with boundary(ModelError, "looking for the base model", folder):
        if not exists(Path(folder) / BASE_NAME):
            return None
    raw = read_json(safe_join(folder, BASE_NAME, where=where))
    path, digest = raw.get("path"), raw.get("sha256")  # older versions wrote the whole path
    if path is None:
        named = read_json(safe_join(folder, ADAPTER_CONFIG)).get("base_model_name_or_path")
        is_hub = isinstance(named, str) and hub_name(named) is not None
        path = named if is_hub else os.path.realpath(Path(folder) / str(named))
    if isinstance(path, str) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest):
        return Base(path, digest)
    raise ModelError(f"{BASE_NAME} names no base model", where=where, next="save the adapter again")


def check_same_base(found: Base, expected: Base, where: str, *, setting: str = "--base") -> None:
    """Refuse a base other than the one on which an adapter was trained, wherever the two are stored.

    Args:
        setting: option that names a base, for the error.

    Raises:
        ModelError: it has both folders and both digests.
    """
    if found.sha256 == expected.sha256:
        return
    if found.path == expected.path:
        what = f"the base model in {escape(found.path)} has changed"
        next = f"restore the original files, or name the folder that has them: {setting}=FOLDER"
    else:
        own = escape(expected.path)
        what = f"the model in {escape(found.path)} is not the base of this adapter, which was in {own}"
        next = f"name the current folder of that base: {setting}=FOLDER"
    prints = f"its sha256 begins with {found.sha256[:12]}, the base's with {expected.sha256[:12]}"
    raise ModelError(f"{what}: {prints}", where=where, next=next)


@boundary(ModelError, "looking for an adapter")
def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return exists(Path(folder) / ADAPTER_CONFIG)


@boundary(ModelError, "reading the adapter")
def read_adapter(folder: str | os.PathLike[str]) -> AdapterConfig:
    """Return the config of the adapter in `folder` without reading a tensor.

    Raises:
        ModelError: the adapter is missing, malformed or unsupported.
    """
    where = escape(folder)
    if not exists(Path(folder) / ADAPTER_CONFIG):
        what = f"{where} has no {ADAPTER_CONFIG}" if is_folder(folder) else f"the folder {where} does not exist"
        raise ModelError(what, next=f"name the folder of an adapter: {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    path = safe_join(folder, ADAPTER_CONFIG, where=where)
    return read_adapter_config(read_json(path), escape(Path(folder) / ADAPTER_CONFIG))


@boundary(ModelError, "reading the adapter")
def load_adapter(
    model: M, folder: str | os.PathLike[str], *, dropout: float | None = None, generator: Generator | None = None
) -> M:
    """Give a base model the adapter in `folder`, which PEFT or `write_adapter` wrote, and return the model.

    If the model has adapters already, they get new values. Everything is checked before the model changes.

    Args:
        dropout: dropout of the low-rank path's input, instead of the folder's.
        generator: generator of dropout; None uses the default one.

    Raises:
        ModelError: as in `read_adapter`, or tensors are missing, left over, or differ in shape from the model's layers.
    """
    apply_adapters_of(model, folder, dropout=dropout, generator=generator)
    values = adapter_values(model, folder)
    with no_grad():
        for name, parameter in adapter_parameters(model).items():
            cast = np.ascontiguousarray(values[name].astype(parameter.dtype.numpy, copy=False))
            backend_for(parameter.device).from_numpy(cast, parameter.array)
    return model


@boundary(ModelError, "reading the adapter")
def apply_adapters_of(
    model: M, folder: str | os.PathLike[str], *, dropout: float | None = None, generator: Generator | None = None
) -> M:
    """Give a base model fresh adapters like the one in `folder`, and return it; only headers of tensors are read.

    A model that has such adapters already does not change.

    Args:
        dropout, generator: as in `load_adapter`.

    Raises:
        ModelError: as in `load_adapter`.
    """
    config = read_adapter(folder)
    config = config if dropout is None else replace(config, dropout=dropout)
    with _open_weights(folder) as file:
        chosen, saved = _parts(model, config, folder)
        _check_tensors(model, chosen, saved, config, file)
    if layers := adapted_layers(model):
        _check_same(layers, chosen, config, escape(folder))
        if (has := model.modules_to_save) != tuple(saved):
            raise ModelError(f"the folder saves {saved} whole, but the model {list(has)}", where=escape(folder))
    else:
        adapt(model, chosen, saved, config, generator)
    return model


def _parts(
    model: nn.Module, config: AdapterConfig, folder: str | os.PathLike[str]
) -> tuple[dict[str, Target], list[str]]:
    fail = partial(ModelError, where=escape(Path(folder) / ADAPTER_CONFIG))
    chosen = targets(model, config, fail, strict=False)
    return chosen, saved_modules(model, config, chosen, fail)


@boundary(ModelError, "reading the adapter")
def adapter_values(model: nn.Module, folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the tensors in `folder` as stored, by the parameters' names in a model with such adapters.

    Raises:
        ModelError: as in `load_adapter`.
    """
    config = read_adapter(folder)
    with _open_weights(folder) as file:
        stored = _check_tensors(model, *_parts(model, config, folder), config, file)
        return {name: file.read(held) for name, held in stored.items()}


def _open_weights(folder: str | os.PathLike[str]) -> SafeTensors:
    if not exists(Path(folder) / ADAPTER_WEIGHTS):
        pickled = exists(Path(folder) / "adapter_model.bin")
        what = f"{escape(folder)} has no {ADAPTER_WEIGHTS}"
        if pickled:
            what += ", only adapter_model.bin, a pickle, which can run code when it is loaded"
        raise ModelError(what, next="save it again with PEFT: save_pretrained(FOLDER, safe_serialization=True)")
    return SafeTensors(safe_join(folder, ADAPTER_WEIGHTS, where=escape(folder)))


def _saved_name(name: str) -> str:
    """Return PEFT's name of an adapter's parameter in the file."""
    return _PREFIX + name.replace(f"{_MAGNITUDE}.weight", _MAGNITUDE)


def _check_tensors(
    model: Any, chosen: Mapping[str, Target], saved: Iterable[str], config: AdapterConfig, file: SafeTensors
) -> dict[str, str]:
    """Return parameter's name -> tensor's name in the file.

    Raises:
        ModelError: it lists everything that is wrong with names, shapes and dtypes.
    """
    # The expected parameters: A and B (and m) of adapted layers, and modules that are saved whole.
    expected, is_tied = dict[str, tuple[int, ...]](), model.lm_head is None
    for name, target in chosen.items():
        rows, columns = target.linear.out_features, target.linear.in_features
        expected |= {f"{name}.lora_A.weight": (target.r, columns), f"{name}.lora_B.weight": (rows, target.r)}
        if config.use_dora:
            expected[f"{name}.{_MAGNITUDE}.weight"] = (rows,)
    for owner in saved:
        whole = model.get_submodule(EMBEDDING if owner == HEAD and is_tied else owner)
        expected |= {f"{owner}.{part}": tuple(p.shape) for part, p in whole.named_parameters()}
    # Match them with the file's tensors.
    found: dict[str, str] = {}
    missing = []
    for name in expected:
        # PEFT versions write m's name with and without `.weight`.
        forms = (_saved_name(name), _PREFIX + name)
        held = next((form for form in forms if form in file.entries), None)
        if held is None:
            missing.append(forms[0])
        else:
            found[name] = held
    extra = set(file.names) - set(found.values())
    if f"{EMBEDDING}.weight" in found and is_tied and config.ensure_weight_tying:
        extra.discard(f"{_PREFIX}{HEAD}.weight")  # PEFT writes the tied embedding a second time as the head
    # Report all problems at once.
    problems = [f"missing: {list_names(missing)}"] if missing else []
    if extra:
        problems.append(f"outside the layers that {ADAPTER_CONFIG} targets: {list_names(extra)}")
    for key, held in found.items():
        entry = file.entries[held]
        if tuple(entry.shape) != expected[key]:
            shape = tuple(entry.shape)
            problems.append(f"{escape(held)} has shape {shape}, but the layer and its rank need {expected[key]}")
        elif entry.dtype not in _FLOATS:
            kinds = "float64, float32, float16 or bfloat16"
            problems.append(f"{escape(held)} has type {entry.dtype}, not {kinds}")
        if len(problems) == 10:
            break
    if problems:
        next_step = "use the adapter with the base that it was trained on"
        raise ModelError("; ".join(problems), where=escape(file.path), next=next_step)
    return found


def _check_same(
    layers: Mapping[str, nn.LoRALinear], chosen: Mapping[str, Target], config: AdapterConfig, where: str
) -> None:
    """Raise ModelError if the model's adapters differ from the folder's."""
    has = {name: (a.r, a.alpha, a.use_rslora, a.lora_magnitude_vector is not None) for name, a in layers.items()}
    reads = {name: (t.r, t.alpha, config.use_rslora, config.use_dora) for name, t in chosen.items()}
    for name in {**has, **reads}:
        if has.get(name) != reads.get(name):
            one, other = (
                "no adapter" if each is None else "r {}, alpha {:g}, use_rslora {}, use_dora {}".format(*each)
                for each in (reads.get(name), has.get(name))
            )
            raise ModelError(f"{name}: the folder has {one}, but the model has {other}", where=where)


def write_adapter(
    model: nn.Module,
    writer: FolderWriter,
    *,
    base: str | os.PathLike[str] | None,
    values: Mapping[str, TensorSource] | None = None,
) -> None:
    """Write a model's adapters in PEFT's format: `adapter_config.json` and float32 `adapter_model.safetensors`.

    Args:
        base: folder of the base model, recorded relative to the adapter's, or its name on the hub.
        values: values of the adapters' parameters by name; None uses the model's.

    Raises:
        UsageError: as in `adapter_of`. DiskError: writing failed.
    """
    if base is not None and is_folder(base):
        base = base_name(base, writer.target)
    config = adapter_of(model, base=None if base is None else os.fspath(base))
    tensors = {
        _saved_name(name): _float32(None if values is None else values[name], parameter)
        for name, parameter in adapter_parameters(model).items()
    }
    if config.ensure_weight_tying:
        tensors[f"{_PREFIX}{HEAD}.weight"] = tensors[f"{_PREFIX}{EMBEDDING}.weight"]
    writer.write(ADAPTER_CONFIG, adapter_json(config))
    with writer.create(ADAPTER_WEIGHTS) as file:
        write_tensors(file, tensors)


def _float32(source: TensorSource | None, parameter: Tensor) -> TensorSource:
    def read() -> np.ndarray:
        values = parameter.detach().cpu().numpy() if source is None else source.read()
        return np.ascontiguousarray(values.astype(np.float32, copy=False))

    return TensorSource(np.dtype(np.float32), parameter.shape, read)

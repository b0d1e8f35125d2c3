"""Exports a trained model or adapter for other programs: whole, merged, or as an adapter.

`write_export` writes the folder with a model card (`card_of`). `check_weights_of` and `check_answers` compare it with
the trained model. Weights are compared with values recomputed in float64, so that a mistake in merging shows. Their
tolerance follows from the dtype: half a unit in the last place, and for merged weights the error of float32 sums.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

import genesis
from genesis import __version__
from genesis.dtypes import as_dtype
from genesis.errors import ConfigError, ModelError, NumericError, UsageError, escape
from genesis.files.atomic import MANIFEST_NAME, AtomicFolder, read_manifest
from genesis.files.boundary import boundary
from genesis.files.hashing import sha256_file
from genesis.files.hf import CHECKPOINT, README, WeightFolder, list_names, read_head, read_json, with_head
from genesis.files.hub import DATA_SOURCE, hub_name, local_path, name_of
from genesis.files.paths import exists, is_folder, list_folder, safe_join
from genesis.files.safetensors import load_file
from genesis.files.strict_json import read_limited
from genesis.files.trust import run_file
from genesis.nn import LoRALinear
from genesis.train.checkpoint import TRAINER
from genesis.train.config_file import RESOLVED, parse_config
from genesis.train.strict_yaml import MAX_BYTES, emit
from genesis_models.adapters import ADAPTER_WEIGHTS, BASE_NAME, adapted_layers, base_of, is_adapter, write_adapter
from genesis_models.adapters.layers import HEAD
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.folder import side_bytes, write_model
from genesis_models.source import ModelSource

EXPORT = "export"  # key in the metadata of an export's manifest; folders that have it may be overwritten
MAX_README = 1 << 20  # bytes
TEXTS = {("data", "template_args"), ("data", "fields"), ("eval", "prompts")}  # settings that contain no paths
LICENSE = ("license", "license_name", "license_link")
# Relative size of half a unit in the last place. _LEAST: the smallest positive number.
_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_LEAST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
Answers = list[np.ndarray]  # logits [T, V] of each text


def write_export(model: CausalLM, source: ModelSource, target: Path, *, merge: bool, dtype: str | None) -> None:
    """Write the folder `target`, which appears as a whole; an earlier export is replaced.

    Args:
        model: the source's model, loaded as float32 or in its stored dtype.
        merge: merge an adapter into the weights of its base.
        dtype: "float32", "bfloat16" or "float16" for whole weights; None keeps each tensor's own.

    Raises:
        UsageError: the source has no adapter to merge, or a dtype is given for an adapter. ConfigError: as in
            `check_target`. NumericError: a weight exceeds float16's range. DiskError: writing failed; existing files
            are intact.
    """
    if merge and source.adapter is None:
        what = f"{escape(source.folder)} is a whole model, not an adapter to merge"
        raise UsageError(what, next="remove --merge")
    is_whole = merge or source.adapter is None
    if dtype is not None and not is_whole:
        raise UsageError("an adapter is always written in float32", next="remove --dtype, or add --merge")
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
    """Return the base's name on the hub if the adapter has it, otherwise the base's folder."""
    named = None if source.config is None else source.config.base
    is_hub = named and hub_name(named) is not None and not os.path.lexists(named)
    return named if named and is_hub else os.fspath(source.folder)


def check_target(target: Path, source: ModelSource) -> None:
    """Refuse a target folder that is neither new, empty nor an earlier export.

    Raises:
        ConfigError: the folder holds something else, or overlaps with what is exported.
    """
    where, next = "--out", "name a new or empty folder"
    real = Path(os.path.realpath(target))
    for folder in source.folders:
        other = Path(os.path.realpath(folder))
        if real == other or other.is_relative_to(real) or real.is_relative_to(other):
            what = f"{escape(target)} overlaps with {escape(folder)}, which is exported"
            raise ConfigError(what, where=where, next=next)
    with boundary(ConfigError, "looking at the folder", target):
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not is_folder(target):
            raise ConfigError(f"{escape(target)} is not a plain folder", where=where, next=next)
        names = set(list_folder(target))
        if names and not _is_export(target, names):
            what = f"{escape(target)} holds files that are not an export's"
            raise ConfigError(what, where=where, next=next)


def _is_export(folder: Path, names: set[str]) -> bool:
    """Whether an export wrote the folder and all files in it; an edited model card does not count as its file."""
    if not exists(folder / MANIFEST_NAME):
        return False
    try:
        manifest = read_manifest(folder)
        is_same_card = README not in names or sha256_file(safe_join(folder, README)) == manifest.files[README].sha256
    except (ModelError, KeyError):
        return False
    written = {MANIFEST_NAME, *(name.partition("/")[0] for name in manifest.files)}
    return is_same_card and EXPORT in manifest.metadata and names == written


class Difference(NamedTuple):
    """The distance between the answers of two models.

    Attributes:
        tokens: number of compared tokens.
        logit: the largest absolute difference of a logit.
        kl: mean of KL(first ‖ second) of a token's distribution, in nats.
        relative: ‖difference‖ / ‖logits‖ over all tokens.
    """

    tokens: int
    logit: float
    kl: float
    relative: float


def answers(model: CausalLM, texts: Sequence[np.ndarray]) -> Answers:
    """Return the logits after each token of texts of ids `[T]`; of a reward model the final hidden states."""
    model.eval()
    with genesis.no_grad():
        found = [_outputs(model, genesis.from_numpy(ids[None].astype(np.int64))) for ids in texts]
    return [each.numpy()[0].astype(np.float32) for each in found]


def _outputs(model: CausalLM, input_ids: genesis.Tensor) -> genesis.Tensor:
    """Return the logits `[1, T, V]`; of a reward model the final hidden states `[1, T, H]`, because the products with a
    single vector cancel, so their relative error has no bound.
    """
    return model(input_ids) if model.score is None else model.hidden_states(input_ids)


def difference(expected: Answers, found: Answers) -> Difference:
    """Return the distance of `found` from `expected`.

    Raises:
        NumericError: an answer is NaN or infinite.
    """
    tokens, largest, kl, square, norm = 0, 0.0, 0.0, 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise NumericError("the model's logits are NaN or infinite", next="export it as float32 or bfloat16")
        tokens += len(a)
        largest = max(largest, float(np.abs(a - b).max()))
        square, norm = square + float(((a - b) ** 2).sum()), norm + float((a**2).sum())
        log_a, log_b = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (a, b))
        kl += float((np.exp(log_a) * (log_a - log_b)).sum())
    return Difference(tokens, largest, max(kl / max(tokens, 1), 0.0), math.sqrt(square / max(norm, 1e-300)))


def check_answers(found: Difference, dtype: str, config: ModelConfig, where: Path) -> None:
    """Refuse answers that differ from the trained model's by more than rounding its weights to `dtype` explains.

    Each of about 7 matmuls in a layer adds the rounding error of its weight, and the error of sums of K products in
    float32: u + 2^-24·√K. These errors are independent, so n of them add up to √n times one. A factor of 4 leaves room
    for how the model amplifies them.

    Raises:
        ModelError: it has the difference and the bound.
    """
    sums = _UNIT["float32"] * math.sqrt(config.intermediate_size)
    bound = 4 * math.sqrt(7 * config.num_hidden_layers + 1) * (_UNIT[dtype] + sums)
    if not found.relative <= bound:
        what = f"the answers differ by {found.relative:.2g} of their size, but rounding to {dtype} explains {bound:.2g}"
        next = "do not use this folder: it is not the trained model"
        raise ModelError(what, where=escape(where), next=next)


def check_weights_of(model: CausalLM, folder: Path) -> tuple[int, str]:
    """Compare every written tensor with the trained one.

    Args:
        model: the trained model in float32.
        folder: its exported adapter, or the whole model with adapters merged.

    Returns:
        The number of tensors, and the coarsest of their dtypes.
    Raises:
        ModelError: at most 10 names of tensors that differ by more than their dtype explains.
    """
    compared = list((_compared_adapter if is_adapter(folder) else _compared_weights)(model, folder))
    wrong = [name for name, _, same in compared if not same]
    if wrong:
        what = f"the folder's weights are not the trained ones, in tensors: {list_names(wrong)}"
        raise ModelError(what, where=escape(folder), next="do not use this folder; export it again")
    return len(compared), max((kind for _, kind, _ in compared), key=_UNIT.__getitem__)


def _compared_adapter(model: CausalLM, folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield each tensor of an adapter, its dtype, and whether it has its parameter's bits."""
    layers = adapted_layers(model)
    for name, values in load_file(folder / ADAPTER_WEIGHTS).items():
        owner, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        parameter: genesis.Tensor
        if part:
            parameter = layers[owner].get_parameter(f"lora_{part.removesuffix('.weight')}.weight")
        else:
            parameter = model.head_weight if owner == f"{HEAD}.weight" else model.get_parameter(owner)
        yield name, "float32", np.array_equal(values, parameter.detach().numpy().astype(np.float32))


def _compared_weights(model: CausalLM, folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield each tensor of a whole model, its dtype, and whether it is within the tolerance."""
    layers = adapted_layers(model)
    with WeightFolder(folder) as weights:
        for name, parameter in model.named_parameters():
            owner, _, last = name.rpartition(".")
            if owner.rpartition(".")[0] in layers:
                continue  # a part of an adapter
            if owner in layers and last == "weight":
                exact, lost = _merged(layers[owner])
            else:
                exact, lost = parameter.detach().numpy().astype(np.float64), np.zeros(())
            written = weights.read(name)
            kind = as_dtype(written.dtype).name
            allowed = _UNIT[kind] * (np.abs(exact) + lost) * (1 + 2.0**-20) + lost + _LEAST[kind]
            yield name, kind, bool((np.abs(written.astype(np.float64) - exact) <= allowed).all())


def _merged(layer: LoRALinear) -> tuple[np.ndarray, np.ndarray]:
    """Return a layer's merged weight in float64, and the error of a merge in float32 before it is rounded."""
    w, a, b = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.lora_A.weight, layer.lora_B.weight))
    whole = w + layer.scaling * (b @ a)
    # Sums of r products, followed by a few operations: at most (r + 4) rounding errors of the sum of absolute values.
    sizes = np.abs(w) + abs(layer.scaling) * (np.abs(b) @ np.abs(a))
    lost = (layer.r + 4) * _UNIT["float32"] * sizes
    if layer.lora_magnitude_vector is None:
        return whole, lost
    norm = np.sqrt((whole**2).sum(-1, keepdims=True))
    factor = layer.lora_magnitude_vector.weight.detach().numpy().astype(np.float64)[:, None] / norm
    # The norm's own error: from the errors of its elements, and from summing squares in float32.
    of_norm = np.sqrt((lost**2).sum(-1, keepdims=True)) / norm + whole.shape[-1] * _UNIT["float32"]
    return whole * factor, np.abs(factor) * (lost + np.abs(whole) * (of_norm + 4 * _UNIT["float32"]))


def card_of(source: ModelSource, base: str | None, *, merged: bool, dtype: str | None) -> bytes:
    """Return the README of an export: the existing one if no Genesis run made the model, otherwise a model card.

    Args:
        base: the base's name in the adapter.
    """
    # A model that no Genesis run made keeps its own README.
    saved = Path(os.path.abspath(source.adapter or source.folder))
    is_checkpoint = CHECKPOINT.fullmatch(saved.name) is not None
    run = saved.parent if is_checkpoint else saved
    record = run_file(run, RESOLVED)
    if record is None and not merged and exists(saved / README):
        return read_limited(safe_join(saved, README), MAX_README)
    # The configuration and the data sets come from the run's record.
    config, sources = None, list[Any]()
    if record is not None:
        with suppress(ConfigError):  # another version of Genesis may have written the record
            config = parse_config(read_limited(record, MAX_BYTES), RESOLVED)
            sources = [
                DATA_SOURCE.fullmatch(each if isinstance(each, str) else each.path) for each in config.data.train
            ]
    # The head: metadata for the hub.
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
    # The text: a table of facts, and the commands that made the model.
    rows = {"Genesis": __version__, "base model": base and public(base), **({} if record is None else _state(saved))}
    text = f"# {name}\n\nThis {kind} was written by Genesis.\n\n| | |\n|---|---|\n"
    text += "".join(f"| {key} | {escape(value).replace('|', '/')} |\n" for key, value in rows.items() if value)
    flags = " --merge" * merged + (f" --dtype {dtype}" if dtype else "")
    commands = f"    genesis export {name}{f'/{saved.name}' * is_checkpoint}{flags}\n"
    if config is not None:
        commands = f"    genesis train config.yaml\n{commands}\nIn `config.yaml`, absolute paths are shortened:\n\n"
        commands += textwrap.indent(emit(_without_places(config.model_dump())), "    ")
    return with_head(head, f"{text}\n## How it was made\n\n{commands}")


def _state(saved: Path) -> dict[str, str]:
    """Return the card's rows about data, steps and weights; files of another version may lack some of them."""
    if (path := run_file(saved, TRAINER)) is None:
        return {}
    state = read_json(path)
    about = (read_manifest(saved).metadata if exists(saved / MANIFEST_NAME) else state).get("data")
    data = about if isinstance(about, dict) else {}
    values = (*map(data.get, ("documents", "tokens", "targets")), state.get("step"), state.get("num_tokens"))
    counts = [f"{value:,}" if type(value) is int else "?" for value in values]
    return {
        "data": "{} documents, {} tokens, {} of them targets".format(*counts) if data else "",
        "trained": "{3} steps, {4} tokens".format(*counts),
        "state hash": str(state.get("state_hash", "")),
    }


def _head_of_base(base: str, folder: Path) -> dict[str, Any]:
    """Return the base's name on the hub, if it has one, and the license in its own card."""
    pulled = name_of(folder)
    try:
        card = read_head(folder)
    except ModelError:
        card = {}
    named = pulled.id if pulled is not None else None if exists(Path(base)) or hub_name(base) is None else base
    return {"base_model": named} | {key: card[key] for key in LICENSE if isinstance(card.get(key), str)}


def public(text: str) -> str:
    """Return a path without parts that reveal the machine: a pulled model's name on the hub, else the last part."""
    pulled = name_of(text) if os.path.isabs(text) else None
    says = os.path.isabs(text) or ".." in PurePath(text).parts
    return pulled.id if pulled is not None else PurePath(text).name if says else text


def _without_places(value: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Mapping) and path not in TEXTS:
        return {key: _without_places(each, (*path, key)) for key, each in value.items()}
    if isinstance(value, list) and path not in TEXTS:
        return [_without_places(each, path) for each in value]
    return public(value) if isinstance(value, str) else value

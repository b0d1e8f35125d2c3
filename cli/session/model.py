"""The model of a run: its shape, the base of its adapters, what is trained, and its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from genesis import cuda, random
from genesis.backend import CPU, Device
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, DeviceError, ModelError, escape
from genesis.files.atomic import FolderWriter
from genesis.files.hf import (
    CHECKPOINT,
    GENERATION_CONFIG,
    MAX_TEMPLATE_BYTES,
    SIDE_FILES,
    TOKENIZER_FILES,
    side_files,
)
from genesis.files.paths import safe_join
from genesis.files.strict_json import read_limited
from genesis.nn import LoRALinear, init
from genesis.ops import fp8
from genesis.train.checkpoint import BEST
from genesis.train.config import LORA, Config, fine_tuning_defaults
from genesis.train.config_help import show
from genesis.train.optimizer import check_patterns, freeze
from genesis.train.preference_losses import REWARD
from genesis.train.state import FrozenBase, Snapshot, masters
from genesis_cli.session.chat import ChatFormat
from genesis_cli.session.run_folder import Resume
from genesis_models.adapters import (
    BASE_NAME,
    AdapterConfig,
    Base,
    adapted_layers,
    adapter_parameters,
    adapter_values,
    apply_adapters,
    apply_adapters_of,
    base_of,
    check_same_base,
    is_adapter,
    load_adapter,
    read_base,
    write_adapter,
)
from genesis_models.blocks import CausalLM, widest_matmul
from genesis_models.chat_files import chat_files, generation_config
from genesis_models.config import ModelConfig
from genesis_models.folder import load, read_config, write_model
from genesis_models.registry import ARCHITECTURES, build, fuses, preset
from genesis_models.source import check_model_folder


def model_config(config: Config) -> ModelConfig:
    """Return the shape of the model to train, from its folder, its preset or the configuration itself."""
    if config.model.path is not None:
        found = read_config(config.model.path)
    elif config.model.preset is not None:
        found = ModelConfig.from_dict(preset(config.model.preset), where="model.preset")
    else:
        try:
            found = ModelConfig.from_dict(config.model.config or {}, where="model.config")
        except ModelError as error:  # an error in the user's configuration
            raise ConfigError(error.what, where=error.where, next=error.next) from error
    if found.is_reward and config.objective.name not in REWARD:
        what = f"the model in {escape(config.model.path)} is a reward model, which predicts no tokens"
        raise ConfigError(what, where="model.path", next="set objective to reward, or name a language model")
    found = found.as_reward() if config.objective.name in REWARD else found
    if config.data.seq_len > found.packed_length:
        what = f"data.seq_len {config.data.seq_len} exceeds the model's {found.packed_length} positions"
        if found.packed_length < found.context_length:
            what += f" of a row: rotary angles of longer sequences depend on their length (rope_type {found.rope.kind})"
        raise ConfigError(what, where="data.seq_len", next="lower it")
    if config.train.activation_checkpointing == "selective" and not fuses(found):
        raise ConfigError(
            f"activation_checkpointing selective needs fused layers, but the layers of {found.model_type} are plain",
            where="train.activation_checkpointing",
            next="set it to none or full",
        )
    return found


def usable_precision(config: Config, shape: ModelConfig, device: Device) -> tuple[str | None, str | None]:
    """Return the usable `train.precision`, and a line if it differs from the setting or is slow."""
    if config.train.precision is None:
        return None, None
    fp8_line, widest = f"precision: {config.model.dtype}: fp8", widest_matmul(shape)
    if not fuses(shape):
        return None, f"{fp8_line} needs fused layers, but the layers of {shape.model_type} are plain"
    if widest < fp8.MIN_COLUMNS:
        why = f"needs matmuls of at least {fp8.MIN_COLUMNS} columns, but the model's widest has {widest}"
        return None, f"{fp8_line} {why}"
    if device == CPU:
        return config.train.precision, "precision: the CPU emulates fp8, which is slow"
    lack = fp8.lacking(cuda.get_device_capability(device), device)
    return (config.train.precision, None) if lack is None else (None, f"{fp8_line} {lack}")


def make_model(
    config: Config, shape: ModelConfig, tokenizer: Tokenizer, device: Device, adapter: Path | None = None
) -> CausalLM:
    """Return the model with the weights from which training starts.

    Args:
        adapter: checkpoint that is loaded next.
    """
    random.manual_seed(config.train.seed)
    if config.model.path is not None:
        rows = 0 if config.lora is not None else tokenizer.vocab_size
        model = load(
            config.model.path, device=str(device), dtype=config.model.dtype, vocab_size=rows, reward=shape.is_reward
        )
    else:
        raw = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, **shape.raw}
        fresh = ModelConfig.from_dict(raw, where="model.config")
        model = build(fresh, config.train.seed, device=str(device), dtype=config.model.dtype)
    select_trained(config, model, adapter)
    is_reference = config.objective.needs_reference  # the initial values, which a resumed run also needs
    if (adapter is None or is_reference) and config.lora is not None and config.lora.init_from is not None:
        load_adapter(model, config.lora.init_from, dropout=config.lora.dropout)
    model.activation_checkpointing = config.train.activation_checkpointing
    model.precision, _ = usable_precision(config, model.config, device)
    return model


# --- The base of adapters ---------------------------------------------------------------------------------------------


def adapter_to_resume(config: Config, resume: Resume, resume_from: str | None) -> Path | None:
    """Return the checkpoint from which a run with adapters continues; None for a new run."""
    output = Path(config.train.output_dir)
    if config.lora is None or not (resume or resume_from) or not output.is_dir():
        return None
    steps = [int(match[1]) for name in os.listdir(output) if (match := CHECKPOINT.fullmatch(name))]
    is_named = resume_from not in (None, BEST)  # all checkpoints of a run have the same base
    name = Path(resume_from or "").name if is_named or not steps else f"checkpoint-{max(steps)}"
    return output / name if name and is_adapter(output / name) else None


def checked_base(config: Config, checkpoint: Path | None) -> Base | None:
    """Return the base of a run with adapters, hashed unless `checkpoint` has its digest; None without adapters.

    Raises:
        ModelError: it cannot be read, or is not the base of the checkpoint.
    """
    if config.lora is None:
        return None
    assert config.model.path is not None, "the schema requires it"
    known = None if checkpoint is None else read_base(checkpoint)
    try:
        check_model_folder(config.model.path)
        base = base_of(config.model.path, known)
    except ModelError as error:
        if known is None:
            raise
        where = f"in {escape(config.model.path)}"
        if os.path.realpath(config.model.path) != known.path:
            where += f"; the run began with it in {escape(known.path)}"
        what = f"the base model of the run is not {where}: {error.what}"
        raise ModelError(
            what, where=escape(checkpoint), next="restore it, or name its folder: model.path=FOLDER"
        ) from error
    if known is not None:
        check_same_base(base, known, escape(checkpoint), setting="model.path")
    return base


# --- What is trained --------------------------------------------------------------------------------------------------


def select_trained(config: Config, model: CausalLM, adapter: str | os.PathLike[str] | None = None) -> None:
    """Give `model` the fresh adapters of a run, and freeze what is not trained.

    Args:
        adapter: an adapter's folder to use instead of `lora.init_from`, which may no longer exist.

    Raises:
        ConfigError: a pattern matches no parameter or layer, or nothing is left to train. ModelError: the adapter in
            `lora.init_from` cannot be read or is for another model.
    """
    lora = config.lora
    if lora is not None and lora.init_from is not None:
        apply_adapters_of(model, lora.init_from if adapter is None else adapter, dropout=lora.dropout)
        if model.score is not None and "score" not in model.modules_to_save:
            what = f"the adapter in {escape(lora.init_from)} has no score, which a reward model trains"
            raise ConfigError(what, where="lora.init_from", next="merge it (genesis export --merge), and train that")
    elif lora is not None:
        values = ((key, getattr(lora, key)) for key in LORA)
        settings: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values}
        if model.score is not None:
            settings["modules_to_save"] = tuple(dict.fromkeys([*settings["modules_to_save"], "score"]))
        try:
            apply_adapters(model, AdapterConfig(**settings))
        except ConfigError as error:
            raise ConfigError(error.what, where=f"lora.{error.where}", next=error.next) from error
    freeze(model.named_parameters(), config.train.freeze)


def check_exact(config: Config, device: Device) -> None:
    """Check that a device and the weights' dtype support `train.exact`.

    Raises:
        DeviceError: the device has no compute capability 9. ConfigError: the weights are not bfloat16.
    """
    if not config.train.exact:
        return
    next = "set train.exact to false"
    if device.type == "cpu" or cuda.get_device_capability(device)[0] != 9:
        what = f"train.exact needs a GPU with compute capability 9.0; the run's device is {device}"
        raise DeviceError(what, where="train.exact", next=next)
    if config.model.dtype != "bfloat16":
        what = f"train.exact computes in bfloat16, but the weights are {config.model.dtype}"
        raise ConfigError(what, where="model.dtype", next=f"set it to bfloat16, or {next}")


def check_trained(config: Config, shape: ModelConfig, adapter: str | os.PathLike[str] | None = None) -> list[str]:
    """Check the settings that name parts of the model, without allocating weights, and return `trained_lines`.

    Raises:
        ConfigError, ModelError: as in `select_trained`; ConfigError: also for `optim.lr_factors`.
    """
    with init.shapes_only():
        model = ARCHITECTURES[shape.model_type](shape)
        select_trained(config, model, adapter)
    check_patterns(config.optim.lr_factors, [name for name, p in model.named_parameters() if p.requires_grad])
    return list(trained_lines(config, model))


def trained_lines(config: Config, model: CausalLM) -> Iterator[str]:
    """Yield lines about what is trained and which settings have fine-tuning defaults; nothing from scratch."""
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    share = f"{trained:,} of {total:,} parameters are trained, {100 * trained / total:.3g} %"
    if config.lora is not None:
        layers = adapted_layers(model)
        whole = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in model.modules_to_save))
        yield f"{_kind_of(layers)}{f'; {whole} in full' if whole else ''}: {share}"
        if wide := {name: layer for name, layer in layers.items() if layer.r > min(layer.weight.shape)}:
            name, layer = next(iter(wide.items()))
            rows, columns = layer.weight.shape
            others = f" (one of {len(wide):,} such layers)" if len(wide) > 1 else ""
            yield (
                f"warning: r {layer.r} exceeds the largest rank of the matrix of {escape(name)}, {rows} x {columns}"
                f"{others}: r {min(rows, columns)} can learn as much"
            )
    elif config.model.path is not None or trained < total:
        yield f"all {total:,} parameters are trained" if trained == total else share
    if chosen := fine_tuning_defaults(config):
        kind = "in full" if config.lora is None else "with adapters"
        values = ", ".join(f"{key} {show(value)}" for key, value in chosen.items())
        yield f"fine-tuning defaults {kind}, because model.path names a trained model: {values}"


def _kind_of(layers: Mapping[str, LoRALinear]) -> str:
    """Return kind, ranks and scales of adapters, and their layers, as text."""
    one, sizes = next(iter(layers.values())), list[str]()
    kind = ("DoRA" if one.lora_magnitude_vector is not None else "LoRA") + (", rank-stabilized" * one.use_rslora)
    for key in ("r", "scaling"):
        values = sorted(getattr(layer, key) for layer in layers.values())
        sizes.append(f"{key} " + " to ".join(f"{value:g}" for value in sorted({values[0], values[-1]})))
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    return f"{kind}: {', '.join(sizes)}, on {len(layers):,} layers ({ends})"


# --- Files ------------------------------------------------------------------------------------------------------------


def frozen_base(model: CausalLM, base: Base | None = None) -> FrozenBase | None:
    """Return the frozen part of a model with adapters, which checkpoints omit; None if all of it is trained."""
    adapters = adapter_parameters(model).keys()
    names = frozenset(name for name, _ in model.named_parameters()) - adapters
    return FrozenBase("" if base is None else base.sha256, names) if adapters else None


@dataclass(frozen=True)
class ModelFiles:
    """Writes and reads the model files of a run, in checkpoints and at its end, in Hugging Face's or PEFT's format.

    Attributes:
        base: base of adapters.
        chat: chat format that the model learns.
    """

    config: Config
    tokenizer: Tokenizer
    model: CausalLM
    base: Base | None
    chat: ChatFormat

    def write(self, folder: FolderWriter, snapshot: Snapshot) -> None:
        """Write model, tokenizer and side files; unchanged files of a source folder are copied byte for byte."""
        source, end, ends = self.config.model.path, self.tokenizer.eos_id, self.chat.ends
        if self.config.lora is None:
            # Files that are not passed are copied from the source.
            files = None if self._keeps_tokenizer and self.chat.templates is None else self.tokenizer_files
            own: dict[str, Any] = {"source": source, "extra_files": files, "eos_token_id": end, "ends": ends}
            write_model(self.model, folder, values=snapshot.weights, **own)
            return
        assert self.base is not None, "a run that saves has a base"
        values = masters(snapshot.weights, snapshot.optimizer)
        write_adapter(self.model, folder, base=self.base.path, values=values)
        folder.write(BASE_NAME, self.base.to_json())
        folder.write(GENERATION_CONFIG, generation_config(self.model.config, source, ends, end))
        for name, data in self.tokenizer_files.items():
            folder.write(name, data)

    @property
    def _keeps_tokenizer(self) -> bool:
        return self.config.model.path is not None and self.config.data.tokenizer is None

    @cached_property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Name -> bytes of the tokenizer's files, including the chat template."""
        source, files = self.config.model.path, self.tokenizer.files()
        if self._keeps_tokenizer and source is not None:
            names = [name for name in side_files(source) if TOKENIZER_FILES.fullmatch(name)]
            where = escape(source)
            files = {
                name: read_limited(safe_join(source, name, where=where), SIDE_FILES.get(name, MAX_TEMPLATE_BYTES))
                for name in names
            }
        return files if self.chat.templates is None else chat_files(self.chat.templates, files)

    def read_masters(self, folder: Path) -> Mapping[str, np.ndarray]:
        """Return the float32 values of the adapters in a checkpoint by parameter name."""
        return adapter_values(self.model, folder)

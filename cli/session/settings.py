"""What `model.dtype`, `train.precision` and `lora.init_from` mean for a run, before anything is built or recorded."""

from __future__ import annotations

from pathlib import Path

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import ConfigError
from genesis.files.boundary import boundary
from genesis.files.paths import exists
from genesis.files.strict_json import read_limited
from genesis.ops import fp8 as fp8_ops
from genesis.train.config import Config
from genesis.train.config_file import parse_config
from genesis.train.strict_yaml import MAX_BYTES
from genesis_cli.session.trained_parameters import filled_lora
from genesis_models.blocks import widest_matmul
from genesis_models.chat_files import drawing_line, file_drawing
from genesis_models.config import ModelConfig
from genesis_models.engine import Sampling
from genesis_models.folder import stored_dtype
from genesis_models.registry import fuses
from genesis_models.weights import AUTO, WeightType, weight_type


def settled(config: Config, device: Device, record: Path | None = None) -> tuple[Config, WeightType]:
    """`config` with the type that its `model.dtype` means on `device`, and that type with the reason for it; and with
    the settings of the adapter that `lora.init_from` names; and with what the model's generation_config.json says about
    how samples are drawn, for the settings of `eval` that were not given.

    Args:
        record: the resolved configuration of the run that is resumed: "auto" is the type that it has there.

    Raises:
        ModelError: the model's folder or the adapter cannot be read. ConfigError: the record is malformed, or settings
            contradict the adapter.
    """
    recorded: Config | None = None
    if record is not None:
        with boundary(ConfigError, "reading the run's record", record):
            is_there = exists(record)
        recorded = parse_config(read_limited(record, MAX_BYTES), str(record)) if is_there else None
    found: WeightType | None = None
    if config.model.dtype == AUTO and recorded is not None:
        before = recorded.model.dtype
        found = None if before == AUTO else WeightType(before, "as the run began")
    if found is None:
        is_open = config.model.dtype == AUTO and device.type != "cpu" and config.model.path is not None
        stored = stored_dtype(config.model.path) if is_open and config.model.path is not None else None
        found = weight_type(config.model.dtype, device, stored, trains=True)
    model = config.model.model_copy(update={"dtype": found.name})
    lora = config.lora
    if lora is not None:
        lora = filled_lora(lora, None if recorded is None else recorded.lora)
    eval_ = config.eval
    if config.model.path is not None:  # which says how its texts are drawn, where the configuration does not
        drawn = file_drawing([Path(config.model.path)])
        names = {"temperature", "top_k", "top_p"} & drawn.keys() - eval_.model_fields_set
        eval_ = eval_.model_copy(update={name: drawn[name] for name in names})
    return config.model_copy(update={"model": model, "lora": lora, "eval": eval_}), found


def sample_drawing(config: Config) -> Sampling:
    """How the tokens of a run's samples are drawn."""
    settings, path = config.eval, config.model.path
    drawn = {} if path is None else file_drawing([Path(path)])
    more = {name: drawn[name] for name in ("min_p", "repetition_penalty") if name in drawn}
    return Sampling(settings.temperature, settings.top_k, settings.top_p, config.train.seed, **more)


def sample_drawing_line(config: Config) -> str | None:
    """What the model's generation_config.json decides of `sample_drawing`; None where it decides nothing."""
    if config.model.path is None or not config.eval.prompts:
        return None
    folders = [Path(config.model.path)]
    found = file_drawing(folders)
    given = {name: value for name in found if (value := getattr(config.eval, name, found[name])) != found[name]}
    return drawing_line(folders, given)


def usable_precision(config: Config, shape: ModelConfig, device: Device) -> tuple[str | None, str | None]:
    """What `train.precision` comes to, and a line about it where that is not all it may promise."""
    if config.train.precision is None:
        return None, None
    stays, widest = f"precision: {config.model.dtype}: fp8", widest_matmul(shape)
    if not fuses(shape):
        return None, f"{stays} is for fused layers, and those of {shape.model_type} are plain"
    if widest < fp8_ops.MIN_COLUMNS:
        return (
            None,
            f"{stays} is for matmuls of at least {fp8_ops.MIN_COLUMNS} columns, and the model's widest has {widest}",
        )
    if device == CPU:
        return config.train.precision, "precision: the CPU imitates fp8, which takes longer"
    lack = fp8_ops.lacking(cuda.get_device_capability(device), device)
    return (config.train.precision, None) if lack is None else (None, f"{stays} {lack}")

"""Resolves `model.dtype`, `lora.init_from` and a model's own files for a run, before anything is built or recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from genesis.backend import Device
from genesis.errors import ConfigError, DeviceError, ModelError, escape
from genesis.files.atomic import read_manifest
from genesis.files.boundary import boundary
from genesis.files.paths import exists, list_folder
from genesis.files.strict_json import read_limited
from genesis.train.config import LORA, Config, LoraConfig
from genesis.train.config_file import parse_config
from genesis.train.config_help import show
from genesis.train.state import platform_changes, platform_of
from genesis.train.strict_yaml import MAX_BYTES
from genesis_models.adapters import read_adapter
from genesis_models.chat_files import file_drawing
from genesis_models.folder import stored_dtype
from genesis_models.source import hub_advice, newest_checkpoint
from genesis_models.weights import AUTO, WeightType, weight_type

# Settings that may differ from the adapter's in `lora.init_from`: they do not change what was trained.
FREE = ("dropout",)


def settled(config: Config, device: Device, record: Path | None = None) -> tuple[Config, WeightType]:
    """Return `config` with its derived settings, and the weight dtype with its reason.

    "auto" in `model.dtype` becomes the dtype for `device`. Absent `lora` settings come from the adapter in
    `lora.init_from`, and absent sampling settings of `eval` from the model's generation_config.json.

    Args:
        record: resolved configuration of the resumed run, which decides "auto".

    Raises:
        ModelError: the model's folder or the adapter cannot be read. ConfigError: the record is malformed, or settings
            contradict the adapter.
    """
    recorded: Config | None = None
    if record is not None:
        with boundary(ConfigError, "reading the run's record", record):
            is_there = exists(record)
        recorded = parse_config(read_limited(record, MAX_BYTES), str(record)) if is_there else None
    dtype, path, before = config.model.dtype, config.model.path, AUTO if recorded is None else recorded.model.dtype
    if dtype == AUTO and before != AUTO:
        found = WeightType(before, "as the run began")
    else:
        stored = stored_dtype(path) if dtype == AUTO and device.type != "cpu" and path is not None else None
        found = weight_type(dtype, device, stored, trains=True)
    model, lora, eval_ = config.model.model_copy(update={"dtype": found.name}), config.lora, config.eval
    if lora is not None:
        lora = _filled_lora(lora, None if recorded is None else recorded.lora)
    if path is not None:  # its generation_config.json has defaults for sampling
        drawn = file_drawing([Path(path)])
        names = {"temperature", "top_k", "top_p"} & drawn.keys() - eval_.model_fields_set
        eval_ = eval_.model_copy(update={name: drawn[name] for name in names})
    return config.model_copy(update={"model": model, "lora": lora, "eval": eval_}), found


def _filled_lora(lora: LoraConfig, recorded: LoraConfig | None) -> LoraConfig:
    """Return `lora` with absent settings from the adapter in `init_from`.

    Args:
        recorded: settings of the resumed run, which are complete.

    Raises:
        ConfigError: a setting contradicts the adapter's. ModelError: `init_from` is not an adapter.
    """
    if lora.init_from is None:
        return lora
    if recorded is not None and recorded.init_from == lora.init_from:
        found = recorded.model_dump()
    else:
        found = _settings_of_adapter(lora.init_from)

    def in_order(value: Any) -> Any:  # the order of names does not matter
        return sorted(value) if isinstance(value, list) else value

    for key in LORA:
        given = getattr(lora, key)
        if given is not None and key not in FREE and in_order(given) != in_order(found[key]):
            what = f"lora.{key} is {show(given)}, but the adapter in lora.init_from has {show(found[key])}"
            next = f"remove lora.{key}: training continues with the adapter's value"
            raise ConfigError(what, where=escape(lora.init_from), next=next)
    return lora.model_copy(update={key: found[key] for key in LORA if getattr(lora, key) is None})


def _settings_of_adapter(folder: str) -> dict[str, Any]:
    """Return the settings of the adapter from which training starts. Raises: ModelError: it says what the folder is."""
    try:
        adapter = read_adapter(folder)
    except ModelError as error:
        newest, advice = newest_checkpoint(folder), hub_advice(folder)
        next = error.next if newest is None else f"name its newest checkpoint: {escape(newest)}"
        raise ModelError(
            error.what, where=error.where or "lora.init_from", next=next if advice is None else f"{next}; {advice}"
        ) from error
    settings = {key: getattr(adapter, key) for key in LORA}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def check_recorded(folders: Iterable[Path], device: Device) -> None:
    """Check that a run trained with `train.exact` is used on its GPU model, with its version of Triton.

    Raises:
        DeviceError: a checkpoint records another GPU model or version of Triton.
    """
    now = platform_of(device)
    for folder in folders:
        checkpoints = [folder / name for name in list_folder(folder) if name.startswith("checkpoint-")]
        for each in (folder, *checkpoints):
            with suppress(ModelError, OSError):  # most folders have no manifest
                recorded = read_manifest(each).metadata.get("exact")
                if isinstance(recorded, dict) and (changes := platform_changes(recorded, now)):
                    what = f"the run was trained exactly with {changes}: sums would differ"
                    raise DeviceError(what, where=escape(each), next="use the recorded GPU model and Triton")

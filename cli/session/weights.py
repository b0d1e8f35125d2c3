"""The type of a run's weights: what `model.dtype` comes to before anything is built, recorded or planned."""

from __future__ import annotations

import os
from pathlib import Path

from genesis.backend import Device
from genesis.io.strict_json import read_limited
from genesis.train.config import Config
from genesis.train.config_file import parse_config
from genesis.train.strict_yaml import MAX_BYTES
from genesis_models.folder import stored_dtype
from genesis_models.precision import AUTO, WeightType, weight_type

__all__ = ["settled"]


def settled(config: Config, device: Device, record: Path | None = None) -> tuple[Config, WeightType]:
    """`config` with the type that its `model.dtype` means on `device`, and that type with the reason for it.

    Args:
        record: the resolved configuration of the run that is resumed: "auto" is the type that it has there.

    Raises:
        ModelError: the model's folder cannot be read. ConfigError: the record is malformed.
    """
    found: WeightType | None = None
    if config.model.dtype == AUTO and record is not None and os.path.lexists(record):
        before = parse_config(read_limited(record, MAX_BYTES), str(record)).model.dtype
        found = None if before == AUTO else WeightType(before, "as the run began")
    if found is None:
        is_open = config.model.dtype == AUTO and device.type != "cpu" and config.model.path is not None
        stored = stored_dtype(config.model.path) if is_open and config.model.path is not None else None
        found = weight_type(config.model.dtype, device, stored, trains=True)
    model = config.model.model_copy(update={"dtype": found.name})
    return config.model_copy(update={"model": model}), found

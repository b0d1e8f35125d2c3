"""Shapes of the published sizes that families name, for training from scratch and for benchmarks: no weights."""

from __future__ import annotations

from typing import Any

from genesis.errors import ConfigError
from genesis_models.registry import ARCHITECTURES

PRESETS: dict[str, dict[str, Any]] = {
    name: raw for model in ARCHITECTURES.values() for name, raw in model.presets.items()
}


def preset(name: str) -> dict[str, Any]:
    """The config of a published size.

    Raises:
        ConfigError: naming the sizes there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"model size {name!r} is not known", next=f"use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])

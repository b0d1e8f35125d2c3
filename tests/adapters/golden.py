"""Adapters that PEFT made of the tiny Qwen models, and what it computes with them (make_fixtures.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import genesis
import genesis_models
from genesis.files.safetensors import load_file
from genesis_models.adapters import ADAPTER_WEIGHTS, adapted_layers, load_adapter
from genesis_models.blocks import CausalLM
from tests.models.golden import FIXTURES as MODELS

__all__ = ["FIXTURES", "KINDS", "NAMES", "base_of", "loaded", "logits", "reference", "saved_names", "stored"]

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = ("lora", "rslora", "dora")
NAMES = tuple(f"{model}-{kind}" for model in ("qwen2-tied", "qwen3-tied") for kind in KINDS)


def base_of(name: str) -> Path:
    return MODELS / name.rpartition("-")[0]


def reference(name: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / name / "reference.safetensors")


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of an adapter's folder."""
    return load_file(folder / ADAPTER_WEIGHTS)


def loaded(name: str, device: str = "cpu") -> CausalLM:
    """The base model with the adapter."""
    return load_adapter(genesis_models.load(base_of(name), device=device, dtype="float32"), FIXTURES / name)


def saved_names(model: CausalLM) -> dict[str, genesis.Tensor]:
    """The adapter's parameters by the names that PEFT saves them under."""
    return {
        f"base_model.model.{name}.{part}".replace("vector.weight", "vector"): parameter
        for name, layer in adapted_layers(model).items()
        for part, parameter in layer.named_parameters()
        if part not in ("weight", "bias")
    }


def logits(model: CausalLM, ids: np.ndarray) -> np.ndarray:
    with genesis.no_grad():
        found: np.ndarray = model(genesis.from_numpy(ids).to(model.head_weight.device)).numpy()
    return found

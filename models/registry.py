"""The class of each `model_type`, and what a config builds: the model or only its parameters' shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import genesis
from genesis import nn
from genesis.backend import CPU, as_device
from genesis.errors import ConfigError
from genesis.nn.parameter import take_memory
from genesis.random import Generator
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.fuse import fuse
from genesis_models.gemma3 import Gemma3ForCausalLM
from genesis_models.granite import GraniteForCausalLM
from genesis_models.llama import LlamaForCausalLM
from genesis_models.mistral import MistralForCausalLM
from genesis_models.olmo2 import Olmo2ForCausalLM
from genesis_models.phi3 import Phi3ForCausalLM
from genesis_models.qwen2 import Qwen2ForCausalLM
from genesis_models.qwen3 import Qwen3ForCausalLM
from genesis_models.smollm3 import SmolLM3ForCausalLM
from genesis_models.weights import check_fits

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "gemma3_text": Gemma3ForCausalLM,
    "granite": GraniteForCausalLM,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "olmo2": Olmo2ForCausalLM,
    "phi3": Phi3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "smollm3": SmolLM3ForCausalLM,
}


def empty_model(config: ModelConfig, *, device: str = "cpu", dtype: str = "float32") -> CausalLM:
    """Return the model of a config in fused form with undefined weights.

    On a GPU the weights of layers that share an input are neighbours in memory, even without an optimizer's flat
    buffers, so that q, k and v are one product in generation, in evaluation and under adapters. On the CPU each weight
    has its own array: one product saves little there, and BLAS would change the bits by summing in another order.
    """
    if as_device(device) == CPU:
        with nn.init.skip_init(device, dtype):
            return fuse(ARCHITECTURES[config.model_type](config))
    model = without_memory(config)
    take_memory(model.named_parameters(), device, dtype)
    return model


def without_memory(config: ModelConfig) -> CausalLM:
    """Return the fused model of a config; its parameters have shapes but no memory."""
    with nn.init.shapes_only():
        return fuse(ARCHITECTURES[config.model_type](config))


def fuses(config: ModelConfig) -> bool:
    """Whether all layers of the model of a config run in fused ops."""
    return without_memory(config).is_fused


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by name."""
    return {name: parameter.shape for name, parameter in without_memory(config).named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters of the model of a config; a tied head counts once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def build(
    config: Mapping[str, Any] | ModelConfig, seed: int = 0, *, device: str = "cpu", dtype: str = "float32"
) -> CausalLM:
    """Return a model with fresh weights, initialised as Hugging Face does for these families.

    Matrices are normal with standard deviation `initializer_range`, biases are 0 and norm weights 1. The draws depend
    only on `seed` and on the order of the parameters.

    Args:
        config: the keys of a `config.json`, or a checked config.
        seed: seed of the weights.

    Raises:
        ModelError: the config is malformed. OutOfMemoryError: the weights do not fit in the device's memory.
    """
    checked = config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)
    check_fits(parameter_count(checked), "float32", as_device(device), where="the model's config")
    model = empty_model(checked, device=device)  # the draws are the same on every device
    generator = Generator(seed)
    with genesis.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, checked.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else model.first_norm_weight)
    model.to(dtype=dtype)
    return model


PRESETS: dict[str, dict[str, Any]] = {
    name: raw for model in ARCHITECTURES.values() for name, raw in model.presets.items()
}


def preset(name: str) -> dict[str, Any]:
    """Return the config of a published size.

    Raises:
        ConfigError: the size is unknown; the error lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"model size {name!r} is not known", next=f"use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])

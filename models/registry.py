"""Which class builds which `model_type`, and building a model with fresh weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import genesis
from genesis import nn
from genesis.errors import ModelError, escape
from genesis.random import Generator
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.llama import LlamaForCausalLM
from genesis_models.qwen2 import Qwen2ForCausalLM
from genesis_models.qwen3 import Qwen3ForCausalLM

__all__ = ["ARCHITECTURES", "build", "check_architecture", "empty_model"]

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
}


def check_architecture(config: ModelConfig, *, where: str = "config.json") -> None:
    """Raises: ModelError, for a model type that Genesis does not have."""
    if config.model_type not in ARCHITECTURES:
        known, found = ", ".join(ARCHITECTURES), escape(config.model_type)
        raise ModelError(f"model_type {found!r} is not supported", where=where, next=f"Genesis has {known}")


def empty_model(
    config: ModelConfig, *, where: str = "config.json", device: str = "cpu", dtype: str = "float32"
) -> CausalLM:
    """The model of a config, its weights undefined.

    Raises:
        ModelError: for a model type that Genesis does not have.
    """
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"model_type {escape(config.model_type)!r} is not supported", where=where, next=f"Genesis has {known}"
        )
    with nn.init.skip_init(device, dtype):
        return ARCHITECTURES[config.model_type](config)


def build(
    config: Mapping[str, Any] | ModelConfig, seed: int = 0, *, device: str = "cpu", dtype: str = "float32"
) -> CausalLM:
    """A model with fresh weights, as Hugging Face initialises these families.

    Matrices are normal with standard deviation `initializer_range`, biases 0, norms 1. The draws depend on `seed` and
    on the order of parameters only.

    Args:
        config: the keys of a `config.json`, or a checked config.
        seed: of the weights.
    """
    checked = config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)
    model = empty_model(checked, device=device)  # the draws are the same on every device
    generator = Generator(seed)
    with genesis.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, checked.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    model.to(dtype=dtype)
    return model

"""Which class builds which `model_type`, and building a model with fresh weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import genesis
from genesis import nn
from genesis.backend import as_device
from genesis.random import Generator
from genesis_models.blocks import CausalLM
from genesis_models.budget import check_fits
from genesis_models.config import ModelConfig
from genesis_models.llama import LlamaForCausalLM
from genesis_models.qwen2 import Qwen2ForCausalLM
from genesis_models.qwen3 import Qwen3ForCausalLM

__all__ = ["ARCHITECTURES", "build", "empty_model"]

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
}


def empty_model(config: ModelConfig, *, device: str = "cpu", dtype: str = "float32") -> CausalLM:
    """The model of a config, its weights undefined."""
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

    Raises:
        ModelError: the config is malformed. OutOfMemoryError: the weights need more than all memory of the device.
    """
    checked = config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)
    check_fits(checked, "float32", as_device(device), where="the model's config")
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

"""Language models for Genesis, a file for each family: build, load, save, generate.

import genesis_models

model = genesis_models.load("path/to/Qwen2.5-0.5B")
logits = model(input_ids)  # [B, T, V]
text = model.generate("Once upon a time", max_tokens=50).text
"""

from genesis_models.blocks import CausalLM, KeyValueCache
from genesis_models.config import ModelConfig
from genesis_models.engine import Sampling
from genesis_models.folder import load, save
from genesis_models.generate import Generated, generate
from genesis_models.registry import ARCHITECTURES, PRESETS, build, preset
from genesis_models.weights import quantize

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "CausalLM",
    "Generated",
    "KeyValueCache",
    "ModelConfig",
    "Sampling",
    "build",
    "generate",
    "load",
    "preset",
    "quantize",
    "save",
]

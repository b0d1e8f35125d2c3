"""Every parameter of a model by name and shape, from its config alone."""

from __future__ import annotations

import math

from genesis_models.config import ModelConfig

__all__ = ["EMBEDDING", "HEAD", "parameter_count", "parameter_shapes"]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model of a config; a tied head counts once."""
    layer = sum(map(math.prod, _layer_shapes(config, 0).values()))
    return sum(map(math.prod, _outer_shapes(config).values())) + config.num_hidden_layers * layer


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, without making the model."""
    shapes = _outer_shapes(config)
    for i in range(config.num_hidden_layers):
        shapes.update(_layer_shapes(config, i))
    return shapes


def _outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of what stands around the layers."""
    h = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, h)
    return shapes


def _layer_shapes(config: ModelConfig, i: int) -> dict[str, tuple[int, ...]]:
    """Of layer `i`."""
    h, d = config.hidden_size, config.head_dim
    q, kv, inner = config.num_attention_heads * d, config.num_key_value_heads * d, config.intermediate_size
    qkv_bias = config.attention_bias or config.model_type == "qwen2"
    attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
    shapes: dict[str, tuple[int, ...]] = {}
    for part, (rows, columns), bias in (
        (f"{attention}.q_proj", (q, h), qkv_bias),
        (f"{attention}.k_proj", (kv, h), qkv_bias),
        (f"{attention}.v_proj", (kv, h), qkv_bias),
        (f"{attention}.o_proj", (h, q), config.attention_bias and config.model_type != "qwen2"),
        (f"{mlp}.gate_proj", (inner, h), config.mlp_bias),
        (f"{mlp}.up_proj", (inner, h), config.mlp_bias),
        (f"{mlp}.down_proj", (h, inner), config.mlp_bias),
    ):
        shapes[f"{part}.weight"] = (rows, columns)
        if bias:
            shapes[f"{part}.bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    shapes.update({f"model.layers.{i}.{n}.weight": (h,) for n in norms})
    if config.model_type == "qwen3":
        shapes.update({f"{attention}.{n}.weight": (d,) for n in ("q_norm", "k_norm")})
    return shapes

"""Shapes of the published Qwen models, for training from scratch and for benchmarks: no weights, nothing downloaded."""

from __future__ import annotations

from typing import Any

from genesis.errors import ConfigError

__all__ = ["PRESETS", "preset"]


def _qwen25(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_act": "silu",
        "max_position_embeddings": 32768 if hidden < 3584 else 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "0.5B": _qwen25(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": _qwen25(1536, 8960, 28, 12, 2, 151936, True),
    "3B": _qwen25(2048, 11008, 36, 16, 2, 151936, True),
    "7B": _qwen25(3584, 18944, 28, 28, 4, 152064, False),
    "qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
}


def preset(name: str) -> dict[str, Any]:
    """The config of a published size.

    Raises:
        ConfigError: naming the sizes there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"model size {name!r} is not known", next=f"use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])

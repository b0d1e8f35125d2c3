"""What a model's `config.json` says, checked: the keys that shape the computation, with Hugging Face's defaults.

Keys that Genesis does not read are kept and written back; keys that would change the computation in a way that it does
not implement are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from genesis.errors import ModelError, escape

__all__ = ["ModelConfig", "RopeConfig"]

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base θ, the scaling rule and its parameters (`rope_scaling` or `rope_parameters`)."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, under Hugging Face's key names.

    Attributes:
        layer_windows: per layer, how many keys up to the query it sees; 0 means all.
        raw: the whole config as it was read, for writing back.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    layer_windows: tuple[int, ...]
    raw: Mapping[str, Any]

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read and check a config.

        Raises:
            ModelError: naming the key, what was found and what was expected.
        """
        return _Reader(raw, where).config()


class _Reader:
    """Reads typed values out of a raw config and reports what is wrong with the key's name."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def fail(self, what: str, next: str = "") -> ModelError:
        return ModelError(what, where=self.where, next=next)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`; null counts as absent; without a default it is required."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing", next="this model family needs it")
            return default
        wrong = isinstance(value, bool) != (kind is bool)
        if wrong or not isinstance(value, (int, float) if kind is float else kind):
            raise self.fail(f"{key} is {escape(repr(value))}, expected {kind.__name__}")
        return kind(value)

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if not 1 <= value < 1 << 31:
            raise self.fail(f"{key} is {value}, expected a count of at least 1")
        return value

    def fraction(self, key: str, default: float) -> float:
        value: float = self.get(key, float, default)
        if not 0 < value < 1e6:
            raise self.fail(f"{key} is {value}, expected a positive number")
        return value

    def refuse_unsupported(self) -> None:
        for key, plain in (
            ("hidden_act", ("silu",)),
            ("attention_dropout", (0, 0.0)),
            ("partial_rotary_factor", (1, 1.0)),
            ("quantization_config", ()),
        ):
            value = self.raw.get(key)
            if value is not None and value not in plain:
                raise self.fail(f"{key} is {escape(repr(value))[:80]}, which Genesis does not implement")

    def config(self) -> ModelConfig:
        self.refuse_unsupported()
        kind = self.get("model_type", str)
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads = self.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if "head_dim" not in self.raw and kind != "qwen3" and hidden % heads:
            raise self.fail(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}", next="set head_dim")
        head_dim = self.count("head_dim", 128 if kind == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise self.fail(f"head_dim {head_dim} is odd; rotary embedding turns pairs")
        layers = self.count("num_hidden_layers")
        return ModelConfig(
            model_type=kind,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.count("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self.count("max_position_embeddings", 2048 if kind == "llama" else 32768),
            rms_norm_eps=self.fraction("rms_norm_eps", 1e-6),
            initializer_range=self.fraction("initializer_range", 0.02),
            tie_word_embeddings=self.get("tie_word_embeddings", bool, False),
            attention_bias=self.get("attention_bias", bool, False),
            mlp_bias=self.get("mlp_bias", bool, False),
            rope=self.rope(),
            layer_windows=self.windows(layers) if kind != "llama" else (0,) * layers,
            raw=dict(self.raw),
        )

    def rope(self) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        new, old = self.raw.get("rope_parameters"), self.raw.get("rope_scaling")
        given = new if new is not None else (old if old is not None else {})
        if not isinstance(given, Mapping):
            raise self.fail(f"rope parameters are {escape(repr(given))[:80]}, expected a mapping")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _ROPE_TYPES:
            raise self.fail(f"rope_type is {escape(repr(kind))[:80]}, Genesis has {', '.join(_ROPE_TYPES)}")
        theta = given.get("rope_theta", self.raw.get("rope_theta", 10000.0))
        needed = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"], "default": []}.get(
            kind, ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
        )
        for key, value in [("rope_theta", theta), *((k, given.get(k)) for k in needed)]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
                raise self.fail(f"rope parameter {key} is {escape(repr(value))[:80]}, expected a positive number")
        return RopeConfig(float(theta), kind, dict(given))

    def windows(self, layers: int) -> tuple[int, ...]:
        """Sliding windows by layer, as Qwen configs state them."""
        window = self.raw.get("sliding_window") if self.raw.get("use_sliding_window", False) else None
        types = self.raw.get("layer_types")
        if types is None:
            first = self.raw.get("max_window_layers", 28)
            types = [
                "sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)
            ]
        known = {"full_attention", "sliding_attention"}
        if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= known:
            raise self.fail(f"layer_types must list {layers} of {', '.join(sorted(known))}")
        if "sliding_attention" not in types:
            return (0,) * layers
        size = self.count("sliding_window")
        return tuple(size if t == "sliding_attention" else 0 for t in types)

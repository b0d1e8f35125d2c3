"""Gemma 3's text model (Gemma Team, "Gemma 3 Technical Report", 2025): five of six layers attend to a sliding window
and have their own rotary embedding; norms before and after each block.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor, nn
from genesis.errors import ModelError
from genesis_models import blocks
from genesis_models.blocks import MLP, CausalLM, Context
from genesis_models.config import ModelConfig, Reader, RopeConfig, family

FULL, SLIDING = "full_attention", "sliding_attention"


@family("gemma3_text", "Gemma 3 270M and 1B")
@dataclass(frozen=True, slots=True)
class Gemma3Config(ModelConfig):
    """`config.json` of `model_type: gemma3_text`.

    Attributes:
        local_rope: rotary embedding of the sliding-window layers.
        query_pre_attn_scalar: scores are divided by its square root.
    """

    local_rope: RopeConfig
    query_pre_attn_scalar: float

    ACTIVATION: ClassVar[tuple[str, ...]] = ("hidden_activation", "gelu_pytorch_tanh")
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(mlp_bias=False, use_bidirectional_attention=False)
        reader.require(attn_logit_softcapping=None, final_logit_softcapping=None)
        pattern = reader.get("sliding_window_pattern", int, 6)
        if pattern < 1:
            raise reader.fail(f"sliding_window_pattern is {pattern}, expected at least 1")
        layers, head_dim = range(1, reader.count("num_hidden_layers") + 1), reader.head_dim()
        rope, local_rope = cls.read_ropes(reader, head_dim)
        return reader.config(
            cls,
            head_dim=head_dim,
            attention_bias=reader.get("attention_bias", bool, False),
            layer_windows=reader.windows([SLIDING if i % pattern else FULL for i in layers]),
            rope=rope,
            local_rope=local_rope,
            query_pre_attn_scalar=reader.fraction("query_pre_attn_scalar", 256.0, 1e6),
        )

    @staticmethod
    def read_ropes(reader: Reader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
        """Read `rope_parameters` for each kind of layer (transformers 5), or `rope_theta` and `rope_local_base_freq`.

        As in transformers, `rope_scaling` applies to the full layers only.
        """
        given = reader.object("rope_parameters")
        if not given.keys() <= {FULL, SLIDING}:
            raise reader.fail(f"rope_parameters is not an object of {FULL} and {SLIDING}")
        thetas = {FULL: reader.theta("rope_theta"), SLIDING: reader.theta("rope_local_base_freq")}
        found = []
        for kind, theta in thetas.items():
            scaling = reader.object("rope_scaling") if kind == FULL else {}
            try:
                own = Reader({kind: given.get(kind)}, reader.where).object(kind)
                raw = {"rope_parameters": own | scaling, "rope_theta": theta}
                found.append(Reader(raw, reader.where).rope(head_dim))
            except ModelError as error:
                raise ModelError(f"{kind}: {error.what}", where=error.where, next=error.next) from error
        return found[0], found[1]

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return self.rope, self.local_rope

    def rope_json(self) -> dict[str, Any]:
        by_kind = {FULL: self.rope.json(), SLIDING: self.local_rope.json()}
        own = {"rope_local_base_freq": self.local_rope.theta, "rope_parameters": by_kind}
        return ModelConfig.rope_json(self) | own


def norm(size: int, config: Gemma3Config) -> nn.RMSNorm:
    """An RMSNorm that computes x / √(mean(x²) + eps)·(1 + weight)."""
    return nn.RMSNorm(size, eps=config.rms_norm_eps, offset=1.0)


class Attention(blocks.Attention):
    """Grouped-query attention; each query and key head is normalised before it is rotated."""

    def __init__(self, config: Gemma3Config, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.rope = 1 if self.window else 0  # of the config's `ropes`
        self.q_norm = norm(self.head_dim, config)
        self.k_norm = norm(self.head_dim, config)

    def placed(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return context.rope(self.q_norm(q), self.rope), context.rope(self.k_norm(k), self.rope)


class DecoderLayer(nn.Module):
    """Attention and MLP on the normalised stream; their results are normalised and added to it."""

    def __init__(self, config: Gemma3Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config, nn.GELU("tanh"))
        self.input_layernorm = norm(config.hidden_size, config)
        self.post_attention_layernorm = norm(config.hidden_size, config)
        self.pre_feedforward_layernorm = norm(config.hidden_size, config)
        self.post_feedforward_layernorm = norm(config.hidden_size, config)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), context))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(blocks.Decoder):
    """Token embedding scaled by √H, layers and final norm."""

    def __init__(self, config: Gemma3Config, make_layer: Any) -> None:
        super().__init__(config, make_layer)
        self.norm = norm(config.hidden_size, config)
        self.embed_scale = config.hidden_size**0.5

    def embed(self, input_ids: Tensor) -> Tensor:  # [B, T]
        x = self.embed_tokens(input_ids)  # [B, T, H]
        return x * float(x.dtype.numpy.type(self.embed_scale))  # the factor is rounded to the weights' dtype


class Gemma3ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer, make_decoder = DecoderLayer, Decoder
    first_norm_weight = 0.0

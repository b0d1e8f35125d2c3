"""The parts that model families share, in plain form: decoder, layers, attention over a cache, SwiGLU, the causal LM.

`fuse.py` replaces them with fused ops when a model is built. Parameters have Hugging Face's names.

The angles of the rotary embedding are float32 products, as in transformers: at long positions the rounding of the
frequencies is part of the model.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Unpack, overload

import numpy as np

import genesis
from genesis import Tensor, nn
from genesis.autograd import checkpoint
from genesis.backend import CPU
from genesis.errors import ConfigError, ModelError
from genesis.nn import functional as F
from genesis.nn import fused
from genesis.nn.quantized import QuantizedLinear
from genesis.ops import fp8 as fp8_ops
from genesis_models.config import ModelConfig

if TYPE_CHECKING:
    from genesis.data.tokenizer import Tokenizer
    from genesis_models.generate import Generated, Settings

CHECKPOINTING = ("none", "selective", "full")

Tables = Sequence[tuple[Tensor, Tensor]]


class PackedHeads(NamedTuple):
    """How one layer turns packed queries, keys and values `[B, T, Q + 2·K, D]` into the inputs of attention.

    Attributes:
        layer: index of the layer.
        heads, key_heads: Q and K.
        window: number of keys that a query attends to, up to its own; 0 means all.
        rope: index into the config's `ropes` of the embedding that rotates queries and keys; None rotates nothing.
        norms: norms of query heads and of key heads, applied before the rotation.
    """

    layer: int
    heads: int
    key_heads: int
    window: int
    scale: float
    rope: int | None = 0
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None = None

    def prepared(self, qkv: Tensor, tables: Tables) -> Tensor:
        """Return `qkv` with queries and keys normalised and rotated."""
        if self.rope is None:
            assert self.norms is None, "norms without positions: no family has them"
            return qkv
        cos, sin = tables[self.rope]
        if self.norms is not None:
            return fused.norm_rope(qkv, *self.norms, cos, sin, self.heads, self.key_heads)
        return F.rope(qkv, cos, sin, self.heads + self.key_heads)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 2)
        return q, k, v


def pairs(x: Tensor, size: int) -> Tensor:
    """Reorder heads `[..., D]` so that the halves of the first `size` values are D/2 apart, as `F.rope` pairs them.

    Applied to both queries and keys, the order does not change the scores.
    """
    half, rest = size // 2, (x.shape[-1] - size) // 2
    first, second, *others = x.split([half, half, rest, rest], -1)
    return genesis.cat([first, others[0], second, others[1]], -1)


class LayerCache(Protocol):
    """Stores the keys and values of a forward pass and returns attention over all of them so far."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor: ...

    def attention_packed(self, qkv: Tensor, form: PackedHeads, starts: Tensor | None, tables: Tables) -> Tensor:
        """Return attention `[B, T, Q, D]` of packed projections `[B, T, Q + 2·K, D]`."""
        q, k, v = form.split(form.prepared(qkv, tables))
        return self.attention(q, k, v, starts, form.layer, form.window, form.scale)


class KeyValueCache(LayerCache):
    """Keys and values of the tokens seen so far, one pair of buffers for each layer.

    Args:
        batch: number of sequences.
        capacity: the most tokens of each sequence.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, dtype: genesis.DType, device: str) -> None:
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [genesis.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [genesis.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.length, self.capacity = 0, capacity

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Store k and v, and return q's attention over all keys so far; shapes as in `Context.attention`."""
        end = self.length + k.shape[1]
        self.keys[layer][:, self.length : end] = k
        self.values[layer][:, self.length : end] = v
        k, v = self.keys[layer][:, :end], self.values[layer][:, :end]
        return F.attention(q, k, v, starts, scale=scale, causal=True, window=window)


class EngineCache(LayerCache, Protocol):
    """A cache in which each sequence has its own position (`genesis_models.engine`)."""

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables: ...
    def advance(self, t: int) -> None: ...


class Context:
    """The inputs that all layers of a forward pass share.

    Attributes:
        tables: cos and sin of each rotary embedding of the config, `[T, D/2]` or `[B, T, D/2]`.
        starts: start of each token's document `[B, T]`, or with the tokens that it skips `[B, T, 3]`; or None.
        cache: keys and values of earlier tokens, or None.
        checkpointing: what backward recomputes: "none", "selective" (in fused ops) or "full".
        fp8: fused ops compute matmuls of at least this many columns in 8-bit floats; 0 disables it.
    """

    def __init__(
        self, tables: Tables, starts: Tensor | None, cache: LayerCache | None, checkpointing: str, fp8: int
    ) -> None:
        self.tables, self.starts, self.cache = tables, starts, cache
        self.checkpointing, self.fp8 = checkpointing, fp8

    @property
    def recompute(self) -> bool:
        """Whether fused ops recompute the results of norms and of SwiGLU in backward."""
        return self.checkpointing == "selective"

    def rope(self, x: Tensor, which: int = 0) -> Tensor:
        """Return queries or keys `[B, T, heads, D]` rotated by their positions.

        Args:
            which: index into the config's `ropes`.
        """
        return F.rope(x, *self.tables[which])

    def rope_part(self, x: Tensor, size: int) -> Tensor:
        """Rotate only the first `size` values of each head; the result is in the order of `pairs`."""
        return self.rope(x if size == x.shape[-1] else pairs(x, size))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int, scale: float) -> Tensor:
        """Return attention `[B, T, Q, D]` of q `[B, T, Q, D]` over k, v `[B, T, K, D]` and the cached keys and values.

        Args:
            layer: index of the layer.
            window: number of keys that a query attends to, up to its own; 0 means all.
        """
        if self.cache is not None:
            return self.cache.attention(q, k, v, self.starts, layer, window, scale)
        return F.attention(q, k, v, self.starts, scale=scale, causal=True, window=window)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al., 2023; Su et al., 2021).

    Args:
        bias: whether q, k and v have biases; the config's `attention_bias` by default.
        out_bias: whether the output projection has a bias; the config's `attention_bias` by default.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, bias: bool | None = None, out_bias: bool | None = None
    ) -> None:
        super().__init__()
        bias = config.attention_bias if bias is None else bias
        out_bias = config.attention_bias if out_bias is None else out_bias
        self.layer, self.window = layer, config.layer_windows[layer]
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = config.head_dim, 1 / math.sqrt(config.head_dim)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=out_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, Q, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        q, k = self.placed(q, k, context)
        o = context.attention(q, k, v, self.layer, self.window, self.scale)  # [B, T, Q, D]
        return self.o_proj(o.flatten(-2))

    def placed(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return queries and keys as attention takes them: rotated here; families override this."""
        return context.rope(q), context.rope(k)


class MLP(nn.Module):
    """SwiGLU, or another gated linear unit (Shazeer, 2020).

    Args:
        act_fn: activation, SiLU by default.
    """

    def __init__(self, config: ModelConfig, act_fn: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = nn.SiLU() if act_fn is None else act_fn

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PreNormLayer(nn.Module):
    """Attention and MLP, each applied to the normalised stream and added to it. Families override the two classes."""

    make_attention: ClassVar[Any] = Attention  # called with the config and the layer's index
    make_mlp: ClassVar[Any] = MLP  # called with the config

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = self.make_attention(config, layer), self.make_mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


def widest_matmul(config: ModelConfig) -> int:
    """Return the most output columns of a layer's weight matmuls, forward or for the input's gradient."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return max(config.hidden_size, heads * config.head_dim, 2 * config.intermediate_size)


class Decoder(nn.Module):
    """Token embedding, layers and final norm.

    Args:
        make_layer: builds a layer from the config and the layer's index.
    """

    def __init__(self, config: ModelConfig, make_layer: Callable[[ModelConfig, int], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([make_layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def embed(self, input_ids: Tensor) -> Tensor:  # [B, T]
        """Return the first layer's input."""
        return self.embed_tokens(input_ids)  # [B, T, H]

    def forward(self, input_ids: Tensor, context: Context) -> Tensor:  # [B, T]
        x = self.embed(input_ids)  # [B, T, H]
        for layer in self.layers:
            x = checkpoint(layer, x, context) if context.checkpointing == "full" else layer(x, context)
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder with a language-model head. Each family defines its layer class.

    Attributes:
        presets: configs of published sizes, by name.
        config: the checked configuration.
        activation_checkpointing: the activations that backward recomputes in training. "none" keeps all. "selective"
            recomputes the results of norms and of SwiGLU in fused layers: a third of a layer's memory for a hundredth
            of its time. "full" keeps only each layer's input and costs another forward pass.
        precision: "fp8" computes wide matmuls of fused layers in 8-bit floats in training, except for weight gradients.
            None computes in the dtype of the weights, as the embedding, the head and all inference do.
        stored_types: parameter -> dtype of its tensor in the folder, if loading chose the model's dtype itself; `save`
            writes these dtypes.
        folders: folders the model was loaded from: adapter first, then base. Empty for a model built from a config.
        modules_to_save: names of the modules that an adapter trains and saves whole.
        tokenizer: tokenizer of the model's folder, read when text is first generated. It may be assigned.
    """

    presets: ClassVar[Mapping[str, dict[str, Any]]] = {}
    make_layer: ClassVar[Any]  # class of a layer; called with the config and the layer's index
    first_norm_weight: ClassVar[float] = 1.0  # initial value of norm weights
    make_decoder: ClassVar[Any] = Decoder  # class of all but the head; called with the config and `make_layer`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stored_types: Mapping[str, str] = {}
        self.folders: Sequence[Path] = ()
        self.modules_to_save: tuple[str, ...] = ()
        self.tokenizer: Tokenizer | None = None
        self._checkpointing = "none"
        self._precision: str | None = None
        self.model = self.make_decoder(config, self.make_layer)
        has_head = not (config.tie_word_embeddings or config.is_reward)
        self.lm_head: nn.Linear | QuantizedLinear | None = (
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_head else None
        )
        self.score = nn.Linear(config.hidden_size, 1, bias=False) if config.is_reward else None
        self._rotaries = [Rotary(replace(config, rope=rope)) for rope in config.ropes]

    @property
    def is_fused(self) -> bool:
        """Whether all layers run in fused ops (`genesis_models.fuse`)."""
        return all(getattr(layer, "is_fused_layer", False) for layer in self.model.layers)

    @property
    def activation_checkpointing(self) -> str:
        """See the class. Raises ConfigError if the layers do not support the assigned value."""
        return self._checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, how: str) -> None:
        if how not in CHECKPOINTING:
            raise ConfigError(f"activation_checkpointing is {how!r}, expected one of {', '.join(CHECKPOINTING)}")
        if how == "selective" and not self.is_fused:
            raise ConfigError(self._plain("activation_checkpointing selective"), next="set it to none or full")
        self._checkpointing = how

    @property
    def precision(self) -> str | None:
        """See the class. Raises ConfigError if the layers do not support the assigned value."""
        return self._precision

    @precision.setter
    def precision(self, precision: str | None) -> None:
        if precision not in (None, "fp8"):
            raise ConfigError(f"precision is {precision!r}, expected fp8 or None")
        if precision == "fp8" and not self.is_fused:
            raise ConfigError(self._plain("precision fp8"), next="leave it at None")
        self._precision = precision

    def _plain(self, setting: str) -> str:
        return f"{setting} needs fused layers, but the layers of {self.config.model_type} are plain"

    @property
    def head_weight(self) -> Tensor:
        """The output projection `[V, H]`: the head's weight, or the token embedding. An 8-bit head is dequantized.

        Raises:
            ModelError: the model is a reward model.
        """
        if self.score is not None:
            what = "the model is a reward model, which scores answers and predicts no tokens"
            raise ModelError(what, where="model", next="use a model with a language-model head")
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., V]` of final hidden states `[..., H]`."""
        if isinstance(self.lm_head, QuantizedLinear):
            return self.lm_head(hidden)
        return F.linear(hidden, self.head_weight)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the final hidden states `[B, T, H]` of tokens `[B, T]`.

        Args:
            position_ids: `[B, T]`. Positions that restart at 0 mark document borders, which attention does not cross.
                On a device they must be below the number of tokens seen so far, including these. `[B, T, 4]` also has
                what each token sees: the index of its document's first token, then the begin and the end of a range of
                earlier tokens that it skips.
            cache: keys and values of earlier tokens; this call extends it. Positions continue from it.
        """
        t, begin = input_ids.shape[1], 0 if cache is None else cache.length
        tables, starts = self._positions(begin, begin + t, position_ids, input_ids.device)
        trains = self.training and cache is None
        fp8 = fp8_ops.MIN_COLUMNS if trains and self.precision == "fp8" else 0
        context = Context(tables, starts, cache, self.activation_checkpointing if trains else "none", fp8)
        x = self.model(input_ids, context)
        if cache is not None:
            cache.length += t
        return x

    def next_hidden_states(self, input_ids: Tensor, cache: EngineCache) -> Tensor:
        """Return the final hidden states `[B, T, H]` of each sequence's next T tokens `[B, T]`, and extend `cache`.

        It records no gradients and uses neither checkpointing nor 8-bit floats.
        """
        t = input_ids.shape[1]
        x = self.model(input_ids, Context(cache.tables(self._rotaries, t), None, cache, "none", 0))
        cache.advance(t)
        return x

    def _positions(
        self, begin: int, end: int, position_ids: Tensor | None, device: genesis.Device
    ) -> tuple[Tables, Tensor | None]:
        """Return cos and sin of the tokens' positions, and each token's document start (None for one document)."""
        if position_ids is not None and position_ids.ndim == 3:
            tables, _ = self._positions(begin, end, position_ids[..., 0], device)
            return tables, position_ids[..., 1:].to(device=device)
        if device.type != "cpu":
            if position_ids is None:
                return [each.span(begin, end, device) for each in self._rotaries], None
            ids = position_ids.to(device=device)
            return [each.at(ids, end) for each in self._rotaries], genesis.arange(begin, end, device=device) - ids
        if position_ids is None:
            return [each(np.arange(begin, end), device) for each in self._rotaries], None
        positions = position_ids.numpy()
        starts = genesis.from_numpy(np.arange(begin, end) - positions)
        return [each(positions, device) for each in self._rotaries], starts

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the logits `[B, T, V]`."""
        return self.logits(self.hidden_states(input_ids, position_ids, cache))

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        num_targets: int | Tensor | None = None,
    ) -> Tensor:
        """Return the next-token cross entropy: position t predicts `labels[:, t + 1]`. It never stores all logits.

        Args:
            labels: `[B, T]`; -100 marks positions without a target.
            num_targets: divisor of the summed loss; the number of targets in this batch by default.
        """
        return F.linear_cross_entropy(
            self.hidden_states(input_ids, position_ids), self.head_weight, labels, shift=1, num_targets=num_targets
        )

    def log_probs(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the log-probability of each label, float32 `[B, T]`; entry t belongs to `labels[:, t + 1]`.

        It is 0 where the label is -100. Logits are never stored.
        """
        hidden = self.hidden_states(input_ids, position_ids)
        return F.linear_token_log_probs(hidden, self.head_weight, labels, shift=1)

    def rewards(self, input_ids: Tensor, last: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the rewards of sequences, float32 `[B, N]`: the products of `score` and their last hidden states.

        Args:
            last: column of the last token of each sequence, `[B, N]`.

        Raises:
            ModelError: the model is no reward model.
        """
        if self.score is None:
            raise ModelError("the model has no score head", where="model", next="train one with objective: reward")
        hidden = self.hidden_states(input_ids, position_ids)
        rows, length = input_ids.shape
        places = last + (genesis.arange(rows, device=last.device) * length).unsqueeze(1)
        states = F.embedding(places, hidden.flatten(0, 1)).to(dtype="float32")  # [B, N, H]
        return (states * self.score.weight[0].to(dtype="float32")).sum(-1)

    def loss_and_hits(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return `[2]`: the summed loss, and how many targets have the largest logit of all tokens.

        For evaluation: it has no gradients. The loss has the bits of `loss`.
        """
        return F.linear_loss_and_hits(self.hidden_states(input_ids, position_ids), self.head_weight, labels, shift=1)

    @overload
    def generate(self, prompt: str | Sequence[int], **settings: Unpack[Settings]) -> Generated: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **settings: Unpack[Settings]) -> list[Generated]: ...

    def generate(self, prompt: Any, **settings: Any) -> Any:
        """Continue a prompt, or each of a list of prompts: texts or ids; see `genesis_models.generate`."""
        return genesis.generate(self, prompt, **settings)  # in the layer above, which imports this module


# --- Angles of the rotary embedding, and their tables on a device -----------------------------------------------------


def _yarn(config: ModelConfig, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al., "YaRN", 2023)."""
    p, size, theta = config.rope.parameters, config.rotary_dim, config.rope.theta
    factor, scale = p["factor"], p.get("attention_factor")  # the growth of attention logits
    length = p.get("original_max_position_embeddings") or config.max_position_embeddings

    def dimension(rotations: float) -> float:
        """Return the dimension that makes `rotations` turns over the original length."""
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
    if scale is None:

        def growth(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        has_both = p.get("mscale") and p.get("mscale_all_dim")
        scale = growth(p["mscale"]) / growth(p["mscale_all_dim"]) if has_both else growth(1.0)
    return inverse / factor * ramp + inverse * (1 - ramp), float(scale)


def _llama3(config: ModelConfig, inverse: np.ndarray) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between (Llama 3.1)."""
    p = config.rope.parameters
    low, high, length = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * inverse / p["factor"] + blend * inverse


def _longrope(config: ModelConfig, inverse: np.ndarray, length: int) -> tuple[np.ndarray, float]:
    """Divide each frequency by its own factor. One list of factors is for lengths up to the trained one, another for
    longer ones (Ding et al., "LongRoPE", 2024).
    """
    p = config.rope.parameters
    trained, scale = p["original_max_position_embeddings"], p.get("attention_factor")
    factor = p.get("factor") or config.max_position_embeddings / trained
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inverse / np.array(p["long_factor" if config.regime(length) else "short_factor"]), scale


def frequencies(config: ModelConfig, length: int) -> tuple[np.ndarray, float]:
    """Return the inverse frequencies `[R/2]` (float32) of a head's R rotated values, and the factor on cos and sin, for
    a sequence of `length` positions.
    """
    rope, size = config.rope, config.rotary_dim
    theta, scale = rope.theta, 1.0
    if rope.kind == "dynamic":  # NTK-aware: the base grows beyond the trained length
        longest, factor = config.max_position_embeddings, rope.parameters["factor"]
        stretch = factor * max(length, longest) / longest - (factor - 1)
        theta *= stretch ** (size / (size - 2))
    inverse = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)  # θ^(-2i/D) (Su et al., 2021)
    if rope.kind == "linear":
        inverse = inverse / rope.parameters["factor"]
    elif rope.kind == "yarn":
        inverse, scale = _yarn(config, inverse)
    elif rope.kind == "llama3":
        inverse = _llama3(config, inverse)
    elif rope.kind == "longrope":
        inverse, scale = _longrope(config, inverse, length)
    return inverse.astype(np.float32), scale


def tables(config: ModelConfig, length: int, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float32 `[length - begin, D/2]` each, of positions `begin` … length - 1 of a sequence.

    If only a part of a head is rotated, the angles of the other pairs are 0 (see `pairs`).
    """
    inverse, scale = frequencies(config, length)
    angles = np.arange(begin, length, dtype=np.float32)[:, None] * inverse
    cos, sin = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    if rest := config.head_dim // 2 - len(inverse):
        cos, sin = (np.pad(x, ((0, 0), (0, rest)), constant_values=fill) for x, fill in ((cos, 1), (sin, 0)))
    return cos, sin


class Rotary:
    """cos and sin by position; the tables grow with the sequences. It has no parameters, and threads may share it.

    On the CPU rows are looked up in numpy. Positions on a device are not read back; the whole table is copied to the
    device once.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._device_tables: dict[tuple[int, genesis.Device], tuple[Tensor, Tensor]] = {}
        # By regime; each pair is replaced as one value, so that no thread sees one table without the other.
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, positions: np.ndarray, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[*positions.shape, D/2]`, float32."""
        cos, sin = self._for_length(int(positions.max(initial=-1)) + 1)
        cos, sin = cos[positions], sin[positions]
        return genesis.from_numpy(cos).to(device=device), genesis.from_numpy(sin).to(device=device)

    def rows(self, positions: np.ndarray, totals: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[B, T, D/2]` of the positions `[B, T]` of separate sequences, on the CPU.

        Args:
            totals: sequence lengths that scale the angles; derived from the positions by default.
        """
        ends = [int(row.max(initial=-1)) + 1 for row in positions] if totals is None else totals
        if not any(map(self.is_stretched, ends)):
            return self(positions, CPU)
        found = [[table[at] for table in self._for_length(end)] for at, end in zip(positions, ends, strict=True)]
        cos, sin = (genesis.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
        return cos, sin

    def last(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin `[length, D/2]`, float32; row p is for the last token of a sequence of p + 1."""
        plain = self.config.packed_length if self.is_stretched(length) else length
        found = [table[:plain] for table in self._for_length(plain)]
        if self.config.regime(length) == 1:
            rows = [tables(self.config, length, plain)]
        else:
            rows = [tables(self.config, end, end - 1) for end in range(plain + 1, length + 1)]
        cos, sin = (np.concatenate([first, *rest]) for first, *rest in zip(found, *rows, strict=True))
        return cos, sin

    def span(self, begin: int, end: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[T, D/2]`, float32, of positions `begin` … `end` - 1 on a device."""
        cos, sin = self._on_device(end, device)
        return cos.narrow(0, begin, end - begin), sin.narrow(0, begin, end - begin)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[*positions.shape, D/2]` of positions on a device, all of them below `end`."""
        cos, sin = self._on_device(end, positions.device)
        return F.embedding(positions, cos), F.embedding(positions, sin)

    def _on_device(self, length: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        cos, sin = self._for_length(length)
        key = (len(cos), device)
        if key not in self._device_tables:
            if self.config.regime(len(cos)) > 1:  # each length has its own table: keep only the last one
                self._device_tables.clear()
            self._device_tables[key] = genesis.tensor(cos, device=device), genesis.tensor(sin, device=device)
        return self._device_tables[key]

    def is_stretched(self, length: int) -> bool:
        """Whether a sequence of `length` has other frequencies than the trained length has."""
        return self.config.regime(length) > 0

    def _for_length(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        regime = self.config.regime(length)
        found = self._tables.get(regime)
        if found is None or len(found[0]) < length:
            size = max(256, 1 << (length - 1).bit_length())
            if self.config.regime(size) != regime:
                size = length if regime else self.config.packed_length
            found = tables(self.config, size)
            self._tables = {key: each for key, each in self._tables.items() if key < 2} | {regime: found}
        return found

"""torch's attention and transformer modules, with its parameter names, so that states of torch's models load.

The fast path of torch's encoder is absent: positions that a padding mask hides are computed in evaluation, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from genesis.errors import ShapeError, UsageError
from genesis.functions.create import full
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.layers import Dropout, LayerNorm, Linear
from genesis.nn.module import Module, ModuleList
from genesis.nn.multi_head_attention import additive
from genesis.nn.parameter import Parameter
from genesis.tensor import Tensor


class NonDynamicallyQuantizableLinear(Linear):
    """torch's name for the output projection of attention."""


class MultiheadAttention(Module):
    """Attention of several heads (Vaswani et al., 2017); see `functional.multi_head_attention_forward`.

    Attributes:
        in_proj_weight: projections of query, key and value `[3E, E]`; with other widths of keys or values (`kdim`,
            `vdim`) it is None, and `q_proj_weight`, `k_proj_weight` and `v_proj_weight` replace it.
        in_proj_bias, out_proj: biases of the projections, and the layer after the heads.
        bias_k, bias_v: with `add_bias_kv`, a further key and value.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise UsageError(f"MultiheadAttention: {embed_dim} channels cannot be split into {num_heads} heads")
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        alike, further = self._qkv_same_embed_dim, (1, 1, embed_dim) if add_bias_kv else None
        shapes: dict[str, tuple[int, ...] | None] = {
            "q_proj_weight": None if alike else (embed_dim, embed_dim),
            "k_proj_weight": None if alike else (embed_dim, self.kdim),
            "v_proj_weight": None if alike else (embed_dim, self.vdim),
            "in_proj_weight": (3 * embed_dim, embed_dim) if alike else None,
            "in_proj_bias": (3 * embed_dim,) if bias else None,
            "bias_k": further,
            "bias_v": further,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else Parameter(init.new(shape, device, dtype)))
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias, device, dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for name, p in self._parameters.items():
            if p is not None:
                draw = {"in_proj_bias": init.zeros_, "bias_k": init.xavier_normal_, "bias_v": init.xavier_normal_}
                draw.get(name, init.xavier_uniform_)(p)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return outputs and weights (None without `need_weights`); tensors are `[B, T, E]` with `batch_first`."""
        swapped = self.batch_first and query.ndim == 3
        if swapped:
            same = query is key is value
            query = query.transpose(0, 1)
            key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
        y, weights = F.multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k,
            self.bias_v, self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias, self.training,
            key_padding_mask, need_weights, attn_mask, not self._qkv_same_embed_dim, self.q_proj_weight,
            self.k_proj_weight, self.v_proj_weight, None, None, average_attn_weights, is_causal,
        )  # fmt: skip
        return (y.transpose(0, 1) if swapped else y), weights


def _activation(given: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not isinstance(given, str):
        return given
    if given not in ("relu", "gelu"):
        raise UsageError(f"the activation {given!r} is unknown", next="pass relu, gelu or a function")
    return F.relu if given == "relu" else F.gelu


class _Layer(Module):
    """A block: self-attention, in a decoder also attention to a memory, and two linear layers."""

    memory_attends = False

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu, layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        attentions = ("self_attn", "multihead_attn")[: 1 + self.memory_attends]
        for name in attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, batch_first=batch_first, **place))
        self.linear1 = Linear(d_model, dim_feedforward, **place)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, **place)
        self.norm_first = norm_first
        for kind, make in (
            ("norm", lambda: LayerNorm(d_model, layer_norm_eps, **place)),
            ("dropout", lambda: Dropout(dropout)),
        ):
            for i in range(1, 2 + len(attentions)):
                setattr(self, f"{kind}{i}", make())
        self.activation = _activation(activation)

    def _added(self, x: Tensor, norm: Module, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return x + block(x), with the norm before the block or after the sum."""
        return x + block(norm(x), *inputs) if self.norm_first else norm(x + block(x, *inputs))

    def _attended(
        self, attention: Module, x: Tensor, memory: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool
    ) -> Tensor:
        how: dict[str, Any] = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": causal}
        return attention(x, memory, memory, need_weights=False, **how)[0]  # type: ignore[no-any-return]

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        return self.dropout1(self._attended(self.self_attn, x, x, attn_mask, key_padding_mask, is_causal))  # type: ignore[no-any-return]

    def _ff_block(self, x: Tensor) -> Tensor:
        last = self.dropout3 if self.memory_attends else self.dropout2
        return last(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]


class TransformerEncoderLayer(_Layer):
    """Self-attention and two linear layers, each added to its input and normalized.

    Args:
        d_model, nhead, dim_feedforward: channels, heads, and channels between the linear layers.
        activation: "relu", "gelu", or a function of a tensor.
        batch_first: tensors are `[B, T, d_model]`; otherwise `[T, B, d_model]`.
        norm_first: normalize the input of each part; otherwise its sum with the input.
    """

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        src_mask = additive(src_mask, "src_mask", src.dtype)
        x = self._added(src, self.norm1, self._sa_block, src_mask, src_key_padding_mask, is_causal)
        return self._added(x, self.norm2, self._ff_block)


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to a memory and two linear layers; for arguments see `TransformerEncoderLayer`."""

    memory_attends = True

    def _mha_block(
        self, x: Tensor, mem: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        return self.dropout2(self._attended(self.multihead_attn, x, mem, attn_mask, key_padding_mask, is_causal))  # type: ignore[no-any-return]

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        x = self._added(tgt, self.norm1, self._sa_block, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        inputs = memory, memory_mask, memory_key_padding_mask, memory_is_causal
        x = self._added(x, self.norm2, self._mha_block, *inputs)
        return self._added(x, self.norm3, self._ff_block)


def _is_causal(mask: Tensor | None, given: bool | None, size: int) -> bool:
    """Whether a mask is the causal one. If the caller does not say, its values decide, which blocks on CUDA."""
    if given is not None or mask is None:
        return bool(given)
    if mask.shape != (size, size):
        return False
    return bool((mask == Transformer.generate_square_subsequent_mask(size, mask.device, mask.dtype)).all())


def _length(layers: ModuleList, x: Tensor) -> int:
    length: int = x.shape[1 if x.ndim == 3 and layers[0].self_attn.batch_first else 0]
    return length


class TransformerEncoder(Module):
    """`num_layers` copies of an encoder layer, one after the other, then `norm`.

    `enable_nested_tensor` and `mask_check` concern torch's fast path and have no effect.
    """

    def __init__(
        self, encoder_layer: Module, num_layers: int, norm: Module | None = None, enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers, self.norm = num_layers, norm
        self.enable_nested_tensor, self.mask_check = enable_nested_tensor, mask_check

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        mask = additive(mask, "mask", src.dtype)
        padding = additive(src_key_padding_mask, "src_key_padding_mask", src.dtype)
        causal = _is_causal(mask, is_causal, _length(self.layers, src))
        for layer in self.layers:
            src = layer(src, src_mask=mask, is_causal=causal, src_key_padding_mask=padding)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """`num_layers` copies of a decoder layer, one after the other, then `norm`."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(decoder_layer) for _ in range(num_layers))
        self.num_layers, self.norm = num_layers, norm

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        causal = _is_causal(tgt_mask, tgt_is_causal, _length(self.layers, tgt))
        how: dict[str, Any] = {"tgt_mask": tgt_mask, "tgt_key_padding_mask": tgt_key_padding_mask}
        how |= {"memory_mask": memory_mask, "memory_key_padding_mask": memory_key_padding_mask}
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_is_causal=causal, memory_is_causal=memory_is_causal, **how)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder of a source and a decoder of a target that attends to it (Vaswani et al., 2017).

    Args:
        d_model, nhead, dim_feedforward, activation, batch_first, norm_first: as for `TransformerEncoderLayer`.
        custom_encoder, custom_decoder: modules that replace encoder and decoder.
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1, activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any = None, custom_decoder: Any = None, layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        how: tuple[Any, ...] = (dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        kinds: Any = (
            ("encoder", custom_encoder, TransformerEncoderLayer, TransformerEncoder, num_encoder_layers),
            ("decoder", custom_decoder, TransformerDecoderLayer, TransformerDecoder, num_decoder_layers),
        )
        for name, given, layer, stack, count in kinds:
            if given is None:
                norm = LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)
                given = stack(layer(d_model, nhead, *how, device, dtype), count, norm)
            setattr(self, name, given)
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for p in self.parameters():
            if p.ndim > 1:
                init.xavier_uniform_(p)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the decoder's outputs, with the shape of `tgt`."""
        row = 0 if self.batch_first else 1
        if src.ndim == 3 and src.shape[row] != tgt.shape[row]:
            raise ShapeError(f"Transformer: src {tuple(src.shape)} and tgt {tuple(tgt.shape)} differ in batch size")
        if not src.shape[-1] == tgt.shape[-1] == self.d_model:
            raise ShapeError(f"Transformer: src and tgt have {src.shape[-1]} and {tgt.shape[-1]} channels",
                             next=f"pass {self.d_model}")  # fmt: skip
        memory = self.encoder(
            src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
        )  # fmt: skip
        return self.decoder(  # type: ignore[no-any-return]
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """Return the causal mask `[sz, sz]`: -inf above the diagonal, else 0."""
        return full((sz, sz), float("-inf"), device=device, dtype=dtype).triu(1)  # type: ignore[no-any-return]

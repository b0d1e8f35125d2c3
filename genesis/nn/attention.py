"""A building block: grouped-query attention with rotary positions and a KV cache. Our models define their own."""

from __future__ import annotations

from typing import Any

from genesis.autograd.modes import is_grad_enabled, no_grad
from genesis.errors import GradientError, ShapeError, UsageError
from genesis.functions.create import arange, empty
from genesis.nn import functional as F
from genesis.nn.layers import Linear
from genesis.nn.module import Module
from genesis.tensor import Tensor


class RoPE(Module):
    """Rotary position embedding for heads of an even `size`. `theta` is the base of the wavelengths."""

    def __init__(self, size: int, theta: float = 10_000.0) -> None:
        super().__init__()
        if size % 2:
            raise ShapeError(f"RoPE: the head size {size} is odd", next="use an even head size")
        self.size, self.theta = size, theta

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x `[B, T, heads, size]` by integer positions `[T]` or `[B, T]`."""
        cos, sin = F.rope_table(positions, self.size, self.theta)
        return F.rope(x, cos, sin)

    def extra_repr(self) -> str:
        return f"{self.size}, theta={self.theta:g}"


class KVCache:
    """The keys and values of the `length` tokens so far, for generation.

    Its memory grows by doubling and is reused after `reset`.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None  # [B, room, heads, D]
        self._values: Tensor | None = None

    def reset(self) -> None:
        """Drop the cached tokens but keep the memory."""
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, T, heads, D]`, and return all cached ones as views `[B, length, heads, D]`.

        Raises GradientError if gradients are recorded, ShapeError if the batch size or the heads changed.
        """
        if is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise GradientError("a KV cache does not record gradients", next="generate inside no_grad()")
        end = self.length + keys.shape[1]
        with no_grad():
            self._keys, self._values = self._room(self._keys, keys, end), self._room(self._values, values, end)
            self._keys[:, self.length : end] = keys
            self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def _room(self, held: Tensor | None, new: Tensor, end: int) -> Tensor:
        """Return memory for `end` tokens like `new`, with the cached tokens in it."""
        if held is not None and (held.shape[0], *held.shape[2:]) != (new.shape[0], *new.shape[2:]):
            if self.length:
                raise ShapeError(f"the cache holds {held.shape}, got {new.shape}", next="call reset() first")
            held = None
        if held is not None and held.shape[1] >= end:
            return held
        size = end if held is None else max(end, 2 * held.shape[1])
        grown: Tensor = empty(new.shape[0], size, *new.shape[2:], dtype=new.dtype, device=new.device)
        if held is not None and self.length:
            grown[:, : self.length] = held[:, : self.length]
        return grown


class Attention(Module):
    """Causal self-attention in which groups of query heads share a key head (Ainslie et al., 2023).

    Args:
        hidden_size: width of a token.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`, which is the default.
        head_dim: size of a head; hidden_size / num_heads by default.
        bias: whether the projections have a bias.
        rope_theta: base of the rotary wavelengths; None means no rotation.
        window: number of most recent tokens that a query sees; 0 means all.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope_theta: float | None = 10_000.0,
        window: int = 0,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.window = window
        if num_heads % self.num_kv_heads:
            raise ShapeError(f"{num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        kind = {"device": device, "dtype": dtype}
        self.q_proj = Linear(hidden_size, num_heads * self.head_dim, bias, **kind)
        self.k_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, bias, **kind)
        self.v_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, bias, **kind)
        self.o_proj = Linear(num_heads * self.head_dim, hidden_size, bias, **kind)
        self.rope = None if rope_theta is None else RoPE(self.head_dim, rope_theta)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend to the tokens in `cache` and in `x`. Returns `[B, T, hidden_size]`.

        Args:
            x: tokens `[B, T, hidden_size]`.
            positions: integers `[T]` or `[B, T]` for the rotation; by default they continue from the cache.
            starts: integers `[B, T]`, the first key that each token sees (the start of its document).
            mask: replaces the causal mask, as in `functional.scaled_dot_product_attention`. It excludes `starts` and a
                window.
            cache: KV cache, to which these tokens are appended.
        """
        if mask is not None and (starts is not None or self.window):
            rule = "starts" if starts is not None else f"a window of {self.window}"
            raise UsageError(f"Attention takes a mask or {rule}, not both", next="hide those keys in the mask")
        batch, length, _ = x.shape
        # Project and rotate: q is [B, T, heads, D], k and v are [B, T, kv_heads, D].
        q = self.q_proj(x).reshape(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        if self.rope is not None:
            seen = cache.length if cache is not None else 0
            positions = arange(seen, seen + length, device=x.device) if positions is None else positions
            q, k = self.rope(q, positions), self.rope(k, positions)
        # Attend to all cached tokens. A mask needs the general form.
        if cache is not None:
            k, v = cache.extend(k, v)
        if mask is None:
            heads = F.attention(q, k, v, starts, window=self.window)
        else:
            heads = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, enable_gqa=True
            ).transpose(1, 2)
        return self.o_proj(heads.reshape(batch, length, self.num_heads * self.head_dim))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"

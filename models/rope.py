"""Angles of the rotary embedding, with the scalings that Llama and Qwen configs use, and their tables on a device.

Angles are float32 products, as in transformers: at long positions the rounding of the frequencies is part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import genesis
from genesis import Tensor
from genesis.backend import CPU
from genesis.nn import functional as F
from genesis_models.config import ModelConfig


def _yarn(config: ModelConfig, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al., "YaRN", 2023)."""
    p, size, theta = config.rope.parameters, config.rotary_dim, config.rope.theta
    factor, scale = p["factor"], p.get("attention_factor")  # the scale is how much attention logits grow
    length = p.get("original_max_position_embeddings") or config.max_position_embeddings

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original length."""
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
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    p = config.rope.parameters
    low, high, length = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * inverse / p["factor"] + blend * inverse


def _longrope(config: ModelConfig, inverse: np.ndarray, length: int) -> tuple[np.ndarray, float]:
    """Each frequency is divided by a factor of its own, of two lists: up to the trained length and beyond (Ding et al.,
    "LongRoPE", 2024).
    """
    p = config.rope.parameters
    trained, scale = p["original_max_position_embeddings"], p.get("attention_factor")
    factor = p.get("factor") or config.max_position_embeddings / trained
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inverse / np.array(p["long_factor" if config.regime(length) else "short_factor"]), scale


def frequencies(config: ModelConfig, length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[R/2]` (float32), of the R values of a head that are rotated, and the factor on cos and sin,
    for a sequence of `length` positions.
    """
    rope, size = config.rope, config.rotary_dim
    theta, scale = rope.theta, 1.0
    if rope.kind == "dynamic":  # NTK-aware: the base grows once the sequence is longer than trained
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
    """cos and sin of positions `begin` … length - 1 of a sequence of `length`, each float32 `[length - begin, D/2]`.

    Where a part of a head is rotated, the other pairs are turned by nothing (`genesis_models.blocks.pairs`).
    """
    inverse, scale = frequencies(config, length)
    angles = np.arange(begin, length, dtype=np.float32)[:, None] * inverse
    cos, sin = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    if rest := config.head_dim // 2 - len(inverse):
        cos, sin = (np.pad(x, ((0, 0), (0, rest)), constant_values=fill) for x, fill in ((cos, 1), (sin, 0)))
    return cos, sin


class Rotary:
    """cos and sin by position, grown as longer sequences come. It has no parameters and may be shared by threads.

    On the CPU the rows are looked up in numpy. Positions on a device are not read back: the whole table goes there
    once.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._device_tables: dict[tuple[int, genesis.Device], tuple[Tensor, Tensor]] = {}
        # By regime; replaced as a whole, so that no thread sees one table without the other.
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, positions: np.ndarray, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """cos and sin `[*positions.shape, D/2]`, float32."""
        cos, sin = self._for_length(int(positions.max(initial=-1)) + 1)
        cos, sin = cos[positions], sin[positions]
        return genesis.from_numpy(cos).to(device=device), genesis.from_numpy(sin).to(device=device)

    def rows(self, positions: np.ndarray, totals: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, T, D/2]` of positions `[B, T]` of sequences of their own; on the CPU.

        Args:
            totals: the length of each sequence that stretched angles are for; the positions' unless given.
        """
        ends = [int(row.max(initial=-1)) + 1 for row in positions] if totals is None else totals
        if not any(map(self.is_stretched, ends)):
            return self(positions, CPU)
        found = [[table[at] for table in self._for_length(end)] for at, end in zip(positions, ends, strict=True)]
        cos, sin = (genesis.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
        return cos, sin

    def last(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin `[length, D/2]`, float32: row p is for the last token of a sequence of p + 1."""
        plain = self.config.packed_length if self.is_stretched(length) else length
        found = [table[:plain] for table in self._for_length(plain)]
        if self.config.regime(length) == 1:
            rows = [tables(self.config, length, plain)]
        else:
            rows = [tables(self.config, end, end - 1) for end in range(plain + 1, length + 1)]
        cos, sin = (np.concatenate([first, *rest]) for first, *rest in zip(found, *rows, strict=True))
        return cos, sin

    def span(self, begin: int, end: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """cos and sin of positions `begin` … `end` - 1 on a device, `[T, D/2]` float32."""
        cos, sin = self._on_device(end, device)
        return cos.narrow(0, begin, end - begin), sin.narrow(0, begin, end - begin)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin `[*positions.shape, D/2]` of positions below `end`, which are on a device."""
        cos, sin = self._on_device(end, positions.device)
        return F.embedding(positions, cos), F.embedding(positions, sin)

    def _on_device(self, length: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        cos, sin = self._for_length(length)
        key = (len(cos), device)
        if key not in self._device_tables:
            if self.config.regime(len(cos)) > 1:  # each length has a table of its own: keep the last one alone
                self._device_tables.clear()
            self._device_tables[key] = genesis.tensor(cos, device=device), genesis.tensor(sin, device=device)
        return self._device_tables[key]

    def is_stretched(self, length: int) -> bool:
        """Whether frequencies are not those of the trained length: under dynamic scaling and longrope beyond it."""
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

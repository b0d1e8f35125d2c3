"""Whether an exported folder is the model that was trained: its weights one by one, and what it answers.

Weights are compared with ones that are computed here again in float64, so a mistake in merging shows. How far each may
be off follows from its type: half a unit in the last place, and for merged ones what float32 sums lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import genesis
from genesis.dtypes import as_dtype
from genesis.errors import ModelError, NumericError, escape
from genesis.files.hf import WeightFolder, list_names
from genesis.files.safetensors import load_file
from genesis.nn import LoRALinear
from genesis_models.adapters import ADAPTER_WEIGHTS, adapted_layers, is_adapter
from genesis_models.adapters.targets import HEAD
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig

# Half a unit in the last place, relative, and the least positive number.
_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_LEAST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
Answers = list[np.ndarray]  # logits [T, V] of each text


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one model's answers are from another's.

    Attributes:
        tokens: how many were answered.
        logit: the largest absolute difference of a logit.
        kl: the mean of KL(first ‖ second) of a token's distribution, in nats.
        relative: ‖difference‖ / ‖logits‖ over all.
    """

    tokens: int
    logit: float
    kl: float
    relative: float


def answers(model: CausalLM, texts: Sequence[np.ndarray]) -> Answers:
    """The logits after each token of texts `[T]` of ids."""
    model.eval()
    with genesis.no_grad():
        return [model(genesis.from_numpy(ids[None].astype(np.int64))).numpy()[0].astype(np.float32) for ids in texts]


def difference(expected: Answers, found: Answers) -> Difference:
    """How far `found` is from `expected`.

    Raises:
        NumericError: an answer is NaN or infinite.
    """
    tokens, largest, kl, square, norm = 0, 0.0, 0.0, 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise NumericError("the model's logits are NaN or infinite", next="export it as float32 or bfloat16")
        tokens += len(a)
        largest = max(largest, float(np.abs(a - b).max()))
        square, norm = square + float(((a - b) ** 2).sum()), norm + float((a**2).sum())
        log_a, log_b = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (a, b))
        kl += float((np.exp(log_a) * (log_a - log_b)).sum())
    return Difference(tokens, largest, max(kl / max(tokens, 1), 0.0), math.sqrt(square / max(norm, 1e-300)))


def check_answers(found: Difference, dtype: str, config: ModelConfig, where: Path) -> None:
    """Refuse answers further from the trained model's than rounding its weights to `dtype` explains.

    Each of about 7 matmuls in a layer adds an error of a rounding of its weight, and of sums of K products in float32:
    u + 2^-24·√K. They are independent of each other, so n of them add up to √n of one; 4 times that leaves room for
    what a model makes of them.

    Raises:
        ModelError: with the difference and the bound.
    """
    sums = _UNIT["float32"] * math.sqrt(config.intermediate_size)
    bound = 4 * math.sqrt(7 * config.num_hidden_layers + 1) * (_UNIT[dtype] + sums)
    if not found.relative <= bound:
        what = f"the answers differ by {found.relative:.2g} of their size, and rounding to {dtype} explains {bound:.2g}"
        raise ModelError(what, where=escape(where), next="do not use this folder: it is not what was trained")


def check_weights_of(model: CausalLM, folder: Path) -> tuple[int, str]:
    """Compare every tensor that was written with the one that was trained.

    Args:
        model: the trained one, in float32.
        folder: an adapter of it, or the whole model, with adapters merged.

    Returns:
        how many tensors these are, and the coarsest of their types.
    Raises:
        ModelError: naming at most 10 tensors that are further off than their type explains.
    """
    compared = list((_compared_adapter if is_adapter(folder) else _compared_weights)(model, folder))
    wrong = [name for name, _, same in compared if not same]
    if wrong:
        what = f"the folder holds other weights than those that were trained, in tensors: {list_names(wrong)}"
        raise ModelError(what, where=escape(folder), next="do not use this folder; export it again")
    return len(compared), max((kind for _, kind, _ in compared), key=_UNIT.__getitem__)


def _compared_adapter(model: CausalLM, folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Each tensor of an adapter, its type, and whether it has its parameter's bits."""
    layers = adapted_layers(model)
    for name, values in load_file(folder / ADAPTER_WEIGHTS).items():
        owner, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        parameter: genesis.Tensor
        if part:
            parameter = layers[owner].get_parameter(f"lora_{part.removesuffix('.weight')}.weight")
        else:
            parameter = model.head_weight if owner == f"{HEAD}.weight" else model.get_parameter(owner)
        yield name, "float32", np.array_equal(values, parameter.detach().numpy().astype(np.float32))


def _compared_weights(model: CausalLM, folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Each tensor of a whole model, its type, and whether it is as near as that allows."""
    layers = adapted_layers(model)
    own = {
        f"{name}.{part}" for name, layer in layers.items() for part, _ in layer.named_parameters() if "lora_" in part
    }
    with WeightFolder(folder) as weights:
        for name, parameter in model.named_parameters():
            if name in own:
                continue
            owner, _, last = name.rpartition(".")
            if owner in layers and last == "weight":
                exact, lost = _merged(layers[owner])
            else:
                exact, lost = parameter.detach().numpy().astype(np.float64), np.zeros(())
            written = weights.read(name)
            kind = as_dtype(written.dtype).name
            allowed = _UNIT[kind] * (np.abs(exact) + lost) * (1 + 2.0**-20) + lost + _LEAST[kind]
            yield name, kind, bool((np.abs(written.astype(np.float64) - exact) <= allowed).all())


def _merged(layer: LoRALinear) -> tuple[np.ndarray, np.ndarray]:
    """A layer's merged weight in float64, and how far one whose sums are in float32 may be off, rounding apart."""
    w, a, b = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.lora_A.weight, layer.lora_B.weight))
    whole = w + layer.scaling * (b @ a)
    # Sums of r products and what follows them: an error of (r + 4) roundings of the sum of all sizes at most.
    sizes = np.abs(w) + abs(layer.scaling) * (np.abs(b) @ np.abs(a))
    lost = (layer.r + 4) * _UNIT["float32"] * sizes
    if layer.lora_magnitude_vector is None:
        return whole, lost
    norm = np.sqrt((whole**2).sum(-1, keepdims=True))
    factor = layer.lora_magnitude_vector.weight.detach().numpy().astype(np.float64)[:, None] / norm
    # The norm's own error: that of its elements, and of a sum of squares in float32.
    of_norm = np.sqrt((lost**2).sum(-1, keepdims=True)) / norm + whole.shape[-1] * _UNIT["float32"]
    return whole * factor, np.abs(factor) * (lost + np.abs(whole) * (of_norm + 4 * _UNIT["float32"]))

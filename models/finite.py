"""Whether a model's weights are finite: a NaN or an infinity in one makes text and losses meaningless."""

from __future__ import annotations

import numpy as np

import genesis
from genesis import Tensor
from genesis.backend import CPU
from genesis.errors import NumericError
from genesis.files.hf import list_names
from genesis_models.blocks import CausalLM

PIECE = 1 << 22  # elements that are looked at together


def check_finite(model: CausalLM, *, where: str) -> None:
    """Raises: NumericError, naming at most 10 parameters that hold a NaN or an infinity, with their count."""
    with genesis.no_grad():
        found = [name for name, parameter in model.named_parameters() if not _is_finite(parameter.detach())]
    if found:
        is_half = model.head_weight.dtype is genesis.float16
        raise NumericError(
            f"weights are NaN or infinite in tensors: {list_names(found)}",
            where=where,
            next="load them as float32 or bfloat16: float16 ends at 65,504"
            if is_half
            else "take the model again, or an older checkpoint: these weights are damaged",
        )


def _is_finite(values: Tensor) -> bool:
    if values.device == CPU:
        flat = values.numpy().reshape(-1)
        return all(np.isfinite(flat[i : i + PIECE]).all() for i in range(0, len(flat), PIECE))
    flat_there = values.view(-1)
    size = flat_there.numel()
    pieces = (flat_there.narrow(0, i, min(PIECE, size - i)) for i in range(0, size, PIECE))
    return all(bool(genesis.isfinite(piece).all().item()) for piece in pieces)

"""float32 masters for `genesis export`: a checkpoint has them beside the 16-bit weights that they were rounded to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from genesis.dtypes import bfloat16
from genesis.errors import ModelError, escape
from genesis.files.atomic import verify_manifest
from genesis.files.boundary import boundary
from genesis.files.paths import exists
from genesis.ops.rounding import split_into
from genesis.optim.states import MASTER
from genesis.train.checkpoint import RNG, optimizer_tensors
from genesis_models.blocks import CausalLM
from genesis_models.source import newest_checkpoint


def take_masters(model: CausalLM, folder: Path) -> str | None:
    """Give `model` the masters of its weights, where they can be had; a line about it, None where no weight has one.

    Args:
        model: of `folder`, in float32.
        folder: of a checkpoint, or of a run, whose newest checkpoint is taken if the final model is that.
    """
    narrow = {kind for kind in model.stored_types.values() if kind in ("bfloat16", "float16")}
    if not narrow:
        return None
    with boundary(ModelError, "reading the checkpoint", folder):
        is_checkpoint = exists(folder / RNG)  # which the final model of a run does not have
    checkpoint = folder if is_checkpoint else newest_checkpoint(folder)
    weights = f"float32: the {' and '.join(sorted(narrow))} weights as they are"
    if checkpoint is None:
        return f"{weights}; {escape(folder)} has no checkpoint, whose optimizer may have masters of them"
    try:
        if not is_checkpoint:
            verify_manifest(checkpoint)
        reason = _taken(model, checkpoint)
    except ModelError as error:
        reason = error.what
    if reason is not None:
        return f"{weights}; {escape(checkpoint)} has no masters of them: {reason}"
    return f"float32: the optimizer's masters in {escape(checkpoint)}, which the weights were rounded from"


def _taken(model: CausalLM, checkpoint: Path) -> str | None:
    """Copy the masters in `checkpoint` into the weights if all of these are rounded from them; else why not."""
    parameters = dict(model.named_parameters())
    with optimizer_tensors(checkpoint) as tensors:
        masters = {n.removesuffix(f".{MASTER}"): each for n, each in tensors.items() if n.endswith(f".{MASTER}")}
        if not masters:
            return "its optimizer keeps none"
        for name, stored in masters.items():
            if name not in parameters or not _is_rounded(
                parameters[name].detach().numpy(), stored.whole(), model.stored_types.get(name, "float32")
            ):
                return f"{escape(name)} is of another step"
        for name, stored in masters.items():
            np.copyto(parameters[name].detach().numpy(), stored.whole())
    return None


def _is_rounded(weight: np.ndarray, master: np.ndarray, kind: str) -> bool:
    """Whether float32 `weight` is `master` rounded to `kind`: halves to even, or in bfloat16 away from zero, too."""
    if weight.shape != master.shape or master.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        near = master.astype(np.dtype(kind) if kind != "bfloat16" else bfloat16.numpy)
    if np.array_equal(near.astype(np.float32), weight):
        return True
    if kind != "bfloat16":
        return False
    flat = np.ascontiguousarray(master).reshape(-1)
    rounded, residual = np.empty(flat.size, bfloat16.numpy), np.empty(flat.size, np.int16)
    split_into(rounded, residual, flat)
    return np.array_equal(rounded.astype(np.float32).reshape(weight.shape), weight)

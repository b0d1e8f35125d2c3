"""Drawing tokens on a GPU; the plain reference is genesis/ops/sample.py. The host draws: the logits are read back."""

from __future__ import annotations

import numpy as np

from genesis.array import Array
from genesis.backend import backend_for
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.ops.sample import sample as op

__all__ = ["sample"]


@cuda_impl("sample")
def sample(
    out: tuple[Array, Array],
    logits: Array,
    keys: Array,
    settings: Array,
    top_k: Array,
    seen: Array | None = None,
    log_probs: bool = False,
) -> None:
    """The reference on copies of its inputs."""
    on_host = [None if x is None else x.numpy() for x in (logits, keys, settings, top_k, seen)]
    found = tuple(np.empty(o.shape, o.dtype.numpy) for o in out)
    op.reference(found, *on_host, log_probs=log_probs)
    for values, array in zip(found, out, strict=True):
        backend_for(array.device).from_numpy(values, array)

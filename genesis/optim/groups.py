"""Parameter groups by kind: which parameters decay, and which ones Muon takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genesis.tensor import Tensor

__all__ = ["decay_groups", "muon_groups"]

Named = tuple[str, Tensor]


def decay_groups(named_parameters: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Groups under which matrices (two dimensions or more) decay, and vectors, as norms and biases are, do not.

    Frozen parameters are left out; so are empty groups.
    """
    trained = [(n, p) for n, p in named_parameters if p.requires_grad]
    matrices = [(n, p) for n, p in trained if p.ndim >= 2]
    vectors = [(n, p) for n, p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def muon_groups(
    named_parameters: Iterable[Named], weight_decay: float, not_hidden: Sequence[str] = ("embed_tokens", "lm_head")
) -> list[dict[str, Any]]:
    """Groups for `Muon`: hidden matrices by Muon, the other parameters by AdamW; vectors do not decay.

    Args:
        named_parameters: frozen ones are left out.
        weight_decay: of matrices.
        not_hidden: parts of dotted names whose matrices (embeddings, output heads) go by AdamW.
    """
    trained = [(n, p) for n, p in named_parameters if p.requires_grad]
    hidden = [(n, p) for n, p in trained if p.ndim == 2 and not set(n.split(".")) & set(not_hidden)]
    names = {n for n, _ in hidden}
    rest = decay_groups([(n, p) for n, p in trained if n not in names], weight_decay)
    muon = [{"params": hidden, "weight_decay": weight_decay, "use_muon": True}] if hidden else []
    return muon + [{**group, "use_muon": False} for group in rest]

"""Parameter groups by kind: which parameters decay, and which ones Muon takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genesis.tensor import Tensor

Named = tuple[str, Tensor]


def decay_groups(named_parameters: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Groups under which matrices (two dimensions or more) decay, and vectors, as norms and biases are, do not.

    Frozen parameters are left out; so are empty groups. Flat buffers have the order of a group.
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    matrices = [(n, p) for n, p in trained if p.ndim >= 2]
    vectors = [(n, p) for n, p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def pairs_together(named_parameters: Iterable[Named]) -> list[Named]:
    """Parameters in the order in which flat buffers are to hold them: of all adapters in a block first A, then B.

    A and B of layers on one input are neighbours then, and one operand each. All else keeps its place.
    """
    blocks: dict[str, int] = {}
    keys: list[tuple[int, bool]] = []
    named = list(named_parameters)
    for number, (name, _) in enumerate(named):
        *path, _layer, kind, _weight = ("", "", *name.split("."))
        is_pair = kind in ("lora_A", "lora_B")
        place = blocks.setdefault(".".join(path), number) if is_pair else number
        keys.append((place, kind == "lora_B"))
    return [named[i] for i in sorted(range(len(named)), key=keys.__getitem__)]


def muon_groups(
    named_parameters: Iterable[Named], weight_decay: float, not_hidden: Sequence[str] = ("embed_tokens", "lm_head")
) -> list[dict[str, Any]]:
    """Groups for `Muon`: hidden matrices by Muon, the other parameters by AdamW; vectors do not decay.

    Args:
        named_parameters: frozen ones are left out.
        weight_decay: of matrices.
        not_hidden: parts of dotted names whose matrices (embeddings, output heads) go by AdamW.
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    hidden = [(n, p) for n, p in trained if p.ndim == 2 and not set(n.split(".")) & set(not_hidden)]
    names = {n for n, _ in hidden}
    rest = decay_groups([(n, p) for n, p in trained if n not in names], weight_decay)
    muon = [{"params": hidden, "weight_decay": weight_decay, "use_muon": True}] if hidden else []
    return muon + [{**group, "use_muon": False} for group in rest]

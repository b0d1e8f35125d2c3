"""Parameter groups: which parameters decay and which Muon takes, and the names of a group's settings.

A name that an optimizer does not know is an error, never ignored: a misspelt setting would otherwise train with the
default. torch has some settings that are not offered here; their neutral values are taken, since nothing differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from genesis.errors import KeywordError, unknown_keyword
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


# --- Settings ---------------------------------------------------------------------------------------------------------


# What a group holds beside the settings of its rule. `Optimizer.set_lr` reads "lr_factor".
OF_GROUPS = ("params", "param_names", "initial_lr", "lr_factor")

NEUTRAL = (None, False)
# torch's settings that are not offered, with what to do instead.
NOT_OFFERED = {
    "amsgrad": "leave it out: the maximum of past averages is not kept",
    "capturable": "leave it out: `update` can be captured in a CUDA graph without it",
    "differentiable": "leave it out: gradients do not flow through a step",
    "decoupled_weight_decay": "use Adam for an L2 penalty, AdamW for decoupled decay",
}


def without_neutral(owner: str, given: Mapping[str, Any], neutral: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`given` without torch's settings that are not offered, where their values change nothing.

    Args:
        owner: the optimizer's name, for errors.
        neutral: values that change nothing for this optimizer besides None and False.

    Raises:
        KeywordError: for another value, saying what to do instead.
    """
    kept = dict(given)
    for name in given.keys() & NOT_OFFERED.keys():
        value = kept.pop(name)
        own = (neutral or {}).get(name, False)
        if value is not None and bool(value) != own:
            raise KeywordError(f"{owner} does not offer {name}={value!r}", next=NOT_OFFERED[name])
    return kept


def check_keywords(owner: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise KeywordError for the first name that is not one of `names`, with the nearest that is."""
    for name in given:
        if name not in names:
            raise unknown_keyword(owner, name, names)


class Group(dict[str, Any]):
    """The settings of a parameter group, and "params"; a dict that takes no other names.

    Args:
        owner: the optimizer's name, for errors.
        settings: names of the rule's settings.
        of_optimizer: names of settings that only the whole optimizer has.
        values: what the group holds.
    """

    owner = "Optimizer"
    names: Collection[str] | None = None  # None while a copy is being made
    of_optimizer: Collection[str] = ()

    def __init__(
        self, owner: str, settings: Iterable[str], of_optimizer: Collection[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.owner, self.names, self.of_optimizer = owner, (*settings, *OF_GROUPS), of_optimizer
        self.update(values)

    def check(self, names: Iterable[str]) -> None:
        """Raise KeywordError for a name that a group does not hold."""
        if self.names is None:
            return
        for name in names:
            if name in self.of_optimizer and name not in self.names:
                raise KeywordError(
                    f"{name} is no setting of a parameter group", next=f"pass it to {self.owner}, for all groups"
                )
        check_keywords(f"a parameter group of {self.owner}", names, self.names)

    def __setitem__(self, name: str, value: Any) -> None:
        self.check((name,))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.check((name,))
        return super().setdefault(name, default)

    def update(self, *args: Any, **more: Any) -> None:
        """As of a dict; nothing changes where a name is unknown."""
        values = dict(*args, **more)
        self.check(values)
        super().update(values)

    def __ior__(self, values: Any) -> Group:  # type: ignore[override,misc]
        self.update(values)
        return self

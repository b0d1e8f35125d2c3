"""Which layers of a model an adapter's config means, by PEFT's rules for names, and the shortest names for a choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from genesis import nn
from genesis.errors import GenesisError, nearest
from genesis.files.paths import quote
from genesis_models.adapters.config import ALL_LINEAR, MERGE, AdapterConfig
from genesis_models.adapters.patterns import match_names

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Target:
    """A layer that gets an adapter."""

    linear: nn.Linear
    r: int
    alpha: float


def targets(
    model: nn.Module, config: AdapterConfig, kind: type[GenesisError], where: str, *, strict: bool
) -> dict[str, Target]:
    """The layers that `config` means by PEFT's rules, in the model's order.

    Args:
        kind, where: of the error.
        strict: each entry of `target_modules` must mean a layer.

    Raises:
        GenesisError: of class `kind`.
    """
    modules = {name: module for name, module in model.named_modules() if name and not is_part(name)}
    modules.setdefault(HEAD, model)  # one that is the embedding can be named, too
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and name != HEAD}
    chosen = _chosen(list(modules), list(linears), config, kind, where, strict=strict)
    for name in chosen:
        if name in linears:
            continue
        what = f"{quote(name)} is a module of class {type(modules[name]).__name__}; adapters are of linear layers"
        next = f"name linear layers: {_ends(linears)}"
        if name == HEAD:
            what = "the head gets no adapter: the loss multiplies its weight in pieces, without a low-rank path"
            next = "leave lm_head out of target_modules; modules_to_save can have it: the head is then trained whole"
        if not strict and name in (HEAD, EMBEDDING):
            is_tied = getattr(model, HEAD, None) is None
            next = "train it with modules_to_save; the head is the embedding, and PEFT's merge would change both"
            next = next if is_tied else MERGE
        raise kind(what, where=where, next=next)
    if not chosen:
        what = f"target_modules {quote(config.target_modules)} means no layer of the model"
        raise kind(what, where=where, next=f"name linear layers: {_ends(linears)}")
    ranks = _by_pattern(chosen, config.rank_pattern, config.r, kind, where)
    alphas = _by_pattern(chosen, config.alpha_pattern, config.alpha, kind, where)
    return {name: Target(linears[name], ranks[name], alphas[name]) for name in chosen}


def saved_modules(
    model: nn.Module, config: AdapterConfig, chosen: Iterable[str], kind: type[GenesisError], where: str
) -> list[str]:
    """The modules that are trained and saved whole: as in PEFT those whose names end in an entry of `modules_to_save`.

    Args:
        chosen: the layers that get adapters.

    Raises:
        GenesisError: of class `kind`; an entry is not the end of a name, or a module has an adapter.
    """
    names = dict.fromkeys([*(name for name, _ in model.named_modules() if name and not is_part(name)), HEAD])
    for entry in config.modules_to_save:
        if not any(name.endswith(entry) for name in names):
            meant = nearest(entry, {end: None for name in names for end in (name, name.rpartition(".")[2])})
            next = "name modules such as embed_tokens, lm_head or norm" if meant is None else f"did you mean {meant}?"
            raise kind(f"modules_to_save has {quote(entry)}, which no module's name ends in", where=where, next=next)
    found = [name for name in names if name.endswith(config.modules_to_save)]
    if config.ensure_weight_tying and model.lm_head is None:
        found = list(dict.fromkeys(EMBEDDING if name == HEAD else name for name in found))
    for name in found:
        if any(f"{layer}.".startswith(f"{name}.") for layer in chosen):
            what = f"{name} is in modules_to_save, and a layer of it gets an adapter"
            raise kind(what, where=where, next="leave it out of modules_to_save or of target_modules")
    return found


def _ends(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _chosen(
    names: list[str], linears: list[str], config: AdapterConfig, kind: type[GenesisError], where: str, *, strict: bool
) -> list[str]:
    """The names of modules that `target_modules` means less those of `exclude_modules`."""
    wanted = config.target_modules
    if isinstance(wanted, str):
        is_all = wanted.lower() == ALL_LINEAR
        found = set(linears) if is_all else _matching(wanted, names, kind, where)
    else:
        if strict:
            _check_entries(wanted, names, linears, kind, where)
        found = {name for name in names if name in wanted}
        found |= _in_layers({name for name in names if _ends_in(name, wanted)} - found, config, kind, where)
    excluded = config.exclude_modules
    if isinstance(excluded, str):
        found -= _matching(excluded, names, kind, where)
    else:
        found -= {name for name in names if name in excluded or _ends_in(name, excluded)}
    return [name for name in names if name in found]


def _matching(pattern: str, names: list[str], kind: type[GenesisError], where: str) -> set[str]:
    found = match_names("{}", [pattern], names, kind=kind, where=where)[0]
    return {name for name, match in zip(names, found, strict=True) if match is not None}


def _ends_in(name: str, ends: tuple[str, ...]) -> bool:
    return any(name.endswith(f".{end}") for end in ends)


def _check_entries(
    entries: tuple[str, ...], names: list[str], linears: list[str], kind: type[GenesisError], where: str
) -> None:
    known = {end: None for name in linears for end in (name, name.rpartition(".")[2])}
    for entry in entries:
        if any(name == entry or name.endswith(f".{entry}") for name in names):
            continue
        meant = nearest(entry, known)
        ends = _ends(linears)
        next = f"did you mean {meant}?" if meant is not None else f"name linear layers: {ends}, or {ALL_LINEAR}"
        raise kind(f"target_modules has {quote(entry)}, which is no layer of the model", where=where, next=next)


def _in_layers(names: set[str], config: AdapterConfig, kind: type[GenesisError], where: str) -> set[str]:
    """Those of `names` whose layer's index is one of `layers_to_transform`."""
    if not config.layers_to_transform:
        return names
    ordered = sorted(names)
    patterns = config.layers_pattern or (r"[^.]*",)
    form = r"(?:^|.*?\.){}\.(?P<idx>\d+)\." if config.layers_pattern else r".*?\.{}\.(?P<idx>\d+)\."
    found = match_names(form, patterns, ordered, kind=kind, where=where)
    indices = [next((row[i] for row in found if row[i] is not None), None) for i in range(len(ordered))]
    wanted = config.layers_to_transform
    return {name for name, index in zip(ordered, indices, strict=True) if index and int(index) in wanted}


def _by_pattern(
    names: list[str], patterns: Mapping[str, N], default: N, kind: type[GenesisError], where: str
) -> dict[str, N]:
    """For each of `names` the value of the first pattern that its end matches, else the default."""
    keys = list(patterns)
    found = match_names(r"(.*\.)?({})$", keys, names, kind=kind, where=where)
    first = [
        next((k for k, row in zip(keys, found, strict=True) if row[i] is not None), None) for i in range(len(names))
    ]
    return {name: default if key is None else patterns[key] for name, key in zip(names, first, strict=True)}


def is_part(name: str) -> bool:
    """Whether it is a part of an adapter."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B", "lora_magnitude_vector")


def shortened(chosen: set[str], names: list[str]) -> list[str]:
    """The ends of names that mean just `chosen` of `names`, sorted; whole names where ends do not."""
    by_end: dict[str, set[str]] = {}
    for name in names:
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    found = [[end] if same <= chosen else sorted(same & chosen) for end, same in by_end.items() if same & chosen]
    return sorted(name for part in found for name in part)


def pattern_of(values: Mapping[str, N], default: N) -> dict[str, N]:
    """The shortest pattern that gives each name its value."""
    found: dict[str, N] = {}
    for value in sorted(set(values.values()) - {default}):
        chosen = {name for name, its in values.items() if its == value}
        found |= dict.fromkeys(shortened(chosen, list(values)), value)
    return found

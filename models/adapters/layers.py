"""Finds the layers that an adapter config targets by PEFT's rules for names, and adapts them.

A layer that gets an adapter keeps its name, so its block remains fused. Names are matched by regular expressions from
files. Python's `re` takes exponential time for some of them and has no time limit. Expressions that repeat or branch
therefore run in a child process with one second of processor time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from genesis import nn, no_grad
from genesis.errors import ConfigError, GenesisError, UsageError, nearest
from genesis.files.paths import quote
from genesis.random import Generator
from genesis_models.adapters.config import ALL_LINEAR, MAX_PATTERNS, MERGE, AdapterConfig

MAX_CHARACTERS = 4096  # in a pattern
N = TypeVar("N", int, float)
M = TypeVar("M", bound=nn.Module)
HEAD, EMBEDDING, SCORE = "lm_head", "model.embed_tokens", "score"
CPU_SECONDS, WALL_SECONDS = 1, 60  # the wall time is generous for a busy machine
# Patterns without repetition or branches take time proportional to the name.
_PLAIN = re.compile(r"[\w.^$-]*")
_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
is_whole, expressions, names = json.load(sys.stdin)
found = []
for expression in map(re.compile, expressions):
    match = expression.fullmatch if is_whole else expression.match
    found.append([None if (m := match(name)) is None else m.groupdict().get("idx") or "" for name in names])
json.dump(found, sys.stdout)
"""


Fail = Callable[..., GenesisError]  # builds an error at a fixed place from what is wrong and what to do next


def match_names(form: str, patterns: Sequence[str], names: Sequence[str], fail: Fail) -> list[list[str | None]]:
    """Return a row for each pattern with a match for each name: the group `idx` or "" if it matches, otherwise None.

    Args:
        form: expression matched from the name's start, with `{}` for the pattern; a bare `{}` matches the full name.

    Raises:
        GenesisError: built by `fail`; a pattern is not a regular expression, is too long, or takes too long.
    """
    # Bound the work, and check the syntax of the patterns and of the expressions around them.
    if len(patterns) > MAX_PATTERNS:
        raise fail(f"{len(patterns):,} patterns exceed the limit of {MAX_PATTERNS:,}", next="name the layers by suffix")
    whole, next = [form.replace("{}", each) for each in patterns], "write a Python regular expression, or list names"
    for pattern, embedded in zip(patterns, whole, strict=True):
        if len(pattern) > MAX_CHARACTERS:
            raise fail(f"a pattern of {len(pattern):,} characters exceeds {MAX_CHARACTERS:,}", next=next)
        try:
            re.compile(pattern)
            re.compile(embedded)
        except (re.error, RecursionError, OverflowError) as error:
            raise fail(f"{quote(pattern)} is not a regular expression: {error}", next=next) from None
    # Simple patterns run here, all others in a child process with a time limit.
    if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        matches = [re.compile(each).fullmatch if form == "{}" else re.compile(each).match for each in whole]
        return [
            [None if (m := match(name)) is None else m.groupdict().get("idx") or "" for name in names]
            for match in matches
        ]
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(CPU_SECONDS)]
    given = json.dumps([form == "{}", whole, names])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=WALL_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        shown = quote(max(patterns, key=len))
        what = f"matching {shown} with the names of the model's layers takes over {CPU_SECONDS} s"
        raise fail(what, next="write it without nested repetition, or name the layers") from None
    found: list[list[str | None]] = json.loads(done.stdout)
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """A layer that gets an adapter, with its rank and alpha."""

    linear: nn.Linear
    r: int
    alpha: float


def targets(model: nn.Module, config: AdapterConfig, fail: Fail, *, strict: bool) -> dict[str, Target]:
    """Return the layers that `config` targets by PEFT's rules, in the model's order.

    Args:
        strict: require that each entry of `target_modules` matches a layer.

    Raises:
        GenesisError: built by `fail`.
    """
    modules = {name: module for name, module in model.named_modules() if name and not is_part(name)}
    modules.setdefault(HEAD, model)  # a tied head can be named too
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and name != HEAD}
    names, wanted = list(modules), config.target_modules
    lines = f"name linear layers: {', '.join(dict.fromkeys(map(_end, linears)))}"
    # Find the modules that `target_modules` means, without the excluded ones.
    if isinstance(wanted, str):
        found = set(linears) - {SCORE} if wanted.lower() == ALL_LINEAR else _matching(wanted, names, fail)
    else:
        for entry in wanted if strict else ():
            if not _matching((entry,), names, fail):
                meant = nearest(entry, {end: None for name in linears for end in (name, _end(name))})
                next = f"{lines}, or {ALL_LINEAR}" if meant is None else f"did you mean {meant}?"
                raise fail(f"target_modules has {quote(entry)}, which is not a layer of the model", next=next)
        found = {name for name in names if name in wanted}
        found |= _in_layers(_matching(wanted, names, fail) - found, config, fail)
    found -= _matching(config.exclude_modules, names, fail)
    chosen = [name for name in names if name in found]
    # Only linear layers except the head can have adapters.
    for name in chosen:
        if name in linears:
            continue
        what = f"{quote(name)} is a {type(modules[name]).__name__}, but only linear layers can have adapters"
        next = lines
        if name == HEAD:
            what = "the head cannot have an adapter: the loss computes logits in chunks, without a low-rank path"
            next = "remove lm_head from target_modules; modules_to_save can train the whole head"
        if not strict and name in (HEAD, EMBEDDING):
            is_tied = getattr(model, HEAD, None) is None
            next = "train it with modules_to_save; the head is the embedding, and PEFT's merge would change both"
            next = next if is_tied else MERGE
        raise fail(what, next=next)
    if not chosen:
        raise fail(f"target_modules {quote(config.target_modules)} matches no layer of the model", next=lines)
    # Give each layer its rank and alpha.
    ranks = _by_pattern(chosen, config.rank_pattern, config.r, fail)
    alphas = _by_pattern(chosen, config.alpha_pattern, config.alpha, fail)
    return {name: Target(linears[name], ranks[name], alphas[name]) for name in chosen}


def saved_modules(model: nn.Module, config: AdapterConfig, chosen: Iterable[str], fail: Fail) -> list[str]:
    """Return the modules that are trained and saved whole: as in PEFT, names that end in an entry of `modules_to_save`.

    Args:
        chosen: names of the layers that get adapters.

    Raises:
        GenesisError: built by `fail`; no name ends in an entry, or a module contains an adapter.
    """
    names = dict.fromkeys([*(name for name, _ in model.named_modules() if name and not is_part(name)), HEAD])
    for entry in config.modules_to_save:
        if not any(name.endswith(entry) for name in names):
            meant = nearest(entry, {end: None for name in names for end in (name, _end(name))})
            next = "name modules such as embed_tokens, lm_head or norm" if meant is None else f"did you mean {meant}?"
            next = "it belongs to a reward model: objective.name reward trains one" if entry == SCORE else next
            raise fail(f"modules_to_save has {quote(entry)}, but no module's name ends in it", next=next)
    found = [name for name in names if name.endswith(config.modules_to_save)]
    if config.ensure_weight_tying and model.lm_head is None:
        found = list(dict.fromkeys(EMBEDDING if name == HEAD else name for name in found))
    for name in found:
        if any(f"{layer}.".startswith(f"{name}.") for layer in chosen):
            what = f"{name} is in modules_to_save, but one of its layers gets an adapter"
            raise fail(what, next="remove it from modules_to_save or from target_modules")
    return found


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _matching(wanted: str | tuple[str, ...], names: list[str], fail: Fail) -> set[str]:
    """Return the names that a regular expression matches, or that equal or end in one of `wanted`."""
    if not isinstance(wanted, str):
        return {name for name in names if name in wanted or name.endswith(tuple(f".{end}" for end in wanted))}
    found = match_names("{}", [wanted], names, fail)[0]
    return {name for name, match in zip(names, found, strict=True) if match is not None}


def _in_layers(names: set[str], config: AdapterConfig, fail: Fail) -> set[str]:
    """Return the names whose layer index is in `layers_to_transform`."""
    if not config.layers_to_transform:
        return names
    ordered, patterns = sorted(names), config.layers_pattern or (r"[^.]*",)
    form = r"(?:^|.*?\.){}\.(?P<idx>\d+)\." if config.layers_pattern else r".*?\.{}\.(?P<idx>\d+)\."
    columns = zip(*match_names(form, patterns, ordered, fail), strict=True)  # by name
    indices = [next((index for index in column if index is not None), None) for column in columns]
    wanted = config.layers_to_transform
    return {name for name, index in zip(ordered, indices, strict=True) if index and int(index) in wanted}


def _by_pattern(names: list[str], patterns: Mapping[str, N], default: N, fail: Fail) -> dict[str, N]:
    """Return name -> value of the first pattern that matches its end, otherwise the default."""
    found = [*zip(patterns, match_names(r"(.*\.)?({})$", list(patterns), names, fail), strict=True)]
    first = [next((key for key, row in found if row[i] is not None), None) for i in range(len(names))]
    return {name: default if key is None else patterns[key] for name, key in zip(names, first, strict=True)}


def is_part(name: str) -> bool:
    """Whether a module's name is a part of an adapter."""
    return _end(name) in ("lora_A", "lora_B", "lora_magnitude_vector")


def shortened(chosen: set[str], names: list[str]) -> list[str]:
    """Return the ends of names that mean exactly `chosen` of `names`, sorted; full names if the ends are ambiguous."""
    by_end = {end: {name for name in names if _end(name) == end} for end in dict.fromkeys(map(_end, names))}
    found = [[end] if same <= chosen else sorted(same & chosen) for end, same in by_end.items() if same & chosen]
    return sorted(name for part in found for name in part)


def pattern_of(values: Mapping[str, N], default: N) -> dict[str, N]:
    """Return the shortest pattern that maps each name to its value."""
    found: dict[str, N] = {}
    for value in sorted(set(values.values()) - {default}):
        chosen = {name for name, its in values.items() if its == value}
        found |= dict.fromkeys(shortened(chosen, list(values)), value)
    return found


def adapted_layers(model: nn.Module) -> dict[str, nn.LoRALinear]:
    """Return the adapted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's adapters, and of the modules saved whole with them, by name."""
    layers, whole = adapted_layers(model), getattr(model, "modules_to_save", ())
    found = {f"{name}.{part}": p for name, each in layers.items() for part, p in each.named_parameters()}
    found = {name: p for name, p in found.items() if ".lora_" in name}
    return found | {f"{name}.{part}": p for name in whole for part, p in model.get_submodule(name).named_parameters()}


def apply_adapters(model: M, config: AdapterConfig, *, generator: Generator | None = None) -> M:
    """Adapt the layers that `config` targets in place, freeze all other parameters, and return the model.

    Args:
        generator: generator of the values of A; None uses the default one.

    Raises:
        ConfigError: an entry of `target_modules` matches no linear layer, or one of `modules_to_save` no module.
            UsageError: the model has adapters already.
    """
    if adapted_layers(model):
        raise UsageError("the model has adapters already", next="merge them, or load the base model again")
    chosen = targets(model, config, partial(ConfigError, where="target_modules"), strict=True)
    saved = saved_modules(model, config, chosen, partial(ConfigError, where="modules_to_save"))
    adapt(model, chosen, saved, config, generator)
    return model


def adapt(
    model: Any, chosen: Mapping[str, Target], saved: Sequence[str], config: AdapterConfig, generator: Generator | None
) -> None:
    """Give each layer of `chosen` a fresh adapter of its rank and alpha, and freeze all except adapters and `saved`.

    A tied head gets its own weight with the same values if it or the embedding is saved whole.
    """
    model.requires_grad_(False)
    # Untie the head if it or the embedding is trained whole.
    is_tied = model.lm_head is None and getattr(model, SCORE, None) is None
    if {HEAD, EMBEDDING} & set(saved) and is_tied and not config.ensure_weight_tying:
        weight, (rows, columns) = model.head_weight, model.head_weight.shape
        has_values = not nn.init.is_skipped()
        with nn.init.skip_init(), no_grad():
            head = nn.Linear(columns, rows, bias=False, device=weight.device, dtype=weight.dtype)
            if has_values:
                head.weight.copy_(weight)
        model.lm_head = head.requires_grad_(False).train(model.training)
        if (stored := model.stored_types.get(f"{EMBEDDING}.weight")) is not None:
            model.stored_types = {**model.stored_types, f"{HEAD}.weight": stored}
    model.modules_to_save = tuple(saved)
    # Replace the chosen linear layers, and train only adapters and saved modules.
    for name, target in chosen.items():
        path, _, last = name.rpartition(".")
        layer = nn.LoRALinear.from_linear(
            target.linear,
            r=target.r,
            alpha=target.alpha,
            dropout=config.dropout,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            generator=generator,
        )
        setattr(model.get_submodule(path), last, layer)
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)


def adapter_of(model: nn.Module, *, base: str | None = None) -> AdapterConfig:
    """Return the config of a model's adapters; its layers are listed by the ends of their names where unambiguous.

    Args:
        base: folder of the base model.

    Raises:
        UsageError: no layer has an adapter, or the adapters are of different kinds, which PEFT cannot write.
    """
    layers = adapted_layers(model)
    kinds = {(layer.use_rslora, layer.lora_magnitude_vector is not None, layer.dropout) for layer in layers.values()}
    if len(kinds) != 1:
        what = "the model's adapters are of several kinds" if kinds else "the model has no adapters"
        raise UsageError(what, next="give all layers the same use_rslora, use_dora and dropout")
    use_rslora, use_dora, dropout = next(iter(kinds))
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not is_part(name)]
    saved: tuple[str, ...] = getattr(model, "modules_to_save", ())
    ranks = {name: layer.r for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return AdapterConfig(
        r=int(r),
        alpha=alpha,
        target_modules=tuple(shortened(set(layers), linears)),
        dropout=dropout,
        use_rslora=use_rslora,
        use_dora=use_dora,
        rank_pattern=pattern_of(ranks, int(r)),
        alpha_pattern=pattern_of(alphas, alpha),
        modules_to_save=saved,
        ensure_weight_tying=EMBEDDING in saved and model.lm_head is None and getattr(model, SCORE, None) is None,
        base=base,
    )

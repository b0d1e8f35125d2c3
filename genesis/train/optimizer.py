"""Builds frozen parameters, optimizer and schedule from the configuration, and restores the optimizer's state.

Patterns of parameter names have the syntax of file name patterns (`model.layers.[0-3].*`): a dot matches only a dot,
and matching never takes exponential time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from genesis.distributed.group import Group
from genesis.errors import ConfigError, ModelError, escape, nearest
from genesis.optim import OPTIMIZERS, Optimizer, make_schedule
from genesis.optim.saving import StoredTensor
from genesis.tensor import Tensor
from genesis.train.config import OptimConfig


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, Tensor]],
    seed: int,
    accumulation_steps: int = 1,
    ranks: Group | None = None,
    zero: int = 1,
) -> Optimizer:
    """Build the optimizer that `config` names, over flat buffers; vectors (norms, biases) do not decay.

    Args:
        seed: seed of stochastic rounding.
        accumulation_steps: batches over which gradients accumulate.
        ranks: the ranks that train together, see `Optimizer`.
        zero: what they shard, see `Optimizer`.

    Raises:
        ConfigError: a pattern of `lr_factors` matches no trained parameter.
    """
    kind = OPTIMIZERS[config.name]
    offered = {key: getattr(config, key) for key in kind.in_runs if key != "weight_decay"}
    groups, settings = kind.for_run(named_parameters, config.weight_decay or 0.0, offered)
    return kind(
        list(_split_by_factor(groups, config.lr_factors)) if config.lr_factors else groups,
        **settings,
        fused=True,
        seed=seed,
        low_precision=config.low_precision,
        state_dtype=config.state_dtype,
        grad_dtype=config.grad_dtype or ("float32" if accumulation_steps > 1 else None),
        ranks=ranks,
        zero=zero,
    )


def _split_by_factor(groups: Sequence[Mapping[str, Any]], factors: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Split the groups by the learning-rate factors of their parameters."""
    check_patterns(factors, [name for group in groups for name, _ in group["params"]])
    for group in groups:
        parts: dict[float, list[tuple[str, Tensor]]] = {}
        for name, parameter in group["params"]:
            parts.setdefault(factor_of(name, factors), []).append((name, parameter))
        for factor, members in parts.items():
            yield {**group, "params": members, "lr_factor": factor}


def build_schedule(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0, in a run of `steps`."""
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * steps)
    assert config.lr is not None, "the schema fills in the optimizer's default rate"
    schedule = make_schedule(
        config.schedule,
        lr=config.lr,
        total_steps=steps,
        warmup_steps=warmup,
        min_lr_ratio=config.min_lr_ratio,
        decay_ratio=config.decay_ratio,
        step_size=config.step_size,
        step_gamma=config.step_gamma,
    )
    return schedule.lr_at


def overlong_schedule(config: OptimConfig, steps: int) -> str | None:
    """Return a warning if the warm-up, plus the decay of wsd, is longer than the run; otherwise None."""
    warmup, decay = config.warmup_steps or 0, 0
    if config.schedule == "wsd":
        decay = round((config.decay_ratio or 0.0) * steps)
    if warmup > steps:
        ends = build_schedule(config, steps)(steps - 1)
        what = f"optim.warmup_steps {warmup:,} is more than the run's {steps:,} steps"
        return f"warning: {what}: the rate ends at {ends:g} and never reaches {config.lr:g}"
    if warmup and warmup + decay > steps:
        what = f"a warm-up of {warmup:,} steps and a decay of {decay:,} do not fit a run of {steps:,}"
        return f"warning: {what}: the rate jumps after the warm-up"
    return None


def updated_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that have been updated, by name."""
    for group in optimizer.param_groups:
        named = zip(group["param_names"], group["params"], strict=True)
        yield from ((name, parameter) for name, parameter in named if parameter in optimizer.state)


def optimizer_counts(optimizer: Optimizer) -> dict[str, int]:
    """Return how often each parameter was updated, by name."""
    return {name: optimizer.state[parameter]["step"] for name, parameter in updated_parameters(optimizer)}


def restore_optimizer(
    optimizer: Optimizer, arrays: Mapping[str, np.ndarray | StoredTensor], counts: Mapping[str, int]
) -> None:
    """Restore the state from `Snapshot.optimizer` and `optimizer_counts`; the settings come from the configuration.

    A rank reads only its shard of the stored tensors. The parameters must already hold their rounded masters.

    Raises:
        ModelError: this optimizer does not keep an array, or keeps it in another shape.
    """
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    unknown = [key for key in arrays if key.rpartition(".")[0] not in counts] + [n for n in counts if n not in names]
    if unknown:
        raise ModelError(f"the saved optimizer state has {escape(unknown[0])}, which this model does not have")
    state: dict[str, dict[str, Any]] = {name: {"step": int(count)} for name, count in counts.items()}
    for key, value in arrays.items():
        name, _, kind = key.rpartition(".")
        state[name][kind] = value
    by_number = {number: state[name] for number, name in enumerate(names) if name in state}
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


# --- Patterns of names ------------------------------------------------------------------------------------------------


def check_patterns(
    patterns: Iterable[str],
    names: Sequence[str],
    setting: str = "optim.lr_factors",
    kind: str = "trained parameter",
) -> None:
    """Refuse a setting with a pattern that matches none of `names`, which are parameters of this kind.

    Raises:
        ConfigError: with the likely name or pattern, if there is one.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            wider, close = f"*{pattern.strip('*')}*", nearest(pattern, names, 0.5)
            next = f"use names such as {escape(names[len(names) // 2])}"
            if found := [name for name in names if fnmatchcase(name, wider)]:
                next = f"write {escape(wider)}, which matches {escape(found[0])}, for example"
            elif close:
                next = f"did you mean {escape(close)}?"
            raise ConfigError(f"{escape(pattern)} matches no {kind}", where=setting, next=next)


def freeze(named_parameters: Iterable[tuple[str, Tensor]], patterns: Sequence[str]) -> None:
    """Freeze the parameters that `patterns` (the setting `train.freeze`) match: they need no gradients.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    parameters = dict(named_parameters)
    check_patterns(patterns, list(parameters), "train.freeze", "parameter")
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "every parameter is frozen", where="train.freeze", next="remove the pattern that matches them all"
        )


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of the first pattern that matches a parameter; 1 without a match."""
    return next((float(factor) for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)

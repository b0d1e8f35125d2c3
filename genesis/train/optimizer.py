"""From the configuration to what is trained and how: frozen parameters, optimizer, rates; its state to and from files.

A pattern of parameter names is one of file names (`model.layers.[0-3].*`): dots in it are dots, and none takes
exponential time.
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
    """The optimizer that `config` names, over flat buffers; vectors (norms, biases) do not decay.

    Args:
        seed: of stochastic rounding, where an optimizer rounds.
        accumulation_steps: of how many batches gradients are added up.
        ranks, zero: who trains the parameters together, and what they divide; see `Optimizer`.

    Raises:
        ConfigError: a pattern of `lr_factors` names no parameter that is trained.
    """
    kind = OPTIMIZERS[config.name]
    offered = {key: getattr(config, key) for key in kind.in_runs if key != "weight_decay"}
    groups, settings = kind.for_run(named_parameters, config.weight_decay or 0.0, offered)
    return kind(
        list(_by_factor(groups, config.lr_factors)) if config.lr_factors else groups,
        **settings,
        fused=True,
        seed=seed,
        low_precision=config.low_precision,
        state_dtype=config.state_dtype,
        grad_dtype=config.grad_dtype or ("float32" if accumulation_steps > 1 else None),
        ranks=ranks,
        zero=zero,
    )


def _by_factor(groups: Sequence[Mapping[str, Any]], factors: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """The groups divided by the factors of their parameters' learning rates."""
    check_patterns(factors, [name for group in groups for name, _ in group["params"]])
    for group in groups:
        parts: dict[float, list[tuple[str, Tensor]]] = {}
        for name, parameter in group["params"]:
            parts.setdefault(factor_of(name, factors), []).append((name, parameter))
        for factor, members in parts.items():
            yield {**group, "params": members, "lr_factor": factor}


def build_schedule(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of each step of a run of `steps`, counted from 0."""
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * steps)
    assert config.lr is not None, "the schema fills the optimizer's own rate in"
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
    """A warning where the steps of a warm-up, with those of wsd's decay, are more than the run's."""
    warmup, decay = config.warmup_steps or 0, 0
    if config.schedule == "wsd":
        decay = round((config.decay_ratio or 0.0) * steps)
    if warmup > steps:
        ends = build_schedule(config, steps)(steps - 1)
        what = f"optim.warmup_steps {warmup:,} is more than the run's {steps:,} steps"
        return f"warning: {what}: the rate ends at {ends:g} and never reaches {config.lr:g}"
    if warmup and warmup + decay > steps:
        what = f"a warm-up of {warmup:,} steps and a decay of {decay:,} do not fit a run of {steps:,}"
        return f"warning: {what}: the rate jumps behind the warm-up"
    return None


def updated_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The parameters that were updated, by name."""
    for group in optimizer.param_groups:
        named = zip(group["param_names"], group["params"], strict=True)
        yield from ((name, parameter) for name, parameter in named if parameter in optimizer.state)


def optimizer_counts(optimizer: Optimizer) -> dict[str, int]:
    """How often each parameter was updated."""
    return {name: optimizer.state[parameter]["step"] for name, parameter in updated_parameters(optimizer)}


def restore_optimizer(
    optimizer: Optimizer, arrays: Mapping[str, np.ndarray | StoredTensor], counts: Mapping[str, int]
) -> None:
    """Set the state to `Snapshot.optimizer` and `optimizer_counts`; settings stay those of the configuration.

    Of stored tensors a rank reads what it owns; the parameters have the rounded values of their masters already.

    Raises:
        ModelError: arrays that this optimizer does not keep, or of other shapes.
    """
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    unknown = [key for key in arrays if key.rpartition(".")[0] not in counts] + [n for n in counts if n not in names]
    if unknown:
        raise ModelError(f"the saved optimizer state has {escape(unknown[0])}, which this model has not")
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
    """Refuse a setting with a pattern that is the name of no parameter of this kind, which have these names.

    Raises:
        ConfigError: with the name or the pattern that was meant, as far as it can be guessed.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            wider, close = f"*{pattern.strip('*')}*", nearest(pattern, names, 0.5)
            next = f"they have names such as {escape(names[len(names) // 2])}"
            if found := [name for name in names if fnmatchcase(name, wider)]:
                next = f"write {escape(wider)}, which has {escape(found[0])}, say"
            elif close:
                next = f"did you mean {escape(close)}?"
            raise ConfigError(f"{escape(pattern)} is the name of no {kind}", where=setting, next=next)


def freeze(named_parameters: Iterable[tuple[str, Tensor]], patterns: Sequence[str]) -> None:
    """Let the parameters that `patterns`, the setting `train.freeze`, name keep their values: they take no gradient.

    Raises:
        ConfigError: a pattern names no parameter, or nothing is left to train.
    """
    parameters = dict(named_parameters)
    check_patterns(patterns, list(parameters), "train.freeze", "parameter")
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "every parameter is frozen", where="train.freeze", next="leave out the pattern that names them all"
        )


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """The factor of the first pattern that names a parameter; 1 where none does."""
    return next((float(factor) for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)

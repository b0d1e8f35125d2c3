"""The adapters of a model: its linear layers get some, and what it has is found again.

A layer that gets an adapter keeps its name, so a block stays the fused one that it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from genesis import nn, no_grad
from genesis.errors import ConfigError, UsageError
from genesis.random import Generator
from genesis_models.adapters import targets as names
from genesis_models.adapters.config import AdapterConfig
from genesis_models.adapters.targets import EMBEDDING, HEAD, Target, is_part

M = TypeVar("M", bound=nn.Module)


def adapted_layers(model: nn.Module) -> dict[str, nn.LoRALinear]:
    """The layers of a model that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's adapters, and of the modules that are saved whole with them, by name."""
    layers, whole = adapted_layers(model), getattr(model, "modules_to_save", ())
    found = {f"{name}.{part}": p for name, each in layers.items() for part, p in each.named_parameters()}
    found = {name: p for name, p in found.items() if ".lora_" in name}
    return found | {f"{name}.{part}": p for name in whole for part, p in model.get_submodule(name).named_parameters()}


def apply_adapters(model: M, config: AdapterConfig, *, generator: Generator | None = None) -> M:
    """Give the layers that `config` means adapters, in place, and freeze all other parameters; returns the model.

    Args:
        generator: of the values of A; None means the default one.

    Raises:
        ConfigError: an entry of `target_modules` means no linear layer, or one of `modules_to_save` no module.
            UsageError: the model has adapters already.
    """
    if adapted_layers(model):
        raise UsageError("the model has adapters already", next="merge them, or load the base model again")
    chosen = names.targets(model, config, ConfigError, "target_modules", strict=True)
    saved = names.saved_modules(model, config, chosen, ConfigError, "modules_to_save")
    adapt(model, chosen, saved, config, generator)
    return model


def adapt(
    model: Any, chosen: Mapping[str, Target], saved: Sequence[str], config: AdapterConfig, generator: Generator | None
) -> None:
    """Give each layer of `chosen` a fresh adapter of its rank and alpha, and freeze all but that and `saved`."""
    model.requires_grad_(False)
    if {HEAD, EMBEDDING} & set(saved) and model.lm_head is None and not config.ensure_weight_tying:
        _give_head(model)
    model.modules_to_save = tuple(saved)
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


def _give_head(model: Any) -> None:
    """Give a model whose head is its embedding a head of its own, which has the same values."""
    weight = model.head_weight
    rows, columns = weight.shape
    has_values = not nn.init.is_skipped()
    with nn.init.skip_init(), no_grad():
        head = nn.Linear(columns, rows, bias=False, device=weight.device, dtype=weight.dtype)
        if has_values:
            head.weight.copy_(weight)
    model.lm_head = head.requires_grad_(False).train(model.training)
    if (stored := model.stored_types.get(f"{EMBEDDING}.weight")) is not None:
        model.stored_types = {**model.stored_types, f"{HEAD}.weight": stored}


def adapter_of(model: nn.Module, *, base: str | None = None) -> AdapterConfig:
    """The config that gives a model the adapters that it has, its layers listed by the ends of names where these do.

    Args:
        base: the folder of the base model.

    Raises:
        UsageError: no layer has an adapter, or they are of different kinds, which PEFT cannot write.
    """
    layers = adapted_layers(model)
    kinds = {(layer.use_rslora, layer.lora_magnitude_vector is not None, layer.dropout) for layer in layers.values()}
    if len(kinds) != 1:
        what = "its adapters are of several kinds" if kinds else "the model has no adapters"
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
        target_modules=tuple(names.shortened(set(layers), linears)),
        dropout=dropout,
        use_rslora=use_rslora,
        use_dora=use_dora,
        rank_pattern=names.pattern_of(ranks, int(r)),
        alpha_pattern=names.pattern_of(alphas, alpha),
        modules_to_save=saved,
        ensure_weight_tying=EMBEDDING in saved and model.lm_head is None,
        base=base,
    )

"""The adapters of a model: its linear layers get some, and what it has is found again.

A layer that gets an adapter keeps its name, so a block stays the fused one that it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from genesis import nn
from genesis.errors import ConfigError, UsageError
from genesis.random import Generator
from genesis_models.adapters.config import AdapterConfig
from genesis_models.adapters.targets import Target, is_part, pattern_of, shortened, targets

__all__ = ["adapt", "adapted_layers", "adapter_of", "adapter_parameters", "adapter_parts", "apply_adapters"]

M = TypeVar("M", bound=nn.Module)


def adapted_layers(model: nn.Module) -> dict[str, nn.LoRALinear]:
    """The layers of a model that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's adapters, by name."""
    layers = adapted_layers(model)
    return {f"{name}.{part}": p for name, layer in layers.items() for part, p in adapter_parts(layer)}


def adapter_parts(layer: nn.LoRALinear) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a layer's adapter, by their names in the layer: `lora_A.weight` and so on."""
    return ((name, p) for name, p in layer.named_parameters() if name.startswith("lora_"))


def apply_adapters(model: M, config: AdapterConfig, *, generator: Generator | None = None) -> M:
    """Give the layers that `config` means adapters, in place, and freeze all other parameters; returns the model.

    Args:
        generator: of the values of A; None means the default one.

    Raises:
        ConfigError: an entry of `target_modules` means no linear layer. UsageError: the model has adapters already.
    """
    if adapted_layers(model):
        raise UsageError("the model has adapters already", next="merge them, or load the base model again")
    adapt(model, targets(model, config, ConfigError, "target_modules", strict=True), config, generator)
    return model


def adapt(model: nn.Module, chosen: Mapping[str, Target], config: AdapterConfig, generator: Generator | None) -> None:
    """Give each layer of `chosen` a fresh adapter of its rank and alpha, and freeze all other parameters."""
    model.requires_grad_(False)
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
        base=base,
    )

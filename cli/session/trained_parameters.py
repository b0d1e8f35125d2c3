"""Which parameters of its model a run trains: for the run itself, for its memory plan, and for its validation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from genesis.errors import ConfigError, ModelError, escape
from genesis.nn import LoRALinear, init
from genesis.train.config import LORA, Config, LoraConfig, fine_tuning_defaults
from genesis.train.config_help import show
from genesis.train.optimizer import check_factors, freeze
from genesis_models.adapters import (
    AdapterConfig,
    adapted_layers,
    apply_adapters,
    apply_adapters_of,
    read_adapter,
)
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import ARCHITECTURES
from genesis_models.source import hub_advice, newest_checkpoint

# Settings that may differ from those of the adapter in `lora.init_from`: they change nothing that was trained.
FREE = ("dropout",)


def filled_lora(lora: LoraConfig, recorded: LoraConfig | None) -> LoraConfig:
    """`lora` with what it leaves to the adapter in `init_from`.

    Args:
        recorded: of the run that is resumed, which has them already.

    Raises:
        ConfigError: a setting contradicts the adapter's. ModelError: that is no adapter.
    """
    if lora.init_from is None:
        return lora
    if recorded is not None and recorded.init_from == lora.init_from:
        found = recorded.model_dump()
    else:
        found = _settings_of(_read_first(lora.init_from))
    for key in LORA:
        given = getattr(lora, key)
        if given is not None and key not in FREE and not _same(given, found[key]):
            what = f"lora.{key} is {show(given)}, and that of the adapter in lora.init_from {show(found[key])}"
            next = f"remove lora.{key}: training goes on with what the adapter has"
            raise ConfigError(what, where=escape(lora.init_from), next=next)
    return lora.model_copy(update={key: found[key] for key in LORA if getattr(lora, key) is None})


def _read_first(folder: str) -> AdapterConfig:
    """The config of the adapter that training starts from. Raises: ModelError, with what the folder is instead."""
    try:
        return read_adapter(folder)
    except ModelError as error:
        newest, advice = newest_checkpoint(folder), hub_advice(folder)
        next = error.next if newest is None else f"name its newest checkpoint: {escape(newest)}"
        raise ModelError(
            error.what, where=error.where or "lora.init_from", next=next if advice is None else f"{next}; {advice}"
        ) from error


def _settings_of(adapter: AdapterConfig) -> dict[str, Any]:
    settings = {key: getattr(adapter, key) for key in LORA}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _same(one: Any, other: Any) -> bool:
    return sorted(one) == sorted(other) if isinstance(one, list) and isinstance(other, list) else bool(one == other)


def select_trained(config: Config, model: CausalLM, adapter: str | os.PathLike[str] | None = None) -> None:
    """Give `model` the adapters of a run, with fresh values, and freeze what it does not learn.

    Args:
        adapter: the folder of one that went on from `lora.init_from`, which may be gone.

    Raises:
        ConfigError: a pattern names no parameter or layer, or nothing is left to train. ModelError: the adapter in
            `lora.init_from` cannot be read or is not of this model.
    """
    lora = config.lora
    if lora is not None and lora.init_from is not None:
        apply_adapters_of(model, lora.init_from if adapter is None else adapter, dropout=lora.dropout)
    elif lora is not None:
        try:
            apply_adapters(model, _adapter_config(lora))
        except ConfigError as error:
            raise ConfigError(error.what, where=f"lora.{error.where}", next=error.next) from error
    freeze(model.named_parameters(), config.train.freeze)


def _adapter_config(lora: LoraConfig) -> AdapterConfig:
    settings: dict[str, Any] = {key: getattr(lora, key) for key in LORA}
    listed = {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    return AdapterConfig(**settings | listed)


def check_trained(config: Config, shape: ModelConfig, adapter: str | os.PathLike[str] | None = None) -> list[str]:
    """Check the settings that name parts of the model, without the memory of its weights; returns `trained_lines`.

    Raises:
        ConfigError, ModelError: as in `select_trained`; ConfigError: of `optim.lr_factors`.
    """
    with init.shapes_only():
        model = ARCHITECTURES[shape.model_type](shape)
        select_trained(config, model, adapter)
    check_factors(config.optim.lr_factors, [name for name, p in model.named_parameters() if p.requires_grad])
    return list(trained_lines(config, model))


def trained_lines(config: Config, model: CausalLM) -> Iterator[str]:
    """What is trained, and which settings have the defaults of fine-tuning, in a line each; nothing from scratch."""
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    share = f"{trained:,} of {total:,} parameters are trained, {100 * trained / total:.3g} %"
    if config.lora is not None:
        layers = adapted_layers(model)
        whole = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in model.modules_to_save))
        yield f"{_adapters_line(layers)}{f'; {whole} as a whole' if whole else ''}: {share}"
        yield from _wide_lines(layers)
    elif config.model.path is not None or trained < total:
        yield f"all {total:,} parameters are trained" if trained == total else share
    chosen = fine_tuning_defaults(config)
    if chosen:
        yield _defaults_line(config, chosen)


def _adapters_line(layers: Mapping[str, LoRALinear]) -> str:
    one = next(iter(layers.values()))
    kind = ("DoRA" if one.lora_magnitude_vector is not None else "LoRA") + (", rank-stabilized" * one.use_rslora)
    ranks, scalings = ({getattr(layer, key) for layer in layers.values()} for key in ("r", "scaling"))
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    sizes = f"r {_spread(ranks)}, scaling {_spread(scalings)}"
    return f"{kind}: {sizes}, on {len(layers):,} layers ({ends})"


def _wide_lines(layers: Mapping[str, LoRALinear]) -> Iterator[str]:
    """Which ranks are larger than that of the matrix beside them, in a line."""
    wide = {name: layer for name, layer in layers.items() if layer.r > min(layer.weight.shape)}
    if wide:
        name, layer = next(iter(wide.items()))
        rows, columns = layer.weight.shape
        others = f" (one of {len(wide):,} such layers)" if len(wide) > 1 else ""
        yield (
            f"warning: r {layer.r} is more than the rank that the matrix of {escape(name)}, {rows} x {columns}, can"
            f" have{others}: r {min(rows, columns)} learns as much there"
        )


def _spread(values: set[float]) -> str:
    return " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))


def _defaults_line(config: Config, chosen: Mapping[str, float | bool]) -> str:
    """What the schema filled in, and why."""
    kind = "in full" if config.lora is None else "with adapters"
    values = ", ".join(f"{key} {show(value)}" for key, value in chosen.items())
    return f"defaults of fine-tuning {kind}, as model.path names a trained model: {values}"

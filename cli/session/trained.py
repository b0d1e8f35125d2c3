"""Which parameters of its model a run trains: for the run itself, for its memory plan, and for its validation."""

from __future__ import annotations

from genesis.nn import init
from genesis.train.config import Config
from genesis.train.parameters import check_factors, freeze
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import ARCHITECTURES

__all__ = ["check_trained", "select_trained"]


def select_trained(config: Config, model: CausalLM) -> None:
    """Freeze what `model` does not learn in a run.

    Raises:
        ConfigError: a pattern names no parameter, or nothing is left to train.
    """
    freeze(model.named_parameters(), config.train.freeze)


def check_trained(config: Config, shape: ModelConfig) -> None:
    """Check the settings that name parts of the model, without the memory of its weights.

    Raises:
        ConfigError: as in `select_trained`, and of `optim.lr_factors`.
    """
    with init.shapes_only():
        model = ARCHITECTURES[shape.model_type](shape)
        select_trained(config, model)
    check_factors(config.optim.lr_factors, [name for name, p in model.named_parameters() if p.requires_grad])

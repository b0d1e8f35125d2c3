"""The shape of a model that a command names: a preset, a config.json, a model folder, or a shipped recipe's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genesis.errors import ModelError
from genesis.files.boundary import boundary
from genesis_cli import recipes

if TYPE_CHECKING:
    from genesis_models.config import ModelConfig


def shape_named(size: str, option: str) -> ModelConfig:
    """The shape called `size`, which was given for `option`.

    Raises:
        UsageError: there is no such size. ModelError: the file is malformed, or of a model that Genesis does not have.
    """
    from genesis_cli.session.bench.cases import shape_of
    from genesis_models.config import ModelConfig

    names = recipes.names()
    if size in names:
        raw = recipes.load(size, []).model.config
        if raw is not None:
            return ModelConfig.from_dict(raw, where=size)
    with boundary(ModelError, "looking for the model", size):
        return shape_of(size, option, names)

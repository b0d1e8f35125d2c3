"""The configuration that a command names: a file, or by its bare name a recipe shipped with Genesis."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from genesis.errors import ConfigError, escape, nearest
from genesis.io.boundary import boundary
from genesis.io.paths import exists

if TYPE_CHECKING:
    from genesis.train.config import Config

# Settings that name a model.
MODELS = (("model", "path"), ("data", "tokenizer"), ("lora", "init_from"))

__all__ = ["configured", "load", "names", "source", "text_of"]


def names() -> list[str]:
    """Names of the shipped recipes."""
    with boundary(ConfigError, "listing the recipes"):
        found = [file.name for file in files("genesis_configs").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def text_of(name: str) -> str:
    """The text of the shipped recipe called `name`."""
    file = files("genesis_configs") / f"{name}.yaml"
    with boundary(ConfigError, "reading the recipe", str(file)):
        return file.read_text(encoding="utf-8")


def load(name: str, overrides: Sequence[str]) -> Config:
    """The configuration called `name`: `configured` of its `source`. Raises: ConfigError, UsageError: as they do."""
    return configured(*source(name), overrides)


def source(name: str) -> tuple[str | bytes, str]:
    """The text of the configuration called `name`, and its name in errors; a file takes precedence over a recipe.

    Raises:
        ConfigError: there is no such file or recipe.
    """
    from genesis.io.owner import stranger
    from genesis.train.config_file import read_source

    with boundary(ConfigError, "looking for the configuration", name):
        is_there = "\0" in name or exists(name)
    if not is_there:
        if name in names():
            return text_of(name), f"{name}.yaml (shipped with Genesis)"
        close = nearest(Path(name).stem, names())
        next = f"did you mean the recipe {close}?" if close else f"the shipped recipes are: {', '.join(names())}"
        raise ConfigError("there is no such file or recipe", where=escape(name), next=next)
    if name in names() and (user := stranger(name)) is not None:
        raise ConfigError(
            f"the file {name} in this folder belongs to user {user}, and a recipe has the same name",
            where=escape(Path(name).absolute()),
            next=f"write ./{name} for the file, or call the recipe from another folder",
        )
    return read_source(name), escape(name)


def configured(text: str | bytes, name: str, overrides: Sequence[str]) -> Config:
    """The configuration in a text. Names of models on the hub are replaced with the folders that have what was pulled.

    Raises:
        ConfigError: it is invalid. UsageError: an override is malformed.
    """
    from genesis.train.config_file import parse_config

    return _on_this_machine(parse_config(text, name, overrides))


def _on_this_machine(config: Config) -> Config:
    """`config` with the folders that names on the hub stand for."""
    from genesis.io.hub_cache import local_path

    for section, key in MODELS:
        found = getattr(config, section)
        named = None if found is None else getattr(found, key)
        if named is not None and (folder := local_path(named)) != named:
            config = config.model_copy(update={section: found.model_copy(update={key: folder})})
    return config

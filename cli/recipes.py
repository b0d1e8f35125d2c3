"""Loads the configuration that a command names, a file or a shipped recipe; `genesis recipes` lists the recipes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import ConfigError, ModelError, UsageError, escape, nearest
from genesis.files.boundary import boundary
from genesis.files.paths import exists

if TYPE_CHECKING:
    from genesis.train.config import Config
    from genesis.train.config_file import Overrides
    from genesis_models.config import ModelConfig

# Settings that name a model.
MODELS = (("model", "path"), ("data", "tokenizer"), ("lora", "init_from"))


def names() -> list[str]:
    """Return the names of the shipped recipes."""
    with boundary(ConfigError, "listing the recipes"):
        found = [file.name for file in files("genesis_configs").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes to which a shell completes `incomplete`."""
    return [name for name in names() if name.startswith(incomplete)]


def text_of(name: str) -> str:
    """Return the text of the shipped recipe `name`."""
    file = files("genesis_configs") / f"{name}.yaml"
    with boundary(ConfigError, "reading the recipe", str(file)):
        return file.read_text(encoding="utf-8")


def load(name: str, overrides: Sequence[str]) -> Config:
    """Return the configuration `name`; a file of that name takes precedence over a recipe. Hub names of models are
    replaced with the folders of their pulled copies.

    Raises:
        ConfigError: the file or recipe does not exist, or is invalid. UsageError: an override is malformed.
    """
    return _configured(*_source(name), overrides)


def load_run(name: str, overrides: Sequence[str], *, resumes: bool) -> tuple[Config, Overrides]:
    """Return the configuration as `load` does, and the overrides for the run's record.

    A resumed run also uses the overrides of its record, and `name` may be its folder.

    Raises:
        ConfigError, UsageError: as in `load`. ConfigError: as in `recorded_overrides`.
    """
    from genesis.train.config_file import RESOLVED, combined, output_dir

    typed = list(overrides)
    if resumes and os.path.isfile(record := os.path.join(name, RESOLVED)):
        typed.insert(0, f"train.output_dir={json.dumps(name, ensure_ascii=False)}")
        name = record
    text, shown = _source(name)
    if not resumes or (output := output_dir(text, shown, typed)) is None:
        return _configured(text, shown, typed), combined(text, shown, typed, {})
    from genesis_cli.session.run_folder import recorded_overrides

    recorded = recorded_overrides(output)
    is_record = recorded is not None and os.path.realpath(name) == os.path.realpath(os.path.join(output, RESOLVED))
    kept = combined(text, shown, typed, recorded or {}, is_record=is_record)
    words = typed if is_record else [f"{key}={override.text}" for key, override in kept.items()]
    return _configured(text, shown, words), kept


def _source(name: str) -> tuple[str | bytes, str]:
    """Return the text of the configuration `name`, and its name for errors."""
    from genesis.files.trust import foreign_owner
    from genesis.train.config_file import read_source

    with boundary(ConfigError, "looking for the configuration", name):
        is_there = "\0" in name or exists(name)
    if not is_there:
        if name in names():
            return text_of(name), f"{name}.yaml (shipped with Genesis)"
        close = nearest(Path(name).stem, names())
        next = f"did you mean the recipe {close}?" if close else f"the shipped recipes are: {', '.join(names())}"
        raise ConfigError("the file or recipe does not exist", where=escape(name), next=next)
    if name in names() and (user := foreign_owner(name)) is not None:
        what = f"the file {name} in this folder belongs to user {user}, and a recipe has the same name"
        next = f"write ./{name} to use the file, or run the command in another folder to use the recipe"
        raise ConfigError(what, where=escape(Path(name).absolute()), next=next)
    return read_source(name), escape(name)


def _configured(text: str | bytes, name: str, overrides: Sequence[str]) -> Config:
    """Return the configuration with hub names replaced by the folders of their pulled copies."""
    from genesis.files.hub import local_path
    from genesis.train.config_file import parse_config

    config = parse_config(text, name, overrides)
    for section, key in MODELS:
        found = getattr(config, section)
        named = None if found is None else getattr(found, key)
        if named is not None and (folder := local_path(named)) != named:
            config = config.model_copy(update={section: found.model_copy(update={key: folder})})
    return config


def shape_named(size: str, option: str) -> ModelConfig:
    """Return the shape `size` given for `option`: a preset, a config.json, a model folder, or a recipe's model.

    Weights are not read.

    Raises:
        UsageError: the size is unknown. ModelError: the file is malformed, or its architecture is unknown.
    """
    from genesis.files.hf import read_json
    from genesis_models.config import ModelConfig
    from genesis_models.folder import read_config
    from genesis_models.registry import PRESETS, preset

    shipped = names()
    raw = load(size, []).model.config if size in shipped else preset(size) if size in PRESETS else None
    if raw is not None:
        return ModelConfig.from_dict(raw, where=size if size in shipped else option)
    with boundary(ModelError, "looking for the model", size):
        if Path(size).is_dir():
            return read_config(Path(size))
        if Path(size).is_file():
            return ModelConfig.from_dict(read_json(Path(size)), where=escape(size))
    known = (*PRESETS, *shipped)
    holding = [name for name in known if size and size.lower() in name.lower()]
    near = holding[0] if holding else nearest(size, known, 0.5)
    advice = f"did you mean {near}? " if near else ""
    what = f"{escape(size)!r} is neither a model size nor a file"
    raise UsageError(what, where=option, next=f"{advice}sizes: {', '.join(known)}")


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Recipe to print; lists all by default.", autocompletion=complete_recipe),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Write the recipe to NAME.yaml in this folder.")] = False,
) -> None:
    """List the recipes, print one, or copy it.

    A recipe is a complete configuration: genesis train NAME runs it.

    Example: genesis recipes quickstart --copy
    """
    from genesis.files.atomic import write_file
    from genesis_cli.session.init import check_new

    known = names()
    if name is None:
        width = max(map(len, known))
        for each in known:
            comment = text_of(each).partition("\n#\n")[0]
            sentence = " ".join(line.removeprefix("#").strip() for line in comment.splitlines()).partition(". ")[0]
            print(f"{each.ljust(width)}  {sentence.rstrip('.')}")
        return
    if name not in known:
        near = nearest(name, known)
        next = f"did you mean {near}?" if near else f"recipes: {', '.join(known)}"
        raise UsageError(f"the recipe {name} does not exist", where="NAME", next=next)
    if not copy:
        print(text_of(name), end="")
        return
    path = Path(f"{name}.yaml")
    check_new(path, force=False)
    write_file(path, text_of(name).encode())
    print(f"wrote {path}; next: genesis train {path}")

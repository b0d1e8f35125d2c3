"""`genesis data`: shows training data without training."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import DataError, UsageError
from genesis.files.boundary import fitting

if TYPE_CHECKING:
    from genesis.train.config import Config

_OVERRIDE = re.compile(r"([a-z]+\.[a-z_]+(\.\w+)*|objective)=")

data = typer.Typer(help="Inspect training data.", add_completion=False, rich_markup_mode=None)


@data.callback()
def _about() -> None:
    """Inspect training data."""


@data.command("preview")
def preview(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|SOURCE...",
            help="YAML file or recipe, or data files, folders and globs; then settings as SECTION.KEY=VALUE.",
        ),
    ],
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=0, help="Samples to print.")] = 3,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FOLDER", help="Model folder with the tokenizer and template; weights are not read."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", help="Tokens in a packed sequence.  [default: the configuration's]"),
    ] = None,
) -> None:
    """Show what a run would train on.

    Prints samples with targets marked, lengths, and how full packed rows are. It trains nothing and writes nothing.

    Example: genesis data preview chats.jsonl --model qwen
    """
    from genesis.train.output import Output

    config = _config(words, model, seq_len)
    from genesis_cli import session

    output = Output(sys.stdout)
    with fitting(DataError, "looking at the data"):
        session.preview(config, samples=samples, output=output, progress=Output(sys.stderr))
    output.check()


def _config(words: list[str], model: str | None, seq_len: int | None) -> Config:
    """Return the named configuration, or one for the named sources. Raises: UsageError, ConfigError."""
    from genesis.train.strict_yaml import emit, emit_value
    from genesis_cli import recipes

    names = [word for word in words if not _OVERRIDE.match(word)]
    overrides = [word for word in words if _OVERRIDE.match(word)]
    if seq_len is not None:
        overrides.append(f"data.seq_len={seq_len}")
    # A configuration or a recipe, possibly with another model.
    if len(names) == 1 and (names[0] in recipes.names() or names[0].lower().endswith((".yaml", ".yml"))):
        given = [] if model is None else ["model.preset=null", "model.config=null", f"model.path={emit_value(model)}"]
        return recipes.load(names[0], [*given, *overrides])
    # Sources only: the model folder determines tokenizer, template and length.
    if not names:
        raise UsageError("no data are named", where="command line", next="name a configuration or data files")
    if model is None:
        next = "add --model FOLDER, which provides the tokenizer and template"
        raise UsageError("the sources do not determine a tokenizer", where="command line", next=next)
    from genesis.files.hub import local_path
    from genesis.train.config import DataConfig
    from genesis.train.config_file import parse_config
    from genesis_models.folder import read_config

    folder = local_path(model)
    length = min(DataConfig.model_fields["seq_len"].default, read_config(folder).packed_length)
    raw = {
        "model": {"path": folder},
        "data": {"train": names, "seq_len": length, "eval_fraction": 0.0},
        "train": {"output_dir": "none", "steps": 1},  # required, but unused
    }
    return parse_config(emit(raw), "command line", overrides)

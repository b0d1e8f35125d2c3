"""`genesis data`: looks at training data without training."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import DataError, UsageError
from genesis.files.boundary import fitting

if TYPE_CHECKING:
    from genesis.train.config import Config

_OVERRIDE = re.compile(r"[a-z]+\.[a-z_]+(\.\w+)*=")

data = typer.Typer(help="Look at training data.", add_completion=False, rich_markup_mode=None)


@data.callback()
def _about() -> None:
    """Look at training data."""


@data.command("preview")
def preview(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|SOURCE...",
            help="YAML file or recipe, or files, folders and globs of data; then settings as SECTION.KEY=VALUE.",
        ),
    ],
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=0, help="Samples to print.")] = 3,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FOLDER", help="Model folder whose tokenizer and template are used; its weights are not."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", help="Tokens in a packed sequence.  [default: the configuration's]"),
    ] = None,
) -> None:
    """Show what a run would learn from: samples with their targets marked, lengths, how full packed rows are.

    Nothing is trained and nothing is written. For instance: genesis data preview chats.jsonl --model qwen
    """
    from genesis.train.output import Output

    config = _config(words, model, seq_len)
    from genesis_cli import session

    output = Output(sys.stdout)
    with fitting(DataError, "looking at the data"):
        session.preview(config, samples=samples, output=output, progress=Output(sys.stderr))
    output.check()


def _config(words: list[str], model: str | None, seq_len: int | None) -> Config:
    """The configuration that is named, or one for the sources that are named. Raises: UsageError, ConfigError."""
    from genesis.train.strict_yaml import emit, emit_value
    from genesis_cli import recipes

    names = [word for word in words if not _OVERRIDE.match(word)]
    overrides = [word for word in words if _OVERRIDE.match(word)]
    if seq_len is not None:
        overrides.append(f"data.seq_len={seq_len}")
    if len(names) == 1 and (names[0] in recipes.names() or names[0].lower().endswith((".yaml", ".yml"))):
        given = [] if model is None else ["model.preset=null", "model.config=null", f"model.path={emit_value(model)}"]
        return recipes.load(names[0], [*given, *overrides])
    if not names:
        raise UsageError("no data are named", where="command line", next="name a configuration, or files of data")
    if model is None:
        next = "add --model FOLDER, whose tokenizer and template are to be used"
        raise UsageError("sources alone say no tokenizer", where="command line", next=next)
    from genesis.files.hub import local_path
    from genesis.train.config import DataConfig
    from genesis.train.config_file import parse_config
    from genesis_models.folder import read_config

    folder = local_path(model)
    length = min(DataConfig.model_fields["seq_len"].default, read_config(folder).packed_length)
    raw = {
        "model": {"path": folder},
        "data": {"train": names, "seq_len": length, "eval_fraction": 0.0},
        "train": {"output_dir": "none", "steps": 1},  # there is no run
    }
    return parse_config(emit(raw), "command line", overrides)

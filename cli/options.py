"""Options that several commands share; their defaults and bounds come from the configuration schema."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from genesis.errors import UsageError, escape
from genesis_cli.recipes import complete_recipe

if TYPE_CHECKING:
    from pydantic import BaseModel


def complete_config(incomplete: str) -> list[str]:
    """Return recipes, YAML files and folders to which a shell completes `incomplete`."""
    paths = [path + "/" * os.path.isdir(path) for path in glob.glob(glob.escape(incomplete) + "*")]
    return complete_recipe(incomplete) + sorted(path for path in paths if path.endswith(("/", ".yaml", ".yml")))


ConfigName = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="YAML file, or a recipe such as quickstart.", autocompletion=complete_config),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that override the file's."),
]
Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="Model or adapter: a run's output_dir, a checkpoint, a Hugging Face folder, a PEFT adapter.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option("--base", metavar="FOLDER", help="Base model of an adapter.  [default: as the adapter says]"),
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="Device: auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Weight type: auto, fp32, bf16, fp16, fp8 or int8.  [default: the folder's on a GPU, fp32 on the CPU]",
    ),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Match training's forward pass bit for bit; bf16 on an H100 or H200, no filters."),
]

# Options of the commands that measure.
MeasuredDevice = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Device: auto, cpu, cuda or cuda:N.")]
OpDtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16, fp32, fp64 or an integer type.  [default: fp32]"),
]
VsTorch = Annotated[str | None, typer.Option("--vs", metavar="torch", help="Compare with torch in a separate process.")]
TorchPython = Annotated[
    str | None,
    typer.Option("--torch-python", metavar="PATH", help="Python interpreter with torch.  [default: this one]"),
]
Reports = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="Folder of reports.  [default: benchmarks/results in a clone, else genesis-bench]",
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Also write the report as JSON; - prints only the JSON."),
]


def settings(section: type[BaseModel], **given: tuple[str, Any]) -> dict[str, Any]:
    """Return values of schema settings: checked values from the command line, and the schema's defaults for the others.

    Args:
        section: section of the schema.
        given: for each key of the section, the option's name and its value; None means that it was omitted.

    Raises:
        UsageError: a value is outside the schema's bounds.
    """
    from pydantic import TypeAdapter, ValidationError

    from genesis.train.config_help import expected, show

    values = {}
    for key, (option, value) in given.items():
        field = section.model_fields[key]
        values[key] = field.get_default()
        if value is None:
            continue
        checker: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        try:
            values[key] = checker.validate_python(value, strict=True)
        except ValidationError:
            fragment = {**checker.json_schema(), "examples": field.examples}
            # The error does not offer null: omitting the option means the default.
            what = f"{option} must be {expected(fragment).removesuffix(', or null')}, not {show(value)}"
            about = str(field.description).partition(" null:")[0]
            raise UsageError(what, where="command line", next=about) from None
    return values


def weight_dtype(name: str | None, *, trains: bool = False, quantized: bool = False) -> str:
    """Return the weight dtype that `--dtype` names; "auto" if it was omitted.

    Args:
        trains: exclude float16, because the weights are trained.
        quantized: accept 8-bit weights.

    Raises:
        UsageError: weights cannot have this dtype.
    """
    if name is None:
        return "auto"
    from genesis.dtypes import as_dtype
    from genesis.errors import DTypeError
    from genesis.train.config_help import show
    from genesis_models.weights import AUTO, QUANTIZED, WEIGHT_TYPES

    more = QUANTIZED if quantized else ()
    if name == AUTO or name in more:
        return name
    known = [kind for kind in WEIGHT_TYPES if not (trains and kind == "float16")]
    try:
        found = as_dtype(name).name
    except DTypeError:
        found = ""
    if found not in known:
        what = f"--dtype must be one of {', '.join((AUTO, *known, *more))}, not {show(name)}"
        next = "train in bfloat16; eval and generate accept float16" if found == "float16" else "also fp32, bf16, fp16"
        raise UsageError(what, where="command line", next=next)
    return found


# --- Sampling ---------------------------------------------------------------------------------------------------------


System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="Sampling temperature; 0 takes the likeliest token.")
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Sample among the K likeliest tokens.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens with total probability P."),
]
MinP = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Keep tokens at least P times as likely as the likeliest.")
]
Penalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", metavar="R", help="Make repeated tokens less likely."),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Longest generated text, in tokens.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the text before TEXT; may be repeated.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Random seed; the same seed gives the same text.")
]
KvCache = Annotated[
    str, typer.Option("--kv-cache", metavar="TYPE", help="Type of keys and values: auto (as weights), or fp8 on a GPU.")
]


def given_drawing(**options: float | None) -> dict[str, Any]:
    """Return the given sampling options, checked, by name. Raises: UsageError."""
    from genesis.train.bounds import BOUNDS
    from genesis.train.config import EvalConfig

    words = {name: (f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None}
    found = settings(EvalConfig, **{name: each for name, each in words.items() if name in EvalConfig.model_fields})
    for name in words.keys() - found.keys():  # settings that the schema does not have
        word, value = words[name]
        found[name] = BOUNDS[name].checked(value, word, where="command line")
    return found


def kv_cache_type(name: str) -> Literal["auto", "fp8"]:
    """Return the type that `--kv-cache` names. Raises: UsageError."""
    if name == "auto":
        return "auto"
    if name != "fp8":
        raise UsageError(f"--kv-cache is {escape(name)!r}", where="command line", next="use auto or fp8")
    return "fp8"

"""Options that several commands share, and their defaults and bounds, which the configuration schema holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ConfigName", "Device", "Dtype", "Folder", "Overrides", "settings"]

ConfigName = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, or the name of a recipe: quickstart.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that go before those of the file."),
]
Folder = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Model folder: a run's output_dir, a checkpoint, a Hugging Face folder.")
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="float32 or bfloat16.")]


def settings(section: type[BaseModel], **given: tuple[str, Any]) -> dict[str, Any]:
    """Values of schema settings: those given on the command line, checked, and the schema's defaults for the others.

    Args:
        section: the schema's section.
        given: for each key of the section the option's name and its value, None when it was left out.

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
            what = f"{option} must be {expected(fragment)}, not {show(value)}"
            raise UsageError(what, where="command line", next=f"{field.description}") from None
    return values

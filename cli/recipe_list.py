"""`genesis recipes`: the configurations that ship with Genesis, to read and to copy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import UsageError, nearest
from genesis_cli.options import complete_recipe


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A recipe; without it they are listed.", autocompletion=complete_recipe),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Write it to NAME.yaml here, to change it.")] = False,
) -> None:
    """List the recipes, print one, or copy it.

    A recipe is a configuration that runs as it is: genesis train NAME. For instance: genesis recipes quickstart --copy
    """
    from genesis.files.atomic import write_file
    from genesis_cli.recipes import names, text_of
    from genesis_cli.session.init import check_new

    known = names()
    if name is None:
        width = max(map(len, known))
        for each in known:
            print(f"{each.ljust(width)}  {_first_sentence(text_of(each))}")
        return
    if name not in known:
        near = nearest(name, known)
        next = f"did you mean {near}?" if near else f"recipes: {', '.join(known)}"
        raise UsageError(f"there is no recipe {name}", where="NAME", next=next)
    if not copy:
        print(text_of(name), end="")
        return
    path = Path(f"{name}.yaml")
    check_new(path, force=False)
    write_file(path, text_of(name).encode())
    print(f"wrote {path}; next: genesis train {path}")


def _first_sentence(text: str) -> str:
    """Of the comment that a recipe begins with."""
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("\n#\n")[0].splitlines())
    return comment.partition(". ")[0].rstrip(".")

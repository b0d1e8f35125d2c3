"""`genesis init`: writes a configuration for a model, data and a goal, sized for a GPU."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import GenesisError, ModelError, UsageError
from genesis.files.boundary import fitting
from genesis_cli.estimate import GpuMemory

# The keys of `GOALS` in `genesis_cli.session.init`, whose import is too slow for shell completion.
GOALS = ("lora", "full", "dpo", "kto", "reward", "distill", "pretrain", "scratch")

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Model folder, name on the hub, or a size such as qwen3-0.6B."),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="SOURCE", help="File, folder or glob to train on; may be repeated.  [default: shipped data]"
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        "--goal",
        metavar="GOAL",
        help="lora, full, dpo or reward (pairs of answers), kto (judged answers), distill (a teacher), pretrain (on"
        " texts) or scratch.  [default: lora with --model, or dpo or kto if the data hold preferences; else scratch]",
        autocompletion=lambda incomplete: [goal for goal in GOALS if goal.startswith(incomplete)],
    ),
]
Teacher = Annotated[
    str | None,
    typer.Option("--teacher", metavar="NAME", help="Teacher of --goal distill: a folder or a name on the hub."),
]
OutputDir = Annotated[
    str | None, typer.Option("--output-dir", metavar="FOLDER", help="Folder of the run.  [default: runs/FILE's name]")
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", min=2, help="Tokens in a row.  [default: 1024; 256 on the CPU]")
]


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Configuration to write.")] = "genesis.yaml",
    model: Model = None,
    data: Data = None,
    goal: Goal = None,
    teacher: Teacher = None,
    gpu_memory: GpuMemory = None,
    seq_len: SeqLen = None,
    output_dir: OutputDir = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a configuration for a model, data and a goal.

    The file has comments, and its steps fit the GPU. On a terminal the command asks for missing options; in a pipe it
    uses defaults.

    Example: genesis init chats.yaml --model Qwen/Qwen3-0.6B --data chats.jsonl --gpu-memory 24
    """
    from genesis.files.atomic import write_file
    from genesis_cli import recipes
    from genesis_cli.session import init as session

    path = Path(file)
    if model == "":
        raise UsageError("--model is empty", where="command line", next="name a model, or omit --model for a new one")
    session.check_new(path, force=force)
    # On a terminal, ask for the choices that no option makes.
    if model is None and not data and goal is None and sys.stdin.isatty() and sys.stdout.isatty():
        model, goal, source = _questions()
        data = [source]
        if goal == "distill" and teacher is None:
            teacher = _answer("Teacher: a folder or a name on the hub", "", session.check_model)
    model = None if model is None else os.path.expanduser(model)
    chosen = session.goal_of(goal, model, data or ())
    session.check_teacher(chosen, teacher or None)
    asked = session.Choices(
        goal=chosen,
        model=model,
        data=tuple(data or [session.GOALS[chosen][2]]),
        file=file,
        output_dir=output_dir or f"runs/{path.stem}",
        seq_len=seq_len,
        teacher=None if teacher is None else os.path.expanduser(teacher),
    )
    # Size the steps, and write the file.
    with fitting(ModelError, "sizing the model"):
        place = session.place_for(gpu_memory)
        text, sized = session.config_text(asked, place, recipes.text_of)
    write_file(path, text.encode())
    print(f"wrote {path}")
    print("\n".join(session.described(asked, place, sized)))
    print(f"next: genesis train {shlex.quote(str(path))}")


def _questions() -> tuple[str | None, str, str]:
    """Ask for model, goal and data until the answers are valid; Return takes the default in brackets."""
    from genesis_cli.session import init as session

    model: str | None = None
    goal = ""
    while not goal:
        model = _answer("Model: a folder, a name on the hub, or empty for a new one", "", session.check_model) or None
        for name, (what, *_) in session.GOALS.items():
            print(f"  {name}: {what}")
        asked = _answer("Goal", session.goal_of(None, model), session.check_goal)
        try:
            goal = session.goal_of(asked, model)
        except UsageError as error:  # model and goal do not match: ask for both again
            _print_error(error)
    source = _answer("Data: a file, a folder or a glob", session.GOALS[goal][2], session.check_source)
    return model, goal, source


def _answer(question: str, default: str, check: Callable[[str], object]) -> str:
    """Ask until `check` accepts the answer, and return it."""
    while True:
        answer: str = typer.prompt(question, default=default, show_default=bool(default)).strip()
        try:
            check(answer)
        except GenesisError as error:
            _print_error(error)
        else:
            return answer


def _print_error(error: GenesisError) -> None:
    print("\n".join(filter(None, (f"  {error.what}", error.next and f"  next: {error.next}"))))

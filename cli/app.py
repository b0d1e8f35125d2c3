"""The command `genesis`: its sub-commands, and the place where their exceptions end."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from genesis.errors import DistributedError, InterruptedRun
from genesis_cli.chat import chat
from genesis_cli.data import data
from genesis_cli.env import env
from genesis_cli.errors import exit_code, flush_stdout, make_printable, prepare_descriptors, settle_stdout
from genesis_cli.estimate import estimate
from genesis_cli.eval import evaluate
from genesis_cli.export import export
from genesis_cli.generate import generate
from genesis_cli.init import init
from genesis_cli.measured import bench, bench_model, bench_ops, demo, profile
from genesis_cli.pull import pull
from genesis_cli.recipes import recipes
from genesis_cli.report import report, watch
from genesis_cli.schema import schema
from genesis_cli.serve import serve
from genesis_cli.train import TrainCommand, train
from genesis_cli.validate import validate

DEBUG = "--debug"
EPILOG = f"Every command takes {DEBUG}: an error then shows its traceback."

# The variable through which a shell asks for completions; the script of `--install-completion` sets it.
COMPLETE = "_GENESIS_COMPLETE"

# Commands by task, in the order of the help.
TASKS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "Begin": {"pull": pull, "recipes": recipes, "init": init, "estimate": estimate},
    "Train": {"train": train, "validate": validate, "data": data, "report": report, "watch": watch},
    "Use a model": {"generate": generate, "chat": chat, "serve": serve, "eval": evaluate, "export": export},
    "Measure": {
        "profile": profile, "bench-model": bench_model, "bench-ops": bench_ops, "bench": bench, "demo": demo,
    },
    "Look up": {"schema": schema, "env": env},
}  # fmt: skip
# Commands that parse their own words.
CLASSES: Mapping[str, type[TyperCommand]] = {"train": TrainCommand}


class Commands(TyperGroup):
    """The group of commands; the help lists them by task."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and first sentences of all commands."""
        for task, names in TASKS.items():
            with formatter.section(task):
                column = max(map(len, self.commands))
                width = formatter.width - column - 6
                formatter.write_dl(
                    [(name.ljust(column), self.commands[name].get_short_help_str(width)) for name in names]
                )


app = typer.Typer(
    name="genesis",
    cls=Commands,
    help="Train small language models.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (item for commands in TASKS.values() for item in commands.items()):
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name, epilog=EPILOG)
    else:
        app.command(_name, cls=CLASSES.get(_name), epilog=EPILOG)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        from genesis import __version__

        print("genesis", __version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train small language models."""


def run(arguments: Sequence[str], *, ends_process: bool = False) -> int:
    """Run one command and return its exit code; no exception escapes.

    Args:
        ends_process: let a failed command end the process at once.
    """
    make_printable()
    words = list(arguments) or ["--help"]
    options = words[: words.index("--")] if "--" in words else words
    debug = DEBUG in options
    words = [word for word in options if word != DEBUG] + words[len(options) :]
    try:
        prepare_descriptors()
        # Typer's own `main` would turn exceptions into its own exit codes first.
        command = typer.main.get_command(app)
        if ends_process and COMPLETE in os.environ:
            command.main([], "genesis", COMPLETE)
        with command.make_context("genesis", words) as context:
            command.invoke(context)
        flush_stdout()
    except BaseException as error:
        if ends_process:  # nothing slow follows, and another Ctrl-C would show a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = exit_code(error, debug=debug)
        if ends_process:
            # Everything is closed. Shutting the interpreter down would abort if a thread is inside a Rust library, and
            # would wait for compiling threads, or for a GPU that waits for a dead rank.
            if not isinstance(error, (InterruptedRun, DistributedError, KeyboardInterrupt)):
                atexit._run_exitfuncs()
            settle_stdout()
            os._exit(code)
        return code
    finally:
        settle_stdout()
    return 0

"""`genesis chat`: a conversation with a model, in a terminal or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import DataError, DiskError, ModelError, UsageError, escape
from genesis.files.boundary import boundary, fitting
from genesis_cli import options

if TYPE_CHECKING:
    from genesis.train.output import Output
    from genesis_cli.session.talk import Talk

COMMANDS = {
    "/help": "show these commands",
    "/reset": "clear the conversation, but keep the system message",
    "/system [TEXT]": "set the system message, or show it",
    "/regenerate": "answer the last message again",
    "/tokens": "show how much of the context the conversation uses",
    "/save FILE": "write the conversation as a line of JSONL",
    "/load FILE": "continue a saved conversation",
    "/quit": "leave, like Ctrl-D",
}
KEYS = "Enter sends, Alt-Enter inserts a new line, Ctrl-C stops an answer. // at the start sends a /."


def chat(
    folder: options.Folder,
    system: options.System = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens.")] = 1024,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    base: options.Base = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kv_cache: options.KvCache = "auto",
) -> None:
    """Chat with the model in FOLDER.

    A model without a chat template continues your text. In a pipe, each line is a message.
    """
    from genesis.train.config import TrainConfig

    drawing = options.given_drawing(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    length = options.given_drawing(max_tokens=max_tokens)["max_tokens"]
    run = options.settings(TrainConfig, seed=("--seed", seed), device=("--device", device))
    kind, cache = options.weight_dtype(dtype, quantized=True), options.kv_cache_type(kv_cache)
    from genesis_cli import session

    with (
        fitting(ModelError, "running the model", folder),
        session.talk(
            folder,
            system=system,
            max_tokens=length,
            **drawing,
            **run,
            base=base,
            dtype=kind,
            kv_cache=cache,
        ) as talk,
    ):
        _converse(talk)


def _converse(talk: Talk) -> None:
    """Process all lines.

    Raises:
        DiskError: an answer cannot be written.
    """
    from genesis.train.output import Output
    from genesis_models.engine.engine import FullContext

    out, console = Output(sys.stdout), Output(sys.stderr)
    by_hand = _is_typed()
    if by_hand:
        console.line("/help lists the commands, Ctrl-D leaves")
    for line in _typed() if by_hand else _piped():
        if line.strip() in ("/quit", "/exit") or out.lost:
            break
        try:
            _process(talk, line, out, console)
        except KeyboardInterrupt:
            if not by_hand:
                raise
            out.line()
            console.line("stopped")
        except (UsageError, DataError, DiskError) as error:
            if out.error is not None:
                break
            console.line(": ".join(filter(None, ("error", error.where, error.what))))
            is_full = isinstance(error, FullContext)
            if then := "/reset starts a new conversation; /save FILE saves this one" if is_full else error.next:
                console.line(f"next: {then}")
    out.check()


def _process(talk: Talk, line: str, out: Output, console: Output) -> None:
    # A message; // at its start means /.
    if not line.startswith("/") or line.startswith("//"):
        if line.strip():
            _answer(talk, talk.say(line.removeprefix("/")), out, console)
        return
    # A command.
    name, _, argument = (part.strip() for part in line.strip().partition(" "))
    if name == "/help":
        width = max(map(len, COMMANDS))
        for command, what in COMMANDS.items():
            out.line(f"{command:<{width}}  {what}")
        out.line(KEYS)
    elif name == "/reset":
        talk.reset()
    elif name == "/system" and argument:
        talk.set_system(argument)
    elif name == "/system":
        out.line("no system message" if talk.system is None else talk.system)
    elif name == "/regenerate":
        _answer(talk, talk.regenerate(), out, console)
    elif name == "/tokens":
        used, most = talk.size()
        out.line(f"{used:,} of {most:,} tokens" + "; the context is full: /reset starts again" * (used >= most))
    elif name == "/save":
        talk.save(_file(argument))
        console.line(f"saved {len(talk.messages)} messages")
    elif name == "/load":
        talk.load(_file(argument))
        console.line(f"loaded {len(talk.messages)} messages")
    else:
        raise UsageError(f"{escape(name)} is not a command", next="/help lists them; // begins a message with a /")


def _answer(talk: Talk, pieces: Iterator[str], out: Output, console: Output) -> None:
    out.flow(pieces)
    if out.lost:
        return
    out.line()
    if talk.finish == "length":
        console.line(f"cut off after {talk.tokens:,} tokens; --max-tokens allows more")
    elif talk.finish == "context":
        console.line("the answer ends at the end of the model's context; /reset starts again")


def _file(argument: str) -> str:
    """Return the file in a command's argument. Raises: UsageError: no file is named."""
    if not argument:
        raise UsageError("a file is missing", next="name it after the command")
    return os.path.expanduser(argument)


def _is_typed() -> bool:
    """Whether a person types at a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _typed() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    words = WordCompleter([name.split()[0] for name in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(key_bindings=keys, completer=words, complete_while_typing=False)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:  # discards the line
            continue
        except EOFError:
            return


def _piped() -> Iterator[str]:
    """Yield the lines of a pipe or a file. Raises: UsageError: not UTF-8. DataError: reading failed."""
    with boundary(DataError, "reading stdin", "stdin"):
        for number, data in enumerate(sys.stdin.buffer, 1):
            try:
                yield data.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                what = f"line {number} is not UTF-8: its byte {error.start:,} is invalid"
                raise UsageError(what, where="stdin", next="send UTF-8 text") from error

"""`genesis generate`: continues a prompt, answers a message, or does so for a file of them.

The continuations of a file are lines of JSON in its order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.readers.stream import BOM
from genesis.data.record_formats import read_messages, read_tools
from genesis.data.records import Conversation, Position
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError, GenesisError, ModelError, UsageError, escape
from genesis.files.strict_json import parse_object, read_limited
from genesis.train.config import EvalConfig
from genesis.train.output import Output
from genesis_cli.session.inference import COMMON, found_source, opened, template_folder
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.settings import check_recorded
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import drawing_line, file_drawing, stop_ids
from genesis_models.engine import Engine, Piece, Request, Sampling, continue_texts
from genesis_models.engine.device import DeviceEngine
from genesis_models.engine.engine import check_prompt
from genesis_models.engine.exact import filters
from genesis_models.generate import engine_for
from genesis_models.source import ModelSource

LARGEST = 64 << 20  # the most bytes of a file of prompts
EXAMPLES = 'write a line as {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to continue.

    Attributes:
        record: a text, or a conversation to answer.
        where: its file and line.
        given: fields that the line of its continuation repeats.
    """

    record: str | Conversation
    where: str
    given: Mapping[str, Any]

    def as_chat(self) -> Prompt:
        """Return a text prompt as a user's message."""
        if isinstance(self.record, Conversation):
            return self
        return replace(self, record=Conversation(({"role": "user", "content": self.record},)))

    def with_system(self, text: str) -> Prompt:
        """Return a conversation with this system message, unless it has its own.

        Raises:
            UsageError: the prompt is a text.
        """
        if isinstance(self.record, str):
            what = "--system is a message of a chat, but the prompt is a text"
            raise UsageError(what, where=self.where or "command line", next="add --chat")
        messages = self.record.messages
        if messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, record=replace(self.record, messages=({"role": "system", "content": text}, *messages)))


def read_prompts(path: str) -> list[Prompt]:
    """Read "prompt" or "messages" from each line of a JSONL file; other keys and empty lines are ignored.

    Raises:
        DataError: the file does not exist, has no line, or a line is not a JSON object with either; it names line and
            field.
    """
    return [_prompt(*line) for line in read_lines(path, "prompts", EXAMPLES)]


def read_lines(path: str, what: str, examples: str) -> list[tuple[Mapping[str, Any], Position, str]]:
    """Return the JSON object of each non-empty line, with its position and its place for errors.

    Args:
        what: name of what the lines hold, for the error of an empty file.
        examples: next step of the errors.

    Raises:
        DataError: the file does not exist, has no line, or a line is not a JSON object.
    """
    found: list[tuple[Mapping[str, Any], Position, str]] = []
    for number, line in enumerate(read_limited(path, LARGEST, DataError).removeprefix(BOM).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{escape(path)}:{number}"
        try:
            found.append((parse_object(line, where=where), Position(path, number), where))
        except ModelError as error:
            raise DataError(f"the line is not a JSON object: {error.what}", where=where, next=examples) from error
    if not found:
        raise DataError(f"the file has no {what}", where=escape(path), next=examples)
    return found


def _prompt(value: Mapping[str, Any], position: Position, where: str) -> Prompt:
    if ("prompt" in value) == ("messages" in value):
        what = "the line has both a prompt and messages" if "prompt" in value else 'the line has no "prompt"'
        raise DataError(what, where=where, next=EXAMPLES)
    if "messages" in value:
        return Prompt(_conversation(value, position), where, {"messages": value["messages"]})
    if not isinstance(value["prompt"], str):
        raise DataError("the prompt is not a text", where=f"{where}: prompt", next=EXAMPLES)
    if not value["prompt"]:
        raise DataError("the prompt is empty", where=f"{where}: prompt", next="give at least one character")
    return Prompt(value["prompt"], where, {"prompt": value["prompt"]})


def _conversation(value: Mapping[str, Any], position: Position) -> Conversation:
    messages, tools = read_messages(value["messages"], position), read_tools(value.get("tools"), position)
    if messages[-1]["role"] == "assistant":
        field = f"messages[{len(messages) - 1}].role"
        what = "the last message is the assistant's, so it needs no answer"
        raise position.defect("answered", what, "remove it, or add the user's next message", field=field)
    return Conversation(messages, tools)


def as_lines(pieces: Iterable[Piece], prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a line of JSON for each prompt in order: the given fields, completion, tokens and the reason of its end."""
    texts, ready, next_ = [""] * len(prompts), dict[int, str](), 0
    for piece in pieces:
        texts[piece.request] += piece.text
        if piece.finish is None:
            continue
        line = {**prompts[piece.request].given, "completion": texts[piece.request], "tokens": piece.tokens}
        ready[piece.request] = json.dumps({**line, "finish": piece.finish}) + "\n"
        while next_ in ready:
            yield ready.pop(next_)
            next_ += 1


# Setting of a training run -> the option of this command.
GENERATE = COMMON | {
    "train.seed": "--seed",
    "eval.sample_tokens": "--max-tokens",
    "eval.temperature": "--temperature",
    "eval.top_k": "--top-k",
    "eval.top_p": "--top-p",
}
GENERATE_MEMORY = "choose --dtype bf16 or, on a GPU, --kv-cache fp8, lower --max-tokens, or use a smaller model"


def generate(
    folder: str,
    prompt: str | None,
    *,
    max_tokens: int,
    seed: int,
    device: str,
    dtype: str,
    kv_cache: Literal["auto", "fp8"] = "auto",
    exact: bool = False,
    base: str | None = None,
    special: bool = False,
    prompts: str | None = None,
    chat: bool = False,
    system: str | None = None,
    stop: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
    **drawing: Any,
) -> Iterator[str]:
    """Yield the continuation of `prompt` by the model in `folder`, piece by piece.

    Args:
        kv_cache: dtype of keys and values, as in `engine_for`.
        exact: draw from the whole distribution, with log-probabilities bit-identical to the forward pass of training.
        base: folder of an adapter's base, instead of the one that the adapter names.
        special: show special tokens, and parse those in a text prompt; otherwise a warning names one.
        prompts: JSONL file of prompts. The pieces are then lines of JSON in its order, each as soon as it and those
            before it are complete.
        chat: treat prompts as a user's messages in the model's chat template.
        system: first message of chats that have no system message.
        stop: strings that end a text and are excluded from it.
        tell: receives lines about the whole after the last piece; None writes them to stderr.
        drawing: sampling settings, as in `chosen_sampling`.
    """
    with phrased_for(GENERATE, memory=GENERATE_MEMORY):
        if prompts is None and not prompt:
            raise UsageError("the prompt is empty", where="--prompt", next="give at least one character")
        asked = [Prompt(prompt or "", "--prompt", {})] if prompts is None else read_prompts(prompts)
        if chat:
            asked = [each.as_chat() for each in asked]
        if system is not None:
            asked = [each.with_system(system) for each in asked]
        source = found_source(folder, base)
        sampling = chosen_sampling(source, drawing, seed, Output(sys.stderr), exact)
        model, tokenizer = opened(source, resolve_device(device), dtype)
        requests = requests_of(model, asked, source, tokenizer, sampling, max_tokens, special)
        engine = engine_for(model, requests, cache=kv_cache, exact=exact)
        if exact:
            check_recorded(source.folders, resolve_device(device))
        found = continue_texts(engine, requests, tokenizer, stop, special=special)
        is_chat = not any(isinstance(each.record, str) for each in asked)
        say = tell or Output(sys.stderr).line
        pieces = _timed(_told_width(found, engine, say), say, is_chat)
    return _phrased(as_lines(pieces, asked) if prompts is not None else (piece.text for piece in pieces))


def requests_of(
    model: CausalLM, asked: Sequence[Prompt], source: ModelSource, tokenizer: Tokenizer, sampling: Sampling,
    max_tokens: int, special: bool = False,
) -> list[Request]:  # fmt: skip
    """Return a request for each prompt. Raises: GenesisError: a prompt cannot be continued; `where` is its line."""
    ids, ends = _encoded(asked, source, tokenizer, special)
    requests = [Request(each, sampling, max_tokens, ends, sequence=i) for i, each in enumerate(ids)]
    for each, request in zip(asked, requests, strict=True):
        try:
            check_prompt(model, request.ids)
        except GenesisError as error:
            error.where = error.where or each.where
            raise
    return requests


def chosen_sampling(
    source: ModelSource, drawing: Mapping[str, Any], seed: int, console: Output, exact: bool = False
) -> Sampling:
    """Return the sampling settings: from `drawing` by the names of `Sampling`, then from the model's
    generation_config.json (which a line reports), then from the schema's defaults.

    Args:
        exact: ignore the filters of generation_config.json, because exact generation refuses filters.
    """
    if exact:
        own = file_drawing(source.folders)
        if found := [name for name in filters(own) if name not in drawing]:
            console.line(f"exact: {', '.join(found)} of generation_config.json not applied")
        temperature = own.get("temperature", EvalConfig().temperature)
        return Sampling(**{"temperature": temperature, **drawing}, seed=seed).check()
    if (line := drawing_line(source.folders, drawing)) is not None:
        console.line(line)
    defaults = EvalConfig().model_dump(include={"temperature", "top_k", "top_p"})
    return Sampling(**{**defaults, **file_drawing(source.folders), **drawing}, seed=seed).check()


def _encoded(
    asked: Sequence[Prompt], source: ModelSource, tokenizer: Tokenizer, special: bool
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the ids of each prompt, and the ids that end its text."""
    texts, ends = [each.record for each in asked if isinstance(each.record, str)], stop_ids(source.folders, tokenizer)
    written = None if special else next(filter(None, map(tokenizer.special_text, texts)), None)
    if written is not None:
        what = f"the prompt has the text of a special token, {escape(written)}, which is treated as plain text"
        Output(sys.stderr).line(f"warning: {what}; --special parses it")
    with ExitStack() as stack:
        chats: ChatPrompts | None = None
        if len(texts) < len(asked):
            chats = stack.enter_context(ChatPrompts(tokenizer, ChatTemplate.read(str(template_folder(source)))))
            ends |= {*chats.end_of_turn_ids}
        ids = []
        for each in asked:
            if isinstance(each.record, Conversation):
                assert chats is not None
                ids.append(chats.encode(each.record, where=each.where))
            else:
                ids.append(tokenizer.prompt(each.record, parse_special=special))
    return ids, ends


def _phrased(pieces: Iterator[str]) -> Iterator[str]:
    with phrased_for(GENERATE, memory=GENERATE_MEMORY):
        yield from pieces


def _told_width(pieces: Iterator[Piece], engine: Engine | DeviceEngine, tell: Callable[[str], None]) -> Iterator[Piece]:
    """Yield `pieces`, then report whether memory held fewer sequences than the engine asked for."""
    yield from pieces
    if isinstance(engine, DeviceEngine) and engine.width < engine.rows:
        held = f"memory held {engine.width} of {engine.rows} sequences at a time"
        tell(f"{held}; --kv-cache fp8 or a lower --max-tokens holds more")


def _timed(pieces: Iterator[Piece], tell: Callable[[str], None], is_chat: bool) -> Iterator[Piece]:
    """Yield `pieces`, then pass lines to `tell`: tokens per second, texts that the context cut off, and empty texts."""
    tokens: dict[int, int] = {}
    begun: set[int] = set()
    cut, start, first = 0, time.monotonic(), 0.0
    for piece in pieces:
        first = first or time.monotonic() - start
        tokens[piece.request] = piece.tokens
        cut += piece.finish == "context"
        if piece.text:
            begun.add(piece.request)
        yield piece
    count, seconds = sum(tokens.values()), time.monotonic() - start
    if cut:
        texts = "the text ends" if len(tokens) == 1 else f"{cut} texts end"
        tell(f"{texts} at the end of the model's context")
    if count:
        rate = f", then {(count - 1) / max(seconds - first, 1e-9):,.1f} tokens/s" if count > 1 else ""
        tell(f"{count:,} token{'s' * (count != 1)} in {seconds:.2f} s: the first after {first:.2f} s{rate}")
    if empty := len(tokens) - len(begun):
        texts = "the text is empty: it" if len(tokens) == 1 else f"empty texts: {empty} of {len(tokens)}, each"
        tell(f"{texts} ended at once" + "; a chat model answers with --chat" * (not is_chat))

"""`genesis generate`: what continues a prompt, a message or a file of either; and the samples of a training run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.records import Conversation
from genesis.data.tokenizer import Tokenizer
from genesis.errors import GenesisError, UsageError, escape
from genesis.train.config import EvalConfig
from genesis.train.output import Output
from genesis_cli.session.inference import COMMON, found_source, opened
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.prompts import Prompt, as_lines, read_prompts
from genesis_cli.session.speaker import template_folder
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import drawing_line, file_drawing, stop_ids
from genesis_models.engine import Piece, Request, Sampling, continue_texts
from genesis_models.engine.engine import check_prompt
from genesis_models.generate import engine_for
from genesis_models.source import ModelSource

# What a user types where a training run has a setting.
GENERATE = COMMON | {
    "train.seed": "--seed",
    "eval.sample_tokens": "--max-tokens",
    "eval.temperature": "--temperature",
    "eval.top_k": "--top-k",
    "eval.top_p": "--top-p",
}
GENERATE_MEMORY = "choose --dtype bf16 or, on a GPU, --kv-cache fp8, lower --max-tokens, or take a smaller model"


def generate(
    folder: str,
    prompt: str | None,
    *,
    max_tokens: int,
    seed: int,
    device: str,
    dtype: str,
    kv_cache: Literal["auto", "fp8"] = "auto",
    base: str | None = None,
    special: bool = False,
    prompts: str | None = None,
    chat: bool = False,
    system: str | None = None,
    stop: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
    **drawing: Any,
) -> Iterator[str]:
    """The continuation of `prompt` by the model in `folder`, piece by piece.

    Args:
        kv_cache: the type of keys and values, as of `engine_for`.
        base: the folder of an adapter's base, instead of the one that it names.
        special: special tokens are shown, and those written out in a prompt that is no chat become their ids; else a
            warning names one.
        prompts: a JSONL file of prompts: the pieces are lines of JSON then, in the order of the file, each as soon as
            those before it are there.
        chat: prompts are messages of a user, which the model's template makes a chat of.
        system: a chat's first message, where it has none of this role.
        stop: strings that end a text, and are no part of it.
        tell: takes the lines about the whole, when the last piece is there; None writes them to stderr.
        drawing: how tokens are drawn, as of `chosen_sampling`.
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
        sampling = chosen_sampling(source, drawing, seed, Output(sys.stderr))
        model, tokenizer = opened(source, resolve_device(device), dtype)
        ids, ends = _encoded(asked, source, tokenizer, special)
        requests = [Request(each, sampling, max_tokens, ends, sequence=i) for i, each in enumerate(ids)]
        for each, request in zip(asked, requests, strict=True):
            try:
                check_prompt(model, request.ids)
            except GenesisError as error:
                error.where = error.where or each.where
                raise
        engine = engine_for(model, requests, cache=kv_cache)
        found = continue_texts(engine, requests, tokenizer, stop, special=special)
        is_chat = not any(isinstance(each.record, str) for each in asked)
        pieces = _timed(found, tell or Output(sys.stderr).line, is_chat)
    return _phrased(as_lines(pieces, asked) if prompts is not None else (piece.text for piece in pieces))


def chosen_sampling(source: ModelSource, drawing: Mapping[str, Any], seed: int, console: Output) -> Sampling:
    """How tokens are drawn: as `drawing` says, by the names of `Sampling`; then as the model's generation_config.json
    does, which a line shows; then by the schema's defaults.
    """
    if (line := drawing_line(source.folders, drawing)) is not None:
        console.line(line)
    eval_ = EvalConfig()
    defaults = {"temperature": eval_.temperature, "top_k": eval_.top_k, "top_p": eval_.top_p}
    return Sampling(**{**defaults, **file_drawing(source.folders), **drawing}, seed=seed).check()


def _encoded(
    asked: Sequence[Prompt], source: ModelSource, tokenizer: Tokenizer, special: bool
) -> tuple[list[list[int]], frozenset[int]]:
    """The ids of each prompt, and those that end its text."""
    texts, ends = [each.record for each in asked if isinstance(each.record, str)], stop_ids(source.folders, tokenizer)
    written = None if special else next(filter(None, map(tokenizer.special_text, texts)), None)
    if written is not None:
        what = f"the prompt holds text of a special token, {escape(written)}, which is read as plain text"
        Output(sys.stderr).line(f"warning: {what}; --special reads the token")
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


def _timed(pieces: Iterator[Piece], tell: Callable[[str], None], is_chat: bool) -> Iterator[Piece]:
    """`pieces`, and in the end to `tell` a line with tokens a second, and lines about texts that the context cut and
    about empty ones.
    """
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
        tell(f"{texts} where the model's context does")
    if count:
        rate = f", then {(count - 1) / max(seconds - first, 1e-9):,.1f} tokens/s" if count > 1 else ""
        tell(f"{count:,} token{'s' * (count != 1)} in {seconds:.2f} s: the first after {first:.2f} s{rate}")
    if empty := len(tokens) - len(begun):
        texts = "the text is empty: it" if len(tokens) == 1 else f"empty texts: {empty} of {len(tokens)}, each"
        tell(f"{texts} ended at once" + "; a chat model answers with --chat" * (not is_chat))

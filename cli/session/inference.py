"""`genesis generate` and `genesis eval`: a trained model's text, and its loss on data."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from genesis.backend import Device
from genesis.data.pipeline import prepare_held_out
from genesis.data.sources import STDLIB
from genesis.data.tokenizer import Tokenizer
from genesis.errors import GenesisError, ModelError, NumericError, UsageError, escape
from genesis.io.files import temporary_folder
from genesis.io.hf import GENERATION_CONFIG, read_json
from genesis.io.paths import safe_join
from genesis.train.config import DataConfig
from genesis.train.evaluation import evaluate as measure
from genesis.train.output import Output
from genesis_cli.session.chat import EncoderFactory
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import Stages, resolve_device, special_text_warning
from genesis_cli.session.prompts import as_lines, read_prompts
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import end_ids
from genesis_models.config import ModelConfig
from genesis_models.engine import Piece, Request, Sampling, continue_texts
from genesis_models.engine.engine import check_prompt
from genesis_models.finite import check_finite
from genesis_models.folder import load_source, read_config
from genesis_models.generate import engine_for
from genesis_models.source import ModelSource, find_source

__all__ = ["check_ids", "continue_text", "evaluate", "generate", "stop_ids"]

# What a user types where a training run has a setting.
COMMON = {"train.device": "--device", "model.dtype": "--dtype", "model.path": "FOLDER"}
GENERATE = COMMON | {
    "train.seed": "--seed",
    "eval.sample_tokens": "--max-tokens",
    "eval.temperature": "--temperature",
    "eval.top_k": "--top-k",
    "eval.top_p": "--top-p",
}
EVAL = COMMON | {
    "data.train": "--data",
    "data.eval": "--data",
    "data.seq_len": "--seq-len",
    "train.batch_size": "--batch-size",
    "eval.batch_size": "--batch-size",
}
GENERATE_MEMORY = "choose --dtype bf16, lower --max-tokens, or take a smaller model"
EVAL_MEMORY = "lower --batch-size or --seq-len, choose --dtype bf16, or take a smaller model"
LONGEST_EVAL = 1024  # tokens of a sequence where the model takes more and the user names no length


def continue_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    count: int,
    *,
    stop: frozenset[int],
    parse_special: bool = False,
) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece as characters complete.

    Args:
        stop: the ids that end the text.
        parse_special: special tokens written out in the prompt become their ids.
    """
    request = Request(tokenizer.prompt(prompt, parse_special=parse_special), sampling, count, stop)
    for piece in continue_texts(engine_for(model, [request]), [request], tokenizer):
        if piece.text:
            yield piece.text


def stop_ids(folders: str | os.PathLike[str] | Iterable[Path] | None, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a text: every `eos_token_id` of the generation_config.json and config.json in the folders of a
    model; the tokenizer's, where they name none.

    Raises:
        ModelError: an `eos_token_id` that is neither an id nor a list of ids.
    """
    listed = [] if folders is None else [Path(folders)] if isinstance(folders, str | os.PathLike) else folders
    found: set[int] = set()
    for folder in listed:
        for name in (GENERATION_CONFIG, "config.json"):
            if os.path.lexists(folder / name):
                where = escape(folder / name)
                found.update(end_ids(read_json(safe_join(folder, name, where=where)), where))
    return frozenset(found) or frozenset({tokenizer.eos_id})


def generate(
    folder: str,
    prompt: str | None,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: str,
    dtype: str,
    base: str | None = None,
    parse_special: bool = False,
    prompts: str | None = None,
    stop: Sequence[str] = (),
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Iterator[str]:
    """Pieces of text that continue `prompt` with the model in `folder`; arguments as in the eval section.

    At the end a line on stderr says how many tokens a second that were.

    Args:
        prompt: the text; None where `prompts` names a file.
        base: the folder of an adapter's base, instead of the one that it names.
        parse_special: special tokens written out in the prompt become their ids; else a warning names one.
        prompts: a JSONL file of objects with a "prompt": the pieces are lines of JSON then, in the order of the file,
            each as soon as those before it are there.
        stop: strings that end a text, and are no part of it.
        min_p, repetition_penalty: as of `Sampling`.
    """
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    with phrased_for(GENERATE, memory=GENERATE_MEMORY):
        sampling.check()
        texts = [prompt or ""] if prompts is None else read_prompts(prompts)
        source = _found(folder, base)
        model, tokenizer = _opened(source, resolve_device(device), dtype)
        ends, console = stop_ids(source.folders, tokenizer), Output(sys.stderr)
        found = [] if parse_special else [token for text in texts if (token := tokenizer.special_text(text))]
        if found:
            what = f"the prompt holds text of a special token, {escape(found[0])}, which is read as plain text"
            console.line(f"warning: {what}; --special reads the token")
        ids = [tokenizer.prompt(text, parse_special=parse_special) for text in texts]
        requests = [Request(each, sampling, max_tokens, ends, sequence=i) for i, each in enumerate(ids)]
        for number, request in enumerate(requests):
            _check(model, request, "" if prompts is None else f"{escape(prompts)}: prompt {number + 1}")
        found_pieces = continue_texts(engine_for(model, requests), requests, tokenizer, stop)
        pieces = _timed(found_pieces, console)
    return _worded(as_lines(pieces, texts) if prompts is not None else (piece.text for piece in pieces))


def _check(model: CausalLM, request: Request, where: str) -> None:
    """`check_prompt`, whose error says which of many prompts it is."""
    try:
        check_prompt(model, request.ids)
    except GenesisError as error:
        error.where = error.where or where
        raise


def _worded(pieces: Iterator[str]) -> Iterator[str]:
    with phrased_for(GENERATE, memory=GENERATE_MEMORY):
        yield from pieces


def _timed(pieces: Iterator[Piece], console: Output) -> Iterator[Piece]:
    """`pieces`, and in the end a line with tokens a second and one about texts that the context cut."""
    tokens: dict[int, int] = {}
    cut, start = 0, time.monotonic()
    for piece in pieces:
        tokens[piece.request] = piece.tokens
        cut += piece.finish == "context"
        yield piece
    count, seconds = sum(tokens.values()), time.monotonic() - start
    if cut:
        texts = "the text ends" if len(tokens) == 1 else f"{cut} texts end"
        console.line(f"{texts} where the model's context does")
    if count:
        console.line(f"{count:,} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):,.1f} tokens/s with the prompt")


def _found(folder: str, base: str | None) -> ModelSource:
    """What `folder` stands for; of an adapter a line says on which base it is."""
    source = find_source(folder, base)
    if source.adapter is not None:
        Output(sys.stderr).line(str(source))
    return source


def _opened(source: ModelSource, device: Device, dtype: str) -> tuple[CausalLM, Tokenizer]:
    """The model and the tokenizer of a source, which fit together.

    Raises:
        ModelError: its tokenizer has ids that the model has not. NumericError: NaN weights.
    """
    config, where = read_config(source.folder), escape(source.adapter or source.folder)
    tokenizer = Tokenizer.load(source.holding("tokenizer.json"))
    check_ids(tokenizer, config, where)
    model = load_source(source, device=str(device), dtype=dtype)
    check_finite(model, where=where)
    return model, tokenizer


def check_ids(tokenizer: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raises: ModelError where the tokenizer has ids that the model has not."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model's embedding {config.vocab_size:,} rows",
            where=where,
            next="use the tokenizer and the config.json of the same model",
        )


def evaluate(
    folder: str,
    sources: Sequence[str],
    *,
    seq_len: int | None,
    batch_size: int,
    device: str,
    dtype: str,
    base: str | None = None,
) -> dict[str, float | int]:
    """Loss, perplexity and bits per byte of the model in `folder` on `sources`, each sample alone, and gzip's on texts.

    Conversations are samples by the template of the folder; what the assistant says is measured.
    """
    with phrased_for(EVAL, memory=EVAL_MEMORY):
        return _evaluate(_found(folder, base), sources, seq_len, batch_size, resolve_device(device), dtype)


def _evaluate(
    source: ModelSource, sources: Sequence[str], seq_len: int | None, batch_size: int, where: Device, dtype: str
) -> dict[str, float | int]:
    model, tokenizer = _opened(source, where, dtype)
    longest = model.config.packed_length
    length = min(LONGEST_EVAL, longest) if seq_len is None else seq_len
    if length > longest:
        raise UsageError(f"--seq-len {length} is beyond the model's {longest} positions", next="lower it")
    if not all(sources):
        raise UsageError("--data is empty", next='name a file, a folder, a glob or "stdlib:"')
    data = DataConfig(train=[STDLIB])  # for the defaults of the rest
    console = Output(sys.stderr)
    with temporary_folder() as cache, Stages(console) as stages:
        held_out = prepare_held_out(
            sources=sources,
            tokenizer=tokenizer,
            cache_dir=cache,
            on_error=data.on_error,
            format=data.format,
            fields=data.fields,
            max_line_bytes=data.max_line_bytes,
            seq_len=length,
            progress=stages,
            make_encoder=EncoderFactory(data, source.holding("tokenizer.json")),
            key="--data",
        )
        console.line(str(held_out.files))
        for note in held_out.notes:
            console.line(str(note))
        if held_out.special.documents:
            console.line(special_text_warning(held_out.special))
        found = measure(model, held_out, batch_size=batch_size, seq_len=length, max_batches=None, device=where)
    assert found is not None, "nothing asks this evaluation to stop"
    if not math.isfinite(found.loss):
        raise NumericError(
            "the loss is not finite",
            where=escape(source.adapter or source.folder),
            next="measure in float32: --dtype fp32",
        )
    gzip = held_out.gzip_bits_per_byte
    return {
        "eval/loss": found.loss,
        "eval/perplexity": found.perplexity,
        "eval/bits_per_byte": found.bits_per_byte,
        **({} if gzip is None else {"eval/gzip_bits_per_byte": gzip}),
        "eval/num_tokens": found.targets,
    }

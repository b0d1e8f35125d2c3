"""The first stages of all commands: the device, the model's shape, the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from genesis.backend import CPU, Device, as_device
from genesis.data.documents import TokenSet
from genesis.data.pipeline import Prepared, prepare
from genesis.data.tokenize import SpecialText
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, DeviceError, ModelError, escape
from genesis.files.hf import list_names
from genesis.train.config import Config
from genesis.train.output import Output
from genesis.train.progress import tokenizing
from genesis.train.ranks import ALONE, Ranks
from genesis_cli.session.chat import EncoderFactory
from genesis_models.chat_files import check_ids, new_tokens
from genesis_models.config import ModelConfig


def resolve_device(name: str, ranks: Ranks = ALONE) -> Device:
    """Return the device that a setting means; "auto" is a usable GPU, otherwise the CPU.

    Each of several ranks on a host has its own GPU.

    Raises:
        DeviceError: the named device is missing or too old; Genesis never silently uses another one.
        ConfigError: one GPU is named for several ranks.
    """
    if ranks.size > 1:
        return _device_of_rank(name, ranks)
    if name == "auto":
        return as_device("cuda" if describe_gpu()[0] else "cpu")
    device = as_device(name)
    if device != CPU:
        from genesis import cuda

        cuda.check_supported(device)
    return device


def _device_of_rank(name: str, ranks: Ranks) -> Device:
    if name.startswith("cuda:"):
        what = f"train.device {name} is one GPU, but each of the {ranks.size} ranks needs its own"
        raise ConfigError(what, where="train.device", next="set train.device=cuda")
    if name == "cpu" or (name == "auto" and not describe_gpu()[0]):
        return CPU
    from genesis import cuda
    from genesis.backend.cuda.driver import is_interpreted

    device = as_device("cuda" if is_interpreted() else f"cuda:{ranks.local_rank}")
    cuda.check_supported(device)
    return device


def describe_gpu() -> tuple[bool, str]:
    """Return whether "auto" means a GPU, and which one, or why not."""
    from genesis import cuda
    from genesis.backend.cuda.driver import is_interpreted

    try:
        if not cuda.is_available() or is_interpreted():
            return False, "no GPU was found"
        return True, cuda.check_supported("cuda:0")
    except DeviceError as error:
        return False, error.what


def prepare_data(
    config: Config,
    model: ModelConfig,
    console: Output,
    cache_dir: str | os.PathLike[str] | None = None,
    encoders: EncoderFactory | None = None,
) -> Prepared:
    """Prepare documents, split, tokenizer and tokens, with a progress bar for each stage that is not cached.

    Args:
        encoders: creates the encoder of records; callers use it to get the chat format.
    """
    data = config.data
    default_cache = data.cache_dir or Path(config.train.output_dir) / "cache"
    with stages(console) as progress:
        prepared = prepare(
            train_sources=data.train,
            eval_sources=data.eval,
            eval_fraction=data.eval_fraction,
            tokenizer_path=data.tokenizer or config.model.path,
            vocab_size=data.vocab_size or model.vocab_size,
            cache_dir=cache_dir or default_cache,
            seed=config.train.seed,
            on_error=data.on_error,
            format=data.format,
            fields=data.fields,
            max_line_bytes=data.max_line_bytes,
            seq_len=data.seq_len,
            too_long=data.too_long,
            parse_special=data.parse_special,
            make_encoder=encoders or EncoderFactory(data, config.model.path, config.objective.learns),
            learns=config.objective.learns,
            progress=progress,
        )
    # Check that every token has a row in the model's embedding.
    tokenizer, where = prepared.tokenizer, escape(data.tokenizer or config.model.path or "data.vocab_size")
    check_ids(tokenizer, model, where, only_new=config.model.path is not None)
    if config.lora is not None:
        held_out = [] if prepared.held_out is None else [prepared.held_out.tokens]
        next = "an adapter has no rows for new tokens: remove lora, and the embedding grows"
        check_rows([prepared.train, *held_out], tokenizer, model, where, next)
    return prepared


def new_token_lines(tokenizer: Tokenizer, model: ModelConfig, *, grows: bool) -> Iterator[str]:
    """Yield a line about tokens that have no row in the embedding of a stored model."""
    if new := new_tokens(tokenizer, model):
        rows = "grows by rows for them, the mean of the others" if grows else "has no rows for them"
        yield f"new tokens: {list_names(new)}; the embedding {rows}"


def check_rows(sets: Sequence[TokenSet], tokenizer: Tokenizer, model: ModelConfig, where: str, next: str) -> None:
    """Raise ModelError if a token of the data has no row in the model's embedding; the error names it."""
    largest = 0
    if tokenizer.vocab_size > model.vocab_size:  # otherwise a long stream need not be searched
        largest = max(int(tokens.stream.max(initial=0)) for tokens in sets)
    if largest >= model.vocab_size:
        token = escape(tokenizer.token(largest) or "")
        what = f"the data has the token {token!r} with id {largest:,}, but the embedding has {model.vocab_size:,} rows"
        raise ModelError(what, where=where, next=next)


def file_lines(data: Prepared) -> Iterator[str]:
    """Yield lines about files that were read or skipped, samples that are too long or have no target, and warnings."""
    yield str(data.report.files)
    if data.report.tail:
        yield f"held out: the end of the only document, from {escape(data.report.tail)} on"
    if data.held_out is not None and data.held_out.files.read:
        yield f"held out: {data.held_out.files}"
        for name, tokens in data.held_out.sets.items():
            yield f"held out: {name}: {len(tokens):,} samples from {tokens.num_documents:,} documents"
    parts: dict[str, Any] = {"": data.report} | ({} if data.held_out is None else {"held out: ": data.held_out})
    for part in parts.values():
        if names := part.files.like_records:
            which = "1 file that begins" if len(names) == 1 else f"{len(names):,} files that begin"
            yield (
                f"warning: {which} like JSON or CSV, such as {escape(names[0])}, read as text; "
                "records are read from .jsonl, .json and .csv"
            )
    for which, part in parts.items():
        for note in part.notes:
            yield f"{which}{note}" + (f"; see {note.setting}" if note.setting else "")
    # In messages such text is always plain text.
    advice = "" if data.train.index.is_record.all() else "; data.parse_special=true reads the tokens"
    for part in parts.values():
        if part.special.documents:
            yield f"{special_text_warning(part.special)}{advice}"


def sample_counts(tokens: TokenSet) -> str:
    """Return what to add to the counts of documents and tokens if some tokens are not targets."""
    if tokens.mask is None:
        return ""
    return (
        f"; {len(tokens):,} samples, {100 * tokens.num_targets / tokens.num_tokens:.1f} % of their tokens are targets"
    )


def special_text_warning(special: SpecialText) -> str:
    """Return the warning about documents that contain the text of special tokens."""
    documents = "1 document contains" if special.documents == 1 else f"{special.documents:,} documents contain"
    token = escape(special.example)
    return f"warning: {documents} the text of special tokens such as {token}; it is treated as plain text"


@contextmanager
def stages(console: Output) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress display for each stage of data preparation; yields a callback of stage, done and total."""
    current, report = "", None  # type: tuple[str, Callable[[int, int], None] | None]
    with ExitStack() as shown:

        def update(stage: str, done: int, total: int) -> None:
            nonlocal current, report
            if report is None or stage != current:
                shown.close()
                current, report = stage, shown.enter_context(tokenizing(stage, console))
            report(done, total)

        yield update

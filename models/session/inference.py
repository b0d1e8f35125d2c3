"""`genesis generate` and `genesis eval`: a trained model's text, and its loss on data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

from genesis.data.pipeline import prepare_held_out
from genesis.data.stream_decoder import StreamDecoder
from genesis.data.tokenizer import Tokenizer
from genesis.errors import UsageError
from genesis.train.config import DataConfig
from genesis.train.evaluation import evaluate as measure
from genesis.train.output import Output
from genesis_models.blocks import CausalLM
from genesis_models.folder import load
from genesis_models.generate import Sampling
from genesis_models.generate import generate as generate_ids
from genesis_models.session.preparation import Stages, resolve_device

__all__ = ["continue_text", "evaluate", "generate"]

LONGEST_EVAL = 1024  # tokens of a sequence where the model takes more and the user names no length


def continue_text(model: CausalLM, tokenizer: Tokenizer, prompt: str, sampling: Sampling, count: int) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece as characters complete."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = start + [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos_id]
    decoder = StreamDecoder(tokenizer)
    for token in generate_ids(model, ids, sampling, count, frozenset({tokenizer.eos_id})):
        piece = decoder.push(token)
        if piece:
            yield piece
    if rest := decoder.finish():
        yield rest


def generate(
    folder: str,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: str,
    dtype: str,
) -> Iterator[str]:
    """Pieces of text that continue `prompt` with the model in `folder`; arguments as in the eval section."""
    where = resolve_device(device)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, device=str(where), dtype=dtype)
    return continue_text(model, tokenizer, prompt, Sampling(temperature, top_k, top_p, seed), max_tokens)


def evaluate(
    folder: str, sources: Sequence[str], *, seq_len: int | None, batch_size: int, device: str, dtype: str
) -> dict[str, float | int]:
    """Loss, perplexity and bits per byte of the model in `folder` on `sources`, each document alone, beside gzip's."""
    where = resolve_device(device)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, device=str(where), dtype=dtype)
    longest = model.config.max_position_embeddings
    length = min(LONGEST_EVAL, longest) if seq_len is None else seq_len
    if length > longest:
        raise UsageError(f"--seq-len {length} is beyond the model's {longest} positions", next="lower it")
    data = DataConfig(train=list(sources))
    with TemporaryDirectory(prefix="genesis-") as cache, Stages(Output(sys.stderr)) as stages:
        held_out = prepare_held_out(
            sources=sources,
            tokenizer=tokenizer,
            cache_dir=cache,
            on_error=data.on_error,
            text_field=data.text_field,
            max_line_bytes=data.max_line_bytes,
            progress=stages,
        )
        found = measure(model, held_out, batch_size=batch_size, seq_len=length, max_batches=None, device=where)
    assert found is not None, "nothing asks this evaluation to stop"
    return {
        "eval/loss": found.loss,
        "eval/perplexity": found.perplexity,
        "eval/bits_per_byte": found.bits_per_byte,
        "eval/gzip_bits_per_byte": held_out.gzip_bits_per_byte,
        "eval/num_tokens": found.targets,
    }

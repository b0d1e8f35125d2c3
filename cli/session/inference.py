"""A trained model and its tokenizer, and `genesis eval`: its loss on data."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from genesis.backend import Device
from genesis.data.pipeline import prepare_held_out
from genesis.data.sources import STDLIB
from genesis.data.tokenizer import Tokenizer
from genesis.data.worker_thread import start_in_thread
from genesis.errors import GenesisError, NumericError, UsageError, escape
from genesis.files.atomic import temporary_folder
from genesis.train.config import DataConfig
from genesis.train.evaluation import evaluate as measure
from genesis.train.objective import NextTokens
from genesis.train.output import Output
from genesis_cli.session.chat import EncoderFactory
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import check_rows, resolve_device, special_text_warning, stages
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import check_ids
from genesis_models.folder import load_source, read_config
from genesis_models.quantize import QUANTIZED, quantize
from genesis_models.source import ModelSource, find_source
from genesis_models.weights import AUTO, check_finite

# What a user types where a training run has a setting.
COMMON = {"train.device": "--device", "model.dtype": "--dtype", "model.path": "FOLDER"}
EVAL = COMMON | {
    "data.train": "--data",
    "data.eval": "--data",
    "data.template": "--template",
    "data.seq_len": "--seq-len",
    "train.batch_size": "--batch-size",
    "eval.batch_size": "--batch-size",
}
EVAL_MEMORY = "lower --batch-size or --seq-len, choose --dtype bf16, or take a smaller model"
LONGEST_EVAL = 1024  # tokens of a sequence where the model takes more and the user names no length


def found_source(folder: str, base: str | None) -> ModelSource:
    """What `folder` stands for; of an adapter a line says on which base it is."""
    source = find_source(folder, base)
    if source.adapter is not None:
        Output(sys.stderr).line(str(source))
    return source


def opened(source: ModelSource, device: Device, dtype: str) -> tuple[CausalLM, Tokenizer]:
    """The model and the tokenizer of a source, which fit together.

    Args:
        dtype: of the weights; or "fp8" or "int8", to which they are quantized as they are loaded by default.

    Raises:
        ModelError: its tokenizer has ids that the model has not. NumericError: NaN weights.
    """
    config, where = read_config(source.folder), escape(source.adapter or source.folder)
    loading = start_in_thread(lambda: Tokenizer.load(source.holding("tokenizer.json")))
    try:  # a large vocabulary takes as long to read as weights
        model = load_source(source, device=str(device), dtype=AUTO if dtype in QUANTIZED else dtype)
    except GenesisError:
        check_ids(loading.result(), config, where)  # what is wrong there is said first
        raise
    tokenizer = loading.result()
    check_ids(tokenizer, config, where)
    check_finite(model, where=where)
    return quantize(model, dtype) if dtype in QUANTIZED else model, tokenizer


@phrased_for(EVAL, memory=EVAL_MEMORY)
def evaluate(
    folder: str,
    sources: Sequence[str],
    *,
    seq_len: int | None,
    batch_size: int,
    device: str,
    dtype: str,
    base: str | None = None,
    template: str | None = None,
) -> dict[str, float | int]:
    """The figures of `Evaluation.metrics` of the model in `folder` on `sources`, each sample alone.

    Conversations are samples by `template` (`chatml`, a file or a folder), by default the folder's own; what the
    assistant says is measured.
    """
    source, where = found_source(folder, base), resolve_device(device)
    model, tokenizer = opened(source, where, dtype)
    longest = model.config.packed_length
    length = min(LONGEST_EVAL, longest) if seq_len is None else seq_len
    if length > longest:
        raise UsageError(f"--seq-len {length} is beyond the model's {longest} positions", next="lower it")
    if not all(sources):
        raise UsageError("--data is empty", next='name a file, a folder, a glob or "stdlib:"')
    data = DataConfig(train=[STDLIB], template=template)  # for the defaults of the rest
    console = Output(sys.stderr)
    with temporary_folder() as cache, stages(console) as progress:
        held_out = prepare_held_out(
            sources=sources,
            tokenizer=tokenizer,
            cache_dir=cache,
            on_error=data.on_error,
            format=data.format,
            fields=data.fields,
            max_line_bytes=data.max_line_bytes,
            seq_len=length,
            progress=progress,
            make_encoder=EncoderFactory(data, source.holding("tokenizer.json")),
            key="--data",
        )
        console.line(str(held_out.files))
        for note in held_out.notes:
            console.line(str(note))
        if held_out.special.documents:
            console.line(special_text_warning(held_out.special))
        next = "train the model on such texts: its embedding grows"
        check_rows([held_out.tokens], tokenizer, model.config, "--data", next)
        found = measure(
            NextTokens(),
            model,
            held_out,
            batch_size=batch_size,
            seq_len=length,
            max_batches=None,
            device=where,
            progress=lambda done, total: progress("evaluate", done, total),
        )
    assert found is not None, "nothing asks this evaluation to stop"
    if not math.isfinite(found.loss):
        raise NumericError(
            "the loss is not finite",
            where=escape(source.adapter or source.folder),
            next="measure in float32: --dtype fp32",
        )
    return found.metrics()

"""Uses a trained model: its loss on data (`genesis eval`), its answers, and log-probabilities of given ids."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import genesis
from genesis.backend import Device
from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.pipeline import prepare_held_out
from genesis.data.records import Conversation
from genesis.data.sources import STDLIB
from genesis.data.tokenizer import Tokenizer
from genesis.data.worker_thread import start_in_thread
from genesis.errors import GenesisError, NumericError, UsageError, escape
from genesis.files.atomic import temporary_folder
from genesis.files.hf import read_chat_templates
from genesis.nn import functional as F
from genesis.train.config import DataConfig
from genesis.train.evaluation import evaluate as measure
from genesis.train.objective import NextTokens
from genesis.train.output import Output
from genesis_cli.session.chat import EncoderFactory
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import check_rows, resolve_device, special_text_warning, stages
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import check_ids, stop_ids
from genesis_models.engine import Piece, Request, continue_texts
from genesis_models.engine.engine import check_prompt, length_of
from genesis_models.engine.exact import check_model
from genesis_models.engine.text import Runner
from genesis_models.folder import check_predicts, load_source, read_config
from genesis_models.generate import engine_for
from genesis_models.source import ModelSource, find_source
from genesis_models.weights import AUTO, QUANTIZED, check_finite, quantize

# Setting of a training run -> the option of the command.
COMMON = {"train.device": "--device", "model.dtype": "--dtype", "model.path": "FOLDER"}
EVAL = COMMON | {
    "data.train": "--data",
    "data.eval": "--data",
    "data.template": "--template",
    "data.seq_len": "--seq-len",
    "train.batch_size": "--batch-size",
    "eval.batch_size": "--batch-size",
}
EVAL_MEMORY = "lower --batch-size or --seq-len, choose --dtype bf16, or use a smaller model"
LONGEST_EVAL = 1024  # the most tokens of a sequence by default
SMALLEST = 1024  # initial tokens of a cache that grows with a conversation
PACKED = 4096  # tokens of a forward pass, unless one sequence has more
SCORED = 256  # positions whose logits are computed at once


def found_source(folder: str, base: str | None) -> ModelSource:
    """Return the source that `folder` means; a line reports the base of an adapter."""
    source = find_source(folder, base)
    if source.adapter is not None:
        Output(sys.stderr).line(str(source))
    return source


def opened(source: ModelSource, device: Device, dtype: str) -> tuple[CausalLM, Tokenizer]:
    """Return the model and the tokenizer of a source, after checking that they match.

    Args:
        dtype: dtype of the weights. "fp8" and "int8" load the default dtype and quantize it.

    Raises:
        ModelError: the tokenizer has ids that the model lacks, or it is a reward model. NumericError: weights are NaN.
    """
    config, where = read_config(source.folder), escape(source.adapter or source.folder)
    check_predicts(source, where)
    loading = start_in_thread(lambda: Tokenizer.load(source.holding("tokenizer.json")))
    try:  # reading a large vocabulary takes as long as reading weights
        model = load_source(source, device=str(device), dtype=AUTO if dtype in QUANTIZED else dtype)
    except GenesisError:
        check_ids(loading.result(), config, where)  # errors of the tokenizer come first
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
    exact: bool = False,
) -> dict[str, float | int]:
    """Return the metrics of the model in `folder` on `sources` (`Evaluation.metrics`); no sample attends to another.

    Conversations become samples by `template` (`chatml`, a file or a folder), by default the folder's own; only the
    assistant's messages are measured. `exact` sums in the order of docs/decisions/0014-exact.md.
    """
    # Open the model, and check the options.
    source, where = found_source(folder, base), resolve_device(device)
    model, tokenizer = opened(source, where, dtype)
    if exact:
        check_model(model)
    longest = model.config.packed_length
    length = min(LONGEST_EVAL, longest) if seq_len is None else seq_len
    if length > longest:
        raise UsageError(f"--seq-len {length} exceeds the model's {longest} positions", next="lower it")
    if not all(sources):
        raise UsageError("--data is empty", next='name a file, a folder, a glob or "stdlib:"')
    data = DataConfig(train=[STDLIB], template=template)  # provides the other defaults
    # Prepare the data, and report warnings about them.
    console = Output(sys.stderr)
    with ExitStack() as stack, temporary_folder() as cache, stages(console) as progress:
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
        # Measure the loss.
        stack.enter_context(genesis.exact(exact))
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
    assert found is not None, "nothing stops this evaluation"
    if not math.isfinite(found.loss):
        where_ = escape(source.adapter or source.folder)
        raise NumericError("the loss is not finite", where=where_, next="measure in float32: --dtype fp32")
    return found.metrics()


class Speaker(ExitStack):
    """A model that answers one request after the other; a context manager.

    Args:
        kv_cache: dtype of keys and values, as in `engine_for`.
        template: `chatml`, or a file or folder with the chat template, instead of the model's own.

    Attributes:
        template: renders conversations; None for a model without a chat template, which continues texts.
        ends: ids that end an answer.

    Raises:
        ModelError: a folder, tokenizer or template cannot be used.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        device: str,
        dtype: str,
        kv_cache: Literal["auto", "fp8"] = "auto",
        template: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self._cache = source, kv_cache
        self.model, self.tokenizer = opened(source, resolve_device(device), dtype)
        self.template, self.ends = chat_prompts(source, self.tokenizer, self, template)
        self._engine: Runner | None = None
        self._capacity = 0

    def encode(self, asked: str | Conversation, where: str = "") -> list[int]:
        """Return the ids of a text, or of a conversation up to its answer; errors name `where`.

        Raises:
            DataError: the template cannot render the conversation.
        """
        if isinstance(asked, str):
            return self.tokenizer.prompt(asked)
        assert self.template is not None
        return self.template.encode(asked, where=where)

    def answer(self, request: Request) -> Iterator[Piece]:
        """Continue a prompt, and yield a piece for each token.

        Raises:
            UsageError: the prompt is empty or fills the context. NumericError: logits are not finite.
        """
        check_prompt(self.model, request.ids)
        longest = length_of(self.model, request)
        if longest > self._capacity:  # doubled, so that a cache and its graphs serve several turns
            self._capacity = min(max(SMALLEST, 1 << (longest - 1).bit_length()), self.model.config.context_length)
            whole = Request(request.ids, request.sampling, self._capacity - len(request.ids))
            self._engine = engine_for(self.model, [whole], cache=self._cache)
        assert self._engine is not None
        try:
            yield from continue_texts(self._engine, [request], self.tokenizer)
        except BaseException:
            self._capacity = 0  # an interrupted engine is not reused
            raise


def chat_prompts(
    source: ModelSource, tokenizer: Tokenizer, stack: ExitStack, template: str | None = None
) -> tuple[ChatPrompts | None, frozenset[int]]:
    """Return the renderer of chats, open until the stack closes (None without a template), and the ids that end an
    answer.

    Args:
        template: as in `Speaker`.
    """
    folder, ends = template_folder(source), stop_ids(source.folders, tokenizer)
    if template is None and not read_chat_templates(folder):
        return None, ends
    chats = stack.enter_context(ChatPrompts(tokenizer, ChatTemplate.named(template or str(folder), tokenizer)))
    return chats, ends | {*chats.end_of_turn_ids}


def template_folder(source: ModelSource) -> Path:
    """Return the first folder with a chat template, or the model's if none has one."""
    return next((folder for folder in source.folders if read_chat_templates(folder)), source.folder)


class Score(NamedTuple):
    """The log-probability of an id after those before it, and the likeliest ids with theirs."""

    log_prob: float
    top: list[tuple[int, float]]


def scores(model: CausalLM, sequences: Sequence[tuple[Sequence[int], int]], top: int = 0) -> Iterator[list[Score]]:
    """Yield, for each sequence, the scores of its ids from a position on.

    Args:
        sequences: ids, and the first scored position; at least 1, because nothing precedes the first id.
        top: number of the likeliest ids to return.

    Raises:
        UsageError: a sequence exceeds the context. ModelError: an id exceeds the vocabulary.
    """
    for ids, _ in sequences:
        for part in (ids[:-1], ids[-1:]) if len(ids) > 1 else ():
            check_prompt(model, part, room=0)
    was_training = model.training
    model.eval()
    try:
        # If rotary angles depend on the length, a sequence longer than the trained length runs alone.
        for batch in _packed(sequences, min(PACKED, model.config.packed_length)):
            yield from _scored(model, batch, top)
    finally:
        model.train(was_training)


def _packed(sequences: Sequence[tuple[Sequence[int], int]], most: int) -> Iterator[list[tuple[Sequence[int], int]]]:
    """Group the sequences in order into forward passes of at most `most` tokens."""
    batch: list[tuple[Sequence[int], int]] = []
    for each in sequences:
        if batch and sum(len(ids) for ids, _ in batch) + len(each[0]) > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _scored(model: CausalLM, batch: list[tuple[Sequence[int], int]], top: int) -> Iterator[list[Score]]:
    # Pack the sequences without their last ids, which are only scored.
    counts = [max(0, len(ids) - max(first, 1)) for ids, first in batch]
    if not any(counts):
        yield from ([] for _ in batch)
        return
    inputs = [np.asarray(ids[:-1], np.int64) for ids, _ in batch]
    begins = np.cumsum([0, *map(len, inputs)])
    rows = np.concatenate([np.arange(e - n, e) for e, n in zip(begins[1:], counts, strict=True)])
    wanted = np.concatenate(
        [np.asarray(ids[len(ids) - n :], np.int64) for (ids, _), n in zip(batch, counts, strict=True)]
    )
    # One forward pass; then logits for a limited number of positions at once.
    device = model.model.embed_tokens.weight.device
    positions = np.concatenate([np.arange(len(each)) for each in inputs])
    with genesis.no_grad():
        ids = genesis.tensor(np.concatenate(inputs)[None], device=device)
        places = genesis.tensor(positions[None], device=device) if len(batch) > 1 else None
        hidden = model.hidden_states(ids, places)[0]  # [T, H]
        found: list[Score] = []
        for begin in range(0, len(rows), SCORED):
            part = genesis.tensor(rows[begin : begin + SCORED], device=device)
            chances = F.log_softmax(model.logits(hidden[part]).float(), 1)
            ids = genesis.tensor(wanted[begin : begin + SCORED], device=device)
            chosen = chances.gather(1, ids[:, None])[:, 0].cpu().numpy().tolist()
            tops: list[list[tuple[int, float]]] = [[] for _ in chosen]
            if top:
                values, likeliest = (each.cpu().numpy().tolist() for each in genesis.topk(chances, top))
                tops = [[*zip(i, v, strict=True)] for i, v in zip(likeliest, values, strict=True)]
            found += map(Score, chosen, tops)
    for end, count in zip(np.cumsum(counts), counts, strict=True):
        yield found[end - count : end]

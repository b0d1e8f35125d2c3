"""Generation in Python: texts or ids go in, texts and ids come out; and the engine for where a model is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from genesis.backend import CPU
from genesis.data.tokenizer import Tokenizer
from genesis.errors import UsageError, escape
from genesis.io.paths import exists
from genesis.keywords import checked
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import check_ids, end_ids, stop_ids
from genesis_models.engine import Engine, Finish, Request, Sampling, choose, continue_texts, length_of

if TYPE_CHECKING:
    from genesis_models.engine.device import DeviceEngine

__all__ = [
    "GPU_ROWS",
    "MAX_TOKENS",
    "ROWS",
    "Generated",
    "Sampling",
    "Settings",
    "choose",
    "continue_ids",
    "engine_for",
    "generate",
    "tokenizer_of",
]

MAX_TOKENS = 128  # as the schema's eval.sample_tokens
ROWS = 16  # sequences at a time: a CPU's matmuls gain little from more
GPU_ROWS = 32  # as many rows as the kernels of a step take


@dataclass(frozen=True, slots=True)
class Generated:
    """What continues a prompt.

    Attributes:
        ids: all that were drawn, those of a stop string too.
        text: what they add to that of the prompt, up to a stop string; None for a model without a tokenizer.
        finish: why it ends: "stop" at a stop id or a stop string, "length" at `max_tokens`, "context" at the end of the
            model's context.
        log_probs: of each id under the model's logits as they are; None where nobody asked.
    """

    ids: list[int]
    text: str | None
    finish: Finish
    log_probs: list[float] | None = None

    def __str__(self) -> str:
        return str(self.ids) if self.text is None else self.text


class Settings(TypedDict, total=False):
    """The keywords of `generate`."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str | int]
    log_probs: bool
    special: bool


@overload
def generate(model: CausalLM, prompt: str | Sequence[int], **settings: Unpack[Settings]) -> Generated: ...


@overload
def generate(model: CausalLM, prompt: list[str] | list[list[int]], **settings: Unpack[Settings]) -> list[Generated]: ...


@checked
def generate(
    model: CausalLM,
    prompt: str | Sequence[int] | list[str] | list[list[int]],
    *,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | int] = (),
    log_probs: bool = False,
    special: bool = False,
) -> Generated | list[Generated]:
    """What continues a prompt, or each of a list of prompts, which run together.

    The text of a prompt depends neither on what runs beside it nor on the machine's load: number i of a list draws the
    random numbers of (seed, i).

    Args:
        prompt: a text, or the ids of one; or a list of texts or of lists of ids, which may be of unequal length.
            Tensors and numpy arrays of ids do as well.
        max_tokens: the most tokens of a continuation. It ends earlier at an id that the model's folder names as an end,
            or its tokenizer, and at the end of the model's context.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: as of `Sampling`; temperature 0 takes the likeliest
            token.
        stop: texts that end a continuation and are no part of its text, and further ids that end it.
        log_probs: whether to give the log-probability of each id.
        special: special tokens written out in a text prompt are read, and those in the continuation shown.

    Raises:
        UsageError: an impossible setting, an empty prompt or one that fills the context, or a text for a model without
            a tokenizer. ModelError: an id beyond the vocabulary, or a tokenizer that cannot be used. NumericError: the
            logits are NaN or infinite. OutOfMemoryError.
    """
    is_single, prompts = _prompts(prompt)
    tokenizer, stops = tokenizer_of(model), [stop] if isinstance(stop, str) else list(stop)
    texts, ends = [each for each in stops if isinstance(each, str)], _ids_among(stops)
    if tokenizer is None and (texts or any(isinstance(each, str) for each in prompts)):
        next = "give ids, or set model.tokenizer to a genesis.data.tokenizer.Tokenizer"
        raise UsageError("the model has no tokenizer, which a text needs", next=next)
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    ends += end_ids(model.config.raw, "config.json")
    requests = [
        Request(
            _ids(each, tokenizer, special), sampling, max_tokens, stop_ids(model.folders, tokenizer) | {*ends}, sequence
        )
        for sequence, each in enumerate(prompts)
    ]
    engine = engine_for(model, requests, log_probs=log_probs)
    results = [Generated([], None if tokenizer is None else "", "stop", [] if log_probs else None) for _ in requests]
    pieces: list[list[str]] = [[] for _ in requests]
    for piece in continue_texts(engine, requests, tokenizer, texts, special=special):
        found = results[piece.request]
        pieces[piece.request].append(piece.text)
        if piece.id is not None:
            found.ids.append(piece.id)
            if found.log_probs is not None and piece.log_prob is not None:
                found.log_probs.append(piece.log_prob)
        if piece.finish is not None:
            text = None if tokenizer is None else "".join(pieces[piece.request])
            results[piece.request] = Generated(found.ids, text, piece.finish, found.log_probs)
    return results[0] if is_single else results


def tokenizer_of(model: CausalLM) -> Tokenizer | None:
    """The model's tokenizer, read from its folder at the first call; None where there is none.

    Raises:
        ModelError: it cannot be used, or has ids that the model has not.
    """
    if model.tokenizer is None:
        for folder in model.folders:
            if exists(folder / "tokenizer.json"):
                model.tokenizer = Tokenizer.load(folder)
                break
    if model.tokenizer is not None:
        check_ids(model.tokenizer, model.config, "")
    return model.tokenizer


def _ids_among(stops: Sequence[Any]) -> list[int]:
    """The ids, of Python or numpy, among texts. Raises: UsageError for anything else."""
    others = [each for each in stops if not isinstance(each, str)]
    for each in others:
        if not isinstance(each, int | np.integer):
            raise UsageError(f"stop has {escape(repr(each))[:60]}", next="give texts and ids, as integers")
    return [int(each) for each in others]


def _prompts(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is a single one, and all of them, each a text or ids."""
    if isinstance(prompt, str):
        return True, [prompt]
    plain = _plain(prompt)
    if not isinstance(plain, list) or (_are_ids(plain) and (plain or not isinstance(prompt, list))):
        prompts, is_single = [plain], True
    else:
        prompts, is_single = [_plain(each) for each in plain], False
    for each in prompts:
        if not isinstance(each, str) and not _are_ids(each):
            what = f"a prompt is {type(each).__name__}, neither a text nor ids"
            raise UsageError(what, next="give a str, a list of int, or a list of either")
    return is_single, prompts


def _plain(prompt: Any) -> Any:
    """A list, where it is a tensor, an array or a tuple."""
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    return list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else prompt


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, Integral) for token in prompt)


def _ids(prompt: str | list[int], tokenizer: Tokenizer | None, special: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise UsageError("the prompt is empty", next="give at least one character")
    assert tokenizer is not None
    return tokenizer.prompt(prompt, parse_special=special)


def continue_ids(
    model: CausalLM, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Token ids that continue `prompt`, as they are drawn; ends after a token of `stop` (not yielded) or `max_tokens`.

    Beyond the model's context length nothing is generated: it has not learned such positions.

    Raises:
        UsageError: for an empty prompt, or one that fills the context already. ModelError: an id beyond the vocabulary.
    """
    request = Request(prompt, sampling, max_tokens, stop)
    for token in engine_for(model, [request]).run([request]):
        if token.id is not None:
            yield token.id


def engine_for(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    rows: int | None = None,
    log_probs: bool = False,
    cache: Literal["auto", "fp8"] = "auto",
) -> Engine | DeviceEngine:
    """An engine for these requests where the model is.

    Args:
        rows: the most sequences at a time; None for as many as suit the device.
        log_probs: whether tokens have their log-probability.
        cache: the type of keys and values: "auto", that of the weights, or on a GPU "fp8", e4m3.

    Raises:
        UsageError: a cache in fp8 on the CPU.
    """
    capacity = max([length_of(model, request) for request in requests], default=1)
    most, on_host = max(1, len(requests)), model.model.embed_tokens.weight.device == CPU
    rows = min(rows or (ROWS if on_host else GPU_ROWS), most)
    if on_host:
        if cache != "auto":
            raise UsageError(f"a KV cache in {cache} on the CPU", next="leave it at auto, or use a GPU")
        return Engine(model, rows=rows, capacity=capacity, log_probs=log_probs)
    from genesis_models.engine.device import DeviceEngine

    return DeviceEngine(model, rows=rows, capacity=capacity, log_probs=log_probs, cache=cache)

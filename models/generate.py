"""Generation in Python, from texts or ids to texts and ids; and the choice of the engine for a model's device."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from genesis.backend import CPU
from genesis.data.tokenizer import Tokenizer
from genesis.errors import GenesisError, UsageError, escape
from genesis.files.paths import exists
from genesis.keywords import checked
from genesis.nn.quantized import QuantizedLinear
from genesis.train.bounds import BOUNDS
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import check_ids, end_ids, file_drawing, stop_ids
from genesis_models.engine import Engine, Finish, Piece, Request, Sampling, continue_texts, length_of
from genesis_models.engine.engine import check_prompt
from genesis_models.engine.exact import check_model, filters

if TYPE_CHECKING:
    from genesis_models.engine.device import DeviceEngine

WHERE = "generate"  # the place that errors name
MAX_TOKENS = 128  # the same as the schema's eval.sample_tokens
ROWS = 16  # concurrent sequences: a CPU's matmuls gain little from more
GPU_ROWS = 512  # rows that the decoding kernels support; fewer are used if memory is short
CODED_ROWS = 32  # the limit with 8-bit weights: a step of more rows would dequantize all of them


@dataclass(frozen=True, slots=True)
class Generated:
    """The continuation of a prompt.

    Attributes:
        ids: all drawn ids, including a stop string's.
        text: text that the ids add to the prompt's, up to a stop string; None for a model without a tokenizer.
        finish: why it ends: "stop" at a stop id or a stop string, "length" at `max_tokens`, "context" at the end of the
            model's context.
        log_probs: log-probability of each id under the model's unmodified logits; None unless requested.
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
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int
    stop: str | Sequence[str | int]
    log_probs: bool
    special: bool
    exact: bool


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
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str | int] = (),
    log_probs: bool = False,
    special: bool = False,
    exact: bool = False,
) -> Generated | list[Generated]:
    """Continue a prompt, or each of a list of prompts, which run together.

    The text of a prompt depends neither on the other prompts nor on the machine's load: prompt i of a list draws the
    random numbers of (seed, i).

    Args:
        prompt: a text or its ids, or a list of texts or of lists of ids, which may differ in length. Tensors and numpy
            arrays of ids are accepted too.
        max_tokens: the most tokens of a continuation, 1 or more. It ends earlier at an end id of the model's folder or
            its tokenizer, and at the end of the model's context.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: as in `Sampling`; temperature 0 takes the likeliest
            token. None uses generation_config.json of the model's folder, or the likeliest token without one.
        stop: texts that end a continuation and are excluded from its text, and additional end ids.
        log_probs: whether to return the log-probability of each id.
        special: whether to parse special tokens in a text prompt and show them in the continuation.
        exact: draw from the whole distribution, with log-probabilities (at the temperature) that are bit-identical to
            the forward pass of training. Filters of generation_config.json do not apply. Needs bfloat16 on an H100 or
            H200.

    Raises:
        UsageError: a setting is out of bounds, a prompt is empty or fills the context, or a text was given for a model
            without a tokenizer. ModelError: an id exceeds the vocabulary, or the tokenizer cannot be used.
            NumericError: the logits are NaN or infinite. OutOfMemoryError.
    """
    _check_kinds(model, log_probs=log_probs, special=special, exact=exact)
    max_tokens = BOUNDS["max_tokens"].checked(max_tokens, "max_tokens", where=WHERE)
    named = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    named |= {"repetition_penalty": repetition_penalty}
    given = {name: value for name, value in named.items() if value is not None}
    own = file_drawing(model.folders)
    if exact:
        own = {name: value for name, value in own.items() if name not in filters(own)}
    sampling = Sampling(**{"temperature": 0.0, **own, **given}, seed=seed).check(WHERE)
    is_single, prompts = _prompts(prompt)
    tokenizer, (texts, ends) = tokenizer_of(model), _stops(stop, model.config.vocab_size)
    if tokenizer is None and (texts or any(isinstance(each, str) for each in prompts)):
        next = "give ids, or set model.tokenizer to a genesis.data.tokenizer.Tokenizer"
        raise UsageError("the model has no tokenizer, but a text needs one", where=WHERE, next=next)
    ends += end_ids(model.config.raw, "config.json")
    all_ends, requests = stop_ids(model.folders, tokenizer) | {*ends}, list[Request]()
    for sequence, each in enumerate(prompts):
        where = WHERE if is_single else f"{WHERE}, prompt {sequence} of the list"
        requests.append(Request(_ids(model, each, special, where), sampling, max_tokens, all_ends, sequence))
    engine = engine_for(model, requests, log_probs=log_probs, exact=exact)
    pieces: list[list[Piece]] = [[] for _ in requests]
    for piece in continue_texts(engine, requests, tokenizer, texts, special=special):
        pieces[piece.request].append(piece)
    results = [_generated(each, has_text=tokenizer is not None, log_probs=log_probs) for each in pieces]
    return results[0] if is_single else results


def _generated(pieces: Sequence[Piece], *, has_text: bool, log_probs: bool) -> Generated:
    ids, finish = [piece.id for piece in pieces if piece.id is not None], pieces[-1].finish
    assert finish is not None, "the last piece has the reason why the text ends"
    chances = [piece.log_prob for piece in pieces if piece.log_prob is not None]
    text = "".join(piece.text for piece in pieces) if has_text else None
    return Generated(ids, text, finish, chances if log_probs else None)


def tokenizer_of(model: CausalLM) -> Tokenizer | None:
    """Return the model's tokenizer, read from its folder at the first call; None if the folder has none.

    Raises:
        ModelError: it cannot be used, or has ids that the model lacks.
    """
    if model.tokenizer is None:
        for folder in model.folders:
            if exists(folder / "tokenizer.json"):
                model.tokenizer = Tokenizer.load(folder)
                break
    if model.tokenizer is not None:
        check_ids(model.tokenizer, model.config, "")
    return model.tokenizer


def _check_kinds(model: Any, **switches: Any) -> None:
    """Raise UsageError if `model` is not a model, or a switch is neither true nor false."""
    if not isinstance(model, CausalLM):
        next = "give a model: genesis_models.load(FOLDER)"
        raise UsageError(f"the model is {_shown(model)}", where=WHERE, next=next)
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise UsageError(f"{name} is {_shown(value)}", where=WHERE, next="give True or False")


def _stops(stop: Any, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and the ids, of Python or numpy, that end a continuation. Raises: UsageError."""
    stops, next = [stop] if isinstance(stop, str) else _plain(stop), "give a text, or a list of texts and ids"
    if not isinstance(stops, list):
        raise UsageError(f"stop is {_shown(stop)}", where=WHERE, next=next)
    texts, ids = [each for each in stops if isinstance(each, str)], list[int]()
    for each in stops:
        if isinstance(each, str):
            continue
        if not _is_id(each):
            raise UsageError(f"stop has {_shown(each)}", where=WHERE, next=next)
        if not 0 <= each < vocab_size:
            what = f"stop has the id {each}, but the model's vocabulary has {vocab_size:,}"
            raise UsageError(what, where=WHERE, next="give ids of the model's own tokenizer")
        ids.append(int(each))
    return texts, ids


def _shown(value: Any) -> str:
    return escape(repr(value))[:60]


def _prompts(prompt: Any) -> tuple[bool, list[Any]]:
    """Return whether the prompt is a single one, and the list of prompts, each a text or ids."""
    if isinstance(prompt, str):
        return True, [prompt]
    plain = _plain(prompt)
    if not isinstance(plain, list) or (_are_ids(plain) and (plain or not isinstance(prompt, list))):
        prompts, is_single = [plain], True
    else:
        prompts, is_single = [_plain(each) for each in plain], False
    for each in prompts:
        if not isinstance(each, str) and not _are_ids(each):
            what = f"a prompt is a {type(each).__name__}, neither a text nor ids"
            raise UsageError(what, where=WHERE, next="give a str, a list of int, or a list of either")
    return is_single, prompts


def _plain(prompt: Any) -> Any:
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    return list(prompt) if isinstance(prompt, Sequence | Set) and not isinstance(prompt, str | bytes) else prompt


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(map(_is_id, prompt))


def _is_id(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def _ids(model: CausalLM, prompt: str | list[int], special: bool, where: str) -> Sequence[int]:
    """Return the ids of a prompt. Raises: UsageError, ModelError, DataError: it cannot be continued."""
    if prompt == "":
        raise UsageError("the prompt is empty", where=where, next="give at least one character")
    try:
        if isinstance(prompt, str):
            assert model.tokenizer is not None
            prompt = model.tokenizer.prompt(prompt, parse_special=special)
        check_prompt(model, prompt)
    except GenesisError as error:
        error.where = where
        raise
    return prompt


def engine_for(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    rows: int | None = None,
    log_probs: bool = False,
    cache: Literal["auto", "fp8"] = "auto",
    exact: bool = False,
) -> Engine | DeviceEngine:
    """Return an engine for these requests on the model's device.

    Args:
        rows: the most concurrent sequences; None chooses a number for the device.
        log_probs: whether tokens have their log-probability.
        cache: dtype of keys and values: "auto" for the weights' dtype, or "fp8" (e4m3) on a GPU.
        exact: as in `DeviceEngine`.

    Raises:
        UsageError: an fp8 cache on the CPU. With `exact`, also the errors of `check_model`.
    """
    capacity = max([length_of(model, request) for request in requests], default=1)
    most, on_host = max(1, len(requests)), model.model.embed_tokens.weight.device == CPU
    if not rows:
        is_coded = any(isinstance(each, QuantizedLinear) for each in model.modules())
        rows = ROWS if on_host else CODED_ROWS if is_coded else GPU_ROWS
    rows = min(rows, most)
    if exact:
        check_model(model, cache)
    if on_host:
        if cache != "auto":
            raise UsageError(f"the KV cache is {cache} on the CPU", next="leave it at auto, or use a GPU")
        return Engine(model, rows=rows, capacity=capacity, log_probs=log_probs)
    from genesis_models.engine.device import DeviceEngine

    return DeviceEngine(model, rows=rows, capacity=capacity, log_probs=log_probs, cache=cache, exact=exact)

"""Compares what exact generation draws with the forward pass of training, bit by bit.

`compare` generates, scores the same tokens with the pass that training runs (gradients recorded, several sequences in
a row), and counts the log-probabilities whose bits differ. `first_layer` finds where a difference begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import genesis
from genesis import Tensor
from genesis.autograd.modes import exact
from genesis.nn import functional as F
from genesis_models.blocks import CausalLM, Context
from genesis_models.engine.device import CHUNK, DeviceEngine, Prompts
from genesis_models.engine.device_cache import KEY_BLOCK, StepCache
from genesis_models.engine.device_rows import DeviceRows
from genesis_models.engine.engine import Request, length_of

PACKED = 4096  # tokens of a scoring pass, unless one sequence has more


class Difference(NamedTuple):
    """A drawn token whose log-probability differs between sampler and trainer.

    Attributes:
        request: number of its request.
        token: the token's index in the continuation.
        drawn, scored: the log-probabilities that the engine and the forward pass of training give it.
    """

    request: int
    token: int
    drawn: float
    scored: float


class Comparison(NamedTuple):
    """The number of compared tokens, the number that differ, the first difference, and the generated ids."""

    tokens: int
    differing: int
    first: Difference | None
    drawn: list[list[int]]


def compare(model: CausalLM, requests: Sequence[Request], rows: int) -> Comparison:
    """Generate the requests exactly, and compare each token's log-probability with the forward pass of training.

    Args:
        rows: largest number of concurrent sequences.

    Raises:
        GenesisError: as `DeviceEngine` and its `run`.
    """
    capacity = max(length_of(model, each) for each in requests)
    engine = DeviceEngine(model, rows=rows, capacity=capacity, log_probs=True, exact=True)
    drawn: list[list[int]] = [[] for _ in requests]
    chances: list[list[float]] = [[] for _ in requests]
    for token in engine.run(requests):
        if token.id is not None and token.log_prob is not None:
            drawn[token.request].append(token.id)
            chances[token.request].append(token.log_prob)
    count, differing, first = 0, 0, None
    for number, scored in log_probs(model, requests, drawn):
        found = np.array(chances[number], np.float32)
        differs = found.view(np.uint32) != scored.view(np.uint32)
        count, differing = count + len(found), differing + int(differs.sum())
        if differs.any() and (first is None or number < first.request):
            at = int(differs.argmax())
            first = Difference(number, at, float(found[at]), float(scored[at]))
    return Comparison(count, differing, first, drawn)


def log_probs(
    model: CausalLM, requests: Sequence[Request], drawn: Sequence[Sequence[int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each request's number and the log-probabilities `[N]` (float32) that the forward pass of training gives its
    drawn tokens at the request's temperature (1 for greedy requests).
    """
    waiting = [number for number, ids in enumerate(drawn) if ids]
    waiting.sort(key=lambda number: requests[number].sampling.temperature or 1.0)
    while waiting:
        # Pack sequences at the same temperature; each begins at a multiple of the key block.
        packed, ends = [waiting.pop(0)], [0]
        temperature = requests[packed[0]].sampling.temperature or 1.0
        length = len(requests[packed[0]].ids) + len(drawn[packed[0]])
        begins = [0]
        while waiting and (requests[waiting[0]].sampling.temperature or 1.0) == temperature:
            begin = -(-length // KEY_BLOCK) * KEY_BLOCK
            end = begin + len(requests[waiting[0]].ids) + len(drawn[waiting[0]])
            if end > PACKED or model.config.packed_length < max(end - begin, ends[-1]):
                break
            begins.append(begin)
            packed.append(waiting.pop(0))
            length = end
        ids, positions = np.zeros((1, length), np.int64), np.zeros((1, length), np.int64)
        for begin, stop, number in zip(begins, [*begins[1:], length], packed, strict=True):
            whole = [*requests[number].ids, *drawn[number]]
            ids[0, begin : begin + len(whole)], positions[0, begin:stop] = whole, np.arange(stop - begin)
        scored = _scored(model, ids, positions, temperature)
        for begin, number in zip(begins, packed, strict=True):
            end = begin + len(requests[number].ids) + len(drawn[number]) - 1
            yield number, scored[end - len(drawn[number]) : end]


def _scored(model: CausalLM, ids: np.ndarray, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Return the log-probability `[T - 1]` of each id but the first, given the ids before it."""
    device, was_training = model.model.embed_tokens.weight.device, model.training
    tokens, places = (genesis.from_numpy(each).to(device=device) for each in (ids, positions))
    model.eval()
    try:
        with genesis.enable_grad(), exact():
            hidden = model.hidden_states(tokens, places if positions.any() else None)
            found = F.linear_token_log_probs(hidden[:, :-1], model.head_weight, tokens[:, 1:], temperature=temperature)
    finally:
        model.train(was_training)
    scored: np.ndarray = found.detach().cpu().numpy().reshape(-1)
    return scored


def first_layer(model: CausalLM, request: Request, drawn: Sequence[int], token: int) -> int | None:
    """Return the first layer whose output for the input of the drawn token `token` differs between a generation step
    and the forward pass of training; None if all layers agree.
    """
    ids = [*request.ids, *drawn[:token]]
    device = model.model.embed_tokens.weight.device
    with exact():
        whole = genesis.tensor([ids], device=device)
        tables, starts = model._positions(0, len(ids), None, device)
        with genesis.enable_grad():
            trained = [x[:, -1] for x in _states(model, whole, Context(tables, starts, None, "none", 0))]
        held = DeviceRows(model, 1, len(ids) + 1, False, "auto", True)
        held.begin(model)
        Prompts(model, held, CHUNK).pass_all([(0, np.asarray(ids, np.int64))])
        held.state.start([(0, Request(ids, request.sampling, 1), 1)])
        cache = StepCache(held.cache, 1, held.cache.capacity)
        context = Context(cache.tables(model._rotaries, 1), None, cache, "none", 0)
        with genesis.no_grad():
            stepped = [x[:, -1] for x in _states(model, whole[:, -1:], context)]
    for layer, (x, y) in enumerate(zip(trained, stepped, strict=True)):
        if (x.detach().float() != y.detach().float()).any().item():
            return layer
    return None


def _states(model: CausalLM, ids: Tensor, context: Context) -> Iterator[Tensor]:
    """Yield the output `[1, T, H]` of each layer."""
    x = model.model.embed(ids)
    for layer in model.model.layers:
        x = layer(x, context)
        yield x

"""What an engine on a GPU holds for its rows, from run to run: the cache, the sequences' state, and steps as graphs.

A step reads the state on the device, and the next one goes on from it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import genesis
from genesis import Tensor, cuda, nn
from genesis.array import Array
from genesis.autograd.modes import fixed_weights
from genesis.backend import CPU, Device
from genesis.dtypes import DType, float8_e4m3fn
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.functions.transfer import overwrite, pinned_empty
from genesis.nn.lora import LoRALinear
from genesis.nn.quantized import QuantizedLinear
from genesis.ops import fp8
from genesis.ops.sample import next_tokens, sample
from genesis.train.captured import Captured
from genesis_models.blocks import CausalLM
from genesis_models.engine.device_cache import DeviceCache, StepCache
from genesis_models.engine.engine import Request

STOPS = 16  # ids that end a row on the device; the host looks for further ones
RING = 32  # steps whose tokens the device keeps


class DeviceState:
    """Arrays with a row for each sequence, as the ops `sample` and `next_tokens` take them.

    Args:
        lengths, left: of the rows of the cache: tokens that are there, and how many each may still draw.
        vocabulary: of the logits.
        log_probs: whether tokens have their log-probability.

    Attributes:
        tokens: the last of each row, which is not in the cache.
        is_penalized: whether steps look at the tokens that sequences have.
    """

    def __init__(self, lengths: Tensor, left: Tensor, vocabulary: int, log_probs: bool, logits: genesis.DType) -> None:
        rows, device = lengths.shape[0], lengths.device

        def zeros(*shape: int, dtype: Any = "int64") -> Tensor:
            return genesis.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self._lengths, self._left = zeros(rows), lengths, left
        self._stops, self._keys, self._top_k = zeros(rows, STOPS), zeros(rows, 3), zeros(rows)
        self._settings = zeros(rows, 4, dtype="float64")
        self._seen: Tensor | None = None  # [rows, vocabulary], taken when a sequence has a penalty, and kept
        self.is_penalized = False
        self._ring, self._step = zeros(RING * rows), zeros(1)
        self._ring_log_probs = zeros(RING * rows * log_probs, dtype="float64" if logits is genesis.float64 else None)
        self._steps, self._vocabulary, self._log_probs = 0, vocabulary, log_probs

    def clear(self) -> None:
        """No row has a sequence."""
        self._left.fill_(0)
        self._step.fill_(0)
        self._steps, self.is_penalized = 0, False

    def start(self, sequences: Sequence[tuple[int, Request, int]]) -> None:
        """New sequences: row, request, and the most tokens to draw. All of a prompt but its last token is cached."""
        if any(request.sampling.repetition_penalty != 1 for _, request, _ in sequences):
            self.is_penalized = True
            if self._seen is None:
                self._seen = genesis.zeros(len(self.tokens), self._vocabulary, dtype="bool", device=self.tokens.device)
        arrays = self._lengths, self.tokens, self._stops, self._keys, self._settings, self._top_k, self._left
        for _, run in itertools.groupby(enumerate(sequences), lambda at: at[1][0] - at[0]):  # neighbours in one go
            found = [each for _, each in run]
            first = found[0][0]
            for array, values in zip(arrays, zip(*map(_values, found), strict=True), strict=True):
                _write(array, first, np.array(values))
            if self.is_penalized and self._seen is not None:
                seen = np.zeros((len(found), self._vocabulary), bool)
                for row, (_, request, _) in zip(seen, found, strict=True):
                    row[np.asarray(request.ids)] = True
                _write(self._seen, first, seen)

    def end(self, row: int) -> None:
        """The sequence in `row` draws no more."""
        _write(self._left, row, np.zeros(1, np.int64))

    def draw(self, logits: Tensor) -> None:
        """The next token of each of the first rows, from their logits `[B, V]`; it goes into the ring."""
        rows = logits.shape[0]
        keys, settings, top_k, left = (
            each.narrow(0, 0, rows).array for each in (self._keys, self._settings, self._top_k, self._left)
        )
        seen = [self._seen.narrow(0, 0, rows).array] if self.is_penalized and self._seen is not None else []
        drawn, chances = sample(logits.array, keys, settings, top_k, *seen, log_probs=self._log_probs)
        nobody = genesis.empty(rows, 0, dtype="bool", device=logits.device).array
        tokens, lengths, stops = (each.narrow(0, 0, rows).array for each in (self.tokens, self._lengths, self._stops))
        rings = (each.array for each in self._rings(rows))
        next_tokens(drawn, chances, stops, tokens, lengths, left, keys, *(seen or [nobody]), *rings, self._step.array)

    def made(self, steps: int, rows: int) -> Reading:
        """Note that steps of the first `rows` rows were launched, whose tokens are on their way to the host."""
        first, self._steps = self._steps, self._steps + steps
        places = np.arange(first, self._steps) % RING
        return Reading(places, *self._rings(rows))

    def _rings(self, rows: int) -> tuple[Tensor, Tensor]:
        """The last steps' tokens `[R, B]` and their log-probabilities, `[R, 0]` where there are none."""
        wide = rows * self._log_probs
        return (
            self._ring.narrow(0, 0, RING * rows).view(RING, rows),
            self._ring_log_probs.narrow(0, 0, RING * wide).view(RING, wide),
        )


def _values(sequence: tuple[int, Request, int]) -> tuple[object, ...]:
    """What a sequence begins with: a value of each of the arrays in `DeviceState.start`."""
    _, request, left = sequence
    sampling, count = request.sampling, len(request.ids)
    seed = np.array([sampling.seed], np.uint64).view(np.int64)[0]
    stops = [*sorted(request.stop)[:STOPS], *[-1] * STOPS][:STOPS]
    keys = (seed, request.sequence, count)
    return count - 1, request.ids[-1], stops, keys, sampling.numbers, sampling.top_k or 0, left


def _write(target: Tensor, first: int, values: np.ndarray) -> None:
    """Overwrite the rows from `first` on; the host does not wait."""
    target.narrow(0, first, len(values)).copy_(genesis.from_numpy(values))


class Reading:
    """Tokens of some steps, on their way to the host.

    Args:
        places: of the steps in the ring.
        rings: tokens and log-probabilities `[R, B]`.
    """

    def __init__(self, places: np.ndarray, *rings: Tensor) -> None:
        self._places, self._event = places, cuda.Event()
        self._host = list[Array]()
        for ring in rings:
            host = pinned_empty(ring.shape, ring.dtype, ring.device) if ring.is_cuda else ring.clone().array
            if ring.is_cuda:
                overwrite(host, ring.array, non_blocking=True)
            self._host.append(host)
        if rings[0].is_cuda:
            self._event.record(cuda.current_stream(rings[0].device))

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities `[steps, B]`; waits for them."""
        self._event.synchronize()
        tokens, chances = (each.view_np()[self._places] for each in self._host)
        return tokens, chances


GRAIN = 256  # capacities are multiples
FEWEST_KEYS = 512  # of a graph
INPUTS = 3  # numbers of each token in a pass
ROOM = 512 << 20  # bytes that a cache leaves: prompts and steps need memory, too
KEPT = 16  # rows in up to this part of the device's memory are kept for the next run with the model
ADVICE = "ask for fewer tokens, shorten the prompts, or keep the cache in fp8"


class Step:
    """A step of some rows: a CUDA graph from its third call on.

    Attributes:
        rows: how many, from the first on.

    Args:
        keys: the most tokens of each of them.
    """

    def __init__(self, model: CausalLM, cache: DeviceCache, state: DeviceState, rows: int, keys: int) -> None:
        kept, model_of, device = list[Tensor](), weakref.ref(model), _weight(model).device
        self.rows, self._kept = rows, kept

        def step() -> None:
            model = model_of()
            assert model is not None
            with genesis.no_grad(), fixed_weights(has_fixed_weights(model)):
                tokens = state.tokens.narrow(0, 0, rows).view(rows, 1)
                hidden = model.next_hidden_states(tokens, StepCache(cache, rows, keys))[:, -1]  # [B, H]
                logits = model.logits(hidden)  # [B, V]
                state.draw(logits)
            kept[:] = [logits]

        self._call = captured(step, device)

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph."""
        return isinstance(self._call, Captured) and self._call.is_captured

    def __call__(self) -> None:
        """Launch it."""
        self._call()

    @property
    def logits(self) -> Tensor | None:
        """Of the last call, `[B, V]`, until another step runs."""
        return self._kept[0] if self._kept else None


def captured(function: Callable[[], None], device: Device) -> Callable[[], None]:
    """`function`, on a GPU a CUDA graph from its third call on. One that cannot be is launched as it is, and slower."""
    return function if device == CPU else Captured(function, device, lambda note: None)


class DeviceRows:
    """The rows of an engine. They hold no model, so that both go when the model does.

    Args:
        rows: sequences at a time; fewer where memory has no room for them.
        capacity: the most tokens of each, rounded up.
        dtype: of keys and values: "auto", that of the weights, or "fp8", e4m3.

    Raises:
        DeviceError: a cache in e4m3 on a GPU that has no such numbers.

    Attributes:
        form: what the rows are for, besides their size.
        asked: how many rows there would be with enough memory.
        passes: of prompts, as graphs, by what tells them apart.
        inputs, packed: what these read, and where they leave keys and values.
    """

    def __init__(self, model: CausalLM, rows: int, capacity: int, log_probs: bool, dtype: str) -> None:
        weight, vocabulary = _weight(model), model.config.vocab_size
        if dtype == "fp8" and weight.is_cuda:
            lack = fp8.lacking(cuda.get_device_capability(weight.device), weight.device)
            if lack is not None:
                raise DeviceError(f"a KV cache in fp8 {lack}", next="leave it at auto")
        self.form = (weight.device, weight.dtype, log_probs, dtype)
        self.asked = rows
        self.cache = _cache(model, rows, _rounded(capacity), weight.dtype if dtype == "auto" else float8_e4m3fn)
        self.state = DeviceState(self.cache.lengths, self.cache.left, vocabulary, log_probs, weight.dtype)
        self.steps: dict[tuple[int, int, bool], Step] = {}
        self.passes: dict[tuple[int, int], Callable[[], None]] = {}
        self.inputs = self.packed = genesis.zeros(0, device=weight.device)
        self._read: tuple[object, ...] = ()  # by graphs, and where

    def begin(self, model: CausalLM) -> None:
        """No row has a sequence. Graphs read weights where they were: another address or type makes them useless."""
        read = _read(model)
        if read != self._read:
            self.steps.clear()
            self.passes.clear()
            self._read = read
        self.state.clear()

    def make_room(self, length: int, most: int) -> None:
        """Memory for passes of `length` tokens; there are none of more than `most`."""
        if len(self.inputs) < INPUTS * length:
            length, device = bucket(length, most, GRAIN), self.cache.data.device
            self.passes.clear()  # they would read and write elsewhere
            self.inputs = self.packed = genesis.zeros(0, device=device)
            packed = genesis.empty(self.cache.packed_size(length), dtype=self.cache.data.dtype, device=device)
            self.inputs, self.packed = genesis.zeros(INPUTS * length, dtype="int64", device=device), packed

    def step(self, model: CausalLM, rows: int, keys: int) -> Step:
        """A step of at least the first `rows` rows, of at most `keys` tokens each with the step's own."""
        rows, keys = bucket(rows, self.cache.rows), bucket(keys, self.cache.capacity, FEWEST_KEYS)
        key = rows, keys, self.state.is_penalized
        if key not in self.steps:
            self.steps[key] = Step(model, self.cache, self.state, rows, keys)
        return self.steps[key]


def _weight(model: CausalLM) -> Tensor:
    """One in the type of hidden states, which weights in 8 bits are not."""
    return model.model.embed_tokens.weight


def has_fixed_weights(model: CausalLM) -> bool:
    """Whether layers read parameters or codes alone, where these lie: a step computes no weight and copies none."""
    plain = (nn.Linear, nn.RMSNorm, nn.Embedding, QuantizedLinear)
    own = [each for each in model.modules() if [*each.parameters(recurse=False), *each.buffers(recurse=False)]]
    lie_whole = all(each.is_contiguous() for each in (*model.parameters(), *model.buffers()))
    fixed = all(type(each) in plain and not getattr(each, "offset", 0) for each in own)
    return model.is_fused and lie_whole and fixed


def _read(model: CausalLM) -> tuple[object, ...]:
    """Where and in what types the weights are, and how float32 is multiplied: a step's launches depend on that."""
    tensors = [*model.parameters(), *model.buffers()]
    with genesis.no_grad():
        for module in model.modules():  # what is computed anew where a weight has changed
            scale = module.scale() if isinstance(module, nn.RMSNorm) else None
            if scale is not None:
                tensors.append(scale)
            if isinstance(module, LoRALinear) and module.lora_magnitude_vector is not None:
                tensors.append(module.row_squares())
    return cuda.allow_tf32.on, *((each.data_ptr(), each.dtype) for each in tensors)


def bucket(size: int, most: int, least: int = 1) -> int:
    """`size`, rounded up to a power of two times `least`, at most `most`."""
    while least < size:
        least *= 2
    return min(least, most)


def _rounded(capacity: int) -> int:
    """A capacity rounded up, by at most a quarter where it is large: texts that grow need new rows now and then."""
    grain = max(GRAIN, 1 << max(capacity.bit_length() - 3, 0))
    return -(-capacity // grain) * grain


def _cache(model: CausalLM, rows: int, capacity: int, dtype: DType) -> DeviceCache:
    """A cache of as many rows as there is memory for."""
    made: DeviceCache | None
    device = _weight(model).device
    while True:
        try:
            made = DeviceCache(model.config, rows, capacity, dtype, device, model._rotaries)
            if rows == 1 or has_room(device):
                return made
        except OutOfMemoryError as error:
            if rows == 1:
                error.next = ADVICE
                raise
        rows, made = rows // 2, None


def has_room(device: Device) -> bool:
    """Whether memory is left for prompts and steps beside a cache."""
    if device == CPU:
        return True
    unused = cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return cuda.mem_get_info(device)[0] + unused >= ROOM


# --- Rows that wait for the next run ----------------------------------------------------------------------------------

_kept: weakref.WeakKeyDictionary[CausalLM, DeviceRows] = weakref.WeakKeyDictionary()


def take(model: CausalLM, rows: int, capacity: int, log_probs: bool, dtype: str) -> DeviceRows:
    """Rows for a run: those that the last one left, if they are enough, or new ones."""
    found = _kept.pop(model, None)
    form = (_weight(model).device, _weight(model).dtype, log_probs, dtype)
    if found is not None and found.form == form and found.asked >= rows and found.cache.capacity >= capacity:
        return found
    del found  # before new ones are made
    return DeviceRows(model, rows, capacity, log_probs, dtype)


def keep(model: CausalLM, rows: DeviceRows) -> bool:
    """Leave rows to the next run with the model; whether it was done.

    It is not for rows that take much of the device's memory, nor for fewer than were asked for: others may find more.
    """
    data = rows.cache.data
    if rows.cache.rows < rows.asked:
        return False
    if data.is_cuda and (data.nbytes + rows.packed.nbytes) * KEPT > cuda.mem_get_info(data.device)[1]:
        return False
    _kept[model] = rows
    return True


def release(model: CausalLM) -> None:
    """Give the memory of rows and graphs back that wait for the next run with the model."""
    _kept.pop(model, None)

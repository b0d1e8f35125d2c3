"""The GPU memory that an engine keeps between runs: the cache, the state of its rows, and steps as CUDA graphs.

A step reads the state from the device and leaves it updated for the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import genesis
from genesis import Tensor, cuda, nn
from genesis.array import Array
from genesis.autograd.modes import exact as exact_sums
from genesis.autograd.modes import fixed_weights
from genesis.backend import CPU, Device
from genesis.dtypes import DType, float8_e4m3fn
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.functions.transfer import overwrite, pinned_empty
from genesis.nn.lora import LoRALinear
from genesis.nn.quantized import QuantizedLinear
from genesis.ops import fp8
from genesis.ops.sample import next_tokens, sample
from genesis.ops.sample_head import sample_head
from genesis.train.captured import Captured
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine.device_cache import DeviceCache, StepCache
from genesis_models.engine.engine import Request

STOPS = 16  # stop ids that the device checks for each row; the host checks the others
RING = 32  # steps whose tokens the device stores


class DeviceState:
    """The state of each sequence, as arrays for the ops `sample` and `next_tokens`.

    Args:
        lengths: tokens in each row of the cache.
        left: tokens that each row may still draw.
        vocabulary: size of the logits.
        log_probs: whether tokens have their log-probability.

    Attributes:
        tokens: last token of each row, which is not in the cache yet.
        is_penalized: whether steps apply a repetition penalty.
    """

    def __init__(self, lengths: Tensor, left: Tensor, vocabulary: int, log_probs: bool, logits: genesis.DType) -> None:
        rows, device = lengths.shape[0], lengths.device

        def zeros(*shape: int, dtype: Any = "int64") -> Tensor:
            return genesis.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self._lengths, self._left = zeros(rows), lengths, left
        self._stops, self._keys, self._top_k = zeros(rows, STOPS), zeros(rows, 3), zeros(rows)
        self._settings = zeros(rows, 4, dtype="float64")
        self._seen: Tensor | None = None  # [rows, vocabulary], allocated for the first sequence with a penalty
        self.is_penalized = False
        self._ring, self._step = zeros(RING * rows), zeros(1)
        self._ring_log_probs = zeros(RING * rows * log_probs, dtype="float64" if logits is genesis.float64 else None)
        self._steps, self._vocabulary, self._log_probs = 0, vocabulary, log_probs

    def clear(self) -> None:
        """Remove all sequences."""
        self._left.fill_(0)
        self._step.fill_(0)
        self._steps, self.is_penalized = 0, False

    def start(self, sequences: Sequence[tuple[int, Request, int]]) -> None:
        """Start sequences: row, request, and the most tokens to draw. The cache has each prompt but its last token."""
        if any(request.sampling.repetition_penalty != 1 for _, request, _ in sequences):
            self.is_penalized = True
            if self._seen is None:
                self._seen = genesis.zeros(len(self.tokens), self._vocabulary, dtype="bool", device=self.tokens.device)
        rows = [row for row, _, _ in sequences]
        values = [np.array(each) for each in zip(*map(_values, sequences), strict=True)]
        arrays = self._lengths, self.tokens, self._stops, self._keys, self._settings, self._top_k, self._left
        if rows == [*range(rows[0], rows[0] + len(rows))]:
            for array, value in zip(arrays, values, strict=True):
                _write(array, rows[0], value)
        else:
            self._scatter(arrays, rows, values)
        if self.is_penalized and self._seen is not None:
            for row, request, _ in sequences:
                seen = np.zeros((1, self._vocabulary), bool)
                seen[0, np.asarray(request.ids)] = True
                _write(self._seen, row, seen)

    def _scatter(self, arrays: Sequence[Tensor], rows: list[int], values: Sequence[np.ndarray]) -> None:
        """Overwrite rows that are not adjacent, with as many launches for many rows as for few."""
        device, is_new, places = self.tokens.device, np.zeros(len(self.tokens), bool), np.zeros(len(self.tokens), int)
        is_new[rows], places[rows] = True, np.arange(len(rows))
        mask, at, *found = (genesis.from_numpy(each).to(device) for each in (is_new, places, *values))
        for array, value in zip(arrays, found, strict=True):
            wide = mask if array.ndim == 1 else mask.unsqueeze(1)
            array.copy_(genesis.where(wide, value.index_select(0, at), array))

    def end(self, row: int) -> None:
        """Stop the sequence in `row`."""
        _write(self._left, row, np.zeros(1, np.int64))

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of each of the first rows from their logits `[B, V]`, and store it in the ring."""
        rows = logits.shape[0]
        keys, settings, top_k = (each.narrow(0, 0, rows).array for each in (self._keys, self._settings, self._top_k))
        seen = [self._seen.narrow(0, 0, rows).array] if self.is_penalized and self._seen is not None else []
        drawn, chances = sample(logits.array, keys, settings, top_k, *seen, log_probs=self._log_probs)
        self._store(rows, drawn, chances, seen)

    def draw_exactly(self, hidden: Tensor, weight: Tensor) -> None:
        """Draw from hidden states `[B, H]` and the head's weight `[V, H]`, in float32."""
        rows = hidden.shape[0]
        keys, settings = (each.narrow(0, 0, rows).array for each in (self._keys, self._settings))
        drawn, chances = sample_head(hidden.array, weight.array, keys, settings)
        if not self._log_probs:
            chances = genesis.empty(0, dtype="float32", device=hidden.device).array
        self._store(rows, drawn, chances, [])

    def _store(self, rows: int, drawn: Array, chances: Array, seen: list[Array]) -> None:
        """Store drawn tokens in the ring, and pass them to the next step."""
        keys, left = (each.narrow(0, 0, rows).array for each in (self._keys, self._left))
        unseen = genesis.empty(rows, 0, dtype="bool", device=self.tokens.device).array
        tokens, lengths, stops = (each.narrow(0, 0, rows).array for each in (self.tokens, self._lengths, self._stops))
        rings = (each.array for each in self._rings(rows))
        next_tokens(drawn, chances, stops, tokens, lengths, left, keys, *(seen or [unseen]), *rings, self._step.array)

    def read_later(self, steps: int, rows: int) -> Reading:
        """Record that `steps` steps of the first `rows` rows were launched, and return their tokens' pending copy."""
        first, self._steps = self._steps, self._steps + steps
        places = np.arange(first, self._steps) % RING
        return Reading(places, *self._rings(rows))

    def _rings(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the last steps' tokens `[R, B]` and log-probabilities, `[R, 0]` if they are disabled."""
        wide = rows * self._log_probs
        return (
            self._ring.narrow(0, 0, RING * rows).view(RING, rows),
            self._ring_log_probs.narrow(0, 0, RING * wide).view(RING, wide),
        )


def _values(sequence: tuple[int, Request, int]) -> tuple[object, ...]:
    """Return a sequence's initial value of each array in `DeviceState.start`."""
    _, request, left = sequence
    sampling, count = request.sampling, len(request.ids)
    seed = np.array([sampling.seed], np.uint64).view(np.int64)[0]
    stops = [*sorted(request.stop)[:STOPS], *[-1] * STOPS][:STOPS]
    keys = (seed, request.sequence, count)
    return count - 1, request.ids[-1], stops, keys, sampling.numbers, sampling.top_k or 0, left


def _write(target: Tensor, first: int, values: np.ndarray) -> None:
    """Overwrite the rows from `first` on without synchronizing."""
    target.narrow(0, first, len(values)).copy_(genesis.from_numpy(values))


class Reading:
    """The tokens of some steps, copied to the host asynchronously.

    Args:
        places: indices of the steps in the ring.
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
        """Wait for the copy, and return tokens and log-probabilities `[steps, B]`."""
        self._event.synchronize()
        tokens, chances = (each.view_np()[self._places] for each in self._host)
        return tokens, chances


GRAIN = 256  # capacities are multiples of it
FEWEST_KEYS = 512  # the smallest number of keys of a graph
INPUTS = 3  # numbers for each token of a pass
ROOM = 512 << 20  # bytes left free for prompts and steps, in addition to the logits of all rows
NARROW = 32  # a cache of up to this many rows may take all memory
SHARE = 2  # a cache of more rows takes at most 1/2 of the free memory
KEPT = 16  # rows are kept for the next run if they take at most 1/16 of the device's memory
ADVICE = "ask for fewer tokens, shorten the prompts, or store the cache in fp8"


class Step:
    """A step of some rows: a CUDA graph from its third call on.

    Attributes:
        rows: number of rows, from the first on.

    Args:
        keys: the most tokens of each row.
        exact: compute bit for bit what the forward pass of training computes, and draw without storing logits.
    """

    def __init__(
        self, model: CausalLM, cache: DeviceCache, state: DeviceState, rows: int, keys: int, exact: bool = False
    ) -> None:
        kept, model_of, device = list[Tensor](), weakref.ref(model), _weight(model).device
        self.rows, self._kept = rows, kept

        def step() -> None:
            model = model_of()
            assert model is not None
            with genesis.no_grad(), fixed_weights(has_fixed_weights(model)), exact_sums(exact):
                tokens = state.tokens.narrow(0, 0, rows).view(rows, 1)
                hidden = model.next_hidden_states(tokens, StepCache(cache, rows, keys))[:, -1]  # [B, H]
                if exact:
                    state.draw_exactly(hidden, model.head_weight)
                else:
                    kept[:] = [model.logits(hidden)]  # [B, V]
                    state.draw(kept[0])

        self._call = captured(step, device)

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph."""
        return isinstance(self._call, Captured) and self._call.is_captured

    def __call__(self) -> None:
        """Launch the step."""
        self._call()

    @property
    def logits(self) -> Tensor | None:
        """The logits `[B, V]` of the last call, until another step runs; None before it and of exact steps."""
        return self._kept[0] if self._kept else None


def captured(function: Callable[[], None], device: Device) -> Callable[[], None]:
    """Return `function` as a CUDA graph from its third call on a GPU; otherwise launched op by op."""
    return function if device == CPU else Captured(function, device, lambda note: None)


class DeviceRows:
    """The rows of an engine. They do not reference the model, so that rows kept for it are freed with it.

    Args:
        rows: the most concurrent sequences; fewer if memory is short.
        capacity: the most tokens of each, rounded up.
        dtype: dtype of keys and values: "auto" for the weights' dtype, or "fp8" (e4m3).
        exact: whether passes and steps compute bit for bit what the forward pass of training computes.

    Raises:
        DeviceError: the GPU does not support e4m3.

    Attributes:
        form: properties of the rows other than their number and capacity.
        asked: number of requested rows; `cache` has fewer if memory is short.
        wanted: number of rows that should fit into the free memory.
        passes: graphs of prefill passes, by key.
        inputs: buffer from which these graphs read.
        packed: buffer to which the passes write keys and values.
        prompts: row -> the bytes of the ids of the prompt whose keys and values the row holds.
    """

    def __init__(
        self, model: CausalLM, rows: int, capacity: int, log_probs: bool, dtype: str, exact: bool = False
    ) -> None:
        weight, vocabulary = _weight(model), model.config.vocab_size
        if dtype == "fp8" and weight.is_cuda:
            lack = fp8.lacking(cuda.get_device_capability(weight.device), weight.device)
            if lack is not None:
                raise DeviceError(f"a KV cache in fp8 {lack}", next="leave it at auto")
        self.form = (weight.device, weight.dtype, log_probs, dtype, exact)
        self.exact, self.prompts = exact, dict[int, bytes]()
        kind, capacity = weight.dtype if dtype == "auto" else float8_e4m3fn, rounded_capacity(capacity)
        self.asked, self.wanted = rows, rows
        if weight.is_cuda:
            self.wanted = width(model.config, rows, capacity, kind, free_memory(weight.device)) or 1
        self.cache = _cache(model, self.wanted, capacity, kind, exact)
        self.state = DeviceState(self.cache.lengths, self.cache.left, vocabulary, log_probs, weight.dtype)
        self.steps: dict[tuple[int, int, bool], Step] = {}
        self.passes: dict[tuple[int, int], Callable[[], None]] = {}
        self.inputs = self.packed = genesis.zeros(0, device=weight.device)
        self._read: tuple[object, ...] = ()  # what the graphs read, with addresses

    def begin(self, model: CausalLM) -> None:
        """Remove all sequences. Drop the graphs if a weight has moved to another address or dtype."""
        read = _read(model)
        if read != self._read:
            self.steps.clear()
            self.passes.clear()
            self._read = read
        self.state.clear()
        self.prompts.clear()

    def make_room(self, length: int, most: int) -> None:
        """Allocate memory for passes of `length` tokens; no pass is longer than `most`."""
        if len(self.inputs) < INPUTS * length:
            length, device = bucket(length, most, GRAIN), self.cache.data.device
            self.passes.clear()  # they use the old buffers
            self.inputs = self.packed = genesis.zeros(0, device=device)
            packed = genesis.empty(self.cache.packed_size(length), dtype=self.cache.data.dtype, device=device)
            self.inputs, self.packed = genesis.zeros(INPUTS * length, dtype="int64", device=device), packed

    def step(self, model: CausalLM, rows: int, keys: int) -> Step:
        """Return a step of at least the first `rows` rows with at most `keys` tokens each, including the step's own."""
        rows, keys = bucket(rows, self.cache.rows), bucket(keys, self.cache.capacity, FEWEST_KEYS)
        key = rows, keys, self.state.is_penalized
        if key not in self.steps:
            self.steps[key] = Step(model, self.cache, self.state, rows, keys, self.exact)
        return self.steps[key]


def _weight(model: CausalLM) -> Tensor:
    """A weight in the dtype of hidden states, which 8-bit weights do not have."""
    return model.model.embed_tokens.weight


def has_fixed_weights(model: CausalLM) -> bool:
    """Whether layers read only parameters or codes in place: a step neither computes nor copies weights."""
    plain = (nn.Linear, nn.RMSNorm, nn.Embedding, QuantizedLinear)
    own = [each for each in model.modules() if [*each.parameters(recurse=False), *each.buffers(recurse=False)]]
    lie_whole = all(each.is_contiguous() for each in (*model.parameters(), *model.buffers()))
    fixed = all(type(each) in plain and not getattr(each, "offset", 0) for each in own)
    return model.is_fused and lie_whole and fixed


def _read(model: CausalLM) -> tuple[object, ...]:
    """Return addresses and dtypes of the weights, and the float32 matmul mode: a step's launches depend on them."""
    tensors = [*model.parameters(), *model.buffers()]
    with genesis.no_grad():
        for module in model.modules():  # values derived from a weight are recomputed if it has changed
            scale = module.scale() if isinstance(module, nn.RMSNorm) else None
            if scale is not None:
                tensors.append(scale)
            if isinstance(module, LoRALinear) and module.lora_magnitude_vector is not None:
                tensors.append(module.row_squares())
    return cuda.allow_tf32.get(), *((each.data_ptr(), each.dtype) for each in tensors)


def bucket(size: int, most: int, least: int = 1) -> int:
    """Return `size` rounded up to `least` times a power of two, at most `most`."""
    while least < size:
        least *= 2
    return min(least, most)


def rounded_capacity(capacity: int) -> int:
    """Return a capacity rounded up, a large one by at most a quarter, so that growing texts rarely need new rows."""
    grain = max(GRAIN, 1 << max(capacity.bit_length() - 3, 0))
    return -(-capacity // grain) * grain


def _cache(model: CausalLM, rows: int, capacity: int, dtype: DType, exact: bool) -> DeviceCache:
    """Return a cache with as many rows as fit into memory, at most `rows`."""
    made: DeviceCache | None
    weight = _weight(model)
    device, logits = weight.device, model.config.vocab_size * weight.dtype.itemsize
    while True:
        try:
            made = DeviceCache(model.config, rows, capacity, dtype, device, model._rotaries, exact)
            if rows == 1 or has_room(device, rows * logits):
                return made
        except OutOfMemoryError as error:
            if rows == 1:
                error.next = ADVICE
                raise
        rows, made = rows // 2, None


def width(config: ModelConfig, rows: int, capacity: int, dtype: DType, free: int) -> int:
    """Return the largest number of rows, at most `rows`, whose cache fits into 1 / `SHARE` of `free` bytes; up to
    `NARROW` rows may take all of `free`. 0 if not even one row fits.
    """
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * capacity * config.head_dim * dtype.itemsize
    while rows > NARROW and rows * row * SHARE > free:
        rows = max(rows // 2, NARROW)
    while rows and rows * row + ROOM > free:
        rows //= 2
    return rows


def free_memory(device: Device) -> int:
    """Return a GPU's free memory in bytes, including memory that the allocator caches."""
    return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device) - cuda.memory_allocated(device)


def has_room(device: Device, more: int = 0) -> bool:
    """Whether the device has memory left for prompts and steps, and `more` bytes."""
    return device == CPU or free_memory(device) >= ROOM + more


# --- Rows kept for the next run ---------------------------------------------------------------------------------------

_kept: weakref.WeakKeyDictionary[CausalLM, DeviceRows] = weakref.WeakKeyDictionary()


def take(model: CausalLM, rows: int, capacity: int, log_probs: bool, dtype: str, exact: bool = False) -> DeviceRows:
    """Return rows for a run: those kept from the last run if they suffice, otherwise new ones."""
    found = _kept.pop(model, None)
    form = (_weight(model).device, _weight(model).dtype, log_probs, dtype, exact)
    if found is not None and found.form == form and found.asked >= rows and found.cache.capacity >= capacity:
        return found
    del found  # frees them before new ones are allocated
    return DeviceRows(model, rows, capacity, log_probs, dtype, exact)


def keep(model: CausalLM, rows: DeviceRows) -> bool:
    """Keep rows for the next run with the model; return whether they were kept.

    Rows that take much of the device's memory are not kept, nor are fewer rows than should fit: the next run may
    have more memory.
    """
    data = rows.cache.data
    if rows.cache.rows < rows.wanted:
        return False
    if data.is_cuda and (data.nbytes + rows.packed.nbytes) * KEPT > cuda.mem_get_info(data.device)[1]:
        return False
    _kept[model] = rows
    return True


def release(model: CausalLM) -> None:
    """Free the rows and graphs that are kept for the next run with the model."""
    _kept.pop(model, None)

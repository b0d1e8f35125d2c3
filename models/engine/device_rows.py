"""What an engine on a GPU holds for its rows, from run to run: the cache, the sequences' state, and steps as graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import genesis
from genesis import Tensor, cuda, nn
from genesis.autograd.modes import fixed_weights
from genesis.backend import CPU, Device
from genesis.dtypes import DType, float8_e4m3fn
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.nn.lora import LoRALinear
from genesis.nn.quantized import QuantizedLinear
from genesis.ops import fp8
from genesis.train.captured import Captured
from genesis_models.blocks import CausalLM
from genesis_models.engine.device_cache import DeviceCache
from genesis_models.engine.device_state import DeviceState

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
                hidden = model.next_hidden_states(tokens, cache.step(rows, keys))[:, -1]  # [B, H]
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
                tensors.append(module._row_squares())
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

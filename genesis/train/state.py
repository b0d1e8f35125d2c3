"""What a run must get back to go on bit by bit, its snapshot as a checkpoint holds it, and H, the hash of that.

`Snapshot.of` reads tensors from the run, which must not go on meanwhile: on the CPU nothing is copied, and of a device
one tensor is on the host at a time. With a `HostBuffer` they are copied there, so that training can go on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from genesis import random
from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import threads
from genesis.data.loader import PackedLoader
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.files.hashing import StateHash
from genesis.files.safetensors import TensorSource
from genesis.op import registry
from genesis.ops.rounding import joined
from genesis.optim import Optimizer
from genesis.optim.saving import kept_arrays
from genesis.optim.states import MASTER, RESIDUAL
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, NextTokens, Objective
from genesis.train.optimizer import optimizer_counts, updated_parameters
from genesis.train.ranks import ALONE, Ranks


@dataclass
class Interval:
    """Sums since the last row of metrics; saved with a checkpoint, so that a resumed run writes the same rows."""

    loss_sum: float = 0.0
    targets: int = 0
    figures: tuple[float, ...] = ()  # sums of the objective's; empty before the first step

    def add(self, loss_sum: float, targets: int, figures: Sequence[float]) -> None:
        """Add those of a step."""
        before = self.figures or (0.0,) * len(figures)
        self.figures = tuple(old + new for old, new in zip(before, figures, strict=True))
        self.loss_sum += loss_sum
        self.targets += targets

    @property
    def loss(self) -> float:
        """Mean loss of a target token."""
        return self.loss_sum / max(self.targets, 1)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far, the first of several that are equal.

    Attributes:
        step: -1 before there is one.
        targets: target tokens that were measured.
        since: evaluations after it.
    """

    step: int = -1
    loss: float = math.inf
    targets: int = 0
    since: int = 0

    def after(self, step: int, loss: float, targets: int) -> Best:
        """The best evaluation once `step` has this loss, which is finite; losses over other targets do not compare."""
        is_lower = math.isfinite(loss) and (loss < self.loss or targets != self.targets)
        return Best(step, loss, targets) if is_lower else replace(self, since=self.since + 1)

    def to_json(self) -> dict[str, Any]:
        """Its values; JSON has no infinity for the loss before there is one."""
        return {**asdict(self), "loss": self.loss if self.step >= 0 else None}


@dataclass(frozen=True)
class FrozenBase:
    """A model that a run reads and never changes: the sha256 of its files, and the names of its parameters."""

    sha256: str
    parameters: frozenset[str]


@dataclass
class TrainState:
    """A run between two steps.

    Attributes:
        step: optimizer steps done.
        num_tokens: tokens trained on so far.
        evaluated_at: the step of the last complete evaluation; no part of H.
        best: the best evaluation after a step; no part of H.
        ranks: who trains it together; each has the whole model, and a part of the optimizer's states.
        objective: what the model learns.
        draws: counters of random draws that a batch takes, once it is known; for ranks.
        base: the frozen model that adapters are trained beside, None where the model itself is trained.
    """

    model: LanguageModel
    optimizer: Optimizer
    loader: PackedLoader
    step: int = 0
    num_tokens: int = 0
    interval: Interval = field(default_factory=Interval)
    evaluated_at: int = -1
    best: Best = field(default_factory=Best)
    base: FrozenBase | None = None
    ranks: Ranks = ALONE
    objective: Objective = field(default_factory=NextTokens)
    draws: int | None = None

    def own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are the run's: all but those of the base."""
        of_base = frozenset() if self.base is None else self.base.parameters
        return ((name, p) for name, p in self.model.named_parameters() if name not in of_base)

    def counters(self) -> dict[str, Any]:
        """Step, tokens, running sums, how often each parameter was updated, as JSON values; "data" is its size."""
        interval: dict[str, Any] = {"loss_sum": self.interval.loss_sum, "targets": self.interval.targets}
        if self.interval.figures:
            interval["figures"] = list(self.interval.figures)
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "interval": interval,
            "optimizer": optimizer_counts(self.optimizer),
            "data": self._data,
            "best": self.best.to_json(),
        }

    @cached_property
    def _data(self) -> dict[str, int]:
        """Documents, tokens and targets of an epoch."""
        tokens = self.loader.tokens
        return {"documents": tokens.num_documents, "tokens": tokens.num_tokens, "targets": tokens.num_targets}

    def persistent(self) -> dict[str, list[Array]]:
        """The arrays that stay from step to step: "weights", "gradients", and "optimizer" with masters and averages."""
        parameters = [p for _, p in self.model.named_parameters()]
        kept = (x for values in self.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
        shared = self.optimizer.shared_memory()
        return {
            "weights": [p.array for p in parameters],
            "gradients": [p.grad.array for p in parameters if p.grad is not None] + shared["gradients"],
            "optimizer": [x.array for x in kept] + shared["optimizer"],
        }

    def hash(self) -> str:
        """The state hash, see `Snapshot.digest`: a call of all ranks."""
        ranks, hashed = self.ranks, StateHash()
        with self.optimizer.gathered_states():
            snapshot = Snapshot.of(self)
            snapshot.hash_arrays(snapshot.share(ranks.rank, ranks.size), hashed)
        for digests in ranks.to_main("hashed", hashed.array_digests())[1:]:
            hashed.add_digests(digests)
        return str(ranks.from_main("hash", snapshot.digest(hashed) if ranks.is_main else ""))


# --- The snapshot -----------------------------------------------------------------------------------------------------


_JOINED = 4 << 20  # elements of a split master that are joined at once


class Share(NamedTuple):
    """Names of a snapshot's weights and of its optimizer's tensors."""

    weights: list[str]
    optimizer: list[str]


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, as a checkpoint has it.

    Attributes:
        weights: the run's own parameters, by name.
        optimizer: the optimizer's tensors as `<parameter>.<name of the state>`, masters in float32.
        counters: as of `TrainState.counters`.
        base: the sha256 of a frozen base's files.
        threads: of the CPU that computed it.
    """

    step: int
    weights: Mapping[str, TensorSource]
    optimizer: Mapping[str, TensorSource]
    rng: dict[str, int]
    data: dict[str, Any]
    counters: dict[str, Any]
    evaluated_at: int
    base: str | None
    threads: int

    @classmethod
    def of(cls, state: TrainState, buffer: HostBuffer | None = None) -> Snapshot:
        """The run as it is, inside the optimizer's `gathered_states`.

        Args:
            buffer: where tensors are copied to, in stream order; None: they are read from the run.
        """
        if buffer is not None:
            buffer.begin()
        weights, optimizer = tensor_sources(state.own_parameters(), state.optimizer, buffer)
        if buffer is not None:
            buffer.end()
        return cls(
            step=state.step,
            weights=weights,
            optimizer=optimizer,
            rng=random.get_state(),
            data=state.loader.state(),
            counters=state.counters(),
            evaluated_at=state.evaluated_at,
            base=None if state.base is None else state.base.sha256,
            threads=threads(),
        )

    def share(self, rank: int = 0, size: int = 1) -> Share:
        """What one of several ranks reads of a run: arrays of about as many bytes as each other rank's.

        Rank 0 has less of the optimizer, as it writes all weights.
        """
        loads = [sum(source.nbytes for source in self.weights.values()), *[0] * (size - 1)]
        own = []
        for name, source in self.optimizer.items():
            least = loads.index(min(loads))
            loads[least] += source.nbytes
            own += [name] if least == rank else []
        return Share(list(self.weights)[rank::size], own)

    def hash_arrays(self, share: Share, into: StateHash) -> None:
        """Add the arrays of a share that `into` does not hold yet."""
        arrays = {f"model.{name}": self.weights[name] for name in share.weights}
        arrays |= {f"optimizer.{name}": self.optimizer[name] for name in share.optimizer}
        for name, source in arrays.items():
            if not into.holds(name):
                into.add_array(name, source.read())

    def digest(self, hashed: StateHash | None = None) -> str:
        """The state hash: sha256 over parameters, optimizer, random generators, data position and step.

        No clock enters. A base enters by its fingerprint.

        Args:
            hashed: holds all arrays, by `hash_arrays`; without it they are read here.
        """
        state = StateHash() if hashed is None else hashed
        if hashed is None:
            self.hash_arrays(self.share(), state)
        if self.base is not None:
            state.add_json("base", self.base)
        state.add_json("rng", self.rng)
        state.add_json("data", self.data)
        state.add_json("steps", {"step": self.step, "optimizer": self.counters["optimizer"]})
        return state.hexdigest()


def tensor_sources(
    parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, buffer: HostBuffer | None = None
) -> tuple[dict[str, TensorSource], dict[str, TensorSource]]:
    """The tensors of some parameters and those of the optimizer, as of `Snapshot`.

    Args:
        buffer: they are copied there; None: they are read where they are.
    """

    def take(array: Callable[[], Array]) -> Callable[[], np.ndarray]:
        return (lambda: array().numpy()) if buffer is None else buffer.take(array())

    weights = {
        name: TensorSource(p.dtype.numpy, p.shape, take(functools.partial(getattr, p, "array")))
        for name, p in parameters
    }

    states: dict[str, TensorSource] = {}
    for name, parameter in updated_parameters(optimizer):
        for key, kept in kept_arrays(optimizer, parameter).items():
            if key == RESIDUAL:
                read = _joined(weights[name].read, take(kept.array))
                states[f"{name}.{MASTER}"] = TensorSource(np.dtype(np.float32), parameter.shape, read)
            else:
                states[f"{name}.{key}"] = TensorSource(kept.dtype.numpy, kept.shape, take(kept.array))
    return weights, states


def masters(weights: Mapping[str, TensorSource], optimizer: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The parameters by name, of each its float32 master where the optimizer keeps one; both as of `Snapshot`."""
    return {name: optimizer.get(f"{name}.{MASTER}", source) for name, source in weights.items()}


def snapshot_bytes(state: TrainState) -> int:
    """Bytes of host memory that a snapshot takes. No values are read: the arrays may be those of a fake device."""
    total = sum(slot_bytes(p.array.nbytes) for _, p in state.own_parameters())
    for _, parameter in updated_parameters(state.optimizer):
        shared = state.optimizer.sharded(parameter)
        if shared is not None:
            sizes = [parameter.array.size * each.dtype.itemsize for each in shared[0].states.values()]
        else:
            kept = state.optimizer.state[parameter].values()
            sizes = [value.array.nbytes for value in kept if isinstance(value, Tensor)]
        total += sum(map(slot_bytes, sizes))
    return total


def _joined(weight: Callable[[], np.ndarray], residual: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """What reads a float32 master from its bfloat16 weight and the residual."""

    def read() -> np.ndarray:
        upper = weight()
        master = np.empty(upper.shape, np.float32)
        out, first, second = master.reshape(-1), upper.reshape(-1), residual().reshape(-1)
        for start in range(0, out.size, _JOINED):
            piece = slice(start, start + _JOINED)
            joined(first[piece], second[piece], out[piece])
        return master

    return read


# --- The host memory of snapshots -------------------------------------------------------------------------------------


_ALIGNMENT = 64
# Bytes that are pinned at once: a GPU's launches wait for it, some tens of milliseconds.
_PIECE = 128 << 20
_POLL_S = 0.002


def slot_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` takes of a buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """Room for one snapshot of `nbytes`, see `snapshot_bytes`: one piece, used again by each, pinned where a GPU copies
    to it. A thread touches and pins it while training goes on, so that the first snapshot costs no more than the next.

    Args:
        device: what copies to it.

    Attributes:
        size: bytes.
        not_pinned: why copies to it make training wait longer; None where they do not.

    Raises:
        OutOfMemoryError: the host has no room.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self.size, self.device = nbytes, device
        self.not_pinned: str | None = None
        try:
            whole = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        except MemoryError as error:
            what = f"no memory for the {nbytes:,} bytes of a snapshot"
            raise OutOfMemoryError(what, where="checkpoint.background", next="set it to off") from error
        skip = -whole.ctypes.data % mmap.PAGESIZE
        self._memory, self._end = whole[skip : skip + nbytes], 0
        self._pinned: list[int] = []
        self._copied: int | None = None  # an event of the device
        self._is_closed = False
        self._preparing = threading.Thread(target=self._prepare, name="genesis-snapshot-memory", daemon=True)
        self._preparing.start()

    @property
    def _backend(self) -> Any:
        return backend_for(self.device)

    def _prepare(self) -> None:
        """Touch all pages and pin them."""
        for start in range(0, self.size, _PIECE):
            if self._is_closed:
                return
            piece = self._memory[start : start + _PIECE]
            piece.fill(0)
            if self.device != CPU and self.not_pinned is None:
                from genesis.backend.cuda.driver import OutOfDeviceMemory

                try:
                    self._backend.driver.register_host(piece.ctypes.data, piece.nbytes)
                    self._pinned.append(piece.ctypes.data)
                except (DeviceError, OutOfDeviceMemory) as error:
                    self.not_pinned = str(error) or "the driver has no room"

    def begin(self) -> None:
        """What was copied here before is no longer needed."""
        self._preparing.join()
        self._end = 0

    def take(self, array: Array) -> Callable[[], np.ndarray]:
        """Copy an array in the order of the current stream; what reads the copy, after `wait`."""
        start, nbytes = self._end, array.nbytes
        self._end += slot_bytes(nbytes)
        assert self._end <= self.size, "a snapshot has the size that was asked for"
        raw = self._memory[start : start + nbytes]
        values = raw.view(array.dtype.numpy).reshape(array.shape)
        if array.device == CPU:
            np.copyto(values, array.view_np())
        else:
            source = (array if array.is_contiguous else registry["copy"](array)).data_ptr()
            driver, stream, target = self._backend.driver, self._backend.stream, raw.ctypes.data
            for first in range(start // _PIECE * _PIECE, start + nbytes, _PIECE):  # no copy is across two pinned ones
                skip, stop = max(first - start, 0), min(first + _PIECE - start, nbytes)
                driver.copy(target + skip, source + skip, stop - skip, stream)
        return lambda: values

    def end(self) -> None:
        """All is copied, or on its way."""
        if self.device != CPU:
            self._copied = self._backend.driver.mark(self._backend.stream)

    def wait(self) -> None:
        """In another thread than the one that launches work: wait until the copies are done.

        Raises:
            GenesisError: a kernel before them met bad values.
        """
        if self._copied is not None:
            from genesis.backend.cuda.faults import check

            driver = self._backend.driver
            while not driver.has_happened(self._copied):
                time.sleep(_POLL_S)
            event, self._copied = self._copied, None
            driver.destroy_event(event)
            check(self.device)

    def close(self) -> None:
        """Give the memory back."""
        self._is_closed = True
        self._preparing.join()
        if self.device != CPU:
            with contextlib.suppress(DeviceError):  # that of a device which has failed
                self._backend.driver.synchronize_stream(self._backend.stream)
        while self._pinned:
            self._backend.driver.unregister_host(self._pinned.pop())
        self._memory = np.empty(0, np.uint8)

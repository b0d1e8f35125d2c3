"""The state that a run needs to resume bit by bit, its snapshot for checkpoints, and the state hash.

`Snapshot.of` refers to the run's own tensors, so the run must not continue while the snapshot is read. On the CPU it
copies nothing; from a GPU it copies one tensor at a time to the host. With a `HostBuffer` all tensors are copied, and
training can continue.
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
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from genesis import cuda, random
from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import threads
from genesis.data.loader import PackedLoader
from genesis.errors import DeviceError, OutOfMemoryError, escape
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
    """Sums since the last row of metrics. Checkpoints save them, so that a resumed run writes the same rows."""

    loss_sum: float = 0.0
    targets: int = 0
    figures: tuple[float, ...] = ()  # sums of the objective's figures; empty before the first step

    def add(self, loss_sum: float, targets: int, figures: Sequence[float]) -> None:
        """Add the sums of a step."""
        before = self.figures or (0.0,) * len(figures)
        self.figures = tuple(old + new for old, new in zip(before, figures, strict=True))
        self.loss_sum += loss_sum
        self.targets += targets

    @property
    def loss(self) -> float:
        """Mean loss per target token."""
        return self.loss_sum / max(self.targets, 1)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far; the first of equal ones.

    Attributes:
        step: its step; -1 before the first evaluation.
        targets: target tokens that it measured.
        since: number of evaluations after it.
    """

    step: int = -1
    loss: float = math.inf
    targets: int = 0
    since: int = 0

    def after(self, step: int, loss: float, targets: int) -> Best:
        """Return the best evaluation after `step`. A finite loss over other targets always replaces the old one."""
        is_lower = math.isfinite(loss) and (loss < self.loss or targets != self.targets)
        return Best(step, loss, targets) if is_lower else replace(self, since=self.since + 1)

    def to_json(self) -> dict[str, Any]:
        """Return its values. The initial loss is null because JSON has no infinity."""
        return {**asdict(self), "loss": self.loss if self.step >= 0 else None}


@dataclass(frozen=True)
class FrozenBase:
    """A frozen model: the sha256 of its files, and the names of its parameters."""

    sha256: str
    parameters: frozenset[str]


@dataclass
class TrainState:
    """A run between two steps.

    Attributes:
        step: optimizer steps done.
        num_tokens: tokens trained on so far.
        evaluated_at: step of the last complete evaluation; not part of the state hash.
        best: best evaluation after a step; not part of the state hash.
        ranks: the ranks of the run. Each has the whole model and a shard of the optimizer's states.
        objective: the loss and what it reads.
        draws: counters of random draws per batch; None until the first step of several ranks measures it.
        base: frozen model of a run that trains adapters; None if the model itself is trained.
        platform: GPU model and version of Triton, which determine the bits of an exact run; None for other runs.
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
    platform: dict[str, str] | None = None

    def own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the run's own parameters: all except the base's."""
        of_base = frozenset() if self.base is None else self.base.parameters
        return ((name, p) for name, p in self.model.named_parameters() if name not in of_base)

    def counters(self) -> dict[str, Any]:
        """Return step, tokens, running sums, update counts and data sizes as JSON values."""
        interval: dict[str, Any] = {"loss_sum": self.interval.loss_sum, "targets": self.interval.targets}
        if self.interval.figures:
            interval["figures"] = list(self.interval.figures)
        identity = dict(self.objective.identity)
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "interval": interval,
            "optimizer": optimizer_counts(self.optimizer),
            "data": self._data,
            "best": self.best.to_json(),
            **({"objective": identity} if identity else {}),
        }

    @cached_property
    def _data(self) -> dict[str, int]:
        tokens = self.loader.tokens
        return {"documents": tokens.num_documents, "tokens": tokens.num_tokens, "targets": tokens.num_targets}

    def persistent(self) -> dict[str, list[Array]]:
        """Return the arrays that persist between steps: "weights", "gradients", "optimizer" (masters and averages),
        "frozen" (the objective's weights).
        """
        parameters = [p for _, p in self.model.named_parameters()]
        kept = (x for values in self.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
        shared = self.optimizer.shared_memory()
        return {
            "weights": [p.array for p in parameters],
            "gradients": [p.grad.array for p in parameters if p.grad is not None] + shared["gradients"],
            "optimizer": [x.array for x in kept] + shared["optimizer"],
            "frozen": list(self.objective.frozen),
        }

    def hash(self) -> str:
        """Return the state hash, see `Snapshot.digest`. All ranks must call it."""
        ranks, hashed = self.ranks, StateHash()
        with self.optimizer.gathered_states():
            snapshot = Snapshot.of(self)
            snapshot.hash_arrays(snapshot.share(ranks.rank, ranks.size), hashed)
        for digests in ranks.to_main("hashed", hashed.array_digests())[1:]:
            hashed.add_digests(digests)
        return str(ranks.from_main("hash", snapshot.digest(hashed) if ranks.is_main else ""))


# --- The snapshot -----------------------------------------------------------------------------------------------------


_JOINED = 4 << 20  # elements of a split master that are joined at a time


class Share(NamedTuple):
    """The weights and the optimizer tensors, by name, that one rank hashes."""

    weights: list[str]
    optimizer: list[str]


def platform_of(device: Device) -> dict[str, str]:
    """Return the GPU model and the version of Triton, which determine the bits of exact sums."""
    return {"gpu": cuda.get_device_name(device), "triton": version("triton")}


def platform_changes(recorded: object, now: Mapping[str, str]) -> str:
    """Return in words how a checkpoint's record of `platform_of` differs from `now`; empty if it does not."""
    was = recorded if isinstance(recorded, dict) else {}
    return "; ".join(f"{key} {escape(was.get(key))}, now {now[key]}" for key in now if was.get(key) != now[key])


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint.

    Attributes:
        weights: the run's own parameters, by name.
        optimizer: the optimizer's tensors as `<parameter>.<name of the state>`, masters in float32.
        counters: see `TrainState.counters`.
        base: sha256 of a frozen base's files.
        threads: CPU threads that computed the state.
        platform: see `TrainState.platform`.
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
    platform: dict[str, str] | None = None

    @classmethod
    def of(cls, state: TrainState, buffer: HostBuffer | None = None) -> Snapshot:
        """Take a snapshot of the run. Call it inside the optimizer's `gathered_states`.

        Args:
            buffer: receives copies of the tensors, in stream order. None: the snapshot reads the run's tensors.
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
            platform=state.platform,
        )

    def share(self, rank: int = 0, size: int = 1) -> Share:
        """Return the share of a rank. The shares of the ranks have about equal sizes.

        Rank 0 gets less of the optimizer because it writes all weights.
        """
        loads = [sum(source.nbytes for source in self.weights.values()), *[0] * (size - 1)]
        own = []
        for name, source in self.optimizer.items():
            least = loads.index(min(loads))
            loads[least] += source.nbytes
            own += [name] if least == rank else []
        return Share(list(self.weights)[rank::size], own)

    def hash_arrays(self, share: Share, into: StateHash) -> None:
        """Add the arrays of a share to `into` unless it already holds them."""
        arrays = {f"model.{name}": self.weights[name] for name in share.weights}
        arrays |= {f"optimizer.{name}": self.optimizer[name] for name in share.optimizer}
        for name, source in arrays.items():
            if not into.holds(name):
                into.add_array(name, source.read())

    def digest(self, hashed: StateHash | None = None) -> str:
        """Return the state hash: sha256 over parameters, optimizer, random generators, data position and step.

        It excludes times. A frozen base contributes only its fingerprint.

        Args:
            hashed: all arrays, added by `hash_arrays`. None: they are read and hashed now.
        """
        state = StateHash() if hashed is None else hashed
        if hashed is None:
            self.hash_arrays(self.share(), state)
        if self.base is not None:
            state.add_json("base", self.base)
        state.add_json("rng", self.rng)
        state.add_json("data", self.data)
        state.add_json("steps", {"step": self.step, "optimizer": self.counters["optimizer"]})
        if "objective" in self.counters:
            state.add_json("objective", self.counters["objective"])
        return state.hexdigest()


def tensor_sources(
    parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, buffer: HostBuffer | None = None
) -> tuple[dict[str, TensorSource], dict[str, TensorSource]]:
    """Return the given parameters and the optimizer's tensors, by name as in `Snapshot`.

    Args:
        buffer: receives copies of the tensors. None: the sources read the original arrays.
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
                read = _master_reader(weights[name].read, take(kept.array))
                states[f"{name}.{MASTER}"] = TensorSource(np.dtype(np.float32), parameter.shape, read)
            else:
                states[f"{name}.{key}"] = TensorSource(kept.dtype.numpy, kept.shape, take(kept.array))
    return weights, states


def masters(weights: Mapping[str, TensorSource], optimizer: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the float32 masters by parameter name; the weight itself where the optimizer keeps no master."""
    return {name: optimizer.get(f"{name}.{MASTER}", source) for name, source in weights.items()}


def snapshot_bytes(state: TrainState) -> int:
    """Return the bytes of host memory that a snapshot needs. It reads no values, so a fake device's arrays work."""
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


def _master_reader(weight: Callable[[], np.ndarray], residual: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """Return a function that reads a float32 master from its bfloat16 weight and the residual."""

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
# Bytes pinned at a time. Pinning blocks a GPU's launches, for some tens of milliseconds.
_PIECE = 128 << 20
_POLL_S = 0.002


def slot_bytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` occupies in a buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """Host memory for one snapshot of `nbytes`, see `snapshot_bytes`; each snapshot reuses it. It is pinned for a GPU.
    A thread touches and pins the pages while training continues, so that the first snapshot is as fast as later ones.

    Args:
        device: the device whose arrays are copied.

    Attributes:
        size: bytes.
        not_pinned: why the memory is not pinned, which makes copies block training longer; None if it is.

    Raises:
        OutOfMemoryError: the host has not enough memory.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self.size, self.device = nbytes, device
        self.not_pinned: str | None = None
        try:
            whole = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        except MemoryError as error:
            what = f"the host cannot allocate the {nbytes:,} bytes of a snapshot"
            raise OutOfMemoryError(what, where="checkpoint.background", next="set it to off") from error
        skip = -whole.ctypes.data % mmap.PAGESIZE
        self._memory, self._end = whole[skip : skip + nbytes], 0
        self._pinned: list[int] = []
        self._copied: int | None = None  # event of the device
        self._is_closed = False
        self._preparing = threading.Thread(target=self._prepare, name="genesis-snapshot-memory", daemon=True)
        self._preparing.start()

    @property
    def _backend(self) -> Any:
        return backend_for(self.device)

    def _prepare(self) -> None:
        """Touch all pages and pin them, piece by piece."""
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
        """Start a new snapshot, which overwrites the one before."""
        self._preparing.join()
        self._end = 0

    def take(self, array: Array) -> Callable[[], np.ndarray]:
        """Copy an array in stream order; return a function that returns the copy, valid after `wait`."""
        start, nbytes = self._end, array.nbytes
        self._end += slot_bytes(nbytes)
        assert self._end <= self.size, "a snapshot has the requested size"
        raw = self._memory[start : start + nbytes]
        values = raw.view(array.dtype.numpy).reshape(array.shape)
        if array.device == CPU:
            np.copyto(values, array.view_np())
        else:
            source = (array if array.is_contiguous else registry["copy"](array)).data_ptr()
            driver, stream, target = self._backend.driver, self._backend.stream, raw.ctypes.data
            for first in range(start // _PIECE * _PIECE, start + nbytes, _PIECE):  # no copy spans two pinned pieces
                skip, stop = max(first - start, 0), min(first + _PIECE - start, nbytes)
                driver.copy(target + skip, source + skip, stop - skip, stream)
        return lambda: values

    def end(self) -> None:
        """Mark the end of the copies in the stream."""
        if self.device != CPU:
            self._copied = self._backend.driver.mark(self._backend.stream)

    def wait(self) -> None:
        """Block until the copies are done. Call it in another thread than the one that launches work.

        Raises:
            GenesisError: an earlier kernel reported bad values.
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
        """Unpin and release the memory."""
        self._is_closed = True
        self._preparing.join()
        if self.device != CPU:
            with contextlib.suppress(DeviceError):  # the device has failed
                self._backend.driver.synchronize_stream(self._backend.stream)
        while self._pinned:
            self._backend.driver.unregister_host(self._pinned.pop())
        self._memory = np.empty(0, np.uint8)

"""What a checkpoint holds of a step: tensors, read one at a time, and JSON values; of the run itself, or copied.

`Snapshot.of` reads tensors from the run, which must not go on meanwhile: on the CPU nothing is copied, of a device one
tensor is on the host at a time. With a `HostBuffer` they are copied there, so that training can go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from genesis import random
from genesis.array import Array
from genesis.backend.cpu import threads
from genesis.files.hashing import StateHash
from genesis.files.safetensors import TensorSource
from genesis.ops.rounding import joined
from genesis.optim import Optimizer
from genesis.optim.saving import kept_arrays
from genesis.optim.states import MASTER, RESIDUAL
from genesis.tensor import Tensor
from genesis.train.host_buffer import HostBuffer, slot_bytes
from genesis.train.optimizer import updated_parameters

if TYPE_CHECKING:
    from genesis.train.state import TrainState

_PIECE = 4 << 20  # elements of a split master that are joined at once

Take = Callable[[Callable[[], Array]], Callable[[], np.ndarray]]  # from what gives an array to what reads its copy


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
        """The run as it is, inside the optimizer's `whole_states`.

        Args:
            buffer: where tensors are copied to, in stream order; None: they are read from the run.
        """
        if buffer is not None:
            buffer.begin()
        take = _reads if buffer is None else functools.partial(_copied, buffer)
        weights, optimizer = tensor_sources(state.own_parameters(), state.optimizer, take)
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
    parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, take: Take | None = None
) -> tuple[dict[str, TensorSource], dict[str, TensorSource]]:
    """The tensors of some parameters and those of the optimizer, as of `Snapshot`.

    Args:
        take: gives what reads an array from what gives the array; None reads it where it is.
    """
    take = _reads if take is None else take
    weights = {name: _source(parameter, take) for name, parameter in parameters}
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
    """Bytes of host memory that a snapshot takes: the run's own parameters, and the optimizer's states as it keeps
    them. It needs no values: the arrays may be those of a fake device.
    """
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


def _reads(array: Callable[[], Array]) -> Callable[[], np.ndarray]:
    return lambda: array().numpy()


def _copied(buffer: HostBuffer, array: Callable[[], Array]) -> Callable[[], np.ndarray]:
    return buffer.take(array())


def _source(parameter: Tensor, take: Take) -> TensorSource:
    array = parameter.array
    return TensorSource(array.dtype.numpy, array.shape, take(lambda: array))


def _joined(weight: Callable[[], np.ndarray], residual: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """What reads a float32 master from its bfloat16 weight and the residual."""

    def read() -> np.ndarray:
        upper = weight()
        master = np.empty(upper.shape, np.float32)
        out, first, second = master.reshape(-1), upper.reshape(-1), residual().reshape(-1)
        for start in range(0, out.size, _PIECE):
            piece = slice(start, start + _PIECE)
            joined(first[piece], second[piece], out[piece])
        return master

    return read

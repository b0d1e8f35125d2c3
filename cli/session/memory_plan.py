"""The memory of a training step on a GPU before any of it is taken: steps on a fake GPU of the same kind are counted.

The steps are those of `genesis train`, of the model in full size, with its optimizer. The fake GPU runs no kernel and
its addresses lead nowhere; but each op asks the same allocator for the same bytes in the same order, so a change to an
op, a block or an optimizer is in the plan as soon as it is in the code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from genesis import cuda
from genesis.array import empty, label
from genesis.backend import Device
from genesis.backend.cuda.simulated.fake import counting_device
from genesis.data.loader import Batch
from genesis.distributed.nccl import LITTLE
from genesis.dtypes import uint8
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.objective import NextTokens, Objective
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import check_divides
from genesis.train.state import FrozenBase, TrainState, snapshot_bytes
from genesis.train.step import measure
from genesis_models.adapters import adapter_parameters
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import empty_model

STEPS = 2  # the second one has what the first made once


class PlannedRanks(NamedTuple):
    """Ranks that share a run, of which a plan is for one.

    Attributes:
        size: how many.
        zero: what they keep parts of, `train.zero`.
        is_in_stream_order: whether their collectives are, as NCCL's; else all ranks keep the sums of all gradients.
    """

    size: int = 1
    zero: int = 1
    is_in_stream_order: bool = True


ONE_RANK = PlannedRanks()


class _CountedGroup:
    """Collectives that do nothing, of the first rank: its parts are the longest."""

    def __init__(self, ranks: PlannedRanks) -> None:
        self.rank, self.size, self.is_in_stream_order = 0, ranks.size, ranks.is_in_stream_order

    def reduce_scatter(self, *what: Any, **how: Any) -> None: ...

    all_gather = gather = all_reduce = broadcast = buffer = reduce_scatter

    def close(self) -> None: ...

    # What `Ranks` say besides.

    def in_turn(self, own: list[float]) -> list[float]:
        return [each for each in own for _ in range(self.size)]

    def all(self, own: bool) -> bool:
        return own


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a training step by what they are for.

    Attributes:
        weights, gradients: of all parameters; of several ranks, with the sums of gradients that this one keeps.
        optimizer: its running averages, and masters of 2-byte weights; a part of them where ranks share them.
        staging: what other ranks send, on its way.
        batch: tokens, labels and positions on their way, the tables of rotary angles, the figures of steps.
        activations: what is kept when the decoder's forward pass ends.
        workspace: the most that is allocated beyond all that at one time, in the loss, backward or the update.
        reserved: the most that the allocator takes from the driver for it, and for evaluations between steps. What is
            beyond `total` are free places between blocks, and what evaluations take beside the memory of graphs.
        saved: what a checkpoint holds of weights and optimizer; a snapshot of it takes as much of the host's memory.
    """

    weights: int
    gradients: int
    optimizer: int
    batch: int
    activations: int
    workspace: int
    reserved: int
    saved: int
    staging: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak, which add up to it."""
        left_out = ("reserved", "saved") if self.staging else ("reserved", "saved", "staging")
        return {name: getattr(self, name) for name in self.__slots__ if name not in left_out}

    @property
    def total(self) -> int:
        """The peak: what `genesis.cuda.max_memory_allocated` will say."""
        return sum(self.parts.values())


def memory_plan(
    config: ModelConfig,
    device: Device,
    *,
    batch: int,
    length: int,
    accumulation_steps: int = 1,
    activation_checkpointing: str = "none",
    precision: str | None = None,
    dtype: str = "bfloat16",
    optim: OptimConfig | None = None,
    select: Callable[[CausalLM], None] = lambda model: None,
    eval_batch: int | None = None,
    ranks: PlannedRanks = ONE_RANK,
    objective: Objective | None = None,
) -> MemoryPlan:
    """The plan of steps of `accumulation_steps` batches `[batch, length]` on a GPU like `device`.

    Args:
        eval_batch: sequences in a batch of evaluations, None where there are none.
        select: adds adapters, freezes what is not trained.
        ranks: who shares the batches.
        objective: what the model learns; next tokens unless given.

    Raises:
        ConfigError: ranks that do not divide the batches.
    """
    check_divides(ranks.size, accumulation_steps)
    fake = counting_device(cuda.get_device_properties(device))
    gc.collect()  # graphs of the plan before, which refer to themselves
    cuda.empty_cache(fake)
    with cuda.device(fake):
        model = empty_model(config, device=str(fake), dtype=dtype)
        select(model)
        model.activation_checkpointing, model.precision = activation_checkpointing, precision
        group: Any = _CountedGroup(ranks)
        shared = {"ranks": group, "zero": ranks.zero}
        optimizer = build_optimizer(optim or OptimConfig(), model.named_parameters(), 0, accumulation_steps, **shared)
        loader: Any = SimpleNamespace(batch_size=batch, seq_len=length)
        state = TrainState(model, optimizer, loader, ranks=group, objective=objective or NextTokens())
        held_out = None if eval_batch is None else Batch.empty(eval_batch, length)
        staging = optimizer.largest_exchange + LITTLE if optimizer.exchanges_beside else 0
        kept = label(empty((staging,), uint8, fake), "staging of collectives") if staging else None
        plan = _counted(state, fake, [Batch.empty(batch, length)] * accumulation_steps, held_out, staging)
        del kept
        return plan


def _counted(
    state: TrainState, device: Device, batches: list[Batch], held_out: Batch | None, staging: int
) -> MemoryPlan:
    """Takes steps, evaluates, and counts."""
    model: Any = state.model
    model.train()
    if state.ranks.size > 1:  # the first step of ranks is not as others are
        steps_of(state)(state, device, 1.0, 1).take(batches, 1e-5)
        gc.collect()
        cuda.empty_cache(device)
    after_forward, earlier = list[int](), list[int]()
    hook = model.model.register_forward_hook(lambda *call: after_forward.append(cuda.memory_allocated(device)))
    steps = steps_of(state)(state, device, 1.0, STEPS)
    cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        earlier = after_forward.copy()
        after_forward.clear()
        steps.take(batches, 1e-5)
    lasting = {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}
    at_rest, peak = cuda.memory_allocated(device), cuda.max_memory_allocated(device)
    activations = max(after_forward or earlier) - at_rest  # a step of replays runs no hook
    hook.remove()
    if held_out is not None:
        model.eval()
        measure(state.objective, model, held_out, device)
    return MemoryPlan(
        **lasting,
        batch=at_rest - sum(lasting.values()) - staging,
        staging=staging,
        activations=activations,
        workspace=peak - at_rest - activations,
        reserved=cuda.max_memory_reserved(device),
        saved=saved_bytes(state),
    )


def saved_bytes(state: TrainState) -> int:
    """What a snapshot takes of a run with this model: of adapters alone where it has them."""
    adapters, model = adapter_parameters(state.model), state.model  # type: ignore[arg-type]
    if adapters:
        state.base = FrozenBase("", frozenset(name for name, _ in model.named_parameters()) - adapters.keys())
    return snapshot_bytes(state)

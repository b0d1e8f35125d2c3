"""Plans the memory of a training step on the CPU from steps of a few layers and rows, extrapolated to the whole.

Once the loss is computed in more than one chunk, a step's memory is nearly linear in layers, in rows, and in their
product. Four small steps therefore determine it without a model of its parts. The pool keeps blocks for requests of the
same size, so its blocks are counted by size; numpy's temporaries are counted by Python's allocation tracing. Threads
share the rows of a batch. One share is measured for all threads, because in some step all of them hold their most
blocks of a size at the same time. The update is not shared.
"""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from genesis import from_numpy
from genesis.autograd import grad
from genesis.backend import CPU
from genesis.backend.cpu import most_reserved, pool
from genesis.data.loader import Batch
from genesis.ops.loss import chunk_rows
from genesis.tensor import Tensor
from genesis.train.config import Config
from genesis.train.objectives import build_objective
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import accumulate_gradients, share_count, trained_parameters
from genesis_cli.session.dry_run import saved_bytes
from genesis_cli.session.model import select_trained, usable_precision
from genesis_cli.session.teacher import planned_objective, teacher_bytes
from genesis_cli.session.training import cpu_threads
from genesis_models.config import ModelConfig
from genesis_models.registry import build

LAYERS = (2, 4)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes of a step on the CPU by purpose.

    Attributes:
        saved: bytes of weights and optimizer in a checkpoint.
    """

    parts: Mapping[str, int]
    saved: int

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    reserved = total


def host_plan(config: Config, shape: ModelConfig) -> HostPlan:
    """Plan a step of `config` with the threads of this process."""
    batch, length = config.train.batch_size, config.data.seq_len
    count = share_count(batch, batch * length) if build_objective(config).divides_rows else 1
    share = -(-batch // count)
    few_rows = _few_rows(shape.vocab_size, length)
    if share <= 2 * few_rows[-1]:
        few_rows = (share,)
    # Patterns that name missing layers would be an error.
    few_layers = LAYERS if shape.num_hidden_layers > LAYERS[-1] and not config.train.freeze else ()
    layers = few_layers or (shape.num_hidden_layers,)
    with cpu_threads(1):
        counted = {(n, b): _counted(config, _with_layers(shape, n), b, count) for n in layers for b in few_rows}

    def at(key: str, n: int) -> float:
        """Return the value for `n` layers and all rows of a thread."""
        return _on_line(few_rows, [counted[n, b][key] for b in few_rows], share)

    names = next(iter(counted.values()))
    found = {key: round(_on_line(layers, [at(key, n) for n in layers], shape.num_hidden_layers)) for key in names}
    lasting = {name: found[name] for name in ("weights", "gradients", "optimizer", "frozen")}
    activations = max(_reserved(found), found["start"]) - sum(lasting.values())
    if not lasting.pop("frozen"):
        return HostPlan({**lasting, "activations": activations}, found["saved"])
    lasting["frozen"] = teacher_bytes(config)  # the plan's teacher has one layer
    return HostPlan({**lasting, "activations": activations}, found["saved"])


def _reserved(found: Mapping[str, int]) -> int:
    """Return the pool's size after steps, from the results of `_counted`; it frees unused blocks now and then."""
    # When the first update creates the optimizer's last state, blocks from building the model are unused.
    in_use = max(found["start in use"], found["before update"] + found["optimizer"] - found["largest state"])
    is_trimmed = found["start"] + found["optimizer"] > most_reserved(in_use)
    reserved = found["steps" if is_trimmed else "start and steps"]
    return min(reserved, most_reserved(found["in use"])) + found["others"]


def _few_rows(vocabulary: int, length: int) -> tuple[int, ...]:
    """Return the rows of small steps whose losses are computed in more than one chunk."""
    least = max(2, chunk_rows(vocabulary, 4) // max(1, length - 1) + 1)
    return least, least + 2


def _on_line(at: tuple[int, ...], values: list[float], where: int) -> float:
    """Return the value at `where` of the line through one or two points."""
    if len(at) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (where - at[0]) / (at[1] - at[0])


def _with_layers(shape: ModelConfig, count: int) -> ModelConfig:
    if count == shape.num_hidden_layers:
        return shape
    raw = {**shape.raw, "num_hidden_layers": count}
    if isinstance(raw.get("layer_types"), list):
        raw["layer_types"] = raw["layer_types"][:count]
    return ModelConfig.from_dict(raw)


@dataclass(frozen=True)
class _Phase:
    """The memory of a phase of a step.

    Attributes:
        before: blocks of the pool by size at its start.
        added: the most additional blocks of each size.
        extra: the most additional bytes in use.
        others: bytes outside the pool.
    """

    before: Counter[int]
    added: Counter[int]
    extra: int
    others: int

    @property
    def held(self) -> int:
        """Bytes in use before the phase."""
        return sum(size * n for size, n in self.before.items())

    @property
    def in_use(self) -> int:
        """The most bytes in use."""
        return self.held + self.extra

    def combined(self, other: _Phase, times: int) -> _Phase:
        """Return the phase combined with `other` in `times` concurrent threads."""
        added = Counter({size: self.added[size] + times * other.added[size] for size in self.added | other.added})
        return _Phase(self.before, added, self.extra + times * other.extra, self.others + times * other.others)


class _Blocks:
    """The pool's blocks by size: their current number, and the most of the current phase."""

    def __init__(self) -> None:
        self.now, self.most = Counter[int](), Counter[int]()
        self.in_use = self.most_in_use = 0

    def watch(self, address: int, nbytes: int) -> None:
        """Record an allocation; `nbytes` is negative when a block is freed."""
        self.in_use += nbytes
        self.most_in_use = max(self.most_in_use, self.in_use)
        size = abs(nbytes)
        self.now[size] += 1 if nbytes > 0 else -1
        self.most[size] = max(self.most[size], self.now[size])

    def phase(self, work: Callable[[], object]) -> _Phase:
        """Run `work`, and return its memory as a phase."""
        before, in_use, held = Counter(self.now), self.in_use, pool.allocated + pool.cached
        self.most, self.most_in_use = Counter(self.now), self.in_use
        tracemalloc.reset_peak()
        traced = tracemalloc.get_traced_memory()[0]
        work()
        others = tracemalloc.get_traced_memory()[1] - traced - max(0, pool.allocated + pool.cached - held)
        return _Phase(before, self.most - before, self.most_in_use - in_use, max(0, others))


def _counted(config: Config, shape: ModelConfig, rows: int, count: int) -> dict[str, int]:
    """Run steps of one share of `count`, and count bytes."""
    # Start with an empty pool, and count its blocks and numpy's memory.
    gc.collect()
    pool.trim()
    was_tracing, blocks = tracemalloc.is_tracing(), _Blocks()
    if not was_tracing:
        tracemalloc.start()
    pool.watch = blocks.watch
    try:
        state, batch = _state(config, shape, rows), Batch.empty(rows, config.data.seq_len)
        building = _Phase(Counter(), blocks.most, blocks.most_in_use, 0)
        *start, first_update = _step(state, batch, blocks, count, micro=1)
        # Gradient sums need no more memory after the second micro-step.
        steps = _step(state, batch, blocks, count, micro=min(config.train.accumulation_steps, 2))
        lasting = {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}
        saved = saved_bytes(state)
    finally:
        pool.watch = None
        if not was_tracing:
            tracemalloc.stop()
    # Combine the phases into the figures that `host_plan` extrapolates.
    return {
        **lasting,
        "saved": saved,
        "start": _together([building, *start]),
        "start in use": max(phase.in_use for phase in (building, *start)),
        "before update": first_update.held,
        "largest state": max(first_update.added, default=0),
        "steps": _together(steps),
        "start and steps": _together([building, *start, *steps]),
        "in use": max(phase.in_use for phase in steps),
        "others": max(phase.others for phase in steps),
    }


def _step(state: TrainState, batch: Batch, blocks: _Blocks, count: int, micro: int) -> list[_Phase]:
    """Return the phases of a step: the shares of each micro-step, and the update."""
    state.optimizer.zero_grad()
    if count == 1:
        targets = state.objective.num_targets(batch)
        work = functools.partial(accumulate_gradients, state.objective, state.model, batch, targets, CPU)
        shares = [blocks.phase(work) for _ in range(micro)]
    else:
        is_first_step = state.step == 0
        shares = [_shares(state, batch, blocks, count, is_first_step) for _ in range(micro)]
    update = blocks.phase(lambda: (state.optimizer.grad_norm(), state.optimizer.step(grad_scale=1.0)))
    state.step += 1
    return [*shares, update]


def _shares(state: TrainState, batch: Batch, blocks: _Blocks, count: int, is_first_step: bool) -> _Phase:
    """Return the memory of `count` shares: one measured alone, the others while a forward pass is held."""
    trained, found, objective = trained_parameters(state.model), list[Any](), state.objective

    def loss() -> Tensor:
        fields = [from_numpy(values) for values in objective.fields(batch)]
        return objective.loss(state.model, fields, objective.num_targets(batch))[0]

    def work() -> None:
        found.append(grad(loss(), trained, allow_unused=True))

    first = blocks.phase(work)
    if is_first_step:  # the next step counts the other shares
        other, found = first, found * 2
    else:
        waiting = loss()
        other = blocks.phase(work)
        del waiting
    for parameter, *gradients in zip(trained, *found, strict=True):
        if gradients[0] is not None:
            parameter.accumulate_grad(*(gradient.array for gradient in gradients))
    return first.combined(other, count - 1)


def _together(phases: Sequence[_Phase]) -> int:
    """Return the bytes of a pool that keeps all blocks of the phases."""
    sizes = {size for phase in phases for size in phase.before | phase.added}
    return sum(size * max(phase.before[size] + phase.added[size] for phase in phases) for size in sizes)


def _state(config: Config, shape: ModelConfig, rows: int) -> TrainState:
    """Return a run with its own weights before its first step."""
    model = build(shape, config.train.seed, dtype=config.model.dtype)
    select_trained(config, model)
    model.activation_checkpointing = config.train.activation_checkpointing
    model.precision = usable_precision(config, shape, CPU)[0]
    model.train()
    optimizer = build_optimizer(config.optim, model.named_parameters(), 0, config.train.accumulation_steps)
    loader: Any = SimpleNamespace(batch_size=rows, seq_len=config.data.seq_len)
    objective = planned_objective(config, lambda teacher: build(_with_layers(teacher, 1), 0, dtype=config.model.dtype))
    return TrainState(model, optimizer, loader, objective=objective)

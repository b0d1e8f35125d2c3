"""Plans a GPU run before it begins, by running its steps on a fake GPU of the same kind: their memory and kernels.

The steps are the same as in `genesis train`, with the full-size model and its optimizer. The fake GPU runs no kernel,
and its addresses are invalid. But each op requests the same bytes from the same allocator in the same order and
launches the same kernels, so a change to an op, a block or an optimizer changes the plan too.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import genesis
from genesis import cuda
from genesis.array import empty, label
from genesis.backend import CPU, Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.compilations import is_compiling
from genesis.backend.cuda.launch import compile_ahead
from genesis.backend.cuda.simulated import counting_device, watching_kernels
from genesis.data.loader import Batch
from genesis.distributed.nccl import MAPPED_STAGING
from genesis.dtypes import uint8
from genesis.errors import GenesisError, OutOfMemoryError
from genesis.train.config import Config, OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.objective import NextTokens, Objective
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import ALONE, Ranks, check_divides
from genesis.train.state import TrainState, snapshot_bytes
from genesis.train.step import measure
from genesis_cli.session.model import frozen_base, select_trained, usable_precision
from genesis_cli.session.teacher import planned_objective
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine import Request, Sampling
from genesis_models.generate import engine_for
from genesis_models.registry import empty_model, parameter_count
from genesis_models.weights import check_fits

STEPS = 2  # the second step reuses what the first allocated once


class PlannedRanks(NamedTuple):
    """The ranks of a run; the plan is for one of them.

    Attributes:
        size: number of ranks.
        zero: `train.zero`.
        is_in_stream_order: whether collectives run in stream order, like NCCL's; otherwise each rank keeps the sums of
            all gradients.
    """

    size: int = 1
    zero: int = 1
    is_in_stream_order: bool = True


ONE_RANK = PlannedRanks()


class _CountedGroup:
    """Collectives that do nothing, on the first rank, whose shards are the largest."""

    def __init__(self, ranks: PlannedRanks) -> None:
        self.rank, self.size, self.is_in_stream_order = 0, ranks.size, ranks.is_in_stream_order

    def reduce_scatter(self, *what: Any, **how: Any) -> None: ...

    all_gather = gather = all_reduce = broadcast = buffer = reduce_scatter

    def close(self) -> None: ...

    # The rest of the interface of `Ranks`.

    def in_turn(self, own: list[float]) -> list[float]:
        return [each for each in own for _ in range(self.size)]

    def all(self, own: bool) -> bool:
        return own


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a training step by purpose.

    Attributes:
        weights: bytes of all parameters.
        gradients: bytes of all gradients; with several ranks, including the gradient sums that this rank keeps.
        optimizer: running averages, and masters of 2-byte weights; only this rank's shard if ranks share them.
        frozen: bytes of the objective's frozen weights, such as a teacher's.
        staging: buffers for data from other ranks.
        batch: tokens, labels and positions being copied, tables of rotary angles, figures of steps.
        activations: what is kept at the end of the decoder's forward pass.
        workspace: the most that is allocated in addition at one time, in the loss, backward or the update.
        reserved: the most that the allocator takes from the driver, including evaluations between steps. The bytes
            beyond `total` are gaps between blocks, and evaluations' memory outside the memory of graphs.
        saved: bytes of weights and optimizer in a checkpoint; a snapshot takes as much host memory.
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
    frozen: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak by purpose; their sum is the peak."""
        left_out = {"reserved", "saved", *(name for name in ("staging", "frozen") if not getattr(self, name))}
        return {name: getattr(self, name) for name in self.__slots__ if name not in left_out}

    @property
    def total(self) -> int:
        """The peak: the value of `genesis.cuda.max_memory_allocated` after a step."""
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
    objective: Callable[[Device], Objective] = lambda device: NextTokens(),
) -> MemoryPlan:
    """Plan steps of `accumulation_steps` batches `[batch, length]` on a GPU like `device`.

    Args:
        eval_batch: sequences in a batch of evaluations; None for no evaluations.
        select: adds adapters and freezes what is not trained.
        ranks: ranks that share the batches.
        objective: returns the training objective on a device; next tokens by default.

    Raises:
        ConfigError: the number of ranks does not divide the batches.
    """
    check_divides(ranks.size, accumulation_steps)
    fake = counting_device(cuda.get_device_properties(device))
    gc.collect()  # frees graphs of the previous plan, which form reference cycles
    cuda.empty_cache(fake)
    with cuda.device(fake):
        model = empty_model(config, device=str(fake), dtype=dtype)
        select(model)
        model.activation_checkpointing, model.precision = activation_checkpointing, precision
        group: Any = _CountedGroup(ranks)
        shared = {"ranks": group, "zero": ranks.zero}
        optimizer = build_optimizer(optim or OptimConfig(), model.named_parameters(), 0, accumulation_steps, **shared)
        loader: Any = SimpleNamespace(batch_size=batch, seq_len=length)
        state = TrainState(model, optimizer, loader, ranks=group, objective=objective(fake))
        held_out = None if eval_batch is None else Batch.empty(eval_batch, length)
        staging = optimizer.largest_exchange + MAPPED_STAGING if optimizer.overlaps_exchange else 0
        kept = label(empty((staging,), uint8, fake), "staging of collectives") if staging else None
        plan = _counted(state, fake, [Batch.empty(batch, length)] * accumulation_steps, held_out, staging)
        del kept
        return plan


def _counted(
    state: TrainState, device: Device, batches: list[Batch], held_out: Batch | None, staging: int
) -> MemoryPlan:
    """Run steps and an evaluation, and count bytes."""
    model: Any = state.model
    model.train()
    if state.ranks.size > 1:  # the first step of several ranks differs from the others
        steps_of(state)(state, device, 1.0, 1).take(batches, 1e-5)
        gc.collect()
        cuda.empty_cache(device)
    # Record memory at the end of each forward pass, and the peak of steps.
    pool = backend_of(device).pool  # the counters of genesis.cuda are 0 on a machine without a GPU
    after_forward, earlier = list[int](), list[int]()
    hook = model.model.register_forward_hook(lambda *call: after_forward.append(pool.allocated))
    steps = steps_of(state)(state, device, 1.0, STEPS)
    pool.reset_peak()
    for _ in range(STEPS):
        earlier = after_forward.copy()
        after_forward.clear()
        steps.take(batches, 1e-5)
    # Split the peak into its parts.
    lasting = {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}
    at_rest, peak = pool.allocated, pool.max_allocated
    activations = max(after_forward or earlier) - at_rest  # a replayed step runs no hook
    hook.remove()
    # An evaluation can raise what the allocator reserves.
    if held_out is not None:
        model.eval()
        measure(state.objective, model, held_out, device)
    return MemoryPlan(
        **lasting,
        batch=at_rest - sum(lasting.values()) - staging,
        staging=staging,
        activations=activations,
        workspace=peak - at_rest - activations,
        reserved=pool.max_reserved,
        saved=saved_bytes(state),
    )


def saved_bytes(state: TrainState) -> int:
    """Return the bytes of a snapshot of a run with this model; only adapters count if it has them."""
    state.base = frozen_base(state.model)  # type: ignore[arg-type]
    return snapshot_bytes(state)


# --- The memory of a run ----------------------------------------------------------------------------------------------


TOLERANCE = 0.03  # a run may start although its plan exceeds the free memory by this fraction
SAVING = ("none", "selective", "full")
SIZED = ("batch", "activations", "workspace")  # parts that grow with the tokens of a step
SHORTEST = 16  # the smallest data.seq_len that the advice suggests


def run_plan(config: Config, shape: ModelConfig, device: Device, **changed: Any) -> MemoryPlan:
    """Plan a run's steps, with some arguments of `memory_plan` changed."""
    settings: dict[str, Any] = {
        "batch": config.train.batch_size,
        "length": config.data.seq_len,
        "accumulation_steps": config.train.accumulation_steps,
        "activation_checkpointing": config.train.activation_checkpointing,
        "precision": usable_precision(config, shape, device)[0],
        "dtype": config.model.dtype,
        "optim": config.optim,
        "select": functools.partial(select_trained, config),
        "eval_batch": None if config.data.eval_fraction == 0 else config.eval_batch_size,
        "objective": lambda fake: planned_objective(
            config, functools.partial(empty_model, device=str(fake), dtype=config.model.dtype)
        ),
    }
    return memory_plan(shape, device, **(settings | changed))


def planned_memory(config: Config, shape: ModelConfig, device: Device, ranks: Ranks = ALONE) -> str | None:
    """Return a line about the memory that a run takes on `device`; None on the CPU.

    Args:
        ranks: ranks of the run; each has a device, and the line is about one.

    Raises:
        OutOfMemoryError: the run does not fit into the free memory.
    """
    if device == CPU:
        check_fits(parameter_count(shape), config.model.dtype, device, where="model")
        return None
    planned = PlannedRanks(ranks.size, config.train.zero, ranks.group.is_in_stream_order)
    plan, (free, total) = run_plan(config, shape, device, ranks=planned), cuda.mem_get_info(device)
    room = free + cuda.memory_reserved(device) - cuda.memory_allocated(device)  # free blocks of the pool count too
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in plan.parts.items() if name != "batch")
    if plan.total * (1 - TOLERANCE) > room:
        raise OutOfMemoryError(
            f"a step of this run needs {_gib(plan.total)} GiB on {device}, but only {_gib(room)} of {_gib(total)} GiB"
            f" are free: {parts}",
            where=f"train.batch_size {config.train.batch_size}, data.seq_len {config.data.seq_len}",
            next=advice(config, shape, device, plan, room, planned),
        )
    return f"memory: {_gib(plan.total)} of {_gib(total)} GiB: {parts}; {_gib(plan.reserved)} reserved"


def advice(
    config: Config,
    shape: ModelConfig,
    device: Device,
    plan: MemoryPlan,
    room: int,
    ranks: PlannedRanks = ONE_RANK,
) -> str:
    """Return which part is the largest and how to reduce it until the run fits, with the least checkpointing."""
    name = max(plan.parts, key=plan.parts.__getitem__)
    found = [f"the largest part is {name}: {_remedies(config, shape, device, name, room, ranks)}"]
    if name in ("gradients", "optimizer") and config.model.path is not None and config.lora is None:
        found.append("train adapters (lora: {}), which need little of both")
    for how in SAVING[SAVING.index(config.train.activation_checkpointing) + 1 :]:
        less = run_plan(config, shape, device, activation_checkpointing=how, ranks=ranks).total
        if less <= room:
            found.append(f"set train.activation_checkpointing to {how}, which needs {_gib(less)} GiB")
            break
    return ", or ".join(found)


def _remedies(config: Config, shape: ModelConfig, device: Device, name: str, room: int, ranks: PlannedRanks) -> str:
    optim, found = config.optim, list[str]()
    if name in SIZED:

        def fits(rows: int, length: int) -> bool:
            return run_plan(with_batch(config, rows, length), shape, device, ranks=ranks).reserved <= room

        rows, length = config.train.batch_size, config.data.seq_len
        shorter = min(length, SHORTEST)
        if rows > 1 and fits(1, length):
            found.append("lower train.batch_size")
        if length > shorter and fits(rows, shorter):
            found.append("lower data.seq_len")
        if not found and rows > 1 and fits(1, shorter):
            found.append("lower train.batch_size and data.seq_len")
    if name == "gradients" and config.model.dtype == "bfloat16" and optim.grad_dtype != "bfloat16":
        found.append("set optim.grad_dtype to bfloat16")
    if name == "optimizer" and optim.state_dtype != "bfloat16":
        found.append("set optim.state_dtype to bfloat16")
    if name == "optimizer" and config.model.dtype == "bfloat16" and optim.low_precision != "stochastic":
        found.append("set optim.low_precision to stochastic")
    return ", or ".join(found or ["use a smaller model"])


def with_batch(config: Config, rows: int, length: int | None = None) -> Config:
    """Return `config` with another train.batch_size, and another data.seq_len if `length` is given."""
    train = config.train.model_copy(update={"batch_size": rows})
    data = config.data.model_copy(update={"seq_len": length or config.data.seq_len})
    return config.model_copy(update={"train": train, "data": data})


def _gib(size: int) -> str:
    """Format bytes in GiB: one decimal, or two significant digits below 1."""
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.2g}"


# --- Kernels ----------------------------------------------------------------------------------------------------------


CHARACTERS = 4  # of a prompt for each token, on average
TOKENS = 4  # drawn tokens of a sample: the first, those until a step is captured, and one replayed step


@contextmanager
def compiled_ahead(device: Device) -> Iterator[None]:
    """Within the block, each launch on the fake GPU like `device` starts compiling its kernel for `device`."""
    driver = None if device == CPU else backend_of(device).driver
    if driver is None or driver.prepare is not None:  # this device needs no compilation
        yield
        return
    with watching_kernels(cuda.get_device_properties(device), functools.partial(compile_ahead, driver)):
        yield


def compile_samples(config: Config, shape: ModelConfig, sampling: Sampling, device: Device) -> None:
    """Start compiling the kernels of a run's samples, unless the kernels of its steps were all cached."""
    if device != CPU and config.eval.prompts and is_compiling():
        # A wrong prompt raises its error when it is drawn from.
        with compiled_ahead(device), suppress(GenesisError):
            draw_samples(config, shape, sampling, counting_device(cuda.get_device_properties(device)))


def draw_samples(config: Config, shape: ModelConfig, sampling: Sampling, fake: Device) -> None:
    """Draw the first tokens of a run's samples on a fake GPU, from prompts of about the same lengths."""
    settings = config.eval
    with cuda.device(fake), genesis.no_grad():
        model = empty_model(shape, device=str(fake), dtype=config.model.dtype)
        select_trained(config, model)
        model.eval()
        requests = [
            Request([0] * max(1, len(prompt) // CHARACTERS), sampling, settings.sample_tokens, sequence=number)
            for number, prompt in enumerate(settings.prompts)
        ]
        tokens = engine_for(model, requests).run(iter(requests))
        for _ in itertools.islice(tokens, TOKENS * len(requests)):
            pass

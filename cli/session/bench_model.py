"""`genesis bench-model`: measures training steps of a model, alone or in ranks, and compares them with torch."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple, cast

import numpy as np

from genesis import cuda
from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.data.loader import Batch
from genesis.dtypes import as_dtype
from genesis.errors import DeviceError, DistributedError, GenesisError, InterruptedRun, OutOfMemoryError
from genesis.measure import run
from genesis.measure.limits import Limits, limits_of
from genesis.measure.peer import Child, PeerError, Ratio, ratio_of, started
from genesis.measure.record import Column, Failure, Table, format_seconds
from genesis.measure.run import UNTIL_CAPTURED, Recorded, Subject, Sums, free_graphs, plain_steps, recorded_steps
from genesis.measure.session import Recording, peak_bytes
from genesis.measure.timing import Plan, Timing, measure
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.output import Output
from genesis.train.ranks import ALONE, FIRST_STEPS_S, PREPARING_S, Ranks
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.measured import show_progress
from genesis_cli.nproc import is_rank
from genesis_cli.session.profiling import subject_of
from genesis_cli.session.ranks import joined_ranks
from genesis_cli.session.training import cpu_threads
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine.device_rows import release
from genesis_models.fuse import FusedAttention, FusedHeadNormAttention
from genesis_models.registry import build, parameter_count, without_memory

PHASES = ("forward", "backward", "optimizer")
FORMULA = "tokens × (6 N + 6 L h S)"
OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
DRAWN = 4  # different batches, which steps take in turn
EVERY = 64  # steps between two readings of their figures
RECORDED = 3  # steps whose ops are timed
FAST = Plan(precision=0.05, seconds=1.0, warm_up=0.2, most_calls=1)
THOROUGH = Plan(seconds=10.0, warm_up=0.5, most_calls=1)


@dataclass(frozen=True)
class Request:
    """The steps to measure."""

    config: ModelConfig
    cases: Sequence[tuple[int, int]]  # batch and length; in ranks, of each rank's batch
    device: Device
    dtype: str  # of weights and activations
    checkpointing: str = "none"  # of activations: none, selective or full
    plan: Plan = THOROUGH  # duration and precision of each case; a sample holds one step
    versus: bool = False  # whether to compare with torch
    python: str | None = None  # the interpreter that has torch; None for this one


class Memory(NamedTuple):
    """Bytes of a step."""

    weights: int
    gradients: int
    optimizer: int  # running averages, and masters of 2-byte weights
    peak: int  # allocated bytes; on the CPU the three above plus what a step adds, Python objects included

    @property
    def rest(self) -> int:
        return self.peak - self.weights - self.gradients - self.optimizer


@dataclass
class Case:
    """Measured steps on batches of one size."""

    batch: int
    length: int
    step: Timing  # wall time as `genesis train` takes it: captured on a GPU, the slowest rank's in ranks
    memory: Memory  # of the rank with the highest peak
    flops: int
    limits: Limits
    ranks: int = 1
    phases: dict[str, float] = field(default_factory=dict)  # seconds; empty like `ops` in ranks or if recording failed
    ops: list[dict[str, Any]] = field(default_factory=list)
    token_ratio: float | None = None  # time of a token, compared with the first case's
    scaling: float | None = None  # a rank's tokens per second divided by one process's alone
    peer: Ratio | None = None  # the step in torch
    peer_memory: int | None = None  # torch's peak memory; None on the CPU
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.length}"

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.ranks * self.batch * self.length / self.step.seconds

    def share_of(self, rate: float | None) -> float | None:
        """A rank's FLOP rate divided by `rate`: model FLOP utilization."""
        return self.flops / self.step.seconds / rate if rate else None


def step_flops(config: ModelConfig, batch: int, length: int) -> int:
    """FLOPs of a step by `FORMULA`, without those that checkpointing repeats.

    N counts all parameters (a tied head once). Each is used in a multiplication and an addition in forward, and twice
    in backward. Attention takes 12·L·h·S per token, where h is the width of all heads; the causal half counts.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * length
    return batch * length * (6 * parameter_count(config) + attention)


@dataclass
class RandomTokens:
    """Replaces a run's loader: batches of random tokens, in which each row is one document."""

    batch_size: int
    seq_len: int
    vocab_size: int

    def batch(self, epoch: int, index: int) -> Batch:
        b, t = self.batch_size, self.seq_len
        ids = np.random.default_rng((epoch, index)).integers(0, self.vocab_size, (b, t))
        positions = np.broadcast_to(np.arange(t), (b, t))
        return Batch(epoch, index, ids, ids, positions, b * (t - 1), b * t, np.zeros((0, 4), np.int64))

    def describe(self, batch: Batch) -> list[str]:
        return [f"random tokens, batch {batch.index}"]


def random_steps(state: TrainState, device: Device, notes: list[str]) -> Subject:
    """The steps of a run. A GPU captures the third step as a CUDA graph, or `notes` gets the reason why it does not."""
    batches, state.step = itertools.cycle([state.loader.batch(0, index) for index in range(DRAWN)]), 0
    on_device = None if device == CPU else steps_of(state)(state, device, MAX_NORM, EVERY, notes.append)

    def drawn() -> list[Batch]:
        return list(itertools.islice(batches, state.ranks.size))

    return subject_of(state, device, on_device, drawn, lambda: LR, MAX_NORM)


def timed(subject: Subject, ranks: Ranks, plan: Plan) -> Timing:
    """The time of a step on the slowest rank; all ranks call this together, and take the same number of steps."""
    clock = 0.0  # the sum of the times that the ranks exchange, so that all end together

    def sample(_: int) -> float:
        nonlocal clock
        own = run.step_seconds(subject)
        subject.settle()
        ranks.record_seconds(own)
        slowest = max(ranks.in_turn([own]))
        clock += slowest
        return slowest

    return measure(sample, replace(plan, clock=lambda: clock))


def memory_of(state: TrainState, device: Device) -> Memory:
    """The memory of the rank with the highest peak since the last reset; all ranks call this together."""
    ranks, persistent = state.ranks, cast("dict[str, Sequence[Array]]", state.persistent())
    own = [sum(each.nbytes for each in persistent[name]) for name in ("weights", "gradients", "optimizer")]
    if device == CPU:
        batches = [state.loader.batch(0, 0)] * ranks.size
        own.append(sum(own) + peak_bytes(lambda: take_step(state, batches, LR, MAX_NORM, CPU), CPU))
    else:
        own.append(cuda.max_memory_allocated(device))
    every = [int(number) for number in ranks.in_turn(own)]
    return max((Memory(*every[rank :: ranks.size]) for rank in range(ranks.size)), key=lambda memory: memory.peak)


def measured_case(
    model: CausalLM, batch: int, length: int, request: Request, limits: Limits, child: Child | None, ranks: Ranks
) -> Case:
    """Time steps of one size with a new optimizer, compare them with torch's, and divide others by phase and op."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    optimizer = build_optimizer(optim, model.named_parameters(), 0, ranks.size, ranks.group)
    state = TrainState(model, optimizer, loader, ranks=ranks)
    device, notes, failed, found = request.device, list[str](), list[str](), list[Recording]()
    free_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    subject = random_steps(state, device, notes)
    # Ranks capture one step later, because they exchange after the first step's backward.
    plain_steps(subject, 0, 0 if device == CPU else UNTIL_CAPTURED + (ranks.size > 1))
    step, flops = timed(subject, ranks, request.plan), step_flops(model.config, batch, length)
    case = Case(batch, length, step, memory_of(state, device), flops, limits, ranks.size, notes=notes)
    if child is not None:
        compare(case, subject, child, request, ranks)
    del subject
    if ranks.size > 1:
        return case
    free_graphs(device)
    try:
        subject = random_steps(state, device, failed)
        found = recorded_steps(subject, RECORDED, 0 if device == CPU else UNTIL_CAPTURED)
    except (DeviceError, OutOfMemoryError) as error:
        failed.append(error.what)
    if failed:
        notes.append(f"no phases and ops: {failed[0]}")
    else:
        sums = Sums(Recorded("captured", [step.seconds], found), device != CPU, limits)
        case.ops, case.phases = sums.ops(), {row["name"]: row["share"] * step.seconds for row in sums.phases()}
    return case


def each_case(
    request: Request, limits: Limits, child: Child | None = None, ranks: Ranks = ALONE
) -> Iterator[Case | Failure]:
    """Measure each case of a model with random weights. In ranks a case that fails ends the job."""
    model = build(request.config, seed=0, device=str(request.device), dtype=request.dtype)
    model.activation_checkpointing = request.checkpointing
    model.train()
    for i, (batch, length) in enumerate(request.cases, 1):
        label = f"{batch}x{length}"
        if ranks.is_main:
            show_progress(f"{i} of {len(request.cases)}: {label}")
        found: Case | Failure
        try:
            with ranks.during(f"measuring {label}", FIRST_STEPS_S):
                found = measured_case(model, batch, length, request, limits, child, ranks)
        except (InterruptedRun, DistributedError):
            raise
        except (GenesisError, MemoryError) as error:
            if ranks.size > 1:
                raise
            found = Failure.of("step", label, error)
        # Free the case's memory, which the frames of the error hold until here.
        for parameter in model.parameters():
            parameter.grad = None
        release(model)
        free_graphs(request.device)
        yield found


ROUNDS, LEAST_STEPS, MOST_STEPS = 3, 3, 100
SHARE = 1 / 6  # share of the plan's time for each round of each side
# Parameters that the layers of torch's model have, or may have.
LEAN = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LEAN |= {"input_layernorm", "post_attention_layernorm"}
QKV_BIAS = {f"self_attn.{name}_proj.bias" for name in "qkv"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def lean_config(config: ModelConfig, length: int) -> dict[str, object]:
    """The sizes of torch's model for sequences of `length` tokens. Raises PeerError: it has other layers."""
    model = without_memory(config)
    names = {name.partition(".layers.0.")[2].removesuffix(".weight") for name, _ in model.named_parameters()} - {""}
    if unknown := names - LEAN - QKV_BIAS - HEAD_NORMS:
        raise PeerError(f"its model's layers have no {min(unknown)}")
    # Layers with the same parameters may still use them differently.
    forms = {type(layer.self_attn).__bases__[0] if model.is_fused else None for layer in model.model.layers}
    if not forms <= {FusedAttention, FusedHeadNormAttention}:
        raise PeerError(f"its model's layers differ from those of {config.model_type}")
    if window := min((each for each in config.layer_windows if 0 < each < length), default=0):
        raise PeerError(f"its model has no sliding window, and one of {window} is shorter than {length} tokens")
    sizes = {name: getattr(config, name) for name in SIZES}
    flags = {"qkv_bias": names >= QKV_BIAS, "head_norms": names >= HEAD_NORMS}
    return {**sizes, **flags, "rope_theta": config.rope.theta}


def compare(case: Case, subject: Subject, child: Child, request: Request, ranks: Ranks) -> None:
    """Interleave rounds of our steps and torch's, each by its slowest rank. If torch fails, a note says why."""
    with tempfile.TemporaryDirectory() as folder:  # torch's processes find each other by a file in it
        place = ranks.from_main("torch's meeting place", f"{folder}/{case.label}")
        group = {"rank": ranks.rank, "size": ranks.size, "place": place} if ranks.size > 1 else None
        try:
            config, failed = lean_config(request.config, case.length), ""
            sizes = {"batch": case.batch, "length": case.length, "dtype": request.dtype}
            child.ask("open", config=config, ranks=group, **sizes)
        except GenesisError as error:
            failed = error.what
        if not ranks.all(not failed):
            case.notes.append(f"{case.label} is not compared with torch: {failed or 'another rank failed'}")
            return
        rounds, peak = list[tuple[float, float]](), 0.0
        count = min(max(round(request.plan.seconds * SHARE / case.step.seconds), LEAST_STEPS), MOST_STEPS)
        for _ in range(ROUNDS):
            ours, answer = plain_steps(subject, count, 0), child.ask("measure", count=count)
            every = (ranks.in_turn(samples) for samples in (ours, answer["samples"]))
            slowest = ([max(e[i : i + ranks.size]) for i in range(0, len(e), ranks.size)] for e in every)
            mine, theirs = map(median, slowest)
            rounds.append((mine, theirs))
            peak = max(ranks.in_turn([answer["peak"] or 0]))
        child.ask("close")
        ranks.barrier("torch")
    case.peer, case.peer_memory = ratio_of(rounds), int(peak) or None


CASE = Column("case", "case", "text", "Rows x tokens of a rank's batch.", "label")
STEPS = [
    CASE,
    Column("step", "step", "s", "Median wall time of a step, as `genesis train` takes it.", "step.seconds"),
    Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", "step.half_width"),
    *(Column(n, n, "s", f"Time of {n}: its share of recorded steps.", f"phases.{n}") for n in PHASES),
    Column("tokens_per_second", "tokens/s", "token/s", "Trained tokens per second of all ranks."),
    Column("token_ratio", "time of a token", "ratio", "Time of a token, compared with the first case's."),
    Column("scaling", "of one rank", "share", "A rank's tokens/s as a share of one process alone."),
    Column("flops_per_second", "FLOP/s", "FLOP/s", f"FLOP/s of a rank, by {FORMULA}.",
           lambda c: c.flops / c.step.seconds),
    Column("mfu", "MFU", "share", "FLOP/s as a share of the measured matmul's.",
           lambda c: c.share_of(c.limits.flops_per_second)),
    Column("mfu_sheet", "of the sheet", "share", "FLOP/s as a share of the data sheet's peak.",
           lambda c: c.share_of(c.limits.data_sheet)),
    Column("peak", "memory", "bytes", "Peak memory of the rank with the most.", "memory.peak"),
    Column("peer_step", "torch", "s", "Median step of torch.", "peer.peer_seconds"),
    Column("ratio", "vs torch", "ratio", "torch's time / ours, in interleaved rounds.", "peer.ratio"),
    Column("ratio_band", "band of torch", "text", "Band of the ratio; noise if the rounds disagree.", "peer.band"),
    Column("peer_memory", "torch's memory", "bytes", "Peak memory of torch."),
    Column("is_noisy", "note", "text", "noisy: the machine was not quiet.",
           lambda c: "noisy" if c.step.is_noisy else ""),
]  # fmt: skip
MEMORY = [
    CASE,
    *(Column(n, n, "bytes", f"Bytes of {n}.", f"memory.{n}") for n in ("weights", "gradients", "optimizer")),
    Column("rest", "activations, workspace", "bytes", "Other bytes at the peak.", "memory.rest"),
    Column("peak", "peak", "bytes", "Peak memory.", "memory.peak"),
]


def step_tables(cases: Sequence[Case], title: str = "") -> list[Table]:
    """The tables of steps, of memory, and of the largest case's ops."""
    if not cases:
        return []
    for case in cases[1:]:
        case.token_ratio = cases[0].tokens_per_second / case.tokens_per_second
    notes = dict.fromkeys(note for case in cases for note in case.notes)
    found = [Table("steps", title, STEPS, cases, notes=notes), Table("memory", "memory", MEMORY, cases)]
    most = max(cases, key=lambda c: (c.batch * c.length, c.length))
    if most.ops:
        columns, label = run.part_columns("op", most.limits.device != CPU), f"ops of a step, {most.label}"
        room = max((op for op in most.ops if "above" in op), key=lambda op: float(op["above"]), default=None)
        above = [f"{room['name']} has the most room: {format_seconds(room['above'])} above its limit"] if room else []
        found.append(Table("ops", label, columns, most.ops, most=run.MOST, notes=above))
    return found


@contextmanager
def together(device: str, command: str, *, is_quiet: bool) -> Iterator[Ranks]:
    """The ranks that measure and end together; this process alone if no launcher started others."""
    if not is_rank():
        yield ALONE
        return
    console = Output(None if is_quiet else sys.stdout)
    with (
        Interrupts(saves=False) as interrupts,
        joined_ranks({"the command": command}, device, console, interrupts) as ranks,
        cpu_threads(max(1, threads() // (ranks.local_size or 1))),
        ranks.during("measuring", PREPARING_S),
    ):
        yield ranks


@dataclass
class Measured:
    """The results of a request; `torch` is torch's version if it was compared."""

    limits: Limits
    cases: list[Case] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    torch: str | None = None


def measure_model(request: Request, ranks: Ranks = ALONE) -> Measured:
    """All ranks measure each case, then the first alone; only its result is complete. Raises: torch is missing."""
    device, dtype = request.device, as_dtype(request.dtype)
    rates = list(vars(limits_of(device, dtype)).values())[2:] if ranks.is_main else None
    found = Measured(Limits(device, dtype, *ranks.from_main("limits", rates)))
    with ExitStack() as stack:
        stack.callback(partial(show_progress, ""))
        child = stack.enter_context(started("steps", device, request.python)) if request.versus else None
        found.torch = None if child is None else child.version
        for each in each_case(request, found.limits, child, ranks):
            if isinstance(each, Failure):
                found.failures.append(each)
            else:
                found.cases.append(each)
        if ranks.size > 1 and ranks.is_main:
            for case, one in zip(found.cases, each_case(request, found.limits), strict=True):
                if isinstance(one, Failure):
                    case.notes.append(f"{case.label}: one rank alone cannot run it: {one.error}")
                else:
                    case.scaling = case.tokens_per_second / ranks.size / one.tokens_per_second
        ranks.barrier("one rank's steps")
    return found

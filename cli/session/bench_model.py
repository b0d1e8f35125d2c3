"""`genesis bench-model`: measures the cases of a request, in one process or in ranks, and compares with torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

from genesis import cuda
from genesis.backend import CPU
from genesis.dtypes import as_dtype
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError
from genesis.measure.collectives import StepTimes, collective_table, timed_collectives
from genesis.measure.limits import Limits, limits_of
from genesis.measure.peer import Child, PeerLacks, ratio_of, started
from genesis.measure.record import Column, Failure, Table, format_seconds, table
from genesis.measure.run import (
    MOST,
    UNTIL_CAPTURED,
    Recorded,
    Sums,
    free_graphs,
    part_columns,
    plain_steps,
    recorded_steps,
)
from genesis.measure.session import Recording
from genesis.measure.timing import Timing
from genesis.train.ranks import ALONE, FIRST_STEPS_S, PREPARING_S, Ranks
from genesis.train.state import TrainState
from genesis_cli.measured import show_progress
from genesis_cli.session import bench_steps as steps
from genesis_cli.session.bench_steps import Memory, Notify, Request
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.fuse import FusedAttention, FusedHeadNormAttention
from genesis_models.registry import without_memory

PHASES = ("forward", "backward", "optimizer")
NO_ROOM = "one rank alone has no room for it, so its scaling is not known"
WATCHED_STEPS = {"cpu": 5, "cuda": 20}  # whose collectives are timed


@dataclass
class Case:
    """Steps on batches of one size, measured in one process or in ranks.

    Attributes:
        batch, length: of a rank's batch.
        step: wall time of a step as `genesis train` takes it: on a GPU a captured one, in ranks the slowest rank's.
        by_rank: seconds of a step on each rank.
        memory: of each rank.
        phases, ops: of recorded steps; empty in ranks, and where recording failed.
        times: the collectives of a step; None in one process.
        scaling: tokens a second of a rank over those of one process alone; None if that is unknown.
    """

    batch: int
    length: int
    step: Timing
    by_rank: list[float]
    memory: list[Memory]
    flops: int
    limits: Limits
    phases: dict[str, float] = field(default_factory=dict)
    ops: list[dict[str, Any]] = field(default_factory=list)
    times: StepTimes | None = None
    scaling: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Batch and length."""
        return f"{self.batch}x{self.length}"

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return len(self.by_rank) * self.batch * self.length / self.step.seconds

    def over(self, rate: float | None) -> float | None:
        """FLOPs a second of a rank over a rate: model FLOP utilization."""
        return self.flops / self.step.seconds / rate if rate else None


def bench_model(
    request: Request, limits: Limits, notify: Notify = print, ranks: Ranks = ALONE
) -> Iterator[Case | Failure]:
    """Measure each case of a model with random weights: a call of all ranks.

    Raises:
        GenesisError: in ranks, where a case that fails ends the job, because other ranks wait in it.
    """
    model = steps.trained_model(request.config, request.device, request.settings)

    def measured(batch: int, length: int) -> Case:
        with ranks.during(f"measuring {batch}x{length}", FIRST_STEPS_S):
            return measured_case(model, batch, length, request, limits, ranks)

    return steps.each_case(request, model, measured, notify, ranks)


def measured_case(
    model: CausalLM, batch: int, length: int, request: Request, limits: Limits, ranks: Ranks = ALONE
) -> Case:
    """Take steps of one size with a new optimizer: first unwatched, then recorded or, in ranks, their collectives."""
    device, notes, state = request.device, list[str](), steps.new_state(model, batch, length, ranks)
    free_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    step, by_rank = steps.timed(steps.captured_steps(state, device, notes), ranks, request.settings.plan)
    memory, flops = steps.memory_of(state, device), steps.step_flops(model.config, batch, length)
    case = Case(batch, length, step, by_rank, memory, flops, limits, notes=notes)
    if ranks.size > 1:
        count = WATCHED_STEPS[device.type]
        captured = partial(steps.captured_steps, state, device, [])
        case.times = timed_collectives(state.optimizer, ranks.group, captured, count, ranks.in_turn)
    else:
        record_parts(case, state)
    return case


def record_parts(case: Case, state: TrainState) -> None:
    """Record steps and divide them by phase and op; a note says where that fails."""
    failed, found, device = list[str](), list[Recording](), case.limits.device
    free_graphs(device)
    try:
        subject = steps.random_steps(state, device, failed)
        found = recorded_steps(subject, steps.RECORDED, 0 if device == CPU else UNTIL_CAPTURED)
    except (DeviceError, OutOfMemoryError) as error:
        failed.append(error.what)
    if failed:
        case.notes.append(f"no phases and ops: {failed[0]}")
        return
    sums = Sums(Recorded("captured", [case.step.seconds], found), device != CPU, case.limits)
    case.ops, case.phases = sums.ops(), {row["name"]: row["share"] * case.step.seconds for row in sums.phases()}


# --- Growth -----------------------------------------------------------------------------------------------------------


def growths(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Rows that compare each case with the next larger one along the batch and along the length."""
    rows = []
    for small in cases:
        for axis, fixed in (("batch", "length"), ("length", "batch")):
            larger = [c for c in cases if getattr(c, fixed) == getattr(small, fixed) and c.flops > small.flops]
            for large in sorted(larger, key=lambda c: c.flops)[:1]:
                ratio = small.tokens_per_second / large.tokens_per_second
                ends = {"before": small.label, "case": large.label}
                rows.append({"axis": axis, **ends, "ratio": ratio, "seconds": large.step.seconds})
    return rows


# --- Tables -----------------------------------------------------------------------------------------------------------

CASE = Column("case", "case", "text", "Rows x tokens of a rank's batch.", "label")
STEPS = [
    CASE,
    Column("step", "step", "s", "Median wall time of a step, as `genesis train` takes it.", "step.seconds"),
    Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", "step.half_width"),
    *(Column(n, n, "s", f"Time of {n}: its share of recorded steps.", f"phases.{n}") for n in PHASES),
    Column("tokens_per_second", "tokens/s", "token/s", "Trained tokens a second, of all ranks."),
    Column("scaling", "of one rank", "share", "Tokens/s of a rank as a share of one process alone."),
    Column("flops_per_second", "FLOP/s", "FLOP/s", f"Of a rank, by {steps.FORMULA}.",
           lambda c: c.flops / c.step.seconds),
    Column("mfu", "MFU", "share", "FLOP/s over the measured matmul's.", lambda c: c.over(c.limits.flops_per_second)),
    Column("mfu_sheet", "of the sheet", "share", "FLOP/s over the data sheet's peak.",
           lambda c: c.over(c.limits.data_sheet)),
    Column("exposed", "exposed", "s", "Time in which a step waits for collectives.",
           lambda c: c.times and sum(each.exposed for each in c.times.collectives)),
    Column("computing", "computing", "s", "Time until a rank first waits, after forward and backward.",
           "times.computing"),
    Column("peak", "memory", "bytes", "Peak memory, of the rank with the most.",
           lambda c: max(each.peak for each in c.memory)),
    Column("is_noisy", "note", "text", "Whether the machine was not quiet.", "step.note"),
]  # fmt: skip
MEMORY = [
    CASE,
    *(Column(n, n, "bytes", f"Bytes of {n}.", f"memory.0.{n}") for n in ("weights", "gradients", "optimizer")),
    Column("rest", "activations, workspace", "bytes", "At the peak.", "memory.0.rest"),
    Column("peak", "peak", "bytes", "The most at one time.", "memory.0.peak"),
]
GROWTH = [
    Column("axis", "grows", "text", "What grows."),
    Column("before", "from", "text", "The smaller case."),
    Column("case", "to", "text", "The larger case."),
    Column("ratio", "time of a token", "ratio", "Over that of the smaller case."),
    Column("seconds", "step", "s", "Time of a step of the larger case."),
]
RANKS = [
    Column("rank", "rank", "count", "Number of the rank.", "0"),
    Column("seconds", "step", "s", "Median of its own steps.", "1"),
    Column("peak", "memory", "bytes", "The most at one time.", "2.peak"),
]


def step_tables(cases: Sequence[Case], title: str = "") -> list[Table]:
    """The tables about the steps of one process or of ranks; the last ones are about the largest case."""
    most = max(cases, key=lambda c: (c.batch * c.length, c.length))
    count, notes = len(most.by_rank), dict.fromkeys(note for case in cases for note in case.notes)
    if count == 1:
        memory, growth = table("memory", "memory", MEMORY, cases), table("growth", "growth", GROWTH, growths(cases))
        found = [table("steps", title, STEPS, cases, notes=notes), memory, growth]
        rooms = [op for op in most.ops if "above" in op]
        first = max(rooms, key=lambda op: float(op["above"]), default=None)
        above = first and f"{first['name']} has the most room: {format_seconds(first['above'])} above its limit"
        columns, title = part_columns("op", most.limits.device != CPU), f"ops of a step, {most.label}"
        ops = table("ops", title, columns, most.ops, most=MOST, notes=[above] if above else [])
        return [*found, ops] if most.ops else found
    each = zip(range(count), most.by_rank, most.memory, strict=True)
    found = [
        table("ranks", f"{count} ranks, each with a batch of its own", STEPS, cases, notes=notes),
        table("each", f"each rank, {most.label}", RANKS, each),
    ]
    return [*found, collective_table(most.times, count, most.step.seconds)] if most.times else found


# --- Compared with torch ----------------------------------------------------------------------------------------------

ROUNDS, LEAST_STEPS, MOST_STEPS = 3, 3, 100
SHARE = 1 / 6  # of the plan's time for each round of each side
# Parameters of a layer that the lean recipe's layers have, or may have.
LEAN = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LEAN |= {"input_layernorm", "post_attention_layernorm"}
QKV_BIAS = {f"self_attn.{name}_proj.bias" for name in "qkv"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
# Its sizes, named as in a config.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def lean_config(config: ModelConfig, length: int) -> dict[str, object]:
    """The sizes of the lean recipe's model, for sequences of `length` tokens.

    Raises:
        PeerLacks: the recipe's layers compute something else than the model's.
    """
    model = without_memory(config)
    names = {name.partition(".layers.0.")[2].removesuffix(".weight") for name, _ in model.named_parameters()} - {""}
    if unknown := names - LEAN - QKV_BIAS - HEAD_NORMS:
        raise PeerLacks(f"the lean recipe's layers have no {min(unknown)}")
    # Layers with the same parameters may still use them differently.
    forms = {type(layer.self_attn).__bases__[0] if model.is_fused else None for layer in model.model.layers}
    if not forms <= {FusedAttention, FusedHeadNormAttention}:
        raise PeerLacks(f"the lean recipe's layers compute something else than those of {config.model_type}")
    if window := min((each for each in config.layer_windows if 0 < each < length), default=0):
        raise PeerLacks(f"the lean recipe has no sliding window, and one of {window} is shorter than {length} tokens")
    sizes = {name: getattr(config, name) for name in SIZES}
    flags = {"qkv_bias": names >= QKV_BIAS, "head_norms": names >= HEAD_NORMS}
    return {**sizes, **flags, "rope_theta": config.rope.theta}


def versus_torch(
    request: Request, notify: Notify = print, ranks: Ranks = ALONE, ours: Sequence[tuple[float, int]] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each recipe and case: a call of all ranks. A row notes what its recipe cannot do.

    One process interleaves its own steps with torch's. In ranks the two share no memory: `ours` are the seconds of a
    step and the peak memory of a rank that were measured before, for each case.

    Raises:
        UsageError, DeviceError: the peer is missing.
    """
    if not request.recipes:
        return
    model = steps.trained_model(request.config, request.device, request.settings) if ranks.size == 1 else None
    for recipe in request.recipes:
        notify(f"torch, {recipe}: starting")
        with ExitStack() as stack, ranks.during(f"measuring torch, {recipe}", PREPARING_S):
            # A file through which torch's processes find each other; it outlives them.
            place = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.is_main else ""
            place = ranks.from_main("torch's meeting place", place)
            child = stack.enter_context(started("steps", request.device, "torch", request.python))
            for number, (batch, length) in enumerate(request.cases):
                case = f"{batch}x{length}"
                notify(f"torch {child.version}, {recipe}: {case}")
                row: dict[str, Any] = {"recipe": recipe, "version": child.version, "case": case, "note": ""}
                job = {"recipe": recipe, "batch": batch, "length": length, "dtype": request.settings.dtype}
                if ranks.size > 1:
                    job["ranks"] = {"rank": ranks.rank, "size": ranks.size, "place": f"{place}/{case}"}
                try:
                    raw = dict(request.config.raw) if recipe in ("eager", "compile") else None
                    config = lean_config(request.config, length) if raw is None else raw
                    row["warm_up"] = child.ask("open", config=config, **job)["warm_up"]
                except GenesisError as error:
                    row["note"] = error.what
                if not ranks.all(not row["note"]):
                    row["note"] = row["note"] or "another rank failed"
                elif ranks.size > 1:
                    step, peak = ours[number]
                    row |= _compared(child, step, request, ranks)
                    row["memory"] = row["peer_memory"] and peak
                else:
                    row |= _beside_ours(child, model, batch, length, request)
                yield row
            ranks.barrier("torch")


def _beside_ours(child: Child, model: Any, batch: int, length: int, request: Request) -> dict[str, Any]:
    """The cells of a case on one process, with our own steps between torch's."""
    device, notes = request.device, list[str]()
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    try:
        subject = steps.captured_steps(steps.new_state(model, batch, length), device, notes)
        if notes:
            raise DeviceError(notes[0])

        def own(count: int) -> float:
            return median(plain_steps(subject, count, 0))

        cells = _compared(child, own, request, ALONE)
        return cells | {"memory": None if device == CPU else cuda.max_memory_allocated(device)}
    except (GenesisError, MemoryError) as error:
        return {"note": Failure.of("step", "", error).error}
    finally:
        steps.forget(model, device)


def _compared(child: Child, own: Callable[[int], float] | float, request: Request, ranks: Ranks) -> dict[str, Any]:
    """The ratio of the medians of some rounds, each of the slowest rank, and torch's peak memory.

    Args:
        own: our median, or a function that measures it over that many steps.
    """
    rounds, peak = list[tuple[float, float]](), 0.0
    step = own(2) if callable(own) else own
    count = min(max(round(request.settings.plan.seconds * SHARE / step), LEAST_STEPS), MOST_STEPS)
    for _ in range(ROUNDS):
        mine, answer = own(count) if callable(own) else own, child.ask("measure", count=count)
        every = ranks.in_turn(answer["samples"])  # step by step
        slowest = [max(every[i : i + ranks.size]) for i in range(0, len(every), ranks.size)]
        rounds.append((mine, median(slowest)))
        peak = max(ranks.in_turn([answer["peak"] or 0]))
    child.ask("close")
    return {"ratio": ratio_of(rounds), "peer_memory": int(peak) or None}


PEERS = [
    Column("recipe", "recipe", "text", "Of torch."),
    Column("case", "case", "text", "Rows x tokens of a batch."),
    Column("step", "Genesis", "s", "Median step of Genesis.", "ratio.seconds"),
    Column("peer_step", "torch", "s", "Median step of torch.", "ratio.peer_seconds"),
    Column("ratio", "ratio", "ratio", "Torch's time over Genesis's.", "ratio.ratio"),
    Column("spread", "spread", "share", "Largest ratio of a round over the smallest, less 1.", "ratio.spread"),
    Column("memory", "memory", "bytes", "Peak memory of Genesis."),
    Column("peer_memory", "torch's memory", "bytes", "Peak memory of torch."),
    Column("warm_up", "torch's warm-up", "s", "Its first steps, which compile."),
    Column("note", "note", "text", "Why there is no ratio, or that it is noise.",
           lambda row: row["note"] or ("noise" if row["ratio"].is_noisy else "")),
    Column("version", "version", "text", "Of torch.", hidden=True),
]  # fmt: skip


# --- The whole --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The results of a request, complete or interrupted."""

    request: Request
    limits: Limits
    cases: list[Any] = field(default_factory=list)  # Case, or Generation
    shared: list[Case] = field(default_factory=list)  # of ranks
    failures: list[Failure] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    def tables(self) -> list[Table]:
        """The tables of the report."""
        if self.request.settings.new:
            return [table("generation", "", steps.GENERATION, self.cases)] if self.cases else []
        found = [
            each for cases in (self.cases, self.shared) if cases for each in step_tables(cases, self.request.title)
        ]
        if self.peers:
            how = f"compared with torch {self.peers[0]['version']}; ratio above 1: Genesis is faster"
            found.append(table("peers", how, PEERS, self.peers))
        return found

    def compare_with_one(self) -> None:
        """Set the scaling of ranks. A case for which one process has no room gets a note and is not a failure."""
        alone = {each.label: each for each in self.cases}
        full = [each for each in self.failures if each.exit_code == OutOfMemoryError.exit_code]
        for case in self.shared:
            if one := alone.get(case.label):
                case.scaling = case.tokens_per_second / len(case.by_rank) / one.tokens_per_second
            elif any(each.label == case.label for each in full):
                case.notes.append(f"{case.label}: {NO_ROOM}")
        if self.shared:
            self.failures = [each for each in self.failures if each not in full]


def measure_model(request: Request, ranks: Ranks = ALONE) -> Measured:
    """All ranks measure each case together, the first does so alone, and all compare with torch.

    On a terminal stderr shows the progress. Only the first rank has all of it. KeyboardInterrupt ends the measuring of
    one process with the results so far.
    """
    device, dtype = request.device, as_dtype(request.settings.dtype)
    rates = list(vars(limits_of(device, dtype)).values())[2:] if ranks.is_main else None
    limits = Limits(device, dtype, *ranks.from_main("limits", rates))
    measured, notify = Measured(request, limits), show_progress if ranks.is_main else lambda text: None
    try:
        if ranks.size > 1:
            measured.shared += cast("Iterator[Case]", bench_model(request, limits, notify, ranks))
        if ranks.is_main:
            alone = steps.bench_generation if request.settings.new else bench_model
            for each in alone(request, limits, notify):
                if isinstance(each, Failure):
                    measured.failures.append(each)
                else:
                    measured.cases.append(each)
            measured.compare_with_one()
        ranks.barrier("one rank's steps")
        times = [(case.step.seconds, max(each.peak for each in case.memory)) for case in measured.shared]
        for row in versus_torch(request, notify, ranks, times):
            measured.peers.append(row)
    except KeyboardInterrupt:
        if ranks.size > 1:
            raise
        measured.interrupted = True
    finally:
        notify("")
    return measured

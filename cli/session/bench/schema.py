"""The report about a model's training steps as data: what `genesis bench-model --json` writes.

Times are seconds, sizes are bytes, shares are of 1. `Report.model_json_schema()` gives its JSON schema.
`schema_version` grows when a field goes or changes its meaning; new fields leave it as it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from genesis.profile.collective_table import CollectiveRow
from genesis.profile.schema import Failure, LimitsRow, Measured, Ratio, StrictModel, Time


class Phases(StrictModel):
    """The parts of a step: on the CPU by the clock, on a GPU by events inside the step as it is made, captured or not.

    In each step they add up to the whole; their medians do so as far as steps are alike.
    """

    forward: Time
    """To the loss, which makes the head's gradients on its way. Where threads share a batch, their mean."""
    backward: Time
    """From there to the gradients of all parameters."""
    optimizer: Time
    """The gradient norm, clipping and the update."""
    step: Time
    """All of it."""

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's share of the three together."""
        times = {name: getattr(self, name).seconds for name in ("forward", "backward", "optimizer")}
        return {name: seconds / sum(times.values()) for name, seconds in times.items()}


class Memory(StrictModel):
    """What a step takes."""

    weights: int
    """Of all parameters, as they are allocated."""
    gradients: int
    optimizer: int
    """Running averages, and masters of 2-byte weights."""
    peak: int
    """The most at one time. On a GPU what was allocated; on the CPU the three above, and the most that a step took
    beyond them, with Python's own objects."""
    planned: dict[str, int] | None
    """The parts of the plan, from steps on a fake GPU, which add up to the planned peak; null on the CPU."""

    @property
    def rest(self) -> int:
        """Activations and workspace at the peak."""
        return self.peak - self.weights - self.gradients - self.optimizer


class OpShare(StrictModel):
    """An op in a step."""

    op: str
    """Name in the registry."""
    calls: int
    """In one step; of threads that share a batch, all of theirs."""
    seconds: float
    """All its calls together; of threads that share a batch, the busiest one's."""
    share: float
    """Of the step."""
    least: float
    """Seconds that its counted bytes or FLOPs, whichever takes longer, would take at the measured limits."""
    limit: Literal["bandwidth", "compute"] | None
    """Which of them binds; null for an op that moves and computes nothing."""

    @property
    def above(self) -> float:
        """Seconds that are not needed, by the measured limits: the room for improvement."""
        return max(self.seconds - self.least, 0.0)


class Breakdown(StrictModel):
    """A step by op. On a GPU the times are those inside the CUDA graph of a step."""

    seconds: float
    """Of the step, with what measuring costs."""
    ops: list[OpShare]
    """The longest first."""
    rest: float
    """Seconds in no op: between them, and (on the CPU) Python."""

    @property
    def priorities(self) -> list[OpShare]:
        """By the room for improvement, the most first."""
        return sorted(self.ops, key=lambda each: -each.above)


class Row(StrictModel):
    """Steps on batches of one size."""

    batch: int
    """Rows of a batch."""
    length: int
    """Tokens of a row."""
    step: Time
    """Wall time of a step as `genesis train` takes it: on a GPU a captured one, on the CPU shared by threads."""
    is_captured: bool
    """The step was replayed as a CUDA graph."""
    phases: Phases
    tokens_per_second: float
    flops: int
    """Operations of a step by the formula in `Report.formula`."""
    flops_per_second: float
    mfu: float | None
    """Model FLOP utilization: `flops_per_second` as a share of a large matmul's."""
    memory: Memory
    breakdown: Breakdown | None = None
    """Null but for the largest case."""
    notes: list[str]
    """What was not as usual."""

    @property
    def label(self) -> str:
        """Batch and length for people."""
        return f"{self.batch}x{self.length}"


class Scaling(StrictModel):
    """What a larger batch or length does to the time of a token, all else alike."""

    axis: Literal["batch", "length"]
    """What grows."""
    fixed: int
    """The other one."""
    start: int
    end: int
    ratio: float
    """Step seconds for each token at `end` over those at `start`; below 1 where larger is more efficient."""


class Doubling(StrictModel):
    """A step on twice as much as the largest that was measured, predicted."""

    axis: Literal["batch", "length"]
    """What is doubled."""
    batch: int
    length: int
    seconds: float
    """On the line through the two largest steps along the axis, over their FLOPs; proportional where there is one."""
    tokens_per_second: float
    memory: int
    """Bytes at the peak: what was measured, and by what the plan grows."""
    room: int
    """Bytes that a run may take here."""
    fits: bool


class PeerStep(StrictModel):
    """A step against torch's."""

    recipe: str
    """eager: Hugging Face's model; compile: the same compiled; lean: one written for speed, compiled; of
    several ranks ddp and fsdp2: lean's, whose steps were not interleaved with ours."""
    version: str
    """Of torch."""
    batch: int
    length: int
    ratio: Ratio | None = None
    """Null where the recipe failed."""
    peak: int | None = None
    """The most memory that was allocated by us at one time; null on the CPU."""
    peer_peak: int | None = None
    """By torch."""
    warm_up: float | None = None
    """Seconds of the recipe's first steps, which compile."""
    note: str = ""
    """Why there is no ratio."""

    @property
    def label(self) -> str:
        """Batch and length for people."""
        return f"{self.batch}x{self.length}"


class SharedStep(StrictModel):
    """Steps that ranks take together, each on a batch of its own: data parallel, with ZeRO-1."""

    batch: int
    """Rows of each rank's batch."""
    length: int
    step: Time
    """Wall time of a step, which all ranks begin at once; of each step the slowest rank's."""
    rank_seconds: list[float]
    """Of each rank, the median of its own steps."""
    is_captured: bool
    """The step, with what ranks exchange, was replayed as CUDA graphs."""
    tokens_per_second: float
    """Over all ranks."""
    flops_per_second: float
    """Over all ranks, by `Report.formula`."""
    mfu: float | None
    """Of each rank: the share of a large matmul's rate there."""
    scaling: float | None = None
    """Tokens a second of a rank, as a share of those of one rank alone in `Report.rows`; null where that failed."""
    memory: list[Memory]
    """Of each rank."""
    collectives: list[CollectiveRow] = Field(default_factory=list)
    """From further steps that were timed, which does not cost those above anything."""
    computing: float | None = None
    """Of those steps: seconds until a rank first waited for others, with forward and backward done."""
    notes: list[str]

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a rank waits for collectives."""
        return sum(each.exposed for each in self.collectives)

    @property
    def label(self) -> str:
        """Batch and length for people."""
        return f"{self.batch}x{self.length}"


class ModelFacts(StrictModel):
    """The model."""

    size: str
    """As it was asked for."""
    model_type: str
    parameters: int
    """A tied head counts once."""
    config: dict[str, JsonValue]
    """Its config.json."""


class SettingsRow(StrictModel):
    """How steps were taken."""

    dtype: str
    """Of weights and activations."""
    optimizer: str
    checkpointing: str
    """Of activations."""
    threads: int | None
    """That share a batch; null on a GPU."""
    is_fast: bool
    """Little time was taken for each case."""


class Report(Measured):
    """The report."""

    limits: LimitsRow
    """For the dtype of the settings."""
    model: ModelFacts
    settings: SettingsRow
    formula: str
    """Of `Row.flops`: N parameters, L layers, h the width of all heads, S the length."""
    ranks: int = 1
    """Processes that took the steps in `shared`; those in `rows` rank 0 took alone."""
    rows: list[Row]
    shared: list[SharedStep] = Field(default_factory=list)
    """Empty with one rank."""
    scaling: list[Scaling]
    doublings: list[Doubling] = Field(default_factory=list)
    peers: list[PeerStep] = Field(default_factory=list)
    """Empty unless asked for."""
    failures: list[Failure]

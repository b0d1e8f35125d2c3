"""Where a call is under the roofline, what holds it back, and what would help: pure functions of numbers.

The least time of a call is that of the limit that binds: its bytes at the rate of a copy, or its FLOPs at the rate of
a large matrix product, whichever takes longer (Williams, Waterman & Patterson, 2009).
"""

from __future__ import annotations

from typing import NamedTuple

from genesis.profile.format import format_seconds, format_share

BANDS = ((0.9, "excellent"), (0.7, "good"), (0.5, "fair"), (0.2, "poor"), (0.0, "critical"))
WAITING = 0.75  # the GPU works less than this share of the wall time: it waits for launches
SMALLEST = 0.5  # the smallest call takes this share of the time: the work itself is the lesser part
CACHED = 1.05  # above this share of a copy's rate, data came out of a cache


class Facts(NamedTuple):
    """What was counted and measured.

    Attributes:
        flops, nbytes: of one call.
        wall: seconds of a call, eager.
        gpu: seconds of it on the GPU; None where there is none.
        bytes_per_second, flops_per_second: the limits; the second is None where no product was measured.
        smallest_wall, smallest_gpu: seconds of the smallest call.
        recording: seconds that recording for backward adds; None where it was not measured.
        multiplies: the FLOPs are those of matrix products.
    """

    flops: int
    nbytes: int
    wall: float
    gpu: float | None
    bytes_per_second: float
    flops_per_second: float | None
    smallest_wall: float
    smallest_gpu: float | None
    recording: float | None = None
    multiplies: bool = True

    @property
    def seconds(self) -> float:
        """The time of the work: on the GPU, if there is one."""
        return self.wall if self.gpu is None else self.gpu

    @property
    def copy_seconds(self) -> float:
        """That its bytes would take in a copy."""
        return self.nbytes / self.bytes_per_second

    @property
    def product_seconds(self) -> float:
        """That its FLOPs would take in a large matrix product; 0 where none was measured."""
        return self.flops / self.flops_per_second if self.flops_per_second else 0.0


class Verdict(NamedTuple):
    """What the facts say.

    Attributes:
        intensity, ridge: FLOPs a byte of the call, and from which on compute is the limit; None where one is 0.
        limit: "bandwidth" or "compute", the one that binds; None for a call that moves and computes nothing.
        bandwidth_share, compute_share: of the limits that were reached.
        share: of the limit that binds; above 1 where data came out of a cache.
        band: of the share, from excellent to critical; None without a limit.
        cause: what the time is spent on: launch, bandwidth, compute or autograd.
        advice: what would help.
    """

    intensity: float | None
    ridge: float | None
    limit: str | None
    bandwidth_share: float
    compute_share: float | None
    share: float | None
    band: str | None
    cause: str
    advice: str


def judge(facts: Facts) -> Verdict:
    """Everything that follows from the facts."""
    moved, computed = facts.copy_seconds / facts.seconds, facts.product_seconds / facts.seconds
    limit = None if not facts.nbytes and not facts.flops else "compute" if computed > moved else "bandwidth"
    share = None if limit is None else max(moved, computed)
    cause = cause_of(facts, limit)
    return Verdict(
        intensity=facts.flops / facts.nbytes if facts.nbytes else None,
        ridge=facts.flops_per_second / facts.bytes_per_second if facts.flops_per_second else None,
        limit=limit,
        bandwidth_share=moved,
        compute_share=computed if facts.flops_per_second else None,
        share=share,
        band=None if share is None else band_of(share),
        cause=cause,
        advice=_advice(facts, cause, share),
    )


def band_of(share: float) -> str:
    """The word for a share of the limit that binds."""
    return next(name for least, name in BANDS if share >= least)


def cause_of(facts: Facts, limit: str | None) -> str:
    """What the time of a call is spent on, mostly."""
    if facts.recording is not None and facts.recording > facts.wall:
        return "autograd"
    if limit is None or _is_launch_bound(facts):
        return "launch"
    return limit


def _is_launch_bound(facts: Facts) -> bool:
    if facts.gpu is None or facts.smallest_gpu is None:
        return facts.smallest_wall >= SMALLEST * facts.wall
    return facts.gpu < WAITING * facts.wall or facts.smallest_gpu >= SMALLEST * facts.gpu


def _advice(facts: Facts, cause: str, share: float | None) -> str:
    if cause == "autograd":
        assert facts.recording is not None
        return (
            f"recording adds {format_seconds(facts.recording)} to a call of {format_seconds(facts.wall)}:"
            " use no_grad() where no gradient is needed, or one fused op instead of several"
        )
    if cause == "launch":
        return _advice_on_launches(facts)
    assert share is not None
    return _advice_on_bandwidth(facts, share) if cause == "bandwidth" else _advice_on_compute(facts, share)


def _advice_on_launches(facts: Facts) -> str:
    if facts.gpu is not None and facts.gpu < WAITING * facts.wall:
        return (
            f"the GPU works {format_seconds(facts.gpu)} of {format_seconds(facts.wall)}:"
            " capture the calls in a CUDA graph, or fuse this one with its neighbours"
        )
    smallest, whole = (
        (facts.smallest_wall, facts.wall)
        if facts.gpu is None or facts.smallest_gpu is None
        else (facts.smallest_gpu, facts.gpu)
    )
    return (
        f"the smallest call takes {format_seconds(smallest)} of these {format_seconds(whole)}:"
        " make fewer calls on larger tensors"
    )


def _advice_on_bandwidth(facts: Facts, share: float) -> str:
    if share > CACHED:
        return "faster than a copy through memory: its data stays in a cache; a larger shape shows memory's cost"
    if share >= 0.7:
        return f"at {share:.0%} of a copy only fewer bytes help: a narrower dtype, or fusing it with its neighbours"
    return (
        f"a copy of its bytes takes {format_seconds(facts.copy_seconds)}, the call {1 / share:.1f} times as long:"
        " look for further passes over memory, temporaries, costly arithmetic, and strides that jump"
    )


def _advice_on_compute(facts: Facts, share: float) -> str:
    if share >= 0.7:
        return f"at {share:.0%} of the largest product's rate only fewer FLOPs or a narrower dtype help"
    if not facts.multiplies:
        return (
            "it computes more than it moves, and what it computes are no products, whose rate is out of its reach:"
            " fewer or cheaper operations an element help"
        )
    return f"at {format_share(share)} of the largest product's rate: batch small products into larger ones"

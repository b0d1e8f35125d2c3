"""What many rows say together: counts, medians, the best and the worst, and what to do next. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from genesis.measure.cases import CATEGORIES
from genesis.profile.format import format_ratio, format_seconds, format_share
from genesis.profile.roofline import BANDS, CACHED
from genesis.profile.schema import Failure, OpRow, Peer
from genesis.report.schema import Category, Change, Entry, PeerSummary, Ranked, Summary

RANKED = 5
NAMED = 4  # cases that a sentence names
GOOD = next(least for least, name in BANDS if name == "good")
MANY = 0.25  # a share of cases that is worth a sentence


def seconds_of(row: OpRow) -> float:
    """The time that its share is of: on the GPU, where there is one."""
    return (row.gpu or row.wall).seconds


def is_call_bound(row: OpRow) -> bool:
    """Whether its time is mostly that of the call itself, so that its share says nothing about the kernel."""
    return row.cause in ("launch", "autograd")


def is_loaded(row: OpRow) -> bool:
    """Whether its share says something."""
    return row.share is not None and not is_call_bound(row)


def bands_of(rows: Iterable[OpRow]) -> dict[str, int]:
    """How many rows are in each band, from excellent to critical; call-bound ones are left out."""
    bands = [row.band for row in rows if is_loaded(row)]
    return {name: bands.count(name) for _, name in BANDS}  # type: ignore[arg-type]


def listed(texts: Sequence[str], most: int = NAMED) -> str:
    """`a, b, c and 3 others`."""
    more = len(texts) - most
    return ", ".join(texts) if more <= 0 else f"{', '.join(texts[:most])} and {more} other{'s' * (more > 1)}"


def summarize(entries: Sequence[Entry], failures: Sequence[Failure], changes: Sequence[Change] = ()) -> Summary:
    """The summary of all cases that were tried."""
    rows = [entry.row for entry in entries]
    tried = len(rows) + len(failures)
    judged = [entry for entry in entries if is_loaded(entry.row)]
    return Summary(
        cases=tried,
        measured=len(rows),
        success_rate=len(rows) / tried if tried else 1.0,
        median_share=_median_share(rows),
        bands=bands_of(rows),
        launch_bound=sum(map(is_call_bound, rows)),
        cached=sum(_is_cached(row) for row in rows),
        noisy=sum(row.is_noisy for row in rows),
        categories=list(_categories(entries)),
        best=[_ranked(entry) for entry in _best(judged)],
        worst=[_ranked(entry) for entry in _worst(judged)],
        peer=_peer(rows),
        recommendations=list(_recommendations(entries, failures, changes)),
    )


def _peer(rows: Iterable[OpRow]) -> PeerSummary | None:
    compared = [row.peer for row in rows if row.peer is not None]
    if not compared:
        return None
    return PeerSummary(
        name=compared[0].name,
        version=compared[0].version,
        cases=len(compared),
        median_ratio=median(peer.forward.ratio for peer in compared),
        slower=sum(map(_is_slower, compared)),
    )


def _is_slower(peer: Peer) -> bool:
    """The peer is faster, and not by chance."""
    return peer.forward.ratio < 1 - peer.forward.spread


def _median_share(rows: Iterable[OpRow]) -> float | None:
    shares = [row.share for row in rows if row.share is not None and is_loaded(row)]
    return median(shares) if shares else None


def _is_cached(row: OpRow) -> bool:
    return row.limit == "bandwidth" and is_loaded(row) and (row.share or 0.0) > CACHED


def _best(judged: Iterable[Entry]) -> list[Entry]:
    through_memory = [each for each in judged if not _is_cached(each.row) and (each.row.share or 0.0) >= GOOD]
    return sorted(through_memory, key=lambda each: -(each.row.share or 0.0))[:RANKED]


def _worst(judged: Iterable[Entry]) -> list[Entry]:
    low = [each for each in judged if (each.row.share or 0.0) < GOOD]
    return sorted(low, key=lambda each: each.row.share or 0.0)[:RANKED]


def _ranked(entry: Entry) -> Ranked:
    row = entry.row
    assert row.share is not None and row.band is not None
    return Ranked(
        name=row.name,
        label=row.label,
        dtype=row.dtype,
        seconds=seconds_of(row),
        share=row.share,
        band=row.band,
        cause=row.cause,
        advice=row.advice,
    )


def _categories(entries: Sequence[Entry]) -> Iterable[Category]:
    for category in CATEGORIES:
        rows = [entry.row for entry in entries if entry.category == category]
        if rows:
            yield Category(
                category=category,
                ops=len({row.name for row in rows}),
                cases=len(rows),
                launch_bound=sum(map(is_call_bound, rows)),
                median_share=_median_share(rows),
                bands=bands_of(rows),
            )


# --- What to do next --------------------------------------------------------------------------------------------------


def _recommendations(entries: Sequence[Entry], failures: Sequence[Failure], changes: Sequence[Change]) -> Iterable[str]:
    """Sentences, the most pressing first."""
    rows = [entry.row for entry in entries]
    if failures:
        names = listed([f"{f.name} {f.label}" for f in failures])
        yield f"Repair what failed: {names}; the errors are below."
    slower = sorted((c for c in changes if c.verdict == "slower"), key=lambda c: -c.ratio)
    if slower:
        names = listed([f"{c.name} {c.label} ×{format_ratio(c.ratio)}" for c in slower])
        yield f"Find out what made these slower than in the last run, beyond the noise: {names}."
    yield from _about_peer(rows)
    yield from _about_limits(entries)
    yield from _about_launches(rows)
    beaten = [row for row in rows if row.limit == "compute" and (row.share or 0.0) > CACHED]
    if beaten:
        yield (
            f"{len(beaten)} product{'s' * (len(beaten) > 1)} ran faster than the limit, which was measured while the"
            " machine had other work to do: measure again for shares that mean something."
        )
    noisy = [row for row in rows if row.is_noisy]
    if rows and len(noisy) >= MANY * len(rows):
        yield (
            f"{len(noisy)} of {len(rows)} cases are noisy, so small differences mean nothing:"
            " measure again on a quiet machine, and with more time."
        )


def _about_peer(rows: Sequence[OpRow]) -> Iterable[str]:
    """The cases in which the peer is faster, the worst first."""
    slower = [row for row in rows if row.peer is not None and _is_slower(row.peer)]
    if slower:
        slower.sort(key=lambda row: row.peer.forward.ratio if row.peer else 0.0)
        names = listed(
            [f"{row.name} {row.label} ({format_ratio(row.peer.forward.ratio)})" for row in slower if row.peer]
        )
        yield f"See what {slower[0].peer.name if slower[0].peer else ''} does better, ratios below 1: {names}."


def _about_limits(entries: Sequence[Entry]) -> Iterable[str]:
    """For each limit the cases farthest from it, with the time that they could save."""
    for cause, rate in (("bandwidth", "a copy of the same bytes"), ("compute", "the largest product's rate")):
        low = [e for e in entries if e.row.cause == cause and e.row.share is not None and e.row.share < GOOD]
        if not low:
            continue
        low.sort(key=lambda entry: entry.row.share or 0.0)
        ops = listed([f"{name} ({format_share(share)})" for name, share in _least_by_op(e.row for e in low)])
        largest = max(low, key=lambda entry: _lost(entry.row))
        most = largest.row
        yield (
            f"{len(low)} case{'s' * (len(low) > 1)} bound by {cause} reach{'es' * (len(low) == 1)} less than"
            f" {GOOD:.0%} of {rate}: {ops}. Most time is lost in {most.name} {most.label}:"
            f" {format_seconds(_lost(most))} of {format_seconds(seconds_of(most))}. There, {largest.row.advice}."
        )


def _lost(row: OpRow) -> float:
    """Seconds beyond those that its limit allows."""
    return seconds_of(row) * (1 - (row.share or 0.0))


def _least_by_op(rows: Iterable[OpRow]) -> list[tuple[str, float]]:
    """Each op once with its lowest share; rows come sorted by it."""
    least: dict[str, float] = {}
    for row in rows:
        least.setdefault(row.name, row.share or 0.0)
    return list(least.items())


def _about_launches(rows: Sequence[OpRow]) -> Iterable[str]:
    bound = [row for row in rows if is_call_bound(row)]
    if not bound:
        return
    on_gpu = any(row.gpu is not None for row in bound)
    what = "capture them in a CUDA graph, fuse them, or call them on larger tensors" if on_gpu else (
        "call them on larger tensors, or use one fused op instead of several"
    )  # fmt: skip
    yield (
        f"{len(bound)} of {len(rows)} cases are bound by the call itself, not by the machine's limits: {what}."
        " Their share says nothing about the kernel."
    )

"""Sentences and cells that the text, the Markdown and the page share."""

from __future__ import annotations

from collections.abc import Iterator

from genesis.profile.format import format_bytes, format_rate, format_ratio, format_seconds, format_share
from genesis.profile.schema import LimitsRow, OpRow
from genesis.report.schema import BenchReport, Change
from genesis.report.summary import seconds_of


def percent(share: float | None) -> str:
    """`83%`; a dash where there is none."""
    return "–" if share is None else format_share(share)


def marked(ratio: float) -> str:
    """A change as people read it: `+12%`."""
    return f"{ratio - 1:+.0%}".replace("-", "−")


def subject(report: BenchReport) -> str:
    """What was measured."""
    return "Ops and a model" if report.sections else "Ops"


def headline(report: BenchReport) -> str:
    """The report in a sentence."""
    summary = report.summary
    if not summary.measured:
        return f"None of {summary.cases} cases could be measured."
    ops = len({entry.row.name for entry in report.entries})
    good = sum(summary.bands[name] for name in ("excellent", "good"))
    cases = f" in {summary.measured} cases" if summary.measured != ops else ""
    text, loaded = f"{ops} op{'s' * (ops > 1)}{cases}: ", sum(summary.bands.values())
    if summary.launch_bound:
        text += f"{summary.launch_bound} are bound by the call itself; of the other {loaded}, "
    text += f"{good} reach at least 70% of the limit that binds"
    if summary.median_share is not None:
        text += f", the median {percent(summary.median_share)}"
    if summary.peer is not None:
        peer = summary.peer
        times = format_ratio(peer.median_ratio)
        text += f"; {peer.name} {peer.version} takes {times} times as long at the median of {peer.cases}"
    if summary.measured < summary.cases:
        text += f"; {summary.cases - summary.measured} failed"
    if report.left:
        text += f"; interrupted before the last {report.left} case{'s' * (report.left > 1)}"
    elif report.kind == "bench-all" and not report.sections:
        text += "; interrupted before the model's training steps"
    return text + "."


def subtitle(report: BenchReport) -> str:
    """Where and when."""
    settings = report.settings
    threads = "" if settings.threads is None else f", {settings.threads} thread{'s' * (settings.threads != 1)}"
    fast = ", little time for each case (--fast)" if settings.is_fast else ""
    return f"{report.device_name} ({report.device}{threads}), {settings.dtype}, {when(report.date)}{fast}"


def when(date: str) -> str:
    """A date as people read it."""
    return f"{date[:16].replace('T', ' ')} UTC"


def remarks(report: BenchReport) -> str:
    """What a reader of the bands must know; empty where there is nothing."""
    summary = report.summary
    counts = {
        "bound by the cost of a call and in no band": summary.launch_bound,
        "faster than memory, because their data stayed in a cache": summary.cached,
        "noisy": summary.noisy,
    }
    found = [f"{count} {'is' if count == 1 else 'are'} {what}" for what, count in counts.items() if count]
    return f"Of the cases {', '.join(found)}." if found else ""


def limits_of_report(limits: LimitsRow) -> list[tuple[str, str]]:
    """Each limit with its name."""
    found = [("copy", format_rate(limits.bytes_per_second, "B/s"))]
    if limits.flops_per_second is not None:
        found.append((f"matmul {limits.dtype}", format_rate(limits.flops_per_second, "FLOP/s")))
    found.append(("smallest call", format_seconds(limits.call_seconds)))
    if limits.kernel_seconds is not None:
        found.append(("smallest kernel", format_seconds(limits.kernel_seconds)))
    return found


def about_changes(report: BenchReport) -> Iterator[str]:
    """What is different from the last run."""
    if not report.changes:
        yield "There is no earlier run of this machine with these cases in the folder, so nothing to compare with."
        return
    counts = {verdict: sum(c.verdict == verdict for c in report.changes) for verdict in ("slower", "faster", "same")}
    since = max(change.since for change in report.changes)
    yield (
        f"Beside the last run that has the same case, at the latest {when(since)}:"
        f" {counts['slower']} slower, {counts['faster']} faster,"
        f" {counts['same']} the same within the noise."
    )
    last = report.history[-1]
    if last.relative is not None:
        change = 1 / last.relative - 1
        text = (
            f"{abs(change):.0%} {'more' if change > 0 else 'less'} time than in" if round(change, 2) else "the time of"
        )
        yield f"All common cases together take {text} the run of {when(last.date)}."
    if last.bytes_per_second:
        rate_now = marked(report.limits[0].bytes_per_second / last.bytes_per_second)
        yield f"The machine's own copy rate moved by {rate_now}; what moves with it is the machine, not Genesis."


def cells_of(row: OpRow) -> dict[str, str]:
    """The columns of a case in the tables of details, the ones that most people look for first."""
    work = (row.flops_per_second, "FLOP/s") if row.limit == "compute" else (row.bytes_per_second, "B/s")
    return {
        "op": row.name,
        "case": row.label.replace("x", "×"),
        "time": format_seconds(seconds_of(row)),
        "±": "?" if seconds_half(row) is None else f"{seconds_half(row):.1%}",
        "share": percent(row.share),
        "band": row.band or "–",
        "torch": f"{format_ratio(row.peer.forward.ratio)}" if row.peer else "",
        "change": "",
        "trend": "",
        "cause": row.cause,
        "rate": format_rate(*work),
        "wall": format_seconds(row.wall.seconds) if row.gpu else "",
        "backward": format_seconds((row.backward.gpu or row.backward.wall).seconds) if row.backward else "",
        "memory": format_bytes(row.peak_bytes),
        "dtype": row.dtype,
        "note": "; ".join(["noisy"] * row.is_noisy + row.notes),
    }


def seconds_half(row: OpRow) -> float | None:
    """Half of the confidence interval of the shown time, as a share of it."""
    return (row.gpu or row.wall).half_width


def changed(change: Change) -> dict[str, str]:
    """The columns of a change."""
    return {
        "op": change.name,
        "change": marked(change.ratio),
        "before": format_seconds(change.before),
        "now": format_seconds(change.now),
        "noise": f"±{format_share(change.noise)}",
        "case": change.label.replace("x", "×"),
        "dtype": change.dtype,
    }


def about_machine(report: BenchReport) -> list[tuple[str, str]]:
    """Versions and hardware, as far as they are known."""
    machine = report.machine
    found = [("Genesis", str(machine.get("genesis", "unknown")))]
    for key, names in (("python", ("version",)), ("system", ("name", "release", "machine"))):
        part = machine.get(key)
        if isinstance(part, dict):
            found.append((key.capitalize(), " ".join(str(part[name]) for name in names if part.get(name))))
    cpu = machine.get("cpu")
    if isinstance(cpu, dict):
        cores = f", {cpu['usable_cores']} cores" if cpu.get("usable_cores") else ""
        found.append(("CPU", f"{cpu.get('name') or 'unknown'}{cores}"))
    cuda = machine.get("cuda")
    if isinstance(cuda, dict):
        found += [("GPU", str(each["name"])) for each in cuda.get("devices") or [] if isinstance(each, dict)]  # type: ignore[union-attr]
    packages = machine.get("packages")
    if isinstance(packages, list):
        rows = [
            row for row in packages if isinstance(row, dict) and row.get("name") in ("numpy", "triton", "cuda-python")
        ]
        found += [(str(row["name"]), str(row["version"])) for row in rows if row.get("version")]
    if machine.get("numpy_blas"):
        found.append(("BLAS", str(machine["numpy_blas"])))
    return found

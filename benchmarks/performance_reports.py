"""What docs/performance.md says of the reports of `genesis bench-ops`, `bench all` and `bench-model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.reasons import known_reason
from benchmarks.result_files import Result
from genesis.profile.format import format_bytes, format_rate, format_seconds
from genesis.profile.roofline import band_of
from genesis.report.markdown import markdown_table

__all__ = ["all_ops", "model_steps"]

GOOD = 0.7  # where the band "good" begins
GAINS = 5  # ops that are named
Row = dict[str, Any]

# --- Every op: `genesis bench-ops` and `genesis bench all` ------------------------------------------------------------


def all_ops(results: Sequence[Result]) -> Iterator[str]:
    """The newest full report of each machine and dtype: the one with the most cases of its last day."""
    newest: dict[tuple[str, str], Result] = {}
    for result in results:
        if str(result.data.get("kind", "")).startswith("bench-"):
            key = result.data["device_name"], result.data["settings"]["dtype"]
            held = newest.get(key)
            if held is None or len(result.data["entries"]) >= len(held.data["entries"]):
                newest[key] = result
    for (device, dtype), result in sorted(newest.items()):
        yield from ("", f"## Every op on {device}, {dtype}", "")
        yield from _all_ops(result)


def _all_ops(result: Result) -> Iterator[str]:
    data, summary = result.data, result.data["summary"]
    limits = data["limits"][0]
    product = limits["flops_per_second"]
    left = data.get("left", 0)  # of a run that was interrupted
    yield (
        f"{summary['measured']} of {summary['cases'] + left} cases were measured"
        + (" before the run was ended" if left else "")
        + " next to a copy of"
        f" {format_rate(limits['bytes_per_second'], 'B/s')}"
        + (f" and a matmul of {format_rate(product, 'FLOP/s')}" if product else "")
        + f". {summary['launch_bound']} are bound by the call itself; the median share of the others is"
        + (" unknown." if summary["median_share"] is None else f" {summary['median_share']:.0%}.")
    )
    yield from (f"[All figures](../benchmarks/results/{result.name}).", "")
    bands = list(summary["bands"])
    rows = [
        [each["category"], each["cases"], "–" if each["median_share"] is None else f"{each['median_share']:.0%}"]
        + [each["bands"][band] for band in bands]
        for each in summary["categories"]
    ]
    yield from markdown_table(("category", "cases", "median share", *bands), rows, ("category",))
    for section in data.get("sections", ()):
        yield from ("", f"### {section['title']}", "", *section["text"], "")
        yield from markdown_table(section["columns"], section["cells"], section["columns"][:1])
    far = [
        entry["row"] for entry in data["entries"] if entry["row"]["share"] is not None and entry["row"]["share"] < GOOD
    ]
    if far:
        yield from ("", '### Below "good", and why', "")
        yield from markdown_table(("op", "cases", "share", "band of the lowest", "reason"), list(_why(far)), WORDS)
    yield from _beside_peer([entry["row"] for entry in data["entries"] if entry["row"].get("peer")])
    for failure in data["failures"]:
        yield from ("", f"- {failure['name']} {failure['label']} failed: {failure['error']}.")
    yield from ("", _source(data))


def _source(data: dict[str, Any]) -> str:
    """Where figures come from, in a line."""
    machine = data["machine"]
    about = f"Genesis {machine.get('genesis', 'unknown')}"
    packages = {p["name"]: p["version"] for p in machine.get("packages", ()) if p.get("version")}
    about += "".join(f", {name} {packages[name]}" for name in ("numpy", "triton") if name in packages)
    return f"- Measured {data['date'][:10]} on {data['device_name']} ({about}) by `{data['command']}`."


WORDS = ("op", "cases", "band of the lowest", "reason")


def _beside_peer(rows: Sequence[Row]) -> Iterator[str]:
    """How the ops compare with torch, and where it is faster."""
    if not rows:
        return
    ratios = [row["peer"]["forward"]["ratio"] for row in rows]
    peer = f"{rows[0]['peer']['name']} {rows[0]['peer']['version']}"
    yield from ("", f"Next to {peer}: {len(rows)} cases, the median ratio is {median(ratios):.2f}.")
    below = sorted((row for row in rows if row["peer"]["forward"]["ratio"] < 1), key=_ratio)
    if below:
        yield from ("", "### Below 1, and why", "")
        cells = [[f"{row['name']} {row['label']}", f"{_ratio(row):.3f}", _reason_below(row)] for row in below]
        yield from markdown_table(("op", "ratio", "reason"), cells, ("op", "reason"))


def _ratio(row: Row) -> float:
    return float(row["peer"]["forward"]["ratio"])


def _reason_below(row: Row) -> str:
    spread = row["peer"]["forward"]["spread"]
    if 1 - _ratio(row) <= spread:
        return f"within the spread of the rounds, {spread:.1%}"
    return known_reason(f"{row['name']} {row['label']} {row['dtype']}") or "not known"


def _why(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Each op and cause once, the farthest from the limit first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["share"]):
        groups.setdefault((row["name"], row["cause"]), []).append(row)
    for (name, cause), here in groups.items():
        labels, shares = ", ".join(row["label"] for row in here), [row["share"] for row in here]
        span = f"{shares[0]:.0%}" if len(here) == 1 else f"{shares[0]:.0%} to {shares[-1]:.0%}"
        yield [name, labels, span, here[0]["band"], _reason_in_report(name, cause, here)]


def _reason_in_report(name: str, cause: str, rows: Sequence[Row]) -> str:
    if cause == "launch":
        return "launch bound: the smallest call takes most of the time, so the share says nothing about the kernel"
    return known_reason(f"{name} {rows[0]['label']} {rows[0]['dtype']}") or "not known"


# --- A model: `genesis bench-model` -----------------------------------------------------------------------------------

STEP_COLUMNS = ("tokens a step", "step", "forward", "backward", "optimizer", "tokens/s", "MFU", "memory")
PEER_COLUMNS = ("tokens a step", "recipe", "Genesis", "torch", "ratio", "memory", "torch's memory", "note")


def model_steps(results: Sequence[Result]) -> Iterator[str]:
    """The newest report of each machine, model, dtype and way of checkpointing."""
    newest: dict[tuple[str, ...], Result] = {}
    for result in results:
        if "formula" in result.data and "model" in result.data:
            data = result.data
            key = (
                data["device_name"],
                data["model"]["size"],
                data["settings"]["dtype"],
                data["settings"]["checkpointing"],
            )
            newest[key] = result
    for (device, size, dtype, how), result in sorted(newest.items()):
        yield from ("", f"## Training steps of {size} on {device}, {dtype}, checkpointing {how}", "")
        yield from _model(result)


def _model(result: Result) -> Iterator[str]:
    data = result.data
    product = format_rate(data["limits"]["flops_per_second"], "FLOP/s")
    yield f"FLOPs are {data['formula']}; MFU is their rate as a share of the measured matmul's, {product}."
    yield ""
    yield from markdown_table(STEP_COLUMNS, [_step_cells(row) for row in data["rows"]], STEP_COLUMNS[:1])
    if data.get("peers"):
        yield ""
        yield from markdown_table(PEER_COLUMNS, [_peer_cells(peer) for peer in data["peers"]], ("recipe", "note"))
        for peer in data["peers"]:
            if peer.get("ratio") and peer["ratio"]["ratio"] < 1:
                name = f"{data['model']['size']} {_tokens(peer)} {peer['recipe']}"
                yield from ("", f"- Below 1: {name}: {known_reason(name) or 'the reason is not known'}.")
    yield from _below_good(data)
    for failure in data["failures"]:
        yield from ("", f"- {failure['label']} failed: {failure['error']}.")
    yield from ("", f"{_source(data)} [All figures](../benchmarks/results/{result.name}).")


def _tokens(row: Row) -> str:
    return f"{row['batch']} x {row['length']}"


def _step_cells(row: Row) -> list[str]:
    times = [row["step"], *(row["phases"][name] for name in ("forward", "backward", "optimizer"))]
    return [
        _tokens(row),
        *(format_seconds(each["seconds"]) for each in times),
        f"{row['tokens_per_second']:,.0f}",
        "–" if row["mfu"] is None else f"{row['mfu']:.0%}",
        format_bytes(row["memory"]["peak"]),
    ]


def _peer_cells(peer: Row) -> list[str]:
    ratio = peer.get("ratio")
    sizes = [format_bytes(peer[key]) if peer.get(key) else "–" for key in ("peak", "peer_peak")]
    figures = ["–"] * 3
    if ratio:
        figures = [format_seconds(ratio["seconds"]), format_seconds(ratio["peer_seconds"]), f"{ratio['ratio']:.2f}"]
    return [_tokens(peer), f"{peer['recipe']}, torch {peer['version']}", *figures, *sizes, peer.get("note", "")]


def _below_good(data: Row) -> Iterator[str]:
    """Cases with a low MFU, and where the time of the largest goes beyond what the limits need."""
    low = [row for row in data["rows"] if row["mfu"] is not None and row["mfu"] < GOOD]
    if not low:
        return
    cases = ", ".join(f"{_tokens(row)} ({row['mfu']:.0%}, {band_of(row['mfu'])})" for row in low)
    yield from ("", f'- Below "good": {cases}.')
    for row in data["rows"]:
        found = row.get("breakdown")
        if found:
            gains = sorted(found["ops"], key=lambda op: op["least"] - op["seconds"])[:GAINS]
            names = ", ".join(
                f"{op['op']} {format_seconds(op['seconds'])} of which {format_seconds(op['least'])} are needed"
                for op in gains
            )
            yield f"- By op, at {_tokens(row)} the most time beyond what the limits need goes to {names}."
            break
    else:
        yield "- The report has no figures by op; where the time goes is not known."

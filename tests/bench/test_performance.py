"""docs/performance.md: what results make of it, and that the committed page is what the committed results make."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.training_step import ratios
from benchmarks.lower_bounds import RENAMED
from benchmarks.performance import PAGE, REPOSITORY, page_of
from benchmarks.reasons import REASONS, known_reason
from benchmarks.result_files import RESULTS, Result, read_results, result_files
from genesis.profile.schema import Peer, Ratio
from tests.bench.reports import entry, report
from tests.packaging.tree import repository_files

KNOWN = "forward 8192x896 -> 1152 bf16"  # a row whose reason is known
OPS = {
    "date": "2026-01-01", "command": "python -m ops", "gpu": "a GPU", "driver": "1.2", "versions": {"torch": "2"},
    "copy TB/s": 4.0,
    "rows": [
        {"op": "add 8 fp32", "genesis_us": 2.0, "torch_us": 2.0, "ratio": 1.0, "spread": 0.0, "TB/s": 2.0},
        {"op": "sum 9 fp32", "genesis_us": 9.0, "torch_us": 6.3, "ratio": 0.7, "spread": 0.1, "TB/s": 1.0},
        {"op": "sum 8 fp32", "genesis_us": 9.0, "torch_us": 8.9, "ratio": 0.99, "spread": 0.1, "TB/s": 3.6},
        {"op": KNOWN, "genesis_us": 9.0, "torch_us": 8.0, "ratio": 0.88, "spread": 0.0, "TFLOP/s": 400.0},
        {"op": "broken", "failed": "relative error"},
    ],
}  # fmt: skip
LAUNCHES = {
    "date": "2026-01-01", "command": "python -m launches", "gpu": "a GPU",
    "microseconds of a 64K-element add": {
        "driver launch": 3.0, "inside a graph": 1.0, "wall, autograd": 10.0, "torch, autograd": 6.0
    },
}  # fmt: skip
STEP = {"size": "0.5B", "shape": "1x128", "tokens_per_second": 100.0, "model_tflops": 50.0, "peak_gib": 2.0}


def steps(date: str, ms: float, peer: float | None = None) -> dict[str, Any]:
    rows = [{**STEP, "side": "genesis", "ms": ms, "checkpointing": "none"}]
    rows += [{**STEP, "side": "lean-compile", "ms": peer}] if peer else []
    return {"date": date, "command": f"python -m steps {date}", "gpu": "a GPU", "rows": rows}


def page(*data: dict[str, Any]) -> str:
    return page_of([Result(f"{i}.json", each) for i, each in enumerate(data)])


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def test_fused_ops_stand_beside_torchs_and_the_slow_ones_are_named() -> None:
    row = {"genesis_us": 2.0, "torch_us": 4.0, "ratio": 2.0, "spread": 0.02}
    rows = [
        {**row, "op": "attention (1,2) cudnn", "ratio": 0.99, "TFLOP/s": 400.0},
        {**row, "op": "attention (1,2) flash", "ratio": 0.5, "TFLOP/s": 400.0},
        {**row, "op": "fast", "TB/s": 3.9},
        {**row, "op": "far", "TB/s": 3.0},
        {**row, "op": "rms_norm 128", "TB/s": 0.1},
    ]
    fused = {"date": "2026-01-02", "command": "python -m fused", "gpu": "a GPU", "note": "of a test", "fused": rows}
    text = page(OPS, fused)
    assert lines_with(text, "| attention (1,2) cudnn | 2.00 µs | 4.00 µs | 0.99 | 400 TFLOP/s |")
    assert lines_with(text, "| fast |") == ["| fast | 2.00 µs | 4.00 µs | 2.00 | 3.90 TB/s |"]
    named = text.partition("### Slower than torch")[2]
    assert "| attention (1,2) cudnn | ratio 0.99 | within the spread" in named
    assert "| far | 75% of a copy | not known |" in named and "| rms_norm 128 | 2% of a copy | few tokens" in named
    assert "flash" not in text and "| fast |" not in named and "- Note: of a test." in named


def test_the_committed_page_is_what_the_committed_results_make() -> None:
    if subprocess.run(["git", "rev-parse"], cwd=RESULTS, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    again = "run `make performance` and commit the page with the results"
    assert PAGE.read_text() == page_of(read_results(result_files())), again


def test_every_result_that_is_there_can_be_read() -> None:
    files = [path for path in repository_files("benchmarks/results") if path.suffix == ".json"]
    assert page_of(read_results(files)).startswith("# Performance\n")


def test_the_same_results_in_any_order_make_the_same_page(tmp_path: Path) -> None:
    files = []
    for i, each in enumerate((OPS, LAUNCHES, steps("2026-01-01", 5.0, 6.0), steps("2026-01-02", 4.0))):
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(each))
    assert page_of(read_results(files)) == page_of(read_results(reversed(files)))
    assert page_of([]).startswith("# Performance\n")


def test_what_is_below_1_is_named_with_what_is_known() -> None:
    text = page(OPS, LAUNCHES)
    start, end = text.index("### Below 1, and why"), text.index('### Below "good", and why')
    below = [line.split("|")[1:4] for line in text[start:end].splitlines() if line.startswith("| ")][2:]
    assert [name.strip() for name, _, _ in below] == ["sum 9 fp32", KNOWN, "sum 8 fp32"]
    reasons = [reason.strip() for _, _, reason in below]
    assert reasons[0] == "not known"
    assert reasons[1].startswith("other tiles, more programs")
    assert reasons[2] == "within the spread of the two measurements, 10.0%"
    assert "broken" not in text


def test_what_is_below_good_is_named_with_what_is_known() -> None:
    text = page(OPS, LAUNCHES)
    far = text[text.index('### Below "good", and why') : text.index("## What a call costs")]
    (add,) = lines_with(far, "add 8")
    assert [cell.strip() for cell in add.split("|")[1:6]] == [
        "add 8 fp32", "50%", "fair", "50%",
        "at least 1 launch (1.00 µs) and 1.00 µs at the limit: 2.00 µs, and it took 2.00 µs",
    ]  # fmt: skip
    (partly,) = lines_with(far, "sum 9")
    assert "3.25 µs of 9.00 µs, 36%; the other 64% are unexplained |" in partly
    assert "Of 2 rows 1 is explained." in far
    assert "sum 8" not in far and KNOWN not in far


def test_launches_that_were_noted_are_counted() -> None:
    summed = {"name": "reduce_kernel", "grid": [16, 1, 1], "sm_count": 132}
    rows = [
        {**OPS["rows"][1], "kernels": [summed, summed]},
        {**OPS["rows"][0], "op": "softmax (8, 151936)", "kernels": [summed], "ratio": 0.5},
        {**OPS["rows"][0], "op": "masked select", "kernels": [summed], "clock": "wall"},
    ]
    data = {**OPS, "rows": rows, "microseconds on next to no data": {"reduce_kernel": 1.2}}
    text = page(data, LAUNCHES)
    far = text[text.index('### Below "good", and why') : text.index("## What a call costs")]
    count = (
        "2 launches (reduce_kernel 1.20 µs, reduce_kernel 1.20 µs) and 2.25 µs at the limit: 4.65 µs of 9.00 µs, 52%;"
    )
    (partly,) = lines_with(far, count)
    assert partly.endswith("reduce_kernel has 16 programs for 132 SMs; the other 48% are unexplained |")
    (softmax,) = lines_with(far, "| softmax")
    assert "it took 2.00 µs" in softmax and "a line of 151,936" in softmax  # counted, and known
    (select,) = lines_with(far, "| masked")
    assert "the host waits" in select and "launch" not in select
    assert f"| not known; here {count}" in text  # and below 1
    assert "launches (" not in page({**OPS, "rows": rows})  # what a launch takes is not known


def test_the_page_has_kernels_by_the_names_that_they_have() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "genesis/kernels").rglob("*.py"))
    kernels = set(re.findall(r"@(?:triton|gluon)\.jit.*\n(?:@.*\n)*def (\w+)\(", sources))
    page = PAGE.read_text(encoding="utf-8")
    listed = ", ".join(re.findall(r"\d launch(?:es)? \(([^)]*)\)", page))
    named = set(re.findall(r"([a-z]\w+) [\d.]+ .?s", listed)) | set(re.findall(r"; (\w+) (?:has|takes) [\d.]+ ", page))
    assert len(named) > 5
    assert named <= kernels and set(RENAMED.values()) <= kernels
    ops = (kernel["name"] for result in read_results(result_files()) for kernel in measured_kernels(result.data))
    assert set(RENAMED) <= set(ops), "measured anew: the old name can go"


def measured_kernels(found: Any) -> Iterator[dict[str, Any]]:
    """Every kernel in a result."""
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, part in parts:
        if key == "kernels":
            yield from (each for each in part if isinstance(each, dict) and "name" in each)
        else:
            yield from measured_kernels(part)


def test_the_newest_step_counts_with_its_own_peers() -> None:
    text = page(steps("2026-01-01", 5.0, 6.0), steps("2026-01-02", 4.0))
    (row,) = lines_with(text, "| 0.5B |")
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["1 x 128", "none", "4.0 ms", "100"]
    assert "6.0 ms" not in text  # of another run
    beside = page(steps("2026-01-02", 4.0), steps("2026-01-03", 4.0, 3.0))
    assert "torch.compile | 3.0 ms | 2.0 GiB | 0.75 |" in beside
    assert "1 is below 1" in beside
    assert "- step 0.5B 1x128: the reason is not known." in beside


def test_all_peers_of_a_file_stand_beside_a_step_and_a_later_one_alone() -> None:
    ours, peer = {**STEP, "side": "genesis"}, {**STEP, "ms": 8.0}
    runs = [
        {"command": "first", "rows": [{**ours, "ms": 4.0}, {**peer, "side": "lean-compile"}]},
        {"command": "second", "rows": [{**ours, "ms": 5.0}, {**peer, "side": "hf-liger"}]},
        {"command": "third", "rows": [{**ours, "side": "genesis-fp8", "ms": 2.0}, {**ours, "ms": 3.0}]},
        {"command": "fourth", "rows": [{**ours, "shape": "32x1024x8", "ms": 9.0}]},
    ]
    rows = lines_with(page({"date": "2026-01-01", "gpu": "a GPU", "runs": runs}), "| 0.5B |")
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    assert [(c[0], c[1], c[2], c[6], c[-1]) for c in cells] == [
        ("1 x 128", "none", "4.0 ms", "torch.compile", "2.00"),
        ("1 x 128", "none", "5.0 ms", "Hugging Face with Liger", "1.60"),
        ("1 x 128", "none", "3.0 ms", "–", "–"),
        ("1 x 128", "none, fp8", "2.0 ms", "Genesis in bf16", "1.50"),
        ("32 x 1024 x 8", "none", "9.0 ms", "–", "–"),
    ]


@pytest.mark.parametrize(
    ("recipe", "reserved", "cells", "told"),
    [
        ("lean-compile", 3.0, ["2.0 GiB", "2.0 GiB"], None),
        ("lean-graphs", 3.0, ["4.0 GiB reserved", "3.0 GiB reserved"], "memory is what was reserved"),
        ("lean-graphs", None, ["2.0 GiB", "2.0 GiB"], "leaves out what the graphs hold"),  # an older file
    ],
)
def test_memory_beside_cuda_graphs_is_what_is_reserved(
    recipe: str, reserved: float | None, cells: list[str], told: str | None
) -> None:
    ours = {**STEP, "side": "genesis", "ms": 4.0, "reserved_gib": 4.0}
    peer = {**STEP, "side": recipe, "ms": 5.0, **({"reserved_gib": reserved} if reserved else {})}
    text = page({"date": "2026-01-01", "command": "steps", "gpu": "a GPU", "rows": [ours, peer]})
    (row,) = lines_with(text, "| 0.5B |")
    assert [row.split("|")[column].strip() for column in (7, 10)] == cells
    notes = [part for part in ("memory is what was reserved", "leaves out what the graphs hold") if part in text]
    assert notes == ([told] if told else [])
    (ratio,) = ratios([ours, peer])
    assert ratio.endswith("1.25x time   1.33 reserved memory" if "reserved" in cells[0] else "1.25x time   1.00 memory")


def test_launches_beside_torch() -> None:
    assert "a call with autograd has the ratio 0.60. The driver's launch" in page(LAUNCHES)


def test_reports_of_bench_ops_are_listed_with_their_reasons(tmp_path: Path) -> None:
    made = report(
        tmp_path, entry("add", 0.9), entry("sort", 0.1, label="8"), entry("sort", 0.3, label="16"), entry("exp", 0.5),
        entry("neg", 0.1, cause="launch"),
    )  # fmt: skip
    small = report(tmp_path, entry("add", 0.2))
    text = page(json.loads(made.model_dump_json()), json.loads(small.model_dump_json()))
    assert "## Every op on a processor, float32" in text
    assert lines_with(text, "| sort | 8, 16 | 10% to 30% | critical | an order needs several passes")
    assert lines_with(text, "| exp | 4x4 | 50% | fair | not known |")
    assert lines_with(text, "| neg | 4x4 | 10% | critical | launch bound")
    assert "[All figures](../benchmarks/results/0.json)" in text  # not the run of one op
    assert "5 of 5 cases were measured next to" in text
    ended = made.model_copy(update={"left": 3})
    assert "5 of 8 cases were measured before the run was ended next to" in page(json.loads(ended.model_dump_json()))


def test_reports_beside_torch_name_what_is_below_1(tmp_path: Path) -> None:
    def peer(ratio: float, spread: float = 0.01) -> Peer:
        found = Ratio(seconds=1.0, peer_seconds=ratio, ratio=ratio, spread=spread, rounds=3)
        return Peer(name="torch", version="2", clock="wall", threads=1, forward=found, backward=None)

    made = report(
        tmp_path, entry("add", peer=peer(1.2)), entry("exp", peer=peer(0.8)), entry("log", peer=peer(0.97, 0.05))
    )
    text = page(json.loads(made.model_dump_json()))
    assert "Next to torch 2: 3 cases, the median ratio is 0.97." in text
    assert lines_with(text, "| exp 4x4 | 0.800 | not known |")
    assert lines_with(text, "| log 4x4 | 0.970 | within the spread of the rounds, 5.0% |")


def test_a_model_is_listed_with_where_its_time_goes() -> None:
    seconds = {"seconds": 2.0}
    case = {
        "batch": 1, "length": 8, "step": seconds, "tokens_per_second": 4.0, "mfu": 0.5, "memory": {"peak": 2048},
        "phases": dict.fromkeys(("forward", "backward", "optimizer"), seconds),
        "breakdown": {
            "ops": [{"op": "copy", "seconds": 1.0, "least": 0.9}, {"op": "linear", "seconds": 1.0, "least": 0.5}]
        },
    }  # fmt: skip
    made = {
        "date": "2026-01-01T00:00:00", "command": "genesis bench-model", "device_name": "a GPU", "formula": "6 N",
        "machine": {"genesis": "0.0"}, "limits": {"flops_per_second": 1e12}, "model": {"size": "0.5B"},
        "settings": {"dtype": "bfloat16", "checkpointing": "none"}, "rows": [case, {**case, "mfu": 0.8}],
        "failures": [{"label": "4x8", "error": "no room"}],
        "peers": [
            {"batch": 1, "length": 8, "recipe": "lean", "version": "2", "peak": 10, "peer_peak": None, "note": "",
             "ratio": {"seconds": 2.0, "peer_seconds": 1.8, "ratio": 0.9}},
            {"batch": 1, "length": 8, "recipe": "eager", "version": "2", "note": "it failed", "ratio": None},
        ],
    }  # fmt: skip
    text = page(made)
    assert "## Training steps of 0.5B on a GPU, bfloat16, checkpointing none" in text
    assert "- Below 1: 0.5B 1 x 8 lean: the reason is not known." in text
    assert lines_with(text, "| eager, torch 2 | – | – | – | – | – | it failed |")
    assert '- Below "good": 1 x 8 (50%, fair).' in text
    assert "goes to linear 1.00 s of which 500 ms are needed, copy" in text
    assert "- 4x8 failed: no room." in text


def test_reasons_are_found_by_name() -> None:
    assert known_reason("masked select 1% of 64Mi fp32")
    assert known_reason("sort 4x512x896 over -1")
    assert known_reason("add (256, 256) fp32") is None
    assert len({pattern for pattern, _ in REASONS}) == len(REASONS)

"""`genesis.profiler`: sums, traces, stacks, torch's schedules, and errors."""

from __future__ import annotations

import gzip
import inspect
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genesis
from genesis import nn, profiler
from genesis.backend import CPU, Device
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DeviceError, GenesisError, UsageError
from genesis.measure.recorder import Recorder
from genesis.nn.hooks import call_watches
from genesis.op import _observers
from genesis.optim import AdamW
from genesis.profiler import EventList, ProfilerAction, ProfilerActivity, benchmark, profile, record_function, schedule
from genesis_models.registry import build
from tests.cli.test_bench_model import RAW
from tests.measure.test_trace import read

CUDA = Device("cuda", 0)
PAGE = Path(__file__).parents[2] / "docs" / "profiler.md"
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
LINE = re.compile(r"[^ ;]+(;[^ ;]+)* [1-9][0-9]*")  # what flamegraph.pl reads


class MLP(nn.Module):
    """Two layers with a GELU."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: genesis.Tensor) -> genesis.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def training_step(device: Device) -> Callable[[], object]:
    model, x = MLP().to(device), genesis.ones(4, 16, device=device)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        with record_function("loss"):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    return step


def generation(device: Device) -> Callable[[], object]:
    model: Any = build(RAW, seed=0).to(device)
    return lambda: genesis.generate(model, [1, 2, 3], max_tokens=4)


def plain(device: Device) -> Callable[[], object]:
    x = genesis.ones(8, 8, device=device)

    def function() -> None:
        time.sleep(0.01)
        (x @ x + 1).sum().item()

    return function


def rows_of(found: EventList) -> dict[str, Any]:
    return {row.key: row for row in found}


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("made", [training_step, generation, plain])
def test_rows_add_up_to_the_whole(made: Any, device: Device, tmp_path: Path) -> None:
    run = made(device)
    run()
    with profile(activities=BOTH if device == CUDA else None, profile_memory=True, with_flops=True) as p:
        began = time.perf_counter()
        run()
        genesis.cuda.synchronize() if device == CUDA else None
        whole = (time.perf_counter() - began) * 1e6
    found = p.key_averages()
    recording = p._recordings[0]
    assert found.self_cpu_time_total == pytest.approx(recording.seconds * 1e6) and recording.seconds * 1e6 >= whole
    kernels = sum(kernel.end - kernel.start for kernel in recording.kernels) * 1e6
    assert sum(row.self_cuda_time_total for row in found) == pytest.approx(kernels, rel=0.02)
    assert (kernels > 0) == (device == CUDA)
    for row in found:
        assert 0 <= row.self_cpu_time_total <= row.cpu_time_total * 1.0001
        assert row.self_cuda_time_total <= row.cuda_time_total * 1.0001
    changes = {track.device.type: sum(c.nbytes for c in track.changes[1:]) for track in recording.tracks}
    assert sum(row.self_cpu_memory_usage for row in found) == changes["cpu"]
    assert sum(row.self_cuda_memory_usage for row in found) == changes.get("cuda", 0)
    assert made is plain or "linear" in rows_of(found)
    assert sum(row.flops for row in found) > 0
    p.export_chrome_trace(tmp_path / "trace.json")
    rows = read((tmp_path / "trace.json").read_bytes())
    assert [name for _, name, *_ in rows["steps"]] == ["ProfilerStep#0"]
    assert len(rows.get("kernels", [])) == len(recording.kernels)
    for metric in ("self_cpu_time_total", "self_cuda_time_total")[: 1 + (device == CUDA)]:
        p.export_stacks(tmp_path / "stacks.txt", metric)
        lines = (tmp_path / "stacks.txt").read_text().splitlines()
        assert all(LINE.fullmatch(line) for line in lines)
        total = found.self_cpu_time_total if metric == "self_cpu_time_total" else kernels
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == pytest.approx(total, rel=0.02, abs=len(lines))


def test_ops_know_ranges_modules_shapes_and_lines() -> None:
    model, x = MLP(), genesis.ones(4, 16)
    with profile(with_stack=True, with_modules=True, record_shapes=True) as p, record_function("all"):
        model(x)
        model(genesis.ones(2, 16))
    rows = rows_of(p.key_averages())
    assert (rows["linear"].count, rows["gelu"].count, rows["MLP"].count, rows["MLP.up"].count) == (4, 2, 2, 2)
    assert rows["all"].cpu_time_total > rows["MLP"].cpu_time_total > rows["MLP.up"].cpu_time_total
    shapes = [row.input_shapes for row in p.key_averages(group_by_input_shape=True) if row.key == "gelu"]
    assert shapes == [[[4, 16]], [[2, 16]]]
    lines = [row.stack for row in p.key_averages(group_by_stack_n=2) if row.key == "gelu"]
    assert [[line.rpartition(": ")[2] for line in each] for each in lines] == [
        ["forward", "test_ops_know_ranges_modules_shapes_and_lines"]
    ] * 2


def test_ops_inside_of_a_range_of_the_same_name_count_once() -> None:
    @record_function("twice")
    def recursive(depth: int) -> None:
        time.sleep(0.005)
        if depth:
            recursive(depth - 1)

    with profile() as p:
        recursive(1)
    row = rows_of(p.key_averages())["twice"]
    assert row.count == 2
    assert row.cpu_time_total == pytest.approx(row.self_cpu_time_total)
    assert 0.98 < row.self_cpu_time_total / p.key_averages().self_cpu_time_total <= 1


# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "actions"),  # as torch 2.14 has them
    [
        ({"wait": 1, "warmup": 1, "active": 2}, "NWRSNWRSNWRS"),
        ({"wait": 1, "warmup": 1, "active": 2, "repeat": 2}, "NWRSNWRSNNNN"),
        ({"wait": 0, "warmup": 0, "active": 1, "skip_first": 2}, "NNSSSSSSSSSS"),
        ({"wait": 3, "warmup": 1, "active": 1, "skip_first": 1, "skip_first_wait": 1, "repeat": 2}, "NWSNNNWSNNNN"),
    ],
)
def test_a_schedule_is_torchs(settings: dict[str, int], actions: str) -> None:
    letters = {"NONE": "N", "WARMUP": "W", "RECORD": "R", "RECORD_AND_SAVE": "S"}
    chosen = schedule(**settings)
    assert "".join(letters[chosen(step).name] for step in range(12)) == actions


def test_cycles_are_recorded_and_handed_over(tmp_path: Path) -> None:
    seen: list[tuple[int, int, list[str]]] = []

    def ready(p: profiler.Profiler) -> None:
        seen.append((p.step_num, rows_of(p.key_averages())["exp"].count, [name for name, *_ in p._steps]))
        profiler.tensorboard_trace_handler(tmp_path, "w", use_gzip=True)(p)

    x = genesis.ones(4)
    cycles = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(schedule=cycles, on_trace_ready=ready) as p, record_function("epoch"):
        for _ in range(12):
            x.exp()
            assert bool(_observers) == (p._action is not ProfilerAction.NONE)
            p.step()
    assert seen == [(4, 2, ["ProfilerStep#2", "ProfilerStep#3"]), (8, 2, ["ProfilerStep#6", "ProfilerStep#7"])]
    assert "exp" in rows_of(p.key_averages())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 and "traceEvents" in json.loads(gzip.decompress(files[0].read_bytes()))
    with pytest.raises(UsageError, match="not running"):
        p.step()
    with p:  # again
        x.exp()
        p.step()
    assert len(seen) == 2 and not _observers


def test_a_block_that_ends_early_keeps_what_it_has_and_may_accumulate() -> None:
    x = genesis.ones(4)
    with profile(schedule=schedule(wait=0, warmup=0, active=2), acc_events=True) as p:
        for _ in range(4):
            x.exp()
            p.step()
        x.exp()
    assert rows_of(p.key_averages())["exp"].count == 5
    assert len(p._steps) == 5


def test_ops_of_other_threads_are_recorded_with_ranges_of_their_own() -> None:
    x = genesis.ones(4)

    def work() -> None:
        with record_function("other"):
            x.exp()

    with profile() as p, record_function("main"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (frame,) = [frame for frame in p._recordings[0].frames if frame.level == "op"]
    assert frame.parent is not None and frame.parent.name == "other"
    rows = rows_of(p.key_averages())
    assert rows["main"].count == rows["other"].count == 1
    assert p.key_averages().self_cpu_time_total == pytest.approx(p._recordings[0].seconds * 1e6)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_a_graph_has_its_kernels_or_is_one() -> None:
    x = genesis.ones(4, device="cuda")
    before, inside = FunctionGraph(), FunctionGraph()
    y = before.capture(lambda: x.exp() + 1)
    with profile(activities=BOTH) as p:
        before.replay()
        z = inside.capture(lambda: x.exp() + 1)
        inside.replay()
    rows = rows_of(p.key_averages())
    assert rows["(CUDA graph)"].count == 1 and rows["(CUDA graph)"].self_cuda_time_total > 0
    in_graph = [kernel.op for kernel in p._recordings[0].kernels if kernel.in_graph]
    assert in_graph == ["exp", "add"]
    inside.replay()  # after the profile
    assert y.cpu().tolist() == z.cpu().tolist()


def test_a_profile_inside_a_capture_is_refused() -> None:
    x, p = genesis.ones(4, device="cuda"), profile(activities=BOTH)

    def capture(action: Callable[[], object]) -> None:
        calls = iter([lambda: None] * 2 + [action])
        FunctionGraph().capture(lambda: (x.exp(), next(calls)()))

    with pytest.raises(DeviceError, match="inside the capture"):
        capture(p.start)
    with profile(activities=BOTH) as p, pytest.raises(DeviceError, match="inside the capture"):
        capture(p.step)
    assert not _observers
    with profile(activities=BOTH) as p:
        x.exp()
    assert "exp" in rows_of(p.key_averages())


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_a_function_that_raises_ends_the_profile() -> None:
    x = genesis.ones(4)

    def fails() -> None:
        with record_function("fails"):
            x.exp()
            x.reshape(3)

    for _ in range(2):
        with pytest.raises(GenesisError, match="elements"), profile() as p:
            fails()
        assert (_observers, call_watches, profiler._running) == ([], [], [])
        rows = rows_of(p.key_averages())
        assert rows["exp"].count == rows["fails"].count == 1 and "reshape" not in rows
    with pytest.raises(GenesisError, match="elements"):
        profile("fails", fails, num_warmups=0)
    with pytest.raises(ZeroDivisionError), profile(on_trace_ready=lambda p: 1 / 0):  # type: ignore[arg-type]
        x.exp()
    assert (_observers, profiler._running) == ([], [])


def test_what_is_refused() -> None:
    with profile() as p:
        with pytest.raises(UsageError, match="inside a profile"), profile():
            pass
        with pytest.raises(UsageError, match="recorded nothing"):
            p.key_averages()
        genesis.ones(4)
    found = p.key_averages()
    with pytest.raises(UsageError, match="self_cpu_time_total"):
        found.table(sort_by="self_cpu_time_totl")
    with pytest.raises(UsageError, match="has no metric"):
        p.export_stacks("nowhere", "count")
    with pytest.raises(TypeError, match="with_stak"):
        profile(with_stak=True)
    with pytest.raises(UsageError, match="description and a function"):
        profile("alone")
    with pytest.raises(UsageError, match="not an activity"):
        profile(activities=["CPU"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="at least 1"):
        schedule(wait=0, warmup=0, active=0)
    with pytest.raises(UsageError, match="ProfilerAction"), profile(schedule=lambda step: step):  # type: ignore[arg-type, return-value]
        pass
    with pytest.raises(UsageError, match="times no call"):
        benchmark("nothing", lambda: None, num_trials=0)
    with Recorder(MLP()).watching(), pytest.raises(UsageError, match="inside a profile"), profile():
        pass  # as inside of `genesis profile CONFIG`
    assert profiler._running == []


# --- Functions and names ----------------------------------------------------------------------------------------------


def test_benchmark_and_profile_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.01)
        genesis.ones(64).exp()

    assert 10 <= benchmark("sleep", run, num_warmups=2, num_trials=3) < 1000
    assert len(calls) == 5
    table = profile("a sleep/exp", run, with_stack=True)
    assert isinstance(table, str) and len(calls) == 7
    lines = table.splitlines()
    assert lines[1].startswith("Name ") and "Self CPU time total" in lines[-1]
    names = [line.split("  ")[0] for line in lines[3:-2]]
    assert names[0] == "(outside ops)" and {"exp", "fill"} <= set(names)
    assert {path.name for path in (tmp_path / "var").iterdir()} == {f"stacks_a_sleep_exp.{x}" for x in ("txt", "svg")}


def test_a_table_is_sorted_and_cut() -> None:
    with profile() as p:
        for _ in range(3):
            genesis.ones(4).exp()
        genesis.ones(4).sin()
    found = p.key_averages()
    lines = found.table(sort_by="count", row_limit=2, max_name_column_width=3, header="title").splitlines()
    assert lines[0] == "title" and len(lines) == 1 + 3 + 2 + 2
    assert lines[4].startswith("...") and lines[4].split()[-1] == "4"
    assert len(found.table(row_limit=-1).splitlines()) == len(found) + 5


def test_names_and_defaults_are_torchs() -> None:
    required = inspect.Parameter.empty
    off = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules", "acc_events")
    wanted: dict[Callable[..., Any], dict[str, Any]] = {
        profile: dict.fromkeys(("activities", "schedule", "on_trace_ready")) | dict.fromkeys(off, False),
        schedule: dict.fromkeys(("wait", "warmup", "active"), required)
        | dict.fromkeys(("repeat", "skip_first", "skip_first_wait"), 0),
        profiler.Profiler.key_averages: {"group_by_input_shape": False, "group_by_stack_n": 0},
        EventList.table: {
            "sort_by": None, "row_limit": 100, "max_src_column_width": 75, "max_name_column_width": 55,
            "max_shapes_column_width": 80, "header": None,
        },
        profiler.Profiler.export_stacks: {"path": required, "metric": "self_cpu_time_total"},
        record_function: {"name": required, "args": None},
        profiler.tensorboard_trace_handler: {"dir_name": required, "worker_name": None, "use_gzip": False},
    }  # fmt: skip
    for function, defaults in wanted.items():
        ours = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        for name in ("self", *(("description", "run", "num_warmups") if function is profile else ())):
            ours.pop(name, None)
        assert ours == defaults, function


# --- docs/profiler.md -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_gpu", [False, pytest.param(True, marks=pytest.mark.full)], ids=["cpu", "cuda"])
def test_the_page_runs(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not has_gpu:
        monkeypatch.setattr(genesis.cuda, "is_available", lambda: False)
    blocks = re.findall(
        r"^```python\n(.*?)^```$",
        PAGE.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    code = compile("\n".join(blocks), "page.py", "exec")
    exec(code, {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.count("twice the") == 3
    assert printed.count("Self CPU time total") == 4 + 2 + 1
    assert printed.count("Self CUDA time total") == (6 if has_gpu else 0)  # a sleep has no kernels
    assert "up to step 4" in printed
    phases = {event["ph"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert phases == {"M", "X", "C"}
    stacks = Path("stacks.txt").read_text()
    assert re.search(r"^page.py\(\d+\):_<module>;.*;gelu \d+$", stacks, re.MULTILINE)
    assert all(Path(name).stat().st_size for name in ("flame.svg", "var/stacks_mlp.txt", "var/stacks_mlp.svg"))

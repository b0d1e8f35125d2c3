"""Steps recorded: tables that add up, modules and phases of backward, waits with their line, the pool's memory."""

from __future__ import annotations

import itertools
import os
from typing import Any, cast
from unittest import mock
from xml.etree import ElementTree

import pytest

import genesis
from genesis import Tensor, nn
from genesis.autograd.graph import tape_watches
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.cuda import nvtx
from genesis.errors import ShapeError
from genesis.measure.record import Table
from genesis.measure.recorder import Recorder
from genesis.measure.run import Recorded, plain_steps, recorded_steps, step_tables
from genesis.measure.svg import flame_graph
from genesis.measure.trace import collapsed, stacks
from genesis.nn.fused import linear_sum
from genesis.nn.hooks import call_watches
from genesis.op import _beginnings, _observers, observe, registry
from tests.measure.runs import captured_subject, subject

CUDA = Device("cuda", 0)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=[CPU, CUDA], ids=str)
def recorded(request: pytest.FixtureRequest) -> tuple[Recorded, Device]:
    """Three steps of the tiny model on a device; on CUDA in the interpreter."""
    under = subject(request.param)
    plain = plain_steps(under, 2, 2)
    return Recorded("eager", plain, recorded_steps(under, 3, 1)), request.param


Tables = dict[str, Table]


def tables_of(recorded: Recorded, on_gpu: bool) -> Tables:
    """The tables by name without the mode."""
    return {each.name.rpartition("-")[2]: each for each in step_tables([recorded], on_gpu)}


@pytest.fixture(scope="module")
def tables(recorded: tuple[Recorded, Device]) -> Tables:
    return tables_of(recorded[0], recorded[1] != CPU)


def named(table: Table) -> dict[Any, Any]:
    return {row["name"]: row for row in table.rows}


def summed(table: Table, key: str) -> float:
    return sum(row[key] or 0.0 for row in table.rows)  # type: ignore[misc]


def test_each_table_adds_up_to_the_step(recorded: tuple[Recorded, Device], tables: Tables) -> None:
    steps, (row,) = recorded[0].steps, tables["steps"].rows
    if row["measure"] == "wall":
        whole = sum(step.seconds for step in steps) / len(steps)
    else:
        ends = [(min(k.start for k in s.kernels), max(k.end for k in s.kernels)) for s in steps]
        whole = sum(end - start for start, end in ends) / len(steps)
    assert row["seconds"] == pytest.approx(whole, rel=0.02)
    for name in ("phases", "modules", "ops"):
        assert summed(tables[name], "seconds") == pytest.approx(whole, rel=0.02)
        assert summed(tables[name], "share") == pytest.approx(1)
    assert row["attributed"] + row["idle"] == pytest.approx(row["seconds"])  # type: ignore[operator]


def test_ops_modules_and_phases_are_told_apart(tables: Tables) -> None:
    ops, modules, phases = (named(tables[name]) for name in ("ops", "modules", "phases"))
    assert (ops["linear"]["calls"], ops["relu"]["calls"], ops["adamw_step"]["calls"]) == (4, 2, 1)
    assert {"blocks.*.up", "blocks.*.down", "Tiny", "(optimizer)", "(data)"} <= set(modules)
    assert {"forward", "backward", "optimizer", "data", "idle"} <= set(phases)
    assert tables["waits"].rows == []
    assert phases["backward"]["cpu_seconds"] > 0


class Pair(nn.Module):
    """Layers that are computed together unless a hook wants to see one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return linear_sum(self.up(x), self.down, x)


def test_a_step_under_watch_has_the_ops_of_one_that_is_not() -> None:
    model, x, names = Pair(), genesis.ones(4, 8), list[str]()
    with observe(lambda op, *_: names.append(op.name)):
        model(x).sum().backward()
    model.zero_grad()
    recorder = Recorder(model)
    with recorder.watching():
        model(x).sum().backward()
    assert [frame.name for frame in recorder.frames if frame.level == "op"] == names
    assert names.count("linear") == 2 and "add" not in names
    assert {frame.module for frame in recorder.frames if frame.level == "op"} == {"(data)", "up"}


def test_an_op_that_raises_is_left_out() -> None:
    recorder = Recorder(Pair())
    recorder._op_ended(registry["exp"], (), (), {}, 0.1)  # it began before anybody watched
    with recorder.watching():
        with pytest.raises(ShapeError):
            genesis.ones(4, 8).reshape(5)
        genesis.ones(4, 8).exp()
    assert [frame.name for frame in recorder.end()] == ["fill", "fill", "exp"]


def test_backward_belongs_to_the_module_of_forward(recorded: tuple[Recorded, Device]) -> None:
    frames = [f for f in recorded[0].steps[0].frames if f.level == "op" and f.phase == "backward"]
    where = {f.module for f in frames if f.name in ("matmul", "add_matmul", "matmul_add")}
    assert where == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert {f.module for f in frames if f.name == "mul"} >= {"Tiny"}


@pytest.mark.parametrize("recorded", [CUDA], indirect=True, ids=str)
def test_a_captured_step_has_the_kernels_of_the_eager_one(recorded: tuple[Recorded, Device]) -> None:
    under = captured_subject(CUDA)
    captured = Recorded("captured", plain_steps(under, 1, 4), recorded_steps(captured_subject(CUDA), 2, 3))
    found = tables_of(captured, on_gpu=True)
    ours, eager = ({kernel.op for step in made.steps for kernel in step.kernels} for made in (captured, recorded[0]))
    assert ours == eager == {row["name"] for row in found["ops"].rows if row["calls"] and row["name"] in eager}
    assert {"forward", "backward", "optimizer"} <= named(found["phases"]).keys()
    assert {"blocks.*.up", "blocks.*.down"} <= named(found["modules"]).keys()
    for step in captured.steps:
        inside = [kernel for kernel in step.kernels if kernel.in_graph]
        # Outside of the graph the batch and the step's numbers are copied.
        assert {(kernel.name, kernel.op) for kernel in step.kernels if not kernel.in_graph} == {("copy", "(copy)")}
        assert all(a.end == b.start for a, b in itertools.pairwise(inside))
        assert [kernel.start for kernel in step.kernels] == sorted(kernel.start for kernel in step.kernels)
    assert found["waits"].rows == []
    (row,) = found["steps"].rows
    assert summed(found["ops"], "seconds") - named(found["ops"])["(idle)"]["seconds"] == pytest.approx(
        row["attributed"]
    )
    assert summed(found["kernels"], "seconds") == pytest.approx(row["attributed"])


def test_stacks_add_up_and_the_flame_graph_is_as_wide(recorded: tuple[Recorded, Device], tables: Tables) -> None:
    found = stacks(recorded[0].steps, recorded[1] != CPU)
    (row,) = tables["steps"].rows
    whole: Any = row["attributed"] if recorded[1] != CPU else row["seconds"]
    assert sum(found.values()) == pytest.approx(whole)
    lines = [line.rpartition(" ") for line in collapsed(found).decode().splitlines()]
    assert sum(int(count) for _, _, count in lines) == pytest.approx(whole * 1e6, abs=len(found))
    assert any(stack.startswith("forward;blocks.*;up;linear") for stack, _, _ in lines)
    picture = ElementTree.fromstring(flame_graph(found, "a <title> & more"))
    rects = [(float(r.get("y", 0)), float(r.get("x", 0)), float(r.get("width", 0))) for r in picture.iter(f"{SVG}rect")]
    width = rects[0][2]
    below = sum(w for y, _, w in rects if y == sorted({y for y, _, _ in rects})[1])
    assert below == pytest.approx(width, rel=0.01)
    assert all(x + w <= rects[0][1] + width + 0.01 for _, x, w in rects)
    order = ["forward", "backward", "optimizer"]
    names = [title.text.partition(":")[0] for title in picture.iter(f"{SVG}title") if title.text]
    assert [name for name in names if name in order] == order
    assert "a <title> & more" in next(iter(picture.iter(f"{SVG}text"))).text  # type: ignore[operator]


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize(
    "reads",
    [lambda x: x.sum().item(), lambda x: x.detach().numpy(), lambda x: x[x > 0], lambda x: x.nonzero()],
    ids=["item", "numpy", "select", "nonzero"],
)
def test_a_planted_read_is_found_with_its_line(reads: Any, device: Device) -> None:
    under = subject(device, reads=reads)
    found = tables_of(Recorded("eager", [1.0], recorded_steps(under, 1, 1)), on_gpu=device != CPU)
    line = f"{__file__}:{reads.__code__.co_firstlineno}".removeprefix(f"{os.getcwd()}/")
    (row,) = found["waits"].rows
    assert (row["what"], row["line"], row["count"]) == ("values read on the host", line, 1.0)


def test_a_wait_for_the_device_is_found() -> None:
    under = subject(CUDA, reads=lambda x: genesis.cuda.synchronize(x.device))
    found = tables_of(Recorded("eager", [1.0], recorded_steps(under, 1, 1)), on_gpu=True)
    assert [(row["what"], row["count"]) for row in found["waits"].rows] == [("the device waited for", 1.0)]


def test_a_graph_that_a_step_replays_twice_counts_twice() -> None:
    once = recorded_steps(captured_subject(CUDA), 1, 3)[0].kernels
    twice = recorded_steps(captured_subject(CUDA, replays=2), 1, 2)[0].kernels
    inside = [kernel for kernel in twice if kernel.in_graph]
    assert [k.name for k in inside] == 2 * [k.name for k in once if k.in_graph]
    assert [k.start for k in inside] == sorted(k.start for k in inside)


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_highest_total_is_the_pool_s_peak(device: Device) -> None:
    under = subject(device, width=64)
    plain_steps(under, 1, 1)
    allocated: Any = pool if device == CPU else cast(Any, backend_for(device)).pool
    allocated.max_allocated = before = allocated.allocated
    (step,) = recorded_steps(under, 1, 0, has_memory=True)
    changes = step.tracks[0].changes
    assert (changes[0].allocated, max(each.allocated for each in changes)) == (before, allocated.max_allocated)
    assert [each.at for each in changes] == sorted(each.at for each in changes)
    assert changes[0].at == pytest.approx(step.start, abs=1e-3)
    assert allocated.watch is None


def test_ranges_nest_as_the_frames_do() -> None:
    open_, seen = list[str](), list[str]()

    def push(name: str) -> None:
        open_.append(name)
        seen.append("/".join(open_))

    with mock.patch.multiple(nvtx, range_push=push, range_pop=open_.pop):
        recorded_steps(subject(), 1, 0, has_ranges=True)
    assert open_ == []
    assert {"forward/blocks.1/blocks.1.up/linear", "backward/blocks.1.up linear/matmul"} < set(seen)
    assert "optimizer/adamw_step" in seen


def test_ranges_go_to_the_first_library_that_has_them() -> None:
    loaded = mock.Mock(spec=["nvtxRangePushA", "nvtxRangePop", "nvtxMarkA", "nvtxRangeStartA", "nvtxRangeEnd"])
    nvtx.library.cache_clear()
    with mock.patch("ctypes.CDLL", side_effect=[OSError("missing"), object(), loaded]):
        assert nvtx.is_available()
    loaded.nvtxRangePushA.return_value = loaded.nvtxRangePop.return_value = 0
    nvtx.range_push("forward")
    nvtx.range_pop()
    assert loaded.mock_calls == [mock.call.nvtxRangePushA(b"forward"), mock.call.nvtxRangePop()]
    nvtx.library.cache_clear()
    with mock.patch("ctypes.CDLL", side_effect=OSError("missing")):
        assert not nvtx.is_available()
    nvtx.library.cache_clear()


def test_nothing_is_watched_afterwards(recorded: tuple[Recorded, Device]) -> None:
    backend: Any = backend_for(recorded[1])
    assert (_observers, _beginnings, tape_watches, call_watches) == ([], [], [], [])
    assert "to_numpy" not in vars(backend)
    if recorded[1] != CPU:
        assert backend.driver.dependent
        assert not {"copy", "synchronize", "launch_graph"} & set(vars(backend.driver))
        assert not {"on_side_stream", "on_comm_stream"} & set(vars(backend))

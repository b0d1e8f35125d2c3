"""Rows: counted work, what every op can be measured for, memory, gradients, and the parts that only CUDA has."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from unittest import mock

import pytest

from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.dtypes import DType, bfloat16, float32, int32
from genesis.errors import DeviceError, UsageError
from genesis.measure import kernels, limits
from genesis.measure import op as measuring
from genesis.measure.cases import choices, make_case, supported
from genesis.measure.op import BANDS, COLUMNS, Measured, Settings, profile_case, profile_op, tables_of
from genesis.measure.record import Failure, Report
from genesis.measure.session import peak_bytes
from genesis.measure.timing import Plan
from genesis.op import execute, registry
from tests.measure.quick import PLAN, made_limits, small_limits

CUDA = Device("cuda", 0)


def measured(
    name: str, shape: tuple[int, ...], axes: int | None = None, dtype: DType | None = None, device: Device = CPU,
    plan: Plan = PLAN, **settings: bool,
) -> Measured:  # fmt: skip
    case = make_case(name, shape, axes, dtype, device)
    return profile_case(case, made_limits(device), Settings(plan=plan, causes=False, **settings))


@pytest.mark.parametrize(
    ("name", "shape", "axes", "dtype", "flops", "nbytes"),
    [
        ("add", (3, 5), None, float32, 15, 3 * 15 * 4),
        ("reduce_sum", (4, 6), -1, bfloat16, 24, 24 * 2 + 4 * 2),
        ("matmul", (2, 3, 4), None, float32, 2 * 2 * 3 * 4, (6 + 12 + 8) * 4),
        ("embedding", (6, 2), None, float32, 0, 6 * 8 + 12 * 4 + 12 * 4),
        ("attention", (1, 4, 2, 8), None, float32, 4 * 2 * 4 * 4 * 8 // 2, 4 * 64 * 4 + 2 * 4 * 4),
    ],
)
def test_work_is_what_a_hand_counts(
    name: str, shape: tuple[int, ...], axes: int | None, dtype: DType, flops: int, nbytes: int
) -> None:
    row = measured(name, shape, axes, dtype)
    assert (row.flops, row.nbytes) == (flops, nbytes)
    moved, computed = nbytes / row.wall.seconds / 1e10, flops / row.wall.seconds / 1e11
    assert (row.bandwidth_share, row.compute_share) == (pytest.approx(moved), pytest.approx(computed))
    assert row.share == pytest.approx(max(moved, computed))
    assert row.limit == ("compute" if computed > moved else "bandwidth")
    assert row.band == next(name for least, name in BANDS if max(moved, computed) >= least)


def test_every_op_is_measured_and_its_row_has_every_column() -> None:
    rows = []
    for name in supported():
        shape, axes = next(choices(name, CPU))
        case = make_case(name, tuple(min(size, 16) for size in shape), axes, None, CPU)
        # A gradient of integers or of what is drawn is none; the suite measures such cases without it.
        has_gradient = case.op.vjp is not None and name in ("exp", "matmul", "cross_entropy", "rms_norm", "index_put")
        rows.append(profile_case(case, made_limits(), Settings(backward=has_gradient, causes=False, plan=PLAN)))
        assert (rows[-1].backward is not None) == has_gradient
    report = Report("profile-op", "", "cpu", "a processor", {}, tables=tables_of(rows))
    ops = json.loads(report.to_json())["tables"][1]
    assert [row["name"] for row in ops["rows"]] == supported()
    assert set(ops["rows"][0]) == {column["key"] for column in ops["columns"]}
    assert len(set(ops["rows"][0])) == len(COLUMNS), "two columns share a key"


def test_memory_of_temporaries_is_seen() -> None:
    def call() -> None:
        x = registry["add"](y, y)
        registry["add"](x, x)

    y = make_case("add", (512, 512), None, None, CPU).inputs[0]
    assert isinstance(y, Array)
    assert 2 * y.nbytes <= peak_bytes(call, CPU) < 2 * y.nbytes + 20_000


def test_recording_is_a_difference() -> None:
    row = measured("exp", (64,), backward=True)
    assert row.backward is not None
    assert row.backward.recording == pytest.approx(row.backward.recorded.seconds - row.wall.seconds)
    assert row.backward.gpu is None


def test_some_results_have_no_gradient() -> None:
    with pytest.raises(UsageError, match="eq has no gradient"):
        next(profile_op("eq", CPU, shapes=[(4,)], settings=Settings(plan=PLAN, backward=True)))
    with pytest.raises(UsageError, match="has no gradient"):
        measured("sum", (4,), dtype=int32, backward=True)


def test_a_case_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(case: object, *rest: object) -> object:
        monkeypatch.setattr(measuring, "profile_case", profile_case)
        raise DeviceError("a kernel failed")

    monkeypatch.setattr(measuring, "profile_case", fails_once)
    with small_limits():
        found = list(profile_op("sum", CPU, axes=[0, 1], shapes=[(4, 8)], settings=Settings(plan=PLAN, causes=False)))
    assert found[0] == Failure("sum", "4x8 over 0", "a kernel failed", 6)
    assert isinstance(found[1], Measured)
    assert found[1].case.axes == 1


# --- CUDA, in Triton's interpreter ------------------------------------------------------------------------------------


def test_the_interpreter_gives_wall_time_alone() -> None:
    row = measured("reduce_sum", (4, 8), device=CUDA, backward=True)
    assert row.gpu is None
    assert row.dispatch == {}
    assert row.launches is not None and [each.kernel for each in row.launches] == ["reduce_kernel"]
    assert min(row.launches[0].grid) >= 1
    assert row.peak_bytes == 512  # one number, in a block of the least size
    assert row.backward is not None and row.backward.gpu is None
    assert row.backward.launches == []  # a view
    row = measured("exp", (8,), device=CUDA, backward=True)
    assert row.backward is not None and row.backward.launches is not None
    assert [each.kernel for each in row.backward.launches] == ["flat_kernel"]
    assert row.backward.launches[0].resources is None


@pytest.fixture
def pretended_gpu() -> object:
    """The interpreter taken for a GPU."""
    yes = mock.Mock(return_value=True)
    with (
        mock.patch.object(limits, "has_gpu_time", yes),
        mock.patch.object(measuring, "has_gpu_time", yes),
        mock.patch.object(kernels, "has_gpu_time", yes),
    ):
        yield


@pytest.mark.usefixtures("pretended_gpu")
def test_gpu_time_and_stages() -> None:
    # CPU time of many samples: a pause of this process is in no stage.
    plan = replace(PLAN, seconds=0.05, clock=time.thread_time)
    row = measured("add", (8,), device=CUDA, backward=True, plan=plan)
    assert row.gpu is not None and row.gpu.seconds > 0
    assert row.backward is not None and row.backward.gpu is not None
    assert min(row.dispatch[stage] for stage in ("lookup", "allocate", "wrap")) > 0
    # The interpreter's kernel is far longer than the rest of the call.
    assert row.dispatch["launch"] > row.dispatch["lookup"]
    assert row.bandwidth_share == pytest.approx(row.nbytes / row.gpu.seconds / 1e10)
    assert measured("add", (8,), device=CUDA, stages=False).dispatch == {}


@pytest.mark.usefixtures("pretended_gpu")
def test_a_call_that_no_graph_holds_has_no_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest: object) -> object:
        raise DeviceError("values were read inside the capture of a CUDA graph")

    monkeypatch.setattr(measuring, "time_on_gpu", refuse)
    row = measured("add", (8,), device=CUDA)
    assert row.gpu is None
    assert row.notes == ("no GPU time: values were read inside the capture of a CUDA graph",)


def test_every_launch_is_counted() -> None:
    case = make_case("cumsum", (1, 20_000), -1, None, CUDA)
    launches = kernels.launches_of(lambda: execute(case.op, case.inputs, dict(case.attrs)), CUDA)
    assert len(launches) == 2  # totals of tiles, and the running sums of all elements
    assert all(len(each.grid) == 3 for each in launches)

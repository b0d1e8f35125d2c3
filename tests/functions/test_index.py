"""Indexing: plans, random indices against numpy, torch's answers where numpy's differ, assignment, and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import genesis
from genesis import op as ops
from genesis.array import Array
from genesis.backend import cpu
from genesis.errors import DTypeError, GradientError, IndexRangeError, ShapeError
from genesis.functions import index as functions
from genesis.functions.create import tensor
from genesis.functions.surface import methods
from genesis.indexing import Kind, plan_get, plan_set
from genesis.ops.index import sum_rows
from tests.autograd.scenarios import gradcheck
from tests.functions.torch_tables import difference, load
from tests.ops.layouts import place

INPUTS, CALLS = load("index")
SEPARATED = json.loads((Path(__file__).parent / "fixtures" / "torch_indexing.json").read_text(encoding="utf-8"))[
    "cases"
]


def counted(*sizes: int, requires_grad: bool = False) -> Any:
    """0, 1, 2, … in float64."""
    return tensor(np.arange(float(np.prod(sizes))).reshape(sizes), requires_grad=requires_grad)


def normal(*sizes: int) -> Any:
    return tensor(np.random.default_rng(0).standard_normal(sizes), requires_grad=True)


# --- torch's answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({call["call"] for call in CALLS}))
def test_functions_agree_with_torch(name: str) -> None:
    calls = [call for call in CALLS if call["call"] == name]
    found = [f"{c['x']}, {c['args']}: {wrong}" for c in calls if (wrong := difference(c, INPUTS))]
    assert not found, "\n".join(found)


def test_the_table_covers_the_functions() -> None:
    named = {n for n in methods if methods[n].__module__ == functions.__name__ and not n.endswith("_")}
    assert {call["call"] for call in CALLS} == named - {"index_put", "repeat_interleave"}


def decoded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return slice(*entry["slice"]) if "slice" in entry else np.array(entry["array"])
    return Ellipsis if entry == "..." else entry


@pytest.mark.parametrize("case", SEPARATED, ids=lambda c: str(c["shape"]))
def test_an_integer_beside_arrays_takes_its_dimension_away_first(case: dict[str, Any]) -> None:
    """torch's placement of the indexed dimensions, where numpy counts the integer among the arrays."""
    x = counted(*case["shape"])
    index = tuple(decoded(e) for e in case["index"])
    expected = np.array(case["result"], np.float64).reshape(case["result_shape"])
    assert np.array_equal(x[index].numpy(), expected)
    tensors = tuple(tensor(e) if isinstance(e, np.ndarray) else e for e in index)
    assert np.array_equal(x[tensors].numpy(), expected)


# --- Random indices against numpy -------------------------------------------------------------------------------------

Index = tuple[Any, ...]


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], Index]:
    """A shape and an index into it of any kind."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    common = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 3)]))
    index: list[Any] = []
    dim, dots = 0, False
    while dim < len(shape):
        size = shape[dim]
        kinds = ["slice", "none", "stop"] + ([] if dots else ["dots"]) + (["int", "array"] if size else [])
        kind = draw(st.sampled_from([*kinds, "mask", "bool"]))
        if kind == "stop":
            break
        if kind == "dots":
            dots = True
            index.append(Ellipsis)
            dim += draw(st.integers(0, len(shape) - dim))
        elif kind in ("none", "bool"):
            index.append(None if kind == "none" else draw(st.booleans()))
        elif kind == "mask":
            width = draw(st.integers(1, len(shape) - dim))
            count = int(np.prod(shape[dim : dim + width]))
            bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
            index.append(np.array(bits, bool).reshape(shape[dim : dim + width]))
            dim += width
        else:
            if kind == "int":
                index.append(draw(st.integers(-size, size - 1)))
            elif kind == "slice":
                bound = st.one_of(st.none(), st.integers(-size - 1, size + 1))
                index.append(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3]))))
            else:
                given_shape = tuple(1 if draw(st.integers(0, 4)) == 0 else s for s in common)
                count = int(np.prod(given_shape))
                values = draw(st.lists(st.integers(-size, size - 1), min_size=count, max_size=count))
                index.append(np.array(values, np.int64).reshape(given_shape))
            dim += 1
    return shape, tuple(index)


def reached(shape: tuple[int, ...], index: Index) -> np.ndarray | None:
    """The flat places that an index reaches, by numpy: the basic part first, then arrays and masks; None if refused."""
    used = sum(e.ndim if isinstance(e, np.ndarray) and e.dtype == bool else 1 for e in index if _takes(e))
    if used > len(shape):
        return None
    basic: list[Any] = []
    arrays: list[Any] = []
    dim = 0
    for e in index:
        if isinstance(e, np.ndarray) and e.dtype == bool:
            if e.shape != shape[dim : dim + e.ndim]:  # numpy lets some masks of size 0 pass
                return None
            basic += [slice(None)] * e.ndim
            arrays.append(e)
            dim += e.ndim - 1
        elif isinstance(e, np.ndarray) and e.ndim:
            basic.append(slice(None))
            arrays.append(e)
        elif e is Ellipsis:
            basic += [slice(None)] * (len(shape) - used)
            arrays += [slice(None)] * (len(shape) - used)
            dim += len(shape) - used
        elif isinstance(e, bool):
            arrays.append(e)
        elif e is None or isinstance(e, slice):
            basic.append(e)
            arrays.append(slice(None))
        else:
            basic.append(int(e))
        dim += _takes(e)
    try:
        window = np.arange(int(np.prod(shape))).reshape(shape)[tuple(basic)]
        found: np.ndarray = window[tuple(arrays)]
    except IndexError:
        return None
    return found


def _takes(entry: Any) -> bool:
    return not (entry is None or entry is Ellipsis or isinstance(entry, bool))


def as_tensors(index: Index) -> Index:
    return tuple(tensor(e) if isinstance(e, np.ndarray) else e for e in index)


@settings(max_examples=100)
@given(indexed(), st.integers(0, 2**32))
@example(((4, 3), (np.array([0, 0, 1]), slice(1, None))), 0)
@example(((3, 3), (np.eye(3, dtype=bool),)), 0)
@example(((2, 3, 4), (np.array([0, 1]), slice(None), np.array([1, 1]))), 0)
def test_any_index_reads_and_writes_like_numpy(made: tuple[tuple[int, ...], Index], seed: int) -> None:
    shape, index = made
    rng = np.random.default_rng(seed)
    expected = reached(shape, index)
    x = counted(*shape)
    if expected is None:
        with pytest.raises((IndexRangeError, ShapeError)):
            x[as_tensors(index)]
        return
    got = x[as_tensors(index)]
    assert np.array_equal(got.numpy(), expected)
    if not any(isinstance(e, (np.ndarray, bool)) for e in index):
        assert got.array.storage is x.array.storage, "basic indexing is a view"
    # assignment, in order of position: the last write stays
    values = rng.standard_normal(expected.shape[rng.integers(0, expected.ndim + 1) :])
    written = np.arange(float(x.numel()))
    for at, value in zip(expected.ravel(), np.broadcast_to(values, expected.shape).ravel(), strict=True):
        written[at] = value
    target = counted(*shape)
    target[as_tensors(index)] = tensor(values)
    assert np.array_equal(target.numpy().ravel(), written)
    # the same through the tape, with the gradients of what was read and written
    source, value = counted(*shape, requires_grad=True), tensor(values, requires_grad=True)
    weights = rng.standard_normal(expected.shape)
    other = source * 1.0
    other[as_tensors(index)] = value
    ((source[as_tensors(index)] * tensor(weights)).sum() + (other * tensor(written.reshape(shape))).sum()).backward()
    read = np.bincount(expected.ravel(), weights.ravel(), minlength=source.numel())
    last = dict(zip(expected.ravel().tolist(), range(expected.size), strict=True))
    kept = np.ones(source.numel())
    kept[list(last)] = 0.0
    assert np.allclose(source.grad.numpy().ravel(), read + kept * written)
    stayed = np.zeros(expected.size)
    stayed[list(last.values())] = written[list(last)]
    summed = stayed.reshape(-1, values.size).sum(0) if values.size else np.zeros(0)
    assert np.allclose(value.grad.numpy().ravel(), summed)


def test_the_oracle_on_places_worked_out_by_hand() -> None:
    found = reached((2, 3), (1, slice(None, None, 2)))
    assert found is not None
    assert found.tolist() == [3, 5]
    apart = reached((2, 2, 2), (np.array([1, 0]), 1, np.array([0, 1])))
    assert apart is not None
    assert apart.tolist() == [6, 3]
    assert reached((2,), (np.array([True, False, True]),)) is None
    assert reached((2,), (2,)) is None


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_plans_say_what_will_run() -> None:
    x = genesis.zeros(4, 5, 6).array
    rows, mask = tensor([0, 2]).array, genesis.zeros(4, 5, dtype="bool").array
    view = plan_get(x, (slice(1, 4, 2), None, 2))
    assert (view.kind, view.shape) == (Kind.VIEW, (2, 1, 6))
    assert (view.window.strides, view.window.offset) == ((60, 0, 1), 30 + 12)
    gather = plan_get(x, (rows, slice(2, 5)))
    assert (gather.kind, gather.shape, gather.dims, gather.window.offset) == (Kind.GATHER, (2, 3, 6), (0,), 12)
    apart = plan_get(x, (rows, slice(None), rows))
    assert (apart.shape, apart.dims) == ((2, 5), (0, 2))
    assert plan_set(x, 1, scalar=True).kind is Kind.FILL
    assert plan_set(x, 1, scalar=False).kind is Kind.COPY
    scatter = plan_set(x, (slice(None), rows), scalar=False)
    assert (scatter.kind, scatter.shape) == (Kind.SCATTER, (4, 2, 6))
    masked = plan_set(x, mask, scalar=True)
    assert masked.kind is Kind.FILL
    assert masked.mask is not None
    assert masked.mask.shape == (4, 5, 1)
    assert plan_set(x, mask, scalar=False).shape == (0, 6)


def taken(function: Any) -> tuple[int, Any]:
    """The most bytes of the CPU's pool that a call has at once, and its result."""
    now = most = 0

    def watch(address: int, nbytes: int) -> None:
        nonlocal now, most
        now += nbytes
        most = max(most, now)

    cpu.pool.watch = watch
    try:
        result = function()
    finally:
        cpu.pool.watch = None
    return most, result


ROWS, HALF = np.array([3, 0, 3]), np.arange(20).reshape(4, 5) % 2 == 0
READS: list[tuple[Any, str, bool, int]] = [
    # index, kind, whether a mask is counted, bytes for positions
    ((slice(1, 4, 2), None, 2), "VIEW", False, 0),
    ((Ellipsis, slice(2, None)), "VIEW", False, 0),
    (3, "VIEW", False, 0),
    (slice(4, 9), "VIEW", False, 0),
    (ROWS, "GATHER", False, 0),
    ((slice(None), ROWS, slice(1, 3)), "GATHER", False, 0),
    ((slice(1, 2), slice(2, None), ROWS), "GATHER", False, 0),
    ((ROWS, slice(None), ROWS), "GATHER", False, 0),
    (HALF, "GATHER", True, 2 * 10 * 8),
    ((HALF[:, 1], slice(None), 0), "GATHER", True, 2 * 8),
    (np.arange(120).reshape(4, 5, 6) % 3 == 0, "GATHER", True, 2 * 8),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("index", "kind", "counts", "temporary"), READS)
def test_a_plan_tells_what_a_read_does(index: Any, kind: str, counts: bool, temporary: int, device: str) -> None:
    def placed(entry: Any) -> Any:
        return genesis.tensor(entry, device=device) if isinstance(entry, np.ndarray) else entry

    values = np.arange(120, dtype=np.float32).reshape(5, 4, 6).transpose(1, 0, 2)
    x = genesis.tensor(np.ascontiguousarray(values.transpose(1, 0, 2)), device=device).transpose(0, 1)
    key = tuple(map(placed, index)) if isinstance(index, tuple) else placed(index)
    plan = genesis.index_plan(x, key)
    most, result = taken(lambda: x[key]) if device == "cpu" else (0, x[key])
    assert (plan.kind, plan.needs_mask_compaction, plan.temp_memory_bytes) == (kind, counts, temporary)
    assert plan.kind is Kind[kind]
    assert (plan.result_shape, plan.result_strides) == (result.shape, result.stride())
    assert np.array_equal(result.cpu().numpy(), values[index])
    if kind == "VIEW":
        assert plan.index_tensor is None
        if result.numel():
            assert plan.ptr_offset_bytes == result.data_ptr() - x.data_ptr()
    elif device == "cpu":
        assert most == result.array.nbytes + temporary
    if plan.index_tensor is not None:  # the view of the basic part, and in it the positions
        several = plan.index_tensor if isinstance(plan.index_tensor, tuple) else (plan.index_tensor,)
        assert all(i.dtype is genesis.int64 and i.device.type == device for i in several)


def test_the_positions_of_a_plan_read_the_same() -> None:
    x = genesis.arange(20).reshape(4, 5)
    plan = genesis.index_plan(x, tensor(HALF[:, 1]))
    assert plan.index_tensor.tolist() == [1, 3]
    assert x[plan.index_tensor].tolist() == x[tensor(HALF[:, 1])].tolist()
    part = genesis.index_plan(x, (slice(1, 3), tensor([0, 4])))
    assert (part.index_tensor.tolist(), part.ptr_offset_bytes) == ([0, 4], 5 * 8)
    rows, columns = genesis.index_plan(x, (tensor([0, 1]), tensor([2, 3]))).index_tensor
    assert (rows.tolist(), columns.tolist()) == ([0, 1], [2, 3])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_tells_what_a_write_does_and_leaves_it(device: str) -> None:
    x, rows = genesis.zeros(4, 6, device=device), genesis.tensor([3, 0, 3], device=device)
    mask = genesis.tensor(HALF[:, 1], device=device)
    ones = genesis.ones(3, 6, device=device)
    fill = genesis.index_plan(x, (slice(1, 3), 2), 1.0)
    assert fill == (Kind.FILL, (2,), (6,), (6 + 2) * 4, None, False, 0)
    assert genesis.index_plan(x, slice(1, 4), ones) == (Kind.COPY, (3, 6), (6, 1), 6 * 4, None, False, 0)
    scatter = genesis.index_plan(x, rows, ones)
    assert (scatter.kind, scatter.result_shape, scatter.temp_memory_bytes) == ("SCATTER", (3, 6), 0)
    assert scatter.index_tensor.tolist() == [3, 0, 3]
    under = genesis.index_plan(x, mask, 5.0)
    assert (under.kind, under.needs_mask_compaction, under.temp_memory_bytes) == ("FILL", False, 0)
    listed = genesis.index_plan(x, mask, ones[:2])
    assert (listed.kind, listed.needs_mask_compaction, listed.temp_memory_bytes) == ("SCATTER", True, 2 * 8)
    assert not x.any()
    with pytest.raises(IndexRangeError):
        genesis.index_plan(x, 4)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every time the host reads a value from an array."""
    seen: list[str] = []
    for name in ("item", "numpy"):
        plain = getattr(Array, name)

        def noted(self: Array, plain: Any = plain, name: str = name) -> Any:
            seen.append(name)
            return plain(self)

        monkeypatch.setattr(Array, name, noted)
    return seen


def test_a_mask_waits_once_for_its_size_and_a_fill_not_at_all(waits: list[str]) -> None:
    x, mask = counted(4, 5), counted(4, 5) > 7.0
    waits.clear()
    picked = x[mask]
    assert waits.count("item") == 1
    assert len(waits) == waits.count("item") + 1  # item itself reads through numpy
    waits.clear()
    x[mask] = 0.0
    x[mask[:, 0]] = tensor(1.0, dtype="float64")
    assert not waits
    x[mask] = picked
    assert waits.count("item") == 1


# --- Assignment -------------------------------------------------------------------------------------------------------


def test_assignment_through_any_index_changes_the_original() -> None:
    x = genesis.zeros(4, 10, dtype="float64")
    expected = np.zeros((4, 10))
    address = x.data_ptr()
    rows = tensor([3, 1])
    x[rows, 2:8] += 1.0
    expected[[3, 1], 2:8] += 1
    x[0] = tensor(np.arange(10.0))
    expected[0] = np.arange(10)
    x[:, ::3] *= 2.0
    expected[:, ::3] *= 2
    x[x > 10.0] = -1.0
    expected[expected > 10] = -1
    x[..., -1] = tensor([[1.0], [2.0], [3.0], [4.0]])[:, 0]
    expected[..., -1] = [1, 2, 3, 4]
    x[[0, 1], [5, 6]] = [7.0, 8.0]
    expected[[0, 1], [5, 6]] = [7, 8]
    view = x[2:, None, 4]
    view[...] = 9.0
    expected[2:, 4] = 9
    assert np.array_equal(x.numpy(), expected)
    assert x.data_ptr() == address


@pytest.mark.parametrize("layout", ["transposed", "step", "offset"])
def test_assignment_into_views_writes_nowhere_else(layout: str) -> None:
    array = place(np.arange(24.0).reshape(4, 6), layout)
    x = genesis.Tensor(array)
    x[tensor([1, 1, 3]), 1:4] = tensor([[1.0], [2.0], [3.0]], dtype="float64")
    x.index_add_(1, tensor([5, 5]), genesis.ones(4, 2, dtype="float64"))
    expected = np.arange(24.0).reshape(4, 6)
    expected[1, 1:4], expected[3, 1:4] = 2.0, 3.0
    expected[:, 5] += 2
    assert np.array_equal(x.numpy(), expected)
    whole = Array(array.storage, (array.storage.nbytes // 8,), (1,), array.dtype).view_np()
    assert np.isnan(whole).sum() == whole.size - 24


def test_values_are_broadcast_and_cast() -> None:
    x = genesis.zeros(3, 4, dtype="int32")
    x[1] = 2.9
    x[0, :2] = tensor([1.7, -1.7])
    x[tensor([2]), tensor([3])] = tensor([8.2])
    x[x == 0] = True
    assert x.tolist() == [[1, -1, 1, 1], [2, 2, 2, 2], [1, 1, 1, 8]]
    x[1:3] = tensor([[[[5]]]])  # leading dimensions of size 1 are dropped
    assert x[1:].unique().tolist() == [5]
    narrow = genesis.zeros(2, dtype="bfloat16")
    narrow[0] = tensor(1.0 / 3.0, dtype="float64")
    assert narrow[0].item() == tensor(1.0 / 3.0).bfloat16().item()
    flags = genesis.zeros(3, dtype="bool")
    flags[tensor([0, 2])] = 5
    assert flags.tolist() == [True, False, True]


def test_overlapping_memory_is_read_before_it_is_written() -> None:
    x = counted(6)
    x[1:] = x[:-1]
    assert x.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    y = counted(6)
    y[tensor([5, 4, 3])] = y[:3]
    assert y.tolist() == [0.0, 1.0, 2.0, 2.0, 1.0, 0.0]
    places = tensor([2, 0, 1])
    places[places] = places + 0
    assert places.tolist() == [0, 1, 2]
    with pytest.raises(ShapeError, match="share memory"):
        genesis.zeros(1, 3).expand(2, 3)[tensor([0])] = 1.0


def test_the_last_of_repeated_writes_stays() -> None:
    count = 10_000
    places = np.random.default_rng(0).integers(0, 50, count)
    last = {int(p): i for i, p in enumerate(places)}
    for width in (1, 40):
        x = genesis.zeros(50, width)
        values = np.repeat(np.arange(count, dtype=np.float32)[:, None], width, 1)
        x[tensor(places)] = tensor(values)
        assert x[:, -1].tolist() == [float(last[i]) for i in range(50)]
    grid = genesis.zeros(5, 10)
    grid[tensor(places.reshape(100, 100) // 10), tensor(places.reshape(100, 100) % 10)] = tensor(
        np.arange(count, dtype=np.float32).reshape(100, 100)
    )
    assert grid.reshape(-1).tolist() == [float(last[i]) for i in range(50)]


# --- Gradients --------------------------------------------------------------------------------------------------------

READS: dict[str, Any] = {
    "rows": lambda x: x[tensor([1, 1, 0])],
    "mixed": lambda x: x[tensor([1, 0]), 1:],
    "several": lambda x: x[tensor([1, 0]), :, tensor([[0], [3]])],
    "mask": lambda x: x[tensor([[True, False, True], [False, True, True]])],
    "view": lambda x: x[:, None, ::2, -1],
    "gather": lambda x: x.gather(2, tensor([[[0, 0], [3, 1], [2, 2]]] * 2)),
    "index_select": lambda x: x.index_select(1, tensor([2, 2, 0])),
    "take_along_dim": lambda x: genesis.take_along_dim(x, tensor([[[1, 1]]]), 2),
    "masked_select": lambda x: x.masked_select(tensor([True, False, True, True])),
}
ROW = tensor([[[0.5, 1.0, 1.5, 2.0]]], dtype="float64")
WRITES: dict[str, Any] = {
    "setitem rows": lambda x, v: assign(x, (tensor([1, 0, 1]), 1), v),
    "setitem slice": lambda x, v: assign(x, (slice(None), 1), v),
    "setitem mask": lambda x, v: assign(x, tensor([[True, False, True], [False, True, True]]), v),
    "setitem number": lambda x, v: assign(x * v, (tensor([1]), 0), 2.0),
    "setitem mask number": lambda x, v: assign(x * v, tensor([[True, False, True], [False, True, True]]), 2.0),
    "setitem mask scalar": lambda x, v: assign(x, tensor([[True, False, True], [False, True, True]]), v[0]),
    "add into a view": lambda x, v: added(x, v),
    "index_add": lambda x, v: x.index_add(1, tensor([2, 2]), v.expand(2, 2, 4), alpha=3),
    "index_copy": lambda x, v: x.index_copy(1, tensor([2, 0, 2]), v.expand(2, 3, 4)),
    "index_put": lambda x, v: x.index_put((tensor([1, 1]), tensor([0, 0])), v, accumulate=True),
    "index_fill": lambda x, v: (x * v).index_fill(0, tensor([1]), 5.0),
    "scatter": lambda x, v: x.scatter(1, tensor([[[2, 0, 1, 0], [2, 1, 1, 1]]]), (v * 2.0).expand(1, 2, 4)),
    "scatter_add": lambda x, v: x.scatter_add(1, tensor([[[2, 0, 1, 0], [2, 1, 1, 1]]]), v.expand(1, 2, 4)),
    "masked_scatter": lambda x, v: (x * 1.0).masked_scatter(tensor([True, False, True, False]), v.repeat(4)),
}


def assign(x: Any, index: Any, value: Any) -> Any:
    made = x * 1.0
    made[index] = value
    return made * made


def added(x: Any, v: Any) -> Any:
    made = x * 1.0
    made[:, 1] += v
    made[tensor([0, 1]), 2] *= v
    return made * made


@pytest.mark.parametrize("name", READS)
def test_gradients_of_reading(name: str) -> None:
    assert gradcheck(READS[name], [normal(2, 3, 4)])


@pytest.mark.parametrize("name", WRITES)
def test_gradients_of_writing(name: str) -> None:
    assert gradcheck(
        WRITES[name], [normal(2, 3, 4), tensor([0.3, -0.7, 1.1, 0.9], dtype="float64", requires_grad=True)]
    )


def test_in_place_forms_agree() -> None:
    x, rows, source = counted(3, 4), tensor([2, 0]), genesis.ones(2, 4, dtype="float64") * 7.0
    grid = tensor([[0, 1, 2, 0]])
    for name, args in {
        "index_add": (0, rows, source),
        "index_copy": (0, rows, source),
        "index_fill": (0, rows, 3.0),
        "index_put": ((rows,), source),
        "scatter": (0, grid, source),
        "scatter_add": (0, grid, source),
        "masked_scatter": (x > 5.0, source),
    }.items():
        changed = x.clone()
        assert getattr(changed, name + "_")(*args) is changed
        assert np.array_equal(changed.numpy(), getattr(x, name)(*args).numpy())
        assert not np.array_equal(changed.numpy(), x.numpy()), name


def test_what_is_assigned_to_its_own_memory_off_the_tape_joins_the_tape() -> None:
    x = tensor([[1.0, 2.0]], requires_grad=True)
    y = x.detach()
    y[0] = x
    assert y.requires_grad
    (y * tensor([[3.0, 5.0]])).sum().backward()
    assert x.grad.tolist() == [[3.0, 5.0]]
    z = x * 1
    z[0] += 1  # assigns the part to itself, which changes nothing more
    z.sum().backward()
    assert (z.tolist(), x.grad.tolist()) == ([[2.0, 3.0]], [[4.0, 6.0]])


def test_a_leaf_that_requires_a_gradient_refuses_assignment() -> None:
    x = counted(3, requires_grad=True)
    for index in (0, tensor([0]), tensor([True, False, False])):
        with pytest.raises(GradientError, match="leaf that requires a gradient"):
            x[index] = 1.0
    with genesis.no_grad():
        x[tensor([0])] = 5.0
    assert x.tolist() == [5.0, 1.0, 2.0]


def test_a_changed_index_is_noticed_before_backward() -> None:
    x, rows = counted(3, requires_grad=True), tensor([0, 1])
    y = x[rows]
    rows[0] = 2
    with pytest.raises(GradientError, match="changed in place"):
        y.sum().backward()


# --- Accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 31, 32, 100])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64"])
def test_repeated_indices_add_up(width: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    places = rng.integers(-20, 20, 500)
    values = rng.integers(-4, 5, (500, width))
    x = genesis.zeros(20, width, dtype=dtype).index_add_(0, tensor(places), tensor(values, dtype=dtype))
    expected = np.zeros((20, width))
    for at, value in zip(places, values, strict=True):
        expected[at] += value
    assert np.array_equal(x.numpy().astype(np.float64), expected)  # small integers: every sum is exact


@pytest.mark.parametrize("width", [3, 64])
def test_narrow_floats_accumulate_in_float32(width: int) -> None:
    """1 + 1 + … in bfloat16 would stop at 256."""
    weight = genesis.zeros(4, width, dtype="bfloat16", requires_grad=True)
    weight[tensor([2] * 3000)].sum().backward()
    assert weight.grad[2].tolist() == [genesis.full((), 3000.0, dtype="bfloat16").item()] * width


def test_backward_of_a_large_table_touches_each_row_once() -> None:
    """An embedding of 151,936 rows: work grows with the looked-up rows, not with their repetitions."""
    calls: list[tuple[int, ...]] = []
    plain = sum_rows

    def counting(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = plain(keys, rows)
        calls.append(found[1].shape)
        return found

    ids = np.minimum(np.random.default_rng(0).zipf(1.3, 2048), 151_935)
    weight = genesis.zeros(151_936, 32, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.ops.index.sum_rows", counting)
        weight[tensor(ids)].sum().backward()
    assert calls == [(len(np.unique(ids)), 32)]
    assert np.array_equal(weight.grad[:, 0].numpy(), np.bincount(ids, minlength=151_936))


def test_unrecorded_writes_touch_the_indexed_elements_only() -> None:
    """No copy of the target: the mutating op is what runs, on a target of any size."""
    seen: list[str] = []
    x = genesis.zeros(1000, 8)
    with ops.observe(lambda op, inputs, outputs, attrs, seconds: seen.append(op.name)):
        x[tensor([1, 5])] = 1.0
        x.index_add_(0, tensor([1]), genesis.ones(1, 8))
    assert [n for n in seen if n.startswith("index")] == ["index_put_", "index_put_"]
    assert x.sum().item() == 24.0


# --- Errors -----------------------------------------------------------------------------------------------------------

X = counted(2, 3)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "int": (lambda: X[2], IndexRangeError, "index 2 is out of range for dimension 0 of size 2"),
    "negative": (lambda: X[0, -4], IndexRangeError, "index -4 is out of range for dimension 1 of size 3"),
    "array": (lambda: X[0, tensor([0, 3])], IndexRangeError, "index 3 is out of range for dimension 1 of size 3"),
    "array after None": (lambda: X[None, [5]], IndexRangeError, "index 5 is out of range for dimension 0 of size 2"),
    "too many": (lambda: X[0, 0, 0], IndexRangeError, "3 indices .* 2 dimensions"),
    "ellipses": (lambda: X[..., ...], IndexRangeError, "more than one ellipsis"),
    "step": (lambda: X[::-1], ShapeError, "slice step -1 for dimension 0: steps are at least 1.*use flip"),
    "bound": (lambda: X[1.5:], DTypeError, "bounds and steps of slices are integers"),
    "float": (lambda: X[1.5], DTypeError, "type float"),
    "text": (lambda: X["a"], DTypeError, "type str"),
    "float array": (lambda: X[tensor([1.0])], DTypeError, "an index tensor is genesis.float32"),
    "uint8 array": (lambda: X[tensor([1, 0], dtype="uint8")], DTypeError, r"genesis.uint8.*cast it"),
    "float list": (lambda: X[[0.5]], DTypeError, "type float64"),
    "ragged list": (lambda: X[[[0], [0, 1]]], ShapeError, "rectangular"),
    "mask": (lambda: X[tensor([True])], IndexRangeError, r"a mask of shape \(1,\) at dimension 0 does not match"),
    "arrays": (lambda: X[[0, 1], [0, 1, 2]], ShapeError, r"shapes \(2,\) and \(3,\) do not broadcast"),
    "value": (lambda: setitem(X, 0, genesis.zeros(2)), ShapeError, r"shape \(2,\) cannot be assigned to .* \(3,\)"),
    "value for arrays": (lambda: setitem(X, [0], genesis.zeros(4)), ShapeError, r"\(4,\) cannot be assigned"),
    "value for a mask": (lambda: setitem(X, X > 3.0, genesis.zeros(3)), ShapeError, r"\(3,\) cannot be .* \(2,\)"),
    "value type": (lambda: setitem(X, 0, "a"), DTypeError, "a value of type str"),
    "value range": (lambda: setitem(genesis.zeros(2, dtype="uint8"), 0, -1), DTypeError, "-1 does not fit into"),
    "value nan": (lambda: setitem(genesis.zeros(2, dtype="int8"), 0, float("nan")), DTypeError, "nan does not fit"),
    "gather": (lambda: X.gather(0, tensor([0])), ShapeError, r"an index of shape \(1,\) does not suit"),
    "gather index": (lambda: X.gather(0, X), DTypeError, "gather: the index is genesis.float64"),
    "scatter source": (lambda: X.scatter(0, tensor([[0, 1]]), X[:, :1]), ShapeError, "a source of shape"),
    "index_select": (lambda: X.index_select(0, tensor([[0]])), ShapeError, "must be a vector of integers"),
    "index_add": (lambda: X.index_add(0, tensor([0]), X), ShapeError, r"the source has shape \(2, 3\), expected"),
    "index_put": (lambda: X.index_put((), 1.0), ShapeError, "at least one index tensor"),
    "masked_select": (lambda: X.masked_select(tensor([1])), DTypeError, "masked_select takes a bool mask"),
    "masked_scatter": (lambda: X.masked_scatter(X >= 0.0, X[0]), ShapeError, "selects 6 elements, the source has 3"),
    "no tensor": (lambda: X.gather(0, [0]), DTypeError, "gather takes a tensor, got list"),
}


def setitem(x: Any, index: Any, value: Any) -> None:
    x[index] = value


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
    assert X.tolist() == counted(2, 3).tolist()

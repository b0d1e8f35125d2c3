"""Recorded launches repeat correctly on other operands: addresses, aliases, numbers, windows, temporaries."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.array import Array, Spec, empty
from genesis.backend import backend_for
from genesis.backend.cuda import CudaBackend, dispatch, launch
from genesis.backend.cuda.dispatch import call_key, cuda_impls, exact, layout_of
from genesis.backend.cuda.launch import KernelLaunch, submit, watching_launches
from genesis.custom import cuda_source
from genesis.dtypes import float32
from genesis.errors import DeviceError, DTypeError, ShapeError
from genesis.op import Op, registry
from tests.ops.devices import CUDA


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend, with nothing remembered."""
    found = backend_for(CUDA)
    assert isinstance(found, CudaBackend)
    monkeypatch.setattr(found, "_calls", {})
    monkeypatch.setattr(found, "_calls_into", {})
    return found


def device(values: np.ndarray) -> Array:
    return genesis.tensor(values, device="cuda").array  # type: ignore[no-any-return]


def launch_what_waits(backend: CudaBackend) -> None:
    backend.driver.flush()  # of a GPU; in the interpreter nothing waits but what a test lets wait
    try:
        for launch in backend.driver.pending:
            launch()
    finally:
        backend.driver.pending.clear()


def test_a_second_call_replays_on_new_operands(backend: CudaBackend) -> None:
    add = registry["add"]
    rng = np.random.default_rng(0)
    for turn in range(3):
        x, y = rng.standard_normal((2, 5, 7)).astype(np.float32)
        assert np.array_equal(add(device(x), device(y)).numpy(), x + y)
        assert len(backend._calls) == 1, turn


def test_the_same_array_twice_is_another_call(backend: CudaBackend) -> None:
    sub = registry["sub"]
    x, y = device(np.full((4, 4), 3.0, np.float32)), device(np.full((4, 4), 1.0, np.float32))
    assert np.all(sub(x, x).numpy() == 0)
    assert np.all(sub(x, y).numpy() == 2)
    assert np.all(sub(y, x).numpy() == -2)
    assert np.all(sub(y, y).numpy() == 0)


def test_writing_over_an_input_is_another_call(backend: CudaBackend) -> None:
    mul = registry["mul"]
    for start in (1.0, 2.0):
        x, y = device(np.full(6, start, np.float32)), device(np.full(6, 3.0, np.float32))
        mul(x, y, out=x)
        assert np.all(x.numpy() == 3 * start)
        assert np.all(mul(x, y).numpy() == 9 * start)
        assert np.all(x.numpy() == 3 * start)


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (0.0, -0.0), (True, 1), (2, 3)])
def test_numbers_of_other_type_or_sign_are_other_calls(backend: CudaBackend, a: float, b: float) -> None:
    x = device(np.ones(3, np.float32))
    mul = registry["mul"]
    assert call_key(mul, (x, a), {}) != call_key(mul, (x, b), {})
    assert np.array_equal(np.signbit(mul(x, a).numpy()), np.signbit(np.full(3, a, np.float32)))
    assert np.array_equal(np.signbit(mul(x, b).numpy()), np.signbit(np.full(3, b, np.float32)))


def test_a_copy_into_another_type_is_no_plain_copy(backend: CudaBackend) -> None:
    """The result of `out=` of another type is copied there: what was remembered of that copy had its type."""
    narrow, wide = genesis.ones(3, dtype="bfloat16", device="cuda"), genesis.tensor([0.1, 0.2, 0.3], device="cuda")
    narrow.add_(wide)
    genesis.mul(wide, 2.0, out=genesis.zeros(3, dtype="float64", device="cuda"))
    for _ in range(3):
        assert wide.clone().dtype is genesis.float32
        assert np.array_equal(wide.clone().cpu().numpy(), np.float32([0.1, 0.2, 0.3]))


def test_results_are_laid_out_as_without_out(backend: CudaBackend) -> None:
    """Of size 1 and of no elements any strides are contiguous, but plain results have their own."""
    x = genesis.ones(1, 4, device="cuda")
    genesis.neg(x, out=genesis.zeros(1, 8, device="cuda")[:, :4])
    assert genesis.neg(x).stride() == (4, 1)
    moved = genesis.zeros(9, device="cuda")[1:9].view(2, 4)  # not at a multiple of 16 bytes
    y = genesis.ones(2, 4, device="cuda")
    genesis.exp(y, out=moved)
    assert layout_of(genesis.exp(y).array) is layout_of(y.array)


def test_plain_calls_after_one_into_like_memory_are_remembered(backend: CudaBackend) -> None:
    x, memory = device(np.ones(8, np.float32)), device(np.zeros(32, np.float32))
    registry["exp"](x, out=memory.view((8,), (1,), 16))
    registry["exp"](x)
    assert [key[0] for key in backend._calls] == [registry["exp"]]


@dataclasses.dataclass(eq=False)
class Settings:
    factor: float


def test_what_an_object_holds_is_asked_again(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an object that may change nothing is remembered; numpy's scalars are equal where their bits are not."""

    def cuda_impl(out: Array, x: Array, factor: Any) -> None:
        registry["mul"](x, float(getattr(factor, "factor", factor)), out=out)

    op = Op("trial", lambda out, x, factor: None, lambda x, factor: Spec(x.shape, x.dtype), cuda_impl=cuda_impl)
    x, settings = device(np.ones(3, np.float32)), Settings(2.0)
    assert np.all(op(x, factor=settings).numpy() == 2)
    settings.factor = 3.0
    assert np.all(op(x, factor=settings).numpy() == 3)
    for factor in (0.0, np.float32(-0.0), np.float64(-0.0), np.float32(0.0), -0.0):
        assert np.all(np.signbit(op(x, factor=factor).numpy()) == np.signbit(factor)), repr(factor)


@pytest.mark.parametrize(
    ("a", "b"),
    [((1,), (1.0,)), ((1,), (True,)), ((0.0,), (-0.0,)), (((2,), 1), ((2.0,), 1)), (2.0, np.int64(2)), (0, False)],
)
def test_equal_values_that_compute_differently_have_other_keys(a: Any, b: Any) -> None:
    assert a == b
    assert exact(a) != exact(b)
    assert exact(a) == exact(copy.deepcopy(a))


def test_nan_is_found_again(backend: CudaBackend) -> None:
    for _ in range(3):
        assert np.isnan(registry["mul"](device(np.ones(3, np.float32)), float("nan")).numpy()).all()
    assert len(backend._calls) == 1
    assert exact((float("nan"), 1)) == exact((float("nan"), 1))


class Kernel:
    """As much of a kernel under `triton.jit` as a launch looks at before it is compiled."""

    __name__, params = "scaled", ()


def test_machine_code_for_a_constant_is_not_that_of_an_equal_one(backend: CudaBackend) -> None:
    """A kernel compiled for 2 computes with integers, one for 2.0 with floats."""
    asked: list[Any] = []
    kernel, x = Kernel(), device(np.ones(1, np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_compiling", {})
        patch.setattr(launch, "compiling", lambda kernel, signature, arch: asked.append(signature) or Future())
        for constant in (2, 2.0, 1, True, 0.0, -0.0, 2, -0.0):
            launch.native_launch(backend, kernel, (1, 1, 1), (x, x), {"C": constant})
    assert [repr(s.constants[0][1]) for s in asked] == ["2", "2.0", "1", "True", "0.0", "-0.0"]


def test_sources_compiled_with_equal_macros_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_compiled", lambda preamble, *rest: [preamble])
    made = [cuda_source.compile_source("", "f", (9, 0), (("C", c),)) for c in (1, 1.0, True)]
    assert made == ["#define C 1\n", "#define C 1.0f\n", "#define C true\n"]


def test_layouts_are_shared_and_tell_alignment_apart() -> None:
    x = device(np.arange(64, dtype=np.float32))
    aligned, odd = x.view((8,), (1,), 16), x.view((8,), (1,), 3)
    assert layout_of(x.view((8,), (1,), 32)) is layout_of(aligned)
    assert layout_of(odd) is not layout_of(aligned)
    assert np.array_equal(registry["neg"](odd).numpy(), -np.arange(3, 11, dtype=np.float32))
    assert np.array_equal(registry["neg"](aligned).numpy(), -np.arange(16, 24, dtype=np.float32))


def test_sizes_that_depend_on_data_do_not_pile_up(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count of selected elements is a call of its own; what is remembered of them is bounded."""
    monkeypatch.setattr("genesis.backend.cuda.dispatch.PLANS", 8)
    monkeypatch.setattr(dispatch, "LAYOUTS", 16)
    monkeypatch.setattr(dispatch, "_layouts", {})
    values = np.arange(40, dtype=np.float32)
    x, rows = genesis.tensor(values, device="cuda"), genesis.tensor(values.reshape(20, 2), device="cuda")
    for count in range(1, 20):
        mask = genesis.tensor(np.arange(40) < count, device="cuda")
        assert x[mask].tolist() == values[:count].tolist()
        assert rows[mask[:20]].numpy().tolist() == values.reshape(20, 2)[:count].tolist()
        assert len(backend._calls) <= 8 and len(backend._calls_into) <= 8 and len(dispatch._layouts) <= 16
    assert len(backend._calls_into) == 8


def test_each_layout_has_a_plan_of_its_own(backend: CudaBackend) -> None:
    for shape in ((5, 7), (3,), (2, 3, 4)):
        for turn in range(4):
            x, y = np.random.default_rng(turn).standard_normal((2, *shape)).astype(np.float32)
            assert np.array_equal(registry["add"](device(x), device(y)).numpy(), x + y)
    assert len(backend._calls) == 3


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_calls_into_given_memory_come_back_too(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    add, values = registry["add"], np.arange(12, dtype=np.float32).reshape(3, 4)
    x, y, out = device(values), device(values + 1), device(np.zeros((3, 4), np.float32))
    for _ in range(turns):
        assert add(x, y, out=out) is out
    assert out.storage.version == turns
    assert np.array_equal(out.numpy(), 2 * values + 1)
    for _ in range(turns):
        add(x, y, out=x)
    assert np.array_equal(x.numpy(), values + turns * (values + 1))
    monkeypatch.setattr(add, "infer", lambda *args, **attrs: pytest.fail("decided again"))
    if turns > 1:
        add(x, y, out=out)


def test_given_memory_that_overlaps_an_input_is_not_written_while_it_is_read(backend: CudaBackend) -> None:
    """The key of a call does not tell whether two arrays share memory."""
    add = registry["add"]
    ones = device(np.ones(4, np.float32))
    for _ in range(3):
        add(device(np.arange(4, dtype=np.float32)), ones, out=device(np.zeros(4, np.float32)))
    memory = device(np.arange(8, dtype=np.float32))
    add(memory.view((4,), (1,), 0), ones, out=memory.view((4,), (1,), 4))
    add(memory.view((4,), (1,), 2), ones, out=memory.view((4,), (1,), 0))
    assert memory.numpy().tolist() == [3, 4, 2, 3, 1, 2, 3, 4]


def test_a_wrong_out_is_refused_however_often_the_op_ran(backend: CudaBackend) -> None:
    x = device(np.ones(4, np.float32))
    for _ in range(3):
        registry["add"](x, x, out=device(np.zeros(4, np.float32)))
        with pytest.raises(ShapeError):
            registry["add"](x, x, out=device(np.zeros(5, np.float32)))
        with pytest.raises(DTypeError):
            registry["add"](x, x, out=device(np.zeros(4, np.int32)))


def test_several_outputs_are_taken_afresh(backend: CudaBackend) -> None:
    before: list[Array] = []
    for turn in range(4):
        values = np.random.default_rng(turn).standard_normal((3, 8)).astype(np.float32)
        top, places = registry["topk"](device(values), k=2, axis=1)
        assert np.array_equal(places.numpy(), np.argsort(-values, axis=1, kind="stable")[:, :2])
        assert np.array_equal(top.numpy(), np.take_along_axis(values, places.numpy(), 1))
        assert not {a.data_ptr() for a in before} & {top.data_ptr(), places.data_ptr()}
        before += [top, places]


def test_what_is_changed_in_place_counts_its_versions(backend: CudaBackend) -> None:
    p, expected = device(np.ones(5, np.float32)), np.ones(5, np.float32)
    for turn in range(4):
        g = np.full(5, turn, np.float32)
        registry["sgd_step"](p, device(g), 0.5, 1.0, 1.0, weight_decay=0.0)
        expected = expected - np.float32(0.5) * g
        assert p.storage.version == turn + 1
        assert np.array_equal(p.numpy(), expected)  # halves: exact


def test_launches_that_are_watched_are_seen_each_time(backend: CudaBackend) -> None:
    x, seen = device(np.ones(5, np.float32)), []
    for _ in range(3):
        unseen = registry["exp"](x)

    def watch(launched: KernelLaunch, stream: int) -> None:
        seen.append(launched.name)
        launched.run(stream)

    launch_what_waits(backend)
    with watching_launches(watch):
        found = registry["exp"](x)
    registry["exp"](x)
    assert len(seen) == 1
    assert np.array_equal(found.numpy(), unseen.numpy())


def test_calls_wait_behind_launches_that_wait(backend: CudaBackend) -> None:
    exp, order = registry["exp"], []
    x, out = device(np.ones(5, np.float32)), device(np.zeros(5, np.float32))
    for _ in range(3):
        exp(x)
        exp(x, out=out)

    def first() -> None:
        order.append("waited")
        backend.driver.fill(x.data_ptr(), 0, x.nbytes, backend.stream)

    backend.driver.pending.append(first)
    fresh = exp(x)
    exp(x, out=out)
    order.append("asked")
    launch_what_waits(backend)
    assert order == ["asked", "waited"]
    assert fresh.numpy().tolist() == out.numpy().tolist() == [1.0] * 5


def test_a_launch_that_could_not_be_prepared_says_so_again(backend: CudaBackend) -> None:
    failures = ["no compiler", "still none"]

    def prepare(made: KernelLaunch) -> None:
        if failures:
            raise DeviceError(failures.pop(0))
        made.words, made.slots, made.run = [0], (0,), lambda stream: launched.append(stream)

    def cuda_impl(out: Array) -> None:
        submit(KernelLaunch(prepare, lambda: False), [out], backend.driver, backend.stream)

    launched: list[int] = []
    op = Op("trial", lambda out: None, lambda **attrs: Spec((4,), float32), cuda_impl=cuda_impl)

    def run() -> None:
        op(device=CUDA)
        launch_what_waits(backend)

    for message in tuple(failures):
        with pytest.raises(DeviceError, match=message):
            run()
    for turn in range(3):
        run()
        assert len(launched) == turn + 1


def impl_of_two_steps(out: Array, x: Array) -> None:
    """-2x, through a temporary and a window of the input."""
    doubled = empty(x.shape, x.dtype, x.device)
    registry["add"](x.view(x.shape, x.strides, x.offset), x, out=doubled)
    registry["neg"](doubled, out=out)


def test_temporaries_and_windows_are_traced(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op("trial", lambda out, x: None, lambda x: Spec(x.shape, x.dtype), family="elementwise")
    monkeypatch.setitem(cuda_impls, "trial", impl_of_two_steps)
    try:
        for value in (1.0, 5.0, 2.0, -3.0):
            x = device(np.full(9, value, np.float32))
            assert np.all(op(x).numpy() == -2 * value)
        assert [key[0] for key in backend._calls] == [op]
    finally:
        del registry["trial"]


@pytest.mark.parametrize(
    ("stride", "places", "is_clear"),
    [(1, [(0, 20), (40, 16), (7, 30)], True), (10, [(0, 12), (1, 22), (3, 4)], False)],
    ids=["apart", "interleaved"],
)
def test_windows_are_traced_where_one_of_the_operands_in_a_memory_holds_them(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, stride: int, places: Any, is_clear: bool
) -> None:
    """As all weights of a model are in one memory. The second row of y is added to x, wherever the two are."""

    def impl(out: Array, x: Array, y: Array) -> None:
        registry["add"](x, y.view((4,), (1,), y.offset + 4), out=out)

    op = Op("windowed", lambda out, x, y: None, lambda x, y: Spec(x.shape, x.dtype), family="elementwise")
    monkeypatch.setitem(cuda_impls, "windowed", impl)
    try:
        memory = device(np.arange(80, dtype=np.float32))
        for first, second in places:
            x, y = memory.view((4,), (stride,), first), memory.view((2, 4), (4, 1), second)
            assert np.array_equal(op(x, y).numpy(), x.numpy() + y.numpy()[1])
        assert any(key[0] is op for key in backend._calls) == is_clear
    finally:
        del registry["windowed"]


def test_what_reads_memory_back_is_not_repeated(backend: CudaBackend) -> None:
    for kept in ((True, False, True), (False, False, True), (True, True, True)):
        x, mask = genesis.tensor([1.0, 2.0, 3.0], device="cuda"), genesis.tensor(list(kept), device="cuda")
        assert x[mask].tolist() == [v for v, k in zip((1.0, 2.0, 3.0), kept, strict=True) if k]

"""Recorded launches repeat correctly on other operands: addresses, aliases, numbers, windows, temporaries."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis.array import Array, empty
from genesis.backend import backend_for
from genesis.backend.cuda import CudaBackend, replay, twins
from genesis.backend.cuda.replay import call_key, layout_of
from genesis.op import Op, Spec, registry
from tests.ops.devices import CUDA


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend, with nothing remembered."""
    found = backend_for(CUDA)
    assert isinstance(found, CudaBackend)
    monkeypatch.setattr(found, "_calls", {})
    monkeypatch.setattr(found, "_plans", {})
    return found


def device(values: np.ndarray) -> Array:
    return genesis.tensor(values, device="cuda").array  # type: ignore[no-any-return]


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


def test_layouts_are_shared_and_tell_alignment_apart() -> None:
    x = device(np.arange(64, dtype=np.float32))
    aligned, odd = x.view((8,), (1,), 16), x.view((8,), (1,), 3)
    assert layout_of(x.view((8,), (1,), 32)) is layout_of(aligned)
    assert layout_of(odd) is not layout_of(aligned)
    assert np.array_equal(registry["neg"](odd).numpy(), -np.arange(3, 11, dtype=np.float32))
    assert np.array_equal(registry["neg"](aligned).numpy(), -np.arange(16, 24, dtype=np.float32))


def test_sizes_that_depend_on_data_do_not_pile_up(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count of selected elements is a call of its own; what is remembered of them is bounded."""
    monkeypatch.setattr("genesis.backend.cuda.PLANS", 8)
    monkeypatch.setattr(replay, "LAYOUTS", 16)
    monkeypatch.setattr(replay, "_layouts", {})
    values = np.arange(40, dtype=np.float32)
    x, rows = genesis.tensor(values, device="cuda"), genesis.tensor(values.reshape(20, 2), device="cuda")
    for count in range(1, 20):
        mask = genesis.tensor(np.arange(40) < count, device="cuda")
        assert x[mask].tolist() == values[:count].tolist()
        assert rows[mask[:20]].numpy().tolist() == values.reshape(20, 2)[:count].tolist()
        assert len(backend._calls) <= 8 and len(backend._plans) <= 8 and len(replay._layouts) <= 16
    assert len(backend._plans) == 8


def twin_of_two_steps(out: Array, x: Array) -> None:
    """-2x, through a temporary and a window of the input."""
    doubled = empty(x.shape, x.dtype, x.device)
    registry["add"](x.view(x.shape, x.strides, x.offset), x, out=doubled)
    registry["neg"](doubled, out=out)


def test_temporaries_and_windows_are_traced(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op("trial", lambda out, x: None, lambda x: Spec(x.shape, x.dtype), family="elementwise")
    monkeypatch.setitem(twins, "trial", twin_of_two_steps)
    try:
        for value in (1.0, 5.0):
            x = device(np.full(9, value, np.float32))
            assert np.all(op(x).numpy() == -2 * value)
        assert [key[0] for key in backend._calls] == [op]
    finally:
        del registry["trial"]


def test_what_reads_memory_back_is_not_repeated(backend: CudaBackend) -> None:
    for kept in ((True, False, True), (False, False, True), (True, True, True)):
        x, mask = genesis.tensor([1.0, 2.0, 3.0], device="cuda"), genesis.tensor(list(kept), device="cuda")
        assert x[mask].tolist() == [v for v, k in zip((1.0, 2.0, 3.0), kept, strict=True) if k]

"""The engine: depth, release of memory, anomaly detection, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.array import Array
from genesis.autograd import detect_anomaly
from genesis.autograd.graph import Node
from genesis.backend.cpu import pool
from genesis.errors import NumericError
from tests.autograd.scenarios import leaf, squares


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must free memory: the collector runs too late for activations."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large(requires_grad: bool = True) -> Any:
    """One pooled block: 1 MiB."""
    return genesis.ones(1 << 17, dtype=genesis.float64, requires_grad=requires_grad)


# --- The memory of a gradient -----------------------------------------------------------------------------------------


def gradient_memory(kept: Any = None, scale: float = 2.0) -> tuple[Any, int]:
    """The gradient of a leaf, and the address of the memory in which the vjp computed it."""
    a, seen = leaf(genesis, 1.0, 2.0), []

    def hook(g: Any) -> None:
        seen.append(g.data_ptr())
        if kept is not None:
            kept(g)

    b = a.view(2)  # its gradient becomes the leaf's
    b.register_hook(hook)
    (b * scale).backward(genesis.ones(2, dtype=genesis.float64))
    return a.grad, seen[0]


def test_a_gradient_that_nothing_else_sees_is_not_copied() -> None:
    grad, computed = gradient_memory()
    assert grad.data_ptr() == computed and grad.tolist() == [2, 2]


@pytest.mark.parametrize("view", [lambda g: g, lambda g: g.numpy(), lambda g: g.numpy()[1:], lambda g: g[1:]])
def test_a_gradient_that_the_program_keeps_is_copied(view: Any) -> None:
    kept: list[Any] = []
    grad, computed = gradient_memory(lambda g: kept.append(view(g)))
    assert grad.data_ptr() != computed
    grad += 1
    assert kept[0].tolist() in ([2, 2], [2])


def test_a_gradient_that_the_program_passed_in_is_copied() -> None:
    a, given = leaf(genesis, 1.0, 2.0), np.ones(2)
    a.view(2).backward(genesis.from_numpy(given))
    a.grad.mul_(3)
    assert given.tolist() == [1, 1]


def test_leaves_that_receive_one_gradient_do_not_share_memory() -> None:
    a, b = leaf(genesis, 1.0, 2.0), leaf(genesis, 3.0, 4.0)
    ((a + b) * 2).sum().backward()
    a.grad.mul_(5)
    assert a.grad.tolist() == [10, 10] and b.grad.tolist() == [2, 2]


# --- Depth ------------------------------------------------------------------------------------------------------------


def test_a_chain_of_ten_thousand_ops() -> None:
    a = leaf(genesis, 1.0)
    y = a
    for _ in range(10_000):
        y = y * 1.0001
    y.backward()
    assert a.grad.item() == pytest.approx(1.0001**10_000)
    del y  # freeing the chain must not run out of stack, either


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("run_backward", [True, False])
def test_a_long_chain_is_freed(run_backward: bool, no_collector: None) -> None:
    a = leaf(genesis, 1.0)
    y = a
    for _ in range(20_000):
        y = y + 1.0
    first = weakref.ref(y.grad_fn)
    if run_backward:
        y.backward()
    del y
    assert first() is None


def test_a_wide_graph() -> None:
    """One tensor used ten thousand times: gradients are added in place, not in ten thousand copies."""
    a = leaf(genesis, 1.0, 2.0)
    genesis.stack([a * 1.0 for _ in range(2_000)]).sum().backward()
    assert a.grad.tolist() == [2000, 2000]


def test_a_deep_graph_of_shared_results_runs_backward_once() -> None:
    """y = y + y, sixty times: 2^60 paths, 60 nodes."""
    a = leaf(genesis, 1.0)
    y = a
    for _ in range(60):
        y = y + y
    y.backward()
    assert a.grad.item() == 2.0**60


# --- Release ----------------------------------------------------------------------------------------------------------


def test_backward_frees_what_was_saved(no_collector: None) -> None:
    a = large()
    before = pool.allocated
    y = (a.exp() * a.exp()).sum()
    kept = pool.allocated - before
    assert kept >= 2 * a.nbytes
    y.backward()
    assert pool.allocated - before <= a.nbytes + 4096, "only the gradient of the leaf and the sum are left"


def test_memory_is_flat_over_many_passes(no_collector: None) -> None:
    a, w = large(), large()
    peaks, levels = [], []
    for _ in range(100):
        pool.max_allocated = pool.allocated
        loss = ((a * w).exp() * a[: 1 << 16].sum()).mean()
        loss.backward()
        a.grad = w.grad = None
        del loss
        levels.append(pool.allocated)
        peaks.append(pool.max_allocated)
    assert levels[1] == levels[-1] and peaks[1] == peaks[-1]


def test_a_graph_that_was_never_run_backward_is_freed_with_its_result(no_collector: None) -> None:
    a = large()
    before = pool.allocated
    y = (a.exp() * a).sum()
    node = weakref.ref(y.grad_fn)
    del y
    assert node() is None and pool.allocated == before


def test_an_in_place_graph_and_its_views_are_freed(no_collector: None) -> None:
    a = large()
    before = pool.allocated
    h = a * 2
    v = h[10:]
    v.mul_(a[10:])
    h[0] = 1.0
    h.sum().backward()
    a.grad = None
    del h, v
    assert pool.allocated == before


def test_a_leaf_is_freed_with_its_last_user(no_collector: None) -> None:
    a = large()
    y = a * 2
    gone = weakref.ref(a)
    del a
    assert gone() is None, "the graph needs its gradient slot, not the leaf"
    y.sum().backward()  # nobody can look at the gradient: it is dropped


def test_gradients_are_freed_as_the_pass_goes(no_collector: None) -> None:
    """A chain of n ops holds a constant number of gradients at a time."""
    a = large()
    y = a
    for _ in range(20):
        y = y + 1.0
    start = pool.allocated
    pool.max_allocated = start
    y.backward(genesis.ones(1 << 17, dtype=genesis.float64))
    assert pool.max_allocated - start <= 3 * a.nbytes


# --- Anomalies --------------------------------------------------------------------------------------------------------


def test_anomaly_detection_names_the_op_and_the_line_of_its_call() -> None:
    a = leaf(genesis, 0.0, 1.0)
    with detect_anomaly():
        y = a.sqrt() * 0.0  # 0 · ∞ in the gradient of sqrt
        line = _line() - 1
        with pytest.raises(NumericError, match="the gradient of sqrt for its input 0 is NaN") as caught:
            y.sum().backward()
    assert caught.value.where == f"{__file__}:{line}"


def _line() -> int:
    import inspect

    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_without_anomaly_detection_nan_flows_on() -> None:
    a = leaf(genesis, 0.0, 1.0)
    (a.sqrt() * 0.0).sum().backward()
    assert np.isnan(a.grad.tolist()[0])


def test_a_call_recorded_before_detection_says_so() -> None:
    a = leaf(genesis, 0.0)
    y = a.sqrt() * 0.0
    with detect_anomaly(), pytest.raises(NumericError, match="recorded without anomaly detection"):
        y.sum().backward()


def test_infinite_gradients_are_no_anomaly() -> None:
    a = leaf(genesis, 0.0)
    with detect_anomaly():
        a.sqrt().sum().backward()
    assert a.grad.tolist() == [np.inf]


def test_detection_can_be_switched_off_inside() -> None:
    a = leaf(genesis, 0.0)
    with detect_anomaly(), detect_anomaly(False):
        (a.sqrt() * 0.0).sum().backward()


# --- Our own mistakes -------------------------------------------------------------------------------------------------


def test_a_vjp_with_too_few_gradients_is_reported() -> None:
    from genesis.array import Spec
    from genesis.op import Op, registry

    def reference(out: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        np.add(x, y, out=out)

    op = Op("short", reference, lambda x, y: Spec(x.shape, x.dtype), vjp=lambda ctx, g: (g,))
    try:
        y = genesis.autograd.apply(op, leaf(genesis, 1), leaf(genesis, 2))
        assert isinstance(y.grad_fn, Node)
        with pytest.raises(AssertionError, match="short: 1 gradients for 2 inputs"):
            y.sum().backward()
    finally:
        del registry["short"]


def test_a_gradient_of_another_shape_is_summed_for_elementwise_ops_only() -> None:
    from genesis.array import Spec
    from genesis.op import Op, registry

    def reference(out: np.ndarray, x: np.ndarray) -> None:
        out[...] = x.sum()

    def wider(ctx: Any, g: Array) -> tuple[Array]:
        return (genesis.ones(2, 3).array,)

    op = Op("wider", reference, lambda x: Spec((), x.dtype), vjp=wider)
    try:
        y = genesis.autograd.apply(op, genesis.ones(3, requires_grad=True))
        with pytest.raises(AssertionError, match=r"wider: gradient \(2, 3\) for an input of shape \(3,\)"):
            y.backward()
    finally:
        del registry["wider"]


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_threads_with_graphs_of_their_own() -> None:
    """Four threads record, run backward and change in place at once; each gets the numbers it gets alone."""
    failures: list[str] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            start.wait(10)
            for i in range(30):
                a = leaf(genesis, seed, seed + 1.0, i)
                h = a * 2
                h[1:].mul_(a[:-1])
                y = h
                for _ in range(20):
                    y = y + h * 0.5
                squares(y).backward()
                expected = _expected(np.array([seed, seed + 1.0, i]))
                np.testing.assert_allclose(a.grad.numpy(), expected, rtol=1e-10)
        except BaseException as error:
            failures.append(f"{seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(s,)) for s in (1, 2, 3, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def _expected(a: np.ndarray) -> np.ndarray:
    """d/da of Σ (11·h)² with h = (2a0, 2a1·a0, 2a2·a1)."""
    h = np.array([2 * a[0], 2 * a[1] * a[0], 2 * a[2] * a[1]])
    g = 2 * 121 * h
    return np.array([2 * g[0] + 2 * a[1] * g[1], 2 * a[0] * g[1] + 2 * a[2] * g[2], 2 * a[1] * g[2]])


def test_threads_sharing_a_leaf_through_grad() -> None:
    """grad() touches no leaf, so that threads may differentiate with respect to shared parameters."""
    w = leaf(genesis, 1.0, 2.0, 3.0)
    results: dict[int, list[float]] = {}

    def work(k: int) -> None:
        for _ in range(50):
            results[k] = genesis.autograd.grad((w * w * float(k)).sum(), w)[0].tolist()

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {k: [2.0 * k, 4.0 * k, 6.0 * k] for k in (1, 2, 3)}
    assert w.grad is None

"""Arguments in torch's forms: out= and pin_memory= of creation functions, several dimensions, optional ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.errors import DeviceError, DTypeError, ShapeError, UsageError

X = genesis.tensor([[1.26, 2.75], [-3.5, 4.45]])
I = genesis.tensor([1, 2])  # noqa: E741  integers


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: genesis.round(X, decimals=1), [[1.3, 2.8], [-3.5, 4.4]]),
        (lambda: X.round(decimals=-1), [[0.0, 0.0], [0.0, 0.0]]),
        (lambda: genesis.repeat_interleave(I), [0, 1, 1]),
        (lambda: genesis.repeat_interleave(I, I, output_size=3), [1, 2, 2]),
        (lambda: X.count_nonzero(0, 1), 4),
        (lambda: X[None].squeeze(0, 1).sum(), 4.96),
        (lambda: I.broadcast_to(2, 2), [[1, 2], [1, 2]]),
        (lambda: genesis.stack(X.hsplit(1, 1)[::2])[0], [[1.26], [-3.5]]),
        (lambda: genesis.inverse(input=2 * genesis.eye(2)), [[0.5, 0.0], [0.0, 0.5]]),
        (lambda: genesis.norm(genesis.eye(3), "nuc"), 3.0),
        (lambda: genesis.tensordot(genesis.ones(2, 1), genesis.ones(3, 2), ([1], [0])), [[3.0, 3.0], [3.0, 3.0]]),
        (lambda: genesis.zeros(2).scatter(0, I - 1, I + 1.0, reduce="add"), [2.0, 3.0]),
        (lambda: genesis.ones(2).scatter(0, I - 1, 3.0, reduce="multiply"), [3.0, 3.0]),
        (lambda: genesis.tensor(2.0).index_add(0, genesis.tensor([0]), genesis.tensor(1.0)), 3.0),
        (lambda: genesis.tensor(2.0).index_fill_(0, genesis.tensor([0]), 5.0), 5.0),
        (lambda: genesis.cov(genesis.tensor([[1, 2, 3]])), 1.0),
        (lambda: genesis.normal(X, 0.0), X.tolist()),
        (lambda: genesis.diff(I, 0, prepend=I), [1, 2]),
    ],
)  # fmt: skip
def test_forms_of_arguments(compute: Callable[[], Any], expected: Any) -> None:
    np.testing.assert_allclose(compute().numpy(), np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_distinct_slices_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    for shape, dim in (((5, 2), 0), ((2, 6), 1), ((4, 2, 2), -3), ((6,), 0)):
        a = rng.integers(0, 2, shape)
        values, inverse, counts = np.unique(a, return_inverse=True, return_counts=True, axis=dim)
        found = genesis.unique(genesis.tensor(a), return_inverse=True, return_counts=True, dim=dim)
        for one, other in zip(found, (values, inverse.reshape(-1), counts), strict=True):
            assert np.array_equal(one.numpy(), other)


def test_a_created_tensor_takes_the_memory_and_type_of_out() -> None:
    out = genesis.ones(3, dtype="int32")
    assert genesis.arange(3, out=out) is out
    assert out.tolist() == [0, 1, 2]
    values, places = genesis.empty(2), genesis.empty(2, dtype="int64")
    assert genesis.max(X, 0, out=(values, places))[0] is values
    assert values.tolist() == X.max(0).values.tolist()
    assert places.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: genesis.round(I, decimals=1), DTypeError),
        (lambda: genesis.normal(), UsageError),
        (lambda: genesis.repeat_interleave(I, I, output_size=4), ShapeError),
        (lambda: I.repeat_interleave(None), DTypeError),
        (lambda: genesis.zeros(2).scatter(0, I - 1, 3.0, reduce="mean"), UsageError),
        (lambda: X.hsplit("ab"), DTypeError),
        (lambda: genesis.cov(X, fweights=genesis.tensor([1.0, 2.0])), DTypeError),
        (lambda: genesis.cov(X, fweights=genesis.tensor([1])), ShapeError),
    ],
)
def test_wrong_forms_are_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@pytest.mark.skipif(genesis.cuda.is_available(), reason="memory can be pinned")
def test_pinned_memory_needs_a_device() -> None:
    with pytest.raises(DeviceError):
        genesis.zeros(2, pin_memory=True)

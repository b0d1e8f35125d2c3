"""Values and errors that torch has where other definitions are as natural: stored as torch gives them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn

I = genesis.tensor([[1, 2], [3, 4]])  # noqa: E741  integers
W = genesis.tensor([1, 1])
BYTES = genesis.tensor([[200, 100], [100, 200]], dtype="uint8")
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: (genesis.tensor([1.0, 2.0, 4.0]) * 1e-25).std() * 1e25, 1.5275252),
        (lambda: (genesis.tensor([1.0, 2.0, 4.0]) * 1e25).std(0) / 1e25, 1.5275252),
        (lambda: (genesis.tensor([1.0, 2.0, 3.0]) * 2.0**90).bfloat16().std() / 2.0**90, 1.0),
        (lambda: genesis.linspace(0, 10, 4, dtype=genesis.int64), [0, 3, 6, 10]),
        (lambda: genesis.linspace(2.7, -5.5, 5, dtype=genesis.int32), [2, 0, -1, -3, -5]),
        (lambda: BYTES.sum_to_size(1, 2), [[300, 300]]),
        (lambda: genesis.einsum("ij->i", BYTES), [300, 300]),
        (lambda: genesis.addmv(W, I, W, beta=2.5), [5, 9]),
        (lambda: genesis.addmm(I, I, I, alpha=1.5, beta=0.5), [[7, 10], [15, 22]]),
        (lambda: genesis.addbmm(I, I[None], I[None], beta=2.5), [[9, 14], [21, 30]]),
        (lambda: genesis.baddbmm(I[None], I[None], I[None], alpha=1.5, beta=0.5), [[[7, 10], [15, 22]]]),
        (lambda: genesis.tensor([-3, 2]).relu_(), [0, 2]),
        (lambda: genesis.stack(genesis.where(I > 2)), [[1, 1], [0, 1]]),
        (lambda: I.clone().apply_(lambda a: a * 2), [[2, 4], [6, 8]]),
        (lambda: I.type("torch.DoubleTensor"), [[1.0, 2.0], [3.0, 4.0]]),
        (lambda: genesis.special.expit(W * 0.0), [0.5, 0.5]),
    ],
)  # fmt: skip
def test_values_are_those_of_torch(compute: Callable[[], Any], expected: Any) -> None:
    found = compute()
    np.testing.assert_allclose(found.tolist(), expected, rtol=1e-6)
    assert found.dtype.is_floating_point == isinstance(np.asarray(expected).ravel()[0], np.floating)


@pytest.mark.parametrize(
    ("compute", "values", "expected"),
    [
        (genesis.max, [1.0, NAN, NAN, 0.0], [0.0, 0.5, 0.5, 0.0]),
        (lambda x: x.view(2, 2).amax(1).sum(), [1.0, NAN, 3.0, 3.0], [NAN, NAN, 0.5, 0.5]),
        (genesis.prod, [1.0, 0.0, INF, 2.0], [NAN, INF, 0.0, NAN]),
        (lambda x: x.logit().sum(), [-0.1, 0.25, 0.5, 1.2], [NAN, 16 / 3, 4.0, NAN]),
    ],
)  # fmt: skip
def test_gradients_are_those_of_torch(compute: Callable[[Any], Any], values: list[float], expected: Any) -> None:
    x = genesis.tensor(values, dtype="float64", requires_grad=True)
    compute(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("compute", "error"),
    [
        (lambda: genesis.from_numpy(np.arange(3)[::-1]), ValueError),
        (lambda: genesis.addr(I, W, W, beta=2.5), RuntimeError),
        (lambda: genesis.ones(2).float_power_(2), RuntimeError),
        (lambda: nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU())).insert(0, nn.ReLU()), KeyError),
        (lambda: nn.Sequential(nn.ReLU()).insert(2, nn.ReLU()), IndexError),
        (lambda: I[0].detach_(), RuntimeError),
    ],
)  # fmt: skip
def test_errors_are_those_of_torch(compute: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        compute()


def test_facts_of_a_tensor() -> None:
    x = genesis.zeros(2, 3)
    assert x[0]._base is x
    assert x._base is None
    assert (x.get_device(), x.itemsize, x.is_meta, x.type(), x.ndimension()) == (-1, 4, False, "torch.FloatTensor", 2)
    assert (x.layout, x.byte().dtype, x.char().dtype) == (genesis.strided, genesis.uint8, genesis.int8)


def test_forked_generators_return_to_their_state() -> None:
    genesis.manual_seed(0)
    with genesis.random.fork_rng():
        drawn = genesis.rand(3)
    assert drawn.tolist() == genesis.rand(3).tolist()


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (genesis.ones(2), genesis.ones(2) + 1e-6, ""),
        (genesis.ones(2), genesis.ones(2) + 1e-4, "2 of 2 elements are not close"),
        (genesis.ones(2), genesis.ones(2).double(), "values of dtype differ"),
        (genesis.ones(2), genesis.ones(3), "values of shape differ"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"1 of 1 elements at\['a'\]\[1\]"),
        (genesis.tensor([NAN]), genesis.tensor([NAN]), "1 of 1"),
        (1, 1.0, "types differ"),
    ],
)
def test_close_values_and_others(actual: Any, expected: Any, text: str) -> None:
    if not text:
        return genesis.testing.assert_close(actual, expected)
    with pytest.raises(AssertionError, match=text):
        genesis.testing.assert_close(actual, expected)
    return None


def test_settings_of_backends() -> None:
    from genesis.backends import cudnn

    cudnn.benchmark = True
    assert not genesis.backends.cuda.matmul.allow_tf32
    genesis.backends.cuda.matmul.allow_tf32 = True
    assert genesis.get_float32_matmul_precision() == "high"
    genesis.backends.cuda.matmul.allow_tf32 = False
    assert genesis.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2", "VSX", "DEFAULT")

"""Flat buffers: one run of memory, views that stay views, gradients made in their slots."""

from __future__ import annotations

import math

import numpy as np
import pytest

from genesis import nn, optim
from genesis.array import Array
from genesis.errors import GenesisError
from genesis.functions.create import tensor
from genesis.functions.random import randn
from genesis.optim.flat import ALIGNED_ELEMENTS, ALIGNMENT, FlatBuffers
from genesis.tensor import Tensor


def leaves(*shapes: tuple[int, ...], dtype: str = "float32") -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [tensor(rng.standard_normal(s), dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_become_aligned_views_with_the_same_values(dtype: str) -> None:
    params = leaves((3, 5), (), (0, 4), (100,), (2, 2), dtype=dtype)
    before = [p.detach().numpy().copy() for p in params]
    flat = FlatBuffers(params)
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        np.testing.assert_array_equal(param.detach().numpy(), old)
        assert param.array.storage is flat.values.storage
        assert param.array.data_ptr() % ALIGNMENT == 0
        assert param.grad is None
        flat.view(flat.values, i).view_np()[...] = 7
        assert (param.detach().numpy() == 7).all()
    assert flat.size % ALIGNED_ELEMENTS == 0 and flat.size >= sum(p.numel() for p in params)


def test_transposed_parameters_and_old_gradients_are_taken_over() -> None:
    turned = tensor(np.arange(6.0).reshape(2, 3)).t().requires_grad_()
    turned.grad = tensor(np.ones((3, 2)))
    flat = FlatBuffers([turned])
    assert turned.is_contiguous() and turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert turned.grad.array.storage is flat.gradients.storage
    assert turned.grad.tolist() == [[1, 1]] * 3


def test_backward_writes_into_the_flat_gradient_and_accumulates() -> None:
    a, b = leaves((4, 3), (3,))
    flat = FlatBuffers([a, b])
    flat.gradients.view_np()[...] = np.nan  # a first gradient must overwrite, not add
    x = randn(5, 4)
    ((x @ a + b) ** 2).sum().backward()
    assert a.grad.array.storage is flat.gradients.storage
    once = [a.grad.numpy().copy(), b.grad.numpy().copy()]
    assert np.isfinite(once[0]).all() and np.isfinite(once[1]).all()
    ((x @ a + b) ** 2).sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), 2 * once[0])
    np.testing.assert_array_equal(b.grad.numpy(), 2 * once[1])
    flat.zero_grad()
    assert a.grad is None and b.grad is None
    ((x @ a + b) ** 2).sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), once[0])
    flat.zero_grad(set_to_none=False)
    assert (a.grad.numpy() == 0).all() and a.grad.array.storage is flat.gradients.storage


def test_norm_and_scaling_leave_out_what_has_not_arrived() -> None:
    params = leaves((7, 3), (11,), (5, 5))
    flat = FlatBuffers(params)
    flat.gradients.view_np()[...] = 1e30  # stale memory
    grads = [tensor(np.full((7, 3), 2.0), dtype="float32"), None, tensor(np.full((5, 5), -1.0), dtype="float32")]
    flat.view(flat.gradients, 0).view_np()[...] = 0
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    flat.collect_gradients()
    _clear_gaps(flat)
    expected = math.sqrt(4 * 21 + 25)
    assert flat.grad_norm().item() == pytest.approx(expected, rel=1e-6)
    assert flat.grad_norm(math.inf).item() == 2
    flat.scale_gradients(tensor(0.5))
    assert flat.grad_norm().item() == pytest.approx(expected / 2, rel=1e-6)
    assert params[1].grad is None


def _clear_gaps(flat: FlatBuffers) -> None:
    """This test filled the gaps between tensors, which are zero otherwise."""
    keep = np.zeros(flat.size, bool)
    for start, param in zip(flat.starts, flat.params, strict=True):
        keep[start : start + param.numel()] = True
    flat.gradients.view_np()[~keep] = 0


def test_runs_are_maximal() -> None:
    params = leaves((40,), (5,), (6,), (7,), (8,))
    flat = FlatBuffers(params)
    keys = dict(zip(map(id, params), ("a", "a", None, "a", "b"), strict=True))
    runs = flat.runs(lambda p: keys[id(p)])
    assert [(r.key, r.first, r.last, r.start, r.stop) for r in runs] == [
        ("a", 0, 2, 0, 96),
        ("a", 3, 4, 128, 160),
        ("b", 4, 5, 160, 192),
    ]
    assert len(flat.runs(lambda p: 1)) == 1


def test_a_module_that_moves_away_is_an_error_and_not_a_silent_fork() -> None:
    model = nn.Linear(3, 3)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    model.double()
    model(randn(2, 3, dtype="float64")).sum().backward()
    with pytest.raises(GenesisError, match=r"left its flat buffer.*moved or cast"):
        optimizer.step()


def test_loading_a_state_into_a_flattened_model_keeps_the_views() -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=1.0, fused=True)
    flat = optimizer._flats[0][0]
    model.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(model.weight.detach().numpy(), other.weight.detach().numpy())
    assert model.weight.array.storage is flat.values.storage
    model(randn(2, 4)).sum().backward()
    optimizer.step()
    assert not np.array_equal(model.weight.detach().numpy(), other.weight.detach().numpy())


def idle(optimizer: optim.Optimizer, param: Tensor) -> Array | None:
    assert param._gradient_slot is not None
    return param._gradient_slot.idle_memory()


def test_memory_of_gradients_is_idle_until_the_first_of_them() -> None:
    params = leaves((2, 32), (5, 32), (4, 32))
    optimizer = optim.SGD(params, lr=0.1, fused=True)
    buffer = optimizer._flats[0][0].gradients
    for param, start, stop in zip(params, (64, 224, 0), (352, 352, 224), strict=True):
        memory = idle(optimizer, param)
        assert memory is not None
        assert (memory.offset - buffer.offset, memory.size) == (start, stop - start)  # the longer side
        assert memory.storage is buffer.storage
    params[1].grad = leaves((5, 32))[0].detach()
    assert idle(optimizer, params[0]) is None
    assert idle(optimizer, params[1]) is not None  # its own gradient does not lie beside it
    optimizer.zero_grad()
    assert idle(optimizer, params[0]) is not None
    use = params[2]._gradient_slot.lease(is_movable=True)  # type: ignore[union-attr]
    assert idle(optimizer, params[0]) is None
    del use
    assert idle(optimizer, params[0]) is not None


def test_gaps_between_gradients_are_never_leased() -> None:
    params = leaves((64,), (33,))
    optimizer = optim.SGD(params, lr=0.1, fused=True)
    assert idle(optimizer, params[0]) is None
    assert idle(optimizer, params[1]) is None

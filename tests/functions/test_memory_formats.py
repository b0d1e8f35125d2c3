"""Layouts, memory formats, copies of views, and changes of a tensor's size."""

from __future__ import annotations

import pytest

import genesis
from genesis.errors import GradientError, UsageError


def test_memory_formats_choose_the_order_of_a_result() -> None:
    x = genesis.arange(6.0).reshape(2, 3).t()
    row_major = {"memory_format": genesis.contiguous_format}
    for make in (genesis.zeros_like, genesis.ones_like, genesis.empty_like):
        assert make(x, memory_format=genesis.preserve_format).stride() == (1, 3)
        assert make(x, **row_major).stride() == (2, 1)
        made = make(x, requires_grad=True, **row_major)
        assert made.is_leaf and made.requires_grad
    for made in (x.clone(**row_major), x.contiguous(**row_major), x.double(genesis.contiguous_format)):
        assert made.stride() == (2, 1) and made.tolist() == x.tolist()
    assert x.to("cpu", False, True, memory_format=genesis.preserve_format).stride() == (1, 3)
    assert genesis.zeros(2, layout=genesis.strided).layout is genesis.strided
    for wrong in ({"memory_format": genesis.strided}, {"layout": "sparse"}):
        with pytest.raises(UsageError):
            genesis.zeros_like(x, **wrong)


def test_resize_keeps_the_elements_and_grows_into_new_memory() -> None:
    x = genesis.arange(6)
    view = x[2:]
    assert x.resize_(2, 2).tolist() == [[0, 1], [2, 3]] and view.tolist() == [2, 3, 4, 5]
    assert x.resize_as_(genesis.zeros(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert x.resize_(3, 3)[:2].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(GradientError):
        genesis.ones(2, requires_grad=True).resize_(1)


def test_copies_of_views_share_no_memory_and_keep_gradients() -> None:
    x = genesis.arange(4.0).reshape(2, 2).requires_grad_()
    parts = genesis.unbind_copy(x)
    assert all(part.untyped_storage() != x.untyped_storage() for part in parts)
    (parts[1] * 2).sum().backward()
    assert x.grad.tolist() == [[0, 0], [2, 2]]
    out = genesis.empty(2)
    assert genesis.diagonal_copy(x.detach(), out=out) is out and out.tolist() == [0, 3]

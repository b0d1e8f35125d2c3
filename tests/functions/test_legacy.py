"""Names of tensors by type, and tensors over buffers."""

from __future__ import annotations

import pytest

import genesis
from genesis.errors import DTypeError


def test_names_by_type_make_and_recognize_tensors() -> None:
    made = genesis.LongTensor([2**40, 1])
    assert made.tolist() == [2**40, 1] and made.dtype is genesis.int64
    assert isinstance(made, genesis.LongTensor) and not isinstance(made, genesis.FloatTensor)
    assert genesis.FloatTensor(2, 3).shape == (2, 3)
    assert genesis.LongTensor(made).data_ptr() == made.data_ptr()
    with pytest.raises(TypeError):
        genesis.FloatTensor(made)
    with pytest.raises(DTypeError):
        genesis.set_default_tensor_type("torch.LongTensor")
    with pytest.raises(DTypeError):
        genesis.set_default_tensor_type("Nothing")
    assert genesis.autograd.Variable(genesis.ones(2), requires_grad=True).requires_grad


def test_buffers_share_memory_unless_they_are_read_only() -> None:
    memory = bytearray(8)
    x = genesis.frombuffer(memory, dtype=genesis.int32, offset=4)
    x.fill_(1)
    assert memory[4] == 1 and x.shape == (1,)
    assert genesis.frombuffer(b"ab", dtype=genesis.uint8).tolist() == [97, 98]
    with pytest.raises(ValueError, match="frombuffer"):
        genesis.frombuffer(b"abc", dtype=genesis.int32)

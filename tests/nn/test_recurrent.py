"""Recurrent layers: a packed batch equals each sequence alone, layers equal their cells, and wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import ShapeError, UsageError
from genesis.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence, unpack_sequence

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
CELLS = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}


def near(a: Any, b: Any) -> bool:
    return bool(np.allclose(a.detach().numpy(), b.detach().numpy(), atol=1e-12))


def sequences() -> list[Any]:
    rng = np.random.default_rng(0)
    return [genesis.tensor(rng.standard_normal((n, 3))) for n in (2, 5, 1, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_equals_each_sequence_alone(kind: str) -> None:
    layer = KINDS[kind](3, 4, num_layers=2, bidirectional=True, dtype=genesis.float64)
    out, state = layer(pack_sequence(sequences(), enforce_sorted=False))
    first = state[0] if kind == "LSTM" else state
    for i, (one, row) in enumerate(zip(sequences(), unpack_sequence(out), strict=True)):
        alone, final = layer(one)
        assert near(row, alone)
        assert near(first[:, i], final[0] if kind == "LSTM" else final)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_its_cell(kind: str) -> None:
    layer, cell = KINDS[kind](3, 4, dtype=genesis.float64), CELLS[kind](3, 4, dtype=genesis.float64)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in layer.state_dict().items()})
    x = pad_sequence(sequences())
    out, _ = layer(x)
    state = None
    for t in range(len(x)):
        state = cell(x[t], state)
        assert near(out[t], state[0] if kind == "LSTM" else state)


def test_padding_is_restored() -> None:
    x, lengths = pad_sequence(sequences(), batch_first=True), [2, 5, 1, 4]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert packed.batch_sizes.tolist() == [4, 3, 2, 2, 1]
    padded, sizes = pad_packed_sequence(packed, batch_first=True, padding_value=-1.0, total_length=6)
    assert sizes.tolist() == lengths
    assert padded.shape == (4, 6, 3)
    assert near(padded[:, :5] * (padded[:, :5] != -1), x)
    assert (padded[2, 1:] == -1).all()


def test_gradients() -> None:
    layer = nn.LSTM(2, 3, proj_size=2, dtype=genesis.float64)
    x = genesis.randn(3, 1, 2, dtype=genesis.float64, requires_grad=True)
    assert genesis.autograd.gradcheck(lambda x, *p: layer(x)[0], [x, *layer.parameters()])


def test_dropout_between_layers_only_in_training() -> None:
    layer, x = nn.GRU(3, 4, num_layers=2, dropout=0.9), pad_sequence(sequences()).float()
    assert not near(layer(x)[0], layer(x)[0])
    layer.eval()
    assert near(layer(x)[0], layer(x)[0])


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="nonlinearity"):
        nn.RNN(3, 4, nonlinearity="gelu")
    with pytest.raises(UsageError, match="proj_size"):
        nn.LSTM(3, 4, proj_size=4)
    with pytest.raises(ShapeError, match="should end in 3"):
        nn.GRU(3, 4)(genesis.ones(5, 2, 4))
    with pytest.raises(ShapeError, match="the state has shape"):
        nn.GRU(3, 4)(genesis.ones(5, 2, 3), genesis.ones(1, 3, 4))
    with pytest.raises(ShapeError, match="increase"):
        pack_padded_sequence(genesis.ones(3, 2, 1), [1, 2])
    with pytest.raises(ShapeError, match="do not suit"):
        pack_padded_sequence(genesis.ones(3, 2, 1), [0, 2], enforce_sorted=False)

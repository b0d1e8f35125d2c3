"""Recurrent layers: RNN, LSTM and GRU, and their cells, with torch's parameters and order of gates.

A padded batch is computed as a packed one in which every step has all sequences. One matmul computes the
products with the inputs of all steps; the steps then run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from genesis.errors import ShapeError, UsageError
from genesis.functions.create import zeros
from genesis.functions.shape import cat, stack
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.module import Module, changed_settings
from genesis.nn.parameter import Parameter
from genesis.nn.utils.rnn import PackedSequence
from genesis.tensor import Tensor

State = tuple[Tensor, ...]  # (h,) or (h, c)
# (x·W_ihᵀ + b_ih, h·W_hhᵀ + b_hh, the state) -> the next state
Step = Callable[[Tensor, Tensor, State], State]


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda x, h, state: (activation(x + h),)


def _lstm_step(x: Tensor, h: Tensor, state: State) -> State:
    """c' = f·c + i·g and h' = o·tanh(c')."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(x: Tensor, h: Tensor, state: State) -> State:
    """h' = (1 - z)·n + z·h with n = tanh(x_n + r·h_n)."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((1 - z) * n + z * state[0],)


GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "LSTM": 4, "GRU": 3}
STEPS: dict[str, Step] = {
    "RNN_TANH": _rnn_step(lambda x: x.tanh()),
    "RNN_RELU": _rnn_step(lambda x: x.relu()),
    "LSTM": _lstm_step,
    "GRU": _gru_step,
}


class RNNBase(Module):
    """A recurrent layer of a mode: "RNN_TANH", "RNN_RELU", "LSTM" or "GRU".

    Attributes:
        weight_ih_l0: `[gates · hidden, input]` of layer 0; `_reverse` is appended for the backward direction. With
            `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0` and, with `proj_size`, `weight_hr_l0`, and so on for each layer.
    """

    def __init__(
        self, mode: str, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size < 1 or num_layers < 1:
            raise UsageError(f"{mode}: hidden_size {hidden_size} and num_layers {num_layers} must be at least 1")
        if not 0 <= dropout <= 1:
            raise UsageError(f"{mode}: dropout is {dropout}, and must be between 0 and 1")
        if proj_size and (mode != "LSTM" or not 0 < proj_size < hidden_size):
            raise UsageError(f"{mode}: proj_size {proj_size} needs an LSTM and a larger hidden_size than {hidden_size}")
        self.mode, self.input_size, self.hidden_size, self.num_layers = mode, input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        gates, out = GATES[mode] * hidden_size, proj_size or hidden_size
        self._suffixes = [f"_l{k}{side}" for k in range(num_layers) for side in ("", "_reverse")[: 1 + bidirectional]]
        for i, suffix in enumerate(self._suffixes):
            width = input_size if i <= bidirectional else out * (1 + bidirectional)
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (gates, width), "weight_hh": (gates, out)}
            shapes |= {"bias_ih": (gates,), "bias_hh": (gates,)} if bias else {}
            shapes |= {"weight_hr": (proj_size, hidden_size)} if proj_size else {}
            for name, shape in shapes.items():
                setattr(self, name + suffix, Parameter(init.new(shape, device, dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values uniformly within ±1/√hidden_size."""
        bound = 1 / math.sqrt(self.hidden_size)
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def flatten_parameters(self) -> None:
        """Do nothing: torch packs weights for cuDNN here."""

    @property
    def all_weights(self) -> list[list[Parameter]]:
        """The parameters of each layer and direction."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        return [[getattr(self, n + s) for n in names if n + s in self._parameters] for s in self._suffixes]

    def extra_repr(self) -> str:
        shown = {"proj_size": 0, "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        return f"{self.input_size}, {self.hidden_size}" + changed_settings(self, **shown, bidirectional=False)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Return the outputs of the last layer at all steps, and the final state of every layer and direction.

        Args:
            input: `[T, B, input]`, `[B, T, input]` with `batch_first`, `[T, input]` without a batch, or packed.
            hx: initial state `[layers · directions, B, hidden]`, a pair of these for an LSTM; by default 0.
        """
        packed = isinstance(input, PackedSequence)
        if isinstance(input, PackedSequence):
            data, counts, order = input.data, input._sizes(), input.sorted_indices
        else:
            if input.ndim not in (2, 3) or input.shape[-1] != self.input_size:
                raise ShapeError(f"{self.mode}: the input has shape {input.shape}, and should end in {self.input_size}")
            by_step = input.unsqueeze(1) if input.ndim == 2 else input.transpose(0, 1) if self.batch_first else input
            counts, order = [by_step.shape[1]] * by_step.shape[0], None
            data = by_step.reshape(-1, self.input_size)
        single = not packed and input.ndim == 2  # type: ignore[union-attr]
        state = self._initial(hx, data, counts[0] if counts else 0, single, order)
        finals: list[State] = []
        per_layer = 1 + self.bidirectional
        for first in range(0, len(self._suffixes), per_layer):
            if first and self.dropout:
                data = F.dropout(data, self.dropout, self.training)
            outputs = []
            for i in range(first, first + per_layer):
                out, final = self._run_layer(data, counts, tuple(s[i] for s in state), self._suffixes[i], i > first)
                outputs.append(out)
                finals.append(final)
            data = cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        final_state = tuple(stack(list(each)) for each in zip(*finals, strict=True))
        if isinstance(input, PackedSequence):
            if input.unsorted_indices is not None:
                final_state = tuple(s.index_select(1, input.unsorted_indices) for s in final_state)
            result: Any = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        else:
            result = data.reshape(len(counts), -1, data.shape[-1])
            result = result.squeeze(1) if single else result.transpose(0, 1) if self.batch_first else result
            final_state = tuple(s.squeeze(1) for s in final_state) if single else final_state
        return result, final_state if self.mode == "LSTM" else final_state[0]

    def _initial(self, hx: Any, data: Tensor, batch: int, single: bool, order: Tensor | None) -> State:
        """Return the tensors of the initial state, `[layers · directions, batch, size]` each."""
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: 2 if self.mode == "LSTM" else 1]
        shapes = [(len(self._suffixes), batch, size) for size in sizes]
        if hx is None:
            return tuple(zeros(shape, dtype=data.dtype, device=data.device) for shape in shapes)
        given: Sequence[Tensor] = hx if self.mode == "LSTM" else (hx,)
        state = tuple(s.unsqueeze(1) if single else s for s in given)
        for s, shape in zip(state, shapes, strict=True):
            if tuple(s.shape) != shape:
                raise ShapeError(f"{self.mode}: the state has shape {s.shape}, and should have {shape}")
        return state if order is None else tuple(s.index_select(1, order) for s in state)

    def _run_layer(
        self, data: Tensor, counts: list[int], state: State, suffix: str, is_reverse: bool
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction; return its outputs, packed, and its final state."""
        w_ih, w_hh = getattr(self, f"weight_ih{suffix}"), getattr(self, f"weight_hh{suffix}")
        b_ih, b_hh = getattr(self, f"bias_ih{suffix}", None), getattr(self, f"bias_hh{suffix}", None)
        w_hr = getattr(self, f"weight_hr{suffix}", None)
        gates, step = F.linear(data, w_ih, b_ih), STEPS[self.mode]
        ends = [sum(counts[: t + 1]) for t in range(len(counts))]
        initial, outputs = state, []
        ended: list[State] = []  # final states of sequences that ended, the shortest last
        state = tuple(s[: counts[-1]] for s in state) if is_reverse else state
        for t in range(len(counts))[:: -1 if is_reverse else 1]:
            active, n = state[0].shape[0], counts[t]
            if n < active:  # sequences end
                ended.append(tuple(s[n:] for s in state))
                state = tuple(s[:n] for s in state)
            elif n > active:  # from the back, longer sequences come first and shorter ones join
                state = tuple(cat([s, start[active:n]]) for s, start in zip(state, initial, strict=True))
            state = step(gates[ends[t] - n : ends[t]], F.linear(state[0], w_hh, b_hh), state)
            if w_hr is not None:
                state = (F.linear(state[0], w_hr), *state[1:])
            outputs.append(state[0])
        final = tuple(cat([s, *(d[i] for d in ended[::-1])]) if ended else s for i, s in enumerate(state))
        return cat(outputs[::-1] if is_reverse else outputs), final


class RNN(RNNBase):
    """h' = tanh(x·W_ihᵀ + b_ih + h·W_hhᵀ + b_hh), or relu with `nonlinearity="relu"`, over a sequence."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        self._check_nonlinearity(nonlinearity)
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, bias, batch_first, dropout,
            bidirectional, device=device, dtype=dtype,
        )  # fmt: skip
        self.nonlinearity = nonlinearity

    @staticmethod
    def _check_nonlinearity(nonlinearity: str) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise UsageError(f"nonlinearity is {nonlinearity!r}", next='pass "tanh" or "relu"')


class LSTM(RNNBase):
    """Long short-term memory over a sequence; the gates are i, f, g, o, and the state is a pair (h, c)."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device,
            dtype,
        )  # fmt: skip


class GRU(RNNBase):
    """Gated recurrent units over a sequence; the gates are r, z, n."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype,
        )  # fmt: skip


class RNNCellBase(Module):
    """One step of a recurrent layer, with the parameters weight_ih, weight_hh, bias_ih and bias_hh."""

    mode = "RNN_TANH"

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, num_chunks: int, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        gates = num_chunks * hidden_size
        self.weight_ih = Parameter(init.new((gates, input_size), device, dtype))
        self.weight_hh = Parameter(init.new((gates, hidden_size), device, dtype))
        self.bias_ih = Parameter(init.new((gates,), device, dtype)) if bias else None
        self.bias_hh = Parameter(init.new((gates,), device, dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values uniformly within ±1/√hidden_size."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size else 0.0
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + changed_settings(self, bias=True)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state of `[B, input]` or `[input]`; a pair (h, c) for an LSTM. By default `hx` is 0."""
        if input.ndim not in (1, 2) or input.shape[-1] != self.input_size:
            raise ShapeError(f"{self.mode}: the input has shape {input.shape}, and should end in {self.input_size}")
        count = 2 if self.mode == "LSTM" else 1
        if hx is None:
            state: State = (input.new_zeros((*input.shape[:-1], self.hidden_size)),) * count
        else:
            state = tuple(hx) if count == 2 else (hx,)
        for s in state:
            if tuple(s.shape) != (*input.shape[:-1], self.hidden_size):
                raise ShapeError(f"{self.mode}: the state has shape {s.shape} for an input of shape {input.shape}")
        x, h = F.linear(input, self.weight_ih, self.bias_ih), F.linear(state[0], self.weight_hh, self.bias_hh)
        state = STEPS[self.mode](x, h, state)
        return state if count == 2 else state[0]


class RNNCell(RNNCellBase):
    """One step of `RNN`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        RNN._check_nonlinearity(nonlinearity)
        super().__init__(input_size, hidden_size, bias, 1, device, dtype)
        self.nonlinearity, self.mode = nonlinearity, f"RNN_{nonlinearity.upper()}"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else f", nonlinearity={self.nonlinearity}")


class LSTMCell(RNNCellBase):
    """One step of `LSTM`."""

    mode = "LSTM"

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, 4, device, dtype)


class GRUCell(RNNCellBase):
    """One step of `GRU`."""

    mode = "GRU"

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, 3, device, dtype)

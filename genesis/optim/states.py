"""The states of an optimizer: what a rule keeps for each parameter, and the float32 masters of 2-byte parameters.

Masters are made at a parameter's first update. Of a bfloat16 parameter under an elementwise fused rule only the 16-bit
residual is kept, because the parameter is the rest of the master (see `genesis.ops.rounding`): values that are put into
the parameter later count, to within half of bfloat16's last place. Masters that are kept whole hide such values: the
next update overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from genesis.array import empty, label
from genesis.dtypes import DType, bfloat16, float32, float64, int16
from genesis.op import registry
from genesis.optim.gradients import GroupGradients
from genesis.optim.shard import RuleCall, check_pair, check_range
from genesis.optim.shared import SharedBuffers
from genesis.optim.whole_states import WholeStates
from genesis.shapes import Shape
from genesis.tensor import Tensor

if TYPE_CHECKING:
    from genesis.distributed.group import Group as Ranks

MASTER, RESIDUAL = "master", "master_low"  # an fp32 master; the 16-bit residual of one whose upper half is the weight

LowPrecision = Literal["master", "stochastic"]


class GroupStates(GroupGradients):
    """Base of `Optimizer`: the rule that a subclass declares, and the states that it keeps for each parameter.

    Attributes:
        state: for each parameter its step count and the tensors of the rule; `saved_state` has masters in full.
        steps: steps begun.
        whole: gathers sharded states, inside `whole_states`.
        low_precision: "master" or "stochastic", as of `Optimizer`.
        state_dtype: float32 or bfloat16: the type of the rule's tensors.
    """

    # Settings that are numbers from 0 on, and those that must be below 1, too ("betas": both of them). The schema of a
    # training run's configuration reads them.
    at_least_0: ClassVar[tuple[str, ...]] = ()
    below_1: ClassVar[tuple[str, ...]] = ()
    # The settings that a training run's configuration offers, with their defaults there: the schema is made from them.
    in_runs: ClassVar[Mapping[str, Any]] = {}
    # Values of settings that are not offered under which nothing would differ, besides None and False.
    neutral: ClassVar[Mapping[str, Any]] = {}

    defaults: dict[str, Any]  # settings of groups that do not name them

    def __init__(
        self, low_precision: LowPrecision, state_dtype: DType, ranks: Ranks | None, zero: int, grad_dtype: DType | None
    ) -> None:
        super().__init__(ranks, zero, grad_dtype)
        self.low_precision: LowPrecision = low_precision
        self.state_dtype = state_dtype
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.steps = 0
        self.whole: WholeStates | None = None
        self._updated: dict[int, dict[str, Any]] = {}  # states of the parameters that the last step updated

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        """How a parameter of this shape is updated in a group: everything else about an optimizer follows from it."""
        raise NotImplementedError

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for settings out of range."""
        for name in self.at_least_0:
            check_range(name, group[name], 0)
        for name in self.below_1:
            (check_pair if name == "betas" else check_range)(name, group[name], 0, 1)

    def kept_dtype(self, param: Tensor) -> DType:
        """The type of the rule's tensors for a parameter."""
        return float64 if param.dtype is float64 else self.state_dtype

    def keeps_master(self, param: Tensor) -> bool:
        """Whether a parameter is updated in float32: a 2-byte one, unless it is rounded at random."""
        return param.dtype.itemsize == 2 and self.low_precision == "master"

    def state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made at its first use."""
        state = self.state.get(param)
        if state is None:
            state = self.state[param] = {"step": 0}
            shapes = self.rule(param.shape, group).state_shapes(param.shape)
            if (shared := self.sharded(param)) is not None:
                self._begin_shard(*shared, shapes)
                return state
            for name, shape in shapes.items():
                state[name] = self._state_tensor(param, name, shape, self.kept_dtype(param))
            if self.keeps_master(param):
                if param.dtype is bfloat16 and self._is_in_flat(param):
                    state[RESIDUAL] = self._state_tensor(param, RESIDUAL, param.shape, int16)
                else:
                    state[MASTER] = self._state_tensor(param, MASTER, param.shape, float32)
                    registry["cast"](param.array, dtype=float32, out=state[MASTER].array)
        return state

    def _begin_shard(self, flat: SharedBuffers, index: int, names: Iterable[str]) -> None:
        """The part of a parameter's states that is kept here: zeros, and the master."""
        param = flat.params[index]
        kept = dict.fromkeys(names, self.kept_dtype(param))
        if self.keeps_master(param):
            kept |= {RESIDUAL: int16} if param.dtype is bfloat16 else {MASTER: float32}
        for name, dtype in kept.items():
            if name not in flat.states:
                flat.states[name] = flat.buffer(dtype, f"{type(self).__name__} {name}", flat.state_size)
            flat.put(name, index, registry["cast"](param.array, dtype=float32) if name == MASTER else None)

    @contextmanager
    def whole_states(self) -> Iterator[None]:
        """Inside the block every rank can read all states in full, for `saved_state`: a call of all ranks.

        A read goes on when all other ranks read, too, or have left their blocks, which all end together.
        """
        sharded = [flat for flat in self._shared() if flat.is_sharded]
        if not sharded:
            yield
            return
        self.whole = WholeStates(sharded)
        try:
            with self.whole.reading():
                yield
        finally:
            self.whole = None

    def _is_in_flat(self, param: Tensor) -> bool:
        """Whether the states of a parameter are in flat buffers, as it is itself."""
        return self.elementwise and param in self._positions

    def _state_tensor(self, param: Tensor, name: str, shape: Shape, dtype: DType) -> Tensor:
        """Zeros of `shape`, in the flat buffer of that state where the parameter is in one."""
        owner = f"{type(self).__name__} {name}"
        if self._is_in_flat(param):
            flat, index = self._positions[param]
            if name not in flat.states:
                flat.states[name] = flat.buffer(dtype, owner)
            array = flat.view(flat.states[name], index)
        else:
            array = label(empty(shape, dtype, param.device), owner)
        registry["fill"](out=array, value=0, shape=array.shape, dtype=array.dtype)
        return Tensor(array)

    def forget_state(self) -> None:
        """Forget all states and counts."""
        self.state.clear()
        self._updated, self.steps = {}, 0

"""Parameter groups, and what an optimizer does with them before any step: their gradients, and the states of a rule.

Groups say which parameters decay and which Muon takes. A setting that an optimizer does not know is an error, never
ignored: a misspelt one would train with the default. torch has some that are not offered here; their neutral values are
taken, since nothing differs.

Gradients are dropped, summed over ranks, measured and clipped. Under a fused optimizer they lie in flat buffers; with
ranks, each rank keeps sums of its part alone.

States are the tensors of the rule and the float32 masters of 2-byte parameters, made at a parameter's first update. Of
a bfloat16 parameter under an elementwise fused rule only the 16-bit residual is kept, because the parameter is the rest
of the master (see `genesis.ops.rounding`): values that are put into the parameter later count, to within half of
bfloat16's last place. Masters that are kept whole hide such values: the next update overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from genesis.array import Array, empty, from_numpy, label
from genesis.dtypes import DType, bfloat16, float32, float64, int16
from genesis.errors import KeywordError, unknown_keyword
from genesis.op import registry
from genesis.ops.gradients import clip_factor, clip_factor_of_ranks, total_norm
from genesis.optim.flat import FlatBuffers, RuleCall, check_pair, check_range
from genesis.optim.shared import BucketExchange, SharedBuffers, StateGather
from genesis.shapes import Shape
from genesis.tensor import Tensor

if TYPE_CHECKING:
    from genesis.distributed.group import Group as Ranks

Named = tuple[str, Tensor]


def decay_groups(named_parameters: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Groups under which matrices (two dimensions or more) decay, and vectors, as norms and biases are, do not.

    Frozen parameters are left out; so are empty groups. Flat buffers have the order of a group.
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    matrices = [(n, p) for n, p in trained if p.ndim >= 2]
    vectors = [(n, p) for n, p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def pairs_together(named_parameters: Iterable[Named]) -> list[Named]:
    """Parameters in the order in which flat buffers are to hold them: of all adapters in a block first A, then B.

    A and B of layers on one input are neighbours then, and one operand each. All else keeps its place.
    """
    blocks: dict[str, int] = {}
    keys: list[tuple[int, bool]] = []
    named = list(named_parameters)
    for number, (name, _) in enumerate(named):
        *path, _layer, kind, _weight = ("", "", *name.split("."))
        is_pair = kind in ("lora_A", "lora_B")
        place = blocks.setdefault(".".join(path), number) if is_pair else number
        keys.append((place, kind == "lora_B"))
    return [named[i] for i in sorted(range(len(named)), key=keys.__getitem__)]


def muon_groups(
    named_parameters: Iterable[Named], weight_decay: float, not_hidden: Sequence[str] = ("embed_tokens", "lm_head")
) -> list[dict[str, Any]]:
    """Groups for `Muon`: hidden matrices by Muon, the other parameters by AdamW; vectors do not decay.

    Args:
        named_parameters: frozen ones are left out.
        weight_decay: of matrices.
        not_hidden: parts of dotted names whose matrices (embeddings, output heads) go by AdamW.
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    hidden = [(n, p) for n, p in trained if p.ndim == 2 and not set(n.split(".")) & set(not_hidden)]
    names = {n for n, _ in hidden}
    rest = decay_groups([(n, p) for n, p in trained if n not in names], weight_decay)
    muon = [{"params": hidden, "weight_decay": weight_decay, "use_muon": True}] if hidden else []
    return muon + [{**group, "use_muon": False} for group in rest]


# --- Settings ---------------------------------------------------------------------------------------------------------


# What a group holds beside the settings of its rule. `Optimizer.set_lr` reads "lr_factor".
OF_GROUPS = ("params", "param_names", "initial_lr", "lr_factor")

NEUTRAL = (None, False)
# torch's settings that are not offered, with what to do instead.
NOT_OFFERED = {
    "amsgrad": "leave it out: the maximum of past averages is not kept",
    "capturable": "leave it out: `update` can be captured in a CUDA graph without it",
    "differentiable": "leave it out: gradients do not flow through a step",
    "decoupled_weight_decay": "use Adam for an L2 penalty, AdamW for decoupled decay",
}


def without_neutral(owner: str, given: Mapping[str, Any], neutral: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`given` without torch's settings that are not offered, where their values change nothing.

    Args:
        owner: the optimizer's name, for errors.
        neutral: values that change nothing for this optimizer besides None and False.

    Raises:
        KeywordError: for another value, saying what to do instead.
    """
    kept = dict(given)
    for name in given.keys() & NOT_OFFERED.keys():
        value = kept.pop(name)
        own = (neutral or {}).get(name, False)
        if value is not None and bool(value) != own:
            raise KeywordError(f"{owner} does not offer {name}={value!r}", next=NOT_OFFERED[name])
    return kept


def check_keywords(owner: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise KeywordError for the first name that is not one of `names`, with the nearest that is."""
    for name in given:
        if name not in names:
            raise unknown_keyword(owner, name, names)


class Group(dict[str, Any]):
    """The settings of a parameter group, and "params"; a dict that takes no other names.

    Args:
        owner: the optimizer's name, for errors.
        settings: names of the rule's settings.
        of_optimizer: names of settings that only the whole optimizer has.
        values: what the group holds.
    """

    owner = "Optimizer"
    names: Collection[str] | None = None  # None while a copy is being made
    of_optimizer: Collection[str] = ()

    def __init__(
        self, owner: str, settings: Iterable[str], of_optimizer: Collection[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.owner, self.names, self.of_optimizer = owner, (*settings, *OF_GROUPS), of_optimizer
        self.update(values)

    def check(self, names: Iterable[str]) -> None:
        """Raise KeywordError for a name that a group does not hold."""
        if self.names is None:
            return
        for name in names:
            if name in self.of_optimizer and name not in self.names:
                raise KeywordError(
                    f"{name} is no setting of a parameter group", next=f"pass it to {self.owner}, for all groups"
                )
        check_keywords(f"a parameter group of {self.owner}", names, self.names)

    def __setitem__(self, name: str, value: Any) -> None:
        self.check((name,))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.check((name,))
        return super().setdefault(name, default)

    def update(self, *args: Any, **more: Any) -> None:
        """As of a dict; nothing changes where a name is unknown."""
        values = dict(*args, **more)
        self.check(values)
        super().update(values)

    def __ior__(self, values: Any) -> Group:  # type: ignore[override,misc]
        self.update(values)
        return self


# --- Gradients and states ---------------------------------------------------------------------------------------------


MASTER, RESIDUAL = "master", "master_low"  # an fp32 master; the 16-bit residual of one whose upper half is the weight

LowPrecision = Literal["master", "stochastic"]


class GroupStates:
    """Base of `Optimizer`: the parameter groups, what is done with all their gradients together, and the states that
    the rule of a subclass keeps for each parameter.

    Attributes:
        param_groups: one dict for each group: "params", and the settings, which may be changed between steps.
        state: for each parameter its step count and the tensors of the rule; `saved_state` has masters in full.
        steps: steps begun.
        whole: gathers sharded states, inside `gathered_states`.
        low_precision, state_dtype, ranks, zero, grad_dtype: as of `Optimizer`; `ranks` is None for one process.
    """

    # Whether elements are updated independently, so that several parameters may be one shard.
    elementwise = True
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
        self.low_precision: LowPrecision = low_precision
        self.state_dtype, self.zero, self.grad_dtype = state_dtype, zero, grad_dtype
        self.ranks = None if ranks is None or ranks.size == 1 else ranks
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.steps = 0
        self.whole: StateGather | None = None
        self._updated: dict[int, dict[str, Any]] = {}  # states of the parameters that the last step updated
        self._flats: list[list[FlatBuffers]] = []  # for each group, one for each dtype and device
        self._positions: dict[Tensor, tuple[FlatBuffers, int]] = {}
        self._bucket_exchange: BucketExchange | None = None  # made when all groups are there
        self._figures: Array | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to 0."""
        for group, flats in zip(self.param_groups, self._flats, strict=True):
            for flat in flats:
                flat.zero_grad(set_to_none)
            for param in group["params"] if not flats else ():
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def _gradients(self) -> list[Array]:
        """All accumulated gradients, in as few pieces as the memory allows."""
        arrays: list[Array] = []
        for group, flats in zip(self.param_groups, self._flats, strict=True):
            arrays += [span for flat in flats for span in flat.gradient_spans()]
            arrays += [p.grad.array for p in group["params"] if p.grad is not None] if not flats else []
        return arrays

    def exchange(self, adds: bool) -> None:
        """Give the gradients of a micro-batch to the ranks that own them, who add them to those of the step before, if
        `adds`: a call of all ranks, nothing without ranks. The next gradients replace what is in `.grad` now.
        """
        for flat in self._shared():
            flat.exchange(adds)

    @property
    def overlaps_exchange(self) -> bool:
        """Whether ranks exchange gradients, and parameters, beside the work of a step and inside a CUDA graph."""
        return any(flat.is_overlapped for flat in self._shared())

    @property
    def largest_exchange(self) -> int:
        """Bytes of the gradients that ranks send at a time, at most."""
        return max((flat.largest_exchange for flat in self._shared()), default=0)

    def exchanging(self, adds: bool) -> AbstractContextManager[None]:
        """`exchange` of what the backward pass inside the block makes, while that goes on."""
        if self._bucket_exchange is None:
            self._bucket_exchange = BucketExchange(list(self._shared()))
        return self._bucket_exchange.exchanged(adds)

    def complete(self) -> None:
        """After the last `exchange` of a step."""
        for flat in self._shared():
            flat.complete()

    def first_not_finite(self) -> Tensor | None:
        """The first parameter of which this rank has a sum of gradients that is not finite."""
        found = ((flat, flat.first_not_finite()) for flat in self._shared())
        return next((flat.params[i] for flat, i in found if i is not None), None)

    def _shared(self) -> Iterator[SharedBuffers]:
        return (flat for flats in self._flats for flat in flats if isinstance(flat, SharedBuffers))

    def shared_memory(self) -> dict[str, list[Array]]:
        """What ranks keep in parts, beside what is in `.grad` and `state`: "gradients", their sums, and "optimizer"."""
        shared = list(self._shared())
        states = [each for flat in shared if flat.is_sharded for each in flat.states.values()]
        return {"gradients": [flat.summed for flat in shared], "optimizer": states}

    def sharded(self, param: Tensor) -> tuple[SharedBuffers, int] | None:
        """Where a parameter is whose states are on several ranks, a part on each; else None."""
        flat, index = self._positions.get(param, (None, 0))
        return (flat, index) if isinstance(flat, SharedBuffers) and flat.is_sharded else None

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients: a 0-d tensor, and nothing waits for it."""
        shared = list(self._shared())
        if self.overlaps_exchange:
            assert norm_type == 2, "ranks add squares up"
            report, loss = (Tensor(shared[0].buffer(float32, "gradient norm", size)) for size in (4, 1))
            self.clip_factor(report, loss, None)
            return report[1]
        if not all(flat.has_all_sums for flat in shared):
            assert norm_type == 2, "ranks add squares up"
            norm = math.sqrt(sum(flat.square_sum() for flat in shared))
            return Tensor(from_numpy(np.array(norm, np.float32)))
        return Tensor(total_norm(*self._gradients(), ord=float(norm_type)))

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by a number or a 0-d tensor; `step(grad_scale=factor)` needs no pass for it."""
        value = factor.array if isinstance(factor, Tensor) else factor
        for array in self._gradients():
            registry["mul"](array, value, out=array)
        for flat in self._shared():
            if flat.is_overlapped:
                flat.find_squares()

    def clip_factor(self, report: Tensor, loss: Tensor, max_norm: float | None) -> Tensor:
        """The scale under which a step clips, and is left out once a loss or norm was not finite; nothing waits.

        Args:
            report: float32 `[4]`, overwritten by the loss, the norm of all gradients, the factor, and a mark that the
                next call reads: 0 at first, NaN from the first loss or norm on that is not finite.
            loss: 0-d. Where ranks exchange beside the step it is those of all micro-batches `[n]`, 0 where another rank
                has them: their sum is the loss, and this is a call of all ranks.
            max_norm: gradients are scaled down to it; None leaves them.

        Returns:
            The factor, 0-d, a part of `report`: for `step(grad_scale=...)`.
        """
        if self.overlaps_exchange:
            figures, losses = self._figures_of_ranks(loss), loss.shape[0]
            clip_factor_of_ranks(report.array, figures, losses=losses, max_norm=max_norm)
        else:
            clip_factor(report.array, loss.array, *self._gradients(), max_norm=max_norm)
        array = report.array
        return Tensor(array.view((), (), array.offset + 2 * array.strides[0]))

    def _figures_of_ranks(self, losses: Tensor) -> Array:
        """The losses of all ranks, then the partial sums of squares that one process makes; float64, one dimension.

        Each figure is one rank's, and 0 on the others: so their sum over ranks has no order.
        """
        flats = list(self._shared())
        parts = [losses.array, *(flat.squares for flat in flats)]
        size = sum(part.size for part in parts)
        if self._figures is None or self._figures.size != size:
            self._figures = flats[0].buffer(float64, "losses and squares of ranks", size)
        figures, at = self._figures, 0
        for part in parts:
            place = figures.view((part.size,), (1,), figures.offset + at)
            registry["cast"](part, dtype=float64, out=place)
            at += part.size
        with flats[0].sending():
            flats[0].group.all_reduce(figures)
        flats[0].join()
        return figures

    def _flatten(self, kinds: Iterable[Sequence[Tensor]]) -> list[FlatBuffers]:
        flats: list[FlatBuffers]
        if self.ranks is None:
            flats = [FlatBuffers(members, self.grad_dtype) for members in kinds]
        else:
            is_sharded = self.zero == 1 and self.elementwise
            flats = [SharedBuffers(members, self.grad_dtype, self.ranks, is_sharded=is_sharded) for members in kinds]
        for flat in flats:
            self._positions.update({p: (flat, i) for i, p in enumerate(flat.params)})
        return flats

    # --- States -------------------------------------------------------------------------------------------------------

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
        if state is not None:
            return state
        state = self.state[param] = {"step": 0}
        flat, index = self._positions.get(param, (None, 0)) if self.elementwise else (None, 0)
        shared, dtype = self.sharded(param), self.kept_dtype(param)
        shapes = self.rule(param.shape, group).state_shapes(param.shape)
        kept: dict[str, tuple[Shape, DType]] = {name: (shape, dtype) for name, shape in shapes.items()}
        if self.keeps_master(param):
            is_split = param.dtype is bfloat16 and flat is not None
            kept |= {RESIDUAL: (param.shape, int16)} if is_split else {MASTER: (param.shape, float32)}
        for name, (shape, dtype) in kept.items():
            owner = f"{type(self).__name__} {name}"
            if flat is not None and name not in flat.states:
                flat.states[name] = flat.buffer(dtype, owner, flat.state_size)
            if shared is not None:
                shared[0].put(name, index, registry["cast"](param.array, dtype=float32) if name == MASTER else None)
                continue
            in_flat = None if flat is None else flat.view(flat.states[name], index)
            array = label(empty(shape, dtype, param.device), owner) if in_flat is None else in_flat
            if name == MASTER:
                registry["cast"](param.array, dtype=float32, out=array)
            else:
                registry["fill"](out=array, value=0, shape=shape, dtype=dtype)
            state[name] = Tensor(array)
        return state

    @contextmanager
    def gathered_states(self) -> Iterator[None]:
        """Inside the block every rank can read all states in full, for `saved_state`: a call of all ranks.

        A read goes on when all other ranks read, too, or have left their blocks, which all end together.
        """
        sharded = [flat for flat in self._shared() if flat.is_sharded]
        if not sharded:
            yield
            return
        self.whole = StateGather(sharded)
        try:
            with self.whole.reading():
                yield
        finally:
            self.whole = None

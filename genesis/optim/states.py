"""The base of `Optimizer`: parameter groups, operations on all their gradients, and the states of a rule.

Groups select the parameters that decay or that Muon updates. An unknown setting is an error, because a misspelt one
would silently train with its default. Settings of torch that Genesis does not offer are accepted with neutral values.

Gradients are dropped, summed over ranks, measured and clipped. A fused optimizer stores them in flat buffers. With
ranks, each rank stores the sums of its own part only.

States are the tensors of the rule and the float32 masters of 2-byte parameters, allocated at a parameter's first
update. For a bfloat16 parameter under an elementwise fused rule, only the 16-bit residual is stored, because the
parameter holds the other half of the master (see `genesis.ops.rounding`). A value written into such a parameter takes
effect, to within half of bfloat16's last place. With a full master, the next update overwrites it.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
    """Return a group of matrices (two dimensions or more), which decay, and one of vectors, which do not.

    Frozen parameters and empty groups are left out. Flat buffers follow the order of a group.
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    matrices = [(n, p) for n, p in trained if p.ndim >= 2]
    vectors = [(n, p) for n, p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def pairs_together(named_parameters: Iterable[Named]) -> list[Named]:
    """Return the parameters in the order of flat buffers: all A, then all B of the adapters in a block.

    The A of layers on one input are then neighbours and form one GEMM operand, and so do the B. The order of all other
    parameters does not change.
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
    named_parameters: Iterable[Named],
    weight_decay: float,
    not_hidden: Sequence[str] = ("embed_tokens", "lm_head", "score"),
) -> list[dict[str, Any]]:
    """Return groups for `Muon`: Muon updates hidden matrices, and AdamW all other parameters. Vectors do not decay.

    Args:
        named_parameters: names and parameters; frozen ones are left out.
        weight_decay: weight decay of matrices.
        not_hidden: parts of dotted names of matrices that AdamW updates (embeddings, output heads).
    """
    trained = pairs_together((n, p) for n, p in named_parameters if p.requires_grad)
    hidden = [(n, p) for n, p in trained if p.ndim == 2 and not set(n.split(".")) & set(not_hidden)]
    names = {n for n, _ in hidden}
    others = decay_groups([(n, p) for n, p in trained if n not in names], weight_decay)
    muon = [{"params": hidden, "weight_decay": weight_decay, "use_muon": True}] if hidden else []
    return muon + [{**group, "use_muon": False} for group in others]


# --- Settings ---------------------------------------------------------------------------------------------------------


# The keys of a group other than the settings of its rule. `Optimizer.set_lr` reads "lr_factor", `SWALR` "swa_lr".
OF_GROUPS = ("params", "param_names", "initial_lr", "lr_factor", "swa_lr")

NEUTRAL = (None, False)
# Settings of torch that Genesis does not offer, with the alternative.
NOT_OFFERED = {
    "amsgrad": "remove it: the maximum of past averages is not kept",
    "differentiable": "remove it: gradients do not flow through a step",
    "decoupled_weight_decay": "use Adam for an L2 penalty, AdamW for decoupled decay",
}


def without_neutral(
    owner: str, settings: Mapping[str, Any], neutral: Mapping[str, Any], offered: Collection[str]
) -> dict[str, Any]:
    """Return `settings` without torch's unsupported settings, whose values must be neutral.

    Args:
        owner: name of the optimizer, for errors.
        neutral: neutral values of this optimizer in addition to None and False.
        offered: settings that this optimizer has.

    Raises:
        KeywordError: for another value; it names the alternative.
    """
    kept = {k: v for k, v in settings.items() if k != "capturable"}  # graphs capture a step in any case
    for name in settings.keys() & NOT_OFFERED.keys() - set(offered):
        value = kept.pop(name)
        own = neutral.get(name, False)
        if value is not None and bool(value) != own:
            raise KeywordError(f"{owner} does not offer {name}={value!r}", next=NOT_OFFERED[name])
    return kept


def check_keywords(owner: str, keywords: Iterable[str], names: Collection[str]) -> None:
    """Raise KeywordError for the first keyword that is not in `names`, with the closest match."""
    for name in keywords:
        if name not in names:
            raise unknown_keyword(owner, name, names)


class Group(dict[str, Any]):
    """A dict of "params" and the settings of a parameter group, which rejects unknown keys.

    Args:
        owner: name of the optimizer, for errors.
        settings: names of the rule's settings.
        of_optimizer: names of settings that apply to all groups.
        values: initial contents.
    """

    owner = "Optimizer"
    names: Collection[str] | None = None  # None while `copy` or `pickle` builds a copy
    of_optimizer: Collection[str] = ()

    def __init__(
        self, owner: str, settings: Iterable[str], of_optimizer: Collection[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.owner, self.names, self.of_optimizer = owner, (*settings, *OF_GROUPS), of_optimizer
        self.update(values)

    def check(self, names: Iterable[str]) -> None:
        """Raise KeywordError for a name that a group cannot have."""
        if self.names is None:
            return
        for name in names:
            if name in self.of_optimizer and name not in self.names:
                raise KeywordError(
                    f"{name} is a setting of all groups, not of one", next=f"pass {name}= to {self.owner}"
                )
        check_keywords(f"a parameter group of {self.owner}", names, self.names)

    def __setitem__(self, name: str, value: Any) -> None:
        self.check((name,))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """See `dict.setdefault`."""
        self.check((name,))
        return super().setdefault(name, default)

    def update(self, *args: Any, **more: Any) -> None:
        """See `dict.update`. Nothing changes if a name is unknown."""
        values = dict(*args, **more)
        self.check(values)
        super().update(values)

    def __ior__(self, values: Any) -> Group:  # type: ignore[override,misc]
        self.update(values)
        return self


# --- Gradients and states ---------------------------------------------------------------------------------------------


MASTER, RESIDUAL = "master", "master_low"  # an fp32 master; its 16-bit residual if the weight holds the upper half

LowPrecision = Literal["master", "stochastic"]


HOOKS = ("step_pre", "step_post", "save_pre", "save_post", "load_pre", "load_post")


class State(dict[str, Any]):
    """The state of a parameter. Users may add entries.

    Attributes:
        names: the names of the tensors that a step changes, in the order of the rule.
        count: number of updates where torch's state has no "step"; None otherwise.
    """

    names: tuple[str, ...] = ()
    count: int | None = None

    def __missing__(self, name: str) -> int:
        if name != "step" or self.count is None:
            raise KeyError(name)
        return self.count

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "step" and self.count is not None:
            self.count = value
        else:
            super().__setitem__(name, value)


class GroupStates:
    """Base of `Optimizer`: the parameter groups, operations on all their gradients, and the states of each parameter.

    Attributes:
        param_groups: one dict per group with "params" and settings, which may change between steps.
        state: step count and tensors of the rule, by parameter. Masters may be split; `saved_state` joins them.
        steps: number of steps begun.
        state_gather: gathers sharded states inside `gathered_states`, else None.
        low_precision, state_dtype, ranks, zero, grad_dtype: as for `Optimizer`; `ranks` is None for one process.
    """

    # Whether elements are updated independently, so that a shard may span several parameters.
    elementwise = True
    shows_step = True  # whether a state has the entry "step", as in torch
    # Settings that must be at least 0, and settings in [0, 1) ("betas": both values). The schema of a training run's
    # configuration reads them.
    at_least_0: ClassVar[tuple[str, ...]] = ()
    below_1: ClassVar[tuple[str, ...]] = ()
    # The settings in a training run's configuration with their defaults, from which its schema is built.
    in_runs: ClassVar[Mapping[str, Any]] = {}
    # Neutral values of unsupported settings in addition to None and False.
    neutral: ClassVar[Mapping[str, Any]] = {}

    defaults: dict[str, Any]  # default settings of a group

    def __init__(
        self, low_precision: LowPrecision, state_dtype: DType, ranks: Ranks | None, zero: int, grad_dtype: DType | None
    ) -> None:
        self.low_precision: LowPrecision = low_precision
        self.state_dtype, self.zero, self.grad_dtype = state_dtype, zero, grad_dtype
        self.ranks = None if ranks is None or ranks.size == 1 else ranks
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._hooks: dict[str, list[Any]] = {kind: [] for kind in HOOKS}
        self.steps = 0
        self.state_gather: StateGather | None = None
        self._updated: dict[int, dict[str, Any]] = {}  # states of the parameters that the last step updated
        self._flats: list[list[FlatBuffers]] = []  # per group, one for each dtype and device
        self._positions: dict[Tensor, tuple[FlatBuffers, int]] = {}
        self._bucket_exchange: BucketExchange | None = None  # built at first use, when all groups exist
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
        """All accumulated gradients, in as few spans as the memory allows."""
        arrays: list[Array] = []
        for group, flats in zip(self.param_groups, self._flats, strict=True):
            arrays += [span for flat in flats for span in flat.gradient_spans()]
            arrays += [p.grad.array for p in group["params"] if p.grad is not None] if not flats else []
        return arrays

    def exchange(self, adds: bool) -> None:
        """Reduce-scatter the gradients of a micro-batch to their owners. A collective call; without ranks, a no-op.

        If `adds`, owners add them to the sums of earlier micro-batches. The next backward pass overwrites `.grad`.
        """
        for flat in self._shared():
            flat.exchange(adds)

    @property
    def overlaps_exchange(self) -> bool:
        """Whether collectives overlap with the work of a step and can be captured in its CUDA graph."""
        return any(flat.is_overlapped for flat in self._shared())

    @property
    def largest_exchange(self) -> int:
        """The size in bytes of the largest collective on gradients."""
        return max((flat.largest_exchange for flat in self._shared()), default=0)

    def exchanging(self, adds: bool) -> AbstractContextManager[None]:
        """Exchange the gradients of the backward pass inside the block while it runs; see `exchange`."""
        if self._bucket_exchange is None:
            self._bucket_exchange = BucketExchange(list(self._shared()))
        return self._bucket_exchange.exchanged(adds)

    def complete(self) -> None:
        """Complete the sums of gradients after the last `exchange` of a step."""
        for flat in self._shared():
            flat.complete()

    def first_not_finite(self) -> Tensor | None:
        """The first parameter whose sum of gradients on this rank is not finite."""
        first = ((flat, flat.first_not_finite()) for flat in self._shared())
        return next((flat.params[i] for flat, i in first if i is not None), None)

    def _shared(self) -> Iterator[SharedBuffers]:
        return (flat for flats in self._flats for flat in flats if isinstance(flat, SharedBuffers))

    def shared_memory(self) -> dict[str, list[Array]]:
        """The sharded arrays that neither `.grad` nor `state` holds: "gradients" (their sums) and "optimizer"."""
        shared = list(self._shared())
        states = [each for flat in shared if flat.is_sharded for each in flat.states.values()]
        return {"gradients": [flat.summed for flat in shared], "optimizer": states}

    def sharded(self, param: Tensor) -> tuple[SharedBuffers, int] | None:
        """The flat buffer of a parameter with sharded states and its index there; None for other parameters."""
        flat, index = self._positions.get(param, (None, 0))
        return (flat, index) if isinstance(flat, SharedBuffers) and flat.is_sharded else None

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor, without waiting for it."""
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
        """Multiply all gradients by a number or a 0-d tensor. `step(grad_scale=factor)` does so without a pass."""
        value = factor.array if isinstance(factor, Tensor) else factor
        for array in self._gradients():
            registry["mul"](array, value, out=array)
        for flat in self._shared():
            if flat.is_overlapped:
                flat.compute_squares()

    def clip_factor(self, report: Tensor, loss: Tensor, max_norm: float | None) -> Tensor:
        """Return the clip scale of a step. It is NaN from the first non-finite loss or norm on. Does not wait.

        Args:
            report: float32 `[4]`, overwritten by the loss, the norm of all gradients, the factor, and a mark that the
                next call reads: 0 at first, NaN from the first non-finite loss or norm on.
            loss: 0-d. With `overlaps_exchange` it is the loss of each micro-batch `[n]`, 0 for another rank's. Their
                sum is the loss, and the call is collective.
            max_norm: maximum norm of the gradients; None does not clip.

        Returns:
            The factor for `step(grad_scale=...)`: 0-d, a view of `report`.
        """
        if self.overlaps_exchange:
            figures, losses = self._figures_of_ranks(loss), loss.shape[0]
            clip_factor_of_ranks(report.array, figures, losses=losses, max_norm=max_norm)
        else:
            clip_factor(report.array, loss.array, *self._gradients(), max_norm=max_norm)
        array = report.array
        return Tensor(array.view((), (), array.offset + 2 * array.strides[0]))

    def _figures_of_ranks(self, losses: Tensor) -> Array:
        """Return the losses and then the partial sums of squares of all ranks: one-dimensional, float64.

        Each value is nonzero on one rank only, so their sum over ranks does not depend on an order.
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
    def has_rule(cls) -> bool:
        """Whether a rule computes the updates; a class without one defines `step`."""
        return cls.rule.__func__ is not GroupStates.rule.__func__  # type: ignore[attr-defined]

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        """Return the rule and attributes for a parameter of this shape in a group. Subclasses must define it."""
        raise NotImplementedError

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ConfigError if a setting is out of range."""
        for name in self.at_least_0:
            check_range(name, group[name], 0)
        for name in self.below_1:
            (check_pair if name == "betas" else check_range)(name, group[name], 0, 1)

    @property
    def rounds(self) -> bool:
        """Whether updates round at random, by noise that depends on the step count."""
        return self.low_precision == "stochastic" or self.state_dtype is bfloat16

    def kept_dtype(self, param: Tensor) -> DType:
        """The dtype of the rule's states for a parameter."""
        return float64 if param.dtype is float64 else self.state_dtype

    def keeps_master(self, param: Tensor) -> bool:
        """Whether a parameter has a float32 master: a 2-byte one without stochastic rounding."""
        return param.dtype.itemsize == 2 and self.low_precision == "master"

    def state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, allocated at its first use."""
        state = self.state.get(param)
        if isinstance(state, State):
            return state
        added, state = state or {}, State()
        state.count = None if self.shows_step else 0
        state["step"], self.state[param] = 0, state
        flat, index = self._positions.get(param, (None, 0)) if self.elementwise else (None, 0)
        shared, dtype = self.sharded(param), self.kept_dtype(param)
        call = self.rule(param.shape, group)
        shapes = call.state_shapes(param.shape)
        # List the tensors of the rule, and the master or the residual of a split one.
        kept: dict[str, tuple[Shape, DType]] = {name: (shape, dtype) for name, shape in shapes.items()}
        if self.keeps_master(param):
            is_split = param.dtype is bfloat16 and flat is not None
            kept |= {RESIDUAL: (param.shape, int16)} if is_split else {MASTER: (param.shape, float32)}
        # Allocate and initialize them, in flat buffers if there are some.
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
                registry["fill"](out=array, value=call.initial.get(name, 0), shape=shape, dtype=dtype)
            state[name] = Tensor(array)
        state.names = tuple(name for name in state if name not in ("step", MASTER))
        state.update(added)
        return state

    @contextmanager
    def gathered_states(self) -> Iterator[None]:
        """Inside the block, every rank can read all states in full, for `saved_state`. A collective call.

        A read waits until every other rank also reads or has left its block. All ranks leave their blocks together.
        """
        sharded = [flat for flat in self._shared() if flat.is_sharded]
        if not sharded:
            yield
            return
        self.state_gather = StateGather(sharded)
        try:
            with self.state_gather.reading():
                yield
        finally:
            self.state_gather = None

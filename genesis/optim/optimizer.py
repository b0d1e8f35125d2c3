"""Optimizer: parameter groups and steps, and three ways to run one update rule.

* plain: tensor operations on one parameter after the other; the readable form.
* foreach: one fused op for each parameter (the default).
* fused: parameters, gradients and states move to flat buffers, and one op updates a whole group.

`states.py` handles all gradients together and keeps the states of each parameter. A 2-byte parameter is updated through
a float32 master or by stochastic rounding.

A step has a host part, `begin_step`, and a device part, `update`. `update` launches the same work in every step and
reads the step count and the learning rates from `device_scalars`, so a CUDA graph can capture and replay it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import numpy as np

from genesis.array import Array, empty, label
from genesis.autograd import enable_grad, no_grad
from genesis.autograd.graph import HookHandle
from genesis.backend import CPU, Device, backend_for
from genesis.dtypes import DType, as_dtype, bfloat16, float16, float32, float64
from genesis.errors import ConfigError, ShapeError
from genesis.functions.transfer import overwrite, pinned_empty
from genesis.op import registry
from genesis.ops.optimizers import DeviceScalar
from genesis.ops.rounding import COUNTED, Noise, rounding_counters, stochastic_round
from genesis.optim.flat import (
    ALIGNED_ELEMENTS,
    FlatBuffers,
    Piece,
    Rounded,
    Run,
    Shard,
    check_flags,
    check_range,
    scale_value,
)
from genesis.optim.saving import Hooks, SavedStates, added
from genesis.optim.shared import SharedBuffers
from genesis.optim.states import MASTER, RESIDUAL, Group, LowPrecision, check_keywords, decay_groups, without_neutral
from genesis.tensor import Tensor

if TYPE_CHECKING:
    from genesis.distributed.group import Group as Ranks


F = TypeVar("F", bound=Callable[..., Any])
GLOBAL_HOOKS: Hooks = {"step_pre": [], "step_post": []}


def hooked(step: F) -> F:
    """Return a method `step` that runs the hooks before and after it."""

    @functools.wraps(step)
    def called(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        for before in (*GLOBAL_HOOKS["step_pre"], *optimizer._hooks["step_pre"]):
            args, kwargs = before(optimizer, args, kwargs) or (args, kwargs)
        result = step(*args, **kwargs)
        for after in (*optimizer._hooks["step_post"], *GLOBAL_HOOKS["step_post"]):
            after(optimizer, args, kwargs)
        return result

    return cast(F, called)


def _check_group(group: Any) -> None:
    if isinstance(group, Mapping) and "params" in group:
        return
    kind = f"of type {type(group).__name__}"
    if isinstance(group, Mapping):
        kind = f"one with the keys {', '.join(map(str, group)) or '(none)'}"
    raise ConfigError(
        f"a parameter group is a dict with its parameters under 'params', not {kind}",
        next="pass {'params': [...], 'lr': ...}",
    )


def register_optimizer_step_pre_hook(hook: Callable[..., Any]) -> HookHandle:
    """Call `hook(optimizer, args, kwargs)` before each step of every optimizer."""
    return added(GLOBAL_HOOKS["step_pre"], hook)


def register_optimizer_step_post_hook(hook: Callable[..., Any]) -> HookHandle:
    """Call `hook(optimizer, args, kwargs)` after each step of every optimizer."""
    return added(GLOBAL_HOOKS["step_post"], hook)


def betas_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return a group's "betas" under the names that rules use."""
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2}


class How(TypedDict, total=False):
    """Settings of how an optimizer stores and updates parameters; see `Optimizer`."""

    foreach: bool | None
    fused: bool | None
    low_precision: LowPrecision
    state_dtype: str | DType
    grad_dtype: str | DType | None
    seed: int
    ranks: Ranks | None
    zero: int


class Optimizer(SavedStates):
    """Base class of the optimizers.

    Args:
        params: tensors, (name, tensor) pairs, or dicts with such a list under "params" and settings of that group.
        defaults: default settings of a group.
        foreach, fused: at most one is True; foreach by default, plain if foreach is False.
        low_precision: update of 2-byte parameters. "master" keeps float32 masters in the state. "stochastic" (bfloat16
            only) rounds up or down at random so that the mean is exact, without masters.
        state_dtype: dtype of the rule's states, "float32" or "bfloat16" (computed in float32, rounded stochastically).
            States of float64 parameters are float64.
        grad_dtype: minimum dtype of accumulated gradients, such as "float32" for bfloat16 parameters; needs fused.
        seed: seed of stochastic rounding. The noise also depends on the step, so a resumed run repeats it.
        ranks: group of ranks that train these parameters, each on its own batches; needs fused. Call `exchange` after
            each backward pass. `grad_norm` and `update` are then collective, too.
        zero: 1 shards optimizer state (ZeRO-1); 0 replicates it. Rules that mix elements always replicate.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **how: Unpack[How]) -> None:
        # Check the settings and select the implementation.
        self.defaults = defaults
        how = cast(How, without_neutral(type(self).__name__, how, self.neutral, defaults))
        check_keywords(type(self).__name__, how, (*defaults, *How.__annotations__))
        foreach, fused = how.get("foreach"), how.get("fused")
        check_flags({k: v for k, v in how.items() if v is not None}, ("foreach", "fused"))
        if foreach and fused:
            raise ConfigError("foreach and fused exclude each other", next="pass one of them")
        self.implementation = "fused" if fused else "plain" if foreach is False else "foreach"
        grad_dtype, self.seed = how.get("grad_dtype"), how.get("seed", 0)
        super().__init__(
            how.get("low_precision", "master"),
            as_dtype(how.get("state_dtype", float32)),
            how.get("ranks"),
            how.get("zero", 1),
            None if grad_dtype is None else as_dtype(grad_dtype),
        )
        self._check_how()
        # Memory of device scalars, and the positions of rounding noise.
        self._device_scalars: dict[tuple[Device, int], DeviceScalars] = {}
        self._scales: dict[Device, tuple[float, Array]] = {}
        self._counters: dict[Tensor, int] = {}  # the first counter of each parameter's rounding noise in a stream
        self._counters_per_stream = 0
        # The groups of parameters.
        groups = list(params)
        if not groups:
            raise ConfigError(f"{type(self).__name__} got no parameters", next="pass model.parameters()")
        for group in groups if isinstance(groups[0], Mapping) else [{"params": groups}]:
            self.add_param_group(group)

    def _check_how(self) -> None:
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}, and must be an integer")
        if self.low_precision not in ("master", "stochastic"):
            raise ConfigError(f'low_precision is {self.low_precision!r}, and must be "master" or "stochastic"')
        if self.state_dtype not in (float32, bfloat16):
            raise ConfigError(f"state_dtype is {self.state_dtype}, and must be float32 or bfloat16")
        if self.grad_dtype is not None and self.implementation != "fused":
            raise ConfigError("grad_dtype needs flat buffers", next="also pass fused=True")
        if self.ranks is not None and self.implementation != "fused":
            raise ConfigError("ranks need flat buffers", next="also pass fused=True")
        check_range("zero", self.zero, 0, 2)

    # --- Hooks for subclasses -----------------------------------------------------------------------------------------

    @classmethod
    def for_run(
        cls, named_parameters: Iterable[tuple[str, Any]], weight_decay: float, settings: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return groups and settings for a training run, from its values of `in_runs`. Vectors do not decay."""
        return decay_groups(named_parameters, weight_decay), settings

    # --- Groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of parameters with its own settings.

        Raises:
            ConfigError: if a parameter is not a float leaf or already in a group, or a setting is out of range.
            KeywordError: if this optimizer does not have a setting.
        """
        # Check the settings and the parameters.
        _check_group(param_group)
        owner, params = type(self).__name__, param_group["params"]
        values = without_neutral(owner, param_group, self.neutral, self.defaults)
        full = Group(owner, self.defaults, How.__annotations__, {**self.defaults, **values})
        pairs = [e if isinstance(e, tuple) else (None, e) for e in ([params] if isinstance(params, Tensor) else params)]
        known = {id(p) for g in self.param_groups for p in g["params"]}
        for name, param in pairs:
            self._check_param(name, param, known)
            known.add(id(param))
        names = [n for n, _ in pairs]
        full["params"] = [p for _, p in pairs]
        if names and all(n is not None for n in names):
            full["param_names"] = names
        check_flags(full, ("maximize", "nesterov", "use_muon"))
        check_range("lr_factor", full.get("lr_factor", 1.0), 0)
        self.check_settings(full)
        self.param_groups.append(full)
        # One flat buffer per dtype and device. Rounding counters follow the order of the buffers.
        kinds: dict[Any, list[Tensor]] = {}
        for param in full["params"]:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        for param in (p for members in kinds.values() for p in members):
            self._counters[param] = self._counters_per_stream
            self._counters_per_stream += rounding_counters(param.shape, ALIGNED_ELEMENTS)
        self._bucket_exchange = None
        self._flats.append(self._flatten(kinds.values()) if self.implementation == "fused" else [])

    def _check_param(self, name: str | None, param: Any, known: set[int]) -> None:
        label = f"parameter {name!r}" if name else "a parameter"
        if not isinstance(param, Tensor):
            raise ConfigError(f"{label} is a {type(param).__name__}, not a tensor")
        if not param.is_leaf or not param.is_floating_point():
            raise ConfigError(f"{label} of shape {param.shape} is not a float leaf and cannot be trained")
        if id(param) in known:
            raise ConfigError(f"{label} of shape {param.shape} occurs twice", next="list each parameter once")
        if self.low_precision == "stochastic" and param.dtype not in (bfloat16, float32, float64):
            raise ConfigError(
                f"{label} is {param.dtype}, and stochastic rounding needs bfloat16", next='use low_precision="master"'
            )

    # --- Stepping -----------------------------------------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each group to `lr` times its "lr_factor", which defaults to 1."""
        for group in self.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)

    def __init_subclass__(cls, **rest: Any) -> None:
        """Make the `step` of a subclass without a rule run the hooks."""
        super().__init_subclass__(**rest)
        if "step" in vars(cls) and not cls.has_rule():
            cls.step = hooked(vars(cls)["step"])  # type: ignore[method-assign]

    @hooked
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | float | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients; its result is returned.
            grad_scale: factor on the gradients, such as a clip scale or the inverse of a loss scale. If it is NaN, no
                parameter and no state changes, without a host synchronization.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        scale_value(grad_scale, False)  # raises before the step is counted
        self.begin_step()
        self.update(grad_scale)
        self.share()
        return loss

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(optimizer, args, kwargs)` before each step; it may return new ones. args[0] is the optimizer."""
        return added(self._hooks["step_pre"], hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(optimizer, args, kwargs)` after each step."""
        return added(self._hooks["step_post"], hook)

    def begin_step(self) -> None:
        """Run the host part of a step: count it, and send the count and the learning rates to the devices.

        Before the replay of a captured `update`, this also counts the step for the parameters that the graph updates.
        A `CUDAGraph` that captures `step` calls this before each replay.
        """
        devices = {flat.device for flats in self._flats for flat in flats}  # of a fused optimizer
        devices = (devices or {p.device for g in self.param_groups for p in g["params"]}) - {CPU}
        if any(backend_for(device).call_before_replay(self.begin_step) for device in devices):
            return
        self.steps += 1
        for state in self._updated.values():
            state["step"] += 1
        for device in devices:
            self.device_scalars(device).send(self.step_scalars())

    def update(self, grad_scale: Tensor | float | None = None) -> None:
        """Run the device part of a step, after `begin_step`. It reads step count and rates from `device_scalars`."""
        with no_grad():
            self._count_updated()
            for index, group in enumerate(self.param_groups):
                scale = scale_value(grad_scale, bool(group.get("maximize", False)))
                for flat, stop, shard in self._shards(index, group):
                    self._update(shard, index, group, scale)
                    if isinstance(flat, SharedBuffers):
                        flat.updated_to(stop)

    def share(self) -> None:
        """All-gather the weights that each rank updated. Call it after `update`; `step` includes it."""
        for flat in self._shared():
            if flat.is_sharded:
                flat.gather_values()

    @property
    def not_capturable(self) -> str | None:
        """The reason why a CUDA graph cannot capture `update`, or None if it can."""
        if self.implementation == "plain":
            return "a plain optimizer reads the gradient scale on the host"
        is_flat = self.implementation == "fused" and self.elementwise
        if self.rounds and not is_flat:
            return f"{type(self).__name__} rounds each parameter with noise whose position the host counts"
        return None

    def device_scalars(self, device: Device) -> DeviceScalars:
        """The scalars from which steps on `device` read their count and learning rates."""
        key = device, len(self.param_groups)
        if key not in self._device_scalars:
            self._device_scalars[key] = DeviceScalars(*key)
        return self._device_scalars[key]

    def step_scalars(self) -> list[float]:
        """The contents of `device_scalars` in the current step: the step count, then the rate of each group."""
        return [float(self.steps), *(float(g["lr"]) for g in self.param_groups)]

    def _count_updated(self) -> None:
        """Count this step for the parameters with gradients. `begin_step` assumed the same ones as in the last step."""
        for flats in self._flats:
            for flat in flats:
                flat.collect_gradients()
        pairs = ((p, g) for g in self.param_groups for p in g["params"] if p.grad is not None)
        updated = {id(p): self.state_of(p, g) for p, g in pairs}
        for key, state in updated.items():
            if key not in self._updated:
                state["step"] += 1
        for key, state in self._updated.items():
            if key not in updated:
                state["step"] -= 1
        self._updated = updated

    def _update(self, shard: Shard, index: int, group: dict[str, Any], scale: DeviceScalar) -> None:
        call, lr, param = self.rule(shard.param.shape, group), group["lr"], shard.param
        if self.implementation == "plain" or call.rule.is_plain:
            lr = float(lr)
            grad = shard.grad if shard.grad.dtype is param.dtype else shard.grad.to(param.dtype)
            factor = Tensor(scale) if isinstance(scale, Array) else scale
            if math.isnan(float(factor)):
                return
            call.plain(shard, lr, grad if isinstance(factor, float) and factor == 1 else grad * factor)
        elif param.device == CPU:
            call.fused(shard, lr, scale)
        else:
            scalars, late = self.device_scalars(param.device), self.steps - shard.step
            step = scalars.step if late == 0 else registry["sub"](scalars.step, float(late))
            call.fused(replace(shard, step=step), scalars.lr(index), self._scale_on(param.device, scale))
        for target, wide, counter in shard.rounded:
            out = target.array
            if counter is None:
                registry["cast"](wide.array, dtype=out.dtype, out=out)
            else:
                stochastic_round(wide.array, dtype=out.dtype, seed=self.seed, offset=counter, out=out)

    def _scale_on(self, device: Device, scale: DeviceScalar) -> Array:
        """Return a gradient scale on the device. A number is copied only if it has changed."""
        if isinstance(scale, Array):
            return scale
        cached = self._scales.get(device)
        if cached is None or cached[0] != scale:
            memory = label(empty((1,), float64, device), "optimizer scalars")
            overwrite(memory, _pinned((scale,), device), non_blocking=True)
            cached = self._scales[device] = scale, memory.view((), ())
        return cached[1]

    # --- Shards -------------------------------------------------------------------------------------------------------

    def _shards(self, index: int, group: dict[str, Any]) -> Iterator[tuple[FlatBuffers | None, int, Shard]]:
        """Yield the shard of each call of the rule, with its flat buffer and its end there (or None and 0)."""
        if self.implementation == "fused" and self.elementwise:
            for flat in self._flats[index]:
                for run in flat.runs(lambda p: None if p.grad is None else self.state[p]["step"]):
                    for piece in flat.pieces(run.start, run.stop):
                        yield flat, piece.stop, self._flat_shard(flat, run, piece)
            return
        for param in group["params"]:
            if param.grad is not None:
                yield None, 0, self._shard(param)

    def _shard(self, param: Tensor) -> Shard:
        """The shard of one parameter. 2-byte values are upcast before the update and rounded after it."""
        state: Any = self.state[param]
        step, noise = state["step"], self._noise(param)
        grad, (flat, index) = param.grad, self._positions.get(param, (None, 0))
        if isinstance(flat, SharedBuffers):
            grad = Tensor(flat.view(flat.summed, index))
        assert grad is not None
        # The states of the rule, then the parameter or its master.
        tensors, rounded = {}, []
        for stream, name in enumerate(state.names, 1):
            kept = tensors[name] = state[name]
            if kept.dtype.itemsize == 2:
                tensors[name] = kept.to(float32)
                rounded.append(Rounded(kept, tensors[name], noise.counter(step, stream)))
        wide = param
        if MASTER in state:
            wide = state[MASTER]
            rounded.append(Rounded(param, wide, None))
        elif param.dtype.itemsize == 2:
            wide = param.to(float32)
            rounded.append(Rounded(param, wide, noise.counter(step, 0)))
        return Shard(wide, grad, tensors, step, rounded=tuple(rounded))

    def _flat_shard(self, flat: FlatBuffers, run: Run, piece: Piece) -> Shard:
        """The shard of a piece of a run. A run has gradients and one step count; it is usually the whole buffer."""
        first, length = flat.params[run.first], piece.stop - piece.start

        def part(buffer: Array, start: int = piece.at) -> Tensor:
            return Tensor(buffer.view((length,), (1,), buffer.offset + start))

        state = {n: part(kept) for n, kept in flat.states.items() if n not in (MASTER, RESIDUAL)}
        values, grad = part(flat.values, piece.start), part(flat.summed, flat.sums_at(piece))
        noise = self._noise(first, piece.start - run.start)
        rounds = any(x.dtype is bfloat16 for x in state.values())
        if flat.dtype is float16:
            master = part(flat.states[MASTER])
            rounded = (Rounded(values, master, None),)
            return Shard(master, grad, state, run.key, noise=noise if rounds else None, rounded=rounded)
        residual = part(flat.states[RESIDUAL]) if RESIDUAL in flat.states else None
        rounds |= residual is None and values.dtype is bfloat16
        return Shard(values, grad, state, run.key, residual, noise if rounds else None)

    def _noise(self, param: Tensor, offset: int = 0) -> Noise:
        """The rounding noise of a parameter, from its element `offset` on."""
        return Noise(self.seed, self._counters[param] + offset // COUNTED, self._counters_per_stream)

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.param_groups):
            lines.append(f"group {i}: {len(group['params'])} parameters")
            lines += [f"    {k}: {v}" for k, v in sorted(group.items()) if k not in ("params", "param_names")]
        return f"{type(self).__name__} (\n" + "\n".join(lines) + "\n)"


# --- Scalars that change from step to step ----------------------------------------------------------------------------


class DeviceScalars:
    """Float64 scalars at a fixed device address: the number of the current step, then the rate of each group.

    Because the address is fixed, a captured step reads the new values at each replay.
    """

    def __init__(self, device: Device, groups: int) -> None:
        self.array = label(empty((1 + groups,), float64, device), "optimizer scalars")
        self._is_fed = False
        self._sent: tuple[float, ...] = ()

    def read_from(self, array: Array) -> None:
        """Read the scalars from `array` from now on. The caller writes `Optimizer.step_scalars` into it before each
        step, for example with the batch. Raises ShapeError unless it is contiguous float64 of the right shape.
        """
        if array.shape != self.array.shape or array.dtype is not float64 or not array.is_contiguous:
            raise ShapeError(f"the step scalars are {array.dtype} {array.shape}, expected float64 {self.array.shape}")
        self.array, self._is_fed = array, True

    def send(self, values: Sequence[float]) -> None:
        """Copy the scalars of the next step from pinned memory in stream order, without waiting."""
        if self._is_fed or tuple(values) == self._sent:
            return
        overwrite(self.array, _pinned(values, self.array.device), non_blocking=True)
        self._sent = tuple(values)

    @property
    def step(self) -> Array:
        """The step count, 0-d."""
        return self.array.view((), (), self.array.offset)

    def lr(self, group: int) -> Array:
        """The learning rate of a group, 0-d."""
        return self.array.view((), (), self.array.offset + 1 + group)


def _pinned(values: Sequence[float], device: Device) -> Array:
    """Return the values in pinned memory, which is reused only after copies from it have finished."""
    host = pinned_empty((len(values),), float64, device)
    np.copyto(host.view_np(), values)
    return host

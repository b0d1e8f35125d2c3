"""Optimizer: what all optimizers share. Parameter groups, state and its saving, and three ways to run one update rule.

* plain: tensor operations on one parameter after the other; the readable form.
* foreach: one fused op for each parameter (the default).
* fused: parameters, gradients and states are moved to flat buffers, and one op updates a whole group.

A parameter of a 2-byte type is updated through a float32 master that the optimizer keeps, or by stochastic rounding. A
master is made at the parameter's first update; values that are put into the parameter later are lost at the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from genesis.array import Array, empty, from_numpy
from genesis.autograd import enable_grad, no_grad
from genesis.backend import CPU, Device
from genesis.dtypes import DType, bfloat16, float32, float64
from genesis.errors import ConfigError, GradientError, ModelError
from genesis.functions.transfer import moved
from genesis.op import registry
from genesis.ops.optimizers import rounding_counters, stochastic_round, total_norm
from genesis.optim.flat import FlatBuffers
from genesis.shapes import Shape
from genesis.tensor import Tensor

__all__ = ["LowPrecision", "Optimizer", "Unit", "check_range"]

LowPrecision = Literal["master", "stochastic"]
Scale = Any  # a number, or a 0-d array


@dataclass(slots=True)
class Unit:
    """What one call of an update rule works on: one parameter, or a run of a flat buffer.

    Attributes:
        param: float32 or float64, updated in place: the parameter, its master, or a widened copy.
        grad: of the parameter's own dtype.
        state: tensors by name, updated in place.
        step: counts from 1; a 0-d array in a fused update on a device.
        target: the 2-byte parameter that is written afterwards, if there is one.
        noise: counter from which the rounding to `target` is random; None rounds to nearest.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    step: Any
    target: Tensor | None = None
    noise: int | None = None


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless low <= value < high (or both are finite and equal `low`)."""
    if not low <= value < high:
        bound = f"at least {low:g}" if high == math.inf else f"at least {low:g} and below {high:g}"
        raise ConfigError(f"{name} is {value}, and must be {bound}")


class Optimizer:
    """Base of the optimizers.

    Args:
        params: tensors, (name, tensor) pairs, or dicts that hold such a list under "params" and settings of that group.
        defaults: settings of groups that do not name them.
        foreach, fused: at most one is True; both False is plain. None for both means foreach.
        low_precision: how 2-byte parameters are updated. "master": in a float32 copy, kept in the state. "stochastic":
            without a copy, bfloat16 only, rounded up or down at random so that the mean is exact.
        seed: of that randomness; it depends on the step besides, so a resumed run goes on as if it had not stopped.

    Attributes:
        param_groups: one dict for each group: "params", and the settings, which may be changed between steps.
        state: for each parameter its step count and the tensors of the rule.
    """

    # Whether elements are updated independently, so that several parameters may be one unit.
    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        low_precision: LowPrecision = "master",
        seed: int = 0,
    ) -> None:
        if foreach and fused:
            raise ConfigError("foreach and fused exclude each other", next="pass one of them")
        if low_precision not in ("master", "stochastic"):
            raise ConfigError(f'low_precision is {low_precision!r}, and must be "master" or "stochastic"')
        self.implementation = "fused" if fused else "plain" if foreach is False else "foreach"
        self.low_precision, self.seed = low_precision, seed
        self.defaults = defaults
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._flats: list[list[FlatBuffers]] = []  # for each group, one for each dtype and device
        self._places: dict[Tensor, tuple[FlatBuffers, int]] = {}
        self._scalars: dict[tuple[str, Device], tuple[float, Array]] = {}
        self._counters: dict[Tensor, int] = {}  # where each parameter's rounding noise starts within a step
        self._counters_per_step = 0
        groups = list(params)
        if not groups:
            raise ConfigError(f"{type(self).__name__} got no parameters", next="pass model.parameters()")
        for group in groups if isinstance(groups[0], Mapping) else [{"params": groups}]:
            self.add_param_group(dict(group))

    # --- The rule: what subclasses define -----------------------------------------------------------------------------

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for settings out of range."""

    def state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, Shape]:
        """The tensors that the rule keeps for one parameter; they start at 0, in float32 or float64."""
        raise NotImplementedError

    def plain_update(self, unit: Unit, group: dict[str, Any], grad: Tensor) -> None:
        """Update `unit` with tensor operations; `grad` is its gradient, scaled, in the dtype of `unit.param`."""
        raise NotImplementedError

    def fused_update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        """Update `unit` with one op, which multiplies the gradient by `scale`."""
        raise NotImplementedError

    # --- Groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters with settings of their own.

        Raises:
            ConfigError: for a parameter that is no float leaf or stands in a group already, and for bad settings.
        """
        given = group["params"]
        entries = [given] if isinstance(given, Tensor) else list(given)
        pairs = [e if isinstance(e, tuple) else (None, e) for e in entries]
        known = {id(p) for g in self.param_groups for p in g["params"]}
        for name, param in pairs:
            self._check_param(name, param, known)
            known.add(id(param))
        names = [n for n, _ in pairs]
        full = {**self.defaults, **group, "params": [p for _, p in pairs]}
        if names and all(n is not None for n in names):
            full["param_names"] = names
        self.check_settings(full)
        self.param_groups.append(full)
        for param in full["params"]:
            self._counters[param] = self._counters_per_step
            self._counters_per_step += rounding_counters(param.shape)
        self._flats.append(self._flatten(full["params"]) if self.implementation == "fused" else [])

    def _check_param(self, name: str | None, param: Any, known: set[int]) -> None:
        label = f"parameter {name!r}" if name else "a parameter"
        if not isinstance(param, Tensor):
            raise ConfigError(f"{label} is a {type(param).__name__}, not a tensor")
        if not param.is_leaf or not param.is_floating_point():
            raise ConfigError(f"{label} of shape {param.shape} is not a float leaf and cannot be trained")
        if id(param) in known:
            raise ConfigError(f"{label} of shape {param.shape} stands in two places", next="name each parameter once")
        if self.low_precision == "stochastic" and param.dtype not in (bfloat16, float32, float64):
            raise ConfigError(f"{label} is {param.dtype}: stochastic rounding is for bfloat16", next="use masters")

    def _flatten(self, params: Sequence[Tensor]) -> list[FlatBuffers]:
        kinds: dict[Any, list[Tensor]] = {}
        for param in params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        flats = [FlatBuffers(members) for members in kinds.values()]
        for flat in flats:
            self._places.update({p: (flat, i) for i, p in enumerate(flat.params)})
        return flats

    # --- Gradients ----------------------------------------------------------------------------------------------------

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
        """All gradients that have arrived, in as few pieces as the memory allows."""
        arrays: list[Array] = []
        for group, flats in zip(self.param_groups, self._flats, strict=True):
            arrays += [span for flat in flats for span in flat.gradient_spans()]
            arrays += [p.grad.array for p in group["params"] if p.grad is not None] if not flats else []
        return arrays

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients: a 0-d tensor, and nothing waits for it."""
        return Tensor(total_norm(*self._gradients(), ord=float(norm_type)))

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by a number or a 0-d tensor; `step(grad_scale=factor)` needs no pass for it."""
        value = factor.array if isinstance(factor, Tensor) else factor
        for array in self._gradients():
            registry["mul"](array, value, out=array)

    # --- Stepping -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | float | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss (and its gradients) anew; its result is returned.
            grad_scale: gradients are multiplied by it on the fly: a clip scale, the inverse of a loss scale. Where it
                is NaN no parameter and no state changes, and nothing waits to find that out.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        with no_grad():
            for index, group in enumerate(self.param_groups):
                scale = _scale_value(grad_scale, bool(group.get("maximize", False)))
                for unit in self._units(index, group):
                    self._update(unit, group, scale)
        return loss

    def _update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        if self.implementation == "plain":
            grad = unit.grad if unit.grad.dtype is unit.param.dtype else unit.grad.to(unit.param.dtype)
            factor = Tensor(scale) if isinstance(scale, Array) else scale
            if math.isnan(float(factor)):
                return
            self.plain_update(unit, group, grad if isinstance(factor, float) and factor == 1 else grad * factor)
        elif unit.param.device == CPU:
            self.fused_update(unit, group, scale)
        else:  # numbers would make every step a new recording of its launches
            place = unit.param.device
            ready = replace(unit, step=self._on_device("step", unit.step, place))
            rate = self._on_device("lr", group["lr"], place)
            self.fused_update(ready, {**group, "lr": rate}, self._on_device("scale", scale, place))
        if unit.target is None:
            return
        out = unit.target.array
        if unit.noise is None:
            registry["cast"](unit.param.array, dtype=out.dtype, out=out)
        else:
            stochastic_round(unit.param.array, dtype=out.dtype, seed=self.seed, offset=unit.noise, out=out)

    def _on_device(self, name: str, value: Any, device: Device) -> Array:
        """A number as a 0-d array of the device; copied again only when it has changed."""
        if isinstance(value, (Array, Tensor)):
            return value.array if isinstance(value, Tensor) else value
        known = self._scalars.get((name, device))
        if known is None or known[0] != value:
            known = value, moved(from_numpy(np.array(value, np.float64)), device)
            self._scalars[name, device] = known
        return known[1]

    def _units(self, index: int, group: dict[str, Any]) -> Iterator[Unit]:
        flats = self._flats[index]
        for flat in flats:
            flat.collect_gradients()
        if flats and self.elementwise and self.low_precision == "master":
            for flat in flats:
                yield from self._flat_units(flat, group)
            return
        for param in group["params"]:
            if param.grad is not None:
                yield self._unit(param, group)

    def _unit(self, param: Tensor, group: dict[str, Any]) -> Unit:
        """One parameter."""
        state = self._state_of(param, group)
        state["step"] += 1
        step, tensors = state["step"], {k: v for k, v in state.items() if k not in ("step", "master")}
        assert param.grad is not None
        if param.dtype.itemsize > 2:
            return Unit(param, param.grad, tensors, step)
        if "master" in state:
            return Unit(state["master"], param.grad, tensors, step, param)
        noise = (step - 1) * self._counters_per_step + self._counters[param]
        return Unit(param.to(float32), param.grad, tensors, step, param, noise)

    def _flat_units(self, flat: FlatBuffers, group: dict[str, Any]) -> Iterator[Unit]:
        """Runs of neighbouring parameters that have gradients and the same step count: usually one."""
        for param in flat.params:
            if param.grad is not None:
                self._state_of(param, group)["step"] += 1
        for run in flat.runs(lambda p: None if p.grad is None else self.state[p]["step"]):
            names = [n for n in self.state[flat.params[run.first]] if n not in ("step", "master")]
            state = {n: Tensor(flat.span(self._flat_state(flat, n), run)) for n in names}
            values, grad = Tensor(flat.span(flat.values, run)), Tensor(flat.span(flat.gradients, run))
            if flat.dtype.itemsize > 2:
                yield Unit(values, grad, state, run.key)
            else:
                master = Tensor(flat.span(self._flat_state(flat, "master"), run))
                yield Unit(master, grad, state, run.key, values)

    # --- State --------------------------------------------------------------------------------------------------------

    def _flat_state(self, flat: FlatBuffers, name: str) -> Array:
        if name not in flat.states:
            flat.states[name] = flat.buffer(_wide(flat.dtype))
        return flat.states[name]

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made at its first use."""
        state = self.state.get(param)
        if state is None:
            state = self.state[param] = {"step": 0}
            shapes = self.state_shapes(param, group)
            for name, shape in shapes.items():
                state[name] = self._state_tensor(param, name, shape)
            if param.dtype.itemsize == 2 and self.low_precision == "master":
                state["master"] = self._state_tensor(param, "master", param.shape)
                registry["cast"](param.array, dtype=float32, out=state["master"].array)
        return state

    def _state_tensor(self, param: Tensor, name: str, shape: Shape) -> Tensor:
        """Zeros of `shape`, in the flat buffer of that state where the parameter is in one."""
        place = self._places.get(param)
        if place is not None and self.elementwise and self.low_precision == "master":
            array = place[0].view(self._flat_state(place[0], name), place[1])
        else:
            array = empty(shape, _wide(param.dtype), param.device)
        registry["fill"](out=array, value=0, shape=array.shape, dtype=array.dtype)
        return Tensor(array)

    def state_dict(self) -> dict[str, Any]:
        """Settings and state as plain values and tensors (which share memory), parameters by number."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            for param in group["params"]:
                numbers[id(param)] = len(numbers)
            kept = {k: v for k, v in group.items() if k != "params"}
            groups.append({**kept, "params": [numbers[id(p)] for p in group["params"]]})
        state = {numbers[id(p)]: dict(s) for p, s in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state: settings and state tensors are replaced, bit for bit.

        Raises:
            ModelError: if groups, parameters, names, shapes or dtypes differ; nothing is changed then.
        """
        groups, saved = state_dict["param_groups"], state_dict["state"]
        settings = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        params = [(n, p, i) for n, p, i in self._match_groups(groups) if n in saved]
        for number, param, i in params:
            self._check_state(number, param, {**self.param_groups[i], **settings[i]}, saved[number])
        for own, loaded in zip(self.param_groups, settings, strict=True):
            own.update(loaded)
        self.state.clear()
        for number, param, i in params:
            state = self._state_of(param, self.param_groups[i])
            state["step"] = int(saved[number]["step"])
            for name, tensor in state.items():
                if name != "step":
                    registry["copy"](moved(_as_array(saved[number][name]), tensor.device), out=tensor.array)

    def _match_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Tensor, int]]:
        """(number in the saved state, parameter, number of its group) for every parameter."""
        sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in self.param_groups]
        if sizes != own:
            raise ModelError(
                f"the saved optimizer has groups of {sizes} parameters, this one of {own}",
                next="make the optimizer as it was when the state was saved",
            )
        found = []
        for i, (mine, group) in enumerate(zip(self.param_groups, groups, strict=True)):
            names, theirs = mine.get("param_names"), group.get("param_names")
            if names is not None and theirs is not None and list(names) != list(theirs):
                first = next((a, b) for a, b in zip(theirs, names, strict=True) if a != b)
                raise ModelError(f"the saved optimizer has parameter {first[0]!r} where this one has {first[1]!r}")
            found += [(int(n), p, i) for n, p in zip(group["params"], mine["params"], strict=True)]
        return found

    def _check_state(self, number: int, param: Tensor, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        shapes = dict(self.state_shapes(param, group))
        if param.dtype.itemsize == 2 and self.low_precision == "master":
            shapes["master"] = param.shape
        if set(saved) != {"step", *shapes}:
            raise ModelError(
                f"the saved state of parameter {number} holds {sorted(saved)}, expected {sorted(['step', *shapes])}",
                next="load it into the optimizer that saved it",
            )
        for name, shape in shapes.items():
            array = _as_array(saved[name])
            if array.shape != shape or array.dtype is not _wide(param.dtype):
                raise ModelError(
                    f"the saved {name} of parameter {number} is {array.dtype} {array.shape},"
                    f" expected {_wide(param.dtype)} {shape}"
                )

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.param_groups):
            lines.append(f"group {i}: {len(group['params'])} parameters")
            lines += [f"    {k}: {v}" for k, v in sorted(group.items()) if k not in ("params", "param_names")]
        return f"{type(self).__name__} (\n" + "\n".join(lines) + "\n)"


def _wide(dtype: DType) -> DType:
    """The dtype of states and masters."""
    return float64 if dtype is float64 else float32


def _as_array(value: Any) -> Array:
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, np.ndarray):
        return from_numpy(value)
    raise ModelError(f"a saved optimizer state is a {type(value).__name__}, not a tensor")


def _scale_value(scale: Tensor | float | None, maximize: bool) -> Scale:
    value = 1.0 if scale is None else scale.array if isinstance(scale, Tensor) else float(scale)
    if isinstance(value, Array) and value.shape != ():
        raise GradientError(f"grad_scale has shape {value.shape}", next="pass a number or a 0-d tensor")
    if not maximize:
        return value
    return registry["neg"](value) if isinstance(value, Array) else -value

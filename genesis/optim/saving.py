"""Saving and loading an optimizer's state as plain values and tensors. Loading checks everything before it copies.

Split masters are saved as float32 values, so every implementation can load the state of the others. A loaded state may
be stored in a file; a rank then reads only the parts it owns, piece by piece.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, empty, from_numpy
from genesis.autograd.graph import HookHandle
from genesis.dtypes import DType, float32, int16
from genesis.errors import ModelError
from genesis.functions.transfer import moved
from genesis.op import registry
from genesis.ops.rounding import join_master, split_master
from genesis.optim.shared import SharedBuffers
from genesis.optim.states import MASTER, OF_GROUPS, RESIDUAL, GroupStates, check_keywords, without_neutral
from genesis.shapes import Shape
from genesis.tensor import Tensor

# Maximum elements of a stored tensor that a rank reads at once: 64 MiB of float32.
READ = 16 << 20


class StoredTensor(NamedTuple):
    """A saved state in a file. `read(start, stop)` returns the elements [start, stop) in row-major order."""

    dtype: DType
    shape: Shape
    read: Callable[[int, int], np.ndarray]

    def read_all(self) -> np.ndarray:
        """Return all elements in the tensor's shape."""
        return self.read(0, math.prod(self.shape)).reshape(self.shape)


Hooks = dict[str, list[Callable[..., Any]]]


def added(hooks: list[Callable[..., Any]], hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
    """Add a hook, and return the handle that removes it."""
    hooks.insert(0 if prepend else len(hooks), hook)
    return HookHandle(lambda: hooks.remove(hook))


class KeptArray(NamedTuple):
    """A state of a parameter. `array` returns its values, gathered from all ranks if it is sharded."""

    dtype: DType
    shape: Shape
    array: Callable[[], Array]


def kept_arrays(optimizer: GroupStates, param: Tensor) -> dict[str, KeptArray]:
    """The states of one parameter as stored, including residuals of split masters."""
    state, shared = optimizer.state.get(param, {}), optimizer.sharded(param)
    if state and shared is not None:
        flat, index = shared
        if (gather := optimizer.state_gather) is None:
            return {}
        return {
            name: KeptArray(kept.dtype, param.shape, functools.partial(gather.read, flat, name, index))
            for name, kept in flat.states.items()
        }
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: KeptArray(t.dtype, t.shape, functools.partial(getattr, t, "array")) for name, t in tensors.items()}


class SavedStates(GroupStates):
    """Base of `Optimizer` that saves and loads the state of all parameters."""

    def saved_state(self, param: Tensor) -> dict[str, Any]:
        """Return the entry of one parameter in `state_dict`: its step count and tensors, with masters joined.

        It is empty if the parameter was never updated. As in torch, the count is left out where no rule reads it.
        """
        state = dict(self.state.get(param, {}))
        if self.has_rule() and param in self.state and (self.shows_step or self.rounds):
            state["step"] = self.state[param]["step"]
        state |= {name: Tensor(kept.array()) for name, kept in kept_arrays(self, param).items()}
        residual = state.pop(RESIDUAL, None)
        if residual is not None:
            state[MASTER] = Tensor(join_master(param.array, residual.array))
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state, with parameters by number. Tensors share memory, except joined split masters."""
        for hook in self._hooks["save_pre"]:
            hook(self)
        numbers: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            for param in group["params"]:
                numbers[id(param)] = len(numbers)
            kept = {k: v for k, v in group.items() if k != "params"}
            groups.append({**kept, "params": [numbers[id(p)] for p in group["params"]]})
        state = {numbers[id(p)]: saved for p in self.state if (saved := self.saved_state(p))}
        saved = {"state": state, "param_groups": groups}
        for hook in self._hooks["save_post"]:
            saved = hook(self, saved) or saved
        return saved

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(optimizer)` before `state_dict`."""
        return added(self._hooks["save_pre"], hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(optimizer, state_dict)` after `state_dict`; it may return another one."""
        return added(self._hooks["save_post"], hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(optimizer, state_dict)` before `load_state_dict`; it may return another one."""
        return added(self._hooks["load_pre"], hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(optimizer)` after `load_state_dict`."""
        return added(self._hooks["load_post"], hook, prepend)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace settings and state tensors by saved ones, bit for bit. Parameters with masters are set from them.

        Raises:
            ModelError: if groups, parameters, names, shapes or dtypes differ; nothing has changed then.
        """
        # Check everything first, so that an error leaves the optimizer as it was.
        for hook in self._hooks["load_pre"]:
            state_dict = hook(self, state_dict) or state_dict
        check_saved("an optimizer's state", state_dict, ("state", "param_groups"))
        groups, saved = state_dict["param_groups"], state_dict["state"]
        if not self.has_rule():
            return self._load_free(groups, saved)
        settings = [_settings(self, i, g) for i, g in enumerate(groups)]
        params = [(n, p, i) for n, p, i in _matched(self, groups) if n in saved]
        for number, param, i in params:
            _check(self, number, param, {**self.param_groups[i], **settings[i]}, saved[number])
        for own, loaded in zip(self.param_groups, settings, strict=True):
            self.check_settings({**own, **loaded})
        # Copy settings, step counts and tensors.
        for own, loaded in zip(self.param_groups, settings, strict=True):
            own.update(loaded)
        self.state.clear()
        self._updated = {}
        for number, param, i in params:
            state = self.state_of(param, self.param_groups[i])
            state["step"] = int(saved[number].get("step", 1))  # torch's SGD counts no steps
            if (shared := self.sharded(param)) is not None:
                _load_shard(*shared, saved[number])
                continue
            for name, tensor in state.items():
                if name == RESIDUAL:
                    master = moved(_as_array(saved[number][MASTER]), param.device)
                    split_master(param.array, tensor.array, master)
                elif name != "step":
                    registry["copy"](moved(_as_array(saved[number][name]), tensor.device), out=tensor.array)
                    if name == MASTER:
                        registry["cast"](tensor.array, dtype=param.dtype, out=param.array)
        self.steps = max((state["step"] for state in self.state.values()), default=0)
        for hook in self._hooks["load_post"]:
            hook(self)

    def _load_free(self, groups: Sequence[Mapping[str, Any]], saved: Mapping[Any, Any]) -> None:
        """Load the groups and states of an optimizer without a rule, whatever they contain, as torch does."""
        matched = _matched(self, groups)
        for own, loaded in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in loaded.items() if name != "params"})
        self.state.clear()
        self.state.update({param: _cast_state(param, saved[n]) for n, param, _ in matched if n in saved})
        for hook in self._hooks["load_post"]:
            hook(self)


def _cast_state(param: Tensor, value: Any, name: str = "") -> Any:
    """Return a state on the parameter's device; float tensors except "step" also take its dtype."""
    if isinstance(value, Tensor):
        dtype = param.dtype if value.is_floating_point() and name != "step" else value.dtype
        return value.to(device=param.device, dtype=dtype).clone()
    return {k: _cast_state(param, v, k) for k, v in value.items()} if isinstance(value, dict) else value


def _load_shard(flat: SharedBuffers, index: int, saved: Mapping[str, Any]) -> None:
    """Load the part of a parameter's states that this rank owns, and set the parameter from its master."""
    param = flat.params[index]
    for name in flat.states:
        source = saved[MASTER if name == RESIDUAL else name]
        is_stored = isinstance(source, StoredTensor)
        for first, last in flat.own_spans(index, READ) if is_stored else [(0, param.array.size)]:
            length = last - first
            values = from_numpy(source.read(first, last)) if is_stored else registry["copy"](_as_array(source))
            array = moved(values, param.device).view((length,), (1,))
            weight = flat.values.view((length,), (1,), flat.values.offset + flat.starts[index] + first)
            if name == RESIDUAL:
                residual = empty((length,), int16, param.device)
                split_master(weight, residual, array)
                array = residual
            elif name == MASTER:
                registry["cast"](array, dtype=param.dtype, out=weight)
            flat.put(name, index, array, first)


def check_saved(kind: str, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ModelError unless a saved state has exactly these entries."""
    if set(state) != set(names):
        raise ModelError(
            f"{kind} has the entries {', '.join(names)}, not {', '.join(sorted(map(str, state))) or 'none'}",
            next="load the result of state_dict() of the same class",
        )


def _settings(optimizer: GroupStates, index: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved group, after checking that the optimizer has all of them."""
    owner = type(optimizer).__name__
    kept = without_neutral(owner, saved, optimizer.neutral, optimizer.defaults)
    kept = {k: v for k, v in kept.items() if k not in ("foreach", "fused")}  # torch saves them too
    check_keywords(f"the saved parameter group {index} of {owner}", kept, (*optimizer.defaults, *OF_GROUPS))
    return {k: v for k, v in kept.items() if k not in ("params", "param_names")}


def _matched(optimizer: GroupStates, groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Tensor, int]]:
    """(number in the saved state, parameter, number of its group) for every parameter."""
    sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in optimizer.param_groups]
    if sizes != own:
        raise ModelError(
            f"the saved optimizer has groups of {sizes} parameters, and this one of {own}",
            next="build the optimizer with the groups of the saved one",
        )
    matched = []
    for i, (mine, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        names, theirs = mine.get("param_names"), group.get("param_names")
        if names is not None and theirs is not None and list(names) != list(theirs):
            first = next((a, b) for a, b in zip(theirs, names, strict=True) if a != b)
            raise ModelError(f"the saved optimizer has parameter {first[0]!r} where this one has {first[1]!r}")
        matched += [(int(n), p, i) for n, p in zip(group["params"], mine["params"], strict=True)]
    return matched


def _check(
    optimizer: GroupStates, number: int, param: Tensor, group: dict[str, Any], saved: Mapping[str, Any]
) -> None:  # fmt: skip
    dtype, shapes = optimizer.kept_dtype(param), optimizer.rule(param.shape, group).state_shapes(param.shape)
    expected = {name: (shape, dtype) for name, shape in shapes.items()}
    if optimizer.keeps_master(param):
        expected[MASTER] = (param.shape, float32)
    if {"step", *saved} != {"step", *expected}:
        raise ModelError(
            f"the saved state of parameter {number} has {sorted(saved)}, expected {sorted(['step', *expected])}",
            next="load it into the optimizer that saved it",
        )
    for name, (shape, dtype) in expected.items():
        value = saved[name]
        tensor = value if isinstance(value, StoredTensor) else _as_array(value)
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise ModelError(
                f"the saved {name} of parameter {number} is {tensor.dtype} {tensor.shape}, expected {dtype} {shape}"
            )


def _as_array(value: Any) -> Array:
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, np.ndarray):
        return from_numpy(value)
    if isinstance(value, StoredTensor):
        return from_numpy(value.read_all())
    raise ModelError(f"a saved optimizer state is a {type(value).__name__}, not a tensor")

"""States of modules: loading one by name, with the hooks and further values that modules add to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, from_numpy
from genesis.errors import ModelError, UsageError, escape
from genesis.functions.transfer import moved
from genesis.nn.parameter import Parameter
from genesis.op import registry
from genesis.tensor import Tensor

SHOWN = 10  # names in an error, because the weights of another model can have thousands
EXTRA = "_extra_state"  # the key of the value that `Module.get_extra_state` returns


class LoadResult(NamedTuple):
    """Names that the state lacks, and names in the state that the module does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:  # as torch prints it
        names = f"_IncompatibleKeys(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"
        return names if self.missing_keys or self.unexpected_keys else "<All keys matched successfully>"


def listed(names: Sequence[str]) -> str:
    """List at most ten names, then the number of the others."""
    shown = ", ".join(escape(n) for n in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def load_state(
    owner: str, targets: Mapping[str, Tensor], state: Mapping[str, Any], strict: bool, root: Any = None
) -> LoadResult:
    """Copy `state` into `targets`, cast to their dtypes, or assign it in `root`; see `Module.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise ModelError(f"a state is a dict of tensors by name, not a {type(state).__name__}")
    arrays: dict[str, Array] = {}
    for name, value in state.items():
        if not isinstance(value, (Tensor, np.ndarray)):
            raise ModelError(f"{escape(name)} is a {type(value).__name__}, not a tensor")
        arrays[name] = value.array if isinstance(value, Tensor) else from_numpy(value)
    # Collect missing and unexpected names and wrong shapes. Any name of a tied parameter will do.
    names: dict[int, list[str]] = {}  # all names of each tensor
    for name, tensor in targets.items():
        names.setdefault(id(tensor), []).append(name)
    missing = [n for n, t in targets.items() if not any(a in arrays for a in names[id(t)])]
    unexpected = [n for n in arrays if n not in targets]
    shapes = [
        f"{n} is {list(arrays[n].shape)}, expected {list(t.array.shape)}"
        for n, t in targets.items()
        if n in arrays and arrays[n].shape != t.array.shape
    ]
    wrong = [f"{len(shapes)} of the wrong shape: {listed(shapes)}"] if shapes else []
    refuse_misfit(owner, _unfit(missing, unexpected, strict) + wrong)
    # The values of a tied parameter must agree.
    for name, tensor in targets.items():
        first = next((a for a in names[id(tensor)] if a in arrays), name)
        same = name not in arrays or arrays[name] is arrays[first]
        if not same and not np.array_equal(arrays[name].numpy(), arrays[first].numpy()):
            raise ModelError(
                f"{escape(first)} and {escape(name)} are tied in {owner}, but their values in the state differ",
                next="load it into a model with untied weights",
            )
    # Everything fits, so copying cannot fail half-way.
    new: dict[int, Tensor] = {}
    for name, tensor in targets.items():
        used = [a for a in names[id(tensor)] if a in arrays]
        if root is not None and used:
            value = state[used[0]] if isinstance(state[used[0]], Tensor) else Tensor(arrays[used[0]])
            if isinstance(tensor, Parameter) and not isinstance(value, Parameter):
                value = Parameter(value, tensor.requires_grad)
            path, _, last = name.rpartition(".")
            value = new.setdefault(id(tensor), value.requires_grad_(tensor.requires_grad))
            setattr(root.get_submodule(path), last, value)
        elif name in arrays:
            registry["cast"](moved(arrays[name], tensor.device), dtype=tensor.array.dtype, out=tensor.array)
    return LoadResult(missing, unexpected)


# --- Hooks and further values -----------------------------------------------------------------------------------------


def no_extra_state(self: Any) -> Any:
    """Return a further value for `state_dict`. A subclass that defines it also defines `set_extra_state`."""
    raise UsageError(f"{type(self).__name__} does not define get_extra_state()")


def refuse_extra_state(self: Any, state: Any) -> None:
    """Take the value of `get_extra_state` from a loaded state."""
    raise UsageError(f"{type(self).__name__} does not define set_extra_state()", next="define both")


def owners(root: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return all modules of a tree with the prefixes of their names, parents first."""
    found = root.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False)
    return [(f"{path}." if path else "", module) for path, module in found]


def members(root: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by dotted name. Tied ones have all their names."""
    for before, module in owners(root, prefix):
        persistent = {n: b for n, b in module._buffers.items() if n not in module._transient}
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                yield before + name, tensor


def extras(root: Any, prefix: str = "") -> dict[str, Any]:
    """Return the modules that define `get_extra_state`, by the name of the value."""
    return {before + EXTRA: m for before, m in owners(root, prefix) if type(m).get_extra_state is not no_extra_state}


def hooked(root: Any, kind: str, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return the state hooks of a kind with prefix and module: parents first, or last after loading or saving."""
    found = [(b, m, h.call) for b, m in owners(root, prefix) for h in m._state_hooks.values() if h.kind == kind]
    return found[::-1] if kind in ("saved", "loaded") else found


def load(root: Any, state: Mapping[str, Any], strict: bool, assign: bool) -> LoadResult:
    """Load a state into a module under its hooks; see `Module.load_state_dict`."""
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    further, after = extras(root), hooked(root, "loaded")
    before = hooked(root, "loads")
    if (further or before) and isinstance(state, Mapping):
        state = dict(state)
    for prefix, module, hook in before:
        hook(module, state, prefix, {}, strict, missing, unexpected, errors)
    # Take out the values of `get_extra_state`, which are not tensors of the module.
    values = {name: state.pop(name) for name in further if name in state}  # type: ignore[attr-defined]
    missing += [name for name in further if name not in values]
    # A hook that runs after loading decides which names may be missing.
    owner = type(root).__name__
    refuse_misfit(owner, errors if after else [*errors, *_unfit(missing, unexpected, strict)])
    found = load_state(owner, dict(members(root)), state, strict and not after, root if assign else None)
    for name, value in values.items():
        further[name].set_extra_state(value)
    result = LoadResult([*missing, *found.missing_keys], [*unexpected, *found.unexpected_keys])
    for _, module, hook in after:
        hook(module, result)
    refuse_misfit(owner, _unfit(*result, strict))
    return result


def _unfit(missing: Sequence[str], unexpected: Sequence[str], strict: bool) -> list[str]:
    kinds = {"missing": missing, "unexpected": unexpected} if strict else {}
    return [f"{len(each)} {kind}: {listed(each)}" for kind, each in kinds.items() if each]


def refuse_misfit(owner: str, problems: Sequence[str]) -> None:
    """Raise ModelError if there are problems."""
    if problems:
        raise ModelError(
            f"the state does not fit {owner}: {'; '.join(problems)}",
            next="load weights of the same architecture and sizes",
        )

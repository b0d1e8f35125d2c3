"""Parametrizations, as in torch.nn.utils.parametrize: a tensor of a module that is computed from others.

>>> class Positive(genesis.nn.Module):
...     def forward(self, x): return x.exp()
>>> layer = genesis.nn.utils.parametrize.register_parametrization(genesis.nn.Linear(2, 2), "weight", Positive())
>>> bool((layer.weight > 0).all())
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import UsageError
from genesis.keywords import check_calls
from genesis.nn.module import Module, ModuleDict, ModuleList
from genesis.nn.parameter import Parameter
from genesis.tensor import Tensor

__all__ = [
    "ParametrizationList", "cached", "is_parametrized", "register_parametrization", "remove_parametrizations",
    "transfer_parametrizations_and_params", "type_before_parametrizations",
]  # fmt: skip

_caches: list[dict[tuple[int, str], Tensor]] = []  # one for each open `cached` block; the first one is used


@contextmanager
def cached() -> Iterator[None]:
    """Compute each parametrized tensor once inside the block."""
    _caches.append({})
    try:
        yield
    finally:
        _caches.pop()


def _parametrized(kind: type[Module]) -> type[Module]:
    """Return a subclass that computes tensors when they are read, and sets their originals when they are assigned."""

    def get(self: Module, name: str) -> Any:
        if name == "parametrizations" or not is_parametrized(self, name):
            return kind.__getattr__(self, name)
        if not _caches:
            return self.parametrizations[name]()
        key = (id(self), name)
        if key not in _caches[0]:
            _caches[0][key] = self.parametrizations[name]()
        return _caches[0][key]

    def assign(self: Module, name: str, value: Any) -> None:
        if is_parametrized(self, name):
            self.parametrizations[name].right_inverse(value)
        else:
            kind.__setattr__(self, name, value)

    parts = {"__getattr__": get, "__setattr__": assign, "__module__": kind.__module__}
    return type(f"Parametrized{kind.__name__}", (kind,), parts)


def _check_kept(what: str, before: Tensor, after: Any, names: Sequence[str] = ("dtype", "device", "shape")) -> None:
    """Raise UsageError unless a tensor keeps its dtype, device and shape."""
    if not isinstance(after, Tensor):
        raise UsageError(f"{what} is a {type(after).__name__}, not a tensor")
    for name in names:
        if (old := getattr(before, name)) != (now := getattr(after, name)):
            next = "keep it, or pass unsafe=True to register_parametrization"
            raise UsageError(f"{what} has the {name} {now}, and the tensor {old}", next=next)


def _tensors(values: Any) -> list[Tensor]:
    listed = [values] if isinstance(values, Tensor) else values
    if not isinstance(listed, Sequence) or not all(isinstance(v, Tensor) for v in listed):
        raise UsageError(f"right_inverse returns a {type(values).__name__}, not a tensor or a sequence of tensors")
    return list(listed)


def _register(module: Module, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


class ParametrizationList(ModuleList):
    """The parametrizations of one tensor, and what it is computed from: `original`, or `original0`, `original1`, …"""

    def __init__(self, modules: Sequence[Module], original: Tensor, unsafe: bool = False) -> None:
        super().__init__(modules)
        if not len(self):
            raise UsageError("ParametrizationList takes one or more modules")
        self.unsafe = unsafe
        old = original.detach()
        with no_grad():
            new: Any = original
            for each in reversed(list(self)):
                if hasattr(each, "right_inverse"):
                    try:
                        new = each.right_inverse(new)
                    except NotImplementedError:
                        pass
        parts = _tensors(new)
        self.is_tensor, self.ntensors = isinstance(new, Tensor), len(parts)
        if self.is_tensor:
            _check_kept("the result of right_inverse", old, new, ("dtype", "device"))
            if new is not original:
                original.data = new.detach()
            _register(self, "original", original)
        else:
            for i, part in enumerate(parts):
                is_trained, wants = isinstance(original, Parameter), original.requires_grad
                own = Parameter(part.detach(), wants) if is_trained else part.detach().requires_grad_(wants)
                _register(self, f"original{i}", own)
        if not unsafe:
            _check_kept("the parametrized tensor", old, self())

    def originals(self) -> list[Tensor]:
        """Return the tensors from which the parametrized one is computed."""
        return [self.original] if self.is_tensor else [getattr(self, f"original{i}") for i in range(self.ntensors)]

    @no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Set the originals so that the parametrized tensor is `value`."""
        new: Any = value
        for each in reversed(list(self)):
            if not hasattr(each, "right_inverse"):
                raise UsageError(f"{type(each).__name__} does not define right_inverse, so its tensor cannot be set")
            new = each.right_inverse(new)
        parts = _tensors(new)
        if len(parts) != self.ntensors:
            raise UsageError(f"right_inverse returns {len(parts)} tensors, and there are {self.ntensors} originals")
        for original, part in zip(self.originals(), parts, strict=True):
            _check_kept("the result of right_inverse", original, part, ("dtype", "device"))
            original.data = part.detach()

    def forward(self) -> Tensor:
        first, *others = self
        result = first(*self.originals())
        for each in others:
            result = each(result)
        return result  # type: ignore[no-any-return]


def register_parametrization(
    module: Module, tensor_name: str, parametrization: Module, *, unsafe: bool = False
) -> Module:
    """Let `parametrization` compute a parameter or buffer of `module`, after those registered before.

    The tensor becomes `module.parametrizations.<name>.original`, which is trained. `parametrization.right_inverse` sets
    it, also when the tensor is assigned later; if it returns a sequence, `forward` takes these tensors, `original0` and
    so on. `unsafe` allows another shape and dtype, and skips the checks.

    Raises:
        UsageError: if the module has no such tensor, or the parametrized one has another dtype or shape.
    """
    parametrization.train(module.training)
    if is_parametrized(module, tensor_name):
        chain = module.parametrizations[tensor_name]
        if not unsafe:
            before = getattr(module, tensor_name)
            after = parametrization(before)
            _check_kept("the parametrized tensor", before, after)
            if hasattr(parametrization, "right_inverse"):
                try:
                    _check_kept("the result of right_inverse", before, parametrization.right_inverse(after))
                except NotImplementedError:
                    pass
        chain.append(parametrization)
        chain.unsafe |= unsafe
        return module
    if tensor_name not in {*module._parameters, *module._buffers}:
        raise UsageError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    chain = ParametrizationList([parametrization], getattr(module, tensor_name), unsafe)
    delattr(module, tensor_name)
    if not is_parametrized(module):
        module.__class__ = _parametrized(type(module))
        module.parametrizations = ModuleDict()
    module.parametrizations[tensor_name] = chain
    return module


def is_parametrized(module: Module, tensor_name: str | None = None) -> bool:
    """Whether the tensor of this name is parametrized; without a name, whether any is."""
    table = module.__dict__.get("_modules", {}).get("parametrizations")
    return isinstance(table, ModuleDict) and (len(table) > 0 if tensor_name is None else tensor_name in table)


def remove_parametrizations(module: Module, tensor_name: str, leave_parametrized: bool = True) -> Module:
    """Make a parametrized tensor an ordinary one, with its value or, without `leave_parametrized`, its original.

    Raises UsageError if the tensor is not parametrized, or if its several originals should stay.
    """
    if not is_parametrized(module, tensor_name):
        raise UsageError(f"{type(module).__name__} has no parametrization of {tensor_name!r}")
    chain = module.parametrizations[tensor_name]
    if chain.is_tensor:
        kept = chain.original
        if leave_parametrized:
            with no_grad():
                kept.data = getattr(module, tensor_name).detach()
    elif leave_parametrized:
        value = getattr(module, tensor_name)
        kept = Parameter(value.detach()) if value.requires_grad else value
    else:
        raise UsageError(f"{tensor_name} has {chain.ntensors} originals", next="pass leave_parametrized=True")
    del module.parametrizations[tensor_name]
    if not is_parametrized(module):
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
    _register(module, tensor_name, kept)
    return module


def type_before_parametrizations(module: Module) -> type:
    """Return the class that the module had before its first parametrization."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def transfer_parametrizations_and_params(
    from_module: Module, to_module: Module, tensor_name: str | None = None
) -> Module:
    """Give `to_module` the parametrizations of `from_module`, of one tensor or of all; the originals are shared."""
    own = from_module.parametrizations if is_parametrized(from_module) else ModuleDict()
    for name in list(own) if tensor_name is None or not len(own) else [tensor_name]:
        if not hasattr(to_module, name):
            setattr(to_module, name, Parameter(getattr(from_module, name).detach()))
        for each in own[name]:
            register_parametrization(to_module, name, each)
        for key, original in own[name].named_parameters(recurse=False):
            setattr(to_module.parametrizations[name], key, original)
    return to_module


check_calls(globals(), __all__)

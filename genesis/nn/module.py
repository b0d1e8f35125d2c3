"""Module, a tree of parameters, buffers and submodules with torch's names and rules, and containers of modules."""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Self

from genesis.autograd.graph import HookHandle
from genesis.errors import DTypeError, IndexRangeError, UsageError
from genesis.functions.create import empty_like
from genesis.keywords import refuse_unknown
from genesis.nn.hooks import BackwardWatch, Hook, call_watches, changes, hook_in, hooks_of
from genesis.nn.parameter import Buffer, Parameter, cuda_device, move, replace_array, targets
from genesis.nn.state import LoadResult, extras, hooked, load, members, no_extra_state, refuse_extra_state
from genesis.tensor import Tensor


class Module:
    """Base class of all layers and models. Subclasses assign their parts in `__init__` and compute in `forward`.

    Attributes:
        training: whether the module is in training mode, which layers such as dropout read; see `train` and `eval`.
    """

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _transient: set[str]  # names of buffers that state_dict leaves out
    _pre_hooks: dict[int, Hook]
    _forward_hooks: dict[int, Hook]
    _backward_hooks: dict[int, Hook]
    _state_hooks: dict[int, Hook]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises KeywordError for a keyword that `__init__` does not take."""
        if kwargs:
            refuse_unknown(cls.__name__, cls.__init__, kwargs)
        return super().__new__(cls)

    def __init__(self) -> None:
        own: dict[str, Any] = {
            "training": True,
            "_parameters": {},
            "_buffers": {},
            "_modules": {},
            "_transient": set(),
            "_pre_hooks": {},
            "_forward_hooks": {},
            "_backward_hooks": {},
            "_state_hooks": {},
        }
        self.__dict__.update(own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of a call of the module."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def compile(self, **options: Any) -> None:
        """Compile `forward` in place, with the options of `genesis.compile`. Hooks run around the compiled forward."""
        changes.count += 1
        compiler = importlib.import_module("genesis.compiler")  # in a higher layer
        self.__dict__["forward"] = compiler.compile(self.forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (call_watches or self._pre_hooks or self._forward_hooks or self._backward_hooks):
            return self.forward(*args, **kwargs)
        with ExitStack() as stack:
            for watch in tuple(call_watches):
                stack.enter_context(watch(self))
            return self._hooked(*args, **kwargs)

    def _hooked(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward with its hooks. After an error, the forward hooks with `always_call` still run."""
        waiting = list(hooks_of("forward", self._forward_hooks))
        result = None
        try:
            for hook in hooks_of("pre", self._pre_hooks):
                changed = hook.call(self, args, kwargs) if hook.kwargs else hook.call(self, args)
                if changed is not None and hook.kwargs:
                    if not (isinstance(changed, tuple) and len(changed) == 2):
                        raise UsageError("a forward pre-hook with keywords returns None or (args, kwargs)")
                    args, kwargs = changed
                elif changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
            backward = hooks_of("backward", self._backward_hooks)
            watch = BackwardWatch(self, backward) if backward else None
            result = self.forward(*(watch.inputs(args) if watch else args), **kwargs)
            while waiting:
                result = self._after_forward(waiting.pop(0), args, kwargs, result)
        except Exception:
            for hook in (h for h in waiting if h.always):
                with suppress(Exception):  # the first error is raised
                    result = self._after_forward(hook, args, kwargs, result)
            raise
        return watch.outputs(result) if watch else result

    def _after_forward(self, hook: Hook, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        changed = hook.call(self, args, kwargs, result) if hook.kwargs else hook.call(self, args, result)
        return result if changed is None else changed

    # --- Parts, as attributes -----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        changes.count += 1
        tables = [self.__dict__.get(table) for table in ("_parameters", "_modules", "_buffers")]
        # Before Module.__init__ the tables do not exist.
        if tables[0] is None:
            if isinstance(value, (Parameter, Module)):
                raise UsageError(f"{type(self).__name__}.{name} is set too early", next="call super().__init__() first")
            object.__setattr__(self, name, value)
            return
        # Register a part in the table of its kind. A plain tensor is a buffer only under a registered name.
        kinds: tuple[type, ...] = (Parameter, Module, Tensor)
        for table, kind in zip(tables, kinds, strict=True):
            assert table is not None
            if isinstance(value, kind) and (kind is not Tensor or name in table or isinstance(value, Buffer)):
                if isinstance(value, Buffer):
                    (self._transient.discard if value.persistent else self._transient.add)(name)
                self._forget(name, keep=table)
                table[name] = value
                return
            if name in table:
                if value is not None:
                    raise DTypeError(
                        f"{name} is a {kind.__name__} of {type(self).__name__}, not {type(value).__name__}"
                    )
                table[name] = None
                return
        object.__setattr__(self, name, value)

    def _forget(self, name: str, keep: Mapping[str, Any] | None = None) -> None:
        """Remove a name from all tables except `keep`, where it keeps its position."""
        changes.count += 1
        self.__dict__.pop(name, None)
        for table in (self._parameters, self._modules, self._buffers):
            if table is not keep:
                table.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        for table in ("_parameters", "_buffers", "_modules"):
            members = self.__dict__.get(table)
            if members is not None and name in members:
                return members[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if name not in self._parameters and name not in self._buffers and name not in self._modules:
            object.__delattr__(self, name)
        self._forget(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter, or reserve the name with None."""
        self._check_name(name, self._parameters)
        if param is not None and not isinstance(param, Parameter):
            raise DTypeError(f"{name} is a {type(param).__name__}, not a Parameter", next="wrap it in Parameter()")
        self._parameters[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that moves with the module and is not trained. `state_dict` contains it if `persistent`."""
        self._check_name(name, self._buffers)
        if tensor is not None and not isinstance(tensor, Tensor):
            raise DTypeError(f"buffer {name} is a {type(tensor).__name__}, not a Tensor")
        self._buffers[name] = tensor
        if persistent:
            self._transient.discard(name)
        else:
            self._transient.add(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a submodule."""
        self._check_name(name, self._modules)
        if module is not None and not isinstance(module, Module):
            raise DTypeError(f"{name} is a {type(module).__name__}, not a Module")
        self._modules[name] = module

    register_module = add_module

    def _check_name(self, name: str, table: Mapping[str, Any]) -> None:
        changes.count += 1
        if "_parameters" not in self.__dict__:
            raise UsageError(f"{type(self).__name__}.{name} is set too early", next="call super().__init__() first")
        if not name or "." in name:
            raise PartNameError(f"{name!r} cannot name a part of a module: it is empty or contains a dot")
        if name not in table and hasattr(self, name):
            raise PartNameError(f"{type(self).__name__} already has an attribute {name!r}")

    # --- Traversing the tree ------------------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Yield this module as `prefix` and all modules below it, parents first, each once."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def modules(self, remove_duplicate: bool = True) -> Iterator[Module]:
        """This module and all below it; `remove_duplicate` as in `named_modules`."""
        return (module for _, module in self.named_modules(remove_duplicate=remove_duplicate))

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct submodules."""
        return ((name, m) for name, m in self._modules.items() if m is not None)

    def children(self) -> Iterator[Module]:
        """The direct submodules, without names."""
        return (module for _, module in self.named_children())

    def _named_members(self, table: str, prefix: str, recurse: bool, once: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        owners = self.named_modules(prefix=prefix, remove_duplicate=once) if recurse else iter([(prefix, self)])
        for path, module in owners:
            for name, member in getattr(module, table).items():
                if member is None or (once and id(member) in seen):
                    continue
                seen.add(id(member))
                yield f"{path}.{name}" if path else name, member

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """All parameters with their dotted names. A tied parameter comes once, under its first name."""
        return self._named_members("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """All parameters, each once."""
        return (p for _, p in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All buffers with their dotted names, each once."""
        return self._named_members("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All buffers, each once."""
        return (b for _, b in self.named_buffers(recurse=recurse))

    def get_submodule(self, target: str) -> Module:
        """The module at a dotted path. The path "" names this module."""
        module: Any = self
        for part in filter(None, target.split(".")):
            module = module._modules.get(part)
            if module is None:
                raise MissingMemberError(f"{type(self).__name__} has no submodule {target!r}")
        return module  # type: ignore[no-any-return]

    def set_submodule(self, target: str, module: Module, strict: bool = False) -> None:
        """Put a module at a dotted path, whose parent exists; with `strict` it replaces an existing one."""
        path, _, name = target.rpartition(".")
        if not name or not isinstance(module, Module):
            raise UsageError(
                f"set_submodule({target!r}) got a {type(module).__name__}", next="pass a path and a module"
            )
        parent = self.get_submodule(path)
        if (strict or hasattr(parent, name)) and not isinstance(getattr(parent, name, None), Module):
            raise MissingMemberError(f"{type(self).__name__} has no submodule {target!r} to replace")
        setattr(parent, name, module)

    def get_parameter(self, target: str) -> Parameter:
        """The parameter at a dotted path."""
        path, _, name = target.rpartition(".")
        parameter = self.get_submodule(path)._parameters.get(name)
        if parameter is None:
            raise MissingMemberError(f"{type(self).__name__} has no parameter {target!r}")
        return parameter

    def get_buffer(self, target: str) -> Tensor:
        """The buffer at a dotted path."""
        path, _, name = target.rpartition(".")
        buffer = self.get_submodule(path)._buffers.get(name)
        if buffer is None:
            raise MissingMemberError(f"{type(self).__name__} has no buffer {target!r}")
        return buffer

    # --- State --------------------------------------------------------------------------------------------------------

    def state_dict(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by dotted name, sharing memory. Tied ones have all their names."""
        for before, module, hook in hooked(self, "saves", prefix):
            hook(module, before, keep_vars)
        state = {name: tensor if keep_vars else tensor.detach() for name, tensor in members(self, prefix)}
        state.update({name: module.get_extra_state() for name, module in extras(self, prefix).items()})
        for before, module, hook in hooked(self, "saved", prefix):
            hook(module, state, before, {})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadResult:
        """Copy values into parameters and persistent buffers. After an error, none has changed.

        A tied parameter may have any of its names, or several with equal values.

        Args:
            state_dict: tensors or numpy arrays by dotted name.
            strict: whether missing and unexpected names are errors; wrong shapes always are.
            assign: make new parameters of the tensors themselves, with their dtype and device. Ties remain.

        Raises:
            ModelError: if the state does not fit; it lists up to ten names of each kind and their number.
        """
        return load(self, state_dict, strict, assign)

    get_extra_state, set_extra_state = no_extra_state, refuse_extra_state

    # --- Changing the whole tree --------------------------------------------------------------------------------------

    def apply(self, fn: Callable[[Module], Any]) -> Self:
        """Call `fn` on every module, children first."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set every module to training mode, or to evaluation mode with False."""
        if mode not in (True, False):
            raise UsageError(f"train() got the mode {mode!r}", next="pass True or False")
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Set every module to evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze every parameter."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to 0."""
        clear_gradients(self.parameters(), set_to_none)

    def to(self, *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> Self:
        """Move parameters and buffers to a device, cast floating-point ones to a float type, or both, in place.

        Call it as `to(device)`, `to(dtype)`, `to(device, dtype)`, or `to(tensor)` for the device and dtype of a tensor.
        Tensors keep their identity, so tied ones stay tied, and gradients move along. Call it before building an
        optimizer, whose flat buffers do not move.

        Args:
            non_blocking: do not wait for copies from pinned memory to a device.

        Raises:
            DeviceError: if this machine does not have the device.
            DTypeError: for a value that is neither a device nor a float type.
            UsageError: for two devices or two dtypes.
        """
        place, kind = targets(args, device, dtype)
        move((*self.parameters(), *self.buffers()), place, kind, non_blocking)
        return self

    def cuda(self, device: Any = None) -> Self:
        """Move to a CUDA device: an index, "cuda:1", a `Device`, or None for the current one."""
        return self.to(device=cuda_device(device))

    def cpu(self) -> Self:
        """Move to the CPU."""
        return self.to(device="cpu")

    def float(self) -> Self:
        """Cast to float32."""
        return self.to(dtype="float32")

    def double(self) -> Self:
        """Cast to float64."""
        return self.to(dtype="float64")

    def half(self) -> Self:
        """Cast to float16."""
        return self.to(dtype="float16")

    def bfloat16(self) -> Self:
        """Cast to bfloat16."""
        return self.to(dtype="bfloat16")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Replace the memory of parameters, buffers and gradients with the memory of `fn(tensor)`."""
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            grad = tensor.grad
            replace_array(tensor, fn(tensor.detach()).array)
            if grad is not None:
                tensor.grad = fn(grad.detach())
        return self

    def type(self, dst_type: Any) -> Self:
        """Cast all parameters and buffers, also integer ones."""
        return self._apply(lambda t: t.type(dst_type))

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Move to a device without copying values."""
        return self._apply(lambda t: empty_like(t, device=t.device if device is None else device), recurse)

    def share_memory(self) -> Self:
        """Call `Tensor.share_memory_` on parameters and buffers, which raises on the CPU."""
        return self._apply(lambda t: t.share_memory_())

    # --- Hooks --------------------------------------------------------------------------------------------------------

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """Call `hook(module, args)` before forward. A result other than None replaces the positional arguments.

        Args:
            prepend: run before the hooks that are registered.
            with_kwargs: call `hook(module, args, kwargs)`; it returns None or `(args, kwargs)`.
        """
        return hook_in(self._pre_hooks, Hook(hook, with_kwargs), prepend)

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> HookHandle:
        """Call `hook(module, args, result)` after forward. A result of the hook other than None replaces `result`.

        Args:
            prepend: run before the hooks that are registered.
            with_kwargs: call `hook(module, args, kwargs, result)`.
            always_call: run also if forward raises an error.
        """
        return hook_in(self._forward_hooks, Hook(hook, with_kwargs, always_call), prepend)

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_input, grad_output)` in backward. A result other than None replaces `grad_input`.

        `grad_input` has an entry per positional argument and `grad_output` one per result, None without a gradient.
        """
        return hook_in(self._backward_hooks, Hook(hook), prepend)

    def register_full_backward_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_output)` before backward. A result other than None replaces `grad_output`."""
        return hook_in(self._backward_hooks, Hook(hook, before=True), prepend)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(module, prefix, keep_vars)` before `state_dict`."""
        return hook_in(self._state_hooks, Hook(hook, kind="saves"))

    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(module, state_dict, prefix, {})` after `state_dict`, children first; it may change the dict."""
        return hook_in(self._state_hooks, Hook(hook, kind="saved"))

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(module, state_dict, prefix, {}, strict, missing, unexpected, errors)` before a state is loaded.

        It may change the dict, a copy, and add names or messages to the lists. Messages are raised.
        """
        return hook_in(self._state_hooks, Hook(hook, kind="loads"))

    def _register_load_state_dict_pre_hook(self, hook: Callable[..., Any], with_module: bool = False) -> HookHandle:
        return self.register_load_state_dict_pre_hook(hook if with_module else lambda _, *args: hook(*args))

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call `hook(module, result)` after loading. It may empty the lists of missing and unexpected names."""
        return hook_in(self._state_hooks, Hook(hook, kind="loaded"))

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        """The module's settings, as `repr` shows them."""
        return ""

    def _parts_repr(self) -> list[str]:
        """Return a text for each submodule, as `repr` shows them."""
        return [f"({name}): {module!r}" for name, module in self._modules.items()]

    def __repr__(self) -> str:
        lines = self._parts_repr()
        extra = self.extra_repr()
        if not lines and "\n" not in extra:
            return f"{type(self).__name__}({extra})"
        inside = "\n".join([extra, *lines] if extra else lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {inside}\n)"


def changed_settings(module: Module, **defaults: Any) -> str:
    """Return ", name=value" for each attribute that differs from its default, for `extra_repr`."""
    found = {name: getattr(module, name) for name in defaults}
    return "".join(f", {name}={value!r}" for name, value in found.items() if value != defaults[name])


def clear_gradients(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """Drop the gradients of `parameters`, or set them to 0."""
    for parameter in parameters:
        if parameter.grad is not None:
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()


# --- Containers -------------------------------------------------------------------------------------------------------


class MissingMemberError(UsageError, AttributeError):
    """A module has no member of this name and kind."""


class PartNameError(UsageError, KeyError):
    """A name that no part of a module can have."""


class MissingNameError(IndexRangeError, KeyError):
    """A position whose module has a name instead of a number."""


class _Numbered(Module):
    """Submodules named "0", "1", …"""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        self.extend(() if modules is None else modules)

    def _name(self, index: int) -> str:
        index, count = operator.index(index), len(self._modules)
        if not -count <= index < count:
            raise IndexRangeError(f"module {index} does not exist: the container has {count}")
        return str(index % count)

    def pop(self, key: int | slice) -> Any:
        """Remove a module and return it."""
        module = self[key]
        del self[key]
        return module

    def __add__(self, other: Iterable[Module]) -> Any:
        made = type(self)()
        made.extend(self)
        return made.extend(other)

    def __iadd__(self, other: Iterable[Module]) -> Any:
        return self.extend(other)

    def append(self, module: Module) -> Any:
        """Add a module at the end."""
        self.add_module(str(len(self._modules)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> Any:
        """Add several modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> Any:
        """Add a module before `index`. Raises IndexRangeError, also a KeyError if those from `index` on have names."""
        order, size = list(self._modules.values()), len(self._modules)
        start = index + size if index < 0 else index
        if not 0 <= start <= size:
            raise IndexRangeError(f"insert at {index}: there are {size} modules")
        if any(str(i) not in self._modules for i in range(start, size)):
            raise MissingNameError(f"insert at {index}: the modules are named {', '.join(self._modules)}")
        self.append(module)  # checks it and adds the new last name
        self._modules.update({str(i): m for i, m in enumerate((module, *order[start:]), start)})
        return self

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            chosen = list(self._modules.values())[index]
            return type(self)(*chosen) if isinstance(self, Sequential) else type(self)(chosen)  # type: ignore[arg-type]
        return self._modules[self._name(index)]

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, self._name(index), module)

    def __delitem__(self, index: int | slice) -> None:
        order: list[Module | None] = list(self._modules.values())
        del order[index]
        self._modules.clear()
        self._modules.update({str(i): m for i, m in enumerate(order)})

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __contains__(self, module: object) -> bool:
        return any(m is module for m in self._modules.values())


class Sequential(_Numbered):
    """Calls its modules in order, each on the result of the one before. Takes modules, or one mapping by name."""

    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(modules)

    def _name(self, index: int) -> str:
        return list(self._modules)[int(super()._name(index))]

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """A list of modules that are registered as submodules."""

    def _parts_repr(self) -> list[str]:
        """Equal neighbours share a line."""
        lines, start = [], 0
        for shown, group in itertools.groupby(map(repr, self)):
            end = start + len(list(group))
            lines.append(f"({start}): {shown}" if end == start + 1 else f"({start}-{end - 1}): {end - start} x {shown}")
            start = end
        return lines


class ModuleDict(Module):
    """A dict of modules that are registered as submodules."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add or replace modules by name, from a mapping or from pairs."""
        for name, module in dict(modules).items():
            self[name] = module

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules:
            raise UsageError(f"no module is named {name!r}, only {', '.join(self._modules) or 'none'}")
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> Iterable[str]:
        """The names of the modules."""
        return self._modules.keys()

    def values(self) -> Iterable[Any]:
        """The modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """The names and modules."""
        return self._modules.items()

    def pop(self, name: str) -> Any:
        """Remove a module and return it."""
        module = self[name]
        del self[name]
        return module

    def clear(self) -> None:
        """Remove all modules."""
        self._modules.clear()

"""torch.func without transforms over batches: gradients of functions, and calls of a module with other parameters.

The arguments of the function are given a new place on the tape, so that nothing accumulates into `.grad`. The passes
are recorded only if the result depends on other tensors that require a gradient, for example of an outer `grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from genesis.array import Array
from genesis.autograd.engine import run_backward
from genesis.autograd.graph import BaseNode, Edge
from genesis.autograd.modes import enable_grad, is_grad_enabled
from genesis.autograd.record import AccumulateNode, TensorBase, as_tensor, taped
from genesis.errors import GradientError, UsageError
from genesis.op import BackwardStep, registry

__all__ = ["functional_call", "grad", "grad_and_value", "vjp"]

NEXT = "pass a function of tensors"


def _map(function: Callable[[TensorBase], Any], tree: Any) -> Any:
    """Apply `function` to the tensors in nested tuples, lists and dicts."""
    if isinstance(tree, TensorBase):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_map(function, value) for value in tree])
    return type(tree)([_map(function, value) for value in tree]) if isinstance(tree, (tuple, list)) else tree


def _leaves(tree: Any) -> list[TensorBase]:
    found: list[TensorBase] = []
    _map(found.append, tree)
    return found


class _InputNode(BaseNode):
    """An argument of a transformed function: the identity, with the history that the argument had outside."""

    __slots__ = ("level",)

    level: _Level

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        return grads


class _Level:
    """One transformed call: its arguments on the tape, and what their gradients depend on."""

    def __init__(self) -> None:
        self.edges: list[Edge] = []
        self.is_recorded = is_grad_enabled()
        self.is_live = True  # the function is running

    def place(self, x: TensorBase) -> Any:
        """Return a tensor over the same memory that this level differentiates with respect to."""
        if not x.array.dtype.is_floating_point:
            raise GradientError(f"a gradient is wanted for a {x.array.dtype} tensor", next="use a float type")
        edge = x.edge() if self.is_recorded else None
        node = _InputNode("input", (edge,), (x.array.spec,))
        node.level = self
        self.edges.append(Edge(node, 0))
        return TensorBase.wrap(x.array, node)

    def reaches_others(self, tensors: Sequence[TensorBase]) -> bool:
        """Whether a tensor depends on something that requires a gradient outside this level."""
        seen: set[BaseNode] = set()
        stack = [edge.node for t in tensors if (edge := t.edge()) is not None]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, _InputNode):
                is_outer = node.level is not self and node.level.is_live
            else:
                is_outer = isinstance(node, AccumulateNode)
            if is_outer:
                return True
            stack.extend(edge.node for edge in node.edges if edge is not None)
        return False

    def outside(self, tree: Any) -> Any:
        """Return results without this level's history, where they have no other."""
        return _map(lambda t: t if self.is_recorded and self.reaches_others([t]) else TensorBase.wrap(t.array), tree)

    def gradients(self, outputs: Sequence[TensorBase], seeds: Sequence[TensorBase], keeps: bool = False) -> list[Any]:
        """Return the gradients of all placed arguments, zeros for those that are not used."""
        create = self.is_recorded and self.reaches_others([*outputs, *seeds])
        roots = []
        for out, seed in zip(outputs, seeds, strict=True):
            if (edge := out.edge()) is None:
                continue
            a, dtype = seed.array, out.array.dtype
            a = a if a.dtype is dtype else registry["cast"](a, dtype=dtype)
            source = seed.edge() if create else None
            roots.append((edge, a if source is None else taped(a, source, None)))
        found: list[Array | None] = [None] * len(self.edges)
        if roots:
            found = run_backward(roots, retain_graph=keeps or create, capture=self.edges, create_graph=create)
        device, grads = outputs[0].array.device, []
        for grad, edge in zip(found, self.edges, strict=True):
            spec = edge.node.specs[0]
            assert spec is not None
            zeros: dict[str, Any] = {"value": 0, "shape": spec.shape, "dtype": spec.dtype, "device": device}
            grads.append(as_tensor(registry["fill"](**zeros) if grad is None else grad))
        return [self.outside(g) for g in grads]


def _ones(like: TensorBase) -> Any:
    a = like.array
    return as_tensor(registry["fill"](value=1, shape=a.shape, dtype=a.dtype, device=a.device))


def grad_and_value(
    func: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes `(gradients, value)` of `func`, which returns one number as a tensor.

    Args:
        argnums: numbers of the arguments to differentiate: tensors, or nested tuples, lists and dicts of tensors. A
            tuple gives a tuple of gradients.
        has_aux: `func` returns `(value, aux)`; the result is then `(gradients, (value, aux))`.

    Example:
        >>> square = genesis.func.grad_and_value(lambda x: (x * x).sum())
        >>> square(genesis.tensor([1.0, 2.0]))
        (tensor([2., 4.]), tensor(5.))
    """

    @functools.wraps(func)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        for number in numbers:
            if not -len(args) <= number < len(args):
                raise UsageError(f"argnums names argument {number}, and there are {len(args)}", next="count from 0")
        level = _Level()
        given = list(args)
        with enable_grad():
            for number in numbers:
                given[number] = _map(level.place, args[number])
            result = func(*given, **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise UsageError("a function with has_aux=True returns (value, aux)")
            value, aux = result if has_aux else (result, None)
            if not isinstance(value, TensorBase):
                raise UsageError(f"the function returned a {type(value).__name__}, not a tensor", next=NEXT)
            if value.array.shape != ():
                what = f"the function returned a tensor of shape {value.array.shape}, not one number"
                raise UsageError(what, next="reduce it with .sum() or .mean()")
            found = iter(level.gradients([value], [_ones(value)]))
        grads = tuple(_map(lambda _: next(found), args[number]) for number in numbers)
        level.is_live, value = False, level.outside(value)
        return grads if isinstance(argnums, tuple) else grads[0], (value, level.outside(aux)) if has_aux else value

    return transformed


def grad(func: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradients of `func`, which returns one number as a tensor.

    With `has_aux`, `func` returns `(value, aux)`, and the result is `(gradients, aux)`. See `grad_and_value`.

    Example:
        >>> slope = genesis.func.grad(genesis.func.grad(lambda x: x**3))
        >>> slope(genesis.tensor(2.0))
        tensor(12.)
    """
    both = grad_and_value(func, argnums, has_aux)

    @functools.wraps(func)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return transformed


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Return `func(*primals)` and a function from gradients of the result to a tuple of gradients of `primals`.

    With `has_aux`, `func` returns `(value, aux)`, and the third result is `aux`.

    Example:
        >>> y, pull = genesis.func.vjp(genesis.sin, genesis.tensor(0.0))
        >>> pull(genesis.tensor(2.0))
        (tensor(2.),)
    """
    level = _Level()
    with enable_grad():
        result = func(*[_map(level.place, p) for p in primals])
    value, aux = result if has_aux else (result, None)
    outputs = _leaves(value)
    if not outputs:
        raise UsageError(f"the function returned a {type(value).__name__} without tensors", next=NEXT)
    level.is_live = False

    def pull(*cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> tuple[Any, ...]:
        seeds = _leaves(cotangents)
        if [s.array.shape for s in seeds] != [o.array.shape for o in outputs]:
            raise UsageError("the gradients do not have the structure and shapes of the result")
        with enable_grad():
            found = iter(level.gradients(outputs, seeds, keeps=retain_graph))
        return tuple(_map(lambda _: next(found), p) for p in primals)

    return (level.outside(value), pull, level.outside(aux)) if has_aux else (level.outside(value), pull)


def functional_call(
    module: Any,
    parameter_and_buffer_dicts: Mapping[str, TensorBase] | Sequence[Mapping[str, TensorBase]],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call `module` with other tensors in the place of its parameters and buffers, which stay as they are.

    Args:
        parameter_and_buffer_dicts: tensors by name, as in `state_dict`; or several such dicts without common names.
        args: the positional arguments, or the only one if it is not a tuple.
        tie_weights: a tensor given for one name of a shared parameter also takes the place of its other names.
        strict: require exactly the names of the module.

    Raises:
        UsageError: if a name is given twice or, with `strict`, missing or unknown.
    """
    given: dict[str, Any] = {}
    several = isinstance(parameter_and_buffer_dicts, Mapping)
    for each in [parameter_and_buffer_dicts] if several else parameter_and_buffer_dicts:
        twice = sorted(given.keys() & each.keys())  # type: ignore[union-attr]
        if twice:
            raise UsageError(f"{twice[0]} is given twice", next="name each tensor in one dict")
        given.update(each)  # type: ignore[arg-type]
    positional = () if args is None else args if isinstance(args, tuple) else (args,)
    with _replaced(module, given, tie_weights, strict):
        return module(*positional, **(kwargs or {}))


@contextmanager
def _replaced(module: Any, given: Mapping[str, Any], tie_weights: bool, strict: bool) -> Iterator[None]:
    places = {}  # name -> table and key
    for prefix, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            places.update({f"{prefix}.{key}" if prefix else key: (table, key) for key in table})
    present = {name for name, (table, key) in places.items() if table[key] is not None}
    unknown, missing = sorted(given.keys() - places.keys()), sorted(present - given.keys())
    if strict and (unknown or missing):
        raise UsageError(f"functional_call(strict=True): unknown names {unknown[:5]}, missing names {missing[:5]}")
    new = {name: value for name, value in given.items() if name in places}
    if tie_weights:
        shared = {id(places[name][0][places[name][1]]): value for name, value in new.items()}
        for name in present - given.keys():
            table, key = places[name]
            if id(table[key]) in shared:
                new[name] = shared[id(table[key])]
    saved = [(*places[name], places[name][0][places[name][1]]) for name in new]
    try:
        for name, value in new.items():
            table, key = places[name]
            table[key] = value
        yield
    finally:
        for table, key, value in saved:
            table[key] = value

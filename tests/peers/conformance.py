"""Torch's own test databases, run through Genesis by name: `make conformance`.

    .venv-peers/bin/python -m tests.peers.conformance [--only add,nn.Linear] [--jobs 2] [--write]

Takes the sample inputs of torch's operators (op_db), modules (module_db) and optimizers (optim_db) on the CPU, calls
the function, method, module or optimizer of the same name in Genesis, and compares with torch. `--write` writes
docs/conformance.tsv: a row for each entry, or for each kind of call if they differ.

Status: ok; absent (no such name, see ABSENT); raw (an exception that is not a GenesisError); refused (a GenesisError
where torch works); wrong (values, type, shape, memory, class of an error); differs (documented, see DIFFERENT);
excluded (a family that Genesis leaves out).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import multiprocessing
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import genesis
from genesis.errors import GenesisError
from tests.peers.known import ABSENT, DIFFERENT, EXCLUDED, RANDOM
from tests.peers.values import TOLERANCES, Absent, Copies, Skipped, difference, flat, named, numbers, ours_of, rebound

TABLE = Path(__file__).parents[2] / "docs" / "conformance.tsv"
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
SAMPLES = 60  # of one entry and type, taken evenly from torch's
SECONDS = 120  # of CPU time for one entry
ORDER = ("ok", "differs", "excluded", "absent", "refused", "wrong", "raw")  # the worst of several statuses is the last


class Row(NamedTuple):
    """The outcome of one kind of call of one entry."""

    entry: str
    kind: str
    status: str
    reason: str


class Tally:
    """Outcomes of the calls of one entry, by kind."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.calls: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.first: dict[tuple[str, str], str] = {}

    def add(self, kind: str, status: str, reason: str = "") -> None:
        if status in ("wrong", "refused"):
            found = (self.entry, kind, reason)
            names = [name for name, patterns in DIFFERENT.items() if all(map(re.search, patterns, found))]
            status, reason = ("differs", f"{names[0]}: {reason}") if names else (status, reason)
        elif status == "absent":
            reason = next((why for pattern, why in ABSENT.items() if re.search(pattern, self.entry)), reason)
        self.calls[kind][status] += 1
        self.first.setdefault((kind, status), reason)

    def rows(self) -> list[Row]:
        """Return a row for each kind, or one row if all are alike."""
        rows = []
        for kind, counts in self.calls.items():
            worst = max(counts, key=ORDER.index)
            share = f"{counts[worst]} of {counts.total()}: " if counts.total() > 1 and worst != "ok" else ""
            rows.append(Row(self.entry, kind, worst, share + self.first[kind, worst]))
        if rows and all(row.status == "ok" for row in rows):
            return [Row(self.entry, "all", "ok", "")]
        if not rows:
            return [Row(self.entry, "all", "excluded", "torch has no sample that applies")]
        return rows


# --- One call ---------------------------------------------------------------------------------------------------------


def theirs_of(call: Callable[[], Any]) -> Any:
    """Return torch's result. Raises Skipped if torch raises."""
    try:
        return call()
    except Exception as error:
        raise Skipped(str(error)) from error


def judged(tally: Tally, kind: str, label: str, compare: Callable[[], str]) -> bool:
    """Enter the outcome of a comparison, which returns a difference or raises; return whether it is ok."""
    try:
        reason = compare()
    except Skipped:
        return False
    except Absent as absent:
        tally.add(kind, "absent", str(absent))
    except GenesisError as error:
        tally.add(kind, "refused", f"{label}: {shown(error)}")
    except AttributeError as error:
        is_name = re.search(r"module '?genesis|'(Tensor|Parameter)'( object)? has no", str(error))
        tally.add(kind, "absent" if is_name else "raw", f"{label}: {shown(error)}")
    except Exception as error:
        tally.add(kind, "raw", f"{label}: {shown(error)}")
    else:
        tally.add(kind, "wrong" if reason else "ok", f"{label}: {reason}")
        return not reason
    return False


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")[:160]


class Call(NamedTuple):
    """A function in both libraries, the arguments of a sample, and how to compare."""

    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    sample: Any
    values: bool = True
    is_tied: str = ""  # name of a function whose indices torch does not define where elements are equal

    def arguments(self, ours: bool) -> tuple[Any, Any, Any, Copies]:
        copies = Copies(ours)
        first = copies.first = copies(self.sample.input)
        return first, copies(tuple(self.sample.args)), copies(dict(self.sample.kwargs)), copies

    def results(self) -> tuple[Any, Any, Copies, Copies]:
        """Return torch's and Genesis' results and the copies of the arguments."""
        first, args, keywords, their_copies = self.arguments(False)
        expected = theirs_of(lambda: self.theirs(first, *args, **keywords))
        first, args, keywords, our_copies = self.arguments(True)
        return expected, self.ours(first, *args, **keywords), their_copies, our_copies

    def compare(self) -> str:
        expected, found, copies, _ = self.results()
        if self.is_tied and not self.sample.kwargs.get("stable"):  # the order of equal elements is free
            expected, found = self._untied(expected, copies.first, found)
        reason = difference(expected, found, values=self.values)
        return reason if not reason or difference(expected, found, values=False) else self._beside_exact(reason)

    def _beside_exact(self, reason: str) -> str:
        """Return the difference, empty if no short float is further from torch's float64 than torch's furthest."""
        kinds = (torch.float32, torch.bfloat16)
        exact = self._replace(sample=self.sample.transform(lambda x: widened(x, kinds)))
        expected, found, *_ = self.results()
        first, args, keywords, _ = exact.arguments(False)
        for one, other, truth in zip(
            flat(expected), flat(found), flat(self.theirs(first, *args, **keywords)), strict=True
        ):
            if not isinstance(one, torch.Tensor) or one.dtype not in kinds:
                return reason
            values, near = numbers(truth), difference(one, other)
            theirs, ours = (np.abs(numbers(x).astype(np.float64) - values) for x in (one, other))
            furthest = theirs[np.isfinite(theirs)].max(initial=0)
            allowed = np.maximum(furthest, TOLERANCES[str(one.dtype)[6:]][0] * np.abs(values))
            if near and not ((ours <= allowed) | (numbers(one) == numbers(other))).all():
                return reason
        return ""

    def _untied(self, expected: Any, first: torch.Tensor, found: Any) -> tuple[Any, Any]:
        """Replace indices by the elements that they name."""
        dim = {**dict(zip(("k", "dim") if len(flat(expected)) == 2 and self.is_tied == "topk" else ("dim",),
                          self.sample.args, strict=False)), **self.sample.kwargs}.get("dim", -1)  # fmt: skip
        theirs, ours = flat(expected), flat(found)
        if len(theirs) != len(ours) or theirs[-1].shape != tuple(ours[-1].shape) or not first.dim():
            return expected, found
        indices = torch.from_numpy(np.array(numbers(ours[-1])))
        theirs[-1] = first.gather(dim, theirs[-1])
        ours[-1] = ours_of(first.gather(dim, indices))
        return theirs, ours

    def compare_views(self) -> str:
        """Compare which inputs a result shares memory with, and the strides of views."""
        expected, found, their_copies, our_copies = self.results()
        for one, other in zip(flat(expected), flat(found), strict=True):
            if not isinstance(one, torch.Tensor) or not one.numel():
                continue
            for key, theirs in their_copies.tensors.items():
                ours = our_copies.tensors[key]
                shares = one.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
                if shares != (memory(other) is memory(ours)):
                    return "copies where torch returns a view" if shares else "a view where torch copies"
                if (
                    shares
                    and not one.is_complex()
                    and (spaced(one), one.storage_offset()) != (spaced(other), other.storage_offset())
                ):
                    return f"view with strides {other.stride()}, torch has {one.stride()}"
        return ""

    def compare_in_place(self) -> str:
        first, args, keywords, _ = self.arguments(False)
        before = tuple(first.shape), first.dtype
        expected = theirs_of(lambda: self.theirs(first, *args, **keywords))
        first, args, keywords, _ = self.arguments(True)
        found = self.ours(first, *args, **keywords)
        if (tuple(expected.shape), expected.dtype) == before and found is not first:
            return "does not return its input"
        return difference(expected, found, values=self.values) or difference(expected, first, values=self.values)

    def compare_out(self, resized: bool) -> str:
        """Compare with `out=` of the result's shape and type, filled or empty."""
        first, args, keywords, _ = self.arguments(False)
        expected = theirs_of(lambda: self.theirs(first, *args, **keywords))
        if not all(isinstance(x, torch.Tensor) for x in flat(expected)):
            raise Skipped("no tensor")
        is_tuple = isinstance(expected, (tuple, list))
        their_outs = [torch.zeros([0] if resized else x.shape, dtype=x.dtype) for x in flat(expected)]
        their_out = tuple(their_outs) if is_tuple else their_outs[0]
        theirs_of(lambda: self.theirs(first, *args, **keywords, out=their_out))
        first, args, keywords, _ = self.arguments(True)
        outs = [ours_of(torch.zeros([0] if resized else x.shape, dtype=x.dtype)) for x in flat(expected)]
        found = self.ours(first, *args, **keywords, out=tuple(outs) if is_tuple else outs[0])
        if any(a is not b for a, b in zip(flat(found), outs, strict=True)):
            return "does not return out"
        return difference(expected, outs, values=self.values)

    def compare_gradients(self, second: bool) -> str:
        """Compare gradients of all inputs under fixed output gradients; `second` also those of the gradients."""
        process = self.sample.output_process_fn_grad or (lambda x: x)
        expected, found, their_copies, our_copies = self.results()
        if second and not self.values:
            raise Skipped("random")
        theirs = [real_of(x, torch) for x in flat(process(expected)) if isinstance(x, torch.Tensor)]
        ours = [real_of(x, genesis) for x in flat(rebound(process)(found)) if isinstance(x, genesis.Tensor)]
        leaves = their_copies.leaves
        if not leaves or not any(x.requires_grad for x in theirs):
            raise Skipped("no gradient")
        for one, other in zip(theirs, ours, strict=True):
            if one.requires_grad != other.requires_grad:
                return f"requires_grad is {other.requires_grad}, torch has {one.requires_grad}"
        theirs, ours = [x for x in theirs if x.requires_grad], [x for x in ours if x.requires_grad]
        towards = [fixed(x) for x in theirs]
        expected = theirs_of(
            lambda: torch.autograd.grad(theirs, leaves, towards, allow_unused=True, create_graph=second)
        )
        ours_towards = [ours_of(x) for x in towards]
        found = genesis.autograd.grad(ours, our_copies.leaves, ours_towards, allow_unused=True, create_graph=second)
        reason = difference(expected, found, values=self.values)
        if reason and not difference(zeroed(expected, leaves), zeroed(found, our_copies.leaves)):
            return "None and zeros"
        if reason or not second:
            return reason
        pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and a.requires_grad]
        if not pairs:
            raise Skipped("no second gradient")
        theirs, ours = [a for a, _ in pairs], [b for _, b in pairs]
        if any(not x.requires_grad for x in ours):
            return "a gradient is not recorded, torch records it"
        towards = [fixed(x) for x in theirs]
        expected = theirs_of(lambda: torch.autograd.grad(theirs, leaves, towards, allow_unused=True))
        found = genesis.autograd.grad(ours, our_copies.leaves, [ours_of(x) for x in towards], allow_unused=True)
        return difference(zeroed(expected, leaves), zeroed(found, our_copies.leaves), factor=10)


def widened(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return a tensor or a type of short floats as float64."""
    if isinstance(value, torch.Tensor):
        return value.detach().double() if value.dtype in kinds else value
    return torch.float64 if isinstance(value, torch.dtype) and value in kinds else value


def real_of(tensor: Any, library: Any) -> Any:
    return library.view_as_real(tensor) if tensor.is_complex() else tensor


def memory(tensor: Any) -> Any:
    """Return the storage of a tensor of Genesis."""
    return (tensor.pairs if tensor.is_complex() else tensor).array.storage


def spaced(tensor: Any) -> list[int]:
    """Return the strides of dimensions that have more than one element; Genesis normalizes the others."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def fixed(like: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output: the same numbers for every output of this shape."""
    values = np.random.default_rng(0).standard_normal(tuple(like.shape))
    return torch.from_numpy(np.asarray(values)).to(like.dtype)


def zeroed(gradients: Any, leaves: list[Any]) -> list[Any]:
    return [leaf.detach() * 0 if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]


# --- Operators --------------------------------------------------------------------------------------------------------


def ours_by_name(op: Any) -> Callable[..., Any]:
    """Return Genesis' function for an entry of op_db. Raises Absent."""
    is_lambda = isinstance(op.op, types.FunctionType) and "<lambda>" in op.op.__qualname__
    if is_lambda:
        return rebound(op.op)
    if (
        op.op.__name__.startswith("__")
        or getattr(torch.Tensor, op.name, None) is op.op
        or getattr(torch, op.name.split(".")[0], None) is None
    ):
        return method_named(op.name)
    return named(op.name)  # type: ignore[no-any-return]


def method_named(name: str) -> Callable[..., Any]:
    """Return a method of Tensor. Raises Absent."""
    try:
        return getattr(genesis.Tensor, name)  # type: ignore[no-any-return]
    except AttributeError:
        raise Absent(f"Tensor.{name}") from None


def samples_of(op: Any, dtype: torch.dtype, gradient: bool) -> list[Any]:
    """Return sample inputs, evenly chosen."""
    torch.manual_seed(0)
    np.random.seed(0)
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradient), 2000))
    except Exception:
        return []
    return samples[:: -(-len(samples) // _MOST[0]) or 1]


def is_random(op: Any, sample: Any) -> bool:
    """Whether the values of a sample's results are drawn."""
    is_dropped = sample.kwargs.get("dropout_p") or ("multi_head" in op.name and sample.args[9] and sample.args[9] > 0)
    return bool(RANDOM.match(op.name) or is_dropped)


def run_operator(op: Any, tally: Tally) -> None:
    """Run the samples of one operator: values of all types, gradients, views, variants and errors."""
    try:
        ours = ours_by_name(op)
    except Absent as absent:
        tally.add("all", "absent", str(absent))
        return
    for dtype in DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for i, sample in enumerate(samples_of(op, dtype, False)):
            tied = op.name if op.name in ("sort", "argsort", "topk") else ""
            values = not is_random(op, sample)
            call, label = Call(op.op, ours, sample, values, tied), f"{str(dtype)[6:]} #{i}"
            is_ok = judged(tally, "values", label, call.compare)
            if is_ok and dtype in (torch.float32, torch.int64):
                judged(tally, "views", label, call.compare_views)
                _run_variants(op, tally, call, label)
    if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu"):
        samples = samples_of(op, torch.float64, True)
        for i, sample in enumerate(samples):
            call = Call(op.op, ours, sample, not is_random(op, sample))
            is_ok = judged(tally, "gradient", f"#{i}", functools.partial(call.compare_gradients, False))
            if is_ok and op.supports_gradgrad and i % max(1, len(samples) // 8) == 0:
                judged(tally, "double backward", f"#{i}", functools.partial(call.compare_gradients, True))
    _run_errors(op, ours, tally)


def _run_variants(op: Any, tally: Tally, call: Call, label: str) -> None:
    """Run the method, in-place, out and operator forms and the aliases of one sample."""
    if op.supports_out:
        for resized in (False, True):
            judged(tally, "out", label, functools.partial(call.compare_out, resized))
    forms = [("method", op.method_variant), ("in-place", op.inplace_variant)]
    for alias in op.aliases:
        judged(tally, "alias", label, lambda alias=alias: call._replace(ours=named(alias.name)).compare())
        forms += [("method", alias.method_variant), ("in-place", alias.inplace_variant)]
    for kind, theirs in forms:
        if theirs is None or getattr(theirs, "__name__", "<lambda>") == "<lambda>":
            continue

        def compare(theirs: Any = theirs, kind: str = kind) -> str:
            form = call._replace(theirs=theirs, ours=method_named(theirs.__name__))
            return form.compare_in_place() if kind == "in-place" else form.compare()

        judged(tally, kind, label, compare)
    for operator in (op.operator_variant, op.inplace_operator_variant):
        if operator is not None and isinstance(call.sample.input, torch.Tensor):
            judged(tally, "operator", label, call._replace(theirs=operator, ours=operator).compare)


def _run_errors(op: Any, ours: Callable[..., Any], tally: Tally) -> None:
    """Run inputs that torch refuses: Genesis must raise a GenesisError of torch's class."""
    if op.error_inputs_func is None:
        return
    try:
        wrong = list(op.error_inputs("cpu"))
    except Exception:
        return
    for i, each in enumerate(wrong):

        def compare(each: Any = each) -> str:
            sample = each.sample_input
            if not isinstance(sample.input, (torch.Tensor, list, tuple)):
                raise Skipped("Genesis takes numbers where torch needs a tensor")
            first, args, keywords, _ = Call(op.op, ours, sample).arguments(False)
            try:
                op.op(first, *args, **keywords)
            except Exception as error:
                expected = type(error)
            else:
                raise Skipped("torch accepts it")
            first, args, keywords, _ = Call(op.op, ours, sample).arguments(True)
            return _refusal(expected, lambda: ours(first, *args, **keywords))

        judged(tally, "errors", f"#{i}", compare)


_CLASSES = (NotImplementedError, RuntimeError, ValueError, IndexError, TypeError)


def _refusal(expected: type[Exception], call: Callable[[], Any]) -> str:
    """Return how a refusal differs from torch's class; raises what is no GenesisError."""
    try:
        call()
    except GenesisError as error:
        wanted = next((kind for kind in _CLASSES if issubclass(expected, kind)), Exception)
        if wanted is NotImplementedError:
            wanted = RuntimeError
        return "" if isinstance(error, wanted) else f"{shown(error)} is no {wanted.__name__}"
    return f"accepted, torch raises {expected.__name__}"


# --- Modules and optimizers -------------------------------------------------------------------------------------------


def run_module(info: Any, tally: Tally) -> None:
    """Run one module: state names, forward, gradients of inputs and parameters, training and evaluation."""
    try:
        named(f"nn.{info.module_cls.__name__}")
    except Absent as absent:
        tally.add("all", "absent", str(absent))
        return
    for dtype, training in itertools.product((torch.float32, torch.float64), (True, False)):
        torch.manual_seed(0)
        try:
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=dtype == torch.float64, training=training
            )
        except Exception:
            continue
        for i, each in enumerate(inputs):
            label = f"{str(dtype)[6:]} {'train' if training else 'eval'} #{i} {each.desc}".strip()
            judged(tally, "values", label, functools.partial(_compare_module, info, each, dtype, training))


def _compare_module(info: Any, each: Any, dtype: torch.dtype, training: bool) -> str:
    """Compare one module's states, outputs and gradients."""
    made, given = each.constructor_input, each.forward_input
    theirs = theirs_of(lambda: info.module_cls(*made.args, **made.kwargs).to(dtype))
    theirs.train(training)
    copies = Copies(True)
    ours = named(f"nn.{info.module_cls.__name__}")(*copies(made.args), **copies(made.kwargs))
    ours = ours.to(named(str(dtype)[6:])).train(training)
    states = theirs.state_dict()
    if list(states) != list(ours.state_dict()):
        return f"states {list(ours.state_dict())}, torch has {list(states)}"[:200]
    if info.is_lazy:
        raise Skipped("lazy")
    ours.load_state_dict({name: ours_of(value) for name, value in states.items()})
    their_copies, our_copies = Copies(False), Copies(True)
    args, keywords = their_copies(tuple(given.args)), their_copies(dict(given.kwargs))
    our_args, our_keywords = our_copies(tuple(given.args)), our_copies(dict(given.kwargs))
    torch.manual_seed(0)
    expected = theirs_of(lambda: theirs(*args, **keywords))
    found = ours(*our_args, **our_keywords)
    is_random = training and any(getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in theirs.modules())
    factor = 10 if dtype == torch.float32 else 1
    reason = difference(expected, found, values=not is_random, factor=factor)
    if reason or is_random or dtype == torch.float32:
        return reason
    outs = [x for x in flat(expected) if isinstance(x, torch.Tensor) and x.requires_grad]
    our_outs = [x for x in flat(found) if isinstance(x, genesis.Tensor) and x.requires_grad]
    if not outs or len(outs) != len(our_outs):
        return "" if not outs else "an output does not require a gradient"
    leaves = their_copies.leaves + [p for p in theirs.parameters() if p.requires_grad]
    our_leaves = our_copies.leaves + [p for p in ours.parameters() if p.requires_grad]
    towards = [fixed(x) for x in outs]
    expected = theirs_of(lambda: torch.autograd.grad(outs, leaves, towards, allow_unused=True))
    found = genesis.autograd.grad(our_outs, our_leaves, [ours_of(x) for x in towards], allow_unused=True)
    reason = difference(expected, found)
    return f"gradient: {reason}" if reason else difference(theirs.state_dict(), dict(ours.state_dict()))


def run_optimizer(info: Any, tally: Tally) -> None:
    """Run one optimizer: 5 steps of every setting on three parameters."""
    name = info.optim_cls.__name__
    try:
        named(f"optim.{name}")
    except Absent as absent:
        tally.add("all", "absent", str(absent))
        return
    for dtype in (torch.float32, torch.float64):
        for i, each in enumerate(info.optim_inputs_func(device="cpu", dtype=dtype)):
            label = f"{str(dtype)[6:]} #{i} {each.desc}".strip()
            judged(tally, "steps", label, functools.partial(_compare_optimizer, info, each.kwargs, dtype))


def _compare_optimizer(info: Any, settings: dict[str, Any], dtype: torch.dtype) -> str:
    """Compare parameters after 5 steps with the same gradients."""
    rng = np.random.default_rng(0)
    shapes = ((4, 6), (5, 3)) if info.optim_cls.__name__ == "Muon" else ((4, 6), (5,), ())
    starts = [torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype) for shape in shapes]
    theirs = [torch.nn.Parameter(x.clone()) for x in starts]
    ours = [genesis.nn.Parameter(ours_of(x.clone())) for x in starts]
    optimizer = theirs_of(lambda: info.optim_cls(theirs, **settings))
    other = named(f"optim.{info.optim_cls.__name__}")(ours, **Copies(True)(settings))
    for _ in range(5):
        for one, two in zip(theirs, ours, strict=True):
            one.grad = torch.from_numpy(np.asarray(rng.standard_normal(tuple(one.shape)))).to(dtype)
            two.grad = ours_of(one.grad.clone())
        theirs_of(optimizer.step)
        other.step()
    exact = info.optim_cls.__name__ != "Muon"  # torch iterates in bfloat16
    factor = 1 if exact else 50 if dtype == torch.float32 else 1e4
    return difference([p.detach() for p in theirs], [p.detach() for p in ours], factor=factor)


# --- The run ----------------------------------------------------------------------------------------------------------


def entries() -> dict[str, tuple[Callable[[Any, Tally], None], Any]]:
    """Return the entries of the three databases by name, with the function that runs each."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    found: dict[str, tuple[Callable[[Any, Tally], None], Any]] = {}
    for op in op_db:
        found[f"{op.name}/{op.variant_test_name}" if op.variant_test_name else op.name] = (run_operator, op)
    for info in module_db:
        found[info.name] = (run_module, info)
    for info in optim_db:
        found[f"optim.{info.optim_cls.__name__}"] = (run_optimizer, info)
    return found


def excluded(name: str) -> str:
    """Return why Genesis leaves an entry out, empty if it does not."""
    if re.match(r"__r?\w+__", name):
        return ""
    return next((reason for pattern, reason in EXCLUDED.items() if re.search(pattern, name)), "")


class _OutOfTime(BaseException):
    """An entry has used its CPU time."""


def _out_of_time(*_: Any) -> None:
    raise _OutOfTime


def run(name: str) -> list[Row]:
    """Run one entry."""
    reason = excluded(name)
    if reason:
        return [Row(name, "all", "excluded", reason)]
    function, info = _ENTRIES[name]
    if isinstance(getattr(info, "op", None), torch._ops.OpOverload):
        return [Row(name, "all", "excluded", "not a public name of torch")]
    tally = Tally(name)
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            function(info, tally)
    except _OutOfTime:
        tally.add("time", "raw", f"takes over {SECONDS} s")
    except Exception as error:
        tally.add("harness", "raw", f"the comparison failed: {shown(error)}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return tally.rows()


_ENTRIES: dict[str, tuple[Callable[[Any, Tally], None], Any]] = {}
_MOST = [SAMPLES]


def _begin() -> None:
    torch.set_num_threads(1)


def run_all(names: list[str], jobs: int) -> Iterator[list[Row]]:
    """Yield the rows of each entry, in order."""
    with multiprocessing.get_context("fork").Pool(jobs, initializer=_begin) as pool:
        yield from pool.imap(run, names, chunksize=4)


def summary(rows: list[Row]) -> str:
    """Return how many entries have each status, by their worst kind."""
    worst: dict[str, str] = {}
    for row in rows:
        worst[row.entry] = max(worst.get(row.entry, "ok"), row.status, key=ORDER.index)
    counts = collections.Counter(worst.values())
    return f"{len(worst)} entries: " + ", ".join(f"{counts[status]} {status}" for status in ORDER)


def main(argv: list[str] | None = None) -> int:
    """Run the entries, print those that are not ok, and write the table if asked to."""
    parser = argparse.ArgumentParser(description="Torch's test databases through Genesis, by name.")
    parser.add_argument("--only", help="entries, separated by commas; a trailing * matches a prefix")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of one entry and type, taken evenly")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--out", type=Path, help="write the table to another file")
    options = parser.parse_args(argv)
    _ENTRIES.update(entries())
    _MOST[0] = options.samples
    names = list(_ENTRIES)
    if options.only:
        wanted = options.only.split(",")
        names = [n for n in names if any(n == w or (w[-1] == "*" and n.startswith(w[:-1])) for w in wanted)]
    rows = []
    for found in run_all(names, options.jobs):
        rows += found
        for row in found:
            if row.status not in ("ok", "excluded"):
                print("\t".join(row), flush=True)
    print(summary(rows))
    target = TABLE if options.write else options.out
    if target:
        lines = [f"# {summary(rows)}", "\t".join(Row._fields), *["\t".join(row) for row in rows]]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

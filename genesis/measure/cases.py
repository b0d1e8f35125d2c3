"""Builds the arguments of any op from a shape: names of ops, the table of calls, typical shapes, and backward passes.

All other modules of this package are generic over the registry. `KINDS` finds an op by its name, by its record
(elementwise ops), or through the op whose gradient it computes. An op of a new form takes one line in `KINDS`.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import numpy as np

from genesis.array import Array, empty
from genesis.autograd import TensorBase, apply, enable_grad, grad
from genesis.backend import CPU, Device, as_device, backend_for
from genesis.cuda import get_device_capability
from genesis.custom import UserOp, load_op, user_ops
from genesis.dtypes import DType, as_dtype, bfloat16, bool_, float32, float64, int8, int16, int32, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError, UserCode, nearest
from genesis.op import Op, observe, registry
from genesis.ops.fp8 import lacking
from genesis.ops.low_rank import Pair
from genesis.shapes import Shape, contiguous_strides, normalize_axes, numel, reduced_shape
from genesis.tensor import Tensor

# Importing these registers the ops that decoding and ranks run.
from genesis.ops import attention_step, gradients, quantized_linear, sample, sample_head  # noqa: F401  isort: skip

Axes = int | tuple[int, ...] | None
CATEGORIES = ("element", "activation", "reduction", "matmul", "memory", "optimizer")
# Size classes in ascending order of work; "batch" is a batch of a language model's tokens.
SIZES = ("small", "medium", "batch", "large", "xlarge")
DISTINCT_VALUES = 1 << 16  # values drawn for an array; a larger array repeats them, which is faster than drawing more
RANK = 16  # rank of low-rank pairs
DTYPES = {"b": bool_, "i8": int8, "i16": int16, "bf16": bfloat16, "f32": float32, "f64": float64}
BOUNDS = {"+": (0.5, 2.0), "?": (0.0, 1.0), "^": (1.0, 2.0)}


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # inputs and attributes of a call
Make = Callable[["Request"], Arguments]


@dataclass(frozen=True)
class Request:
    """A call to build: op, shape, axes, dtype and device."""

    op: Op
    shape: Shape
    axes: Axes  # one dimension, several, or None for all
    dtype: DType  # of each operand whose word in the call names no dtype
    device: Device
    letters: str = ""  # one letter for each dimension of the shape; empty for ops that take any shape
    inputs: tuple[Any, ...] = ()  # empty until they are built
    # Draws all values of the call in order, so equal requests build equal calls.
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0), repr=False)

    @functools.cached_property
    def dims(self) -> dict[str, Shape]:
        shape = self.shape if len(self.shape) != 1 else self.shape * max(len(self.letters), 1)
        first, last = self.shape[:1], self.shape[-1:]
        known: dict[str, Shape] = {"*": self.shape, "F": first, "L": last, "P": self.shape[:-1], "T": self.shape[1:]}
        count = numel(self.shape)
        known |= {"S": (count,), "E": (count + 1,), "H": tuple(n // 2 for n in last), "o": (1,), "r": (RANK,)}
        return known | {letter: (n,) for letter, n in zip(self.letters, shape, strict=False)}

    def size(self, name: str) -> int:
        return int(name) if name.isdigit() else numel(self.dims[name])

    def operand(self, text: str) -> Any:
        """The operand that a word describes, in the language of `call`."""
        if text == "-":
            return None
        if re.fullmatch(r"[-+\d.e]+", text):
            return float(text) if re.search(r"[.e]", text) else int(text)
        letters, _, values = text.partition(":")
        shape: Shape = ()
        for times, letter in re.findall(r"(\d*)(\D)", letters):
            *rest, size = self.dims[letter]
            shape += (*rest, int(times or 1) * size)
        return self.array(shape, values)

    def array(self, shape: Shape, values: str = "") -> Array:
        """An array of the requested dtype unless `values` names another; see `call`."""
        if values == "p":
            return self.placed(self.rng.permutation(shape[0]))
        if values[:1] in ("#", "<"):
            end = self.size(values[1:])
            return self.placed(self.rng.integers(0, end, shape) if values[0] == "#" else np.full(shape, end - 1))
        wide = float64 if self.dtype is float64 else float32
        dtype = DTYPES.get(values.rstrip("+?^w"), wide if values == "wide" else self.dtype)
        result = empty(shape, dtype, self.device)  # first, because it refuses what does not fit into memory
        count = min(result.size, DISTINCT_VALUES)
        low, high = (-(shape[-1] ** -0.5), shape[-1] ** -0.5) if values == "w" else BOUNDS.get(values[-1:], (-1.0, 1.0))
        if values == "%":
            some = self.rng.integers(0, 64, count)
        elif dtype.is_floating_point:
            some = self.rng.uniform(low, high, count).astype(dtype.numpy)
        else:
            some = self.rng.integers(0, 2, count).astype(np.bool_) if dtype is bool_ else self.rng.integers(1, 8, count)
        return self.placed(np.resize(some, shape), dtype, result)

    def placed(self, values: Any, dtype: DType = int64, into: Array | None = None) -> Array:
        result = empty(np.shape(values), dtype, self.device) if into is None else into
        backend_for(self.device).from_numpy(np.asarray(values), result)
        return result


def call(operands: str, **attrs: Any) -> Make:
    """Return a function that builds a call from a line, in which each word describes one operand.

    A word gives the operand's dimensions and, after a colon, its values: "mk nk:w" is x [M, K] and a weight [N, K].
    A number stands for itself and "-" for None. A number before a letter multiplies its size.

    Dimensions: a letter of the kind; * the whole shape; F, L its first and its last size; T, P all sizes but the first
    and all but the last; H half of the last size; S the number of elements, E one more; o 1; r `RANK`.

    Values are uniform in [-1, 1), or: + in [0.5, 2); ? in [0, 1); ^ in [1, 2); w as small as a model's weights; p a
    permutation; #X integers below X; <X the integer X - 1; % at most 64 distinct numbers. A name in `DTYPES` sets the
    dtype.

    Args:
        attrs: attributes of the op; a function computes its attribute from the request with its inputs.
    """

    def make(r: Request) -> Arguments:
        inputs = tuple(r.operand(word) for word in operands.split())
        made = replace(r, inputs=inputs)
        values = {name: value(made) if isinstance(value, FunctionType) else value for name, value in attrs.items()}
        where = {"device": r.device} if not inputs and r.device != CPU else {}  # inputs would imply it
        return inputs, values | where

    return make


def elementwise(r: Request) -> Arguments:
    """Operands in [0.5, 2), where logarithms, roots and quotients are defined."""
    return call("*:+ " * r.op.operands)(r)


def of_user(user: UserOp, r: Request) -> Arguments:
    """The arrays that a user's op returns from its `sample`; without one, every input has the request's shape."""
    attrs = dict(user.attrs)
    if user.sample is None:
        return tuple(r.array(r.shape, "+") for _ in user.inputs), attrs
    with UserCode(f"the sample of {user.name}"):
        arrays = [np.asarray(x) for x in user.sample(r.shape, r.dtype)]
    if len(arrays) != len(user.inputs):
        raise UsageError(f"the sample of {user.name} gave {len(arrays)} arrays for {len(user.inputs)} inputs")
    return tuple(r.placed(x, as_dtype(x.dtype)) for x in arrays), attrs


def transposed(r: Request) -> Arguments:
    """A matrix `[n, m]` that is stored as `[m, n]`."""
    rows, columns = r.shape
    return (r.array((columns, rows)).view((rows, columns), (1, rows)),), {}


def one_axis(r: Request) -> int:
    """The requested axis. Raises UsageError if several or all axes are requested."""
    if not isinstance(r.axes, int):
        raise UsageError(f"{r.op.name} takes one axis", where="--axis", next="give one number, such as -1")
    return r.axes


def masked_select(r: Request) -> Arguments:
    """Values, a mask with about half of its values set, and the mask's offsets."""
    (x, mask), attrs = call("* *:b", count=lambda r: int(r.inputs[1].numpy().sum()))(r)
    return (x, mask, registry["mask_offsets"](mask)), attrs


def backward_of(make: Make, r: Request) -> Arguments:
    """The arguments of `<op>_backward` in the backward pass of the call of `<op>` that `make` builds."""
    forward = registry[r.op.name.removesuffix("_backward")]
    recorded: list[Arguments] = []

    def note(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        if op is r.op:
            recorded.append((inputs, attrs))

    _, backward = passes_of(forward, *make(replace(r, op=forward)))
    with observe(note):
        backward()
    if not recorded:
        raise UsageError(f"the gradient of {forward.name} needs no {r.op.name} for these inputs", where="--op")
    return recorded[0]


@dataclass(frozen=True)
class Kind:
    """Ops whose shapes have the same meaning."""

    category: str  # one of `CATEGORIES`
    sizes: str  # one shape for each of `SIZES`
    calls: Mapping[str, Make]  # builds each op's call, by its name or alias
    letters: str = ""  # one letter per dimension; empty if a shape may have any number of dimensions
    form: str = "rows,columns"  # the form of a shape, as errors show it
    axes: tuple[Axes, ...] = ()  # the default axes to measure; empty for ops without an axis
    make: Make = elementwise  # builds the call of the op that `kind_of` looked up

    def shape_of(self, size: str) -> Shape:
        return tuple(map(int, self.sizes.split()[SIZES.index(size)].split(",")))


def over(op: str, **attrs: Any) -> dict[str, Make]:
    """Calls of reductions over the requested axes; `op` holds names separated by spaces."""
    return dict.fromkeys(op.split(), call("*", axes=lambda r: r.axes, **attrs))


SCALARS = "1e-3 3 1.0"  # learning rate, step, scale of the gradient
RULES: dict[str, tuple[int, dict[str, Any]]] = {  # elementwise optimizers: number of states, settings
    "sgd": (0, {"weight_decay": 0.1}),
    "sgd_momentum": (1, {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1}),
    "adamw": (2, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}),
    "lion": (1, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
}
STEPS = {  # on a parameter, or on a bfloat16 weight and its residual (`_split`)
    f"{rule}{split}_step": call(f"{param} * {'*:+ ' * states} {SCALARS}", **settings)
    for rule, (states, settings) in RULES.items()
    for split, param in (("", "*"), ("_split", "*:bf16 *:i16"))
}
SCHULZ = {"coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "iterations": 5}
MUON = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "lr_ratio": 1.0, **SCHULZ}
FACTORED = {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.1}
CAUSAL = {"scale": lambda r: 1 / math.sqrt(r.shape[-1])}
PACKED = {"heads": lambda r: r.shape[2], "key_heads": lambda r: r.shape[2]}
WINDOW = {"shape": lambda r: r.shape, "strides": lambda r: contiguous_strides(r.shape), "offset": 0}
DRAWN = {"seed": 1, "offset": 0}
MADE = {"shape": lambda r: r.shape, "dtype": lambda r: r.dtype}
COUNTED = {"count": lambda r: numel(r.shape), "dtype": lambda r: r.dtype}

# Calls of ops that take any shape, where the elementwise form does not fit.
ANY = {
    "where": call("*:b * *"),
    "clamp": call("*:+ 0.75 1.5"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), call("*:?")),  # of [0, 1)
    "acosh": call("*:^"),
    "cast": call("*:+", dtype=lambda r: float64 if r.dtype is float32 else float32),
    "fill": call("", value=1, **MADE),
    "reshape": call("*", shape=lambda r: (numel(r.shape),)),
    "permute": call("*", dims=lambda r: tuple(reversed(range(len(r.shape))))),
    "expand": call("oT", shape=lambda r: r.shape),
    "slice": call("*", items=lambda r: ((0, -(-r.shape[0] // 2), 2),)),
    "diagonal": call("*", offset=0, dim1=0, dim2=1),
    "unfold": call("*", dim=0, size=2, step=2),
    "as_strided": call("*", **WINDOW),
    "as_strided_scatter": call("* *", **WINDOW),
    "cat": call("* *", dim=0),
    "flip": call("*", dims=(0,)),
    "roll": call("*", shifts=(1,), dims=(0,)),
    **dict.fromkeys(("tril", "triu"), call("*", diagonal=0)),
    "pad": call("*", widths=lambda r: ((1, 1),) * len(r.shape), value=0.0),
    "arange": call("", start=0, step=1, **COUNTED),
    "linspace": call("", start=0.0, end=1.0, **COUNTED),
    "uniform": call("", low=0.0, high=1.0, **DRAWN, **MADE),
    "normal": call("", mean=0.0, std=1.0, **DRAWN, **MADE),
    "randint": call("", low=0, high=100, **DRAWN, **MADE),
    "randperm": call("", n=lambda r: numel(r.shape), dtype=int64, **DRAWN),
    "bernoulli": call("*:?", **DRAWN),
    "dropout": call("*", p=0.5, **DRAWN),
    **dict.fromkeys(("mask_count", "mask_offsets"), call("*:b")),
    "mask_indices": call("*:b", count=lambda r: int(r.inputs[0].numpy().sum())),
    "masked_select": masked_select,
    **dict.fromkeys(("nonzero_count", "unique_count"), call("*")),
    "nonzero": call("*:%", size=lambda r: np.count_nonzero(r.inputs[0].numpy())),
    "unique": call("*:%", size=lambda r: len(np.unique(r.inputs[0].numpy()))),
    "bincount": call("S:#64", size=64),
    "total_norm": call("*", ord=2.0),
    "clip_factor": call("4o:f32 :f32 *", max_norm=1.0),
    "clip_factor_of_ranks": call("4o:f32 E:f64+", losses=1, max_norm=1.0),
    "square_spans": call("S", of=lambda r: numel(r.shape)),
    "stochastic_round": call("*", dtype=bfloat16, **DRAWN),
    "join_master": call("*:bf16 *:i16"),
    "split_master": call("*:bf16 *:i16 *"),
    "rank_sum": call("S S oS", rank=0, adds=False),
    "adafactor_vector_step": call(f"S:+ S:+ S:+ {SCALARS}", **FACTORED),
}
PRODUCTS = {
    **dict.fromkeys(("matmul", "quantized_matmul"), call("mk kn")),
    "mixed_matmul": call("mk kn", dtype=float32),
    "matmul_add": call("mk kn mn"),
    "add_matmul": call("mn mk kn"),
    "matmul_sum": call("mk kn mr rn"),
}
LINEARS = {
    **dict.fromkeys(("linear", "packed_linear"), call("mk nk")),
    "norm_linear": call("mk k nk:w", eps=1e-6),
    "norm_mlp": call("mk k kn:w - nk:w nk:w", eps=1e-6),
    "swiglu_linear_backward": call("mk kn m2n"),
    "quantized_linear": call("mk nk:i8 n:f32"),
    "low_rank_backward": call("mn mr nr", pairs=lambda r: (Pair(0, r.size("n"), RANK, 1.0),)),
}
NORMS = {
    "rms_norm": call("* L", eps=1e-6),
    "layer_norm": call("* L L", eps=1e-6),
    "quantize_rows": call("*"),
    "rms_norm_scale": call("* L P:wide"),
    "scale_columns": call("* L"),
}
ATTENTION = {  # causal, with as many key heads as query heads
    "attention": call("* * *", **CAUSAL),
    "attention_packed": call("bt3hd", **PACKED, **CAUSAL),
    "attention_step": call("b3hd 2obhtd b:<t", **CAUSAL),  # one token of each row after t - 1 others
}
ROWS = {  # each row is read or written once, in random order, as the cost rule assumes
    "embedding": call("F:p *"),
    "embedding_add_": call("* * F:p"),
    "index_get": call("* F:p", dims=(0,)),
    **dict.fromkeys(("index_put", "index_put_"), call("* * F:p", dims=(0,))),
}
CLASSES = {
    "cross_entropy": call("* F:#L", ignore_index=-100, label_smoothing=0.0, z_loss=0.0),
    "sample": call("* F3o:#9 F4o:? F:#1"),
    # No row of the batch ends: the counters are far from their limits.
    "next_tokens": call(f"F:#L F Fo:#L {'F:<1099511627776 ' * 3} F3o:#9 *:b 4oF:#L 4oF o:#1"),
    "multinomial": call("*:+", num_samples=1, replacement=True, **DRAWN),
}
MATRIX_STEPS = {
    "newton_schulz": call("*", **SCHULZ),
    "muon_step": call(f"* * * {SCALARS}", **MUON),
    "adafactor_step": call(f"* * Fo:+ oL:+ {SCALARS}", **FACTORED),
    "dora_factors": call(
        "F:+ F:+ * rL Fr", columns=lambda r: ((0, r.shape[0]),), scales=(1.0,), width=lambda r: r.shape[0]
    ),
    "dequantize_rows": call("*:i8 F:f32", dtype=lambda r: r.dtype),
    "scale_rows": call("* F"),
}
ALONG_AXIS = {
    **dict.fromkeys(("argmax", "argmin"), call("*", axis=lambda r: None if r.axes is None else one_axis(r))),
    **dict.fromkeys(("max_with_indices", "min_with_indices", "cumsum", "sort"), call("*", axis=one_axis)),
    "topk": call("*", axis=one_axis, k=lambda r: min(8, *r.shape)),
    "put_along_axis": call("* *:#L", axis=one_axis, size=lambda r: r.shape[-1]),
}
REDUCED = {
    **over("sum mean count_nonzero prod amax amin any all logsumexp"),
    **over("var std", correction=1),
    **over("norm", p=2.0),
}
SUMMED = call("*", shape=lambda r: reduced_shape(r.shape, normalize_axes(r.axes, len(r.shape)), keepdim=True))
SOFTMAX = dict.fromkeys(("softmax", "log_softmax"), call("*", dim=one_axis))
ROPE = {"rope": call("* tH tH"), "norm_rope": call("bt2hd d d tH tH", **PACKED, eps=1e-6)}
GATES = {"swiglu": call("* *"), "swiglu_packed": call("P2L"), "geglu_packed": call("P2L")}
TOKENS = {"ignore_index": -100, "shift": 0, "temperature": 1.0}
HEAD = {
    "linear_cross_entropy": call("mk nk:w m:#n", ignore_index=-100, with_grads=True, mean=True),
    "linear_token_log_probs": call("mk nk:w m:#n", **TOKENS, with_dx=False),
    "linear_token_log_probs_backward": call("m:f32 mk nk:w m:#n", **TOKENS, needs=(True, True)),
    "linear_distillation": call("mk nk:w mk nk:w m:#n", **TOKENS, beta=0.5, with_grads=True),
    "sample_head": call("mk nk:w m3o:#9 m4o:?"),
}

SQUARES = "256,256 1024,1024 32,512,896 4096,4096 8192,8192"
BLOCKS = "4,64,256 4,512,896 32,512,896 8,1024,2048 16,2048,4864"
HEADS = "1,128,14,64 1,512,14,64 32,512,14,64 4,1024,14,64 4,4096,14,64"
LAYERS = "256 2048,896,896 8192,4864,896 2048,896,4864 8192,896,4864"
LOSSES = "128,256,4096 256,896,4096 2048,896,151936 512,896,32768 8192,896,151936"
ALL_AXES: tuple[Axes, ...] = (None, -1, (0, 1))

KINDS = {
    "elementwise": Kind("element", SQUARES, ANY),
    "transpose": Kind("memory", "256,256 1024,1024 32,896 4096,4096 8192,8192", {"transpose": transposed}, "mn"),
    "reduction": Kind("reduction", BLOCKS, {**REDUCED, "sum_to_shape": SUMMED}, axes=ALL_AXES),
    "along one axis": Kind("reduction", BLOCKS, ALONG_AXIS, axes=(-1,)),
    "softmax": Kind("activation", SQUARES.replace("8192", "16384"), SOFTMAX, axes=(-1,)),
    "matmul": Kind("matmul", "256 1024 2048,896,4864 4096 8192", PRODUCTS, "mkn", "N, or M,K,N for [M, K] x [K, N]"),
    "linear": Kind("matmul", LAYERS, LINEARS, "mkn", "N, or M,K,N for x [M, K] and a weight [N, K]"),
    "norm": Kind("reduction", "1,128,896 4,512,896 32,512,896 8,2048,896 16,4096,896", NORMS),
    "attention": Kind("matmul", HEADS, ATTENTION, "bthd", "B,T,heads,size"),
    "rope": Kind("element", HEADS, ROPE, "bthd", "B,T,heads,size"),
    "swiglu": Kind("activation", "128,4864 512,4864 32,512,4864 2048,4864 8192,4864", GATES),
    "rows by index": Kind("memory", "1024,896 4096,896 16384,896 32768,896 151936,896", ROWS, "mn", "rows,width"),
    "classes": Kind("reduction", "128,4096 256,16384 4096,32768 256,151936 2048,151936", CLASSES, "mn", "rows,classes"),
    "linear cross entropy": Kind("matmul", LOSSES, HEAD, "mkn", "rows,width,classes"),
    "step of a matrix": Kind("optimizer", "256,256 896,896 4864,896 2048,2048 4096,4096", MATRIX_STEPS, "mn"),
    "step of a rule": Kind("optimizer", SQUARES, STEPS),
}
# Categories of elementwise ops by the file that defines them.
FAMILIES = {
    **dict.fromkeys(("shape", "create", "index"), "memory"),
    **dict.fromkeys(("gradients", "rounding", "matrix_optimizers", "rank_sum"), "optimizer"),
    "activation": "activation",
    "sort": "reduction",
}
MOVING = ("copy", "overwrite", "cast", "fill")  # elementwise ops that compute nothing

# Other names of ops, including torch's.
ALIASES = {
    **{f"reduce_{name}": name for name in REDUCED},
    **{"reduce_max": "amax", "reduce_min": "amin", "max": "amax", "min": "amin", "sum_to_size": "sum_to_shape"},
    **{"clip": "clamp", "clone": "copy", "contiguous": "copy", "transpose": "copy"},
}


@functools.cache
def kind_of(name: str) -> Kind | None:
    """The kind of an op or an alias; None if the op is unknown, or if no table says how to call it."""
    meant = ALIASES.get(name, name)
    for key in (name, meant):  # an alias may have its own kind: a transpose is a copy
        for kind in KINDS.values():
            if kind.calls is not ANY and key in kind.calls:
                return replace(kind, make=kind.calls[key])
    op = registry.get(meant)
    if op is not None and (
        meant in ANY or (op.elementwise and op.family in ("elementwise", "activation", "special", "loss"))
    ):
        category = "memory" if meant in MOVING else FAMILIES.get(op.family, "element")
        return replace(KINDS["elementwise"], make=ANY.get(meant, elementwise), category=category)
    forward = kind_of(meant.removesuffix("_backward")) if op is not None and meant.endswith("_backward") else None
    return None if forward is None else replace(forward, make=functools.partial(backward_of, forward.make))


def supported() -> list[str]:
    """Every name that `op_named` accepts, sorted."""
    return sorted(name for name in {*registry, *ALIASES} if kind_of(name) is not None)


def op_named(name: str) -> tuple[Op, Kind]:
    """An op and its kind, by its name, an alias, or "module:name" for a user's op. Raises UsageError."""
    user = load_op(name) if ":" in name else user_ops.get(name)
    if user is not None:
        return user.op, replace(KINDS["elementwise"], make=functools.partial(of_user, user))
    if (kind := kind_of(name)) is not None:
        return registry[ALIASES.get(name, name)], kind
    near, known = nearest(name, supported(), 0.5), textwrap.fill(" ".join(supported()), 90)
    what = f"there is no op {name}"
    raise UsageError(what, where="--op", next=f"did you mean {near}?" if near else f"ops: {known}")


@dataclass(frozen=True)
class Case:
    """An op and the arguments of a call."""

    name: str  # as requested, and so are shape and axes
    op: Op
    shape: Shape
    axes: Axes  # None for all axes, and for ops without an axis
    label: str  # shape and axes as text
    dtype: DType
    device: Device
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]

    @property
    def category(self) -> str:
        return op_named(self.name)[1].category

    @property
    def arrays(self) -> list[Array]:
        return [x for x in self.inputs if isinstance(x, Array)]

    def call(self) -> Any:
        """Run the op on tensors, as a user's program does."""
        tensors = [TensorBase.wrap(x) if isinstance(x, Array) else x for x in self.inputs]
        return apply(self.op, *tensors, **self.attrs)


def default_sizes(device: Device, *, is_fast: bool = False) -> tuple[str, ...]:
    """The size classes to measure by default. A CPU takes too long for sizes that fill a GPU."""
    if device == CPU:
        return ("medium",) if is_fast else ("small", "medium", "large")
    return ("large",) if is_fast else SIZES


def choices(
    name: str, device: Device, shapes: Sequence[Shape] = (), axes: Sequence[Axes] = ()
) -> Iterator[tuple[Shape, Axes]]:
    """The shapes and axes to measure. Given shapes without axes are paired with the kind's first. Raises UsageError."""
    kind = op_named(name)[1]
    if axes and not kind.axes:
        raise UsageError(f"{name} has no axis", where="--axis", next="leave --axis out")
    every = axes or (kind.axes[:1] if shapes else kind.axes) or (None,)
    for shape in shapes or [kind.shape_of(size) for size in default_sizes(device)]:
        yield from ((shape, each) for each in every)


def make_case(name: str, shape: Shape, axes: Axes, dtype: DType | None, device: Device) -> Case:
    """The op `name` with inputs of `dtype`, or of the first of float32, int32, bool it takes. Raises UsageError."""
    op, kind = op_named(name)
    device = as_device(device)
    if kind.letters and len(shape) not in {text.count(",") + 1 for text in kind.sizes.split()}:
        raise UsageError(f"{name} takes the shape {kind.form}; got {','.join(map(str, shape))}", where="--shape")
    if op.family == "fp8" and device != CPU and (lack := lacking(get_device_capability(device), device)):
        raise UsageError(f"{name} {lack}", where="--device", next="measure another op, or this one on the CPU")
    refused: UsageError | None = None
    for each in (float32, int32, bool_) if dtype is None else (dtype,):
        try:
            inputs, attrs = kind.make(Request(op, shape, axes, each, device, kind.letters))
            op.infer(*inputs, **{key: value for key, value in attrs.items() if key != "device"})
            return Case(name, op, shape, axes, label_of(name, shape, axes), each, device, inputs, attrs)
        except DTypeError as error:
            refused = refused or UsageError(error.what, where="--dtype", next=error.next)
        except (IndexRangeError, ShapeError) as error:
            where = "--shape" if axes is None else "--shape and --axis"
            where = "--axis" if isinstance(error, IndexRangeError) else where
            raise UsageError(error.what, where=where, next=error.next) from error
    assert refused is not None
    raise refused


def label_of(name: str, shape: Shape, axes: Axes) -> str:
    """Shape and axes as text: "4x512x896 over -1"."""
    label, axis = "x".join(map(str, shape)), "all" if axes is None else re.sub(r"[() ]", "", str(axes))
    return f"{label} over {axis}" if op_named(name)[1].axes else label


def passes_of(op: Op, inputs: Sequence[Any], attrs: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], object]]:
    """Two functions: one records the call, one runs its backward pass. Raises UsageError: the op has no gradient."""
    tensors = [TensorBase.wrap(x) if isinstance(x, Array) else x for x in inputs]
    leaves = [t.requires_grad_() for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    forward = functools.partial(apply, op, *tensors, **attrs)
    with enable_grad():
        results = forward()
    outputs = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
    if not outputs:
        what = f"{op.name} of these inputs has no gradient"
        raise UsageError(what, where="--backward", next="choose a float dtype, or leave --backward out")
    arriving = [TensorBase.wrap(t.array) for t in outputs]  # any values take the same time
    return forward, lambda: grad(outputs, leaves, arriving, retain_graph=True, allow_unused=True)

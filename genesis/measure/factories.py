"""Arguments of ops, made from a shape: one factory per kind of op, or per op. `cases.py` says which takes which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, empty
from genesis.autograd import TensorBase, apply, enable_grad, grad
from genesis.backend import CPU, Device, backend_for
from genesis.custom import UserOp
from genesis.dtypes import DType, as_dtype, bfloat16, bool_, float32, float64, int8, int16, int64
from genesis.errors import UsageError, UserCode
from genesis.op import Op, observe, registry
from genesis.shapes import Shape, contiguous_strides, normalize_axes, numel, reduced_shape
from genesis.tensor import Tensor

Axes = int | tuple[int, ...] | None
VALUES = 1 << 16  # different ones; a larger array repeats them, which costs less than to make more
RANK = 16  # of low-rank pairs


class Arguments(NamedTuple):
    """The arguments of an op."""

    inputs: tuple[Any, ...]
    attrs: dict[str, Any]


def call(*inputs: Any, **attrs: Any) -> Arguments:
    """The arguments as they are written in a call."""
    return Arguments(inputs, attrs)


@dataclass(frozen=True)
class Request:
    """What a factory is given.

    Attributes:
        shape: what the kind's `shape` says it means.
        axes: one dimension, several, or None for all.
        dtype, device: of the floats (or integers) that are made.
        rng: gives all values of a case in order, the same for equal cases.
    """

    op: Op
    shape: Shape
    axes: Axes
    dtype: DType
    device: Device
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0), repr=False)

    @property
    def size(self) -> int:
        """Elements of the shape."""
        return numel(self.shape)

    def values(self, *shape: int, dtype: DType | None = None, low: float = -1.0, high: float = 1.0) -> Array:
        """Uniform floats in [low, high), integers from 1 to 7, or bools; of the requested dtype unless one is named."""
        dtype = dtype or self.dtype
        array = empty(shape, dtype, self.device)  # first, because it refuses what has no room
        count = min(array.size, VALUES)
        if dtype.is_floating_point:
            some = self.rng.uniform(low, high, count).astype(dtype.numpy)
        else:
            some = self.rng.integers(0, 2, count).astype(np.bool_) if dtype is bool_ else self.rng.integers(1, 8, count)
        backend_for(self.device).from_numpy(np.resize(some, shape), array)
        return array

    def x(self, **bounds: float) -> Array:
        """Values of the requested shape and dtype."""
        return self.values(*self.shape, **bounds)  # type: ignore[arg-type]

    def whole(self, high: int, *shape: int) -> Array:
        """int64 in [0, high)."""
        return self.placed(self.rng.integers(0, high, shape), int64)

    def order(self, count: int) -> Array:
        """The numbers below `count` in random order, each once: so what they select is read as the cost counts it."""
        return self.placed(self.rng.permutation(count), int64)

    def placed(self, values: Any, dtype: DType) -> Array:
        """Values that are computed."""
        values = np.asarray(values)
        array = empty(values.shape, dtype, self.device)
        backend_for(self.device).from_numpy(values, array)
        return array

    def created(self, **attrs: Any) -> Arguments:
        """No inputs: the device is an attribute."""
        return Arguments((), {**attrs, **({} if self.device == CPU else {"device": self.device})})


# --- Kinds ------------------------------------------------------------------------------------------------------------


def elementwise(r: Request) -> Arguments:
    """Values from 0.5 to 2, which logarithms, roots and quotients take."""
    return Arguments(tuple(r.x(low=0.5, high=2.0) for _ in range(r.op.operands)), {})


def of_user(user: UserOp, r: Request) -> Arguments:
    """What a user's op says (its `sample`), or as many arrays of the shape as it takes; its attributes' defaults."""
    if user.sample is None:
        return Arguments(tuple(r.x(low=0.5, high=2.0) for _ in user.inputs), dict(user.attrs))
    with UserCode(f"the sample of {user.name}"):
        arrays = [np.asarray(x) for x in user.sample(r.shape, r.dtype)]
    if len(arrays) != len(user.inputs):
        raise UsageError(f"the sample of {user.name} gave {len(arrays)} arrays for {len(user.inputs)} inputs")
    return Arguments(tuple(r.placed(x, as_dtype(x.dtype)) for x in arrays), dict(user.attrs))


def transposed(r: Request) -> Arguments:
    """A matrix `[n, m]` that is stored as `[m, n]`."""
    rows, columns = r.shape
    return call(r.values(columns, rows).view((rows, columns), (1, rows)))


def reduction(r: Request) -> Arguments:
    """Values around 0; the axes may be several, or all."""
    extra: dict[str, dict[str, Any]] = {"var": {"correction": 1}, "std": {"correction": 1}, "norm": {"p": 2.0}}
    return call(r.x(), axes=r.axes, **extra.get(r.op.name, {}))


def sum_to_shape(r: Request) -> Arguments:
    """Values around 0; the axes are summed and keep size 1."""
    return call(r.x(), shape=reduced_shape(r.shape, normalize_axes(r.axes, len(r.shape)), keepdim=True))


def one_axis(r: Request) -> int:
    """The axis that was asked for. Raises: UsageError: it is several, or all."""
    if not isinstance(r.axes, int):
        raise UsageError(f"{r.op.name} takes one axis", where="--axis", next="give one number, such as -1")
    return r.axes


def along_axis(r: Request) -> Arguments:
    """One axis, called as the op calls it; argmax and argmin also take all."""
    axis = r.axes if r.axes is None and r.op.name in ("argmax", "argmin") else one_axis(r)
    extra = {"k": min(8, *r.shape)} if r.op.name == "topk" else {}
    return call(r.x(), **{"dim" if r.op.family == "softmax" else "axis": axis}, **extra)


def sizes(r: Request) -> tuple[int, int, int]:
    """M, K, N of a product."""
    return (r.shape * 3)[:3] if len(r.shape) == 1 else r.shape  # type: ignore[return-value]


def product(*operands: str, **attrs: Any) -> Callable[[Request], Arguments]:
    """Operands of a product by their dimensions, such as "mk" for `[M, K]`; r is a low rank, "2n" is 2N.

    An "i" behind a comma makes int8 codes, an "f" float32, and a "w" values as small as a model's weights are.
    """

    def make(r: Request) -> Arguments:
        m, k, n = sizes(r)
        known = {"m": m, "k": k, "n": n, "r": RANK, "N": 2 * n}
        made = []
        for operand in operands:
            names, _, kind = operand.partition(",")
            bound = k**-0.5 if kind == "w" else 1.0
            dtype = {"i": int8, "f": float32}.get(kind)
            made.append(r.values(*(known[c] for c in names), dtype=dtype, low=-bound, high=bound) if names else None)
        return Arguments(tuple(made), dict(attrs))

    return make


def low_rank_backward(r: Request) -> Arguments:
    """One pair over all columns."""
    from genesis.ops.low_rank import Pair

    return product("mn", "mr", "nr", pairs=(Pair(0, sizes(r)[2], RANK, 1.0),))(r)


def attention(r: Request) -> Arguments:
    """Causal, as many key heads as query heads."""
    return call(r.x(), r.x(), r.x(), scale=1 / math.sqrt(r.shape[-1]))


def attention_packed(r: Request) -> Arguments:
    """Queries, keys and values side by side."""
    b, t, heads, size = r.shape
    return call(r.values(b, t, 3 * heads, size), heads=heads, key_heads=heads, scale=1 / math.sqrt(size))


def attention_step(r: Request) -> Arguments:
    """One token per row, behind T - 1 others."""
    b, t, heads, size = r.shape
    lengths, cache = r.placed(np.full(b, t - 1), int64), r.values(2, b, heads, t, size)
    return call(r.values(b, 3 * heads, size), cache, lengths, scale=1 / math.sqrt(size))


def tables(r: Request) -> list[Array]:
    """Cosines and sines of the usual angles."""
    _, t, _, size = r.shape
    angles = np.outer(np.arange(t), 10000.0 ** (-np.arange(size // 2) / max(size // 2, 1)))
    return [r.placed(f(angles), r.dtype) for f in (np.cos, np.sin)]


def norm_rope(r: Request) -> Arguments:
    """As many key heads as query heads, side by side."""
    b, t, heads, size = r.shape
    given = r.values(b, t, 2 * heads, size), r.values(size), r.values(size), *tables(r)
    return call(*given, heads=heads, key_heads=heads, eps=1e-6)


def rms_norm(r: Request) -> Arguments:
    """Rows, and the weight of their width."""
    return call(r.x(), r.values(r.shape[-1]), eps=1e-6)


def rope(r: Request) -> Arguments:
    """Heads, and the tables of their angles."""
    return call(r.x(), *tables(r))


def swiglu(r: Request) -> Arguments:
    """Gate and up."""
    return call(r.x(), r.x())


def index_put(r: Request) -> Arguments:
    """Each row once, in random order."""
    return call(r.x(), r.x(), r.order(r.shape[0]), dims=(0,))


def gates(r: Request) -> Arguments:
    """Gate and up side by side."""
    return call(r.values(*r.shape[:-1], 2 * r.shape[-1]))


def sample(r: Request) -> Arguments:
    """Draws at temperature 1 from all classes."""
    rows = r.shape[0]
    return call(
        r.x(), r.whole(9, rows, 3), r.placed(np.tile([1.0, 1.0, 0.0, 1.0], (rows, 1)), r.dtype), r.whole(1, rows)
    )


def next_tokens(r: Request) -> Arguments:
    """A batch of which no row comes to its end."""
    rows, count = r.shape
    counters = [r.placed(np.full(rows, 1 << 40), int64) for _ in range(3)]
    seen, ring = (r.whole(9, rows, 3), r.values(rows, count, dtype=bool_)), (r.whole(count, 4, rows), r.values(4, rows))
    return call(r.whole(count, rows), r.values(rows), r.whole(count, rows, 1), *counters, *seen, *ring, r.whole(1, 1))


def cross_entropy(r: Request) -> Arguments:
    """Logits and random labels."""
    return call(r.x(), r.whole(r.shape[1], r.shape[0]), ignore_index=-100, label_smoothing=0.0, z_loss=0.0)


def linear_cross_entropy(r: Request) -> Arguments:
    """Hidden states, the head's weight, as small as a model's is, and random labels; gradients come with the loss."""
    rows, width, count = r.shape
    weight = r.values(count, width, low=-(width**-0.5), high=width**-0.5)
    attrs: dict[str, Any] = {"ignore_index": -100, "with_grads": True, "mean": True}
    return call(r.values(rows, width), weight, r.whole(count, rows), **attrs)


# --- Optimizer steps --------------------------------------------------------------------------------------------------

SCALARS = (1e-3, 3, 1.0)  # learning rate, step, scale of the gradient
SCHULZ = {"coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "iterations": 5}
MUON = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "lr_ratio": 1.0, **SCHULZ}
FACTORED = {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.1}
RULES: dict[str, tuple[int, dict[str, Any]]] = {  # states and settings
    "sgd": (0, {"weight_decay": 0.1}),
    "sgd_momentum": (1, {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1}),
    "adamw": (2, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}),
    "lion": (1, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
}


def rule_step(r: Request) -> Arguments:
    """A parameter (or a bfloat16 weight and its residual), its gradient, and positive states."""
    name = r.op.name.removesuffix("_step")
    states, settings = RULES[name.removesuffix("_split")]
    kept = [r.x(low=0.5) for _ in range(states)]
    param = halves(r) if name.endswith("_split") else (r.x(),)
    return call(*param, r.x(), *kept, *SCALARS, **settings)


def halves(r: Request) -> tuple[Array, Array]:
    """A bfloat16 weight and what it lacks of its float32 master."""
    return r.values(*r.shape, dtype=bfloat16), r.values(*r.shape, dtype=int16)


def adafactor_step(r: Request) -> Arguments:
    """The variances of rows and columns beside a matrix."""
    row, column = r.values(*r.shape[:-1], 1, low=0.5), r.values(*r.shape[:-2], 1, r.shape[-1], low=0.5)
    return call(r.x(), r.x(), row, column, *SCALARS, **FACTORED)


def dora_factors(r: Request) -> Arguments:
    """One layer over all columns."""
    n, width = r.shape
    given = r.values(n, low=0.5), r.values(n, low=0.5), r.x(), r.values(RANK, width), r.values(n, RANK)
    return call(*given, columns=((0, n),), scales=(1.0,), width=n)


# --- Values that are counted first ------------------------------------------------------------------------------------


def put_along_axis(r: Request) -> Arguments:
    """Each row's values in reversed order."""
    axis = normalize_axes(one_axis(r), len(r.shape))[0]
    size = r.shape[axis]
    order = np.arange(size)[::-1].reshape([size if d == axis else 1 for d in range(len(r.shape))])
    return call(r.x(), r.placed(np.broadcast_to(order, r.shape).copy(), int64), axis=axis, size=size)


def masked(r: Request) -> Arguments:
    """A mask of which about half is true."""
    return call(r.values(*r.shape, dtype=bool_))


def mask_indices(r: Request) -> Arguments:
    """With its count."""
    (mask,), _ = masked(r)
    return call(mask, count=int(mask.numpy().sum()))


def masked_select(r: Request) -> Arguments:
    """With the counts of its blocks."""
    (mask,), attrs = mask_indices(r)
    return call(r.x(), mask, registry["mask_offsets"](mask), **attrs)


def nonzero(r: Request) -> Arguments:
    """With the count of what is not 0."""
    x = r.x()
    return call(x, size=int(np.count_nonzero(x.numpy())))


def unique(r: Request) -> Arguments:
    """Of at most 64 values."""
    x = r.placed(r.rng.integers(0, 64, r.shape), r.dtype)
    return call(x, size=len(np.unique(x.numpy())))


def window(r: Request) -> dict[str, Any]:
    """The whole as a strided window."""
    return {"shape": tuple(r.shape), "strides": contiguous_strides(tuple(r.shape)), "offset": 0}


def drawn(r: Request, **attrs: Any) -> Arguments:
    """Draws of the shape."""
    return r.created(seed=1, offset=0, shape=r.shape, dtype=r.dtype, **attrs)


def of_step(r: Request) -> tuple[Array, Array]:
    """The four numbers of a step's report, and its loss."""
    return r.placed(np.zeros(4), float32), r.placed(2.5, float32)


# --- The calls of ops that their kind does not make -------------------------------------------------------------------

CALLS: dict[str, Callable[[Request], Arguments]] = {
    "where": lambda r: call(r.values(*r.shape, dtype=bool_), r.x(), r.x()),
    "clamp": lambda r: call(r.x(low=0.5, high=2.0), 0.75, 1.5),
    "cast": lambda r: call(r.x(low=0.5, high=2.0), dtype=float64 if r.dtype is float32 else float32),
    "fill": lambda r: r.created(value=1, shape=r.shape, dtype=r.dtype),
    "reshape": lambda r: call(r.x(), shape=(r.size,)),
    "permute": lambda r: call(r.x(), dims=tuple(reversed(range(len(r.shape))))),
    "expand": lambda r: call(r.values(1, *r.shape[1:]), shape=r.shape),
    "slice": lambda r: call(r.x(), items=((0, -(-r.shape[0] // 2), 2),)),
    "diagonal": lambda r: call(r.x(), offset=0, dim1=0, dim2=1),
    "unfold": lambda r: call(r.x(), dim=0, size=2, step=2),
    "as_strided": lambda r: call(r.x(), **window(r)),
    "as_strided_scatter": lambda r: call(r.x(), r.x(), **window(r)),
    "cat": lambda r: call(r.x(), r.x(), dim=0),
    "flip": lambda r: call(r.x(), dims=(0,)),
    "roll": lambda r: call(r.x(), shifts=(1,), dims=(0,)),
    "tril": lambda r: call(r.x(), diagonal=0),
    "triu": lambda r: call(r.x(), diagonal=0),
    "pad": lambda r: call(r.x(), widths=((1, 1),) * len(r.shape), value=0.0),
    "arange": lambda r: r.created(start=0, step=1, count=r.size, dtype=r.dtype),
    "linspace": lambda r: r.created(start=0.0, end=1.0, count=r.size, dtype=r.dtype),
    "uniform": lambda r: drawn(r, low=0.0, high=1.0),
    "normal": lambda r: drawn(r, mean=0.0, std=1.0),
    "randint": lambda r: drawn(r, low=0, high=100),
    "randperm": lambda r: r.created(seed=1, offset=0, n=r.size, dtype=int64),
    "bernoulli": lambda r: call(r.x(low=0.0), seed=1, offset=0),
    "dropout": lambda r: call(r.x(), p=0.5, seed=1, offset=0),
    "mask_count": masked,
    "mask_offsets": masked,
    "mask_indices": mask_indices,
    "masked_select": masked_select,
    "nonzero_count": lambda r: call(r.x()),
    "unique_count": lambda r: call(r.x()),
    "nonzero": nonzero,
    "unique": unique,
    "bincount": lambda r: call(r.whole(64, r.size), size=64),
    "put_along_axis": put_along_axis,
    "total_norm": lambda r: call(r.x(), ord=2.0),
    "clip_factor": lambda r: call(*of_step(r), r.x(), max_norm=1.0),
    "clip_factor_of_ranks": lambda r: call(
        of_step(r)[0], r.values(r.size + 1, dtype=float64, low=0.5), losses=1, max_norm=1.0
    ),
    "square_spans": lambda r: call(r.values(r.size), of=r.size),
    "stochastic_round": lambda r: call(r.x(), dtype=bfloat16, seed=1, offset=0),
    "join_master": lambda r: call(*halves(r)),
    "split_master": lambda r: call(*halves(r), r.x()),
    "rank_sum": lambda r: call(r.values(r.size), r.values(r.size), r.values(1, r.size), rank=0, adds=False),
    "mixed_matmul": product("mk", "kn", dtype=float32),
    "matmul_add": product("mk", "kn", "mn"),
    "add_matmul": product("mn", "mk", "kn"),
    "matmul_sum": product("mk", "kn", "mr", "rn"),
    "norm_linear": product("mk", "k", "nk,w", eps=1e-6),
    "norm_mlp": product("mk", "k", "kn,w", "", "nk,w", "nk,w", eps=1e-6),
    "swiglu_linear_backward": product("mk", "kn", "mN"),
    "quantized_linear": product("mk", "nk,i", "n,f"),
    "low_rank_backward": low_rank_backward,
    "quantize_rows": lambda r: call(r.x()),
    "rms_norm_scale": lambda r: call(
        r.x(), r.values(r.shape[-1]), r.values(*r.shape[:-1], dtype=float64 if r.dtype is float64 else float32)
    ),
    "scale_columns": lambda r: call(r.x(), r.values(r.shape[-1])),
    "scale_rows": lambda r: call(r.x(), r.values(r.shape[0])),
    "layer_norm": lambda r: call(r.x(), r.values(r.shape[-1]), r.values(r.shape[-1]), eps=1e-6),
    "attention_packed": attention_packed,
    "attention_step": attention_step,
    "norm_rope": norm_rope,
    "swiglu_packed": gates,
    "geglu_packed": gates,
    "embedding": lambda r: call(r.order(r.shape[0]), r.x()),
    "embedding_add_": lambda r: call(r.x(), r.x(), r.order(r.shape[0])),
    "index_get": lambda r: call(r.x(), r.order(r.shape[0]), dims=(0,)),
    "sample": sample,
    "next_tokens": next_tokens,
    "multinomial": lambda r: call(r.x(low=0.5, high=2.0), num_samples=1, replacement=True, seed=1, offset=0),
    "newton_schulz": lambda r: call(r.x(), **SCHULZ),
    "muon_step": lambda r: call(r.x(), r.x(), r.x(), *SCALARS, **MUON),
    "adafactor_vector_step": lambda r: call(*(r.values(r.size, low=0.5) for _ in range(3)), *SCALARS, **FACTORED),
    "dora_factors": dora_factors,
    "dequantize_rows": lambda r: call(
        r.values(*r.shape, dtype=int8), r.values(r.shape[0], dtype=float32), dtype=r.dtype
    ),
}


# --- Backward ---------------------------------------------------------------------------------------------------------


class Passes(NamedTuple):
    """The forward pass of a call, which records it, and the backward pass through one recorded call."""

    forward: Callable[[], Any]
    backward: Callable[[], object]


def passes_of(op: Op, inputs: Sequence[Any], attrs: dict[str, Any]) -> Passes:
    """A call recorded once.

    Raises:
        UsageError: its result has no gradient.
    """
    tensors = [TensorBase.wrap(x) if isinstance(x, Array) else x for x in inputs]
    leaves = [t.requires_grad_() for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]

    def forward() -> Any:
        return apply(op, *tensors, **attrs)

    with enable_grad():
        made = forward()
    outputs = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
    if not outputs:
        what = f"{op.name} of these inputs has no gradient"
        raise UsageError(what, where="--backward", next="choose a float dtype, or leave --backward out")
    arriving = [TensorBase.wrap(t.array) for t in outputs]  # its values do not matter
    return Passes(forward, lambda: grad(outputs, leaves, arriving, retain_graph=True, allow_unused=True))


def backward_of(make: Callable[[Request], Arguments], r: Request) -> Arguments:
    """What `<op>_backward` is called with in the backward pass of a call of `<op>`, whose arguments `make` makes."""
    forward = registry[r.op.name.removesuffix("_backward")]
    found: list[Arguments] = []

    def note(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        if op is r.op:
            found.append(Arguments(inputs, attrs))

    passes = passes_of(forward, *make(replace(r, op=forward)))
    with observe(note):
        passes.backward()
    if not found:
        raise UsageError(f"the gradient of {forward.name} needs no {r.op.name} for these inputs", where="--op")
    return found[0]

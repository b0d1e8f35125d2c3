"""Genesis: a deep-learning framework for training small language models, without PyTorch underneath.

Made by `make stubs`: do not edit.
"""

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from genesis import autograd as autograd
from genesis import cuda as cuda
from genesis import custom as custom
from genesis import errors as errors
from genesis import nn as nn
from genesis import optim as optim
from genesis import profiler as profiler
from genesis import random as random
from genesis.autograd.autocast import autocast as autocast
from genesis.autograd.autocast import get_autocast_dtype as get_autocast_dtype
from genesis.autograd.autocast import is_autocast_enabled as is_autocast_enabled
from genesis.autograd.modes import enable_grad as enable_grad
from genesis.autograd.modes import inference_mode as inference_mode
from genesis.autograd.modes import is_grad_enabled as is_grad_enabled
from genesis.autograd.modes import no_grad as no_grad
from genesis.autograd.modes import set_grad_enabled as set_grad_enabled
from genesis.backend import Device as Device
from genesis.backend import Device as device
from genesis.custom.check import check_op as check_op
from genesis.custom.kernel_ops import cuda_op as cuda_op
from genesis.custom.kernel_ops import triton_op as triton_op
from genesis.dtypes import DType as DType
from genesis.dtypes import finfo as finfo
from genesis.dtypes import iinfo as iinfo
from genesis.dtypes import promote_types as promote_types
from genesis.functions.index import IndexPlan
from genesis.functions.linalg import LowRankPairs
from genesis.functions.reduce import ValuesAndIndices as ValuesAndIndices
from genesis.functions.surface import DeviceLike, Dims, DTypeLike, Sizes
from genesis.random import Generator as Generator
from genesis.random import manual_seed as manual_seed
from genesis.saving import load as load
from genesis.saving import save as save
from genesis.shapes import Size as Size
from genesis.tensor import Tensor as Tensor
from genesis_models.generate import generate as generate

__all__ = [
    "DType",
    "Device",
    "Generator",
    "Size",
    "Tensor",
    "ValuesAndIndices",
    "abs",
    "add",
    "addmm",
    "addmv",
    "all",
    "allclose",
    "amax",
    "amin",
    "any",
    "arange",
    "are_deterministic_algorithms_enabled",
    "argmax",
    "argmin",
    "argsort",
    "as_strided",
    "as_tensor",
    "autocast",
    "autograd",
    "baddbmm",
    "bernoulli",
    "bfloat16",
    "bincount",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "bmm",
    "bool",
    "broadcast_to",
    "can_cast",
    "cat",
    "ceil",
    "check_op",
    "chunk",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "clone",
    "concat",
    "contiguous",
    "cos",
    "count_nonzero",
    "cuda",
    "cuda_op",
    "cumsum",
    "custom",
    "device",
    "diagonal",
    "div",
    "dot",
    "double",
    "dropout",
    "einsum",
    "empty",
    "empty_like",
    "enable_grad",
    "eq",
    "equal",
    "erf",
    "errors",
    "exp",
    "exp2",
    "expand",
    "expm1",
    "eye",
    "finfo",
    "flatten",
    "flip",
    "float",
    "float16",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "from_dlpack",
    "from_numpy",
    "full",
    "full_like",
    "gather",
    "ge",
    "gelu_tanh",
    "generate",
    "get_autocast_dtype",
    "get_default_device",
    "get_default_dtype",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "get_rng_state",
    "gt",
    "half",
    "iinfo",
    "index_add",
    "index_copy",
    "index_fill",
    "index_plan",
    "index_put",
    "index_select",
    "inference_mode",
    "initial_seed",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_autocast_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_floating_point",
    "is_grad_enabled",
    "is_tensor",
    "isclose",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "left_shift",
    "lerp",
    "linear",
    "linspace",
    "load",
    "log",
    "log1p",
    "log2",
    "log10",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "long",
    "lt",
    "manual_seed",
    "masked_fill",
    "masked_scatter",
    "masked_select",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mm",
    "movedim",
    "mul",
    "multinomial",
    "mv",
    "narrow",
    "ne",
    "neg",
    "nn",
    "no_grad",
    "nonzero",
    "norm",
    "normal",
    "numel",
    "ones",
    "ones_like",
    "optim",
    "outer",
    "pad",
    "permute",
    "pow",
    "prod",
    "profiler",
    "promote_types",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "randperm",
    "ravel",
    "reciprocal",
    "reduce_all",
    "reduce_amax",
    "reduce_amin",
    "reduce_any",
    "reduce_count_nonzero",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_norm",
    "reduce_prod",
    "reduce_std",
    "reduce_sum",
    "reduce_var",
    "relu",
    "remainder",
    "repeat",
    "repeat_interleave",
    "reshape",
    "result_type",
    "right_shift",
    "roll",
    "round",
    "rsqrt",
    "save",
    "scatter",
    "scatter_add",
    "seed",
    "select",
    "set_default_device",
    "set_default_dtype",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_num_interop_threads",
    "set_num_threads",
    "set_printoptions",
    "set_rng_state",
    "short",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "sum_to_shape",
    "swapaxes",
    "take_along_dim",
    "tan",
    "tanh",
    "tensor",
    "topk",
    "transpose",
    "tril",
    "triton_op",
    "triu",
    "trunc",
    "uint8",
    "unbind",
    "unflatten",
    "unfold",
    "unique",
    "unsqueeze",
    "use_deterministic_algorithms",
    "var",
    "where",
    "zeros",
    "zeros_like",
]
bfloat16: DType
bool: DType
double: DType
float: DType
float16: DType
float32: DType
float64: DType
half: DType
int: DType
int16: DType
int32: DType
int64: DType
int8: DType
long: DType
short: DType
uint8: DType
__version__: str

def abs(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """|x|."""

def add(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x + alpha·y."""

def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: builtins.float = 1, alpha: builtins.float = 1) -> Tensor:
    """Return beta·x + alpha·(mat1 @ mat2); x broadcasts."""

def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: builtins.float = 1, alpha: builtins.float = 1) -> Tensor:
    """Return beta·x + alpha·(mat @ vec); x broadcasts."""

def all(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether all elements over `dim` are not 0; an empty `dim` reduces no dimension, as in torch."""

def allclose(
    input: Tensor,
    other: Tensor,
    rtol: builtins.float = 1e-05,
    atol: builtins.float = 1e-08,
    equal_nan: builtins.bool = False,
) -> builtins.bool:
    """Return whether `isclose` is true everywhere; blocks until the device is done."""

def amax(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""

def amin(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""

def any(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether any element over `dim` is not 0; an empty `dim` reduces no dimension, as in torch."""

def arange(
    *bounds: Any,
    start: Any = None,
    end: Any = None,
    step: Any = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return start, start + step, … up to but excluding end, for arange([start,] end[, step])."""

def are_deterministic_algorithms_enabled() -> builtins.bool:
    """Return what `use_deterministic_algorithms` recorded."""

def argmax(input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False) -> Tensor:
    """Return the position of the largest element (the first of equals) along `dim` or in the flattened tensor."""

def argmin(input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False) -> Tensor:
    """Return the position of the smallest element (the first of equals) along `dim` or in the flattened tensor."""

def argsort(
    input: Tensor, dim: builtins.int | None = None, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """Return the indices of `sort`."""

def as_strided(
    input: Tensor,
    size: Sequence[builtins.int],
    stride: Sequence[builtins.int],
    storage_offset: builtins.int | None = None,
) -> Tensor:
    """Return any window on x's storage; `storage_offset` counts from the storage's start (default: x's own)."""

def as_tensor(data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None) -> Tensor:
    """Return `data` as a tensor, without a copy if possible."""

def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: builtins.float = 1, alpha: builtins.float = 1
) -> Tensor:
    """Return beta·x + alpha·(batch1 @ batch2); x broadcasts."""

def bernoulli(input: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Return 1 with the probabilities in x, else 0."""

def bincount(input: Tensor, weights: Tensor | None = None, minlength: builtins.int = 0) -> Tensor:
    """Return how often each value occurs in x `[n]` (integers from 0 on), or the sum of its `weights`."""

def bitwise_and(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits that x and y share."""

def bitwise_not(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The bits of x inverted."""

def bitwise_or(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits of x or y."""

def bitwise_xor(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits that x and y do not share."""

def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[b, n, k]` @ y `[b, k, m]`, without broadcasting."""

def broadcast_to(input: Tensor, shape: Sequence[builtins.int]) -> Tensor:
    """Return x expanded to `shape`."""

def can_cast(from_: DTypeLike, to: DTypeLike) -> builtins.bool:
    """Return whether promotion may cast `from_` to `to`: never to a lower category, and to bool only from bool."""

def cat(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped."""

def ceil(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded up."""

def chunk(input: Tensor, chunks: builtins.int, dim: builtins.int = 0) -> tuple[Tensor, ...]:
    """Return at most `chunks` views of equal size along `dim`; the last may be smaller."""

def clamp(
    input: Tensor,
    min: Tensor | builtins.float | None = None,
    max: Tensor | builtins.float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x limited to [min, max]; None leaves a side open."""

def clamp_max(input: Tensor, max: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return the smaller of x and `max`, element by element."""

def clamp_min(input: Tensor, min: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return the larger of x and `min`, element by element."""

def clip(
    input: Tensor,
    min: Tensor | builtins.float | None = None,
    max: Tensor | builtins.float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x limited to [min, max]; None leaves a side open."""

def clone(input: Tensor) -> Tensor:
    """Return a copy whose dimensions are stored in the order of x's; autograd records it."""

def concat(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped."""

def contiguous(input: Tensor) -> Tensor:
    """Return x itself if its elements are stored row-major without gaps, else a copy."""

def cos(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The cosine."""

def count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """Return how many elements over `dim` are not 0, as int64."""

def cumsum(
    input: Tensor, dim: builtins.int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None
) -> Tensor:
    """Return cumulative sums along `dim`; integers and bools give int64 by default."""

def diagonal(input: Tensor, offset: builtins.int = 0, dim1: builtins.int = 0, dim2: builtins.int = 1) -> Tensor:
    """Return the diagonals of the matrices in `dim1` and `dim2` as the last dimension, `offset` above the main
    one."""

def div(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    rounding_mode: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""

def dot(input: Tensor, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the dot product of two vectors."""

def dropout(
    input: Tensor, p: builtins.float = 0.5, training: builtins.bool = True, *, generator: Generator | None = None
) -> Tensor:
    """Return x with elements set to 0 with probability `p` and the others divided by 1 - p; x itself if not
    training."""

def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return products of elements, summed over labels, as the equation says: `"bij,bjk->bik"`."""

def empty(
    *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return a tensor with undefined contents, of the default dtype unless `dtype` is given."""

def empty_like(
    input: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return a tensor with undefined contents, with x's shape, dtype and device by default."""

def eq(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x = y."""

def equal(input: Tensor, other: Tensor) -> builtins.bool:
    """Return whether two tensors have the same shape and equal elements; blocks until the device is done."""

def erf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The error function: 2/√π·∫ e^-t² dt from 0 to x."""

def exp(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """e^x."""

def exp2(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """2^x."""

def expand(input: Tensor, *sizes: Sizes) -> Tensor:
    """Return a view of x, repeated along dimensions of size 1 and along new leading ones; -1 keeps a size."""

def expm1(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """e^x - 1, exact near 0."""

def eye(
    n: builtins.int,
    m: builtins.int | None = None,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return an `[n, m]` matrix (square unless m is given) with ones on the diagonal."""

def flatten(input: Tensor, start_dim: builtins.int = 0, end_dim: builtins.int = -1) -> Tensor:
    """Return x with dimensions `start_dim` to `end_dim` (inclusive) merged into one."""

def flip(input: Tensor, *dims: Sizes) -> Tensor:
    """Return a copy with the elements along `dims` in reverse order."""

def floor(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded down."""

def floor_divide(
    input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """x / y rounded down."""

def from_dlpack(source: Any) -> Tensor:
    """Return a tensor over the memory of any object with `__dlpack__`, on the host or on CUDA."""

def from_numpy(values: np.ndarray) -> Tensor:
    """Return a tensor over numpy's memory; read-only arrays and arrays with negative strides are copied."""

def full(
    size: Sizes,
    fill_value: builtins.float,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return a tensor filled with `fill_value`, whose type determines the default dtype: float32, int64 or
    bool."""

def full_like(
    input: Tensor,
    fill_value: builtins.float,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return a tensor filled with `fill_value`, with x's shape, dtype and device by default."""

def gather(input: Tensor, dim: builtins.int, index: Tensor) -> Tensor:
    """Return y with y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; y has the shape of `index`."""

def ge(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≥ y."""

def gelu_tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel, 2016)."""

def get_default_device() -> Device:
    """Return the device of factories without `device`."""

def get_default_dtype() -> DType:
    """Return the dtype of tensors made from Python floats, and of factories without `dtype`."""

def get_float32_matmul_precision() -> str:
    """Return the precision of float32 matmuls on CUDA: "highest", "high" or "medium"."""

def get_num_interop_threads() -> builtins.int:
    """Return what `set_num_interop_threads` recorded, by default 1: ops run one after another."""

def get_num_threads() -> builtins.int:
    """Return how many threads split elementwise work on the CPU."""

def get_rng_state() -> Tensor:
    """Return the state of the default generator: uint8 `[16]`, the seed and the position."""

def gt(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x > y."""

def index_add(input: Tensor, dim: builtins.int, index: Tensor, source: Tensor, *, alpha: builtins.float = 1) -> Tensor:
    """Return x with alpha·source added to the slices `index` along dimension `dim`; repeated indices
    accumulate."""

def index_copy(input: Tensor, dim: builtins.int, index: Tensor, source: Tensor) -> Tensor:
    """Return x with the slices `index` along dimension `dim` replaced by `source`; the last of repeated ones
    wins."""

def index_fill(input: Tensor, dim: builtins.int, index: Tensor, value: Tensor | builtins.float) -> Tensor:
    """Return x with `value`, a number or a one-element tensor, in the slices `index` along dimension `dim`."""

def index_plan(input: Tensor, index: Any, value: Any = ...) -> IndexPlan:
    """Return what `x[index]` does, or `x[index] = value` if a value is given; x does not change."""

def index_put(
    input: Tensor, indices: Sequence[Tensor], values: Tensor | builtins.float, accumulate: builtins.bool = False
) -> Tensor:
    """Return x with `values` written, or added, at `indices`: a tuple of index tensors for the leading
    dimensions."""

def index_select(input: Tensor, dim: builtins.int, index: Tensor) -> Tensor:
    """Return a copy of the slices `index` (a vector) along dimension `dim`."""

def initial_seed() -> builtins.int:
    """Return the seed of the default generator."""

def is_deterministic_algorithms_warn_only_enabled() -> builtins.bool:
    """Return the `warn_only` that `use_deterministic_algorithms` recorded."""

def is_floating_point(input: Tensor) -> builtins.bool:
    """Return whether x has a float dtype."""

def is_tensor(obj: Any) -> builtins.bool:
    """Return whether `obj` is a tensor."""

def isclose(
    input: Tensor,
    other: Tensor,
    rtol: builtins.float = 1e-05,
    atol: builtins.float = 1e-08,
    equal_nan: builtins.bool = False,
) -> Tensor:
    """Return bools: |x - y| <= atol + rtol·|y|, or x = y; with `equal_nan`, NaN is close to NaN."""

def isfinite(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is neither NaN nor infinite."""

def isinf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is ∞ or -∞."""

def isnan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is NaN."""

def le(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≤ y."""

def left_shift(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x·2^y of integers: the bits of x moved up by y."""

def lerp(
    input: Tensor | builtins.float,
    end: Tensor | builtins.float,
    weight: Tensor | builtins.float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x + weight·(end - x)."""

def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    fp8: builtins.int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """Return x·Wᵀ + b + residual for x `[..., in]`, weight `[out, in]`, bias `[out]` and residual `[..., out]`."""

def linspace(
    start: builtins.float,
    end: builtins.float,
    steps: builtins.int,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return `steps` evenly spaced values from start to end, both included."""

def log(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The natural logarithm."""

def log10(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 10."""

def log1p(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + x), exact near 0."""

def log2(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 2."""

def log_softmax(input: Tensor, dim: builtins.int, *, dtype: DTypeLike = None) -> Tensor:
    """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""

def logical_and(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x and y are both not 0."""

def logical_not(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is 0."""

def logical_or(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x or y is not 0."""

def logical_xor(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether just one of x and y is not 0."""

def logsumexp(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return log Σ e^x over `dim` (default: all)."""

def lt(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x < y."""

def masked_fill(input: Tensor, mask: Tensor, value: Tensor | builtins.float) -> Tensor:
    """Return x with `value` where `mask` is true, in x's dtype and the broadcast shape."""

def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Compute `masked_scatter_` on a copy of x, broadcast to the mask's shape."""

def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where `mask` is true (both broadcast) as a vector, in row-major order."""

def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x @ y: matrices in the last two dimensions, batches broadcast; a vector is a row (x) or a column
    (y)."""

def max(
    input: Tensor,
    dim: builtins.int | Tensor | None = None,
    keepdim: builtins.bool = False,
    *,
    other: Tensor | None = None,
) -> Any:
    """Return the largest element, with `dim` (values, indices) along it, with a second tensor the larger of
    each."""

def maximum(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The larger of x and y; NaN where one is NaN."""

def mean(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ x / n over `dim` (default: all); `dtype` casts x first."""

def min(
    input: Tensor,
    dim: builtins.int | Tensor | None = None,
    keepdim: builtins.bool = False,
    *,
    other: Tensor | None = None,
) -> Any:
    """Return the smallest element, with `dim` (values, indices) along it, with a second tensor the smaller of
    each."""

def minimum(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The smaller of x and y; NaN where one is NaN."""

def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k, m]`."""

def movedim(
    input: Tensor, source: builtins.int | Sequence[builtins.int], destination: builtins.int | Sequence[builtins.int]
) -> Tensor:
    """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""

def mul(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x·y."""

def multinomial(
    input: Tensor, num_samples: builtins.int, replacement: builtins.bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Return `num_samples` categories for each row of weights x, `[n]` or `[rows, n]`, as int64."""

def mv(input: Tensor, vec: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k]`."""

def narrow(input: Tensor, dim: builtins.int, start: builtins.int, length: builtins.int) -> Tensor:
    """Return `length` elements of dimension `dim` from `start` on; a negative start counts from the end."""

def ne(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≠ y."""

def neg(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-x."""

def nonzero(input: Tensor, as_tuple: builtins.bool = False) -> Any:
    """Return indices `[n, ndim]` of the elements that are not 0, in row-major order; reading n blocks once."""

def norm(
    input: Tensor,
    p: builtins.float | str | None = 2.0,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all)."""

def normal(
    mean: builtins.float,
    std: builtins.float,
    size: Sizes,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return normal values with the given mean and standard deviation, of shape `size`."""

def numel(input: Tensor) -> builtins.int:
    """Return the number of elements of x."""

def ones(
    *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return a tensor of ones, of the default dtype unless `dtype` is given."""

def ones_like(
    input: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return ones with x's shape, dtype and device by default."""

def outer(input: Tensor, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""

def pad(input: Tensor, pad: Sequence[builtins.int], mode: str = "constant", value: builtins.float = 0.0) -> Tensor:
    """Return x padded with `value`; `pad` lists (before, after) from the last dimension on; negative widths
    crop."""

def permute(input: Tensor, *dims: Sizes) -> Tensor:
    """Return x with its dimensions in the order `dims`."""

def pow(input: Tensor | builtins.float, exponent: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x^y."""

def prod(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""

def rand(
    *size: Sizes,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return uniform values in [0, 1), of shape `size`."""

def rand_like(
    input: Tensor,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Compute `rand` with x's shape, dtype and device by default."""

def randint(
    low: Any,
    high: Any = None,
    size: Sizes | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = ...,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return integers in [low, high), of shape `size`; `randint(high, size)` starts at 0."""

def randint_like(
    input: Tensor,
    low: builtins.int,
    high: builtins.int | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
) -> Tensor:
    """Compute `randint` with x's shape, dtype and device by default."""

def randn(
    *size: Sizes,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return standard normal values, of shape `size`."""

def randn_like(
    input: Tensor,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Compute `randn` with x's shape, dtype and device by default."""

def randperm(
    n: builtins.int, *, generator: Generator | None = None, dtype: DTypeLike = ..., device: DeviceLike = None
) -> Tensor:
    """Return 0 … n-1 in random order."""

def ravel(input: Tensor) -> Tensor:
    """Return all elements in one dimension, in row-major order."""

def reciprocal(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / x."""

def reduce_all(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether all elements over `dim` are not 0; an empty `dim` reduces no dimension, as in torch."""

def reduce_amax(
    input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""

def reduce_amin(
    input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""

def reduce_any(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether any element over `dim` is not 0; an empty `dim` reduces no dimension, as in torch."""

def reduce_count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """Return how many elements over `dim` are not 0, as int64."""

def reduce_logsumexp(
    input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Return log Σ e^x over `dim` (default: all)."""

def reduce_max(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""

def reduce_mean(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ x / n over `dim` (default: all); `dtype` casts x first."""

def reduce_min(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""

def reduce_norm(
    input: Tensor,
    p: builtins.float | str | None = 2.0,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all)."""

def reduce_prod(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""

def reduce_std(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return √`var`, with the same arguments; where it is 0, its gradient is 0."""

def reduce_sum(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ x over `dim` (default: all); `dtype` casts x first, integers and bools give int64 by default."""

def reduce_var(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ (x - mean)² / (n - correction) over `dim` (default: all)."""

def relu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""

def remainder(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x - y·floor(x / y): it has the sign of y."""

def repeat(input: Tensor, *sizes: Sizes) -> Tensor:
    """Return x repeated `sizes` times along each dimension; additional sizes add leading dimensions."""

def repeat_interleave(input: Tensor, repeats: Sizes | Tensor, dim: builtins.int | None = None) -> Tensor:
    """Return each element, or slice along `dim`, `repeats` times in a row; `repeats` is one number or one per
    slice."""

def reshape(input: Tensor, *shape: Sizes) -> Tensor:
    """Return x as `shape` (one size may be -1): a view if the strides allow it, else a copy."""

def result_type(*operands: Any) -> DType:
    """Return the dtype of arithmetic on tensors and numbers: `result_type(x, 2.5)`, or on one sequence of them."""

def right_shift(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x / 2^y of integers, rounded down."""

def roll(
    input: Tensor,
    shifts: builtins.int | Sequence[builtins.int],
    dims: builtins.int | Sequence[builtins.int] | None = None,
) -> Tensor:
    """Return x with elements rotated by `shifts` along `dims`; without `dims`, in the flattened tensor."""

def round(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded to the nearest integer, halves to the even one."""

def rsqrt(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / √x."""

def scatter(input: Tensor, dim: builtins.int, index: Tensor, src: Tensor | builtins.float) -> Tensor:
    """Return x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes wins."""

def scatter_add(input: Tensor, dim: builtins.int, index: Tensor, src: Tensor | builtins.float) -> Tensor:
    """Return x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes accumulate in order."""

def seed() -> builtins.int:
    """Seed the default generator from the system's entropy, and return the seed."""

def select(input: Tensor, dim: builtins.int, index: builtins.int) -> Tensor:
    """Return the slice at `index` of dimension `dim`, which is removed. Raises IndexRangeError."""

def set_default_device(device: DeviceLike) -> None:
    """Set the device of factories without `device`; None means the CPU."""

def set_default_dtype(d: DTypeLike) -> None:
    """Set the default float dtype: of factories, Python floats, and float results of integers."""

def set_float32_matmul_precision(precision: str) -> None:
    """Let float32 matmuls on CUDA round their operands to TF32 ("high", "medium"), or not ("highest", the
    default)."""

def set_num_interop_threads(threads: builtins.int) -> None:
    """Record a number of threads; it has no effect, because ops run one after another."""

def set_num_threads(threads: builtins.int) -> None:
    """Set how many threads elementwise work and matmuls on the CPU may use."""

def set_printoptions(
    precision: builtins.int | None = None,
    threshold: builtins.float | None = None,
    edgeitems: builtins.int | None = None,
    linewidth: builtins.int | None = None,
    profile: str | None = None,
    sci_mode: builtins.bool | None = None,
) -> None:
    """Set how tensors are printed; options that are None stay as they are, but for `sci_mode`."""

def set_rng_state(new_state: Tensor) -> None:
    """Restore a state that `get_rng_state` returned."""

def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + e^-x)."""

def sign(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1."""

def silu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x·sigmoid(x)."""

def sin(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The sine."""

def softmax(input: Tensor, dim: builtins.int, *, dtype: DTypeLike = None) -> Tensor:
    """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""

def sort(
    input: Tensor, dim: builtins.int | None = None, descending: builtins.bool = False, stable: builtins.bool = True
) -> ValuesAndIndices:
    """Return x sorted along `dim` (default: the last), and the original position of each element."""

def split(
    tensor: Tensor, split_size_or_sections: builtins.int | Sequence[builtins.int], dim: builtins.int = 0
) -> tuple[Tensor, ...]:
    """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""

def sqrt(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """√x."""

def square(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x²."""

def squeeze(input: Tensor, dim: builtins.int | Sequence[builtins.int] | None = None) -> Tensor:
    """Return x without its dimensions of size 1: all of them, or those in `dim`."""

def stack(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return tensors of the same shape stacked along a new dimension. Raises ShapeError if shapes differ."""

def std(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return √`var`, with the same arguments; where it is 0, its gradient is 0."""

def sub(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x - alpha·y."""

def sum(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ x over `dim` (default: all); `dtype` casts x first, integers and bools give int64 by default."""

def sum_to_shape(input: Tensor, shape: Sequence[builtins.int]) -> Tensor:
    """Return x summed over the dimensions that broadcasting from `shape` repeats: the gradient of broadcasting."""

def swapaxes(input: Tensor, axis0: builtins.int, axis1: builtins.int) -> Tensor:
    """Compute `transpose`; this is numpy's name."""

def take_along_dim(input: Tensor, indices: Tensor, dim: builtins.int | None = None) -> Tensor:
    """Compute `gather` with x and `indices` broadcast outside `dim`; without `dim`, on the flattened tensors."""

def tan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The tangent."""

def tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""

def tensor(
    data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return a tensor with a copy of `data`: a number, nested lists of numbers, or a numpy array."""

def topk(
    input: Tensor,
    k: builtins.int,
    dim: builtins.int | None = None,
    largest: builtins.bool = True,
    sorted: builtins.bool = True,
) -> ValuesAndIndices:
    """Return the k largest (or smallest) elements along `dim` (default: the last), and their positions."""

def transpose(input: Tensor, dim0: builtins.int, dim1: builtins.int) -> Tensor:
    """Return x with two dimensions swapped."""

def tril(input: Tensor, diagonal: builtins.int = 0) -> Tensor:
    """Return the lower triangles of the matrices in the last two dimensions, up to `diagonal`; 0 elsewhere."""

def triu(input: Tensor, diagonal: builtins.int = 0) -> Tensor:
    """Return the upper triangles of the matrices in the last two dimensions, from `diagonal` on; 0 elsewhere."""

def trunc(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded towards 0."""

def unbind(input: Tensor, dim: builtins.int = 0) -> tuple[Tensor, ...]:
    """Return one view per index of dimension `dim`, which is removed."""

def unflatten(input: Tensor, dim: builtins.int, sizes: Sequence[builtins.int]) -> Tensor:
    """Return x with dimension `dim` split into `sizes` (one may be -1)."""

def unfold(input: Tensor, dimension: builtins.int, size: builtins.int, step: builtins.int) -> Tensor:
    """Return a view of all windows of `size` along `dimension`, `step` apart, as a new last dimension."""

def unique(
    input: Tensor,
    sorted: builtins.bool = True,
    return_inverse: builtins.bool = False,
    return_counts: builtins.bool = False,
) -> Any:
    """Return the distinct values of the flattened x, sorted; reading their count blocks once."""

def unsqueeze(input: Tensor, dim: builtins.int) -> Tensor:
    """Return x with a dimension of size 1 inserted before `dim`."""

def use_deterministic_algorithms(mode: builtins.bool, *, warn_only: builtins.bool = False) -> None:
    """Record the choice; every algorithm here is deterministic in either case."""

def var(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ (x - mean)² / (n - correction) over `dim` (default: all)."""

def where(condition: Tensor, input: Tensor | builtins.float, other: Tensor | builtins.float) -> Tensor:
    """Return x where `condition` (bool) is true, else y."""

def zeros(
    *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return a tensor of zeros, of the default dtype unless `dtype` is given."""

def zeros_like(
    input: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: builtins.bool = False
) -> Tensor:
    """Return zeros with x's shape, dtype and device by default."""

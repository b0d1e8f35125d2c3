"""Genesis: a deep-learning framework for training small language models, without PyTorch underneath.

Made by `make stubs`: do not edit.
"""

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from genesis import autograd as autograd
from genesis import backends as backends
from genesis import compiler as compiler
from genesis import cuda as cuda
from genesis import custom as custom
from genesis import errors as errors
from genesis import linalg as linalg
from genesis import masked as masked
from genesis import nn as nn
from genesis import optim as optim
from genesis import profiler as profiler
from genesis import random as random
from genesis import special as special
from genesis import testing as testing
from genesis.autograd.autocast import autocast as autocast
from genesis.autograd.autocast import get_autocast_dtype as get_autocast_dtype
from genesis.autograd.autocast import is_autocast_enabled as is_autocast_enabled
from genesis.autograd.modes import enable_grad as enable_grad
from genesis.autograd.modes import exact as exact
from genesis.autograd.modes import inference_mode as inference_mode
from genesis.autograd.modes import is_grad_enabled as is_grad_enabled
from genesis.autograd.modes import no_grad as no_grad
from genesis.autograd.modes import set_grad_enabled as set_grad_enabled
from genesis.backend import Device as Device
from genesis.backend import Device as device
from genesis.compiler import compile as compile
from genesis.custom.check import check_op as check_op
from genesis.custom.kernel_ops import cuda_op as cuda_op
from genesis.custom.kernel_ops import triton_op as triton_op
from genesis.dtypes import DType as DType
from genesis.dtypes import DType as dtype
from genesis.dtypes import Layout as Layout
from genesis.dtypes import Layout as layout
from genesis.dtypes import MemoryFormat
from genesis.dtypes import MemoryFormat as memory_format
from genesis.dtypes import finfo as finfo
from genesis.dtypes import iinfo as iinfo
from genesis.dtypes import promote_types as promote_types
from genesis.functions.index import IndexPlan
from genesis.functions.linalg import LowRankPairs
from genesis.functions.reduce import ValuesAndIndices as ValuesAndIndices
from genesis.functions.statistics import MinAndMax
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
    "Layout",
    "Size",
    "Tensor",
    "ValuesAndIndices",
    "abs",
    "abs_",
    "absolute",
    "acos",
    "acos_",
    "acosh",
    "acosh_",
    "add",
    "addbmm",
    "addcdiv",
    "addcmul",
    "addmm",
    "addmv",
    "addmv_",
    "addr",
    "adjoint",
    "alias_copy",
    "all",
    "allclose",
    "alpha_dropout",
    "amax",
    "amin",
    "aminmax",
    "angle",
    "any",
    "arange",
    "arccos",
    "arccos_",
    "arccosh",
    "arccosh_",
    "arcsin",
    "arcsin_",
    "arcsinh",
    "arcsinh_",
    "arctan",
    "arctan2",
    "arctan_",
    "arctanh",
    "arctanh_",
    "are_deterministic_algorithms_enabled",
    "argmax",
    "argmin",
    "argsort",
    "argwhere",
    "as_strided",
    "as_strided_copy",
    "as_strided_scatter",
    "as_tensor",
    "asarray",
    "asin",
    "asin_",
    "asinh",
    "asinh_",
    "atan",
    "atan2",
    "atan_",
    "atanh",
    "atanh_",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "autocast",
    "autograd",
    "backends",
    "baddbmm",
    "bernoulli",
    "bfloat16",
    "bilinear",
    "bincount",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "block_diag",
    "bmm",
    "bool",
    "broadcast_shapes",
    "broadcast_tensors",
    "broadcast_to",
    "bucketize",
    "can_cast",
    "cartesian_prod",
    "cat",
    "cdist",
    "cdouble",
    "ceil",
    "ceil_",
    "celu",
    "celu_",
    "cfloat",
    "chain_matmul",
    "check_op",
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "chunk",
    "clamp",
    "clamp_",
    "clamp_max",
    "clamp_max_",
    "clamp_min",
    "clamp_min_",
    "clip",
    "clip_",
    "clone",
    "column_stack",
    "combinations",
    "compile",
    "compiler",
    "complex",
    "complex64",
    "complex128",
    "concat",
    "concatenate",
    "conj",
    "conj_physical",
    "constant_pad_nd",
    "contiguous",
    "contiguous_format",
    "conv1d",
    "conv_transpose1d",
    "copysign",
    "corrcoef",
    "cos",
    "cos_",
    "cosh",
    "cosh_",
    "cosine_similarity",
    "count_nonzero",
    "cov",
    "cross",
    "cuda",
    "cuda_op",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "cumulative_trapezoid",
    "custom",
    "default_generator",
    "deg2rad",
    "deg2rad_",
    "det",
    "device",
    "diag",
    "diag_embed",
    "diagflat",
    "diagonal",
    "diagonal_copy",
    "diagonal_scatter",
    "diff",
    "digamma",
    "dist",
    "div",
    "divide",
    "dot",
    "double",
    "dropout",
    "dsplit",
    "dstack",
    "dtype",
    "e",
    "einsum",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "enable_grad",
    "eq",
    "equal",
    "erf",
    "erf_",
    "erfc",
    "erfc_",
    "erfinv",
    "errors",
    "exact",
    "exp",
    "exp2",
    "exp2_",
    "exp_",
    "expand",
    "expand_copy",
    "expm1",
    "expm1_",
    "eye",
    "feature_alpha_dropout",
    "fill",
    "fill_",
    "finfo",
    "fix",
    "fix_",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "float",
    "float16",
    "float32",
    "float64",
    "float_power",
    "floor",
    "floor_",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "frac_",
    "from_dlpack",
    "from_numpy",
    "frombuffer",
    "full",
    "full_like",
    "gather",
    "gcd",
    "gcd_",
    "ge",
    "gelu_tanh",
    "generate",
    "geqrf",
    "ger",
    "get_autocast_dtype",
    "get_default_device",
    "get_default_dtype",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "get_rng_state",
    "greater",
    "greater_equal",
    "group_norm",
    "gt",
    "half",
    "hardshrink",
    "heaviside",
    "histc",
    "hsplit",
    "hstack",
    "hypot",
    "iinfo",
    "imag",
    "index_add",
    "index_copy",
    "index_fill",
    "index_plan",
    "index_put",
    "index_put_",
    "index_reduce",
    "index_select",
    "inf",
    "inference_mode",
    "initial_seed",
    "inner",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "inverse",
    "is_autocast_enabled",
    "is_complex",
    "is_conj",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_floating_point",
    "is_grad_enabled",
    "is_neg",
    "is_nonzero",
    "is_same_size",
    "is_signed",
    "is_tensor",
    "isclose",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "kron",
    "kthvalue",
    "layer_norm",
    "layout",
    "lcm",
    "lcm_",
    "ldexp",
    "ldexp_",
    "le",
    "left_shift",
    "lerp",
    "less",
    "less_equal",
    "lgamma",
    "linalg",
    "linear",
    "linspace",
    "load",
    "log",
    "log1p",
    "log1p_",
    "log2",
    "log2_",
    "log10",
    "log10_",
    "log_",
    "log_softmax",
    "logaddexp",
    "logaddexp2",
    "logcumsumexp",
    "logdet",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logit_",
    "logspace",
    "logsumexp",
    "long",
    "lt",
    "lu",
    "lu_solve",
    "lu_unpack",
    "manual_seed",
    "masked",
    "masked_fill",
    "masked_scatter",
    "masked_select",
    "matmul",
    "matrix_exp",
    "matrix_power",
    "max",
    "maximum",
    "mean",
    "median",
    "memory_format",
    "meshgrid",
    "min",
    "minimum",
    "mm",
    "mode",
    "moveaxis",
    "movedim",
    "msort",
    "mul",
    "multinomial",
    "multiply",
    "mv",
    "mvlgamma",
    "nan",
    "nan_to_num",
    "nan_to_num_",
    "nanmean",
    "nanmedian",
    "nanquantile",
    "nansum",
    "narrow",
    "narrow_copy",
    "ne",
    "neg",
    "neg_",
    "negative",
    "negative_",
    "newaxis",
    "nn",
    "no_grad",
    "nonzero",
    "nonzero_static",
    "norm",
    "normal",
    "not_equal",
    "numel",
    "ones",
    "ones_like",
    "optim",
    "orgqr",
    "ormqr",
    "outer",
    "pad",
    "pairwise_distance",
    "pca_lowrank",
    "pdist",
    "permute",
    "permute_copy",
    "pi",
    "pinverse",
    "poisson",
    "polar",
    "polygamma",
    "positive",
    "pow",
    "prelu",
    "preserve_format",
    "prod",
    "profiler",
    "promote_types",
    "put",
    "qr",
    "quantile",
    "rad2deg",
    "rad2deg_",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "randperm",
    "range",
    "ravel",
    "real",
    "reciprocal",
    "reciprocal_",
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
    "relu_",
    "remainder",
    "renorm",
    "repeat",
    "repeat_interleave",
    "reshape",
    "resize_as_",
    "resolve_conj",
    "resolve_neg",
    "result_type",
    "right_shift",
    "rms_norm",
    "roll",
    "rot90",
    "round",
    "round_",
    "row_stack",
    "rrelu",
    "rrelu_",
    "rsqrt",
    "rsqrt_",
    "rsub",
    "save",
    "scalar_tensor",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "searchsorted",
    "seed",
    "select",
    "select_copy",
    "select_scatter",
    "selu",
    "selu_",
    "set_default_device",
    "set_default_dtype",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_num_interop_threads",
    "set_num_threads",
    "set_printoptions",
    "set_rng_state",
    "sgn",
    "sgn_",
    "short",
    "sigmoid",
    "sigmoid_",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sin_",
    "sinc",
    "sinc_",
    "sinh",
    "sinh_",
    "slice_scatter",
    "slogdet",
    "softmax",
    "sort",
    "special",
    "split",
    "split_with_sizes",
    "split_with_sizes_copy",
    "sqrt",
    "sqrt_",
    "square",
    "square_",
    "squeeze",
    "squeeze_copy",
    "stack",
    "std",
    "std_mean",
    "strided",
    "sub",
    "subtract",
    "sum",
    "sum_to_shape",
    "svd",
    "svd_lowrank",
    "swapaxes",
    "swapdims",
    "t",
    "t_copy",
    "take",
    "take_along_dim",
    "tan",
    "tan_",
    "tanh",
    "tanh_",
    "tensor",
    "tensor_split",
    "tensordot",
    "testing",
    "threshold",
    "threshold_",
    "tile",
    "topk",
    "trace",
    "transpose",
    "transpose_copy",
    "trapezoid",
    "trapz",
    "triangular_solve",
    "tril",
    "tril_indices",
    "triton_op",
    "triu",
    "triu_indices",
    "true_divide",
    "trunc",
    "trunc_",
    "uint8",
    "unbind",
    "unbind_copy",
    "unflatten",
    "unfold",
    "unfold_copy",
    "unique",
    "unique_consecutive",
    "unravel_index",
    "unsafe_chunk",
    "unsafe_split",
    "unsqueeze",
    "unsqueeze_copy",
    "use_deterministic_algorithms",
    "vander",
    "var",
    "var_mean",
    "vdot",
    "view_as_complex",
    "view_as_real",
    "view_copy",
    "vsplit",
    "vstack",
    "where",
    "xlogy",
    "xlogy_",
    "zero_",
    "zeros",
    "zeros_like",
]
bfloat16: DType
bool: DType
cdouble: DType
cfloat: DType
complex128: DType
complex64: DType
contiguous_format: MemoryFormat
default_generator: Generator
double: DType
e: builtins.float
float: DType
float16: DType
float32: DType
float64: DType
half: DType
inf: builtins.float
int: DType
int16: DType
int32: DType
int64: DType
int8: DType
long: DType
nan: builtins.float
newaxis: None
pi: builtins.float
preserve_format: MemoryFormat
short: DType
strided: Layout
uint8: DType
__version__: str

def abs(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """|x|."""

def abs_(input: Tensor) -> Tensor:
    """Compute `abs` in place."""

def absolute(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """|x|."""

def acos(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arccosine."""

def acos_(input: Tensor) -> Tensor:
    """Compute `acos` in place."""

def acosh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of cosh, for x ≥ 1."""

def acosh_(input: Tensor) -> Tensor:
    """Compute `acosh` in place."""

def add(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x + alpha·y."""

def addbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: builtins.float = 1,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return beta·x + alpha·Σ batch1 @ batch2 over the batch; with beta = 0, x is not read."""

def addcdiv(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: builtins.float = 1, out: Tensor | None = None
) -> Tensor:
    """Return x + value·tensor1 / tensor2. Raises DTypeError if both are integers."""

def addcmul(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: builtins.float = 1, out: Tensor | None = None
) -> Tensor:
    """Return x + value·tensor1·tensor2."""

def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: builtins.float = 1,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return beta·x + alpha·(mat1 @ mat2); x broadcasts."""

def addmv(
    input: Tensor,
    mat: Tensor,
    vec: Tensor,
    *,
    beta: builtins.float = 1,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return beta·x + alpha·(mat @ vec); x broadcasts."""

def addmv_(input: Tensor, mat: Tensor, vec: Tensor, *, beta: builtins.float = 1, alpha: builtins.float = 1) -> Tensor:
    """Compute `addmv` in place."""

def addr(
    input: Tensor,
    vec1: Tensor,
    vec2: Tensor,
    *,
    beta: builtins.float = 1,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return beta·x + alpha·(vec1 ⊗ vec2); with beta = 0, x is not read."""

def adjoint(input: Tensor) -> Tensor:
    """Return x with its last two dimensions swapped, the adjoint of real matrices."""

def alias_copy(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of x."""

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

def alpha_dropout(
    input: Tensor, p: builtins.float = 0.5, training: builtins.bool = False, inplace: builtins.bool = False
) -> Tensor:
    """Set elements to selu's lower limit with probability p, and scale and shift so that mean and variance
    stay."""

def amax(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""

def amin(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""

def aminmax(
    input: Tensor,
    *,
    dim: builtins.int | None = None,
    keepdim: builtins.bool = False,
    out: Sequence[Tensor] | None = None,
) -> MinAndMax:
    """Return the smallest and the largest elements along `dim`, or of all."""

def angle(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the angles of complex numbers, from -π to π; π for negative real numbers, and 0 for others."""

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
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return start, start + step, … up to but excluding end, for arange([start,] end[, step])."""

def arccos(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arccosine."""

def arccos_(input: Tensor) -> Tensor:
    """Compute `acos` in place."""

def arccosh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of cosh, for x ≥ 1."""

def arccosh_(input: Tensor) -> Tensor:
    """Compute `acosh` in place."""

def arcsin(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arcsine."""

def arcsin_(input: Tensor) -> Tensor:
    """Compute `asin` in place."""

def arcsinh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of sinh."""

def arcsinh_(input: Tensor) -> Tensor:
    """Compute `asinh` in place."""

def arctan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arctangent."""

def arctan2(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The angle of the point (y, x), from -π to π."""

def arctan_(input: Tensor) -> Tensor:
    """Compute `atan` in place."""

def arctanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of tanh."""

def arctanh_(input: Tensor) -> Tensor:
    """Compute `atanh` in place."""

def are_deterministic_algorithms_enabled() -> builtins.bool:
    """Return what `use_deterministic_algorithms` recorded."""

def argmax(
    input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Return the position of the largest element (the first of equals) along `dim` or in the flattened tensor."""

def argmin(
    input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Return the position of the smallest element (the first of equals) along `dim` or in the flattened tensor."""

def argsort(
    input: Tensor,
    dim: builtins.int = -1,
    descending: builtins.bool = False,
    stable: builtins.bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the indices of `sort`."""

def argwhere(input: Tensor) -> Tensor:
    """Return indices `[n, ndim]` of the elements that are not 0."""

def as_strided(
    input: Tensor,
    size: Sequence[builtins.int],
    stride: Sequence[builtins.int],
    storage_offset: builtins.int | None = None,
) -> Tensor:
    """Return any window on x's storage; `storage_offset` counts from the storage's start (default: x's own)."""

def as_strided_copy(
    input: Tensor,
    size: Sequence[builtins.int],
    stride: Sequence[builtins.int],
    storage_offset: builtins.int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return a copy of `as_strided`."""

def as_strided_scatter(
    input: Tensor,
    src: Tensor,
    size: Sequence[builtins.int],
    stride: Sequence[builtins.int],
    storage_offset: builtins.int | None = None,
) -> Tensor:
    """Return a copy of x with `src` in a window of its storage."""

def as_tensor(data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None) -> Tensor:
    """Return `data` as a tensor, without a copy if possible."""

def asarray(
    obj: Any,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    copy: builtins.bool | None = None,
    requires_grad: builtins.bool | None = None,
) -> Tensor:
    """Return data as a tensor: with `copy` always a copy, with False never one, otherwise if needed."""

def asin(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arcsine."""

def asin_(input: Tensor) -> Tensor:
    """Compute `asin` in place."""

def asinh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of sinh."""

def asinh_(input: Tensor) -> Tensor:
    """Compute `asinh` in place."""

def atan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The arctangent."""

def atan2(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The angle of the point (y, x), from -π to π."""

def atan_(input: Tensor) -> Tensor:
    """Compute `atan` in place."""

def atanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of tanh."""

def atanh_(input: Tensor) -> Tensor:
    """Compute `atanh` in place."""

def atleast_1d(*tensors: Any) -> Any:
    """Return a tensor, or a tuple of tensors, with at least 1 dimensions."""

def atleast_2d(*tensors: Any) -> Any:
    """Return a tensor, or a tuple of tensors, with at least 2 dimensions."""

def atleast_3d(*tensors: Any) -> Any:
    """Return a tensor, or a tuple of tensors, with at least 3 dimensions."""

def baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: builtins.float = 1,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return beta·x + alpha·(batch1 @ batch2); x broadcasts."""

def bernoulli(
    input: Tensor, p: builtins.float | None = None, *, generator: Generator | None = None, out: Tensor | None = None
) -> Tensor:
    """Return 1 with the probabilities in x, or with probability `p` for each element, else 0."""

def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_ij x1_i·weight_oij·x2_j + bias_o for inputs `[…, in1]` and `[…, in2]` and weight `[out, in1, in2]`."""

def bincount(input: Tensor, weights: Tensor | None = None, minlength: builtins.int = 0) -> Tensor:
    """Return how often each value occurs in x `[n]` (integers from 0 on), or the sum of its `weights`."""

def bitwise_and(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits that x and y share."""

def bitwise_left_shift(
    input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """x·2^y of integers: the bits of x moved up by y."""

def bitwise_not(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The bits of x inverted."""

def bitwise_or(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits of x or y."""

def bitwise_right_shift(
    input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """x / 2^y of integers, rounded down."""

def bitwise_xor(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The bits that x and y do not share."""

def block_diag(*tensors: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the matrix with matrices (vectors as rows, numbers) as blocks along its diagonal."""

def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[b, n, k]` @ y `[b, k, m]`, without broadcasting."""

def broadcast_shapes(*shapes: Any) -> Any:
    """Return the shape to which shapes (or single sizes) broadcast."""

def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Return views of the tensors in their common shape."""

def broadcast_to(input: Tensor, *size: Sizes) -> Tensor:
    """Return x expanded to `size`."""

def bucketize(
    input: Any,
    boundaries: Tensor,
    *,
    out_int32: builtins.bool = False,
    right: builtins.bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the bucket of each value between sorted `boundaries`; with `right`, a boundary opens the next
    bucket."""

def can_cast(from_: DTypeLike, to: DTypeLike) -> builtins.bool:
    """Return whether promotion may cast `from_` to `to`: never to a lower category, and to bool only from bool."""

def cartesian_prod(*tensors: Any) -> Tensor:
    """Return all combinations of vectors' elements as rows; of one vector, the vector."""

def cat(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped."""

def cdist(
    x1: Tensor, x2: Tensor, p: builtins.float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Tensor:
    """Return the p-norm distances `[..., n, m]` between rows of x1 `[..., n, k]` and x2 `[..., m, k]`."""

def ceil(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded up."""

def ceil_(input: Tensor) -> Tensor:
    """Compute `ceil` in place."""

def celu(input: Tensor, alpha: builtins.float = 1.0, inplace: builtins.bool = False) -> Tensor:
    """x where x > 0, else alpha·(e^(x/alpha) - 1)."""

def celu_(input: Tensor, alpha: builtins.float = 1.0) -> Tensor:
    """Compute `celu` in place."""

def chain_matmul(*matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of matrices; see `linalg.multi_dot`."""

def cholesky(A: Tensor, upper: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return L of A = L·Lᵀ, or Lᵀ if `upper`. Raises LinAlgError unless A is positive-definite."""

def cholesky_inverse(L: Tensor, upper: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the inverse of A, given its Cholesky factor."""

def cholesky_solve(B: Tensor, L: Tensor, upper: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return X of A·X = B, given the Cholesky factor of A."""

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

def clamp_(
    input: Tensor, min: Tensor | builtins.float | None = None, max: Tensor | builtins.float | None = None
) -> Tensor:
    """Compute `clamp` in place."""

def clamp_max(input: Tensor, max: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return the smaller of x and `max`, element by element."""

def clamp_max_(input: Tensor, max: Tensor | builtins.float) -> Tensor:
    """Compute `clamp_max` in place."""

def clamp_min(input: Tensor, min: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return the larger of x and `min`, element by element."""

def clamp_min_(input: Tensor, min: Tensor | builtins.float) -> Tensor:
    """Compute `clamp_min` in place."""

def clip(
    input: Tensor,
    min: Tensor | builtins.float | None = None,
    max: Tensor | builtins.float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x limited to [min, max]; None leaves a side open."""

def clip_(
    input: Tensor, min: Tensor | builtins.float | None = None, max: Tensor | builtins.float | None = None
) -> Tensor:
    """Compute `clamp` in place."""

def clone(input: Tensor, *, memory_format: MemoryFormat | None = None) -> Tensor:
    """Return a copy whose dimensions are stored in the order of x's; autograd records it."""

def column_stack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return tensors joined as columns: vectors and numbers become columns, matrices stay."""

def combinations(input: Tensor, r: builtins.int = 2, with_replacement: builtins.bool = False) -> Tensor:
    """Return the combinations of `r` elements of a vector as rows, in order."""

def complex(real: Tensor, imag: Tensor) -> Tensor:
    """Return a complex tensor of real and imaginary parts, which have the same type, float32 or float64."""

def concat(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped."""

def concatenate(tensors: Sequence[Tensor] | Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped."""

def conj(input: Tensor) -> Tensor:
    """Return the conjugate; a real tensor itself."""

def conj_physical(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return `conj(x)`, computed at once; a real tensor itself."""

def constant_pad_nd(input: Tensor, pad: Sequence[builtins.int], value: builtins.float = 0) -> Tensor:
    """Compute `nn.functional.pad` with a constant."""

def contiguous(input: Tensor, memory_format: MemoryFormat | None = None) -> Tensor:
    """Return x itself if its elements are stored row-major without gaps, else a copy."""

def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: builtins.int = 1,
) -> Tensor:
    """y[o, i] = Σ weight[o, c, k]·x[c, stride·i + dilation·k - padding] + bias[o]."""

def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: builtins.int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The gradient of `conv1d` with respect to its input, as a layer: `[N, C, L]` to `[N, O, …]`."""

def copysign(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return |x| with the sign of y, in a float dtype."""

def corrcoef(input: Tensor) -> Tensor:
    """Return the correlation coefficients of variables (rows) from observations (columns)."""

def cos(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The cosine."""

def cos_(input: Tensor) -> Tensor:
    """Compute `cos` in place."""

def cosh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic cosine."""

def cosh_(input: Tensor) -> Tensor:
    """Compute `cosh` in place."""

def cosine_similarity(x1: Tensor, x2: Tensor, dim: builtins.int = 1, eps: builtins.float = 1e-08) -> Tensor:
    """x1·x2 / (max(‖x1‖, eps)·max(‖x2‖, eps)) over `dim`; the operands broadcast."""

def count_nonzero(input: Tensor, *dim: builtins.int | Sequence[builtins.int]) -> Tensor:
    """Return how many elements over `dim` (default: all) are not 0, as int64."""

def cov(
    input: Tensor, *, correction: builtins.int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Return the covariance matrix of variables (rows) from observations (columns), which may have weights."""

def cross(input: Tensor, other: Tensor, dim: builtins.int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return cross products along `dim` of size 3, by default the first such dimension."""

def cummax(input: Tensor, dim: builtins.int, *, out: Sequence[Tensor] | None = None) -> ValuesAndIndices:
    """Return the largest element so far along `dim`, and its position (the last of equals)."""

def cummin(input: Tensor, dim: builtins.int, *, out: Sequence[Tensor] | None = None) -> ValuesAndIndices:
    """Return the smallest element so far along `dim`, and its position (the last of equals)."""

def cumprod(input: Tensor, dim: builtins.int, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
    """Return cumulative products along `dim`; integers and bools give int64 by default."""

def cumsum(
    input: Tensor, dim: builtins.int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None
) -> Tensor:
    """Return cumulative sums along `dim`; integers and bools give int64 by default."""

def cumulative_trapezoid(
    other: Tensor, input: Tensor | None = None, *, dx: builtins.float | None = None, dim: builtins.int = -1
) -> Tensor:
    """Return the integral up to each sample but the first; arguments as for `trapezoid`."""

def deg2rad(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return degrees as radians."""

def deg2rad_(input: Tensor) -> Tensor:
    """Compute `deg2rad` in place."""

def det(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the determinants of square matrices."""

def diag(input: Tensor, diagonal: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the matrix with a vector as its diagonal, or a copy of a matrix's diagonal."""

def diag_embed(input: Tensor, offset: builtins.int = 0, dim1: builtins.int = -2, dim2: builtins.int = -1) -> Tensor:
    """Return matrices in dimensions `dim1` and `dim2` whose diagonals are the last dimension of x."""

def diagflat(input: Tensor, offset: builtins.int = 0) -> Tensor:
    """Return the matrix with the flattened x as its diagonal."""

def diagonal(input: Tensor, offset: builtins.int = 0, dim1: builtins.int = 0, dim2: builtins.int = 1) -> Tensor:
    """Return the diagonals of the matrices in `dim1` and `dim2` as the last dimension, `offset` above the main
    one."""

def diagonal_copy(
    input: Tensor,
    offset: builtins.int = 0,
    dim1: builtins.int = 0,
    dim2: builtins.int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return a copy of `diagonal`."""

def diagonal_scatter(
    input: Tensor, src: Tensor, offset: builtins.int = 0, dim1: builtins.int = 0, dim2: builtins.int = 1
) -> Tensor:
    """Return a copy of x with `src` as its diagonal."""

def diff(
    input: Tensor,
    n: builtins.int = 1,
    dim: builtins.int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the `n`-th differences of neighbours along `dim`, of x between `prepend` and `append`."""

def digamma(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The derivative of lgamma."""

def dist(input: Tensor, other: Tensor, p: builtins.float = 2) -> Tensor:
    """Return the p-norm of x - other, as one number."""

def div(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    rounding_mode: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""

def divide(
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
    input: Tensor,
    p: builtins.float = 0.5,
    training: builtins.bool = True,
    inplace: builtins.bool = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Return x with elements set to 0 with probability `p` and the others divided by 1 - p; x itself if not
    training."""

def dsplit(input: Tensor, *indices_or_sections: builtins.int | Sequence[builtins.int]) -> tuple[Tensor, ...]:
    """Compute `tensor_split` along dimension 2, into equal sections."""

def dstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return tensors joined along dimension 2, which is added where missing."""

def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return products of elements, summed over labels, as the equation says: `"bij,bjk->bik"`."""

def empty(
    *size: Sizes,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Return a tensor with undefined contents, of the default dtype unless `dtype` is given."""

def empty_like(
    input: Tensor,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Return a tensor with undefined contents, with x's shape, dtype and device by default."""

def empty_permuted(
    size: Sizes,
    physical_layout: Sizes,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a tensor with undefined contents whose dimensions are stored in the order `physical_layout`."""

def empty_strided(
    size: Sizes,
    stride: Sizes,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a tensor with undefined contents and the given strides, in elements."""

def eq(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x = y."""

def equal(input: Tensor, other: Tensor) -> builtins.bool:
    """Return whether two tensors have the same shape and equal elements; blocks until the device is done."""

def erf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The error function: 2/√π·∫ e^-t² dt from 0 to x."""

def erf_(input: Tensor) -> Tensor:
    """Compute `erf` in place."""

def erfc(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 - erf(x), exact for large x."""

def erfc_(input: Tensor) -> Tensor:
    """Compute `erfc` in place."""

def erfinv(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The inverse of erf."""

def exp(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """e^x."""

def exp2(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """2^x."""

def exp2_(input: Tensor) -> Tensor:
    """Compute `exp2` in place."""

def exp_(input: Tensor) -> Tensor:
    """Compute `exp` in place."""

def expand(input: Tensor, *sizes: Sizes, implicit: builtins.bool = False) -> Tensor:
    """Return a view of x, repeated along dimensions of size 1 and along new leading ones; -1 keeps a size."""

def expand_copy(input: Tensor, *sizes: Sizes, implicit: builtins.bool = False, out: Tensor | None = None) -> Tensor:
    """Return a copy of `expand`."""

def expm1(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """e^x - 1, exact near 0."""

def expm1_(input: Tensor) -> Tensor:
    """Compute `expm1` in place."""

def eye(
    n: builtins.int,
    m: builtins.int | None = None,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return an `[n, m]` matrix (square unless m is given) with ones on the diagonal."""

def feature_alpha_dropout(
    input: Tensor, p: builtins.float = 0.5, training: builtins.bool = False, inplace: builtins.bool = False
) -> Tensor:
    """`alpha_dropout` of whole channels, `[N, C, …]`."""

def fill(input: Tensor, value: Tensor | builtins.float) -> Tensor:
    """Return a tensor like x filled with `value`, a number or a 0-d tensor."""

def fill_(input: Tensor, value: Tensor | builtins.float) -> Tensor:
    """Set every element to `value`, a number or a 0-d tensor."""

def fix(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded towards 0."""

def fix_(input: Tensor) -> Tensor:
    """Compute `trunc` in place."""

def flatten(input: Tensor, start_dim: builtins.int = 0, end_dim: builtins.int = -1) -> Tensor:
    """Return x with dimensions `start_dim` to `end_dim` (inclusive) merged into one."""

def flip(input: Tensor, *dims: Sizes) -> Tensor:
    """Return a copy with the elements along `dims` in reverse order."""

def fliplr(input: Tensor) -> Tensor:
    """Return x with dimension 1 reversed."""

def flipud(input: Tensor) -> Tensor:
    """Return x with dimension 0 reversed."""

def float_power(
    input: Tensor | builtins.float, exponent: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """Return x^exponent in float64."""

def floor(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded down."""

def floor_(input: Tensor) -> Tensor:
    """Compute `floor` in place."""

def floor_divide(
    input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """x / y rounded down."""

def fmax(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the larger of x and y; where one is NaN, the other."""

def fmin(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the smaller of x and y; where one is NaN, the other."""

def fmod(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return x - y·trunc(x / y): the remainder with the sign of x."""

def frac(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x - trunc(x)."""

def frac_(input: Tensor) -> Tensor:
    """Compute `frac` in place."""

def from_dlpack(source: Any) -> Tensor:
    """Return a tensor over the memory of any object with `__dlpack__`, on the host or on CUDA."""

def from_numpy(values: np.ndarray) -> Tensor:
    """Return a tensor over numpy's memory; read-only arrays are copied."""

def frombuffer(
    buffer: bytes | bytearray | memoryview,
    *,
    dtype: DTypeLike,
    count: builtins.int = -1,
    offset: builtins.int = 0,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """Return a vector over the memory of a buffer, such as bytes; read-only memory is copied."""

def full(
    size: Sizes,
    fill_value: builtins.float,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
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
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Return a tensor filled with `fill_value`, with x's shape, dtype and device by default."""

def gather(
    input: Tensor, dim: builtins.int, index: Tensor, *, sparse_grad: builtins.bool = False, out: Tensor | None = None
) -> Tensor:
    """Return y with y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; y has the shape of `index`."""

def gcd(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the greatest common divisor of integers, by Euclid's algorithm; it blocks once a step."""

def gcd_(input: Tensor, other: Tensor) -> Tensor:
    """Compute `gcd` in place."""

def ge(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≥ y."""

def gelu_tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel, 2016)."""

def geqrf(input: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return R with the reflectors of Q below it, and their factors tau; without gradient."""

def ger(input: Tensor, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""

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

def greater(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x > y."""

def greater_equal(
    input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """Whether x ≥ y."""

def group_norm(
    input: Tensor,
    num_groups: builtins.int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: builtins.float = 1e-05,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias with statistics of groups of channels (Wu & He, 2018)."""

def gt(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x > y."""

def hardshrink(input: Tensor, lambd: builtins.float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """x, and 0 within ±lambd."""

def heaviside(input: Tensor, values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return 0 for negative elements, 1 for positive ones, and `values` where x is 0."""

def histc(
    input: Tensor,
    bins: builtins.int = 100,
    min: builtins.float = 0,
    max: builtins.float = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the counts of elements in `bins` equal intervals from `min` to `max`; both 0 mean the data's
    range."""

def hsplit(input: Tensor, *indices_or_sections: builtins.int | Sequence[builtins.int]) -> tuple[Tensor, ...]:
    """Compute `tensor_split` along dimension 1, into equal sections."""

def hstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return tensors joined along dimension 1; vectors along dimension 0."""

def hypot(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return √(x² + y²), computed in float64."""

def imag(input: Tensor) -> Tensor:
    """Return the imaginary parts of a complex tensor, a view."""

def index_add(
    input: Tensor,
    dim: builtins.int,
    index: Tensor,
    source: Tensor,
    *,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with alpha·source added to the slices `index` along dimension `dim`; repeated indices
    accumulate."""

def index_copy(input: Tensor, dim: builtins.int, index: Tensor, source: Tensor, *, out: Tensor | None = None) -> Tensor:
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

def index_put_(
    input: Tensor, indices: Sequence[Tensor], values: Tensor | builtins.float, accumulate: builtins.bool = False
) -> Tensor:
    """Compute `index_put` in place."""

def index_reduce(
    input: Tensor,
    dim: builtins.int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: builtins.bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with slices of `source` reduced into the slices `index` of `dim`: "prod", "mean", "amax" or
    "amin"."""

def index_select(input: Tensor, dim: builtins.int, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of the slices `index` (a vector) along dimension `dim`."""

def initial_seed() -> builtins.int:
    """Return the seed of the default generator."""

def inner(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the sums of products over the last dimensions of x and y; a number scales the other."""

def inverse(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the inverses of square matrices. Raises LinAlgError for a singular one."""

def is_complex(input: Tensor) -> builtins.bool:
    """Return whether a tensor is complex, as results of `polar` and `view_as_complex` are."""

def is_conj(input: Tensor) -> builtins.bool:
    """Return False: conjugates are always computed."""

def is_deterministic_algorithms_warn_only_enabled() -> builtins.bool:
    """Return the `warn_only` that `use_deterministic_algorithms` recorded."""

def is_floating_point(input: Tensor) -> builtins.bool:
    """Return whether x has a float dtype."""

def is_neg(input: Tensor) -> builtins.bool:
    """Return False: negatives are always computed."""

def is_nonzero(input: Tensor) -> builtins.bool:
    """Return whether the only element is not 0. Raises ShapeError unless there is just one."""

def is_same_size(input: Tensor, other: Tensor) -> builtins.bool:
    """Return whether two tensors have the same shape."""

def is_signed(input: Tensor) -> builtins.bool:
    """Return whether a tensor's dtype has negative values."""

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

def isin(
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: builtins.bool = False,
    invert: builtins.bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return whether each element equals one of `test_elements`; `invert` negates it. One may be a number."""

def isinf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is ∞ or -∞."""

def isnan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is NaN."""

def isneginf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return whether elements are -∞."""

def isposinf(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return whether elements are ∞."""

def isreal(input: Tensor) -> Tensor:
    """Return whether elements are real: True for every dtype of Genesis."""

def kron(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the Kronecker product: x with each element replaced by its product with y."""

def kthvalue(
    input: Tensor,
    k: builtins.int,
    dim: builtins.int = -1,
    keepdim: builtins.bool = False,
    *,
    out: Sequence[Tensor] | None = None,
) -> ValuesAndIndices:
    """Return the k-th smallest element along `dim`, counted from 1, and its position."""

def layer_norm(
    input: Tensor,
    normalized_shape: builtins.int | Sequence[builtins.int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: builtins.float = 1e-05,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias over the last dimensions of x = `input`; float32 statistics or
    wider."""

def lcm(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the least common multiple of integers."""

def lcm_(input: Tensor, other: Tensor) -> Tensor:
    """Compute `lcm` in place."""

def ldexp(input: Tensor, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return x·2^other, in a float dtype."""

def ldexp_(input: Tensor, other: Tensor | builtins.float) -> Tensor:
    """Compute `ldexp` in place."""

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

def less(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x < y."""

def less_equal(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≤ y."""

def lgamma(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log |Γ(x)|."""

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
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return `steps` evenly spaced values from start to end, both included."""

def log(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The natural logarithm."""

def log10(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 10."""

def log10_(input: Tensor) -> Tensor:
    """Compute `log10` in place."""

def log1p(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + x), exact near 0."""

def log1p_(input: Tensor) -> Tensor:
    """Compute `log1p` in place."""

def log2(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 2."""

def log2_(input: Tensor) -> Tensor:
    """Compute `log2` in place."""

def log_(input: Tensor) -> Tensor:
    """Compute `log` in place."""

def log_softmax(input: Tensor, dim: builtins.int, dtype: DTypeLike = None, *, out: Tensor | None = None) -> Tensor:
    """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""

def logaddexp(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return log(e^x + e^y), without overflow."""

def logaddexp2(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return log2(2^x + 2^y), without overflow."""

def logcumsumexp(input: Tensor, dim: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return log Σ e^x of the elements up to each one along `dim`, without overflow."""

def logdet(input: Tensor) -> Tensor:
    """Return the logarithms of determinants: NaN for negative ones."""

def logical_and(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x and y are both not 0."""

def logical_not(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Whether x is 0."""

def logical_or(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x or y is not 0."""

def logical_xor(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether just one of x and y is not 0."""

def logit(input: Tensor, eps: builtins.float | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return log(x / (1 - x)); with `eps`, of x limited to [eps, 1 - eps]."""

def logit_(input: Tensor, eps: builtins.float | None = None) -> Tensor:
    """Compute `logit` in place."""

def logspace(
    start: builtins.float,
    end: builtins.float,
    steps: builtins.int,
    base: builtins.float = 10.0,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return `base` to the power of `steps` evenly spaced values from start to end."""

def logsumexp(input: Tensor, dim: Dims = None, keepdim: builtins.bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return log Σ e^x over `dim` (default: all)."""

def lt(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x < y."""

def lu(
    A: Tensor, pivot: builtins.bool = True, get_infos: builtins.bool = False, *, out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return L and U in one matrix and the pivots, and info with `get_infos`."""

def lu_solve(b: Tensor, LU_data: Tensor, LU_pivots: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return X of A·X = b, given the result of `linalg.lu_factor`."""

def lu_unpack(
    LU_data: Tensor,
    LU_pivots: Tensor,
    unpack_data: builtins.bool = True,
    unpack_pivots: builtins.bool = True,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return P, L and U from `lu_factor`; the parts that are not asked for are empty."""

def masked_fill(input: Tensor, mask: Tensor, value: Tensor | builtins.float) -> Tensor:
    """Return x with `value` where `mask` is true, in x's dtype and the broadcast shape."""

def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Compute `masked_scatter_` on a copy of x, broadcast to the mask's shape."""

def masked_select(input: Tensor, mask: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the elements where `mask` is true (both broadcast) as a vector, in row-major order."""

def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x @ y: matrices in the last two dimensions, batches broadcast; a vector is a row (x) or a column
    (y)."""

def matrix_exp(A: Tensor) -> Tensor:
    """Return the matrix exponential, by scaling and squaring in float64; the host reads the largest norm."""

def matrix_power(A: Tensor, n: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return the n-th power of square matrices; a negative n inverts them first."""

def max(
    input: Tensor,
    dim: builtins.int | Tensor | None = None,
    keepdim: builtins.bool = False,
    *,
    other: Tensor | None = None,
    out: Tensor | None = None,
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

def median(
    input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Any:
    """Return the lower median of all elements, or (values, indices) along `dim`; NaN if there is one."""

def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Return views of vectors as coordinates of a grid; `indexing` is "ij" (default) or "xy" (first two
    swapped)."""

def min(
    input: Tensor,
    dim: builtins.int | Tensor | None = None,
    keepdim: builtins.bool = False,
    *,
    other: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Return the smallest element, with `dim` (values, indices) along it, with a second tensor the smaller of
    each."""

def minimum(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """The smaller of x and y; NaN where one is NaN."""

def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k, m]`."""

def mode(
    input: Tensor, dim: builtins.int = -1, keepdim: builtins.bool = False, *, out: Sequence[Tensor] | None = None
) -> ValuesAndIndices:
    """Return the most frequent element along `dim` (the smallest if there are several), and its last position."""

def moveaxis(
    input: Tensor, source: builtins.int | Sequence[builtins.int], destination: builtins.int | Sequence[builtins.int]
) -> Tensor:
    """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""

def movedim(
    input: Tensor, source: builtins.int | Sequence[builtins.int], destination: builtins.int | Sequence[builtins.int]
) -> Tensor:
    """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""

def msort(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x sorted along its first dimension."""

def mul(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x·y."""

def multinomial(
    input: Tensor,
    num_samples: builtins.int,
    replacement: builtins.bool = False,
    *,
    generator: Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `num_samples` categories for each row of weights x, `[n]` or `[rows, n]`, as int64."""

def multiply(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x·y."""

def mv(input: Tensor, vec: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k]`."""

def mvlgamma(input: Tensor, p: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return the logarithm of the multivariate gamma function of dimension `p`."""

def nan_to_num(
    input: Tensor,
    nan: builtins.float | None = None,
    posinf: builtins.float | None = None,
    neginf: builtins.float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with NaN, ∞ and -∞ replaced: by 0 and the dtype's largest and smallest values unless given."""

def nan_to_num_(
    input: Tensor,
    nan: builtins.float | None = None,
    posinf: builtins.float | None = None,
    neginf: builtins.float | None = None,
) -> Tensor:
    """Compute `nan_to_num` in place."""

def nanmean(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean over `dim` of the elements that are not NaN."""

def nanmedian(
    input: Tensor, dim: builtins.int | None = None, keepdim: builtins.bool = False, *, out: Tensor | None = None
) -> Any:
    """Return the lower median of the elements that are not NaN; see `median`."""

def nanquantile(
    input: Tensor,
    q: Any,
    dim: builtins.int | None = None,
    keepdim: builtins.bool = False,
    *,
    interpolation: str = "linear",
    out: Tensor | None = None,
) -> Tensor:
    """Compute `quantile` of the elements that are not NaN."""

def nansum(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the sum over `dim`, with NaN counted as 0."""

def narrow(input: Tensor, dim: builtins.int, start: builtins.int, length: builtins.int) -> Tensor:
    """Return `length` elements of dimension `dim` from `start` on; a negative start counts from the end."""

def narrow_copy(
    input: Tensor, dim: builtins.int, start: builtins.int, length: builtins.int, *, out: Tensor | None = None
) -> Tensor:
    """Return a copy of `narrow`."""

def ne(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≠ y."""

def neg(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-x."""

def neg_(input: Tensor) -> Tensor:
    """Compute `neg` in place."""

def negative(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-x."""

def negative_(input: Tensor) -> Tensor:
    """Compute `neg` in place."""

def nonzero(input: Tensor, as_tuple: builtins.bool = False, *, out: Tensor | None = None) -> Any:
    """Return indices `[n, ndim]` of the elements that are not 0, in row-major order; reading n blocks once."""

def nonzero_static(
    input: Tensor, *, size: builtins.int, fill_value: builtins.int = -1, out: Tensor | None = None
) -> Tensor:
    """Return the first `size` rows of `nonzero(x)`, followed by rows of `fill_value`."""

def norm(
    input: Tensor,
    p: builtins.float | str | None = "fro",
    dim: Dims = None,
    keepdim: builtins.bool = False,
    dtype: DTypeLike = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all)."""

def normal(
    mean: Tensor | builtins.float = 0.0,
    std: Tensor | builtins.float = 1.0,
    size: Sizes | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Draw normal values: of shape `size`, or one for each element of `mean` and `std` if one of these is a
    tensor."""

def not_equal(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Whether x ≠ y."""

def numel(input: Tensor) -> builtins.int:
    """Return the number of elements of x."""

def ones(
    *size: Sizes,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a tensor of ones, of the default dtype unless `dtype` is given."""

def ones_like(
    input: Tensor,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Return ones with x's shape, dtype and device by default."""

def orgqr(input: Tensor, tau: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `linalg.householder_product`."""

def ormqr(
    input: Tensor,
    tau: Tensor,
    other: Tensor,
    left: builtins.bool = True,
    transpose: builtins.bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return Q·other (Qᵀ with `transpose`; other·Q if not `left`), with Q from the reflectors of `geqrf`."""

def outer(input: Tensor, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""

def pad(input: Tensor, pad: Sequence[builtins.int], mode: str = "constant", value: builtins.float = 0.0) -> Tensor:
    """Return x padded with `value`; `pad` lists (before, after) from the last dimension on; negative widths
    crop."""

def pairwise_distance(
    x1: Tensor, x2: Tensor, p: builtins.float = 2.0, eps: builtins.float = 1e-06, keepdim: builtins.bool = False
) -> Tensor:
    """‖x1 - x2 + eps‖_p over the last dimension; the operands broadcast."""

def pca_lowrank(
    A: Tensor, q: builtins.int | None = None, center: builtins.bool = True, niter: builtins.int = 2
) -> tuple[Tensor, ...]:
    """Return `svd_lowrank` of A, whose columns are centered by default."""

def pdist(input: Tensor, p: builtins.float = 2.0) -> Tensor:
    """‖x_i - x_j‖_p of all pairs of rows i < j of x = `input` `[N, M]`: `[N·(N-1)/2]`."""

def permute(input: Tensor, *dims: Sizes) -> Tensor:
    """Return x with its dimensions in the order `dims`."""

def permute_copy(input: Tensor, *dims: Sizes, out: Tensor | None = None) -> Tensor:
    """Return a copy of `permute`."""

def pinverse(input: Tensor, rcond: builtins.float = 1e-15) -> Tensor:
    """Return pseudo-inverses; singular values up to rcond·largest count as 0."""

def poisson(input: Tensor, generator: Generator | None = None) -> Tensor:
    """Return Poisson values with the rates in x. Each step blocks, to read whether another one is needed."""

def polar(abs: Tensor, angle: Tensor) -> Tensor:
    """Return abs·(cos(angle) + i·sin(angle)), of tensors of the same type, float32 or float64."""

def polygamma(n: builtins.int, input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the n-th derivative of digamma. Raises UsageError for a negative n."""

def positive(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x itself. Raises DTypeError for bools."""

def pow(input: Tensor | builtins.float, exponent: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x^y."""

def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """x where x > 0, else weight·x; `weight` has one element, or one for each channel (dimension 1)."""

def prod(
    input: Tensor,
    dim: Dims = None,
    keepdim: builtins.bool = False,
    *,
    dtype: DTypeLike = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""

def put(input: Tensor, index: Tensor, source: Tensor, accumulate: builtins.bool = False) -> Tensor:
    """Compute `put_` on a copy."""

def qr(input: Tensor, some: builtins.bool = True, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return Q and R, reduced if `some`."""

def quantile(
    input: Tensor,
    q: Any,
    dim: builtins.int | None = None,
    keepdim: builtins.bool = False,
    *,
    interpolation: str = "linear",
    out: Tensor | None = None,
) -> Tensor:
    """Return quantiles `q` (a number or a vector) of all elements or along `dim`; NaN where there is one."""

def rad2deg(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return radians as degrees."""

def rad2deg_(input: Tensor) -> Tensor:
    """Compute `rad2deg` in place."""

def rand(
    *size: Sizes,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return uniform values in [0, 1), of shape `size`."""

def rand_like(
    input: Tensor,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Compute `rand` with x's shape, dtype and device by default."""

def randint(
    low: Any,
    high: Any = None,
    size: Sizes | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
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
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Compute `randint` with x's shape, dtype and device by default."""

def randn(
    *size: Sizes,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return standard normal values, of shape `size`."""

def randn_like(
    input: Tensor,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Compute `randn` with x's shape, dtype and device by default."""

def randperm(
    n: builtins.int,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return 0 … n-1 in random order, as int64 unless `dtype` is given."""

def range(
    start: builtins.float,
    end: builtins.float | None = None,
    step: builtins.float = 1,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return start, start + step, … up to and including end, in the default dtype unless `dtype` is given."""

def ravel(input: Tensor) -> Tensor:
    """Return all elements in one dimension, in row-major order."""

def real(input: Tensor) -> Tensor:
    """Return the real parts, a view; a real tensor itself."""

def reciprocal(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / x."""

def reciprocal_(input: Tensor) -> Tensor:
    """Compute `reciprocal` in place."""

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

def reduce_count_nonzero(input: Tensor, *dim: builtins.int | Sequence[builtins.int]) -> Tensor:
    """Return how many elements over `dim` (default: all) are not 0, as int64."""

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
    p: builtins.float | str | None = "fro",
    dim: Dims = None,
    keepdim: builtins.bool = False,
    dtype: DTypeLike = None,
    *,
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
    """Return max(x, 0)."""

def relu_(input: Tensor) -> Tensor:
    """Compute `relu` in place."""

def remainder(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x - y·floor(x / y): it has the sign of y."""

def renorm(
    input: Tensor, p: builtins.float, dim: builtins.int, maxnorm: builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """Return x with each slice along `dim` scaled so that its p-norm is at most `maxnorm`."""

def repeat(input: Tensor, *sizes: Sizes) -> Tensor:
    """Return x repeated `sizes` times along each dimension; additional sizes add leading dimensions."""

def repeat_interleave(
    input: Tensor,
    repeats: Sizes | Tensor = (),
    dim: builtins.int | None = None,
    *,
    output_size: builtins.int | None = None,
) -> Tensor:
    """Return each element, or slice along `dim`, `repeats` times in a row; `repeats` is one number or one per
    slice."""

def reshape(input: Tensor, *shape: Sizes) -> Tensor:
    """Return x as `shape` (one size may be -1): a view if the strides allow it, else a copy."""

def resize_as_(input: Tensor, the_template: Tensor, *, memory_format: MemoryFormat | None = None) -> Tensor:
    """Change x's shape to another tensor's; see `Tensor.resize_`."""

def resolve_conj(input: Tensor) -> Tensor:
    """Return x: conjugates are always computed."""

def resolve_neg(input: Tensor) -> Tensor:
    """Return x: negatives are always computed."""

def result_type(*operands: Any) -> DType:
    """Return the dtype of arithmetic on tensors and numbers: `result_type(x, 2.5)`, or on one sequence of them."""

def right_shift(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """x / 2^y of integers, rounded down."""

def rms_norm(
    input: Tensor,
    normalized_shape: builtins.int | Sequence[builtins.int],
    weight: Tensor | None = None,
    eps: builtins.float | None = None,
) -> Tensor:
    """x / √(mean(x²) + eps)·weight over the last dimensions of x = `input`, with statistics in float32 or
    wider."""

def roll(
    input: Tensor,
    shifts: builtins.int | Sequence[builtins.int],
    dims: builtins.int | Sequence[builtins.int] | None = None,
) -> Tensor:
    """Return x with elements rotated by `shifts` along `dims`; without `dims`, in the flattened tensor."""

def rot90(input: Tensor, k: builtins.int = 1, dims: Sequence[builtins.int] = (0, 1)) -> Tensor:
    """Return x rotated `k` quarter turns in the plane of `dims`, from the first towards the second."""

def round(input: Tensor, *, decimals: builtins.int = 0, out: Tensor | None = None) -> Tensor:
    """Return x rounded to the nearest multiple of 10^-decimals, halves to the even one; integers stay
    unchanged."""

def round_(input: Tensor, *, decimals: builtins.int = 0) -> Tensor:
    """Compute `round` in place."""

def row_stack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return tensors joined along dimension 0; vectors count as rows."""

def rrelu(
    input: Tensor,
    lower: builtins.float = 0.125,
    upper: builtins.float = 0.3333333333333333,
    training: builtins.bool = False,
    inplace: builtins.bool = False,
) -> Tensor:
    """leaky_relu with a slope drawn for each element from [lower, upper]; their mean outside of training."""

def rrelu_(
    input: Tensor,
    lower: builtins.float = 0.125,
    upper: builtins.float = 0.3333333333333333,
    training: builtins.bool = False,
) -> Tensor:
    """Compute `rrelu` in place."""

def rsqrt(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / √x."""

def rsqrt_(input: Tensor) -> Tensor:
    """Compute `rsqrt` in place."""

def rsub(
    input: Tensor, other: Tensor | builtins.float, *, alpha: builtins.float = 1, out: Tensor | None = None
) -> Tensor:
    """Return other - alpha·x."""

def scalar_tensor(
    s: Any,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a number as a tensor without dimensions, in the default dtype unless `dtype` is given."""

def scatter(
    input: Tensor,
    dim: builtins.int,
    index: Tensor,
    src: Tensor | builtins.float,
    *,
    reduce: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes wins."""

def scatter_add(
    input: Tensor, dim: builtins.int, index: Tensor, src: Tensor | builtins.float, *, out: Tensor | None = None
) -> Tensor:
    """Return x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes accumulate in order."""

def scatter_reduce(
    input: Tensor,
    dim: builtins.int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: builtins.bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with src[i, j] reduced into x[i, index[i, j]] (dim = 1): "sum", "prod", "mean", "amax" or
    "amin"."""

def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: builtins.bool = False,
    right: builtins.bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return where `input` would be inserted in sorted lines: before equals, or with `right` after them."""

def seed() -> builtins.int:
    """Seed the default generator from the system's entropy, and return the seed."""

def select(input: Tensor, dim: builtins.int, index: builtins.int) -> Tensor:
    """Return the slice at `index` of dimension `dim`, which is removed. Raises IndexRangeError."""

def select_copy(input: Tensor, dim: builtins.int, index: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `select`."""

def select_scatter(input: Tensor, src: Tensor, dim: builtins.int, index: builtins.int) -> Tensor:
    """Return a copy of x with `src` as slice `index` of `dim`."""

def selu(input: Tensor, inplace: builtins.bool = False) -> Tensor:
    """1.0507·elu(x, 1.6733), which keeps mean 0 and variance 1 (Klambauer et al., 2017)."""

def selu_(input: Tensor) -> Tensor:
    """Compute `selu` in place."""

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
    """Set how tensors are printed. Options that are None, except `sci_mode`, do not change."""

def set_rng_state(new_state: Tensor) -> None:
    """Restore a state that `get_rng_state` returned."""

def sgn(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1."""

def sgn_(input: Tensor) -> Tensor:
    """Compute `sign` in place."""

def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + e^-x)."""

def sigmoid_(input: Tensor) -> Tensor:
    """Compute `sigmoid` in place."""

def sign(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1."""

def signbit(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return whether the sign is negative; also for -0."""

def silu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x·σ(x), with the same bits as in SwiGLU."""

def sin(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The sine."""

def sin_(input: Tensor) -> Tensor:
    """Compute `sin` in place."""

def sinc(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return sin(πx) / (πx); 1 at 0."""

def sinc_(input: Tensor) -> Tensor:
    """Compute `sinc` in place."""

def sinh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic sine."""

def sinh_(input: Tensor) -> Tensor:
    """Compute `sinh` in place."""

def slice_scatter(
    input: Tensor,
    src: Tensor,
    dim: builtins.int = 0,
    start: builtins.int | None = None,
    end: builtins.int | None = None,
    step: builtins.int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return a copy of x with `src` in start:end:step of `dim`."""

def slogdet(A: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the signs of determinants and the logarithms of their sizes."""

def softmax(input: Tensor, dim: builtins.int, dtype: DTypeLike = None, *, out: Tensor | None = None) -> Tensor:
    """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""

def sort(
    input: Tensor,
    dim: builtins.int = -1,
    descending: builtins.bool = False,
    stable: builtins.bool = True,
    *,
    out: Sequence[Tensor] | None = None,
) -> ValuesAndIndices:
    """Return x sorted along `dim` (default: the last), and the original position of each element."""

def split(
    tensor: Tensor, split_size_or_sections: builtins.int | Sequence[builtins.int], dim: builtins.int = 0
) -> tuple[Tensor, ...]:
    """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""

def split_with_sizes(input: Tensor, split_sizes: Sequence[builtins.int], dim: builtins.int = 0) -> tuple[Tensor, ...]:
    """Return views of the listed sizes along `dim`."""

def split_with_sizes_copy(
    input: Tensor, split_sizes: Sequence[builtins.int], dim: builtins.int = 0, *, out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return a copy of `split_with_sizes`."""

def sqrt(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """√x."""

def sqrt_(input: Tensor) -> Tensor:
    """Compute `sqrt` in place."""

def square(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x²."""

def square_(input: Tensor) -> Tensor:
    """Compute `square` in place."""

def squeeze(input: Tensor, *dim: builtins.int | Sequence[builtins.int]) -> Tensor:
    """Return x without its dimensions of size 1: all of them, or those in `dim`."""

def squeeze_copy(input: Tensor, *dim: builtins.int | Sequence[builtins.int], out: Tensor | None = None) -> Tensor:
    """Return a copy of `squeeze`."""

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

def std_mean(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `std` and `mean` over `dim`."""

def sub(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    alpha: builtins.float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x - alpha·y."""

def subtract(
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

def svd(
    input: Tensor, some: builtins.bool = True, compute_uv: builtins.bool = True, *, out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return U, singular values and V (not Vᵀ), reduced if `some`; U and V are zeros without `compute_uv`."""

def svd_lowrank(
    A: Tensor, q: builtins.int | None = 6, niter: builtins.int | None = 2, M: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return U, S and V of about the q largest singular values, by random projections (Halko et al., 2009)."""

def swapaxes(input: Tensor, axis0: builtins.int, axis1: builtins.int) -> Tensor:
    """Compute `transpose`; this is numpy's name."""

def swapdims(input: Tensor, dim0: builtins.int, dim1: builtins.int) -> Tensor:
    """Return x with two dimensions swapped."""

def t(input: Tensor) -> Tensor:
    """Return the transpose of a matrix; vectors and scalars are returned unchanged."""

def t_copy(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `t`."""

def take(input: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the elements of the flattened x at `index`, in its shape."""

def take_along_dim(
    input: Tensor, indices: Tensor, dim: builtins.int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute `gather` with x and `indices` broadcast outside `dim`; without `dim`, on the flattened tensors."""

def tan(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The tangent."""

def tan_(input: Tensor) -> Tensor:
    """Compute `tan` in place."""

def tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""

def tanh_(input: Tensor) -> Tensor:
    """Compute `tanh` in place."""

def tensor(
    data: Any,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a tensor with a copy of `data`: a number, nested lists of numbers, or a numpy array."""

def tensor_split(
    input: Tensor,
    indices_or_sections: builtins.int | Sequence[builtins.int] | Tensor,
    dim: builtins.int = 0,
    *,
    indices: Any = None,
    sections: Any = None,
) -> tuple[Tensor, ...]:
    """Return views along `dim`: as many as the number says, of nearly equal size, or cut before the indices."""

def tensordot(a: Tensor, b: Tensor, dims: Any = 2, *, out: Tensor | None = None) -> Tensor:
    """Return the product of two tensors summed over pairs of dimensions."""

def threshold(
    input: Tensor, threshold: builtins.float, value: builtins.float, inplace: builtins.bool = False
) -> Tensor:
    """x where x > threshold, else value."""

def threshold_(input: Tensor, threshold: builtins.float, value: builtins.float) -> Tensor:
    """Compute `threshold` in place."""

def tile(input: Tensor, *dims: Sizes) -> Tensor:
    """Return x repeated `dims` times along its last dimensions; missing counts are 1."""

def topk(
    input: Tensor,
    k: builtins.int,
    dim: builtins.int = -1,
    largest: builtins.bool = True,
    sorted: builtins.bool = True,
    *,
    out: Sequence[Tensor] | None = None,
) -> ValuesAndIndices:
    """Return the k largest (or smallest) elements along `dim` (default: the last), and their positions."""

def trace(input: Tensor) -> Tensor:
    """Return the sum of a matrix's diagonal."""

def transpose(input: Tensor, dim0: builtins.int, dim1: builtins.int) -> Tensor:
    """Return x with two dimensions swapped."""

def transpose_copy(input: Tensor, dim0: builtins.int, dim1: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `transpose`."""

def trapezoid(
    other: Tensor, input: Tensor | None = None, *, dx: builtins.float | None = None, dim: builtins.int = -1
) -> Tensor:
    """Return the integral of samples `y` along `dim` by the trapezoidal rule, at points `x` or `dx` (1) apart."""

def trapz(
    other: Tensor, input: Tensor | None = None, *, dx: builtins.float | None = None, dim: builtins.int = -1
) -> Tensor:
    """Return the integral of samples `y` along `dim` by the trapezoidal rule, at points `x` or `dx` (1) apart."""

def triangular_solve(
    b: Tensor,
    A: Tensor,
    upper: builtins.bool = True,
    transpose: builtins.bool = False,
    unitriangular: builtins.bool = False,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return X of A·X = b (Aᵀ·X = b with `transpose`) for triangular A, and a copy of A."""

def tril(input: Tensor, diagonal: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the lower triangles of the matrices in the last two dimensions, up to `diagonal`; 0 elsewhere."""

def tril_indices(
    row: builtins.int,
    col: builtins.int,
    offset: builtins.int = 0,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return rows and columns `[2, n]` of the lower triangle of a matrix, up to diagonal `offset`."""

def triu(input: Tensor, diagonal: builtins.int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the upper triangles of the matrices in the last two dimensions, from `diagonal` on; 0 elsewhere."""

def triu_indices(
    row: builtins.int,
    col: builtins.int,
    offset: builtins.int = 0,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return rows and columns `[2, n]` of the upper triangle of a matrix, up to diagonal `offset`."""

def true_divide(
    input: Tensor | builtins.float,
    other: Tensor | builtins.float,
    *,
    rounding_mode: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""

def trunc(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x rounded towards 0."""

def trunc_(input: Tensor) -> Tensor:
    """Compute `trunc` in place."""

def unbind(input: Tensor, dim: builtins.int = 0) -> tuple[Tensor, ...]:
    """Return one view per index of dimension `dim`, which is removed."""

def unbind_copy(input: Tensor, dim: builtins.int = 0, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return a copy of `unbind`."""

def unflatten(input: Tensor, dim: builtins.int, sizes: Sequence[builtins.int]) -> Tensor:
    """Return x with dimension `dim` split into `sizes` (one may be -1)."""

def unfold(input: Tensor, dimension: builtins.int, size: builtins.int, step: builtins.int) -> Tensor:
    """Return a view of all windows of `size` along `dimension`, `step` apart, as a new last dimension."""

def unfold_copy(
    input: Tensor, dimension: builtins.int, size: builtins.int, step: builtins.int, *, out: Tensor | None = None
) -> Tensor:
    """Return a copy of `unfold`."""

def unique(
    input: Tensor,
    sorted: builtins.bool = True,
    return_inverse: builtins.bool = False,
    return_counts: builtins.bool = False,
    dim: builtins.int | None = None,
) -> Any:
    """Return the sorted distinct values of the flattened x, or slices along `dim`. Blocks once to read their
    count."""

def unique_consecutive(
    input: Tensor,
    return_inverse: builtins.bool = False,
    return_counts: builtins.bool = False,
    dim: builtins.int | None = None,
) -> Any:
    """Return x without repetitions of neighbours, of the flattened tensor or of slices along `dim`."""

def unravel_index(indices: Tensor, shape: Sequence[builtins.int]) -> tuple[Tensor, ...]:
    """Return the coordinates of positions in a flattened tensor of `shape`."""

def unsafe_chunk(input: Tensor, chunks: builtins.int, dim: builtins.int = 0) -> tuple[Tensor, ...]:
    """Compute `chunk`."""

def unsafe_split(
    tensor: Tensor, split_size_or_sections: builtins.int | Sequence[builtins.int], dim: builtins.int = 0
) -> tuple[Tensor, ...]:
    """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""

def unsqueeze(input: Tensor, dim: builtins.int) -> Tensor:
    """Return x with a dimension of size 1 inserted before `dim`."""

def unsqueeze_copy(input: Tensor, dim: builtins.int, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `unsqueeze`."""

def use_deterministic_algorithms(mode: builtins.bool, *, warn_only: builtins.bool = False) -> None:
    """Record the choice; every algorithm here is deterministic in either case."""

def vander(input: Tensor, N: builtins.int | None = None, increasing: builtins.bool = False) -> Tensor:
    """Return the Vandermonde matrix of a vector, with N columns (default: square) of decreasing powers."""

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

def var_mean(
    input: Tensor,
    dim: Dims | builtins.bool = None,
    unbiased: builtins.bool = True,
    keepdim: builtins.bool = False,
    *,
    correction: builtins.float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `var` and `mean` over `dim`."""

def vdot(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the dot product of two vectors."""

def view_as_complex(input: Tensor) -> Tensor:
    """Return the complex view of real pairs [..., 2]. Raises ShapeError unless each pair is contiguous."""

def view_as_real(input: Tensor) -> Tensor:
    """Return the pairs [..., 2] of a complex tensor, over the same memory."""

def view_copy(input: Tensor, *shape: Sizes, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
    """Return a copy of `view`."""

def vsplit(input: Tensor, *indices_or_sections: builtins.int | Sequence[builtins.int]) -> tuple[Tensor, ...]:
    """Compute `tensor_split` along dimension 0, into equal sections."""

def vstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return tensors joined along dimension 0; vectors count as rows."""

def where(
    condition: Tensor,
    input: Tensor | builtins.float | None = None,
    other: Tensor | builtins.float | None = None,
    *,
    out: Tensor | None = None,
) -> Any:
    """Return x where `condition` (bool) is true, else y; without both, the indices of `nonzero(as_tuple=True)`."""

def xlogy(input: Tensor | builtins.float, other: Tensor | builtins.float, *, out: Tensor | None = None) -> Tensor:
    """Return x·log(y); 0 where x is 0 and y is not NaN."""

def xlogy_(input: Tensor | builtins.float, other: Tensor | builtins.float) -> Tensor:
    """Compute `xlogy` in place."""

def zero_(input: Tensor) -> Tensor:
    """Set every element to 0."""

def zeros(
    *size: Sizes,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    out: Tensor | None = None,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Return a tensor of zeros, of the default dtype unless `dtype` is given."""

def zeros_like(
    input: Tensor,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
    layout: Layout | None = None,
    memory_format: MemoryFormat | None = None,
) -> Tensor:
    """Return zeros with x's shape, dtype and device by default."""

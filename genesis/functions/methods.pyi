"""The methods of Tensor, which are the same objects as the functions, and its operators.

Made by `make stubs`: do not edit.
"""

from collections.abc import Sequence
from typing import Any, Self

from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.surface import DeviceLike, Dims, DTypeLike, Sizes
from genesis.random import Generator
from genesis.tensor import Tensor

class Methods:
    """Base class of Tensor that holds its methods."""
    def abs(self, *, out: Tensor | None = None) -> Tensor:
        """|x|."""
    def abs_(self) -> Self:
        """Compute `abs` in place."""
    def absolute(self, *, out: Tensor | None = None) -> Tensor:
        """|x|."""
    def add(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x + alpha·y."""
    def add_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """Compute x += alpha·y in place."""
    def addmm(self, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return beta·x + alpha·(mat1 @ mat2); x broadcasts."""
    def addmv(self, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return beta·x + alpha·(mat @ vec); x broadcasts."""
    def all(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return whether all elements over `dim` are not 0; an empty `dim` reduces no dimension, as in torch."""
    def allclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Return whether `isclose` is true everywhere; blocks until the device is done."""
    def amax(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""
    def amin(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""
    def any(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return whether any element over `dim` is not 0; an empty `dim` reduces no dimension, as in torch."""
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the position of the largest element (the first of equals) along `dim` or in the flattened tensor."""
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the position of the smallest element (the first of equals) along `dim` or in the flattened tensor."""
    def argsort(self, dim: int | None = None, descending: bool = False, stable: bool = True) -> Tensor:
        """Return the indices of `sort`."""
    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
        """Return any window on x's storage; `storage_offset` counts from the storage's start (default: x's own)."""
    def baddbmm(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return beta·x + alpha·(batch1 @ batch2); x broadcasts."""
    def bernoulli(self, *, generator: Generator | None = None) -> Tensor:
        """Return 1 with the probabilities in x, else 0."""
    def bernoulli_(self, p: Tensor | float = 0.5, *, generator: Generator | None = None) -> Self:
        """Overwrite x with 1 with probability `p` (a number, or a tensor that broadcasts to x), else 0."""
    def bincount(self, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """Return how often each value occurs in x `[n]` (integers from 0 on), or the sum of its `weights`."""
    def bitwise_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y share."""
    def bitwise_and_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_and` in place."""
    def bitwise_not(self, *, out: Tensor | None = None) -> Tensor:
        """The bits of x inverted."""
    def bitwise_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits of x or y."""
    def bitwise_or_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_or` in place."""
    def bitwise_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y do not share."""
    def bitwise_xor_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_xor` in place."""
    def bmm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[b, n, k]` @ y `[b, k, m]`, without broadcasting."""
    def broadcast_to(self, shape: Sequence[int]) -> Tensor:
        """Return x expanded to `shape`."""
    def ceil(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded up."""
    def ceil_(self) -> Self:
        """Compute `ceil` in place."""
    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Return at most `chunks` views of equal size along `dim`; the last may be smaller."""
    def clamp(
        self, min: Tensor | float | None = None, max: Tensor | float | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return x limited to [min, max]; None leaves a side open."""
    def clamp_(self, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Self:
        """Compute `clamp` in place."""
    def clamp_max(self, max: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return the smaller of x and `max`, element by element."""
    def clamp_min(self, min: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return the larger of x and `min`, element by element."""
    def clip(
        self, min: Tensor | float | None = None, max: Tensor | float | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return x limited to [min, max]; None leaves a side open."""
    def clip_(self, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Self:
        """Compute `clamp` in place."""
    def clone(self) -> Tensor:
        """Return a copy whose dimensions are stored in the order of x's; autograd records it."""
    def contiguous(self) -> Tensor:
        """Return x itself if its elements are stored row-major without gaps, else a copy."""
    def copy_(self, source: Tensor | float, non_blocking: bool = False) -> Self:
        """Overwrite x with `source`, which broadcasts, is cast to x's dtype, and may be on another device."""
    def cos(self, *, out: Tensor | None = None) -> Tensor:
        """The cosine."""
    def cos_(self) -> Self:
        """Compute `cos` in place."""
    def count_nonzero(self, dim: Dims = None) -> Tensor:
        """Return how many elements over `dim` are not 0, as int64."""
    def cumsum(self, dim: int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
        """Return cumulative sums along `dim`; integers and bools give int64 by default."""
    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """Return the diagonals of the matrices in `dim1` and `dim2` as the last dimension, `offset` above the main
        one."""
    def div(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
    def div_(self, other: Tensor | float, *, rounding_mode: str | None = None) -> Self:
        """Compute `div` in place."""
    def divide(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
    def dot(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the dot product of two vectors."""
    def eq(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x = y."""
    def equal(self, other: Tensor) -> bool:
        """Return whether two tensors have the same shape and equal elements; blocks until the device is done."""
    def erf(self, *, out: Tensor | None = None) -> Tensor:
        """The error function: 2/√π·∫ e^-t² dt from 0 to x."""
    def erf_(self) -> Self:
        """Compute `erf` in place."""
    def exp(self, *, out: Tensor | None = None) -> Tensor:
        """e^x."""
    def exp2(self, *, out: Tensor | None = None) -> Tensor:
        """2^x."""
    def exp2_(self) -> Self:
        """Compute `exp2` in place."""
    def exp_(self) -> Self:
        """Compute `exp` in place."""
    def expand(self, *sizes: Sizes) -> Tensor:
        """Return a view of x, repeated along dimensions of size 1 and along new leading ones; -1 keeps a size."""
    def expand_as(self, other: Tensor) -> Tensor:
        """Return x expanded to the shape of `other`."""
    def expm1(self, *, out: Tensor | None = None) -> Tensor:
        """e^x - 1, exact near 0."""
    def expm1_(self) -> Self:
        """Compute `expm1` in place."""
    def fill_(self, value: Tensor | float) -> Self:
        """Set every element to `value`, a number or a 0-d tensor."""
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Return x with dimensions `start_dim` to `end_dim` (inclusive) merged into one."""
    def flip(self, *dims: Sizes) -> Tensor:
        """Return a copy with the elements along `dims` in reverse order."""
    def floor(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded down."""
    def floor_(self) -> Self:
        """Compute `floor` in place."""
    def floor_divide(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / y rounded down."""
    def floor_divide_(self, other: Tensor | float) -> Self:
        """Compute `floor_divide` in place."""
    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Return y with y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; y has the shape of `index`."""
    def ge(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≥ y."""
    def gt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x > y."""
    def index_add(self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        """Return x with alpha·source added to the slices `index` along dimension `dim`; repeated indices
        accumulate."""
    def index_add_(self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Self:
        """Compute `index_add` in place."""
    def index_copy(self, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """Return x with the slices `index` along dimension `dim` replaced by `source`; the last of repeated ones
        wins."""
    def index_copy_(self, dim: int, index: Tensor, source: Tensor) -> Self:
        """Compute `index_copy` in place."""
    def index_fill(self, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
        """Return x with `value`, a number or a one-element tensor, in the slices `index` along dimension `dim`."""
    def index_fill_(self, dim: int, index: Tensor, value: Tensor | float) -> Self:
        """Compute `index_fill` in place."""
    def index_put(self, indices: Sequence[Tensor], values: Tensor | float, accumulate: bool = False) -> Tensor:
        """Return x with `values` written, or added, at `indices`: a tuple of index tensors for the leading
        dimensions."""
    def index_put_(self, indices: Sequence[Tensor], values: Tensor | float, accumulate: bool = False) -> Self:
        """Compute `index_put` in place."""
    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return a copy of the slices `index` (a vector) along dimension `dim`."""
    def isclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
        """Return bools: |x - y| <= atol + rtol·|y|, or x = y; with `equal_nan`, NaN is close to NaN."""
    def isfinite(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is neither NaN nor infinite."""
    def isinf(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is ∞ or -∞."""
    def isnan(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is NaN."""
    def le(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≤ y."""
    def left_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·2^y of integers: the bits of x moved up by y."""
    def left_shift_(self, other: Tensor | float) -> Self:
        """Compute `left_shift` in place."""
    def lerp(self, end: Tensor | float, weight: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x + weight·(end - x)."""
    def lerp_(self, end: Tensor | float, weight: Tensor | float) -> Self:
        """Compute `lerp` in place."""
    def log(self, *, out: Tensor | None = None) -> Tensor:
        """The natural logarithm."""
    def log10(self, *, out: Tensor | None = None) -> Tensor:
        """The logarithm to base 10."""
    def log10_(self) -> Self:
        """Compute `log10` in place."""
    def log1p(self, *, out: Tensor | None = None) -> Tensor:
        """log(1 + x), exact near 0."""
    def log1p_(self) -> Self:
        """Compute `log1p` in place."""
    def log2(self, *, out: Tensor | None = None) -> Tensor:
        """The logarithm to base 2."""
    def log2_(self) -> Self:
        """Compute `log2` in place."""
    def log_(self) -> Self:
        """Compute `log` in place."""
    def log_softmax(self, dim: int, *, dtype: DTypeLike = None) -> Tensor:
        """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""
    def logical_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x and y are both not 0."""
    def logical_not(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is 0."""
    def logical_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x or y is not 0."""
    def logical_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether just one of x and y is not 0."""
    def logsumexp(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return log Σ e^x over `dim` (default: all)."""
    def lt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x < y."""
    def masked_fill(self, mask: Tensor, value: Tensor | float) -> Tensor:
        """Return x with `value` where `mask` is true, in x's dtype and the broadcast shape."""
    def masked_fill_(self, mask: Tensor, value: Tensor | float) -> Self:
        """Compute `masked_fill` in place."""
    def masked_scatter(self, mask: Tensor, source: Tensor) -> Tensor:
        """Compute `masked_scatter_` on a copy of x, broadcast to the mask's shape."""
    def masked_scatter_(self, mask: Tensor, source: Tensor) -> Self:
        """Overwrite the elements of x where `mask` (which broadcasts to x) is true with the elements of `source`."""
    def masked_select(self, mask: Tensor) -> Tensor:
        """Return the elements where `mask` is true (both broadcast) as a vector, in row-major order."""
    def matmul(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x @ y: matrices in the last two dimensions, batches broadcast; a vector is a row (x) or a column
        (y)."""
    def max(self, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
        """Return the largest element, with `dim` (values, indices) along it, with a second tensor the larger of
        each."""
    def maximum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The larger of x and y; NaN where one is NaN."""
    def mean(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Σ x / n over `dim` (default: all); `dtype` casts x first."""
    def min(self, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
        """Return the smallest element, with `dim` (values, indices) along it, with a second tensor the smaller of
        each."""
    def minimum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The smaller of x and y; NaN where one is NaN."""
    def mm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[n, k]` @ y `[k, m]`."""
    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""
    def mul(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def mul_(self, other: Tensor | float) -> Self:
        """Compute `mul` in place."""
    def multinomial(self, num_samples: int, replacement: bool = False, *, generator: Generator | None = None) -> Tensor:
        """Return `num_samples` categories for each row of weights x, `[n]` or `[rows, n]`, as int64."""
    def multiply(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def mv(self, vec: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[n, k]` @ y `[k]`."""
    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements of dimension `dim` from `start` on; a negative start counts from the end."""
    def ne(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≠ y."""
    def neg(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def neg_(self) -> Self:
        """Compute `neg` in place."""
    def negative(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def new_empty(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Return a tensor of undefined contents in the given shape, with x's dtype and device by default."""
    def new_full(
        self,
        size: Sizes,
        fill_value: float,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Return a tensor of shape `size` filled with `fill_value`, with x's dtype and device by default."""
    def new_ones(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Return a tensor of ones in the given shape, with x's dtype and device by default."""
    def new_tensor(
        self, data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Return a tensor with a copy of `data`, with x's dtype and device by default."""
    def new_zeros(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Return a tensor of zeros in the given shape, with x's dtype and device by default."""
    def nonzero(self, as_tuple: bool = False) -> Any:
        """Return indices `[n, ndim]` of the elements that are not 0, in row-major order; reading n blocks once."""
    def norm(
        self,
        p: float | str | None = 2.0,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: DTypeLike = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all)."""
    def normal_(self, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Self:
        """Overwrite x with normal values."""
    def outer(self, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""
    def permute(self, *dims: Sizes) -> Tensor:
        """Return x with its dimensions in the order `dims`."""
    def pin_memory(self, device: DeviceLike = "cuda") -> Tensor:
        """Return a copy in pinned host memory, or x itself if it is pinned. See `to(non_blocking=True)`."""
    def pow(self, exponent: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x^y."""
    def pow_(self, exponent: Tensor | float) -> Self:
        """Compute `pow` in place."""
    def prod(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""
    def random_(self, low: int = 0, high: int | None = None, *, generator: Generator | None = None) -> Self:
        """Overwrite x with integers in [low, high); `random_(high)` starts at 0."""
    def ravel(self) -> Tensor:
        """Return all elements in one dimension, in row-major order."""
    def reciprocal(self, *, out: Tensor | None = None) -> Tensor:
        """1 / x."""
    def reciprocal_(self) -> Self:
        """Compute `reciprocal` in place."""
    def relu(self, *, out: Tensor | None = None) -> Tensor:
        """max(x, 0)."""
    def remainder(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x - y·floor(x / y): it has the sign of y."""
    def remainder_(self, other: Tensor | float) -> Self:
        """Compute `remainder` in place."""
    def repeat(self, *sizes: Sizes) -> Tensor:
        """Return x repeated `sizes` times along each dimension; additional sizes add leading dimensions."""
    def repeat_interleave(self, repeats: Sizes | Tensor, dim: int | None = None) -> Tensor:
        """Return each element, or slice along `dim`, `repeats` times in a row; `repeats` is one number or one per
        slice."""
    def reshape(self, *shape: Sizes) -> Tensor:
        """Return x as `shape` (one size may be -1): a view if the strides allow it, else a copy."""
    def reshape_as(self, other: Tensor) -> Tensor:
        """Return x in the shape of `other`."""
    def right_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / 2^y of integers, rounded down."""
    def right_shift_(self, other: Tensor | float) -> Self:
        """Compute `right_shift` in place."""
    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
        """Return x with elements rotated by `shifts` along `dims`; without `dims`, in the flattened tensor."""
    def round(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded to the nearest integer, halves to the even one."""
    def round_(self) -> Self:
        """Compute `round` in place."""
    def rsqrt(self, *, out: Tensor | None = None) -> Tensor:
        """1 / √x."""
    def rsqrt_(self) -> Self:
        """Compute `rsqrt` in place."""
    def scatter(self, dim: int, index: Tensor, src: Tensor | float) -> Tensor:
        """Return x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes wins."""
    def scatter_(self, dim: int, index: Tensor, src: Tensor | float) -> Self:
        """Compute `scatter` in place."""
    def scatter_add(self, dim: int, index: Tensor, src: Tensor | float) -> Tensor:
        """Return x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes accumulate in order."""
    def scatter_add_(self, dim: int, index: Tensor, src: Tensor | float) -> Self:
        """Compute `scatter_add` in place."""
    def select(self, dim: int, index: int) -> Tensor:
        """Return the slice at `index` of dimension `dim`, which is removed. Raises IndexRangeError."""
    def sigmoid(self, *, out: Tensor | None = None) -> Tensor:
        """1 / (1 + e^-x)."""
    def sigmoid_(self) -> Self:
        """Compute `sigmoid` in place."""
    def sign(self, *, out: Tensor | None = None) -> Tensor:
        """-1, 0 or 1."""
    def sign_(self) -> Self:
        """Compute `sign` in place."""
    def silu(self, *, out: Tensor | None = None) -> Tensor:
        """x·sigmoid(x)."""
    def sin(self, *, out: Tensor | None = None) -> Tensor:
        """The sine."""
    def sin_(self) -> Self:
        """Compute `sin` in place."""
    def softmax(self, dim: int, *, dtype: DTypeLike = None) -> Tensor:
        """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    def sort(self, dim: int | None = None, descending: bool = False, stable: bool = True) -> ValuesAndIndices:
        """Return x sorted along `dim` (default: the last), and the original position of each element."""
    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""
    def sqrt(self, *, out: Tensor | None = None) -> Tensor:
        """√x."""
    def sqrt_(self) -> Self:
        """Compute `sqrt` in place."""
    def square(self, *, out: Tensor | None = None) -> Tensor:
        """x²."""
    def square_(self) -> Self:
        """Compute `square` in place."""
    def squeeze(self, dim: int | Sequence[int] | None = None) -> Tensor:
        """Return x without its dimensions of size 1: all of them, or those in `dim`."""
    def std(
        self,
        dim: Dims | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return √`var`, with the same arguments; where it is 0, its gradient is 0."""
    def sub(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x - alpha·y."""
    def sub_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """Compute x -= alpha·y in place."""
    def subtract(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x - alpha·y."""
    def sum(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Σ x over `dim` (default: all); `dtype` casts x first, integers and bools give int64 by default."""
    def sum_to_size(self, *size: Sizes) -> Tensor:
        """Return x summed to shape `size`: over the dimensions that broadcasting from `size` to x's shape repeats."""
    def swapaxes(self, axis0: int, axis1: int) -> Tensor:
        """Compute `transpose`; this is numpy's name."""
    def t(self) -> Tensor:
        """Return the transpose of a matrix; vectors and scalars are returned unchanged."""
    def take_along_dim(self, indices: Tensor, dim: int | None = None) -> Tensor:
        """Compute `gather` with x and `indices` broadcast outside `dim`; without `dim`, on the flattened tensors."""
    def tan(self, *, out: Tensor | None = None) -> Tensor:
        """The tangent."""
    def tan_(self) -> Self:
        """Compute `tan` in place."""
    def tanh(self, *, out: Tensor | None = None) -> Tensor:
        """The hyperbolic tangent."""
    def tanh_(self) -> Self:
        """Compute `tanh` in place."""
    def topk(self, k: int, dim: int | None = None, largest: bool = True, sorted: bool = True) -> ValuesAndIndices:
        """Return the k largest (or smallest) elements along `dim` (default: the last), and their positions."""
    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Return x with two dimensions swapped."""
    def tril(self, diagonal: int = 0) -> Tensor:
        """Return the lower triangles of the matrices in the last two dimensions, up to `diagonal`; 0 elsewhere."""
    def triu(self, diagonal: int = 0) -> Tensor:
        """Return the upper triangles of the matrices in the last two dimensions, from `diagonal` on; 0 elsewhere."""
    def trunc(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded towards 0."""
    def trunc_(self) -> Self:
        """Compute `trunc` in place."""
    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Return one view per index of dimension `dim`, which is removed."""
    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return x with dimension `dim` split into `sizes` (one may be -1)."""
    def unfold(self, dimension: int, size: int, step: int) -> Tensor:
        """Return a view of all windows of `size` along `dimension`, `step` apart, as a new last dimension."""
    def uniform_(self, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None) -> Self:
        """Overwrite x with uniform values in [low, high)."""
    def unique(self, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
        """Return the distinct values of the flattened x, sorted; reading their count blocks once."""
    def unsqueeze(self, dim: int) -> Tensor:
        """Return x with a dimension of size 1 inserted before `dim`."""
    def var(
        self,
        dim: Dims | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return Σ (x - mean)² / (n - correction) over `dim` (default: all)."""
    def view(self, *shape: Sizes) -> Tensor:
        """Return a view of x as `shape` (one size may be -1). Raises ShapeError if that needs a copy."""
    def view_as(self, other: Tensor) -> Tensor:
        """Return a view of x in the shape of `other`."""
    def zero_(self) -> Self:
        """Set every element to 0."""
    def __abs__(self) -> Tensor: ...
    def __add__(self, other: Tensor | float) -> Tensor: ...
    def __and__(self, other: Tensor | float) -> Tensor: ...
    def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
    def __floordiv__(self, other: Tensor | float) -> Tensor: ...
    def __ge__(self, other: Tensor | float) -> Tensor: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def __gt__(self, other: Tensor | float) -> Tensor: ...
    def __iadd__(self, other: Tensor | float) -> Self: ...
    def __iand__(self, other: Tensor | float) -> Self: ...
    def __ifloordiv__(self, other: Tensor | float) -> Self: ...
    def __ilshift__(self, other: Tensor | float) -> Self: ...
    def __imod__(self, other: Tensor | float) -> Self: ...
    def __imul__(self, other: Tensor | float) -> Self: ...
    def __invert__(self) -> Tensor: ...
    def __ior__(self, other: Tensor | float) -> Self: ...
    def __ipow__(self, other: Tensor | float) -> Self: ...
    def __irshift__(self, other: Tensor | float) -> Self: ...
    def __isub__(self, other: Tensor | float) -> Self: ...
    def __itruediv__(self, other: Tensor | float) -> Self: ...
    def __ixor__(self, other: Tensor | float) -> Self: ...
    def __le__(self, other: Tensor | float) -> Tensor: ...
    def __lshift__(self, other: Tensor | float) -> Tensor: ...
    def __lt__(self, other: Tensor | float) -> Tensor: ...
    def __matmul__(self, other: Tensor) -> Tensor: ...
    def __mod__(self, other: Tensor | float) -> Tensor: ...
    def __mul__(self, other: Tensor | float) -> Tensor: ...
    def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
    def __neg__(self) -> Tensor: ...
    def __or__(self, other: Tensor | float) -> Tensor: ...
    def __pow__(self, other: Tensor | float) -> Tensor: ...
    def __radd__(self, other: Tensor | float) -> Tensor: ...
    def __rand__(self, other: Tensor | float) -> Tensor: ...
    def __rfloordiv__(self, other: Tensor | float) -> Tensor: ...
    def __rlshift__(self, other: Tensor | float) -> Tensor: ...
    def __rmod__(self, other: Tensor | float) -> Tensor: ...
    def __rmul__(self, other: Tensor | float) -> Tensor: ...
    def __ror__(self, other: Tensor | float) -> Tensor: ...
    def __rpow__(self, other: Tensor | float) -> Tensor: ...
    def __rrshift__(self, other: Tensor | float) -> Tensor: ...
    def __rshift__(self, other: Tensor | float) -> Tensor: ...
    def __rsub__(self, other: Tensor | float) -> Tensor: ...
    def __rtruediv__(self, other: Tensor | float) -> Tensor: ...
    def __rxor__(self, other: Tensor | float) -> Tensor: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __sub__(self, other: Tensor | float) -> Tensor: ...
    def __truediv__(self, other: Tensor | float) -> Tensor: ...
    def __xor__(self, other: Tensor | float) -> Tensor: ...

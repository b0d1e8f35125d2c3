"""The methods of Tensor that are functions, too, one and the same object; and its operators.

Made by `make stubs`: do not edit.
"""

from collections.abc import Sequence
from typing import Any, Self

from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.surface import DeviceLike, Dims, DTypeLike, Sizes
from genesis.random import Generator
from genesis.tensor import Tensor

class Methods:
    """Base of Tensor."""
    def abs(self, *, out: Tensor | None = None) -> Tensor:
        """|x|."""
    def abs_(self) -> Self:
        """`abs` in place."""
    def absolute(self, *, out: Tensor | None = None) -> Tensor:
        """|x|."""
    def add(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """x + alpha·y."""
    def add_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """x += alpha·y, in place."""
    def addmm(self, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta·x + alpha·(mat1 @ mat2); x broadcasts."""
    def addmv(self, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta·x + alpha·(mat @ vec); x broadcasts."""
    def all(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Whether no element over `dim` is 0; an empty `dim` means none here, as in torch."""
    def allclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Whether `isclose` holds everywhere; waits for the device."""
    def amax(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """The largest element over `dim` (all dimensions unless given); equal ones share the gradient evenly."""
    def amin(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """The smallest element over `dim` (all dimensions unless given); equal ones share the gradient evenly."""
    def any(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Whether an element over `dim` is not 0; an empty `dim` means none here, as in torch."""
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Position of the largest element (the first of equals) along `dim`, or in the flattened tensor."""
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Position of the smallest element (the first of equals) along `dim`, or in the flattened tensor."""
    def argsort(self, dim: int | None = None, descending: bool = False, stable: bool = True) -> Tensor:
        """The indices of `sort`."""
    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
        """Any window on x's storage; `storage_offset` counts from the storage's start (default: x's own)."""
    def baddbmm(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta·x + alpha·(batch1 @ batch2); x broadcasts."""
    def bernoulli(self, *, generator: Generator | None = None) -> Tensor:
        """1 with the probabilities in x, else 0."""
    def bernoulli_(self, p: Tensor | float = 0.5, *, generator: Generator | None = None) -> Self:
        """Overwrite x with 1 with probability `p` (a number or a tensor that broadcasts to x), else 0."""
    def bincount(self, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """How often each value occurs in x `[n]` (integers from 0 on), or the sums of the `weights` at each."""
    def bitwise_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y share."""
    def bitwise_and_(self, other: Tensor | float) -> Self:
        """`bitwise_and` in place."""
    def bitwise_not(self, *, out: Tensor | None = None) -> Tensor:
        """The bits of x inverted."""
    def bitwise_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits of x or y."""
    def bitwise_or_(self, other: Tensor | float) -> Self:
        """`bitwise_or` in place."""
    def bitwise_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y do not share."""
    def bitwise_xor_(self, other: Tensor | float) -> Self:
        """`bitwise_xor` in place."""
    def bmm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[b, n, k]` @ `[b, k, m]`, without broadcasting."""
    def broadcast_to(self, shape: Sequence[int]) -> Tensor:
        """x expanded to `shape`."""
    def ceil(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded up."""
    def ceil_(self) -> Self:
        """`ceil` in place."""
    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """At most `chunks` views along `dim` of equal size, the last maybe smaller."""
    def clamp(
        self, min: Tensor | float | None = None, max: Tensor | float | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x limited to [min, max]: numbers or tensors, which broadcast and have gradients; None leaves a side open."""
    def clamp_(self, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Self:
        """`clamp` in place."""
    def clamp_max(self, max: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x, or `max` where that is smaller."""
    def clamp_min(self, min: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x, or `min` where that is larger."""
    def clip(
        self, min: Tensor | float | None = None, max: Tensor | float | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x limited to [min, max]: numbers or tensors, which broadcast and have gradients; None leaves a side open."""
    def clip_(self, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Self:
        """`clamp` in place."""
    def clone(self) -> Tensor:
        """A copy in fresh contiguous memory, on the tape."""
    def contiguous(self) -> Tensor:
        """x itself where its elements lie row-major without gaps, else a copy of it."""
    def copy_(self, source: Tensor | float, non_blocking: bool = False) -> Self:
        """Overwrite x with `source` (broadcast, cast to x's dtype), which may be on another device."""
    def cos(self, *, out: Tensor | None = None) -> Tensor:
        """The cosine."""
    def cos_(self) -> Self:
        """`cos` in place."""
    def count_nonzero(self, dim: Dims = None) -> Tensor:
        """How many elements over `dim` are not 0, as int64."""
    def cumsum(self, dim: int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
        """Running sums along `dim`; integers and bools give int64."""
    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """The diagonal of the matrices in dimensions `dim1`, `dim2`, as the last dimension; `offset` counts above
        it."""
    def div(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """x / y; `rounding_mode` "floor" or "trunc" keeps the operands' type."""
    def div_(self, other: Tensor | float, *, rounding_mode: str | None = None) -> Self:
        """`div` in place; `rounding_mode` as there."""
    def divide(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """x / y; `rounding_mode` "floor" or "trunc" keeps the operands' type."""
    def dot(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The sum of products of two vectors."""
    def eq(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x = y."""
    def equal(self, other: Tensor) -> bool:
        """Whether two tensors have one shape and equal elements; waits for the device."""
    def erf(self, *, out: Tensor | None = None) -> Tensor:
        """The error function: 2/√π·∫ e^-t² dt from 0 to x."""
    def erf_(self) -> Self:
        """`erf` in place."""
    def exp(self, *, out: Tensor | None = None) -> Tensor:
        """e^x."""
    def exp2(self, *, out: Tensor | None = None) -> Tensor:
        """2^x."""
    def exp2_(self) -> Self:
        """`exp2` in place."""
    def exp_(self) -> Self:
        """`exp` in place."""
    def expand(self, *sizes: Sizes) -> Tensor:
        """x repeated along dimensions of size 1 and along new ones in front, without a copy; -1 keeps a size."""
    def expand_as(self, other: Tensor) -> Tensor:
        """x expanded to the shape of `other`."""
    def expm1(self, *, out: Tensor | None = None) -> Tensor:
        """e^x - 1, exact near 0."""
    def expm1_(self) -> Self:
        """`expm1` in place."""
    def fill_(self, value: Tensor | float) -> Self:
        """Every element becomes `value`, a number or a tensor without dimensions."""
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Dimensions `start_dim` to `end_dim` (inclusive) made one."""
    def flip(self, *dims: Sizes) -> Tensor:
        """A copy with the order of elements along `dims` reversed."""
    def floor(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded down."""
    def floor_(self) -> Self:
        """`floor` in place."""
    def floor_divide(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / y rounded down."""
    def floor_divide_(self, other: Tensor | float) -> Self:
        """`floor_divide` in place."""
    def gather(self, dim: int, index: Tensor) -> Tensor:
        """y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; the result has the shape of `index`."""
    def ge(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≥ y."""
    def gt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x > y."""
    def index_add(self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        """x with alpha·source added to the slices `index` of dimension `dim`; repeated indices add up."""
    def index_add_(self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Self:
        """`index_add` in place."""
    def index_copy(self, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """x with the slices `index` of dimension `dim` replaced by those of `source`; the last of repeated ones
        stays."""
    def index_copy_(self, dim: int, index: Tensor, source: Tensor) -> Self:
        """`index_copy` in place."""
    def index_fill(self, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
        """x with `value` (a number or a tensor of one element) in the slices `index` of dimension `dim`."""
    def index_fill_(self, dim: int, index: Tensor, value: Tensor | float) -> Self:
        """`index_fill` in place."""
    def index_put(self, indices: Sequence[Tensor], values: Tensor | float, accumulate: bool = False) -> Tensor:
        """x with `values` written at the index tensors `indices` (a tuple, over the leading dimensions), or added
        there."""
    def index_put_(self, indices: Sequence[Tensor], values: Tensor | float, accumulate: bool = False) -> Self:
        """`index_put` in place."""
    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The slices `index` (a vector) of dimension `dim`, copied."""
    def isclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
        """Where |x - y| <= atol + rtol·|y|, or both are equal, as bools; with `equal_nan` NaN is close to NaN."""
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
        """`left_shift` in place."""
    def lerp(self, end: Tensor | float, weight: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x + weight·(end - x)."""
    def lerp_(self, end: Tensor | float, weight: Tensor | float) -> Self:
        """`lerp` in place."""
    def log(self, *, out: Tensor | None = None) -> Tensor:
        """The natural logarithm."""
    def log10(self, *, out: Tensor | None = None) -> Tensor:
        """The logarithm to base 10."""
    def log10_(self) -> Self:
        """`log10` in place."""
    def log1p(self, *, out: Tensor | None = None) -> Tensor:
        """log(1 + x), exact near 0."""
    def log1p_(self) -> Self:
        """`log1p` in place."""
    def log2(self, *, out: Tensor | None = None) -> Tensor:
        """The logarithm to base 2."""
    def log2_(self) -> Self:
        """`log2` in place."""
    def log_(self) -> Self:
        """`log` in place."""
    def log_softmax(self, dim: int, *, dtype: DTypeLike = None) -> Tensor:
        """log softmax(x) along `dim`, without forming the softmax."""
    def logical_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x and y are both not 0."""
    def logical_not(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is 0."""
    def logical_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x or y is not 0."""
    def logical_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether just one of x and y is not 0."""
    def logsumexp(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """log Σ e^x over `dim` (all dimensions unless given)."""
    def lt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x < y."""
    def masked_fill(self, mask: Tensor, value: Tensor | float) -> Tensor:
        """x with `value` where `mask` holds, in x's dtype and the broadcast shape."""
    def masked_fill_(self, mask: Tensor, value: Tensor | float) -> Self:
        """`masked_fill` in place."""
    def masked_scatter(self, mask: Tensor, source: Tensor) -> Tensor:
        """`masked_scatter_` on a copy of x, broadcast to the mask's shape."""
    def masked_scatter_(self, mask: Tensor, source: Tensor) -> Self:
        """The elements of x where `mask` (which broadcasts to x) holds become those of `source`, in order, in
        place."""
    def masked_select(self, mask: Tensor) -> Tensor:
        """The elements where `mask` holds (both broadcast), in row-major order, as a vector."""
    def matmul(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x @ y: matrices in the last two dimensions, batches broadcast, a vector is a row (left) or a column
        (right)."""
    def max(self, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
        """The largest element of x; with `dim` (values, indices) along it; with a second tensor the larger of two."""
    def maximum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The larger of x and y; NaN where one is NaN."""
    def mean(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Σ x / n over `dim` (all dimensions unless given)."""
    def min(self, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
        """The smallest element of x; with `dim` (values, indices) along it; with a second tensor the smaller of
        two."""
    def minimum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The smaller of x and y; NaN where one is NaN."""
    def mm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[n, k]` @ `[k, m]`."""
    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Dimensions `source` moved to the places `destination`; the others keep their order."""
    def mul(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def mul_(self, other: Tensor | float) -> Self:
        """`mul` in place."""
    def multinomial(self, num_samples: int, replacement: bool = False, *, generator: Generator | None = None) -> Tensor:
        """`num_samples` categories for each row of weights x `[n]` or `[rows, n]`, as int64."""
    def multiply(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def mv(self, vec: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[n, k]` @ `[k]`."""
    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """`length` elements of dimension `dim` from `start` on; a negative start counts from the end."""
    def ne(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≠ y."""
    def neg(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def neg_(self) -> Self:
        """`neg` in place."""
    def negative(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def new_empty(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Undefined contents of another shape in x's dtype and on its device."""
    def new_full(
        self,
        size: Sizes,
        fill_value: float,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """`fill_value` of another shape in x's dtype and on its device."""
    def new_ones(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Ones of another shape in x's dtype and on its device."""
    def new_tensor(
        self, data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """A tensor of `data` in x's dtype and on its device."""
    def new_zeros(
        self, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        """Zeros of another shape in x's dtype and on its device."""
    def nonzero(self, as_tuple: bool = False) -> Any:
        """Indices `[n, ndim]` of the elements that are not 0, in row-major order; n is read from the device once."""
    def norm(
        self,
        p: float | str | None = 2.0,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: DTypeLike = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The vector p-norm (Σ |x|^p)^(1/p) over `dim` (all dimensions unless given)."""
    def normal_(self, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Self:
        """Overwrite x with normal values."""
    def outer(self, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[n]` and `[m]` to the `[n, m]` products of their elements."""
    def permute(self, *dims: Sizes) -> Tensor:
        """Dimensions in the order `dims`."""
    def pin_memory(self, device: DeviceLike = "cuda") -> Tensor:
        """A copy in pinned host memory; x itself where it is there. See `to(non_blocking=True)`."""
    def pow(self, exponent: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x^y."""
    def pow_(self, exponent: Tensor | float) -> Self:
        """`pow` in place."""
    def prod(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Π x over `dim` (all dimensions unless given; several are allowed); integers and bools give int64."""
    def random_(self, low: int = 0, high: int | None = None, *, generator: Generator | None = None) -> Self:
        """Overwrite x with integers from `low` to below `high`; `random_(high)` starts at 0."""
    def ravel(self) -> Tensor:
        """All elements in one dimension, row-major."""
    def reciprocal(self, *, out: Tensor | None = None) -> Tensor:
        """1 / x."""
    def reciprocal_(self) -> Self:
        """`reciprocal` in place."""
    def relu(self, *, out: Tensor | None = None) -> Tensor:
        """max(x, 0)."""
    def remainder(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x - y·floor(x / y): it has the sign of y."""
    def remainder_(self, other: Tensor | float) -> Self:
        """`remainder` in place."""
    def repeat(self, *sizes: Sizes) -> Tensor:
        """x laid side by side `sizes` times along each dimension; more sizes than dimensions add some in front."""
    def repeat_interleave(self, repeats: Sizes | Tensor, dim: int | None = None) -> Tensor:
        """Each element (or slice along `dim`) `repeats` times in a row; `repeats` is a number or one number per
        slice."""
    def reshape(self, *shape: Sizes) -> Tensor:
        """x as `shape` (one size may be -1): a view where strides allow, a copy otherwise."""
    def reshape_as(self, other: Tensor) -> Tensor:
        """x in the shape of `other`."""
    def right_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / 2^y of integers, rounded down."""
    def right_shift_(self, other: Tensor | float) -> Self:
        """`right_shift` in place."""
    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
        """Elements moved by `shifts` along `dims`, around the end; without dims over the flattened tensor."""
    def round(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded to the nearest integer, halves to the even one."""
    def round_(self) -> Self:
        """`round` in place."""
    def rsqrt(self, *, out: Tensor | None = None) -> Tensor:
        """1 / √x."""
    def rsqrt_(self) -> Self:
        """`rsqrt` in place."""
    def scatter(self, dim: int, index: Tensor, src: Tensor | float) -> Tensor:
        """x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes stays."""
    def scatter_(self, dim: int, index: Tensor, src: Tensor | float) -> Self:
        """`scatter` in place."""
    def scatter_add(self, dim: int, index: Tensor, src: Tensor | float) -> Tensor:
        """x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes add up in order."""
    def scatter_add_(self, dim: int, index: Tensor, src: Tensor | float) -> Self:
        """`scatter_add` in place."""
    def select(self, dim: int, index: int) -> Tensor:
        """The part at `index` of dimension `dim`, which goes away. Raises: IndexRangeError, naming dimension and
        size."""
    def sigmoid(self, *, out: Tensor | None = None) -> Tensor:
        """1 / (1 + e^-x)."""
    def sigmoid_(self) -> Self:
        """`sigmoid` in place."""
    def sign(self, *, out: Tensor | None = None) -> Tensor:
        """-1, 0 or 1."""
    def sign_(self) -> Self:
        """`sign` in place."""
    def silu(self, *, out: Tensor | None = None) -> Tensor:
        """x·sigmoid(x)."""
    def sin(self, *, out: Tensor | None = None) -> Tensor:
        """The sine."""
    def sin_(self) -> Self:
        """`sin` in place."""
    def softmax(self, dim: int, *, dtype: DTypeLike = None) -> Tensor:
        """e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    def sort(self, dim: int | None = None, descending: bool = False, stable: bool = True) -> ValuesAndIndices:
        """x in order along `dim` (the last one unless given), and where each element came from."""
    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Views along `dim`: of one size (the last may be smaller), or of the sizes listed, which add up to its."""
    def sqrt(self, *, out: Tensor | None = None) -> Tensor:
        """√x."""
    def sqrt_(self) -> Self:
        """`sqrt` in place."""
    def square(self, *, out: Tensor | None = None) -> Tensor:
        """x²."""
    def square_(self) -> Self:
        """`square` in place."""
    def squeeze(self, dim: int | Sequence[int] | None = None) -> Tensor:
        """Without the dimensions of size 1: all of them, or those in `dim`."""
    def std(
        self,
        dim: Dims | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """√`var`, with the same arguments; its gradient is 0 where it is 0."""
    def sub(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """x - alpha·y."""
    def sub_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """x -= alpha·y, in place."""
    def subtract(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """x - alpha·y."""
    def sum(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Σ x over `dim` (all dimensions unless given), of x cast to `dtype` if given; integers and bools give
        int64."""
    def sum_to_size(self, *size: Sizes) -> Tensor:
        """x summed over the dimensions that broadcasting `size` to x's shape repeats."""
    def swapaxes(self, axis0: int, axis1: int) -> Tensor:
        """`transpose` under numpy's name."""
    def t(self) -> Tensor:
        """The transpose of a matrix; vectors and scalars as they are."""
    def take_along_dim(self, indices: Tensor, dim: int | None = None) -> Tensor:
        """`gather` whose index and tensor broadcast against each other outside `dim`; without dim over the flat
        tensor."""
    def tan(self, *, out: Tensor | None = None) -> Tensor:
        """The tangent."""
    def tan_(self) -> Self:
        """`tan` in place."""
    def tanh(self, *, out: Tensor | None = None) -> Tensor:
        """The hyperbolic tangent."""
    def tanh_(self) -> Self:
        """`tanh` in place."""
    def topk(self, k: int, dim: int | None = None, largest: bool = True, sorted: bool = True) -> ValuesAndIndices:
        """The k largest (or smallest) elements along `dim` (the last one unless given), and their positions."""
    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions swapped."""
    def tril(self, diagonal: int = 0) -> Tensor:
        """The lower triangles of the matrices in the last two dimensions, up to the given diagonal; 0 elsewhere."""
    def triu(self, diagonal: int = 0) -> Tensor:
        """The upper triangles of the matrices in the last two dimensions, from the given diagonal on; 0 elsewhere."""
    def trunc(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded towards 0."""
    def trunc_(self) -> Self:
        """`trunc` in place."""
    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """A view for each index of dimension `dim`, without it."""
    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """Dimension `dim` divided into `sizes` (one may be -1)."""
    def unfold(self, dimension: int, size: int, step: int) -> Tensor:
        """All windows of `size` along `dimension`, `step` apart, as a new last dimension; windows may overlap in
        memory."""
    def uniform_(self, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None) -> Self:
        """Overwrite x with uniform values in [low, high)."""
    def unique(self, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
        """The distinct values of the flattened x in order; their number is read from the device once."""
    def unsqueeze(self, dim: int) -> Tensor:
        """With a dimension of size 1 before `dim`."""
    def var(
        self,
        dim: Dims | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Σ (x - mean)² / (n - correction) over `dim`."""
    def view(self, *shape: Sizes) -> Tensor:
        """x seen as `shape` (one size may be -1). Raises: ShapeError, if that takes a copy or the element count
        differs."""
    def view_as(self, other: Tensor) -> Tensor:
        """x seen in the shape of `other`."""
    def zero_(self) -> Self:
        """Every element becomes 0."""
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

"""The methods of Tensor, which are the same objects as the functions, and its operators.

Made by `make stubs`: do not edit.
"""

from collections.abc import Sequence
from typing import Any, Self

from genesis.dtypes import Layout, MemoryFormat
from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.statistics import MinAndMax
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
    def absolute_(self) -> Self:
        """Compute `abs` in place."""
    def acos(self, *, out: Tensor | None = None) -> Tensor:
        """The arccosine."""
    def acos_(self) -> Self:
        """Compute `acos` in place."""
    def acosh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of cosh, for x ≥ 1."""
    def acosh_(self) -> Self:
        """Compute `acosh` in place."""
    def add(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x + alpha·y."""
    def add_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """Compute x += alpha·y in place."""
    def addbmm(
        self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return beta·x + alpha·Σ batch1 @ batch2 over the batch; with beta = 0, x is not read."""
    def addbmm_(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Self:
        """Compute `addbmm` in place."""
    def addcdiv(self, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x + value·tensor1 / tensor2. Raises DTypeError if both are integers."""
    def addcdiv_(self, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Self:
        """Compute `addcdiv` in place."""
    def addcmul(self, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x + value·tensor1·tensor2."""
    def addcmul_(self, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Self:
        """Compute `addcmul` in place."""
    def addmm(
        self, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return beta·x + alpha·(mat1 @ mat2); x broadcasts."""
    def addmm_(self, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Self:
        """Compute `addmm` in place."""
    def addmv(
        self, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return beta·x + alpha·(mat @ vec); x broadcasts."""
    def addmv_(self, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Self:
        """Compute `addmv` in place."""
    def addr(
        self, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return beta·x + alpha·(vec1 ⊗ vec2); with beta = 0, x is not read."""
    def addr_(self, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Self:
        """Compute `addr` in place."""
    def adjoint(self) -> Tensor:
        """Return x with its last two dimensions swapped, the adjoint of real matrices."""
    def all(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return whether all elements over `dim` are not 0; an empty `dim` reduces no dimension, as in torch."""
    def allclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Return whether `isclose` is true everywhere; blocks until the device is done."""
    def amax(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""
    def amin(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""
    def aminmax(
        self, *, dim: int | None = None, keepdim: bool = False, out: Sequence[Tensor] | None = None
    ) -> MinAndMax:
        """Return the smallest and the largest elements along `dim`, or of all."""
    def angle(self, *, out: Tensor | None = None) -> Tensor:
        """Return the angles of complex numbers, from -π to π; π for negative real numbers, and 0 for others."""
    def any(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return whether any element over `dim` is not 0; an empty `dim` reduces no dimension, as in torch."""
    def arccos(self, *, out: Tensor | None = None) -> Tensor:
        """The arccosine."""
    def arccos_(self) -> Self:
        """Compute `acos` in place."""
    def arccosh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of cosh, for x ≥ 1."""
    def arccosh_(self) -> Self:
        """Compute `acosh` in place."""
    def arcsin(self, *, out: Tensor | None = None) -> Tensor:
        """The arcsine."""
    def arcsin_(self) -> Self:
        """Compute `asin` in place."""
    def arcsinh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of sinh."""
    def arcsinh_(self) -> Self:
        """Compute `asinh` in place."""
    def arctan(self, *, out: Tensor | None = None) -> Tensor:
        """The arctangent."""
    def arctan2(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The angle of the point (y, x), from -π to π."""
    def arctan2_(self, other: Tensor | float) -> Self:
        """Compute `atan2` in place."""
    def arctan_(self) -> Self:
        """Compute `atan` in place."""
    def arctanh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of tanh."""
    def arctanh_(self) -> Self:
        """Compute `atanh` in place."""
    def argmax(self, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the position of the largest element (the first of equals) along `dim` or in the flattened tensor."""
    def argmin(self, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the position of the smallest element (the first of equals) along `dim` or in the flattened tensor."""
    def argsort(
        self, dim: int = -1, descending: bool = False, stable: bool = True, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the indices of `sort`."""
    def argwhere(self) -> Tensor:
        """Return indices `[n, ndim]` of the elements that are not 0."""
    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
        """Return any window on x's storage; `storage_offset` counts from the storage's start (default: x's own)."""
    def as_strided_(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Self:
        """Change x itself into the view `as_strided`."""
    def as_strided_scatter(
        self, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> Tensor:
        """Return a copy of x with `src` in a window of its storage."""
    def asin(self, *, out: Tensor | None = None) -> Tensor:
        """The arcsine."""
    def asin_(self) -> Self:
        """Compute `asin` in place."""
    def asinh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of sinh."""
    def asinh_(self) -> Self:
        """Compute `asinh` in place."""
    def atan(self, *, out: Tensor | None = None) -> Tensor:
        """The arctangent."""
    def atan2(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The angle of the point (y, x), from -π to π."""
    def atan2_(self, other: Tensor | float) -> Self:
        """Compute `atan2` in place."""
    def atan_(self) -> Self:
        """Compute `atan` in place."""
    def atanh(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of tanh."""
    def atanh_(self) -> Self:
        """Compute `atanh` in place."""
    def baddbmm(
        self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return beta·x + alpha·(batch1 @ batch2); x broadcasts."""
    def baddbmm_(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Self:
        """Compute `baddbmm` in place."""
    def bernoulli(
        self, p: float | None = None, *, generator: Generator | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return 1 with the probabilities in x, or with probability `p` for each element, else 0."""
    def bernoulli_(self, p: Tensor | float = 0.5, *, generator: Generator | None = None) -> Self:
        """Overwrite x with 1 with probability `p` (a number, or a tensor that broadcasts to x), else 0."""
    def bincount(self, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """Return how often each value occurs in x `[n]` (integers from 0 on), or the sum of its `weights`."""
    def bitwise_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y share."""
    def bitwise_and_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_and` in place."""
    def bitwise_left_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·2^y of integers: the bits of x moved up by y."""
    def bitwise_left_shift_(self, other: Tensor | float) -> Self:
        """Compute `left_shift` in place."""
    def bitwise_not(self, *, out: Tensor | None = None) -> Tensor:
        """The bits of x inverted."""
    def bitwise_not_(self) -> Self:
        """Compute `bitwise_not` in place."""
    def bitwise_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits of x or y."""
    def bitwise_or_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_or` in place."""
    def bitwise_right_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / 2^y of integers, rounded down."""
    def bitwise_right_shift_(self, other: Tensor | float) -> Self:
        """Compute `right_shift` in place."""
    def bitwise_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The bits that x and y do not share."""
    def bitwise_xor_(self, other: Tensor | float) -> Self:
        """Compute `bitwise_xor` in place."""
    def bmm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[b, n, k]` @ y `[b, k, m]`, without broadcasting."""
    def broadcast_to(self, *size: Sizes) -> Tensor:
        """Return x expanded to `size`."""
    def cauchy_(self, median: float = 0, sigma: float = 1, *, generator: Generator | None = None) -> Self:
        """Overwrite x with Cauchy values."""
    def cdouble(self, memory_format: Any = None) -> Tensor:
        """Convert to complex128."""
    def ceil(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded up."""
    def ceil_(self) -> Self:
        """Compute `ceil` in place."""
    def cfloat(self, memory_format: Any = None) -> Tensor:
        """Convert to complex64."""
    def cholesky(self, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return L of A = L·Lᵀ, or Lᵀ if `upper`. Raises LinAlgError unless A is positive-definite."""
    def cholesky_inverse(self, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return the inverse of A, given its Cholesky factor."""
    def cholesky_solve(self, L: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return X of A·X = B, given the Cholesky factor of A."""
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
    def clamp_max_(self, max: Tensor | float) -> Self:
        """Compute `clamp_max` in place."""
    def clamp_min(self, min: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return the larger of x and `min`, element by element."""
    def clamp_min_(self, min: Tensor | float) -> Self:
        """Compute `clamp_min` in place."""
    def clip(
        self, min: Tensor | float | None = None, max: Tensor | float | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return x limited to [min, max]; None leaves a side open."""
    def clip_(self, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Self:
        """Compute `clamp` in place."""
    def clone(self, *, memory_format: MemoryFormat | None = None) -> Tensor:
        """Return a copy whose dimensions are stored in the order of x's; autograd records it."""
    def conj(self) -> Tensor:
        """Return the conjugate; a real tensor itself."""
    def conj_physical(self, *, out: Tensor | None = None) -> Tensor:
        """Return `conj(x)`, computed at once; a real tensor itself."""
    def conj_physical_(self) -> Self:
        """Compute `conj_physical` in place."""
    def contiguous(self, memory_format: MemoryFormat | None = None) -> Tensor:
        """Return x itself if its elements are stored row-major without gaps, else a copy."""
    def copy_(self, source: Tensor | float, non_blocking: bool = False) -> Self:
        """Overwrite x with `source`, which broadcasts, is cast to x's dtype, and may be on another device."""
    def copysign(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return |x| with the sign of y, in a float dtype."""
    def copysign_(self, other: Tensor | float) -> Self:
        """Compute `copysign` in place."""
    def corrcoef(self) -> Tensor:
        """Return the correlation coefficients of variables (rows) from observations (columns)."""
    def cos(self, *, out: Tensor | None = None) -> Tensor:
        """The cosine."""
    def cos_(self) -> Self:
        """Compute `cos` in place."""
    def cosh(self, *, out: Tensor | None = None) -> Tensor:
        """The hyperbolic cosine."""
    def cosh_(self) -> Self:
        """Compute `cosh` in place."""
    def count_nonzero(self, *dim: int | Sequence[int]) -> Tensor:
        """Return how many elements over `dim` (default: all) are not 0, as int64."""
    def cov(self, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
        """Return the covariance matrix of variables (rows) from observations (columns), which may have weights."""
    def cross(self, other: Tensor, dim: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return cross products along `dim` of size 3, by default the first such dimension."""
    def cummax(self, dim: int, *, out: Sequence[Tensor] | None = None) -> ValuesAndIndices:
        """Return the largest element so far along `dim`, and its position (the last of equals)."""
    def cummin(self, dim: int, *, out: Sequence[Tensor] | None = None) -> ValuesAndIndices:
        """Return the smallest element so far along `dim`, and its position (the last of equals)."""
    def cumprod(self, dim: int, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
        """Return cumulative products along `dim`; integers and bools give int64 by default."""
    def cumprod_(self, dim: int, *, dtype: DTypeLike = None) -> Self:
        """Compute `cumprod` in place."""
    def cumsum(self, dim: int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
        """Return cumulative sums along `dim`; integers and bools give int64 by default."""
    def cumsum_(self, dim: int | None = None, *, dtype: DTypeLike = None) -> Self:
        """Compute `cumsum` in place."""
    def cumulative_trapezoid(self, input: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
        """Return the integral up to each sample but the first; arguments as for `trapezoid`."""
    def deg2rad(self, *, out: Tensor | None = None) -> Tensor:
        """Return degrees as radians."""
    def deg2rad_(self) -> Self:
        """Compute `deg2rad` in place."""
    def det(self, *, out: Tensor | None = None) -> Tensor:
        """Return the determinants of square matrices."""
    def diag(self, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Return the matrix with a vector as its diagonal, or a copy of a matrix's diagonal."""
    def diag_embed(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """Return matrices in dimensions `dim1` and `dim2` whose diagonals are the last dimension of x."""
    def diagflat(self, offset: int = 0) -> Tensor:
        """Return the matrix with the flattened x as its diagonal."""
    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """Return the diagonals of the matrices in `dim1` and `dim2` as the last dimension, `offset` above the main
        one."""
    def diagonal_scatter(self, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """Return a copy of x with `src` as its diagonal."""
    def diff(
        self,
        n: int = 1,
        dim: int = -1,
        prepend: Tensor | None = None,
        append: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the `n`-th differences of neighbours along `dim`, of x between `prepend` and `append`."""
    def digamma(self, *, out: Tensor | None = None) -> Tensor:
        """The derivative of lgamma."""
    def digamma_(self) -> Self:
        """Compute `digamma` in place."""
    def dist(self, other: Tensor, p: float = 2) -> Tensor:
        """Return the p-norm of x - other, as one number."""
    def div(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
    def div_(self, other: Tensor | float, *, rounding_mode: str | None = None) -> Self:
        """Compute `div` in place."""
    def divide(self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
    def divide_(self, other: Tensor | float, *, rounding_mode: str | None = None) -> Self:
        """Compute `div` in place."""
    def dot(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the dot product of two vectors."""
    def dsplit(self, *indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
        """Compute `tensor_split` along dimension 2, into equal sections."""
    def eq(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x = y."""
    def eq_(self, other: Tensor | float) -> Self:
        """Compute `eq` in place."""
    def equal(self, other: Tensor) -> bool:
        """Return whether two tensors have the same shape and equal elements; blocks until the device is done."""
    def erf(self, *, out: Tensor | None = None) -> Tensor:
        """The error function: 2/√π·∫ e^-t² dt from 0 to x."""
    def erf_(self) -> Self:
        """Compute `erf` in place."""
    def erfc(self, *, out: Tensor | None = None) -> Tensor:
        """1 - erf(x), exact for large x."""
    def erfc_(self) -> Self:
        """Compute `erfc` in place."""
    def erfinv(self, *, out: Tensor | None = None) -> Tensor:
        """The inverse of erf."""
    def erfinv_(self) -> Self:
        """Compute `erfinv` in place."""
    def exp(self, *, out: Tensor | None = None) -> Tensor:
        """e^x."""
    def exp2(self, *, out: Tensor | None = None) -> Tensor:
        """2^x."""
    def exp2_(self) -> Self:
        """Compute `exp2` in place."""
    def exp_(self) -> Self:
        """Compute `exp` in place."""
    def expand(self, *sizes: Sizes, implicit: bool = False) -> Tensor:
        """Return a view of x, repeated along dimensions of size 1 and along new leading ones; -1 keeps a size."""
    def expand_as(self, other: Tensor) -> Tensor:
        """Return x expanded to the shape of `other`."""
    def expm1(self, *, out: Tensor | None = None) -> Tensor:
        """e^x - 1, exact near 0."""
    def expm1_(self) -> Self:
        """Compute `expm1` in place."""
    def exponential_(self, lambd: float = 1, *, generator: Generator | None = None) -> Self:
        """Overwrite x with exponential values of rate `lambd`."""
    def fill_(self, value: Tensor | float) -> Self:
        """Set every element to `value`, a number or a 0-d tensor."""
    def fill_diagonal_(self, fill_value: float, wrap: bool = False) -> Self:
        """Set the main diagonal, in place; with `wrap`, it starts again after the square part of a tall matrix."""
    def fix(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded towards 0."""
    def fix_(self) -> Self:
        """Compute `trunc` in place."""
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Return x with dimensions `start_dim` to `end_dim` (inclusive) merged into one."""
    def flip(self, *dims: Sizes) -> Tensor:
        """Return a copy with the elements along `dims` in reverse order."""
    def fliplr(self) -> Tensor:
        """Return x with dimension 1 reversed."""
    def flipud(self) -> Tensor:
        """Return x with dimension 0 reversed."""
    def float_power(self, exponent: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x^exponent in float64."""
    def float_power_(self, exponent: Tensor | float) -> Self:
        """Compute `float_power` in place."""
    def floor(self, *, out: Tensor | None = None) -> Tensor:
        """x rounded down."""
    def floor_(self) -> Self:
        """Compute `floor` in place."""
    def floor_divide(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / y rounded down."""
    def floor_divide_(self, other: Tensor | float) -> Self:
        """Compute `floor_divide` in place."""
    def fmax(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the larger of x and y; where one is NaN, the other."""
    def fmin(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the smaller of x and y; where one is NaN, the other."""
    def fmod(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x - y·trunc(x / y): the remainder with the sign of x."""
    def fmod_(self, other: Tensor | float) -> Self:
        """Compute `fmod` in place."""
    def frac(self, *, out: Tensor | None = None) -> Tensor:
        """Return x - trunc(x)."""
    def frac_(self) -> Self:
        """Compute `frac` in place."""
    def gather(self, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Tensor | None = None) -> Tensor:
        """Return y with y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; y has the shape of `index`."""
    def gcd(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the greatest common divisor of integers, by Euclid's algorithm; it blocks once a step."""
    def gcd_(self, other: Tensor) -> Self:
        """Compute `gcd` in place."""
    def ge(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≥ y."""
    def ge_(self, other: Tensor | float) -> Self:
        """Compute `ge` in place."""
    def geometric_(self, p: float, *, generator: Generator | None = None) -> Self:
        """Overwrite x with numbers of trials up to the first success of probability `p`."""
    def geqrf(self, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return R with the reflectors of Q below it, and their factors tau; without gradient."""
    def ger(self, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""
    def greater(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x > y."""
    def greater_(self, other: Tensor | float) -> Self:
        """Compute `gt` in place."""
    def greater_equal(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≥ y."""
    def greater_equal_(self, other: Tensor | float) -> Self:
        """Compute `ge` in place."""
    def gt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x > y."""
    def gt_(self, other: Tensor | float) -> Self:
        """Compute `gt` in place."""
    def hardshrink(self, lambd: float = 0.5, *, out: Tensor | None = None) -> Tensor:
        """x, and 0 within ±lambd."""
    def heaviside(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return 0 for negative elements, 1 for positive ones, and `values` where x is 0."""
    def heaviside_(self, values: Tensor) -> Self:
        """Compute `heaviside` in place."""
    def histc(self, bins: int = 100, min: float = 0, max: float = 0, *, out: Tensor | None = None) -> Tensor:
        """Return the counts of elements in `bins` equal intervals from `min` to `max`; both 0 mean the data's
        range."""
    def hsplit(self, *indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
        """Compute `tensor_split` along dimension 1, into equal sections."""
    def hypot(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return √(x² + y²), computed in float64."""
    def hypot_(self, other: Tensor) -> Self:
        """Compute `hypot` in place."""
    def index_add(
        self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        """Return x with alpha·source added to the slices `index` along dimension `dim`; repeated indices
        accumulate."""
    def index_add_(self, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Self:
        """Compute `index_add` in place."""
    def index_copy(self, dim: int, index: Tensor, source: Tensor, *, out: Tensor | None = None) -> Tensor:
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
    def index_reduce(
        self,
        dim: int,
        index: Tensor,
        source: Tensor,
        reduce: str,
        *,
        include_self: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x with slices of `source` reduced into the slices `index` of `dim`: "prod", "mean", "amax" or
        "amin"."""
    def index_reduce_(self, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Self:
        """Compute `index_reduce` in place."""
    def index_select(self, dim: int, index: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return a copy of the slices `index` (a vector) along dimension `dim`."""
    def inner(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the sums of products over the last dimensions of x and y; a number scales the other."""
    def inverse(self, *, out: Tensor | None = None) -> Tensor:
        """Return the inverses of square matrices. Raises LinAlgError for a singular one."""
    def is_complex(self) -> bool:
        """Return whether a tensor is complex, as results of `polar` and `view_as_complex` are."""
    def is_conj(self) -> bool:
        """Return False: conjugates are always computed."""
    def is_neg(self) -> bool:
        """Return False: negatives are always computed."""
    def is_nonzero(self) -> bool:
        """Return whether the only element is not 0. Raises ShapeError unless there is just one."""
    def is_same_size(self, other: Tensor) -> bool:
        """Return whether two tensors have the same shape."""
    def is_signed(self) -> bool:
        """Return whether a tensor's dtype has negative values."""
    def isclose(self, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
        """Return bools: |x - y| <= atol + rtol·|y|, or x = y; with `equal_nan`, NaN is close to NaN."""
    def isfinite(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is neither NaN nor infinite."""
    def isinf(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is ∞ or -∞."""
    def isnan(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is NaN."""
    def isneginf(self, *, out: Tensor | None = None) -> Tensor:
        """Return whether elements are -∞."""
    def isposinf(self, *, out: Tensor | None = None) -> Tensor:
        """Return whether elements are ∞."""
    def isreal(self) -> Tensor:
        """Return whether elements are real: True for every dtype of Genesis."""
    def kron(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the Kronecker product: x with each element replaced by its product with y."""
    def kthvalue(
        self, k: int, dim: int = -1, keepdim: bool = False, *, out: Sequence[Tensor] | None = None
    ) -> ValuesAndIndices:
        """Return the k-th smallest element along `dim`, counted from 1, and its position."""
    def lcm(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the least common multiple of integers."""
    def lcm_(self, other: Tensor) -> Self:
        """Compute `lcm` in place."""
    def ldexp(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x·2^other, in a float dtype."""
    def ldexp_(self, other: Tensor | float) -> Self:
        """Compute `ldexp` in place."""
    def le(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≤ y."""
    def le_(self, other: Tensor | float) -> Self:
        """Compute `le` in place."""
    def left_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·2^y of integers: the bits of x moved up by y."""
    def left_shift_(self, other: Tensor | float) -> Self:
        """Compute `left_shift` in place."""
    def lerp(self, end: Tensor | float, weight: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x + weight·(end - x)."""
    def lerp_(self, end: Tensor | float, weight: Tensor | float) -> Self:
        """Compute `lerp` in place."""
    def less(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x < y."""
    def less_(self, other: Tensor | float) -> Self:
        """Compute `lt` in place."""
    def less_equal(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≤ y."""
    def less_equal_(self, other: Tensor | float) -> Self:
        """Compute `le` in place."""
    def lgamma(self, *, out: Tensor | None = None) -> Tensor:
        """log |Γ(x)|."""
    def lgamma_(self) -> Self:
        """Compute `lgamma` in place."""
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
    def log_normal_(self, mean: float = 1, std: float = 2, *, generator: Generator | None = None) -> Self:
        """Overwrite x with e to the power of normal values of `mean` and `std`."""
    def log_softmax(self, dim: int, dtype: DTypeLike = None, *, out: Tensor | None = None) -> Tensor:
        """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""
    def logaddexp(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return log(e^x + e^y), without overflow."""
    def logaddexp2(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return log2(2^x + 2^y), without overflow."""
    def logcumsumexp(self, dim: int, *, out: Tensor | None = None) -> Tensor:
        """Return log Σ e^x of the elements up to each one along `dim`, without overflow."""
    def logdet(self) -> Tensor:
        """Return the logarithms of determinants: NaN for negative ones."""
    def logical_and(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x and y are both not 0."""
    def logical_and_(self, other: Tensor | float) -> Self:
        """Compute `logical_and` in place."""
    def logical_not(self, *, out: Tensor | None = None) -> Tensor:
        """Whether x is 0."""
    def logical_not_(self) -> Self:
        """Compute `logical_not` in place."""
    def logical_or(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x or y is not 0."""
    def logical_or_(self, other: Tensor | float) -> Self:
        """Compute `logical_or` in place."""
    def logical_xor(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether just one of x and y is not 0."""
    def logical_xor_(self, other: Tensor | float) -> Self:
        """Compute `logical_xor` in place."""
    def logit(self, eps: float | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return log(x / (1 - x)); with `eps`, of x limited to [eps, 1 - eps]."""
    def logit_(self, eps: float | None = None) -> Self:
        """Compute `logit` in place."""
    def logsumexp(self, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
        """Return log Σ e^x over `dim` (default: all)."""
    def lt(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x < y."""
    def lt_(self, other: Tensor | float) -> Self:
        """Compute `lt` in place."""
    def lu(self, pivot: bool = True, get_infos: bool = False, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return L and U in one matrix and the pivots, and info with `get_infos`."""
    def lu_solve(self, LU_data: Tensor, LU_pivots: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return X of A·X = b, given the result of `linalg.lu_factor`."""
    def masked_fill(self, mask: Tensor, value: Tensor | float) -> Tensor:
        """Return x with `value` where `mask` is true, in x's dtype and the broadcast shape."""
    def masked_fill_(self, mask: Tensor, value: Tensor | float) -> Self:
        """Compute `masked_fill` in place."""
    def masked_scatter(self, mask: Tensor, source: Tensor) -> Tensor:
        """Compute `masked_scatter_` on a copy of x, broadcast to the mask's shape."""
    def masked_scatter_(self, mask: Tensor, source: Tensor) -> Self:
        """Overwrite the elements of x where `mask` (which broadcasts to x) is true with the elements of `source`."""
    def masked_select(self, mask: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the elements where `mask` is true (both broadcast) as a vector, in row-major order."""
    def matmul(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x @ y: matrices in the last two dimensions, batches broadcast; a vector is a row (x) or a column
        (y)."""
    def matrix_exp(self) -> Tensor:
        """Return the matrix exponential, by scaling and squaring in float64; the host reads the largest norm."""
    def matrix_power(self, n: int, *, out: Tensor | None = None) -> Tensor:
        """Return the n-th power of square matrices; a negative n inverts them first."""
    def max(
        self,
        dim: int | Tensor | None = None,
        keepdim: bool = False,
        *,
        other: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Return the largest element, with `dim` (values, indices) along it, with a second tensor the larger of
        each."""
    def maximum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The larger of x and y; NaN where one is NaN."""
    def mean(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Σ x / n over `dim` (default: all); `dtype` casts x first."""
    def median(self, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Any:
        """Return the lower median of all elements, or (values, indices) along `dim`; NaN if there is one."""
    def min(
        self,
        dim: int | Tensor | None = None,
        keepdim: bool = False,
        *,
        other: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Return the smallest element, with `dim` (values, indices) along it, with a second tensor the smaller of
        each."""
    def minimum(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """The smaller of x and y; NaN where one is NaN."""
    def mm(self, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[n, k]` @ y `[k, m]`."""
    def mode(self, dim: int = -1, keepdim: bool = False, *, out: Sequence[Tensor] | None = None) -> ValuesAndIndices:
        """Return the most frequent element along `dim` (the smallest if there are several), and its last position."""
    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""
    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""
    def msort(self, *, out: Tensor | None = None) -> Tensor:
        """Return x sorted along its first dimension."""
    def mul(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def mul_(self, other: Tensor | float) -> Self:
        """Compute `mul` in place."""
    def multinomial(
        self,
        num_samples: int,
        replacement: bool = False,
        *,
        generator: Generator | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `num_samples` categories for each row of weights x, `[n]` or `[rows, n]`, as int64."""
    def multiply(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x·y."""
    def multiply_(self, other: Tensor | float) -> Self:
        """Compute `mul` in place."""
    def mv(self, vec: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x `[n, k]` @ y `[k]`."""
    def mvlgamma(self, p: int, *, out: Tensor | None = None) -> Tensor:
        """Return the logarithm of the multivariate gamma function of dimension `p`."""
    def mvlgamma_(self, p: int) -> Self:
        """Compute `mvlgamma` in place."""
    def nan_to_num(
        self,
        nan: float | None = None,
        posinf: float | None = None,
        neginf: float | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x with NaN, ∞ and -∞ replaced: by 0 and the dtype's largest and smallest values unless given."""
    def nan_to_num_(self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Self:
        """Compute `nan_to_num` in place."""
    def nanmean(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the mean over `dim` of the elements that are not NaN."""
    def nanmedian(self, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None) -> Any:
        """Return the lower median of the elements that are not NaN; see `median`."""
    def nanquantile(
        self,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute `quantile` of the elements that are not NaN."""
    def nansum(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the sum over `dim`, with NaN counted as 0."""
    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements of dimension `dim` from `start` on; a negative start counts from the end."""
    def narrow_copy(self, dim: int, start: int, length: int, *, out: Tensor | None = None) -> Tensor:
        """Return a copy of `narrow`."""
    def ne(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≠ y."""
    def ne_(self, other: Tensor | float) -> Self:
        """Compute `ne` in place."""
    def neg(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def neg_(self) -> Self:
        """Compute `neg` in place."""
    def negative(self, *, out: Tensor | None = None) -> Tensor:
        """-x."""
    def negative_(self) -> Self:
        """Compute `neg` in place."""
    def new_empty(
        self,
        *size: Sizes,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return a tensor of undefined contents in the given shape, with x's dtype and device by default."""
    def new_empty_strided(
        self,
        size: Sizes,
        stride: Sizes,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Compute `empty_strided` with x's dtype and device by default."""
    def new_full(
        self,
        size: Sizes,
        fill_value: float,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return a tensor of shape `size` filled with `fill_value`, with x's dtype and device by default."""
    def new_ones(
        self,
        *size: Sizes,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return a tensor of ones in the given shape, with x's dtype and device by default."""
    def new_tensor(
        self,
        data: Any,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return a tensor with a copy of `data`, with x's dtype and device by default."""
    def new_zeros(
        self,
        *size: Sizes,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return a tensor of zeros in the given shape, with x's dtype and device by default."""
    def nonzero(self, as_tuple: bool = False, *, out: Tensor | None = None) -> Any:
        """Return indices `[n, ndim]` of the elements that are not 0, in row-major order; reading n blocks once."""
    def nonzero_static(self, *, size: int, fill_value: int = -1, out: Tensor | None = None) -> Tensor:
        """Return the first `size` rows of `nonzero(x)`, followed by rows of `fill_value`."""
    def norm(
        self,
        p: float | str | None = "fro",
        dim: Dims = None,
        keepdim: bool = False,
        dtype: DTypeLike = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all)."""
    def normal_(self, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Self:
        """Overwrite x with normal values."""
    def not_equal(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Whether x ≠ y."""
    def not_equal_(self, other: Tensor | float) -> Self:
        """Compute `ne` in place."""
    def orgqr(self, tau: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute `linalg.householder_product`."""
    def ormqr(
        self, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False, *, out: Tensor | None = None
    ) -> Tensor:
        """Return Q·other (Qᵀ with `transpose`; other·Q if not `left`), with Q from the reflectors of `geqrf`."""
    def outer(self, vec2: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""
    def permute(self, *dims: Sizes) -> Tensor:
        """Return x with its dimensions in the order `dims`."""
    def pin_memory(self, device: DeviceLike = None) -> Tensor:
        """Return a copy in pinned host memory, or x itself if it is pinned. See `to(non_blocking=True)`."""
    def pinverse(self, rcond: float = 1e-15) -> Tensor:
        """Return pseudo-inverses; singular values up to rcond·largest count as 0."""
    def polygamma(self, n: int) -> Tensor:
        """Return the n-th derivative of digamma."""
    def polygamma_(self, n: int) -> Self:
        """Compute `polygamma` in place."""
    def positive(self, *, out: Tensor | None = None) -> Tensor:
        """Return x itself. Raises DTypeError for bools."""
    def pow(self, exponent: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x^y."""
    def pow_(self, exponent: Tensor | float) -> Self:
        """Compute `pow` in place."""
    def prelu(self, weight: Tensor) -> Tensor:
        """x where x > 0, else weight·x; `weight` has one element, or one for each channel (dimension 1)."""
    def prod(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""
    def put(self, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
        """Compute `put_` on a copy."""
    def put_(self, index: Tensor, source: Tensor, accumulate: bool = False) -> Self:
        """Write or add `source` at `index` of the flattened x, in place."""
    def qr(self, some: bool = True, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return Q and R, reduced if `some`."""
    def quantile(
        self,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        out: Tensor | None = None,
    ) -> Tensor:
        """Return quantiles `q` (a number or a vector) of all elements or along `dim`; NaN where there is one."""
    def rad2deg(self, *, out: Tensor | None = None) -> Tensor:
        """Return radians as degrees."""
    def rad2deg_(self) -> Self:
        """Compute `rad2deg` in place."""
    def random_(self, low: int = 0, high: int | None = None, *, generator: Generator | None = None) -> Self:
        """Overwrite x with integers in [low, high); `random_(high)` starts at 0."""
    def ravel(self) -> Tensor:
        """Return all elements in one dimension, in row-major order."""
    def reciprocal(self, *, out: Tensor | None = None) -> Tensor:
        """1 / x."""
    def reciprocal_(self) -> Self:
        """Compute `reciprocal` in place."""
    def relu(self, *, out: Tensor | None = None) -> Tensor:
        """Return max(x, 0)."""
    def relu_(self) -> Self:
        """Compute `relu` in place."""
    def remainder(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x - y·floor(x / y): it has the sign of y."""
    def remainder_(self, other: Tensor | float) -> Self:
        """Compute `remainder` in place."""
    def renorm(self, p: float, dim: int, maxnorm: float, *, out: Tensor | None = None) -> Tensor:
        """Return x with each slice along `dim` scaled so that its p-norm is at most `maxnorm`."""
    def renorm_(self, p: float, dim: int, maxnorm: float) -> Self:
        """Compute `renorm` in place."""
    def repeat(self, *sizes: Sizes) -> Tensor:
        """Return x repeated `sizes` times along each dimension; additional sizes add leading dimensions."""
    def repeat_interleave(
        self, repeats: Sizes | Tensor = (), dim: int | None = None, *, output_size: int | None = None
    ) -> Tensor:
        """Return each element, or slice along `dim`, `repeats` times in a row; `repeats` is one number or one per
        slice."""
    def reshape(self, *shape: Sizes) -> Tensor:
        """Return x as `shape` (one size may be -1): a view if the strides allow it, else a copy."""
    def reshape_as(self, other: Tensor) -> Tensor:
        """Return x in the shape of `other`."""
    def resize_as_(self, the_template: Tensor, *, memory_format: MemoryFormat | None = None) -> Self:
        """Change x's shape to another tensor's; see `Tensor.resize_`."""
    def resolve_conj(self) -> Tensor:
        """Return x: conjugates are always computed."""
    def resolve_neg(self) -> Tensor:
        """Return x: negatives are always computed."""
    def right_shift(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """x / 2^y of integers, rounded down."""
    def right_shift_(self, other: Tensor | float) -> Self:
        """Compute `right_shift` in place."""
    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
        """Return x with elements rotated by `shifts` along `dims`; without `dims`, in the flattened tensor."""
    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
        """Return x rotated `k` quarter turns in the plane of `dims`, from the first towards the second."""
    def round(self, *, decimals: int = 0, out: Tensor | None = None) -> Tensor:
        """Return x rounded to the nearest multiple of 10^-decimals, halves to the even one; integers stay
        unchanged."""
    def round_(self, *, decimals: int = 0) -> Self:
        """Compute `round` in place."""
    def rsqrt(self, *, out: Tensor | None = None) -> Tensor:
        """1 / √x."""
    def rsqrt_(self) -> Self:
        """Compute `rsqrt` in place."""
    def rsub(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return other - alpha·x."""
    def scatter(
        self, dim: int, index: Tensor, src: Tensor | float, *, reduce: str | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes wins."""
    def scatter_(self, dim: int, index: Tensor, src: Tensor | float, *, reduce: str | None = None) -> Self:
        """Compute `scatter` in place."""
    def scatter_add(self, dim: int, index: Tensor, src: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes accumulate in order."""
    def scatter_add_(self, dim: int, index: Tensor, src: Tensor | float) -> Self:
        """Compute `scatter_add` in place."""
    def scatter_reduce(
        self, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True, out: Tensor | None = None
    ) -> Tensor:
        """Return x with src[i, j] reduced into x[i, index[i, j]] (dim = 1): "sum", "prod", "mean", "amax" or
        "amin"."""
    def scatter_reduce_(self, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Self:
        """Compute `scatter_reduce` in place."""
    def select(self, dim: int, index: int) -> Tensor:
        """Return the slice at `index` of dimension `dim`, which is removed. Raises IndexRangeError."""
    def select_scatter(self, src: Tensor, dim: int, index: int) -> Tensor:
        """Return a copy of x with `src` as slice `index` of `dim`."""
    def sgn(self, *, out: Tensor | None = None) -> Tensor:
        """-1, 0 or 1."""
    def sgn_(self) -> Self:
        """Compute `sign` in place."""
    def sigmoid(self, *, out: Tensor | None = None) -> Tensor:
        """1 / (1 + e^-x)."""
    def sigmoid_(self) -> Self:
        """Compute `sigmoid` in place."""
    def sign(self, *, out: Tensor | None = None) -> Tensor:
        """-1, 0 or 1."""
    def sign_(self) -> Self:
        """Compute `sign` in place."""
    def signbit(self, *, out: Tensor | None = None) -> Tensor:
        """Return whether the sign is negative; also for -0."""
    def silu(self, *, out: Tensor | None = None) -> Tensor:
        """x·σ(x), with the same bits as in SwiGLU."""
    def sin(self, *, out: Tensor | None = None) -> Tensor:
        """The sine."""
    def sin_(self) -> Self:
        """Compute `sin` in place."""
    def sinc(self, *, out: Tensor | None = None) -> Tensor:
        """Return sin(πx) / (πx); 1 at 0."""
    def sinc_(self) -> Self:
        """Compute `sinc` in place."""
    def sinh(self, *, out: Tensor | None = None) -> Tensor:
        """The hyperbolic sine."""
    def sinh_(self) -> Self:
        """Compute `sinh` in place."""
    def slice_scatter(
        self,
        src: Tensor,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a copy of x with `src` in start:end:step of `dim`."""
    def slogdet(self, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the signs of determinants and the logarithms of their sizes."""
    def softmax(self, dim: int, dtype: DTypeLike = None, *, out: Tensor | None = None) -> Tensor:
        """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    def sort(
        self, dim: int = -1, descending: bool = False, stable: bool = True, *, out: Sequence[Tensor] | None = None
    ) -> ValuesAndIndices:
        """Return x sorted along `dim` (default: the last), and the original position of each element."""
    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""
    def split_with_sizes(self, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Return views of the listed sizes along `dim`."""
    def sqrt(self, *, out: Tensor | None = None) -> Tensor:
        """√x."""
    def sqrt_(self) -> Self:
        """Compute `sqrt` in place."""
    def square(self, *, out: Tensor | None = None) -> Tensor:
        """x²."""
    def square_(self) -> Self:
        """Compute `square` in place."""
    def squeeze(self, *dim: int | Sequence[int]) -> Tensor:
        """Return x without its dimensions of size 1: all of them, or those in `dim`."""
    def squeeze_(self, *dim: int | Sequence[int]) -> Self:
        """Change x itself into the view `squeeze`."""
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
    def std_mean(
        self, dim: Dims | bool = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `std` and `mean` over `dim`."""
    def sub(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x - alpha·y."""
    def sub_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """Compute x -= alpha·y in place."""
    def subtract(self, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        """Return x - alpha·y."""
    def subtract_(self, other: Tensor | float, *, alpha: float = 1) -> Self:
        """Compute x -= alpha·y in place."""
    def sum(
        self, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
    ) -> Tensor:
        """Return Σ x over `dim` (default: all); `dtype` casts x first, integers and bools give int64 by default."""
    def sum_to_size(self, *size: Sizes) -> Tensor:
        """Return x summed to shape `size`: over the dimensions that broadcasting from `size` to x's shape repeats."""
    def svd(self, some: bool = True, compute_uv: bool = True, *, out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return U, singular values and V (not Vᵀ), reduced if `some`; U and V are zeros without `compute_uv`."""
    def swapaxes(self, axis0: int, axis1: int) -> Tensor:
        """Compute `transpose`; this is numpy's name."""
    def swapaxes_(self, axis0: int, axis1: int) -> Self:
        """Change x itself into the view `swapaxes`."""
    def swapdims(self, dim0: int, dim1: int) -> Tensor:
        """Return x with two dimensions swapped."""
    def swapdims_(self, dim0: int, dim1: int) -> Self:
        """Change x itself into the view `transpose`."""
    def t(self) -> Tensor:
        """Return the transpose of a matrix; vectors and scalars are returned unchanged."""
    def t_(self) -> Self:
        """Change x itself into the view `t`."""
    def take(self, index: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the elements of the flattened x at `index`, in its shape."""
    def take_along_dim(self, indices: Tensor, dim: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Compute `gather` with x and `indices` broadcast outside `dim`; without `dim`, on the flattened tensors."""
    def tan(self, *, out: Tensor | None = None) -> Tensor:
        """The tangent."""
    def tan_(self) -> Self:
        """Compute `tan` in place."""
    def tanh(self, *, out: Tensor | None = None) -> Tensor:
        """The hyperbolic tangent."""
    def tanh_(self) -> Self:
        """Compute `tanh` in place."""
    def tensor_split(
        self,
        indices_or_sections: int | Sequence[int] | Tensor,
        dim: int = 0,
        *,
        indices: Any = None,
        sections: Any = None,
    ) -> tuple[Tensor, ...]:
        """Return views along `dim`: as many as the number says, of nearly equal size, or cut before the indices."""
    def tile(self, *dims: Sizes) -> Tensor:
        """Return x repeated `dims` times along its last dimensions; missing counts are 1."""
    def topk(
        self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Sequence[Tensor] | None = None
    ) -> ValuesAndIndices:
        """Return the k largest (or smallest) elements along `dim` (default: the last), and their positions."""
    def trace(self) -> Tensor:
        """Return the sum of a matrix's diagonal."""
    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Return x with two dimensions swapped."""
    def transpose_(self, dim0: int, dim1: int) -> Self:
        """Change x itself into the view `transpose`."""
    def trapezoid(self, input: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
        """Return the integral of samples `y` along `dim` by the trapezoidal rule, at points `x` or `dx` (1) apart."""
    def triangular_solve(
        self,
        A: Tensor,
        upper: bool = True,
        transpose: bool = False,
        unitriangular: bool = False,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return X of A·X = b (Aᵀ·X = b with `transpose`) for triangular A, and a copy of A."""
    def tril(self, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Return the lower triangles of the matrices in the last two dimensions, up to `diagonal`; 0 elsewhere."""
    def tril_(self, diagonal: int = 0) -> Self:
        """Compute `tril` in place."""
    def triu(self, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Return the upper triangles of the matrices in the last two dimensions, from `diagonal` on; 0 elsewhere."""
    def triu_(self, diagonal: int = 0) -> Self:
        """Compute `triu` in place."""
    def true_divide(
        self, other: Tensor | float, *, rounding_mode: str | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
    def true_divide_(self, other: Tensor | float, *, rounding_mode: str | None = None) -> Self:
        """Compute `div` in place."""
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
    def unique(
        self, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """Return the sorted distinct values of the flattened x, or slices along `dim`. Blocks once to read their
        count."""
    def unique_consecutive(
        self, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """Return x without repetitions of neighbours, of the flattened tensor or of slices along `dim`."""
    def unsafe_chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Compute `chunk`."""
    def unsafe_split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""
    def unsqueeze(self, dim: int) -> Tensor:
        """Return x with a dimension of size 1 inserted before `dim`."""
    def unsqueeze_(self, dim: int) -> Self:
        """Change x itself into the view `unsqueeze`."""
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
    def var_mean(
        self, dim: Dims | bool = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `var` and `mean` over `dim`."""
    def vdot(self, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the dot product of two vectors."""
    def view(self, *shape: Sizes, dtype: DTypeLike = None) -> Tensor:
        """Return a view of x as `shape` (one size may be -1). Raises ShapeError if that needs a copy."""
    def view_as(self, other: Tensor) -> Tensor:
        """Return a view of x in the shape of `other`."""
    def vsplit(self, *indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
        """Compute `tensor_split` along dimension 0, into equal sections."""
    def xlogy(self, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        """Return x·log(y); 0 where x is 0 and y is not NaN."""
    def xlogy_(self, other: Tensor | float) -> Self:
        """Compute `xlogy` in place."""
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
    def __rdiv__(self, other: Tensor | float) -> Tensor: ...
    def __rfloordiv__(self, other: Tensor | float) -> Tensor: ...
    def __rlshift__(self, other: Tensor | float) -> Tensor: ...
    def __rmatmul__(self, other: Tensor) -> Tensor: ...
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

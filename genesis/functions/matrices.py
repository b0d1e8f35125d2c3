"""Solvers and factorizations of `genesis.linalg`, `genesis` and Tensor, with torch's names and semantics.

Matrices are in the last two dimensions; leading ones are a batch. Factorizations take float32 and float64 and run on
the host (`genesis.functions.factorizations`). `linalg` holds the functions by their names in `genesis.linalg`;
`genesis.functions.matrix_norms` adds norms and products.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.autograd.record import TensorBase
from genesis.dtypes import int64
from genesis.errors import DTypeError, LinAlgError, ShapeError, UsageError
from genesis.functions import elementwise, pointwise, reduce
from genesis.functions import factorizations as lapack
from genesis.functions.create import empty, eye, tensor, zeros
from genesis.functions.random import randn
from genesis.functions.shape import movedim
from genesis.functions.surface import Tensor, functions, methods, normalized
from genesis.shapes import broadcast_shapes

linalg: dict[str, Any] = {}

Cholesky = namedtuple("Cholesky", "L info")
Inverse = namedtuple("Inverse", "inverse info")
Solved = namedtuple("Solved", "result info")
Eigen = namedtuple("Eigen", "eigenvalues eigenvectors")
SVD = namedtuple("SVD", "U S Vh")
OldSVD = namedtuple("OldSVD", "U S V")
QR = namedtuple("QR", "Q R")
LogDet = namedtuple("LogDet", "sign logabsdet")
LUFactor = namedtuple("LUFactor", "LU pivots")
LUFactorInfo = namedtuple("LUFactorInfo", "LU pivots info")
LU = namedtuple("LU", "P L U")
LeastSquares = namedtuple("LeastSquares", "solution residuals rank singular_values")
Reflectors = namedtuple("Reflectors", "a tau")
Triangular = namedtuple("Triangular", "solution cloned_coefficient")
Polar = namedtuple("Polar", "U H")


def _into(result: Any, out: Any, name: str) -> Any:
    """Copy a result into `out`: a tensor, or one per part of a tuple. A tensor of another shape is resized if empty."""
    if isinstance(result, tuple):
        if not isinstance(out, (tuple, list)) or len(out) != len(result):
            raise DTypeError(f"{name}: out must be a tuple of {len(result)} tensors")
        return type(result)(*(_into(r, o, name) for r, o in zip(result, out, strict=True)))
    if result.dtype.category > out.dtype.category or result.device != out.device:
        raise DTypeError(f"{name}: a {result.dtype.name} result on {result.device} does not fit into out")
    if out.shape != result.shape:
        if out.numel():
            what = f"{name}: out of shape {tuple(out.shape)} gets new memory of shape {tuple(result.shape)}"
            warnings.warn(what, UserWarning, stacklevel=4)
        out.array = empty(result.shape, dtype=out.dtype, device=out.device).array
    return out.copy_(result)


def _with_out(function: Any, name: str) -> Any:
    """Add `out=`, into which the result is copied."""

    @functools.wraps(function)
    def called(*args: Any, out: Any = None, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        return result if out is None else _into(result, out, name)

    found = inspect.signature(function)
    added = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Tensor | None")
    parameters = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD]
    called.__signature__ = found.replace(parameters=[*parameters, added])  # type: ignore[attr-defined]
    return called


def matrix_function(
    *,
    top: Sequence[str] = (),
    only_top: bool = False,
    method: bool = True,
    out: bool = True,
) -> Callable[[Any], Any]:
    """Decorator: enter a function in `linalg` and, under the names `top`, in `genesis` and (`method`) in Tensor."""

    def register(written: Any) -> Any:
        first = next(iter(inspect.signature(written).parameters))
        more = {word: first for word in ("input", "A", "self") if word != first and first != "x"}
        called = normalized(written, **more)
        called = _with_out(called, written.__name__) if out else called
        called.keywords = more
        if not only_top:
            linalg[written.__name__.removesuffix("_of")] = called
        functions.update(dict.fromkeys(top, called))
        methods.update(dict.fromkeys(top if method else (), called))
        return called

    return register


def _batched(*tensors: Any) -> list[Any]:
    """Return the operands expanded to a common batch."""
    batch = broadcast_shapes(*(tuple(t.shape[:-2]) for t in tensors))
    return [t.expand(*batch, *t.shape[-2:]) for t in tensors]


def _raise_for(info: Any, name: str, check: bool) -> None:
    if check and bool((info != 0).any()):
        raise LinAlgError(f"{name}: a matrix is singular or not positive-definite; info is {info.tolist()}")


# --- Solving ----------------------------------------------------------------------------------------------------------


def lapack_inverse(a: Any, name: str) -> Any:
    """Return the inverse of square matrices, with checks."""
    lapack.check_square(name, a)
    return lapack.inverse_of(a, name)


@matrix_function(top=("inverse",))
def inv(A: Tensor) -> Tensor:
    """Return the inverses of square matrices. Raises LinAlgError for a singular one."""
    return lapack_inverse(A, "linalg.inv")


@matrix_function()
def inv_ex(A: Tensor, *, check_errors: bool = False) -> Any:
    """Return inverses, and info: 0, or the number of the first zero pivot of a singular matrix."""
    lapack.check_square("linalg.inv_ex", A)
    info = lapack.lu_packed(A.detach(), True)[2]
    _raise_for(info, "linalg.inv_ex", check_errors)
    singular = (info != 0).unsqueeze(-1).unsqueeze(-1)
    one = eye(A.shape[-1], dtype=A.dtype, device=A.device)
    safe = A if not bool(singular.any()) else elementwise.where(singular, one, A)
    return Inverse(lapack.inverse_of(safe, "linalg.inv_ex").masked_fill(singular, math.inf), info)


def _solve(name: str, A: Any, B: Any, left: bool) -> Any:
    lapack.check_square(name, A)
    lapack.check_floats(name, A, B, ndim=1)
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and tuple(B.shape) == tuple(A.shape[:-1]))
    if is_vector and not left:
        raise ShapeError(f"{name}: with left=False, B must be a matrix, got the shape {tuple(B.shape)}")
    b = B.unsqueeze(-1) if is_vector else B
    if A.shape[-1] != b.shape[-2 if left else -1]:
        raise ShapeError(f"{name}: the shapes {tuple(A.shape)} and {tuple(B.shape)} do not suit")
    a, b = _batched(A if left else A.mT, b if left else b.mT)
    x = lapack.solve_square(a, b, name)
    return x.squeeze(-1) if is_vector else x if left else x.mT


@matrix_function()
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return X of A·X = B, or of X·A = B if not `left`. Raises LinAlgError for a singular A."""
    return _solve("linalg.solve", A, B, left)


@matrix_function()
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Return X as `solve` does, and info: 0, or the number of the first zero pivot of a singular A."""
    lapack.check_square("linalg.solve_ex", A)
    info = lapack.lu_packed(A.detach(), True)[2]
    _raise_for(info, "linalg.solve_ex", check_errors)
    singular = (info != 0).unsqueeze(-1).unsqueeze(-1)
    one = eye(A.shape[-1], dtype=A.dtype, device=A.device)
    safe = A if not bool(singular.any()) else elementwise.where(singular, one, A)
    return Solved(_solve("linalg.solve_ex", safe, B, left), info)


def _triangular(name: str, A: Any, B: Any, upper: bool, left: bool, unitriangular: bool) -> Any:
    lapack.check_square(name, A)
    lapack.check_floats(name, A, B)
    if A.shape[-1] != B.shape[-2 if left else -1]:
        raise ShapeError(f"{name}: the shapes {tuple(A.shape)} and {tuple(B.shape)} do not suit")
    a, b = _batched(A, B) if left else _batched(A.mT, B.mT)
    x = lapack.substitute(a, b, upper=upper == left, unitriangular=unitriangular)
    return x if left else x.mT


@matrix_function()
def solve_triangular(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Return X of A·X = B (X·A = B if not `left`) for triangular A; only one triangle is read."""
    return _triangular("linalg.solve_triangular", A, B, upper, left, unitriangular)


@matrix_function(top=("triangular_solve",), only_top=True)
def triangular_solve(
    b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, ...]:
    """Return X of A·X = b (Aᵀ·X = b with `transpose`) for triangular A, and a copy of A."""
    a = A.mT if transpose else A
    return Triangular(_triangular("triangular_solve", a, b, upper != transpose, True, unitriangular), A.clone())


@matrix_function()
def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Return least-squares solutions of A·X = B, residuals, ranks and singular values.

    All drivers compute by SVD. As in torch, "gelsy" (the default) reports no residuals, "gels" no rank, and only
    "gelsd" and "gelss" report singular values.
    """
    lapack.check_floats("linalg.lstsq", A)
    lapack.check_floats("linalg.lstsq", A, B, ndim=1)
    if driver not in (None, "gels", "gelsy", "gelsd", "gelss"):
        raise UsageError(f"linalg.lstsq has no driver {driver!r}", next="use gels, gelsy, gelsd or gelss")
    is_vector = A.ndim - 1 == B.ndim and tuple(B.shape) == tuple(A.shape[:-1])
    b = B.unsqueeze(-1) if is_vector else B
    m, n = A.shape[-2:]
    if b.shape[-2] != m:
        raise ShapeError(f"linalg.lstsq: the shapes {tuple(A.shape)} and {tuple(B.shape)} do not suit")
    a, b = _batched(A, b)
    values = svdvals(a.detach())
    cut = reduce.amax(values, -1) * (_epsilon(A) * max(m, n) if rcond is None else max(rcond, 0)) if min(m, n) else None
    if cut is None:
        cut = zeros(a.shape[:-2], dtype=A.dtype, device=A.device)
    rank = (values > cut.unsqueeze(-1)).sum(-1)
    x = lapack.pseudo_inverse(a, cut, False) @ b
    none = empty(0, dtype=A.dtype, device=A.device)
    is_full = m > n and driver not in (None, "gelsy") and bool((rank == n).all())
    residuals = ((a @ x - b) ** 2).sum(-2) if is_full else none
    ranks = empty(0, dtype=int64, device=A.device) if driver == "gels" else rank
    x = x.squeeze(-1) if is_vector else x
    residuals = residuals.squeeze(-1) if is_vector and is_full else residuals
    return LeastSquares(x, residuals, ranks, values if driver in ("gelsd", "gelss") else none)


@matrix_function()
def tensorinv(A: Tensor, ind: int = 2) -> Tensor:
    """Return the inverse of A, read as a matrix with its first `ind` dimensions as rows."""
    if ind <= 0:
        raise UsageError(f"linalg.tensorinv: ind is {ind}, and must be positive")
    rows, columns = tuple(A.shape[:ind]), tuple(A.shape[ind:])
    if math.prod(rows) != math.prod(columns):
        raise ShapeError(f"linalg.tensorinv: {rows} and {columns} have different numbers of elements")
    return inv(A.reshape(math.prod(rows), math.prod(columns))).reshape(*columns, *rows)


@matrix_function()
def tensorsolve(A: Tensor, B: Tensor, dims: Any = None) -> Tensor:
    """Return X with tensordot(A, X, X.ndim) = B; `dims` are moved to the end of A first."""
    a = A if dims is None else movedim(A, tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    rest = tuple(a.shape[B.ndim :])
    if math.prod(rest) != B.numel():
        raise ShapeError(f"linalg.tensorsolve: the shapes {tuple(A.shape)} and {tuple(B.shape)} do not suit")
    return solve(a.reshape(B.numel(), B.numel()), B.reshape(-1)).reshape(rest)


# --- Factorizations ---------------------------------------------------------------------------------------------------


@matrix_function(top=("cholesky",))
def cholesky(A: Tensor, upper: bool = False) -> Tensor:
    """Return L of A = L·Lᵀ, or Lᵀ if `upper`. Raises LinAlgError unless A is positive-definite."""
    lapack.check_square("linalg.cholesky", A)
    lower = lapack.cholesky_of(A.mT if upper else A, "linalg.cholesky")[0]
    return lower.mT if upper else lower


@matrix_function()
def cholesky_ex(A: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the factor, and info: 0, or the order of the first leading minor that is not positive."""
    lapack.check_square("linalg.cholesky_ex", A)
    lower, info = lapack.cholesky_of(A.mT if upper else A, "")
    _raise_for(info, "linalg.cholesky_ex", check_errors)
    return Cholesky(lower.mT if upper else lower, info)


@matrix_function(top=("cholesky_solve",), only_top=True)
def cholesky_solve(B: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """Return X of A·X = B, given the Cholesky factor of A."""
    lower = L.mT if upper else L
    half = _triangular("cholesky_solve", lower, B, False, True, False)
    return _triangular("cholesky_solve", lower.mT, half, True, True, False)


@matrix_function(top=("cholesky_inverse",), only_top=True)
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return the inverse of A, given its Cholesky factor."""
    lapack.check_square("cholesky_inverse", L)
    one = eye(L.shape[-1], dtype=L.dtype, device=L.device)
    half = _triangular("cholesky_inverse", L.mT if upper else L, one, False, True, False)
    return half.mT @ half


@matrix_function(out=True)
def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, ...]:
    """Return Q and R. `mode`: "reduced", "complete", or "r", which leaves Q empty and has no gradient."""
    lapack.check_floats("linalg.qr", A)
    if mode not in ("reduced", "complete", "r"):
        raise UsageError(f"linalg.qr has no mode {mode!r}", next="use reduced, complete or r")
    if mode == "r":
        return QR(empty(0, dtype=A.dtype, device=A.device), lapack.qr_of(A.detach(), "reduced")[1])
    return QR(*lapack.qr_of(A, mode))


@matrix_function(top=("qr",), only_top=True)
def qr_old(input: Tensor, some: bool = True) -> tuple[Tensor, ...]:
    """Return Q and R, reduced if `some`."""
    return qr(input, "reduced" if some else "complete")  # type: ignore[no-any-return]


@matrix_function(top=("geqrf",), only_top=True)
def geqrf(input: Tensor) -> tuple[Tensor, ...]:
    """Return R with the reflectors of Q below it, and their factors tau; without gradient."""
    lapack.check_floats("geqrf", input)
    return Reflectors(*lapack.reflectors_of(input))


def _reflected(A: Any, tau: Any, target: Any, order: Any) -> Any:
    """Return H(i)·…·target for the reflectors H(i) = I - tau[i]·v[i]·v[i]ᵀ in this order."""
    m = A.shape[-2]
    unit = A.tril(-1) + eye(m, A.shape[-1], dtype=A.dtype, device=A.device)
    for i in order:
        v = unit[..., :, i : i + 1]
        target = target - tau[..., i].unsqueeze(-1).unsqueeze(-1) * (v @ (v.mT @ target))
    return target


@matrix_function()
def householder_product(A: Tensor, tau: Tensor) -> Tensor:
    """Return the first columns of the product of the reflectors that `geqrf` returns."""
    lapack.check_floats("linalg.householder_product", A)
    lapack.check_floats("linalg.householder_product", A, tau, ndim=1)
    if A.shape[-2] < A.shape[-1] or tau.shape[-1] > A.shape[-1]:
        raise ShapeError(f"linalg.householder_product: shapes {tuple(A.shape)} and {tuple(tau.shape)} do not suit")
    one = eye(A.shape[-2], A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape)
    return _reflected(A, tau, one, reversed(range(tau.shape[-1]))) + A[..., :0].sum()  # records A in any case


@matrix_function(top=("orgqr",), only_top=True)
def orgqr(input: Tensor, tau: Tensor) -> Tensor:
    """Compute `linalg.householder_product`."""
    return householder_product(input, tau)


@matrix_function(top=("ormqr",), only_top=True)
def ormqr(input: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """Return Q·other (Qᵀ with `transpose`; other·Q if not `left`), with Q from the reflectors of `geqrf`."""
    lapack.check_floats("ormqr", input, other)
    k = range(tau.shape[-1])
    if left:
        return _reflected(input, tau, other, k if transpose else reversed(k))
    return _reflected(input, tau, other.mT, reversed(k) if transpose else k).mT


@matrix_function()
def lu_factor_ex(A: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """Return L and U in one matrix, pivots and info, all as LAPACK defines them."""
    lapack.check_floats("linalg.lu_factor_ex", A)
    return LUFactorInfo(*lapack.lu_packed(A, pivot, "linalg.lu_factor_ex" if check_errors else ""))


@matrix_function()
def lu_factor(A: Tensor, *, pivot: bool = True) -> Any:
    """Return L and U in one matrix, and the pivots. Raises LinAlgError for a zero pivot."""
    lapack.check_floats("linalg.lu_factor", A)
    return LUFactor(*lapack.lu_packed(A, pivot, "linalg.lu_factor")[:2])


@matrix_function(top=("lu",), only_top=True)
def lu_old(A: Tensor, pivot: bool = True, get_infos: bool = False) -> tuple[Tensor, ...]:
    """Return L and U in one matrix and the pivots, and info with `get_infos`."""
    lapack.check_floats("lu", A)
    found = lapack.lu_packed(A, pivot)
    return LUFactorInfo(*found) if get_infos else LUFactor(*found[:2])


@matrix_function(top=("lu_unpack",), only_top=True, method=False)
def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return P, L and U from `lu_factor`; the parts that are not asked for are empty."""
    m, n = LU_data.shape[-2:]
    k = min(m, n)
    none = empty(0, dtype=LU_data.dtype, device=LU_data.device)
    lower = upper = p = none
    if unpack_data:
        one = eye(m, k, dtype=LU_data.dtype, device=LU_data.device)
        lower, upper = LU_data[..., :, :k].tril(-1) + one, LU_data[..., :k, :].triu()
    if unpack_pivots:
        p = lapack.permutation(LU_pivots, m, LU_data.dtype)
    return LU(p, lower, upper)


@matrix_function()
def lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, ...]:
    """Return P, L and U of A = P·L·U; P is empty if not `pivot`."""
    lapack.check_floats("linalg.lu", A)
    packed, pivots, _ = lapack.lu_packed(A, pivot)
    return lu_unpack(packed, pivots, True, pivot)  # type: ignore[no-any-return]


def _solve_lu(LU: Any, pivots: Any, B: Any, left: bool, adjoint: bool) -> Any:
    lapack.check_square("linalg.lu_solve", LU)
    lapack.check_floats("linalg.lu_solve", LU, B)
    if not left:
        return _solve_lu(LU, pivots, B.mT, True, not adjoint).mT
    p = lapack.permutation(pivots, LU.shape[-1], LU.dtype)
    if adjoint:
        half = _triangular("linalg.lu_solve", LU.mT, B, False, True, False)
        return p @ _triangular("linalg.lu_solve", LU.mT, half, True, True, True)
    half = _triangular("linalg.lu_solve", LU, p.mT @ B, False, True, True)
    return _triangular("linalg.lu_solve", LU, half, True, True, False)


@matrix_function()
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """Return X of A·X = B (X·A = B if not `left`; Aᵀ with `adjoint`), given the result of `lu_factor`."""
    return _solve_lu(LU, pivots, B, left, adjoint)


@matrix_function(top=("lu_solve",), only_top=True)
def lu_solve_old(b: Tensor, LU_data: Tensor, LU_pivots: Tensor) -> Tensor:
    """Return X of A·X = b, given the result of `linalg.lu_factor`."""
    return _solve_lu(LU_data, LU_pivots, b, True, False)


# --- Determinants, eigenvalues and singular values --------------------------------------------------------------------


@matrix_function(top=("det",))
def det(A: Tensor) -> Tensor:
    """Return the determinants of square matrices."""
    lapack.check_square("linalg.det", A)
    return lapack.determinant(A)


@matrix_function(top=("slogdet",))
def slogdet(A: Tensor) -> tuple[Tensor, ...]:
    """Return the signs of determinants and the logarithms of their sizes."""
    lapack.check_square("linalg.slogdet", A)
    return LogDet(*lapack.sign_and_log(A))


@matrix_function(top=("logdet",), only_top=True, out=False)
def logdet(input: Tensor) -> Tensor:
    """Return the logarithms of determinants: NaN for negative ones."""
    lapack.check_square("logdet", input)
    sign, log = lapack.sign_and_log(input)
    return elementwise.where(sign < 0, math.nan, log)


def _triangle(UPLO: str, name: str) -> str:
    if UPLO.upper() not in ("L", "U"):
        raise UsageError(f"{name}: UPLO is {UPLO!r}", next='use "L" or "U"')
    return UPLO.upper()


@matrix_function()
def eigh(A: Tensor, UPLO: str = "L") -> Any:
    """Return eigenvalues in ascending order, and eigenvectors, of symmetric matrices; one triangle is read."""
    lapack.check_square("linalg.eigh", A)
    return Eigen(*lapack.eigh_of(A, _triangle(UPLO, "linalg.eigh")))


@matrix_function()
def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """Return the eigenvalues of symmetric matrices in ascending order."""
    lapack.check_square("linalg.eigvalsh", A)
    return lapack.eigh_of(A, _triangle(UPLO, "linalg.eigvalsh"))[0]


@matrix_function()
def svd(A: Tensor, full_matrices: bool = True, *, driver: str | None = None) -> tuple[Tensor, ...]:
    """Return U, singular values in descending order, and Vᵀ. Torch takes `driver` only on CUDA."""
    lapack.check_floats("linalg.svd", A)
    if driver is not None:
        raise UsageError(f"linalg.svd: driver is {driver!r}, and the host has one driver", next="leave driver out")
    return SVD(*lapack.svd_of(A, full_matrices))


@matrix_function(top=("svd",), only_top=True)
def svd_old(input: Tensor, some: bool = True, compute_uv: bool = True) -> tuple[Tensor, ...]:
    """Return U, singular values and V (not Vᵀ), reduced if `some`; U and V are zeros without `compute_uv`."""
    lapack.check_floats("svd", input)
    m, n = input.shape[-2:]
    if not compute_uv:
        shapes = [(*input.shape[:-2], k, k) for k in (m, n)]
        u, v = (zeros(shape, dtype=input.dtype, device=input.device) for shape in shapes)
        return OldSVD(u, svdvals(input), v)
    u, s, vh = lapack.svd_of(input, not some)
    return OldSVD(u, s, vh.mT)


@matrix_function()
def svdvals(A: Tensor, *, driver: str | None = None) -> Tensor:
    """Return singular values in descending order."""
    lapack.check_floats("linalg.svdvals", A)
    if driver is not None:
        raise UsageError(f"linalg.svdvals: driver is {driver!r}, and the host has one driver", next="leave driver out")
    return lapack.svd_of(A, False)[1]


def _epsilon(x: Any) -> float:
    return float(np.finfo(x.dtype.numpy).eps)


def _tolerance(A: Any, largest: Any, atol: Any, rtol: Any) -> Any:
    """Return max(atol, rtol·largest) per matrix; rtol is ε·max(m, n) if no positive atol is given."""
    if rtol is None:
        rtol = 0.0 if atol is not None and (isinstance(atol, TensorBase) or atol > 0) else None
    rtol = _epsilon(A) * max(A.shape[-2:]) if rtol is None else rtol
    relative = largest * rtol
    least: Any = atol if isinstance(atol, TensorBase) else tensor(0.0 if atol is None else atol, dtype=A.dtype)
    return pointwise.maximum(relative, least.to(device=A.device, dtype=A.dtype).expand(relative.shape))


def _sizes_of_spectrum(A: Any, hermitian: bool) -> tuple[Any, Any]:
    """Return the absolute eigenvalues or the singular values, without gradient, and the largest of each matrix."""
    values = eigvalsh(A.detach()).abs() if hermitian else svdvals(A.detach())
    if not values.shape[-1]:
        return values, zeros(values.shape[:-1], dtype=A.dtype, device=A.device)
    return values, reduce.amax(values, -1)


@matrix_function()
def matrix_rank(
    A: Tensor, tol: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None
) -> Tensor:  # fmt: skip
    """Return how many singular values exceed max(atol, rtol·largest); `tol` is an older name of atol."""
    (lapack.check_square if hermitian else lapack.check_floats)("linalg.matrix_rank", A)
    values, largest = _sizes_of_spectrum(A, hermitian)
    if tol is not None:
        atol, rtol = tol, 0.0
    return (values > _tolerance(A, largest, atol, rtol).unsqueeze(-1)).sum(-1)


@matrix_function()
def pinv(
    A: Tensor, rcond: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None
) -> Tensor:  # fmt: skip
    """Return pseudo-inverses; singular values up to max(atol, rtol·largest) count as 0."""
    (lapack.check_square if hermitian else lapack.check_floats)("linalg.pinv", A)
    largest = _sizes_of_spectrum(A, hermitian)[1]
    rtol = rcond if rtol is None else rtol
    rtol = rtol.to(device=A.device) if isinstance(rtol, TensorBase) else rtol  # type: ignore[attr-defined]
    return lapack.pseudo_inverse(A, _tolerance(A, largest, atol, rtol), hermitian)


@matrix_function(top=("pinverse",), only_top=True, out=False)
def pinverse(input: Tensor, rcond: float = 1e-15) -> Tensor:
    """Return pseudo-inverses; singular values up to rcond·largest count as 0."""
    return pinv(input, rcond)


@matrix_function()
def polar(A: Tensor) -> Any:
    """Return the factors of A = U·H: U with orthonormal columns (or rows), and H symmetric and not negative."""
    lapack.check_floats("linalg.polar", A)
    u, s, vh = lapack.svd_of(A, False)
    return Polar(u @ vh, (vh.mT * s.unsqueeze(-2)) @ vh)


@matrix_function(out=False)
def matrix_sqrth(A: Tensor) -> Tensor:
    """Return the square roots of symmetric matrices without negative eigenvalues."""
    lapack.check_square("linalg.matrix_sqrth", A)
    return lapack.root_of(A)


@matrix_function(top=("svd_lowrank",), only_top=True, method=False, out=False)
def svd_lowrank(A: Tensor, q: int | None = 6, niter: int | None = 2, M: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return U, S and V of about the q largest singular values, by random projections (Halko et al., 2009)."""
    a = A if M is None else A - M
    count = 6 if q is None else q
    x = a @ randn(*a.shape[:-2], a.shape[-1], count, dtype=A.dtype, device=A.device)
    basis = lapack.qr_of(x, "reduced")[0]
    for _ in range(2 if niter is None else niter):
        basis = lapack.qr_of(a.mT @ basis, "reduced")[0]
        basis = lapack.qr_of(a @ basis, "reduced")[0]
    u, s, vh = lapack.svd_of(basis.mT @ a, False)
    return basis @ u, s, vh.mT


@matrix_function(top=("pca_lowrank",), only_top=True, method=False, out=False)
def pca_lowrank(A: Tensor, q: int | None = None, center: bool = True, niter: int = 2) -> tuple[Tensor, ...]:
    """Return `svd_lowrank` of A, whose columns are centered by default."""
    m, n = A.shape[-2:]
    count = min(6, m, n) if q is None else q
    if not 0 <= count <= min(m, n):
        raise UsageError(f"pca_lowrank: q is {count}, and must be between 0 and {min(m, n)}")
    return svd_lowrank(A - A.mean(-2, keepdim=True) if center else A, count, niter)  # type: ignore[no-any-return]

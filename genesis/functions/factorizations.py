"""Matrix factorizations and solvers by LAPACK, through numpy on the host, with gradients made of tensor functions.

A matrix on a GPU is copied to the host, factorized there and copied back, so each call waits for the device. Gradients
are products and solves of tensors on the matrix's own device. All matrices are float32 or float64, in the last two
dimensions; leading dimensions are a batch. `genesis.functions.matrices` defines the public functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import from_numpy
from genesis.autograd.function import Function
from genesis.autograd.record import TensorBase
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, GradientError, LinAlgError, ShapeError
from genesis.functions.create import eye
from genesis.functions.surface import Tensor, array_of
from genesis.functions.transfer import moved

Gradient = Callable[..., tuple[Any, ...]]


def check_floats(name: str, *tensors: Any, ndim: int = 2) -> None:
    """Raise unless every operand is a float32 or float64 tensor with at least `ndim` dimensions, all of one dtype."""
    dtypes = [array_of(t, name).dtype for t in tensors]
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if dtype not in (float32, float64):
            raise DTypeError(f"{name} takes float32 and float64, not {dtype.name}", next="convert with .to()")
        if dtype is not dtypes[0]:
            raise DTypeError(f"{name} takes operands of one dtype, got {dtypes[0].name} and {dtype.name}")
        if tensor.ndim < ndim:
            raise ShapeError(f"{name} takes at least {ndim} dimensions, got the shape {tuple(tensor.shape)}")


def check_square(name: str, *tensors: Any) -> None:
    """Raise as `check_floats` does, or if the last two sizes of an operand differ."""
    check_floats(name, *tensors)
    for tensor in tensors:
        if tensor.shape[-1] != tensor.shape[-2]:
            raise ShapeError(f"{name} takes square matrices, got the shape {tuple(tensor.shape)}")


class _OnHost(Function):
    """Runs a numpy function on the host; its gradient is a function of tensors."""

    @staticmethod
    def forward(ctx: Any, compute: Any, gradient: Any, attrs: Any, *tensors: Any) -> Any:
        device = tensors[0].device
        try:
            with np.errstate(all="ignore"):
                results = compute(*(np.asarray(t.array.numpy()) for t in tensors), **attrs)
        except np.linalg.LinAlgError as error:
            what = f"{attrs.get('name', compute.__name__.strip('_'))}: {str(error).lower()}"
            raise LinAlgError(what, next="check the matrix for singularity, NaN and infinity") from None
        outs = tuple(TensorBase.wrap(moved(from_numpy(np.array(r, order="C", copy=None)), device)) for r in results)
        ctx.gradient, ctx.attrs, ctx.count = gradient, attrs, len(tensors)
        ctx.save_for_backward(*tensors, *outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.gradient is None:
            raise GradientError("this factorization has no gradient", next="detach() its input")
        saved = ctx.saved_tensors
        return None, None, None, *ctx.gradient(saved[: ctx.count], saved[ctx.count :], grads, ctx.attrs)


def on_host(compute: Any, gradient: Gradient | None, *tensors: Any, **attrs: Any) -> Any:
    """Return the results of `compute(*arrays, **attrs)`, a tuple of arrays, as tensors on the operands' device."""
    return _OnHost.apply(compute, gradient, attrs, *tensors)


def diag_embed(x: Tensor) -> Tensor:
    """Return matrices with the last dimension of x as their diagonal."""
    return x.unsqueeze(-1) * eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _halved_lower(x: Tensor) -> Tensor:
    """Return the lower triangle with half the diagonal."""
    return x.tril() - diag_embed(x.diagonal(0, -2, -1)) * 0.5


# --- Triangular and square systems ------------------------------------------------------------------------------------


def _substituted(a: np.ndarray, b: np.ndarray, *, upper: bool, unitriangular: bool) -> tuple[np.ndarray]:
    n, x = a.shape[-1], np.empty_like(b)
    for i in reversed(range(n)) if upper else range(n):
        known = slice(i + 1, n) if upper else slice(0, i)
        row = b[..., i, :] - (a[..., i : i + 1, known] @ x[..., known, :])[..., 0, :]
        x[..., i, :] = row if unitriangular else row / a[..., i, i, None]
    return (x,)


def _substituted_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gB = A⁻ᵀ·g, gA = -gB·xᵀ in the triangle."""
    upper, unit = attrs["upper"], attrs["unitriangular"]
    right = substitute(inputs[0].mT, grads[0], upper=not upper, unitriangular=unit)
    product = right @ outs[0].mT
    return -(product.triu(int(unit)) if upper else product.tril(-int(unit))), right


def substitute(a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    """Return A⁻¹·B for triangular A `[..., n, n]` and B `[..., n, k]` of equal batches."""
    return on_host(_substituted, _substituted_gradient, a, b, upper=upper, unitriangular=unitriangular)[0]


def _solved(a: np.ndarray, b: np.ndarray, *, name: str) -> tuple[np.ndarray]:
    return (np.linalg.solve(a, b),)


def _solved_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gB = A⁻ᵀ·g, gA = -gB·xᵀ."""
    right = solve_square(inputs[0].mT, grads[0], attrs["name"])
    return -(right @ outs[0].mT), right


def solve_square(a: Tensor, b: Tensor, name: str = "linalg.solve") -> Tensor:
    """Return A⁻¹·B for A `[..., n, n]` and B `[..., n, k]` of equal batches."""
    return on_host(_solved, _solved_gradient, a, b, name=name)[0]


def _inverted(a: np.ndarray, *, name: str) -> tuple[np.ndarray]:
    return (np.linalg.inv(a),)


def _inverted_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = -A⁻ᵀ·g·A⁻ᵀ."""
    transposed = outs[0].mT
    return (-(transposed @ grads[0] @ transposed),)


def inverse_of(a: Tensor, name: str = "linalg.inv") -> Tensor:
    """Return A⁻¹."""
    return on_host(_inverted, _inverted_gradient, a, name=name)[0]


# --- LU, determinants, Cholesky, QR -----------------------------------------------------------------------------------


def _lu(a: np.ndarray, *, pivot: bool, name: str = "") -> tuple[np.ndarray, ...]:
    """Return L and U in one matrix, the row that each step exchanged with (from 1), and the first zero pivot or 0."""
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    lu, k = np.array(a).reshape(math.prod(batch), m, n), min(m, n)
    rows, info = np.arange(len(lu)), np.zeros(len(lu), np.int32)
    pivots = np.zeros((len(lu), k), np.int32)
    for j in range(k):
        found = j + np.abs(lu[:, j:, j]).argmax(1) if pivot else np.full(len(lu), j)
        pivots[:, j] = found + 1
        lu[rows, j], lu[rows, found] = lu[rows, found], lu[rows, j]
        head = lu[:, j, j, None]
        info[(head[:, 0] == 0) & (info == 0)] = j + 1
        lu[:, j + 1 :, j] /= np.where(head == 0, 1, head) if pivot else head
        lu[:, j + 1 :, j + 1 :] -= lu[:, j + 1 :, j, None] * lu[:, j, None, j + 1 :]
    if name and info.any():
        raise np.linalg.LinAlgError(f"a matrix is singular: its pivot {info[info > 0][0]} is 0")
    return lu.reshape(a.shape), pivots.reshape(*batch, k), info.reshape(batch)


def _lu_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = P·L⁻ᵀ·(tril(Lᵀ·gL, -1) + triu(gU·Uᵀ))·U⁻ᵀ for square A; the rest of a wide or tall one is solved for."""
    lu, g, pivots = outs[0], grads[0], outs[1]
    m, n = lu.shape[-2:]
    k = min(m, n)
    square, g_square = lu[..., :k, :k], g[..., :k, :k]
    lower = square.tril(-1) + eye(k, dtype=lu.dtype, device=lu.device)
    upper = square.triu()
    low, up = lower.mT @ g_square.tril(-1), g_square.triu() @ upper.mT
    if n > k:
        low = low - g[..., :k, k:] @ lu[..., :k, k:].mT
    if m > k:
        up = up - lu[..., k:, :].mT @ g[..., k:, :]
    middle = low.tril(-1) + up.triu()
    found = substitute(upper, middle.mT, upper=True).mT
    if n > k:
        found = _cat([found, g[..., :k, k:]], -1)
    found = substitute(lower.mT, found, upper=True, unitriangular=True)
    if m > k:
        found = _cat([found, substitute(upper, g[..., k:, :].mT, upper=True).mT], -2)
    return (permutation(pivots, m, lu.dtype) @ found,)


def _cat(parts: Sequence[Any], dim: int) -> Any:
    from genesis.functions.shape import cat

    return cat(list(parts), dim)


def lu_packed(a: Tensor, pivot: bool, name: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Return L and U in one matrix, pivots and info (int32). With `name`, a zero pivot raises LinAlgError."""
    return on_host(_lu, _lu_gradient, a, pivot=pivot, name=name)  # type: ignore[no-any-return]


def permutation(pivots: Tensor, m: int, dtype: Any) -> Tensor:
    """Return the matrices P `[..., m, m]` of A = P·L·U for LAPACK's pivots."""
    exchanged = np.asarray(pivots.array.numpy())
    flat = exchanged.reshape(math.prod(exchanged.shape[:-1]), exchanged.shape[-1])
    orders = np.tile(np.arange(m), (len(flat), 1))
    for order, row in zip(orders, flat, strict=True):
        for i, j in enumerate(row):
            order[i], order[j - 1] = order[j - 1], order[i]
    matrices = np.swapaxes(np.eye(m, dtype=dtype.numpy)[orders], -1, -2).reshape(*exchanged.shape[:-1], m, m)
    return TensorBase.wrap(moved(from_numpy(np.ascontiguousarray(matrices)), pivots.device))


def _determinant(a: np.ndarray) -> tuple[np.ndarray]:
    return (np.asarray(np.linalg.det(a)),)


def _determinant_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = g·det(A)·A⁻ᵀ; of a singular matrix g·det(U·Vᵀ)·U·diag(Π of the other singular values)·Vᵀ."""
    (a,), (det,) = inputs, outs
    g = grads[0].unsqueeze(-1).unsqueeze(-1)
    if bool((det != 0).all()):
        return (g * (det.unsqueeze(-1).unsqueeze(-1) * inverse_of(a).mT),)
    u, s, vh = svd_of(a, False)
    n = s.shape[-1]
    others = s.unsqueeze(-2).expand(*s.shape[:-1], n, n)
    one = eye(n, dtype=s.dtype, device=s.device)
    sign = determinant(u @ vh).unsqueeze(-1).unsqueeze(-1)
    return (g * sign * (u * (others * (1 - one) + one).prod(-1).unsqueeze(-2)) @ vh,)


def determinant(a: Tensor) -> Tensor:
    """Return det(A)."""
    return on_host(_determinant, _determinant_gradient, a)[0]


def _log_determinant(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sign, log = np.linalg.slogdet(a)
    return np.asarray(sign), np.asarray(log)


def _log_determinant_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = g·A⁻ᵀ of the logarithm; the sign is constant."""
    return (grads[1].unsqueeze(-1).unsqueeze(-1) * inverse_of(inputs[0], "linalg.slogdet").mT,)


def sign_and_log(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign of det(A) and log |det(A)|."""
    return on_host(_log_determinant, _log_determinant_gradient, a)  # type: ignore[no-any-return]


def _minor(a: np.ndarray) -> int:
    """Return the order of the first leading minor that is not positive, by bisection."""
    low, high = 0, a.shape[-1]
    while high - low > 1:
        middle = (low + high) // 2
        try:
            np.linalg.cholesky(a[:middle, :middle])
            low = middle
        except np.linalg.LinAlgError:
            high = middle
    return int(high)


def _cholesky(a: np.ndarray, *, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        return np.linalg.cholesky(a), np.zeros(a.shape[:-2], np.int32)
    except np.linalg.LinAlgError:
        found, info = np.array(a).reshape(-1, *a.shape[-2:]), np.zeros(a.shape[:-2], np.int32)
        for i, matrix in enumerate(found):
            try:
                found[i] = np.linalg.cholesky(matrix)
            except np.linalg.LinAlgError:
                info.reshape(-1)[i] = order = _minor(matrix)
                if name:
                    what = f"matrix {i} is not positive-definite: its leading minor of order {order} is not positive"
                    raise np.linalg.LinAlgError(what) from None
        return np.tril(found.reshape(a.shape)), info


def _cholesky_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = sym(L⁻ᵀ·Φ(Lᵀ·gL)·L⁻¹), where Φ takes the lower triangle with half the diagonal (Murray, 2016)."""
    lower = outs[0]
    inner = _halved_lower(lower.mT @ grads[0].tril())
    half = substitute(lower.mT, inner, upper=True)
    full = substitute(lower.mT, half.mT, upper=True).mT
    return ((full + full.mT) * 0.5,)


def cholesky_of(a: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return L of A = L·Lᵀ, and info (int32). With `name`, a matrix that is not positive-definite raises."""
    return on_host(_cholesky, _cholesky_gradient, a, name=name)  # type: ignore[no-any-return]


def _qr(a: np.ndarray, *, mode: str) -> tuple[np.ndarray, np.ndarray]:
    q, r = np.linalg.qr(a, mode=mode)  # type: ignore[call-overload]
    return q, r


def _qr_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = (gQ + Q·(X + Xᵀ with half its diagonal))·R⁻ᵀ, X = triu(gR·Rᵀ - gQᵀ·Q); columns beyond m give Q·gR."""
    (q, r), (gq, gr), k = outs, grads, outs[1].shape[-2]
    if k > r.shape[-1]:
        raise GradientError("the complete QR of a tall matrix has no gradient", next="use mode='reduced'")
    rest = r[..., :, k:]
    if rest.shape[-1]:
        gq = gq + inputs[0][..., :, k:] @ gr[..., :, k:].mT
    square, gu = r[..., :, :k], gr[..., :, :k]
    inner = (gu @ square.mT - q.mT @ gq).triu()
    symmetric = inner + inner.mT - diag_embed(inner.diagonal(0, -2, -1))
    found = substitute(square, (gq + q @ symmetric).mT, upper=True).mT
    return (_cat([found, q @ gr[..., :, k:]], -1) if rest.shape[-1] else found,)


def qr_of(a: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Return Q and R, "reduced" or "complete"."""
    return on_host(_qr, _qr_gradient, a, mode=mode)  # type: ignore[no-any-return]


def _raw_qr(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    reflectors, tau = np.linalg.qr(a, mode="raw")
    return np.swapaxes(reflectors, -1, -2).astype(a.dtype), tau.astype(a.dtype)


def reflectors_of(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return LAPACK's form of Q and R: reflectors below R, and their factors."""
    return on_host(_raw_qr, None, a)  # type: ignore[no-any-return]


# --- Eigenvalues and singular values ----------------------------------------------------------------------------------


def _eigh(a: np.ndarray, *, UPLO: str) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(a, UPLO=UPLO)  # type: ignore[call-overload]
    return values, vectors


def _without_zeros(x: Tensor) -> Tensor:
    """Return x with inf for 0, so that a division by it gives 0."""
    return x.masked_fill(x == 0, float("inf"))


def _symmetric(x: Tensor) -> tuple[Tensor]:
    return ((x + x.mT) * 0.5,)


def _eigh_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = sym(V·(diag(gλ) + Vᵀ·gV / (λj - λi))·Vᵀ) (Giles, 2008)."""
    (values, vectors), (g_values, g_vectors) = outs, grads
    inner = diag_embed(g_values) + vectors.mT @ g_vectors / _without_zeros(values.unsqueeze(-2) - values.unsqueeze(-1))
    return _symmetric(vectors @ inner @ vectors.mT)


def eigh_of(a: Tensor, uplo: str) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order, and eigenvectors, of symmetric matrices given by one triangle."""
    return on_host(_eigh, _eigh_gradient, a, UPLO=uplo)  # type: ignore[no-any-return]


def _root(a: np.ndarray) -> tuple[np.ndarray, ...]:
    values, vectors = np.linalg.eigh(a)
    return ((vectors * np.sqrt(values)[..., None, :]) @ np.swapaxes(vectors, -1, -2),)


def _root_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = sym(V·(Vᵀ·g·V / (√λi + √λj))·Vᵀ), and 0 where both eigenvalues are 0."""
    roots, vectors = eigh_of(outs[0], "L")
    sums = _without_zeros(roots.unsqueeze(-1) + roots.unsqueeze(-2))
    return _symmetric(vectors @ (vectors.mT @ grads[0] @ vectors / sums) @ vectors.mT)


def root_of(a: Tensor) -> Tensor:
    """Return the symmetric square root of symmetric matrices."""
    return on_host(_root, _root_gradient, a)[0]


def _svd(a: np.ndarray, *, full_matrices: bool) -> tuple[np.ndarray, ...]:
    return tuple(np.linalg.svd(a, full_matrices=full_matrices))


def _svd_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """gA = U·(skew(Uᵀ·gU)/E·S + S·skew(Vᵀ·gV)/E + diag(gS))·Vᵀ and the parts outside of U and V, E = σj² - σi²."""
    k = outs[1].shape[-1]
    u, s, vh = outs[0][..., :, :k], outs[1], outs[2][..., :k, :]
    gu, gs, gvh = grads[0][..., :, :k], grads[1], grads[2][..., :k, :]
    row, column = s.unsqueeze(-2), s.unsqueeze(-1)
    squares = _without_zeros((row - column) * (row + column))
    left, right = u.mT @ gu, vh @ gvh.mT
    inner = diag_embed(gs) + (left - left.mT) / squares * row + column * ((right - right.mT) / squares)
    found = u @ inner @ vh
    if u.shape[-2] > k:
        found = found + (gu - u @ left) / row @ vh
    if vh.shape[-1] > k:
        found = found + u @ ((gvh - (vh @ gvh.mT).mT @ vh) / column)
    return (found,)


def svd_of(a: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, the singular values in descending order, and Vᵀ."""
    return on_host(_svd, _svd_gradient, a, full_matrices=full_matrices)  # type: ignore[no-any-return]


def _pinv(a: np.ndarray, tolerance: np.ndarray, *, hermitian: bool) -> tuple[np.ndarray]:
    if hermitian:
        values, vectors = np.linalg.eigh(a)
        kept = np.abs(values) > tolerance[..., None]
        return ((vectors * np.where(kept, 1 / values, 0)[..., None, :]) @ np.swapaxes(vectors, -1, -2),)
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    scaled = np.swapaxes(vh, -1, -2) * np.where(s > tolerance[..., None], 1 / s, 0)[..., None, :]
    return (scaled.astype(a.dtype) @ np.swapaxes(u, -1, -2),)


def _pinv_gradient(inputs: Any, outs: Any, grads: Any, attrs: Any) -> tuple[Any, ...]:
    """-Pᵀ·g·Pᵀ + (I - A·P)·gᵀ·P·Pᵀ + Pᵀ·P·gᵀ·(I - P·A), at constant rank (Golub & Pereyra, 1973)."""
    a, p, g = inputs[0], outs[0], grads[0]
    pt, gt = p.mT, g.mT
    outside = gt @ p @ pt
    inside = pt @ p @ gt
    return -(pt @ g @ pt) + outside - a @ (p @ outside) + inside - (inside @ p) @ a, None


def pseudo_inverse(a: Tensor, tolerance: Tensor, hermitian: bool) -> Tensor:
    """Return the pseudo-inverse, where singular values up to `tolerance` count as 0."""
    return on_host(_pinv, _pinv_gradient, a, tolerance, hermitian=hermitian)[0]

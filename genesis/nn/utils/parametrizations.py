"""Parametrizations of weights: weight norm, spectral norm and orthogonal matrices."""

from __future__ import annotations

from typing import Any

from genesis.autograd import no_grad
from genesis.dtypes import finfo
from genesis.errors import DimensionError, ShapeError, UsageError
from genesis.functions.matrices import geqrf, linalg
from genesis.functions.random import randn
from genesis.functions.shape import cat
from genesis.keywords import check_calls
from genesis.nn.functional import normalize
from genesis.nn.module import Module
from genesis.nn.utils.parametrize import register_parametrization
from genesis.tensor import Tensor

__all__ = ["orthogonal", "spectral_norm", "weight_norm"]


class _WeightNorm(Module):
    def __init__(self, dim: int | None = 0) -> None:
        super().__init__()
        self.dim = -1 if dim is None else dim

    def _norm(self, weight: Tensor) -> Tensor:
        """The norm over all dimensions but `dim`; over all of them for -1."""
        if self.dim == -1:
            return weight.norm()
        if not -weight.ndim <= self.dim < weight.ndim:
            raise DimensionError(f"weight_norm got dim {self.dim} for a weight of shape {weight.shape}")
        dims = [d for d in range(weight.ndim) if d != self.dim % weight.ndim]
        return linalg["vector_norm"](weight, 2, dims, keepdim=True) if dims else weight.abs()

    def forward(self, weight_g: Tensor, weight_v: Tensor) -> Tensor:
        return weight_v * (weight_g / self._norm(weight_v))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm(weight), weight


def weight_norm(module: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """Split a weight into its norms `original0` and its directions `original1` (Salimans & Kingma, 2016).

    There is a norm for each index of `dim`; one for all elements with None or -1. States of the older form, with
    `weight_g` and `weight_v`, load too.
    """
    register_parametrization(module, name, _WeightNorm(dim), unsafe=True)

    def rename(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for i, letter in enumerate("gv"):
            if f"{prefix}{name}_{letter}" in state:
                state[f"{prefix}parametrizations.{name}.original{i}"] = state.pop(f"{prefix}{name}_{letter}")

    module.register_load_state_dict_pre_hook(rename)
    return module


class _SpectralNorm(Module):
    _u: Tensor
    _v: Tensor

    def __init__(self, weight: Tensor, n_power_iterations: int = 1, dim: int = 0, eps: float = 1e-12) -> None:
        super().__init__()
        if not -weight.ndim <= dim < weight.ndim:
            raise DimensionError(f"spectral_norm got dim {dim} for a weight of shape {weight.shape}")
        if n_power_iterations <= 0:
            raise UsageError(f"n_power_iterations is {n_power_iterations}, and must be at least 1")
        self.dim, self.eps, self.n_power_iterations = dim % weight.ndim, eps, n_power_iterations
        if weight.ndim > 1:
            matrix = self._matrix(weight)
            for name, size in zip(("_u", "_v"), matrix.shape, strict=True):
                start = randn(size, dtype=weight.dtype, device=weight.device)
                self.register_buffer(name, normalize(start, dim=0, eps=eps))
            self._iterate(matrix, 15)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.dim, 0).flatten(1)

    @no_grad()
    def _iterate(self, matrix: Tensor, count: int) -> None:
        for _ in range(count):
            self._u.copy_(normalize(matrix @ self._v, dim=0, eps=self.eps))
            self._v.copy_(normalize(matrix.T @ self._u, dim=0, eps=self.eps))

    def forward(self, weight: Tensor) -> Tensor:
        if weight.ndim == 1:
            return normalize(weight, dim=0, eps=self.eps)
        matrix = self._matrix(weight)
        if self.training:
            self._iterate(matrix.detach(), self.n_power_iterations)
        u, v = self._u.clone(), self._v.clone()  # the next forward pass changes them
        return weight / (u @ (matrix @ v))

    def right_inverse(self, value: Tensor) -> Tensor:
        return value


def spectral_norm(
    module: Module, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> Module:
    """Divide a weight by its largest singular value (Miyato et al., 2018), which power iterations estimate.

    In training mode each use of the weight runs `n_power_iterations`. The rows of the matrix are the indices of `dim`:
    by default 0, or 1 for transposed convolutions.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise UsageError(f"{type(module).__name__} has no parameter or buffer {name!r}")
    if dim is None:
        dim = int(any(kind.__name__.startswith("ConvTranspose") for kind in type(module).__mro__))
    return register_parametrization(module, name, _SpectralNorm(weight.detach(), n_power_iterations, dim, eps))


class _Orthogonal(Module):
    def __init__(self, weight: Tensor, orthogonal_map: str, use_trivialization: bool) -> None:
        super().__init__()
        self.shape, self.orthogonal_map, self.use_trivialization = weight.shape, orthogonal_map, use_trivialization
        if use_trivialization:
            self.register_buffer("base", None)

    def forward(self, x: Tensor) -> Tensor:
        is_wide = x.shape[-2] < x.shape[-1]
        if is_wide:
            x = x.mT
        n, k = x.shape[-2:]
        if self.orthogonal_map == "householder":
            a = x.tril(-1)
            tau = 2 / (1 + (a * a).sum(-2))
            q = linalg["householder_product"](a, tau) * x.detach().diagonal(dim1=-2, dim2=-1).int().unsqueeze(-2)
        else:
            square = cat([x.tril(), x.new_zeros(*x.shape[:-1], n - k)], -1)
            a = square - square.mT
            if self.orthogonal_map == "cayley":
                half, one = a / 2, a.new_zeros(n).fill_(1).diag()
                q = linalg["solve"](one - half, one + half)
            else:
                q = a.matrix_exp()
            q = q[..., :k]
        if self.use_trivialization:
            q = self.base @ q
        return q.mT if is_wide else q  # type: ignore[no-any-return]

    @no_grad()
    def right_inverse(self, q: Tensor) -> Tensor:
        if q.shape != self.shape:
            raise ShapeError(f"the weight has shape {self.shape}, and its new value {q.shape}")
        first, is_wide = q, q.shape[-2] < q.shape[-1]
        if is_wide:
            q = q.mT
        n, k = q.shape[-2:]
        if not self.use_trivialization:
            if self.orthogonal_map != "householder":
                raise NotImplementedError(f"{self.orthogonal_map} without use_trivialization cannot be assigned")
            a, tau = geqrf(q)
            diagonal = a.diagonal(dim1=-2, dim2=-1)
            diagonal.copy_(diagonal.sign() * (tau != 0).mul(2).sub(1))
            return a.mT if is_wide else a  # type: ignore[no-any-return]
        if n != k:
            q = cat([q, randn(*q.shape[:-1], n - k, dtype=q.dtype, device=q.device)], -1)
        error = (q.mT @ q - q.new_zeros(n).fill_(1).diag()).abs().max()
        if n != k or error > 10 * n * finfo(q.dtype).eps:
            q, r = linalg["qr"](q)
            q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        self.base = q.clone()
        start = first.new_zeros(first.shape)
        start.diagonal(dim1=-2, dim2=-1).fill_(-1)  # householder reads signs from it; the other maps ignore it
        return start


def orthogonal(
    module: Module, name: str = "weight", orthogonal_map: str | None = None, *, use_trivialization: bool = True
) -> Module:
    """Keep a weight `[..., n, k]` orthogonal: its columns are orthonormal, or its rows if it is wide.

    Args:
        orthogonal_map: "matrix_exp", "cayley" or "householder"; by default the first if square, else the last.
        use_trivialization: start from the weight's own orthogonal matrix (Lezcano-Casado, 2019). Without it, only
            "householder" can be assigned.

    Raises:
        UsageError: for another map, or a weight with fewer than two dimensions.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        raise UsageError(f"{type(module).__name__} has no weight {name!r} of two or more dimensions")
    if orthogonal_map is None:
        orthogonal_map = "matrix_exp" if weight.shape[-2] == weight.shape[-1] else "householder"
    if orthogonal_map not in ("matrix_exp", "cayley", "householder"):
        raise UsageError(f"orthogonal_map is {orthogonal_map!r}", next="use matrix_exp, cayley or householder")
    made = _Orthogonal(weight, orthogonal_map, use_trivialization)
    return register_parametrization(module, name, made, unsafe=True)


check_calls(globals(), __all__)

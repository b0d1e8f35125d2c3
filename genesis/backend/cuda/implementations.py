"""The registry of CUDA implementations: for each op's name, the function that launches its kernels."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["cuda_impl", "cuda_impls"]

CudaImpl = Callable[..., None]
cuda_impls: dict[str, CudaImpl] = {}


def cuda_impl(*names: str) -> Callable[[CudaImpl], CudaImpl]:
    """Decorator: the function below runs the ops of these names on CUDA arrays.

    It has the reference's signature, `f(out, *inputs, **attrs)`, with arrays in the place of numpy arrays, and writes
    every element of `out` (a tuple where the op has several outputs).
    """

    def register(function: CudaImpl) -> CudaImpl:
        for name in names:
            assert name not in cuda_impls, f"op {name} has two CUDA implementations"
            cuda_impls[name] = function
        return function

    return register

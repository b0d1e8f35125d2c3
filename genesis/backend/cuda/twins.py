"""The registry of twins: for each op's name, the function that launches its kernels."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["twin", "twins"]

Twin = Callable[..., None]
twins: dict[str, Twin] = {}


def twin(*names: str) -> Callable[[Twin], Twin]:
    """Decorator: the function below runs the ops of these names on CUDA arrays.

    It has the reference's signature, `twin(out, *inputs, **attrs)`, with arrays in the place of numpy arrays, and
    writes every element of `out` (a tuple where the op has several outputs).
    """

    def register(function: Twin) -> Twin:
        for name in names:
            assert name not in twins, f"op {name} has two twins"
            twins[name] = function
        return function

    return register

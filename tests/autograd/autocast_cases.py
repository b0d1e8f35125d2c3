"""Calls whose results' types are compared with torch's under autocast, written against torch's interface.

`fixtures/autocast.json` holds torch's types for inputs of each of `TYPES`, made by `make_fixtures.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CASES", "FIXTURE", "TYPES", "Inputs", "type_of"]

FIXTURE = Path(__file__).parent / "fixtures" / "autocast.json"

# Types of the first and of the second input.
TYPES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float64", "float64"),
)


class Inputs:
    """Tensors of a call: x, m, b of the first type (1, 2, 3 dimensions of size 4), y, n, c of the second; `at` ids."""

    def __init__(self, lib: Any, first: str, second: str, device: str) -> None:
        self.lib, self.F = lib, lib.nn.functional
        self.x, self.m, self.b = (lib.full((4,) * k, 0.5, dtype=getattr(lib, first), device=device) for k in (1, 2, 3))
        self.y, self.n, self.c = (lib.full((4,) * k, 0.5, dtype=getattr(lib, second), device=device) for k in (1, 2, 3))
        self.at = lib.full((4,), 1, dtype=lib.int64, device=device)
        self.square = lib.full((4, 4), 1, dtype=lib.int64, device=device)


def _changed(i: Inputs) -> Any:
    """A change in place keeps its type."""
    return i.lib.zeros_like(i.m).add_(i.n)


CASES: dict[str, Callable[[Inputs], Any]] = {
    # products
    "matmul": lambda i: i.lib.matmul(i.m, i.n),
    "matmul of vectors": lambda i: i.lib.matmul(i.x, i.y),
    "operator @": lambda i: i.b @ i.n,
    "mm": lambda i: i.lib.mm(i.m, i.n),
    "mv": lambda i: i.lib.mv(i.m, i.y),
    "dot": lambda i: i.lib.dot(i.x, i.y),
    "bmm": lambda i: i.lib.bmm(i.b, i.c),
    "addmm": lambda i: i.lib.addmm(i.x, i.m, i.n),
    "addmv": lambda i: i.lib.addmv(i.x, i.m, i.y),
    "baddbmm": lambda i: i.lib.baddbmm(i.b, i.b, i.c),
    "einsum": lambda i: i.lib.einsum("ij,kj->ik", i.m, i.n),
    "einsum without a sum": lambda i: i.lib.einsum("i,j->ij", i.x, i.y),
    "linear": lambda i: i.F.linear(i.m, i.n),
    "linear with a bias": lambda i: i.F.linear(i.m, i.n, i.y),
    "attention": lambda i: i.F.scaled_dot_product_attention(i.b, i.c, i.c),
    "attention with a mask": lambda i: i.F.scaled_dot_product_attention(i.b, i.b, i.b, i.m > 0),
    # range and sums
    "exp": lambda i: i.lib.exp(i.x),
    "acos": lambda i: i.lib.acos(i.x),
    "asin": lambda i: i.lib.asin(i.x),
    "cosh": lambda i: i.lib.cosh(i.x),
    "sinh": lambda i: i.lib.sinh(i.x),
    "erfinv": lambda i: i.lib.erfinv(i.x),
    "expm1": lambda i: i.lib.expm1(i.x),
    "log": lambda i: i.x.log(),
    "log10": lambda i: i.lib.log10(i.x),
    "log1p": lambda i: i.lib.log1p(i.x),
    "log2": lambda i: i.lib.log2(i.x),
    "reciprocal": lambda i: i.lib.reciprocal(i.x),
    "rsqrt": lambda i: i.lib.rsqrt(i.x),
    "tan": lambda i: i.lib.tan(i.x),
    "pow with a number": lambda i: i.x**3,
    "pow of a number": lambda i: 3**i.x,
    "pow": lambda i: i.lib.pow(i.x, i.y),
    "softmax": lambda i: i.lib.softmax(i.m, -1),
    "log_softmax": lambda i: i.F.log_softmax(i.m, -1),
    "logsumexp": lambda i: i.lib.logsumexp(i.m, -1),
    "sum": lambda i: i.m.sum(),
    "sum along a dimension": lambda i: i.m.sum(0),
    "prod": lambda i: i.lib.prod(i.x),
    "cumsum": lambda i: i.lib.cumsum(i.m, 0),
    "norm": lambda i: i.lib.norm(i.x),
    "layer_norm": lambda i: i.F.layer_norm(i.m, (4,)),
    "layer_norm with a weight": lambda i: i.F.layer_norm(i.m, (4,), i.y, i.y),
    "rms_norm": lambda i: i.F.rms_norm(i.m, (4,), i.y),
    "cross_entropy": lambda i: i.F.cross_entropy(i.m, i.at),
    "mse_loss": lambda i: i.F.mse_loss(i.m, i.n),
    "binary_cross_entropy": lambda i: i.F.binary_cross_entropy(i.m, i.n),
    "binary_cross_entropy_with_logits": lambda i: i.F.binary_cross_entropy_with_logits(i.m, i.n),
    # a type asked for
    "sum in bfloat16": lambda i: i.m.sum(dtype=i.lib.bfloat16),
    "cumsum in bfloat16": lambda i: i.lib.cumsum(i.m, 0, dtype=i.lib.bfloat16),
    "softmax in bfloat16": lambda i: i.lib.softmax(i.m, -1, dtype=i.lib.bfloat16),
    "log_softmax in float64": lambda i: i.F.log_softmax(i.m, -1, dtype=i.lib.float64),
    "sum of a comparison": lambda i: (i.m > 0).sum(),
    # several inputs
    "cat": lambda i: i.lib.cat([i.m, i.n]),
    "stack": lambda i: i.lib.stack([i.m, i.n]),
    "add": lambda i: i.m + i.n,
    "mul": lambda i: i.m * i.n,
    "div": lambda i: i.m / i.n,
    "where": lambda i: i.lib.where(i.m > 0, i.m, i.n),
    "index_put": lambda i: i.lib.index_put(i.m, (i.at,), i.n),
    "scatter_add": lambda i: i.lib.scatter_add(i.m, 0, i.square, i.n),
    "index_copy": lambda i: i.lib.index_copy(i.m, 0, i.at, i.n),
    # all others
    "relu": lambda i: i.lib.relu(i.m),
    "gelu": lambda i: i.F.gelu(i.m),
    "silu": lambda i: i.F.silu(i.m),
    "sigmoid": lambda i: i.lib.sigmoid(i.m),
    "tanh": lambda i: i.lib.tanh(i.m),
    "sqrt": lambda i: i.lib.sqrt(i.m),
    "exp2": lambda i: i.lib.exp2(i.m),
    "square": lambda i: i.lib.square(i.m),
    "mean": lambda i: i.m.mean(),
    "var": lambda i: i.m.var(),
    "std": lambda i: i.m.std(),
    "amax": lambda i: i.m.amax(0),
    "embedding": lambda i: i.F.embedding(i.at, i.m),
    "dropout": lambda i: i.F.dropout(i.m, 0.5),
    "transpose": lambda i: i.m.transpose(0, 1),
    "sum after a product": lambda i: (i.m @ i.n).sum(),
    "change in place": _changed,
    "out": lambda i: i.lib.matmul(i.m, i.n, out=i.lib.zeros_like(i.m)),
}


def type_of(call: Callable[[Inputs], Any], inputs: Inputs, refusals: type[Exception]) -> str:
    """The name of the result's dtype, or "error"."""
    try:
        found = call(inputs)
    except refusals:
        return "error"
    return str(found.dtype).rpartition(".")[2]

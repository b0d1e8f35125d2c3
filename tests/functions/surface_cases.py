"""Lines as scripts have them, for torch and for Genesis: `lib` is the one or the other, the other names are inputs.

`make_fixtures.py` writes what torch answers to fixtures/torch_surface.json; test_surface.py compares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Bounds, weights and the like are leaves as well: their gradients are compared.
FLOATS = {
    "x": [[0.5, -1.25, 2.0], [3.5, -0.75, 0.25]],
    "row": [0.75, -1.0, 1.5],
    "column": [[0.6], [-0.4]],
    "one": 0.8,
    "low": [[-1.5, 0.1, 2.5], [0.3, -2.0, 1.0]],  # beside "high" some bounds are crossed
    "high": [[1.0, 0.2, 2.25], [0.4, -1.0, 0.5]],
}
OTHERS = {
    "half": ("float16", [1.5, -2.0]),
    "wide": ("float64", [1.25, -3.0]),
    "i": ("int64", [3, -1, 2]),
    "u": ("uint8", [200, 100, 3]),
    "b": ("bool", [True, False, True]),
    "n": ("int64", 1),
    "f": ("float32", 2.0),
    "steps": ("int64", [[2, 1, 3], [1, 2, 1]]),
    "empty": ("float32", [[], []]),
    "nans": ("float32", [1.0, float("nan"), 3.0]),
}

CASES: dict[str, tuple[str, ...]] = {
    "clamp": (
        "x.clamp(row)", "x.clamp(max=row)", "x.clamp(column, row)", "x.clamp(low, high)", "x.clamp(high, low)",
        "x.clamp(one)", "x.clamp(max=one)", "lib.clamp(x, max=high)",
        "i.clamp(row)", "i.clamp(1.5)", "i.clamp(max=n)", "half.clamp(wide)", "half.clamp(min=f)", "u.clamp(min=i)",
        "i.clamp(u, i)", "row.clamp(nans)", "row.clamp(max=nans)", "nans.clamp(0.0, 2.0)",
        "row.clamp(float('nan'))", "empty.clamp(column[:, 0, None])", "x.clip(row)", "x.clamp_min(row)",
        "x.clamp_max(0.5)", "x.clone().clamp_(row)", "i.clone().clamp_(1.5)", "i.clone().clamp_(row)",
        "row.clone().clamp_(x)", "x.clamp()", "x.clamp(np.float32(0.5))", "i.clamp(np.float64(0.5), np.int64(2))",
    ),
}  # fmt: skip


KINDS = (IndexError, TypeError, RuntimeError, ValueError)


def inputs_of(make: Any) -> dict[str, Any]:
    """All inputs, made by `make(values, dtype)`."""
    made = {name: make(np.array(values, np.float32), "float32") for name, values in FLOATS.items()}
    return made | {name: make(np.array(values, dtype), dtype) for name, (dtype, values) in OTHERS.items()}


def answer(lib: Any, line: str, make: Any, errors: tuple[type[Exception], ...]) -> dict[str, Any]:
    """What a line gives: its outputs and the gradients of the leaves that it reaches, or that it is refused."""
    names = inputs_of(make)
    for name in FLOATS:
        names[name].requires_grad_()
    try:
        result = eval(line, {"lib": lib, "np": np, **names})
    except errors as error:
        return {
            "errors": [k.__name__ for k in (IndexError, TypeError, RuntimeError, ValueError) if isinstance(error, k)]
        }
    tensor = type(names["x"])
    outs = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(v, tensor)]
    if not outs:
        return {"value": _plain(result)}
    if outs[0].requires_grad:
        count = outs[0].numel()
        outs[0].backward(make(np.arange(1, count + 1).reshape(outs[0].shape), str(outs[0].dtype).split(".")[1]))
    grads = {name: names[name].grad.tolist() for name in FLOATS if names[name].grad is not None}
    seen = [{"dtype": str(o.dtype).split(".")[1], "shape": list(o.shape), "values": o.tolist()} for o in outs]
    return {"outs": seen, **({"grads": grads} if grads else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

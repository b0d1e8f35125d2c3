"""Calls with torch's answers: values, dtypes, shapes, gradients and refusals, kept in `fixtures/torch_*.json`.

A row is one method call on a named input. The gradient was taken with 1, 2, 3 … as the gradient of the (first) result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import genesis
from genesis.dtypes import as_dtype
from genesis.errors import GenesisError
from tests.ops.comparing import compare

FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The inputs and the calls of a table."""
    table = json.loads((FIXTURES / f"torch_{name}.json").read_text(encoding="utf-8"))
    return table["inputs"], table["calls"]


def made(entry: dict[str, Any]) -> Any:
    """An input as a tensor."""
    dtype = as_dtype(entry["dtype"])
    values = np.array(entry["values"], np.float64 if dtype.is_floating_point else np.int64)
    return genesis.from_numpy(values.reshape(entry["shape"]).astype(dtype.numpy))


def _argument(value: Any, inputs: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return made(inputs[value["x"]])
    if isinstance(value, str) and value.startswith("torch."):
        return as_dtype(value)
    return tuple(value) if isinstance(value, list) else value


def difference(call: dict[str, Any], inputs: dict[str, Any]) -> str:
    """What differs from torch's answer, in a sentence; empty where nothing does."""
    x = made(inputs[call["x"]])
    if x.is_floating_point():
        x.requires_grad_()
    args = [_argument(v, inputs) for v in call["args"]]
    kwargs = {k: _argument(v, inputs) for k, v in call["kwargs"].items()}
    try:
        result = getattr(x, call["call"])(*args, **kwargs)
    except GenesisError as error:
        return "" if "error" in call else f"raised {type(error).__name__}: {error}"
    if "error" in call:
        return f"torch raises {call['error']}, this gave {result}"
    outs = result if isinstance(result, tuple) else (result,)
    if len(outs) != len(call["outs"]):
        return f"{len(outs)} results, torch has {len(call['outs'])}"
    for got, want in zip(outs, call["outs"], strict=True):
        if wrong := _unlike(got.array.view_np(), want["values"], want["dtype"], tuple(want["shape"]), x):
            return wrong
    return _wrong_gradient(call, x, outs[0]) if "grad" in call else ""


def _unlike(got: np.ndarray, values: Any, dtype: str, shape: tuple[int, ...], x: Any) -> str:
    want = np.array(values, np.float64 if as_dtype(dtype).is_floating_point else as_dtype(dtype).numpy).reshape(shape)
    if as_dtype(got.dtype).name != dtype:
        return f"dtype {got.dtype}, torch gives {dtype}"
    scale = float(np.max(np.abs(np.nan_to_num(x.array.view_np().astype(np.float64), posinf=0, neginf=0)), initial=1.0))
    return compare(got, want, terms=max(x.numel(), 2), scale=scale)


def _wrong_gradient(call: dict[str, Any], x: Any, out: Any) -> str:
    weights = (np.arange(out.numel(), dtype=np.float64) + 1).reshape(out.shape).astype(out.dtype.numpy)
    out.backward(genesis.from_numpy(weights))
    if wrong := _unlike(x.grad.array.view_np(), call["grad"], x.dtype.name, x.shape, out):
        return f"gradient: {wrong}"
    return ""


def differences(name: str) -> list[str]:
    """All calls of a table that differ."""
    inputs, calls = load(name)
    found = []
    for call in calls:
        if wrong := difference(call, inputs):
            found.append(f"{call['x']}.{call['call']}(*{call['args']}, **{call['kwargs']}): {wrong}")
    return found

"""Everyday lines: each gives torch's values, dtypes, shapes and gradients, or is refused where torch refuses it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.errors import GenesisError
from tests.functions.surface_cases import CASES, answer
from tests.functions.torch_tables import FIXTURES

TORCH: dict[str, dict[str, Any]] = dict(json.loads((FIXTURES / "torch_surface.json").read_text(encoding="utf-8")))
ROUNDING = {"float64": 1e-15, "float32": 4e-7, "float16": 1e-3, "bfloat16": 8e-3}  # a few units in the last place


def make(values: np.ndarray, dtype: str) -> Any:
    return genesis.tensor(values, dtype=dtype)


def differing(got: Any, want: Any, dtype: str) -> bool:
    a, b = np.array(got, np.float64), np.array(want, np.float64)
    return a.shape != b.shape or not np.allclose(a, b, rtol=ROUNDING.get(dtype, 0), atol=0, equal_nan=True)


def difference(line: str) -> str:
    """What differs from torch's answer; empty where nothing does."""
    got, want = answer(genesis, line, make, (GenesisError, TypeError)), TORCH[line]
    if "errors" in want and set(want["errors"]) & set(got.get("errors", ())):
        return ""
    if "outs" not in want or "outs" not in got:
        return "" if got == want else f"{line}: {got}, torch: {want}"
    for a, b in zip(got["outs"], want["outs"], strict=True):
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]) or differing(a["values"], b["values"], a["dtype"]):
            return f"{line}: {a}, torch: {b}"
    grads, wanted = got.get("grads", {}), want.get("grads", {})
    if set(grads) != set(wanted) or any(differing(grads[k], wanted[k], "float32") for k in grads):
        return f"{line}: gradients {grads}, torch: {wanted}"
    return ""


def test_every_line_has_torchs_answer() -> None:
    assert set(TORCH) == {line for lines in CASES.values() for line in lines}


@pytest.mark.parametrize("kind", CASES)
def test_lines_give_what_torch_gives(kind: str) -> None:
    assert [d for line in CASES[kind] if (d := difference(line))] == []


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "x.clamp(row)"
    assert difference(line) == ""
    for key, value in (("dtype", "float64"), ("shape", [6]), ("values", [[0.0] * 3] * 2)):
        spoiled = {**TORCH[line], "outs": [{**TORCH[line]["outs"][0], key: value}]}
        monkeypatch.setitem(TORCH, line, spoiled)
        assert "torch:" in difference(line)
        monkeypatch.undo()
    monkeypatch.setitem(TORCH, line, {**TORCH[line], "grads": {}})
    assert "gradients" in difference(line)


# --- Bounds that are tensors ------------------------------------------------------------------------------------------


def test_one_bound_may_be_a_tensor_and_the_other_a_number() -> None:
    x, low = (genesis.tensor(v, requires_grad=True) for v in ([0.5, -2.0, 3.0], [[1.0], [-1.0]]))
    found = x.clamp(low, 2.0)
    assert found.tolist() == [[1.0, 1.0, 2.0], [0.5, -1.0, 2.0]]
    found.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0] and low.grad.tolist() == [[2.0], [1.0]]
    assert x.clamp(-1, low).tolist() == [[0.5, -1.0, 1.0], [-1.0, -1.0, -1.0]]


@pytest.mark.parametrize("count", [1_000, 200_000])  # in one thread, and in several
def test_clamp_with_tensors_of_any_size(count: int) -> None:
    rng = np.random.default_rng(0)
    x, low, high = (rng.standard_normal(count).astype(np.float32) for _ in range(3))
    want = np.minimum(np.maximum(x, low), high)
    tensors = [genesis.from_numpy(v).requires_grad_() for v in (x, low, high)]
    found = tensors[0].clamp(*tensors[1:])
    np.testing.assert_array_equal(found.detach().numpy(), want)
    found.sum().backward()
    crossed = low > high
    dmax = (x > high) | crossed
    dmin = (x < low) & (low < high)
    dx = (x >= low) & (x <= high)
    for tensor, expected in zip(tensors, (dx, dmin, dmax), strict=True):
        np.testing.assert_array_equal(tensor.grad.numpy(), expected.astype(np.float32))

"""Writes fixtures/functional.npz: results and gradients of `cases.calls()` by torch in float64.

Run once, in an environment with torch 2.13: `python -m tests.nn.make_fixtures`. No test needs torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.nn.cases import FIXTURE, calls


def _tensor(value: Any, trained: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.tensor(value, requires_grad=trained and value.dtype == np.float64)


def main() -> None:
    """Write the fixture."""
    found: dict[str, np.ndarray] = {}
    for call in calls():
        args = [_tensor(a, True) for a in call.args]
        kwargs = {k: _tensor(v, False) for k, v in call.kwargs.items()}
        result = getattr(torch.nn.functional, call.function)(*args, **kwargs)
        found[f"{call.name}/result"] = result.detach().numpy()
        weights = np.cos(np.arange(result.numel())).reshape(result.shape)
        (result * torch.tensor(weights)).sum().backward()
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.grad is not None:
                found[f"{call.name}/grad{i}"] = value.grad.numpy()
    FIXTURE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FIXTURE, **found)
    print(f"{FIXTURE.name}: {len(found)} arrays, {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

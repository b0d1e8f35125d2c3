"""Writes fixtures/autocast.json: the types that results of `autocast_cases.CASES` have in torch under autocast.

Run once, in an environment with torch 2.13: `python -m tests.autograd.make_fixtures`. It needs no GPU: what happens on
one is asked of tensors that have only a shape, a type and a device. No test needs torch.
"""

from __future__ import annotations

import json
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.autograd.autocast_cases import CASES, FIXTURE, TYPES, Inputs, type_of


def types_on(device: str) -> dict[str, dict[str, str]]:
    """By case and inputs' types: the result's."""
    found: dict[str, dict[str, str]] = {}
    torch.set_autocast_dtype(device, torch.bfloat16)
    for name, call in CASES.items():
        found[name] = {}
        for first, second in TYPES:
            with nullcontext() if device == "cpu" else FakeTensorMode():
                inputs = Inputs(torch, first, second, device)
                torch.set_autocast_enabled(device, True)  # torch.autocast switches itself off without a GPU
                found[name][f"{first} {second}"] = type_of(call, inputs, RuntimeError)
                torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    return found


def main() -> None:
    """Write the fixture."""
    table = {device: types_on(device) for device in ("cpu", "cuda")}
    FIXTURE.write_text(json.dumps({"torch": torch.__version__, **table}, indent=1) + "\n", encoding="utf-8")
    print(f"{FIXTURE.name}: {len(CASES)} cases, {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

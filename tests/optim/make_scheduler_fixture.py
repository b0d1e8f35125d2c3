"""Writes fixtures/schedulers.npz: rates and momenta as torch's schedulers set them.

Run once, in an environment with torch 2.13: `python -W ignore -m tests.optim.make_scheduler_fixture`. No test needs it.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.optim.scheduler_cases import FIXTURE, RATES, followed, steps


def main() -> None:
    """Write the fixture."""
    found = {}
    for name, make in steps().items():
        for kind, momentum in (("SGD", {"momentum": 0.9}), ("AdamW", {})):
            groups = [{"params": [torch.ones(1, requires_grad=True)], "lr": lr} for lr in RATES]
            optimizer = getattr(torch.optim, kind)(groups, **momentum)
            found[f"{name}/{kind}"] = np.array(followed(torch.optim.lr_scheduler, optimizer, make))
    np.savez_compressed(FIXTURE, **found)
    print(f"{FIXTURE.name}: {len(found)} arrays, {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

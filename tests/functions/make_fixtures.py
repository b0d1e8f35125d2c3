"""Writes fixtures/torch_surface.json: torch's answers to the lines of surface_cases.py.

Run once, in an environment with torch 2.13: `python -m tests.functions.make_fixtures`. No test needs torch.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.functions.surface_cases import CASES, answer


def make(values: np.ndarray, dtype: str) -> Any:
    return torch.tensor(values).to(getattr(torch, dtype))


def main() -> None:
    warnings.simplefilter("ignore")
    refusals = (TypeError, RuntimeError, ValueError, IndexError)
    rows = [json.dumps([line, answer(torch, line, make, refusals)]) for lines in CASES.values() for line in lines]
    path = Path(__file__).parent / "fixtures" / "torch_surface.json"
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

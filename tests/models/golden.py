"""Tiny models and what transformers computes on them; fixtures/README.md says how they were made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genesis.files.safetensors import load_file

__all__ = ["ENGINES", "EXTRA", "FAMILIES", "FIXTURES", "NAMES", "QWEN", "Golden", "extra", "golden", "relative_error"]

FIXTURES = Path(__file__).parent / "fixtures"
QWEN = ("qwen2-tied", "qwen2-untied-sharded", "qwen3-tied")
FAMILIES = ("mistral", "smollm3", "olmo2", "phi3", "phi3-long", "granite", "gemma3")
NAMES = (*QWEN, *FAMILIES)
# Of the models above and below those with features that an engine must know.
ENGINES = ("qwen2-tied", "gemma3", "phi3-long", "qwen2-window")
EXTRA = ("llama3", "phi3-beyond", "llama-head-dim", "qwen2-window", "qwen3-yarn-bias")


@dataclass(frozen=True)
class Golden:
    """A model folder, the arrays of its reference run, and the hyper-parameters of that run."""

    folder: Path
    arrays: dict[str, np.ndarray]
    trainer: dict[str, Any]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays named `prefix.<parameter>`, by parameter."""
        return {n.removeprefix(prefix + "."): a for n, a in self.arrays.items() if n.startswith(prefix + ".")}


def golden(name: str) -> Golden:
    folder = FIXTURES / name
    return Golden(
        folder, load_file(folder / "reference.safetensors"), json.loads((folder / "trainer.json").read_text())
    )


def extra(name: str) -> Golden:
    """A model with features that the golden ones lack; no training run."""
    folder = FIXTURES / "extra" / name
    return Golden(folder, load_file(folder / "reference.safetensors"), {})


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """‖found - expected‖ / ‖expected‖, in float64; NaN counts as infinite."""
    difference = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    error = difference / max(float(np.linalg.norm(expected.astype(np.float64))), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")

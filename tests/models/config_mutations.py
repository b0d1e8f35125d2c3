"""Every key of the families' configs given every kind of bad value, loaded and built under a memory limit.

`python -m tests.models.config_mutations` runs all of them in children of 256 MiB each and prints what was no refusal;
the suite runs a sample.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genesis.errors import GenesisError, ModelError, OutOfMemoryError
from genesis_models.blocks import tables
from genesis_models.config import ModelConfig
from genesis_models.folder import load
from tests.models.golden import FAMILIES, FIXTURES

__all__ = ["BAD", "MEMORY", "bases", "limited", "mutations", "outcome", "refusal"]

MEMORY = 256 * 2**20
BAD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 5_000_000, 2**31, 10**400, 0.5, 1e300, -1e-300),
    *("", "abc", "1", "x" * 10_000, [], [1], ["full_attention"], [None] * 1000, {}, {"a": 1}, {"rope_type": "yarn"}),
)
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {
    "attention_factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: Mapping[str, dict[str, Any]] = {
    "qwen2": YARN,
    "llama": LLAMA3 | {"original_max_position_embeddings": 32},
    "qwen3": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
}


def bases() -> dict[str, dict[str, Any]]:
    """For each family the config of a tiny model with every key that Genesis reads."""
    found = {}
    for kind, rope in ROPES.items():
        raw = json.loads((FIXTURES / "qwen3-tied" / "config.json").read_text())
        raw |= {"model_type": kind, "rope_parameters": dict(rope), "rope_theta": 1e6, "rope_scaling": None}
        raw |= {"hidden_dropout": 0.0, "partial_rotary_factor": 1.0, "torch_dtype": "float32", "mlp_bias": False}
        raw |= {"quantization_config": None, "max_window_layers": 1, "sliding_window": 16, "use_sliding_window": False}
        found[kind] = raw
    return found | {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in FAMILIES}


def mutations() -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Family, key, value, and the config with that value; keys of the rotary embedding have its name before them."""
    for kind, raw in bases().items():
        for key in (*raw, "layer_types"):
            for value in BAD:
                yield kind, key, value, {**raw, key: value}
        for key in raw["rope_parameters"]:
            for value in BAD:
                yield kind, key, value, {**raw, "rope_parameters": {**raw["rope_parameters"], key: value}}


def refusal(raw: Mapping[str, Any]) -> str | None:
    """How the config is refused, or None where it describes a model, of which the rotary tables are made."""
    try:
        config = ModelConfig.from_dict(raw)
    except ModelError as error:
        return error.what if error.where and error.next else f"CRASH nothing but {error.what}"
    for length in {1, 64, min(config.packed_length, 300)}:
        for table in tables(config, length):
            assert table.shape == (length, config.head_dim // 2)
    return None


def outcome(folder: Path, raw: Mapping[str, Any]) -> str:
    """What loading the weights of `folder` with another config comes to: "loaded" or "refused", or a crash."""
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        load(folder)
    except (ModelError, OutOfMemoryError) as error:
        return f"refused: {error.what}"
    except GenesisError as error:
        return f"CRASH {type(error).__name__}: {error}"
    except Exception as error:
        return f"CRASH {type(error).__name__}: {error}"
    return "loaded"


def limited(folder: Path, cases: list[dict[str, Any]]) -> list[str]:
    """The outcomes of `cases` in a child that may take `MEMORY` more than this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
            with os.fdopen(write, "w") as out:
                for raw in cases:
                    out.write(json.dumps(outcome(folder, raw)[:300]) + "\n")
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as lines:
        found = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    return found + [f"CRASH the child ended with {status}"] * (len(cases) - len(found))


def main() -> int:
    cases, bad = list(mutations()), 0
    with tempfile.TemporaryDirectory() as name:
        shutil.copyfile(FIXTURES / "qwen3-tied" / "model.safetensors", Path(name) / "model.safetensors")
        for (kind, key, value, _), found in zip(cases, limited(Path(name), [c[-1] for c in cases]), strict=True):
            if found.startswith("CRASH"):
                bad += 1
                print(kind, key, repr(value)[:60], found)
    print(f"{len(cases)} configs, {bad} neither loaded nor refused")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

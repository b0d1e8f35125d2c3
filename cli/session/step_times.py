"""How long a step of a run took where that was measured before: by the run itself, or by a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from genesis.errors import GenesisError, escape
from genesis.files.hf import read_json
from genesis.files.paths import list_folder
from genesis.files.strict_json import parse_object, read_limited
from genesis.files.trust import run_file
from genesis.report.files import default_folder
from genesis.train.config import Config
from genesis.train.config_file import RESOLVED, load_config
from genesis.train.metrics import FILE_NAME
from genesis_models.config import ModelConfig
from genesis_models.presets import PRESETS, preset

MAX_BYTES = 64 << 20
# What decides how long a step takes, beside the model.
DECIDES = {
    "data": ("seq_len",),
    "train": ("batch_size", "accumulation_steps", "activation_checkpointing", "precision", "tf32"),
    "optim": ("name", "low_precision", "grad_dtype", "state_dtype"),
}


class StepTime(BaseModel):
    """A measured time.

    Attributes:
        source: what was measured, on which GPU, and the file that says so.
    """

    milliseconds: float
    source: str


def measured_step(config: Config, shape: ModelConfig) -> StepTime | None:
    """The time of a step of `config`, from an earlier run of it or from the reports of benchmarks; None without one."""
    try:
        found = _of_run(config)
    except (GenesisError, OSError, ValueError):  # what lies there is no run of ours
        found = None
    return found or next(_of_reports(config, shape), None)


def _of_run(config: Config) -> StepTime | None:
    """The median over the rows of the run in `train.output_dir`, if it has the same model and settings."""
    folder = Path(config.train.output_dir)
    record, metrics = run_file(folder, RESOLVED), run_file(folder, FILE_NAME)
    if record is None or metrics is None:
        return None
    other = load_config(record)
    if other.lora != config.lora or _model(other) != _model(config) or _settings(other) != _settings(config):
        return None
    lines = read_limited(metrics, MAX_BYTES).splitlines()
    times = [parse_object(line, where=FILE_NAME).get("perf/step_ms") for line in lines]
    known = [float(each) for each in times if isinstance(each, int | float)]
    if not known:
        return None
    source = f"median of {len(known):,} rows of the run in {escape(folder)}"
    return StepTime(milliseconds=statistics.median(known), source=source)


def _model(config: Config) -> tuple[Any, ...]:
    return config.model.path, config.model.preset, config.model.config


def _settings(config: Config) -> list[Any]:
    return [getattr(getattr(config, section), key) for section, keys in DECIDES.items() for key in keys]


def _of_reports(config: Config, shape: ModelConfig) -> Iterator[StepTime]:
    """Times in the reports of `genesis bench-model` and of benchmarks/gpu, the newest first."""
    if config.train.accumulation_steps > 1 or config.train.precision is not None or config.optim.name != "adamw":
        return
    folder = default_folder()
    for name in sorted((each for each in _names(folder) if each.endswith(".json")), reverse=True):
        try:
            report = read_json(folder / name, MAX_BYTES)
            for found in _rows(report, shape):
                if _is_step(found, config):
                    gpu = escape(found["gpu"])
                    yield StepTime(
                        milliseconds=float(found["ms"]), source=f"measured on an {gpu}: {escape(folder / name)}"
                    )
        except (GenesisError, KeyError, TypeError, ValueError, AttributeError):  # a report of something else
            continue


def _names(folder: Path) -> list[str]:
    try:
        return list_folder(folder)
    except OSError:
        return []


def _rows(report: dict[str, Any], shape: ModelConfig) -> Iterator[dict[str, Any]]:
    """The measured steps of the model with this shape, in the words of benchmarks/gpu."""
    if "model" in report and "formula" in report:  # of genesis bench-model
        if _same_shape(report["model"]["config"], shape):
            for row in report["rows"]:
                yield {
                    "ms": 1e3 * row["step"]["seconds"],
                    "shape": f"{row['batch']}x{row['length']}",
                    "checkpointing": report["settings"]["checkpointing"],
                    "gpu": report["device_name"],
                    "kind": None,
                }
        return
    runs = report.get("runs", [report])
    for row in (row for run in runs for row in run["rows"]):
        if row.get("side") == "genesis" and row["size"] in PRESETS and _same_shape(preset(row["size"]), shape):
            yield {"kind": None, **row}


def _same_shape(raw: dict[str, Any], shape: ModelConfig) -> bool:
    """Whether a config describes the layers of `shape`; a larger vocabulary or more positions is another model."""
    found = ModelConfig.from_dict(raw)
    keys = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    return all(getattr(found, key) == getattr(shape, key) for key in keys)


def _is_step(row: dict[str, Any], config: Config) -> bool:
    """Whether a measured step is that of `config`."""
    lora, shape = config.lora, f"{config.train.batch_size}x{config.data.seq_len}"
    if (row["shape"], row["checkpointing"]) != (shape, config.train.activation_checkpointing):
        return False
    if lora is None:
        return row["kind"] in (None, "full")
    kind = "dora" if lora.use_dora else "lora"
    return row["kind"] == kind and row.get("r") == lora.r and lora.target_modules in (None, "all-linear")

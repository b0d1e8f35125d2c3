"""`genesis estimate`: the memory and time of a run before it starts, on this machine or on a GPU that it does not have.

The time of a step comes from an earlier measurement, by the run itself or by a benchmark.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.backend.cuda.simulated import ARCHITECTURES, counting_device
from genesis.backend.host import host_memory
from genesis.dtypes import DType, as_dtype
from genesis.errors import GenesisError, UsageError, escape
from genesis.files.hf import read_json
from genesis.files.paths import list_folder
from genesis.files.strict_json import parse_object, read_limited
from genesis.files.trust import run_file
from genesis.measure.record import Cell, Column, Table, Unit, aligned, format_bytes
from genesis.measure.suite import default_folder
from genesis.train.config import Config
from genesis.train.config_file import RESOLVED, load_config
from genesis.train.metrics import FILE_NAME
from genesis_cli.session.dry_run import ONE_RANK, MemoryPlan, PlannedRanks, advice, run_plan, with_batch
from genesis_cli.session.host_plan import HostPlan, host_plan
from genesis_cli.session.model import check_trained, model_config
from genesis_cli.session.preparation import describe_gpu, resolve_device
from genesis_cli.session.settings import settled
from genesis_cli.session.training import arithmetic
from genesis_models.config import ModelConfig
from genesis_models.engine.device_rows import rounded_capacity, width
from genesis_models.generate import GPU_ROWS
from genesis_models.registry import PRESETS, parameter_count, preset

MAX_BYTES = 64 << 20
# The settings that determine the time of a step, in addition to adapters.
DECIDES = {
    "model": ("path", "preset", "config"),
    "data": ("seq_len",),
    "train": ("batch_size", "accumulation_steps", "activation_checkpointing", "precision", "tf32", "exact"),
    "optim": ("name", "low_precision", "grad_dtype", "state_dtype"),
    "objective": ("name", "teacher"),
}


class StepTime(BaseModel):
    """A measured time; the source names what was measured, the GPU and the file."""

    milliseconds: float
    source: str


def measured_step(config: Config, shape: ModelConfig) -> StepTime | None:
    """Return the time of a step of `config` from an earlier run or from benchmark reports; None without one."""
    try:
        found = _of_run(config)
    except (GenesisError, OSError, ValueError):  # the folder does not hold a Genesis run
        found = None
    return found or next(_of_reports(config, shape), None)


def _of_run(config: Config) -> StepTime | None:
    """Return the median over the rows of the run in `train.output_dir`, if it has the same model and settings."""
    folder = Path(config.train.output_dir)
    record, metrics = run_file(folder, RESOLVED), run_file(folder, FILE_NAME)
    if record is None or metrics is None:
        return None
    other = load_config(record)
    if _deciding(other) != _deciding(config):
        return None
    lines = read_limited(metrics, MAX_BYTES).splitlines()
    times = [parse_object(line, where=FILE_NAME).get("perf/step_ms") for line in lines]
    known = [float(each) for each in times if isinstance(each, int | float)]
    if not known:
        return None
    source = f"median of {len(known):,} rows of the run in {escape(folder)}"
    return StepTime(milliseconds=statistics.median(known), source=source)


def _deciding(config: Config) -> list[Any]:
    settings = [getattr(getattr(config, section), key) for section, keys in DECIDES.items() for key in keys]
    return [config.lora, *settings]


def _of_reports(config: Config, shape: ModelConfig) -> Iterator[StepTime]:
    """Yield times from the reports of `genesis bench-model` and of benchmarks, the newest first."""
    if config.train.accumulation_steps > 1 or config.train.precision is not None or config.optim.name != "adamw":
        return
    if config.objective.name != "next_tokens":
        return
    folder = default_folder()
    names = list[str]()
    with suppress(OSError):
        names = list_folder(folder)
    for name in sorted((each for each in names if each.endswith(".json")), reverse=True):
        try:
            report = read_json(folder / name, MAX_BYTES)
            for found in _rows(report, shape):
                if _is_step(found, config):
                    source = f"measured on an {escape(found['gpu'])}: {escape(folder / name)}"
                    yield StepTime(milliseconds=float(found["ms"]), source=source)
        except (GenesisError, KeyError, TypeError, ValueError, AttributeError):  # another kind of report
            continue


def _rows(report: dict[str, Any], shape: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield the measured steps of the model with this shape, in milliseconds."""
    settings = report["settings"]
    for row in (row for table in report["tables"] if table["name"] == "steps" for row in table["rows"]):
        size = row.get("size", settings.get("model"))
        if row.get("side", "genesis") == "genesis" and size in PRESETS and _same_shape(preset(size), shape):
            yield {
                "ms": 1e3 * row["step"],
                "shape": row.get("case") or row["shape"].replace(" ", ""),
                "checkpointing": row.get("checkpointing") or settings.get("checkpointing", "none"),
                "gpu": report["device_name"],
                "kind": row.get("kind"),
                "r": row.get("r"),
            }


def _same_shape(raw: dict[str, Any], shape: ModelConfig) -> bool:
    """Whether a config describes the layers of `shape`, with the same vocabulary and positions."""
    found = ModelConfig.from_dict(raw)
    keys = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    return all(getattr(found, key) == getattr(shape, key) for key in keys)


def _is_step(row: dict[str, Any], config: Config) -> bool:
    lora, shape = config.lora, f"{config.train.batch_size}x{config.data.seq_len}"
    if (row["shape"], row["checkpointing"]) != (shape, config.train.activation_checkpointing):
        return False
    if lora is None:
        return row["kind"] in (None, "full")
    kind = "dora" if lora.use_dora else "lora"
    return row["kind"] == kind and row.get("r") == lora.r and lora.target_modules in (None, "all-linear")


DRIVER = 640 << 20  # bytes of GPU memory for the driver's context and Genesis's kernels
ASSUMED = 90  # architecture of an H100 or H200, assumed for a GPU that is not in this machine
MOST = 1 << 16  # the most rows of a batch
WHAT = {
    "weights": "of all parameters",
    "gradients": "of the trained parameters",
    "optimizer": "running averages, and float32 masters of 2-byte weights",
    "staging": "buffers for data from other ranks",
    "frozen": "weights of the objective, such as a teacher's",
    "batch": "tokens, labels, positions, rotary tables",
    "activations": "kept by the forward pass for backward; on the CPU including temporaries of ops",
    "workspace": "the most that the loss, backward and the update take in addition",
    "peak": "of tensors",
    "reserved": "taken by the allocator for them",
}


@dataclass(frozen=True)
class Place:
    """The device of a planned run.

    Attributes:
        device: the device whose kernels and sizes count; simulated if it is not in this machine.
        name: name of the device for the user.
        total: bytes of its memory; None if unknown.
        room: bytes that a run may take; None if unknown.
        is_here: whether it is in this machine.
    """

    device: Device
    name: str
    total: int | None
    room: int | None
    is_here: bool


class Estimate(BaseModel):
    """What a run takes; sizes are in bytes.

    Attributes:
        nproc: number of ranks; memory and room are for one of them.
        memory: bytes at the peak by purpose.
        peak: bytes of tensors at the peak.
        reserved: bytes that the allocator takes for them.
        room: bytes of the device that a run may take; None if unknown.
        fits: whether `reserved` is within `room`.
        largest_batch: the largest train.batch_size that fits.
        generation: sequences of `seq_len` tokens that generation runs at once if only the weights are in memory; None
            without `room`.
        snapshot: host memory of a save in the background.
        step: measured time of a step, or None.
    """

    schema_version: int = 1
    config: str
    device: str
    is_here: bool
    total: int | None
    room: int | None
    model_type: str
    parameters: int
    dtype: str
    batch_size: int
    seq_len: int
    accumulation_steps: int
    activation_checkpointing: str
    nproc: int = 1
    memory: dict[str, int]
    peak: int
    reserved: int
    fits: bool | None
    largest_batch: int | None
    generation: int | None = None
    advice: str | None
    snapshot: int
    step: StepTime | None

    def to_json(self) -> bytes:
        """Return the estimate as JSON."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def place_of(name: str, gpu_memory: float | None) -> Place:
    """Return the place that `train.device` means; `gpu_memory` is the GiB of a GPU, which need not be in this machine.

    Raises:
        DeviceError: the named GPU is not in this machine, and `gpu_memory` is None.
    """
    is_here = name != "cpu" and describe_gpu()[0]
    if gpu_memory is not None:
        total = int(gpu_memory * 2**30)
        found = cuda.get_device_properties() if is_here else ARCHITECTURES[ASSUMED]
        device = resolve_device("cuda") if is_here else counting_device(found)
        kind = f"{found.name}'s kernels" if is_here else "an H100's or H200's kernels"
        return Place(device, f"a GPU of {gpu_memory:g} GiB with {kind}", total, max(0, total - DRIVER), False)
    device = resolve_device(name)
    if device == CPU:
        return Place(CPU, f"the CPU, {threads()} threads", host_memory(), None, True)
    free, total = cuda.mem_get_info(device)
    room = free + cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return Place(device, cuda.get_device_name(device), total, room, True)


def estimate(config: Config, name: str, place: Place, nproc: int = 1) -> Estimate:
    """Estimate a run of `config`, called `name`, at a place.

    Args:
        nproc: number of ranks, each with such a GPU; the estimate is for one of them.

    Raises:
        UsageError: several ranks on the CPU.
        GenesisError: as in `genesis validate`, for a wrong model or setting; the data are not read.
    """
    config, dtype = settled(config, place.device)
    # Plan a step on the simulated device.
    shape = model_config(config)
    check_trained(config, shape)
    plan: MemoryPlan | HostPlan
    fits, most, to_fit, ranks = None, None, None, PlannedRanks(nproc, config.train.zero)
    if place.device == CPU:
        if nproc > 1:
            raise UsageError("estimates of several ranks need GPUs", next="add --gpu-memory, or remove --nproc")
        with arithmetic(config):
            plan = host_plan(config, shape)
    else:
        plan = run_plan(config, shape, place.device, ranks=ranks)
    # Compare the plan with the device's memory.
    if place.room is not None and isinstance(plan, MemoryPlan):
        fits, most = plan.reserved <= place.room, largest_batch(config, shape, place, plan, ranks)
        to_fit = None if fits else advice(config, shape, place.device, plan, place.room, ranks)
    return Estimate(
        config=name,
        device=place.name,
        **{key: getattr(place, key) for key in ("is_here", "total", "room")},
        model_type=shape.model_type,
        parameters=parameter_count(shape),
        dtype=dtype.name,
        seq_len=config.data.seq_len,
        **{key: getattr(config.train, key) for key in ("batch_size", "accumulation_steps", "activation_checkpointing")},
        nproc=nproc,
        memory=dict(plan.parts),
        peak=plan.total,
        reserved=plan.reserved,
        fits=fits,
        largest_batch=most,
        generation=generation_width(config, shape, as_dtype(dtype.name), place),
        advice=to_fit,
        snapshot=plan.saved,
        step=measured_step(config, shape),
    )


def generation_width(config: Config, shape: ModelConfig, dtype: DType, place: Place) -> int | None:
    """Return how many sequences generation runs at once if only the weights are in memory; None on the CPU."""
    if place.room is None or place.device == CPU:
        return None
    free = place.room - parameter_count(shape) * dtype.itemsize
    return width(shape, GPU_ROWS, rounded_capacity(config.data.seq_len), dtype, free)


def largest_batch(
    config: Config, shape: ModelConfig, place: Place, plan: MemoryPlan | None = None, ranks: PlannedRanks = ONE_RANK
) -> int:
    """Return the largest train.batch_size that fits; 0 if none does. `plan` is the plan of `config`, if known."""
    assert place.room is not None

    def needed(rows: int) -> int:
        if rows == config.train.batch_size and plan is not None:
            return plan.reserved
        return run_plan(with_batch(config, rows), shape, place.device, ranks=ranks).reserved

    return _largest(needed, place.room, config.train.batch_size)


def _largest(needed: Callable[[int], int], room: int, start: int) -> int:
    """Return the largest number of rows whose need, a nearly linear function, is within `room`."""
    low, high, rows = 0, MOST + 1, start
    known: dict[int, int] = {}
    while high - low > 1:
        known[rows] = needed(rows)
        if known[rows] <= room:
            low = rows
        else:
            high = rows
        rows = min(max(_guess(known, room, rows, low, high), low + 1), high - 1)
    return low


def _guess(known: Mapping[int, int], room: int, rows: int, low: int, high: int) -> int:
    """Return where a line reaches `room`: through the ends of the bracket if known, else the two nearest needs."""
    if len(known) == 1:
        return 2 * rows if low else rows // 2
    if len(known) % 3 == 0:  # bisect: if the function is curved, all lines can miss on one side
        return (low + min(high, 2 * low + 1)) // 2
    ends = (low, high) if low in known and high in known else sorted(known, key=lambda n: abs(known[n] - room))[:2]
    one, other = ends
    rise = (known[one] - known[other]) / (one - other)
    return one + math.floor((room - known[one]) / rise) if rise > 0 else (low + high) // 2


def estimate_lines(found: Estimate) -> Iterator[str]:
    """Yield the estimate as lines of text."""
    yield f"model: {found.model_type}, {found.parameters:,} parameters, {found.dtype}"
    batch = f"{found.batch_size} x {found.seq_len}"
    micro = f", {found.accumulation_steps} micro-steps" if found.accumulation_steps > 1 else ""
    yield f"step: {batch} tokens{micro}, activation checkpointing {found.activation_checkpointing}"
    if found.nproc > 1:
        yield f"ranks: {found.nproc}; the figures below are for one rank and its GPU"
    yield f"device: {found.device}"
    sizes = {**found.memory, "peak": found.peak}
    sizes |= {"reserved": found.reserved} if found.reserved > found.peak else {}
    units: tuple[tuple[str, Unit], ...] = (("memory", "text"), ("size", "bytes"), ("of", "text"))
    rows: list[dict[str, Cell]] = [
        {"memory": name, "size": size, "of": WHAT.get(name, "")} for name, size in sizes.items()
    ]
    yield from aligned(Table("memory", "", [Column(name, name, unit, name) for name, unit in units], rows))
    yield f"host: a save in the background takes {format_bytes(found.snapshot)} of its memory"
    if found.room is not None:
        answer = "fits" if found.fits else "does not fit"
        yield f"fit: {answer} into the {format_bytes(found.room)} that a run may take"
        most = found.largest_batch
        yield f"largest train.batch_size: {most or 'none, even one row does not fit'}"
    if found.generation is not None:
        texts = (
            f"{found.generation} sequences of {found.seq_len} tokens at once" if found.generation else "does not fit"
        )
        yield f"generation: {texts}, if only the weights are in memory"
    if found.advice is not None:
        yield f"to make it fit: {found.advice}"
    if found.step is None:
        yield "time: no such step was measured; run genesis bench-model, or the first steps of the run"
    else:
        yield f"time: {found.step.milliseconds:.1f} ms a step; {found.step.source}"

"""The kernels of a call: the resources each takes of a GPU, the stages of dispatch on the host, and the kernels' code.

The code, from Triton's IR to machine code, can be had for any architecture and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.autograd.record import TensorBase
from genesis.backend import CPU, Device
from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError
from genesis.files.paths import quote
from genesis.measure.cases import Axes, Case, choices, make_case, op_named, passes_of
from genesis.measure.limits import cuda_backend, has_gpu_time, wait_for
from genesis.measure.record import Column
from genesis.measure.timing import Plan, measure, of_wall
from genesis.op import execute
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda.compile import Signature
    from genesis.backend.cuda.driver import Driver, Properties
    from genesis.backend.cuda.launch import KernelLaunch
    from genesis.backend.cuda.simulated import Launched

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
USUAL = 90  # the architecture when none is given and there is no GPU
QUEUE = 100  # calls that may wait for the GPU: the host would wait for a full queue


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel. A program is a CUDA block."""

    threads: int  # of a program
    registers: int  # of a thread
    shared: int  # bytes of shared memory of a program
    local: int  # bytes of local memory of a thread: spilled registers, and arrays indexed at run time
    resident: int  # programs that an SM holds at once
    occupancy: float  # their threads, as a share of those that an SM can hold
    sm_count: int  # of the GPU
    waves: float  # the grid over the programs that all SMs hold at once; at most 1 for a persistent kernel
    idle: float  # share of slots, over all waves, that the last wave leaves empty


class Launch(NamedTuple):
    """A kernel, or memory that is set ("fill")."""

    kernel: str
    grid: tuple[int, ...]  # programs in three dimensions; empty for a fill
    resources: Resources | None = None  # None for a fill, and in Triton's interpreter

    @property
    def programs(self) -> int:
        """Programs of the whole grid."""
        return math.prod(self.grid)


TAKEN = "2.resources"
COLUMNS = (  # of a case, the pass ("forward" or "backward") and a launch
    Column("case", "case", "text", "Op and shape.", "0"),
    Column("pass", "pass", "text", "forward or backward.", "1"),
    Column("kernel", "kernel", "text", "Name of the kernel; fill where memory is set.", "2.kernel"),
    Column("grid", "grid", "text", "Programs in each dimension.", lambda row: "x".join(map(str, row[2].grid))),
    Column("threads", "threads", "count", "Threads of a program.", f"{TAKEN}.threads"),
    Column("registers", "registers", "count", "Registers of a thread.", f"{TAKEN}.registers"),
    Column("shared", "shared", "bytes", "Shared memory of a program.", f"{TAKEN}.shared"),
    Column("local", "local", "bytes", "Local memory of a thread: spilled registers.", f"{TAKEN}.local"),
    Column("resident", "per SM", "count", "Programs that an SM holds at once.", f"{TAKEN}.resident"),
    Column("occupancy", "occupancy", "share", "Threads on an SM, of those it can hold.", f"{TAKEN}.occupancy"),
    Column("waves", "waves", "count", "The grid over the programs that all SMs hold.", f"{TAKEN}.waves"),
    Column("idle", "idle", "share", "Slots that the last wave leaves empty.", f"{TAKEN}.idle"),
)


def resources_of(launched: KernelLaunch, driver: Driver) -> Resources | None:
    """The resources of a launch that ran; None for memory that is set, and where no machine code runs."""
    if launched.loaded is None:
        return None
    function, threads, dynamic = launched.loaded.function, launched.loaded.threads, launched.loaded.shared
    kernel, sm_count = driver.kernel_facts(function.handle, threads, dynamic), driver.properties.sm_count
    slots = kernel.resident * sm_count
    waves = math.prod(launched.grid) / slots if slots else 0.0
    return Resources(
        threads=threads,
        registers=kernel.registers,
        shared=kernel.shared + dynamic,
        local=kernel.local,
        resident=kernel.resident,
        occupancy=kernel.resident * threads / driver.sm_facts().threads,
        sm_count=sm_count,
        waves=waves,
        idle=1 - waves / math.ceil(waves) if waves else 0.0,
    )


def launches_of(call: Callable[[], object], device: Device) -> list[Launch]:
    """The kernels and fills that a call launches on a CUDA device, in order."""
    from genesis.backend.cuda.launch import watching_launches

    driver = cuda_backend(device).driver
    found: list[KernelLaunch] = []

    def watch(launched: KernelLaunch, stream: int) -> None:
        found.append(launched)
        launched.run(stream)

    with watching_launches(watch):
        call()
        driver.synchronize()  # launches may wait for their kernels' compilation
    return [Launch(each.name, tuple(each.grid), resources_of(each, driver)) for each in found]


def stages_of(case: Case, plan: Plan) -> dict[str, float]:
    """Host seconds of a call by stage, once its launches are recorded; empty without a GPU.

    Three stages are timed alone: `lookup` finds the recorded launches, `allocate` takes memory for the outputs and
    returns it, `wrap` makes tensors of them. Two are differences, missing where noise makes them negative: `entry`
    leads from tensors to the op on arrays, `launch` packs parameters and calls the driver.
    """
    from genesis.backend.cuda.dispatch import call_key

    backend, op, attrs = cuda_backend(case.device), case.op, dict(case.attrs)
    inputs, attrs = op.join(case.inputs, attrs) if op.join else (case.inputs, attrs)
    made = backend.replay(op, inputs, attrs) if has_gpu_time(case.device) and case.arrays else None
    if made is None:
        return {}
    limited = Plan(plan.precision, plan.seconds / 5, plan.warm_up, plan.sample, QUEUE, plan.clock)
    calls: dict[str, Callable[[], object]] = {
        "lookup": partial(call_key, op, inputs, attrs),
        "allocate": lambda: [backend.allocate(a.nbytes) for a in made],
        "wrap": lambda: [TensorBase.wrap(a) for a in made],
        "replay": partial(backend.replay, op, inputs, attrs),
        "whole": case.call,
    }
    host = {
        name: measure(of_wall(call, wait_for(case.device), of_host=True), limited).seconds
        for name, call in calls.items()
    }
    replay, whole = host.pop("replay"), host.pop("whole")
    host |= {"entry": whole - replay - host["wrap"], "launch": replay - host["lookup"] - host["allocate"]}
    return {name: seconds for name, seconds in host.items() if seconds >= 0}


# --- Code -------------------------------------------------------------------------------------------------------------


def target_named(arch: str | None, device: Device) -> Properties:
    """The GPU to compile for: of the architecture `arch` ("sm_90" or "90"), else the device's own, else a usual one.

    Raises:
        UsageError: there is no such architecture, or kernels are interpreted. DeviceError: Triton is not installed.
    """
    from genesis.backend.cuda import driver_for
    from genesis.backend.cuda.driver import is_interpreted

    if is_interpreted():
        what = "TRITON_INTERPRET is set: kernels are interpreted and have no code"
        raise UsageError(what, where="--show", next="unset TRITON_INTERPRET")
    if importlib.util.find_spec("triton") is None:
        raise DeviceError("kernels cannot be compiled: Triton is not installed", next="pip install triton, on Linux")
    if arch is None and device != CPU and has_gpu_time(device):
        return driver_for(device.index).properties
    from genesis.backend.cuda.simulated import ARCHITECTURES

    digits = re.fullmatch(r"(?:sm_?)?(\d+)a?", arch or str(USUAL))
    if digits is None or int(digits[1]) not in ARCHITECTURES:
        known = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise UsageError(f"{quote(arch)} is not an architecture", where="--arch", next=f"use one of {known}")
    return ARCHITECTURES[int(digits[1])]


def code_of(
    name: str,
    stage: str,
    target: Properties,
    dtype: DType | None = None,
    shapes: Sequence[Shape] = (),
    axes: Sequence[Axes] = (),
    backward: bool = False,
) -> Iterator[str]:
    """The code of each kernel that the first case of an op launches, below a comment that names it.

    Args:
        name, dtype, shapes, axes: as for `op.profile_op`.
        stage: one of `STAGES`.
        backward: the kernels of the gradient, too.

    Raises:
        UsageError: there is no such op or stage. DeviceError: a tool is missing.
    """
    if stage not in STAGES:
        raise UsageError(f"{quote(stage)} is not a stage", where="--show", next=f"use one of {', '.join(STAGES)}")
    found: dict[Any, list[Launched]] = {}
    for each in _launches(name, target, dtype, shapes, axes, backward):
        found.setdefault((each.kernel, repr(each.signature)), []).append(each)
    mark, arch = ";" if stage == "llir" else "//", "".join(map(str, target.capability))
    for alike in found.values():
        kernel, signature = alike[0].kernel, alike[0].signature
        grids = ", ".join(dict.fromkeys("x".join(map(str, each.grid)) for each in alike))
        constants = ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in signature.constants)
        head = f"{mark} {kernel.__name__}: {stage} for sm_{arch}, grid {grids}, constants {constants}"
        yield f"{head}\n{_text(kernel, signature, target.capability, stage).rstrip()}"


def _launches(
    name: str, target: Properties, dtype: DType | None, shapes: Sequence[Shape], axes: Sequence[Axes], backward: bool
) -> list[Launched]:
    """The launches of a call on a simulated GPU like the target."""
    from genesis.backend.cuda.simulated import fake_device

    if backward and op_named(name)[0].vjp is None:
        raise UsageError(f"{name} has no gradient", where="--backward", next="leave --backward out")
    device, driver = fake_device(target)
    case = make_case(name, *next(choices(name, device, shapes, axes)), dtype, device)
    driver.launched.clear()  # these made the inputs
    if backward:
        passes_of(case.op, case.inputs, case.attrs).backward()
    else:
        execute(case.op, case.inputs, dict(case.attrs))
    return list(driver.launched)


def _text(kernel: Any, signature: Signature, capability: tuple[int, int], stage: str) -> str:
    """The code of a kernel at a stage."""
    from genesis.backend.cuda.compile import compiled, dependent
    from genesis.custom.cuda_source import SourceKernel

    if isinstance(kernel, SourceKernel):
        made = kernel.compile(capability, dict(signature.constants))
        name, language = kernel.entry, "CUDA C++"
        stages: Any = {"ptx": made.ptx, "cubin": made.cubin}
    else:
        name, language = kernel.__name__, "in another language than Triton"
        stages = compiled(kernel, signature, capability).asm
    if stage == "sass":
        return disassembled(stages["cubin"])
    if stage not in stages:
        there = ", ".join(each for each in STAGES if each in stages)
        raise UsageError(f"{name} is {language} and has no {stage}", where="--show", next=f"use {there} or sass")
    text = str(stages[stage])
    # The assembler also gets the instructions that let kernels of a graph overlap.
    is_dependent = stage == "ptx" and capability >= (9, 0) and not isinstance(kernel, SourceKernel)
    return dependent(text) if is_dependent else text


def disassembled(cubin: bytes) -> str:
    """The machine instructions (SASS) of a cubin, by nvdisasm or cuobjdump of Triton, CUDA_HOME or PATH.

    Raises:
        DeviceError: no disassembler is installed, or it refuses.
    """
    spec = importlib.util.find_spec("triton.backends.nvidia")
    folders = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "bin")]
    folders += [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    tools = (shutil.which(name, path=path) for name in ("nvdisasm", "cuobjdump"))
    if (tool := next(filter(None, tools), None)) is None:
        raise DeviceError(
            "machine code needs nvdisasm or cuobjdump, and neither was found",
            where="--show sass",
            next="pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit and set CUDA_HOME; or use --show ptx",
        )
    option = "-c" if Path(tool).name.startswith("nvdisasm") else "-sass"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([tool, option, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{tool} failed: {done.stderr.strip()[-300:]}", next="use --show ptx")
    return done.stdout

"""Lists the kernels of a call, with their GPU resources and code, and times the stages of dispatch on the host.

Code is available for every architecture, from Triton's IR to machine code, and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.autograd.record import TensorBase
from genesis.backend import CPU, Device
from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError
from genesis.files.paths import quote
from genesis.measure.cases import Axes, Case, choices, make_case, passes_of
from genesis.measure.limits import cuda_backend, has_gpu_time, wait_for
from genesis.measure.record import Column
from genesis.measure.timing import Plan, measure, of_wall
from genesis.op import execute
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Driver, Properties
    from genesis.backend.cuda.launch import KernelLaunch
    from genesis.backend.cuda.simulated import Launched

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
CHOICE = "choice"  # lists the candidates of GEMM tiles instead of code
DEFAULT_ARCH = 90  # the architecture if none is given and the machine has no GPU
QUEUE = 100  # most calls queued on the GPU; the host blocks when the queue is full


class Resources(NamedTuple):
    """The resources of a kernel. A program is a CUDA block."""

    threads: int  # threads per program
    registers: int  # registers per thread
    shared: int  # bytes of shared memory per program
    local: int  # bytes of local memory per thread: spilled registers, and arrays indexed at run time
    resident: int  # programs that an SM holds at once
    occupancy: float  # threads of the resident programs, as a share of the threads that an SM can hold
    sm_count: int  # SMs of the GPU
    waves: float  # programs of the grid / programs that all SMs hold at once; at most 1 for a persistent kernel
    idle: float  # empty slots of the last wave, as a share of the slots of all waves


class Launch(NamedTuple):
    """The launch of a kernel, or a memset, named "fill"."""

    kernel: str
    grid: tuple[int, ...]  # programs in three dimensions; empty for a fill
    resources: Resources | None = None  # None for a fill, and in Triton's interpreter

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


TAKEN = "2.resources"
COLUMNS = (  # a row is (name of the case, "forward" or "backward", `Launch`)
    Column("case", "case", "text", "Op and shape.", "0"),
    Column("pass", "pass", "text", "forward or backward.", "1"),
    Column("kernel", "kernel", "text", "Name of the kernel; fill for a memset.", "2.kernel"),
    Column("grid", "grid", "text", "Programs in each dimension.", lambda row: "x".join(map(str, row[2].grid))),
    Column("threads", "threads", "count", "Threads of a program.", f"{TAKEN}.threads"),
    Column("registers", "registers", "count", "Registers of a thread.", f"{TAKEN}.registers"),
    Column("shared", "shared", "bytes", "Shared memory of a program.", f"{TAKEN}.shared"),
    Column("local", "local", "bytes", "Local memory of a thread: spilled registers.", f"{TAKEN}.local"),
    Column("resident", "per SM", "count", "Programs that an SM holds at once.", f"{TAKEN}.resident"),
    Column("occupancy", "occupancy", "share", "Share of an SM's thread slots in use.", f"{TAKEN}.occupancy"),
    Column("waves", "waves", "count", "The grid / the programs that all SMs hold at once.", f"{TAKEN}.waves"),
    Column("idle", "idle", "share", "Slots that the last wave leaves empty.", f"{TAKEN}.idle"),
)


def resources_of(launched: KernelLaunch, driver: Driver) -> Resources | None:
    """The resources of a launch that ran; None for a memset, and in Triton's interpreter."""
    if launched.loaded is None:
        return None
    function, threads, dynamic = launched.loaded.function, launched.loaded.threads, launched.loaded.shared
    kernel, sm_count = driver.kernel_facts(function.handle, threads, dynamic), driver.properties.sm_count
    slots = kernel.resident * sm_count
    waves = math.prod(launched.grid) / slots if slots else 0.0
    occupancy = kernel.resident * threads / driver.sm_facts().threads
    idle = 1 - waves / math.ceil(waves) if waves else 0.0
    taken = threads, kernel.registers, kernel.shared + dynamic, kernel.local, kernel.resident
    return Resources(*taken, occupancy, sm_count, waves, idle)


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
    """Host seconds of a call with a recorded launch plan, by stage; empty without a GPU.

    `lookup` finds the launch plan, `allocate` allocates and frees the outputs, `wrap` wraps them in tensors. The others
    are differences, omitted if negative: `entry` unwraps tensors and dispatches, `launch` packs and launches.
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
    wait = wait_for(case.device)
    timed = {name: of_wall(call, wait, plan.clock, of_host=True) for name, call in calls.items()}
    host = {name: measure(sample, limited).seconds for name, sample in timed.items()}
    replay, whole = host.pop("replay"), host.pop("whole")
    host |= {"entry": whole - replay - host["wrap"], "launch": replay - host["lookup"] - host["allocate"]}
    return {name: seconds for name, seconds in host.items() if seconds >= 0}


def target_named(arch: str | None, device: Device) -> Properties:
    """The GPU of architecture "sm_90" or "90", by default the device or else sm_90. Raises UsageError, DeviceError."""
    from genesis.backend.cuda import driver_for
    from genesis.backend.cuda.driver import is_interpreted

    if is_interpreted():
        what = "TRITON_INTERPRET is set: kernels are interpreted and have no code"
        raise UsageError(what, where="--show", next="unset TRITON_INTERPRET")
    if importlib.util.find_spec("triton") is None:
        raise DeviceError("kernels cannot be compiled: Triton is not installed", next="on Linux, pip install triton")
    if arch is None and device != CPU and has_gpu_time(device):
        return driver_for(device.index).properties
    from genesis.backend.cuda.simulated import ARCHITECTURES

    digits = re.fullmatch(r"(?:sm_?)?(\d+)a?", arch or str(DEFAULT_ARCH))
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
    """Yield the code of each kernel that an op's first case launches, or its choice of tiles. Raises UsageError."""
    from genesis.backend.cuda.compile import compiled, dependent
    from genesis.backend.cuda.simulated import fake_device
    from genesis.custom.cuda_source import SourceKernel
    from genesis.kernels.gemm import tiles

    if stage not in (*STAGES, CHOICE):
        next_ = f"use one of {', '.join((*STAGES, CHOICE))}"
        raise UsageError(f"{quote(stage)} is not a stage", where="--show", next=next_)
    device, driver = fake_device(target)
    case = make_case(name, *next(choices(name, device, shapes, axes)), dtype, device)
    driver.launched.clear()  # forget the launches that built the inputs
    tiles.chosen.clear()
    if backward:
        passes_of(case.op, case.inputs, case.attrs)[1]()
    else:
        execute(case.op, case.inputs, dict(case.attrs))
    if stage == CHOICE:
        for asked in tiles.chosen:
            yield "\n".join(tiles.explained(asked[0], tiles.ranked(*asked)))
        return
    found: dict[Any, list[Launched]] = defaultdict(list)
    for each in driver.launched:
        found[each.kernel, repr(each.signature)].append(each)
    mark, arch = ";" if stage == "llir" else "//", "".join(map(str, target.capability))
    for alike in found.values():
        kernel, signature = alike[0].kernel, alike[0].signature
        grids = ", ".join(dict.fromkeys("x".join(map(str, each.grid)) for each in alike))
        constants = ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in signature.constants)
        head = f"{mark} {kernel.__name__}: {stage} for sm_{arch}, grid {grids}, constants {constants}"
        is_source = isinstance(kernel, SourceKernel)
        if is_source:
            binary = kernel.compile(target.capability, dict(signature.constants))
            stages: Any = {"ptx": binary.ptx, "cubin": binary.cubin}
        else:
            stages = compiled(kernel, signature, target.capability).asm
        if stage == "sass":
            text = disassembled(stages["cubin"])
        elif stage in stages:
            text = str(stages[stage])
        else:  # Triton's kernels have every stage
            raise UsageError(f"{kernel.entry} is CUDA C++ and has no {stage}", where="--show", next="use ptx or sass")
        if stage == "ptx" and target.capability >= (9, 0) and not is_source:
            text = dependent(text)  # with the instructions that let kernels of a CUDA graph overlap
        yield f"{head}\n{text.rstrip()}"


def disassembled(cubin: bytes) -> str:
    """Machine instructions (SASS) of a cubin, by a tool of Triton, CUDA_HOME or PATH. Raises: DeviceError."""
    spec = importlib.util.find_spec("triton.backends.nvidia")
    folders = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "bin")]
    folders += [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    tools = (shutil.which(name, path=path) for name in ("nvdisasm", "cuobjdump"))
    if (tool := next(filter(None, tools), None)) is None:
        what = "machine code needs nvdisasm or cuobjdump, and neither was found"
        how = "pip install nvidia-cuda-nvdisasm, or set CUDA_HOME to a CUDA toolkit, or use --show ptx"
        raise DeviceError(what, where="--show sass", next=how)
    option = "-c" if Path(tool).name.startswith("nvdisasm") else "-sass"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([tool, option, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{tool} failed: {done.stderr.strip()[-300:]}", next="use --show ptx")
    return done.stdout

"""`genesis demo`: one idea about speed or memory each, as short code and tables of what it costs on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import genesis
from genesis import Tensor, nn
from genesis.array import Array
from genesis.autograd import no_grad
from genesis.backend import CPU, Device, backend_for
from genesis.errors import DeviceError, NumericError
from genesis.measure.limits import copy_rate, has_gpu_time, time_on_gpu, wait_for
from genesis.measure.memory import peak_bytes
from genesis.measure.record import Column, Table, format_ratio, table
from genesis.measure.timing import Plan, Timing, measure, of_wall
from genesis.op import Op, observe

FAST = Plan(precision=0.1, seconds=0.06, warm_up=0.02)


@dataclass(frozen=True)
class Setting:
    """Where a demo runs, and how hard it tries.

    Attributes:
        is_fast: on little data, for a look.
    """

    device: Device
    is_fast: bool = False
    plan: Plan = field(default_factory=Plan)

    def size(self, gpu: int, cpu: int, fast: int, tiny: int) -> int:
        """The size for this device; `tiny` is for Triton's interpreter."""
        if self.device != CPU and not has_gpu_time(self.device):
            return tiny
        return fast if self.is_fast else cpu if self.device == CPU else gpu

    def square(self) -> int:
        """The side of a square of float32 beyond the caches, a dozen of which fit into a GPU's memory."""
        side = self.size(16384, 4096, 1024 if self.device == CPU else 4096, 32)
        if has_gpu_time(self.device):
            free, _ = cast(Any, backend_for(self.device)).driver.memory_info()
            while 12 * 4 * side * side > free:
                side //= 2
        return side


class Pass(NamedTuple):
    """An op of a call: the bytes of its operands and of its results."""

    op: str
    read: int
    written: int


class Way(NamedTuple):
    """One way of doing the work, measured."""

    name: str
    passes: list[Pass]
    flops: int
    wall: Timing
    gpu: Timing | None
    peak: int
    copy: float

    @property
    def time(self) -> Timing:
        """The GPU's, else by the clock."""
        return self.gpu or self.wall

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(each.read + each.written for each in self.passes)

    @property
    def rate(self) -> float:
        """Bytes read and written a second."""
        return self.moved / self.time.seconds


WAYS = [
    Column("name", "way", "text", "How the work is done.", lambda w: w.name),
    Column("ops", "ops", "count", "Ops, each of which passes over its operands.", lambda w: len(w.passes)),
    Column("read", "read", "bytes", "Bytes of operands.", lambda w: sum(p.read for p in w.passes)),
    Column("written", "written", "bytes", "Bytes of results.", lambda w: sum(p.written for p in w.passes)),
    Column("wall", "wall", "s", "Median by the clock.", lambda w: w.wall.seconds),
    Column("gpu", "GPU", "s", "Median on the GPU alone.", lambda w: w.gpu and w.gpu.seconds),
    Column("rate", "rate", "byte/s", "Bytes read and written a second.", lambda w: w.rate),
    Column("flops", "FLOP/s", "FLOP/s", "Operations a second.", lambda w: w.flops / w.time.seconds),
    Column("share", "of a copy", "share", "The rate as a share of a copy's.", lambda w: w.rate / w.copy),
    Column("peak", "peak memory", "bytes", "Memory taken beyond the inputs.", lambda w: w.peak),
    Column("note", "note", "text", "Whether the time is noisy.", lambda w: "noisy" if w.time.is_noisy else ""),
]  # fmt: skip
PASSES = [
    Column("op", "pass", "text", "The op.", lambda p: p.op),
    Column("read", "read", "bytes", "Bytes of its operands.", lambda p: p.read),
    Column("written", "written", "bytes", "Bytes of its result.", lambda p: p.written),
]


def compare(ways: dict[str, Callable[[], Any]], setting: Setting, tolerance: float | None = 1e-4) -> list[Way]:
    """Measure each way.

    Args:
        tolerance: the difference from the first way's result that is allowed; None where results differ.

    Raises:
        NumericError: two ways do not do the same.
    """
    with no_grad():
        if tolerance is not None:
            first, *others = ways.items()
            expected = first[1]()
            for name, call in others:
                difference = (call() - expected).abs().amax().item()
                if not difference <= tolerance:
                    what = f"{name} differs from {first[0]} by {difference:.3g}, {tolerance:g} is allowed"
                    raise NumericError(what)
        return [_measured(name, call, setting) for name, call in ways.items()]


def _measured(name: str, call: Callable[[], Any], setting: Setting) -> Way:
    device, passes, flops = setting.device, list[Pass](), 0

    def add(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        nonlocal flops
        cost = op.cost(inputs, outputs, attrs)
        if cost.bytes:
            written = sum(each.nbytes for each in outputs)
            passes.append(Pass(op.name, max(cost.bytes - written, 0), written))
        flops += cost.flops

    call()  # compiles, and fills what is filled once
    with observe(add):
        call()
    wall = measure(of_wall(call, wait_for(device)), setting.plan)
    gpu = time_on_gpu(call, device, wall.seconds, setting.plan) if has_gpu_time(device) else None
    return Way(name, passes, flops, wall, gpu, peak_bytes(call, device), copy_rate(device))


def ways_table(name: str, title: str, ways: Sequence[Way]) -> Table:
    """The ways, and what the last costs beside the first."""
    made = table(name, title, WAYS, ways)
    slow = ways[0]
    for way in ways[1:]:
        time, moved = slow.time.seconds / way.time.seconds, slow.moved / way.moved
        noise = " (noise)" if slow.time.is_noisy or way.time.is_noisy else ""
        ratios = f"{format_ratio(time)}x the time of {way.name}, {format_ratio(moved)}x its bytes"
        made.notes.append(f"{slow.name}: {ratios}{noise}")
    return made


# --- Fusion -----------------------------------------------------------------------------------------------------------


def gelu_by_hand(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), op by op: each makes a tensor of x's size and reads it again."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + inner.tanh())


def softmax_by_hand(x: Tensor) -> Tensor:
    """e^x / Σ e^x over rows in five passes: maximum, difference, exponential, sum, quotient."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def fusion(setting: Setting) -> Iterator[Table]:
    """An expression op by op passes over memory once for each op, a fused one once in all."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    ways: dict[str, Callable[[], Any]] = {"by hand": lambda: gelu_by_hand(x), "fused": lambda: genesis.gelu_tanh(x)}
    notes = ["The kernels in CUDA C++ and in Triton need a GPU."] if setting.device == CPU else []
    if setting.device != CPU:
        from genesis.measure.demo_kernels import in_cuda, in_triton

        for name, made in (("in CUDA C++", in_cuda), ("in Triton", in_triton)):
            try:
                own = made()
                own(x)
                ways[name] = lambda own=own: own(x)  # type: ignore[misc]
            except DeviceError as error:
                notes.append(f"No row for {name}: {error.what}; {error.next}")
    found = ways_table("gelu", f"GELU of {width}x{width} float32", compare(ways, setting))
    found.notes += notes
    yield found
    softmax = compare({"by hand": lambda: softmax_by_hand(x), "fused": lambda: genesis.softmax(x, -1)}, setting)
    yield ways_table("softmax", f"softmax of the rows of {width}x{width} float32", softmax)
    yield table("passes", "the passes of softmax by hand", PASSES, softmax[0].passes)


# --- Others -----------------------------------------------------------------------------------------------------------


def batched(setting: Setting) -> Iterator[Table]:
    """A small product leaves most of a GPU idle, and each call costs the host time; a batch pays once."""
    count, n = setting.size(256, 128, 64, 2), setting.size(128, 64, 32, 16)
    x, y = (genesis.randn(count, n, n, device=setting.device) for _ in range(2))

    def looped() -> Tensor:
        return genesis.stack([a @ b for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])

    found = compare({"one by one": looped, "batched": lambda: x @ y}, setting)
    yield ways_table("batched", f"{count} products of {n}x{n} matrices, float32", found)


def memory(setting: Setting) -> Iterator[Table]:
    """x/2 + 1/2, twice: in new memory, in place, and into a tensor of one's own."""
    width = setting.square()
    x, worn, out = (genesis.ones(width, width, device=setting.device) for _ in range(3))

    def in_place() -> Tensor:
        return worn.mul_(0.5).add_(0.5).mul_(0.5).add_(0.5)

    def into() -> Tensor:
        genesis.mul(x, 0.5, out=out)
        genesis.add(out, 0.5, out=out)
        genesis.mul(out, 0.5, out=out)
        return genesis.add(out, 0.5, out=out)

    ways = {"in new memory": lambda: (x * 0.5 + 0.5) * 0.5 + 0.5, "in place": in_place, "into a tensor": into}
    yield ways_table("memory", f"four ops on {width}x{width} float32", compare(ways, setting))


def access(setting: Setting) -> Iterator[Table]:
    """Memory comes in lines (64 bytes on most processors, sectors of 32 on a GPU): gaps cost what they skip."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    rows = genesis.randperm(width, device=setting.device)
    elements = genesis.randperm(width * width // 8, device=setting.device)
    flat = x.view(-1)[: width * width // 8]
    ways = {
        "in a row": x.clone,
        "every 2nd element": x[:, ::2].contiguous,
        "every 16th element": x[:, ::16].contiguous,
        "transposed": x.t().contiguous,
        "rows in random order": lambda: x.index_select(0, rows),
        "elements in random order": lambda: flat.index_select(0, elements),
    }
    found = ways_table("access", f"copies out of {width}x{width} float32", compare(ways, setting, tolerance=None))
    found.notes = ["The rate counts the elements that are used, and indices; a line is read whole."]
    yield found


def linears(setting: Setting) -> Iterator[Table]:
    """How a stack of linears with GELU scales: twice the width, depth or batch of a base."""
    width, depth, batch = setting.size(2048, 256, 128, 16), 4, setting.size(4096, 256, 64, 4)
    sizes = {
        f"{width} wide, {depth} deep, {batch} rows": (width, depth, batch),
        "twice the width": (2 * width, depth, batch),
        "twice the depth": (width, 2 * depth, batch),
        "twice the batch": (width, depth, 2 * batch),
    }
    found = []
    for name, (wide, deep, rows) in sizes.items():
        layers = [layer for _ in range(deep) for layer in (nn.Linear(wide, wide), nn.GELU())]
        model, x = nn.Sequential(*layers).to(setting.device), genesis.randn(rows, wide, device=setting.device)
        found += compare({name: lambda model=model, x=x: model(x)}, setting, tolerance=None)  # type: ignore[misc]
    made = table("linears", "a stack of linears with GELU, forward", WAYS, found)
    for way in found[1:]:
        flops, time = way.flops / found[0].flops, way.time.seconds / found[0].time.seconds
        made.notes.append(f"{way.name}: {format_ratio(flops)}x the FLOPs, {format_ratio(time)}x the time")
    yield made


DEMOS: dict[str, tuple[Callable[[Setting], Iterator[Table]], str]] = {
    "fusion": (fusion, "GELU by hand, fused, in CUDA C++ and in Triton; softmax in five passes and in one"),
    "batched": (batched, "one product of many matrices against a loop over them"),
    "memory": (memory, "results in new memory, in place, and in memory of your own"),
    "access": (access, "memory read in a row, with gaps, across, and in random order"),
    "linears": (linears, "a stack of linears by width, depth and batch"),
}

"""`genesis demo`: each demo measures one idea about speed or memory, in short code that is meant to be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import genesis
from genesis import Tensor, nn
from genesis.array import Array
from genesis.autograd import no_grad
from genesis.backend import CPU, Device
from genesis.errors import NumericError
from genesis.measure.limits import copy_rate, cuda_backend, has_gpu_time, time_on_gpu, wait_for
from genesis.measure.record import Column, Table, format_ratio
from genesis.measure.session import peak_bytes
from genesis.measure.timing import Plan, measure, of_wall
from genesis.op import Op, observe

FAST = Plan(precision=0.1, seconds=0.06, warm_up=0.02)
Way = dict[str, Any]  # one way of doing the work: its cells of `WAYS`, its passes and its time


@dataclass(frozen=True)
class Setting:
    """The device of a demo, and whether it uses little data and time (`is_fast`)."""

    device: Device
    is_fast: bool = False

    def size(self, gpu: int, cpu: int, fast: int, tiny: int) -> int:
        """The size for this device; `tiny` is for Triton's interpreter."""
        if self.device != CPU and not has_gpu_time(self.device):
            return tiny
        return fast if self.is_fast else cpu if self.device == CPU else gpu

    def square(self) -> int:
        """The side of a square float32 matrix that exceeds the caches; 12 of them fit into a GPU's free memory."""
        side = self.size(16384, 4096, 1024 if self.device == CPU else 4096, 32)
        if has_gpu_time(self.device):
            free, _ = cuda_backend(self.device).driver.memory_info()
            while 12 * 4 * side * side > free:
                side //= 2
        return side


WAYS = [
    Column("name", "way", "text", "How the work is done."),
    Column("ops", "ops", "count", "Number of ops. Each makes one pass over its operands."),
    Column("read", "read", "bytes", "Bytes of operands."),
    Column("written", "written", "bytes", "Bytes of results."),
    Column("wall", "wall", "s", "Median wall time.", "wall.seconds"),
    Column("gpu", "GPU", "s", "Median time on the GPU alone.", "gpu.seconds"),
    Column("rate", "rate", "byte/s", "Bytes read and written a second."),
    Column("share", "of a copy", "share", "The rate as a share of a copy's."),
    Column("peak", "peak memory", "bytes", "Peak memory in addition to the inputs."),
    Column("note", "note", "text", "Whether the time is noisy.", lambda w: "noisy" if w["time"].is_noisy else ""),
]
PASSES = [Column("op", "pass", "text", "The op."), *WAYS[2:4]]


def compare(ways: dict[str, Callable[[], Any]], setting: Setting, tolerance: float | None = 1e-4) -> list[Way]:
    """Measure each way. Raises NumericError: a result differs from the first one by more than the tolerance."""
    with no_grad():
        if tolerance is not None:
            (first, call), *others = ways.items()
            expected = call()
            for name, call in others:
                difference = (call() - expected).abs().amax().item()
                if not difference <= tolerance:
                    raise NumericError(f"{name} differs from {first} by {difference:.3g}, more than {tolerance:g}")
        return [_measured(name, call, setting) for name, call in ways.items()]


def _measured(name: str, call: Callable[[], Any], setting: Setting) -> Way:
    device, plan, passes = setting.device, FAST if setting.is_fast else Plan(), list[dict[str, Any]]()

    def add(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        cost, written = op.cost(inputs, outputs, attrs), sum(each.nbytes for each in outputs)
        if cost.bytes:
            passes.append({"op": op.name, "read": max(cost.bytes - written, 0), "written": written})

    call()  # compiles
    with observe(add):
        call()
    wall = measure(of_wall(call, wait_for(device)), plan)
    gpu = time_on_gpu(call, device, wall.seconds, plan) if has_gpu_time(device) else None
    time, read, written = gpu or wall, *(sum(each[key] for each in passes) for key in ("read", "written"))
    rate = (read + written) / time.seconds
    return {
        "name": name, "ops": len(passes), "read": read, "written": written, "wall": wall, "gpu": gpu, "rate": rate,
        "share": rate / copy_rate(device), "peak": peak_bytes(call, device), "passes": passes, "time": time,
    }  # fmt: skip


def ways_table(name: str, title: str, ways: Sequence[Way]) -> Table:
    """The table of the ways, with notes that compare the first way with every other way."""
    first, *others = ways
    ratios = []
    for way in others:
        time = format_ratio(first["time"].seconds / way["time"].seconds)
        moved = format_ratio((first["read"] + first["written"]) / (way["read"] + way["written"]))
        noise = " (noisy)" if first["time"].is_noisy or way["time"].is_noisy else ""
        ratios.append(f"{first['name']}: {time}x the time of {way['name']}, {moved}x its bytes{noise}")
    return Table(name, title, WAYS, ways, notes=ratios)


def gelu_by_hand(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), op by op: each op writes a tensor of x's size."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + inner.tanh())


def softmax_by_hand(x: Tensor) -> Tensor:
    """e^x / Σ e^x of each row in five passes: maximum, difference, exponential, sum, quotient."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def fusion(setting: Setting) -> Iterator[Table]:
    """An expression passes over memory once per op; a fused op passes once."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    ways = {"by hand": lambda: gelu_by_hand(x), "fused": lambda: genesis.gelu_tanh(x)}
    yield ways_table("gelu", f"GELU of {width}x{width} float32", compare(ways, setting))
    softmax = compare({"by hand": lambda: softmax_by_hand(x), "fused": lambda: genesis.softmax(x, -1)}, setting)
    yield ways_table("softmax", f"softmax of the rows of {width}x{width} float32", softmax)
    yield Table("passes", "the passes of softmax by hand", PASSES, softmax[0]["passes"])


def batched(setting: Setting) -> Iterator[Table]:
    """A small matmul leaves most of a GPU idle, and each call costs host time; a batch pays for one call."""
    count, n = setting.size(256, 128, 64, 2), setting.size(128, 64, 32, 16)
    x, y = (genesis.randn(count, n, n, device=setting.device) for _ in range(2))

    def looped() -> Tensor:
        return genesis.stack([a @ b for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])

    found = compare({"one by one": looped, "batched": lambda: x @ y}, setting)
    yield ways_table("batched", f"{count} products of {n}x{n} matrices, float32", found)


def memory(setting: Setting) -> Iterator[Table]:
    """x/2 + 1/2, twice: in new memory, in place, and into an existing tensor."""
    width = setting.square()
    x, worn, out = (genesis.ones(width, width, device=setting.device) for _ in range(3))

    def in_place() -> Tensor:
        return worn.mul_(0.5).add_(0.5).mul_(0.5).add_(0.5)

    def into() -> Tensor:
        genesis.add(genesis.mul(x, 0.5, out=out), 0.5, out=out)
        return genesis.add(genesis.mul(out, 0.5, out=out), 0.5, out=out)

    ways = {"in new memory": lambda: (x * 0.5 + 0.5) * 0.5 + 0.5, "in place": in_place, "into a tensor": into}
    yield ways_table("memory", f"four ops on {width}x{width} float32", compare(ways, setting))


def access(setting: Setting) -> Iterator[Table]:
    """Memory is read in lines, including gaps: 64 bytes on most processors, sectors of 32 bytes on a GPU."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    rows = genesis.randperm(width, device=setting.device)
    flat = x.view(-1)[: width * width // 8]
    elements = genesis.randperm(flat.shape[0], device=setting.device)
    ways = {
        "in a row": x.clone,
        "every 2nd element": x[:, ::2].contiguous,
        "every 16th element": x[:, ::16].contiguous,
        "transposed": x.t().contiguous,
        "rows in random order": lambda: x.index_select(0, rows),
        "elements in random order": lambda: flat.index_select(0, elements),
    }
    found, note = compare(ways, setting, None), "The rate counts used elements and indices, not whole lines."
    yield Table("access", f"copies out of {width}x{width} float32", WAYS, found, notes=[note])


def linears(setting: Setting) -> Iterator[Table]:
    """A stack of linears with GELU at twice the width, depth or batch: does the time grow with the FLOPs?"""
    width, depth, batch = setting.size(2048, 256, 128, 16), 4, setting.size(4096, 256, 64, 4)
    sizes = {
        f"{width} wide, {depth} deep, {batch} rows": (width, depth, batch),
        "twice the width": (2 * width, depth, batch),
        "twice the depth": (width, 2 * depth, batch),
        "twice the batch": (width, depth, 2 * batch),
    }
    found, notes = list[Way](), []
    for name, (wide, deep, rows) in sizes.items():
        layers = [layer for _ in range(deep) for layer in (nn.Linear(wide, wide), nn.GELU())]
        model, x = nn.Sequential(*layers).to(setting.device), genesis.randn(rows, wide, device=setting.device)
        found += compare({name: partial(model, x)}, setting, None)
        flops = format_ratio(wide * wide * deep * rows / (width * width * depth * batch))
        time = format_ratio(found[-1]["time"].seconds / found[0]["time"].seconds)
        notes.append(f"{name}: {flops}x the FLOPs, {time}x the time")
    yield Table("linears", "a stack of linears with GELU, forward", WAYS, found, notes=notes[1:])


DEMOS: dict[str, Callable[[Setting], Iterator[Table]]] = {
    "fusion": fusion, "batched": batched, "memory": memory, "access": access, "linears": linears,
}  # fmt: skip

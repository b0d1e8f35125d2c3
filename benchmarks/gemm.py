"""Random matmuls compared with torch, as GPU time: `python -m benchmarks.gemm --seed 7 --count 400`.

Sizes are multiples of 8 from 64 to 8,000; a K-major operand has 1 to 16,384 rows. Half of the matmuls are bf16, the
others fp16, tf32, float32 and fp8 in equal parts; a quarter is batched. Operands are K-major or MN-major, except fp8's,
which torch takes K-major only. Both sides read the same memory, and results are compared with float64 for some rows.
Both sides are captured into CUDA graphs and replayed in turns; a time is the median.

`--named` takes the matmuls of training steps instead. `--candidates N` also times the N tiles that the cost model ranks
first. `--json FILE` writes one line per matmul; the constants of `genesis/kernels/gemm/tiles.py` are fitted to it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.results import columns, rows_table, write_report
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.launch import (
    KernelLaunch,
    compile_ahead,
    forget_plan,
    memory_of,
    plain_launch,
    signature_of,
    watching_launches,
)
from genesis.dtypes import DType, bfloat16, float8_e4m3fn, float16, float32
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.tiles import MAX_IMPRECISE, GemmTile, Problem, ranked
from genesis.shapes import contiguous_strides

CUDA = Device("cuda", 0)
Call = Callable[[Array, Array, Array], None]
KINDS = {"bf16": 4, "fp16": 1, "tf32": 1, "float32": 1, "fp8": 1}  # relative frequencies
ITEM = {"bf16": 2, "fp16": 2, "tf32": 4, "float32": 4, "fp8": 1}  # bytes of an element
DTYPES: dict[str, DType] = {
    "bf16": bfloat16, "fp16": float16, "tf32": float32, "float32": float32, "fp8": float8_e4m3fn
}  # fmt: skip
OUT: dict[str, DType] = {"fp8": bfloat16}
MOST_FLOPS = {"float32": 2e11}  # so that a call takes at most a few ms
MOST_ELEMENTS = 1 << 28  # of an operand
REPLAY, MOST_CALLS = 4e-4, 40  # least seconds of a replay; calls in a graph at most
# Relative rounding of operands or results. A float32 error may grow with the number of terms, as in a plain sum.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-10, "float32": 2.0**-24, "fp8": 2.0**-8}
CHECKED_ROWS, MOST_ERROR = 64, 4.0
# Models of `genesis bench-model`: width, MLP width, width of packed q, k and v, vocabulary.
WIDTHS = ((576, 1536, 960, 49152), (896, 4864, 1152, 151936), (1536, 8960, 2048, 0), (2048, 8192, 3072, 128256))


class Matmul(NamedTuple):
    """[m, k] x [k, n] for each of `batch` matrices; "t" in `layout` is an MN-major A and a K-major B."""

    kind: str
    layout: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{self.kind} {self.layout} {batch}{self.m} x {self.k} -> {self.n}"


def draw(seed: int, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Matmul]:
    """Return random matmuls."""
    rng, found = random.Random(seed), list[Matmul]()

    def size(low: int, high: int, grain: int) -> int:
        return max(round(math.exp(rng.uniform(math.log(low), math.log(high))) / grain), -(-low // grain)) * grain

    while len(found) < count:
        kind = rng.choices(kinds, [KINDS[each] for each in kinds])[0]
        layout = "nt" if kind == "fp8" else rng.choice(("nn", "nt", "tn", "tt"))
        grain = 16 if kind == "fp8" else 8
        batch = size(2, 64, 1) if kind != "fp8" and rng.random() < 0.25 else 1
        m = size(1, 16384, 1) if layout[0] == "n" else size(8, 16384, grain)
        p = Matmul(kind, layout, batch, m, size(64, 8000, grain), size(64, 8000, grain))
        is_small = batch * max(m * p.k, p.k * p.n, m * p.n) <= MOST_ELEMENTS
        if is_small and p.flops <= MOST_FLOPS.get(kind, math.inf):
            found.append(p)
    return found


def named() -> list[Matmul]:
    """Return forward and backward matmuls of training steps in bf16, and square ones."""
    sizes = [(m, n, k) for m in (2048, 8192) for d, h, q, _ in WIDTHS for n, k in ((q, d), (d, d), (2 * h, d), (d, h))]
    sizes += [(2048, v, d) for d, _, _, v in WIDTHS if v]
    found = [p for m, n, k in sizes for p in (("nt", m, n, k), ("nn", m, k, n), ("tn", n, k, m))]
    found += [(layout, n, n, n) for n in (512, 1024, 2048, 4096, 8192) for layout in ("nn", "nt")]
    both = [Matmul("tf32", layout, 1, n, n, n) for n in (1024, 2048, 4096) for layout in ("nn", "nt")]
    return [*(Matmul("bf16", layout, 1, m, n, k) for layout, m, n, k in dict.fromkeys(found)), *both]


def problem_of(p: Matmul) -> Problem:
    kind, item = {"bf16": "half", "fp16": "half"}.get(p.kind, p.kind), ITEM[p.kind]
    if p.kind == "fp8" and p.k > MAX_IMPRECISE:
        kind = "fp8_long"
    pitches = (p.k if p.layout[0] == "n" else p.m) * item, (p.n if p.layout[1] == "n" else p.k) * item
    layout, out = ("nn", 4) if p.kind == "float32" else (p.layout, OUT.get(p.kind, DTYPES[p.kind]).itemsize)
    return Problem(kind, layout, p.m, p.n, p.k, p.batch, item, out, pitches)


def calls_of(p: Matmul, candidates: int) -> dict[str, Call]:
    """Return the calls to time: the default choice, the choice with `one_chain`, and the first candidates."""
    found: dict[str, Call] = {"genesis": matmul_into}
    if p.kind != "fp8":
        found["one chain"] = partial(matmul_into, one_chain=True)
    properties = backend_of(CUDA).driver.properties
    best: dict[tuple[int | bool, ...], GemmTile] = {}  # the first tile of each size and order
    for _, tile, _ in ranked(problem_of(p), properties.sm_count, properties.shared_memory):
        best.setdefault((*tile[:5], tile.swapped), tile)
    for tile in itertools.islice(best.values(), candidates):
        found[",".join(map(str, tile))] = partial(matmul_into, tile=tile)
    return found


class Operands:
    """Operands and results in torch's memory, and Genesis's views of it."""

    def __init__(self, torch: Any, p: Matmul) -> None:
        self.torch, self.p = torch, p
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}.get(p.kind, torch.float32)
        lead = (p.batch,) if p.batch > 1 else ()
        self.a, self.b = (
            self._random((*lead, *shape), kind, is_transposed=c == "t")
            for c, shape in zip(p.layout, ((p.m, p.k), (p.k, p.n)), strict=True)
        )
        out = torch.bfloat16 if p.kind == "fp8" else kind
        self.theirs, self.ours = (torch.full((*lead, p.m, p.n), math.nan, dtype=out, device="cuda") for _ in range(2))
        self.one = torch.ones((), device="cuda")

    def _random(self, shape: tuple[int, ...], kind: Any, *, is_transposed: bool) -> Any:
        if is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        x = self.torch.randn(shape, device="cuda", dtype=self.torch.float32).to(kind)
        return x.transpose(-1, -2) if is_transposed else x

    def torch_call(self) -> None:
        if self.p.kind == "fp8":
            kind = self.torch.bfloat16
            self.torch._scaled_mm(self.a, self.b, self.one, self.one, out_dtype=kind, out=self.theirs)
        else:
            self.torch.matmul(self.a, self.b, out=self.theirs)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Return out, a and b."""
        return tuple(self._array(x) for x in (self.ours, self.a, self.b))  # type: ignore[return-value]

    def _array(self, x: Any) -> Array:
        storage = backend_of(CUDA).adopt(x.data_ptr(), x.numel() * x.element_size(), x)
        kind = DTYPES[self.p.kind]
        return Array(
            storage, tuple(x.shape), tuple(x.stride()), OUT.get(self.p.kind, kind) if x is self.ours else kind, CUDA
        )

    def error(self) -> float:
        """Return the largest error of Genesis's result, in roundings of a sum of that many terms."""
        p = self.p
        rows = self.torch.linspace(0, p.m - 1, min(p.m, CHECKED_ROWS), device="cuda").long()
        want = self.a.to(self.torch.float64).index_select(-2, rows) @ self.b.to(self.torch.float64)
        got = self.ours.index_select(-2, rows).to(self.torch.float64)
        error = ((got - want).abs() / (1 + want.abs() / p.k**0.5)).max().item()
        return float(error / ROUNDING[p.kind] / (p.k if p.kind == "float32" else p.k**0.5))


class Graph:
    """A graph of calls, timed by replays."""

    def __init__(self, replay: Callable[[], None], close: Callable[[], None], torch: Any, calls: int) -> None:
        self.replay, self.close, self.calls = replay, close, calls
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds(self) -> float:
        """Return the seconds of a call. An uncounted replay hides the time of launching the counted one."""
        self.replay()
        self._events[0].record()
        self.replay()
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3 / self.calls


def torch_graph(torch: Any, call: Callable[[], None], calls: int) -> Graph:
    graph = torch.cuda.CUDAGraph()
    call()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return Graph(graph.replay, graph.reset, torch, calls)


def recorded(call: Callable[[], None]) -> list[KernelLaunch]:
    """Run a call and return its launches, which may still wait for their kernels to compile."""
    found: list[KernelLaunch] = []

    def note(launch: KernelLaunch, stream: int) -> None:
        found.append(launch)
        launch.run(stream)

    backend = backend_of(CUDA)
    with watching_launches(note):
        call()
        backend.driver.synchronize()
    return found


def our_graph(torch: Any, launches: Sequence[KernelLaunch], calls: int) -> Graph:
    """Capture launches. Their temporaries are free, so nothing else may allocate until the last replay."""
    driver, stream, side = backend_of(CUDA).driver, torch.cuda.current_stream().cuda_stream, torch.cuda.Stream()
    driver.synchronize()
    driver.begin_capture(side.cuda_stream)
    for _ in range(calls):
        for launch in launches:
            launch.run(side.cuda_stream)
    graph = driver.end_capture(side.cuda_stream)
    executable = driver.instantiate(graph)
    return Graph(
        lambda: driver.launch_graph(executable, stream), lambda: driver.destroy_graph(graph, executable), torch, calls
    )


def calls_for(seconds: float) -> int:
    return min(max(math.ceil(REPLAY / max(seconds, 1e-7)), 2), MOST_CALLS)


def timed(graphs: Sequence[Graph], rounds: int) -> list[float]:
    """Return the median seconds of graphs replayed in turns."""
    samples = [[g.seconds() for g in graphs] for _ in range(rounds)]
    return [median(column) for column in zip(*samples, strict=True)]


def compare(torch: Any, p: Matmul, calls: dict[str, Callable[[Array, Array, Array], None]], rounds: int) -> Any:
    """Return microseconds of torch and of each call, and the errors."""
    allow_tf32.set(p.kind == "tf32")
    torch.backends.cuda.matmul.allow_tf32 = p.kind == "tf32"
    x = Operands(torch, p)
    first = torch_graph(torch, x.torch_call, 2)
    first.seconds()
    count = calls_for(first.seconds())
    first.close()
    graphs, names, errors = [torch_graph(torch, x.torch_call, count)], ["torch"], {}
    arrays = x.arrays()
    for name, call in calls.items():
        x.ours.fill_(math.nan)
        torch.cuda.synchronize()
        try:
            launches = recorded(lambda call=call: call(*arrays))  # type: ignore[misc]
        except Exception as error:  # a sweep tries tiles that do not fit
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.synchronize()
            continue
        errors[name] = round(x.error(), 3)
        graphs.append(our_graph(torch, launches, count))
        names.append(name)
    for graph in graphs:
        graph.seconds()
    times = timed(graphs, rounds)
    for graph in graphs:
        graph.close()
    return {n: round(t * 1e6, 2) for n, t in zip(names, times, strict=True)}, errors


def compile_all(products: Sequence[Matmul], calls: Callable[[Matmul], dict[str, Call]]) -> None:
    """Compile in parallel what the calls launch. They run nothing: their arrays have no memory."""
    backend = backend_of(CUDA)
    driver, before = backend.driver, backend.driver.prepare
    futures: dict[int, Any] = {}
    storage = empty((256,), float32, CUDA).storage

    def prepare(backend: Any, kernel: Any, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> KernelLaunch:
        forget_plan()  # a copy of an operand would be replayed with this launch, which does nothing
        future = compile_ahead(driver, kernel, signature_of(kernel, args, keywords))
        futures[id(future)] = future
        count = len(memory_of(args))
        return plain_launch(lambda stream: None, (ctypes.c_uint64 * max(count, 1))(), count)

    driver.prepare = prepare
    try:
        for p in products:
            allow_tf32.set(p.kind == "tf32")
            lead, kind = (p.batch,) if p.batch > 1 else (), DTYPES[p.kind]

            def array(shape: tuple[int, ...], kind: DType, *, is_transposed: bool = False) -> Array:
                if not is_transposed:
                    return Array(storage, shape, contiguous_strides(shape), kind, CUDA)
                strides = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
                return Array(storage, shape, (*strides[:-2], strides[-1], strides[-2]), kind, CUDA)

            out = array((*lead, p.m, p.n), OUT.get(p.kind, kind))
            a = array((*lead, p.m, p.k), kind, is_transposed=p.layout[0] == "t")
            b = array((*lead, p.k, p.n), kind, is_transposed=p.layout[1] == "t")
            for call in calls(p).values():
                with suppress(Exception):
                    call(out, a, b)
    finally:
        driver.prepare = before
    start, failed = time.monotonic(), 0
    for future in futures.values():
        failed += future.exception() is not None
    print(f"compiled {len(futures)} kernels in {time.monotonic() - start:.0f} s, {failed} failed", flush=True)


def main() -> None:
    """Compare, and print the ratios of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--named", action="store_true", help="matmuls of training steps")
    parser.add_argument("--candidates", type=int, default=0, help="how many other tiles to time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--json", type=Path, help="write one line per matmul")
    parser.add_argument("--out", type=Path, help="write a report")
    asked = parser.parse_args()
    import torch

    start, rows = time.monotonic(), []
    products = named() if asked.named else draw(asked.seed, asked.count, asked.kinds)
    gc.collect()
    gc.freeze()
    calls = partial(calls_of, candidates=asked.candidates)
    compile_all(products, calls)
    for p in products:
        if time.monotonic() - start > asked.seconds:
            break
        times, errors = compare(torch, p, calls(p), asked.rounds)
        rows.append({**p._asdict(), "us": times, "errors": errors})
        if asked.json:
            asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} of {len(products)} matmuls in {time.monotonic() - start:.0f} s, {torch.cuda.get_device_name()}")
    report(rows, ("genesis", "one chain", "best"), asked.out)


COLUMNS = columns(
    call=("call", "text", "The choice, the choice that splits no sum, or the fastest candidate."),
    kind=("operands", "text", "Type of the operands, and whether the matmul is batched."),
    count=("matmuls", "count", "How many were drawn."),
    median=("median", "ratio", "torch's time / Genesis's."),
    worst=("worst", "ratio", "The lowest of these ratios."),
    low=("below 0.9", "count", "Matmuls with a lower ratio."),
    lowest=("below 0.75", "count", "Matmuls with a lower ratio."),
    of=("worst of all", "text", "The matmul with the lowest ratio."),
)


def report(rows: Sequence[dict[str, Any]], names: Iterable[str], out: Path | None) -> None:
    """Print and write the ratios torch / Genesis of each kind: the median, the worst, and how many are low."""
    for row in rows:
        if tiles := [us for name, us in row["us"].items() if name.count(",") > 3]:
            row["us"]["best"] = min(*tiles, row["us"]["genesis"])
            row["errors"]["best"] = 0.0
        wrong = {name: e for name, e in row["errors"].items() if isinstance(e, str) or not e < MOST_ERROR}
        for name, error in wrong.items():
            print("wrong:", Matmul(*(row[each] for each in Matmul._fields)), name, error)
    lines = []
    for name, kind, is_batched in itertools.product(names, KINDS, (False, True)):
        found = sorted(
            (row["us"]["torch"] / row["us"][name], str(Matmul(*(row[each] for each in Matmul._fields))))
            for row in rows
            if row["kind"] == kind and (row["batch"] > 1) == is_batched and name in row["us"]
        )
        if found:
            ratios = [ratio for ratio, _ in found]
            line = {"call": name, "kind": f"{kind}{' batched' * is_batched}", "count": len(ratios)}
            low = {"low": sum(ratio < 0.9 for ratio in ratios), "lowest": sum(ratio < 0.75 for ratio in ratios)}
            lines.append({**line, "median": median(ratios), "worst": ratios[0], **low, "of": found[0][1]})
    title = f"{len(rows)} matmuls, torch's time / Genesis's"
    write_report(out, "gpu-matmuls", CUDA, [rows_table("matmuls", title, COLUMNS, lines)])


if __name__ == "__main__":
    main()

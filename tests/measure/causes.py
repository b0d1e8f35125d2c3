"""Calls made so that the cause of their time is known: how many does `genesis.measure.causes` name rightly?

    .venv/bin/python -m tests.measure.causes [--device cuda]

Prints for each case the cause that was expected, the one that was found, and the evidence. Ends with 1 where fewer than
nine of ten are named rightly.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import genesis
from genesis import Tensor, no_grad
from genesis.autograd import TensorBase
from genesis.backend import CPU, Device
from genesis.dtypes import float32
from genesis.measure.cases import make_case
from genesis.measure.causes import Call, Finding, Subject, examine
from genesis.measure.limits import has_gpu_time, limits_of
from genesis.measure.op import scaled
from genesis.measure.timing import Plan
from genesis.op import registry

SHARE = 0.9  # of the cases must be named rightly
functional = genesis.nn.functional


class Case(NamedTuple):
    """A call whose cause is known; some have two right names, separated by a space."""

    name: str
    expected: str
    function: Callable[..., Any] | Subject
    inputs: tuple[Any, ...] = ()


def values(device: Device, *shape: int) -> Tensor:
    rng = np.random.default_rng(0)
    return genesis.tensor(np.resize(rng.random(1 << 16, np.float32) + 0.5, shape), device=str(device))


def of_function(function: Callable[..., object], inputs: Sequence[Any], device: Device) -> Subject:
    """The subject for a user's function. Its rows scale in all tensors that have as many rows as the first."""
    arrays = [x.array for x in inputs if isinstance(x, TensorBase) and x.array.shape]
    rows = arrays[0].shape[0] if arrays else 0

    def scaled(factor: float) -> tuple[Call, float] | None:
        count = round(rows * factor)
        if not count or count == rows:
            return None

        def resized(x: Any) -> Any:
            if not isinstance(x, TensorBase) or x.array.shape[:1] != (rows,):
                return x
            longer = registry["cat"](*[x.array] * math.ceil(count / rows), dim=0) if count > rows else x.array
            return TensorBase.wrap(registry["slice"](longer, items=((0, count, 1),)))

        call = partial(function, *map(resized, inputs))
        try:
            call()
        except Exception:  # the function works at its own sizes only
            return None
        return call, count / rows

    return Subject(partial(function, *inputs), device, scaled, rows)


# --- Functions --------------------------------------------------------------------------------------------------------


def waits(x: Tensor) -> Tensor:
    time.sleep(3e-3)
    return x + x


def counts(x: Tensor) -> Tensor:
    sum(i * i for i in range(50_000))
    return x * x


def between(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + 1.0
        time.sleep(1e-3)
    return x


def parses(x: Tensor) -> Tensor:
    " ".join(str(i) for i in range(20_000)).split(" ")
    return x * x


def encodes(x: Tensor) -> Tensor:
    json.loads(json.dumps(list(range(20_000))))
    return x - 1.0


def chain(count: int, x: Tensor) -> Tensor:
    for _ in range(count):
        x = x + x
    return x


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + (0.79788456 * (x + 0.044715 * x * x * x)).tanh())


def softmax_by_hand(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def norm_by_hand(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return d / ((d * d).mean(-1, keepdim=True) + 1e-6).sqrt()


def polynomial(x: Tensor) -> Tensor:
    return ((x * 0.5 + 1.0) * x - 2.0) * x + 3.0


def norm_of_rows(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def gathers(device: Device) -> Subject:
    """Single numbers of a table in random order; the op's own rule makes a smaller table."""
    case = make_case("index_get", (1 << 23, 1), None, None, device)
    return Subject(case.call, device, partial(scaled, case, limits_of(device, float32)))


# --- Kernels ----------------------------------------------------------------------------------------------------------


def kernels() -> tuple[Callable[[Tensor], Tensor], ...]:
    """Ops of one program a row: one holds 16,384 numbers in a warp; one reads 2^20 numbers one after the other; two
    compute 20,000 dependent steps, in a warp and in 32 warps.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def normalize_kernel(p_out, p_x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(p_x + i, mask=i < n, other=0.0)
        tl.store(p_out + i, x / tl.sum(tl.exp(x)), mask=i < n)

    @triton.jit
    def walk_kernel(p_out, p_x, n, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        for start in range(0, COLUMNS, BLOCK):
            i = tl.program_id(0).to(tl.int64) * COLUMNS + start + tl.arange(0, BLOCK)
            tl.store(p_out + i, tl.load(p_x + i, mask=i < n) * 2.0, mask=i < n)

    @triton.jit
    def steps_kernel(p_out, p_x, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(p_x + i, mask=i < n, other=0.0)
        for _ in range(STEPS):
            x = x * 0.999 + 0.001
        tl.store(p_out + i, x, mask=i < n)

    def op(name: str, kernel: Any, **constants: int) -> Callable[[Tensor], Tensor]:
        rules: dict[str, Any] = {"out": lambda x: x, "grid": lambda out, x: x.shape[0], "constants": constants}
        return genesis.triton_op(name, kernel, inputs=("x",), **rules)

    return (
        op("normalized", normalize_kernel, BLOCK=16384, num_warps=1),
        op("walked", walk_kernel, BLOCK=256, COLUMNS=1 << 20, num_warps=1),
        op("stepped", steps_kernel, BLOCK=32, STEPS=20_000, num_warps=1),
        op("stepped_wide", steps_kernel, BLOCK=1024, STEPS=20_000, num_warps=32),
    )


# --- Cases ------------------------------------------------------------------------------------------------------------


def cases(device: Device) -> Iterator[Case]:
    """At least thirty calls for a device."""
    make = partial(values, device)
    wide = 4 if has_gpu_time(device) else 1  # a GPU's time must be longer than the host's
    few, small, large = make(8), make(256, 256), make(4096 * wide, 4096)
    square, block, tall = make(2048 * wide, 2048 * wide), make(*[128 * wide] * 3), make(4096 * wide * wide, 4096)
    # Small calls: their work is nothing.
    yield Case("add of 8 numbers", "launch", lambda x: x + x, (few,))
    yield Case("matmul of 4x4", "launch", lambda x: x @ x, (make(4, 4),))
    yield Case("softmax of 2x8", "launch", lambda x: x.softmax(-1), (make(2, 8),))
    yield Case("30 adds of 8 numbers", "launch latency", partial(chain, 30), (few,))
    yield Case("exp of one number", "launch", lambda x: x.exp(), (make(1),))
    yield Case("sum of 16 numbers", "launch", lambda x: x.sum(), (make(16),))
    # The host works or waits.
    yield Case("sleep and add", "host", waits, (small,))
    yield Case("a Python sum and mul", "host", counts, (small,))
    yield Case("sleeps between adds", "host", between, (small,))
    yield Case("words split and mul", "host", parses, (small,))
    yield Case("JSON read and sub", "host", encodes, (small,))
    # Operands with gaps. A GPU's copy kernel reads and writes a transpose in tiles, at the rate of memory.
    yield Case("add of a transpose", "strides", lambda x: x.t() + x, (square,))
    yield Case("a transpose copied", "bandwidth" if wide > 1 else "strides", lambda x: x.t().contiguous(), (square,))
    yield Case("every 16th column", "strides", lambda x: x[:, ::16] * 2.0, (tall,))
    yield Case("a sum of every 32nd column", "strides", lambda x: x[:, ::32].sum(-1), (tall,))
    yield Case("a block turned around", "strides", lambda x: x.permute(2, 1, 0) * x, (block,))
    # Results that only the next op reads.
    yield Case("GELU by hand", "temporaries", gelu_by_hand, (square,))
    yield Case("eight adds", "temporaries", partial(chain, 8), (large,))
    # A CPU's exp takes as long as moving the temporaries.
    yield Case("softmax by hand", "temporaries" if wide > 1 else "temporaries compute", softmax_by_hand, (square,))
    yield Case("norm by hand", "temporaries", norm_by_hand, (square,))
    yield Case("a polynomial by hand", "temporaries", polynomial, (large,))
    # One pass over memory.
    yield Case("a large add", "bandwidth", lambda x: x + x, (large,))
    yield Case("a large copy", "bandwidth", lambda x: x.clone(), (large,))
    yield Case("a large negation", "bandwidth", lambda x: -x, (large,))
    yield Case("a large product by 2", "bandwidth", lambda x: x * 2.0, (large,))
    yield from (gpu_cases if wide > 1 else cpu_cases)(device, make, square)


def cpu_cases(device: Device, make: Callable[..., Tensor], square: Tensor) -> Iterator[Case]:
    yield Case("matmul of 1024", "compute", lambda x: x @ x, (make(1024, 1024),))
    yield Case("linear of 2048x896", "compute", functional.linear, (make(2048, 896), make(896, 896)))
    yield Case("GELU, one op", "temporaries", functional.gelu, (square,))
    yield Case("a power", "compute", lambda x: x**2.37, (make(1024, 1024),))
    yield Case("a power in half of the rows", "compute", lambda x: x**1.7, (make(512, 1024),))
    yield Case("a random gather", "cache", gathers(device))


def gpu_cases(device: Device, make: Callable[..., Tensor], square: Tensor) -> Iterator[Case]:
    sms = genesis.cuda.get_device_properties(device).multi_processor_count
    spilling, walking, stepping, stepping_wide = kernels()
    yield Case("matmul of 4096", "compute", lambda x: x @ x, (make(4096, 4096),))
    yield Case("an add that fits into L2", "cache launch", lambda x: x + x, (make(2048, 1536),))
    # Places that stay empty: in tiles, in the last wave, on most of the SMs.
    yield Case("matmul of 129 rows", "occupancy", lambda x, w: x @ w, (make(129, 8192), make(8192, 4096)))
    yield Case("a last wave of 4 programs", "occupancy", stepping_wide, (make(2 * sms + 4, 1024),))
    yield Case("8 long rows", "occupancy", walking, (make(8, 1 << 20),))
    yield Case("20,000 steps in a warp", "occupancy latency", stepping, (make(4 * sms, 32),))
    yield Case("softmax of one row", "occupancy latency", lambda x: x.softmax(-1), (make(1, 1 << 20),))
    yield Case(
        "norm of 16 rows",
        "occupancy latency launch",
        lambda x: functional.rms_norm(x, (x.shape[-1],)),
        (make(16, 1 << 16),),
    )
    yield Case("a kernel that spills", "spills", spilling, (make(4096, 16384),))


def found_in(case: Case, device: Device, plan: Plan) -> Finding | None:
    given = case.function
    subject = given if isinstance(given, Subject) else of_function(given, case.inputs, device)
    with no_grad():
        return examine(subject, limits_of(device, float32), plan)


def main() -> int:
    """Examine every case and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if genesis.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    device = CPU if given.device == "cpu" else Device("cuda", 0)
    right = tried = 0
    for case in cases(device):
        if given.only in case.name:
            found = found_in(case, device, Plan(seconds=1.0))
            issue, evidence = ("nothing", "") if found is None else (found.issue, found.evidence)
            is_right = issue in case.expected.split()
            tried, right = tried + 1, right + is_right
            mark = "right" if is_right else "WRONG"
            print(f"{mark}  {case.name:28} {issue:12} {case.expected.replace(' ', ' or '):24} {evidence}", flush=True)
    print(f"{right} of {tried} named rightly")
    return 0 if right >= SHARE * tried else 1


if __name__ == "__main__":
    sys.exit(main())

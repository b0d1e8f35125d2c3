"""Attention's kernels for Hopper, compiled without a GPU to see whether wgmmas are serialized:

    python -m tests.kernels.waits [--sample K]

wgmmas run asynchronously to their warp. Where the assembler finds that registers of an accumulator are touched in
flight, it serializes all wgmmas of the kernel, and says so only in a note. A few lines around a loop can cause that;
the kernel is then correct and slow. The exit code is 1 if a kernel has the note. --sample takes the K-th
size of heads, and half of the forms of each kernel: the K-th half, 0 or 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import compile
from genesis.dtypes import bfloat16, float32, int64
from genesis.kernels.attention import attention
from tests.kernels.assembling import collected
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import Hopper

__all__ = ["launched", "notes", "waiting"]

NOTE = "wgmma.mma_async instructions are serialized"
CUDA = Device("cuda", 0)
# Sequences and tokens at which one program of dK/dV sums over a group, and at which several share it.
SIZES = ((16, 2048), (4, 4096))
HEADS = (64, 128, 256)


def launched(size: int) -> None:
    """Forward and backward of heads of `size`, as in training and with less."""

    def made(*shape: int, dtype: Any = bfloat16) -> Array:
        return empty(shape, dtype, CUDA)

    forms = [*itertools.product(SIZES, (None, ()), (False, True)), *itertools.product(SIZES, ((3,),), (True,))]
    for (batches, tokens), bounds, has_rope in forms:
        q, k = made(batches, tokens, 14, size), made(batches, tokens, 2, size)
        lse = made(batches, 14, tokens, dtype=float32)
        starts = None if bounds is None else made(batches, tokens, *bounds, dtype=int64)
        tables = tuple(made(tokens, size // 2, dtype=float32) for _ in range(2)) if has_rope else ()
        attention.forward_into(q, lse, q, k, k, starts, 0.1, True, 0)
        attention.backward_into((q, k, k), q, q, k, k, q, lse, starts, 0.1, True, 0, tables=tables)


def waiting(size: int, half: int | None = None) -> Iterator[tuple[str, bool]]:
    """Each kernel with wgmmas for heads of `size`, and whether they are serialized; of its forms all or one half."""
    with collecting(Hopper) as found:
        launched(size)
    forms: Counter[str] = Counter()
    for kernel, signature in found.values():
        form = forms[kernel.__name__]
        forms[kernel.__name__] += 1
        if half not in (None, form.bit_count() % 2):  # by all digits, each of which is one thing that forms differ in
            continue
        with collected() as texts:  # the assembler comes once, below, where it may say something
            compile.compiled(kernel, signature, (9, 0))
        yield from ((kernel.__name__, NOTE in notes(ptx)) for ptx in texts if "wgmma.mma_async" in ptx)


def notes(ptx: str) -> str:
    """What the assembler says about it."""
    from triton.backends.nvidia.compiler import get_ptxas

    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert "registers" in done.stdout, done.stdout
    return done.stdout


def main() -> int:
    """Look at heads of each of the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, choices=(0, 1), metavar="K")
    sample = parser.parse_args().sample
    sizes = HEADS if sample is None else HEADS[sample : sample + 1]
    found = [(size, name, waits) for size in sizes for name, waits in waiting(size, sample)]
    late = [f"{name}, heads of {size}: its wgmmas are serialized" for size, name, waits in found if waits]
    print(*late, f"{len(found)} kernels of attention, {len(late)} of them with serialized wgmmas", sep="\n")
    return int(not found or bool(late))


if __name__ == "__main__":
    sys.exit(main())

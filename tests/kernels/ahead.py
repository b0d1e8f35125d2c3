"""Compile the kernels of the op suite ahead of time, without a GPU:

    python -m tests.kernels.ahead [--arch 80 90 100] [--ops softmax reduce] [--dtypes float32 …] [--all]
        [--sample K] [--jobs 2]

The signatures are those that the suite's samples launch on a GPU of the architecture. Of them a part is compiled that
holds, for every kernel, each combination of its parameters' types, each combination of the functions and types among
its constants, and each value of its flags. --all takes all, with every pattern of strides and alignment. --dtypes
keeps the samples of these dtypes (and those of ops that take no others). --sample K is for a check of every day: it
has the K-th of 32 parts of the features and half of the kernels (K is even or odd), and compiles what architectures
share for one of them, in rotation from the K-th. The exit code is 1 where one fails, or takes more shared memory than
its architecture gives a block.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import genesis.ops
import genesis.tensor
from genesis.autograd.modes import exact, no_grad
from genesis.backend.cuda.compile import Signature, compile_kernel
from genesis.backend.cuda.driver import Properties
from genesis.backend.cuda.simulated import SHARED, HostDriver
from genesis.errors import DeviceError, UsageError
from genesis.op import registry
from tests.kernels.assembling import TOGETHER, collected, refused
from tests.kernels.collecting import collecting
from tests.kernels.covering import PARTS, Kernels, covering, rotated
from tests.kernels.reading import read_once
from tests.ops import conformance
from tests.ops.devices import CUDA, using
from tests.ops.samples import all_rows
from tests.ops.sampling import Rows

__all__ = ["failures", "main", "needed"]


class Watched(HostDriver):
    """A device of the architecture `arch`, which notes whether anybody has asked what it is."""

    arch = 90
    asked = False

    @property
    def properties(self) -> Properties:
        """What it is."""
        Watched.asked = True
        return self._properties._replace(capability=divmod(self.arch, 10), shared_memory=SHARED[self.arch])

    @properties.setter
    def properties(self, value: Properties) -> None:
        self._properties = value


def needed(
    ops: list[str], dtypes: list[str], without: list[str], arches: Sequence[int], few: bool = False
) -> dict[int, Kernels]:
    """The kernels and signatures that the samples of these ops (or families; all if none is named) launch there.

    Samples that launch without asking what the device is launch the same on every architecture.

    Args:
        few: leaves out what hardly adds a feature: most samples of layouts other than contiguous. Of 2,250 features of
            112 kernels 11 are left out, and no kernel.
    """
    for module in pkgutil.iter_modules(genesis.ops.__path__):
        importlib.import_module(f"genesis.ops.{module.name}")
    chosen = [v for row in all_rows() for v in _samples(row, ops, set(dtypes), without, few)]
    found: dict[int, dict[Any, tuple[Any, Signature]]] = {}
    common: dict[Any, tuple[Any, Signature]] = {}
    for arch in arches:
        own, again = found.setdefault(arch, {}), []
        with collecting(type("Device", (Watched,), {"arch": arch})) as launched, using(CUDA):
            for v in chosen:
                launched.clear()
                Watched.asked = False
                _launch(v)
                if v.op.autocast == "low_precision":  # matmuls of few rows have kernels of their own
                    with no_grad():
                        _launch(v)
                if arch == 90 and (v.dtype, v.layout) == ("bfloat16", "contiguous"):
                    with exact(), contextlib.suppress(UsageError):  # not all ops are for exact runs
                        _launch(v)
                (own if Watched.asked else common).update(launched)
                if Watched.asked:
                    again.append(v)
        chosen = again
    return {arch: list((common | own).values()) for arch, own in found.items()}


def _samples(
    row: Rows, ops: list[str], dtypes: set[str], without: list[str], few: bool
) -> Iterator[conformance.Variant]:
    """The checks of values of a row that are wanted."""
    op = registry[row.op]
    if op.view is not None or (ops and op.name not in ops and op.family not in ops) or op.family in without:
        return
    wanted = dtypes & {*row.dtypes, *row.int_dtypes}
    seen: Counter[tuple[str, str]] = Counter()
    for v in conformance.variants(row, op):
        if v.check == "value" and (not wanted or v.dtype in wanted):
            seen[v.dtype, v.layout] += 1
            most = {"contiguous": math.inf, "transposed": 4}.get(v.layout, 1)
            if not few or seen[v.dtype, v.layout] <= most:
                yield v


def _launch(v: conformance.Variant) -> None:
    _, inputs = conformance.prepare(v)
    try:
        conformance.outputs(v.op, inputs, v.case.attrs)
    except (ValueError, IndexError, MemoryError, OverflowError):
        pass  # results that were never computed make no sense as sizes
    except DeviceError:
        pass  # an op that is not for this architecture


# --- Compiling --------------------------------------------------------------------------------------------------------


def failures(kernels: Kernels, arch: int) -> list[str]:
    """What does not compile, or cannot be launched once compiled, in words."""
    parts = [kernels[at : at + TOGETHER] for at in range(0, len(kernels), TOGETHER)]
    return [failure for part in parts for failure in _failures_of_few(part, arch)]


def _failures_of_few(kernels: Kernels, arch: int) -> Iterator[str]:
    """The same, of as many kernels as are assembled at once."""
    made = []
    with collected() as texts:
        for kernel, signature in kernels:
            what = f"sm_{arch} {kernel.fn.__name__} {signature}"
            try:
                shared = compile_kernel(kernel, signature, divmod(arch, 10)).shared
            except Exception as error:  # whatever a compiler raises is a finding
                yield f"{what}: {str(error.__cause__ or error)[-500:]}"
                continue
            if len(texts) > len(made):  # else Triton had compiled the same already
                made.append(what)
            if shared > SHARED[arch]:
                yield f"{what}: {shared} bytes of shared memory, and a block has {SHARED[arch]}"
    yield from (f"{made[i]}: {said}" for i, said in refused(texts, arch).items())


_kernels: dict[int, Kernels] = {}  # for the processes that are forked: kernels do not travel between processes


def _part(job: tuple[int, int]) -> list[str]:
    """The failures among every `step`-th kernel, on all architectures."""
    first, step = job
    numbers: dict[str, int] = {}

    def is_mine(kernel: tuple[Any, Signature]) -> bool:
        return numbers.setdefault(repr(kernel), len(numbers)) % step == first

    with read_once():
        return [failure for arch, some in _kernels.items() for failure in failures(list(filter(is_mine, some)), arch)]


@contextmanager
def _scratch(many: bool) -> Iterator[None]:
    """Triton's files go to a folder, and with it; to one in memory where there is one and they are not too many."""
    memory = "/dev/shm" if not many and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield


def main() -> int:
    """Compile; print what failed and how many were compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=SHARED)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[], help="families to leave out")
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--sample", type=int, choices=range(PARTS), metavar="K")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    import triton

    few = options.sample is not None
    found = needed(options.ops, options.dtypes, options.without, options.arch, few)
    _kernels.update({a: kernels if options.all else covering(kernels, options.sample) for a, kernels in found.items()})
    if few:
        _kernels.update(rotated(_kernels, options.sample))
    jobs = [(part, options.jobs) for part in range(options.jobs)]
    with _scratch(options.all):
        if options.jobs == 1:
            failed = _part(jobs[0])
        else:
            gc.freeze()  # what stays is not looked through again and again
            with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
                failed = [failure for some in pool.map(_part, jobs) for failure in some]
            gc.unfreeze()
    print("\n".join(failed))
    arches = ",".join(map(str, options.arch))
    compiled, launched = (sum(map(len, some.values())) for some in (_kernels, found))
    print(f"Triton {triton.__version__}: {compiled} of {launched} signatures for sm_{arches}, {len(failed)} failures")
    return 1 if failed or not all(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

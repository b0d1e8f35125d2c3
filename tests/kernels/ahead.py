"""Compile the kernels of the op suite ahead of time, without a GPU:

    python -m tests.kernels.ahead [--arch 80 90 100] [--ops softmax reduce] [--dtypes float32 …] [--all] [--jobs 2]

The signatures are those that the suite's samples launch on a GPU of the architecture. Of them a part is compiled that
holds, for every kernel, each combination of its parameters' types, each combination of the functions and types among
its constants, and each value of its flags. --all takes all, with every pattern of strides and alignment. --dtypes
keeps the samples of these dtypes (and those of ops that take no others). The exit code is 1 where one fails, or takes
more shared memory than its architecture gives a block.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import genesis.ops
import genesis.tensor
from genesis.backend.cuda.compile import compile_kernel
from genesis.op import registry
from tests.kernels.covering import Kernels, covering
from tests.kernels.dry import DryDriver, collecting
from tests.ops import conformance
from tests.ops.devices import CUDA, using
from tests.ops.samples import all_rows

__all__ = ["SHARED", "failures", "main", "needed"]

# Bytes of shared memory that a block may take, by architecture: CUDA's programming guide, "Technical specifications".
SHARED = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def device_of(arch: int) -> type[DryDriver]:
    """A device of that architecture."""

    class Device(DryDriver):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.properties = self.properties._replace(capability=divmod(arch, 10), shared_memory=SHARED[arch])

    return Device


def needed(ops: list[str], dtypes: list[str], without: list[str], arch: int) -> Kernels:
    """The kernels and signatures that the samples of these ops (or families; all if none is named) launch there."""
    for module in pkgutil.iter_modules(genesis.ops.__path__):
        importlib.import_module(f"genesis.ops.{module.name}")
    with collecting(device_of(arch)) as found, using(CUDA):
        for row in all_rows():
            op = registry[row.op]
            if op.view is not None or (ops and op.name not in ops and op.family not in ops) or op.family in without:
                continue
            wanted = set(dtypes) & {*row.dtypes, *row.int_dtypes}
            for v in conformance.variants(row, op):
                if v.check == "value" and (not wanted or v.dtype in wanted):
                    _launch(v)
    return list(found.values())


def _launch(v: conformance.Variant) -> None:
    _, inputs = conformance.prepare(v)
    try:
        conformance.outputs(v.op, inputs, v.case.attrs)
    except (ValueError, IndexError, MemoryError, OverflowError):
        pass  # results that were never computed make no sense as sizes


# --- Compiling --------------------------------------------------------------------------------------------------------


def failures(kernels: Kernels, arch: int) -> list[str]:
    """What does not compile, or cannot be launched once compiled, in words."""
    found = []
    for kernel, signature in kernels:
        what = f"sm_{arch} {kernel.fn.__name__} {signature}"
        try:
            made = compile_kernel(kernel, signature, divmod(arch, 10))
        except Exception as error:  # whatever a compiler raises is a finding
            found.append(f"{what}: {str(error.__cause__ or error)[-500:]}")
            continue
        if made.shared > SHARED[arch]:
            found.append(f"{what}: {made.shared} bytes of shared memory, and a block has {SHARED[arch]}")
    return found


_kernels: list[tuple[int, Kernels]] = []  # for the processes that are forked: kernels do not travel between processes


def _part(job: tuple[int, int]) -> list[str]:
    first, step = job
    return [failure for arch, kernels in _kernels for failure in failures(kernels[first::step], arch)]


def main() -> int:
    """Compile; print what failed and how many were compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=SHARED)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[], help="families to leave out")
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    import triton

    found = [(arch, needed(options.ops, options.dtypes, options.without, arch)) for arch in options.arch]
    _kernels[:] = found if options.all else [(arch, covering(kernels)) for arch, kernels in found]
    jobs = [(part, options.jobs) for part in range(options.jobs)]
    if options.jobs == 1:
        failed = _part(jobs[0])
    else:
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
            failed = [failure for some in pool.map(_part, jobs) for failure in some]
    print("\n".join(failed))
    arches = ",".join(map(str, options.arch))
    compiled, launched = (sum(len(kernels) for _, kernels in some) for some in (_kernels, found))
    print(f"Triton {triton.__version__}: {compiled} of {launched} signatures for sm_{arches}, {len(failed)} failures")
    return 1 if failed or not all(kernels for _, kernels in found) else 0


if __name__ == "__main__":
    sys.exit(main())

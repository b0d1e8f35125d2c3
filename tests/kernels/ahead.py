"""Compile the kernels of the op suite ahead of time, without a GPU:

    python -m tests.kernels.ahead [--arch 80 90 100] [--ops softmax reduce] [--dtypes float32 …] [--all] [--jobs 2]

The signatures are those that the suite's samples launch. Of them a part is compiled that holds, for every kernel, each
combination of its parameters' types, each combination of the functions and types among its constants, and each value of
its flags. --all takes all, with every pattern of strides and alignment. --dtypes keeps the samples of these dtypes
(and those of ops that take no others). The exit code is 1 where one fails.
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
from tests.kernels.dry import collecting
from tests.ops import conformance
from tests.ops.devices import CUDA, using
from tests.ops.samples import all_rows

__all__ = ["failures", "main", "needed"]


def needed(ops: list[str], dtypes: list[str], without: list[str]) -> Kernels:
    """The kernels and signatures that the samples of these ops (or families; all if none is named) launch."""
    for module in pkgutil.iter_modules(genesis.ops.__path__):
        importlib.import_module(f"genesis.ops.{module.name}")
    with collecting() as found, using(CUDA):
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


def failures(kernels: Kernels, arches: list[int]) -> list[str]:
    """What does not compile, in words."""
    found = []
    for kernel, signature in kernels:
        for arch in arches:
            try:
                compile_kernel(kernel, signature, divmod(arch, 10))
            except Exception as error:  # whatever a compiler raises is a finding
                cause = error.__cause__ or error
                found.append(f"sm_{arch} {kernel.fn.__name__} {signature}: {str(cause)[-500:]}")
    return found


_kernels: Kernels = []  # for the processes that are forked: kernels do not travel between processes


def _part(job: tuple[int, int, list[int]]) -> list[str]:
    first, step, arches = job
    return failures(_kernels[first::step], arches)


def main() -> int:
    """Compile; print what failed and how many were compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[], help="families to leave out")
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    import triton

    found = needed(options.ops, options.dtypes, options.without)
    _kernels[:] = found if options.all else covering(found)
    jobs = [(part, options.jobs, options.arch) for part in range(options.jobs)]
    if options.jobs == 1:
        failed = _part(jobs[0])
    else:
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
            failed = [failure for some in pool.map(_part, jobs) for failure in some]
    print("\n".join(failed))
    arches = ",".join(map(str, options.arch))
    print(
        f"Triton {triton.__version__}: {len(_kernels)} of {len(found)} signatures for sm_{arches}, "
        f"{len(failed)} failures"
    )
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())

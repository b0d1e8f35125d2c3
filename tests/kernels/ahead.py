"""Compile the kernels of the op suite ahead of time, without a GPU:

    python -m tests.kernels.ahead [--arch 80 90 100] [--ops softmax reduce] [--dtypes float32 …] [--all] [--jobs 2]

Every kernel is compiled in every combination of dtypes and constant functions that the suite's samples launch; --all
compiles every signature besides, with each pattern of strides and alignment; --dtypes keeps the samples of these
dtypes (and those of ops that take no others). The exit code is 1 where one fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import genesis.ops
import genesis.tensor
from genesis.backend.cuda.compile import compile_kernel
from genesis.backend.cuda.signature import Signature
from genesis.op import registry
from tests.kernels.dry import collecting
from tests.ops import conformance
from tests.ops.devices import CUDA, using
from tests.ops.samples import all_rows

__all__ = ["failures", "main", "needed"]


def needed(ops: list[str], every: bool, dtypes: list[str], without: list[str]) -> list[tuple[Any, Signature]]:
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
    if every:
        return list(found.values())
    by_dtypes: dict[Any, tuple[Any, Signature]] = {}
    for kernel, signature in found.values():
        by_dtypes.setdefault((kernel, *_kinds(signature)), (kernel, signature))
    return list(by_dtypes.values())


def _launch(v: conformance.Variant) -> None:
    _, inputs = conformance.prepare(v)
    try:
        conformance.outputs(v.op, inputs, v.case.attrs)
    except (ValueError, IndexError, MemoryError, OverflowError):
        pass  # results that were never computed make no sense as sizes


def _kinds(signature: Signature) -> tuple[Any, ...]:
    """What of a signature is not mere layout: pointer and number types, functions and types among the constants."""
    types = tuple(t.partition(":")[0] for t in signature.types if isinstance(t, str) and t[0] in "*ft")
    functions = tuple((k, repr(c)) for k, c in signature.constants if not isinstance(c, (bool, int)))
    flags = tuple((k, c) for k, c in signature.constants if isinstance(c, bool))
    return types, functions, flags


def failures(kernels: list[tuple[Any, Signature]], arches: list[int]) -> list[str]:
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


def _part(job: tuple[int, int, argparse.Namespace]) -> list[str]:
    """Compile one part of the kernels, which are found again: they do not travel between processes."""
    part, parts, options = job
    kernels = needed(options.ops, options.all, options.dtypes, options.without)
    return failures(kernels[part::parts], options.arch)


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

    arches = ",".join(map(str, options.arch))
    count = len(needed(options.ops, options.all, options.dtypes, options.without))
    jobs = [(part, options.jobs, options) for part in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs) as pool:
        failed = [failure for found in pool.map(_part, jobs) for failure in found]
    print("\n".join(failed))
    print(f"Triton {triton.__version__}: {count} kernels for sm_{arches}, {len(failed)} failures")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every op of the registry on CUDA: on a GPU all checks of the op suite, in Triton's interpreter a part of them.

The interpreter runs a kernel's programs one after another in Python. With --full each op is checked there in every
dtype, and in float32 (or the first dtype it takes) in every memory layout and with out= and over its inputs; gradients
once. Every day it is one other dtype and one other layout.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import zlib
from collections import Counter
from functools import cache
from typing import Any

import pytest

import genesis.ops
import genesis.tensor
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl_of
from genesis.op import registry
from genesis.ops.fp8 import CAPABILITY
from tests.ops import conformance
from tests.ops.conformance import Variant, main_dtype
from tests.ops.devices import CUDA, using
from tests.ops.layouts import LAYOUTS
from tests.ops.samples import all_rows

for module in pkgutil.iter_modules(genesis.ops.__path__):
    importlib.import_module(f"genesis.ops.{module.name}")
OPS = {name: op for name, op in registry.items() if op.view is None}

SUITE = os.environ.get("OP_SUITE")  # set by tests/conftest.py
CHECKS = ("value", "out", "alias", "gradient")


def test_an_op_is_found_by_its_family() -> None:
    """Its implementation is in the file that a first use loads, not in one that another op happens to have loaded.

    That of an op with a formula is generated.
    """
    for name, op in OPS.items():
        found: Any = cuda_impl_of(op)
        found = getattr(found, "func", found)  # a partial's
        assert found.__module__.rpartition(".")[2] == (op.family if op.formula is None else "elementwise"), name


def is_of_fp8(v: Variant) -> bool:
    """Whether a check makes 8-bit floats."""
    return v.op.family == "fp8" or bool(v.case.attrs.get("fp8"))


def lacks_fp8() -> bool:
    """Whether the device has none."""
    return backend_of(CUDA).driver.properties.capability < CAPABILITY


def is_of_every_day(v: Variant) -> bool:
    """A gradient, or in the main dtype and another one, contiguous and in another layout: they differ between ops."""
    number, main = zlib.crc32(v.op.name.encode()), main_dtype(v)
    others = [dtype for dtype in (*v.row.dtypes, *v.row.int_dtypes) if dtype != main] or [main]
    layouts = ("contiguous", LAYOUTS[1 + number % (len(LAYOUTS) - 1)])
    if v.check in ("out", "alias") and v.op.formula is not None and number % 8:  # one kernel serves all these ops
        return False
    is_of_dtype = v.dtype in (main, others[number % len(others)]) or not any(map(conformance.is_float, v.case.inputs))
    return v.check == "gradient" or (is_of_dtype and v.layout in layouts)


def chosen(variants: list[Variant]) -> list[Variant]:
    """The checks of one row that run here: threads are the CPU's matter, errors are found before any device is used."""
    wanted = [v for v in variants if v.check in CHECKS and not (is_of_fp8(v) and lacks_fp8())]
    if SUITE is None:
        return wanted
    seen: Counter[tuple[str, str, str, bool]] = Counter()
    kept = []
    for v in wanted:
        if SUITE == "fewest" and not is_of_every_day(v):
            continue
        main = main_dtype(v)
        if v.dtype != main and v.check != "gradient" and (v.check != "value" or v.layout != "contiguous"):
            continue
        kind = (v.check, v.dtype, v.layout, v.number < 0)  # extremes count by themselves
        seen[kind] += 1
        if seen[kind] <= (2 if v.dtype == main and v.check == "value" and v.layout == "contiguous" else 1):
            kept.append(v)
    return kept


@cache
def collected() -> dict[tuple[str, str], list[Variant]]:
    """The checks by op and kind."""
    found: dict[tuple[str, str], list[Variant]] = {}
    with using(CUDA):
        for row in all_rows():
            if row.op not in OPS:
                continue
            for v in chosen(list(conformance.variants(row, OPS[row.op]))):
                found.setdefault((v.op.name, "gradient" if v.check == "gradient" else v.dtype), []).append(v)
    return found


KEYS = [pytest.param(key, marks=[pytest.mark.full] * (SUITE == "few")) for key in sorted(collected())]


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_op_conforms_on_cuda(key: tuple[str, str]) -> None:
    failures = []
    with using(CUDA):
        for variant in collected()[key]:
            try:
                conformance.run(variant)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, f"{len(failures)} checks fail:\n" + "\n".join(failures[:10])


def test_every_op_is_covered() -> None:
    covered = {name for name, _ in collected()}
    assert covered == {name for name, op in OPS.items() if not (op.family == "fp8" and lacks_fp8())}
    gradients = {name for name, kind in collected() if kind == "gradient"}
    assert gradients == {name for name, op in OPS.items() if op.vjp is not None}


def test_a_wrong_implementation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from genesis.backend.cuda.dispatch import cuda_impl_named, cuda_impls

    right = cuda_impl_named("exp", "elementwise")

    def wrong(out: genesis.array.Array, x: genesis.array.Array) -> None:
        right(out, x)
        registry["add"](out, 1e-3, out=out)

    backend = backend_of(CUDA)
    monkeypatch.setitem(cuda_impls, "exp", wrong)
    monkeypatch.setattr(backend, "_calls", {})
    monkeypatch.setattr(backend, "_calls_into", {})
    cuda_impl_named.cache_clear()
    first = collected()["exp", "float32"][0]
    try:
        with using(CUDA), pytest.raises(AssertionError, match="exp: value of case"):
            conformance.run(first)
    finally:
        cuda_impl_named.cache_clear()

"""Every registered op against its samples: values, memory layouts, out=, aliasing, threads, gradients, errors.

Contiguous values in an op's main dtype, gradients of small samples and errors are checked for every sample. Each other
combination of check, dtype and layout has one sample here; `--full` checks the rest.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections import Counter
from functools import cache

import pytest

import genesis.ops
import genesis.tensor
from genesis.op import registry
from tests.ops import conformance
from tests.ops.conformance import Variant, main_dtype
from tests.ops.samples import all_rows
from tests.sampling import some_full

for module in pkgutil.iter_modules(genesis.ops.__path__):  # each registers its ops
    importlib.import_module(f"genesis.ops.{module.name}")
OPS = dict(registry)  # as the product has it: tests elsewhere may register ops of their own
ROWS = all_rows()


SLICES = 16


@cache
def collected() -> tuple[dict[tuple[str, str], list[Variant]], list[Variant]]:
    """The checks of every day by (op, check and dtype), and the rest."""
    found: dict[tuple[str, str], list[Variant]] = {}
    rest = []
    seen: Counter[tuple[str, str, str, str, bool]] = Counter()
    for row in ROWS:
        for v in conformance.variants(row, OPS[row.op]) if row.op in OPS else ():
            group = v.check if v.check in ("gradient", "error") else v.dtype
            if v.check == "gradient" and v.number and (is_large(v) or v.layout != "contiguous"):
                rest.append(v)
                continue
            kind = (v.op.name, v.check, v.dtype, v.layout, v.number < 0)  # extremes count by themselves
            seen[kind] += 1
            is_main = (v.check, v.dtype, v.layout) == ("value", main_dtype(v), "contiguous")
            if group == v.check or is_main or seen[kind] <= 1:
                found.setdefault((v.op.name, group), []).append(v)
            else:
                rest.append(v)
    return found, rest


def is_large(v: Variant) -> bool:
    """Whether a gradient is checked in many places, each of which takes two calls."""
    return sum(x.size for x in v.case.inputs if conformance.is_float(x)) > 100


def is_of_every_day(key: tuple[str, str]) -> bool:
    """Whether a key has gradients, errors, float32 or a kind of integers; of other floats, every third op has them."""
    name, group = key
    return group not in ("float64", "float16", "bfloat16") or zlib.crc32(name.encode()) % 3 == len(group) % 3


KEYS = sorted(collected()[0])


@pytest.mark.parametrize("key", some_full(KEYS, [*filter(is_of_every_day, KEYS)]), ids="-".join)
def test_op_conforms(key: tuple[str, str]) -> None:
    conform(collected()[0][key])


@pytest.mark.full
@pytest.mark.parametrize("part", range(SLICES))
def test_ops_conform_in_all_cases(part: int) -> None:
    conform(collected()[1][part::SLICES])


def conform(variants: list[Variant]) -> None:
    failures = []
    for variant in variants:
        try:
            conformance.run(variant)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} checks fail:\n" + "\n".join(failures[:10])


def test_every_op_has_samples() -> None:
    found = conformance.problems(OPS, ROWS)
    assert not found, "\n".join(found)


def test_there_are_enough_cases() -> None:
    found, rest = collected()
    variants = [v for group in found.values() for v in group]
    assert len(variants) >= 3000 and len(rest) > len(variants)
    assert len({str(v) for v in variants}) >= 3000, "most cases differ from each other in more than their values"

"""Every registered op against its samples: values, memory layouts, out=, aliasing, threads, gradients, errors."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import pytest

import genesis.ops
import genesis.tensor
from genesis.op import registry
from tests.ops import conformance
from tests.ops.conformance import Variant
from tests.ops.samples import all_rows

for module in pkgutil.iter_modules(genesis.ops.__path__):  # each registers its ops
    importlib.import_module(f"genesis.ops.{module.name}")
OPS = dict(registry)  # as the product has it: tests elsewhere may register ops of their own
ROWS = all_rows()


@cache
def collected() -> dict[tuple[str, str], list[Variant]]:
    """All checks by (op, check and dtype)."""
    found: dict[tuple[str, str], list[Variant]] = {}
    for row in ROWS:
        if row.op in OPS:
            for v in conformance.variants(row, OPS[row.op]):
                group = v.check if v.check in ("gradient", "error") else v.dtype
                found.setdefault((v.op.name, group), []).append(v)
    return found


@pytest.mark.parametrize("key", sorted(collected()), ids="-".join)
def test_op_conforms(key: tuple[str, str]) -> None:
    failures = []
    for variant in collected()[key]:
        try:
            conformance.run(variant)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} checks fail:\n" + "\n".join(failures[:10])


def test_every_op_has_samples() -> None:
    found = conformance.problems(OPS, ROWS)
    assert not found, "\n".join(found)


def test_there_are_enough_cases() -> None:
    variants = [v for group in collected().values() for v in group]
    assert len(variants) >= 3000
    assert len({str(v) for v in variants}) >= 3000, "most cases differ from each other in more than their values"

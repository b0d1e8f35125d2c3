"""Element types: names, sizes, categories; result types are in test_promotion.py."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genesis import dtypes
from genesis.dtypes import ALL, as_dtype
from genesis.errors import DTypeError


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_every_way_to_name_a_dtype(dtype: dtypes.DType) -> None:
    ways: list[Any] = [dtype, dtype.name, f"genesis.{dtype.name}", f"torch.{dtype.name}", dtype.numpy, dtype.numpy.type]
    assert all(as_dtype(way) is dtype for way in ways)
    assert str(dtype) == f"genesis.{dtype.name}" and dtype.itemsize == dtype.numpy.itemsize
    assert dtype.is_floating_point == ("float" in dtype.name)
    assert copy.deepcopy(dtype) is dtype and copy.copy(dtype) is dtype


def test_python_types_and_torchs_short_names() -> None:
    assert [as_dtype(t) for t in (float, int, bool)] == [dtypes.float64, dtypes.int64, dtypes.bool_]
    names = ("double", "float", "half", "long", "int")
    wanted = [dtypes.float64, dtypes.float32, dtypes.float16, dtypes.int64, dtypes.int32]
    assert [as_dtype(n) for n in names] == wanted
    assert as_dtype(ml_dtypes.bfloat16) is dtypes.bfloat16


@pytest.mark.parametrize(
    "wrong", ["float8", "", None, complex, np.complex64, "f4 ", 5, object(), np.dtype([("a", "f4")])]
)
def test_what_is_no_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(DTypeError, match="is not a dtype Genesis has") as caught:
        as_dtype(wrong)
    assert "bfloat16" in caught.value.next and isinstance(caught.value, TypeError)

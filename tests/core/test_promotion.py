"""Result dtypes against torch's, from a table made with torch (fixtures/promotion.json says how to read it)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import genesis
from genesis.array import Array, Spec, empty
from genesis.dtypes import DType, as_dtype, promote_types, result_type
from genesis.errors import DTypeError, NumericError
from genesis.op import registry
from genesis.ops import elementwise

TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "promotion.json").read_text())
DTYPES = {letter: as_dtype(name) for letter, name in TABLE["letters"].items()}
LETTERS: dict[DType, str] = {dtype: letter for letter, dtype in DTYPES.items()}
ORDER: str = TABLE["order"]
NUMBERS: dict[str, Any] = {"2": 2, "1.5": 1.5, "True": True}
MORE_THAN_TORCH = {"maximum", "minimum", "logical_and", "logical_or", "logical_xor"}  # they take numbers here
LESS_THAN_TORCH = {("pow", "True")}  # a power of a bool is refused whether the exponent is a tensor or a number


def _tensor(letter: str, dims: int = 1) -> Array:
    return empty((2,) * dims, DTYPES[letter])


def _infer(name: str, *inputs: Any) -> str:
    """The letter of the result's dtype, x where the op refuses."""
    if name == "where":
        inputs = (empty((2,), as_dtype("bool")), *inputs)
    elif name == "lerp":
        inputs = (*inputs, 0.5)
    elif name == "clamp_min":
        name = "clamp"
    try:
        spec = registry[name].infer(*inputs)
    except DTypeError:
        return "x"
    assert isinstance(spec, Spec)
    return LETTERS[spec.dtype]


def test_the_table_has_every_elementwise_op_with_a_dtype_rule() -> None:
    fixed = {"cast", "fill", "overwrite", "copy", "clamp"}  # their dtype is an operand's or an attribute
    mine = {name for name, op in registry.items() if op.family == "elementwise" and op.elementwise} - fixed
    assert mine - set(TABLE["unary"]) - set(TABLE["binary"]) == set()
    assert elementwise.add is registry["add"]


@pytest.mark.parametrize("name", sorted(TABLE["unary"]))
def test_unary(name: str) -> None:
    assert "".join(_infer(name, _tensor(letter)) for letter in ORDER) == TABLE["unary"][name]


@pytest.mark.parametrize("name", sorted(TABLE["binary"]))
def test_binary(name: str) -> None:
    got = {a: "".join(_infer(name, _tensor(a), _tensor(b)) for b in ORDER) for a in ORDER}
    assert got == TABLE["binary"][name]


@pytest.mark.parametrize("name", sorted(set(TABLE["scalar"]) - MORE_THAN_TORCH - {"lerp"}))  # torch: tensors only
@pytest.mark.parametrize("number", sorted(NUMBERS))
def test_with_a_number(name: str, number: str) -> None:
    got = "".join(_infer(name, _tensor(letter), NUMBERS[number]) for letter in ORDER)
    want = TABLE["scalar"][name][number]
    if (name, number) in LESS_THAN_TORCH:
        assert want[-1] == "?" and got == want[:-1] + "x"
    else:
        assert got == want


@pytest.mark.parametrize("name", sorted(MORE_THAN_TORCH))
def test_numbers_where_torch_takes_none(name: str) -> None:
    assert set(TABLE["scalar"][name]["2"]) == {"x"}
    logical = name.startswith("logical")
    assert _infer(name, _tensor("h"), 2.0) == ("?" if logical else "h")
    assert _infer(name, _tensor("i"), 2.0) == ("?" if logical else "f")


@pytest.mark.parametrize("kind", ["00", "01", "10", "11"])
def test_result_type_of_tensors(kind: str) -> None:
    for a, row in TABLE["result_type"][kind].items():
        got = [result_type((_tensor(a, int(kind[0])), _tensor(b, int(kind[1])))) for b in ORDER]
        assert "".join(LETTERS[d] for d in got) == row, f"{kind}: {a}"


@pytest.mark.parametrize("kind", [f"{dims}{number}" for dims in "01" for number in NUMBERS])
def test_result_type_with_a_number(kind: str) -> None:
    got = [result_type((_tensor(letter, int(kind[0])), NUMBERS[kind[1:]])) for letter in ORDER]
    assert "".join(LETTERS[d] for d in got) == TABLE["result_type"][kind]


def test_three_ranks_of_operands() -> None:
    """Dimensions outrank 0-d, which outranks numbers; a lower rank counts only where its category is higher."""
    half0, double0 = _tensor("h", 0), _tensor("d", 0)
    assert result_type((_tensor("i"), half0, 1.5)) is as_dtype("float16")
    assert result_type((_tensor("f"), double0, 1.5)) is as_dtype("float32")
    assert result_type((_tensor("?"), _tensor("c", 0), 2)) is as_dtype("int8")
    assert result_type((_tensor("?"), _tensor("c", 0), 2.0)) is as_dtype("float32")


def test_promotion_is_symmetric_and_idempotent() -> None:
    def promote(a: str, b: str) -> DType:
        return promote_types(DTYPES[a], DTYPES[b])

    for a in ORDER:
        assert promote(a, a) is DTYPES[a]
        for b in ORDER:
            assert promote(a, b) is promote(b, a)
            assert LETTERS[promote(a, b)] == TABLE["result_type"]["11"][a][ORDER.index(b)]


def test_an_operand_that_is_no_tensor_and_no_number_is_refused() -> None:
    with pytest.raises(DTypeError, match="type list"):
        result_type((_tensor("f"), [1.0]))


@pytest.mark.parametrize(("x", "y"), [("int16", "uint8"), ("int64", "int8"), ("float32", "uint8"), ("float64", "int8")])
def test_alpha_multiplies_in_the_type_of_the_sum(x: str, y: str) -> None:
    a, b = (genesis.tensor(values, dtype=kind) for values, kind in (([-6, 8], x), ([12, 100], y)))
    assert a.add(b, alpha=-2).tolist() == [-30, -192]
    assert a.sub(b, alpha=3).tolist() == [-42, -292]
    assert a.clone().add_(b, alpha=-2).sub_(b, alpha=3).tolist() == [-66, -492]
    assert a.add(b[0], alpha=-30).tolist() == [-366, -352]  # of a 0-d operand, too
    assert genesis.add(a, 2, alpha=-3).tolist() == [-12, 2]


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
def test_nothing_is_divided_by_0_where_there_is_nothing(name: str) -> None:
    zeros = genesis.zeros(1, 3, dtype="int64")
    assert getattr(genesis, name)(genesis.zeros(0, 3, dtype="int64"), zeros).shape == (0, 3)
    with pytest.raises(NumericError, match="an integer is divided by 0"):
        getattr(genesis, name)(genesis.zeros(1, 3, dtype="int64"), zeros)


def test_the_gradient_of_an_exponent_is_as_exact_as_its_type() -> None:
    base, exponent = genesis.tensor([2, 7], dtype="int16"), genesis.tensor([0.5, -1.25], dtype="float64")
    exponent.requires_grad_()
    (base**exponent).sum().backward()
    assert exponent.grad.tolist() == pytest.approx([2**0.5 * math.log(2), 7**-1.25 * math.log(7)], rel=1e-15)

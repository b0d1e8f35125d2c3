"""Everyday lines: each gives torch's values, dtypes, shapes and gradients, or is refused where torch refuses it."""

from __future__ import annotations

import copy
import inspect
import json
import re
import subprocess
import sys
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.backend import cpu
from genesis.dtypes import ALL
from genesis.errors import DTypeError, GenesisError, GradientError, KeywordError, ShapeError
from genesis.functions.exchange import _KINDS
from genesis.functions.methods import Methods
from genesis.functions.random import _largest
from genesis.functions.surface import _READ, functional, functions, methods
from genesis.op import observe
from tests.functions.surface_cases import CASES, answer
from tests.functions.torch_tables import FIXTURES

TORCH: dict[str, dict[str, Any]] = dict(json.loads((FIXTURES / "torch_surface.json").read_text(encoding="utf-8")))
ROUNDING = {"float64": 1e-15, "float32": 4e-7, "float16": 1e-3, "bfloat16": 8e-3}  # a few units in the last place


def make(values: np.ndarray, dtype: str) -> Any:
    return genesis.tensor(values, dtype=dtype)


def differing(got: Any, want: Any, dtype: str) -> bool:
    a, b = np.array(got, np.float64), np.array(want, np.float64)
    return a.shape != b.shape or not np.allclose(a, b, rtol=ROUNDING.get(dtype, 0), atol=0, equal_nan=True)


def difference(line: str) -> str:
    """What differs from torch's answer; empty where nothing does."""
    got, want = answer(genesis, line, make, (GenesisError, TypeError)), TORCH[line]
    if "errors" in want and set(want["errors"]) & set(got.get("errors", ())):
        return ""
    if "outs" not in want or "outs" not in got:
        return "" if got == want else f"{line}: {got}, torch: {want}"
    for a, b in zip(got["outs"], want["outs"], strict=True):
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]) or differing(a["values"], b["values"], a["dtype"]):
            return f"{line}: {a}, torch: {b}"
    grads, wanted = got.get("grads", {}), want.get("grads", {})
    if set(grads) != set(wanted) or any(differing(grads[k], wanted[k], "float32") for k in grads):
        return f"{line}: gradients {grads}, torch: {wanted}"
    return ""


def test_every_line_has_torchs_answer() -> None:
    assert set(TORCH) == {line for lines in CASES.values() for line in lines}


@pytest.mark.parametrize("kind", CASES)
def test_lines_give_what_torch_gives(kind: str) -> None:
    assert [d for line in CASES[kind] if (d := difference(line))] == []


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "x.clamp(row)"
    assert difference(line) == ""
    for key, value in (("dtype", "float64"), ("shape", [6]), ("values", [[0.0] * 3] * 2)):
        spoiled = {**TORCH[line], "outs": [{**TORCH[line]["outs"][0], key: value}]}
        monkeypatch.setitem(TORCH, line, spoiled)
        assert "torch:" in difference(line)
        monkeypatch.undo()
    monkeypatch.setitem(TORCH, line, {**TORCH[line], "grads": {}})
    assert "gradients" in difference(line)


# --- Bounds that are tensors ------------------------------------------------------------------------------------------


def test_one_bound_may_be_a_tensor_and_the_other_a_number() -> None:
    x, low = (genesis.tensor(v, requires_grad=True) for v in ([0.5, -2.0, 3.0], [[1.0], [-1.0]]))
    found = x.clamp(low, 2.0)
    assert found.tolist() == [[1.0, 1.0, 2.0], [0.5, -1.0, 2.0]]
    found.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0] and low.grad.tolist() == [[2.0], [1.0]]
    assert x.clamp(-1, low).tolist() == [[0.5, -1.0, 1.0], [-1.0, -1.0, -1.0]]


@pytest.mark.parametrize("count", [1_000, 200_000])  # in one thread, and in several
def test_clamp_with_tensors_of_any_size(count: int) -> None:
    rng = np.random.default_rng(0)
    x, low, high = (rng.standard_normal(count).astype(np.float32) for _ in range(3))
    want = np.minimum(np.maximum(x, low), high)
    tensors = [genesis.from_numpy(v).requires_grad_() for v in (x, low, high)]
    found = tensors[0].clamp(*tensors[1:])
    np.testing.assert_array_equal(found.detach().numpy(), want)
    found.sum().backward()
    crossed = low > high
    dmax = (x > high) | crossed
    dmin = (x < low) & (low < high)
    dx = (x >= low) & (x <= high)
    for tensor, expected in zip(tensors, (dx, dmin, dmax), strict=True):
        np.testing.assert_array_equal(tensor.grad.numpy(), expected.astype(np.float32))


# --- What reaches an op -----------------------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, type(None), genesis.DType, genesis.Device)


def impure(value: Any) -> bool:
    """Whether something in an attribute is neither Python's own nor a type or device of ours."""
    if isinstance(value, (tuple, list)):
        return any(impure(v) for v in value)
    return type(value) not in PLAIN and not isinstance(value, genesis.Device)


@pytest.mark.parametrize("kind", ["integers", "numbers"])
def test_attributes_of_ops_are_plain_numbers(kind: str) -> None:
    """No tensor and no number of numpy reaches an op as an attribute, where nobody would see it."""
    found = []

    def look(op: Any, inputs: Any, outputs: Any, attrs: dict[str, Any], seconds: float) -> None:
        found.extend(f"{op.name}: {name}={value!r}" for name, value in attrs.items() if impure(value))
        found.extend(f"{op.name}: {x!r}" for x in inputs if isinstance(x, (np.generic, genesis.Tensor)))

    with observe(look):
        for line in CASES[kind]:
            answer(genesis, line, make, (GenesisError, TypeError))
    assert found == []


def test_an_unknown_keyword_names_the_one_that_was_meant() -> None:
    x = genesis.ones(2, 3)
    for call, message in (
        (lambda: x.sum(kepdim=True), "sum takes no keyword 'kepdim' | did you mean keepdim?"),
        (lambda: genesis.add(x, x, alpah=2), "add takes no keyword 'alpah' | did you mean alpha?"),
        (lambda: genesis.zeros(2, dtpye="int8"), "zeros takes no keyword 'dtpye' | did you mean dtype?"),
        (lambda: x.abs(foo=1), "abs takes no keyword 'foo' | it takes input, out"),
        (lambda: genesis.add(inptu=x, other=x), "add takes no keyword 'inptu' | did you mean input?"),
        (lambda: x.to(devcie="cpu"), "to takes no keyword 'devcie' | did you mean device?"),
        (lambda: x.narrow(dim=0, strat=0, length=1), "narrow takes no keyword 'strat' | did you mean start?"),
    ):
        with pytest.raises(KeywordError) as caught:
            call()
        assert str(caught.value) == message


def test_wrong_values_are_named_with_the_parameter() -> None:
    x = genesis.ones(2, 3, requires_grad=True)
    for call, message in (
        (lambda: x.narrow(1, genesis.tensor(1.0), 2), "narrow: start is a tensor of shape () and type float32"),
        (lambda: x.topk(k=2.0), "topk: k is 2.0, expected an integer"),
        (lambda: x.add(x, alpha=x.sum()), "requires a gradient, expected a number"),
        (lambda: x.sum(keepdim="no"), "sum: keepdim is 'no', expected True or False"),
        (lambda: genesis.full((2,), 300, dtype="uint8"), "full: 300 does not fit into uint8, which holds 0 to 255"),
    ):
        with pytest.raises(DTypeError, match=re.escape(message)):
            call()


def test_every_public_function_and_method_reads_its_arguments() -> None:
    """A function that is not published would take any keyword error, and integers, as they come."""
    for name in genesis.__all__:
        value = getattr(genesis, name)
        if isinstance(value, FunctionType) and value.__module__.startswith("genesis.functions"):
            assert hasattr(value, "__wrapped__"), name
    for name, method in (vars(Methods) | vars(genesis.Tensor)).items():
        if isinstance(method, FunctionType) and name[0] != "_":
            assert (
                hasattr(method, "__wrapped__") or method.__code__.co_argcount + method.__code__.co_kwonlyargcount == 1
            ), name


# --- Arrays without elements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_arrays_of_numpy_without_elements_can_be_written(shape: tuple[int, ...]) -> None:
    for take in (genesis.from_numpy, genesis.from_dlpack):
        x = take(np.empty(shape, np.float32))
        for change in (x.zero_, lambda x=x: x.add_(1), lambda x=x: x.copy_(genesis.ones(shape)), x.T.exp_):
            assert change().numel() == 0
        x[...] = 1.0
        genesis.add(x, 1, out=x)


def test_sizes_of_1_do_not_overlap_and_repeated_ones_do() -> None:
    one = genesis.from_numpy(np.lib.stride_tricks.as_strided(np.zeros(3), (1, 3), (0, 8)))
    assert one.add_(1).tolist() == [[1.0, 1.0, 1.0]]
    genesis.zeros(1).expand(5, 0).add_(1)
    with pytest.raises(ShapeError, match="expanded view"):
        genesis.zeros(1).expand(5).add_(1)


# --- Names ------------------------------------------------------------------------------------------------------------


def test_types_by_all_their_names() -> None:
    for dtype, names in {
        "float64": "double fp64",
        "float32": "float fp32",
        "float16": "half fp16",
        "bfloat16": "bf16",
        "int64": "long",
        "int32": "int",
        "int16": "short",
    }.items():
        for name in (dtype, *names.split()):
            assert str(genesis.zeros(1, dtype=name).dtype) == f"genesis.{dtype}"
    names = "float half double long int short bool bfloat16 float32 int8 uint8"
    assert all(isinstance(getattr(genesis, name), genesis.DType) for name in names.split())


def test_handles_of_hooks_remove_them() -> None:
    x = genesis.ones(2, requires_grad=True)
    seen: list[str] = []
    kept = x.register_hook(lambda g: seen.append("hook"))
    done = x.register_post_accumulate_grad_hook(lambda t: seen.append("post"))
    x.sum().backward()
    assert seen == ["hook", "post"]
    for handle in (kept, done):
        handle.remove()
        handle.remove()  # nothing is left to do
    x.sum().backward()
    assert seen == ["hook", "post"]
    y = x * 2
    with y.register_hook(lambda g: g * 0):
        y.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [2.0, 2.0]
    y.sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]
    x.register_hook(lambda g: g * 0)()  # the handle is also a function, as it was
    x.sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]


def test_a_format_of_a_tensor_with_dimensions_is_refused() -> None:
    assert f"{genesis.ones(2)}" == "tensor([1., 1.])"
    with pytest.raises(DTypeError, match=r"the format '\.2f' .*\(2,\)"):
        f"{genesis.ones(2):.2f}"


def test_reductions_have_the_names_that_profile_lists() -> None:
    from genesis.measure.cases import ALIASES, supported

    x = genesis.tensor([[1.0, 2.0, 0.5], [4.0, 3.0, 2.5]])
    names = [alias for alias in ALIASES if alias.startswith("reduce_")]
    assert len(names) == 14
    for alias in names:
        assert getattr(genesis, alias)(x).tolist() == getattr(genesis, ALIASES[alias])(x).tolist(), alias
    assert genesis.sum_to_shape(x, (1, 3)).tolist() == [[5.0, 5.0, 3.0]] and "sum_to_shape" in supported()


@pytest.mark.parametrize("kind", CASES)
def test_lines_give_the_same_where_work_is_split_between_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that reads an array beside its inputs breaks only where pieces of them are handed to threads."""
    monkeypatch.setattr(cpu, "_PARALLEL_FROM", 1)
    count = cpu.threads()
    cpu.set_threads(3)
    try:
        assert [d for line in CASES[kind] if (d := difference(line))] == []
    finally:
        cpu.set_threads(count)


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_every_module_of_functions_is_loaded_with_genesis() -> None:
    """What `@public` enters later, a user of `import genesis` would not find."""
    script = (
        "import genesis, importlib, pkgutil\n"
        "from genesis.functions import surface as s\n"
        "before = [set(t) for t in (s.functions, s.methods, s.functional)]\n"
        "for m in pkgutil.iter_modules(genesis.functions.__path__):\n"
        "    importlib.import_module('genesis.functions.' + m.name)\n"
        "assert before == [set(t) for t in (s.functions, s.methods, s.functional)]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


READABLE = {"int", "float", "bool", "None", "Sequence", "Generator", "Dims"}


@pytest.mark.parametrize("table", [functions, methods, functional], ids=["genesis", "Tensor", "nn.functional"])
def test_every_form_of_a_number_is_read(table: dict[str, Any]) -> None:
    """A parameter whose annotation the readers do not know would take tensors and numpy's numbers as they come."""
    unread = {
        f"{name}({parameter.name}: {parameter.annotation})"
        for name, function in table.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_POSITIONAL
        and set(re.findall(r"[A-Za-z]+", str(parameter.annotation))) <= READABLE
        and str(parameter.annotation) not in (*_READ, "Dims | bool")  # which var and std read themselves
    }
    assert not unread


def test_every_reader_of_an_annotation_is_used() -> None:
    called = [*functions.values(), *methods.values(), *functional.values()]
    called += [value for value in vars(genesis.Tensor).values() if hasattr(value, "__wrapped__")]
    annotations = {p.annotation for each in called for p in inspect.signature(each).parameters.values()}
    assert set(_READ) <= {str(annotation).replace("builtins.", "") for annotation in annotations}


def test_every_type_of_element_can_be_exchanged() -> None:
    assert set(_KINDS) == set(ALL)
    for dtype in ALL:
        x = genesis.zeros(2, dtype=dtype)
        assert genesis.from_dlpack(x).dtype is dtype


OPERATORS = {
    "add": "radd iadd", "sub": "rsub isub", "mul": "rmul imul", "truediv": "rtruediv itruediv rdiv",
    "floordiv": "rfloordiv ifloordiv", "mod": "rmod imod", "pow": "rpow ipow", "and": "rand iand", "or": "ror ior",
    "xor": "rxor ixor", "lshift": "rlshift ilshift", "rshift": "rrshift irshift", "matmul": "rmatmul", "neg": "",
    "abs": "", "invert": "", "eq": "ne", "lt": "le gt ge", "getitem": "setitem",
}  # fmt: skip


def test_tensors_have_pythons_operators_and_torchs_aliases() -> None:
    names = {f"__{name}__" for first, more in OPERATORS.items() for name in (first, *more.split())}
    assert names == {name for name, value in vars(Methods).items() if inspect.isfunction(value) and name[:2] == "__"}
    for alias, name in {
        "absolute": "abs", "clip": "clamp", "clip_": "clamp_", "divide": "div", "multiply": "mul", "negative": "neg",
        "subtract": "sub",
    }.items():  # fmt: skip
        assert getattr(genesis.Tensor, alias) is getattr(genesis.Tensor, name)
    assert genesis.clip is genesis.clamp and genesis.concat is genesis.cat


def test_a_reflected_operator_takes_its_operands_the_other_way_round() -> None:
    x = genesis.tensor([2.0, 5.0])
    assert [(7 - x).tolist(), (10 / x).tolist(), (2**x).tolist()] == [[5, 2], [5, 2], [4, 32]]
    assert [(7 // x).tolist(), (7 % x).tolist()] == [[3, 1], [1, 2]]
    assert x.__eq__(None) is NotImplemented and (x == 2).tolist() == [True, False]
    assert [(1 << x.long()).tolist(), (64 >> x.long()).tolist()] == [[4, 32], [16, 2]]


def test_integers_that_no_type_holds_are_refused() -> None:
    for x, bits in ((genesis.ones(2).int(), 70), (genesis.ones(2), 1100)):
        with pytest.raises(DTypeError, match=f"an integer of {bits + 1} bits does not fit into {x.dtype.name}"):
            x * 2**bits


def test_shifts_in_place_are_seen_by_views() -> None:
    x = genesis.tensor([1, 2])
    view = x[:1]
    x <<= 3
    assert x.tolist() == [8, 16] and view.tolist() == [8]
    x >>= 1
    assert view.tolist() == [4]


def test_in_asks_for_an_equal_element() -> None:
    x = genesis.tensor([[1, 3], [4, 1]])
    assert 3 in x and 2 not in x and genesis.tensor(4) in x and genesis.tensor([1, 1]) in x
    assert 1 in genesis.tensor(1) and 1 not in genesis.tensor([])
    with pytest.raises(DTypeError, match="got str"):
        assert "a" in x


def test_copies_of_tensors() -> None:
    """`copy.copy` shares the memory, `copy.deepcopy` does not and copies the gradient too."""
    x = genesis.ones(2, requires_grad=True)
    x.sum().backward()
    shallow, deep = copy.copy(x), copy.deepcopy(x)
    with genesis.no_grad():
        x[0] = 5
    x.grad[0] = 7
    assert shallow.requires_grad and shallow.tolist() == [5, 1] and shallow.grad is None
    assert deep.requires_grad and deep.tolist() == [1, 1] and deep.grad.tolist() == [1, 1]
    parameter = copy.copy(genesis.nn.Parameter(genesis.ones(1), requires_grad=False))
    assert type(parameter) is genesis.nn.Parameter and not parameter.requires_grad
    assert +x is x
    with pytest.raises(GradientError, match="leaves"):
        copy.copy(x * 2)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: genesis.nn.functional.embedding([0], genesis.ones(1, 1)), "embedding: input is a value of type list"),
        (lambda: genesis.nn.functional.linear(genesis.ones(1), genesis.ones(1, 1), 2.0), "linear: bias is 2.0"),
        (lambda: genesis.nn.functional.layer_norm(genesis.ones(1), 1, weight="w"), "layer_norm: weight is 'w'"),
        (lambda: genesis.nn.functional.gelu(3.0), "gelu: input is 3.0"),
    ],
)
def test_what_is_no_tensor_is_named_with_its_parameter(call: Any, found: str) -> None:
    with pytest.raises(DTypeError, match=f"^{found}, not a tensor"):
        call()


def test_the_random_functions_reach_the_largest_integer() -> None:
    limits = {"int8": 2**7 - 1, "uint8": 2**8 - 1, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}
    limits |= {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53, "bool": 1}
    assert {dtype.name: _largest(dtype) for dtype in ALL} == limits

"""Generates `triton.jit` functions of tiles from the formulas of op records (`genesis.ops.formula`).

An op's function exists in up to four forms, which are attributes of this module: `silu_exact`, `silu_fast`, … Compiling
processes import them by these names. The exact form rounds each step like numpy. "quick" divides with an error of two
ulps. "fast" is for results of 2 bytes, which keep 8 or 11 bits: its exponentials, tanh and powers have 15 bits or more;
the exact ones would take longer than the memory traffic. "bools" is for results of type bool.
"""

from __future__ import annotations

import functools
import linecache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels import maths
from genesis.op import registry
from genesis.ops.formula import computed

_ODD = "tl.where(tl.abs({0}) < 1e-30, {0}, libdevice.%s({0}))"  # libdevice flushes subnormal float32 numbers to 0
_WHOLE = "%s({0}) if {0}.dtype.is_floating() else {0}"
_EITHER = "{1}({{0}}, {{1}}) if {{0}}.dtype.is_floating() else {0}({{0}}, {{1}})"
# numpy's name of a step -> its source. Steps that are not listed call the function of `maths` with that name.
STEPS = {
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "square": "{0} * {0}",
    "absolute": "tl.abs({})", "negative": "{0} * -1.0 if {0}.dtype.is_floating() else 0 - {0}",
    "sign": "{0} if {0}.dtype == tl.int1 else ({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "sqrt": "root({})", "reciprocal": "divide(tl.full({0}.shape, 1, {0}.dtype), {0})",
    "where": "tl.where({}, {}, {})",
    "floor": _WHOLE % "floor", "ceil": _WHOLE % "ceil", "trunc": _WHOLE % "trunc", "rint": _WHOLE % "rint",
    "power": _EITHER.format("integer_power", "power"), "remainder": _EITHER.format("integer_remainder", "modulo"),
    "floor_divide": _EITHER.format("integer_floor_divide", "floor_divide"),
    "equal": "{} == {}", "not_equal": "{} != {}", "less": "{} < {}", "less_equal": "{} <= {}", "greater": "{} > {}",
    "greater_equal": "{} >= {}", "logical_and": "({} != 0) & ({} != 0)", "logical_or": "({} != 0) | ({} != 0)",
    "logical_xor": "({} != 0) != ({} != 0)", "logical_not": "{} == 0", "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}", "bitwise_xor": "{} ^ {}", "invert": "{0} == 0 if {0}.dtype == tl.int1 else ~{0}",
    "astype": "{}.to({})",
    **{name: f"libdevice.{name}({{}})" for name in ("expm1", "log10", "log1p", "tan")},
    "arcsin": _ODD % "asin", "arctan": _ODD % "atan", "sinh": _ODD % "sinh", "arcsinh": _ODD % "asinh",
    "arctanh": _ODD % "atanh", "arccos": "libdevice.acos({})", "arccosh": "libdevice.acosh({})",
    "cosh": "libdevice.cosh({})", "erfc": "libdevice.erfc({0}.to(tl.float64)).to({0}.dtype)",
    "lgamma": "libdevice.lgamma({0}.to(tl.float64)).to({0}.dtype)",
    "arctan2": "libdevice.atan2({0}.to(tl.float64), {1}.to(tl.float64)).to({0}.dtype)",
    "erf": "tl.where(tl.abs({0}) < 1e-30, {0} * 1.1283791670955126, libdevice.erf({0}))",
    "erfinv": "tl.where(tl.abs({0}) < 1e-30, {0} * 0.8862269254527580, libdevice.erfinv({0}))",
}  # fmt: skip
_TANH = "tl.where(tl.abs({0}) < 0.02, {0} - {0} * {0} * {0} * (1 / 3), 1 - 2 / (tl.exp(2 * {0}) + 1))"
_QUICK = {"divide": "{} / {}", "reciprocal": "1 / {}"}
FORMS: dict[str, dict[str, str]] = {
    "exact": {}, "quick": _QUICK, "bools": {"add": "{} | {}", "multiply": "{} & {}"},
    "fast": {**_QUICK, "exp": "fast_exp({})", "tanh": _TANH, "power": "fast_power({0}, {1})", "erf": "fast_erf({})"},
}  # fmt: skip
_NAMES = {**vars(maths), "tl": tl, "libdevice": libdevice}
if is_interpreted():  # numpy computes what libdevice does
    from genesis.ops import special

    _LIBDEVICE = [name for name, text in STEPS.items() if "libdevice" in text]
    for _name in _LIBDEVICE:
        _NAMES[_name] = maths.in_numpy(getattr(np, _name, None) or getattr(special, f"{_name}_values"))
        del STEPS[_name]


class _Source:
    """Writes the statements of a function of tiles."""

    def __init__(self, form: str) -> None:
        self.steps, self.lines = {**STEPS, **FORMS[form]}, list[str]()

    def step(self, name: str, *operands: Any) -> str:
        """Write one step; return the name of its result."""
        if name == "dtype":
            return f"{operands[0]}.dtype"
        text = self.steps.get(name) or f"{name}({', '.join(['{}'] * len(operands))})"
        words = ["tl.float64" if x is np.float64 else x if isinstance(x, str) else literal(x) for x in operands]
        if "({}, {})" in text or "({0}, {1})" in text:  # a function takes tiles of one type
            like = next(x for x in operands if isinstance(x, str))
            tiles = zip(operands, words, strict=True)
            words = [w if x is w else f"tl.full({like}.shape, {w}, {like}.dtype)" for x, w in tiles]
        self.lines.append(f"    v{len(self.lines)} = {text.format(*words)}")
        return f"v{len(self.lines) - 1}"


def literal(value: Any) -> str:
    """Return a number as source."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


@functools.cache
def tile_function(name: str, form: str = "exact") -> Any:
    """Return an op's function of tiles in a form. Raises AttributeError for an op without a formula."""
    formula = getattr(registry.get(name), "formula", None)
    if formula is None or form not in FORMS:
        raise AttributeError(f"no formula gives {name}_{form}")
    title, source = f"{name}_{form}", _Source(form)
    operands = registry[name].reference.__code__.co_varnames[1 : 1 + registry[name].operands]
    results = computed(formula, source.step, *operands)
    returned = ", ".join(results) if isinstance(results, tuple) else results
    head = f"def {title}({', '.join(operands)}):"
    return jit_source("\n".join([head, *source.lines, f"    return {returned}", ""]), title, _NAMES, __name__)


def jit_source(source: str, title: str, names: dict[str, Any], module: str) -> Any:
    """Return the function `title` that `source` defines, under `triton.jit`."""
    filename = f"<genesis {title}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # read by `inspect` and Triton
    space = {**names, "__name__": module}
    exec(compile(source, filename, "exec"), space)
    return triton.jit(space[title])


def __getattr__(name: str) -> Any:
    return tile_function(*name.rpartition("_")[::2])

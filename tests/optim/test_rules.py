"""A rule is written once: what runs it agrees, and all that knows optimizers by name finds it."""

from __future__ import annotations

import inspect
import math
import pkgutil
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from genesis import optim
from genesis.errors import ConfigError
from genesis.functions.create import tensor
from genesis.op import registry
from genesis.ops import rule as language
from genesis.ops.optimizers import program_of
from genesis.ops.rule import RULES, Rule, divide, sign, sqrt, where
from genesis.optim import rules
from genesis.train.config import OptimConfig
from genesis.train.optimizer import build_optimizer

# --- Rules in numpy ---------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Any, int]] = {
    "exchanged": (lambda p, g, a, b, *c: (a + g, b, p), 3),
    "one value twice": (lambda p, g, a, b, *c: (p * g, p * g, g), 4),
    "nothing used of a state": (lambda p, g, a, b, *c: (p - g * c[0], g * c[1], b), 1),
    "what nobody uses": (lambda p, g, a, b, *c: (p, (a / b, a + g)[1], where(c[2] != 0, b, sqrt(b) * g)), 0),
    "many values at once": (
        lambda p, g, a, b, *c: (p - divide(g * c[0], sqrt(a * a + b * b) + c[1]) * (g - a) * (2 - b), p * a + b, b - 1),
        4,
    ),
    "literals and a sign": (lambda p, g, a, b, *c: (p - sign(g, c[0]), 1.0 * a, 0.5 / b), 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_a_program_gives_what_the_operators_give_and_leaves_the_gradient(name: str, dtype: str) -> None:
    function, most = CALLS[name]
    rule = Rule.__new__(Rule)
    for key, value in {"name": name, "states": ("a", "b"), "update": function}.items():
        object.__setattr__(rule, key, value)
    kind, constants = np.dtype(dtype), (0.3, 0.7, 1.0)
    rows = [x.astype(kind) for x in np.random.default_rng(0).random((4, 50)) + 0.5]
    p, a, b, g = (_Values(x) for x in rows)
    expected = [x.array.copy() for x in function(p, g, a, b, *constants)]
    program = program_of(rule, kind, constants, ())
    assert program.spare <= most
    before = rows[3].copy()
    with np.errstate(over="ignore"):  # what ops run under
        program.run([*rows, *np.full((program.spare, 50), np.nan, kind)], program.bound(constants, kind))
    for found, wanted in zip(rows[:3], expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(rows[3], before)


class _Values:
    """numpy values with the operators of a rule, in their own type."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def _of(self, ufunc: Any, *operands: Any) -> _Values:
        return _Values(ufunc(*(x.array if isinstance(x, _Values) else x for x in operands)))

    def __add__(self, other: Any) -> _Values:
        return self._of(np.add, self, other)

    def __sub__(self, other: Any) -> _Values:
        return self._of(np.subtract, self, other)

    def __rsub__(self, other: Any) -> _Values:
        return self._of(np.subtract, other, self)

    def __mul__(self, other: Any) -> _Values:
        return self._of(np.multiply, self, other)

    def __rmul__(self, other: Any) -> _Values:
        return self._of(np.multiply, other, self)

    def __truediv__(self, other: Any) -> _Values:
        return self._of(np.divide, self, other)

    def __rtruediv__(self, other: Any) -> _Values:
        return self._of(np.divide, other, self)

    def sqrt(self) -> _Values:
        return self._of(np.sqrt, self)

    def sign(self) -> _Values:
        return self._of(np.sign, self)


def test_a_factor_of_one_costs_no_call() -> None:
    rule = RULES["adamw"]
    attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
    calls = [
        len(program_of(rule, np.dtype(np.float32), rule.constants_of(1e-3, 3.0, 1.0, given), (False,)).calls)
        for given in (attrs, {**attrs, "weight_decay": 0.0})
    ]
    assert calls[0] == calls[1] + 1


# --- Who finds a rule -------------------------------------------------------------------------------------------------


def test_triton_has_every_function_that_a_rule_may_call() -> None:
    pytest.importorskip("triton")
    from genesis.kernels.optim.optimizers import CALLABLE

    defined = {name for name, value in vars(language).items() if getattr(value, "__module__", "") == language.__name__}
    assert set(CALLABLE) == defined - {"Rule", "for_each_rule"}


def test_every_file_of_rules_has_optimizers_that_are_exported() -> None:
    modules = {each.name for each in pkgutil.iter_modules(rules.__path__)}
    assert {kind.__module__.rpartition(".")[2] for kind in optim.OPTIMIZERS.values()} == modules
    for name, kind in optim.OPTIMIZERS.items():
        assert getattr(optim, kind.__name__) is kind and kind.__name__ in optim.__all__
        assert name == kind.__name__.lower()


def test_every_rule_has_its_ops() -> None:
    assert all({f"{name}_step", f"{name}_split_step"} <= set(registry) for name in RULES)


@pytest.mark.parametrize("key", ["betas", "momentum"])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_the_schema_has_the_ranges_of_the_classes(key: str, value: float) -> None:
    given = [0.5, value] if key == "betas" else value
    with pytest.raises(ConfigError, match=rf"{key}(\[1\])? is {value}, and must be at least 0 and below 1"):
        optim.Muon([tensor([1.0], requires_grad=True)], **{key: given})  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=key):
        OptimConfig.model_validate({"name": "muon", key: given})


@pytest.mark.parametrize("name", [name for name, each in optim.OPTIMIZERS.items() if each.in_runs])
def test_a_run_takes_every_optimizer_with_settings_that_both_sides_have(name: str) -> None:
    kind, config = optim.OPTIMIZERS[name], OptimConfig(name=name)
    assert {"lr", "weight_decay"} <= set(kind.in_runs) <= set(OptimConfig.model_fields)
    assert set(kind.in_runs) <= set(inspect.signature(kind).parameters)
    assert all(getattr(config, key) == value for key, value in kind.in_runs.items())
    numbers = {key for key, value in kind.in_runs.items() if not isinstance(value, bool)}
    assert numbers <= {*kind.at_least_0, *kind.below_1}, "the schema reads the ranges there"
    shapes = {"layers.0.weight": (40, 30), "lm_head.weight": (7, 30), "norm.weight": (30,)}
    made = build_optimizer(config, [(n, tensor(np.ones(s), requires_grad=True)) for n, s in shapes.items()], seed=0)
    for group in made.param_groups:
        for p in group["params"]:
            p.grad = tensor(np.ones(p.shape), dtype=p.dtype)
    made.step()
    assert all(made.state[p]["step"] == 1 for group in made.param_groups for p in group["params"])

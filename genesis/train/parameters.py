"""Which of a model's parameters a setting's patterns name: to freeze them, or to train them at another rate.

A pattern is one of file names (`model.layers.[0-3].*`): dots in it are dots, and none takes exponential time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from genesis.errors import ConfigError, escape, nearest
from genesis.tensor import Tensor


def check_factors(factors: Mapping[str, float], names: Sequence[str]) -> None:
    """Refuse `optim.lr_factors` with a pattern that is the name of no trained parameter.

    Args:
        names: of the trained parameters.

    Raises:
        ConfigError: with the name or the pattern that was meant, as far as it can be guessed.
    """
    _check(factors, names, "optim.lr_factors", "trained parameter")


def _check(patterns: Iterable[str], names: Sequence[str], setting: str, kind: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"{escape(pattern)} is the name of no {kind}"
            raise ConfigError(what, where=setting, next=_meant(pattern, names))


def _meant(pattern: str, names: Sequence[str]) -> str:
    wider = f"*{pattern.strip('*')}*"
    found = next((name for name in names if fnmatchcase(name, wider)), None)
    if found is not None:
        return f"write {escape(wider)}, which has {escape(found)}, say"
    close = nearest(pattern, names, 0.5)
    return f"did you mean {escape(close)}?" if close else f"they have names such as {escape(names[len(names) // 2])}"


def freeze(named_parameters: Iterable[tuple[str, Tensor]], patterns: Sequence[str]) -> None:
    """Let the parameters that `patterns`, the setting `train.freeze`, name keep their values: they take no gradient.

    Raises:
        ConfigError: a pattern names no parameter, or nothing is left to train.
    """
    parameters = dict(named_parameters)
    _check(patterns, list(parameters), "train.freeze", "parameter")
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "every parameter is frozen", where="train.freeze", next="leave out the pattern that names them all"
        )


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """The factor of the first pattern that names a parameter; 1 where none does."""
    return next((float(factor) for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)

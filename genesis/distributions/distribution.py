"""Distribution, the base of all: shapes, the checks of arguments and samples, and expansion of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

from genesis.autograd import enable_grad, no_grad
from genesis.distributions.constraints import Constraint, dependent
from genesis.dtypes import default_dtype
from genesis.errors import UsageError
from genesis.functions.arrange import broadcast_tensors
from genesis.functions.create import tensor
from genesis.shapes import Size
from genesis.tensor import Tensor


class NotDefinedError(UsageError, NotImplementedError):
    """A distribution lacks a property or method, or two distributions a divergence."""


def broadcast_all(*values: Any) -> tuple[Tensor, ...]:
    """Broadcast tensors and numbers; numbers take dtype and device of the first tensor."""
    for value in values:
        if not isinstance(value, (Tensor, int, float)):
            raise UsageError(f"a distribution takes numbers and tensors, not a {type(value).__name__}")
    first = next((v for v in values if isinstance(v, Tensor)), None)
    place = {"dtype": default_dtype()} if first is None else {"dtype": first.dtype, "device": first.device}
    return tuple(broadcast_tensors(*(v if isinstance(v, Tensor) else tensor(v, **place) for v in values)))


class lazy_property(cached_property[Any]):  # noqa: N801  torch's name
    """A property that is computed at its first use, with gradients, and kept."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        with enable_grad():
            return super().__get__(instance, owner)


def _missing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotDefinedError(f"{type(self).__name__} has no {name}")

    return method


class Distribution:
    """Base class of distributions. Samples have the shape sample_shape + batch_shape + event_shape.

    Args:
        batch_shape: shape of the parameters: one distribution for each element.
        event_shape: shape of one sample of one distribution.
        validate_args: whether to check arguments against `arg_constraints`, and values of `log_prob` and `cdf` against
            `support`; by default see `set_default_validate_args`. On a GPU each check synchronizes the host.

    Raises:
        UsageError: for an argument or a value outside its constraint.
    """

    has_rsample = False
    has_enumerate_support = False
    arg_constraints: ClassVar[Mapping[str, Constraint]] = {}
    _validate_args: bool = True

    def __init__(
        self,
        batch_shape: Sequence[int] = Size(),
        event_shape: Sequence[int] = Size(),
        validate_args: bool | None = None,
    ) -> None:
        self._batch_shape, self._event_shape = Size(batch_shape), Size(event_shape)
        if validate_args is not None:
            self._validate_args = validate_args
        for name, constraint in self.arg_constraints.items() if self._validate_args else ():
            is_later = name not in self.__dict__ and isinstance(getattr(type(self), name, None), lazy_property)
            if constraint is not dependent and not is_later:
                self._check(name, getattr(self, name), constraint)

    def _check(self, name: str, value: Tensor, constraint: Constraint) -> None:
        if not constraint.check(value).all():
            raise UsageError(
                f"{name} of shape {value.shape} has values that are not {constraint!r}: {value}",
                where=repr(self),
                next="correct them, or pass validate_args=False",
            )

    @staticmethod
    def set_default_validate_args(value: bool) -> None:
        """Set `validate_args` of distributions that are created without it; initially it is True."""
        if value not in (True, False):
            raise UsageError(f"validate_args is {value!r}, and must be True or False")
        Distribution._validate_args = value

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Return the distribution with its parameters expanded to `batch_shape`, without copying them."""
        new = copy.copy(self) if _instance is None else _instance
        new._batch_shape, new._event_shape, new._validate_args = (
            Size(batch_shape),
            self._event_shape,
            self._validate_args,
        )
        for name, constraint in self.arg_constraints.items():
            if name in self.__dict__:
                value = self.__dict__[name]
                new.__dict__[name] = value.expand(*batch_shape, *value.shape[value.ndim - constraint.event_dim :])
        return new

    @property
    def batch_shape(self) -> Size:
        """The shape over which parameters are batched."""
        return self._batch_shape

    @property
    def event_shape(self) -> Size:
        """The shape of one sample of one distribution."""
        return self._event_shape

    @property
    def stddev(self) -> Tensor:
        """The standard deviation."""
        return self.variance.sqrt()

    def sample(self, sample_shape: Sequence[int] = Size()) -> Tensor:
        """Draw samples of shape sample_shape + batch_shape + event_shape, without gradients."""
        with no_grad():
            return self.rsample(sample_shape)

    def sample_n(self, n: int) -> Tensor:
        """Draw `n` samples of each distribution."""
        return self.sample((n,))

    def perplexity(self) -> Tensor:
        """Return e to the power of the entropy, for each distribution."""
        return self.entropy().exp()

    support, mean, mode, variance = (property(_missing(n)) for n in ("support", "mean", "mode", "variance"))
    rsample: Any = _missing("rsample: its samples have no gradients")
    log_prob, cdf, icdf, entropy = (_missing(name) for name in ("log_prob", "cdf", "icdf", "entropy"))
    enumerate_support: Any = _missing("enumerate_support")

    def _extended_shape(self, sample_shape: Sequence[int] = Size()) -> Size:
        return Size((*sample_shape, *self._batch_shape, *self._event_shape))

    def _validate_sample(self, value: Tensor) -> None:
        """With checks on, raise UsageError if the shape of a value does not fit, or if it is outside the support."""
        if not self._validate_args:
            return
        if not isinstance(value, Tensor):
            raise UsageError(f"the value is a {type(value).__name__}, not a tensor", where=repr(self))
        full_shape, events = self._batch_shape + self._event_shape, len(self._event_shape)
        sizes = zip(reversed(value.shape), reversed(full_shape), strict=False)
        if value.shape[value.ndim - events :] != self._event_shape or any(i != j and 1 not in (i, j) for i, j in sizes):
            raise UsageError(f"a value of shape {value.shape} does not broadcast with {full_shape}", where=repr(self))
        self._check("the value", value, self.support)

    def __repr__(self) -> str:
        known = {name: self.__dict__[name] for name in self.arg_constraints if name in self.__dict__}
        shown = (f"{name}: {v if v.numel() == 1 else v.size()}" for name, v in known.items())
        return f"{type(self).__name__}({', '.join(shown)})"

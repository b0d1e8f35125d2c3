"""Random programs on tensors, run step by step on the CPU and on a CUDA device, which must agree after every step.

A program mixes dtypes, memory layouts (views, steps, offsets, expanded), `out=` of other dtypes and layouts, and calls
in place, on a few shapes, so that calls meet what earlier ones left. At its end every plain call is replayed on
fresh tensors of the layouts that it had.

Ops that round once must agree to the bit, and sums of few small numbers but for the sign of 0. Each side of the others
may be off by the tolerance of `tests/ops/sampling.py`, so they may differ by twice that; their results go no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import genesis
from genesis import Tensor
from genesis.dtypes import as_dtype
from genesis.errors import GenesisError
from tests.ops.comparing import tolerance

__all__ = ["Disagreement", "Program"]

SHAPES = ((6,), (3, 4), (2, 3, 4), (), (0, 4))
DTYPES = ("float32", "float32", "float16", "bfloat16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
NUMBERS = (0, 0.0, -0.0, 1, 1.0, True, 2, 0.5, -1, 3)
LARGEST = 60  # larger values are left out, so that no cast to integers overflows

UNARY = ("neg", "abs", "clone", "sign", "floor", "square", "isnan")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "eq", "lt", "bitwise_and")
WITH_OUT = ("add", "sub", "mul", "maximum", "minimum", "neg", "abs", "floor", "eq")
IN_PLACE = ("add_", "sub_", "mul_", "copy_", "fill_", "zero_", "neg_", "abs_", "clamp_", "masked_fill_")
ROUGH = ("exp", "sigmoid", "tanh", "sqrt", "div", "mean")

VIEWS: tuple[tuple[int, Callable[[Any], Any]], ...] = (  # with the fewest dimensions that it takes
    (1, lambda x: x[1:]),
    (1, lambda x: x[::2]),
    (1, lambda x: x[..., :-1]),
    (1, lambda x: x.transpose(0, -1)),
    (1, lambda x: x.flatten()),
    (2, lambda x: x[:, 1:]),
    (2, lambda x: x[:, 1]),
    (0, lambda x: x[None]),
    (0, lambda x: x.expand(2, *x.shape)),
    (1, lambda x: x.as_strided((x.numel() // 2,), (1,), x.storage_offset() + x.numel() % 2)),
)


class Disagreement(AssertionError):
    """The devices differ, or one of them raised an error alone."""


@dataclass(frozen=True)
class Pair:
    """The same tensor on both devices."""

    host: Tensor
    device: Tensor


class Program:
    """One program.

    Args:
        seed: of its random numbers; two programs of one seed are the same.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool: list[Pair] = []
        self.calls: list[tuple[str, Callable[..., Any], tuple[Pair, ...]]] = []
        self.log = [f"seed {seed}"]

    def run(self, steps: int) -> None:
        """Take `steps` steps, then replay every plain call.

        Raises:
            Disagreement: naming the seed and the last steps.
        """
        kinds = (self._make, self._view, self._plain, self._plain, self._into, self._into, self._in_place,
                 self._in_place, self._rough, self._cast, self._reduce, self._index, self._join)  # fmt: skip
        with genesis.no_grad():
            self._make()
            for _ in range(steps):
                self._pick(kinds)()
            for pair in self.pool:
                self._check("at the end", pair.host, pair.device)
            for name, function, pairs in self.calls:
                self._both(f"again {name}", function, *[self._like(p) for p in pairs])

    # --- Choosing -----------------------------------------------------------------------------------------------------

    def _pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _values(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        halves = self.rng.integers(0 if dtype == "uint8" else -8, 9, shape)
        if dtype == "bool":
            return np.asarray(halves > 0)
        return np.asarray(halves / 2 if "float" in dtype else halves)

    def _new(self, shape: tuple[int, ...], dtype: str | None = None) -> Pair:
        """A new pair in some layout: a window on a larger tensor, or all of one."""
        dtype, layout = dtype or self._pick(DTYPES), self._pick(("whole", "whole", "offset", "step", "transposed"))
        around = {"offset": (3, *shape), "step": (*shape, 2), "transposed": shape[::-1]}.get(layout, shape)
        values = self._values(around, dtype)

        def window(x: Tensor) -> Tensor:
            if layout == "offset":
                return x[1]
            if layout == "step":
                return x[..., 1]
            return x.permute(*reversed(range(x.ndim))) if layout == "transposed" and x.ndim else x

        return Pair(*(window(genesis.tensor(values, dtype=dtype, device=where)) for where in ("cpu", "cuda")))

    def _like(self, pair: Pair) -> Pair:
        """Fresh tensors with the values of a pair, in its layout."""
        a = pair.host.array
        extent = 1 + sum(st * (s - 1) for s, st in zip(a.shape, a.strides, strict=True)) if a.size else 0
        lead = a.offset % 16
        made = []
        for x, where in ((pair.host, "cpu"), (pair.device, "cuda")):
            memory = genesis.zeros(lead + extent, dtype=x.dtype, device=where)
            made.append(window := memory.as_strided(a.shape, a.strides, lead))
            if not window.array.overlaps_itself():
                window.copy_(x)
        return Pair(*made)

    def _some(self) -> Pair:
        return self._pick(self.pool) if self._chance(0.8) else self._new(self._pick(SHAPES))

    def _operand(self, x: Pair) -> Pair:
        """Another operand of x's shape."""
        fitting = [p for p in self.pool if p.host.shape == x.host.shape]
        return self._pick(fitting) if fitting and self._chance(0.7) else self._new(tuple(x.host.shape))

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        self._keep(self._new(self._pick(SHAPES)))

    def _view(self) -> None:
        pair = self._pick(self.pool)
        fewest, view = self._pick(VIEWS)
        if pair.host.ndim >= fewest and pair.host.ndim < 4:
            self._keep(self._both("view", view, pair, again=False))

    def _call(self, name: str) -> tuple[Callable[..., Any], tuple[Pair, ...]]:
        """A function of tensors, and its operands."""
        function, x = getattr(genesis, name), self._some()
        if name in UNARY:
            return function, (x,)
        if self._chance(0.4):
            number = self._pick(NUMBERS)
            return lambda a, **rest: function(a, number, **rest), (x,)
        return function, (x, self._operand(x))

    def _plain(self) -> None:
        name = self._pick((*UNARY, *BINARY))
        function, pairs = self._call(name)
        self._keep(self._both(name, function, *pairs))

    def _into(self) -> None:
        """A result into given memory: of any dtype, new or another tensor's, maybe an operand's."""
        name = self._pick(WITH_OUT)
        function, pairs = self._call(name)
        out = self._operand(pairs[0])
        self._both(f"{name} into", lambda out, *xs: function(*xs, out=out), out, *pairs, again=False)
        self._tame(out)

    def _in_place(self) -> None:
        name, x = self._pick(IN_PLACE), self._pick(self.pool)
        method = getattr(Tensor, name)
        number = self._pick(NUMBERS)
        if name in ("add_", "sub_", "mul_", "copy_") and self._chance(0.6):
            self._both(name, method, x, self._operand(x), again=False)
        elif name == "masked_fill_":
            self._both(name, lambda a, m: method(a, m, number), x, self._new(tuple(x.host.shape), "bool"), again=False)
        else:
            rest = {"clamp_": (-2, 2), "zero_": (), "neg_": (), "abs_": ()}.get(name, (number,))
            self._both(name, lambda a: method(a, *rest), x, again=False)
        self._tame(x)

    def _rough(self) -> None:
        name, x = self._pick(ROUGH), self._some()
        pairs = (x, self._operand(x)) if name == "div" else (x,)
        self._both(name, getattr(genesis, name), *pairs, is_rough=True)

    def _cast(self) -> None:
        x, dtype = self._some(), self._pick(DTYPES)
        if dtype != "uint8" or not x.host.dtype.is_floating_point:  # below 0, C leaves that open
            self._keep(self._both(f"to {dtype}", lambda a: a.to(as_dtype(dtype)), x))

    def _reduce(self) -> None:
        x = self._some()
        if x.host.ndim and x.host.numel():
            name, dim = self._pick(("sum", "amax", "argmax", "cumsum")), int(self.rng.integers(x.host.ndim))
            self._keep(self._both(name, lambda a: getattr(genesis, name)(a, dim) + 0, x))  # -0 as 0

    def _index(self) -> None:
        x = self._some()
        if not x.host.ndim or not x.host.numel():
            return
        places = self.rng.integers(-x.host.shape[0], x.host.shape[0], 3)
        if self._chance(0.5):
            self._keep(self._both("index", lambda a: a[genesis.tensor(places, device=a.device)], x))
        elif self._chance(0.5):
            self._keep(self._both("mask", lambda a: a[a > 0], x))
        else:
            x = self._pick(self.pool)
            self._both("assign", lambda a: a.__setitem__(..., 1) or a, x, again=False)

    def _join(self) -> None:
        x = self._some()
        self._keep(self._both("stack", lambda a, b: genesis.stack((a, b)), x, self._operand(x)))

    # --- Running and comparing ----------------------------------------------------------------------------------------

    def _keep(self, pair: Pair | None) -> None:
        if pair is not None and pair.host.ndim < 4 and _is_tame(pair.host):
            self.pool.append(pair)
            if len(self.pool) > 8:
                del self.pool[int(self.rng.integers(8))]

    def _tame(self, pair: Pair) -> None:
        """Bound what was changed in place."""
        if not _is_tame(pair.host):
            for x in (pair.host, pair.device):
                x.fill_(1)

    def _both(
        self, name: str, function: Callable[..., Any], *pairs: Pair, again: bool = True, is_rough: bool = False
    ) -> Pair | None:
        """Run a step on both devices; None where both refuse it alike.

        Args:
            again: whether it is replayed at the end; it changes nothing.
        """
        self.log.append(f"{name}({', '.join(_told(p.host) for p in pairs)})")
        results = []
        for xs in ([p.host for p in pairs], [p.device for p in pairs]):
            try:
                results.append(function(*xs))
            except GenesisError as error:
                results.append(type(error))
        host, device = results
        if isinstance(host, type) or isinstance(device, type):
            if host is not device:
                raise self._disagreement(f"the CPU gives {host}, the device {device}")
            return None
        self._check(name, host, device, is_rough)
        if again and not name.startswith("again"):
            self.calls.append((name, function, pairs)) if not is_rough else None
        return Pair(host, device)

    def _check(self, name: str, host: Tensor, device: Tensor, is_rough: bool = False) -> None:
        for what in ("dtype", "shape"):
            if getattr(host, what) != getattr(device, what):
                raise self._disagreement(f"{name}: {what} {getattr(device, what)}, on the CPU {getattr(host, what)}")
        if host.stride() != device.stride() and host.numel():
            raise self._disagreement(f"{name}: strides {device.stride()}, on the CPU {host.stride()}")
        expected, got = host.numpy(), device.cpu().numpy()
        if not _agrees(got, expected, is_rough):
            raise self._disagreement(f"{name} gives {got.tolist()}, on the CPU {expected.tolist()}")

    def _disagreement(self, what: str) -> Disagreement:
        return Disagreement("\n".join([what, *self.log[:1], *self.log[-8:]]))


def _agrees(got: np.ndarray, expected: np.ndarray, is_rough: bool) -> bool:
    """Whether values agree to the bit (all NaNs are one), or as far as two results may differ."""
    if expected.dtype.kind in "iub":
        return bool((got == expected).all())
    a, b = got.astype(np.float64), expected.astype(np.float64)
    same = ((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))
    if is_rough:
        with np.errstate(all="ignore"):
            same |= np.abs(a - b) <= 2 * tolerance(b, expected.dtype, max(expected.size, 16), LARGEST)
    return bool(same.all())


def _is_tame(x: Tensor) -> bool:
    values = x.numpy().astype(np.float64)
    return bool(np.isfinite(values).all() and (np.abs(values) <= LARGEST).all())


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} by {tuple(x.stride())} at {x.storage_offset()}"

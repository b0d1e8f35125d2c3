"""`check_op`: compares a user's kernel with its numpy reference, and the gradient with finite differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genesis.array import from_numpy
from genesis.autograd import TensorBase, apply, grad, gradcheck
from genesis.custom.user_op import UserOp
from genesis.dtypes import DType, as_dtype, float32, float64
from genesis.errors import NumericError, UsageError
from genesis.tensor import Tensor

# (relative, absolute), the same as in torch.testing.assert_close.
TOLERANCES = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
SHAPES = ((1,), (7,), (1025,), (33, 65))  # sizes that are not multiples of any tile
DIFFERENCES = 64  # most elements for finite differences: each costs two calls
Inputs = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Checked:
    """One comparison that passed.

    Attributes:
        what: "value", "strided value", "gradient of x" or "differences".
        error: worst error as a share of the tolerance; 0 if exact.
    """

    what: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    error: float


@dataclass(frozen=True)
class CheckReport:
    """The comparisons of an op. Its text has one line for each."""

    name: str
    checks: tuple[Checked, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.checks)} checks passed"]
        for c in self.checks:
            shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in c.shapes)
            lines.append(f"  {c.what:<20} {c.dtype:<9} {shapes:<16} {c.error:6.1%} of the tolerance")
        return "\n".join(lines)


def check_op(
    op: UserOp,
    samples: Sequence[Any] | None = None,
    *,
    dtypes: Sequence[DType | str] = (float32,),
    device: str = "cuda",
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    """Run a kernel on samples, in memory full of NaN, and compare it with the op's reference in float64.

    If the op has a gradient, the gradient of the kernel is compared with the gradient of the reference. The latter is
    compared with finite differences on samples of up to 64 elements.

    Args:
        op: an op with a reference, made by `triton_op` or `cuda_op`.
        samples: tuples of one tensor or numpy array per input, optionally followed by a dict of attributes. The
            default is the op's `sample`, or values from 0.5 to 2 in odd sizes.
        dtypes: floating-point inputs are tested in each of these.
        device: device of the kernel; with TRITON_INTERPRET=1 "cuda" is Triton's interpreter.
        rtol: allowed error relative to the expected value; by default as in torch.testing.
        atol: allowed absolute error, added to the relative one; by default as in torch.testing.

    Raises:
        NumericError: values differ. The message has the element's index and both values.
        GradientError: the gradient does not match finite differences.
        UsageError: the op has no reference.
    """
    if not op.has_reference:
        raise UsageError(f"{op.name} has no reference to compare with", next="pass a numpy function as reference=")
    checks: list[Checked] = []
    for kind in map(as_dtype, dtypes):
        relative, absolute = TOLERANCES.get(kind.name, (0.0, 0.0))
        allowed = (relative if rtol is None else rtol, absolute if atol is None else atol)
        for inputs, attrs in _samples(op, samples, kind):
            checks += _Case(op, kind, inputs, attrs, allowed, device).checks()
    checks += [check for sample in _samples(op, samples, float64) if (check := _differences(op, *sample))]
    return CheckReport(op.name, tuple(checks))


def _samples(op: UserOp, samples: Sequence[Any] | None, dtype: DType) -> Iterator[tuple[Inputs, dict[str, Any]]]:
    """Yield inputs as numpy arrays, with floats cast to `dtype`, and attributes."""
    if samples is None:
        for shape in SHAPES:
            yield tuple(_cast(x, dtype) for x in example(op, shape, dtype)), {}
        return
    for each in samples:
        values = tuple(each) if isinstance(each, tuple | list) else (each,)
        attrs = dict(values[-1]) if values and isinstance(values[-1], dict) else {}
        arrays = values[:-1] if values and isinstance(values[-1], dict) else values
        plain = [x.array.numpy() if isinstance(x, TensorBase) else np.asarray(x) for x in arrays]
        yield tuple(_cast(x, dtype) for x in plain), attrs


def example(op: UserOp, shape: tuple[int, ...], dtype: DType) -> Inputs:
    """Inputs of an op for a shape: from its own `sample`, or values that are valid for logarithms and quotients."""
    if op.sample is not None:
        return tuple(np.asarray(x) for x in op.sample(shape, dtype))
    rng = np.random.default_rng(0)
    if dtype.is_floating_point:
        return tuple(rng.uniform(0.5, 2.0, shape).astype(dtype.numpy) for _ in op.inputs)
    return tuple(rng.integers(0, 2, shape).astype(dtype.numpy) for _ in op.inputs)


def _cast(x: np.ndarray, dtype: DType) -> np.ndarray:
    is_float = x.dtype.kind not in "iub"
    return x.astype(dtype.numpy) if is_float else x


@dataclass(frozen=True)
class _Case:
    """One sample in one dtype."""

    op: UserOp
    dtype: DType
    inputs: Inputs
    attrs: dict[str, Any]
    allowed: tuple[float, float]
    device: str

    def checks(self) -> Iterator[Checked]:
        """Run the comparisons in order."""
        # The reference runs in float64, the kernel in the tested dtype.
        exact = [_tensor(x.astype(np.float64) if x.dtype.kind not in "iub" else x) for x in self.inputs]
        on_device = [_tensor(x, self.device) for x in self.inputs]
        floats = [i for i, x in enumerate(exact) if x.is_floating_point()]
        differentiable = self.op.op.vjp is not None and bool(floats)
        for i in floats if differentiable else ():
            exact[i].requires_grad_()
            on_device[i].requires_grad_()
        want, got = self._run(exact), self._poisoned(on_device)
        for one, other in zip(want, got, strict=True):
            yield self._compare("value", one.detach().array.numpy(), other.detach().array.numpy())
        # The kernel must also handle inputs with strides.
        strided = self._poisoned([_strided(_tensor(x, self.device)) for x in self.inputs])
        for one, other in zip(want, strided, strict=True):
            yield self._compare("strided value", one.detach().array.numpy(), other.detach().array.numpy())
        if differentiable:
            yield from self._gradients(exact, on_device, floats, want, got)

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        result = self.op(*tensors, **self.attrs)
        return result if isinstance(result, tuple) else (result,)

    def _poisoned(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the op with new memory full of NaN, so that elements it does not write are detected."""
        from genesis import cuda

        if not self.device.startswith("cuda"):
            return self._run(tensors)
        before = cuda.set_poison(True, self.device)
        try:
            return self._run(tensors)
        finally:
            cuda.set_poison(before, self.device)

    def _gradients(
        self, exact: list[Tensor], on_device: list[Tensor], floats: list[int], want: tuple[Tensor, ...],
        got: tuple[Tensor, ...],
    ) -> Iterator[Checked]:  # fmt: skip
        """Compare the gradients through the kernel and through the reference, given the same output gradients."""
        rng = np.random.default_rng(1)
        output_grads = [rng.uniform(-1, 1, t.shape).astype(self.dtype.numpy) for t in want]
        outs = [i for i, t in enumerate(want) if t.requires_grad]
        gradients = [
            grad(
                [results[i] for i in outs],
                [tensors[i] for i in floats],
                [_tensor(output_grads[i].astype(results[i].dtype.numpy), results[i].device) for i in outs],
                allow_unused=True,
            )
            for results, tensors in ((want, exact), (got, on_device))
        ]
        for i, one, other in zip(floats, *gradients, strict=True):
            if one is not None and other is not None:
                yield self._compare(f"gradient of {self.op.inputs[i]}", one.array.numpy(), other.array.numpy())

    def _compare(self, what: str, want: np.ndarray, got: np.ndarray) -> Checked:
        shapes = tuple(x.shape for x in self.inputs)
        if want.shape != got.shape:
            raise NumericError(f"{self.op.name}: the {what} has shape {got.shape}; the reference has {want.shape}")
        error = _error(want, got, *self.allowed)
        if not (error <= 1).all():
            worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf))), error.shape)
            at = tuple(int(i) for i in worst)
            raise NumericError(
                f"{self.op.name}: the {what} at {at} is {got[at]!s}, the reference gives {want[at]!s}"
                f" ({int((~(error <= 1)).sum())} of {error.size} elements differ)",
                where=f"{self.dtype.name}, inputs of {', '.join(map(str, shapes))}",
                next="check that the kernel writes every element" if np.isnan(got[at].astype(np.float64)) else "",
            )
        return Checked(what, self.dtype.name, shapes, float(error.max(initial=0.0)))


def _error(want: np.ndarray, got: np.ndarray, relative: float, absolute: float) -> np.ndarray:
    """Each element's error as a share of the tolerance; 0 for equal elements, including infinities and NaN."""
    a, b = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (want.astype(got.dtype) == got)
        limit = absolute + relative * np.abs(a)
        share = np.abs(a - b) / np.where(limit > 0, limit, np.finfo(np.float64).tiny)
        return np.asarray(np.where(same, 0.0, share))


def _tensor(values: np.ndarray, device: Any = "cpu") -> Tensor:
    tensor: Tensor = Tensor(from_numpy(values, share=False)).to(device)
    return tensor


def _strided(x: Tensor) -> Tensor:
    """The same values, stored in every second element of a larger tensor."""
    if x.ndim == 0:
        return x
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x
    gaps: Tensor = wide[..., ::2]
    return gaps


def _differences(op: UserOp, inputs: Inputs, attrs: dict[str, Any]) -> Checked | None:
    """Compare the gradient of the reference with finite differences; None without a gradient or for large samples."""
    if op.op.vjp is None or sum(x.size for x in inputs) > DIFFERENCES:
        return None
    tensors = [_tensor(x) for x in inputs]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.requires_grad_()
    merged = op.checked(tensors, attrs)
    gradcheck(lambda *values: apply(op.op, *values, **merged), tensors, atol=1e-6, rtol=1e-5)
    return Checked("differences", float64.name, tuple(x.shape for x in inputs), 0.0)

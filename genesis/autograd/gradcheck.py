"""The gradient checker: compares the full Jacobian of backward with central differences, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import from_numpy
from genesis.autograd.engine import grad
from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase
from genesis.dtypes import float64
from genesis.errors import GradientError

STEP = 1e-6  # balances truncation (step²) against rounding (eps/step) for values near 1


def _outputs(function: Callable[..., Any], inputs: Sequence[TensorBase]) -> list[TensorBase]:
    result = function(*inputs)
    outs = result if isinstance(result, (tuple, list)) else [result]
    return [o for o in outs if o.array.dtype.is_floating_point]


def _numerical(function: Callable[..., Any], inputs: Sequence[TensorBase], index: int) -> list[np.ndarray]:
    """d(output)/d(inputs[index]) for every output, `[inputs, outputs]`, by central differences."""
    values = inputs[index].array.view_np()
    rows: list[list[np.ndarray]] = []
    with no_grad():
        for position in np.ndindex(values.shape):
            original = values[position]
            ends = []
            for sign in (1.0, -1.0):
                values[position] = original + sign * STEP
                ends.append([o.array.numpy().astype(np.float64).ravel() for o in _outputs(function, inputs)])
            values[position] = original
            rows.append([(up - down) / (2 * STEP) for up, down in zip(*ends, strict=True)])
        if not rows:
            return [np.zeros((0, o.array.size)) for o in _outputs(function, inputs)]
    return [np.array([r[k] for r in rows]) for k in range(len(rows[0]))]


def _analytical(function: Callable[..., Any], inputs: Sequence[TensorBase], index: int) -> list[np.ndarray]:
    """The same Jacobians by backward, with one pass per output element."""
    results = []
    for output in _outputs(function, inputs):
        size = output.array.size
        jacobian = np.zeros((inputs[index].array.size, size))
        if output.requires_grad:
            for column in range(size):
                one_hot = np.eye(1, size, column).reshape(output.array.shape)
                seed = TensorBase.wrap(from_numpy(one_hot))
                gradient = grad(output, inputs[index], seed, retain_graph=True, allow_unused=True)[0]
                if gradient is not None:
                    jacobian[:, column] = gradient.array.numpy().ravel()
        results.append(jacobian)
    return results


def jacobians(
    function: Callable[..., Any], inputs: Sequence[TensorBase], index: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(numerical, analytical) Jacobians `[elements of inputs[index], elements of output]` for each float output."""
    return list(zip(_numerical(function, inputs, index), _analytical(function, inputs, index), strict=True))


def gradcheck(
    function: Callable[..., Any], inputs: Sequence[TensorBase], *, atol: float = 1e-6, rtol: float = 1e-5
) -> bool:
    """Check the gradients of `function` at `inputs`: float64 tensors, checked if they require a gradient.

    Returns:
        True.

    Raises:
        GradientError: if a gradient differs (naming input, worst element and both derivatives), or none can be checked.
    """
    if not any(tensor.requires_grad for tensor in inputs):
        raise GradientError("gradcheck has nothing to check: no input requires a gradient")
    if not _outputs(function, inputs):
        raise GradientError("gradcheck has nothing to check: the function has no float output")
    for index, tensor in enumerate(inputs):
        if not tensor.requires_grad:
            continue
        if tensor.array.dtype is not float64:
            raise GradientError(f"gradcheck input {index} is {tensor.array.dtype}, and differences need float64")
        for k, (numerical, analytical) in enumerate(jacobians(function, inputs, index)):
            # Report the element with the largest error.
            error = np.abs(numerical - analytical)
            wrong = ~(error <= atol + rtol * np.abs(numerical))  # a NaN is wrong
            if wrong.any():
                worst = np.where(wrong, np.nan_to_num(error, nan=np.inf), -1.0)
                row, column = np.unravel_index(int(np.argmax(worst)), error.shape)
                raise GradientError(
                    f"d output {k}[{column}] / d input {index}[{row}] is {analytical[row, column]:.9g} by backward and"
                    f" {numerical[row, column]:.9g} by differences ({int(wrong.sum())} of {wrong.size} elements differ)"
                )
    return True

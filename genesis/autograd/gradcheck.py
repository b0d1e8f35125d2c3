"""The gradient checker: compares the full Jacobian of backward with central differences, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import from_numpy
from genesis.autograd.engine import grad
from genesis.autograd.modes import enable_grad, no_grad
from genesis.autograd.record import TensorBase
from genesis.dtypes import float64
from genesis.errors import GradientError, UsageError

STEP = 1e-6  # balances truncation (step²) against rounding (eps/step) for values near 1


def _outputs(function: Callable[..., Any], inputs: Sequence[Any]) -> list[TensorBase]:
    result = function(*inputs)
    outs = result if isinstance(result, (tuple, list)) else [result]
    return [o for o in outs if isinstance(o, TensorBase) and o.array.dtype.is_floating_point]


def _numerical(function: Callable[..., Any], inputs: Sequence[Any], index: int, eps: float) -> list[np.ndarray]:
    """d(output)/d(inputs[index]) for every output, `[inputs, outputs]`, by central differences."""
    values = inputs[index].array.view_np()
    rows: list[list[np.ndarray]] = []
    with no_grad():
        for position in np.ndindex(values.shape):
            original = values[position]
            ends = []
            for sign in (1.0, -1.0):
                values[position] = original + sign * eps
                ends.append([o.array.numpy().astype(np.float64).ravel() for o in _outputs(function, inputs)])
            values[position] = original
            rows.append([(up - down) / (2 * eps) for up, down in zip(*ends, strict=True)])
        if not rows:
            return [np.zeros((0, o.array.size)) for o in _outputs(function, inputs)]
    return [np.array([r[k] for r in rows]) for k in range(len(rows[0]))]


def _analytical(function: Callable[..., Any], inputs: Sequence[Any], index: int) -> list[np.ndarray]:
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
    function: Callable[..., Any], inputs: Sequence[Any], index: int, eps: float = STEP
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(numerical, analytical) Jacobians `[elements of inputs[index], elements of output]` for each float output."""
    return list(zip(_numerical(function, inputs, index, eps), _analytical(function, inputs, index), strict=True))


def gradcheck(
    func: Callable[..., Any],
    inputs: TensorBase | Sequence[Any],
    *,
    eps: float = STEP,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_batched_forward_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
) -> bool:
    """Check the gradients of `func` at `inputs`: float64 tensors, checked if they require a gradient.

    Every element is checked, also with `fast_mode`. Gradients repeat bit for bit and have their inputs'
    types, so `nondet_tol`, `check_undefined_grad`, `check_grad_dtypes` and `masked` change nothing.

    Args:
        eps: step of the differences.
        raise_exception: False returns False instead of raising.

    Returns:
        True.

    Raises:
        GradientError: if a gradient differs (naming input, worst element and both derivatives), or none can be checked.
        UsageError: if batched or forward-mode gradients are to be checked, which do not exist.
    """
    if check_batched_grad or check_batched_forward_grad or check_forward_ad:
        raise UsageError("gradcheck checks backward passes, neither batched nor forward-mode ones")
    given = [inputs] if isinstance(inputs, TensorBase) else list(inputs)
    try:
        _check(func, given, eps, atol, rtol)
    except GradientError:
        if raise_exception:
            raise
        return False
    return True


def _check(function: Callable[..., Any], inputs: Sequence[Any], eps: float, atol: float, rtol: float) -> None:
    checked = [i for i, x in enumerate(inputs) if isinstance(x, TensorBase) and x.requires_grad]
    if not checked:
        raise GradientError("gradcheck has nothing to check: no input requires a gradient")
    if not _outputs(function, inputs):
        raise GradientError("gradcheck has nothing to check: the function has no float output")
    for index in checked:
        if inputs[index].array.dtype is not float64:
            dtype = inputs[index].array.dtype
            raise GradientError(f"gradcheck input {index} is {dtype}, and differences need float64")
        for k, (numerical, analytical) in enumerate(jacobians(function, inputs, index, eps)):
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


def gradgradcheck(
    func: Callable[..., Any],
    inputs: TensorBase | Sequence[Any],
    grad_outputs: TensorBase | Sequence[TensorBase] | None = None,
    *,
    eps: float = STEP,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    gen_non_contig_grad_outputs: bool = False,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_fwd_over_rev: bool = False,
    check_rev_over_rev: bool = True,
    fast_mode: bool = False,
    masked: bool = False,
) -> bool:
    """Check the second derivatives of `func`, as `gradcheck` checks the first ones.

    Args:
        grad_outputs: gradients that enter the outputs; fixed random numbers by default. `gen_non_contig_grad_outputs`
            has no effect: they are contiguous.
    """
    if check_fwd_over_rev:
        raise UsageError("gradgradcheck checks backward passes, not forward-mode ones")
    given = [inputs] if isinstance(inputs, TensorBase) else list(inputs)
    outputs = [o for o in _outputs(func, given) if o.requires_grad]
    if not outputs:
        raise GradientError("gradgradcheck has nothing to check: no output requires a gradient")
    if grad_outputs is None:
        rng = np.random.default_rng(0)
        seeds = [TensorBase.wrap(from_numpy(rng.normal(size=o.array.shape))) for o in outputs]
    else:
        seeds = [grad_outputs] if isinstance(grad_outputs, TensorBase) else list(grad_outputs)
    for seed in seeds:
        seed.requires_grad_()
    count = len(given)
    wanted = [i for i, x in enumerate(given) if isinstance(x, TensorBase) and x.requires_grad]

    def gradients(*values: Any) -> tuple[Any, ...]:
        with enable_grad():
            outs = [o for o in _outputs(func, values[:count]) if o.requires_grad]
            leaves = [values[i] for i in wanted]
            return grad(outs, leaves, values[count:], create_graph=True, materialize_grads=True)

    return gradcheck(
        gradients,
        [*given, *seeds],
        eps=eps,
        atol=atol,
        rtol=rtol,
        raise_exception=raise_exception,
        check_batched_grad=check_batched_grad,
    )

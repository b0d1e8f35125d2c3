"""`triton_op`: a Triton kernel as an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genesis.custom.user_op import Attrs, Constants, KernelLaunch, Operands, Rule, Saved, UserOp
from genesis.dtypes import DType
from genesis.errors import UsageError

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Grid


def triton_op(
    name: str,
    kernel: Any,
    *,
    inputs: Sequence[str],
    out: Rule,
    grid: int | tuple[int, ...] | Rule,
    arguments: Rule | None = None,
    constants: Constants | None = None,
    attrs: Mapping[str, Any] | None = None,
    vjp: Rule | None = None,
    saves: Saved = "inputs",
    reference: Rule | None = None,
    sample: Rule | None = None,
    flops: Rule | None = None,
    nbytes: Rule | None = None,
    contiguous: bool = True,
) -> UserOp:
    """Make an op of a Triton kernel.

    All rules are plain functions of the operands: `rule(out, *inputs, **attrs)`, `out` a tuple where the op has several
    outputs. They may read shapes, strides, dtypes and attributes, never values: a call like one before repeats its
    launches without asking them again.

    Args:
        name: for profiles and errors; none of Genesis' own.
        kernel: a function under `triton.jit`, whose constexpr parameters come last.
        inputs: names of the tensors that the op takes.
        out: `out(*inputs, **attrs)`, on objects with `.shape` and `.dtype`, gives what the result is like: one of
            them, a `genesis.custom.Spec(shape, dtype)`, or a tuple for several outputs.
        grid: programs in up to three dimensions, or a rule that gives them.
        arguments: a rule for the kernel's arguments in its order: tensors, numbers, None, tuples of integers. Left
            out, they are the outputs, the inputs and the number of elements of the first output.
        constants: the constexpr arguments by name, or a rule for them; `num_warps`, `num_stages` and `maxnreg` belong
            here. A dtype stands for Triton's type.
        attrs: further arguments of the op, given by keyword, with their defaults. Numbers, strings, tuples.
        vjp: `vjp(*gradients, *saved, **attrs)` on tensors gives the gradient of every input (None where there is none):
            a function in terms of other ops, or another user op with just these inputs.
        saves: what `vjp` is given behind the gradients: "inputs", "outputs", or "both" in this order.
        reference: `reference(*inputs, **attrs)` in numpy gives the result, or a tuple. It is the CPU's path and what
            `check_op` compares with. 2-byte floats arrive as float32.
        sample: `sample(shape, dtype)` gives a tuple of numpy arrays to call the op with, where not any values do.
        flops, nbytes: rules for the arithmetic and the memory traffic of a call. Left out, they are one for each
            element of the outputs, and each operand once.
        contiguous: let the kernel see contiguous inputs, copied where they are not. False passes them as they are.

    Raises:
        UsageError: the definition makes no sense; later, when a grid or the arguments do not fit.
    """
    if not hasattr(kernel, "arg_names") or not hasattr(kernel, "fn") or hasattr(kernel, "configs"):
        found = "an autotuned kernel" if hasattr(kernel, "configs") else f"a plain {type(kernel).__name__}"
        raise UsageError(
            f"{name}: the kernel must be a function under @triton.jit, not {found}",
            next="put @triton.jit in front of it, and fixed sizes into constants=",
        )
    cuda_impl = _TritonLaunch(name, grid, arguments, constants, contiguous)
    cuda_impl.kernel = kernel
    return UserOp(
        name, cuda_impl, inputs=inputs, out=out, attrs=attrs, vjp=vjp, saves=saves, reference=reference, sample=sample,
        flops=flops, nbytes=nbytes,
    )  # fmt: skip


class _TritonLaunch(KernelLaunch):
    """The launches of a Triton kernel."""

    kernel: Any

    def launch(self, programs: Grid, args: Operands, constants: Attrs, operands: Operands, attrs: Attrs) -> None:
        from triton.errors import TritonError

        from genesis.backend.cuda import backend_of
        from genesis.backend.cuda.launch import launch
        from genesis.kernels.elements import TRITON

        words = {k: TRITON[v.name] if isinstance(v, DType) else v for k, v in constants.items()}
        _check_count(self.name, self.kernel, args, words)
        driver = backend_of(operands[1].device).driver
        try:
            launch(self.kernel, programs, *args, **words)
            if driver.pending and not driver.capturing:
                driver.flush()  # so that a kernel which does not compile ends the call that needs it
        except TritonError as error:
            what = f"{self.name}: Triton refuses the kernel {self.kernel.__name__}: {error}"
            raise UsageError(what, next="correct the kernel, or what it is given") from error


def _check_count(name: str, kernel: Any, args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """Whether every parameter of the kernel is given once."""
    from genesis.backend.cuda.launch import OPTIONS

    unknown = [word for word in words if word not in kernel.arg_names and word not in OPTIONS]
    if unknown:
        what, takes = f"{name}: the kernel has no parameter {unknown[0]}", f"it takes {', '.join(kernel.arg_names)}"
        raise UsageError(what, where="constants=", next=takes)
    wanted = [parameter for parameter in kernel.arg_names if parameter not in words]
    if len(wanted) != len(args):
        what = f"{name}: beside its constants the kernel takes {len(wanted)} arguments ({', '.join(wanted)}); got"
        raise UsageError(f"{what} {len(args)}", where="arguments=", next="give them in the kernel's order")

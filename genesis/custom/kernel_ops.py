"""`triton_op` and `cuda_op`: a kernel in Triton or in CUDA C++ as an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.autograd import TensorBase
from genesis.custom.user_op import Attrs, Constants, KernelLaunch, Operands, Rule, Saved, UserOp, present_capability
from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError
from genesis.op import execute

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Grid
    from genesis.custom.cuda_source import Compiled, SourceKernel


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
) -> TritonOp:
    """Make an op from a Triton kernel.

    All rules are plain functions of the operands: `rule(out, *inputs, **attrs)`, where `out` is a tuple if the op has
    several outputs. They may read shapes, strides, dtypes and attributes, but not values: a later call with the same
    layouts repeats the launches without calling the rules.

    Args:
        name: the op's name in profiles and errors; it must differ from the names of Genesis' own ops.
        kernel: a `triton.jit` function, whose constexpr parameters come last.
        inputs: names of the tensors that the op takes.
        out: `out(*inputs, **attrs)` returns the shape and dtype of the result. Its arguments have `.shape` and
            `.dtype`. It returns one of them, a `genesis.custom.Spec(shape, dtype)`, or a tuple for several outputs.
        grid: programs in up to three dimensions, or a rule that returns them.
        arguments: a rule for the kernel's arguments, in its order: tensors, numbers, None, tuples of integers. The
            default is the outputs, the inputs and the number of elements of the first output.
        constants: the constexpr arguments by name, or a rule for them, including `num_warps`, `num_stages` and
            `maxnreg`. A dtype becomes Triton's type.
        attrs: keyword arguments of the op, with their defaults: numbers, strings, tuples.
        vjp: `vjp(*gradients, *saved, **attrs)` takes tensors and returns the gradient of every input, or None for an
            input without one. It is a function that uses other ops, or another user op with exactly these inputs.
        saves: the tensors that `vjp` gets after the gradients: "inputs", "outputs", or "both" in this order.
        reference: `reference(*inputs, **attrs)` in numpy returns the result, or a tuple. The CPU runs it, and
            `check_op` compares the kernel with it. It gets 2-byte floats as float32.
        sample: `sample(shape, dtype)` returns a tuple of numpy arrays as inputs, if the op does not accept all values.
        flops: a rule for the floating-point operations of a call. The default is one per element of the outputs.
        nbytes: a rule for the memory traffic of a call. The default is one access to each operand.
        contiguous: whether to copy inputs that are not contiguous before the launch. False passes any strides.

    Raises:
        UsageError: the definition is invalid; at a call, a grid or the arguments do not fit the kernel.
    """
    if not hasattr(kernel, "arg_names") or not hasattr(kernel, "fn") or hasattr(kernel, "configs"):
        kind = "an autotuned kernel" if hasattr(kernel, "configs") else f"a plain {type(kernel).__name__}"
        raise UsageError(
            f"{name}: the kernel must be a @triton.jit function, not {kind}",
            next="decorate it with @triton.jit, and pass fixed sizes as constants=",
        )
    cuda_impl = _TritonLaunch(name, grid, arguments, constants, contiguous, kernel)
    return TritonOp(
        name, cuda_impl, inputs=inputs, out=out, attrs=attrs, vjp=vjp, saves=saves, reference=reference, sample=sample,
        flops=flops, nbytes=nbytes,
    )  # fmt: skip


class TritonOp(UserOp):
    """A user's op with a kernel in Triton; `ptx` returns its PTX."""

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """Return the PTX that a call with `inputs` would run on `capability`, by default the GPU's; nothing is run.
        Raises UsageError if kernels are interpreted or the inputs have no elements, and DeviceError without a GPU.
        """
        from genesis.backend.cuda.compile import compiled, dependent
        from genesis.backend.cuda.driver import is_interpreted
        from genesis.backend.cuda.simulated import ARCHITECTURES, fake_device

        if is_interpreted():
            raise UsageError(f"{self.name} has no PTX in Triton's interpreter", next="unset TRITON_INTERPRET")
        capability = capability or present_capability()
        attrs = self.checked(inputs, attrs)
        device, driver = fake_device(ARCHITECTURES[90])  # the launches of a user's op do not depend on the GPU
        driver.launched.clear()
        execute(self.op, tuple(empty(x.shape, x.dtype, device) for x in inputs), attrs)
        if not driver.launched:
            raise UsageError(f"{self.name} launches nothing for inputs without elements")
        kernel, signature, _ = driver.launched[-1]
        text = str(compiled(kernel, signature, capability).asm["ptx"])
        return dependent(text) if capability >= (9, 0) else text


@dataclass(eq=False)
class _TritonLaunch(KernelLaunch):
    """The launches of a Triton kernel."""

    kernel: Any

    def launch(self, programs: Grid, args: Operands, constants: Attrs, operands: Operands, attrs: Attrs) -> None:
        from triton.errors import TritonError

        from genesis.backend.cuda import backend_of
        from genesis.backend.cuda.launch import OPTIONS, launch
        from genesis.kernels.elements import TRITON

        words = {k: TRITON[v.name] if isinstance(v, DType) else v for k, v in constants.items()}
        names = self.kernel.arg_names
        # Check names and the number of arguments, which Triton reports less clearly.
        unknown = [word for word in words if word not in names and word not in OPTIONS]
        if unknown:
            what, takes = f"{self.name}: the kernel has no parameter {unknown[0]}", f"it takes {', '.join(names)}"
            raise UsageError(what, where="constants=", next=takes)
        wanted = [parameter for parameter in names if parameter not in words]
        if len(wanted) != len(args):
            takes = f"{len(wanted)} arguments ({', '.join(wanted)})"
            what = f"{self.name}: without its constants the kernel takes {takes}, not {len(args)}"
            raise UsageError(what, where="arguments=", next="pass the arguments in the kernel's order")
        # Launch; errors in the kernel appear when it is compiled.
        driver = backend_of(operands[1].device).driver
        try:
            launch(self.kernel, programs, *args, **words)
            if driver.pending and not driver.capturing:
                driver.flush()  # a kernel that does not compile fails in the call that needs it
        except TritonError as error:
            what = f"{self.name}: Triton refuses the kernel {self.kernel.__name__}: {error}"
            raise UsageError(what, next="correct the kernel or its arguments") from error


# --- CUDA C++ ---------------------------------------------------------------------------------------------------------


def cuda_op(
    name: str,
    source: str,
    *,
    inputs: Sequence[str],
    out: Rule,
    grid: int | tuple[int, ...] | Rule,
    block: int | tuple[int, ...] | Rule,
    entry: str | None = None,
    arguments: Rule | None = None,
    constants: Constants | None = None,
    shared: int | Rule = 0,
    options: Sequence[str] = (),
    attrs: Mapping[str, Any] | None = None,
    vjp: Rule | None = None,
    saves: Saved = "inputs",
    reference: Rule | None = None,
    sample: Rule | None = None,
    flops: Rule | None = None,
    nbytes: Rule | None = None,
    contiguous: bool = True,
) -> CudaOp:
    """Make an op from CUDA C++ source, which NVRTC compiles for the GPU at the first call.

    `out`, `grid`, `arguments`, `attrs`, `vjp`, `saves`, `reference`, `sample`, `flops`, `nbytes` and `contiguous` are
    the same as for `genesis.triton_op`. Triton's interpreter cannot run machine code and runs the reference instead.

    Args:
        source: CUDA C++ with a kernel, `extern "C"` or not. Every argument is checked against the kernel's parameter
            list: `const float* x` needs a float32 tensor, `int n` a number that fits.
        block: threads per block in up to three dimensions, or a rule that returns them.
        entry: the kernel's name, required if the source has several kernels.
        constants: macros by name, or a rule for them. A dtype becomes its C++ type and includes the header it needs:
            with `{"T": x.dtype}` a source that uses `T*` accepts every float type.
        shared: bytes of dynamic shared memory, or a rule that returns them.
        options: options for NVRTC, such as "--use_fast_math".

    Raises:
        UsageError: the definition is invalid. At a call: the arguments do not fit the parameters, or the source does
            not compile, with the compiler's log and the line.
        DTypeError: at a call, a tensor has another dtype than its parameter.
    """
    from genesis.custom.cuda_source import read_kernel  # plain Python without CUDA

    kernel = read_kernel(source, entry, f"{name}.cu", tuple(options))
    cuda_impl = _CudaLaunch(name, grid, arguments, constants, contiguous, kernel, block, shared)
    op = CudaOp(
        name, cuda_impl, inputs=inputs, out=out, attrs=attrs, vjp=vjp, saves=saves, reference=reference, sample=sample,
        flops=flops, nbytes=nbytes,
    )  # fmt: skip
    cuda_impl.reference = op.op.reference if op.has_reference else None
    return op


class CudaOp(UserOp):
    """A user's op with a kernel in CUDA C++; `compiled` returns its machine code."""

    def compiled(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> Compiled:
        """Compile the kernel for `capability`, by default the GPU's, as a call with `inputs` would.

        Inputs are required only if `constants` is a function. With `capability` no GPU is needed.

        Raises:
            UsageError: the source does not compile, or inputs are missing. DeviceError: NVRTC or a GPU is missing.
        """
        cuda_impl = self.op.cuda_impl
        assert isinstance(cuda_impl, _CudaLaunch)
        operands: tuple[Any, ...] = ()
        if callable(cuda_impl.constants):
            if not inputs:
                raise UsageError(f"the constants of {self.name} depend on its inputs", next="pass the op's inputs")
            attrs = self.checked(inputs, attrs)
            arrays = tuple(x.array if isinstance(x, TensorBase) else x for x in inputs)
            specs = self.op.infer(*arrays, **attrs)
            outs = tuple(empty(s.shape, s.dtype) for s in ((specs,) if isinstance(specs, Spec) else specs))
            operands = (outs[0] if len(outs) == 1 else outs, *arrays)
        macros = cuda_impl.constants_of(operands, attrs)
        return cuda_impl.kernel.compile(capability or present_capability(), macros)

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """The PTX that NVRTC compiles from the source; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).ptx

    def cubin(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> bytes:
        """The machine code, an ELF file for cuobjdump and nvdisasm; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).cubin


@dataclass(eq=False)
class _CudaLaunch(KernelLaunch):
    """The launches of a CUDA C++ kernel."""

    kernel: SourceKernel
    block: int | tuple[int, ...] | Rule
    shared: int | Rule
    reference: Rule | None = None

    def launch(self, programs: Grid, args: Operands, constants: Attrs, operands: Operands, attrs: Attrs) -> None:
        from genesis.backend.cuda.driver import is_interpreted
        from genesis.backend.cuda.simulated import FakeDriver

        threads = self.sizes("block", self.block, operands, attrs)
        shared = self.evaluate("shared memory", self.shared, operands, attrs)
        self.kernel.checked(args, constants)
        if 0 in programs:
            raise UsageError(f"{self.name}: the grid {programs} is empty, but the result has elements", where="grid=")
        backend: Any = operands[1].storage.backend
        if is_interpreted() and not isinstance(backend.driver, FakeDriver):
            self._interpret(operands[0], operands[1:], attrs)
        else:
            self.kernel.launch(backend, programs, threads, shared, args, constants)

    def _interpret(self, out: Any, inputs: tuple[Array, ...], attrs: dict[str, Any]) -> None:
        from genesis.backend.cuda.launch import submit
        from genesis.backend.cuda.simulated import hosted_launch

        reference, outs = self.reference, out if isinstance(out, tuple) else (out,)
        if reference is None:
            raise DeviceError(
                f"{self.name} is CUDA C++, which Triton's interpreter cannot run",
                next="unset TRITON_INTERPRET to run it on a GPU, or pass a numpy function as reference=",
            )

        def work(*arrays: np.ndarray) -> None:
            results = tuple(arrays[: len(outs)])
            reference(results if isinstance(out, tuple) else results[0], *arrays[len(outs) :], **attrs)

        backend: Any = inputs[0].storage.backend
        arrays, driver = [*outs, *inputs], backend.driver
        submit(hosted_launch(driver.run_or_capture, self.kernel.entry, work, arrays), arrays, driver, backend.stream)

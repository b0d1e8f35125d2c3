"""`triton_op` and `cuda_op`: a kernel in Triton or in CUDA C++ as an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.autograd import TensorBase
from genesis.backend import as_device
from genesis.custom.user_op import Attrs, Constants, KernelLaunch, Operands, Rule, Saved, UserOp
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
    cuda_impl = _TritonLaunch(name, grid, arguments, constants, contiguous, kernel)
    return TritonOp(
        name, cuda_impl, inputs=inputs, out=out, attrs=attrs, vjp=vjp, saves=saves, reference=reference, sample=sample,
        flops=flops, nbytes=nbytes,
    )  # fmt: skip


class TritonOp(UserOp):
    """A user's op whose kernel is written in Triton: its PTX can be read."""

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """The PTX for `capability` (by default that of the GPU) that a call with `inputs` would run; nothing runs.

        Raises:
            UsageError: kernels are interpreted, or the inputs have no elements. DeviceError: a GPU is missing.
        """
        from genesis.backend.cuda.compile import compiled, dependent
        from genesis.backend.cuda.driver import is_interpreted
        from genesis.backend.cuda.simulated import ARCHITECTURES, fake_device

        if is_interpreted():
            raise UsageError(f"{self.name} is interpreted and has no PTX", next="unset TRITON_INTERPRET")
        capability = capability or _capability()
        attrs = self.checked(inputs, attrs)
        device, driver = fake_device(ARCHITECTURES[90])  # launches of a user's op do not depend on the GPU
        driver.launched.clear()
        execute(self.op, tuple(empty(x.shape, x.dtype, device) for x in inputs), attrs)
        if not driver.launched:
            raise UsageError(f"{self.name} launches nothing for inputs without elements")
        kernel, signature, _ = driver.launched[-1]
        text = str(compiled(kernel, signature, capability).asm["ptx"])
        return dependent(text) if capability >= (9, 0) else text


def _capability() -> tuple[int, int]:
    """The compute capability of the GPU. Raises: DeviceError, where there is none."""
    from genesis.backend.cuda import driver_for

    try:
        return driver_for(as_device("cuda").index).properties.capability
    except DeviceError as error:
        raise DeviceError("there is no GPU to compile for", next="name one: capability=(9, 0)") from error


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
        unknown = [word for word in words if word not in names and word not in OPTIONS]
        if unknown:
            what, takes = f"{self.name}: the kernel has no parameter {unknown[0]}", f"it takes {', '.join(names)}"
            raise UsageError(what, where="constants=", next=takes)
        wanted = [parameter for parameter in names if parameter not in words]
        if len(wanted) != len(args):
            takes = f"{len(wanted)} arguments ({', '.join(wanted)})"
            what = f"{self.name}: beside its constants the kernel takes {takes}; got {len(args)}"
            raise UsageError(what, where="arguments=", next="give them in the kernel's order")
        driver = backend_of(operands[1].device).driver
        try:
            launch(self.kernel, programs, *args, **words)
            if driver.pending and not driver.capturing:
                driver.flush()  # so that a kernel which does not compile ends the call that needs it
        except TritonError as error:
            what = f"{self.name}: Triton refuses the kernel {self.kernel.__name__}: {error}"
            raise UsageError(what, next="correct the kernel, or what it is given") from error


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
    """Make an op of a CUDA C++ source, compiled through NVRTC for the GPU at the first call.

    `out`, `grid`, `arguments`, `attrs`, `vjp`, `saves`, `reference`, `sample`, `flops`, `nbytes` and `contiguous` are
    those of `genesis.triton_op`. In Triton's interpreter, where no machine code runs, the reference runs in its place.

    Args:
        source: CUDA C++ with a kernel, `extern "C"` or not. Every argument is held against the parameter list
            there: a float32 tensor for `const float* x`, a number that fits for `int n`.
        block: threads of a block in up to three dimensions, or a rule that gives them.
        entry: the kernel's name, where the source has several.
        constants: macros by name, or a rule for them. A dtype stands for its C++ type and brings the header for it:
            `{"T": x.dtype}` lets a source with `T*` take every float type.
        shared: bytes of dynamic shared memory, or a rule that gives them.
        options: for NVRTC, such as "--use_fast_math".

    Raises:
        UsageError: the definition makes no sense; at a call, when the arguments do not fit the parameters, or when the
            source does not compile (with the compiler's log and the line).
        DTypeError: at a call, when a tensor is of another type than its parameter.
    """
    from genesis.custom.cuda_source import read_kernel  # plain Python: needs neither CUDA nor a GPU

    kernel = read_kernel(source, entry, f"{name}.cu", tuple(options))
    cuda_impl = _CudaLaunch(name, grid, arguments, constants, contiguous, kernel, block, shared)
    made = CudaOp(
        name, cuda_impl, inputs=inputs, out=out, attrs=attrs, vjp=vjp, saves=saves, reference=reference, sample=sample,
        flops=flops, nbytes=nbytes,
    )  # fmt: skip
    cuda_impl.reference = made.op.reference if made.has_reference else None
    return made


class CudaOp(UserOp):
    """A user's op whose kernel is written in CUDA C++: its machine code can be read."""

    def compiled(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> Compiled:
        """The kernel compiled for `capability` (by default that of the GPU), as a call with `inputs` would need it.

        Inputs may be left out where `constants` is no function of them. No GPU is needed where `capability` is given.

        Raises:
            UsageError: the source does not compile, or inputs are needed. DeviceError: NVRTC or a GPU is missing.
        """
        cuda_impl = self.op.cuda_impl
        assert isinstance(cuda_impl, _CudaLaunch)
        operands: tuple[Any, ...] = ()
        if callable(cuda_impl.constants):
            if not inputs:
                raise UsageError(f"the constants of {self.name} depend on its inputs", next=f"{self.name}.ptx(x)")
            attrs = self.checked(inputs, attrs)
            arrays = tuple(x.array if isinstance(x, TensorBase) else x for x in inputs)
            found = self.op.infer(*arrays, **attrs)
            outs = tuple(empty(s.shape, s.dtype) for s in ((found,) if isinstance(found, Spec) else found))
            operands = (outs[0] if len(outs) == 1 else outs, *arrays)
        macros = cuda_impl.constants_of(operands, attrs)
        return cuda_impl.kernel.compile(capability or _capability(), macros)

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """The PTX that NVRTC makes of the source; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).ptx

    def cubin(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> bytes:
        """The machine code, an ELF file that cuobjdump and nvdisasm read; see `compiled`."""
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
        shared = self.ask("shared memory", self.shared, operands, attrs)
        self.kernel.checked(args, constants)
        if 0 in programs:
            raise UsageError(f"{self.name}: the grid {programs} is empty and the result is not", where="grid=")
        backend: Any = operands[1].storage.backend
        if is_interpreted() and not isinstance(backend.driver, FakeDriver):
            self._interpret(operands[0], operands[1:], attrs)
        else:
            self.kernel.launch(backend, programs, threads, shared, args, constants)

    def _interpret(self, out: Any, inputs: tuple[Array, ...], attrs: dict[str, Any]) -> None:
        """The reference in the kernel's place."""
        from genesis.backend.cuda.launch import submit
        from genesis.backend.cuda.simulated import hosted_launch

        reference, outs = self.reference, out if isinstance(out, tuple) else (out,)
        if reference is None:
            raise DeviceError(
                f"{self.name} is CUDA C++, which Triton's interpreter does not run",
                next="run it on a GPU (unset TRITON_INTERPRET), or give the op a numpy function: reference=",
            )

        def work(*arrays: np.ndarray) -> None:
            made = tuple(arrays[: len(outs)])
            reference(made if isinstance(out, tuple) else made[0], *arrays[len(outs) :], **attrs)

        backend: Any = inputs[0].storage.backend
        arrays, driver = [*outs, *inputs], backend.driver
        submit(hosted_launch(driver.do, self.kernel.entry, work, arrays), arrays, driver, backend.stream)

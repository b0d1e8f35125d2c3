"""`cuda_op`: a kernel in CUDA C++ as an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.autograd import TensorBase
from genesis.backend import as_device
from genesis.custom.user_op import Attrs, Constants, KernelLaunch, Operands, Rule, Saved, UserOp
from genesis.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Grid
    from genesis.custom.cuda_source import Compiled, SourceKernel


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
    cuda_impl = _CudaLaunch(name, grid, arguments, constants, contiguous)
    cuda_impl.kernel, cuda_impl.block, cuda_impl.shared = kernel, block, shared
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
        from genesis.backend.cuda import driver_for

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
        if capability is None:
            try:
                capability = driver_for(as_device("cuda").index).properties.capability
            except DeviceError as error:
                raise DeviceError("there is no GPU to compile for", next="name one: capability=(9, 0)") from error
        return cuda_impl.kernel.compile(capability, macros)

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """The PTX that NVRTC makes of the source; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).ptx

    def cubin(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> bytes:
        """The machine code, an ELF file that cuobjdump and nvdisasm read; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).cubin


class _CudaLaunch(KernelLaunch):
    """The launches of a CUDA C++ kernel."""

    kernel: SourceKernel
    block: int | tuple[int, ...] | Rule
    shared: int | Rule
    reference: Rule | None

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

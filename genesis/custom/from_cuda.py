"""`cuda_op`: a kernel in CUDA C++ as an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.autograd import TensorBase
from genesis.backend import as_device
from genesis.custom.launching import Constants, arguments_of, constants_of, dense, is_empty, sizes_of
from genesis.custom.user_op import Rule, Saved, UserOp
from genesis.errors import DeviceError, UsageError, UserCode

if TYPE_CHECKING:
    from genesis.custom.cuda_source import SourceKernel
    from genesis.custom.nvrtc import Compiled


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
    cuda_impl = _CudaImpl(name, kernel, grid, block, shared, arguments, constants, contiguous)
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
        assert isinstance(cuda_impl, _CudaImpl)
        macros = (
            self._macros(cuda_impl, inputs, attrs) if callable(cuda_impl.constants) else dict(cuda_impl.constants or {})
        )
        return cuda_impl.kernel.compile(_capability(capability), macros)

    def ptx(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> str:
        """The PTX that NVRTC makes of the source; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).ptx

    def cubin(self, *inputs: Any, capability: tuple[int, int] | None = None, **attrs: Any) -> bytes:
        """The machine code, an ELF file that cuobjdump and nvdisasm read; see `compiled`."""
        return self.compiled(*inputs, capability=capability, **attrs).cubin

    def _macros(self, cuda_impl: _CudaImpl, inputs: Sequence[Any], attrs: dict[str, Any]) -> dict[str, Any]:
        if not inputs:
            raise UsageError(f"the constants of {self.name} depend on its inputs", next=f"{self.name}.ptx(x)")
        merged = self.checked(inputs, attrs)
        arrays = tuple(x.array if isinstance(x, TensorBase) else x for x in inputs)
        found = self.op.infer(*arrays, **merged)
        outs = tuple(empty(s.shape, s.dtype) for s in ((found,) if isinstance(found, Spec) else found))
        out = outs[0] if len(outs) == 1 else outs
        made = constants_of(self.name, cuda_impl.constants, out, arrays, merged)
        return made


def _capability(given: tuple[int, int] | None) -> tuple[int, int]:
    if given is not None:
        return given
    from genesis.backend.cuda import driver_for

    try:
        return driver_for(as_device("cuda").index).properties.capability
    except DeviceError as error:
        raise DeviceError("there is no GPU to compile for", next="name one: capability=(9, 0)") from error


class _CudaImpl:
    """The launches of a CUDA C++ kernel."""

    def __init__(
        self, name: str, kernel: SourceKernel, grid: Any, block: Any, shared: Any, arguments: Rule | None,
        constants: Constants | None, contiguous: bool,
    ) -> None:  # fmt: skip
        self.name, self.kernel, self.grid, self.block, self.shared = name, kernel, grid, block, shared
        self.arguments, self.constants, self.contiguous = arguments, constants, contiguous
        self.reference: Rule | None = None

    def __call__(self, out: Any, *inputs: Array, **attrs: Any) -> None:
        if is_empty(out):
            return
        from genesis.backend.cuda.driver import is_interpreted
        from genesis.backend.cuda.simulated.fake import FakeDriver

        given = tuple(dense(x) for x in inputs) if self.contiguous else inputs
        programs = sizes_of(self.name, "grid", self.grid, out, *given, **attrs)
        threads = sizes_of(self.name, "block", self.block, out, *given, **attrs)
        with UserCode(f"the shared memory of {self.name}"):
            shared = self.shared(out, *given, **attrs) if callable(self.shared) else self.shared
        macros = constants_of(self.name, self.constants, out, given, attrs)
        args = arguments_of(self.name, self.arguments, out, given, attrs)
        self.kernel.checked(args, macros)
        if 0 in programs:
            raise UsageError(f"{self.name}: the grid {programs} is empty and the result is not", where="grid=")
        backend: Any = given[0].storage.backend
        if is_interpreted() and not isinstance(backend.driver, FakeDriver):
            self._interpret(out, given, attrs)
        else:
            self.kernel.launch(backend, programs, threads, shared, args, macros)

    def _interpret(self, out: Any, inputs: tuple[Array, ...], attrs: dict[str, Any]) -> None:
        """The reference in the kernel's place."""
        from genesis.backend.cuda.launch import submit
        from genesis.backend.cuda.simulated.interpreter import hosted_launch

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

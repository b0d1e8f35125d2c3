"""`cuda_module`: the kernels of a CUDA C++ source as functions that launch on tensors, without an op's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genesis.autograd import TensorBase
from genesis.custom.user_op import present_capability, three_sizes
from genesis.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from genesis.custom.cuda_source import Compiled, Macro, SourceKernel


def cuda_module(
    name: str, source: str, *, constants: Mapping[str, Macro] | None = None, options: Sequence[str] = ()
) -> CudaModule:
    """Make a function of every kernel in a CUDA C++ source, `module.kernel(grid, block, args)`.

    NVRTC compiles the kernels together at the first launch, so they share the source's `__device__` variables.

    Args:
        name: the source's name in messages.
        constants: macros by name; a dtype becomes its C++ type and includes the header it needs.
        options: options for NVRTC, such as "--use_fast_math".

    Raises:
        UsageError: the source has no kernel.
    """
    return CudaModule(name, source, dict(constants or {}), tuple(options))


class CudaModule:
    """Kernels that were compiled together; each is an attribute, a `CudaKernel`.

    Attributes:
        kernels: the names of the kernels.
    """

    def __init__(self, name: str, source: str, macros: dict[str, Macro], options: tuple[str, ...]) -> None:
        from genesis.custom.cuda_source import SourceKernel, kernels_of

        self._macros, title, parameters = macros, f"{name}.cu", kernels_of(source, f"{name}.cu")
        self.name, self.kernels = name, tuple(parameters)
        self._sources = {k: SourceKernel(source, k, p, title, options, self.kernels) for k, p in parameters.items()}

    def __getattr__(self, name: str) -> CudaKernel:
        if name not in self.__dict__.get("_sources", ()):
            raise AttributeError(f"the CUDA module has no kernel {name}; it has {self.__dict__.get('kernels')}")
        return CudaKernel(self._sources[name], self._macros)

    def compiled(self, *, capability: tuple[int, int] | None = None) -> Compiled:
        """Compile for `capability`, by default the GPU's, and return the machine code, PTX and build log.

        Raises:
            UsageError: the source does not compile; the message has the line and the log.
            DeviceError: NVRTC or a GPU is missing.
        """
        kernel = self._sources[self.kernels[0]]
        return kernel.compile(capability or present_capability(), self._macros)

    @property
    def log(self) -> str:
        """The compiler's warnings for the present GPU; usually empty. See `compiled`."""
        return self.compiled().log

    def __repr__(self) -> str:
        return f"CudaModule({self.name!r}, kernels={self.kernels})"


class CudaKernel:
    """A kernel of a `CudaModule`."""

    def __init__(self, kernel: SourceKernel, macros: dict[str, Macro]) -> None:
        self._kernel, self._macros = kernel, macros

    def __call__(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], args: Sequence[Any], shared_mem: int = 0
    ) -> None:
        """Launch on the current stream. Autograd does not see what the kernel writes.

        Args:
            grid, block: blocks, and threads per block, in up to three dimensions.
            args: CUDA tensors of one device and numbers, in the order of the kernel's parameters.
            shared_mem: bytes of dynamic shared memory.

        Raises:
            UsageError: an argument does not fit its parameter, or the source does not compile.
            DTypeError: a tensor has another dtype than its parameter.
            DeviceError: a tensor is on another device, or Triton's interpreter replaces the GPU.
        """
        from genesis.backend.cuda import find_backend
        from genesis.backend.cuda.driver import is_interpreted
        from genesis.backend.cuda.simulated import FakeDriver

        where = self._kernel.title
        values = tuple(a.array if isinstance(a, TensorBase) else a for a in args)
        devices = {a.array.device for a in args if isinstance(a, TensorBase)}
        if len(devices) > 1 or any(device.type != "cuda" for device in devices):
            what = f"{self._kernel.entry} got tensors on {', '.join(sorted(map(str, devices)))}"
            raise DeviceError(what, where=where, next="move them to one CUDA device")
        backend = find_backend(next(iter(devices), None))
        if is_interpreted() and not isinstance(backend.driver, FakeDriver):
            what = f"{self._kernel.entry} is CUDA C++, which Triton's interpreter cannot run"
            raise DeviceError(what, where=where, next="unset TRITON_INTERPRET to run it on a GPU")
        programs, threads = (three_sizes(where, k, v) for k, v in (("grid", grid), ("block", block)))
        if 0 in programs or 0 in threads:
            raise UsageError(f"{self._kernel.entry} got the grid {programs} and the block {threads}", where=where)
        self._kernel.launch(backend, programs, threads, shared_mem, values, self._macros)

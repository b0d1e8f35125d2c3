"""CUDA C++ sources: their parameter lists, how launches are packed, and NVRTC where it is installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis
from genesis.array import empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import Function
from genesis.backend.cuda.simulated import ARCHITECTURES, fake_device
from genesis.custom import cuda_source
from genesis.custom.cuda_source import Compiled, Parameter, compile_source, parameters_of, read_kernel
from genesis.errors import DeviceError, UsageError
from genesis.measure.kernels import code_of
from tests.kernels.compiler import has_nvrtc

MIXED = """
template <int N> __device__ float twice(float x) { return x * N; }
/* __global__ void commented(int n) */
__global__ void first(float* x) {}
extern "C" __global__ void __launch_bounds__(256) second(
    float* __restrict__ out, const unsigned char *mask, int n, unsigned long long int seed,
    const float scale, bool on, long count, double d, T value[], half* h
) {}
"""


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


# --- Parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_read() -> None:
    name, found = parameters_of(MIXED, "second", "op")
    assert name == "second"
    assert found == (
        Parameter("out", "float", True),
        Parameter("mask", "unsigned char", True),
        Parameter("n", "int", False),
        Parameter("seed", "unsigned long long", False),
        Parameter("scale", "float", False),
        Parameter("on", "bool", False),
        Parameter("count", "long", False),
        Parameter("d", "double", False),
        Parameter("value", "T", True),
        Parameter("h", "half", True),
    )


def test_the_one_kernel_needs_no_name() -> None:
    assert parameters_of("__global__ void only() {}", None, "op") == ("only", ())
    assert parameters_of("__global__ void only(void) {}", None, "op") == ("only", ())


@pytest.mark.parametrize(
    ("text", "entry", "what"),
    [
        ("void host(int n) {}", None, "has no `__global__ void"),
        (MIXED, None, "has the kernels first, second"),
        (MIXED, "commented", "has no kernel commented"),
    ],
)
def test_a_kernel_that_is_not_there(text: str, entry: str | None, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parameters_of(text, entry, "op")


def test_a_parameter_that_cannot_be_passed() -> None:
    kernel = read_kernel("__global__ void k(struct Big b) {}", None, "k.cu")
    with pytest.raises(UsageError, match="`struct Big b` of the kernel k has a type that cannot be passed"):
        kernel.checked((3,), {})


# --- Launches ---------------------------------------------------------------------------------------------------------


# Where and how wide the driver says that (float*, int, float, long long, bool, unsigned char) are.
PARAMETERS = ((0, 8), (8, 4), (12, 4), (16, 8), (24, 1), (25, 1))


class FakeDriver:
    """Remembers launches with the parameters as the GPU would read them."""

    def __init__(self) -> None:
        self.index, self.pending, self.capturing = 0, [], False
        self.properties = SimpleNamespace(capability=(9, 0))
        self.launches, self.began, self.loads = [], 0, 0

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        assert (image, name, parameters) == (b"code", "mangled", len(PARAMETERS))
        self.loads += 1
        return Function(77, PARAMETERS)

    def serialize_next_launch(self) -> None:
        self.began += 1

    def launcher(
        self, function: int, grid: Any, block: Any, shared: int, parameters: int, cluster: int
    ) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            addresses = (ctypes.c_uint64 * len(PARAMETERS)).from_address(parameters)
            values = [ctypes.string_at(at, size) for at, (_, size) in zip(addresses, PARAMETERS, strict=True)]
            self.launches.append((function, grid, block, shared, stream, values))
            assert cluster == 1

        return launch


def test_a_launch_passes_what_the_kernel_reads() -> None:
    text = "__global__ void k(float* out, int n, float by, long long big, bool on, unsigned char small) {}"
    kernel, x = read_kernel(text, None, "k.cu"), genesis.zeros(3, device="cuda")
    driver = FakeDriver()
    pool = SimpleNamespace(with_room=lambda what, call: call())
    backend: Any = SimpleNamespace(driver=driver, pool=pool, stream=5)
    args = (x.array, -3, 2, 1 << 40, True, 200)
    made = Compiled("mangled", "", b"code", "")
    with mock.patch.object(cuda_source, "compile_together", return_value=(made,)):
        cuda_source._functions.clear()
        kernel.launch(backend, (2, 3, 4), (8, 4, 1), 64, args, {})
        driver.capturing = True
        kernel.launch(backend, (2, 3, 4), (8, 4, 1), 64, args, {})
        cuda_source._functions.clear()
    numbers = [np.int32(-3), np.float32(2), np.int64(1 << 40), np.bool_(True), np.uint8(200)]
    values = [np.uint64(x.array.data_ptr()).tobytes(), *(number.tobytes() for number in numbers)]
    assert driver.launches == [(77, (2, 3, 4), (8, 4, 1), 64, 5, values)] * 2
    assert (driver.loads, driver.began) == (1, 1)  # in a graph it waits for what is launched before


def test_a_device_that_runs_nothing_notes_it() -> None:
    device, driver = fake_device(ARCHITECTURES[80])
    kernel = read_kernel(SQUARE, None, "k.cu")
    x = empty((5,), genesis.float32, device)
    driver.launched.clear()
    kernel.launch(backend_of(device), (2, 1, 1), (4, 1, 1), 0, (x, x, 5), {"T": genesis.float32, "SIZE": 4})
    (found,) = driver.launched
    assert (found.kernel.__name__, found.grid) == ("square", (2, 1, 1))
    assert found.signature.types == ("T*", "T*", "long long")
    assert found.signature.constants == (("SIZE", 4), ("T", genesis.float32))


# --- NVRTC ------------------------------------------------------------------------------------------------------------

SQUARE = """__global__ void square(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)SIZE + threadIdx.x;
    if (i < n) out[i] = (T)((float)x[i] * (float)x[i]);
}
"""


def test_errors_show_the_line() -> None:
    log = 'k.cu(2): error: identifier "j" is undefined\n\n1 error detected in the compilation of "k.cu".'
    told = cuda_source._with_lines(log, "one\n  two = j;\nthree", "k.cu")
    assert told.startswith(
        'the CUDA C++ source does not compile, line 2: identifier "j" is undefined\n    two = j;\nk.cu(2): error'
    )
    assert (
        cuda_source._with_lines("nothing known", "one", "k.cu") == "the CUDA C++ source does not compile\nnothing known"
    )


def test_macros_stand_in_front() -> None:
    macros = (("T", genesis.bfloat16), ("SIZE", 4), ("ON", True), ("BY", 0.5))
    assert cuda_source._preamble(macros) == (
        "#include <cuda_bf16.h>\n#define T __nv_bfloat16\n#define SIZE 4\n#define ON true\n#define BY 0.5f\n"
    )


def test_nvrtc_that_is_not_there() -> None:
    missing = SimpleNamespace(nvrtcVersion=mock.Mock(side_effect=RuntimeError("no libnvrtc")))
    cuda_source._bindings.cache_clear()
    absent = mock.patch.dict("sys.modules", {"cuda.bindings": SimpleNamespace(nvrtc=missing)})
    with absent, pytest.raises(DeviceError, match=r"NVRTC, which is not installed .* pip install nvidia-cuda-nvrtc"):
        compile_source("__global__ void unseen() {}", "unseen", (9, 0))
    cuda_source._bindings.cache_clear()


@needs_nvrtc
@pytest.mark.parametrize("dtype", [genesis.float32, genesis.float64, genesis.bfloat16, genesis.float16])
def test_a_source_compiles_without_a_gpu(dtype: Any) -> None:
    made = compile_source(SQUARE, "square", (9, 0), (("SIZE", 256), ("T", dtype)))
    assert f".entry {made.name}(" in made.ptx
    assert ".target sm_90" in made.ptx
    assert made.cubin[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_source_that_does_not_compile() -> None:
    wrong = SQUARE.replace("out[i] =", "out[j] =")
    with pytest.raises(UsageError, match=r'line 3: identifier "j" is undefined\n.*out\[j\] = ') as raised:
        compile_source(wrong, "square", (9, 0), (("SIZE", 256), ("T", genesis.float32)), (), "square.cu")
    assert raised.value.where == "square.cu"
    with pytest.raises(DeviceError, match="--no-such-option"):
        compile_source(SQUARE, "square", (9, 0), (("SIZE", 1), ("T", genesis.float32)), ("--no-such-option",))


@needs_nvrtc
def test_an_op_shows_its_code() -> None:
    op = genesis.cuda_op(
        "user_square_shown", SQUARE, inputs=("x",), out=lambda x: x, grid=1, block=256,
        constants=lambda out, x: {"T": x.dtype, "SIZE": 256},
    )  # fmt: skip
    assert ".target sm_80" in op.ptx(genesis.zeros(3), capability=(8, 0))
    assert op.cubin(genesis.zeros(3), capability=(8, 0))[:4] == b"\x7fELF"
    with pytest.raises(UsageError, match="depend on its inputs"):
        op.ptx(capability=(8, 0))
    (code,) = code_of(op.name, "ptx", ARCHITECTURES[80], shapes=[(5,)])
    assert code.startswith("// square: ptx for sm_80")
    assert ".target sm_80" in code
    with pytest.raises(UsageError, match="square is CUDA C\\+\\+ and has no ttir"):
        list(code_of(op.name, "ttir", ARCHITECTURES[80], shapes=[(5,)]))

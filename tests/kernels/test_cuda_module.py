"""Kernels of one CUDA C++ source, launched as functions of a module."""

from __future__ import annotations

from typing import Any

import pytest

import genesis
from genesis.backend.cuda.simulated import ARCHITECTURES, fake_device
from genesis.custom import CudaModule, cuda_module
from genesis.errors import DeviceError, DTypeError, UsageError
from tests.kernels.compiler import has_nvrtc

SOURCE = """
__device__ int launches = 0;  // of all kernels

__global__ void scale(T* out, const T* x, int n, float by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, unused;
    if (i == 0) launches++;
    if (i < n) out[i] = (T)((float)x[i] * by);
}

extern "C" __global__ void shift(float* out, const float* x, int n) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) launches++;
    out[threadIdx.x] = tile[(threadIdx.x + 1) % n];
}

__global__ void count(int* out) { *out = launches; }
"""

needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


def module(source: str = SOURCE) -> CudaModule:
    return cuda_module("several", source, constants={"T": genesis.float32})


@needs_nvrtc
def test_the_kernels_are_compiled_together_with_a_log() -> None:
    code = module().compiled(capability=(9, 0))
    assert all(f".entry {name}" in code.ptx for name in ("shift", "_Z5scale", "_Z5count"))
    assert 'several.cu(5): warning #177-D: variable "unused"' in code.log
    with pytest.raises(UsageError, match=r'line 15: identifier "tilde" is undefined\n.*= tilde'):
        module(SOURCE.replace("= tile[(", "= tilde[(")).compiled(capability=(9, 0))


def test_launches_are_checked_and_passed_on() -> None:
    device, driver = fake_device(ARCHITECTURES[90])
    x, kernels = genesis.zeros(5, device=device), module()
    assert kernels.kernels == ("scale", "shift", "count") and "scale" in repr(kernels)
    driver.launched.clear()
    kernels.scale(2, (4,), (x, x, 5, 2.0))
    kernels.shift((1, 2), 5, (x, x, 5), shared_mem=20)
    scale, shift = driver.launched
    assert (scale.kernel.__name__, scale.grid, scale.signature.types[:2]) == ("scale", (2, 1, 1), ("T*", "T*"))
    assert (shift.grid, shift.signature.options) == ((1, 2, 1), (("block", (5, 1, 1)), ("shared", 20)))


@pytest.mark.parametrize(
    ("launch", "error", "text"),
    [
        (lambda k, x: k.scale(1, 4, (x, x, 5)), UsageError, r"takes 4 arguments \(out, x, n, by\), not 3"),
        (
            lambda k, x: k.shift(1, 4, (x, genesis.zeros(5, dtype="float64", device=x.device), 5)),
            DTypeError,
            "got a float64 tensor",
        ),
        (lambda k, x: k.shift(1, 4, (x, x.cpu(), 5)), DeviceError, "tensors on cpu, cuda"),
        (lambda k, x: k.shift(0, 4, (x, x, 5)), UsageError, r"the grid \(0, 1, 1\)"),
        (lambda k, x: k.shift(1, 2.5, (x, x, 5)), UsageError, "block must be up to three sizes, not 2.5"),
        (lambda k, x: k.absent(1, 4, ()), AttributeError, r"no kernel absent; it has \('scale', 'shift', 'count'\)"),
    ],
)
def test_a_launch_that_does_not_fit(launch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        launch(module(), genesis.zeros(5, device=fake_device(ARCHITECTURES[90])[0]))


def test_a_source_without_kernels_and_the_interpreter_are_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(UsageError, match="has no `__global__ void"):
        module("void host() {}")
    if not request.config.getoption("--gpu"):
        with pytest.raises(DeviceError, match="unset TRITON_INTERPRET"):
            module().count(1, 1, (genesis.zeros(1, dtype="int32", device="cuda"),))


@pytest.mark.gpu
def test_kernels_share_the_variables_of_their_source() -> None:
    x, kernels = genesis.arange(8.0, device="cuda"), module()
    out, total = genesis.empty_like(x), genesis.zeros(1, dtype="int32", device="cuda")
    kernels.scale(1, 8, (out, x, 8, 2.5))
    assert out.tolist() == [2.5 * i for i in range(8)]
    for shared_mem in (100_000, 32):  # a smaller size does not lower the limit of the larger one
        kernels.shift(1, 8, (out, x, 8), shared_mem=shared_mem)
        kernels.shift(1, 8, (out, x, 8), 100_000)
        assert out.tolist() == [*range(1, 8), 0]
    kernels.count(1, 1, (total,))
    assert total.item() == 5
    assert "unused" in kernels.log

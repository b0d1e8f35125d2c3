"""What the driver's launcher asks of CUDA, with a CUDA that only notes it."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Any

import pytest

from genesis.backend.cuda.driver import GpuDriver
from genesis.errors import DeviceError


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Cuda:
    """Answers launches with the given results, then with success."""

    CUresult = Result

    def __init__(self, *results: Result) -> None:
        self.results, self.launches, self.entered = deque(results), [], 0
        self.cuLaunchKernel, self.cuCtxSetCurrent = self.launch, self.enter
        self.cuGetErrorString = lambda code: (Result.CUDA_SUCCESS, b"what went wrong")

    def launch(self, *given: Any) -> tuple[Result]:
        self.launches.append(given)
        return (self.results.popleft() if self.results else Result.CUDA_SUCCESS,)

    def enter(self, context: Any) -> tuple[Result]:
        self.entered += 1
        return (Result.CUDA_SUCCESS,)


def driver_of(cuda: Cuda) -> Any:
    driver: Any = object.__new__(GpuDriver)
    driver._cuda, driver._success, driver._context = cuda, Result.CUDA_SUCCESS, 5
    driver.index, driver.capturing, driver._thread = 0, False, threading.local()
    driver._thread.entered = True
    return driver


@pytest.mark.parametrize(("threads", "block"), [(128, (128, 1, 1)), ((8, 4, 2), (8, 4, 2))])
def test_a_launch_names_grid_block_and_parameters(threads: Any, block: tuple[int, ...]) -> None:
    cuda = Cuda()
    run = driver_of(cuda).launcher("kernel", (3, 2, 1), threads, 64, 4096)
    run(11)
    run(12)
    assert cuda.launches == [("kernel", 3, 2, 1, *block, 64, stream, 4096, 0) for stream in (11, 12)]


@pytest.mark.parametrize("threads", [128, (8, 4, 2)])
def test_a_thread_that_has_not_used_the_device_enters_it_and_launches_again(threads: Any) -> None:
    cuda = Cuda(Result.CUDA_ERROR_INVALID_CONTEXT)
    driver_of(cuda).launcher("kernel", (3, 2, 1), threads, 64, 4096)(11)
    first, second = cuda.launches
    assert first == second
    assert cuda.entered == 1


def test_a_launch_that_fails_says_so() -> None:
    run = driver_of(Cuda(Result.CUDA_ERROR_LAUNCH_FAILED)).launcher("kernel", (1, 1, 1), 32, 0, 0)
    with pytest.raises(
        DeviceError, match=r"a kernel launch on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED \(what went wrong"
    ):
        run(0)

"""What the driver asks of CUDA, with a CUDA that only notes it."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from genesis.backend.cuda import driver as drivers
from genesis.backend.cuda.driver import Driver
from genesis.backend.cuda.simulated import HostDriver
from genesis.errors import DeviceError


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Attribute:
    """A launch attribute: its id and its value, a union."""

    def __init__(self) -> None:
        self.id, self.value = "", SimpleNamespace(clusterDim=SimpleNamespace())


class Cuda:
    """Answers launches with the given results, then with success."""

    CUresult, CUlaunchConfig, CUlaunchAttribute, CUstream = Result, SimpleNamespace, Attribute, int
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early", CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster"
    )

    def __init__(self, *results: Result) -> None:
        self.results, self.launches, self.entered = deque(results), [], 0
        self.cuLaunchKernelEx, self.cuCtxSetCurrent = self.launch, self.enter
        self.cuGetErrorString = lambda code: (Result.CUDA_SUCCESS, b"what went wrong")

    def launch(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Result]:
        self.launches.append((config, function, parameters, extra))
        return (self.results.popleft() if self.results else Result.CUDA_SUCCESS,)

    def enter(self, context: Any) -> tuple[Result]:
        self.entered += 1
        return (Result.CUDA_SUCCESS,)


def driver_of(cuda: Cuda) -> Any:
    driver: Any = object.__new__(Driver)
    driver._cuda, driver._success, driver._context = cuda, Result.CUDA_SUCCESS, 5
    driver.index, driver.capturing = 0, False
    drivers._current.driver = driver
    return driver


@pytest.fixture(autouse=True)
def _no_device_afterwards() -> Iterator[None]:
    yield
    drivers._current.driver = None


@pytest.mark.parametrize("block", [(128, 1, 1), (8, 4, 2)])
def test_a_launch_names_grid_block_and_parameters(block: tuple[int, ...]) -> None:
    cuda = Cuda()
    run = driver_of(cuda).launcher("kernel", (3, 2, 1), block, 64, 4096)
    for stream in (11, 12, 11):
        run(stream)
    assert [launch[1:] for launch in cuda.launches] == [("kernel", 4096, 0)] * 3
    configs = [launch[0] for launch in cuda.launches]
    assert [c.hStream for c in configs] == [11, 12, 11]
    assert configs[0] is configs[2]
    for c in configs:
        assert (c.gridDimX, c.gridDimY, c.gridDimZ) == (3, 2, 1)
        assert (c.blockDimX, c.blockDimY, c.blockDimZ) == block
        assert c.sharedMemBytes == 64
        assert not hasattr(c, "attrs")


def test_in_a_capture_all_but_the_first_launch_may_be_brought_early() -> None:
    cuda = Cuda()
    driver = driver_of(cuda)
    run = driver.launcher("kernel", (3, 2, 1), (128, 1, 1), 64, 4096)
    run(11)
    driver.capturing, driver.dependent, driver._is_first = True, True, True
    driver.properties = SimpleNamespace(capability=(9, 0))
    run(11)
    run(11)
    plain, first, second = [launch[0] for launch in cuda.launches]
    assert first is plain
    assert second.numAttrs == 1
    assert second.attrs[0].id == "early"
    assert second.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_programs_of_a_cluster_are_neighbours_in_the_first_dimension() -> None:
    cuda = Cuda()
    driver = driver_of(cuda)
    run = driver.launcher("kernel", (8, 1, 1), (128, 1, 1), 64, 4096, 4)
    run(11)
    driver.capturing, driver.dependent, driver._is_first = True, True, False
    driver.properties = SimpleNamespace(capability=(9, 0))
    run(11)
    plain, early = [launch[0] for launch in cuda.launches]
    assert [a.id for a in plain.attrs] == ["cluster"]
    assert vars(plain.attrs[0].value.clusterDim) == {"x": 4, "y": 1, "z": 1}
    assert ([a.id for a in early.attrs], early.numAttrs) == (["early", "cluster"], 2)


def test_a_thread_that_has_not_used_the_device_enters_it() -> None:
    cuda = Cuda()
    run = driver_of(cuda).launcher("kernel", (3, 2, 1), (128, 1, 1), 64, 4096)
    run(11)
    assert cuda.entered == 0
    thread = threading.Thread(target=run, args=(11,))
    thread.start()
    thread.join()
    assert (cuda.entered, len(cuda.launches)) == (1, 2)


@pytest.mark.parametrize("how", ["launch", "call"])
def test_two_devices_take_turns_in_a_thread(how: str) -> None:
    """The context is the thread's, not the driver's: whoever uses a device after another one enters it."""
    cudas = [Cuda(), Cuda()]
    both = [driver_of(cuda) for cuda in cudas]
    runs = [each.launcher("kernel", (1, 1, 1), (32, 1, 1), 0, 0) for each in both]
    for turn in (0, 0, 1, 1, 0, 1):
        runs[turn](0) if how == "launch" else both[turn].enter()
    assert [cuda.entered for cuda in cudas] == [2, 2]


def test_a_launch_that_fails_says_so() -> None:
    run = driver_of(Cuda(Result.CUDA_ERROR_LAUNCH_FAILED)).launcher("kernel", (1, 1, 1), (32, 1, 1), 0, 0)
    with pytest.raises(
        DeviceError, match=r"a kernel launch on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED \(what went wrong"
    ):
        run(0)


def test_every_call_of_the_driver_is_answered_without_a_gpu() -> None:
    """Those made of others need no answer of their own."""
    composed = {"mark", "wait_once", "follow"}
    calls = {name for name, each in vars(Driver).items() if callable(each) and not name.startswith("_")}
    assert calls - composed <= set(vars(HostDriver))


class Answering:
    """A CUDA whose every function succeeds, and is noted; enumerations have every member."""

    CUresult = Result

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return Members()

        def call(*args: Any) -> tuple[Any, ...]:
            self.called.append(name)
            results = {"cuMemGetInfo": (5, 7), "cuStreamQuery": (), "cuEventQuery": ()}
            return (Result.CUDA_SUCCESS, *results.get(name, (3,)))

        call.__name__ = name
        return call


class Members:
    def __getattr__(self, name: str) -> int:
        return 0


CALLS: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "allocate": ((512,), ["cuMemAlloc"]),
    "free": ((3,), ["cuMemFree"]),
    "allocate_pinned": ((512,), ["cuMemHostAlloc"]),
    "register_host": ((4096, 512), ["cuMemHostRegister"]),
    "unregister_host": ((4096,), ["cuMemHostUnregister"]),
    "memory_info": ((), ["cuMemGetInfo"]),
    "cuda_version": ((), ["cuDriverGetVersion"]),
    "enter": ((), []),
    "is_linked": ((range(2),), ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetP2PAttribute"]),
    "copy": ((1, 2, 3, 0), ["cuMemcpyAsync"]),
    "fill": ((1, 0, 3, 0), ["cuMemsetD8Async"]),
    "create_stream": ((-1,), ["cuStreamCreateWithPriority"]),
    "synchronize_stream": ((4,), ["cuStreamSynchronize"]),
    "is_stream_done": ((4,), ["cuStreamQuery"]),
    "wait_event": ((4, 3), ["cuStreamWaitEvent"]),
    "create_event": ((True,), ["cuEventCreate"]),
    "destroy_event": ((3,), ["cuEventDestroy"]),
    "record_event": ((3, 4), ["cuEventRecord"]),
    "record_time": ((3, 4), ["cuEventRecordWithFlags"]),
    "synchronize_event": ((3,), ["cuEventSynchronize"]),
    "is_event_done": ((3,), ["cuEventQuery"]),
    "has_happened": ((3,), ["cuEventQuery"]),
    "elapsed": ((3, 4), ["cuEventElapsedTime"]),
    "synchronize": ((), ["cuCtxSynchronize"]),
    "mark": ((4,), ["cuEventCreate", "cuEventRecord"]),
    "wait_once": ((4, 3), ["cuStreamWaitEvent", "cuEventDestroy"]),
    "follow": ((4, 5), ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy"]),
    "begin_capture": ((4,), ["cuStreamBeginCapture"]),
    "end_capture": ((4,), ["cuStreamEndCapture"]),
    "is_capturing": ((4,), ["cuStreamIsCapturing"]),
    "instantiate": ((3,), ["cuGraphInstantiate"]),
    "launch_graph": ((3, 4), ["cuGraphLaunch"]),
    "destroy_graph": ((3, 4), ["cuGraphExecDestroy", "cuGraphDestroy"]),
    "sm_facts": ((), ["cuDeviceGetAttribute"] * 5),
    "kernel_facts": ((7, 128, 0), ["cuFuncGetAttribute"] * 3 + ["cuOccupancyMaxActiveBlocksPerMultiprocessor"]),
}
UNORDERED = {"allocate", "allocate_pinned", "memory_info", "create_stream", "create_event", "destroy_event",
             "register_host", "unregister_host", "has_happened", "cuda_version", "enter", "is_linked",
             "end_capture", "is_capturing", "instantiate", "destroy_graph", "sm_facts", "kernel_facts"}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_method_enters_the_device_and_calls_cuda(name: str) -> None:
    """In stream order what waits for its kernel is launched first."""
    args, expected = CALLS[name]
    cuda: Any = Answering()
    driver, launched = driver_of(cuda), []
    drivers._current.driver, driver._device = None, 0
    driver._flushing, driver._is_flushing = threading.RLock(), False
    driver.pending = deque([lambda: launched.append(len(cuda.called))])
    getattr(driver, name)(*args)
    assert cuda.called == ["cuCtxSetCurrent", *expected]
    assert launched == ([] if name in UNORDERED else [2 if name in ("mark", "follow") else 1])


@pytest.mark.parametrize(("answer", "expected"), [((Result.CUDA_SUCCESS, 1), True), ((Result.CUDA_SUCCESS, 0), False),
                                                  ((Result.CUDA_ERROR_LAUNCH_FAILED, 0), False)])  # fmt: skip
def test_devices_are_linked_where_the_driver_says_so(answer: tuple[Any, ...], expected: bool) -> None:
    cuda: Any = Answering()
    driver = driver_of(cuda)
    driver._device = 0

    def attribute(*args: Any) -> tuple[Any, ...]:
        return answer

    cuda.cuDeviceGetP2PAttribute = attribute
    cuda.cuGetErrorString = lambda code: (Result.CUDA_SUCCESS, b"no")
    assert driver.is_linked(range(3)) is expected  # of 3 that there are
    assert driver.is_linked([0]) is True
    assert driver.is_linked(range(4)) is False


def test_every_method_of_the_driver_is_called_above() -> None:
    others = {"flush", "launcher", "load", "serialize_next_launch"}
    public = {name for name, each in vars(Driver).items() if callable(each) and not name.startswith("_")}
    assert public == set(CALLS) | others

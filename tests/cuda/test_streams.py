"""Devices, streams, events, copies that do not wait, and what is there without a GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import genesis
from genesis import cuda
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import Properties
from genesis.backend.cuda.stream import PinnedPool
from genesis.errors import DeviceError, UsageError


def test_the_device_is_described() -> None:
    assert cuda.is_available()
    assert cuda.device_count() >= 1
    assert cuda.get_device_name()
    assert cuda.get_device_capability() == cuda.get_device_properties("cuda:0").capability
    assert cuda.get_device_name() in cuda.check_supported()
    assert cuda.current_device() == 0


def test_device_blocks_say_what_cuda_means() -> None:
    with cuda.device(0) as entered, cuda.device(entered.index):
        assert genesis.zeros(1, device="cuda").device == Device("cuda", 0)
    with pytest.raises(DeviceError, match="cuda:63"):
        cuda.device(63)
    with pytest.raises(DeviceError, match="cpu is not a CUDA device"):
        cuda.synchronize("cpu")


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Properties("NVIDIA T4", (7, 5), 16 << 30, 40, 64 << 10, 4 << 20)
    monkeypatch.setattr(backend_for(Device("cuda")).driver, "properties", old)
    with pytest.raises(DeviceError, match=r"T4 of compute capability 7\.5.*8\.0 or above") as caught:
        cuda.check_supported()
    assert caught.value.exit_code == 6


def test_stream_blocks_nest_and_leave_the_stream_as_it_was() -> None:
    one, two = cuda.Stream(), cuda.Stream(priority=-1)
    assert cuda.current_stream() == cuda.default_stream()
    with cuda.stream(one):
        assert cuda.current_stream() == one
        with cuda.stream(two), cuda.stream(None):
            assert cuda.current_stream() == two
        assert cuda.current_stream() == one
    assert cuda.current_stream() == cuda.default_stream() != one
    with pytest.raises(RuntimeError, match="inside"), cuda.stream(one):
        raise RuntimeError("inside")
    assert cuda.current_stream() == cuda.default_stream()


def test_a_stream_is_reused_after_its_owner_is_gone() -> None:
    handle = cuda.Stream().cuda_stream
    assert cuda.Stream().cuda_stream == handle


def test_work_on_a_side_stream_is_seen_after_waiting() -> None:
    side = cuda.Stream()
    x = genesis.arange(1000.0, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = x * 2
    done = side.record_event()
    cuda.current_stream().wait_event(done)
    y.record_stream(cuda.current_stream())
    assert np.array_equal((y + 1).cpu().numpy(), 2 * np.arange(1000.0, dtype=np.float32) + 1)
    side.synchronize()
    assert side.query()
    assert done.query()


def test_events_keep_milliseconds() -> None:
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    assert begin.query()
    with pytest.raises(UsageError, match="events with timing"):
        begin.elapsed_time(end)
    begin.record()
    genesis.ones(100, device="cuda").add_(1)
    end.record()
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 60_000
    with pytest.raises(UsageError, match="events with timing"):
        cuda.Event().elapsed_time(end)


def test_copies_from_and_to_pinned_memory() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    pinned = genesis.tensor(values).pin_memory()
    assert pinned.is_pinned()
    assert pinned.pin_memory() is pinned
    assert not genesis.tensor(values).is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    assert there.is_cuda
    back = genesis.zeros(2, 3, dtype="int64").pin_memory()
    back.copy_(there, non_blocking=True)
    cuda.synchronize()
    assert np.array_equal(back.numpy(), values)
    there.copy_(genesis.tensor([[7.0], [8.0]]))  # broadcast and cast on the way
    assert there.cpu().tolist() == [[7, 7, 7], [8, 8, 8]]
    with pytest.raises(DeviceError, match="cuda"):
        there.pin_memory()
    with pytest.raises(DeviceError, match="record_stream"):
        genesis.tensor(values).record_stream(cuda.Stream())


def test_pinned_memory_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(Device("cuda"))
    monkeypatch.setattr(backend, "pinned", PinnedPool(backend))  # without the blocks that other tests left
    first = genesis.zeros(1000).pin_memory()
    address, held = first.data_ptr(), cuda.pinned_memory_reserved()
    first.to("cuda", non_blocking=True)
    cuda.synchronize()
    del first
    assert genesis.ones(1000).pin_memory().data_ptr() == address
    assert cuda.pinned_memory_reserved() == held


def test_moving_is_differentiable_and_casts_where_bytes_are_few() -> None:
    x = genesis.arange(4.0, requires_grad=True)
    y = x.to("cuda", "bfloat16")
    assert (y.device, y.dtype) == (Device("cuda"), genesis.bfloat16)
    y.cpu().float().sum().backward()
    assert x.grad is not None
    assert (x.grad.device.type, x.grad.tolist()) == ("cpu", [1.0] * 4)
    assert x.to("cpu") is x
    assert x.cuda().requires_grad


def test_a_module_moves_and_loads_across_devices() -> None:
    layer = genesis.nn.Linear(3, 2)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.to("cuda")
    layer.weight.detach().zero_()
    layer.load_state_dict(state)
    assert layer.weight.is_cuda
    assert np.array_equal(layer.weight.detach().cpu().numpy(), state["weight"].detach().numpy())


def test_importing_genesis_and_asking_for_devices_is_safe_without_a_driver() -> None:
    script = (
        "import sys, genesis\n"
        "assert 'genesis.cuda' not in sys.modules and 'triton' not in sys.modules and 'cuda' not in sys.modules\n"
        "import genesis.backend.cuda.driver as driver\n"
        "def none(): raise driver.DeviceError('no driver')\n"
        "driver.start = none\n"
        "import genesis.cuda; genesis.cuda.start = none\n"
        "print(genesis.cuda.is_available(), genesis.cuda.device_count(), 'torch' in sys.modules)"
    )
    clean = {"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=False)
    assert done.stdout == "False 0 False\n", done.stderr


@pytest.mark.gpu
def test_a_copy_runs_beside_the_host() -> None:
    pinned = genesis.ones(64 << 20).pin_memory()  # 256 MiB
    pinned.to("cuda", non_blocking=True)
    cuda.synchronize()
    begin = cuda.Event(enable_timing=True)
    end = cuda.Event(enable_timing=True)
    copier = cuda.Stream()
    with cuda.stream(copier):
        begin.record()
        there = pinned.to("cuda", non_blocking=True)
        end.record()
    waited = not end.query()
    end.synchronize()
    assert waited, "the copy had ended before the host went on"
    assert begin.elapsed_time(end) > 1
    assert float(there.sum().item()) == 64 << 20


def test_a_stream_block_without_a_stream_makes_one() -> None:
    x = genesis.ones(1000, device="cuda")
    with cuda.stream() as outer:
        assert cuda.current_stream() == outer != cuda.default_stream()
        y = x + 1
        with cuda.stream() as inner:
            assert cuda.current_stream() == inner
            assert inner not in (outer, cuda.default_stream())
            z = y + 1
        with cuda.stream(None), cuda.stream(outer) as again:
            assert again == cuda.current_stream() == outer
        assert cuda.current_stream() == outer
    assert cuda.current_stream() == cuda.default_stream()
    assert (z + y).sum().item() == 5000  # the work behind the block waits for it
    with pytest.raises(RuntimeError, match="inside"), cuda.stream():
        raise RuntimeError("inside")
    assert cuda.current_stream() == cuda.default_stream()


def test_a_new_stream_waits_for_the_work_before_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, waits = backend_for(Device("cuda")).driver, []
    recorded: dict[int, int] = {}
    monkeypatch.setattr(driver, "record_event", lambda event, stream: recorded.update({event: stream}))
    monkeypatch.setattr(driver, "wait_event", lambda stream, event: waits.append((stream, recorded[event])))
    with cuda.stream() as made:
        assert waits == [(made.handle, 0)]
    assert waits == [(made.handle, 0), (0, made.handle)]
    with cuda.stream(made), cuda.stream(None):
        assert len(waits) == 2


def test_properties_have_torchs_names() -> None:
    found = cuda.get_device_properties()
    assert (found.major, found.minor) == found.capability == cuda.get_device_capability()
    assert (found.total_memory, found.multi_processor_count) == (found.memory, found.sm_count)
    assert found.total_memory == cuda.mem_get_info()[1]
    assert found.name == cuda.get_device_name()
    with pytest.raises(DeviceError, match="cuda:63"):
        cuda.get_device_properties(63)

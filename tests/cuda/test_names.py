"""torch.cuda's names beside streams, graphs and counters: pools, limits, the driver's tools, mixed precision."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

import genesis
from genesis import cuda
from genesis.backend.cuda.driver import Driver
from genesis.errors import DeviceError, DTypeError, OutOfMemoryError, UsageError

MiB = 1 << 20


def reserved() -> int:
    cuda.empty_cache()
    return cuda.memory_reserved()


def test_a_pool_keeps_its_memory_apart() -> None:
    kept, before, pool = genesis.ones(100, device="cuda"), reserved(), cuda.MemPool()
    with cuda.use_mem_pool(pool):
        x = genesis.ones(MiB, device="cuda")
        del kept  # returns to the common pool
    y = genesis.ones(MiB, device="cuda")
    (block,) = (row for row in pool.snapshot() if row["state"] == "allocated")
    assert (block["address"], block["size"]) == (x.data_ptr(), 4 * MiB)
    assert y.data_ptr() not in [row["address"] for row in pool.snapshot()]
    assert block in cuda.memory_snapshot()
    del y
    assert reserved() >= before + 4 * MiB  # x remains
    del x
    with cuda.use_mem_pool(pool):  # memory of the pool is used again
        x = genesis.zeros(10, device="cuda")
    assert [row["address"] for row in pool.snapshot()].count(x.data_ptr()) == 1
    del pool
    assert x.eq(0).all()
    del x, block
    assert reserved() <= before
    with pytest.raises(UsageError, match="no other allocator"):
        cuda.MemPool(use_on_oom=True)


def test_a_process_takes_no_more_than_its_part() -> None:
    total, before = cuda.get_device_properties().total_memory, reserved()
    assert cuda.get_per_process_memory_fraction() == 1
    cuda.set_per_process_memory_fraction((before + 30 * MiB) / total)
    try:
        x = genesis.empty(5 * MiB, device="cuda")
        with pytest.raises(OutOfMemoryError, match="cuda:0 has no memory"):
            genesis.empty(5 * MiB, device="cuda")
        del x
        assert genesis.empty(5 * MiB, device="cuda").shape == (5 * MiB,)
        assert 0 < cuda.get_per_process_memory_fraction() < 1
    finally:
        cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(UsageError, match="not between 0 and 1"):
        cuda.set_per_process_memory_fraction(1.5)
    with pytest.raises(DTypeError, match="is a int"):
        cuda.set_per_process_memory_fraction(1)  # type: ignore[arg-type]


def test_memory_without_a_tensor() -> None:
    before = cuda.memory_allocated()
    stream = cuda.Stream()
    pointers = [cuda.caching_allocator_alloc(1000), cuda.caching_allocator_alloc(10, stream=stream)]
    assert cuda.memory_allocated() == before + 1024 + 512
    for pointer in pointers:
        cuda.caching_allocator_delete(pointer)
    assert cuda.memory_allocated() == before
    with pytest.raises(UsageError, match="is not an address"):
        cuda.caching_allocator_delete(pointers[0])


def test_counters_in_torchs_forms() -> None:
    nested = cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == cuda.memory_allocated()
    cuda.reset_accumulated_memory_stats()
    assert cuda.memory_stats()["allocation.all.allocated"] == 0
    x = genesis.empty(1000, device="cuda")
    assert cuda.memory_stats()["allocation.all.allocated"] == 1
    del x
    cuda.reset_max_memory_allocated()
    assert cuda.max_memory_allocated() == cuda.memory_allocated()
    assert cuda.device_memory_used() > 0
    assert cuda.memory.memory_reserved() == cuda.memory_reserved()
    assert cuda.get_allocator_backend() == "native"


def test_reading_values_can_be_reported() -> None:
    x = genesis.ones(3, device="cuda")
    try:
        cuda.set_sync_debug_mode("warn")
        assert cuda.get_sync_debug_mode() == 1
        with pytest.warns(UserWarning, match="waits for the GPU"):
            assert x.sum().item() == 3
        cuda.set_sync_debug_mode(2)
        with pytest.raises(DeviceError, match="read on the host"):
            x.tolist()
        _ = x + 1  # does not wait
    finally:
        cuda.set_sync_debug_mode("default")
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="'loud' is not known"):
        cuda.set_sync_debug_mode("loud")


ANSWERS = {
    "gpu=utilization.gpu": "7",
    "gpu=utilization.memory": "3",
    "gpu=temperature.gpu": "41",
    "gpu=power.draw": "75.25",
    "gpu=clocks.sm": "1980",
    "compute-apps=pid,used_memory": "12, 300\n345, 4000\n",
}


def test_the_drivers_tools_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **settings: Any) -> Any:
        key = command[1].removeprefix("--query-")
        assert command[0] == "nvidia-smi" and command[-1] == "--id=GPU-1"
        return SimpleNamespace(stdout=ANSWERS[key] + "\n")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr(Driver, "uuid", "GPU-1")
    asked = (cuda.utilization, cuda.memory_usage, cuda.temperature, cuda.power_draw, cuda.clock_rate)
    assert [ask() for ask in asked] == [7, 3, 41, 75250, 1980]
    lines = cuda.list_gpu_processes().splitlines()
    assert lines[0] == "GPU:0" and [line.split()[1::2][:2] for line in lines[1:]] == [["12", "300"], ["345", "4000"]]
    monkeypatch.setitem(ANSWERS, "compute-apps=pid,used_memory", "")
    assert cuda.list_gpu_processes(0) == "GPU:0\nno processes are running"
    monkeypatch.setitem(ANSWERS, "gpu=power.draw", "[N/A]")
    with pytest.raises(DeviceError, match=r"nvidia-smi gave no power\.draw of cuda:0"):
        cuda.power_draw()


def test_small_names() -> None:
    stream, x = cuda.Stream(), genesis.ones(2, device="cuda")
    with cuda.StreamContext(stream) as inner, cuda.StreamContext(None):
        assert cuda.current_stream() == inner == stream == cuda.get_stream_from_external(stream.cuda_stream)
    assert cuda.current_stream() == cuda.default_stream()
    with stream, stream:  # nested
        assert cuda.current_stream() == stream and stream.device == x.device and not stream.is_capturing()
    event = cuda.Event(enable_timing=True, blocking=True)
    assert event.cuda_event == 0 and stream.record_event(event).cuda_event != 0
    with pytest.raises(UsageError, match="interprocess"):
        cuda.Event(interprocess=True)
    with cuda.device_of(x), cuda.device_of(genesis.ones(1)):
        assert cuda.current_device() == 0
    facts = cuda.get_device_properties()
    assert (facts.L2_cache_size, facts.shared_memory_per_block_optin) == (facts.l2, facts.shared_memory)
    assert facts.warp_size == 32
    major, minor = cuda.get_device_capability()
    assert cuda.get_gencode_flags() == f"-gencode compute=compute_{major}{minor},code=sm_{major}{minor}"
    assert cuda.is_tf32_supported() and cuda.has_half and not cuda.has_magma
    assert cuda.default_generators == (genesis.default_generator,) * cuda.device_count()
    assert cuda.nvtx.range_end(cuda.nvtx.range_start("all")) is None and cuda.ipc_collect() is None
    cuda.check_error(0)
    with pytest.raises(cuda.CudaError, match="CUDA error 2"):
        cuda.check_error(2)
    with pytest.raises(AttributeError, match="'cudart': kernels are launched through CUDA's driver"):
        _ = cuda.cudart


def test_without_a_gpu_counters_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.memory, "is_available", lambda: False)
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    assert cuda.memory_allocated() == cuda.max_memory_reserved() == cuda.pinned_memory_reserved() == 0
    assert cuda.memory_stats() == cuda.memory_stats_as_nested_dict() == {}
    assert cuda.memory_summary() == ""


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("is_on", [False, True])
def test_a_function_repeats_its_autocast_in_backward(casts: bool, is_on: bool) -> None:
    seen: list[Any] = []

    def note(*tensors: Any) -> None:
        seen.append([genesis.is_autocast_enabled("cuda"), *(t.dtype for t in tensors)])

    class Product(genesis.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, pair: Any) -> Any:
            note(a, *pair[:2])
            ctx.save_for_backward(a, pair[0])
            return a @ pair[0]

        @staticmethod
        @cuda.amp.custom_bwd
        def backward(ctx: Any, g: Any) -> Any:
            note(g)
            return g, None

    decorate = cuda.amp.custom_fwd(cast_inputs=genesis.float32) if casts else cuda.amp.custom_fwd
    Product.forward = staticmethod(decorate(Product.forward))  # type: ignore[method-assign]
    a = genesis.ones(2, 2, device="cuda", dtype=genesis.bfloat16, requires_grad=True)
    b, c = genesis.ones(2, 2, device="cuda", dtype=genesis.bfloat16), genesis.ones(1, dtype=genesis.bfloat16)
    with cuda.amp.autocast(is_on, genesis.bfloat16):
        y = Product.apply(a, [b, c])
    y.float().sum().backward()
    wide = genesis.float32 if casts and is_on else genesis.bfloat16
    assert seen == [[is_on and not casts, wide, wide, genesis.bfloat16], [is_on and not casts, y.dtype]]
    assert cuda.amp.GradScaler(4.0).get_scale() == 4

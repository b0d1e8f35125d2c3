"""Kernels that a program launches through Triton itself: `kernel[grid](x, y, BLOCK=64)` on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl

import genesis
from genesis import cuda
from genesis.backend.cuda.driver import is_interpreted
from genesis.errors import DeviceError, ShapeError

DEVICES = ["cuda", "cpu"] if is_interpreted() else ["cuda"]
on_gpu = pytest.mark.gpu


@triton.jit
def weighted_sum_kernel(p_out, p_x, p_y, n, weight, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + i * step, mask=i < n).to(tl.float32)
    y = tl.load(p_y + i, mask=i < n).to(tl.float32)
    tl.store(p_out + i, (x + weight * y).to(p_out.dtype.element_ty), mask=i < n)


def launched(x: Any, y: Any, block: int = 64) -> Any:
    out = genesis.empty_like(y)
    weighted_sum_kernel[lambda meta: (triton.cdiv(y.numel(), meta["BLOCK"]),)](
        out, x, y, y.numel(), 0.5, x.stride(0), BLOCK=block, num_warps=2
    )
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
def test_a_kernel_reads_and_writes_tensors_and_their_views(device: str, dtype: str) -> None:
    whole = (genesis.arange(600, device=device) % 32).to(dtype)  # the interpreter does not round to bfloat16
    x, y = whole[1:301:2], whole[300:450]  # of one storage, at an offset
    result = launched(x, y)
    assert result.tolist() == (x.float() + 0.5 * y.float()).to(dtype).tolist()
    out = genesis.zeros(200, device=device).to(dtype)
    weighted_sum_kernel[(3,)](p_out=out[50:], p_x=x, p_y=y, n=150, weight=0.5, step=2, BLOCK=64)
    assert out[50:].equal(result) and not out[:50].any()
    assert whole.equal((genesis.arange(600, device=device) % 32).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_updates_a_parameter(device: str) -> None:
    layer = genesis.nn.Linear(8, 8, device=device)
    weight, before = layer.weight, layer.weight.detach().clone()
    weighted_sum_kernel[1,](weight, weight, weight, 64, 1.0, 1, BLOCK=64)
    assert weight.equal(before * 2)
    assert layer(genesis.ones(1, 8, device=device)).shape == (1, 8)


def test_storages_are_copied_whole() -> None:
    x, y = genesis.arange(6.0, device="cuda"), genesis.zeros(6)
    y.untyped_storage().copy_(x.untyped_storage().cpu())
    assert y.tolist() == x.tolist()
    assert y.untyped_storage().cpu() == y.untyped_storage() != x.untyped_storage().cpu()
    with pytest.raises(ShapeError, match="24 bytes into 4"):
        genesis.zeros(1).untyped_storage().copy_(y.untyped_storage())


@pytest.mark.skipif(not is_interpreted(), reason="about the interpreter")
def test_a_graph_in_the_interpreter_cannot_hold_a_launch() -> None:
    x = genesis.ones(150, device="cuda")
    _ = launched(x, x)
    with pytest.raises(DeviceError, match="capture of a CUDA graph"), cuda.graph(cuda.CUDAGraph()):
        launched(x, x)


@on_gpu
def test_a_launch_follows_the_work_before_it_in_its_stream() -> None:
    stream, x = cuda.Stream(), genesis.ones(1 << 20, device="cuda")
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(20):
            x = x + 1
        result = launched(x, x, block=1024) * 2
    stream.synchronize()
    assert result.eq(63).all()


@on_gpu
def test_a_graph_replays_a_launch() -> None:
    x, g = genesis.ones(150, device="cuda"), cuda.CUDAGraph()
    _ = launched(x * 1, x) + 1
    with cuda.graph(g):
        result = launched(x * 1, x) + 1
    for value in (2.0, 4.0):
        x.fill_(value)
        g.replay()
        assert result.eq(1.5 * value + 1).all()


@on_gpu
def test_triton_tunes_a_kernel() -> None:
    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (128, 1024)]
    tuned, x = triton.autotune(configs, key=["n"])(weighted_sum_kernel), genesis.ones(5000, device="cuda")
    out = genesis.empty_like(x)
    tuned[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](out, x, x, 5000, 0.5, 1)
    assert out.eq(1.5).all()
    assert tuned.best_config in configs


@on_gpu
def test_a_kernel_does_not_take_memory_of_the_host() -> None:
    _ = genesis.ones(1, device="cuda")  # starts the driver
    with pytest.raises(ValueError, match="cpu tensor"):
        launched(genesis.ones(150), genesis.ones(150))

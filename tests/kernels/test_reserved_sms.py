"""SMs that persistent kernels leave to what ranks send each other: grids of fewer programs, and the same bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import genesis
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import CudaBackend, backend_of
from genesis.backend.cuda.launch import watching_launches
from genesis.backend.cuda.simulated.fake import ARCHITECTURES, counting_device
from genesis.backend.cuda.stream import Lane
from genesis.dtypes import bfloat16, int64
from genesis.kernels.attention import warp_specialized as attention
from genesis.kernels.gemm import gated, linalg
from genesis.kernels.gemm import warp_specialized as gemm
from genesis.kernels.gemm.tiles import GemmTile
from genesis.nn.functional import linear_cross_entropy
from genesis.op import registry
from genesis.tensor import Tensor

CUDA = Device("cuda", 0)


@contextlib.contextmanager
def _grids(found: dict[str, int]) -> Iterator[None]:
    """Programs of the kernels that are launched inside the block."""

    def note(launched: object, stream: int) -> None:
        found[launched.name] = math.prod(launched.grid)  # type: ignore[attr-defined]
        launched.run(stream)  # type: ignore[attr-defined]

    with watching_launches(note):
        yield


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    found = backend_of(CUDA)
    yield found
    found.reserve_sms(0)


@pytest.mark.host
def test_fewer_programs_compute_the_same_bits(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the same call, whose plan is kept with its grid. Of nine tiles the last is split along k."""
    monkeypatch.setattr(linalg, "choose", lambda *problem: GemmTile(32, 32, 16, 4, 3, split=3))
    rng = np.random.default_rng(0)
    a, b = (
        genesis.from_numpy(rng.standard_normal(size).astype(np.float32)).to(device="cuda", dtype=genesis.bfloat16)
        for size in ((72, 200), (200, 88))
    )
    programs, results = [], []
    for reserved in (0, 1, 0):
        backend.reserve_sms(reserved)
        grids = dict[str, int]()
        with _grids(grids):
            results.append((a @ b).cpu().float().numpy().tobytes())
        assert "gemm_reduce_splits" in grids
        programs.append(grids["gemm_tma"])
    assert programs == [4, 3, 4]  # the interpreter's device has 4 SMs
    assert len(set(results)) == 1


def _launches(device: Device) -> dict[str, Callable[[], object]]:
    """A call of every op that has a persistent kernel, at sizes of Qwen2.5."""

    def made(*shape: int) -> Array:
        return empty(shape, bfloat16, device)

    x, w, h = made(8192, 896), made(9728, 896), made(8192, 4864)
    q, labels = made(2, 2048, 12, 128), Tensor(empty((8192,), int64, device))
    return {
        "gemm_ws": lambda: gemm.ws_swiglu_into(h, made(8192, 9728), x, w),
        "gemm_tma": lambda: registry["matmul"](h, made(4864, 896)),
        "gemm_swiglu": lambda: gated.gemm_swiglu_into(h, made(8192, 9728), x, w, gated._LARGE),
        "attention_fwd_ws": lambda: registry["attention"](q, q, q, scale=0.125),
        "lm_head_exp_kernel": lambda: linear_cross_entropy(Tensor(x), Tensor(made(151936, 896)), labels),
    }


@pytest.mark.host
def test_all_persistent_kernels_leave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemm, attention):
        monkeypatch.setattr(module, "is_interpreted", lambda: False)
    device = counting_device(ARCHITECTURES[90])
    backend = backend_of(device)
    for name, call in _launches(device).items():
        found = []
        for reserved in (0, 16):
            backend.reserve_sms(reserved)
            grids = dict[str, int]()
            with _grids(grids):
                call()
            assert name in grids, grids
            found.append(grids[name])
        backend.reserve_sms(0)
        assert found in ([132, 116], [2 * 132, 2 * 116]), name


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(8192, 896, 4864), (8192, 4864, 896), (896, 8192, 4864), (2048, 2048, 2048)])
def test_large_gemms_have_the_same_bits(size: tuple[int, int, int], backend: CudaBackend) -> None:
    m, k, n = size
    a, b = (genesis.randn(*shape, dtype="bfloat16", device="cuda") for shape in ((m, k), (k, n)))
    results, programs = [], []
    for reserved in (0, 16):
        backend.reserve_sms(reserved)
        grids = dict[str, int]()
        with _grids(grids):
            results.append((a @ b).cpu().float().numpy().tobytes())
        programs.append(sum(grids.values()))
    assert results[0] == results[1]
    assert programs[1] <= programs[0]


@pytest.mark.host
def test_only_while_the_lane_has_work(backend: CudaBackend) -> None:
    lane = Lane(backend)
    for reserved in (0, 2):
        lane.reserved_sms = reserved
        assert backend.persistent_programs(2) == 8
        with lane.work():
            pass
        assert backend.persistent_programs(2) == 8 - 2 * reserved
        lane.join()
        assert backend.reserved_sms == 0
    with lane.work():
        pass
    lane.forget()
    assert backend.reserved_sms == 0

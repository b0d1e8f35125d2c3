"""GPU time over the driver's contract, in Triton's interpreter: what is captured, replayed and counted."""

from __future__ import annotations

import pytest

from genesis.backend import CPU, Device
from genesis.backend.cuda import backend_of
from genesis.dtypes import float32, int32
from genesis.errors import DeviceError
from genesis.measure import limits
from genesis.measure.cases import make_case
from genesis.measure.timing import cold_calls, of_graph
from genesis.op import registry

CUDA = Device("cuda", 0)


def test_a_sample_is_a_replay_behind_another_one() -> None:
    x, y = make_case("add", (4,), None, float32, CUDA).arrays
    total = registry["copy"](x)
    with of_graph(lambda: registry["add"](total, y, out=total), backend_of(CUDA), 3) as sample:
        before = total.numpy()
        assert sample(6) > 0
    assert total.numpy() == pytest.approx(before + 2 * 3 * y.numpy())


def test_a_graph_frees_each_result_before_the_next_call() -> None:
    x, backend = make_case("exp", (1 << 16,), None, float32, CUDA).arrays[0], backend_of(CUDA)
    before = backend.pool.allocated

    def call() -> object:
        assert backend.pool.allocated - before <= x.nbytes
        return registry["exp"](x)

    with of_graph(call, backend, 5) as sample:
        assert sample(1) > 0


def test_what_a_graph_cannot_hold_is_refused() -> None:
    x = make_case("exp", (4,), None, float32, CUDA).arrays[0]
    with pytest.raises(DeviceError, match="graph"), of_graph(x.numpy, backend_of(CUDA), 3):
        pass


def test_cold_calls_fill_the_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, done = backend_of(CUDA), []
    monkeypatch.setattr(backend.driver, "properties", backend.driver.properties._replace(l2=1000))
    monkeypatch.setattr(backend.driver, "fill", lambda target, byte, size, stream: done.append(size))
    with cold_calls(lambda: done.append(0), backend) as sample:
        sample(2)
    assert done == [4000, 0, 4000, 0]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_limits_are_measured_once(device: Device, quick_limits: None) -> None:
    found = limits.limits_of(device, float32)
    assert found.bytes_per_second > 0
    assert found.flops_per_second is not None and found.flops_per_second > 0
    assert found.call_seconds > 0
    assert found.kernel_seconds is None  # the interpreter has no GPU time
    assert limits.limits_of(device, float32) is found
    assert limits.limits_of(device, int32).flops_per_second is None

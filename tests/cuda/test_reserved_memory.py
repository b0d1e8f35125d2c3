"""What steps reserve of a GPU's memory is little more than what they allocate at their peak: counted on a fake H200."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import genesis
from genesis import cuda
from genesis.backend import Device, current_cuda
from genesis.backend.cuda.driver import OutOfDeviceMemory
from genesis.backend.cuda.memory import Arena, Pool, room_for
from genesis.backend.cuda.simulated import ARCHITECTURES, EmptyDriver, counting_device
from genesis.data.loader import Batch
from genesis.errors import DeviceError
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import measure
from genesis_cli.session.dry_run import memory_plan
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.config import ModelConfig
from genesis_models.registry import empty_model, preset
from tests.packaging.tree import REPOSITORY
from tests.sampling import some_full

pytestmark = pytest.mark.host

MIB = 1 << 20
CONSTANT = 64 * MIB  # segments are not filled to the last byte
LORA, DORA = AdapterConfig(r=16, alpha=32.0), AdapterConfig(r=16, alpha=32.0, use_dora=True)
WHOLE = ModelConfig.from_dict(preset("0.5B"))
CASES: dict[str, dict[str, Any]] = {
    "lora": {"adapter": LORA},
    "lora-selective": {"adapter": LORA, "how": "selective"},
    "lora-full": {"adapter": LORA, "how": "full"},
    "dora": {"adapter": DORA},
    "lora-accumulated": {"adapter": LORA, "batch": 4, "length": 512, "micro": 4},
    "all": {},
    "all-full": {"how": "full"},
    "all-small": {"batch": 1, "length": 128},
    "all-accumulated": {"batch": 1, "length": 512, "micro": 4},
    "muon": {"optimizer": "muon"},
}


@pytest.fixture
def device() -> Iterator[Device]:
    """A fake H200."""
    found = counting_device(ARCHITECTURES[90])
    with cuda.device(found):
        yield found


def steps_of(case: dict[str, Any], device: Device) -> tuple[DeviceSteps, list[Batch]]:
    """Steps of Qwen2.5-0.5B on the device, of which nothing else is taken, and their batches."""
    gc.collect()
    cuda.empty_cache(device)
    batch, length, micro = case.get("batch", 8), case.get("length", 1024), case.get("micro", 1)
    model = empty_model(WHOLE, device=str(device), dtype="bfloat16")
    if "adapter" in case:
        apply_adapters(model, case["adapter"])
    model.activation_checkpointing = case.get("how", "none")
    model.train()
    optimizer = build_optimizer(
        OptimConfig(name=case.get("optimizer", "adamw")), model.named_parameters(), 0, accumulation_steps=micro
    )
    loader: Any = SimpleNamespace(batch_size=batch, seq_len=length)
    ids = np.zeros((batch, length), np.int64)
    given = Batch(0, 0, ids, ids, ids + np.arange(length), batch * (length - 1), batch * length, np.zeros((0, 4), int))
    return DeviceSteps(TrainState(model, optimizer, loader), device, 1.0, 8), [given] * micro


@pytest.mark.parametrize("name", some_full(CASES, ("lora", "dora", "all-full", "all-accumulated", "muon")))
def test_steps_reserve_little_more_than_they_allocate(name: str, device: Device) -> None:
    steps, batches = steps_of(CASES[name], device)
    cuda.reset_peak_memory_stats(device)
    for _ in range(4):
        steps.take(batches, 1e-5)
    allocated = cuda.max_memory_allocated(device)
    assert cuda.max_memory_reserved(device) <= 1.1 * allocated + CONSTANT
    assert cuda.memory_reserved(device) <= 1.05 * allocated + CONSTANT


def test_steps_use_no_device_but_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `train.device=cuda:1`, and of every rank but 0: "cuda" means another GPU there."""
    device = counting_device(ARCHITECTURES[90])
    monkeypatch.setattr(current_cuda, "index", 1 << 20)
    with pytest.raises(DeviceError):
        cuda.current_stream()
    steps, batches = steps_of(CASES["lora-accumulated"], device)
    for _ in range(4):
        steps.take(batches, 1e-5)
    steps.reading()


def test_what_came_before_the_first_step_is_given_back(device: Device) -> None:
    steps, batches = steps_of(CASES["all-small"], device)
    before = [genesis.empty(size * MIB, dtype="uint8", device=str(device)) for size in range(3, 83)]
    del before
    assert cuda.memory_reserved(device) - cuda.memory_allocated(device) > 3 << 30
    for _ in range(4):
        steps.take(batches, 1e-5)
    assert cuda.memory_reserved(device) <= 1.05 * cuda.max_memory_allocated(device) + CONSTANT


def check_reserved_with_evaluations(device: Device) -> None:
    """Compare a plan with steps and evaluations; where blocks lie depends on what the process ran before."""
    case = CASES["lora-full"]
    settings: Any = {"batch": 8, "length": 1024, "activation_checkpointing": "full"}
    settings["select"] = lambda model: apply_adapters(model, LORA)
    plan, steps_alone = memory_plan(WHOLE, device, eval_batch=8, **settings), memory_plan(WHOLE, device, **settings)
    assert plan.total == steps_alone.total == sum(plan.parts.values())
    assert plan.total < steps_alone.reserved < plan.reserved
    steps, batches = steps_of(case, device)
    cuda.reset_peak_memory_stats(device)
    for _ in range(4):
        steps.take(batches, 1e-5)
    assert cuda.max_memory_reserved(device) == pytest.approx(steps_alone.reserved, rel=0.02)
    model: Any = steps.state.model
    model.eval()
    for _ in range(2):
        measure(steps.state.objective, model, batches[0], device)
    assert cuda.max_memory_reserved(device) == pytest.approx(plan.reserved, rel=0.02)


@pytest.mark.full
def test_a_plan_says_what_is_reserved_with_evaluations() -> None:
    program = "from tests.cuda import test_reserved_memory as here; here.in_new_process()"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def in_new_process() -> None:
    """Check on a fake H200 in a process that has run nothing else."""
    found = counting_device(ARCHITECTURES[90])
    with cuda.device(found):
        check_reserved_with_evaluations(found)


def test_a_step_is_explained_without_the_graphs_memory_beside_it(device: Device) -> None:
    steps, batches = steps_of(CASES["lora-full"], device)
    steps.state.loader = SimpleNamespace(batch=lambda *_: batches[0], describe=lambda _: [])  # type: ignore[assignment]
    cuda.reset_peak_memory_stats(device)
    for _ in range(4):
        steps.take(batches, 1e-5)
    before = cuda.max_memory_reserved(device)
    made = steps._launched[-1]
    steps.reading()
    assert "the loss was nan" in steps.explain(made, float("nan"), 1.0).what
    assert cuda.max_memory_reserved(device) <= 1.1 * before  # the graphs' 1.2 GiB would be half of that beside it
    steps.take(batches, 1e-5)  # begins again
    assert not steps._whole.is_captured


# --- The one segment of graphs ----------------------------------------------------------------------------------------


class CountingDriver(EmptyDriver):
    """Counts the segments that are taken."""

    def __init__(self, largest: int = 1 << 50) -> None:
        super().__init__(0)
        self.largest, self.taken = largest, list[int]()

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.largest:
            raise OutOfDeviceMemory
        self.taken.append(nbytes)
        return super().allocate(nbytes)


def run(pool: Pool, trace: list[tuple[int, bool]], lasting: int = 0) -> None:
    """Take a block of each size, and give the oldest back where the trace says so; those after `lasting` all."""
    used = []
    for size, gives in trace:
        used.append(pool.take(size * 512, 0))
        if gives:
            pool.give(used.pop(len(used) // 2))
    for block in used[lasting:]:
        pool.give(block)


TRACES = st.lists(st.tuples(st.integers(1, 80_000), st.booleans()), min_size=1, max_size=60)


@given(TRACES)
def test_what_was_traced_fits_into_one_segment_of_the_room_that_was_counted(trace: list[tuple[int, bool]]) -> None:
    pool = Pool(CountingDriver())
    with pool.traced(0) as events:
        run(pool, trace)
    room = room_for(events)
    large: int = max(accumulated(events), default=0)
    assert room >= large
    driver = CountingDriver()
    pool = Pool(driver)
    pool.private = Arena(pool, compact=True)
    for _ in range(2):
        pool.private.room = room
        run(pool, trace)
    assert len([n for n in driver.taken if n > 2 * MIB]) == (room > 0)
    assert pool.allocated == 0


def accumulated(events: list[tuple[int, int]]) -> Iterator[int]:
    """Bytes of large blocks after each event."""
    total = 0
    for _, nbytes in events:
        total += nbytes * (abs(nbytes) > MIB)
        yield total


def test_blocks_that_last_are_not_counted() -> None:
    pool = Pool(CountingDriver())
    with pool.traced(0) as events:
        kept = [pool.take(4 * MIB, 0)]
        pool.give(pool.take(3 * MIB, 0))
        kept.append(pool.take(5 * MIB, 0))
    assert room_for(events) == 3 * MIB
    assert pool.watch is None
    assert not pool.arenas[0].compact


def test_a_trace_goes_on_telling_who_watches() -> None:
    pool, seen = Pool(CountingDriver()), list[tuple[int, int]]()

    def watch(address: int, nbytes: int) -> None:
        seen.append((address, nbytes))

    pool.watch = watch
    with pool.traced(0) as events:
        pool.give(pool.take(3 * MIB, 0))
    assert seen == events
    assert len(events) == 2
    assert pool.watch is watch


def test_without_room_for_the_whole_segment_blocks_have_their_own() -> None:
    driver = CountingDriver(16 * MIB)
    pool = Pool(driver)
    pool.private = arena = Arena(pool, compact=True)
    arena.room = 24 * MIB
    assert [pool.take(5 * MIB, 0).size for _ in range(2)] == [5 * MIB, 5 * MIB]
    assert driver.taken == [5 * MIB, 5 * MIB]


def test_a_block_that_is_given_back_in_a_trace_is_only_noted() -> None:
    """A finalizer may run where another thread waits for this one."""
    pool = Pool(CountingDriver())
    with pool.traced(0) as events:
        block = pool.take(3 * MIB, 0)
        thread = threading.Thread(target=pool.give, args=(block,))
        thread.start()
        thread.join()
        assert len(events) == 1
        pool.take(MIB, 0)
        assert [nbytes for _, nbytes in events] == [3 * MIB, -3 * MIB, MIB]

"""The benchmark that tries how NCCL may share GPUs with a step, over a fake of NCCL: settings, sums, a whole sweep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import rank_sweep
from benchmarks.gpu.rank_sweep import HEAD, SETTINGS, RegisteredGroup, Setting, Steps
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.distributed import Peers
from genesis.dtypes import bfloat16, float32
from genesis.optim import AdamW, shared
from genesis.tensor import Tensor
from genesis_cli.session.bench import shared as steps_of_ranks
from genesis_models.config import ModelConfig
from genesis_models.registry import build
from tests.cuda.stream_order import STAGING, small_spans
from tests.cuda.test_ranks import MODEL
from tests.distributed import fake_nccl
from tests.distributed.forks import Fork, ended, start_ranks, world
from tests.distributed.test_group import expected_sum, of, values
from tests.distributed.test_nccl import given

CUDA = Device("cuda", 0)


def _on_ranks(size: int, work: Any, folder: Path, limit_s: float = 20.0) -> list[Fork]:
    def run(peers: Peers) -> Any:
        fake_nccl.folder = folder
        return work(peers)

    forks = ended(start_ranks(size, run, folder), limit_s)
    assert [each.code for each in forks] == [0] * size, [each.error for each in forks]
    return forks


def test_the_settings_of_a_sweep() -> None:
    """NCCL's own first; each number of blocks with and without as many SMs for it; each policy."""
    assert SETTINGS[0] == (0, 0, 0) and len(set(SETTINGS)) == len(SETTINGS)
    assert {each.ctas for each in SETTINGS} == {0, 1, 2, 4, 8, 16} and {each.policy for each in SETTINGS} == {0, 1, 2}
    assert all((n, 0, 0) in SETTINGS and (n, 0, n) in SETTINGS for n in (1, 2, 4, 8, 16))
    options = rank_sweep.parser().parse_args(["--settings", "8,0,4", "0,2,0"])
    assert options.settings == [Setting(8, 0, 4), Setting(0, 2, 0)]
    assert rank_sweep.parser().parse_args([]).settings == list(SETTINGS)


def test_the_table() -> None:
    row = {"ctas": 0, "policy": 2, "reserved": 8, "ms": 52.125, "exposed_ms": 1.5, "compute_ms": 47.0, "scaling": 0.97}
    row |= {"exchange_gbps": 250.0, "gather_gbps": 300.04, "notes": []}
    said = rank_sweep.line(row)
    assert said.split() == ["auto", "2", "8", "52.12", "1.50", "47.00", "250.0", "300.0", "97.0%"]
    assert len(said) == len(HEAD)
    assert rank_sweep.line({**row, "error": "no"}).split() == ["auto", "2", "8", "no"]


@pytest.mark.host
@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_registered_memory(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits of any group, in one all-to-all where parts are alike; what follows a sum is added to it."""
    monkeypatch.setattr(shared, "BUCKET", 1 << 10)
    lengths = {"alike": [512] * size, "others": [100, *[256] * (size - 1)]}

    def work(peers: Peers) -> list[Any]:
        group = rank_sweep.group_of(Setting(4, 2, 1), fake_nccl, peers, CUDA, STAGING)
        assert isinstance(group, RegisteredGroup) and backend_of(CUDA).lane.reserved_sms == 1
        found, comm = list[Any](), group._nccl._handle
        assert (comm.config.min_ctas, comm.config.max_ctas, comm.config.cta_policy) == (4, 4, 2)
        for parts in lengths.values():
            before, x = comm.calls, given(values(group.rank, sum(parts), bfloat16))
            out = empty((parts[group.rank],), float32, CUDA)
            group.reduce_scatter(x, out, parts)
            once = of(out.numpy())
            group.reduce_scatter(x, out, parts, adds=True)
            found.append([once, of(out.numpy()), comm.calls - before])
        group.close()
        return found

    forks = _on_ranks(size, work, tmp_path)
    for number, parts in enumerate(lengths.values()):
        total = expected_sum(size, sum(parts), bfloat16, float32)
        for rank, each in enumerate(forks):
            start = sum(parts[:rank])
            once, twice, calls = each.value[number]
            assert once == of(total[start : start + parts[rank]])
            again = np.copy(total)
            for other in range(size):
                again += values(other, sum(parts), bfloat16).astype(np.float32)
            assert twice == of(again[start : start + parts[rank]])
            assert calls == (2 if number == 0 else 0)  # parts that differ go by sends and receives


@pytest.mark.host
def test_flat_buffers_in_registered_memory(tmp_path: Path) -> None:
    """What ranks send lies in memory that NCCL knows, and nothing else; afterwards buffers are as they were."""

    def work(peers: Peers) -> list[bool]:
        group = rank_sweep.group_of(Setting(0, 2, 0), fake_nccl, peers, CUDA, STAGING)
        assert isinstance(group, RegisteredGroup)
        param = given(values(0, 640, bfloat16))

        def is_known(x: Array) -> bool:
            return any(at <= x.data_ptr() < at + nbytes for at, nbytes in group._nccl._handle.windows)

        with group.buffers():
            flat = next(AdamW([Tensor(param).requires_grad_()], fused=True, ranks=group)._shared())
        plain = next(AdamW([Tensor(param).requires_grad_()], fused=True, ranks=group)._shared())
        kept = of(flat.values.numpy()) == of(param.numpy())
        found = [kept, *map(is_known, (flat.values, flat.gradients, flat.summed, plain.values, plain.gradients))]
        group.close()
        return found

    for each in _on_ranks(2, work, tmp_path):
        assert each.value == [True, True, True, False, False, False]


@pytest.mark.host
def test_memory_that_cannot_be_registered(tmp_path: Path) -> None:
    """A setting that NCCL refuses is a row that says so, on all ranks."""

    def refuse(*given: Any) -> int:
        raise fake_nccl.NCCLError(5, "no windows here")

    def work(peers: Peers) -> list[Any]:
        rank_sweep.alone = lambda *given: 0.5  # type: ignore[assignment]
        nccl = SimpleNamespace(**{**vars(fake_nccl), "comm_window_register": refuse})
        model: Any = None
        steps, watch = Steps(1, 8, 0.0, 1), SimpleNamespace(collectives=None)
        found = rank_sweep.sweep([Setting(0, 2, 0)], nccl, model, steps, CUDA, world(0, 2, 1), watch, peers)  # type: ignore[arg-type]
        return list(found)

    for each in _on_ranks(2, work, tmp_path):
        first, row = each.value
        assert first == {"alone_ms": 500.0}
        assert row["error"].startswith("memory could not be registered: InvalidUsage (5): no windows here")


@pytest.mark.full
@pytest.mark.host
@pytest.mark.slow
def test_a_sweep(tmp_path: Path) -> None:
    """Captured steps of a small model over registered memory."""

    def work(peers: Peers) -> list[Any]:
        small_spans()
        steps_of_ranks.LEAST_STEPS = 1
        model = build(ModelConfig.from_dict(MODEL), seed=0, device="cuda", dtype="bfloat16")
        model.train()
        watch: Any = SimpleNamespace(collectives=None)
        steps, place, settings = Steps(1, 8, 0.0, 2), world(peers.rank, 2, 1), [Setting(4, 2, 2)]
        return list(rank_sweep.sweep(settings, fake_nccl, model, steps, CUDA, place, watch, peers, STAGING))

    for each in _on_ranks(2, work, tmp_path, 600):
        first, row = each.value
        assert (row["ctas"], row["policy"], row["reserved"], row["notes"]) == (4, 2, 2, [])
        assert row["scaling"] == pytest.approx(first["alone_ms"] / row["ms"])
        assert min(row["ms"], row["compute_ms"], row["exchange_gbps"], row["gather_gbps"]) > 0
        assert len(rank_sweep.line(row)) == len(HEAD)

"""The benchmark that tries how NCCL may share GPUs with a step, over a fake of NCCL: settings, sums, a whole sweep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import rank_sweep
from benchmarks.gpu.rank_sweep import HEAD, SETTINGS, Setting, Steps
from genesis.backend import Device
from genesis.distributed import Peers
from genesis_cli.session.bench import shared as steps_of_ranks
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.config import ModelConfig
from genesis_models.registry import build
from tests.cuda.stream_order import STAGING, small_spans
from tests.cuda.test_ranks import MODEL
from tests.distributed import fake_nccl
from tests.distributed.forks import Fork, ended, start_ranks, world

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
    row |= {"exchange_gbps": 250.0, "gather_gbps": 300.04, "alone_ms": 50.5612, "notes": []}
    said = rank_sweep.line(row)
    assert said.split() == ["auto", "2", "8", "52.12", "1.50", "47.00", "250.0", "300.0", "50.56", "97.0%"]
    assert len(said) == len(HEAD)
    assert rank_sweep.line({**row, "error": "no"}).split() == ["auto", "2", "8", "no"]


@pytest.mark.full
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_sweep(lora: bool, tmp_path: Path) -> None:
    """Captured steps of a small model, or of its adapters, over mapped memory."""

    def work(peers: Peers) -> list[Any]:
        small_spans()
        steps_of_ranks.LEAST_STEPS = 1
        model = build(ModelConfig.from_dict(MODEL), seed=0, device="cuda", dtype="bfloat16")
        if lora:
            apply_adapters(model, AdapterConfig(r=2, alpha=4.0))
        model.train()
        watch: Any = SimpleNamespace(collectives=None)
        steps, place, settings = Steps(1, 8, 0.0, 2), world(peers.rank, 2, 1), [Setting(4, 2, 2)]
        return list(rank_sweep.sweep(settings, fake_nccl, model, steps, CUDA, place, watch, peers, STAGING))

    for each in _on_ranks(2, work, tmp_path, 600):
        first, row = each.value
        assert (row["ctas"], row["policy"], row["reserved"], row["notes"]) == (4, 2, 2, [])
        assert row["scaling"] == pytest.approx(row["alone_ms"] / row["ms"])
        assert len(first["each_alone_ms"]) == len(first["at_once_ms"]) == 2
        assert min(row["ms"], row["compute_ms"], row["exchange_gbps"], row["gather_gbps"]) > 0
        assert len(rank_sweep.line(row)) == len(HEAD)

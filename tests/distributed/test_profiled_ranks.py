"""Steps of ranks on a device, profiled: a collective is a kernel among the others, and its times are of other steps.

Over a fake of NCCL, on the interpreter's device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genesis
from genesis import Tensor, nn
from genesis.data.loader import Batch
from genesis.distributed import Peers
from genesis.measure.session import Recording
from genesis_cli.session.bench_steps import RandomTokens, new_state
from genesis_cli.session.profiling import profiled
from tests.distributed.forks import ended, start_ranks
from tests.distributed.test_collective_times import CUDA, EXCHANGE, GATHER, NORM, counted, ordered


class _Sums(nn.Module):
    """A model of few kernels, whose parameters are several buckets."""

    config = SimpleNamespace(vocab_size=32)

    def __init__(self) -> None:
        super().__init__()
        ones = [genesis.ones(size, dtype="bfloat16", device="cuda") for size in (2048, 1024, 2048)]
        self.first, self.second, self.third = map(nn.Parameter, ones)

    def loss(self, *batch: Tensor, **more: Tensor) -> Tensor:
        return self.first.sum() + self.second.sum() + self.third.sum()


class _Tokens(RandomTokens):
    """Batches without end."""

    _batches: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        self._batches = self._batches or self.batches()
        return next(self._batches)


def _checked(step: Recording) -> dict[str, int]:
    """All but copies of batches run one after the other; the collectives among them."""
    at, kernels = 0.0, [kernel for kernel in step.kernels if not kernel.is_concurrent]
    for kernel in kernels:
        assert at <= kernel.start <= kernel.end, kernel
        at = kernel.end
    assert {kernel.name for kernel in step.kernels if kernel.is_concurrent} <= {"copy"}
    collectives = [kernel for kernel in kernels if kernel.op == "(collective)"]
    assert {(kernel.frame.phase, kernel.frame.module) for kernel in collectives} == {("collectives", "(collectives)")}
    assert not any(kernel.name.startswith("rank_sum") for kernel in step.kernels)  # a part of one
    return Counter(kernel.name for kernel in collectives)


@pytest.mark.host
def test_captured_and_eager_steps(tmp_path: Path) -> None:
    def work(peers: Peers) -> Any:
        ranks = ordered(peers, tmp_path, "comm stream last")
        model: Any = _Sums()
        state: Any = new_state(model, 1, 8, ranks)
        state.loader = _Tokens(1, 8, model.config.vocab_size)
        train = SimpleNamespace(accumulation_steps=2, max_grad_norm=1.0)
        training: Any = SimpleNamespace(
            state=state, config=SimpleNamespace(train=train), lr_at=lambda step: 1e-5, steps=100, device=CUDA
        )
        found = profiled(training, 1)
        calls = {recorded.mode: _checked(recorded.steps[0]) for recorded in found.recorded}
        rows = {row.name: (row.calls, row.nbytes) for row in found.collectives.collectives}
        counts = counted(state.optimizer)
        ranks.group.close()
        assert not {"reduce_scatter", "all_gather", "all_reduce"} & set(vars(ranks.group))
        return calls, rows, counts

    forks = ended(start_ranks(2, work, tmp_path), 100)
    assert [each.code for each in forks] == [0, 0], [each.error for each in forks]
    for each in forks:
        calls, rows, (buckets, elements, spans) = each.value
        assert buckets > 2
        assert list(calls) == ["captured", "eager"]
        for names in calls.values():
            assert names == {"reduce_scatter": buckets, "all_gather": buckets, "all_reduce": 1}
        assert rows == {
            EXCHANGE: [buckets, 2 * elements],
            NORM: [1, 8 * (2 + spans)],
            GATHER: [buckets, 2 * elements],
        }

"""Ranks on a device have the bits of one process: what they send each other is between its graphs, or part of them.

In the interpreter a process has one device, and NCCL is a fake. With its group, whose collectives are in stream order,
steps 2 and 3 run as they are, 4 is captured and later ones are replayed, with streams as late or early as their events
allow; see `stream_order`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis.data.loader import PackedLoader
from tests.cuda.stream_order import LINE, ORDERS
from tests.distributed.cases import Runs, hash_of
from tests.train.counted import mean_id
from tests.train.runs import Ended, Forks, assembled, load, rows

pytestmark = [pytest.mark.host, pytest.mark.slow]

MODEL = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
SETTINGS = (
    f"model.config={json.dumps(MODEL)}",
    *("train.device=cuda", "model.dtype=bfloat16", "train.accumulation_steps=2", "train.batch_size=1"),
    *("data.seq_len=8", "train.steps=4", "data.eval_fraction=0", "eval.every=null", "eval.prompts=[]"),
    "checkpoint.every=null",
)
FLOAT32, ZERO_0, MUON = "model.dtype=float32", "train.zero=0", "optim.name=muon"
FOUR = "train.accumulation_steps=4"


class DeviceRuns(Runs):
    """Runs on the interpreter's device; those of one process are made once."""

    alone: dict[tuple[str, ...], str]
    common = SETTINGS

    def run(self, name: str, ranks: int, *settings: str, faults: tuple[Any, ...] = (), resume: bool = False) -> Ended:
        """A run with these faults on every rank; where an order of streams is one, its ranks meet in a fresh folder."""
        folder = str(tempfile.mkdtemp(dir=self.folder))
        faults = tuple([*fault, folder] if fault[:2] == ["beside", "install"] else fault for fault in faults)
        each = ("several", ["interpreted"], ["beside", "small_spans"], *faults)
        words = [*self.words(name, ranks, *self.common, *settings), *(["--resume"] if resume else [])]
        return self.forks.run(*words, fault=("on_rank", -1, *each) if ranks > 1 else each)

    def hash_alone(self, *settings: str) -> str:
        """The state hash of one process."""
        if settings not in self.alone:
            done = self.run(f"alone-{len(self.alone)}", 1, *settings)
            assert "not captured" not in done.out
            self.alone[settings] = hash_of(done)
        return self.alone[settings]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRuns]:
    with Forks() as forks:
        found = DeviceRuns(forks, tmp_path_factory.mktemp("ranks"))
        found.alone = {}
        yield found


@pytest.mark.full
def test_exchange_between_graphs(runs: DeviceRuns) -> None:
    done = runs.run("between", 2)
    assert "not captured" not in done.out
    assert hash_of(done) == runs.hash_alone()


def check_overlapped(runs: DeviceRuns, name: str, ranks: int, order: str, *settings: str, how: str = "mapped") -> None:
    done = runs.run(name.replace(" ", "-"), ranks, *settings, faults=(["beside", "install", order, how],))
    assert "not captured" not in done.out and LINE in done.out
    assert hash_of(done) == runs.hash_alone(*settings)


@pytest.mark.full
def test_exchange_beside_the_step(runs: DeviceRuns) -> None:
    """ZeRO-1, bfloat16 with split masters; the steps wait for nothing, which `stream_order.install` checks."""
    check_overlapped(runs, "beside", 2, "comm stream last")


@pytest.mark.full
@pytest.mark.parametrize("is_overlapped", [True, False])
def test_figures_of_an_objective(is_overlapped: bool, runs: DeviceRuns) -> None:
    """Those of all ranks' micro-batches, in steps as they are and in replayed ones."""
    name, beside = (
        f"figures-{is_overlapped}",
        (["beside", "install", "comm stream last", "mapped"],) if is_overlapped else (),
    )
    done = runs.run(name, 2, FOUR, "log.every=1", faults=(["counted"], *beside))
    assert hash_of(done) == runs.hash_alone(FOUR)
    found = rows(runs.folder / name)
    loader = PackedLoader(
        assembled(load(runs.recipe, f"{name}-data", *SETTINGS, FOUR)).state.loader.tokens,
        **{"batch_size": 1, "seq_len": 8, "seed": 0},
    )
    ids = [mean_id([next(loader) for _ in range(4)]) for _ in found]
    assert [row["counted/id"] for row in found] == pytest.approx(ids, rel=1e-5)
    assert [row["counted/loss"] for row in found] == pytest.approx([row["train/loss"] for row in found], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_streams(order: str, runs: DeviceRuns) -> None:
    check_overlapped(runs, order, 2, order, FOUR)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "order"), [(2, "comm stream last"), (2, "comm stream first"), (4, "comm stream last")]
)
def test_sends_and_receives_in_place_of_dma_engines(ranks: int, order: str, runs: DeviceRuns) -> None:
    check_overlapped(runs, f"plain-{ranks}-{order}", ranks, order, FOUR, how="plain")


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, (FLOAT32, FOUR)),
        (2, (ZERO_0,)),
        (2, (FLOAT32, ZERO_0, FOUR)),
        (2, (MUON,)),
        (2, ("optim.low_precision=stochastic",)),
        (4, (FOUR,)),
        (4, (FLOAT32, ZERO_0, FOUR)),
    ],
)
def test_more_exchange_beside_the_step(ranks: int, settings: tuple[str, ...], runs: DeviceRuns) -> None:
    check_overlapped(runs, f"beside-{ranks}-{'-'.join(settings)}", ranks, "comm stream last", *settings)


@pytest.mark.full
def test_adapters_with_dropout(tmp_path: Path) -> None:
    """Random numbers belong to a micro-batch, whichever rank has it."""
    with Forks() as forks:
        runs = DeviceRuns(forks, tmp_path / "lora", is_lora=True)
        runs.alone, runs.common = {}, SETTINGS[1:]  # its base says what model it is
        check_overlapped(runs, "lora", 2, "comm stream last", "lora.r=8", "lora.dropout=0.2", FOUR)


@pytest.mark.full
def test_resumed_by_other_ranks(runs: DeviceRuns) -> None:
    """Two ranks, one, two."""
    constant = ("optim.schedule=constant", "optim.warmup_steps=0")
    for steps, ranks in ((6, 2), (10, 1), (16, 2)):
        faults = (["beside", "install", "comm stream last"],) if ranks > 1 else ()
        done = runs.run("resumed", ranks, *constant, f"train.steps={steps}", faults=faults, resume=steps > 6)
    assert hash_of(done) == runs.hash_alone(*constant, "train.steps=16")


@pytest.mark.full
def test_a_bad_loss_on_one_rank(runs: DeviceRuns) -> None:
    """No rank updates in its step, nor later."""
    faults = (["beside", "install", "comm stream last"], ["beside", "weights_stay", 2], ["beside", "nan_on_rank", 1, 3])
    done = runs.run("nan", 2, "log.every=6", faults=faults)
    assert done.code == 9 and done.err.count("error:") == 1, done
    assert "the loss of micro-batch 1 is nan in step 3; the weights are those after step 2" in done.err


@pytest.mark.full
def test_a_rank_that_cannot_capture(runs: DeviceRuns) -> None:
    """Then no rank does, and the bits stay."""
    done = runs.run("eager", 2, faults=(["beside", "install", "comm stream last"], ["beside", "cannot_capture", 1]))
    assert done.out.count("not captured") == 1
    assert hash_of(done) == runs.hash_alone()


@pytest.mark.full
@pytest.mark.parametrize(
    ("order", "missing"),
    [("comm stream first", "main"), ("side stream last", "side stream"), ("comm stream last", "join")],
)
def test_a_wait_that_is_missing_is_seen(order: str, missing: str, runs: DeviceRuns) -> None:
    faults = (["beside", "install", order], ["beside", "without_wait", missing])
    done = runs.run(f"without-{missing.replace(' ', '-')}", 2, FOUR, faults=faults)
    assert "not captured" not in done.out
    assert done.code in (9, 10) or hash_of(done) != runs.hash_alone(FOUR)

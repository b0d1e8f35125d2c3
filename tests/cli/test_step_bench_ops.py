"""A step by op, what doubling it would cost, and steps against a peer's: the arithmetic, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from genesis.array import from_numpy
from genesis.backend import CPU, Device
from genesis.errors import DeviceError, GenesisError, UsageError
from genesis.measure.marks import Kernel
from genesis.measure.timing import Plan
from genesis.op import observe, registry
from genesis.profile.peer import PeerError, PeerLacks
from genesis.profile.schema import Ratio
from genesis_cli.session.bench import versus
from genesis_cli.session.bench.breakdown import OpWatch, _Run, add_kernels, breakdown_of, summed
from genesis_cli.session.bench.cases import step_flops
from genesis_cli.session.bench.doubling import doublings, room_of
from genesis_cli.session.bench.measuring import Settings, bench_model
from genesis_cli.session.bench.report import WIDTH, render_lines
from genesis_cli.session.bench.schema import Breakdown, OpShare, PeerStep, Row
from genesis_cli.session.bench.steps import new_state
from genesis_cli.session.bench.versus import check_recipes, lean_config, versus_torch
from genesis_models.config import ModelConfig
from genesis_models.registry import build
from tests.cli.test_step_bench import CONFIG, ONCE, RAW, limits, made_report, made_row

GPU = Device("cuda", 0)

# --- By op ------------------------------------------------------------------------------------------------------------


def test_runs_are_added_up_by_op() -> None:
    runs = [
        _Run("exp", 1.0, 0.5, thread=1, seconds=2.0),
        _Run("exp", 1.0, 0.5, thread=1, seconds=2.0),
        _Run("exp", 1.0, 0.5, thread=2, seconds=3.0),
        _Run("exp", 1.0, 0.5, thread=2, seconds=3.0),
        _Run("matmul", 1.0, 3.0, thread=1, seconds=8.0),
        _Run("matmul", 1.0, 3.0, thread=1, seconds=8.0),
        _Run("fill", 0.0, 0.0, thread=1, seconds=0.5),
        _Run("fill", 0.0, 0.0, thread=1, seconds=0.5),
    ]
    found = summed(runs, total=40.0, steps=2)
    # Of two threads that work at the same time the busiest counts; all their work does.
    assert [(each.op, each.calls, each.seconds, each.least, each.limit) for each in found.ops] == [
        ("matmul", 1, 8.0, 3.0, "compute"),
        ("exp", 2, 3.0, 2.0, "bandwidth"),
        ("fill", 1, 0.5, 0.0, None),
    ]
    assert (found.seconds, found.rest) == (20.0, 8.5)
    assert [each.above for each in found.priorities] == [5.0, 1.0, 0.5]
    assert [each.share for each in found.ops] == [0.4, 0.15, 0.025]


def test_runs_of_a_graph_were_noted_once_and_replayed_often() -> None:
    runs = [_Run("exp", 1.0, 0.5, 1, seconds=6.0), _Run("exp", 1.0, 0.5, 1, seconds=3.0)]
    found = summed(runs, total=12.0, steps=3, replays=3)
    assert [(each.calls, each.seconds, each.least) for each in found.ops] == [(2, 3.0, 2.0)]
    assert (found.seconds, found.rest) == (4.0, 1.0)


def test_kernels_belong_to_the_op_that_launched_them() -> None:
    def kernel(launched: float, start: float, end: float) -> Kernel:
        return Kernel("k", "inner", "forward", "m", (1, 1, 1), start, end, False, True, (), launched)

    runs = [_Run("linear", 1.0, 1.0, 1, start=10.0, end=12.0), _Run("exp", 1.0, 1.0, 1, start=13.0, end=14.0)]
    replay = [
        kernel(9.0, 0.0, 1.0),  # before all ops, so of none
        kernel(10.0, 1.0, 3.0), kernel(11.5, 3.0, 3.5),  # of one op, whatever op inside it launched them
        kernel(12.5, 3.5, 7.5),  # between two
        kernel(13.5, 7.5, 8.0),
    ]  # fmt: skip
    for _ in range(2):
        add_kernels(runs, replay)
    assert [run.seconds for run in runs] == [5.0, 1.0]
    found = summed(runs, total=16.0, steps=2, replays=2)
    assert ([each.seconds for each in found.ops], found.seconds, found.rest) == ([2.5, 0.5], 8.0, 5.0)


def test_only_ops_of_the_graph_are_noted() -> None:
    into_graph, exp = [False], registry["exp"]
    watch = OpWatch(limits(), lambda: into_graph[0])
    x = from_numpy(np.ones((2, 4), np.float32))
    with observe(watch.ends, watch.begins):
        exp(x)
        into_graph[0] = True
        begun = time.perf_counter()
        exp(x)
    (run,) = watch.runs
    assert begun <= run.start < run.end <= time.perf_counter()
    assert run.seconds == 0.0  # its kernels tell


def test_ops_inside_ops_and_views_are_not_counted() -> None:
    watch, exp, reshape = OpWatch(limits()), registry["exp"], registry["reshape"]
    x = from_numpy(np.ones((2, 4), np.float32))
    with observe(watch.ends, watch.begins):
        watch.begins(exp)
        exp(x)
        reshape(x, shape=(8,))
        watch.ends(exp, (x,), (x,), {}, 1.0)
        exp(x)
    assert [run.op for run in watch.runs] == ["exp", "exp"]
    assert watch.runs[0].seconds == 1.0 and 0 < watch.runs[1].seconds < 1.0
    cost = exp.cost((x,), (x,), {})
    assert watch.runs[0].bytes_seconds == cost.bytes / 1e9 > 0
    assert watch.runs[0].flops_seconds == cost.flops / 1e9 > 0


def test_a_step_on_the_cpu_by_op() -> None:
    model = build(CONFIG, seed=0, device="cpu", dtype="float32")
    model.train()
    found = breakdown_of(new_state(model, 2, 8), limits(), [])
    assert found is not None
    assert sum(each.seconds for each in found.ops) + found.rest == pytest.approx(found.seconds)
    calls = {each.op: each.calls for each in found.ops}
    assert calls["embedding"] == calls["linear_cross_entropy"] > 0
    assert all(each.least > 0 for each in found.ops if each.op in ("linear_cross_entropy", "adamw_step"))


def test_a_step_that_cannot_be_told_by_op_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*rest: object) -> None:
        raise DeviceError("no events in a graph")

    monkeypatch.setattr("genesis_cli.session.bench.breakdown._on_gpu", refuses)
    notes: list[str] = []
    state: Any = None
    assert breakdown_of(state, limits(GPU), notes) is None
    assert notes == ["no times of ops: no events in a graph"]


def test_only_the_largest_case_is_told_by_op() -> None:
    cases = [(2, 8), (1, 8)]
    rows = [each for each in bench_model(CONFIG, cases, limits(), Settings("float32", plan=ONCE)) if type(each) is Row]
    assert [row.breakdown is not None for row in rows] == [True, False]


# --- Doublings --------------------------------------------------------------------------------------------------------


def row_of(batch: int, length: int, seconds: float, planned: dict[str, int] | None = None) -> Row:
    made = made_row(batch, length, seconds / 4, seconds / 2, seconds / 4, planned=planned)
    return made.model_copy(update={"flops": step_flops(CONFIG, batch, length)})


def test_time_grows_along_the_line_of_the_last_two() -> None:
    rows = [row_of(1, 8, 3.0), row_of(2, 8, 4.0), row_of(1, 16, 9.0), row_of(2, 16, 10.0)]
    batch, length = doublings(CONFIG, rows, "none", "float32", CPU, 1 << 40)
    assert (batch.axis, batch.batch, batch.length, batch.seconds) == ("batch", 4, 16, pytest.approx(12.0))
    growth = (10.0 - 4.0) / (step_flops(CONFIG, 2, 16) - step_flops(CONFIG, 2, 8))
    grown = 10.0 + growth * (step_flops(CONFIG, 2, 32) - step_flops(CONFIG, 2, 16))
    assert (length.batch, length.length, length.seconds) == (2, 32, pytest.approx(grown))
    assert batch.tokens_per_second == pytest.approx(64 / 12.0)


def test_time_of_one_case_or_of_noise_is_proportional() -> None:
    for rows in ([row_of(2, 8, 4.0)], [row_of(1, 8, 5.0), row_of(2, 8, 4.0)]):
        assert doublings(CONFIG, rows, "none", "float32", CPU, 1)[0].seconds == pytest.approx(8.0)
    assert doublings(CONFIG, [], "none", "float32", CPU, 1) == []


def test_no_longer_than_the_models_positions() -> None:
    assert [found.axis for found in doublings(CONFIG, [row_of(1, 64, 1.0)], "none", "float32", CPU, 1)] == ["batch"]


def test_memory_grows_as_the_plan_or_with_the_tokens() -> None:
    from genesis_cli.session.dry_run import memory_plan

    # 3 of the 7 MiB are activations, and double.
    (found, _) = doublings(CONFIG, [row_of(1, 8, 1.0)], "none", "float32", CPU, 10 << 20)
    assert (found.memory, found.room, found.fits) == (10 << 20, 10 << 20, True)
    plans = [memory_plan(CONFIG, GPU, batch=batch, length=8, dtype="float32") for batch in (1, 2)]
    (found, _) = doublings(CONFIG, [row_of(1, 8, 1.0, plans[0].parts)], "none", "float32", GPU, 7 << 20)
    assert found.memory == (7 << 20) + plans[1].total - plans[0].total > 7 << 20
    assert not found.fits


def test_there_is_room() -> None:
    assert room_of(CPU) > 1 << 28
    assert room_of(GPU) > 1 << 28


# --- Against a peer ---------------------------------------------------------------------------------------------------


class FakeChild:
    """Answers as torch's process does."""

    version = "9.9"

    def __init__(self, fails: dict[tuple[str, int], Exception]) -> None:
        self.fails, self.asked = fails, list[tuple[str, Any]]()

    def ask(self, what: str, /, **request: Any) -> dict[str, Any]:
        self.asked.append((what, request))
        if what == "open":
            if (request["recipe"], request["batch"]) in self.fails:
                raise self.fails[request["recipe"], request["batch"]]
            return {"warm_up": 0.5, "parameters": 1}
        return {"samples": [0.25] * 5, "peak": 1 << 20} if what == "measure" else {}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    lacks = PeerLacks("transformers is not installed there")
    made = FakeChild({("eager", 1): lacks, ("lean", 2): PeerError("no room")})

    @contextmanager
    def started(work: str, device: Device, name: str, python: str | None) -> Iterator[FakeChild]:
        assert (work, device, name, python) == ("steps", CPU, "torch", "some/python")
        yield made

    monkeypatch.setattr(versus, "started", started)
    return made


def test_each_recipe_is_compared_or_says_why_not(child: FakeChild) -> None:
    settings = Settings("float32", plan=Plan(seconds=0.01, warm_up=0.0, most_calls=1))
    cases = [(1, 8), (2, 8)]
    told: list[str] = []
    found = list(versus_torch(CONFIG, cases, limits(), settings, ("eager", "lean"), "some/python", told.append))
    assert told == [
        "torch, eager: starting", "torch 9.9, eager: 1x8",
        "torch, lean: starting", "torch 9.9, lean: 1x8", "torch 9.9, lean: 2x8",
    ]  # fmt: skip
    # What one case lacks all of them lack; what fails for one does not end the others.
    assert [(each.recipe, each.batch, each.note) for each in found] == [
        ("eager", 1, "transformers is not installed there"),
        ("lean", 1, ""),
        ("lean", 2, "no room"),
    ]
    compared = found[1]
    assert compared.ratio is not None and compared.ratio.rounds == 3
    assert (compared.ratio.peer_seconds, compared.peer_peak, compared.warm_up) == (0.25, 1 << 20, 0.5)
    assert compared.ratio.ratio == pytest.approx(0.25 / compared.ratio.seconds, rel=0.9)
    opened = [request for what, request in child.asked if what == "open"]
    config = lean_config(CONFIG, 8)
    assert opened[1] == {"recipe": "lean", "config": config, "batch": 1, "length": 8, "dtype": "float32"}
    assert (config["hidden_size"], config["qkv_bias"], config["head_norms"]) == (RAW["hidden_size"], True, False)


def test_the_lean_recipe_has_layers_of_its_own() -> None:
    raw = RAW | {"model_type": "qwen3", "head_dim": 64}
    found = lean_config(ModelConfig.from_dict(raw), 8)
    assert (found["head_dim"], found["qkv_bias"], found["head_norms"]) == (64, False, True)
    with pytest.raises(PeerLacks, match=r"the lean recipe's layers have no mlp\.down_proj\.bias"):
        lean_config(ModelConfig.from_dict(RAW | {"model_type": "llama", "mlp_bias": True}), 8)


@pytest.mark.parametrize(
    ("changed", "lacks"),
    [
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no layers without rotary positions, as layer 1 is"),
        ({"model_type": "mistral", "sliding_window": 8}, "no sliding window, and one of 8 is shorter than 9 tokens"),
    ],
)
def test_the_lean_recipe_refuses_what_it_does_not_compute(changed: dict[str, Any], lacks: str) -> None:
    raw = {key: value for key, value in RAW.items() if "window" not in key}
    with pytest.raises(GenesisError, match=f"the lean recipe.*{lacks}"):
        lean_config(ModelConfig.from_dict(raw | changed), 9)


def test_the_lean_recipe_takes_a_window_of_the_whole_sequence_and_layers_that_all_rotate() -> None:
    raw = {key: value for key, value in RAW.items() if "window" not in key}
    for changed in (
        {"model_type": "mistral", "sliding_window": 9},
        {"model_type": "smollm3", "no_rope_layers": [1, 1]},
    ):
        assert lean_config(ModelConfig.from_dict(raw | changed), 9)["qkv_bias"] is False


def test_recipes_are_known() -> None:
    assert check_recipes("lean,eager,lean") == ("lean", "eager")
    with pytest.raises(UsageError, match="'fast' is no recipe") as error:
        check_recipes("lean,fast")
    assert error.value.next == "use some of eager, compile, lean"


# --- What is said -----------------------------------------------------------------------------------------------------


def test_the_text_tells_ops_doublings_and_peers() -> None:
    ops = [
        OpShare(op=f"op{i}", calls=i, seconds=(20 - i) * 1e-2, share=0.1, least=1e-3 * i, limit="compute")
        for i in range(14)
    ]
    ops.append(OpShare(op="fill", calls=3, seconds=1e-2, share=0.01, least=0.0, limit=None))
    row = row_of(2, 16, 4.0).model_copy(update={"breakdown": Breakdown(seconds=4.0, ops=ops, rest=0.5)})
    ratio = Ratio(seconds=1.0, peer_seconds=2.0, ratio=2.0, spread=0.01, rounds=3)
    peers = [
        PeerStep(recipe="lean", version="9.9", batch=2, length=16, ratio=ratio, warm_up=30.0),
        PeerStep(recipe="lean", version="9.9", batch=2, length=16, ratio=ratio.model_copy(update={"spread": 0.5})),
        PeerStep(recipe="eager", version="9.9", batch=2, length=16, note="no \x1b " + "room " * 40),
    ]
    found = doublings(CONFIG, [row], "none", "float32", CPU, 1 << 20)
    report = made_report([row]).model_copy(update={"peers": peers, "doublings": found})
    lines = list(render_lines(report))
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= WIDTH and not any("\x1b" in line for line in lines)
    assert "op0 0 200 ms 5.0% 0.0% compute 200 ms" in text
    assert "op11 11 90.0 ms" in text and "op12" not in text
    assert "other ops (3) 28 160 ms" in text and "between ops 500 ms 12% step 2x16 4.00 s 100%" in text
    assert "improve op0: 200 ms above its limit (0.0% of its compute limit), 5.0% of the step improve op1:" in text
    assert "4x16, twice the batch: about 8.00 s a step, 8 tokens/s; 10.0 MiB of 1.0 MiB: it does not fit" in text
    assert "against torch 9.9, interleaved; ratio above 1: Genesis is faster" in text
    assert "lean 2x16 1.00 s 2.00 s 2.00 1.0% 30.0 s lean 2x16 1.00 s 2.00 s 2.00 50% noisy note eager" in text
    assert "note eager 2x16: no \\x1b room" in text


def test_a_config_of_another_kind_has_its_doublings() -> None:
    wide = ModelConfig.from_dict(RAW | {"model_type": "qwen3", "head_dim": 64})
    assert len(doublings(wide, [row_of(1, 8, 1.0)], "none", "float32", CPU, 1)) == 2

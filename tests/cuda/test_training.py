"""Training on CUDA gives what it gives on the CPU: the steps, what stops them, the whole command, its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis import cuda
from genesis.backend import CPU, Device, backend_for
from genesis.errors import ConfigError, DeviceError, NumericError
from genesis.optim import SGD, Adafactor, Adam, AdamW, Lion, Muon
from genesis.train import state
from genesis.train.device_steps import DeviceSteps, Feed
from genesis.train.objective import NextTokens
from genesis.train.state import HostBuffer, Snapshot, snapshot_bytes
from genesis_cli import session
from genesis_cli.session import preparation
from genesis_models.blocks import CausalLM
from genesis_models.registry import build
from tests.train.runs import assembled, checkpoints, load, make, make_lora, rows, train

CUDA = Device("cuda")
SMALL = ("model.dtype=float32", "train.accumulation_steps=1", "train.batch_size=1", "data.seq_len=16")
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def steps(model: CausalLM, device: str, count: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of `count` AdamW steps on packed rows of 16 tokens, and the weights afterwards."""
    rng = np.random.default_rng(0)
    model.to(device=device)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(count):
        ids = rng.integers(0, 128, (2, 16))
        positions = np.concatenate([np.arange(10), np.arange(6)])[None].repeat(2, 0)
        batch = (genesis.tensor(a, device=device) for a in (ids, ids, positions))
        input_ids, labels, position_ids = batch
        optimizer.zero_grad()
        loss = model.loss(input_ids, labels, position_ids=position_ids, num_targets=30)
        loss.backward()
        optimizer.step(grad_scale=genesis.nn.utils.clip_scale(optimizer.grad_norm(), 1.0))
        losses.append(loss.item())
    return losses, {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}


@pytest.mark.full
def test_three_steps_equal_those_of_the_cpu() -> None:
    losses, weights = steps(build(SHAPE, 1), "cpu", 3)
    found, placed = steps(build(SHAPE, 1), "cuda", 3)
    assert found == pytest.approx(losses, rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-4)
    # AdamW divides by the root of second moments: rounding in a gradient near 0 becomes a part of lr in a weight.
    furthest = max(float(np.abs(placed[n] - weights[n]).max()) for n in weights)
    assert furthest < 3e-3
    median = np.median(np.concatenate([np.abs(placed[n] - weights[n]).ravel() for n in weights]))
    assert median < 1e-6


@pytest.mark.gpu
def test_two_gpus_in_one_process_take_turns() -> None:
    """Steps on each, with the other's in between, are those of one: contexts, streams, kernels and graphs are apart."""
    if cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    alone = steps(build(SHAPE, 1), "cuda:0", 3)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        losses, weights = steps(build(SHAPE, 1), device, 3)
        assert losses == alone[0]
        assert all(np.array_equal(weights[name], value) for name, value in alone[1].items())
    x = genesis.arange(1000, device="cuda:0").float()
    y = x.to("cuda:1")
    for _ in range(3):
        x, y = x * 2 + 1, y * 2 + 1
    assert genesis.equal(x.cpu(), y.cpu()) and genesis.equal(x, y.to("cuda:0"))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1, fused=True),
    "lion": lambda p: Lion(p, lr=0.1, fused=True),
    "adafactor": lambda p: Adafactor(p, lr=0.1, fused=True),
    "muon": lambda p: Muon([{"params": p, "use_muon": True}], lr=0.1, fused=True),
    "foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "plain": lambda p: AdamW(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_of_nan_leaves_the_step_out(name: str, device: str) -> None:
    rng = np.random.default_rng(1)
    shapes = [(3, 4)] if name == "muon" else [(3, 4), (5,)]
    params = [genesis.tensor(rng.standard_normal(s), dtype="float32", device=device) for s in shapes]
    for p in params:
        p.requires_grad_()
    optimizer = OPTIMIZERS[name](params)

    def step(scale: float, gradient: float) -> list[bytes]:
        for p in params:
            p.grad = genesis.full(p.shape, gradient, device=device)
        optimizer.step(grad_scale=genesis.tensor(scale, device=device))
        states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, genesis.Tensor)]
        return [t.detach().cpu().numpy().tobytes() for t in (*params, *states)]

    first = step(1.0, 0.5)
    assert step(float("nan"), float("nan")) == first
    assert step(float("nan"), 0.5) == first
    assert step(1.0, 0.5) != first


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-tied", "qwen2-untied-sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_to_the_device_by_pieces(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis_models.folder.PIECE", 1000)
    folder = Path(__file__).parents[1] / "models" / "fixtures" / name
    here, there = (genesis_models.load(folder, device=device, dtype=dtype) for device in ("cpu", "cuda"))
    for (name, mine), (_, its) in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert its.device == CUDA, name
        assert its.dtype is mine.dtype, name
        assert np.array_equal(its.detach().cpu().numpy(), mine.detach().numpy()), name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("corpus"))


def test_the_feed_brings_every_batch_whole_and_in_order(recipe: Path, tmp_path: Path) -> None:
    loader = assembled(load(recipe, str(tmp_path / "run"))).state.loader
    fields = NextTokens().fields
    feed = Feed(CUDA, fields(loader.batch(0, 0)), scalars=2)
    for index in range(loader.num_batches(0)):
        batch = loader.batch(0, index)
        feed.put(fields(batch), 100 + index, [index, 0.1 * index])
        assert feed.scalars.numpy().tolist() == [index, 0.1 * index]
        for mine, its in zip((batch.input_ids, batch.labels, batch.position_ids), feed.fields, strict=True):
            assert np.array_equal(its.cpu().numpy(), mine)
        assert feed.num_targets.item() == 100 + index


@pytest.mark.slow
def test_replayed_steps_are_those_that_are_launched_one_by_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (*SMALL, "train.accumulation_steps=2", "log.every=4", "train.device=cuda")
    found = []
    for blocking in ("0", "1"):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
        training = assembled(load(recipe, str(tmp_path / blocking), *small))
        steps = training._on_device
        assert isinstance(steps, DeviceSteps)
        results = []
        for step in range(3):
            steps.take(training._batches(), 0.01 * (step + 1))
            if step in (0, 2):
                results += steps.reading().results()
        parts = [steps._first, steps._following, steps._update]
        assert all(part.is_captured == (blocking == "0") for part in parts)
        figures = [(r.loss_sum, r.targets, r.tokens, r.grad_norm) for r in results]
        found.append((training.state.hash(), figures))
    assert found[0] == found[1]
    assert len({f[0] for f in found[0][1]}) == 3


def test_steps_wait_for_nothing(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = assembled(load(recipe, str(tmp_path / "run"), *SMALL, "log.every=8", "train.device=cuda"))
    steps = training._on_device
    assert isinstance(steps, DeviceSteps)
    for _ in range(3):
        steps.take(training._batches(), 0.01)
    driver, calls = backend_for(CUDA).driver, []  # type: ignore[attr-defined]

    def count(name: str, original: Any) -> None:
        monkeypatch.setattr(driver, name, lambda *args: (calls.append(name), original(*args))[1])

    for name in ("synchronize", "synchronize_stream", "synchronize_event", "copy", "launch_graph"):
        count(name, getattr(driver, name))
    steps.take(training._batches(), 0.01)
    # The feed makes sure that the batch before the last has left the pinned memory, and copies from it.
    assert calls == ["synchronize_event", "copy", "launch_graph"]
    calls.clear()
    steps.take(training._batches(), 0.01)
    reading = steps.reading()
    assert calls == ["synchronize_event", "copy", "launch_graph", "copy"]
    calls.clear()
    assert len(reading.results()) == 5
    assert calls == ["synchronize_event"]


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_snapshot_waits_for_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """Copies in stream order, across pieces that are pinned one by one; later steps do not change it."""
    settings = (*SMALL, "model.dtype=bfloat16", "log.every=8", "train.device=cuda")
    training = assembled(load(recipe, str(tmp_path / "run"), *settings))
    driver, calls = backend_for(CUDA).driver, list[str]()  # type: ignore[attr-defined]

    def refuse(pointer: int, nbytes: int) -> None:
        raise DeviceError("cuMemHostRegister failed")

    def note(name: str, original: Any) -> None:
        monkeypatch.setattr(driver, name, lambda *args: (calls.append(name), original(*args))[1])

    if not is_pinned:
        monkeypatch.setattr(driver, "register_host", refuse)
    monkeypatch.setattr(state, "_PIECE", 1 << 14)
    training._step(training._batches())
    training._catch_up()
    buffer = HostBuffer(snapshot_bytes(training.state), CUDA)
    for name in ("synchronize", "synchronize_stream", "synchronize_event", "copy"):
        note(name, getattr(driver, name))
    snapshot = Snapshot.of(training.state, buffer)
    pieces = sum(len(kept) for kept in (snapshot.weights, snapshot.optimizer))
    assert set(calls) == {"copy"} and len(calls) > pieces
    expected = training.state.hash()
    training._step(training._batches())
    buffer.wait()
    assert snapshot.digest() == expected != training.state.hash()
    assert (buffer.not_pinned is None) == is_pinned
    buffer.close()


@pytest.mark.full
def test_a_bad_step_and_all_after_it_change_no_weight_and_are_explained(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, str(tmp_path / "run"), "train.device=cuda", "log.every=4", *SMALL)
    training = assembled(config)
    state, device_steps = training.state, training._on_device
    assert isinstance(device_steps, DeviceSteps)
    loss = type(state.model).loss
    hashes, bad = [], 2

    def poisoned(self: Any, ids: Any, *args: Any, **options: Any) -> Any:
        found = loss(self, ids, *args, **options)
        return found * float("nan") if state.step == bad else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(state.model), "loss", poisoned)
        for _ in range(4):
            training._step(training._batches())
            hashes.append([p.detach().cpu().numpy().tobytes() for _, p in state.model.named_parameters()])
        assert hashes[0] != hashes[1] == hashes[2] == hashes[3]
        with pytest.raises(NumericError, match="loss of micro-batch 0 is nan in step 3") as caught:
            training._catch_up()
    assert caught.value.exit_code == 9
    assert "the weights are those after step 2" in str(caught.value)
    assert re.search(r"samples: row 0: .*doc\d\d\.txt", caught.value.where)


@pytest.mark.slow
def test_a_run_on_cuda_is_that_on_the_cpu_and_resumes_bit_by_bit(recipe: Path, tmp_path: Path) -> None:
    small = (*SMALL, "eval.max_batches=1", "train.steps=3", "eval.prompts=[]", "eval.every=3")
    on_cpu = load(recipe, str(tmp_path / "cpu"), "train.device=cpu", *small)
    whole = load(recipe, str(tmp_path / "cuda"), "train.device=cuda", *small)
    parts = load(recipe, str(tmp_path / "parts"), "train.device=cuda", *small)
    train(on_cpu)
    summary = train(whole)
    kept = rows(whole.train.output_dir)
    for mine, its in zip(kept, rows(on_cpu.train.output_dir), strict=True):
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            assert value == pytest.approx(its[name], rel=1e-3), name
    with pytest.raises(ConfigError, match="device"):
        train(load(recipe, str(tmp_path / "cuda"), "train.device=cpu", *small, "train.steps=5"), resume=True)
    train(load(recipe, str(tmp_path / "parts"), "train.device=cuda", *small, "train.steps=2"))
    resumed = train(parts, resume=True)
    assert resumed.state_hash == summary.state_hash
    assert checkpoints(parts.train.output_dir)[3] == checkpoints(whole.train.output_dir)[3]
    assert summary.tokens_per_second is None or summary.tokens_per_second > 0


@pytest.mark.gpu
def test_adapters_on_cuda_resume_bit_by_bit(tmp_path: Path) -> None:
    few = (
        "lora.target_modules=[q_proj]",
        "lora.dropout=0.1",
        "eval.every=null",
        "eval.prompts=[]",
        "eval.max_batches=1",
    )
    settings = ("train.device=cuda", *SMALL, "model.dtype=bfloat16", *few, "eval.at_start=false", "optim.lr=1e-2")
    recipe = make_lora(tmp_path)
    whole, parts = (load(recipe, str(tmp_path / name), *settings, "train.steps=2") for name in ("whole", "parts"))
    expected = train(whole)
    first = train(load(recipe, str(tmp_path / "parts"), *settings, "train.steps=1"))
    assert train(parts, resume=True).state_hash == expected.state_hash != first.state_hash


def test_auto_takes_a_gpu_where_there_is_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.backend.cuda.driver.is_interpreted", lambda: False)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "check_supported", lambda device: "NVIDIA H200, 140 GiB")
    assert preparation.resolve_device("auto") == CUDA
    assert preparation.describe_gpu() == (True, "NVIDIA H200, 140 GiB")
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert preparation.resolve_device("auto") == CPU
    assert preparation.describe_gpu() == (False, "no GPU was found")

    def old(device: Any) -> str:
        raise DeviceError("cuda:0 is a Tesla T4 of compute capability 7.5")

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "check_supported", old)
    assert preparation.resolve_device("auto") == CPU
    assert "T4" in preparation.describe_gpu()[1]
    with pytest.raises(DeviceError, match="T4"):
        preparation.resolve_device("cuda")


def test_the_interpreter_is_never_chosen_by_auto() -> None:
    if not cuda.get_device_name().startswith("Triton"):
        pytest.skip("there is a GPU")
    assert preparation.resolve_device("auto") == CPU
    assert preparation.resolve_device("cuda") == CUDA


@pytest.mark.full
def test_generation_and_evaluation_run_on_cuda_as_on_the_cpu(recipe: Path, tmp_path: Path) -> None:
    quick = ("train.steps=1", "eval.prompts=[]", "eval.max_batches=1", "train.device=cpu")
    config = load(recipe, str(tmp_path / "run"), *SMALL, *quick)
    train(config)
    folder = str(config.train.output_dir)
    found = []
    for device in ("cpu", "cuda"):
        pieces = session.generate(
            folder,
            "alpha",
            max_tokens=3,
            temperature=0.0,
            top_k=None,
            top_p=None,
            seed=0,
            device=device,
            dtype="float32",
        )
        source = [str(recipe.parent / "doc00.txt")]
        measured = session.evaluate(folder, source, seq_len=16, batch_size=2, device=device, dtype="float32")
        found.append(("".join(pieces), measured))
    assert found[0][0] == found[1][0]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)

"""Distillation from a file of top-k log-probabilities: the loss beside its definition, resuming, and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.backend import CPU
from genesis.data.documents import TokenSet
from genesis.errors import ConfigError, DataError, InterruptedRun, ModelError
from genesis.train import step as shards
from genesis.train.objective import NextTokens, Preparation
from genesis.train.step import take_step
from genesis.train.top_k import TopKDistillation, read_top_k
from genesis_cli.main import main
from tests.train.runs import Forks, assembled, checkpoints, load, make, rows, signal_in_step, steps, train

K = 3
QUIET = ("eval.prompts=[]", "train.device=cpu")


def record(ids: list[int], vocab: int) -> dict[str, Any]:
    """Log-probabilities of an imagined teacher, which depend on the token before; none of the first token."""
    top, logs = list[list[int]](), list[list[float]]()
    for rng in map(np.random.default_rng, ids[:-1]):
        top.append(rng.permutation(vocab)[:K].tolist())
        logs.append(np.log(rng.dirichlet(np.ones(K + 1))[:K]).tolist())
    return {
        "input_ids": ids,
        "target_token_ids": [None, *top],
        "target_logprobs": [[], *logs],
    }


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a file for all its samples, in another order."""
    path, sets = make(tmp_path), list[TokenSet]()

    def note_sets(objective: NextTokens, model: Any, run: Preparation) -> tuple[str, ...]:
        sets.extend(each.tokens for each in (run.loader, *run.held_out))
        return ()

    with monkeypatch.context() as patch:
        patch.setattr(NextTokens, "prepare", note_sets)
        shape = assembled(load(path, "probe", *QUIET)).config.model.config
    assert shape is not None
    records = []
    for tokens in sets:
        for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
            records.append(record(tokens.stream[start : start + length].tolist(), shape["vocab_size"]))
    assert len(sets) >= 2 and len(records) >= 12
    (tmp_path / "top.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records[::-1]))
    path.write_text(f"{path.read_text()}objective: {{name: distill, teacher: {tmp_path / 'top.jsonl'}}}\n")
    return path


def test_the_loss_is_its_definition(recipe: Path) -> None:
    """The value in numpy, from the file; the gradients of a dense program."""
    training = assembled(load(recipe, "run", *QUIET, "model.dtype=float32"))
    objective, batch = training.state.objective, next(training.state.loader)
    model: Any = training.state.model
    tokens = batch.tokens
    assert tokens is not None
    known = {tuple(r["input_ids"]): r for r in map(json.loads, (recipe.parent / "top.jsonl").read_text().splitlines())}
    rows, length = batch.input_ids.shape
    q = np.zeros((rows, length, model.head_weight.shape[0]))
    for (row, sample, first, count), column in zip(batch.samples.tolist(), batch.columns.tolist(), strict=True):
        start = tokens.starts[sample]
        found = known[tuple(tokens.stream[start : start + tokens.lengths[sample]].tolist())]
        for t in range(1, count):
            p = np.exp(found["target_logprobs"][first + t])
            q[row, column + t - 1, found["target_token_ids"][first + t]] = p / p.sum()
    assert q.sum() == pytest.approx(batch.num_targets)

    fields = [genesis.from_numpy(each) for each in objective.fields(batch)]
    model.train()
    loss, figures = objective.loss(model, fields, batch.num_targets)
    loss.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    objective.loss(model, fields, batch.num_targets)[0].backward()
    for name, parameter in model.named_parameters():  # a micro-batch adds its finished gradient, as ranks do
        np.testing.assert_array_equal(parameter.grad.numpy(), 2 * gradients[name], err_msg=name)
    model.zero_grad()
    log_p = model.logits(model.hidden_states(fields[0], fields[2])).log_softmax(-1)
    (-(log_p * genesis.from_numpy(q.astype(np.float32))).sum() / batch.num_targets).backward()
    expected = (q * (np.log(np.maximum(q, 1e-300)) - log_p.detach().numpy().astype(np.float64))).sum()
    assert loss.item() * batch.num_targets == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    at = np.nonzero(batch.labels >= 0)
    log_label = log_p.detach().numpy()[at[0], at[1] - 1, batch.labels[at]]
    assert figures is not None and figures.item() == pytest.approx(-log_label.sum(), rel=1e-5)


def test_a_resumed_run_ends_in_the_same_state(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", 1)
    how = (*QUIET, "train.threads=2", "train.steps=12", "checkpoint.every=6", "eval.every=6")
    whole, halted = load(recipe, "whole", *how), load(recipe, "halted", *how)
    train(whole)
    found = rows(whole.train.output_dir)
    evaluated = [row for row in found if "eval/loss" in row]
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]
    assert "eval/cross_entropy" in evaluated[0] and any("train/cross_entropy" in row for row in found)
    with signal_in_step(8), pytest.raises(InterruptedRun):
        train(halted)
    file = recipe.parent / "top.jsonl"
    text = file.read_text()
    file.write_text(text + "\n")
    with pytest.raises(ModelError, match="the teacher is not the one with which the run began"):
        train(halted, resume=True)
    file.write_text(text)
    train(halted, resume=True)
    assert checkpoints(halted.train.output_dir)[12] == checkpoints(whole.train.output_dir)[12]
    assert rows(halted.train.output_dir) == found


@pytest.mark.full
def test_a_device_computes_the_same_steps(recipe: Path) -> None:
    small = ("eval.prompts=[]", "model.dtype=float32", "train.batch_size=1", "train.accumulation_steps=3")
    more = ("data.seq_len=8", "log.every=4", "eval.every=null", "checkpoint.every=null")
    run, reference = (
        assembled(load(recipe, name, f"train.device={device}", *small, *more))
        for name, device in (("device", "cuda"), ("host", "cpu"))
    )
    steps(run, 2)
    assert run._on_device is not None and run._on_device._following.is_captured
    found = run._on_device.reading().results()
    expected = [take_step(reference.state, reference._batches(), reference.lr_at(n), 1.0, CPU) for n in range(2)]
    for a, b in zip(found, expected, strict=True):
        assert (a.loss_sum, *a.figures) == pytest.approx((b.loss_sum, *b.figures), rel=1e-4)


TOP, LOGS = [None, [0, 1, 2], [3, 4, 5]], [None, [-1.0, -2.0, -3.0], [-1.0, -1.5, -2.0]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_logprobs": LOGS[:2]}, "3 tokens but 2 entries of `target_logprobs`"),
        ({"target_token_ids": None}, "no list `target_token_ids`"),
        ({"input_ids": [1, "b", 3]}, "`input_ids` has other values than 0 to 8"),
        ({"target_token_ids": [None, [0, 1, 2], [3, 4, 9]]}, "token 2 has an id outside the vocabulary of 9 tokens"),
        ({"target_token_ids": [None, [0, 1, 2], [3, 4, -1]]}, "token 2 has an id outside the vocabulary"),
        ({"target_token_ids": [None, [0, 1, 1], [3, 4, 5]]}, "token 1 has an id that occurs twice"),
        ({"target_token_ids": [None, [0, 1, True], [3, 4, 5]]}, "token 1 has a value that is not a number"),
        ({"target_logprobs": [None, [-1.0, -2.0], [-1.0] * 3]}, "token 1 has an entry that is not a list of 3 values"),
        ({"target_logprobs": [None, [-1.0, -2.0, None], [-2.0] * 3]}, "token 1 has a value that is not a number"),
        ({"target_logprobs": [None, [-1.0, -2.0, float("nan")], [-2.0] * 3]}, "NaN"),
        ({"target_logprobs": [None, [-1.0, -2.0, 10**400], [-2.0] * 3]}, "too large"),
        ({"target_logprobs": [None, [-1.0, -2.0, -3.0], [-1.0, -1.0, -0.9]]}, "token 2 has probabilities that sum to"),
        ({"target_logprobs": [None, None, [-2.0] * 3]}, "token 1 has an entry that is not a list of 3 values"),
        ({"target_token_ids": [None] * 3, "target_logprobs": [None] * 3}, "no log-probabilities"),
    ],
)
def test_bad_files(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path, good = tmp_path / "top.jsonl", {"input_ids": [1, 2, 3], "target_token_ids": TOP, "target_logprobs": LOGS}
    path.write_text(json.dumps(good))
    assert read_top_k(str(path), 9).ids.tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5]]
    path.write_text(json.dumps(good | changed))
    with pytest.raises(DataError, match=message):
        read_top_k(str(path), 9)


@pytest.mark.full
def test_ranks_end_in_the_same_state(recipe: Path) -> None:
    how = (*QUIET, "train.steps=2", "train.accumulation_steps=4", "checkpoint.every=null", "eval.every=null")
    train(load(recipe, "alone", *how))
    with Forks() as forks:
        done = forks.run("train", recipe, f"train.output_dir={recipe.parent / 'ranks'}", *how, "--nproc", "2")
    assert done.code == 0, done
    assert checkpoints(recipe.parent / "ranks") == checkpoints(recipe.parent / "alone")


def test_samples_that_the_file_lacks(recipe: Path) -> None:
    file = recipe.parent / "top.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[1:]))
    with pytest.raises(DataError, match="has the tokens of this sample"):
        train(load(recipe, "run", *QUIET))
    first = json.loads(lines[0])
    first["target_token_ids"][4] = first["target_logprobs"][4] = None
    file.write_text("\n".join([json.dumps(first), *lines[1:]]))
    with pytest.raises(DataError, match="no log-probabilities of target token 4"):
        train(load(recipe, "run", *QUIET))
    file.unlink()
    with pytest.raises(DataError, match=r"top\.jsonl"):
        train(load(recipe, "run", *QUIET))


def test_settings_and_plans(recipe: Path) -> None:
    assert isinstance(assembled(load(recipe, "run", *QUIET)).state.objective, TopKDistillation)
    for wrong in ("objective.beta=0.5", "objective.temperature=2"):
        with pytest.raises(ConfigError, match="only the forward KL"):
            load(recipe, "other", wrong)
    words = [str(recipe), *QUIET, f"train.output_dir={recipe.parent / 'run'}"]
    for command in (["validate"], ["estimate"]):
        assert main([command[0], *words, *command[1:]]) == 0

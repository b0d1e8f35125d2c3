"""Reward models: the loss against TRL, runs of pairs, their folders and adapters, what refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, GenesisError, InterruptedRun, ModelError
from genesis.files.safetensors import load_file
from genesis.tensor import Tensor
from genesis.train.preference_losses import reward
from genesis_cli.main import main
from genesis_models.config import ModelConfig
from genesis_models.folder import read_config
from tests.train.golden import BASE, noise
from tests.train.preferences import make_pairs, sequences, sums
from tests.train.runs import assembled, load, rows, signal_in_step, train
from tests.train.test_trl import begun, cases, compare, page

QUIET = ("train.device=cpu", "checkpoint.every=null", "optim.lr=1e-3", "eval.prompts=[]", "train.steps=4")
WHOLE = "lora=null"


def make_model(seed: int) -> Any:
    model = genesis_models.load(BASE, reward=True)
    with genesis.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(genesis.from_numpy(noise(seed, name, parameter.shape)))
    return model.train()


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(("kind", "seed", "name"), cases("reward"))
def test_golden(kind: str, seed: int, name: str) -> None:
    """The loss, its gradients and ten steps of TRL's RewardTrainer, with all sequences in one packed row."""
    of_seed, model = page(kind)["seeds"][str(seed)], make_model(seed)
    case = of_seed["cases"][name]
    sequences = [row[side] for side in ("chosen", "rejected") for row in of_seed["rows"]]
    ids = genesis.tensor([[token for each in sequences for token in each]])
    positions = genesis.tensor([[at for each in sequences for at in range(len(each))]])
    # In TRL the last token is the last one that is not padding, whose token here is also the end of a text.
    at_end = [each[-1] == Tokenizer.load(BASE).eos_id for each in sequences]
    last = genesis.tensor([np.cumsum([len(each) for each in sequences]) - 1 - np.array(at_end)])

    def loss() -> Tensor:
        rewards = model.rewards(ids, last, positions)[0].reshape(2, -1)
        settings = {"gamma": 0.0, "center_rewards_coefficient": 0.0, **case["settings"]}
        margins = genesis.tensor(settings.pop("margins", [0.0] * len(of_seed["rows"]))[: len(of_seed["rows"])])
        return reward(rewards[0], rewards[1], margins, **settings).mean()

    compare(model, loss, case)


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_reads_the_same_sequences(seed: int, tmp_path: Path) -> None:
    """TRL's sequences of chats also have the line break that the template puts after an end of turn."""
    (batch,) = begun(tmp_path, seed, "reward")._batches()
    samples = batch.samples[:, 1].tolist()
    found = {tuple([tuple(ids.tolist()) for ids, _ in sequences(batch.tokens, sample)]) for sample in samples}
    end = None if seed == 2 else -1
    expected = page("reward")["seeds"][str(seed)]["rows"]
    assert found == {(tuple(row["chosen"][:end]), tuple(row["rejected"][:end])) for row in expected}


def test_a_config_of_a_reward_model() -> None:
    """Padding that is also the end of a turn would hide the last token from transformers."""
    raw = {**read_config(BASE).raw, "eos_token_id": [2, 7]}
    found = [ModelConfig.from_dict({**raw, "pad_token_id": pad}).as_reward().raw["pad_token_id"] for pad in (2, 3)]
    assert found == [None, 3]
    with pytest.raises(ModelError, match="cannot become a reward model"):
        ModelConfig.from_dict({**raw, "model_type": "granite"}).as_reward()


def test_a_margin_is_subtracted() -> None:
    found = reward(genesis.tensor([2.0]), genesis.tensor([0.5]), gamma=1.0, center_rewards_coefficient=0.1)
    assert found.item() == pytest.approx(np.log1p(np.exp(-0.5)) + 0.1 * 2.5**2)


def test_margins_of_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All rewards are 0 at first, so that the first loss is the mean of log(1 + e^(margin + gamma))."""
    records = [
        {**row, "margin": margin} for row, margin in zip(sums(12), [0.5, None, "2", 1, -1.0, 0] * 2, strict=True)
    ]
    recipe = make_pairs(tmp_path, "reward", records)
    more = (*QUIET, "data.eval_fraction=0", "train.batch_size=16", "train.steps=1")
    for gamma in (0.0, 0.3):
        train(load(recipe, "run", *more, f"objective={{name: reward, gamma: {gamma}}}"))
        expected = np.log1p(np.exp(np.array([0.5, 0, 2, 1, -1, 0]) + gamma)).mean()
        assert rows(tmp_path / "run")[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
        (tmp_path / "run").rename(tmp_path / f"run{gamma}")
    assert main(["train", str(recipe), *more, "data.fields={margin: prompt}"]) == 4
    assert "the margin is a list, not a finite number" in capfd.readouterr().err


def test_a_packed_batch_has_the_rewards_of_single_sequences(tmp_path: Path) -> None:
    training = assembled(load(make_pairs(tmp_path, "reward"), "run", *QUIET, WHOLE))
    model: Any = training.state.model
    with genesis.no_grad():
        model.score.weight.normal_(0.0, 1.0, generator=genesis.Generator(0))
    batch, objective = next(training.state.loader), training.state.objective
    fields = [genesis.from_numpy(each) for each in objective.fields(batch)]
    tokens = batch.tokens
    assert tokens is not None and len(batch.samples) >= 2
    expected = []
    for sample in batch.samples[:, 1].tolist():
        for ids, _ in sequences(tokens, sample):
            states = model.hidden_states(genesis.tensor(ids[None])).detach().numpy()[0, -1]
            expected.append(float(states @ model.score.weight.detach().numpy()[0]))
    pairs = np.array(expected).reshape(-1, 2)
    margins = pairs[:, 0] - pairs[:, 1]
    _, figures = objective.loss(model, fields, 1)
    sums = [np.log1p(np.exp(-margins)).sum(), pairs.mean(1).sum(), margins.sum(), (margins > 0).sum()]
    assert objective.measure(model, fields).tolist() == pytest.approx(sums, abs=1e-3)
    assert figures is not None and figures.tolist() == pytest.approx(sums[1:], abs=1e-3)


def resumed(recipe: Path, *how: str) -> Path:
    """The folder of a run that learned, was halted and resumed, and ended as one without a halt."""
    settings = (*QUIET, *how, "train.accumulation_steps=2")
    whole = train(load(recipe, "whole", *settings))
    with signal_in_step(2), pytest.raises(InterruptedRun):
        train(load(recipe, "halted", *settings))
    assert train(load(recipe, "halted", *settings), resume=True).state_hash == whole.state_hash
    found = rows(recipe.parent / "whole")
    assert found[0]["eval/loss"] == pytest.approx(np.log(2)) and found[0]["eval/margin"] == 0
    assert found[-1]["eval/accuracy"] == 1 and found[-1]["eval/margin"] > 0.01
    return recipe.parent / "halted"


def test_a_whole_model_resumes_and_is_a_sequence_classifier(tmp_path: Path) -> None:
    run, out = resumed(make_pairs(tmp_path, "reward"), WHOLE), tmp_path / "out"
    assert main(["export", str(run), "--out", str(out), "--check"]) == 0
    for folder in (run, out):
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
        assert weights["score.weight"].shape == (1, config["hidden_size"]) and weights["score.weight"].any()
        assert "lm_head.weight" not in weights
    with pytest.raises(ModelError, match="predicts no tokens"):
        genesis_models.load(out).generate("1 +", max_tokens=1)
    with pytest.raises(ConfigError, match="is a reward model"):
        train(load(make_pairs(tmp_path), "next", *QUIET, WHOLE, f"model.path={out}"))
    with pytest.raises(ModelError, match="is a reward model") as caught:  # before the data, which a student cannot use
        train(load(make_pairs(tmp_path), "next", *QUIET, f"objective={{name: distill, teacher: {out}}}"))
    assert caught.value.where == "objective.teacher"


def test_adapters_resume_and_save_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = resumed(make_pairs(tmp_path, "reward")), tmp_path / "out"
    config = json.loads((run / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    assert load_file(run / "adapter_model.safetensors")["base_model.model.score.weight"].any()
    assert main(["export", str(run), "--out", str(out), "--merge", "--check"]) == 0
    assert main(["chat", str(run)]) == 5 and f"{run} is a reward model" in capsys.readouterr().err
    with pytest.raises(GenesisError, match="belongs to a reward model"):
        train(load(make_pairs(tmp_path), "next", *QUIET, f"lora={{init_from: {run}}}"))
    ids, last = genesis.tensor([[5, 6, 7]]), genesis.tensor([[2]])
    found = [genesis_models.load(folder).rewards(ids, last).item() for folder in (run, out)]
    assert found[0] == pytest.approx(found[1], abs=1e-5) and found[0] != 0


@pytest.mark.parametrize(
    ("change", "message"),
    [("eval.prompts=[hello]", "a reward model scores them"), ("objective.beta=0.1", "beta")],
)
def test_settings_without_a_meaning(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make_pairs(tmp_path, "reward"), "run", *QUIET, change)

"""Frozen parameters, learning rates of their own, the evaluation before step 1, TF32: what a run does with each."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis import cuda, tensor
from genesis.backend import mode
from genesis.errors import ConfigError, DeviceError
from genesis.files.safetensors import SafeTensors
from genesis.optim import AdamW
from genesis.train.loop import Training
from genesis.train.optimizer import factor_of, optimizer_counts, restore_optimizer
from genesis.train.output import Output
from genesis_cli import session
from tests.train.runs import assembled, load, rows, steps, train

FROZEN = "train.freeze=['model.embed_tokens.*', '*.[qk]_proj.*']"


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_frozen_parameters_keep_their_values_and_cost_nothing(recipe: Path, tmp_path: Path, checkpointing: str) -> None:
    how = f"train.activation_checkpointing={checkpointing}"
    training = assembled(load(recipe, str(tmp_path / "run"), FROZEN, how))
    parameters = dict(training.state.model.named_parameters())
    before = {name: p.numpy().copy() for name, p in parameters.items() if not p.requires_grad}
    assert [name.rpartition("proj")[0][-2:] for name in before] == ["", "q_", "k_"]
    steps(training, 2)
    for name, values in before.items():
        assert np.array_equal(parameters[name].numpy(), values) and parameters[name].grad is None, name
    trained = {p for name, p in parameters.items() if name not in before}
    assert set(training.state.optimizer.state) == trained
    assert all(p.grad is not None for p in trained)


def test_a_checkpoint_has_frozen_weights_but_no_state_of_them(recipe: Path, tmp_path: Path) -> None:
    train(load(recipe, str(tmp_path / "run"), FROZEN, "train.steps=2"))
    with SafeTensors(tmp_path / "run/checkpoint-2/optimizer.safetensors") as file:
        assert not [name for name in file.names if "embed_tokens" in name or "q_proj" in name]
        assert [name for name in file.names if "v_proj" in name]


def test_what_was_never_updated_has_no_state_to_restore() -> None:
    def made() -> tuple[AdamW, dict[str, Any]]:
        named = {name: tensor([1.0, 2.0], requires_grad=True) for name in "ab"}
        return AdamW(list(named.items()), lr=0.1), named

    optimizer, named = made()
    (named["a"] * 3).sum().backward()
    optimizer.step()
    kept = {k: v.numpy() for k, v in optimizer.state[named["a"]].items() if k != "step"}
    restored, others = made()
    restore_optimizer(restored, {f"a.{kind}": values for kind, values in kept.items()}, optimizer_counts(optimizer))
    assert optimizer_counts(restored) == {"a": 1} and others["b"] not in restored.state
    assert kept and all(np.array_equal(restored.state[others["a"]][kind].numpy(), kept[kind]) for kind in kept)


@pytest.mark.parametrize(
    ("setting", "words", "advice"),
    [
        ("train.freeze=[q_proj]", "q_proj", "write *q_proj*, which matches model.layers.0"),
        ("train.freeze=[model.embed_token.weight]", "no parameter", "did you mean model.embed_tokens.weight?"),
        ("train.freeze=['*']", "every parameter is frozen", "remove the pattern"),
        ("optim.lr_factors={x: 2.0}", "x matches no trained parameter", "names such as"),
    ],
)
def test_patterns_that_cannot_be_meant(recipe: Path, tmp_path: Path, setting: str, words: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("*", "\\*")) as caught:
        train(load(recipe, str(tmp_path / "run"), setting))
    assert (caught.value.where, caught.value.exit_code) == (setting.partition("=")[0], 3)
    assert advice in caught.value.next
    assert not (tmp_path / "run").exists()


def test_a_frozen_parameter_has_no_learning_rate(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trained parameter"):
        train(load(recipe, str(tmp_path / "run"), FROZEN, "optim.lr_factors={'*embed_tokens*': 2.0}"))


def test_of_several_patterns_the_first_counts() -> None:
    factors = {"*.lora_B.*": 16, "model.layers.?.*": 0.5, "*": 2.0}
    names = ("model.layers.3.q_proj.lora_B.weight", "model.layers.3.q_proj.lora_A.weight", "model.layers.13.x", "norm")
    assert [factor_of(name, factors) for name in names] == [16, 0.5, 2, 2]
    assert factor_of("norm", {}) == 1


def test_a_factor_of_all_is_another_learning_rate(recipe: Path, tmp_path: Path) -> None:
    plain, halved = (
        train(load(recipe, str(tmp_path / f"run{number}"), "optim.name=muon", "train.steps=3", *settings)).state_hash
        for number, settings in enumerate((["optim.lr=1e-2"], ["optim.lr=2e-2", "optim.lr_factors={'*': 0.5}"]))
    )
    assert plain == halved


def test_each_group_keeps_its_factor_in_the_schedule(recipe: Path, tmp_path: Path) -> None:
    settings = "optim.lr_factors={'*mlp*': 0.5, '*norm.weight': 3.0}"
    training = assembled(load(recipe, str(tmp_path / "run"), settings))
    steps(training, 2)
    optimizer, lr = training.state.optimizer, training.lr_at(1)
    found = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    for name, rate in found.items():
        assert rate == lr * (0.5 if "mlp" in name else 3.0 if name.endswith("norm.weight") else 1.0), name
    assert len(set(found.values())) == 3
    # What a captured step reads of each group, and what a checkpoint of the optimizer alone holds.
    assert optimizer.step_scalars() == [2.0, *(group["lr"] for group in optimizer.param_groups)]
    assert [g.get("lr_factor") for g in optimizer.state_dict()["param_groups"]] == [1.0, 0.5, 3.0]


def test_a_factor_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_factor is -1"):
        AdamW([{"params": [tensor([1.0], requires_grad=True)], "lr_factor": -1}])


def test_a_run_is_evaluated_before_its_first_step(recipe: Path, tmp_path: Path) -> None:
    told = io.StringIO()
    config = load(recipe, str(tmp_path / "run"), "eval.at_start=true")
    first = train(config, console=told)
    begun, *rest = rows(tmp_path / "run")
    assert begun["train/global_step"] == 0 and begun["eval/loss"] > 5
    lines = told.getvalue().split("\n")
    place = next(n for n, line in enumerate(lines) if line.startswith("eval at step 0: loss"))
    assert lines[place + 1] == "sample at step 0:" and place < lines.index(
        "saved " + str(tmp_path / "run/checkpoint-2")
    )
    assert not (tmp_path / "run" / "checkpoint-0").exists()
    # It changes nothing else.
    train(load(recipe, str(tmp_path / "other")))
    assert rows(tmp_path / "other") == rest
    assert first.step == 6


def test_exact_runs_need_a_hopper_gpu(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"train.exact needs a GPU with compute capability 9.0; .* is cpu"):
        train(load(recipe, str(tmp_path / "run"), "train.exact=true", "train.device=cpu", "model.dtype=bfloat16"))
    assert not mode.exact


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_on_while_the_run_lasts(recipe: Path, tmp_path: Path, wanted: bool) -> None:
    seen: list[bool] = []
    run = Training.run

    def watched(self: Training) -> Any:
        seen.append(cuda.allow_tf32.get())
        return run(self)

    before = cuda.allow_tf32.set(not wanted)
    try:
        with mock.patch.object(Training, "run", watched):
            train(load(recipe, str(tmp_path / "run"), f"train.tf32={str(wanted).lower()}", "train.steps=1"))
        assert (seen, cuda.allow_tf32.get()) == ([wanted], not wanted)
    finally:
        cuda.allow_tf32.set(before)


def test_validate_finds_a_wrong_pattern_without_the_weights(recipe: Path, tmp_path: Path) -> None:
    told = io.StringIO()
    session.validate(load(recipe, str(tmp_path / "run"), FROZEN), console=Output(told))
    assert "configuration: valid" in told.getvalue()
    for setting in ("train.freeze=[q_proj]", "optim.lr_factors={x: 2.0}"):
        with pytest.raises(ConfigError, match="matches no"):
            session.validate(load(recipe, str(tmp_path / "run"), setting), console=Output(None))

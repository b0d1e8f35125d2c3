"""Runs with adapters: what a checkpoint holds, that a resumed run is the same run, and its base the same base."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis_models
from genesis import nn
from genesis.errors import ConfigError, GenesisError, InterruptedRun, ModelError
from genesis.files.safetensors import SafeTensors
from genesis.optim.states import MASTER
from genesis.train.config import Config
from genesis.train.loop import Training
from genesis.train.output import Output, printable
from genesis.train.state import TrainState
from genesis_cli import session
from genesis_models.adapters import adapter_parameters
from genesis_models.source import find_source
from tests.files.st_files import save_file
from tests.train.runs import assembled, checkpoints, load, make_lora, rows, signal_in_step, steps, train

PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}
STATE_FILES = {"optimizer.safetensors", "trainer_state.json", "rng.json", "data_state.json", "manifest.json"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("lora"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A configuration whose base the test may move or change, and a run that was stopped after step 1."""
    recipe = make_lora(tmp_path)
    recipe.write_text(
        recipe.read_text().replace("steps: 6", "steps: 2").replace("eval: {every: 3", "eval: {at_start: false")
    )
    interrupt(load(recipe, "run"), 1)
    return recipe


def interrupt(config: Config, step: int, *, resume: bool = False) -> None:
    with signal_in_step(step), pytest.raises(InterruptedRun, match=f"after step {step}, which is saved"):
        train(config, resume=resume)


def model_of(state: TrainState) -> nn.Module:
    assert isinstance(state.model, nn.Module)
    return state.model


def told(config: Config, **options: Any) -> str:
    text = io.StringIO()
    train(config, console=text, **options)
    return text.getvalue()


class TestResuming:
    @pytest.mark.sample(cases=2)
    @pytest.mark.parametrize(
        "settings",
        [
            [
                "model.dtype=bfloat16",
                "lora.use_dora=true",
                "lora.dropout=0.2",
                "train.threads=2",
                "train.batch_size=16",
                "train.activation_checkpointing=full",
            ],
            [
                "model.dtype=bfloat16",
                "optim.low_precision=stochastic",
                "lora.use_rslora=true",
                "lora.target_modules=.*mlp[.].*_proj",
                "train.freeze=['*.lora_A.*']",
                "optim.lr_factors={'*.down_proj.*': 4}",
            ],
            ["optim.name=muon", "lora.target_modules=[q_proj, v_proj]", "eval.prompts=[]"],
            ["model.dtype=bfloat16", "lora.modules_to_save=[embed_tokens, lm_head, norm]"],
            ["lora.modules_to_save=[lm_head]", "lora.ensure_weight_tying=true", "eval.prompts=[]"],
        ],
        ids=["dora", "stochastic", "muon", "whole", "tied"],
    )
    def test_stopped_at_every_step(self, recipe: Path, tmp_path: Path, settings: list[str]) -> None:
        settings = [*settings, "train.steps=3", "checkpoint.every=3", "eval.every=2"]
        whole, chopped = (load(recipe, str(tmp_path / name), *settings) for name in ("whole", "chopped"))
        expected = train(whole)
        for step in (1, 2):
            interrupt(chopped, step, resume=step > 1)
        assert train(chopped, resume=True).state_hash == expected.state_hash
        assert rows(chopped.train.output_dir) == rows(whole.train.output_dir)
        name = "adapter_model.safetensors"
        assert (tmp_path / "chopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        evaluated = [row["train/global_step"] for row in rows(whole.train.output_dir) if "eval/loss" in row]
        assert evaluated == [0, 2, 3]

    def test_a_module_that_is_saved_whole_is_the_run_s(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), "lora.modules_to_save=[embed_tokens]")
        state = assembled(config).state
        assert state.base is not None
        parameters = dict(state.model.named_parameters())
        own = {name for name, p in parameters.items() if p.requires_grad}
        assert own == {name for name in parameters if "lora_" in name} | {"model.embed_tokens.weight"}
        assert state.base.parameters == parameters.keys() - own and "lm_head.weight" in state.base.parameters
        head, embedding = (parameters[f"{name}.weight"].detach().numpy() for name in ("lm_head", "model.embed_tokens"))
        np.testing.assert_array_equal(head, embedding)
        for bad in ("embed_tokns", "q_proj"):
            with pytest.raises(ConfigError) as caught:
                train(load(recipe, str(tmp_path / "bad"), f"lora.modules_to_save=[{bad}]"))
            assert caught.value.where == "lora.modules_to_save"

    def test_the_hash_has_the_adapter_and_the_base_but_not_its_weights(self, recipe: Path, tmp_path: Path) -> None:
        state = assembled(load(recipe, str(tmp_path / "run"))).state
        parameters = dict(state.model.named_parameters())
        assert state.base is not None and len(state.base.sha256) == 64
        assert {name for name in parameters if "lora_" not in name} == state.base.parameters
        found = [state.hash()]
        for change in ("model.norm.weight", "model.layers.0.mlp.up_proj.lora_A.weight"):
            parameters[change].detach().numpy().reshape(-1)[0] += 1
            found.append(state.hash())
        state.base = type(state.base)("0" * 64, state.base.parameters)
        found.append(state.hash())
        assert [found[0] == found[1], len(set(found))] == [True, 3]


class TestCheckpoint:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_it_is_a_folder_of_pefts_with_the_masters(self, recipe: Path, tmp_path: Path, dtype: str) -> None:
        training = assembled(load(recipe, str(tmp_path / "run"), f"model.dtype={dtype}"))
        steps(training, 2)
        training.checkpoints.save(training.state)
        folder = training.checkpoints.folder(2)
        assert {path.name for path in folder.iterdir()} == (
            PEFT_FILES | STATE_FILES | TOKENIZER_FILES | {"base.json", "generation_config.json"}
        )
        with SafeTensors(folder / "adapter_model.safetensors") as file:
            saved = {name.removeprefix("base_model.model."): file.read(name) for name in file.names}
        own = adapter_parameters(model_of(training.state))
        assert saved.keys() == own.keys() and len(own) == 14
        for name, parameter in own.items():
            master = training.state.optimizer.saved_state(parameter).get(MASTER, parameter)
            assert saved[name].dtype == np.float32 and np.array_equal(saved[name], master.detach().numpy())
        assert any((values != values.astype(parameter.dtype.numpy)).any() for values in saved.values()) == (
            dtype == "bfloat16"
        )
        with SafeTensors(folder / "optimizer.safetensors") as file:
            assert {name.rpartition(".")[2] for name in file.names} == {"exp_avg", "exp_avg_sq"}

    def test_it_has_at_most_16_bytes_a_trained_parameter(self, recipe: Path, tmp_path: Path) -> None:
        for dtype in ("float32", "bfloat16"):
            training = assembled(load(recipe, str(tmp_path / dtype), "lora.r=16", f"model.dtype={dtype}"))
            steps(training, 1)
            training.checkpoints.save(training.state)
            files = [path for path in training.checkpoints.folder(1).iterdir() if path.name not in TOKENIZER_FILES]
            trained = sum(p.numel() for p in adapter_parameters(model_of(training.state)).values())
            assert 12 <= sum(path.stat().st_size for path in files) / trained <= 16

    def test_the_final_model_is_such_a_folder_too(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), "train.steps=2")
        train(config)
        names = {path.name for path in (tmp_path / "run").iterdir() if path.is_file()}
        assert names >= PEFT_FILES | TOKENIZER_FILES and "model.safetensors" not in names
        adapter = json.loads((tmp_path / "run/adapter_config.json").read_text())
        named = adapter["base_model_name_or_path"]
        assert named.startswith("..") and os.path.samefile(tmp_path / "run" / named, recipe.parent / "base")
        checkpoint = tmp_path / "run/checkpoint-2"
        for folder in (tmp_path / "run", checkpoint):
            assert os.path.samefile(find_source(folder).folder, recipe.parent / "base")
        for path in checkpoint.iterdir():
            assert str(recipe.parent).encode() not in path.read_bytes(), path
        assert (adapter["r"], adapter["lora_alpha"], adapter["peft_type"]) == (4, 32, "LORA")
        shutil.rmtree(tmp_path / "run/checkpoint-2")
        with pytest.raises(ConfigError, match="holds a run"):
            train(config)
        with pytest.raises(ConfigError, match="only the final model of a run"):
            train(config, resume=True)

    def test_a_start_says_what_is_trained_and_which_defaults_it_took(self, recipe: Path, tmp_path: Path) -> None:
        text = told(load(recipe, str(tmp_path / "run"), "train.steps=1", "optim.lr=null", "optim.warmup_steps=null"))
        assert (
            "LoRA: r 4, scaling 8, on 7 layers (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj): 1,"
            in text
        )
        assert "parameters are trained, 1" in text
        assert (
            "fine-tuning defaults with adapters, because model.path names a trained model: optim.lr 0.0002,"
            " optim.warmup_ratio 0.03, optim.weight_decay 0.0, eval.at_start true\n"
        ) in text
        assert f"adapter, metrics and picture: {tmp_path}/run\n" in text
        assert text.index("eval at step 0: ") < text.index("step 1/1")
        full = told(load(recipe, str(tmp_path / "full"), "train.steps=1", "lora=null", "eval.at_start=false"))
        assert "all 14," in full and "parameters are trained\n" in full
        assert "LoRA" not in full and "eval at step 0" not in full
        assert "fine-tuning in full, as model.path" not in full  # the recipe sets the rate and the warm-up


class TestBase:
    def check_refused(self, config: Config, *words: str) -> None:
        before = checkpoints(config.train.output_dir)
        with pytest.raises(ModelError) as caught:
            train(config, resume=True)
        assert caught.value.exit_code == 5 and "model.path" in caught.value.next
        for word in words:
            assert word in caught.value.what, caught.value.what
        assert checkpoints(config.train.output_dir) == before

    def test_one_that_is_gone(self, own: Path) -> None:
        (own.parent / "base").rename(own.parent / "moved")
        self.check_refused(load(own, "run"), f"base model of the run is not in {own.parent}/base")
        elsewhere = load(own, "run", f"model.path={own.parent}/nowhere")
        self.check_refused(elsewhere, f"is not in {own.parent}/nowhere", f"began with it in {own.parent}/base")

    def test_one_that_was_moved_is_named_by_its_new_place(self, own: Path) -> None:
        expected = train(load(own, "whole")).state_hash
        shutil.copytree(own.parent / "base", own.parent / "moved")
        shutil.rmtree(own.parent / "base")
        assert train(load(own, "run", f"model.path={own.parent}/moved"), resume=True).state_hash == expected
        adapter = json.loads((own.parent / "run/adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == "../moved"

    def test_one_that_has_changed(self, own: Path) -> None:
        weights = own.parent / "base/model.safetensors"
        before = weights.stat()
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had been written
        self.check_refused(load(own, "run"), f"the base model in {own.parent}/base has changed", "its sha256 begins")

    def test_another_one(self, own: Path) -> None:
        config = genesis_models.folder.read_config(own.parent / "base").raw
        other = genesis_models.build(config, 1)
        genesis_models.save(other, own.parent / "other", source=own.parent / "base")
        elsewhere = load(own, "run", f"model.path={own.parent}/other")
        self.check_refused(
            elsewhere, f"{own.parent}/other is not the base", f"was in {own.parent}/base", "sha256 begins"
        )

    def test_its_files_are_hashed_once_and_again_where_they_may_have_changed(self, own: Path) -> None:
        hashed: list[str] = []
        from genesis_models.adapters import folder as base

        def watched(path: Path) -> str:
            hashed.append(Path(path).name)
            return sha256(path)

        sha256 = base.sha256_file
        with mock.patch.object(base, "sha256_file", watched):
            with mock.patch.object(Training, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                train(load(own, "run"), resume=True)
            assert hashed == []
            os.utime(own.parent / "base/config.json")
            train(load(own, "run"), resume=True)
            assert hashed == ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def adapter(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter whose config has what the schema has no setting for."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train(load(recipe, str(folder), "train.steps=2", "lora.alpha=8", "lora.target_modules=[q_proj, up_proj]"))
    raw = json.loads((folder / "adapter_config.json").read_text())
    raw["target_modules"] = r".*\.(q_proj|up_proj)"
    raw["rank_pattern"], raw["r"] = {"up_proj": 4}, 4
    with SafeTensors(folder / "adapter_model.safetensors") as file:
        tensors = {name: file.read(name) for name in file.names}
    for name in [name for name in tensors if "q_proj" in name]:
        tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]
    raw["rank_pattern"] = {"q_proj": 2}
    result = folder.with_name("peft")
    result.mkdir()
    (result / "adapter_config.json").write_text(json.dumps(raw))
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, result / "adapter_model.safetensors")
    return result


class TestGoingOn:
    def test_from_an_adapter_of_pefts(self, recipe: Path, tmp_path: Path, adapter: Path) -> None:
        settings = ("lora={init_from: " + str(adapter) + "}", "optim.lr=1e-12", "train.steps=2")
        whole = load(recipe, str(tmp_path / "whole"), *settings)
        expected = train(whole)
        resolved = load(tmp_path / "whole/config.resolved.yaml", "x").lora
        assert resolved is not None
        assert (resolved.r, resolved.alpha, resolved.target_modules) == (4, 8, r".*\.(q_proj|up_proj)")
        written = json.loads((tmp_path / "whole/adapter_config.json").read_text())
        assert (written["r"], written["rank_pattern"]) in ((4, {"q_proj": 2}), (2, {"up_proj": 4}))
        for name in ("adapter_model.safetensors",):  # it went on from there, hardly
            with SafeTensors(adapter / name) as one, SafeTensors(tmp_path / "whole" / name) as other:
                assert one.names == other.names
                assert all(np.allclose(one.read(n), other.read(n), rtol=0, atol=1e-9) for n in one.names)
        # Resuming needs no adapter but that of the checkpoint.
        moved = tmp_path / "copy"
        shutil.copytree(adapter, moved)
        chopped = load(recipe, str(tmp_path / "chopped"), "lora={init_from: " + str(moved) + "}", *settings[1:])
        interrupt(chopped, 1)
        shutil.rmtree(moved)
        assert train(chopped, resume=True).state_hash == expected.state_hash

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("r: 8", "lora.r is 8, but the adapter in lora.init_from has 4"),
            ("alpha: 4.0", "lora.alpha is 4.0, but the adapter in lora.init_from has 8.0"),
            ("use_dora: true", "lora.use_dora is true"),
            ("target_modules: all-linear", "lora.target_modules is"),
        ],
    )
    def test_a_setting_that_contradicts_it(
        self, recipe: Path, tmp_path: Path, adapter: Path, setting: str, words: str
    ) -> None:
        config = load(recipe, str(tmp_path / "run"), f"lora={{init_from: {adapter}, {setting}}}")
        for start in (lambda: train(config), lambda: session.validate(config, console=Output(None))):
            with pytest.raises(ConfigError) as caught:
                start()
            assert caught.value.what.startswith(words) and caught.value.exit_code == 3

    def test_dropout_may_differ(self, recipe: Path, tmp_path: Path, adapter: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), f"lora={{init_from: {adapter}, dropout: 0.3}}", "train.steps=1")
        model = model_of(assembled(config).state)
        assert {m.dropout for m in model.modules() if isinstance(m, nn.LoRALinear)} == {0.3}


class TestMistakes:
    def check_refused(self, config: Config, kind: type[GenesisError], code: int, words: str) -> GenesisError:
        for start in (lambda: train(config), lambda: session.validate(config, console=Output(None))):
            with pytest.raises(kind, match=words) as caught:
                start()
            assert caught.value.exit_code == code and caught.value.next
        assert not Path(config.train.output_dir).exists()
        return caught.value

    def test_layers_that_the_model_does_not_have(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), "lora.target_modules=[q_prj]")
        error = self.check_refused(config, ConfigError, 3, "q_prj")
        assert "q_proj" in error.next and error.where == "lora.target_modules"

    def test_an_adapter_whose_shapes_do_not_fit(self, recipe: Path, tmp_path: Path) -> None:
        train(load(recipe, str(tmp_path / "first"), "train.steps=1"))
        raw = genesis_models.folder.read_config(recipe.parent / "base").raw
        wide = genesis_models.build({**raw, "intermediate_size": 48}, 0)
        genesis_models.save(wide, tmp_path / "wide", source=recipe.parent / "base")
        going_on = f"lora={{init_from: {tmp_path}/first}}"
        config = load(recipe, str(tmp_path / "run"), f"model.path={tmp_path}/wide", going_on)
        error = self.check_refused(config, ModelError, 5, r"has shape \(4, 32\), .* need \(4, 48\)")
        assert "base that it was trained on" in error.next

    def test_an_adapter_in_the_place_of_a_model(self, recipe: Path, tmp_path: Path) -> None:
        train(load(recipe, str(tmp_path / "first"), "train.steps=1"))
        config = load(recipe, str(tmp_path / "run"), f"model.path={tmp_path}/first")
        self.check_refused(config, ModelError, 5, "PEFT adapter")

    def test_no_adapter_where_one_is_named(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), f"lora={{init_from: {tmp_path}}}")
        self.check_refused(config, ModelError, 5, "has no adapter_config.json")

    def test_an_adapter_that_is_not_there(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), f"lora={{init_from: {tmp_path}/gone}}")
        error = self.check_refused(config, ModelError, 5, f"^the folder {tmp_path}/gone")
        assert error.where == "lora.init_from"
        assert "adapter_config.json and adapter_model.safetensors" in error.next
        named = load(recipe, str(tmp_path / "run"), "lora={init_from: someone/qwen-lora}")
        error = self.check_refused(named, ModelError, 5, "the folder someone/qwen-lora does not exist")
        assert "genesis pull someone/qwen-lora" in error.next

    def test_a_run_without_a_final_adapter_names_its_newest_checkpoint(self, recipe: Path, tmp_path: Path) -> None:
        settings = "train.steps=1", "checkpoint.every=1", "checkpoint.save_final=false"
        train(load(recipe, str(tmp_path / "first"), *settings))
        config = load(recipe, str(tmp_path / "run"), f"lora={{init_from: {tmp_path}/first}}")
        error = self.check_refused(config, ModelError, 5, "has no adapter_config.json")
        assert error.next == f"name its newest checkpoint: {tmp_path}/first/checkpoint-1"

    def test_a_rank_that_is_more_than_the_matrix_has(self, recipe: Path, tmp_path: Path) -> None:
        """PEFT takes it, too."""
        few = "lora={r: 40, target_modules: [q_proj, k_proj]}", "train.steps=1"
        console = io.StringIO()
        session.train(load(recipe, str(tmp_path / "run"), *few), resume=False, console=Output(console))
        (line,) = (line for line in console.getvalue().splitlines() if "r 40 exceeds" in line)
        assert line.startswith("warning: ")
        assert "the matrix of model.layers.0.self_attn.q_proj, 32 x 32 (one of 2 such layers)" in line
        assert line.endswith(": r 32 can learn as much")

    def test_everything_frozen(self, recipe: Path, tmp_path: Path) -> None:
        config = load(recipe, str(tmp_path / "run"), "train.freeze=['*lora*']")
        self.check_refused(config, ConfigError, 3, "every parameter is frozen")


def test_the_adapter_is_the_base_before_the_first_step(recipe: Path, tmp_path: Path) -> None:
    """And A has the same values on each start, whatever was drawn before."""
    found = []
    for name in ("one", "other"):
        state = assembled(load(recipe, str(tmp_path / name))).state
        found.append({n: p.detach().numpy().copy() for n, p in adapter_parameters(model_of(state)).items()})
        nn.init.uniform_(next(iter(adapter_parameters(model_of(state)).values())))  # draws from the default generator
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert {bool(values.any()) for name, values in found[0].items() if "lora_B" in name} == {False}


SAMPLED = ("eval.every=1", 'eval.prompts=["alpha beta", "gamma", "de"]', "eval.sample_tokens=9")


def test_samples_of_an_adapter_leave_no_trace(recipe: Path, tmp_path: Path) -> None:
    more = ("train.steps=3", "lora.dropout=0.2")
    quiet = load(recipe, str(tmp_path / "quiet"), *more, "eval.every=null", "eval.prompts=[]")
    watched = load(recipe, str(tmp_path / "watched"), *more, *SAMPLED)
    assert train(quiet).state_hash == train(watched).state_hash
    losses = [[row for row in rows(c.train.output_dir) if "train/loss" in row] for c in (quiet, watched)]
    assert losses[0] == losses[1]


def test_samples_are_what_generate_makes_of_the_adapter(recipe: Path, tmp_path: Path) -> None:
    """All of them together, on the adapter beside its base, and one by one on what was saved."""
    said = told(load(recipe, str(tmp_path / "run"), "train.steps=2", *SAMPLED))
    last = said[said.rindex("sample at step 2:\nalpha beta") :]
    how: dict[str, Any] = {"max_tokens": 9, "temperature": 0.8, "top_k": 50, "top_p": None, "seed": 0}
    for prompt in ("alpha beta", "gamma", "de"):
        text = "".join(session.generate(str(tmp_path / "run"), prompt, **how, device="cpu", dtype="auto"))
        assert text and f"sample at step 2:\n{printable(prompt + text)}\n" in last

"""What a start refuses: changed data, tokenizer or configuration of the run it resumes; folders that are not free."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from unittest import mock

import pytest

from genesis.errors import BusyError, ConfigError, DataError, DiskError, GenesisError, InterruptedRun, ModelError
from genesis.files.lock import FolderLock
from genesis.train.config import Config
from tests.train.runs import Forks, checkpoints, load, make, picture, signal_in_step, train

pytestmark = pytest.mark.xdist_group("runs in forks")


class TestChangedInputs:
    @pytest.fixture
    def own(self, tmp_path: Path) -> Path:
        """A corpus that this test may change, and a run on it that was stopped after step 3."""
        recipe = make(tmp_path)
        with signal_in_step(3), pytest.raises(InterruptedRun):
            train(load(recipe, "run"))
        return recipe

    def check_refused(self, config: Config, error: type[GenesisError], code: int, what: str) -> None:
        before = checkpoints(config.train.output_dir)
        with pytest.raises(error, match=what) as caught:
            train(config, resume=True)
        assert caught.value.exit_code == code
        assert caught.value.next
        assert checkpoints(config.train.output_dir) == before

    @pytest.mark.parametrize("change", ["append", "remove", "add", "swap"])
    def test_data(self, own: Path, change: str) -> None:
        first, second = own.parent / "doc00.txt", own.parent / "doc01.txt"
        if change == "append":
            first.write_bytes(first.read_bytes() + b"x")
        elif change == "remove":
            first.unlink()
        elif change == "add":
            (own.parent / "doc99.txt").write_text("more of it")
        else:
            one, other = first.read_bytes(), second.read_bytes()
            first.write_bytes(other)
            second.write_bytes(one)
        self.check_refused(load(own, "run"), DataError, 4, "differs from the run")

    def test_held_out_data(self, tmp_path: Path) -> None:
        recipe, held_out = make(tmp_path), tmp_path / "held_out.txt"
        held_out.write_text("alpha beta gamma delta")
        overrides = (f"data.eval={held_out}", "data.eval_fraction=null")
        with signal_in_step(3), pytest.raises(InterruptedRun):
            train(load(recipe, "run", *overrides))
        held_out.write_text("alpha beta gamma delta.")
        self.check_refused(load(recipe, "run", *overrides), DataError, 4, "differs from the run")

    def test_tokenizer(self, own: Path) -> None:
        folder = own.parent / "tokenizer"
        folder.mkdir()
        train(load(own, "other", "data.vocab_size=264", "train.steps=1"))
        config, files = load(own, "given", f"data.tokenizer={folder}"), ("tokenizer.json", "tokenizer_config.json")
        for file in files:
            shutil.copy(own.parent / "run" / "checkpoint-3" / file, folder)
        with signal_in_step(3), pytest.raises(InterruptedRun):
            train(config)
        for file in files:
            shutil.copy(own.parent / "other" / file, folder)
        self.check_refused(config, ModelError, 5, "the tokenizer differs")

    def test_the_same_inputs_are_taken(self, own: Path) -> None:
        os.utime(own.parent / "doc00.txt", (0, 0))
        assert train(load(own, "run"), resume=True).step == 6


# A change of every setting: refused on resumption unless the schema marks it as free to change.
CHANGES: dict[str, tuple[str, ...]] = {
    "model.path": ("model.path=elsewhere", "model.config=null"),
    "model.preset": ("model.preset=0.5B", "model.config=null"),
    "model.config": ("model.config.num_hidden_layers=2",),
    "model.dtype": ("model.dtype=bfloat16",),
    "data.train": ("data.train=other.txt",),
    "data.eval": ("data.eval=other.txt", "data.eval_fraction=null"),
    "data.eval_fraction": ("data.eval_fraction=0.3",),
    "data.tokenizer": ("data.tokenizer=elsewhere",),
    "data.vocab_size": ("data.vocab_size=260",),
    "data.seq_len": ("data.seq_len=16",),
    "data.format": ("data.format=text",),
    "data.fields": ("data.fields.text=content",),
    "data.parse_special": ("data.parse_special=true",),
    "data.on_error": ("data.on_error=skip",),
    "data.max_line_bytes": ("data.max_line_bytes=2048",),
    "data.template": ("data.template=chatml",),
    "data.template_args": ("data.template_args={enable_thinking: false}",),
    "data.loss": ("data.loss=last",),
    "data.too_long": ("data.too_long=drop",),
    "train.device": ("train.device=cpu",),
    "train.seed": ("train.seed=1",),
    "train.batch_size": ("train.batch_size=3",),
    "train.accumulation_steps": ("train.accumulation_steps=1",),
    "train.max_grad_norm": ("train.max_grad_norm=2.0",),
    "train.activation_checkpointing": ("train.activation_checkpointing=full",),
    "train.precision": ("train.precision=fp8",),
    "train.tf32": ("train.tf32=true",),
    "train.exact": ("train.exact=true",),
    "train.freeze": ("train.freeze=[model.embed_tokens.*]",),
    "train.threads": ("train.threads=2",),
    "optim.name": ("optim.name=adam", "optim.weight_decay=0.1"),
    "optim.betas": ("optim.betas=[0.8, 0.9]",),
    "optim.eps": ("optim.eps=1e-7",),
    "optim.weight_decay": ("optim.weight_decay=0.2",),
    "optim.momentum": ("optim.name=sgd", "optim.momentum=0.5"),
    "optim.nesterov": ("optim.name=sgd", "optim.nesterov=true"),
    "optim.low_precision": ("optim.low_precision=stochastic",),
    "optim.state_dtype": ("optim.state_dtype=bfloat16",),
    "optim.grad_dtype": ("optim.grad_dtype=float32",),
    "optim.schedule": ("optim.schedule=linear", "optim.min_lr_ratio=0.1"),
    "optim.warmup_steps": ("optim.warmup_steps=1",),
    "optim.warmup_ratio": ("optim.warmup_steps=null", "optim.warmup_ratio=0.5"),
    "optim.min_lr_ratio": ("optim.min_lr_ratio=0.2",),
    "optim.decay_ratio": ("optim.schedule=wsd", "optim.decay_ratio=0.3"),
    "optim.step_size": ("optim.schedule=step", "optim.step_size=2"),
    "optim.step_gamma": ("optim.schedule=step", "optim.step_size=2", "optim.step_gamma=0.5"),
    "optim.lr_factors": ("optim.lr_factors={model.norm.*: 2.0}",),
}
FREE: dict[str, tuple[str, ...]] = {
    "data.cache_dir": ("data.cache_dir={output}/cache",),
    "train.output_dir": (),  # the folder that holds the checkpoint is the new one
    "train.steps": ("train.steps=7",),
    "train.epochs": ("train.steps=null", "train.epochs=1"),
    "train.zero": ("train.zero=0",),
    "optim.lr": ("optim.lr=2e-2",),
    "eval.every": ("eval.every=2",),
    "eval.at_start": ("eval.at_start=true",),
    "eval.batch_size": ("eval.batch_size=1",),
    "eval.max_batches": ("eval.max_batches=1",),
    "eval.prompts": ("eval.prompts=[other]",),
    "eval.sample_tokens": ("eval.sample_tokens=5",),
    "eval.temperature": ("eval.temperature=0.5",),
    "eval.top_k": ("eval.top_k=3",),
    "eval.top_p": ("eval.top_p=0.5",),
    "checkpoint.every": ("checkpoint.every=3",),
    "checkpoint.background": ("checkpoint.background=off",),
    "checkpoint.save_total_limit": ("checkpoint.save_total_limit=1",),
    "checkpoint.save_final": ("checkpoint.save_final=false",),
    "checkpoint.best": ("checkpoint.best=true",),
    "train.name": ("train.name=other",),
    "train.early_stop": ("train.early_stop=9",),
    "log.every": ("log.every=5",),
    "log.tensorboard": (),
    "log.wandb": (),
    "log.wandb_project": ("log.wandb_project=other",),
}


class TestChangedConfiguration:
    def test_every_setting_is_in_one_of_the_tables(self, recipe: Path) -> None:
        apart = ("lora.", "objective.")  # they have tests of their own
        known = (key for key, _ in load(recipe, "x").settings() if not key.startswith(apart))
        assert sorted([*CHANGES, *FREE]) == sorted(known)

    @pytest.mark.parametrize("key", CHANGES)
    def test_a_change_is_refused(self, recipe: Path, stopped: Path, key: str) -> None:
        before = picture(stopped)
        with pytest.raises(ConfigError, match="the configuration differs from the run to resume") as caught:
            train(load(recipe, str(stopped), *CHANGES[key]), resume=True)
        assert caught.value.exit_code == 3
        assert f"\n{key}" in caught.value.what and " -> " in caught.value.what
        assert {k: v[0] for k, v in picture(stopped).items()} == {k: v[0] for k, v in before.items()}

    @pytest.mark.sample(cases=8)
    @pytest.mark.parametrize("key", [key for key, changes in FREE.items() if changes])
    def test_a_free_change_is_taken(self, recipe: Path, halved: Path, expected: str, key: str) -> None:
        overrides = [change.format(output=halved) for change in FREE[key]]
        before = checkpoints(halved)[3]
        ended = train(load(recipe, str(halved), *overrides), resume=True)
        assert ended.step > 3 and ended.state_hash != before
        if key.startswith(("optim.", "eval.", "checkpoint.", "log.")):
            assert (ended.state_hash == expected) is (key != "optim.lr")

    def test_a_run_may_be_moved(self, recipe: Path, halved: Path, expected: str) -> None:
        halved.rename(halved.with_name("moved"))
        assert train(load(recipe, str(halved.with_name("moved"))), resume=True).state_hash == expected


class TestFolders:
    def test_a_second_run_is_exit_11_and_names_the_first(self, recipe: Path, tmp_path: Path) -> None:
        with FolderLock(tmp_path / "run"), pytest.raises(BusyError) as caught:
            train(load(recipe, str(tmp_path / "run")))
        assert caught.value.exit_code == 11
        assert f"process {os.getpid()} on host {socket.gethostname()}" in caught.value.what

    def test_of_several_started_at_once_one_wins(
        self, forks: Forks, recipe: Path, tmp_path: Path, expected: str
    ) -> None:
        output = tmp_path / "run"
        words = ("train", recipe, f"train.output_dir={output}", "train.steps=100000", "eval.every=null")
        children = [forks.start(*words) for _ in range(6)]
        deadline = time.monotonic() + 30
        while not (output / "checkpoint-2").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        winner = int((output / ".lock").read_text().split('"pid": ')[1].split(",")[0])
        losers = [child.wait() for child in children if child.pid != winner]
        assert [loser.code for loser in losers] == [11] * 5
        named = f"process {winner} on host {socket.gethostname()}"
        assert all(named in loser.err for loser in losers)
        # Its lock goes with it, however it ends.
        os.kill(winner, signal.SIGKILL)
        assert next(child for child in children if child.pid == winner).wait().code == -signal.SIGKILL
        assert (output / ".lock").read_text(), "the lock was given back: the test proves nothing"
        again = forks.run(
            "train", recipe, f"train.output_dir={output}", "--resume", "train.steps=100000", "train.seed=1"
        )
        assert again.code == 3  # train.seed differs: it was let in, and refused for that alone

    @pytest.mark.parametrize("names", [["thesis.txt"], ["thesis.txt", ".lock"], ["cache/x"], [".tmp-mine"]])
    def test_a_folder_that_is_not_ours_is_refused_and_unchanged(
        self, recipe: Path, tmp_path: Path, names: list[str]
    ) -> None:
        output = tmp_path / "run"
        for name in names:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_text("mine")
        before = picture(output), sorted(os.listdir(output)), output.stat().st_mtime_ns
        for resume in (False, True):
            with pytest.raises(ConfigError, match="files that are not a Genesis run's") as caught:
                train(load(recipe, str(output)), resume=resume)
            assert caught.value.exit_code == 3
        assert (picture(output), sorted(os.listdir(output)), output.stat().st_mtime_ns) == before

    def test_a_file_is_no_folder(self, recipe: Path, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        with pytest.raises(ConfigError, match="not a folder"):
            train(load(recipe, str(tmp_path / "run")))
        assert (tmp_path / "run").read_text() == "mine"

    def test_an_unreadable_folder(self, recipe: Path, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        listing = mock.patch("genesis_cli.session.run_folder.os.listdir", side_effect=denied)
        with listing, pytest.raises(DiskError) as caught:
            train(load(recipe, str(tmp_path / "run")))
        assert caught.value.exit_code == 8

    def test_what_a_start_without_a_step_leaves_is_ours(self, recipe: Path, tmp_path: Path) -> None:
        """Wherever it ended: with the lock alone, or in the middle of the data, whose cache has any name."""
        output = tmp_path / "run"
        with FolderLock(output):
            pass
        config = load(recipe, str(output), "train.steps=1", f"data.cache_dir={output / 'tokens'}")
        ended = mock.patch("genesis_cli.session.training.make_model", side_effect=KeyboardInterrupt)
        with ended, pytest.raises(KeyboardInterrupt):
            train(config)
        assert (output / "tokens").is_dir()
        assert train(config).step == 1

    def test_a_folder_that_holds_a_run_is_refused_without_resume(self, recipe: Path, halved: Path) -> None:
        before = picture(halved)
        with pytest.raises(ConfigError, match="holds a run") as caught:
            train(load(recipe, str(halved)))
        assert (caught.value.exit_code, "--resume" in caught.value.next) == (3, True)
        assert {k: v[0] for k, v in picture(halved).items()} == {k: v[0] for k, v in before.items()}

    def test_a_checkpoint_between_two_renames_is_a_run_too(self, recipe: Path, halved: Path, expected: str) -> None:
        """What a kill leaves in the moment where a checkpoint is replaced."""
        shutil.rmtree(halved / "checkpoint-2")
        (halved / "checkpoint-3").rename(halved / ".old-checkpoint-3-0123456789abcdef")
        with pytest.raises(ConfigError, match="holds a run"):
            train(load(recipe, str(halved)))
        assert train(load(recipe, str(halved)), resume=True).state_hash == expected

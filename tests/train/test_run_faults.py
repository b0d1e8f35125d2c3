"""What goes wrong while a run runs or in what it left: numbers that are not finite, a failing disk, bit rot."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.errors import ConfigError, DiskError, ModelError, NumericError
from genesis.optim import Optimizer
from genesis.train import loop
from genesis.train.checkpoint import Checkpoints
from genesis.train.config import Config
from genesis.train.metrics import MetricsWriter
from genesis_models.blocks import CausalLM
from tests.files.faults import FailAt, Recorder, ShortWrites
from tests.train.runs import checkpoints, load, observed, picture, rows, train


class TestNotFinite:
    """The weights stay those of the step before, nothing is saved, and the error says where to look."""

    def fail(self, config: Config, step: int) -> tuple[NumericError, Any]:
        """The error of a run that fails in `step`, and its state; the weights must be those before that step."""
        take_step, seen = loop.take_step, []

        def weights(state: Any) -> list[bytes]:
            arrays = [p.detach().numpy() for _, p in state.model.named_parameters()]
            moments = [t.numpy() for s in state.optimizer.state.values() for t in s.values() if hasattr(t, "numpy")]
            return [array.tobytes() for array in arrays + moments]

        def watched(state: Any, *args: Any) -> Any:
            before = weights(state)
            try:
                return take_step(state, *args)
            except NumericError:
                assert weights(state) == before
                seen.append(state)
                raise

        with mock.patch.object(loop, "take_step", watched), pytest.raises(NumericError) as caught:
            train(config)
        assert caught.value.exit_code == 9
        assert f"in step {step}; the weights are those after step {step - 1}" in caught.value.what
        assert seen[0].step == step - 1
        assert np.isfinite(
            np.concatenate([p.detach().numpy().ravel() for _, p in seen[0].model.named_parameters()])
        ).all()
        return caught.value, seen[0]

    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("call, value", [(0, "nan"), (5, "inf"), (8, "nan")])  # two micro-batches a step
    def test_loss(self, recipe: Path, tmp_path: Path, expected: str, call: int, value: str) -> None:
        config, calls, loss = load(recipe, str(tmp_path / "run")), iter(range(1000)), CausalLM.loss
        batches: list[Any] = []
        step, micro = call // 2 + 1, call % 2
        take_step = loop.take_step

        def poisoned(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
            found = loss(self, *args, **kwargs)
            return found * float(value) if self.training and next(calls) == call else found

        def noted(state: Any, given: Any, *args: Any) -> Any:
            batches[:] = given
            return take_step(state, given, *args)

        with mock.patch.object(CausalLM, "loss", poisoned), mock.patch.object(loop, "take_step", noted):
            error, state = self.fail(config, step)
        assert f"the loss of micro-batch {micro} is {value}" in error.what
        described = state.loader.describe(batches[micro])
        assert error.where == "samples: " + "; ".join(described[:8])
        assert not set(state.loader.describe(batches[1 - micro])) & set(error.where[9:].split("; "))
        assert max(checkpoints(tmp_path / "run"), default=0) == (step - 1) // 2 * 2
        assert train(config, resume=True).state_hash == expected

    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_gradient(self, recipe: Path, tmp_path: Path, expected: str, value: float) -> None:
        config, calls, grad_norm = load(recipe, str(tmp_path / "run")), iter(range(1000)), Optimizer.grad_norm
        names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]

        def poisoned(self: Optimizer, *args: Any) -> Any:
            if next(calls) == 3:
                for group in self.param_groups:
                    for name, parameter in zip(group["param_names"], group["params"], strict=True):
                        if name in names:
                            parameter.grad.numpy()[3, 5] = value
            return grad_norm(self, *args)

        with mock.patch.object(Optimizer, "grad_norm", poisoned):
            error, _ = self.fail(config, 4)
        assert f"the gradient of {names[0]} is not finite" in error.what
        assert "doc" in error.where and "row 0" in error.where
        assert train(config, resume=True).state_hash == expected

    def test_a_norm_that_overflows(self, recipe: Path, tmp_path: Path) -> None:
        grad_norm = Optimizer.grad_norm

        def huge(self: Optimizer, *args: Any) -> Any:
            self.scale_gradients(1e38)
            return grad_norm(self, *args)

        with mock.patch.object(Optimizer, "grad_norm", huge):
            error, _ = self.fail(load(recipe, str(tmp_path / "run")), 1)
        assert "overflow" in error.what or "not finite" in error.what


class TestDisk:
    def test_a_call_of_a_run_failing(self, recipe: Path, tmp_path: Path, expected: str) -> None:
        """Exit 8, or a warning where only an old checkpoint stays; what was saved is whole and can be resumed."""
        output, recorder = tmp_path / "run", Recorder()
        config = load(recipe, str(output), "checkpoint.background=off")  # so that calls come in one order
        with observed(recorder):
            train(config)
        removals = [n for n, call in enumerate(recorder.calls, start=1) if ".del-" in f"{call.path} {call.target}"]
        count = len(recorder.calls)
        for number in [*range(1, count, count // 4), removals[0], removals[-1]]:
            shutil.rmtree(output, ignore_errors=True)
            code, told = errno.ENOSPC if number % 2 else errno.EIO, io.StringIO()
            with observed(FailAt(number, code)):
                if number in removals:
                    assert train(config, console=told).state_hash == expected
                else:
                    with pytest.raises(DiskError) as caught:
                        train(config)
                    assert (caught.value.exit_code, caught.value.errno) == (8, code)
            assert ("warning: an old checkpoint cannot be removed: " in told.getvalue()) == (number in removals)
            checkpoints(output)
            assert train(config, resume="allow").state_hash == expected

    def test_short_writes(self, recipe: Path, tmp_path: Path, expected: str) -> None:
        with observed(ShortWrites(1000)):
            assert train(load(recipe, str(tmp_path / "run"))).state_hash == expected
        assert expected in checkpoints(tmp_path / "run").values()

    def test_rows_are_on_the_disk_before_the_checkpoint_that_relies_on_them(self, recipe: Path, tmp_path: Path) -> None:
        """Else a run that resumes after a power loss would lack rows that it does not write again."""
        order: list[str] = []
        sync, staged = MetricsWriter.sync, Checkpoints._staged
        noted = [
            mock.patch.object(MetricsWriter, "sync", lambda self: order.append("rows") or sync(self)),
            mock.patch.object(Checkpoints, "_staged", lambda *given: order.append("checkpoint") or staged(*given)),
        ]
        with noted[0], noted[1]:
            train(load(recipe, str(tmp_path / "run")))
        assert order == ["rows", "checkpoint"] * 3

    def test_the_metrics_failing(self, recipe: Path, tmp_path: Path, expected: str) -> None:
        """A full disk is found by the log first: exit 8 there too, and no half row."""
        config, append = load(recipe, str(tmp_path / "run")), MetricsWriter._append

        def full(self: MetricsWriter, line: bytes) -> None:
            if b'"train/global_step": 3' in line:
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._file = mock.Mock(wraps=self._file, write=mock.Mock(side_effect=error))
            append(self, line)

        with mock.patch.object(MetricsWriter, "_append", full), pytest.raises(DiskError) as caught:
            train(config)
        assert caught.value.exit_code == 8
        assert rows(tmp_path / "run")[-1]["train/global_step"] == 2
        assert train(config, resume=True).state_hash == expected


class TestDamage:
    def test_bit_rot_is_exit_5_and_older_ones_are_taken_only_when_named(
        self, recipe: Path, halved: Path, expected: str
    ) -> None:
        config, path = load(recipe, str(halved)), halved / "checkpoint-3" / "model.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        before = picture(halved)
        with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
            train(config, resume=True)
        assert caught.value.exit_code == 5
        assert "--resume-from checkpoint-2" in caught.value.next
        assert {k: v for k, v in picture(halved).items() if ".lock" not in k} == {
            k: v for k, v in before.items() if ".lock" not in k
        }
        assert train(config, resume_from="checkpoint-2").state_hash == expected

    def test_going_back_leaves_the_later_checkpoints_aside(self, recipe: Path, halved: Path, expected: str) -> None:
        """Else the next --resume would go on from a checkpoint that this run never reached."""
        config, later = load(recipe, str(halved)), checkpoints(halved)[3]
        with mock.patch.object(loop, "take_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            train(config, resume_from=str(halved / "checkpoint-2"))
        assert list(checkpoints(halved)) == [2]
        assert checkpoints(halved / "abandoned-1") == {3: later}
        assert train(config, resume=True).state_hash == expected

    @pytest.mark.parametrize("name", ["checkpoint-9", "nonsense", "../run/checkpoint-4", "checkpoint-03"])
    def test_a_checkpoint_that_is_not_there(self, recipe: Path, halved: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="checkpoint-2, checkpoint-3") as caught:
            train(load(recipe, str(halved)), resume_from=name)
        assert (caught.value.exit_code, caught.value.where) == (3, "--resume-from")

    def test_one_that_is_beyond_the_last_step(self, recipe: Path, halved: Path, expected: str) -> None:
        before = (halved / "config.resolved.yaml").read_bytes()
        with pytest.raises(ConfigError, match="checkpoint is at step 3, but the run ends at step 2") as caught:
            train(load(recipe, str(halved), "train.steps=2", "optim.warmup_steps=2"), resume=True)
        assert (caught.value.exit_code, caught.value.where) == (3, "train.steps")
        assert (halved / "config.resolved.yaml").read_bytes() == before, "a refused start changed the run's record"
        assert train(load(recipe, str(halved)), resume=True).state_hash == expected

"""The kernels of a run are known before it takes anything: those that are compiled while its data is prepared."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import genesis
import genesis.backend.cuda as cuda_backend
from genesis import cuda
from genesis.backend import Device
from genesis.backend.cuda import compilations
from genesis.backend.cuda.compilations import cancelled_on_error, is_compiling
from genesis.backend.cuda.compile import Signature
from genesis.backend.cuda.simulated import counting_device, drivers, watching_kernels
from genesis.data.loader import Batch
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import ConfigError, UsageError
from genesis.train.config import Config
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import measure
from genesis_cli.session import dry_run
from genesis_cli.session.dry_run import draw_samples, run_plan
from genesis_cli.session.model import model_config
from genesis_cli.session.training import sample_drawing, sample_texts
from genesis_models.engine import Sampling
from genesis_models.registry import build
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import Hopper
from tests.train.runs import ROOT, load, make

CUDA = Device("cuda", 0)
Key = tuple[Any, ...]


def key_of(kernel: Any, signature: Signature) -> Key:
    constants = repr(signature.constants)
    return kernel.fn.__module__, kernel.fn.__name__, signature.types, constants, signature.options


def not_told(folder: Path) -> list[str]:
    """Kernels that steps, an evaluation and samples of a run launch, and its plan does not; for a process without the
    interpreter, which changes Triton.
    """
    settings = ("train.device=cuda", "model.dtype=bfloat16", "data.seq_len=32", "train.batch_size=4")
    config = load(make(folder), str(folder / "run"), *settings, "train.accumulation_steps=2", "eval.sample_tokens=9")
    shape, heard, driver = model_config(config), set[Key](), type("Device", (Hopper,), {})
    with collecting(driver) as launched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend, "driver_for", lambda i: drivers[i] if i in drivers else driver(i))
        properties = cuda.get_device_properties(CUDA)
        with watching_kernels(properties, lambda kernel, signature: heard.add(key_of(kernel, signature))):
            run_plan(config, shape, CUDA)
            draw_samples(config, shape, sample_drawing(config), counting_device(properties))
        model = build(shape, 0, device="cuda", dtype="bfloat16")
        launched.clear()  # those of random weights: a run from a folder has none
        take(config, model)
        sample(config, model)
        assert len(launched) > 40
        return [key[1] for key in launched if key not in heard]


@pytest.mark.full
def test_steps_evaluations_and_samples_launch_what_was_told(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = f"import pathlib, tests.cuda.test_compile_ahead as t; print(t.not_told(pathlib.Path({str(tmp_path)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stdout + done.stderr


def take(config: Config, model: Any) -> None:
    """Four steps and an evaluation."""
    micro = config.train.accumulation_steps
    loader: Any = type("Loader", (), {"batch_size": config.train.batch_size, "seq_len": config.data.seq_len})
    state = TrainState(model, build_optimizer(config.optim, model.named_parameters(), 0, micro), loader)
    steps = steps_of(state)(state, CUDA, 1.0, 4)
    for _ in range(4):
        steps.take([Batch.empty(config.train.batch_size, config.data.seq_len)] * micro, 1e-3)
    model.eval()
    measure(state.objective, model, Batch.empty(config.eval_batch_size, config.data.seq_len), CUDA)


def sample(config: Config, model: Any) -> None:
    """The run's samples."""
    tokenizer: Tokenizer = train_bpe(["a text to learn words from"], vocab_size=260)
    drawn = Sampling(config.eval.temperature, config.eval.top_k, config.eval.top_p, 0)
    draw = functools.partial(sample_texts, stop=frozenset(), goes_on=lambda: True)
    with genesis.no_grad():
        prompts = [tokenizer.encode(each).tolist() for each in config.eval.prompts]
        draw(model, tokenizer, prompts, drawn, config.eval.sample_tokens)


def test_a_prompt_that_is_too_long_is_no_matter_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(
        make(tmp_path),
        str(tmp_path / "run"),
        "train.device=cuda",
        "model.dtype=float32",
        f"eval.prompts=[{'word ' * 400}]",
    )
    asked = list[int]()
    monkeypatch.setattr(dry_run, "is_compiling", lambda: not asked.append(1))
    drawing = model_config(config), sample_drawing(config)
    dry_run.compile_samples(config, *drawing, CUDA)
    assert asked
    with pytest.raises(UsageError):
        draw_samples(config, *drawing, counting_device(cuda.get_device_properties(CUDA)))


def test_an_error_gives_up_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of a run that is refused would wait for a minute of compilations."""
    work = compilations._Work()
    monkeypatch.setattr(compilations, "_work", work)
    gate, futures = threading.Event(), list[Any]()

    @cancelled_on_error()
    def refused() -> None:
        futures.extend(work.start(lambda: gate.wait(20)) for _ in range(40))  # type: ignore[arg-type,return-value]
        assert is_compiling()
        raise ConfigError("planted")

    with pytest.raises(ConfigError, match="planted"):
        refused()
    gate.set()
    begun = [each for each in futures if not each.cancelled()]
    assert 0 < len(begun) <= 16 and all(each.result(20) for each in begun)
    assert work.start(lambda: 7).result(20) == 7  # type: ignore[arg-type,return-value]
    assert not is_compiling()

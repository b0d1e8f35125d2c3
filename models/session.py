"""What the commands do, start to end: put a model, data and the training loop together. No argument parsing, no formatting
of errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from genesis import random
from genesis.backend import Device, as_device, backend_for
from genesis.backend.cpu import set_threads
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import HeldOut, Prepared, prepare, prepare_held_out
from genesis.data.stream_decoder import StreamDecoder
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, ModelError, UsageError, escape
from genesis.io.files import FolderUpdate, FolderWriter, write_file
from genesis.io.lock import LOCK_NAME, FolderLock
from genesis.train.checkpoint import Checkpoints
from genesis.train.config import Config, DataConfig
from genesis.train.config_file import check_resume, parse_config
from genesis.train.evaluation import evaluate as measure
from genesis.train.loop import Summary, Training, total_steps
from genesis.train.metrics import MetricsWriter, TensorBoardSink, WandbSink
from genesis.train.optimizer import make_optimizer, make_schedule
from genesis.train.output import Output
from genesis.train.progress import Progress, duration, tokenizing
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.folder import check_weights, load, parameter_count, read_config, write_model
from genesis_models.generate import Sampling
from genesis_models.generate import generate as generate_ids
from genesis_models.presets import preset
from genesis_models.registry import build, check_architecture

__all__ = ["evaluate", "generate", "resolve_device", "train", "validate"]

RESOLVED = "config.resolved.yaml"


def resolve_device(name: str) -> Device:
    """The device that a setting means; "auto" is the CPU, as this version has no other."""
    return as_device("cpu" if name == "auto" else name)


# --- train -------------------------------------------------------------------------------------------------------------


def train(config: Config, *, resume: bool, console: Output, resume_from: str | None = None) -> Summary:
    """Train as `config` says and leave the run in `train.output_dir`.

    Args:
        resume: go on from the newest checkpoint there; with none, start from the beginning.
        resume_from: the name of an older checkpoint to go on from.

    Raises:
        GenesisError: of the class that names what is wrong; see `genesis.errors`.
    """
    output = Path(config.train.output_dir)
    device = resolve_device(config.train.device)
    backend_for(device)
    _check_is_ours(output)
    with Interrupts() as interrupts, FolderLock(output):
        _check_previous(output, config, resume or resume_from is not None)
        write_file(output / RESOLVED, config.resolved_yaml().encode())
        if config.train.threads is not None:
            set_threads(config.train.threads)
        model_config = _model_config(config)
        data = _prepare_data(config, model_config, console)
        model = _make_model(config, model_config, data.tokenizer, device)
        _announce(config, data, model, device, console)
        training = _assemble(config, data, model, device, interrupts, console)
        _restore(training, resume, resume_from, console)
        interrupts.deferred = True
        summary = training.run()
        interrupts.deferred = False
        _finish(config, data.tokenizer, model, data.held_out, summary, console)
    return summary


def _check_is_ours(output: Path) -> None:
    """A folder with content that no run of ours made is never written to."""
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{escape(output)} is not a folder", where="train.output_dir", next="name another folder")
    if any(output.iterdir()) and not (output / RESOLVED).exists() and not (output / LOCK_NAME).exists():
        raise ConfigError(
            f"{escape(output)} holds files of something else than a Genesis run",
            where="train.output_dir",
            next="name an empty or new folder",
        )


def _check_previous(output: Path, config: Config, resume: bool) -> None:
    """A run that stands in the folder is continued on request only, and as the same run."""
    resolved = output / RESOLVED
    has_run = any(output.glob("checkpoint-*")) or (output / "model.safetensors").exists()
    if has_run and not resume:
        raise ConfigError(
            f"{escape(output)} holds a run",
            where="train.output_dir",
            next="continue it with --resume, or name another train.output_dir",
        )
    if has_run and resolved.exists():
        check_resume(parse_config(resolved.read_bytes(), str(resolved)), config, where=str(resolved))


def _model_config(config: Config) -> ModelConfig:
    """The shape of the model to train, from its folder, its preset or the configuration itself."""
    if config.model.path is not None:
        found = read_config(config.model.path)
    elif config.model.preset is not None:
        found = ModelConfig.from_dict(preset(config.model.preset), where="model.preset")
    else:
        found = ModelConfig.from_dict(config.model.config or {}, where="model.config")
    if config.data.seq_len > found.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len {config.data.seq_len} is beyond the model's {found.max_position_embeddings} positions",
            where="data.seq_len",
            next="lower it",
        )
    return found


def _prepare_data(
    config: Config, model: ModelConfig, console: Output, cache_dir: str | os.PathLike[str] | None = None
) -> Prepared:
    """Documents, split, tokenizer and tokens, with a progress bar for each stage that has to work."""
    data = config.data
    default_cache = data.cache_dir or Path(config.train.output_dir) / "cache"
    with _Stages(console) as stages:
        prepared = prepare(
            train_sources=data.train,
            eval_sources=data.eval,
            eval_fraction=data.eval_fraction,
            tokenizer_path=data.tokenizer or config.model.path,
            vocab_size=data.vocab_size or model.vocab_size,
            cache_dir=cache_dir or default_cache,
            seed=config.train.seed,
            on_error=data.on_error,
            text_field=data.text_field,
            max_line_bytes=data.max_line_bytes,
            progress=stages,
        )
    if prepared.tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"the tokenizer has {prepared.tokenizer.vocab_size} ids, the model's embedding {model.vocab_size} rows",
            where=escape(data.tokenizer or config.model.path or "data.vocab_size"),
            next="use the model's own tokenizer",
        )
    return prepared


class _Stages:
    """One progress display per stage of the data preparation."""

    def __init__(self, console: Output) -> None:
        self._console, self._stage, self._open = console, "", ExitStack()
        self._report: Any = None

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._open.close()
            self._stage, self._report = stage, self._open.enter_context(tokenizing(stage, self._console))
        self._report(done, total)


def _make_model(config: Config, model_config: ModelConfig, tokenizer: Tokenizer, device: Device) -> CausalLM:
    """The model with the weights that training starts from."""
    if config.model.path is not None:
        model = load(config.model.path, device=str(device), dtype=config.model.dtype)
    else:
        raw = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, **model_config.raw}
        fresh = ModelConfig.from_dict(raw, where="model.config")
        model = build(fresh, config.train.seed, device=str(device), dtype=config.model.dtype)
    model.activation_checkpointing = config.train.activation_checkpointing == "full"
    return model


def _announce(config: Config, data: Prepared, model: CausalLM, device: Device, console: Output) -> None:
    """What is about to happen, in three lines."""
    chosen = " (auto: this version of Genesis has no GPU backend)" if config.train.device == "auto" else ""
    count = sum(p.numel() for p in model.parameters())
    console.line(f"device: {device}{chosen}")
    console.line(f"model: {model.config.model_type}, {count:,} parameters, {config.model.dtype}")
    held_out = f"{len(data.held_out.tokens):,} held out" if data.held_out is not None else "none held out"
    console.line(
        f"data: {len(data.train):,} documents, {data.train.total_bytes:,} bytes, {data.train.num_tokens:,} tokens"
        f" of a vocabulary of {data.tokenizer.vocab_size:,}; {held_out}"
    )
    if data.report.defects.total:
        console.line(f"data: {data.report.defects.total:,} records left out; the first: {_first_defect(data)}")
    if data.report.shared_documents:
        console.line(f"warning: {data.report.shared_documents:,} training documents are also in data.eval")


def _first_defect(data: Prepared) -> str:
    return escape(next(iter(data.report.defects.examples.values()), ""))


def _assemble(
    config: Config, data: Prepared, model: CausalLM, device: Device, interrupts: Interrupts, console: Output
) -> Training:
    """The training loop's parts, at step 0."""
    output = Path(config.train.output_dir)
    loader = PackedLoader(
        data.train, batch_size=config.train.batch_size, seq_len=config.data.seq_len, seed=config.train.seed
    )
    steps = total_steps(config, loader)
    random.manual_seed(config.train.seed)
    state = TrainState(model, make_optimizer(config.optim, model), loader)
    sampling = Sampling(config.eval.temperature, config.eval.top_k, config.eval.top_p, config.train.seed)

    def sample(prompt: str) -> str:
        return "".join(_continue(model, data.tokenizer, prompt, sampling, config.eval.sample_tokens))

    def write(folder: FolderWriter) -> None:
        _write_model(config, data.tokenizer, model, folder)

    return Training(
        config=config,
        state=state,
        checkpoints=Checkpoints(output, write, config.checkpoint.save_total_limit),
        lr_at=make_schedule(config.optim, steps),
        sample=sample,
        held_out=data.held_out,
        open_metrics=lambda step: MetricsWriter(output, resume_step=step, sinks=_sinks(config, output)),
        progress=Progress(steps, 0, console),
        interrupts=interrupts,
        device=device,
        steps=steps,
    )


def _sinks(config: Config, output: Path) -> tuple[Any, ...]:
    """The other places that metrics go to."""
    sinks: list[Any] = []
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(output / "tensorboard"))
    if config.log.wandb:
        sinks.append(WandbSink(output, config.log.wandb_project, config.model_dump(mode="json")))
    return tuple(sinks)


def _write_model(config: Config, tokenizer: Tokenizer, model: CausalLM, folder: FolderWriter) -> None:
    """Model, tokenizer and side files; a source folder's own files are kept byte for byte."""
    own_tokenizer = config.model.path is not None and config.data.tokenizer is None
    write_model(
        model,
        folder,
        source=config.model.path,
        extra_files=None if own_tokenizer else tokenizer.files(),
        eos_token_id=tokenizer.eos_id,
    )


def _restore(training: Training, resume: bool, resume_from: str | None, console: Output) -> None:
    """Go back to a checkpoint where one is asked for."""
    checkpoints = training.checkpoints
    checkpoints.sweep()
    found = checkpoints.steps()
    step: int | None = found[-1] if found and resume else None
    if resume_from is not None:
        name = Path(resume_from).name
        by_name = {checkpoints.folder(s).name: s for s in found}
        if name not in by_name:
            listed = ", ".join(by_name) or "none"
            raise ConfigError(f"there is no {escape(name)}; complete checkpoints: {listed}", where="--resume-from")
        step = by_name[name]
    if step is not None:
        checkpoints.load(training.state, step)
        training.continue_at(step)
        console.line(f"resumed at step {step} from {checkpoints.folder(step)}")
    elif resume:
        console.line("no complete checkpoint here: starting from the beginning")


def _finish(
    config: Config, tokenizer: Tokenizer, model: CausalLM, held_out: HeldOut | None, summary: Summary, console: Output
) -> None:
    """The final model at the root of the run, the loss picture, and the summary."""
    from genesis.train.plot import loss_picture

    output = Path(config.train.output_dir)
    if config.checkpoint.save_final:
        with FolderUpdate(output) as folder:
            _write_model(config, tokenizer, model, folder)
    loss_picture(output / "metrics.jsonl", output / "loss.png")
    for line in _summary_lines(summary, held_out, output):
        console.line(line)


def _summary_lines(summary: Summary, held_out: HeldOut | None, output: Path) -> Iterator[str]:
    speed = "" if summary.tokens_per_second is None else f", {summary.tokens_per_second:,.0f} tokens/s"
    yield f"done: {summary.step} steps in {duration(summary.seconds)}{speed}"
    if summary.evaluation is not None and held_out is not None:
        found = summary.evaluation
        yield (
            f"held out: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, {found.bits_per_byte:.3f} bits per byte"
            f" (gzip -9 on the same files: {held_out.gzip_bits_per_byte:.3f})"
        )
    yield f"state hash: {summary.state_hash}"
    yield f"model, metrics and picture: {output}"


# --- generate, eval, validate ------------------------------------------------------------------------------------------


def _continue(model: CausalLM, tokenizer: Tokenizer, prompt: str, sampling: Sampling, count: int) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece as characters complete."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = start + [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos_id]
    decoder = StreamDecoder(tokenizer)
    for token in generate_ids(model, ids, sampling, count, frozenset({tokenizer.eos_id})):
        piece = decoder.push(token)
        if piece:
            yield piece
    if rest := decoder.finish():
        yield rest


def generate(
    folder: str,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: str,
    dtype: str,
) -> Iterator[str]:
    """Pieces of text that continue `prompt` with the model in `folder`; arguments as in the eval section."""
    where = resolve_device(device)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, device=str(where), dtype=dtype)
    return _continue(model, tokenizer, prompt, Sampling(temperature, top_k, top_p, seed), max_tokens)


DEFAULT_EVAL_LENGTH = 1024


def evaluate(
    folder: str, sources: Sequence[str], *, seq_len: int | None, batch_size: int, device: str, dtype: str
) -> dict[str, float | int]:
    """Loss, perplexity and bits per byte of the model in `folder` on `sources`, each document alone, beside gzip's."""
    where = resolve_device(device)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, device=str(where), dtype=dtype)
    longest = model.config.max_position_embeddings
    length = min(DEFAULT_EVAL_LENGTH, longest) if seq_len is None else seq_len
    if length > longest:
        raise UsageError(f"--seq-len {length} is beyond the model's {longest} positions", next="lower it")
    data = DataConfig(train=list(sources))
    with TemporaryDirectory(prefix="genesis-") as cache, _Stages(Output(sys.stderr)) as stages:
        held_out = prepare_held_out(
            sources=sources,
            tokenizer=tokenizer,
            cache_dir=cache,
            on_error=data.on_error,
            text_field=data.text_field,
            max_line_bytes=data.max_line_bytes,
            progress=stages,
        )
        found = measure(model, held_out, batch_size=batch_size, seq_len=length, max_batches=None, device=where)
    assert found is not None, "nothing asks this evaluation to stop"
    return {
        "eval/loss": found.loss,
        "eval/perplexity": found.perplexity,
        "eval/bits_per_byte": found.bits_per_byte,
        "eval/gzip_bits_per_byte": held_out.gzip_bits_per_byte,
        "eval/num_tokens": found.targets,
    }


def validate(config: Config, *, console: Output) -> None:
    """Check what `train` would use, without training and without writing: device, model, data, tokenizer."""
    device = resolve_device(config.train.device)
    backend_for(device)
    _check_is_ours(Path(config.train.output_dir))
    model_config = _model_config(config)
    if config.model.path is not None:
        check_weights(config.model.path)
    else:
        empty = ModelConfig.from_dict(model_config.raw, where="model.config")
        check_architecture(empty)
    with TemporaryDirectory(prefix="genesis-") as cache:
        data = _prepare_data(config, model_config, console, cache)
        loader = PackedLoader(
            data.train, batch_size=config.train.batch_size, seq_len=config.data.seq_len, seed=config.train.seed
        )
        steps = total_steps(config, loader)
        make_schedule(config.optim, steps)
        tokens = config.train.batch_size * config.train.accumulation_steps * config.data.seq_len
        console.line("configuration: valid")
        console.line(
            f"model: {model_config.model_type}, {parameter_count(model_config):,} parameters, {config.model.dtype}"
        )
        console.line(f"data: {len(data.train):,} documents, {data.train.num_tokens:,} tokens")
        console.line(f"run: {steps:,} steps of at most {tokens:,} tokens on {device}")

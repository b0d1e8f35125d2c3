"""`genesis train`: resolve the configuration for this machine, build the run, restore a checkpoint, train, finish.

`tests/train/config_walk.py` follows the configuration through the participating files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from genesis import cuda, exact
from genesis.backend import CPU, Device
from genesis.backend.cpu import set_threads, threads
from genesis.backend.cuda.compilations import cancelled_on_error
from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import HeldOut, Prepared
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, DataError, InterruptedRun, OutOfMemoryError, escape
from genesis.files.atomic import FolderUpdate, sweep
from genesis.files.cache import Cache
from genesis.files.strict_json import indented_bytes
from genesis.files.trust import check_owner
from genesis.train.checkpoint import BEST, TRAINER, Checkpoints
from genesis.train.config import Config
from genesis.train.config_file import RESOLVED, Change, Overrides, parse_config, recorded_settings
from genesis.train.loop import Summary, Training, total_steps
from genesis.train.metrics import (
    FILE_NAME,
    Metrics,
    MetricsWriter,
    TensorBoardSink,
    WandbSink,
    check_metrics,
)
from genesis.train.objective import Preparation
from genesis.train.optimizer import build_optimizer, build_schedule, overlong_schedule
from genesis.train.output import Output
from genesis.train.progress import Progress, duration, figure
from genesis.train.ranks import ALONE, FIRST_STEPS_S, PREPARING_S, Ranks
from genesis.train.report.page import loss_picture
from genesis.train.signals import Interrupts
from genesis.train.state import Snapshot, TrainState, platform_of
from genesis_cli.session.chat import TEXTS, ChatFormat, EncoderFactory, unused_settings
from genesis_cli.session.dry_run import compile_samples, compiled_ahead, planned_memory
from genesis_cli.session.model import (
    ModelFiles,
    adapter_to_resume,
    check_exact,
    check_trained,
    checked_base,
    frozen_base,
    make_model,
    model_config,
    trained_lines,
    usable_precision,
)
from genesis_cli.session.preparation import (
    describe_gpu,
    file_lines,
    new_token_lines,
    prepare_data,
    resolve_device,
    sample_counts,
    stages,
)
from genesis_cli.session.ranks import check_same_data, joined
from genesis_cli.session.run_folder import Resume, RunFolder
from genesis_cli.session.settings import settled
from genesis_cli.session.teacher import check_teacher, objective_of
from genesis_models.adapters import Base
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import drawing_line, file_drawing, stop_ids
from genesis_models.engine import Request, Sampling, continue_texts
from genesis_models.folder import read_config
from genesis_models.generate import engine_for
from genesis_models.registry import parameter_count
from genesis_models.weights import WeightType, check_finite


def train(
    config: Config,
    *,
    resume: Resume,
    console: Output,
    resume_from: str | None = None,
    overrides: Overrides | None = None,
) -> Summary:
    """Train with `config`, and leave the run in `train.output_dir`.

    Args:
        resume: continue from the newest checkpoint; "allow" starts a run if there is none.
        resume_from: name of an older checkpoint from which to continue.
        overrides: settings in `config` that the command line gave, for the run's record.

    Raises:
        GenesisError: its class names what is wrong; see `genesis.errors`.
    """
    folder = RunFolder(config, overrides)
    with (
        advised(config),
        cancelled_on_error(),
        Interrupts() as interrupts,
        joined(config, console, interrupts) as ranks,
        ranks.during("preparation", PREPARING_S),
    ):
        console = console if ranks.is_main else Output(None)
        return _train(config, folder, resume, resume_from, console, interrupts, ranks)


def _train(
    config: Config,
    folder: RunFolder,
    resume: Resume,
    resume_from: str | None,
    console: Output,
    interrupts: Interrupts,
    ranks: Ranks,
) -> Summary:
    """Run `train` on one rank. Rank 0 holds the folder, and prepares first what the other ranks then reuse."""
    device = resolve_device(config.train.device, ranks)
    with folder.held(ranks.is_main), arithmetic(config, ranks):
        # Resolve the configuration for this machine, and refuse at once what cannot be trained or does not fit.
        with ranks.main_first("folder"):
            asks = bool(resume) or resume_from is not None
            config, dtype = settled(config, device, folder.path / RESOLVED if asks else None)
            changed = folder.check_previous(config, resume, resume_from)
        if (kept := recorded_settings(folder.overrides)) is not None:
            console.line(kept)
        config = same_settings(ranks, config)
        previous = adapter_to_resume(config, resume, resume_from)
        base = checked_base(config, previous)
        folder.begin()
        shape, sampling = model_config(config), sample_drawing(config)
        check_trained(config, shape, previous)
        check_exact(config, device)
        check_teacher(config)
        with compiled_ahead(device):
            memory = planned_memory(config, shape, device, ranks)
        compile_samples(config, shape, sampling, device)
        # Build the run, at the beginning or at a checkpoint.
        encoders = EncoderFactory(config.data, config.model.path, config.objective.learns)
        with ranks.main_first("data"):  # the others read it from the cache
            data = prepare_data(config, shape, console, encoders=encoders)
        chat = encoders.learned(data.train, data.tokenizer, data.report.formats)
        model = make_model(config, shape, data.tokenizer, device, previous)
        announce(config, data, model, device, dtype, memory, console)
        training = assemble(config, data, model, device, interrupts, console, base, chat, ranks)
        check_same_data(ranks, training.state.loader)
        if ranks.is_main:
            # A killed run may have left its checkpoint between two renames.
            sweep(folder.path, warn=lambda text: console.line(f"warning: {text}"))
        prepare = partial(prepare_objective, training, config, data, console)
        found = _checkpoint_to_resume(training, resume, resume_from) if ranks.is_main else None
        if (step := ranks.from_main("resumed", found)) is not None:
            _restore(training, step, prepare, changed, console)
        else:
            prepare()
            if resume:
                console.line("no complete checkpoint here: starting from the beginning")
        check_finite(model, where=escape(config.model.path or config.train.output_dir))
        with training.open():
            folder.keep()
            interrupts.deferred = True
            with ranks.during("training", FIRST_STEPS_S):
                summary = training.run()
            interrupts.deferred = False
        if config.checkpoint.save_final:
            training.take_best()
        with training.state.optimizer.gathered_states():
            if ranks.is_main:
                _finish(config, training, data.held_out, summary, console)
    return summary


@contextmanager
def advised(config: Config) -> Iterator[None]:
    """Add the run's own settings to the advice of out-of-memory errors that lack it."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.next == OutOfMemoryError.ADVICE:
            rows = "train.batch_size or " * (config.train.batch_size > 1)
            more = ", or set train.activation_checkpointing to full"
            error.next = f"lower {rows}data.seq_len{more * (config.train.activation_checkpointing != 'full')}"
        raise


@contextmanager
def arithmetic(config: Config, ranks: Ranks = ALONE) -> Iterator[None]:
    """Apply `train.tf32`, `train.exact` and `train.threads` within the block; a host's ranks share its cores."""
    before = cuda.allow_tf32.set(config.train.tf32)
    count = config.train.threads
    if count is None and ranks.size > 1:
        count = max(1, threads() // (ranks.local_size or 1))
    try:
        with cpu_threads(count), exact(config.train.exact):
            yield
    finally:
        cuda.allow_tf32.set(before)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use `count` threads for BLAS and for everything else; how BLAS splits a matmul decides its last bits."""
    if count is None:
        yield
        return
    before = threads()
    set_threads(count)
    try:
        with ThreadpoolController().limit(limits=count, user_api="blas"):
            yield
    finally:
        set_threads(before)


def same_settings(ranks: Ranks, config: Config) -> Config:
    """Return rank 0's settings, which may come from the resumed run."""
    text = ranks.from_main("settings", config.resolved_yaml())
    return config if ranks.is_main else parse_config(text.encode(), "what rank 0 settled")


def announce(
    config: Config,
    data: Prepared,
    model: CausalLM,
    device: Device,
    dtype: WeightType,
    memory: str | None,
    console: Output,
) -> None:
    """Print what is about to happen in a few lines."""
    # Device and model.
    chosen = f" (auto: {describe_gpu()[1]})" if config.train.device == "auto" else ""
    console.line(f"device: {device}{chosen}")
    console.line(f"model: {model.config.model_type}, {parameter_count(model.config):,} parameters, {dtype}")
    if config.model.path is not None:
        for line in new_token_lines(data.tokenizer, read_config(config.model.path), grows=config.lora is None):
            console.line(line)
    for name, probability in model.config.dropout.items():
        console.line(f"warning: {name} {probability:g} of config.json is not applied: Genesis trains without dropout")
    if (note := usable_precision(config, model.config, device)[1]) is not None:
        console.line(note)
    # Sampling settings from the model's files.
    if config.model.path is not None and config.eval.prompts:  # generation_config.json may have sampling settings
        folders = [Path(config.model.path)]
        found = file_drawing(folders)
        given = {name: value for name in found if (value := getattr(config.eval, name, found[name])) != found[name]}
        if (drawn := drawing_line(folders, given)) is not None:
            console.line(drawn)
    # What is trained, and the memory that it takes.
    for line in trained_lines(config, model):
        console.line(line)
    if memory is not None:
        console.line(memory)
    # The data, and warnings about them.
    for line in file_lines(data):
        console.line(line)
    train, vocabulary = data.train, f"of a vocabulary of {data.tokenizer.vocab_size:,}"
    held_out = f"{data.held_out.tokens.num_documents:,} held out" if data.held_out is not None else "none held out"
    size = f"{train.num_documents:,} documents, {train.total_bytes:,} bytes, {train.num_tokens:,} tokens"
    console.line(f"data: {size} {vocabulary}{sample_counts(train)}; {held_out}")
    if count := data.report.defects.total:
        first = escape(next(iter(data.report.defects.examples.values()), ""))
        console.line(f"data: {count:,} record{'s' * (count != 1)} skipped; the first: {first}")
    if (warning := unused_settings(config, data.train)) is not None:
        console.line(warning)

    if data.report.shared_documents:
        console.line(f"warning: {data.report.shared_documents:,} training documents are also in data.eval")


def assemble(
    config: Config,
    data: Prepared,
    model: CausalLM,
    device: Device,
    interrupts: Interrupts,
    console: Output,
    base: Base | None = None,
    chat: ChatFormat = TEXTS,
    ranks: Ranks = ALONE,
) -> Training:
    """Return the parts of the training loop, at step 0. `prepare_objective` comes next.

    Args:
        base: base of adapters; required for saving them.
        chat: chat format that the model learns.
        ranks: ranks of the run; only rank 0 writes metrics.
    """
    # Data order, optimizer and schedule.
    output = Path(config.train.output_dir)
    loader = PackedLoader(
        data.train, batch_size=config.train.batch_size, seq_len=config.data.seq_len, seed=config.train.seed
    )
    steps, objective = total_steps(config, loader), objective_of(config, data.tokenizer, device)
    seed, accumulated = config.train.seed, config.train.accumulation_steps
    group, zero = ranks.group, config.train.zero
    optimizer = build_optimizer(config.optim, model.named_parameters(), seed, accumulated, group, zero)
    lr_at, warning = build_schedule(config.optim, steps), overlong_schedule(config.optim, steps)
    if warning is not None:
        console.line(warning)
    # The state that checkpoints store.
    files = ModelFiles(config, data.tokenizer, model, base, chat)
    platform = platform_of(device) if config.train.exact else None
    state = TrainState(
        model, optimizer, loader, base=frozen_base(model, base), ranks=ranks, objective=objective, platform=platform
    )
    # Samples: their prompts and the ids that end them.
    sampling = sample_drawing(config)
    prompts, ends = sample_prompts(config, data.tokenizer, chat.template, model.config.context_length)
    stop = stop_ids(config.model.path, data.tokenizer) | {*chat.ends} | ends
    drawn = model, data.tokenizer, prompts, sampling, config.eval.sample_tokens

    def open_metrics(step: int | None) -> Metrics:
        if not ranks.is_main:
            return Metrics(output)
        more = {*objective.figures, *(f"eval/{name}" for name in objective.held_out_figures)}
        sinks: list[Any] = []
        if config.log.tensorboard:
            sinks.append(TensorBoardSink(output / "tensorboard" / (config.train.name or "")))
        if config.log.wandb:
            settings = config.model_dump(mode="json")
            sinks.append(WandbSink(output, config.log.wandb_project, settings, resumed=step is not None))
        return MetricsWriter(output, resume_step=step, sinks=tuple(sinks), more=more)

    progress = Progress(steps, 0, console)
    return Training(
        config=config,
        state=state,
        checkpoints=Checkpoints(
            output,
            files.write,
            config.checkpoint.save_total_limit,
            keep_best=config.checkpoint.best,
            read_masters=None if config.lora is None else files.read_masters,
            warn=progress.note,
        ),
        lr_at=lr_at,
        sample=lambda: sample_texts(*drawn, stop=stop, goes_on=lambda: interrupts.received is None),
        joint="" if chat.template is None else "\n",
        held_out=data.held_out,
        open_metrics=open_metrics,
        progress=progress,
        interrupts=interrupts,
        device=device,
        steps=steps,
    )


def prepare_objective(training: Training, config: Config, data: Prepared, console: Output) -> None:
    """Let the objective compute what depends on the initial weights, on rank 0 first, and print its lines."""
    state, ranks = training.state, training.state.ranks
    if config.objective.learns != "tokens" and len(data.train) < ranks.size:
        what = f"{len(data.train):,} pairs or answers cannot be shared by {ranks.size:,} ranks"
        raise DataError(what, where="data.train", next="add records, or use fewer ranks")
    held_out = [] if data.held_out is None else list(data.held_out.sets.values()) or [data.held_out.tokens]
    sizes: dict[str, Any] = {"batch_size": config.eval_batch_size, "seq_len": config.data.seq_len}
    loaders = [PackedLoader(tokens, **sizes, seed=0, shuffle=False) for tokens in held_out]
    cache = Cache(config.data.cache_dir or Path(config.train.output_dir) / "cache")
    with ranks.main_first("objective"):
        with stages(console) as progress:
            shown = partial(progress, "reference")
            run = Preparation(state.loader, loaders, config.eval.max_batches, training.device, cache, shown)
            lines = list(state.objective.prepare(state.model, run))
        for line in lines:
            console.line(line)


def sample_drawing(config: Config) -> Sampling:
    """Return the sampling settings of a run's samples."""
    settings, path = config.eval, config.model.path
    drawn = {} if path is None else file_drawing([Path(path)])
    more = {name: drawn[name] for name in ("min_p", "repetition_penalty") if name in drawn}
    return Sampling(settings.temperature, settings.top_k, settings.top_p, config.train.seed, **more)


def sample_prompts(
    config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, context: int
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the ids of a run's `eval.prompts`, and the template's ends of turn. With a template, the prompts are a
    user's messages.

    Raises:
        ConfigError: a prompt fills the context. DataError: the template cannot render one.
    """
    encoded, prompts = list[list[int]](), config.eval.prompts
    with ExitStack() as stack:
        chats = stack.enter_context(ChatPrompts(tokenizer, template)) if template is not None and prompts else None
        for number, prompt in enumerate(prompts):
            where = f"eval.prompts[{number}]"
            if chats is not None:
                ids = chats.encode([{"role": "user", "content": prompt}], where=where)
            else:
                ids = tokenizer.prompt(prompt, parse_special=config.data.parse_special)
            if len(ids) >= context:
                what = f"the prompt has {len(ids):,} tokens, but the model's context holds {context:,}"
                raise ConfigError(what, where=where, next="shorten it")
            encoded.append(ids)
        return encoded, frozenset(() if chats is None else chats.end_of_turn_ids)


def sample_texts(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    count: int,
    *,
    stop: frozenset[int],
    goes_on: Callable[[], bool],
) -> list[str]:
    """Return the continuations of a run's prompts, which run together; each equals the result of `genesis generate`.

    Args:
        count: the most tokens of each.
        stop: ids that end a text.
        goes_on: called before each token; the texts end when it returns False.
    """
    requests = [Request(each, sampling, count, stop) for each in prompts]
    texts = [""] * len(prompts)
    pieces = continue_texts(engine_for(model, requests), requests, tokenizer)
    for piece in itertools.takewhile(lambda _: goes_on(), pieces):
        texts[piece.request] += piece.text
    return texts


def _restore(
    training: Training, step: int, prepare: Callable[[], None], changed: list[Change], console: Output
) -> None:
    """Restore a checkpoint, see `Checkpoints.load`; rank 0 prints which, and which settings have changed."""
    checkpoints, ranks = training.checkpoints, training.state.ranks
    # Load the state; rank 0 checks the metrics before it changes the folder.
    before = checkpoints.load(training.state, step, prepare)
    if ranks.is_main:
        check_metrics(checkpoints.output_dir / FILE_NAME, step)  # before anything in the folder changes
    training.continue_at(step)
    if not ranks.is_main:
        return
    # Report what differs from the run so far.
    console.line(f"resumed at step {step} from {checkpoints.folder(step)}")
    if changed:
        console.line(f"changed: {', '.join(map(str, changed))}")
    keys = {change.key for change in changed}
    if "optim.lr" in keys and step < training.steps:
        rate = f"optim.lr is {training.config.optim.lr:g} from step {step + 1} on"
        console.line(f"{rate}; optim.schedule continues from its position")
    if {"train.steps", "train.epochs"} & keys:
        console.line(f"the learning rate follows optim.schedule over all {training.steps:,} steps from here on")
    if training.device == CPU and before is not None and before != threads():
        console.line(f"warning: train.threads was {before} and is {threads()} from here on: last bits may differ")
    # Move later checkpoints away.
    if (aside := checkpoints.set_aside(step)) is not None:
        console.line(f"the checkpoints after it were moved to {aside}")
    # A kill may have come between the last save and its rotation.
    checkpoints.rotate(step, training.state.best.step)


def _checkpoint_to_resume(training: Training, resume: Resume, resume_from: str | None) -> int | None:
    """Return the step of the checkpoint from which to continue, or None for a new run."""
    checkpoints = training.checkpoints
    found = checkpoints.steps()
    step: int | None = found[-1] if found and resume else None
    # Find the named checkpoint, or the best one.
    if resume_from is not None:
        name, is_best = Path(resume_from).name, resume_from == BEST and bool(found)
        if is_best:  # the newest checkpoint records which one is the best
            _check_owner(checkpoints, found[-1])
            best = checkpoints.best(found[-1]).step
            _check_owner(checkpoints, best)
            name = checkpoints.folder(best).name
        by_name = {checkpoints.folder(s).name: s for s in found}
        if name not in by_name:
            listed = ", ".join(by_name) or "none"
            which = "the checkpoint of the best evaluation" if is_best else escape(name)
            raise ConfigError(f"{which} does not exist; complete checkpoints: {listed}", where="--resume-from")
        step = by_name[name]
    elif step is not None:
        _check_owner(checkpoints, step)
    if step is not None and step > training.steps:
        raise ConfigError(
            f"the checkpoint is at step {step}, but the run ends at step {training.steps}",
            where="train.steps",
            next="raise train.steps, or name an older checkpoint with --resume-from",
        )
    return step


def _check_owner(checkpoints: Checkpoints, step: int) -> None:
    check_owner(checkpoints.folder(step), next="name a checkpoint with --resume-from, or remove this one")


def _finish(config: Config, training: Training, held_out: HeldOut | None, summary: Summary, console: Output) -> None:
    """Write the final model to the root of the run, the loss picture, and the summary."""
    output = Path(config.train.output_dir)
    if config.checkpoint.save_final:
        with FolderUpdate(output) as folder:
            training.checkpoints.write_model(folder, Snapshot.of(training.state))
            folder.write(TRAINER, indented_bytes({**training.state.counters(), "state_hash": training.state_hash}))
    try:  # a run is complete without the picture
        loss_picture(output)
    except InterruptedRun:
        raise
    except Exception as error:
        console.line(f"warning: the loss picture was not drawn: {error}")
    what = "model" if config.lora is None else "adapter"
    for line in _summary_lines(summary, held_out, output, what):
        console.line(line)
    if config.checkpoint.save_final and (config.checkpoint.best or config.train.early_stop is not None):
        best, step = summary.best, training.state.step
        lowest = f"eval/loss was lowest at step {best.step} ({best.loss:.4f})"
        lowest = lowest if best.step >= 0 else "no eval/loss was a finite number"
        kept = "" if config.checkpoint.best or step == best.step else "; checkpoint.best=true keeps the lowest"
        console.line(f"{lowest}; the {what} in {output} is from step {step}{kept}")


def _summary_lines(summary: Summary, held_out: HeldOut | None, output: Path, what: str) -> Iterator[str]:
    speed = "" if summary.tokens_per_second is None else f", {summary.tokens_per_second:,.0f} tokens/s"
    count = summary.step - summary.begun_at
    took = f"{count:,} step{'s' * (count != 1)} in {duration(summary.seconds)}{speed}"
    if not summary.begun_at:
        yield f"done: {took}"
    else:
        end = f"the run is complete at step {summary.step:,}"
        yield f"done: {took}; {end}" if count else f"done: nothing was left to do, {end}"
    if summary.evaluation is not None and held_out is not None:
        found, gzip = summary.evaluation, held_out.gzip_bits_per_byte
        baseline = "" if gzip is None else f" (gzip -9 on the same files: {gzip:.3f})"
        parts = [f"loss {found.loss:.4f}"]
        if found.bits_per_byte is not None:
            perplexity = figure(found.perplexity, ",.2f")
            parts.append(f"perplexity {perplexity}, {found.bits_per_byte:.3f} bits per byte{baseline}")
        parts += [f"{name.replace('_', ' ')} {figure(value, '.3f')}" for name, value in found.figures.items()]
        yield f"held out: {', '.join(parts)}"
    yield f"state hash: {summary.state_hash}"
    yield f"{what}, metrics and picture: {output}"

"""`genesis validate`: checks everything that training checks before its first step, without training or writing."""

from __future__ import annotations

from genesis.data.loader import PackedLoader
from genesis.files.atomic import temporary_folder
from genesis.train.config import Config
from genesis.train.loop import total_steps
from genesis.train.optimizer import build_schedule, overlong_schedule
from genesis.train.output import Output
from genesis_cli.session.chat import unused_settings
from genesis_cli.session.dry_run import planned_memory
from genesis_cli.session.model import check_exact, check_trained, model_config
from genesis_cli.session.preparation import file_lines, prepare_data, resolve_device, sample_counts
from genesis_cli.session.run_folder import RunFolder, check_is_ours
from genesis_cli.session.settings import settled
from genesis_cli.session.teacher import check_teacher
from genesis_cli.session.training import arithmetic
from genesis_models.folder import check_weights
from genesis_models.registry import parameter_count


def validate(config: Config, *, console: Output) -> None:
    """Check device, model, memory, data and tokenizer of a run, without training and without writing."""
    # Settings, model and memory.
    folder = RunFolder(config)
    device = resolve_device(config.train.device)
    check_is_ours(folder.path)
    config, dtype = settled(config, device)
    shape = model_config(config)
    trained = check_trained(config, shape)
    check_exact(config, device)
    with arithmetic(config):
        memory = planned_memory(config, shape, device)
    if config.model.path is not None:
        check_weights(config.model.path)
    # Data and the length of the run.
    with temporary_folder() as cache:
        data = prepare_data(config, shape, console, cache)
        loader = PackedLoader(
            data.train, batch_size=config.train.batch_size, seq_len=config.data.seq_len, seed=config.train.seed
        )
        check_teacher(config, data.tokenizer)
        steps = total_steps(config, loader)
        build_schedule(config.optim, steps)
        warnings = unused_settings(config, data.train), overlong_schedule(config.optim, steps)
        tokens = config.train.batch_size * config.train.accumulation_steps * config.data.seq_len
        # The report.
        console.line("configuration: valid")
        console.line(f"model: {shape.model_type}, {parameter_count(shape):,} parameters, {dtype}")
        for line in (*trained, *([] if memory is None else [memory])):
            console.line(line)
        for line in file_lines(data):
            console.line(line)
        for warning in filter(None, warnings):
            console.line(warning)
        console.line(
            f"data: {data.train.num_documents:,} documents, {data.train.num_tokens:,} tokens{sample_counts(data.train)}"
        )
        console.line(f"run: {steps:,} steps of at most {tokens:,} tokens on {device}")

"""Checks and loads the teacher of a distillation run, and plans its memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from genesis.backend import Device
from genesis.data.tokenizer import Tokenizer
from genesis.data.tokenizer_files import TOKENIZER_NAME
from genesis.dtypes import as_dtype
from genesis.errors import ConfigError, ModelError, escape
from genesis.files.hashing import sha256_file
from genesis.files.paths import exists
from genesis.files.strict_json import canonical_bytes
from genesis.train.config import Config
from genesis.train.objective import Distillation, Objective
from genesis.train.objectives import build_objective
from genesis.train.top_k import TopKDistillation, read_top_k, width
from genesis_models.adapters import base_of
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.folder import check_predicts, load_source, read_config
from genesis_models.registry import parameter_count
from genesis_models.source import ModelSource, find_source
from genesis_models.weights import check_finite

WHERE = "objective.teacher"


def check_teacher(config: Config, tokenizer: Tokenizer | None = None) -> None:
    """Check the teacher of a run, if it has one, without allocating its weights; before the data, without a tokenizer.

    Raises:
        ConfigError: the run's rows are longer than the teacher's context.
        DataError: a file of its log-probabilities cannot be used.
        ModelError: `objective.teacher` is not a model folder, or its tokenizer gives other ids than the run's.
    """
    if (path := config.objective.teacher_file) is not None:
        width(path) if tokenizer is None else read_top_k(path, tokenizer.vocab_size)
        return
    if config.objective.teacher is None:
        return
    source, shape = _source(config), _shape(config)
    if config.data.seq_len > shape.packed_length:
        what = f"data.seq_len {config.data.seq_len} exceeds the teacher's {shape.packed_length} positions"
        raise ConfigError(what, where="data.seq_len", next="lower it")
    if tokenizer is None:
        return
    if tokenizer.vocab_size > shape.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size:,} ids, but the teacher's head has {shape.vocab_size:,} rows"
        raise ModelError(what, where=WHERE, next="name a teacher of the same family")
    folder = source.holding(TOKENIZER_NAME)
    if not exists(folder / TOKENIZER_NAME):
        what = f"the teacher has no {TOKENIZER_NAME}, so its vocabulary cannot be compared"
        raise ModelError(what, where=f"{WHERE}: {escape(folder)}", next=f"copy the teacher's {TOKENIZER_NAME} there")
    other = Tokenizer.load(folder)
    if (difference := tokenizer.difference(other)) is not None:
        what = f"the teacher has another vocabulary: {difference}"
        next = "name a teacher of the same family: divergences compare the probabilities of the same tokens"
        raise ModelError(what, where=f"{WHERE}: {escape(source.folder)}", next=next)


def objective_of(config: Config, tokenizer: Tokenizer, device: Device) -> Objective:
    """Return the objective of a run; a teacher is loaded in the student's dtype.

    Raises:
        ConfigError, DataError, ModelError: as in `check_teacher`. NumericError: a weight is not finite.
        OutOfMemoryError: the teacher does not fit.
    """
    objective = build_objective(config)
    if isinstance(objective, TopKDistillation):
        objective.file = read_top_k(str(config.objective.teacher_file), tokenizer.vocab_size)
        objective.identity = {"teacher": objective.file.sha256}
    elif isinstance(objective, Distillation):
        check_teacher(config, tokenizer)
        source = _source(config)
        objective.teacher = load_source(source, str(device), config.model.dtype)
        objective.identity = {"teacher": _digest(source)}
        check_finite(objective.teacher, where=escape(source.folder))
        _freeze(objective.teacher)
    return objective


def planned_objective(config: Config, make_teacher: Callable[[ModelConfig], CausalLM]) -> Objective:
    """Return the objective of a run for a memory plan; the values of the teacher's weights do not matter."""
    objective = build_objective(config)
    if isinstance(objective, Distillation):
        objective.teacher = make_teacher(_shape(config))
        _freeze(objective.teacher)
    return objective


def _freeze(teacher: CausalLM) -> None:
    teacher.eval()
    for _, parameter in teacher.named_parameters():
        parameter.requires_grad_(False)


def _source(config: Config) -> ModelSource:
    assert config.objective.teacher is not None, "the schema requires it"
    try:
        source = find_source(config.objective.teacher)
        check_predicts(source, WHERE)
        return source
    except ModelError as error:
        raise ModelError(error.what, where=error.where or WHERE, next=error.next) from error


def _shape(config: Config) -> ModelConfig:
    return read_config(_source(config).folder)


def teacher_bytes(config: Config) -> int:
    """Return the size of the teacher's weights in bytes."""
    return parameter_count(_shape(config)) * as_dtype(config.model.dtype).itemsize


def _digest(source: ModelSource) -> str:
    """Return the sha256 of the teacher's config and weights."""
    found = base_of(source.folder).sha256
    if source.adapter is None:
        return found
    names = ("adapter_config.json", "adapter_model.safetensors")
    parts = [found, *(sha256_file(source.adapter / name) for name in names)]
    return hashlib.sha256(canonical_bytes(parts)).hexdigest()

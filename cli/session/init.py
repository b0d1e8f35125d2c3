"""`genesis init`: fills a recipe, including its comments, with the user's model, data and sizes."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from genesis.backend import CPU
from genesis.data.chat.template import CHATML
from genesis.data.corpus import Corpus
from genesis.data.loader import PackedLoader
from genesis.data.sources import expand
from genesis.data.tokenizer_files import TOKENIZER_NAME
from genesis.errors import ConfigError, GenesisError, ModelError, OutOfMemoryError, UsageError, escape
from genesis.files.atomic import temporary_folder
from genesis.files.boundary import boundary
from genesis.files.hf import read_chat_templates
from genesis.files.hub import local_path
from genesis.files.paths import exists, is_folder
from genesis.measure.record import format_bytes
from genesis.train.config import CheckpointConfig, Config
from genesis.train.config_file import parse_config
from genesis.train.loop import total_steps
from genesis.train.output import Output
from genesis.train.strict_yaml import emit_value, parse
from genesis_cli.session.dry_run import MemoryPlan, advice, run_plan, with_batch
from genesis_cli.session.estimate import Place, place_of
from genesis_cli.session.model import model_config
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import describe_gpu, prepare_data
from genesis_cli.session.settings import settled
from genesis_models.config import ModelConfig
from genesis_models.folder import read_config
from genesis_models.registry import PRESETS, fuses, preset

PAIRS = "hf:trl-lib/ultrafeedback_binarized"
# Goals that learn from conversations, or from answers to them.
CHATS = ("lora", "full", "dpo", "kto", "reward", "distill")
# Goal -> what it is, its recipe on a GPU, and the data that ships for it.
GOALS = {
    "lora": ("adapters of a model, trained on chats", "qwen2.5-0.5b-lora", "example:chats"),
    "full": ("all weights of a model, trained on chats", "qwen2.5-0.5b-full", "example:chats"),
    "dpo": ("adapters of a model that answers, trained on pairs of answers", "qwen2.5-0.5b-dpo", PAIRS),
    "kto": (
        "adapters of a model that answers, trained on judged answers",
        "qwen2.5-0.5b-kto",
        "hf:trl-lib/kto-mix-14k",
    ),
    "reward": ("a model that scores answers, trained on pairs of them", "qwen2.5-0.5b-reward", PAIRS),
    "distill": ("a model learns the distributions of a larger one", "qwen2.5-0.5b-distill", "example:chats"),
    "pretrain": ("a base model continues to learn from texts", "continued-pretraining", "stdlib:"),
    "scratch": ("a new model, trained on texts", "from-scratch-gpu", "stdlib:"),
}
ON_CPU = "quickstart"  # recipe for a new model that the CPU can train
STEP_TOKENS = 16_384  # tokens of a step on the user's own data
CPU_ROWS, CPU_LENGTH = 2, 256
OPTIONS = {"data.seq_len": "--seq-len"}
REPORTS = 5  # evaluations and checkpoints of a run
READ_BYTES = 4 << 20  # of data whose tokens are counted
READ_TEXTS = 100  # texts among which the first record is sought
TOKEN_BYTES = 5  # of a token, where they are not counted
HOWS = ("none", "selective", "full")


@dataclass(frozen=True)
class Choices:
    """The user's choices.

    Attributes:
        model: a folder or a name on the hub; for the goal scratch a preset, or None for the recipe's shape.
        data: data sources.
        file: path of the configuration, for the commands in it.
        seq_len: tokens of a row; None uses the recipe's, limited by the model's positions.
        teacher: folder or name of the teacher; only for the goal distill.
    """

    goal: str
    model: str | None
    data: tuple[str, ...]
    file: str
    output_dir: str
    seq_len: int | None = None
    teacher: str | None = None

    @cached_property
    def template(self) -> str | None:
        """The template for chats if the model has none. Raises: ModelError: its files are malformed."""
        if self.goal not in CHATS or self.model is None or read_chat_templates(local_path(self.model)):
            return None
        return CHATML

    @property
    def has_tokenizer(self) -> bool:
        """Whether a run finds a tokenizer; a new model trains one. Raises: ModelError: the folder is inaccessible."""
        if self.goal == "scratch" or self.model is None:
            return True
        with boundary(ModelError, "looking for the tokenizer", self.model):
            return exists(Path(local_path(self.model)) / TOKENIZER_NAME)


class Sized(NamedTuple):
    """A step that fits, and the plan of its memory (None on the CPU)."""

    batch_size: int
    accumulation_steps: int
    activation_checkpointing: str
    plan: MemoryPlan | None


def place_for(gpu_memory: float | None) -> Place:
    """Return the GPU of that size, otherwise this machine's GPU, otherwise the CPU."""
    if gpu_memory is None and not describe_gpu()[0]:
        return Place(CPU, "the CPU: this machine has no GPU, and --gpu-memory is not given", None, None, True)
    return place_of("auto", gpu_memory)


def check_model(name: str) -> None:
    """Raise ModelError if this machine does not have the model, or Genesis does not support it."""
    if name and name not in PRESETS:  # an empty name means a new model
        read_config(local_path(os.path.expanduser(name)))


def check_goal(name: str) -> None:
    """Raise UsageError if the goal is unknown."""
    if name not in GOALS:
        what = f"the goal {escape(name)} is unknown"
        raise UsageError(what, where="--goal", next=f"use one of {', '.join(GOALS)}")


def check_source(name: str) -> None:
    """Raise DataError if the source matches no file."""
    expand([name])


def goal_of(goal: str | None, model: str | None, data: Sequence[str] = ()) -> str:
    """Return the goal that is meant. Raises: UsageError: it is unknown, or does not match the model or the data."""
    trains_weights = model is not None and model not in PRESETS
    kind, fitting = _kind_of_records(data) if data else ("", ())
    found = goal or ("scratch" if not trains_weights else fitting[0] if fitting else "lora")
    check_goal(found)
    if found == "scratch" and trains_weights:
        what = f"the goal scratch starts with random weights, but {escape(model)} has trained ones"
        raise UsageError(what, where="--model", next=f"remove it, or name a size: {', '.join(PRESETS)}")
    if found != "scratch" and not trains_weights:
        what = f"the goal {found} needs the weights of a model"
        raise UsageError(what, where="--model", next="name a folder, or a model on the hub, such as Qwen/Qwen3-0.6B")
    if fitting and found not in fitting:
        what, ways = f"the goal {found} does not learn from {kind}, which --data holds", " or ".join(fitting)
        with_model = "" if trains_weights else " with --model"
        raise UsageError(what, where="--goal", next=f"use --goal {ways}{with_model}, or name other data")
    return found


def _kind_of_records(data: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of the first record and the goals that learn from it; both are empty if that excludes no goal.

    Texts may come before it, such as a folder's README.
    """
    kinds = {"preference": ("pairs of answers", ("dpo", "reward")), "unpaired": ("judged answers", ("kto",))}
    try:
        documents = Corpus(data, on_error="fail", max_line_bytes=READ_BYTES).documents()
        any(document.record is not None for document in itertools.islice(documents, READ_TEXTS))
    except (GenesisError, OSError) as error:
        return kinds.get(getattr(error, "kind", ""), ("", ()))
    return "", ()


def check_teacher(goal: str, teacher: str | None) -> None:
    """Raise UsageError if the goal and `--teacher` do not match."""
    if (goal == "distill") != (teacher is not None):
        what = f"the goal {goal} takes no teacher" if teacher is not None else "the goal distill needs a teacher"
        next = "remove it" if teacher is not None else "name a larger model with the same vocabulary"
        raise UsageError(what, where="--teacher", next=next)


def config_text(asked: Choices, place: Place, recipe: Callable[[str], str]) -> tuple[str, Sized]:
    """Return the configuration as text with comments, and the size of its steps.

    Args:
        recipe: returns the text of a shipped recipe.

    Raises:
        ModelError: this machine does not have the model. DataError: the data match no file.
        OutOfMemoryError: not even one row fits.
    """
    on_cpu = place.device == CPU
    # Start from the recipe for the goal, without its head comment.
    expand(asked.data)
    name = GOALS[asked.goal][1]
    text = recipe(ON_CPU if asked.goal == "scratch" and on_cpu and asked.model is None else name)
    text = text[re.search(r"^\w+:", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
    if asked.goal == "scratch" and asked.model is not None:
        text = _with_preset(text, asked.model)
    # Set the user's choices.
    values: dict[str, Any] = {"data.train": list(asked.data), "train.output_dir": asked.output_dir}
    if asked.goal != "scratch":
        values["model.path"] = asked.model
    if asked.data != (GOALS[asked.goal][2],) and asked.goal in ("lora", "full", "distill"):
        values["train.epochs"] = 3  # the recipe's number is for its small example
    if asked.teacher is not None:
        values["objective.teacher"] = asked.teacher
    if asked.template is not None:
        values["data.template"] = asked.template
    length = asked.seq_len
    if length is None:
        usual = int(parse(text, "a recipe").data["data"]["seq_len"])
        length = min(usual, CPU_LENGTH) if on_cpu else usual
        if asked.goal != "scratch" and asked.model is not None:
            length = min(length, read_config(local_path(asked.model)).packed_length)
    values["data.seq_len"] = length
    text = with_values(text, values, {"data.template": "Turns chats into text; the model has no template of its own."})
    # Choose the steps that fit.
    with phrased_for(OPTIONS, memory=""):
        config = _parsed(text)
        model_config(with_checkpointing(config, HOWS[0]))  # checks that a row fits into the model's positions
    if not on_cpu:
        sized = _on_gpu(config, asked, place)
    elif config.model.path is None:
        sized = Sized(config.train.batch_size, config.train.accumulation_steps, "none", None)
    else:
        sized = Sized(CPU_ROWS, 2, "none", None)
    values = {f"train.{key}": getattr(sized, key) for key in Sized._fields if key != "plan"}
    text = with_values(text, values)
    # Space evaluations and checkpoints by the length of the run.
    if (steps := _about_how_many_steps(_parsed(text))) is not None:
        often = int(float(f"{max(1, steps // REPORTS):.0e}"))  # a round number
        values = {"eval.every": often, "checkpoint.every": min(often, CheckpointConfig().every or often)}
        text = with_values(text, values, {"eval.every": "Steps between two evaluations on held-out data."})
        _parsed(text)
    return "\n".join([*_head(asked, place, sized), "", text]), sized


def described(asked: Choices, place: Place, sized: Sized) -> Iterator[str]:
    """Yield the choices as lines of text."""
    what = GOALS[asked.goal][0]
    yield f"goal: {asked.goal}, {what}"
    if asked.template is not None:
        yield f"template: {asked.template}, because the model has no chat template"
    if not asked.has_tokenizer:
        yield f"tokenizer: {escape(asked.model)} has none; set data.tokenizer to a folder with a tokenizer.json"
    micro = f"{sized.accumulation_steps} micro-steps of " if sized.accumulation_steps > 1 else ""
    saving = f"activation checkpointing {sized.activation_checkpointing}"
    yield f"step: {micro}{sized.batch_size} sequences, {saving}; for {place.name}"
    if sized.plan is not None and place.room is not None:
        yield f"memory: {format_bytes(sized.plan.reserved)} of the {format_bytes(place.room)} that a run may take"


def with_values(text: str, values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Set settings that have their own line in `text`, keeping comments; missing ones are added with their comment."""
    for setting, value in values.items():
        section, _, key = setting.partition(".")
        marks, lines = parse(text, setting), text.split("\n")
        shown = _shown(value)
        about = [f"  # {comments[setting]}"] if comments and setting in comments else []
        if (section, key) in marks.values:
            line, column = marks.values[section, key]
            row = lines[line - 1]
            comment = re.search(r"\s+#.*$", row[column - 1 :])
            lines[line - 1] = row[: column - 1] + shown + (comment[0] if comment else "")
        elif (section,) not in marks.keys:
            lines[-1:] = ["", f"{section}:", *about, f"  {key}: {shown}", ""]
        else:
            start = marks.keys[section,].line
            end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
            lines[end:end] = [*about, f"  {key}: {shown}"]
        text = "\n".join(lines)
    return text


def _shown(value: object) -> str:
    if isinstance(value, list):
        return json.dumps(value[0] if len(value) == 1 else value, ensure_ascii=False)
    return emit_value(value)


def _with_preset(text: str, name: str) -> str:
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("model:"))
    end = next(i for i, line in enumerate(lines) if i > first and not line.strip())
    shape = ["model:", "  # The published shape of this name, with random weights.", f"  preset: {_shown(name)}"]
    text = "\n".join([*lines[:first], *shape, *lines[end:]])
    # A tokenizer of a small text would not use most of the shape's own vocabulary.
    return with_values(text, {"data.vocab_size": min(32_768, preset(name)["vocab_size"]), "optim.lr": 6e-4})


def _parsed(text: str) -> Config:
    """Return the configuration with the model's folder. Raises: ConfigError."""
    found = parse_config(text, "the new configuration")
    if found.model.path is None:
        return found
    model = found.model.model_copy(update={"path": local_path(found.model.path)})
    return found.model_copy(update={"model": model})


def _about_how_many_steps(config: Config) -> int | None:
    """Return the length of the run in steps, estimated if the data are large or have errors; None if they have none."""
    data, train = config.data, config.train
    if train.epochs is None:
        return train.steps
    try:
        files = Corpus(data.train, on_error="skip", max_line_bytes=data.max_line_bytes).files
        size = sum(os.stat(file.path).st_size for file in files)
    except (GenesisError, OSError):
        return None
    if size <= READ_BYTES and (data.tokenizer or config.model.path):
        with suppress(GenesisError), temporary_folder() as cache:
            prepared = prepare_data(config, model_config(config), Output(None), cache)
            sizes: dict[str, Any] = {"batch_size": train.batch_size, "seq_len": data.seq_len}
            return total_steps(config, PackedLoader(prepared.train, **sizes, seed=train.seed))
    rows = size * (1 - (data.eval_fraction or 0)) / (TOKEN_BYTES * data.seq_len)
    return int(train.epochs * rows / (train.batch_size * train.accumulation_steps)) if size else None


def _on_gpu(config: Config, asked: Choices, place: Place) -> Sized:
    """Return the fastest step with the desired tokens: little checkpointing, and few micro-steps."""
    assert place.room is not None
    config, _ = settled(config, place.device)
    shape = model_config(config)
    rows = config.train.batch_size * config.train.accumulation_steps
    if asked.data != (GOALS[asked.goal][2],):
        rows = max(1, STEP_TOKENS // config.data.seq_len)
    plan = None
    for how, batch in _choices(rows, shape):
        micro = -(-rows // batch)
        changed = {"activation_checkpointing": how, "accumulation_steps": micro}
        plan = run_plan(with_batch(config, batch), shape, place.device, **changed)
        if plan.reserved <= place.room:
            return Sized(batch, micro, how, plan)
    assert plan is not None
    raise OutOfMemoryError(
        f"not even one row of {config.data.seq_len:,} tokens fits: a step needs {format_bytes(plan.reserved)} of the"
        f" {format_bytes(place.room)} that a run may take",
        where=place.name,
        next=advice(with_checkpointing(config, HOWS[-1]), shape, place.device, plan, place.room),
    )


def with_checkpointing(config: Config, how: str) -> Config:
    """Return `config` with another train.activation_checkpointing."""
    return config.model_copy(update={"train": config.train.model_copy(update={"activation_checkpointing": how})})


def _choices(rows: int, shape: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield checkpointing and rows, the fastest first: rows down to a quarter come before more recomputation."""
    hows = [how for how in HOWS if how != "selective" or fuses(shape)]
    for how in hows:
        batch = rows
        while batch >= (1 if how == hows[-1] else max(1, rows // 4)):
            yield how, batch
            batch //= 2


def _head(asked: Choices, place: Place, sized: Sized) -> Iterator[str]:
    file = escape(asked.file)
    yield f"# Written by genesis init: {GOALS[asked.goal][0]}."
    yield "#"
    if asked.goal in CHATS:
        yield f"#   genesis data preview {file}      shows what it trains on"
    yield f"#   genesis train {file}             --resume continues an interrupted run"
    merge = " --merge" if asked.goal in ("lora", "dpo", "kto", "reward") else ""
    yield f"#   genesis export {escape(asked.output_dir)}{merge} --check"
    yield "#"
    for line in described(asked, place, sized):
        yield f"# {line[0].upper()}{line[1:]}."


def check_new(path: Path, *, force: bool) -> None:
    """Refuse a folder, and an existing file unless forced. Raises: ConfigError."""
    with boundary(ConfigError, "writing the configuration", path):
        is_there, is_a_folder = exists(path), is_folder(path)
    if is_a_folder:
        raise ConfigError(f"{escape(path)} is a folder", where="command line", next="name a file in it")
    if is_there and not force:
        what = f"the file {escape(path)} exists already"
        raise ConfigError(what, where="command line", next="name another file, or overwrite it with --force")

"""The whole schema: a training run is its sections, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self, get_args

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from genesis.train.config.checkpoint import CheckpointConfig
from genesis.train.config.data import DataConfig
from genesis.train.config.eval import EvalConfig
from genesis.train.config.log import LogConfig
from genesis.train.config.lora import LoraConfig
from genesis.train.config.model import ModelConfig
from genesis.train.config.optim import FINE_TUNING, OptimConfig, fine_tuning_rates
from genesis.train.config.section import Section, problem
from genesis.train.config.train import TrainConfig
from genesis.train.strict_yaml import emit


class Config(Section):
    """A training run."""

    model: ModelConfig = Field(description="The model to train.")
    data: DataConfig = Field(description="What it learns from.")
    train: TrainConfig = Field(description="The run.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="Optimizer and schedule.")
    lora: LoraConfig | None = Field(default=None, description="Adapters. null: the model itself is trained.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation and samples.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving.")
    log: LogConfig = Field(default_factory=LogConfig, description="Reporting.")

    @model_validator(mode="wrap")
    @classmethod
    def _fill(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fills in what a run with `model.path` has as defaults; these do not count as set."""
        if not isinstance(raw, dict):
            return handler(raw)
        model, optim, evaluation = (raw.get(section, {}) for section in ("model", "optim", "eval"))
        trains_further = isinstance(model, dict) and model.get("path") is not None
        filled, chosen = dict(raw), dict[str, float]()
        if trains_further and isinstance(optim, dict):
            chosen = fine_tuning_rates(optim, "full" if raw.get("lora") is None else "lora")
            filled["optim"] = {**optim, **chosen}
        if isinstance(evaluation, dict) and evaluation.get("at_start") is None:
            filled["eval"] = {**evaluation, "at_start": trains_further}
        config = handler(filled)
        config.optim.model_fields_set.difference_update(chosen)
        if filled.get("eval") is not evaluation:
            config.eval.model_fields_set.discard("at_start")
        return config

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is not None:
            self._check_lora()
        if self.model.path is not None and self.data.vocab_size is not None:
            what = "data.vocab_size is for a tokenizer trained on the data, and the model at model.path has its own"
            raise problem("data.vocab_size", what, "remove data.vocab_size")
        if self.eval.every is not None and self.data.eval_fraction == 0 and not self.eval.prompts:
            what = "eval.every is set, but nothing is held out (data.eval_fraction is 0) and there are no eval.prompts"
            raise problem("eval.every", what, "hold out data, add prompts, or remove eval.every")
        self._check_best()
        self._check_sizes(self.model.config or {})
        return self

    def _check_best(self) -> None:
        """What goes by the lowest eval/loss needs evaluations on held-out data while the run goes on."""
        missing = "eval.every is null: the only evaluation is at the end" if self.eval.every is None else ""
        if self.data.eval_fraction == 0:
            missing = "nothing is held out (data.eval_fraction is 0)"
        wanted = {"checkpoint.best": self.checkpoint.best, "train.early_stop": self.train.early_stop is not None}
        for key in (key for key, is_set in wanted.items() if is_set and missing):
            next = f"hold out data (data.eval or data.eval_fraction) and set eval.every, or remove {key}"
            raise problem(key, f"{key} goes by eval/loss, and {missing}", next)

    def _check_lora(self) -> None:
        if self.model.path is None:
            what = "adapters are trained beside the weights of a finished model, and model.path names none"
            raise problem("lora", what, "give model.path, or remove lora (as an override: lora=null)")
        if self.train.precision is not None:
            what = f"train.precision {self.train.precision} is for weights that are trained, and those of lora are not"
            raise problem("train.precision", what, "remove it (as an override: train.precision=null)")

    def _check_sizes(self, model: Mapping[str, Any]) -> None:
        """The data's sizes against those of an inline model; a folder or a preset is checked when it is loaded."""
        vocab, context = model.get("vocab_size"), model.get("max_position_embeddings")
        if isinstance(vocab, int) and self.data.vocab_size is not None and self.data.vocab_size > vocab:
            what = f"data.vocab_size {self.data.vocab_size} is beyond the model's vocab_size {vocab}"
            raise problem("data.vocab_size", what, "lower it, or raise model.config.vocab_size")
        if isinstance(context, int) and self.data.seq_len > context:
            what = f"data.seq_len {self.data.seq_len} is beyond the model's max_position_embeddings {context}"
            raise problem("data.seq_len", what, "lower it, or raise model.config.max_position_embeddings")

    @property
    def eval_batch_size(self) -> int:
        """Sequences in one forward pass of an evaluation."""
        return self.eval.batch_size or self.train.batch_size

    def resolved_yaml(self) -> str:
        """This configuration with every default filled in, as text that loads back equal (config.resolved.yaml)."""
        return "# The configuration of this run, with every default filled in.\n" + emit(self.model_dump())

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Every setting as `section.key` and its value, in the order of the schema."""
        for section in type(self).model_fields:
            part = getattr(self, section)
            for key in section_class(section).model_fields:
                yield f"{section}.{key}", getattr(part, key, None)


def section_class(name: str) -> type[Section]:
    """The class of a section of `Config`, also of one that may be null."""
    annotation = Config.model_fields[name].annotation
    found = next(each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
    assert issubclass(found, Section)
    return found


def fine_tuning_defaults(config: Config) -> dict[str, float | bool]:
    """The settings that were filled in because weights are trained further, by name."""
    if config.model.path is None:
        return {}
    keys = [("optim", key) for key in FINE_TUNING["full" if config.lora is None else "lora"]]
    sections = ((key, getattr(config, section), section) for section, key in (*keys, ("eval", "at_start")))
    missing = (
        (f"{name}.{key}", getattr(part, key)) for key, part, name in sections if key not in part.model_fields_set
    )
    return {key: value for key, value in missing if value is not None}


def json_schema() -> dict[str, Any]:
    """The schema for editors (JSON Schema 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}

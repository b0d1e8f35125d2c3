"""The configuration of a training run: every setting, its default, its bounds, its meaning. `config_file` reads files.

This schema is the one home of every default. A setting that the chosen optimizer or schedule does not use is refused,
and one that it uses but the user left out is filled in, so that a `Config` always shows what will happen. Each section
has a file of its name; `run` has the whole and the rules between sections.
"""

from genesis.train.config.checkpoint import CheckpointConfig
from genesis.train.config.data import SOURCE_KINDS, DataConfig, WeightedSource
from genesis.train.config.eval import EvalConfig
from genesis.train.config.log import LogConfig
from genesis.train.config.lora import LORA, LoraConfig
from genesis.train.config.model import ModelConfig
from genesis.train.config.optim import OPTIMIZERS, SCHEDULES, OptimConfig
from genesis.train.config.run import Config, fine_tuning_defaults, json_schema, section_class
from genesis.train.config.section import RESUME
from genesis.train.config.train import TrainConfig

__all__ = [
    "LORA",
    "OPTIMIZERS",
    "RESUME",
    "SCHEDULES",
    "SOURCE_KINDS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "WeightedSource",
    "fine_tuning_defaults",
    "json_schema",
    "section_class",
]

"""The section `log`: how often a run reports, and to whom."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from genesis.train.config.section import RESUME, Section
from genesis.train.config.values import Count, Text


class LogConfig(Section):
    """What is reported while training; metrics.jsonl is always written."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count = Field(default=10, description="Steps between two rows of metrics and two lines of progress.")
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events below train.output_dir/tensorboard."
    )
    wandb: bool = Field(default=False, description="Also send the metrics to Weights & Biases.")
    wandb_project: Text = Field(default="genesis", description="Project of the run at Weights & Biases.")

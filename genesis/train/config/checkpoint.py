"""The section `checkpoint`: when the state is saved, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from genesis.train.config.section import RESUME, Section
from genesis.train.config.values import Count


class CheckpointConfig(Section):
    """Saving. A checkpoint is a Hugging Face folder with the training state in it; a signal saves one in any case."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count | None = Field(default=500, description="Steps between two checkpoints. null: only at the end.")
    background: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether training goes on while a checkpoint is written. on: from a snapshot in host memory. auto: "
        "where it takes at most half of what is free there. off: training waits. The last save is always waited for.",
    )
    save_total_limit: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=2, description="Checkpoints kept; older ones are removed after a newer one is complete. null: all."
    )
    best: bool = Field(
        default=False,
        description="Whether the checkpoint with the lowest eval/loss is kept beside those of save_total_limit. Each "
        "evaluation after which it is lower than ever saves one, and the final model is that of the best step.",
    )
    save_final: bool = Field(default=True, description="Write the final model at the root of train.output_dir.")

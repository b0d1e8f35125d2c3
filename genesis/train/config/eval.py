"""The section `eval`: when held-out data is evaluated, and how the samples of text are drawn."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from genesis.train.bounds import BOUNDS
from genesis.train.config.section import RESUME, Section
from genesis.train.config.values import Count


class EvalConfig(Section):
    """Evaluation on held-out data, and text samples. Both happen every `every` steps and at the end."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count | None = Field(default=None, description="Steps between two evaluations. null: only at the end.")
    at_start: bool | None = Field(
        default=None,
        description="Whether both also happen before the first step. Default: true with model.path, to see the model "
        "that came in, else false.",
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = Field(
        default=None, description="Sequences in one forward pass. null: train.batch_size."
    )
    max_batches: Count | None = Field(default=None, description="Batches of one evaluation. null: all held-out data.")
    prompts: Annotated[list[Annotated[str, Field(min_length=1, max_length=65_536)]], Field(max_length=64)] = Field(
        default_factory=list,
        description="Texts that the model continues at each evaluation; in a run on chats messages that it answers.",
    )
    sample_tokens: Annotated[int, Field(**BOUNDS["max_tokens"].limits)] = Field(
        default=128, description="Longest continuation, in tokens."
    )
    temperature: Annotated[float, Field(**BOUNDS["temperature"].limits)] = Field(
        default=0.8,
        description="Logits are divided by it before sampling; 0 takes the likeliest token. Where temperature, top_k "
        "or top_p is left out, a generation_config.json in model.path goes before the default.",
    )
    top_k: Annotated[int, Field(**BOUNDS["top_k"].limits)] | None = Field(
        default=50, description="Sample among this many of the likeliest tokens. null: among all."
    )
    top_p: Annotated[float, Field(**BOUNDS["top_p"].limits)] | None = Field(
        default=None,
        description="Sample among the likeliest tokens that together have this probability. null: among all.",
    )

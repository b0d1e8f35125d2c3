"""The section `train`: where the run writes, how long it lasts, how big a step is, what of the model it trains."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from genesis.ops.fp8 import MIN_COLUMNS
from genesis.train.config.section import RESUME, Section, exactly_one, problem
from genesis.train.config.values import Count, PathText, Patterns, Positive


class TrainConfig(Section):
    """The run: where it writes, how long it lasts, how big a step is. Exactly one of `steps` and `epochs`."""

    # A name stands for the folder, so none of the two is required alone.
    model_config = ConfigDict(json_schema_extra={**exactly_one("steps", "epochs"), "required": []})

    name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Name of the run on the page of `genesis report`, in TensorBoard and at Weights & Biases. Without "
        "output_dir the run is in `runs/<name>`.",
        json_schema_extra=RESUME,
    )
    output_dir: PathText = Field(
        description="Folder of the run: checkpoints, final model, metrics.jsonl, loss.svg, config.resolved.yaml.",
        json_schema_extra=RESUME,
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")] = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda or cuda:N.",
        examples=["auto", "cpu", "cuda:0"],
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        default=0, description="Seed of weights, data order, dropout and samples."
    )
    steps: Count | None = Field(default=None, description="Optimizer steps to train.", json_schema_extra=RESUME)
    epochs: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Passes over the training data; the last step is the first one that completes them.",
        json_schema_extra=RESUME,
    )
    early_stop: Count | None = Field(
        default=None,
        description="Evaluations without a lower eval/loss than the lowest before them, after which the run ends. "
        "null: it goes on to its last step.",
        json_schema_extra=RESUME,
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(default=8, description="Sequences in one forward pass.")
    accumulation_steps: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1,
        description="Batches summed into one optimizer step, weighted by their target tokens: it equals one big batch. "
        "Several ranks share them evenly.",
    )
    zero: Annotated[int, Field(ge=0, le=1)] = Field(
        default=1,
        description="What several ranks (--nproc) keep parts of. 1: optimizer states (ZeRO-1), but those of Muon and "
        "Adafactor. 0: nothing. The result is the same.",
        json_schema_extra=RESUME,
    )
    max_grad_norm: Positive | None = Field(
        default=1.0, description="Gradients are scaled down to this global norm. null: they are not clipped."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description=(
            "What backward computes again to save memory. selective: results of norms and activations, for little "
            "time. full: all but each layer's input, for the time of another forward pass."
        ),
    )
    precision: Literal["fp8"] | None = Field(
        default=None,
        description=(
            f"fp8: matmuls of the layers whose result has {MIN_COLUMNS} columns or more multiply 8-bit floats "
            "(e4m3, each row scaled), but for gradients of weights; a GPU needs compute capability 8.9 for it. "
            "Evaluation and samples, embedding and head stay in model.dtype. null: all do."
        ),
    )
    tf32: bool = Field(
        default=False,
        description="Whether a GPU computes float32 matmuls in TF32, of whose operands it reads 10 bits of the "
        "mantissa: up to 8 times faster, with relative errors near 3e-4.",
    )
    freeze: Patterns = Field(
        default_factory=list,
        description="Parameters that keep their values, by patterns of their names in which * is any text, ? one "
        "character and [0-3] one of several. They take no gradient and no optimizer state.",
        examples=[["model.embed_tokens.*", "model.layers.[0-3].*"]],
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="CPU threads. null: every core this process may use. A run repeats bit by bit on as many.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "output_dir" not in raw and isinstance(raw.get("name"), str):
            return {**raw, "output_dir": f"runs/{raw['name']}"}
        return raw

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is not None and not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            what = f"train.name is {self.name!r}, which cannot be the name of a folder"
            raise problem("name", what, "use letters, digits, _, - and ., the first a letter or digit")
        if self.steps is None and self.epochs is None:
            raise problem("", "the length of the run is missing", "give train.steps or train.epochs")
        if self.steps is not None and self.epochs is not None:
            next = "keep one; the override train.steps=null or train.epochs=null drops the other"
            raise problem("epochs", "train.steps and train.epochs exclude each other", next)
        return self

"""The section `lora`: adapters, in PEFT's words."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from genesis.train.config.section import Section
from genesis.train.config.values import TEXT_SCHEMA, PathText, Positive, Text

# The settings of adapters, which `lora.init_from` takes from the adapter it names.
LORA: dict[str, Any] = {
    "r": 16,
    "alpha": 32.0,
    "dropout": 0.0,
    "target_modules": "all-linear",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": [],
    "ensure_weight_tying": False,
}

Targets = Annotated[
    Text | Annotated[list[Text], Field(min_length=1, max_length=1000)],
    WithJsonSchema(
        {
            "anyOf": [
                TEXT_SCHEMA,
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1000},
            ]
        }
    ),
]


def _lora_default(key: str) -> str:
    return f" Default: {json.dumps(LORA[key])}."


class LoraConfig(Section):
    """Adapters: low-rank matrices beside linear layers are trained, the weights of model.path are not. `lora: {}` takes
    every default; null trains the model itself."""

    r: Annotated[int, Field(ge=1, le=8192)] | None = Field(
        default=None, description="Rank: rows of A and columns of B." + _lora_default("r")
    )
    alpha: Positive | None = Field(
        default=None,
        description="B·A is multiplied by alpha / r; with use_rslora by alpha / √r." + _lora_default("alpha"),
    )
    dropout: Annotated[float, Field(ge=0, le=0.95, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Probability with which an element of the adapter's input is left out in training."
        + _lora_default("dropout"),
    )
    target_modules: Targets | None = Field(
        default=None,
        description="The layers that get one, as PEFT reads it: all-linear (all but the head), a list of names or "
        "ends of names, or one regular expression that the whole name matches." + _lora_default("target_modules"),
        examples=["all-linear", ["q_proj", "v_proj"]],
    )
    use_rslora: bool | None = Field(
        default=None,
        description="Rank-stabilized scaling (Kalajdzievski, 2023), for large ranks." + _lora_default("use_rslora"),
    )
    use_dora: bool | None = Field(
        default=None,
        description="Weight-decomposed adapters (Liu et al., 2024): the length of each row of the weight is trained "
        "apart from its direction." + _lora_default("use_dora"),
    )
    modules_to_save: list[Text] | None = Field(
        default=None,
        max_length=1000,
        description="Modules that are trained and saved whole beside the adapters, by ends of their names."
        + _lora_default("modules_to_save"),
        examples=[["embed_tokens", "lm_head"]],
    )
    ensure_weight_tying: bool | None = Field(
        default=None,
        description="A head that is the embedding stays so where modules_to_save has one of them; else each gets its "
        "own weight." + _lora_default("ensure_weight_tying"),
    )
    init_from: PathText | None = Field(
        default=None,
        description="Folder of a PEFT adapter that training goes on from. It has the settings above; one that "
        "contradicts them is an error, but for dropout.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("init_from") is None:
            return {**raw, **{key: value for key, value in LORA.items() if raw.get(key) is None}}
        return raw

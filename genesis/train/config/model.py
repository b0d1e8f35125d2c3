"""The section `model`: which model is trained, and in which type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from genesis.train.config.section import Section, check_json, exactly_one, problem
from genesis.train.config.values import PathText, Text, WeightDtype


class ModelConfig(Section):
    """The model: exactly one of `path`, `preset` and `config`."""

    model_config = ConfigDict(json_schema_extra=exactly_one("path", "preset", "config"))

    path: PathText | None = Field(
        default=None,
        description="Hugging Face folder (config.json, safetensors), or the name of a pulled model on the hub, whose "
        "weights training starts from. With lora a resumed run may name another folder, if that holds the same model.",
    )
    preset: Text | None = Field(
        default=None,
        description="Architecture trained from scratch: 0.5B, 1.5B, 3B, 7B (Qwen2.5), qwen3-0.6B, qwen3-1.7B, "
        "qwen3-4B or qwen3-8B.",
        examples=["0.5B", "qwen3-0.6B"],
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Architecture trained from scratch, in the keys of a Hugging Face config.json with its model_type.",
    )
    dtype: WeightDtype = Field(
        default="auto",
        description="Type of weights and activations; with bfloat16 the optimizer keeps float32 masters. auto: float32 "
        "on the CPU; on a GPU the type of the folder's weights (bfloat16 for float16), and bfloat16 from scratch.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [key for key in ("path", "preset", "config") if getattr(self, key) is not None]
        if not given:
            raise problem("", "no model is named", "give model.path, model.preset or model.config")
        if len(given) > 1:
            both = " and ".join(f"model.{key}" for key in given)
            drop = " or ".join(f"model.{key}=null" for key in given)
            raise problem(given[-1], f"{both} exclude each other", f"keep one; the override {drop} drops the other")
        if self.config is not None:
            _check_model_dict(self.config)
        return self


def _check_model_dict(config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("model_type"), str):
        raise problem("config", "model.config has no model_type", "add model_type: qwen3 (or qwen2, llama)")
    check_json(config, "config", "model.config")

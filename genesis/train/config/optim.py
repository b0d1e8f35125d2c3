"""The section `optim`: optimizer and schedule. The tables have the defaults of each choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from genesis import optim
from genesis.train.config.section import RESUME, Section, problem
from genesis.train.config.values import MAX_STEPS, Count, Dtype, Factor, Fraction, Pattern, Positive

# The settings that each optimizer takes, with their defaults; one that is not in the row of the chosen one is refused.
OPTIMIZERS: dict[str, Mapping[str, Any]] = {name: each.in_runs for name, each in optim.OPTIMIZERS.items()}
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]
# The same for schedules. `step_size` has no default: a step schedule must name it.
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"min_lr_ratio": 0.0},
    "cosine": {"min_lr_ratio": 0.1},
    "wsd": {"min_lr_ratio": 0.0, "decay_ratio": 0.2},
    "step": {"step_size": None, "step_gamma": 0.1},
    "one_cycle": {"min_lr_ratio": 4e-6},
}
ONE_CYCLE_WARMUP_RATIO = 0.3
# What is filled in instead where weights of `model.path` are trained further. The rates are AdamW's; those of other
# optimizers differ from their defaults by the same factor.
FINE_TUNING: dict[str, dict[str, float]] = {
    "full": {"lr": 1e-5, "warmup_ratio": 0.03},
    "lora": {"lr": 2e-4, "warmup_ratio": 0.03, "weight_decay": 0.0},
}


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _range(key: str, most: float | None = None) -> Any:
    """The narrowest range that the optimizers have for a setting; `most` is what a run narrows it to."""
    kinds = [each for each in optim.OPTIMIZERS.values() if key in each.in_runs]
    low = 0 if any(key in (*each.at_least_0, *each.below_1) for each in kinds) else None
    high = 1 if any(key in each.below_1 for each in kinds) else None
    return Field(ge=low, lt=high, le=most, allow_inf_nan=False)


Beta = Annotated[float, _range("betas")]


def _by_choice(table: Mapping[str, Mapping[str, Any]], key: str) -> str:
    """The part of a description that lists a setting's default for each optimizer or schedule that takes it."""
    rows = ((name, row[key]) for name, row in table.items() if row.get(key) is not None)
    shown = ((name, list(value) if isinstance(value, tuple) else value) for name, value in rows)
    return " Default: " + ", ".join(f"{name} {json.dumps(value)}" for name, value in shown) + "."


def _when_fine_tuning(key: str) -> str:
    """The part of a description that says what a setting's default is where `model.path` is given."""
    full, lora = (FINE_TUNING[kind].get(key) for kind in ("full", "lora"))
    if full is None:
        return f" With lora: {lora:g}."
    return f" With model.path: {full:g}" + (f" (with lora: {lora:g})." if lora != full else ".")


class OptimConfig(Section):
    """Optimizer and learning-rate schedule. A setting that the choice does not use is an error."""

    name: OptimizerName = Field(
        default="adamw",
        description="Optimizer. muon: hidden matrices by Muon, its update scaled to AdamW's size; the rest by AdamW.",
    )
    lr: Positive | None = Field(
        default=None,
        description="Peak learning rate."
        + _by_choice(OPTIMIZERS, "lr")
        + _when_fine_tuning("lr")[:-1]
        + " for adamw; the others' change by the same factor.",
        json_schema_extra=RESUME,
    )
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)] | None = Field(
        default=None,
        description="Decay of the running averages, each below 1." + _by_choice(OPTIMIZERS, "betas"),
        examples=[[0.9, 0.95]],
    )
    eps: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Added to the denominator of the update." + _by_choice(OPTIMIZERS, "eps")
    )
    weight_decay: Annotated[float, _range("weight_decay", most=100)] | None = Field(
        default=None,
        description="Decay of matrices; vectors (norms, biases) never decay. Decoupled; for adam and sgd, L2."
        + _by_choice(OPTIMIZERS, "weight_decay")
        + _when_fine_tuning("weight_decay"),
    )
    momentum: Annotated[float, _range("momentum")] | None = Field(
        default=None, description="Momentum, below 1." + _by_choice(OPTIMIZERS, "momentum")
    )
    nesterov: bool | None = Field(default=None, description="Nesterov's momentum." + _by_choice(OPTIMIZERS, "nesterov"))
    low_precision: Literal["master", "stochastic"] = Field(
        default="master",
        description="How bfloat16 weights are updated. master: in float32, as a bfloat16 weight and a 16-bit residual, "
        "which the optimizer keeps. stochastic: without a residual, rounded at random so that the mean is exact.",
    )
    state_dtype: Dtype = Field(
        default="float32",
        description="Type of the optimizer's running averages. bfloat16: computed in float32, rounded at random so "
        "that the mean is exact; half the memory.",
    )
    grad_dtype: Dtype | None = Field(
        default=None,
        description="Type in which gradients of bfloat16 weights are added up over train.accumulation_steps. "
        "Default: float32 where there are several, else bfloat16.",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd", "step", "one_cycle"] = Field(
        default="cosine",
        description="Learning rate after the warm-up. wsd: constant, then linear decay over the last part of the run.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = Field(
        default=None,
        description="Steps in which the learning rate rises linearly. Excludes warmup_ratio; neither: no warm-up."
        + _when_fine_tuning("warmup_ratio").replace(": ", ": warmup_ratio "),
    )
    warmup_ratio: Fraction | None = Field(
        default=None,
        description="The same as a fraction of the run. one_cycle: its rising part, by default "
        f"{ONE_CYCLE_WARMUP_RATIO}, from 1/25 of the peak.",
    )
    min_lr_ratio: Fraction | None = Field(
        default=None,
        description="Last learning rate as a fraction of the peak." + _by_choice(SCHEDULES, "min_lr_ratio"),
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Fraction of the run, at its end, in which the rate decays." + _by_choice(SCHEDULES, "decay_ratio"),
    )
    step_size: Count | None = Field(
        default=None, description="Steps between two drops of the schedule `step`, which requires it."
    )
    step_gamma: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Factor of each drop." + _by_choice(SCHEDULES, "step_gamma")
    )
    lr_factors: Annotated[dict[Pattern, Factor], Field(max_length=100)] = Field(
        default_factory=dict,
        description="The learning rate of some parameters as a multiple of optim.lr: factors by patterns of names, as "
        "those of train.freeze. Of several that match a name, the first counts.",
        examples=[{"*.lora_B.*": 16, "model.embed_tokens.*": 0.1}],
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        filled = dict(raw)
        _fill_choice(filled, "name", OPTIMIZERS, cls.model_fields["name"].default)
        _fill_choice(filled, "schedule", SCHEDULES, cls.model_fields["schedule"].default)
        warmup = filled.get("warmup_steps") is not None or filled.get("warmup_ratio") is not None
        if filled.get("schedule") == "one_cycle" and not warmup:
            filled["warmup_ratio"] = ONE_CYCLE_WARMUP_RATIO
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_choice(self, "optimizer", self.name, OPTIMIZERS)
        _check_choice(self, "schedule", self.schedule, SCHEDULES)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            what = "optim.warmup_steps and optim.warmup_ratio exclude each other"
            raise problem("warmup_ratio", what, "keep one; an override can set the other to null")
        if self.nesterov and not self.momentum:
            raise problem(
                "nesterov", "optim.nesterov needs a momentum", "set optim.momentum above 0, or nesterov: false"
            )
        if self.schedule == "step" and self.step_size is None:
            raise problem("schedule", "the schedule step needs optim.step_size", "add optim.step_size, in steps")
        if self.schedule == "wsd" and (self.warmup_ratio or 0) + (self.decay_ratio or 0) > 1:
            parts = f"optim.warmup_ratio {self.warmup_ratio} and optim.decay_ratio {self.decay_ratio}"
            what = f"{parts} add up to more than the run"
            raise problem("decay_ratio", what, "lower one of the two")
        return self


def _fill_choice(raw: dict[str, Any], choice: str, table: Mapping[str, Mapping[str, Any]], default: str) -> None:
    """Gives `raw` the defaults of its optimizer or schedule."""
    name = raw.get(choice, default)
    if isinstance(name, str):
        raw.update({key: value for key, value in table.get(name, {}).items() if raw.get(key) is None})


def _check_choice(section: OptimConfig, kind: str, name: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a setting that only other optimizers or schedules use."""
    for key in dict.fromkeys(key for row in table.values() for key in row):
        if key not in table[name] and getattr(section, key) is not None:
            users = ", ".join(other for other, row in table.items() if key in row)
            what = f"optim.{key} has no meaning for the {kind} {name}"
            raise problem(key, what, f"remove it (as an override: optim.{key}=null); it is for {users}")


def fine_tuning_rates(optim: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The values of `FINE_TUNING` for what `optim` does not set and its optimizer and schedule use."""
    found = dict(FINE_TUNING[kind])
    fields = OptimConfig.model_fields
    name, schedule = (optim.get(key, fields[key].default) for key in ("name", "schedule"))
    settings = OPTIMIZERS.get(name, {}) if isinstance(name, str) else {}
    if "lr" in settings:
        found["lr"] = float(f"{found['lr'] / OPTIMIZERS['adamw']['lr'] * settings['lr']:.2g}")
    decay = optim.get("decay_ratio")
    if isinstance(decay, float) and schedule == "wsd":
        found["warmup_ratio"] = min(found["warmup_ratio"], max(0.0, 1 - decay))
    if schedule == "one_cycle" or optim.get("warmup_steps") is not None:
        del found["warmup_ratio"]
    used = {"warmup_ratio", *settings}
    return {key: value for key, value in found.items() if key in used and optim.get(key) is None}

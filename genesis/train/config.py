"""The schema of a training run: each setting with its default, bounds and meaning. `config_file` reads the files.

This schema is the only place that defines defaults. It refuses a setting that the chosen optimizer or schedule does not
use, and fills in the ones it uses that the user left out. A `Config` therefore always shows what will happen.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from genesis import optim
from genesis.data import record_formats
from genesis.data.records import Learns
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError
from genesis.files.hub import DATA_SOURCE
from genesis.ops.fp8 import MIN_COLUMNS
from genesis.train.bounds import BOUNDS
from genesis.train.preference_losses import JUDGED, NEAREST, PAIRED, REWARD
from genesis.train.strict_yaml import emit

# json_schema_extra of a setting or section that a resumed run may change. Any other change is refused.
RESUME: dict[str, JsonValue] = {"x-resume": "may change"}


class Section(BaseModel):
    """A section of the file. It is immutable and rejects unknown keys and implicit conversions."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


def problem(key: str, what: str, next: str) -> PydanticCustomError:
    """Return the error of a broken rule between settings; `key` is relative to the section, `next` is the fix."""
    return PydanticCustomError("genesis_rule", "{what}", {"what": what, "key": key, "next": next})


def check_json(value: Mapping[str, Any], key: str, setting: str) -> None:
    """Refuse, at `key`, a mapping that JSON cannot represent; `setting` is its full name."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise problem(key, f"{setting} holds a value that is not JSON", "use strings, finite numbers, lists") from None


def exactly_one(*keys: str) -> dict[str, JsonValue]:
    """Return the JSON schema that requires exactly one of these keys to be set and not null."""
    return {"oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]}


# --- Types shared by several sections ---------------------------------------------------------------------------------


MAX_STEPS = 10**9


def _check_text(text: str) -> str:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise PydanticCustomError("genesis_text", "a string with characters that a file name cannot hold")
    return text


def _expanded(text: str) -> str:
    """Replace a leading `~` or `~user` by the home folder. A file with such a name is written `./~name`."""
    _check_text(text)
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise PydanticCustomError("genesis_home", "a user of that name does not exist; write a file's name as `./~…`")
    return path


def _dtype_name(value: object) -> object:
    if isinstance(value, str):
        try:
            return as_dtype(value).name
        except DTypeError:
            pass
    return value


def _trained_dtype(value: object) -> object:
    name = _dtype_name(value)
    if name == "float16":
        reason = "Genesis does not train in float16, whose gradients underflow; bfloat16 has the same size"
        raise PydanticCustomError("genesis_text", reason)
    return name


def _dtypes(*names: str) -> WithJsonSchema:
    """Return the JSON schema of a dtype that may be given by these names or their short forms."""
    short = {"float32": ("fp32", "float"), "bfloat16": ("bf16",)}
    return WithJsonSchema({"type": "string", "enum": [*names, *(s for name in names for s in short.get(name, ()))]})


Dtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_dtype_name), _dtypes("float32", "bfloat16")]
WeightDtype = Annotated[
    Literal["auto", "float32", "bfloat16"], BeforeValidator(_trained_dtype), _dtypes("auto", "float32", "bfloat16")
]

Count = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_check_text)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_expanded)]
TEXT_SCHEMA: dict[str, JsonValue] = {"type": "string", "minLength": 1, "maxLength": 4096}

# Patterns match parameter names, with the wildcards of file names.
Pattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_check_text)]
Patterns = Annotated[list[Pattern], Field(max_length=100)]
Factor = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


# --- model ------------------------------------------------------------------------------------------------------------


class ModelConfig(Section):
    """The model: exactly one of `path`, `preset` and `config`."""

    model_config = ConfigDict(json_schema_extra=exactly_one("path", "preset", "config"))

    path: PathText | None = Field(
        default=None,
        description="Hugging Face folder (config.json, safetensors) or name of a pulled model; training starts from "
        "its weights. With lora, a resumed run may name another folder that holds the same model.",
    )
    preset: Text | None = Field(
        default=None,
        description="Architecture to train from scratch: 0.5B, 1.5B, 3B, 7B (Qwen2.5), qwen3-0.6B, qwen3-1.7B, "
        "qwen3-4B or qwen3-8B.",
        examples=["0.5B", "qwen3-0.6B"],
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Architecture to train from scratch: the keys of a Hugging Face config.json, with model_type.",
    )
    dtype: WeightDtype = Field(
        default="auto",
        description="Type of weights and activations. With bfloat16 the optimizer keeps float32 masters. auto: float32 "
        "on the CPU; on a GPU the type of the folder's weights (bfloat16 for float16), or bfloat16 from scratch.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [key for key in ("path", "preset", "config") if getattr(self, key) is not None]
        if not given:
            raise problem("", "the model is missing", "give model.path, model.preset or model.config")
        if len(given) > 1:
            both = " and ".join(f"model.{key}" for key in given)
            drop = " or ".join(f"model.{key}=null" for key in given)
            raise problem(given[-1], f"{both} exclude each other", f"keep one; the override {drop} drops the other")
        if self.config is not None:
            if not isinstance(self.config.get("model_type"), str):
                raise problem("config", "model.config has no model_type", "add model_type: qwen3 (or qwen2, llama)")
            check_json(self.config, "config", "model.config")
        return self


# --- data -------------------------------------------------------------------------------------------------------------


EVAL_FRACTION = 0.05


_FIELDS_SCHEMA = WithJsonSchema(
    {
        "type": "object",
        "properties": dict.fromkeys(record_formats.FIELDS, TEXT_SCHEMA),
        "additionalProperties": False,
    }
)
FieldNames = Annotated[dict[record_formats.Field, Text], _FIELDS_SCHEMA]
_HubName = Annotated[Text | None, WithJsonSchema(TEXT_SCHEMA)]


class WeightedSource(Section):
    """A source with its own settings."""

    path: PathText = Field(description="A file, a folder, a glob, `stdlib:`, `example:chats` or `hf:ORG/NAME`.")
    weight: Factor = Field(default=1.0, description="How often an epoch contains its documents.")
    config: _HubName = Field(default=None, description="Configuration of a data set of the hub. null: its default.")
    split: _HubName = Field(default=None, description="Split of a data set of the hub. null: `train`.")
    fields: Annotated[FieldNames | None, _FIELDS_SCHEMA] = Field(
        default=None, description="Like data.fields, for the records of this source. null: data.fields."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, group in (("config", 2), ("split", 4)):
            found = DATA_SOURCE.fullmatch(self.path)
            if getattr(self, name) is not None and (found is None or found[group]):
                what = f"data.train has {name}, but its path is not hf:ORG/NAME, or already names a {name}"
                raise problem(name, what, f"remove {name}, or name a data set of the hub")
        return self


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _sources_schema(item: JsonValue) -> list[JsonValue]:
    return [TEXT_SCHEMA, {"type": "array", "items": item, "minItems": 1, "maxItems": 1000}]


MOST_SETS = 50
_SET_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SETS_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "additionalProperties": {"anyOf": _sources_schema(TEXT_SCHEMA)},
    "minProperties": 1,
    "maxProperties": MOST_SETS,
    "propertyNames": {"pattern": f"^{_SET_NAME.pattern}$"},
}
_Paths = Annotated[list[PathText], Field(min_length=1, max_length=1000)]
Sources = Annotated[_Paths, BeforeValidator(_as_list, json_schema_input_type=PathText | _Paths)]
# Pydantic adds these to the path of a value that can be of two kinds. Errors leave them out.
SOURCE_KINDS = ("<path>", "<weighted source>", "<sources>", "<named sets>")
_Source = Annotated[
    Annotated[PathText, Tag(SOURCE_KINDS[0])] | Annotated[WeightedSource, Tag(SOURCE_KINDS[1])],
    Discriminator(lambda value: SOURCE_KINDS[isinstance(value, dict | WeightedSource)]),
]
TrainSources = Annotated[
    list[_Source],
    Field(min_length=1, max_length=1000),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    WithJsonSchema({"anyOf": _sources_schema({"anyOf": [TEXT_SCHEMA, WeightedSource.model_json_schema()]})}),
]
EvalSources = Annotated[
    Annotated[Sources, Tag(SOURCE_KINDS[2])]
    | Annotated[dict[str, Sources], Field(min_length=1, max_length=MOST_SETS), Tag(SOURCE_KINDS[3])],
    Discriminator(lambda value: SOURCE_KINDS[2 + isinstance(value, dict)]),
    WithJsonSchema({"anyOf": [*_sources_schema(TEXT_SCHEMA), _SETS_SCHEMA]}),
]


class DataConfig(Section):
    """The data: sources, records, tokenizer, length. A source is a file, a folder, a glob, `stdlib:`, `example:chats`
    or `hf:ORG/NAME`."""

    train: TrainSources = Field(
        description="Training data: files of text, JSONL, JSON arrays, CSV (each also as .gz) or Parquet, folders and "
        'globs of them, "stdlib:" (code of the running Python) or "example:chats" (about settings of Genesis). Files '
        "in folders and globs that do not hold text are listed and not read. An item of a list may be a mapping of "
        "`path` and `weight`; the weight says how often an epoch contains its documents."
    )
    eval: EvalSources | None = Field(
        default=None,
        description="Held-out sources, or a mapping of names to sources, such as {math: m.jsonl, code: c.jsonl}. Each "
        "named set has metrics such as eval/math/loss; eval/loss covers all of them. null: a fraction of the training "
        "documents is held out.",
    )
    eval_fraction: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] | None = Field(
        default=None,
        description=f"Fraction of the documents held out if eval is null; 0: none. Default: {EVAL_FRACTION}.",
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="Folder with tokenizer.json. null: the tokenizer of model.path, or else a BPE trained on the data.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] | None = Field(
        default=None,
        description="Size of the byte-level BPE that is trained if no tokenizer is given. null: the model's size.",
    )
    seq_len: Annotated[int, Field(ge=2, le=1_048_576)] = Field(default=1024, description="Tokens in a packed sequence.")
    format: record_formats.Format = Field(
        default="auto", description="Which fields a record has and what they mean. auto: detected by their names."
    )
    fields: FieldNames = Field(
        default_factory=dict,
        description="Other names of fields, such as {messages: conv, role: from}; role and content belong to messages.",
        examples=[{"text": "body"}],
    )
    parse_special: bool = Field(
        default=False,
        description="Whether special tokens spelled out in a text, such as <|im_end|>, become those tokens. false: "
        "they remain plain text, and a warning counts the documents that contain them.",
    )
    on_error: Literal["fail", "skip"] = Field(
        default="fail",
        description="What happens to a record that cannot be read. fail: the run ends and names file and line; skip: "
        "it is left out and counted.",
    )
    max_line_bytes: Annotated[int, Field(ge=1024, le=2**30)] = Field(
        default=16 * 2**20,
        description="Longest record in bytes: a line of JSONL, an element of an array, a row. A longer record is an "
        "error (see on_error).",
    )
    template: PathText | None = Field(
        default=None,
        description="Chat template of conversations: chatml, or a file or folder that holds a template (Jinja, as in "
        "chat_template.jinja). null: the tokenizer's template.",
        examples=["chatml", "template.jinja"],
    )
    template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables that the template reads, such as {enable_thinking: false}. They are saved with the "
        "model as the template's defaults.",
    )
    loss: Literal["all_assistant", "last", "completion", "all"] = Field(
        default="all_assistant",
        description="Which tokens of a conversation are learned. all_assistant: every turn of the assistant; last: its "
        "last turn; completion: the turns of a completion, and in other conversations the turns after the user's last "
        "message; all: every token.",
    )
    too_long: Literal["drop", "truncate", "split", "fail"] | None = Field(
        default=None,
        description="Handling of a document with more than data.seq_len tokens. drop, truncate: it is dropped or "
        "truncated, and counted; split: it continues in the next sequence; fail: the run ends and names file and line. "
        "null: texts are split, conversations and completions are dropped.",
    )
    cache_dir: PathText | None = Field(
        default=None,
        description="Folder of tokenized data, keyed by content; runs may share it. null: `cache` in output_dir.",
        json_schema_extra=RESUME,
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if raw.get("eval") is None and raw.get("eval_fraction") is None:
            return {**raw, "eval_fraction": EVAL_FRACTION}
        return raw

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval is not None and self.eval_fraction is not None:
            what = "data.eval and data.eval_fraction exclude each other"
            raise problem("eval_fraction", what, "remove data.eval_fraction")
        if self.tokenizer is not None and self.vocab_size is not None:
            what = "data.vocab_size sizes a tokenizer trained on the data, but data.tokenizer names a finished one"
            raise problem("vocab_size", what, "remove data.vocab_size")
        for name in self.eval if isinstance(self.eval, dict) else ():
            if not _SET_NAME.fullmatch(name):
                what = f"data.eval has {name!r}, which cannot name a set: the names of its metrics contain it"
                raise problem("eval", what, "use at most 64 letters, digits, _ and -, the first a letter or digit")
        for name in self.template_args:
            if not name.isidentifier():
                what = f"data.template_args has {name!r}, which a template cannot use as a variable"
                raise problem("template_args", what, "rename it")
        check_json(self.template_args, "template_args", "data.template_args")
        return self


# --- train ------------------------------------------------------------------------------------------------------------


class TrainConfig(Section):
    """The run: its folder, its length, its batch size, its memory. Exactly one of `steps` and `epochs` is required."""

    # A name implies the folder, so neither of the two is required by itself.
    model_config = ConfigDict(json_schema_extra={**exactly_one("steps", "epochs"), "required": []})

    name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Name of the run in `genesis report`, TensorBoard and Weights & Biases. Without output_dir the run "
        "is stored in `runs/<name>`.",
        json_schema_extra=RESUME,
    )
    output_dir: PathText = Field(
        description="Folder of the run: checkpoints, final model, metrics.jsonl, loss.svg, config.resolved.yaml.",
        json_schema_extra=RESUME,
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")] = Field(
        default="auto",
        description="auto (a GPU if the machine has one), cpu, cuda or cuda:N.",
        examples=["auto", "cpu", "cuda:0"],
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        default=0, description="Seed of weights, data order, dropout and samples."
    )
    steps: Count | None = Field(default=None, description="Optimizer steps to train.", json_schema_extra=RESUME)
    epochs: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Passes over the training data. The run ends with the first step that completes them.",
        json_schema_extra=RESUME,
    )
    early_stop: Count | None = Field(
        default=None,
        description="The run ends after this many evaluations in a row whose eval/loss is not below the lowest so far. "
        "null: it never ends early.",
        json_schema_extra=RESUME,
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(default=8, description="Sequences in one forward pass.")
    accumulation_steps: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1,
        description="Batches accumulated into one optimizer step, weighted by their target tokens: the step equals one "
        "with a single big batch. Several ranks share them evenly.",
    )
    zero: Annotated[int, Field(ge=0, le=1)] = Field(
        default=1,
        description="What several ranks (--nproc) shard. 1: the optimizer states (ZeRO-1), except for Muon and "
        "Adafactor. 0: nothing. The result is the same.",
        json_schema_extra=RESUME,
    )
    max_grad_norm: Positive | None = Field(
        default=1.0, description="Gradients are scaled down to this global norm. null: they are not clipped."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description=(
            "What the backward pass recomputes to save memory. selective: results of norms and activations, which "
            "costs little time. full: all but each layer's input, which costs another forward pass."
        ),
    )
    precision: Literal["fp8"] | None = Field(
        default=None,
        description=(
            f"fp8: matmuls of the layers with {MIN_COLUMNS} columns or more multiply 8-bit floats (e4m3, one scale per "
            "row), except for weight gradients. A GPU needs compute capability 8.9. Evaluation, samples, embedding and "
            "head stay in model.dtype. null: everything stays in model.dtype."
        ),
    )
    tf32: bool = Field(
        default=False,
        description="Whether a GPU computes float32 matmuls in TF32, which reads 10 bits of each operand's mantissa: "
        "up to 8 times faster, with relative errors near 3e-4.",
    )
    exact: bool = Field(
        default=False,
        description="Whether every sum of a forward pass has one documented order, so that a token's log-probability "
        "has the same bits in training, evaluation and exact generation, whatever else is in the batch. Documents "
        "begin at multiples of 64 slots. Needs bfloat16 and a GPU with compute capability 9.0. A run resumes only on "
        "the same GPU model with the same version of Triton.",
    )
    freeze: Patterns = Field(
        default_factory=list,
        description="Parameters that are not trained, as patterns of their names: * matches any text, ? one character, "
        "[0-3] one of several. They need no gradients and no optimizer state.",
        examples=[["model.embed_tokens.*", "model.layers.[0-3].*"]],
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="CPU threads. null: every core this process may use. A run is bitwise reproducible for the same "
        "number of threads.",
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
            what = f"train.name is {self.name!r}, which cannot name a folder"
            raise problem("name", what, "use letters, digits, _, - and ., the first a letter or digit")
        if self.steps is None and self.epochs is None:
            raise problem("", "the length of the run is missing", "give train.steps or train.epochs")
        if self.steps is not None and self.epochs is not None:
            next = "keep one; the override train.steps=null or train.epochs=null drops the other"
            raise problem("epochs", "train.steps and train.epochs exclude each other", next)
        return self


# --- optim ------------------------------------------------------------------------------------------------------------


# The settings of each optimizer, with their defaults. A setting outside the chosen row is refused.
OPTIMIZERS: dict[str, Mapping[str, Any]] = {
    name: each.in_runs for name, each in optim.OPTIMIZERS.items() if each.in_runs
}
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]
# The same for schedules. `step_size` has no default because a step schedule must set it.
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"min_lr_ratio": 0.0},
    "cosine": {"min_lr_ratio": 0.1},
    "wsd": {"min_lr_ratio": 0.0, "decay_ratio": 0.2},
    "step": {"step_size": None, "step_gamma": 0.1},
    "one_cycle": {"min_lr_ratio": 4e-6},
}
ONE_CYCLE_WARMUP_RATIO = 0.3
# Defaults of runs that train the weights of `model.path` further. The learning rates apply to AdamW; other
# optimizers' rates differ from their defaults by the same factor.
FINE_TUNING: dict[str, dict[str, float]] = {
    "full": {"lr": 1e-5, "warmup_ratio": 0.03},
    "lora": {"lr": 2e-4, "warmup_ratio": 0.03, "weight_decay": 0.0},
    "preferences": {"lr": 1e-6, "warmup_ratio": 0.1},
    "preferences with lora": {"lr": 1e-5, "warmup_ratio": 0.1, "weight_decay": 0.0},
}


def _name_of(objective: Any) -> Any:
    """Return the objective's name from the raw section `objective`, a bare name or a mapping."""
    return objective.get("name", "next_tokens") if isinstance(objective, dict) else objective


def _kind_of(objective: Any, has_lora: bool) -> str:
    """Return the key of a run's defaults in `FINE_TUNING`."""
    if isinstance(objective, str) and objective in {
        *PAIRED,
        *JUDGED,
    }:  # reward models use the rates of other fine-tuning
        return "preferences with lora" if has_lora else "preferences"
    return "lora" if has_lora else "full"


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _range(key: str, most: float | None = None) -> Any:
    """Return the narrowest range that the optimizers allow for a setting; `most` narrows it for runs."""
    kinds = [each for each in optim.OPTIMIZERS.values() if key in each.in_runs]
    low = 0 if any(key in (*each.at_least_0, *each.below_1) for each in kinds) else None
    high = 1 if any(key in each.below_1 for each in kinds) else None
    return Field(ge=low, lt=high, le=most, allow_inf_nan=False)


Beta = Annotated[float, _range("betas")]


def _by_choice(table: Mapping[str, Mapping[str, Any]], key: str) -> str:
    """Return the part of a description that lists a setting's default for each optimizer or schedule."""
    rows = ((name, row[key]) for name, row in table.items() if row.get(key) is not None)
    shown = ((name, list(value) if isinstance(value, tuple) else value) for name, value in rows)
    return " Default: " + ", ".join(f"{name} {json.dumps(value)}" for name, value in shown) + "."


def _when_fine_tuning(key: str) -> str:
    """Return the part of a description that gives a setting's default for runs with `model.path`."""
    full, lora = (FINE_TUNING[kind].get(key) for kind in ("full", "lora"))
    if full is None:
        return f" With lora: {lora:g}."
    return f" With model.path: {full:g}" + (f" (with lora: {lora:g})." if lora != full else ".")


class OptimConfig(Section):
    """Optimizer and learning-rate schedule. A setting that the chosen ones do not use is an error."""

    name: OptimizerName = Field(
        default="adamw",
        description="Optimizer. muon: Muon, with updates of AdamW's size, for hidden matrices; AdamW for the rest.",
    )
    lr: Positive | None = Field(
        default=None,
        description="Peak learning rate."
        + _by_choice(OPTIMIZERS, "lr")
        + _when_fine_tuning("lr")[:-1]
        + " for adamw; the others change by the same factor.",
        json_schema_extra=RESUME,
    )
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)] | None = Field(
        default=None,
        description="Decay rates of the running averages, each below 1." + _by_choice(OPTIMIZERS, "betas"),
        examples=[[0.9, 0.95]],
    )
    eps: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Added to the denominator of the update." + _by_choice(OPTIMIZERS, "eps")
    )
    weight_decay: Annotated[float, _range("weight_decay", most=100)] | None = Field(
        default=None,
        description="Weight decay of matrices; vectors (norms, biases) never decay. Decoupled; L2 for adam and sgd."
        + _by_choice(OPTIMIZERS, "weight_decay")
        + _when_fine_tuning("weight_decay"),
    )
    momentum: Annotated[float, _range("momentum")] | None = Field(
        default=None, description="Momentum, below 1." + _by_choice(OPTIMIZERS, "momentum")
    )
    nesterov: bool | None = Field(default=None, description="Nesterov momentum." + _by_choice(OPTIMIZERS, "nesterov"))
    low_precision: Literal["master", "stochastic"] = Field(
        default="master",
        description="How bfloat16 weights are updated. master: in float32; the optimizer keeps the 16 bits that a "
        "bfloat16 weight lacks. stochastic: without these bits, by unbiased stochastic rounding.",
    )
    state_dtype: Dtype = Field(
        default="float32",
        description="Type of the optimizer's running averages. bfloat16: computed in float32 and stored with unbiased "
        "stochastic rounding; half the memory.",
    )
    grad_dtype: Dtype | None = Field(
        default=None,
        description="Type that accumulates gradients of bfloat16 weights over train.accumulation_steps. Default: "
        "float32 if that is above 1, else bfloat16.",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd", "step", "one_cycle"] = Field(
        default="cosine",
        description="Learning rate after the warm-up. wsd: constant, then linear decay in the last part of the run.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = Field(
        default=None,
        description="Steps in which the learning rate rises linearly. Excludes warmup_ratio. Without both, the run has "
        "no warm-up." + _when_fine_tuning("warmup_ratio").replace(": ", ": warmup_ratio "),
    )
    warmup_ratio: Fraction | None = Field(
        default=None,
        description="The warm-up as a fraction of the run. one_cycle: its rising part, which starts at 1/25 of the "
        f"peak; by default {ONE_CYCLE_WARMUP_RATIO}.",
    )
    min_lr_ratio: Fraction | None = Field(
        default=None,
        description="Final learning rate as a fraction of the peak." + _by_choice(SCHEDULES, "min_lr_ratio"),
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Last fraction of the run, in which the rate decays." + _by_choice(SCHEDULES, "decay_ratio"),
    )
    step_size: Count | None = Field(
        default=None, description="Steps between two drops of the schedule `step`, which requires this setting."
    )
    step_gamma: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Factor of each drop." + _by_choice(SCHEDULES, "step_gamma")
    )
    lr_factors: Annotated[dict[Pattern, Factor], Field(max_length=100)] = Field(
        default_factory=dict,
        description="Learning rates of some parameters as multiples of optim.lr, by patterns of names as in "
        "train.freeze. The first pattern that matches a name applies.",
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
        _check_choice(self, "optim", "optimizer", self.name, OPTIMIZERS)
        _check_choice(self, "optim", "schedule", self.schedule, SCHEDULES)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            what = "optim.warmup_steps and optim.warmup_ratio exclude each other"
            raise problem("warmup_ratio", what, "keep one (an override can set the other to null)")
        if self.nesterov and not self.momentum:
            next = "set optim.momentum above 0, or nesterov: false"
            raise problem("nesterov", "optim.nesterov needs a momentum", next)
        if self.schedule == "step" and self.step_size is None:
            raise problem("schedule", "the schedule step needs optim.step_size", "add optim.step_size, in steps")
        if self.schedule == "wsd" and (self.warmup_ratio or 0) + (self.decay_ratio or 0) > 1:
            parts = f"optim.warmup_ratio {self.warmup_ratio} and optim.decay_ratio {self.decay_ratio}"
            what = f"{parts} add up to more than the run"
            raise problem("decay_ratio", what, "lower one of the two")
        return self


def _fill_choice(raw: dict[str, Any], choice: str, table: Mapping[str, Mapping[str, Any]], default: str) -> None:
    name = raw.get(choice, default)
    if isinstance(name, str):
        raw.update({key: value for key, value in table.get(name, {}).items() if raw.get(key) is None})


def _check_choice(section: Section, title: str, kind: str, name: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    for key in dict.fromkeys(key for row in table.values() for key in row):
        if key not in table[name] and getattr(section, key) is not None:
            users = ", ".join(other for other, row in table.items() if key in row)
            what = f"{title}.{key} has no meaning for the {kind} {name}"
            raise problem(key, what, f"remove it (as an override: {title}.{key}=null); it is for {users}")


def fine_tuning_rates(optim: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Return the values of `FINE_TUNING` that the optimizer and schedule use and that `optim` does not set."""
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


# --- lora -------------------------------------------------------------------------------------------------------------


# The settings of adapters. With `lora.init_from` they come from the adapter it names.
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

Targets = Text | Annotated[list[Text], Field(min_length=1, max_length=1000)]


def _adapter_field(key: str, description: str, **more: Any) -> Any:
    return Field(default=None, description=f"{description} Default: {json.dumps(LORA[key])}.", **more)


class LoraConfig(Section):
    """Adapters: trains low-rank matrices next to linear layers, and freezes the weights of model.path. `lora: {}` uses
    every default; null trains the model itself."""

    r: Annotated[int, Field(ge=1, le=8192)] | None = _adapter_field("r", "Rank: rows of A and columns of B.")
    alpha: Positive | None = _adapter_field("alpha", "Scales B·A by alpha / r, or by alpha / √r with use_rslora.")
    dropout: Annotated[float, Field(ge=0, le=0.95, allow_inf_nan=False)] | None = _adapter_field(
        "dropout", "Probability that training drops an element of the adapter's input."
    )
    target_modules: Targets | None = _adapter_field(
        "target_modules",
        "Layers that get an adapter, as in PEFT: all-linear (all but the head), a list of names or ends of names, or a "
        "regular expression that matches whole names.",
        examples=["all-linear", ["q_proj", "v_proj"]],
    )
    use_rslora: bool | None = _adapter_field(
        "use_rslora", "Rank-stabilized scaling (Kalajdzievski, 2023), for large ranks."
    )
    use_dora: bool | None = _adapter_field(
        "use_dora",
        "Weight-decomposed adapters (Liu et al., 2024): the length of each row of the weight is trained separately "
        "from its direction.",
    )
    modules_to_save: list[Text] | None = _adapter_field(
        "modules_to_save",
        "Modules that are trained and saved in full in addition to the adapters, by ends of their names.",
        max_length=1000,
        examples=[["embed_tokens", "lm_head"]],
    )
    ensure_weight_tying: bool | None = _adapter_field(
        "ensure_weight_tying",
        "Whether head and embedding remain tied if modules_to_save names one of them. false: each has its own weight.",
    )
    init_from: PathText | None = Field(
        default=None,
        description="Folder of a PEFT adapter to train further. The settings above come from it; except for dropout, a "
        "contradicting one is an error.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("init_from") is None:
            return {**raw, **{key: value for key, value in LORA.items() if raw.get(key) is None}}
        return raw


# --- objective --------------------------------------------------------------------------------------------------------


# The settings of each objective, with their defaults. A setting outside the chosen row is refused.
_COMPARED = {"reference": "auto"}
OBJECTIVES: dict[str, Mapping[str, Any]] = {
    "next_tokens": {},
    "distill": {"teacher": None, "beta": 0.5, "temperature": 1.0},
    **{name: {**each.settings, **(_COMPARED if each.needs_reference else {})} for name, each in PAIRED.items()},
    **{name: {**settings, **_COMPARED} for name, (_, settings) in JUDGED.items()},
    **REWARD,
}
if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[*OBJECTIVES]
Share = Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)]


class ObjectiveConfig(Section):
    """What the run learns. A bare name is short for `{name: NAME}`; a setting that the objective does not use is an
    error."""

    name: ObjectiveName = Field(
        default="next_tokens",
        description="next_tokens: the cross entropy of each target token. distill: the divergence from a teacher's "
        "distribution of each target token. Pairs of a chosen and a rejected answer, "
        "compared with a reference, the model before training: dpo and its relatives "
        + ", ".join(name for name, each in PAIRED.items() if each.needs_reference and name != "dpo")
        + "; without a reference: cpo, simpo, orpo. Answers judged good or bad, with a reference: "
        + ", ".join(JUDGED)
        + ". reward: a reward model, from pairs.",
    )
    teacher: PathText | None = Field(
        default=None,
        description="Folder of the teacher, or name of a pulled model: a model or an adapter with the same vocabulary. "
        "Or a .jsonl file of its top-k log-probabilities. distill requires it.",
    )
    beta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None,
        description="For preferences: scales the log-ratios to the reference, or the odds ratio of orpo; with a larger "
        "value the model stays closer to the reference. For distill: weight of the teacher in the mixture of the "
        "generalized Jensen-Shannon divergence; 0 is the forward KL divergence, 1 the reverse."
        + _by_choice(OBJECTIVES, "beta"),
    )
    label_smoothing: Share | None = Field(
        default=None,
        description="Probability that a pair is labelled the wrong way round."
        + _by_choice(OBJECTIVES, "label_smoothing"),
    )
    temperature: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Divides the logits of student and teacher." + _by_choice(OBJECTIVES, "temperature"),
    )
    gamma: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="Target margin between rewards in simpo and reward." + _by_choice(OBJECTIVES, "gamma")
    )
    alpha: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="Weight of the chosen answers' log-likelihood." + _by_choice(OBJECTIVES, "alpha")
    )
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Weight of the squared sum of a pair's rewards, which centers them at 0."
        + _by_choice(OBJECTIVES, "center_rewards_coefficient"),
    )
    tau: Positive | None = Field(default=None, description="Temperature of discopop." + _by_choice(OBJECTIVES, "tau"))
    desirable: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="Weight of good answers." + _by_choice(OBJECTIVES, "desirable")
    )
    undesirable: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="Weight of bad answers." + _by_choice(OBJECTIVES, "undesirable")
    )
    reference: Literal["auto", "adapter", "cached"] | None = Field(
        default=None,
        description="How the reference is computed. adapter: in each step, as the base with the adapters off; cached: "
        "once before the first step, as log-probabilities of all answers. auto: adapter with lora; cached without "
        "lora, or with lora.init_from or lora.modules_to_save.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        filled = {"name": raw} if isinstance(raw, str) else raw
        if isinstance(filled, dict):
            filled = dict(filled)
            if (near := NEAREST.get(str(filled.get("name")))) is not None:
                what = f"objective.name is {filled['name']}, a loss of TRL; Genesis has no objective of this name"
                raise problem("name", what, f"use {near}, which is nearest")
            if filled.get("name") == "distill" and str(filled.get("teacher")).endswith(".jsonl"):
                filled.setdefault("beta", 0.0)
            _fill_choice(filled, "name", OBJECTIVES, cls.model_fields["name"].default)
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_choice(self, "objective", "objective", self.name, OBJECTIVES)
        if self.name == "distill" and self.teacher is None:
            raise problem("name", "the objective distill needs objective.teacher", "add objective.teacher, a folder")
        if self.name == "distill" and (self.beta or 0) > 1:
            raise problem("beta", f"objective.beta of distill is {self.beta}, above 1", "choose a value from 0 to 1")
        if self.teacher_file is not None and (self.beta != 0 or self.temperature != 1):
            what = "a file of log-probabilities allows only the forward KL divergence at temperature 1"
            raise problem("teacher", what, "remove objective.beta and objective.temperature, or name a model folder")
        if "beta" in OBJECTIVES[self.name] and self.name != "distill" and not self.beta:
            what = f"objective.beta is 0: {self.name} would learn nothing or divide by 0"
            raise problem("beta", what, "set it above 0, such as 0.1")
        if self.name == "exo_pair" and not self.label_smoothing:
            what = "objective.label_smoothing is 0, but the objective exo_pair takes its logarithm"
            raise problem("label_smoothing", what, "set it above 0, such as 0.001")
        return self

    @property
    def teacher_file(self) -> str | None:
        """The file of the teacher's top-k log-probabilities; None without one."""
        return self.teacher if str(self.teacher).endswith(".jsonl") else None

    @property
    def learns(self) -> Learns:
        """What the objective learns from."""
        return "pairs" if self.name in {*PAIRED, *REWARD} else "judged" if self.name in JUDGED else "tokens"

    @property
    def needs_reference(self) -> bool:
        """Whether the objective compares the model with a reference."""
        return self.reference is not None

    @property
    def settings(self) -> dict[str, float]:
        """The settings of the objective's loss."""
        return {key: getattr(self, key) for key in OBJECTIVES[self.name] if key != "reference"}

    def computed_reference(self, lora: LoraConfig | None) -> Literal["adapter", "cached"] | None:
        """Return how the reference is computed; None without one."""
        if self.reference != "auto":
            return self.reference
        return "adapter" if lora is not None and lora.init_from is None and not lora.modules_to_save else "cached"


# --- eval -------------------------------------------------------------------------------------------------------------


class EvalConfig(Section):
    """Evaluation on held-out data, and text samples. Both run every `every` steps and at the end."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count | None = Field(default=None, description="Steps between two evaluations. null: only at the end.")
    at_start: bool | None = Field(
        default=None,
        description="Whether to evaluate and sample before the first step. Default: true with model.path, to see the "
        "initial model, else false.",
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = Field(
        default=None, description="Sequences in one forward pass. null: train.batch_size."
    )
    max_batches: Count | None = Field(default=None, description="Batches of one evaluation. null: all held-out data.")
    prompts: Annotated[list[Annotated[str, Field(min_length=1, max_length=65_536)]], Field(max_length=64)] = Field(
        default_factory=list,
        description="Texts that the model continues at each evaluation; in a run on chats, messages that it answers.",
    )
    sample_tokens: Annotated[int, Field(**BOUNDS["max_tokens"].limits)] = Field(
        default=128, description="Longest continuation, in tokens."
    )
    temperature: Annotated[float, Field(**BOUNDS["temperature"].limits)] = Field(
        default=0.8,
        description="Divides the logits before sampling; 0 takes the likeliest token. A generation_config.json in "
        "model.path overrides the defaults of temperature, top_k and top_p.",
    )
    top_k: Annotated[int, Field(**BOUNDS["top_k"].limits)] | None = Field(
        default=50, description="Sample among this many of the likeliest tokens. null: among all."
    )
    top_p: Annotated[float, Field(**BOUNDS["top_p"].limits)] | None = Field(
        default=None,
        description="Sample among the likeliest tokens whose probabilities add up to this. null: among all.",
    )


# --- checkpoint -------------------------------------------------------------------------------------------------------


class CheckpointConfig(Section):
    """Saving. A checkpoint is a Hugging Face folder with the training state; a signal always saves one."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count | None = Field(default=500, description="Steps between two checkpoints. null: only at the end.")
    background: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether training continues during a save, which then needs a snapshot in host memory. auto: if it "
        "takes at most half of the free memory. off: training blocks. The last save always blocks.",
    )
    save_total_limit: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=2, description="Checkpoints to keep. An older one is removed after a newer one is complete. null: all."
    )
    best: bool = Field(
        default=False,
        description="Whether to keep the checkpoint with the lowest eval/loss in addition to save_total_limit. Each "
        "evaluation that sets a new minimum saves one, and the final model comes from the best step.",
    )
    save_final: bool = Field(default=True, description="Write the final model at the root of train.output_dir.")


# --- log --------------------------------------------------------------------------------------------------------------


class LogConfig(Section):
    """Reports of a run. metrics.jsonl is always written."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count = Field(default=10, description="Steps between two rows of metrics and two lines of progress.")
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events below train.output_dir/tensorboard."
    )
    wandb: bool = Field(default=False, description="Also send the metrics to Weights & Biases.")
    wandb_project: Text = Field(default="genesis", description="Project of the run at Weights & Biases.")


# --- The configuration ------------------------------------------------------------------------------------------------


class Config(Section):
    """A training run."""

    model: ModelConfig = Field(description="The model to train.")
    data: DataConfig = Field(description="The training and held-out data.")
    train: TrainConfig = Field(description="The run.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="Optimizer and schedule.")
    lora: LoraConfig | None = Field(default=None, description="Adapters. null: the model itself is trained.")
    objective: Annotated[
        ObjectiveConfig, BeforeValidator(lambda raw: raw, json_schema_input_type=ObjectiveName | ObjectiveConfig)
    ] = Field(
        default_factory=ObjectiveConfig, description="What the run learns. A bare name is short for {name: NAME}."
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation and samples.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving.")
    log: LogConfig = Field(default_factory=LogConfig, description="Reporting.")

    @model_validator(mode="wrap")
    @classmethod
    def _fill(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the defaults of a run with `model.path`. They do not count as set by the user."""
        if not isinstance(raw, dict):
            return handler(raw)
        sections = ("model", "optim", "eval", "objective")
        model, optim, evaluation, objective = (raw.get(section, {}) for section in sections)
        trains_further = isinstance(model, dict) and model.get("path") is not None
        filled, chosen = dict(raw), dict[str, float]()
        if trains_further and isinstance(optim, dict):
            chosen = fine_tuning_rates(optim, _kind_of(_name_of(objective), raw.get("lora") is not None))
            filled["optim"] = {**optim, **chosen}
        if isinstance(evaluation, dict) and evaluation.get("at_start") is None:
            compares = isinstance(objective, str | dict) and _name_of(objective) in {*PAIRED, *JUDGED, *REWARD}
            filled["eval"] = {**evaluation, "at_start": trains_further or compares}
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
            what = "data.vocab_size sizes a tokenizer trained on the data, but the model at model.path has its own"
            raise problem("data.vocab_size", what, "remove data.vocab_size")
        if self.eval.every is not None and self.data.eval_fraction == 0 and not self.eval.prompts:
            what = "eval.every is set, but data.eval_fraction is 0 and eval.prompts is empty"
            raise problem("eval.every", what, "hold out data, add prompts, or remove eval.every")
        if self.train.exact:
            self._check_exact()
        self._check_best()
        self._check_preferences()
        self._check_sizes(self.model.config or {})
        return self

    def _check_best(self) -> None:
        """Check that settings that depend on the lowest eval/loss come with evaluations during the run."""
        missing = "eval.every is null: the only evaluation is at the end" if self.eval.every is None else ""
        if self.data.eval_fraction == 0:
            missing = "nothing is held out (data.eval_fraction is 0)"
        wanted = {"checkpoint.best": self.checkpoint.best, "train.early_stop": self.train.early_stop is not None}
        for key in (key for key, is_set in wanted.items() if is_set and missing):
            next = f"hold out data (data.eval or data.eval_fraction) and set eval.every, or remove {key}"
            raise problem(key, f"{key} depends on eval/loss, but {missing}", next)

    def _check_preferences(self) -> None:
        """Check the settings that depend on what the objective learns from."""
        name = self.objective.name
        if self.objective.learns != "tokens":
            wanted = {"format": "auto", "loss": "all_assistant", "too_long": (None, "drop", "truncate", "fail")}
            for key, value in wanted.items():
                found = getattr(self.data, key)
                if found != value and not (isinstance(value, tuple) and found in value):
                    what = f"data.{key} is {found}, but the records of the objective {name} have a fixed form"
                    raise problem(f"data.{key}", what, f"remove data.{key}")
        if self.train.exact and name == "distill":
            what = "train.exact does not support the objective distill, whose sums have no documented order"
            raise problem("train.exact", what, "remove train.exact")
        if name in REWARD and self.eval.prompts:
            what = "eval.prompts asks for answers, but a reward model scores them and writes none"
            raise problem("eval.prompts", what, "remove eval.prompts")
        lora = self.lora
        if self.objective.reference == "adapter" and (lora is None or lora.init_from or lora.modules_to_save):
            what = "objective.reference is adapter, but the run's reference is not its base without adapters"
            raise problem("objective.reference", what, "set it to cached")

    def _check_lora(self) -> None:
        if self.model.path is None:
            what = "lora trains adapters of an existing model, but model.path is not set"
            raise problem("lora", what, "give model.path, or remove lora (as an override: lora=null)")
        if self.train.precision is not None:
            what = f"train.precision {self.train.precision} requires trained weights, but lora freezes them"
            raise problem("train.precision", what, "remove it (as an override: train.precision=null)")

    def _check_exact(self) -> None:
        next = "remove it, or set train.exact to false"
        if self.model.dtype not in ("auto", "bfloat16"):
            raise problem("model.dtype", f"train.exact computes in bfloat16, not in {self.model.dtype}", next)
        if self.train.precision is not None:
            raise problem("train.precision", f"train.exact excludes 8-bit matmuls ({self.train.precision})", next)
        if self.objective.learns != "tokens":
            what = f"train.exact begins each sample at a key block, but a sample of {self.objective.name} holds two"
            raise problem("train.exact", f"{what} sequences", "set train.exact to false, or choose another objective")
        for key in ("dropout", "use_dora"):
            if self.lora is not None and getattr(self.lora, key):
                raise problem(f"lora.{key}", f"train.exact excludes lora.{key}, which sampling does not have", next)

    def _check_sizes(self, model: Mapping[str, Any]) -> None:
        """Check the data's sizes against an inline model. Folders and presets are checked when they are loaded."""
        vocab, context = model.get("vocab_size"), model.get("max_position_embeddings")
        if isinstance(vocab, int) and self.data.vocab_size is not None and self.data.vocab_size > vocab:
            what = f"data.vocab_size {self.data.vocab_size} exceeds the model's vocab_size {vocab}"
            raise problem("data.vocab_size", what, "lower it, or raise model.config.vocab_size")
        if isinstance(context, int) and self.data.seq_len > context:
            what = f"data.seq_len {self.data.seq_len} exceeds the model's max_position_embeddings {context}"
            raise problem("data.seq_len", what, "lower it, or raise model.config.max_position_embeddings")

    @property
    def eval_batch_size(self) -> int:
        """Sequences in one forward pass of an evaluation."""
        return self.eval.batch_size or self.train.batch_size

    def resolved_yaml(self) -> str:
        """Return this configuration with every default, as YAML that loads back equal (config.resolved.yaml)."""
        return "# The configuration of this run, with every default filled in.\n" + emit(self.model_dump())

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield every setting as `section.key` with its value, in the order of the schema."""
        for name in setting_names():
            section, key = name.split(".")
            yield name, getattr(getattr(self, section), key, None)


def section_class(name: str) -> type[Section]:
    """Return the class of a section of `Config`, also if the section may be null."""
    annotation = Config.model_fields[name].annotation
    found = next(each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
    assert issubclass(found, Section)
    return found


def setting_names() -> list[str]:
    """Return every setting as `section.key`, in the order of the schema."""
    return [f"{section}.{key}" for section in Config.model_fields for key in section_class(section).model_fields]


def fine_tuning_defaults(config: Config) -> dict[str, float | bool]:
    """Return, by name, the settings that took their fine-tuning default because `model.path` is given."""
    if config.model.path is None:
        return {}
    kind = _kind_of(config.objective.name, config.lora is not None)
    names = [f"optim.{key}" for key in FINE_TUNING[kind]] + ["eval.at_start"]
    chosen = {name: value for name, value in config.settings() if name in names and value is not None}
    given = {f"{section}.{key}" for section in ("optim", "eval") for key in getattr(config, section).model_fields_set}
    return {name: chosen[name] for name in names if name in chosen and name not in given}


def json_schema() -> dict[str, Any]:
    """Return the schema for editors (JSON Schema 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}

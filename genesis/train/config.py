"""The configuration of a training run: every setting, its default, its bounds, its meaning. `config_file` reads files.

This schema is the one home of every default. A setting that the chosen optimizer or schedule does not use is refused,
and one that it uses but the user left out is filled in, so that a `Config` always shows what will happen.
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
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError
from genesis.files.hub import DATA_SOURCE
from genesis.ops.fp8 import MIN_COLUMNS
from genesis.train.bounds import BOUNDS
from genesis.train.strict_yaml import emit

# json_schema_extra of a setting, or a whole section, that a resumed run may change; any other change is refused.
RESUME: dict[str, JsonValue] = {"x-resume": "may change"}


class Section(BaseModel):
    """A section of the file: no unknown keys, no silent conversions, no changes once it is made."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


def problem(key: str, what: str, next: str) -> PydanticCustomError:
    """A broken rule between settings: reported at `key` (relative to the section), with the way out."""
    return PydanticCustomError("genesis_rule", "{what}", {"what": what, "key": key, "next": next})


def check_json(value: Mapping[str, Any], key: str, setting: str) -> None:
    """Refuses, at `key`, a mapping that JSON cannot hold; `setting` is its full name."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise problem(key, f"{setting} holds a value that JSON cannot", "use strings, finite numbers, lists") from None


def exactly_one(*keys: str) -> dict[str, JsonValue]:
    """JSON schema of "one of these keys is given and not null"."""
    return {"oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]}


# --- Values that several sections have --------------------------------------------------------------------------------


MAX_STEPS = 10**9


def _check_text(text: str) -> str:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise PydanticCustomError("genesis_text", "a string with characters that no file name can hold")
    return text


def _expanded(text: str) -> str:
    """A path with its `~` or `~user` replaced by the home folder; a file of that name is written `./~name`."""
    _check_text(text)
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise PydanticCustomError("genesis_home", "there is no user of that name; a file of that name is `./~…`")
    return path


def _dtype_name(value: object) -> object:
    """A dtype by any of its names (`bf16`, `half`) as the name that the schema has."""
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
    """The JSON schema of a dtype: `names`, and the short ones of those among them."""
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

# Of parameter names, with the wildcards of file names.
Pattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_check_text)]
Patterns = Annotated[list[Pattern], Field(max_length=100)]
Factor = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


# --- model ------------------------------------------------------------------------------------------------------------


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
_OfHub = Annotated[Text | None, WithJsonSchema(TEXT_SCHEMA)]


class WeightedSource(Section):
    """A source with settings of its own."""

    path: PathText = Field(description="A file, a folder, a glob, `stdlib:`, `example:chats` or `hf:ORG/NAME`.")
    weight: Factor = Field(default=1.0, description="How often its documents are seen in an epoch.")
    config: _OfHub = Field(default=None, description="Configuration of a data set of the hub. null: its own.")
    split: _OfHub = Field(default=None, description="Split of a data set of the hub. null: `train`.")
    fields: Annotated[FieldNames | None, _FIELDS_SCHEMA] = Field(
        default=None, description="As data.fields, of its records. null: data.fields."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, group in (("config", 2), ("split", 4)):
            found = DATA_SOURCE.fullmatch(self.path)
            if getattr(self, name) is not None and (found is None or found[group]):
                what = f"data.train has {name} beside a path that is not hf:ORG/NAME, or names a {name} itself"
                raise problem(name, what, f"remove {name}, or name a data set of the hub")
        return self


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _sources_schema(item: JsonValue) -> list[JsonValue]:
    """The JSON schemas of one source, and of a list of such items."""
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
Sources = Annotated[_Paths, BeforeValidator(_one_or_many, json_schema_input_type=PathText | _Paths)]
# What pydantic adds to the path of a value that can be of two kinds; errors leave it out.
SOURCE_KINDS = ("<path>", "<weighted source>", "<sources>", "<named sets>")
_Source = Annotated[
    Annotated[PathText, Tag(SOURCE_KINDS[0])] | Annotated[WeightedSource, Tag(SOURCE_KINDS[1])],
    Discriminator(lambda value: SOURCE_KINDS[isinstance(value, dict | WeightedSource)]),
]
TrainSources = Annotated[
    list[_Source],
    Field(min_length=1, max_length=1000),
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    WithJsonSchema({"anyOf": _sources_schema({"anyOf": [TEXT_SCHEMA, WeightedSource.model_json_schema()]})}),
]
EvalSources = Annotated[
    Annotated[Sources, Tag(SOURCE_KINDS[2])]
    | Annotated[dict[str, Sources], Field(min_length=1, max_length=MOST_SETS), Tag(SOURCE_KINDS[3])],
    Discriminator(lambda value: SOURCE_KINDS[2 + isinstance(value, dict)]),
    WithJsonSchema({"anyOf": [*_sources_schema(TEXT_SCHEMA), _SETS_SCHEMA]}),
]


class DataConfig(Section):
    """What is learned: sources, records, tokenizer, length. A source is a file, a folder, a glob, `stdlib:`,
    `example:chats` or `hf:ORG/NAME`."""

    train: TrainSources = Field(
        description="What to learn: files of text, JSONL, JSON arrays, CSV (each also as .gz) or Parquet, folders and "
        'globs of them, "stdlib:" (code of the running Python) or "example:chats" (about settings of Genesis). Of '
        "folders and globs, what is no text is listed and not read. An item of a list may be a mapping of `path` and "
        "`weight`, how often its documents are seen in an epoch."
    )
    eval: EvalSources | None = Field(
        default=None,
        description="Held-out sources, or a mapping of names to sources, as {math: m.jsonl, code: c.jsonl}: each set "
        "has metrics such as eval/math/loss, and eval/loss is over all of them. null: a fraction of the training "
        "documents is held out.",
    )
    eval_fraction: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] | None = Field(
        default=None,
        description=f"Fraction of the documents held out when eval is null; 0: none. Default: {EVAL_FRACTION}.",
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="Folder with tokenizer.json. null: that of model.path, else a BPE trained on the data.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] | None = Field(
        default=None,
        description="Size of the byte-level BPE trained on the data when there is no tokenizer. null: the model's.",
    )
    seq_len: Annotated[int, Field(ge=2, le=1_048_576)] = Field(default=1024, description="Tokens in a packed sequence.")
    format: record_formats.Format = Field(
        default="auto", description="Fields of a record and what they mean. auto: found by their names."
    )
    fields: FieldNames = Field(
        default_factory=dict,
        description="Other names of fields, as {messages: conv, role: from}; role and content are those of messages.",
        examples=[{"text": "body"}],
    )
    parse_special: bool = Field(
        default=False,
        description="Whether special tokens written out in a text, such as <|im_end|>, become those tokens. false: "
        "they are plain text, and a warning counts the documents that hold them.",
    )
    on_error: Literal["fail", "skip"] = Field(
        default="fail",
        description="A record that cannot be read: `fail` ends the run with file and line, `skip` counts it.",
    )
    max_line_bytes: Annotated[int, Field(ge=1024, le=2**30)] = Field(
        default=16 * 2**20,
        description="Longest record, in bytes: a line of JSONL, an element of an array, a row. A longer one is an "
        "error (see on_error).",
    )
    template: PathText | None = Field(
        default=None,
        description="Chat template of conversations: chatml, or a file or folder that holds one (Jinja, as in "
        "chat_template.jinja). null: that of the tokenizer.",
        examples=["chatml", "template.jinja"],
    )
    template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables that the template reads, such as {enable_thinking: false}. They are saved with the "
        "model as the template's defaults.",
    )
    loss: Literal["all_assistant", "last", "completion", "all"] = Field(
        default="all_assistant",
        description="What of a conversation is learned. all_assistant: every turn of the assistant; last: the last "
        "one; completion: the turns of a completion, of other conversations those after the user's last message; "
        "all: every token.",
    )
    too_long: Literal["drop", "truncate", "split", "fail"] | None = Field(
        default=None,
        description="What happens to a document of more than data.seq_len tokens: `drop` and `truncate` count it, "
        "`split` continues it in the next sequence, `fail` ends the run with file and line. null: texts are split, "
        "conversations and completions dropped.",
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
            what = "data.vocab_size is for a tokenizer trained on the data, and data.tokenizer names a finished one"
            raise problem("vocab_size", what, "remove data.vocab_size")
        for name in self.eval if isinstance(self.eval, dict) else ():
            if not _SET_NAME.fullmatch(name):
                what = f"data.eval has {name!r}, which cannot name a set: the name is a part of its metrics' names"
                raise problem("eval", what, "use at most 64 letters, digits, _ and -, the first a letter or digit")
        for name in self.template_args:
            if not name.isidentifier():
                what = f"data.template_args has {name!r}, no name that a template can read"
                raise problem("template_args", what, "rename it")
        check_json(self.template_args, "template_args", "data.template_args")
        return self


# --- train ------------------------------------------------------------------------------------------------------------


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


# --- optim ------------------------------------------------------------------------------------------------------------


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


# --- lora -------------------------------------------------------------------------------------------------------------


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

Targets = Text | Annotated[list[Text], Field(min_length=1, max_length=1000)]


def _of_adapter(key: str, description: str, **more: Any) -> Any:
    return Field(default=None, description=f"{description} Default: {json.dumps(LORA[key])}.", **more)


class LoraConfig(Section):
    """Adapters: low-rank matrices beside linear layers are trained, the weights of model.path are not. `lora: {}` takes
    every default; null trains the model itself."""

    r: Annotated[int, Field(ge=1, le=8192)] | None = _of_adapter("r", "Rank: rows of A and columns of B.")
    alpha: Positive | None = _of_adapter("alpha", "B·A is multiplied by alpha / r; with use_rslora by alpha / √r.")
    dropout: Annotated[float, Field(ge=0, le=0.95, allow_inf_nan=False)] | None = _of_adapter(
        "dropout", "Probability with which an element of the adapter's input is left out in training."
    )
    target_modules: Targets | None = _of_adapter(
        "target_modules",
        "The layers that get one, as PEFT reads it: all-linear (all but the head), a list of names or "
        "ends of names, or one regular expression that the whole name matches.",
        examples=["all-linear", ["q_proj", "v_proj"]],
    )
    use_rslora: bool | None = _of_adapter(
        "use_rslora", "Rank-stabilized scaling (Kalajdzievski, 2023), for large ranks."
    )
    use_dora: bool | None = _of_adapter(
        "use_dora",
        "Weight-decomposed adapters (Liu et al., 2024): the length of each row of the weight is trained "
        "apart from its direction.",
    )
    modules_to_save: list[Text] | None = _of_adapter(
        "modules_to_save",
        "Modules that are trained and saved whole beside the adapters, by ends of their names.",
        max_length=1000,
        examples=[["embed_tokens", "lm_head"]],
    )
    ensure_weight_tying: bool | None = _of_adapter(
        "ensure_weight_tying",
        "A head that is the embedding stays so where modules_to_save has one of them; else each gets its own weight.",
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


# --- eval -------------------------------------------------------------------------------------------------------------


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


# --- checkpoint -------------------------------------------------------------------------------------------------------


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


# --- log --------------------------------------------------------------------------------------------------------------


class LogConfig(Section):
    """What is reported while training; metrics.jsonl is always written."""

    model_config = ConfigDict(json_schema_extra=RESUME)

    every: Count = Field(default=10, description="Steps between two rows of metrics and two lines of progress.")
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events below train.output_dir/tensorboard."
    )
    wandb: bool = Field(default=False, description="Also send the metrics to Weights & Biases.")
    wandb_project: Text = Field(default="genesis", description="Project of the run at Weights & Biases.")


# --- The whole --------------------------------------------------------------------------------------------------------


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
        for name in setting_names():
            section, key = name.split(".")
            yield name, getattr(getattr(self, section), key, None)


def section_class(name: str) -> type[Section]:
    """The class of a section of `Config`, also of one that may be null."""
    annotation = Config.model_fields[name].annotation
    found = next(each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
    assert issubclass(found, Section)
    return found


def setting_names() -> list[str]:
    """Every setting as `section.key`, in the order of the schema."""
    return [f"{section}.{key}" for section in Config.model_fields for key in section_class(section).model_fields]


def fine_tuning_defaults(config: Config) -> dict[str, float | bool]:
    """The settings that were filled in because weights are trained further, by name."""
    if config.model.path is None:
        return {}
    names = [f"optim.{key}" for key in FINE_TUNING["full" if config.lora is None else "lora"]] + ["eval.at_start"]
    chosen = {name: value for name, value in config.settings() if name in names and value is not None}
    given = {f"{section}.{key}" for section in ("optim", "eval") for key in getattr(config, section).model_fields_set}
    return {name: chosen[name] for name in names if name in chosen and name not in given}


def json_schema() -> dict[str, Any]:
    """The schema for editors (JSON Schema 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}

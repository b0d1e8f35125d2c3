"""The section `data`: sources, what their records mean, the tokenizer and the chat template."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, WithJsonSchema, model_validator

from genesis.data import record_formats
from genesis.files.hub_cache import DATA_SOURCE
from genesis.train.config.section import RESUME, Section, check_json, problem
from genesis.train.config.values import TEXT_SCHEMA, Factor, PathText, Text

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
Sources = Annotated[
    list[PathText],
    Field(min_length=1, max_length=1000),
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    WithJsonSchema({"anyOf": _sources_schema(TEXT_SCHEMA)}),
]
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
            raise problem(
                "eval_fraction", "data.eval and data.eval_fraction exclude each other", "remove data.eval_fraction"
            )
        if self.tokenizer is not None and self.vocab_size is not None:
            what = "data.vocab_size is for a tokenizer trained on the data, and data.tokenizer names a finished one"
            raise problem("vocab_size", what, "remove data.vocab_size")
        for name in self.eval if isinstance(self.eval, dict) else ():
            if not _SET_NAME.fullmatch(name):
                what = f"data.eval has {name!r}, which cannot name a set: the name is a part of its metrics' names"
                raise problem("eval", what, "use at most 64 letters, digits, _ and -, the first a letter or digit")
        for name in self.template_args:
            if not name.isidentifier():
                raise problem(
                    "template_args", f"data.template_args has {name!r}, no name that a template can read", "rename it"
                )
        check_json(self.template_args, "template_args", "data.template_args")
        return self

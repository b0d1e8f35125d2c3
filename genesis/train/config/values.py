"""Types of values that several sections have: texts, paths, numbers, dtypes, patterns of parameter names."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import PydanticCustomError

from genesis.dtypes import as_dtype
from genesis.errors import DTypeError

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

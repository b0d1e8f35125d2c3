"""What a rejected configuration should have said: pydantic's errors turned into sentences with a suggestion."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from genesis.errors import escape, nearest
from genesis.train.config import SOURCE_KINDS, json_schema
from genesis.train.strict_yaml import KeyPath, scalar, spell

__all__ = ["Problem", "expected", "explain", "nearest_key", "show"]

# A file with more mistakes than this is no configuration; the first ones say enough.
MAX_EXPLAINED = 100
# Names that other trainers use for our settings.
KNOWN_NAMES = {
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "adapter_name_or_path": "lora.init_from",
    "bf16": "model.dtype",
    "block_size": "data.seq_len",
    "chat_template": "data.template",
    "chat_template_kwargs": "data.template_args",
    "context_length": "data.seq_len",
    "cutoff_len": "data.seq_len",
    "dataset": "data.train",
    "device_batch_size": "train.batch_size",
    "enable_thinking": "data.template_args",
    "eval_on_start": "eval.at_start",
    "eval_steps": "eval.every",
    "fp8": "train.precision",
    "freeze_layers": "train.freeze",
    "gradient_accumulation_steps": "train.accumulation_steps",
    "gradient_checkpointing": "train.activation_checkpointing",
    "learning_rate": "optim.lr",
    "logging_steps": "log.every",
    "lora_rank": "lora.r",
    "lora_target": "lora.target_modules",
    "lr_scheduler_type": "optim.schedule",
    "max_length": "data.seq_len",
    "max_new_tokens": "eval.sample_tokens",
    "max_seq_length": "data.seq_len",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "num_iterations": "train.steps",
    "num_train_epochs": "train.epochs",
    "optimizer": "optim.name",
    "per_device_eval_batch_size": "eval.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "rank": "lora.r",
    "save_steps": "checkpoint.every",
    "text_field": "data.fields.text",
    "torch_dtype": "model.dtype",
    "train_on_inputs": "data.loss",
    "val_size": "data.eval_fraction",
}
_BOOLEANS = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false", "n": "false"}


@dataclass(frozen=True)
class Problem:
    """A mistake at `path`: what it is, how to mend it, and whether it is the key (not the value) that is wrong."""

    path: KeyPath
    what: str
    next: str
    at_key: bool = False


def explain(error: ValidationError) -> list[Problem]:
    """The problems behind a validation error of `Config`, each once."""
    problems, missing = [], []
    for detail in error.errors(include_url=False)[:MAX_EXPLAINED]:
        path: KeyPath = tuple(part for part in detail["loc"] if part not in SOURCE_KINDS)
        kind, context = detail["type"], detail.get("ctx", {})
        if kind == "genesis_rule":
            key = tuple(part for part in context["key"].split(".") if part)
            problems.append(Problem((*path, *key), context["what"], context["next"], at_key=True))
        elif kind == "extra_forbidden" or path[-1:] == ("[key]",):
            problems.append(_unknown_key(path if kind == "extra_forbidden" else path[:-1]))
        elif kind == "missing" and isinstance(path[-1], str):
            missing.append(path)
        else:
            path = path[:-1] if kind == "missing" else path
            reason = detail["msg"] if kind in ("genesis_text", "genesis_home") else ""
            problems.append(_wrong_value(path, reason, detail["input"]))
    # A misspelled key explains the missing one.
    meant = {nearest_key(problem.path) for problem in problems if problem.at_key}
    problems += [_missing_key(path) for path in missing if spell(path) not in meant]
    return list(dict.fromkeys(problems))


def _unknown_key(path: KeyPath) -> Problem:
    name, parent = spell(path), spell(path[:-1])
    meant = nearest_key(path)
    if meant is not None:
        return Problem(path, f"unknown key {name}", f"did you mean {meant}?", at_key=True)
    keys = ", ".join(_keys(path[:-1]))
    return Problem(path, f"unknown key {name}", f"the keys of {parent or 'the file'} are {keys}", at_key=True)


def _missing_key(path: KeyPath) -> Problem:
    next = f"add it: {schema_at(path).get('description', '')}"
    return Problem(path, f"{spell(path)} is missing", next)


def _wrong_value(path: KeyPath, reason: str, value: Any) -> Problem:
    fragment = schema_at(path)
    what = f"{spell(path)} must be {expected(fragment)}, not {show(value)}"
    if reason:
        what = f"{spell(path)} is {show(value)}: {reason}"
    remedy = _remedy(fragment, value)
    while "description" not in fragment and path[:-1]:
        fragment = {**schema_at(path[:-1]), **fragment}
        path = path[:-1]
    return Problem(tuple(path), what, remedy or f"{fragment.get('description', '')}")


@functools.cache
def _schema() -> dict[str, Any]:
    return json_schema()


def schema_at(path: KeyPath) -> dict[str, Any]:
    """The part of the JSON schema that describes `path`; empty where it says nothing."""
    fragment = _schema()
    for part in path:
        fragment = next((_child(branch, part) for branch in _branches(fragment) if _child(branch, part)), {})
    return fragment


def _child(fragment: Mapping[str, Any], part: str | int) -> dict[str, Any]:
    if isinstance(part, str):
        others = fragment.get("additionalProperties")
        return dict(fragment.get("properties", {}).get(part) or (others if isinstance(others, dict) else {}))
    prefix = fragment.get("prefixItems", [])
    return dict(prefix[part] if part < len(prefix) else fragment.get("items", {}))


def _branches(fragment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a fragment, references followed, `null` last."""
    if "$ref" in fragment:
        yield from _branches(_schema()["$defs"][fragment["$ref"].rpartition("/")[2]])
    elif "anyOf" in fragment:
        for branch in fragment["anyOf"]:
            yield from _branches(branch)
    else:
        yield dict(fragment)


def nearest_key(path: KeyPath) -> str | None:
    """The setting that an unknown key most likely means: one of its section, another trainer's name, or elsewhere."""
    name = str(path[-1]).lower().replace("-", "_")
    siblings = {key: spell((*path[:-1], key)) for key in _keys(path[:-1])}
    every = {key: f"{section}.{key}" for section in _keys(()) for key in _keys((section,))}
    whole = {setting.replace(".", "_"): setting for setting in every.values()}
    return (
        _close(name, siblings, 0.75)
        or KNOWN_NAMES.get(name)
        or every.get(name)
        or whole.get(name.replace(".", "_"))
        or _close(name, every, 0.75)
        or _close(name, siblings, 0.6)
    )


def _close(name: str, known: Mapping[str, str], cutoff: float) -> str | None:
    found = nearest(name, known, cutoff)
    return None if found is None else known[found]


def _keys(path: KeyPath) -> list[str]:
    """The keys that the mapping at `path` may have."""
    return [key for branch in _branches(schema_at(path)) for key in branch.get("properties", {})]


def expected(fragment: Mapping[str, Any]) -> str:
    """A schema fragment in words: "an integer from 1 to 100, or null"."""
    branches = list(_branches(fragment))
    words = dict.fromkeys(_expected_one({**branch, "examples": fragment.get("examples")}) for branch in branches)
    return " or ".join(word for word in words if word != "null") + (", or null" if "null" in words else "")


def _expected_one(fragment: Mapping[str, Any]) -> str:
    if "enum" in fragment:
        return "one of " + ", ".join(map(str, fragment["enum"]))
    if "const" in fragment:
        return str(fragment["const"])
    kind = fragment.get("type")
    if kind in ("integer", "number"):
        return {"integer": "an integer", "number": "a number"}[kind] + _bounds(fragment)
    if kind == "string" and "pattern" in fragment:
        return "like " + ", ".join(map(str, fragment.get("examples") or [fragment["pattern"]]))
    if kind == "string":
        most = fragment.get("maxLength")
        return f"a string of {fragment.get('minLength', 0)} to {most} characters" if most else "a string"
    if kind == "array" and "prefixItems" in fragment:
        return f"a list of {len(fragment['prefixItems'])}, each {expected(fragment['prefixItems'][0])}"
    if kind == "array":
        most = f"of at most {fragment['maxItems']} " if "maxItems" in fragment else ""
        return f"a list {most}(each item {expected(fragment['items'])})"
    words = {"boolean": "true or false", "null": "null", "object": "a mapping (indented `key: value` lines)"}
    return words.get(str(kind), str(kind))


def _bounds(fragment: Mapping[str, Any]) -> str:
    low, high = fragment.get("minimum"), fragment.get("maximum")
    above, below = fragment.get("exclusiveMinimum"), fragment.get("exclusiveMaximum")
    if below is not None:
        return f" from {_exact(low)} to below {_exact(below)}"
    if above is not None:
        return f" above {_exact(above)} and at most {_exact(high)}"
    return f" from {_exact(low)} to {_exact(high)}" if low is not None and high is not None else ""


def _exact(bound: Any) -> str:
    """A bound as one would type it."""
    return str(bound) if isinstance(bound, int) else f"{bound:.12g}"


def show(value: Any) -> str:
    """A value as it would be written in the file, at most 60 characters, control characters escaped."""
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return escape(text if len(text) <= 60 else text[:57] + "...")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):  # a part of a setting, as the weighted source
        return value.model_dump()
    raise TypeError


def _remedy(fragment: Mapping[str, Any], value: Any) -> str:
    """What to write instead of `value`; empty where there is no better advice than the setting's description."""
    branches = list(_branches(fragment))
    kinds = {branch.get("type") for branch in branches}
    choices = [choice for branch in branches for choice in branch.get("enum", [branch.get("const")]) if choice]
    if isinstance(value, str):
        return _remedy_for_string(value, kinds, choices)
    if "integer" in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"write {int(value)}"
    if "string" in kinds and isinstance(value, bool | int | float):
        return f"quote it: {json.dumps(str(value).lower() if isinstance(value, bool) else str(value))}"
    if "boolean" in kinds and value in (0, 1):
        return f"write {'true' if value else 'false'}"
    if "array" in kinds and isinstance(value, bool | int | float):
        shown = (fragment.get("examples") or [[value]])[0]  # of a fixed length, as betas are
        return f"write a list: {show(shown)}"
    return ""


def _remedy_for_string(value: str, kinds: set[Any], choices: list[str]) -> str:
    if choices:
        close = nearest(value, choices, 0.5)
        return f"did you mean {close}?" if close else ""
    if "boolean" in kinds:
        word = _BOOLEANS.get(value.lower()) or (value.lower() if value.lower() in ("true", "false") else None)
        return f"write {word}" if word else "write true or false"
    if kinds & {"integer", "number"}:
        plain = re.sub(r"[_, ]", "", value.strip())
        plain = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", plain)
        if len(plain) < 40 and isinstance(scalar(plain), int | float):
            return f"write {plain}"
        return "write a plain number, as 100 or 3e-4"
    if "array" not in kinds:
        return ""
    numbers = [scalar(part.strip()) for part in value.split(",")]
    items = numbers if all(isinstance(each, int | float) for each in numbers) else [value]  # a text may have commas
    return f"write a list: [{', '.join(map(show, items))}]"

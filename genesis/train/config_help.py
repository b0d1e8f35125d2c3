"""Explains rejected configurations: turns pydantic's errors into sentences with a suggestion."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from genesis.errors import escape, nearest
from genesis.train.config import SOURCE_KINDS, json_schema, setting_names
from genesis.train.strict_yaml import KeyPath, scalar, spell

# A file with more mistakes is not a configuration; the first ones suffice.
MAX_EXPLAINED = 100
# The equivalent setting, or in words why Genesis has none -> names that other trainers (transformers, TRL, PEFT,
# LLaMA-Factory, Axolotl, Unsloth) use for it.
_MEANINGS = {
    "checkpoint.best": "load_best_model_at_end",
    "checkpoint.every": "save_steps save_strategy saves_per_epoch",
    "data.cache_dir": "dataset_prepared_path tokenized_path",
    "data.eval": "eval_dataset test_datasets validation_file",
    "data.eval_fraction": "val_set_size val_size",
    "data.fields.text": "dataset_text_field text_field",
    "data.loss": "assistant_only_loss completion_only_loss mask_history roles_to_train train_on_inputs train_on_prompt",
    "data.seq_len": "block_size context_length cutoff_len max_length max_seq_len max_seq_length sequence_len",
    "data.template": "chat_template chat_template_path",
    "data.template_args": "chat_template_kwargs enable_thinking",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "data.train": "dataset dataset_dir dataset_name dataset_path datasets train_file",
    "eval.at_start": "eval_on_start",
    "eval.batch_size": "eval_batch_size per_device_eval_batch_size",
    "eval.every": "eval_steps eval_strategy evals_per_epoch evaluation_strategy",
    "eval.sample_tokens": "max_new_tokens",
    "log.every": "logging_steps logging_strategy",
    "log.tensorboard": "logging_dir",
    "log.wandb": "report_to use_wandb",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.init_from": "adapter_name_or_path lora_model_dir",
    "lora.r": "lora_r lora_rank rank",
    "lora.target_modules": "lora_target lora_target_linear lora_target_modules",
    "model.dtype": "bf16 mixed_precision torch_dtype",
    "model.path": "base_model model_name model_name_or_path",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.lr": "learning_rate",
    "optim.lr_factors": "embedding_learning_rate loraplus_lr_ratio",
    "optim.min_lr_ratio": "lr_scheduler_kwargs min_lr",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "train.accumulation_steps": "accumulate_grad_batches gradient_accumulation_steps",
    "train.activation_checkpointing": "activation_offloading gradient_checkpointing use_gradient_checkpointing",
    "train.batch_size": "device_batch_size micro_batch_size per_device_train_batch_size train_batch_size",
    "train.device": "no_cuda use_cpu",
    "train.early_stop": "early_stopping_patience",
    "train.epochs": "max_epochs num_epochs num_train_epochs",
    "train.freeze": "freeze_layers freeze_trainable_layers unfrozen_parameters",
    "train.max_grad_norm": "gradient_clip_val gradient_clipping max_norm",
    "train.name": "run_name",
    "train.precision": "fp8",
    "train.seed": "data_seed random_state",
    "train.steps": "max_steps num_iterations",
    "adapters train next to bfloat16 weights, and 8 bits are for inference (genesis generate --dtype)": "bnb_*"
    " double_quantization load_in_*bit qlora* quantization*",
    "the best checkpoint is the one with the lowest eval/loss": "early_stopping_threshold greater_is_better"
    " metric_for_best_*",
    "nothing is uploaded; genesis export writes a folder for the hub": "hub_* push_to_hub*",
    "documents are always packed into full rows, and attention never crosses them": "*packing* group_by_length"
    " length_column_name multipack* pad_to_* padding_*",
    "--nproc N trains on several GPUs, and train.zero shards the optimizer states": "accelerator_config ddp_*"
    " context_parallel* deepspeed* device_map fsdp* local_rank n_gpu num_gpus tensor_parallel* tpu_* world_size",
    "train.activation_checkpointing has no other choices": "disable_gradient_checkpointing"
    " gradient_checkpointing_* use_reentrant*",
    "attention, norms and loss always use fused kernels if Genesis has them": "*attn_implementation *flash_att* *liger*"
    " *unsloth* *xformers* cut_cross_entropy eager_attention lora_*_kernel sdp_attention torch_compile*",
    "bfloat16 (model.dtype) has the range that float16 lacks": "fp16* half_precision_backend",
    "data is tokenized once, before the run, and cached (data.cache_dir)": "buffer_size dataloader_* dataset_kwargs"
    " dataset_num_proc overwrite_cache preprocessing_* remove_unused_columns skip_prepare_dataset streaming",
    "the section lora trains adapters; without it all weights are trained": "adapter finetuning_type"
    " full_finetuning peft_* task_type use_lora use_peft",
    "objective.alpha": "cpo_alpha pref_ftx",
    "objective.beta": "dpo_beta kto_beta orpo_alpha orpo_beta pref_beta rl_beta",
    "objective.desirable": "desirable_weight kto_chosen_weight",
    "objective.gamma": "simpo_gamma",
    "objective.name": "dpo_loss* loss_type pref_loss stage",
    "objective.reference": "precompute_ref_log_probs ref_model*",
    "objective.tau": "discopop_tau",
    "objective.undesirable": "kto_rejected_weight undesirable_weight",
    "the objective and its data determine what is learned; rewards of programs are not trained": "do_eval do_predict"
    " do_train num_generations ppo_* reward_model*",
    "use the command line instead: genesis train CONFIG --resume": "auto_resume_* ignore_data_skip overwrite_output_dir"
    " resume_from_checkpoint",
    "genesis init writes a batch size that fits, and genesis estimate checks one": "auto_find_batch_size",
    "the loss has no such terms": "label_smoothing_factor neftune_* noisy_embedding_alpha router_aux_loss_coef",
    "the tokenizer and its template define the tokens": "add_tokens additional_special_tokens eos_token pad_token"
    " resize_vocab special_tokens train_on_eos",
    "runs are always bitwise reproducible": "full_determinism use_deterministic_algorithms",
    "code in a model's folder is never run": "trust_remote_code",
}
OTHER_NAMES = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}
_BOOLEANS = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false", "n": "false"}


@dataclass(frozen=True)
class Problem:
    """A mistake at `path` and its remedy; `at_key` says that the key is wrong, not the value."""

    path: KeyPath
    what: str
    next: str
    at_key: bool = False


def explain(error: ValidationError) -> list[Problem]:
    """Return the problems behind a validation error of `Config`, without duplicates."""
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
    for path in missing:
        if (name := spell(path)) not in meant:
            problems.append(Problem(path, f"{name} is missing", f"add it: {schema_at(path).get('description', '')}"))
    return list(dict.fromkeys(problems))


def _unknown_key(path: KeyPath) -> Problem:
    name, parent = spell(path), spell(path[:-1])
    meant = nearest_key(path)
    what, next = f"unknown key {name}", f"the keys of {parent or 'the file'} are {', '.join(_keys(path[:-1]))}"
    if meant is not None and " " in meant:
        what, next = f"{name} is a setting of other trainers, and not supported", f"remove it: {meant}"
    elif meant is not None:
        next = f"did you mean {meant}?"
    return Problem(path, what, next, at_key=True)


def _wrong_value(path: KeyPath, reason: str, value: Any) -> Problem:
    fragment = schema_at(path)
    what = f"{spell(path)} must be {expected(fragment)}, not {show(value)}"
    if reason:
        what = f"{spell(path)} is {show(value)}: {reason}"
    remedy = _remedy(fragment, value)
    while "description" not in fragment and path[:-1]:
        path, fragment = path[:-1], {**schema_at(path[:-1]), **fragment}
    return Problem(path, what, remedy or f"{fragment.get('description', '')}")


@functools.cache
def _schema() -> dict[str, Any]:
    return json_schema()


def schema_at(path: KeyPath) -> dict[str, Any]:
    """Return the part of the JSON schema that describes `path`, or an empty one."""
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
    """Yield the alternatives of a fragment, with references resolved."""
    if "$ref" in fragment:
        yield from _branches(_schema()["$defs"][fragment["$ref"].rpartition("/")[2]])
    elif "anyOf" in fragment:
        for branch in fragment["anyOf"]:
            yield from _branches(branch)
    else:
        yield dict(fragment)


def nearest_key(path: KeyPath) -> str | None:
    """Return the likely meaning of an unknown key; for another trainer's key, in words, why Genesis has none."""
    name = str(path[-1]).lower().replace("-", "_")
    siblings = {key: spell((*path[:-1], key)) for key in _keys(path[:-1])}
    every = {setting.partition(".")[2]: setting for setting in setting_names()}
    whole = {setting.replace(".", "_"): setting for setting in setting_names()}
    return (
        next((meaning for other, meaning in OTHER_NAMES.items() if fnmatch.fnmatchcase(name, other)), None)
        or whole.get(name.replace(".", "_"))
        or siblings.get(nearest(name, siblings, 0.75) or "")
        or every.get(name)
        or every.get(nearest(name, every, 0.75) or "")
        or siblings.get(nearest(name, siblings, 0.6) or "")
    )


def _keys(path: KeyPath) -> list[str]:
    return [key for branch in _branches(schema_at(path)) for key in branch.get("properties", {})]


def expected(fragment: Mapping[str, Any]) -> str:
    """Return a schema fragment in words: "an integer from 1 to 100, or null"."""
    branches = list(_branches(fragment))
    words = dict.fromkeys(_expected_branch({**branch, "examples": fragment.get("examples")}) for branch in branches)
    return " or ".join(word for word in words if word != "null") + (", or null" if "null" in words else "")


def _expected_branch(fragment: Mapping[str, Any]) -> str:
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
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    typed = {n: str(b) if isinstance(b, int) else f"{b:.12g}" for n in names if (b := fragment.get(n)) is not None}
    low, high, above, below = map(typed.get, names)
    if below is not None:
        return f" from {low} to below {below}"
    if above is not None:
        return f" above {above} and at most {high}"
    return f" from {low} to {high}" if low is not None and high is not None else ""


def show(value: Any) -> str:
    """Return a value as the file would spell it, at most 60 characters, with control characters escaped."""
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return escape(text if len(text) <= 60 else text[:57] + "...")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):  # part of a setting, such as a weighted source
        return value.model_dump(exclude_none=True)
    raise TypeError


def _remedy(fragment: Mapping[str, Any], value: Any) -> str:
    """Return what to write instead of `value`; empty if the setting's description is the best advice."""
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
        shown = (fragment.get("examples") or [[value]])[0]  # a list of fixed length, such as betas
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
        return "write a plain number, such as 100 or 3e-4"
    if "array" not in kinds:
        return ""
    numbers = [scalar(part.strip()) for part in value.split(",")]
    items = numbers if all(isinstance(each, int | float) for each in numbers) else [value]  # a text may have commas
    return f"write a list: [{', '.join(map(show, items))}]"

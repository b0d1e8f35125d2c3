"""Reads and writes an adapter's `adapter_config.json`: rank, scale and layers, in PEFT's terms.

Fields that would change the computation in an unsupported way are refused; all others are read or ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from genesis.errors import ModelError
from genesis.files.paths import quote

ALL_LINEAR = "all-linear"
MAX_PATTERNS = 4096
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9

# All fields that PEFT 0.21 writes, except those that Genesis sets.
_WRITTEN: Mapping[str, Any] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "auto_mapping": None,
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
# Fields that change the computation unless they are absent, null, false or empty, and what they do.
_REFUSED: Mapping[str, str] = {
    "lora_bias": "B has a bias",
    "layer_replication": "layers are repeated",
    "use_qalora": "inputs of the low-rank path are pooled (QA-LoRA)",
    "use_bdlora": "A or B is block-diagonal (BD-LoRA)",
    "alora_invocation_tokens": "the adapter is active only after certain tokens (aLoRA)",
    "arrow_config": "inputs are routed to several adapters (Arrow)",
    "kasa_config": "the base's weights are truncated (KaSA)",
    "monteclora_config": "weights are sampled (MonteCLoRA)",
    "trainable_token_indices": "rows of the embedding are trained",
    "target_parameters": "parameters outside linear layers are adapted",
    "megatron_config": "layers are Megatron's",
}
# Initializations of A and B that leave the base unchanged. The others (pissa, olora, corda, loftq, lora_ga) subtract
# their first B·A from it, which PEFT recomputes whenever it loads such a folder.
_PURE_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CONVERT = "have PEFT write it as a plain LoRA: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained), and use the merged folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The linear layers that get adapters, and the kind of adapters.

    Attributes:
        r: rank.
        alpha: the scale is alpha / r, or alpha / √r with `use_rslora`.
        target_modules: "all-linear" (all except the head), a regular expression that matches a layer's full name, or
            names and ends of names ("q_proj").
        dropout: dropout probability of the low-rank path's input.
        use_rslora: divide alpha by √r instead of r.
        use_dora: train magnitudes (DoRA).
        rank_pattern: regular expression -> rank of the layers whose name ends in a match; the first match counts.
        alpha_pattern: the same for alphas.
        exclude_modules: layers without adapters, in the form of `target_modules`.
        layers_to_transform: indices of the layers to which ends of names apply; empty means all.
        layers_pattern: text before the index in a name ("layers"); empty means any.
        modules_to_save: ends of names of modules that are trained and saved whole, in addition to the adapters.
        ensure_weight_tying: keep a tied head tied if it or the embedding is trained whole; otherwise each gets its own
            weight.
        base: the base model's folder, or its name on the hub.
    """

    r: int
    alpha: float
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    base: str | None = None


def read_adapter_config(raw: Mapping[str, Any], where: str) -> AdapterConfig:
    """Return the config in the JSON object of an `adapter_config.json`; absent fields have PEFT's defaults.

    Raises:
        ModelError: a field is wrong or refused; the error has its name, its value, and what was expected or the reason.
    """
    _check_kind(raw, where)

    # Readers of single fields: each returns a checked value, or raises an error with the field's name.
    def error(key: str, expected: str, found: Any) -> ModelError:
        what = f"`{key}` is {quote(found)}, expected {expected}"
        return ModelError(what, where=where, next="repair the file, or save the adapter again")

    def get(
        key: str, fits: Callable[[Any], bool], expected: str, default: Any = None, of: Mapping[str, Any] = raw
    ) -> Any:
        found = of.get(key, default)
        if not fits(found):
            raise error(key, expected, found)
        return found

    def rank(key: str, of: Mapping[str, Any] = raw) -> int:
        most = f"a rank from 1 to {MAX_RANK:,}"
        found: int = get(key, lambda r: type(r) is int and 1 <= r <= MAX_RANK, most, 8, of)
        return found

    def alpha(key: str, of: Mapping[str, Any] = raw) -> float:
        return float(get(key, lambda a: type(a) in (int, float) and abs(a) <= MAX_ALPHA, "a finite number", 8.0, of))

    def switch(key: str) -> bool:
        return bool(get(key, lambda value: value is None or type(value) is bool, "true or false"))

    def listed(key: str, kind: type, expected: str) -> tuple[Any, ...]:
        """Return a list of values of a kind; a single value counts as a list of one, and null as an empty list."""
        found = raw.get(key)
        values = [] if found is None else [found] if type(found) is kind else found
        is_list = isinstance(values, list) and len(values) <= MAX_PATTERNS
        if not is_list or not all(type(value) is kind and value != "" for value in values):
            raise error(key, expected, found)
        return tuple(values)

    def patterns(key: str) -> Mapping[str, Any]:
        most = f"a mapping from names to numbers, of at most {MAX_PATTERNS:,}"
        found: Mapping[str, Any] = get(key, lambda v: not v or (isinstance(v, dict) and len(v) <= MAX_PATTERNS), most)
        return found or {}

    # Build the config, then check the fields that depend on each other.
    ranks, alphas = patterns("rank_pattern"), patterns("alpha_pattern")
    names = f"a list of at most {MAX_PATTERNS:,} names"
    wanted, excluded = raw.get("target_modules"), raw.get("exclude_modules")
    config = AdapterConfig(
        r=rank("r"),
        alpha=alpha("lora_alpha"),
        target_modules=wanted if isinstance(wanted, str) else listed("target_modules", str, names),
        dropout=float(
            get("lora_dropout", lambda p: type(p) in (int, float) and 0 <= p < 1, "a number from 0 to below 1", 0.0)
        ),
        use_rslora=switch("use_rslora"),
        use_dora=switch("use_dora"),
        rank_pattern={key: rank(key, ranks) for key in ranks},
        alpha_pattern={key: alpha(key, alphas) for key in alphas},
        exclude_modules=excluded if isinstance(excluded, str) else listed("exclude_modules", str, names),
        layers_to_transform=listed("layers_to_transform", int, "a list of layers' indices"),
        layers_pattern=listed("layers_pattern", str, names),
        modules_to_save=listed("modules_to_save", str, names),
        ensure_weight_tying=switch("ensure_weight_tying"),
        base=get("base_model_name_or_path", lambda v: v is None or (isinstance(v, str) and "\0" not in v), "a text"),
    )
    if not config.target_modules:
        raise error("target_modules", "names of layers, or a regular expression", wanted)
    if isinstance(config.target_modules, str) and config.layers_to_transform:
        raise error("layers_to_transform", "null because target_modules is a text", raw["layers_to_transform"])
    return config


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    """Refuse other adapters than LoRA, and variants that change the computation.

    Raises:
        ModelError: it has the name of the field.
    """
    if raw.get("peft_type") != "LORA":
        what = f"`peft_type` is {quote(raw.get('peft_type'))}; the only PEFT adapter that Genesis supports is LORA"
        raise ModelError(what, where=where, next=MERGE)
    if raw.get("bias") not in (None, "none"):
        what = f"`bias` is {quote(raw['bias'])}: it also trains the base's biases, which Genesis does not support"
        raise ModelError(what, where=where, next=MERGE)
    init = raw.get("init_lora_weights")
    if not any(init is known or (isinstance(known, str) and init == known) for known in _PURE_INIT):
        what = f"`init_lora_weights` is {quote(init)}: the adapter was trained on a base that it modified"
        raise ModelError(what, where=where, next=_CONVERT)
    for key, value in raw.items():
        known = key in _WRITTEN or key in ("use_rslora", "use_dora")
        reason = _REFUSED.get(key)
        if not known and key.isidentifier() and key.startswith("use_"):  # PEFT's name for a variant
            reason = "an unknown variant of LoRA"
        if not value or reason is None:
            continue
        what = f"`{key}` is {quote(value)}: {reason}, which Genesis does not support"
        raise ModelError(what, where=where, next=MERGE)


def adapter_json(config: AdapterConfig) -> bytes:
    """Return the bytes of `adapter_config.json` as PEFT 0.21 writes it."""

    def plain(number: float) -> float | int:
        return int(number) if number == int(number) else number

    assert not (config.exclude_modules or config.layers_to_transform or config.layers_pattern), "list layers instead"
    modules = config.target_modules
    content = {
        **_WRITTEN,
        "task_type": "SEQ_CLS" if "score" in config.modules_to_save else _WRITTEN["task_type"],
        "base_model_name_or_path": config.base,
        "ensure_weight_tying": config.ensure_weight_tying,
        "modules_to_save": list(config.modules_to_save) or None,
        "r": config.r,
        "lora_alpha": plain(config.alpha),
        "lora_dropout": config.dropout,
        "target_modules": modules if isinstance(modules, str) else list(modules),
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {key: plain(value) for key, value in config.alpha_pattern.items()},
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    }
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False).encode()

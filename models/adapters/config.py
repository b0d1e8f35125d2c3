"""What an adapter is: rank, scale and layers, in the words of PEFT's `adapter_config.json`, read and written.

Fields that change what is computed in a way that Genesis does not have are refused; all others are read or ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from genesis.errors import ModelError
from genesis.files.paths import quote

ALL_LINEAR = "all-linear"
MAX_PATTERNS = 4096
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9

# What PEFT 0.21 writes, in full; what Genesis sets is left out.
_WRITTEN: Mapping[str, Any] = MappingProxyType(
    {
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
)
# Fields that add to the computation unless they are absent, null, false or empty, and what they do.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "lora_bias": "B has a bias",
        "layer_replication": "layers are repeated",
        "use_qalora": "inputs of the low-rank path are pooled (QA-LoRA)",
        "use_bdlora": "A or B is block-diagonal (BD-LoRA)",
        "alora_invocation_tokens": "the adapter works after certain tokens only (aLoRA)",
        "arrow_config": "several adapters are routed to (Arrow)",
        "kasa_config": "the base's weights are truncated (KaSA)",
        "monteclora_config": "weights are sampled (MonteCLoRA)",
        "trainable_token_indices": "rows of the embedding are trained",
        "target_parameters": "parameters that are no linear layer's are adapted",
        "megatron_config": "layers are Megatron's",
    }
)
# Draws of A and B that leave the base as it is. The others (pissa, olora, corda, loftq, lora_ga) subtract their first
# B·A from it, and PEFT computes that again whenever it loads such a folder.
_PURE_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CONVERT = "have PEFT write it as a plain LoRA: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained), and use the merged folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Which linear layers get adapters, and of which kind.

    Attributes:
        r: the rank.
        alpha: the scale is alpha / r, or alpha / √r with `use_rslora`.
        target_modules: "all-linear" (all but the head), a regular expression that matches a layer's whole name, or
            names and ends of names ("q_proj").
        dropout: of the low-rank path's input.
        use_rslora, use_dora: whether the adapters are these.
        rank_pattern, alpha_pattern: other ranks and alphas for layers whose names end in what a key, a regular
            expression, matches; the first such key counts.
        exclude_modules: layers that get none, as in `target_modules`.
        layers_to_transform: of layers that ends of names mean those with these indices; none given: all.
        layers_pattern: what stands before the index in a name ("layers"); none given: anything.
        modules_to_save: ends of names of modules that are trained and saved whole, beside the adapters.
        ensure_weight_tying: a head that is the embedding stays so where one of them is trained whole; else each then
            has its own weight.
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
    """The config in the JSON object of an `adapter_config.json`, with PEFT's own defaults for what is absent.

    Raises:
        ModelError: naming the field, what was found, and what was expected or why it is refused.
    """
    _check_kind(raw, where)
    fields = _Fields(raw, where)
    config = AdapterConfig(
        r=fields.rank("r", 8),
        alpha=fields.alpha("lora_alpha", 8.0),
        target_modules=fields.modules("target_modules"),
        dropout=fields.number("lora_dropout", 0.0, lambda p: 0 <= p < 1, "a number from 0 to below 1"),
        use_rslora=fields.switch("use_rslora"),
        use_dora=fields.switch("use_dora"),
        rank_pattern={key: fields.rank(key, 8, value) for key, value in fields.patterns("rank_pattern")},
        alpha_pattern={key: fields.alpha(key, 8.0, value) for key, value in fields.patterns("alpha_pattern")},
        exclude_modules=fields.modules("exclude_modules"),
        layers_to_transform=fields.indices("layers_to_transform"),
        layers_pattern=fields.names("layers_pattern"),
        modules_to_save=fields.names("modules_to_save"),
        ensure_weight_tying=fields.switch("ensure_weight_tying"),
        base=fields.text("base_model_name_or_path"),
    )
    if not config.target_modules:
        raise fields.error("target_modules", "names of layers, or a regular expression")
    if isinstance(config.target_modules, str) and config.layers_to_transform:
        raise fields.error("layers_to_transform", "null where target_modules is a text")
    return config


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    """Refuse what is no LoRA, or one that computes something else.

    Raises:
        ModelError: naming the field.
    """
    if raw.get("peft_type") != "LORA":
        what = f"`peft_type` is {quote(raw.get('peft_type'))}; of PEFT's adapters Genesis has LORA"
        raise ModelError(what, where=where, next=MERGE)
    if raw.get("bias") not in (None, "none"):
        what = f"`bias` is {quote(raw['bias'])}: biases of the base are trained too, and an adapter of Genesis has none"
        raise ModelError(what, where=where, next=MERGE)
    init = raw.get("init_lora_weights")
    if not any(init is known or (isinstance(known, str) and init == known) for known in _PURE_INIT):
        what = f"`init_lora_weights` is {quote(init)}: the base that it was trained on is not the one it names"
        raise ModelError(what, where=where, next=_CONVERT)
    for key, value in raw.items():
        if not value or (reason := _refusal(key)) is None:
            continue
        raise ModelError(f"`{key}` is {quote(value)}: {reason}, which Genesis does not do", where=where, next=MERGE)


def _refusal(key: str) -> str | None:
    """Why a field with a value is refused; None where it is not."""
    if key in _REFUSED:
        return _REFUSED[key]
    known = key in _WRITTEN or key in ("use_rslora", "use_dora")
    # PEFT names all its variants so.
    unknown_variant = not known and key.isidentifier() and key.startswith("use_")
    return "a variant of LoRA that it does not know" if unknown_variant else None


class _Fields:
    """Reads fields of an `adapter_config.json`, each as one kind of value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def error(self, key: str, expected: str, value: Any = None) -> ModelError:
        found = self.raw.get(key) if value is None else value
        what = f"`{key}` is {quote(found)}, expected {expected}"
        return ModelError(what, where=self.where, next="repair the file, or save the adapter again")

    def number(
        self, key: str, default: float, fits: Callable[[float], bool], expected: str, value: Any = None
    ) -> float:
        found = self.raw.get(key, default) if value is None else value
        if type(found) not in (int, float) or not abs(found) < math.inf or not fits(found):
            raise self.error(key, expected, found)
        return float(found)

    def rank(self, key: str, default: int, value: Any = None) -> int:
        found = self.raw.get(key, default) if value is None else value
        if type(found) is not int or not 1 <= found <= MAX_RANK:
            raise self.error(key, f"a rank from 1 to {MAX_RANK:,}", found)
        return found

    def alpha(self, key: str, default: float, value: Any = None) -> float:
        return self.number(key, default, lambda alpha: abs(alpha) <= MAX_ALPHA, "a finite number", value)

    def switch(self, key: str) -> bool:
        found = self.raw.get(key)
        if found not in (None, True, False) or type(found) not in (type(None), bool):
            raise self.error(key, "true or false")
        return bool(found)

    def text(self, key: str) -> str | None:
        found = self.raw.get(key)
        if found is not None and (not isinstance(found, str) or "\0" in found):
            raise self.error(key, "a text")
        return found

    def names(self, key: str) -> tuple[str, ...]:
        found = self.raw.get(key)
        listed = [] if found is None else [found] if isinstance(found, str) else found
        is_list = isinstance(listed, list) and len(listed) <= MAX_PATTERNS
        if not is_list or not all(isinstance(name, str) and name for name in listed):
            raise self.error(key, f"a list of at most {MAX_PATTERNS:,} names")
        return tuple(listed)

    def modules(self, key: str) -> str | tuple[str, ...]:
        found = self.raw.get(key)
        return found if isinstance(found, str) else self.names(key)

    def indices(self, key: str) -> tuple[int, ...]:
        found = self.raw.get(key)
        listed = [] if found is None else [found] if type(found) is int else found
        if not isinstance(listed, list) or not all(type(index) is int for index in listed):
            raise self.error(key, "a list of layers' indices")
        return tuple(listed)

    def patterns(self, key: str) -> list[tuple[str, Any]]:
        found = self.raw.get(key) or {}
        if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
            raise self.error(key, f"a mapping from names to numbers, of at most {MAX_PATTERNS:,}")
        return list(found.items())


def adapter_json(config: AdapterConfig) -> bytes:
    """`adapter_config.json` as PEFT 0.21 writes it."""

    def plain(number: float) -> float | int:
        return int(number) if number == int(number) else number

    assert not (config.exclude_modules or config.layers_to_transform or config.layers_pattern), "write what they mean"
    modules = config.target_modules
    content = {
        **_WRITTEN,
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

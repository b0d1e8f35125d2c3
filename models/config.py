"""Reads and checks a model's `config.json`: the keys that shape the computation, with Hugging Face's defaults.

Keys that Genesis does not read are kept and written back. Keys that would change the computation in an unsupported way
are refused. Every dimension has an upper bound, so that a corrupt number cannot allocate memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from genesis.dtypes import as_dtype
from genesis.errors import DTypeError, ModelError, escape

# The largest value of each dimension: far above every published model, and small enough for integer arithmetic.
MOST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": (1 << 31) - 1,
    "original_max_position_embeddings": (1 << 31) - 1,
    "sliding_window": (1 << 31) - 1,
    "max_window_layers": (1 << 31) - 1,
}
ROPE_THETA = 10000.0  # the default base of the rotary embedding
# Scaling rule of the rotary embedding -> the parameters that it requires.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
# Name in a config -> scaling rule; phi3 has its own table (models/phi3.py).
ROPE_KINDS: Mapping[str, str] = {kind: kind for kind in ROPE_NEEDS if kind != "longrope"}
FACTORS = ("short_factor", "long_factor")
# Every numeric parameter of a rule -> its smallest and its largest value.
ROPE_NUMBERS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), (1e-6, 1e6)),
    **dict.fromkeys(("beta_fast", "beta_slow"), (1e-6, 1e6)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, 1e6)),
}
# Other keys that may appear: names of rules, keys that are checked elsewhere, and a remark in old YaRN configs.
ROPE_OTHERS = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "truncate",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "finetuned",
        *FACTORS,
    )
)
KINDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list"}
# Dropout that other programs apply in training; it does not affect evaluation or generation.
DROPOUT = ("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base θ, the scaling rule and its parameters (`rope_scaling` or `rope_parameters`)."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return the object that `rope_parameters` holds."""
        return {**self.parameters, "rope_theta": self.theta, "rope_type": self.kind}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, under Hugging Face's key names.

    Attributes:
        ACTIVATION: the family's key of the MLP's activation, followed by the names that it may have.
        ROTATES_PARTS: whether `partial_rotary_factor` may be below 1 in this family.
        DEFAULTS: the family's values of absent keys, where they differ from the usual ones.
        layer_windows: for each layer, the number of keys that a query attends to, up to its own; 0 means all.
        raw: the whole config as it was read; saving writes it back.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    layer_windows: tuple[int, ...]
    raw: Mapping[str, Any]

    ACTIVATION: ClassVar[tuple[str, ...]] = ("hidden_act", "silu", "swish")
    ROTATES_PARTS: ClassVar[bool] = False
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read and check a config; its family comes first.

        Raises:
            ModelError: a key is wrong; the error has its name, its value and what was expected.
        """
        kind = Reader(raw, where).family().config
        return replace(kind.read(Reader({**kind.DEFAULTS, **raw}, where)), raw=dict(raw))

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Return the config of this family, with the defaults of Hugging Face's config class."""
        raise NotImplementedError

    def with_rows(self, rows: int) -> Self:
        """Return the config with an embedding of at least `rows` rows; an embedding never shrinks."""
        if rows <= self.vocab_size:
            return self
        return replace(self, vocab_size=rows, raw={**self.raw, "vocab_size": rows})

    @property
    def is_reward(self) -> bool:
        """Whether the model has a head for rewards instead of one for tokens: `architectures` says so."""
        named = self.raw.get("architectures")
        return isinstance(named, list) and any(str(name).endswith(CLASSIFIER) for name in named)

    def as_reward(self) -> Self:
        """Return the config of the reward model with this decoder, which transformers loads as a sequence classifier.

        Raises:
            ModelError: transformers has no such class for the family.
        """
        if self.is_reward:
            return self
        name = CLASSIFIERS.get(self.model_type)
        if name is None:
            what = f"a {self.model_type} model cannot become a reward model: transformers has no class for it"
            raise ModelError(what, next=f"use a model of type {', '.join(CLASSIFIERS)}")
        own: dict[str, Any] = {"architectures": [name + CLASSIFIER], "problem_type": None}
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        # transformers takes the reward of the last token that is not padding.
        ends, pad = self.raw.get("eos_token_id"), self.raw.get("pad_token_id")
        own["pad_token_id"] = None if pad in (ends if isinstance(ends, list) else [ends]) else pad
        return replace(self, raw={**self.raw, **own, **labels})

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings; each layer uses one of them."""
        return (self.rope,)

    def rope_json(self) -> dict[str, Any]:
        """Return the rotary keys that older and newer readers look for."""
        found = {"rope_theta": self.rope.theta, "rope_parameters": self.rope.json()}
        # Older programs refuse unknown keys, so `rope_scaling` is written back as it was read.
        if self.rope.kind != "default":
            own = {**self.rope.parameters, "rope_type": self.rope.kind}
            found["rope_scaling"] = self.raw.get("rope_scaling") or own
        return found

    @property
    def context_length(self) -> int:
        """The most positions of a sequence: the trained length, or more under dynamic and YaRN scaling."""
        trained, p = self.max_position_embeddings, self.rope.parameters
        if self.rope.kind == "dynamic":
            return max(trained, int(trained * p["factor"]))
        if self.rope.kind == "yarn" and p.get("original_max_position_embeddings"):
            return max(trained, int(p["original_max_position_embeddings"] * p["factor"]))
        return trained

    @property
    def packed_length(self) -> int:
        """The most positions of a packed row: the trained length if the scaling depends on each sequence's length."""
        if self.rope.kind == "longrope":
            return min(self.context_length, self.rope.parameters["original_max_position_embeddings"])
        return self.max_position_embeddings if self.rope.kind == "dynamic" else self.context_length

    def regime(self, length: int) -> int:
        """Return a number for the rotary frequencies of a sequence of `length` tokens.

        0 means the frequencies of the trained length. Longer sequences have regime 1 under longrope, and one regime for
        each length under dynamic scaling.
        """
        if length <= self.packed_length or self.rope.kind not in ("dynamic", "longrope"):
            return 0
        return 1 if self.rope.kind == "longrope" else length

    @property
    def rotary_dim(self) -> int:
        """How many values of a head are rotated."""
        return int(self.head_dim * self.rope.parameters.get("partial_rotary_factor", 1))

    @property
    def stored_dtype(self) -> str | None:
        """The float type that the config names for its weights (`dtype`; `torch_dtype` before transformers 5)."""
        for key in ("dtype", "torch_dtype"):
            try:
                found = as_dtype(self.raw.get(key))
            except DTypeError:
                continue
            if found.is_floating_point:
                return found.name
        return None

    @property
    def dropout(self) -> dict[str, float]:
        """The config's dropout probabilities above 0, which Genesis does not apply."""
        return {key: self.raw[key] for key in DROPOUT if self.raw.get(key)}


CLASSIFIER = "ForSequenceClassification"
# `model_type` -> the beginning of the name of transformers' class with that end.
CLASSIFIERS = {
    "gemma3_text": "Gemma3Text", "llama": "Llama", "mistral": "Mistral", "olmo2": "Olmo2", "phi3": "Phi3",
    "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
}  # fmt: skip
C = TypeVar("C", bound=ModelConfig)


class Family(NamedTuple):
    """A `model_type`: the published models that use it, and the class that reads its configs."""

    models: str
    config: type[ModelConfig]


FAMILIES: dict[str, Family] = {}  # by `model_type`; the registry imports the modules that register here


def family(model_type: str, models: str) -> Callable[[type[C]], type[C]]:
    """Register the config class of a `model_type`; the error for an unknown type lists `models`."""

    def declare(config: type[C]) -> type[C]:
        FAMILIES[model_type] = Family(models, config)
        return config

    return declare


class Reader:
    """Reads typed values from a raw config; its errors name the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def fail(self, what: str, next: str = "correct the config, or download it again from its source") -> ModelError:
        return ModelError(what, where=self.where, next=next)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `key`. null counts as absent; a key without a default is required."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing", next=f"add it: {self.raw.get('model_type')} models need it")
            return default
        wrong = isinstance(value, bool) != (kind is bool)
        if wrong or not isinstance(value, (int, float) if kind is float else kind):
            raise self.fail(f"{key} is {_shown(value)}, expected {KINDS[kind]}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value: int = self.get(key, int, default)
        if not least <= value <= MOST[key]:
            raise self.fail(f"{key} is {_shown(value)}, expected {least} to {MOST[key]:,}")
        return value

    def fraction(self, key: str, default: float, most: float) -> float:
        value = self.get(key, float, default)
        if not 0 < value <= most:
            raise self.fail(f"{key} is {_shown(value)}, expected a number above 0 and at most {most:g}")
        return float(value)

    def require(self, **expected: Any) -> None:
        """Refuse values of these keys that the family does not support; absent and null are accepted."""
        for key, value in expected.items():
            found = self.raw.get(key)
            if found is not None and (type(found) is not type(value) or found != value):
                has = "none" if value is None else _shown(value)
                raise self.fail(f"{key} is {_shown(found)}; Genesis supports {has} for {self.raw['model_type']}")

    def family(self) -> Family:
        """Return the family that `model_type` names."""
        kind = self.raw.get("model_type")
        known = f"use one of {', '.join(FAMILIES)}: {'; '.join(each.models for each in FAMILIES.values())}"
        if kind is None:
            raise self.fail("model_type is missing, so the kind of model is unknown", next=known)
        if not isinstance(kind, str):
            raise self.fail(f"model_type is {_shown(kind)}, expected a text", next=known)
        if kind not in FAMILIES:
            also = ": it takes more than text" if isinstance(self.raw.get("text_config"), Mapping) else ""
            raise self.fail(f"model_type {_shown(kind)} is not supported{also}", next=known)
        return FAMILIES[kind]

    def refuse_unsupported(self, kind: type[ModelConfig]) -> None:
        key, name, *others = kind.ACTIVATION
        if (found := self.get(key, str, name)) not in (name, *others):
            raise self.fail(f"{key} is {_shown(found)}; Genesis supports {name}", next=f"use a model with {name}")
        if not kind.ROTATES_PARTS and self.get("partial_rotary_factor", float, 1) != 1:
            raise self.partial_heads()
        self.require(is_causal=True)
        if (how := self.raw.get("quantization_config")) is not None:
            method = how.get("quant_method") if isinstance(how, Mapping) else None
            of = f" by {escape(method)[:40]}" if isinstance(method, str) else ""
            raise self.fail(
                f"quantization_config: the weights are quantised{of}, which Genesis cannot read",
                next="use the model's original weights in bfloat16, float16 or float32",
            )

    def partial_heads(self) -> ModelError:
        shown = _shown(self.raw["partial_rotary_factor"])
        what = f"partial_rotary_factor is {shown}, but such models rotate whole heads (in transformers too)"
        next = "set it to 1 if the model was trained with whole heads; otherwise use another model"
        return self.fail(what, next=next)

    def check_unused(self) -> None:
        """Check keys that do not shape the computation but are read later or must not be ignored silently."""
        for key in DROPOUT:
            if not 0 <= self.get(key, float, 0.0) < 1:
                raise self.fail(f"{key} is {_shown(self.raw[key])}, expected a probability below 1")
        for key in ("dtype", "torch_dtype"):
            self.get(key, str, "")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = self.raw.get(key)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int and -1 <= i < MOST["vocab_size"] for i in ids):
                raise self.fail(f"{key} is {_shown(value)}, expected a token id, a list of them, or null")

    def config(self, kind: type[C], *, head_dim: int, **own: Any) -> C:
        """Return a config of `kind`: the keys that all families share, and the family's `own` fields."""
        self.refuse_unsupported(kind)
        self.check_unused()
        heads, layers = self.count("num_attention_heads"), self.count("num_hidden_layers")
        kv_heads = self.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        shared: dict[str, Any] = {
            "model_type": self.raw["model_type"],
            **{key: self.count(key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.count("max_position_embeddings", 2048),
            "rms_norm_eps": self.fraction("rms_norm_eps", 1e-6, 1.0),
            "initializer_range": self.fraction("initializer_range", 0.02, 1e3),
            "tie_word_embeddings": self.get("tie_word_embeddings", bool, False),
            "attention_bias": False,
            "mlp_bias": False,
            "rope": own.get("rope") or self.rope(head_dim),
            "layer_windows": (0,) * layers,
            "raw": dict(self.raw),
        }
        return kind(**shared | own)

    def head_dim(self, default: int | None = None) -> int:
        """Return the size of a head; without a `default` it is the hidden size divided by the heads."""
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        if self.raw.get("head_dim") is None and default is None and hidden % heads:
            what = f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
            raise self.fail(what, next="set head_dim")
        head_dim = self.count("head_dim", hidden // heads if default is None else default)
        if head_dim % 2:
            raise self.fail(f"head_dim {head_dim} is odd, but the rotary embedding rotates pairs")
        return head_dim

    def rope(self, head_dim: int, names: Mapping[str, str] = ROPE_KINDS, *, rotates_parts: bool = False) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier versions).

        If a config has both, `rope_scaling` takes precedence, as in transformers.

        Args:
            names: name in the config -> scaling rule, as in `ROPE_KINDS`.
            rotates_parts: whether `partial_rotary_factor` may be below 1.
        """
        # Choose the object and the rule.
        parameters, scaling = self.object("rope_parameters"), self.object("rope_scaling")
        name, given = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
        kinds = (given.get("rope_type"), given.get("type"), "default")
        kind = next(kind for kind in kinds if kind is not None)
        if not isinstance(kind, str) or kind not in names:
            raise self.fail(f"rope_type is {_shown(kind)}; Genesis supports {', '.join(names)} for such models")
        kind = names[kind]
        unknown = [key for key in given if key not in ROPE_NUMBERS and key not in ROPE_OTHERS]
        if unknown:
            found = f"{name} has the unknown key {_shown(unknown[0])}"
            raise self.fail(f"{found}, which may change the computation", next="remove it if it changes nothing")
        # Keys outside the object: θ, the trained length, the rotated part of a head.
        theta = self.raw.get("rope_theta") if given.get("rope_theta") is None else given["rope_theta"]
        if theta is None and parameters.get("rope_theta") not in (None, ROPE_THETA):
            base = _shown(parameters["rope_theta"])
            what = f"rope_scaling has no rope_theta, and rope_theta {base} of rope_parameters"
            raise self.fail(f"{what} would be ignored", next="move the content of rope_scaling to rope_parameters")
        if kind in ("yarn", "llama3", "longrope") and self.raw.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = self.count("original_max_position_embeddings")
        if rotates_parts and self.raw.get("partial_rotary_factor") is not None:
            given.setdefault("partial_rotary_factor", self.raw["partial_rotary_factor"])
        # Check the parameters of the rule.
        reader = Reader({**given, "rope_theta": theta}, f"{self.where}, {name}")
        theta = reader.theta("rope_theta")
        reader.check_rope(kind)
        if (factor := reader.fraction("partial_rotary_factor", 1.0, 1.0)) != 1 and not rotates_parts:
            raise reader.partial_heads()
        if (size := int(head_dim * factor)) % 2 or not size:
            found = f"partial_rotary_factor {_shown(factor)} rotates {size} of {head_dim} values"
            raise reader.fail(f"{found}, but the rotary embedding rotates pairs")
        for key in FACTORS if kind == "longrope" else ():
            reader.check_factors(key, size // 2)
        if kind == "dynamic" and head_dim < 4:
            raise self.fail(f"head_dim is {head_dim}, but rope_type dynamic needs at least 4")
        return RopeConfig(theta, kind, given)

    def object(self, key: str) -> dict[str, Any]:
        """Return a copy of an object of the config; it is empty if the key is absent or null."""
        found = self.raw.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.fail(f"{key} is {_shown(found)}, expected an object")
        return dict(found or {})

    def theta(self, key: str) -> float:
        """Return a base of the rotary embedding."""
        theta = self.get(key, float, ROPE_THETA)
        if not 1 < theta < 1e12:
            raise self.fail(f"{key} is {_shown(theta)}, expected a number above 1 and below 1e12")
        return float(theta)

    def check_rope(self, kind: str) -> None:
        """Check a scaling rule's parameters in `raw`: the required ones exist, and numbers are within their bounds."""
        missing = [key for key in ROPE_NEEDS[kind] if self.raw.get(key) is None]
        if missing:
            raise self.fail(f"{missing[0]} is missing, but rope_type {kind} needs it")
        for key, (least, most) in ROPE_NUMBERS.items():
            if self.raw.get(key) is not None and not least <= self.get(key, float) <= most:
                raise self.fail(f"{key} is {_shown(self.raw[key])}, expected {least:g} to {most:g}")
        self.get("truncate", bool, True)
        self.count("original_max_position_embeddings", 1)
        if kind == "longrope" and self.raw["original_max_position_embeddings"] < 2:
            raise self.fail("original_max_position_embeddings is 1, expected at least 2")
        if kind == "llama3" and self.raw["high_freq_factor"] <= self.raw["low_freq_factor"]:
            low, high = _shown(self.raw["low_freq_factor"]), _shown(self.raw["high_freq_factor"])
            raise self.fail(f"high_freq_factor {high} is not above low_freq_factor {low}")

    def check_factors(self, key: str, count: int) -> None:
        """Check a list of longrope's divisors, one for each frequency."""
        factors = self.get(key, list)
        if len(factors) != count:
            raise self.fail(f"{key} has {len(factors):,} numbers, expected {count}: half of a head's rotated values")
        least, most = ROPE_NUMBERS["factor"]
        wrong = [f for f in factors if isinstance(f, bool) or not isinstance(f, int | float) or not least <= f <= most]
        if wrong:
            raise self.fail(f"{key} has {_shown(wrong[0])}, expected numbers from {least:g} to {most:g}")

    def same_windows(self) -> tuple[int, ...]:
        """Return `sliding_window` for every layer; 0 where it is null or absent."""
        self.require(layer_types=None)
        size = 0 if self.raw.get("sliding_window") is None else self.count("sliding_window")
        return (size,) * self.count("num_hidden_layers")

    def windows(self, types: Sequence[str] | None = None) -> tuple[int, ...]:
        """Return `sliding_window` for the layers that `layer_types` lists as sliding, 0 for the others.

        Args:
            types: default of `layer_types`. None derives it from the keys of Qwen configs.
        """
        has_window = self.get("use_sliding_window", bool, False) and self.get("sliding_window", int, 0) != 0
        if types is None and self.raw.get("layer_types") is None:
            first = self.count("max_window_layers", 28, least=0)
            layers = range(self.count("num_hidden_layers"))
            types = ["sliding_attention" if has_window and i >= first else "full_attention" for i in layers]
        types = self.by_layer("layer_types", ("full_attention", "sliding_attention"), types or ())
        if "sliding_attention" not in types:
            return (0,) * len(types)
        size = self.count("sliding_window")
        return tuple(size if t == "sliding_attention" else 0 for t in types)

    def by_layer(self, key: str, known: tuple[Any, ...], default: Sequence[Any]) -> Sequence[Any]:
        """Return a list that has one of the `known` values for each layer."""
        found, layers = self.raw.get(key), self.count("num_hidden_layers")
        if found is None:
            return default
        if not isinstance(found, list):
            raise self.fail(f"{key} is {_shown(found)}, expected a list")
        if len(found) != layers:
            raise self.fail(f"{key} lists {len(found):,} layers, but num_hidden_layers is {layers:,}")
        wrong = [each for each in found if type(each) is not type(known[0]) or each not in known]
        if wrong:
            raise self.fail(f"{key} has {_shown(wrong[0])}; Genesis supports {' and '.join(map(str, known))}")
        return found


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        digits = int(math.log10(abs(value))) + 1 if abs(value) >= 10**18 else 0
        return f"a number of about {digits:,} digits" if digits else f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"an object of {len(value):,} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value):,}"
    text = escape(str(value)[:61])
    return f'"{text}"' if len(text) <= 60 else f'"{text[:60]}…"'

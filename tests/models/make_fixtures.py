"""Makes the small models in fixtures/ with transformers: a golden model of each family that is not Qwen, and in extra/
features that the golden ones do not have.

    .venv-peers/bin/python tests/models/make_fixtures.py [NAME …]

Needs an environment with torch and transformers (`make peers`); the tests need neither.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent / "fixtures"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.3, 2.5, 4.0],
    "partial_rotary_factor": 0.75,
}

EXTRA = {
    "phi3-beyond": (  # sequences of 20 tokens are longer than those that it was trained with
        Phi3ForCausalLM,
        Phi3Config(**SMALL, pad_token_id=None, original_max_position_embeddings=12, rope_parameters=dict(LONGROPE)),
    ),
    "llama3": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    ),
    "llama-head-dim": (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True,
            attn_implementation="eager",
        ),
    ),
    "qwen3-yarn-bias": (
        Qwen3ForCausalLM,
        Qwen3Config(**SMALL, head_dim=16, rope_parameters=YARN, attention_bias=True, tie_word_embeddings=False),
    ),
}  # fmt: skip

TINY = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# The features of a family that others do not have are all in use.
FAMILIES = {
    "mistral": (MistralForCausalLM, MistralConfig(**TINY, head_dim=8, sliding_window=6)),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(
            **TINY | {"num_hidden_layers": 4}, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "olmo2": (
        Olmo2ForCausalLM,
        Olmo2Config(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **TINY, head_dim=8, query_pre_attn_scalar=12, sliding_window=6, sliding_window_pattern=2,
            rope_parameters=TWO_BASES,
        ),
    ),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(**TINY, sliding_window=6, original_max_position_embeddings=64),
    ),
    "phi3-long": (
        Phi3ForCausalLM,
        Phi3Config(
            **TINY | {"hidden_size": 32, "tie_word_embeddings": True}, original_max_position_embeddings=24,
            rope_parameters=dict(LONGROPE),
        ),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **TINY, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=4.0,
            tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
TRAINER = {
    "lr": 0.003,
    "betas": [0.9, 0.95],
    "eps": 1e-08,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "steps": 10,
    "decay": "weight decay on matrices (ndim >= 2) only",
    "schedule": "constant",
    "bias_correction": True,
}
DEFAULTS = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "rope_parameters", "sliding_window", "layer_types"),
    *("no_rope_layers", "query_pre_attn_scalar"),
)
MARGIN = 1e-3  # by which each greedy token beats the next one, so that rounding cannot change it

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "yarn-scaled": {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": LLAMA3,
}


def initialised(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with weights larger than at initialisation, so that every part shows."""
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def first_pass(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, loss and the gradients of all parameters."""
    out = model(input_ids=ids, labels=labels, use_cache=False)
    out.loss.backward()
    arrays = {"input_ids": ids, "logits": out.logits.detach(), "loss": out.loss.detach()}
    return arrays | {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters()}


def save_arrays(arrays: dict[str, torch.Tensor], folder: Path) -> None:
    save_file({n: a.contiguous() for n, a in arrays.items()}, folder / "reference.safetensors")


def make_extra(name: str) -> None:
    """The folder of one model, and what transformers computes with it."""
    model = initialised(*EXTRA[name], seed=len(name))
    folder = HERE / "extra" / name
    model.save_pretrained(folder)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 20))
    save_arrays(first_pass(model, ids, ids), folder)


def make_family(name: str) -> None:
    """A golden model: the folder, a first pass, a greedy continuation, and a training run."""
    model = initialised(*FAMILIES[name], seed=len(name))
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "trainer.json").write_text(json.dumps(TRAINER, indent=1))
    ids = torch.randint(0, TINY["vocab_size"], (2, 20))
    labels = torch.cat([torch.full((2, 4), -100), ids[:, 4:]], 1)  # as of a prompt
    arrays = first_pass(model, ids, labels) | {"labels": labels, "greedy": greedy(model, ids[:1, :9], 12)}
    save_arrays(arrays | trained(model, torch.randint(0, TINY["vocab_size"], (TRAINER["steps"], 2, 20))), folder)


def greedy(model: PreTrainedModel, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The prompt `[1, T]` and `count` tokens after it, `[T + count]`."""
    out = model.generate(
        prompt, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(out.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > MARGIN, "take another seed"
    return out.sequences[0]


def trained(model: PreTrainedModel, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Losses and gradient norms (before clipping) of a step on each batch, and the weights after them."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": TRAINER["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TRAINER["lr"], betas=tuple(TRAINER["betas"]), eps=TRAINER["eps"])
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINER["max_grad_norm"]))
        optimizer.step()
        losses.append(loss.detach())
    arrays = {"train_ids": batches, "step_loss": torch.stack(losses), "grad_norm": torch.stack(norms)}
    return arrays | {f"final.{n}": p.detach() for n, p in model.named_parameters()}


def make_rope_tables() -> None:
    """Rows of the cos and sin tables of every scaling, for a sequence within and one beyond the trained length."""
    found = []
    for name, parameters in ROPES.items():
        for length in (48, 200):
            config = LlamaConfig(**{**SMALL, "hidden_size": 256}, rope_parameters=dict(parameters))
            cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 64), torch.arange(length)[None])
            rows, half = [0, 1, length // 2, length - 1], cos.shape[-1] // 2
            found.append(
                {
                    "name": name,
                    "config": config.to_diff_dict() | SMALL | {"hidden_size": 256},
                    "length": length,
                    "rows": rows,
                    "cos": cos[0, rows, :half].tolist(),
                    "sin": sin[0, rows, :half].tolist(),
                }
            )
    (HERE / "rope.json").write_text(json.dumps(found))


def make_defaults() -> None:
    """What transformers takes each family's config to say where it leaves keys out."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    required = {key: SMALL[key] for key in sizes} | {"num_hidden_layers": 8, "num_attention_heads": 16}
    found = {}
    for _, config in FAMILIES.values():
        known = type(config)(**required).to_dict()
        kept = [key for key in known if key in DEFAULTS or key.endswith(("_multiplier", "_scaling"))]
        found[config.model_type] = {"given": required, "read": {key: known[key] for key in sorted(kept)}}
    (HERE / "defaults.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    factories = dict.fromkeys(EXTRA, make_extra) | dict.fromkeys(FAMILIES, make_family)
    for model_name in sys.argv[1:] or factories:
        factories[model_name](model_name)
    make_defaults()
    if not sys.argv[1:]:
        make_rope_tables()

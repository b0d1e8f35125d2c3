"""Makes the small models in fixtures/extra with transformers: features that the three golden models do not have.

    .venv-peers/bin/python tests/models/make_fixtures.py

Needs an environment with torch and transformers (`make peers`); the tests need neither.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
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

MODELS = {
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

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "yarn-scaled": {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": LLAMA3,
}


def make_model(name: str) -> None:
    """The folder of one model, and what transformers computes with it."""
    torch.manual_seed(len(name))
    kind, config = MODELS[name]
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at initialisation, so that every part shows
            parameter.add_(torch.randn_like(parameter) * 0.15)
    folder = HERE / "extra" / name
    model.save_pretrained(folder)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 20))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    arrays = {"input_ids": ids, "logits": out.logits.detach(), "loss": out.loss.detach()}
    arrays |= {f"grad.{n}": p.grad for n, p in model.named_parameters()}
    save_file({n: a.contiguous() for n, a in arrays.items()}, folder / "reference.safetensors")


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


if __name__ == "__main__":
    for model_name in MODELS:
        make_model(model_name)
    make_rope_tables()

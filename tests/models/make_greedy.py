"""Makes fixtures/greedy.json with transformers: what a greedy search continues 20 prompts with, for every golden model.

    .venv-peers/bin/python tests/models/make_greedy.py

Needs an environment with torch and transformers (`make peers`); the tests need neither. Prompts after which two tokens
come near to each other are left out, so that float32 sums in another order choose the same ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

HERE = Path(__file__).parent / "fixtures"
MARGIN = 1e-4  # of logits: float32's errors in these models are below 1e-5
PROMPTS, NEW, LONGEST = 20, 40, 22


def greedy(model: PreTrainedModel, prompt: torch.Tensor) -> list[int] | None:
    """The tokens after a prompt `[1, T]`; None where a choice was close."""
    plain = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=plain)
    best = torch.stack(out.logits).topk(2).values
    is_clear = (best[..., 0] - best[..., 1]).min() > MARGIN
    return out.sequences[0, prompt.shape[1] :].tolist() if is_clear else None


def cases(folder: Path) -> list[dict[str, list[int]]]:
    """Prompts of 1 to `LONGEST` tokens and their continuations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.manual_seed(len(folder.name))
    found: list[dict[str, list[int]]] = []
    while len(found) < PROMPTS:
        length = 1 + len(found) * (LONGEST - 1) // (PROMPTS - 1)
        prompt = torch.randint(0, model.config.vocab_size, (1, length))
        if (tokens := greedy(model, prompt)) is not None:
            found.append({"prompt": prompt[0].tolist(), "tokens": tokens})
    return found


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)  # of models so small
    folders = [path.parent for path in sorted(HERE.glob("*/config.json")) + sorted(HERE.glob("extra/*/config.json"))]
    lines = [f" {json.dumps(folder.name)}: {json.dumps(cases(folder), separators=(',', ':'))}" for folder in folders]
    (HERE / "greedy.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

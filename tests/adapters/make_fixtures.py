"""Makes the adapters in fixtures/ with PEFT: LoRA, rsLoRA and DoRA of a tiny Qwen2 and Qwen3, and what PEFT computes.

    .venv-peers/bin/python tests/adapters/make_fixtures.py

Needs an environment with torch, transformers and peft (`make peers`); the tests need none of them. A folder holds the
adapter as PEFT saves it, and in `reference.safetensors` logits and gradients of a first pass, the logits of the merged
model, and ten steps of AdamW.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent / "fixtures"
BASES = Path(__file__).parents[1] / "models" / "fixtures"
COMMON: dict[str, Any] = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM", "init_lora_weights": False}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True, "r": 3},
    "dora": {
        "target_modules": r".*\.(q_proj|o_proj|gate_proj|up_proj)", "use_dora": True,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 1}, "alpha_pattern": {"o_proj": 1},
    },
}  # fmt: skip
MODELS = ("qwen2-tied", "qwen3-tied")
STEPS, LR, CLIP = 10, 3e-3, 1.0


def adapted(model: str, kind: str) -> PeftModel:
    """A model with an adapter whose every tensor does something.

    PEFT draws B as large as A, and a model so disturbed makes of a difference of 1e-7 in the first step one of 1e-4 in
    the tenth. With a quarter of that it stays below 1e-6.
    """
    torch.manual_seed(len(kind))
    base = AutoModelForCausalLM.from_pretrained(BASES / model, dtype=torch.float32)
    found = get_peft_model(base, LoraConfig(**COMMON | KINDS[kind]))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.25)
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return found


def trained_parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters, by the names that they are saved under."""
    by_memory = {p.data_ptr(): p for p in model.parameters() if p.requires_grad}
    return {name: by_memory[tensor.data_ptr()] for name, tensor in get_peft_model_state_dict(model).items()}


def make(model_name: str, kind: str) -> None:
    """The folder of one adapter, and what PEFT computes with it."""
    folder = HERE / f"{model_name}-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    model = adapted(model_name, kind).train()
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../../../models/fixtures/{model_name}"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # PEFT's order is that of a set
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (2, 10))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    arrays = {"input_ids": ids, "logits": out.logits, "loss": out.loss}
    arrays |= {f"grad.{name}": p.grad.clone() for name, p in trained_parameters(model).items()}
    batches = torch.randint(0, vocabulary, (STEPS, 2, 12))
    arrays |= stepped(model, batches)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASES / model_name), folder)
    with torch.no_grad():
        arrays["merged_logits"] = merged.merge_and_unload()(input_ids=ids).logits
    save_file({n: a.detach().contiguous() for n, a in arrays.items()}, folder / "reference.safetensors")


def stepped(model: PeftModel, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Losses and gradient norms (before clipping) of a step on each batch, and the adapter after them."""
    parameters = trained_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP))
        optimizer.step()
        losses.append(loss.detach())
    arrays = {"lr": torch.tensor(LR), "clip": torch.tensor(CLIP)}
    arrays |= {"train_ids": batches, "step_loss": torch.stack(losses), "grad_norm": torch.stack(norms)}
    return arrays | {f"final.{name}": p for name, p in parameters.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in MODELS:
        for form in KINDS:
            make(each, form)

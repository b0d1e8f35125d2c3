"""The torch side of training_step.py: recipes from Hugging Face's model to a lean one under torch.compile.

A recipe's name is made of words: `lean` (a model written for speed) or `hf` (transformers' Qwen), then `compile`,
`graphs` (compile with CUDA graphs), `liger` (its kernels in the Hugging Face model), and `pure` (bf16 weights and
moments instead of float32 ones under autocast).
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch
from torch import nn

from genesis.profile.peers.torch_steps import lean_model
from genesis_cli.session.bench.versus import lean_config
from genesis_models.config import ModelConfig
from genesis_models.registry import preset

__all__ = ["measured"]

WARM_UP = 6


def made(recipe: str, size: str, length: int) -> nn.Module:
    """The recipe's model on the GPU."""
    raw = preset(size)
    if recipe.startswith("lean"):
        model: nn.Module = lean_model(torch, lean_config(ModelConfig.from_dict(raw), length), length)
    else:
        import transformers

        if "liger" in recipe:
            from liger_kernel import transformers as liger

            getattr(liger, f"apply_liger_kernel_to_{raw['model_type']}")()
        kinds = {"qwen2": "Qwen2", "qwen3": "Qwen3"}
        kind = kinds[raw["model_type"]]
        config = getattr(transformers, f"{kind}Config")(**raw, attn_implementation="sdpa", use_cache=False)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = model.to("cuda")
    return (model.bfloat16() if "pure" in recipe else model).train()


def measured(job: dict[str, Any], shape: str) -> dict[str, Any]:
    """One shape's row of a recipe."""
    recipe = job["side"]
    torch.set_float32_matmul_precision("high")
    b, t, *more = (int(x) for x in shape.split("x"))
    micro = more[0] if more else 1
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    model = made(recipe, job["size"], t)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run: Any = model
    if "compile" in recipe:
        run = torch.compile(model)
    elif "graphs" in recipe:
        run = torch.compile(model, mode="reduce-overhead")
    c = ModelConfig.from_dict(preset(job["size"]))
    ids = torch.randint(0, c.vocab_size, (WARM_UP + job["steps"], b, t + 1), device="cuda")

    def step(i: int) -> torch.Tensor:
        x, y = ids[i][:, :-1].contiguous(), ids[i][:, 1:].contiguous()
        for _ in range(micro):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16, enabled="pure" not in recipe):
                loss = run(x, y, torch.bfloat16) if recipe.startswith("lean") else run(input_ids=x, labels=x).loss
            (loss / micro).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begun = time.perf_counter()
    first = float(step(0).detach())
    for i in range(1, WARM_UP):
        step(i)
    torch.cuda.synchronize()
    warm = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(WARM_UP, WARM_UP + job["steps"]):
        begun = time.perf_counter()
        loss = step(i)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times) / micro
    n = sum(p.numel() for p in model.parameters())
    flops = b * t * (6 * n + 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * t)
    return {
        "side": recipe, "size": job["size"], "shape": shape, "ms": seconds * 1e3, "min_ms": min(times) / micro * 1e3,
        "tokens_per_second": b * t / seconds, "model_tflops": flops / seconds / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,  # with what CUDA graphs hold, and what is idle
        "warm_s": warm, "loss": first, "last_loss": float(loss.detach()), "parameters": n,
    }  # fmt: skip

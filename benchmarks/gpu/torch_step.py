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
import torch.nn.functional as F
from torch import nn

from genesis_models.config import ModelConfig
from genesis_models.presets import preset

__all__ = ["measured"]

WARM_UP = 6


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.keys, self.size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.norm1, self.norm2 = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.keys) * self.size, bias=c.model_type == "qwen2")
        self.out = nn.Linear(self.heads * self.size, c.hidden_size, bias=False)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        qk = c.model_type == "qwen3"
        self.q_norm = RMSNorm(self.size, c.rms_norm_eps) if qk else nn.Identity()
        self.k_norm = RMSNorm(self.size, c.rms_norm_eps) if qk else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, -1, self.size).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.keys, self.keys), 1)
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Lean(nn.Module):
    """What a strong engineer would give torch.compile."""

    def __init__(self, c: ModelConfig, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = None if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        inverse = 1e6 ** -(torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(length).float(), inverse)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if torch.is_autocast_enabled():
            x = x.bfloat16()
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def made(recipe: str, size: str, length: int) -> nn.Module:
    """The recipe's model on the GPU."""
    raw = preset(size)
    if recipe.startswith("lean"):
        model: nn.Module = Lean(ModelConfig.from_dict(raw), length)
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
                loss = run(x, y) if recipe.startswith("lean") else run(input_ids=x, labels=x).loss
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
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "warm_s": warm, "loss": first,
        "last_loss": float(loss.detach()), "parameters": n,
    }  # fmt: skip

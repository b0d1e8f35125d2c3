"""The torch side of lora_step.py: LoRA and DoRA steps, from PEFT's model to a lean one under torch.compile.

A recipe's name is made of words. The first is `lean` (a model written for speed: one matmul for q, k and v, one for
gate and up, one for all their A) or `peft` (transformers with PEFT). Then follow `chunk` (computes the head's loss
and gradient on pieces of the rows, without storing all logits), `compile`, `graphs` (compile with CUDA graphs) and
`ckpt` (activation checkpointing of the blocks). Base and adapters have the job's dtype. This file does not use Genesis.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.lora_step import serve, tokens

LR, MAX_NORM = 2e-4, 1.0
PIECE = 2048  # rows of a piece of the head's loss
PREFIX = "base_model.model."

Tensors = dict[str, torch.Tensor]

# --- The lean model ---------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Packed frozen layers of one input, with an adapter for each: c∘(x·Wᵀ + s·(x·Aᵀ)·Bᵀ) + b."""

    def __init__(self, base: Tensors, adapter: Tensors, names: list[str], scaling: float) -> None:
        super().__init__()
        weights = [base[f"{name}.weight"] for name in names]
        biases = [base[f"{name}.bias"] for name in names if f"{name}.bias" in base]
        self.register_buffer("weight", torch.cat(weights))
        self.register_buffer("bias", torch.cat(biases) if biases else None)
        self.a = nn.Parameter(torch.cat([adapter[f"{name}.lora_A.weight"] for name in names]))
        self.b = nn.ParameterList(nn.Parameter(adapter[f"{name}.lora_B.weight"]) for name in names)
        self.rank, self.scaling = self.b[0].shape[1], scaling
        of_dora = [adapter.get(f"{name}.lora_magnitude_vector") for name in names]
        self.magnitude = None
        if of_dora[0] is not None:
            self.magnitude = nn.Parameter(torch.cat([m for m in of_dora if m is not None]))
            self.register_buffer("squares", self.weight.float().square().sum(-1))

    def factors(self) -> torch.Tensor:
        """c = m / ‖W + s·B·A‖, computed without B·A. The norm is a constant in backward."""
        with torch.no_grad():
            a, s = self.a.split(self.rank), self.scaling
            cross = torch.cat([
                (w @ x.T * b).float().sum(-1)
                for w, x, b in zip(self.weight.split([len(b) for b in self.b]), a, self.b, strict=True)
            ])  # fmt: skip
            square = torch.cat([(b @ (x @ x.T) * b).float().sum(-1) for x, b in zip(a, self.b, strict=True)])
            norm = (self.squares + 2 * s * cross + s * s * square).clamp_min(0).sqrt()
        return self.magnitude.float() / norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = F.linear(x, self.a) * self.scaling
        more = [F.linear(part, b) for part, b in zip(u.split(self.rank, -1), self.b, strict=True)]
        low = more[0] if len(more) == 1 else torch.cat(more, -1)
        if self.magnitude is None:
            return F.linear(x, self.weight, self.bias) + low
        y = (F.linear(x, self.weight) + low) * self.factors().to(x.dtype)
        return y if self.bias is None else y + self.bias


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """A decoder layer of Qwen2, Qwen3 or Llama."""

    make: Any = Adapted

    def __init__(self, raw: dict[str, Any], base: Tensors, adapter: Tensors, scaling: float) -> None:
        super().__init__()
        self.heads, self.keys, self.eps = raw["num_attention_heads"], raw["num_key_value_heads"], raw["rms_norm_eps"]
        self.size = raw.get("head_dim") or raw["hidden_size"] // self.heads

        def adapted(*names: str) -> Adapted:
            return self.make(base, adapter, list(names), scaling)

        self.qkv = adapted(*(f"self_attn.{name}_proj" for name in "qkv"))
        self.out = adapted("self_attn.o_proj")
        self.gate_up = adapted("mlp.gate_proj", "mlp.up_proj")
        self.down = adapted("mlp.down_proj")
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            self.register_buffer(name.rpartition(".")[2], base.get(f"{name}.weight"))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(normed(x, self.input_layernorm, self.eps)).view(rows, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.keys, self.keys), 1)
        if self.q_norm is not None:
            q, k = normed(q, self.q_norm, self.eps), normed(k, self.k_norm, self.eps)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(normed(x, self.post_attention_layernorm, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PieceLoss(torch.autograd.Function):
    """The summed cross-entropy of a piece of rows under a frozen head; forward computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, head).float()
        most = torch.logsumexp(logits, -1)
        right = logits.gather(1, labels[:, None])[:, 0]
        d = (logits - most[:, None]).exp()
        d = d - (torch.arange(head.shape[0], device=x.device)[None, :] == labels[:, None]).to(d.dtype)
        ctx.save_for_backward(d.to(x.dtype) @ head)
        return (most - right).sum()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (dx,) = ctx.saved_tensors
        return dx * g.to(dx.dtype), None, None


class Lean(nn.Module):
    """A model whose adapters alone are parameters."""

    def __init__(
        self, job: dict[str, Any], raw: dict[str, Any], base: Tensors, adapter: Tensors, scaling: float
    ) -> None:
        super().__init__()
        self.words, self.eps, count = job["side"].split("-"), raw["rms_norm_eps"], raw["num_hidden_layers"]

        def of_layer(i: int, tensors: Tensors) -> Tensors:
            start = f"model.layers.{i}."
            return {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}

        self.register_buffer("embed", base["model.embed_tokens.weight"])
        self.register_buffer("head", base.get("lm_head.weight", base["model.embed_tokens.weight"]))
        self.register_buffer("norm", base["model.norm.weight"])
        self.blocks = nn.ModuleList(Block(raw, of_layer(i, base), of_layer(i, adapter), scaling) for i in range(count))
        size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        where = self.embed.device
        inverse = raw["rope_theta"] ** -(torch.arange(0, size, 2, device=where).float() / size)
        angles = torch.outer(torch.arange(job["length"], device=where).float(), inverse)
        self.register_buffer("cos", angles.cos().to(self.embed.dtype))
        self.register_buffer("sin", angles.sin().to(self.embed.dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.embed)
        for block in self.blocks:
            if "ckpt" in self.words:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        x, labels = normed(x, self.norm, self.eps)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        if "chunk" not in self.words:
            return F.cross_entropy(F.linear(x, self.head).float(), labels)
        pieces = zip(x.split(PIECE), labels.split(PIECE), strict=True)
        return torch.stack([PieceLoss.apply(part, self.head, right) for part, right in pieces]).sum() / labels.numel()


# --- Steps ------------------------------------------------------------------------------------------------------------


def made(job: dict[str, Any], raw: dict[str, Any]) -> nn.Module:
    """The recipe's model with the adapter of the job's folder, which alone is trained."""
    folder, dtype = Path(job["folder"]), getattr(torch, job["dtype"])
    if job["side"].startswith("lean"):
        base = {
            name: x.to(job["device"], dtype)
            for file in sorted((folder / "base").glob("*.safetensors"))
            for name, x in load_file(file).items()
        }
        stored = load_file(folder / "adapter" / "adapter_model.safetensors")
        adapter = {
            name.removeprefix(PREFIX): x.to(job["device"], torch.float32 if "magnitude" in name else dtype)
            for name, x in stored.items()
        }
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        return Lean(job, raw, base, adapter, config["lora_alpha"] / config["r"])
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    model = model.to(job["device"])
    if "ckpt" in job["side"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


class OpenedSteps:
    """A recipe's model and its steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.on_gpu = job, job["device"] != "cpu"
        torch.set_float32_matmul_precision("high")
        raw = json.loads((Path(job["folder"]) / "base" / "config.json").read_text())
        raw["rope_theta"] = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
        self.model = made(job, raw).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0, fused=self.on_gpu)
        words, self.run = job["side"].split("-"), self.model
        if "graphs" in words:
            self.run = torch.compile(self.model, mode="reduce-overhead")
        elif "compile" in words:
            self.run = torch.compile(self.model)
        self.ids = torch.from_numpy(tokens(job)).to(job["device"])
        self.count, self.taken = 0, []

    def step(self) -> None:
        """Take a step and wait for its end."""
        ids = self.ids[self.count % len(self.ids)]
        self.count += 1
        if self.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.run(ids) if self.job["side"].startswith("lean") else self.run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken.append(loss.detach().clone())
        if self.on_gpu:
            torch.cuda.synchronize()

    def losses(self) -> list[float]:
        """The losses of the steps since the last call."""
        found, self.taken = [float(x) for x in self.taken], []
        return found

    def forget_peak(self) -> None:
        """Forget the peak of the first steps, in which torch.compile tries kernels."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, Any]:
        """Bytes of peak and reserved memory. Only the latter includes the memory of CUDA graphs."""
        if not self.on_gpu:
            return {"peak": 0, "reserved": 0}
        return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    given, begun = json.loads(sys.argv[1]), time.perf_counter()
    serve(OpenedSteps(given), given, begun)

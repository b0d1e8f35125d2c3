"""The torch side of cpu_training.py: the quickstart's model, eager, on the CPU. That script starts it."""

from __future__ import annotations

import json
import math
import resource
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

ROPE_BASE = 10000.0


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.split = (heads, kv_heads, kv_heads)
        self.size = size
        self.qkv = nn.Linear(hidden, sum(self.split) * size, bias=False)
        self.out = nn.Linear(heads * size, hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, -1, self.size).transpose(1, 2).split(self.split, dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).reshape(b, t, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention = Attention(hidden, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, c: dict, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=1e-6)
        size = c["head_dim"]
        angles = torch.outer(torch.arange(length).float(), ROPE_BASE ** (-torch.arange(0, size, 2).float() / size))
        self.cos, self.sin = angles.cos(), angles.sin()
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    tokens = torch.from_numpy(np.load(job["tokens"]).astype(np.int64))
    b, t = job["batch_size"], job["seq_len"]
    model = Model(job["model"], t)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times, losses = [], []
    for _ in range(job["warmup"] + job["steps"]):
        begun = time.perf_counter()
        starts = torch.randint(len(tokens) - t - 1, (b,))
        rows = torch.stack([tokens[s : s + t + 1] for s in starts])
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
        losses.append(loss.item())
    assert math.isfinite(losses[-1]) and losses[-1] < losses[0], "the peer does not train"
    print(
        json.dumps(
            {
                "step_ms": [1000 * x for x in times[job["warmup"] :]],
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "parameters": sum(p.numel() for p in model.parameters()),
                "last_loss": losses[-1],
                "version": f"torch {torch.__version__}",
            }
        )
    )


if __name__ == "__main__":
    main()

"""The torch side of generation.py: a lean decoder with packed weights whose step is one CUDA graph.

Keys and values are one tensor of fixed size. Token and position are on the device, and the host reads the tokens at the
end. `lean-graph` captures the plain step, `lean-compile` the step after torch.compile. This file does not use Genesis.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

Tensors = dict[str, torch.Tensor]
TEMPERATURE, TOP_P, TOP_K = 0.8, 0.95, 50
CHUNK = 1024  # tokens of a prompt in one pass, which limits the scores in memory


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Decoder:
    """Qwen2, Qwen3 or Llama with packed weights."""

    def __init__(self, raw: dict[str, Any], base: Tensors) -> None:
        self.heads, self.keys, self.eps = raw["num_attention_heads"], raw["num_key_value_heads"], raw["rms_norm_eps"]
        self.size, self.layers = raw.get("head_dim") or raw["hidden_size"] // self.heads, []
        for i in range(raw["num_hidden_layers"]):
            own = {
                k.removeprefix(f"model.layers.{i}."): x for k, x in base.items() if k.startswith(f"model.layers.{i}.")
            }
            packed = {
                "qkv": [f"self_attn.{n}_proj" for n in "qkv"],
                "out": ["self_attn.o_proj"],
                "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
                "down": ["mlp.down_proj"],
            }
            layer: dict[str, Any] = {}
            for name, parts in packed.items():
                layer[name] = torch.cat([own[f"{part}.weight"] for part in parts])
                biases = [own[f"{part}.bias"] for part in parts if f"{part}.bias" in own]
                layer[f"{name}_bias"] = torch.cat(biases) if biases else None
            for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                layer[name.rpartition(".")[2]] = own.get(f"{name}.weight")
            self.layers.append(layer)
        self.embed, self.norm = base["model.embed_tokens.weight"], base["model.norm.weight"]
        self.head, self.theta = base.get("lm_head.weight", self.embed), raw["rope_theta"]

    def room(self, batch: int, capacity: int) -> None:
        """Allocate the buffers of a batch."""
        device, dtype = self.embed.device, self.embed.dtype
        shape = (len(self.layers), 2, batch, self.keys, capacity, self.size)
        self.cache = torch.zeros(shape, device=device, dtype=dtype)
        inverse = self.theta ** -(torch.arange(0, self.size, 2, device=device).float() / self.size)
        angles = torch.outer(torch.arange(capacity, device=device).float(), inverse)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.places = torch.arange(capacity, device=device)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.found = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)

    def hidden(self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Any) -> torch.Tensor:
        """The last layer's result `[B, T, H]`; attend(layer, q, k, v) of `[B, heads, T, D]`."""
        x = F.embedding(ids, self.embed)
        rows, length = ids.shape
        for i, w in enumerate(self.layers):
            qkv = F.linear(normed(x, w["input_layernorm"], self.eps), w["qkv"], w["qkv_bias"])
            q, k, v = qkv.view(rows, length, -1, self.size).transpose(1, 2).split((self.heads, self.keys, self.keys), 1)
            if w["q_norm"] is not None:
                q, k = normed(q, w["q_norm"], self.eps), normed(k, w["k_norm"], self.eps)
            o = attend(i, rotated(q, cos, sin), rotated(k, cos, sin), v)
            x = x + F.linear(o.transpose(1, 2).reshape(rows, length, -1), w["out"], w["out_bias"])
            gate, up = F.linear(normed(x, w["post_attention_layernorm"], self.eps), w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return x

    def prefill(self, ids: torch.Tensor, sampled: bool) -> None:
        """Process the prompts chunk by chunk, and draw the first tokens."""
        for begin in range(0, ids.shape[1], CHUNK):
            part = ids[:, begin : begin + CHUNK]
            end = begin + part.shape[1]

            def attend(
                i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int = begin, end: int = end
            ) -> torch.Tensor:
                self.cache[i, 0, :, :, begin:end], self.cache[i, 1, :, :, begin:end] = k, v
                if not begin:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                seen = self.places[:end] <= self.places[begin:end, None]
                whole = self.cache[i, :, :, :, :end]
                return F.scaled_dot_product_attention(q, whole[0], whole[1], attn_mask=seen, enable_gqa=True)

            x = self.hidden(part, self.cos[begin:end], self.sin[begin:end], attend)
        self.at.fill_(ids.shape[1])
        self._next(x[:, -1:], sampled)

    def _next(self, x: torch.Tensor, sampled: bool) -> None:
        logits = F.linear(normed(x, self.norm, self.eps), self.head)[:, -1]
        if sampled:
            best, order = (logits.float() / TEMPERATURE).topk(TOP_K)
            p = best.softmax(-1)
            p = torch.where(p.cumsum(-1) - p < TOP_P, p, 0.0)
            drawn = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
            self.token.copy_(order.gather(1, drawn))
        else:
            self.token.copy_(logits.argmax(-1, keepdim=True))
        self.found.index_copy_(1, self.at, self.token)

    def step(self, sampled: bool) -> None:
        """Replace the token at position `at` with the next one, on the device."""
        hidden = torch.where(self.places <= self.at, 0.0, float("-inf")).to(self.embed.dtype)  # [S]
        cos, sin = self.cos.index_select(0, self.at), self.sin.index_select(0, self.at)
        rows = len(self.token)

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache[i, 0].index_copy_(2, self.at, k)
            self.cache[i, 1].index_copy_(2, self.at, v)
            grouped = q.reshape(rows, self.keys, -1, self.size) * self.size**-0.5
            scores = torch.matmul(grouped, self.cache[i, 0].transpose(-1, -2)).float() + hidden
            o = torch.matmul(scores.softmax(-1).to(q.dtype), self.cache[i, 1])
            return o.reshape(rows, self.heads, 1, self.size)

        x = self.hidden(self.token, cos, sin, attend)
        self.at.add_(1)
        self._next(x, sampled)


class Opened:
    """A model, and the step of its previous case as a graph."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_float32_matmul_precision("high")
        torch.set_grad_enabled(False)
        folder = Path(job["folder"]) / "base"
        self.job, self.raw = job, json.loads((folder / "config.json").read_text())
        self.raw["rope_theta"] = self.raw.get("rope_theta") or self.raw["rope_parameters"]["rope_theta"]
        dtype = getattr(torch, job["dtype"])
        files = sorted(folder.glob("*.safetensors"))
        base = {name: x.to(job["device"], dtype) for file in files for name, x in load_file(file).items()}
        self.decoder, self.key, self.replay = Decoder(self.raw, base), (0, 0, ""), lambda: None

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """The times of a case. A call before it captures the graph of a new shape."""
        key = case["batch"], case["prompt"] + case["new"], case["draw"]
        if key != self.key:
            self.key, self.replay = key, lambda: None
            self.decoder.room(case["batch"], key[1])
            self.replay = self._captured(case["draw"] == "sampled")
            self.run(case)
        return self.run(case)

    def _captured(self, sampled: bool) -> Any:
        def step() -> None:
            self.decoder.step(sampled)

        called = torch.compile(step) if "compile" in self.job["side"] else step
        if self.job["device"] == "cpu":
            return called
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                called()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            called()
        return graph.replay

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Generate once; return times in seconds and tokens."""
        on_gpu = self.job["device"] != "cpu"
        rng = np.random.default_rng(case["batch"])
        ids = torch.from_numpy(rng.integers(0, self.raw["vocab_size"], (case["batch"], case["prompt"])))
        ids, ends = ids.to(self.job["device"]), []
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        self.decoder.prefill(ids, case["draw"] == "sampled")
        self.decoder.token.cpu()
        first = time.perf_counter() - begun
        for _ in range(case["new"] - 1):
            self.replay()
            if on_gpu:
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
        tokens = self.decoder.found[:, case["prompt"] : case["prompt"] + case["new"]].cpu().tolist()
        whole = time.perf_counter() - begun
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]
        token = statistics.median(times) / 1e3 if times else (whole - first) / (case["new"] - 1)
        return {"token": token, "whole": whole, "first": first, "tokens": tokens}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    opened = Opened(given)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(opened.answer(json.loads(line))), flush=True)

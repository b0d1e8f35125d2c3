"""Training steps in torch, for a comparison: a model written for speed, AdamW and clipping. `torch_ops.py` runs it.

One process compiles the model with torch.compile. Several processes compile it layer by layer, in
DistributedDataParallel. In bf16 the weights stay float32 and compute runs under autocast.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import time
from typing import Any

WARM_UP = 5  # steps; the first of them compile
DRAWN = 4  # different batches, which steps take in turn
LR, MAX_NORM = 1e-5, 1.0
LIMIT_S, BUCKET_MB = 300.0, 64  # seconds that a process waits for another; size of a bucket of gradients


def lean_model(torch: Any, raw: dict[str, Any], length: int) -> Any:
    """A model as an engineer would write it for torch.compile: one matmul for q, k and v, one for gate and up.

    Args:
        raw: sizes under Hugging Face's names; `qkv_bias` adds a bias to queries, keys and values, `head_norms` a norm
            to the heads of queries and keys.
    """
    nn, functional = torch.nn, torch.nn.functional
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    keys, size, eps = raw["num_key_value_heads"], raw["head_dim"], raw["rms_norm_eps"]
    wide = 2 * raw["intermediate_size"]

    def normed(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    class Layer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(hidden, (heads + 2 * keys) * size, bias=raw["qkv_bias"])
            self.out = nn.Linear(heads * size, hidden, bias=False)
            self.gate_up = nn.Linear(hidden, wide, bias=False)
            self.down = nn.Linear(wide // 2, hidden, bias=False)
            ones = [hidden, hidden, *([size, size] if raw["head_norms"] else [])]
            self.norms = nn.ParameterList(torch.ones(n) for n in ones)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            rows, tokens, _ = x.shape
            parts = self.qkv(normed(x, self.norms[0])).view(rows, tokens, -1, size).transpose(1, 2)
            q, k, v = parts.split((heads, keys, keys), 1)
            if raw["head_norms"]:
                q, k = normed(q, self.norms[2]), normed(k, self.norms[3])
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
            gate, up = self.gate_up(normed(x, self.norms[1])).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Lean(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(raw["vocab_size"], hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(raw["num_hidden_layers"]))
            self.norm = nn.Parameter(torch.ones(hidden))
            self.head = None if raw["tie_word_embeddings"] else nn.Linear(hidden, raw["vocab_size"], bias=False)
            inverse = raw["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
            angles = torch.outer(torch.arange(length).float(), inverse)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, ids: Any, labels: Any, dtype: Any) -> Any:
            x, cos, sin = self.embed(ids).to(dtype), self.cos.to(dtype), self.sin.to(dtype)
            for layer in self.layers:
                x = layer(x, cos, sin)
            logits = functional.linear(normed(x, self.norm), (self.head or self.embed).weight)
            return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    model = Lean()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02)
    return model


class Job:
    """A model that is trained on random tokens, by this process or by several with their own batches.

    Args:
        ranks: the number of this process (`rank`), the number of processes (`size`), and a file by which they find each
            other (`place`); None for one process.

    Attributes:
        facts: the number of parameters.
    """

    def __init__(
        self,
        torch: Any,
        device: str,
        config: dict[str, Any],
        batch: int,
        length: int,
        dtype: str,
        ranks: dict[str, Any] | None = None,
    ) -> None:
        self.torch, self.device = torch, device
        self.kind, self.dtype = "cpu" if device == "cpu" else "cuda", getattr(torch, dtype)
        self.group: Any = None if ranks is None else self._joined(**ranks)
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device(device):  # a GPU draws random weights much faster
            self.model = lean_model(torch, config, length)
        self.model = self.model.to(device).train()
        self.run = self._shared() if self.group else torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.batches = itertools.cycle(
            torch.randint(0, config["vocab_size"], (DRAWN, batch, length + 1), device=device)
        )
        for _ in range(WARM_UP):
            self.sample()
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.facts = {"parameters": sum(p.numel() for p in self.model.parameters())}

    def _joined(self, rank: int, size: int, place: str) -> Any:
        group = importlib.import_module("torch.distributed")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        if group.is_initialized():  # by the case before
            group.destroy_process_group()
        limit, library = datetime.timedelta(seconds=LIMIT_S), "gloo" if self.kind == "cpu" else "nccl"
        group.init_process_group(library, init_method=f"file://{place}", rank=rank, world_size=size, timeout=limit)
        return group

    def _shared(self) -> Any:
        """The model in DistributedDataParallel. Compiled layers yield their gradients one after the other."""
        where: dict[str, Any] = {}
        if self.kind == "cuda":  # comparisons on CPUs leave the layers uncompiled
            where = {"device_ids": [self.torch.cuda.current_device()]}
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        wrapped = importlib.import_module("torch.nn.parallel").DistributedDataParallel
        return wrapped(self.model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=BUCKET_MB, **where)

    def sample(self) -> float:
        torch, ids = self.torch, next(self.batches)
        if self.group is not None:
            self.group.barrier()
        self._wait()
        begun = time.perf_counter()
        x, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            loss = self.run(x, labels, self.dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.kind == "cuda":
            self.torch.cuda.synchronize()

    @property
    def peak(self) -> int | None:
        """The most memory that was allocated at one time; None on the CPU."""
        return None if self.kind == "cpu" else int(self.torch.cuda.max_memory_allocated())

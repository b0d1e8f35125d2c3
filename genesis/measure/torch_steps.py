"""Training steps in torch, for a comparison: a recipe's model, AdamW, clipping. `torch_ops.py` runs it.

Recipes: `eager` is Hugging Face's model unchanged, `compile` the same under torch.compile, `lean` a model written for
speed under torch.compile. For several processes, `ddp` is the lean model, compiled layer by layer, in
DistributedDataParallel, and `fsdp2` the same, sharded layer by layer. In bf16 the weights stay float32 and compute runs
under autocast.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

RECIPES = ("eager", "compile", "lean")
RANK_RECIPES = ("ddp", "fsdp2")  # for several processes
WARM_UP = 5  # steps; the first of them compile
DRAWN = 4  # different batches, which steps take in turn
LR, MAX_NORM = 1e-5, 1.0
LIMIT_S, BUCKET_MB = 300.0, 64  # seconds that a process waits for another; size of a bucket of gradients

# --- Models -----------------------------------------------------------------------------------------------------------


def _hugging_face(raw: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """The model that transformers builds from a config.json, in float32, and its loss."""
    transformers = importlib.import_module("transformers")
    kept = {name: value for name, value in raw.items() if name not in ("model_type", "dtype", "torch_dtype")}
    config = transformers.AutoConfig.for_model(raw["model_type"], **{**kept, "use_cache": False})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, lambda run, ids: run(input_ids=ids, labels=ids).loss


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


# --- Steps ------------------------------------------------------------------------------------------------------------


class Job:
    """A model that is trained on random tokens, by this process or by several with batches of their own.

    Args:
        ranks: of several processes, the number of this one (`rank`), of all (`size`), and a file where they find each
            other (`place`).

    Attributes:
        facts: the number of parameters, and the seconds of the first steps, which compile.
    """

    def __init__(
        self,
        torch: Any,
        device: str,
        recipe: str,
        config: dict[str, Any],
        batch: int,
        length: int,
        dtype: str,
        ranks: dict[str, Any] | None = None,
    ) -> None:
        self.torch, self.device, self.recipe = torch, device, recipe
        self.kind, self.dtype = "cpu" if device == "cpu" else "cuda", getattr(torch, dtype)
        self.group: Any = None if ranks is None else self._joined(**ranks)
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.loss: Callable[..., Any] | None = None
        with torch.device(device):  # a GPU draws random weights much faster
            if recipe in ("lean", *RANK_RECIPES):
                self.model = lean_model(torch, config, length)
            else:
                self.model, self.loss = _hugging_face(config)
        self.model = self.model.to(device).train()
        self.run = self.model if recipe == "eager" else self._shared() if self.group else torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.batches = itertools.cycle(
            torch.randint(0, config["vocab_size"], (DRAWN, batch, length + 1), device=device)
        )
        begun = time.perf_counter()
        for _ in range(WARM_UP):
            self.sample()
        warm = time.perf_counter() - begun
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.facts = {"parameters": sum(p.numel() for p in self.model.parameters()), "warm_up": warm}

    def _joined(self, rank: int, size: int, place: str) -> Any:
        """The group of all processes."""
        group = importlib.import_module("torch.distributed")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        if group.is_initialized():  # by the case before
            group.destroy_process_group()
        limit, library = datetime.timedelta(seconds=LIMIT_S), "gloo" if self.kind == "cpu" else "nccl"
        group.init_process_group(library, init_method=f"file://{place}", rank=rank, world_size=size, timeout=limit)
        return group

    def _shared(self) -> Any:
        """The model with exchanges around it. Layers are compiled one by one, so that gradients arrive one by one."""
        torch = self.torch
        if self.kind == "cuda":  # comparisons on CPUs leave the layers as they are
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        if self.recipe == "ddp":
            wrapped = importlib.import_module("torch.nn.parallel").DistributedDataParallel
            where = {} if self.kind == "cpu" else {"device_ids": [torch.cuda.current_device()]}
            return wrapped(
                self.model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=BUCKET_MB, **where
            )
        fsdp, size = importlib.import_module("torch.distributed.fsdp"), self.group.get_world_size()
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(self.kind, (size,))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for each in (*self.model.layers, self.model):
            fsdp.fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return self.model

    def sample(self) -> float:
        """Take a step, and return its seconds."""
        torch, ids = self.torch, next(self.batches)
        if self.group is not None:
            self.group.barrier()
        self._wait()
        begun = time.perf_counter()
        x, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        is_mixed = self.dtype is torch.bfloat16 and self.recipe != "fsdp2"
        with torch.autocast(self.kind, torch.bfloat16, enabled=is_mixed):
            loss = self.run(x, labels, self.dtype) if self.loss is None else self.loss(self.run, x)
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

"""Training steps in torch, as a peer takes them: a recipe's model, AdamW, clipping. Run by `torch_ops.py`.

Recipes: `eager` is Hugging Face's model as it is, `compile` the same under torch.compile, `lean` a model written for
speed under torch.compile. In bf16 weights stay float32 and compute runs under autocast. Of several processes: `ddp` is
the lean model, compiled layer by layer, in DistributedDataParallel; `fsdp2` the same, sharded layer by layer.
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
RANK_RECIPES = ("ddp", "fsdp2")  # of several processes, around the lean model
WARM_UP = 5  # steps: of them the first compile
DRAWN = 4  # batches that differ; steps take them in turn
LR, MAX_NORM = 1e-5, 1.0
LIMIT_S, BUCKET_MB = 300.0, 64  # how long a process waits for another; of a bucket of gradients

# --- Models -----------------------------------------------------------------------------------------------------------


def _hugging_face(raw: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """transformers' model of a config.json, in float32, and its loss."""
    transformers = importlib.import_module("transformers")
    kept = {name: value for name, value in raw.items() if name not in ("model_type", "dtype", "torch_dtype")}
    config = transformers.AutoConfig.for_model(raw["model_type"], **{**kept, "use_cache": False})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, lambda run, ids: run(input_ids=ids, labels=ids).loss


def lean_model(torch: Any, raw: dict[str, Any], length: int) -> Any:
    """What a strong engineer would give torch.compile: one matmul for q, k and v, one for gate and up, no cache.

    Args:
        raw: sizes under Hugging Face's names, and whether queries, keys and values have a bias (`qkv_bias`) and query
            and key heads a norm (`head_norms`).
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
    """A model that is trained on random tokens.

    Attributes:
        facts: how many parameters it has, and the seconds of the first steps, which compile.
    """

    def __init__(
        self, torch: Any, device: str, recipe: str, config: dict[str, Any], batch: int, length: int, dtype: str
    ) -> None:
        self.torch, self.device, self.recipe = torch, device, recipe
        self.dtype = getattr(torch, dtype)
        torch._dynamo.reset()
        torch.manual_seed(0)
        loss: Callable[..., Any] | None = None
        with torch.device(device):  # where random weights are made: a processor takes long
            if recipe in ("lean", *RANK_RECIPES):
                self.model = lean_model(torch, config, length)
            else:
                self.model, loss = _hugging_face(config)
        self.model = self.model.to(device).train()
        self.loss = loss
        self.run = self.spread()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        drawn = torch.randint(0, config["vocab_size"], (DRAWN, batch, length + 1), device=device)
        self.batches = itertools.cycle(drawn)
        begun = time.perf_counter()
        for _ in range(WARM_UP):
            self.step()
        warm = time.perf_counter() - begun
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self.facts = {"parameters": sum(p.numel() for p in self.model.parameters()), "warm_up": warm}

    def spread(self) -> Any:
        """What a step calls: the model, compiled or not."""
        return self.model if self.recipe == "eager" else self.torch.compile(self.model)

    def meet(self) -> None:
        """Wait for the other processes, if there are some."""

    def step(self) -> float:
        """Seconds of one step."""
        torch, ids = self.torch, next(self.batches)
        self.meet()
        self._wait()
        begun = time.perf_counter()
        x, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        kind = "cpu" if self.device == "cpu" else "cuda"
        with torch.autocast(kind, torch.bfloat16, enabled=self.dtype is torch.bfloat16 and self.recipe != "fsdp2"):
            loss = self.run(x, labels, self.dtype) if self.loss is None else self.loss(self.run, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def sampler(self, what: str) -> Callable[[], float]:
        """What takes a step and gives its seconds."""
        return self.step

    def noted(self) -> dict[str, Any]:
        """The most memory that was allocated at one time; None on the CPU."""
        return {"peak": None if self.device == "cpu" else self.torch.cuda.max_memory_allocated()}


class SharedJob(Job):
    """The same on several processes, each of which has batches of its own.

    Args:
        ranks: which this is (`rank`), of how many (`size`), and a file in which they find each other (`place`).
    """

    def __init__(self, torch: Any, device: str, ranks: dict[str, Any], **job: Any) -> None:
        self.group, self.size = importlib.import_module("torch.distributed"), ranks["size"]
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        if self.group.is_initialized():  # of the case before
            self.group.destroy_process_group()
        self.group.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{ranks['place']}",
            rank=ranks["rank"],
            world_size=ranks["size"],
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        super().__init__(torch, device, **job)

    def spread(self) -> Any:
        """The model around which processes exchange; its layers are compiled, so that gradients arrive one by one."""
        torch, kind = self.torch, "cpu" if self.device == "cpu" else "cuda"
        if kind == "cuda":  # gloo's CPUs compare what is not compiled
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        if self.recipe == "ddp":
            wrapped = importlib.import_module("torch.nn.parallel").DistributedDataParallel
            where = {} if kind == "cpu" else {"device_ids": [torch.cuda.current_device()]}
            return wrapped(
                self.model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=BUCKET_MB, **where
            )
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(kind, (self.size,))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for each in (*self.model.layers, self.model):
            fsdp.fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return self.model

    def meet(self) -> None:
        """Wait for all."""
        self.group.barrier()


def opened(torch: Any, device: str, **job: Any) -> Job:
    """The job of a request."""
    return (SharedJob if "ranks" in job else Job)(torch, device, **job)

"""The peer's side of a comparison, run as a script: it answers questions about torch's times, one JSON line each.

    python torch_peer.py '{"work": "ops", "device": "cuda:0", "threads": null}'

It first prints torch's version, or the missing requirement. Then it answers each line of stdin with a line: `open`
builds a job, `measure` samples it for a while (`seconds`) or a number of times (`count`), `close` forgets it. If a job
fails, the answer is its error. A job is a training step, or an op by its torch path or its key in `CALLS`.
"""

from __future__ import annotations

import base64
import datetime
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

WALL_SAMPLE, MOST_CALLS = 1e-3, 1000  # least seconds of a sample by the wall; calls in it at most
REPLAY, GRAPH_CALLS = 1e-3, (4, 100)  # least seconds of a replay; calls in a graph at least and at most
LEAST_SAMPLES = 5
WARM_UP = 5  # steps; the first of them compile
DRAWN = 4  # different batches, which steps take in turn
LR, MAX_NORM = 1e-5, 1.0
LIMIT_S, BUCKET_MB = 300.0, 64  # seconds that a process waits for another; size of a bucket of gradients

Call = Callable[..., Any]  # f(torch, attributes, *inputs)


def _named(t: Any, path: str, a: dict[str, Any]) -> Call:
    """The function at `path`, such as "torch.nn.functional.silu", on the same operands and dimensions."""
    function = attrgetter(path.partition(".")[2])(t)
    dims = [a[name] for name in ("axes", "axis", "dim") if a.get(name) is not None]
    return lambda t, a, *x: function(*x, *dims)


def _attention(t: Any, a: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    call = t.nn.functional.scaled_dot_product_attention
    return call(*heads, is_causal=True, scale=a["scale"]).transpose(1, 2)


def _rotated(t: Any, x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return t.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _head_loss(t: Any, a: dict[str, Any], x: Any, weight: Any, labels: Any) -> Any:
    """The mean loss. Its gradients are computed with it, as in Genesis."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with t.enable_grad():
        logits = t.nn.functional.linear(x, weight).float()
        loss = t.nn.functional.cross_entropy(logits, labels, ignore_index=a["ignore_index"])
        t.autograd.grad(loss, (x, weight))
    return loss.detach()


# Ops whose call in torch has another form. The record names the others (`Op.torch`).
CALLS: dict[str, Call] = {
    "clamp": lambda t, a, x, low, high: t.clamp(x, low, high),
    "cast": lambda t, a, x: x.to(getattr(t, a["dtype"])),
    "copy": lambda t, a, x: t.clone(x, memory_format=t.contiguous_format),
    "gelu_tanh": lambda t, a, x: t.nn.functional.gelu(x, approximate="tanh"),
    "var": lambda t, a, x: t.var(x, dim=a["axes"], correction=a["correction"]),
    "std": lambda t, a, x: t.std(x, dim=a["axes"], correction=a["correction"]),
    "norm": lambda t, a, x: t.linalg.vector_norm(x, a["p"], dim=a["axes"]),
    "logsumexp": lambda t, a, x: t.logsumexp(x, tuple(range(x.ndim)) if a["axes"] is None else a["axes"]),
    "topk": lambda t, a, x: t.topk(x, a["k"], dim=a["axis"]),
    "rms_norm": lambda t, a, x, w: t.nn.functional.rms_norm(x, w.shape, w, a["eps"]),
    "layer_norm": lambda t, a, x, w, b: t.nn.functional.layer_norm(x, w.shape, w, b, a["eps"]),
    "attention": _attention,
    "attention_packed": lambda t, a, x: _attention(t, a, *x.chunk(3, 2)),
    "rope": lambda t, a, x, cos, sin: _rotated(t, x, cos[:, None], sin[:, None]),
    "swiglu": lambda t, a, gate, up: t.nn.functional.silu(gate) * up,
    "cross_entropy": lambda t, a, *x: t.nn.functional.cross_entropy(*x, reduction="none"),
    "linear_cross_entropy": _head_loss,
}


class Op:
    """A job: an op, by its `path` in torch or `CALLS`, on inputs like Genesis's, in replays of a graph or eagerly."""

    peak = None

    def __init__(
        self, torch: Any, device: str, op: str, path: str, inputs: list[Any], attrs: dict[str, Any], in_graph: bool
    ) -> None:
        self.torch, self.device = torch, device
        values = [self._input(x) if isinstance(x, dict) else x for x in inputs]
        call, given = CALLS.get(op) or _named(torch, path, attrs), {"device": device, **attrs}
        torch.set_grad_enabled(False)
        self.call: Callable[[], Any] = lambda: call(torch, given, *values)
        made = self.call()
        self.facts = {"shape": list((made if isinstance(made, torch.Tensor) else made[0]).shape)}
        if in_graph:
            self.sample = self._of_graph()
        else:
            self._timed(3)
            count = min(max(int(WALL_SAMPLE / self._timed(3)), 1), MOST_CALLS)
            self.sample = lambda: self._timed(count)

    def _input(self, x: dict[str, Any]) -> Any:
        """An input of the given shape and strides; its values are repeated as needed."""
        torch = self.torch
        some = torch.frombuffer(bytearray(base64.b64decode(x["values"])), dtype=getattr(torch, x["dtype"]))
        extent = 1 + sum((n - 1) * step for n, step in zip(x["shape"], x["strides"], strict=True))
        flat = some.to(self.device).repeat(-(-extent // len(some)))[:extent]
        return flat.as_strided(x["shape"], x["strides"])

    def _timed(self, count: int) -> float:
        wait = self.torch.cuda.synchronize if self.device != "cpu" else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(count):
            self.call()
        wait()
        return (time.perf_counter() - start) / count

    def _of_graph(self) -> Callable[[], float]:
        """Replays of a graph of so many calls that its start and end do not count."""
        torch = self.torch
        with torch.cuda.stream(torch.cuda.Stream()):
            self._timed(3)
            count = min(max(int(REPLAY / self._timed(10)), GRAPH_CALLS[0]), GRAPH_CALLS[1])
        graph, start, end = torch.cuda.CUDAGraph(), torch.cuda.Event(True), torch.cuda.Event(True)
        with torch.cuda.graph(graph):
            for _ in range(count):
                self.call()

        def sample() -> float:
            graph.replay()  # while it runs, the host launches the one that counts
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / count

        sample()
        return sample


def lean_model(torch: Any, raw: dict[str, Any], length: int) -> Any:
    """A model as an engineer would write it for torch.compile: one matmul for q, k and v, one for gate and up."""
    nn, functional = torch.nn, torch.nn.functional
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    keys, size, eps = raw["num_key_value_heads"], raw["head_dim"], raw["rms_norm_eps"]
    wide = 2 * raw["intermediate_size"]

    def normed(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

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
            q, k = (_rotated(torch, each, cos, sin) for each in (q, k))
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


class Steps:
    """A job: training steps on random tokens, by this process or by several with their own batches, in DDP.

    One process compiles the model, and several compile it layer by layer. In bf16 the weights stay float32 and compute
    runs under autocast. `ranks` holds this process's number, their count, and the file through which they meet.
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
        self.torch, self.on_gpu = torch, device != "cpu"
        self.dtype, self.group = getattr(torch, dtype), None if ranks is None else self._joined(**ranks)
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device(device):  # a GPU draws random weights much faster
            self.model = lean_model(torch, config, length)
        self.model = self.model.to(device).train()
        self.run = self._shared() if self.group else torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        drawn = torch.randint(0, config["vocab_size"], (DRAWN, batch, length + 1), device=device)
        self.batches, self.facts = itertools.cycle(drawn), dict[str, Any]()
        for _ in range(WARM_UP):
            self.sample()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def _joined(self, rank: int, size: int, place: str) -> Any:
        group = importlib.import_module("torch.distributed")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        if group.is_initialized():  # by the previous case
            group.destroy_process_group()
        limit, library = datetime.timedelta(seconds=LIMIT_S), "nccl" if self.on_gpu else "gloo"
        group.init_process_group(library, init_method=f"file://{place}", rank=rank, world_size=size, timeout=limit)
        return group

    def _shared(self) -> Any:
        """The model in DistributedDataParallel. Compiled layers yield their gradients one by one."""
        where: dict[str, Any] = {}
        if self.on_gpu:  # comparisons on CPUs leave the layers uncompiled
            where = {"device_ids": [self.torch.cuda.current_device()]}
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        wrapped = importlib.import_module("torch.nn.parallel").DistributedDataParallel
        return wrapped(self.model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=BUCKET_MB, **where)

    def sample(self) -> float:
        torch, ids = self.torch, next(self.batches)
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        if self.group is not None:
            self.group.barrier()
        wait()
        begun = time.perf_counter()
        x, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            loss = self.run(x, labels, self.dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait()
        return time.perf_counter() - begun

    @property
    def peak(self) -> int | None:
        return int(self.torch.cuda.max_memory_allocated()) if self.on_gpu else None


def main() -> int:
    """Serve until stdin ends."""
    settings = json.loads(sys.argv[1])
    device, answers = settings["device"], os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr, not among the answers

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        say(missing=f"torch cannot be imported: {error}")
        return 3
    if device != "cpu" and not torch.cuda.is_available():
        say(missing=f"torch {torch.__version__} finds no GPU, and {device} was asked for")
        return 3
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    if device != "cpu":
        torch.cuda.set_device(device)
    say(version=str(torch.__version__))
    job: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        what, reply = request.pop("ask"), dict[str, Any]()
        if what != "measure":
            job = None  # its memory is freed before the next one is built
            if device != "cpu":
                torch.cuda.empty_cache()
        try:
            if what == "open":
                job = (Steps if settings["work"] == "steps" else Op)(torch, device, **request)
                reply = job.facts
            elif what == "measure":
                end, count, samples = (
                    time.perf_counter() + request.get("seconds", 0.0),
                    request.get("count"),
                    list[float](),
                )
                while len(samples) < (count or LEAST_SAMPLES) or (not count and time.perf_counter() < end):
                    samples.append(job.sample())
                reply = {"samples": samples, "peak": job.peak}
        except Exception as error:  # the peer's exceptions are answers
            lines = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
        say(**reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())

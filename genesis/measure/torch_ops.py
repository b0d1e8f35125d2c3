"""The peer's side of a comparison, run as a script: it answers questions about torch's times, one JSON line each.

    python torch_ops.py '{"work": "ops", "device": "cuda:0", "threads": null}'

It first prints torch's version, or the missing requirement. Then it answers each line of stdin with a line: `open`
builds a job, `measure` samples it for a while (`seconds`) or a number of times (`count`), `close` forgets it. If a job
fails, the answer is its error. The jobs here are ops: an op's record names it in torch, or `CALLS` calls it.
Jobs of training steps are in `torch_steps.py`.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WALL_SAMPLE, MOST_CALLS = 1e-3, 1000  # least seconds of a sample by the wall; calls in it at most
REPLAY, GRAPH_CALLS = 1e-3, (4, 100)  # least seconds of a replay; calls in a graph at least and at most
LEAST_SAMPLES = 5

Call = Callable[..., Any]  # f(torch, attributes, *inputs)


def _named(t: Any, path: str, a: dict[str, Any]) -> Call:
    """The function at `path`, such as "torch.nn.functional.silu", on the same operands and dimensions."""
    function = t
    for name in path.split(".")[1:]:
        function = getattr(function, name)
    dims = [a[name] for name in ("axes", "axis", "dim") if a.get(name) is not None]
    return lambda t, a, *x: function(*x, *dims)


def _attention(t: Any, a: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    call = t.nn.functional.scaled_dot_product_attention
    return call(*heads, is_causal=True, scale=a["scale"]).transpose(1, 2)


def _rotated(t: Any, a: dict[str, Any], x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
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
    "rope": _rotated,
    "swiglu": lambda t, a, gate, up: t.nn.functional.silu(gate) * up,
    "cross_entropy": lambda t, a, *x: t.nn.functional.cross_entropy(*x, reduction="none"),
    "linear_cross_entropy": _head_loss,
}


class Job:
    """An op on inputs like Genesis's.

    Args:
        path: torch's name of the op, where it is not in `CALLS`.
        in_graph: times replays of a CUDA graph instead of eager calls.

    Attributes:
        facts: the shape of the (first) result.
        sample: returns the seconds of a call.
    """

    peak = None

    def __init__(
        self, torch: Any, device: str, op: str, path: str, inputs: list[Any], attrs: dict[str, Any], in_graph: bool
    ) -> None:
        self.torch, self.device = torch, device
        values = [self._made(x) if isinstance(x, dict) else x for x in inputs]
        call, given = CALLS.get(op) or _named(torch, path, attrs), {"device": device, **attrs}
        torch.set_grad_enabled(False)
        self.call: Callable[[], Any] = lambda: call(torch, given, *values)
        made = self.call()
        self.facts = {"shape": list((made if isinstance(made, torch.Tensor) else made[0]).shape)}
        self.sample = self._of_graph() if in_graph else self._of_wall()

    def _made(self, x: dict[str, Any]) -> Any:
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

    def _of_wall(self) -> Callable[[], float]:
        self._timed(3)
        count = min(max(int(WALL_SAMPLE / self._timed(3)), 1), MOST_CALLS)
        return lambda: self._timed(count)

    def _of_graph(self) -> Callable[[], float]:
        """Replays of a graph of so many calls that its start and end do not count."""
        torch = self.torch
        with torch.cuda.stream(torch.cuda.Stream()):
            self._timed(3)
            count = min(max(int(REPLAY / self._timed(10)), GRAPH_CALLS[0]), GRAPH_CALLS[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                self.call()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)

        def sample() -> float:
            graph.replay()  # while it runs, the host launches the one that counts
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / count

        sample()
        return sample


def main() -> int:
    """Serve until stdin ends."""
    settings = json.loads(sys.argv[1])
    device, answers = settings["device"], os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr, not among the answers

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")

    torch: Any = None
    try:
        torch = importlib.import_module("torch")
        missing = f"torch {torch.__version__} finds no GPU, and {device} was asked for"
        missing = "" if device == "cpu" or torch.cuda.is_available() else missing
    except ImportError as error:
        missing = f"torch cannot be imported: {error}"
    if missing:
        say({"missing": missing})
        return 3
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    if device != "cpu":
        torch.cuda.set_device(device)
    sys.path.insert(0, str(Path(__file__).parent))
    opened = importlib.import_module("torch_steps").Job if settings["work"] == "steps" else Job
    say({"version": str(torch.__version__)})
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
                job = opened(torch, device, **request)
                reply = job.facts
            elif what == "measure":
                reply = {"samples": samples_of(job.sample, **request), "peak": job.peak}
        except Exception as error:  # the peer's exceptions are answers
            lines = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
        say(reply)
    return 0


def samples_of(sample: Callable[[], float], seconds: float = 0.0, count: int = 0) -> list[float]:
    """`count` samples; if `count` is 0, samples for `seconds`, at least `LEAST_SAMPLES`."""
    if count:
        return [sample() for _ in range(count)]
    end, found = time.perf_counter() + seconds, list[float]()
    while len(found) < LEAST_SAMPLES or time.perf_counter() < end:
        found.append(sample())
    return found


if __name__ == "__main__":
    sys.exit(main())

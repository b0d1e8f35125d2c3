"""What Genesis's ops are in torch: the name in their record, or a line in a table; and the timing of one call.

Run by `child.py`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

WALL_SAMPLE = 1e-3  # seconds that a sample by the clock on the wall lasts at least
MOST_CALLS = 1000
REPLAY = 1e-3  # seconds that a replay of a graph lasts at least
GRAPH_CALLS = (4, 100)  # held by a graph: at least and at most

Call = Callable[..., Any]  # f(torch, attributes, *inputs)

# --- The table --------------------------------------------------------------------------------------------------------


def _named(t: Any, path: str, a: dict[str, Any]) -> Call:
    """The function at `path`, such as "torch.nn.functional.silu", on the same operands and the same dimensions."""
    function = t
    for name in path.split(".")[1:]:
        function = getattr(function, name)
    dims = [a[name] for name in ("axes", "axis", "dim") if a.get(name) is not None]
    return lambda t, a, *x: function(*x, *dims)


def _product(t: Any, a: dict[str, Any], x: Any) -> Any:
    """One dimension after the other, as torch's takes one at a time."""
    dims = a["axes"]
    if dims is None:
        return t.prod(x)
    for dim in sorted([dims] if isinstance(dims, int) else dims, reverse=True):
        x = t.prod(x, dim)
    return x


def _dims(a: dict[str, Any], x: Any) -> Any:
    return tuple(range(x.ndim)) if a["axes"] is None else a["axes"]


def _functional(name: str, *args: Any, **settings: Any) -> Call:
    return lambda t, a, *x: getattr(t.nn.functional, name)(*x, *args, **settings)


def _aten(name: str, *args: Any, **settings: Any) -> Call:
    return lambda t, a, *x: getattr(t.ops.aten, name)(*x, *args, **settings)


def _attention(t: Any, a: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    call = t.nn.functional.scaled_dot_product_attention
    return call(*heads, is_causal=True, scale=a["scale"]).transpose(1, 2)


def _rotated(t: Any, a: dict[str, Any], x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return t.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _geglu(t: Any, a: dict[str, Any], x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return t.nn.functional.gelu(gate, approximate="tanh") * up


def _swiglu(t: Any, a: dict[str, Any], gate: Any, up: Any) -> Any:
    return t.nn.functional.silu(gate) * up


def _head_loss(t: Any, a: dict[str, Any], x: Any, weight: Any, labels: Any) -> Any:
    """The mean loss, and as here its gradients with it."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with t.enable_grad():
        logits = t.nn.functional.linear(x, weight).float()
        loss = t.nn.functional.cross_entropy(logits, labels, ignore_index=a["ignore_index"])
        t.autograd.grad(loss, (x, weight))
    return loss.detach()


# Ops whose call in torch has another form. Of the others the record says what torch calls them (`Op.torch`).
CALLS: dict[str, Call] = {
    "prod": _product,
    "sum_to_shape": lambda t, a, x: x.sum_to_size(a["shape"]),
    "clamp": lambda t, a, x, low, high: t.clamp(x, low, high),
    "cast": lambda t, a, x: x.to(getattr(t, a["dtype"])),
    "copy": lambda t, a, x: t.clone(x, memory_format=t.contiguous_format),
    "fill": lambda t, a: t.full(a["shape"], a["value"], dtype=getattr(t, a["dtype"]), device=a["device"]),
    "gelu_tanh": _functional("gelu", approximate="tanh"),
    "gelu_tanh_backward": _aten("gelu_backward", approximate="tanh"),
    "relu_backward": _aten("threshold_backward", 0),
    "var": lambda t, a, x: t.var(x, dim=a["axes"], correction=a["correction"]),
    "std": lambda t, a, x: t.std(x, dim=a["axes"], correction=a["correction"]),
    "norm": lambda t, a, x: t.linalg.vector_norm(x, a["p"], dim=a["axes"]),
    "logsumexp": lambda t, a, x: t.logsumexp(x, _dims(a, x)),
    "topk": lambda t, a, x: t.topk(x, a["k"], dim=a["axis"]),
    "rms_norm": lambda t, a, x, w: t.nn.functional.rms_norm(x, w.shape, w, a["eps"]),
    "layer_norm": lambda t, a, x, w, b: t.nn.functional.layer_norm(x, w.shape, w, b, a["eps"]),
    "attention": _attention,
    "attention_packed": lambda t, a, x: _attention(t, a, *x.chunk(3, 2)),
    "rope": _rotated,
    "swiglu": _swiglu,
    "swiglu_packed": lambda t, a, x: _swiglu(t, a, *x.chunk(2, -1)),
    "geglu_packed": _geglu,
    "cross_entropy": _functional("cross_entropy", reduction="none"),
    "linear_cross_entropy": _head_loss,
}

# --- One call ---------------------------------------------------------------------------------------------------------


class Job:
    """An op on inputs like Genesis's, forward and backward.

    Args:
        path: what torch calls it, where it is not in `CALLS`.

    Attributes:
        facts: the shape of the (first) result.
    """

    def __init__(
        self, torch: Any, device: str, op: str, path: str, inputs: list[Any], attrs: dict[str, Any], clock: str
    ) -> None:
        self.torch, self.device, self.clock = torch, device, clock
        values = [self._made(x) if isinstance(x, dict) else x for x in inputs]
        call, given = CALLS.get(op) or _named(torch, path, attrs), {"device": device, **attrs}
        stream = torch.cuda.Stream() if device != "cpu" else None
        self.stream = stream  # backward runs on the stream of forward: a graph of it must be captured there
        self.call: Callable[[], Any] = lambda: call(torch, given, *values)
        self.leaves = [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.samplers: dict[str, Callable[[], float]] = {}
        with self._on_stream(), torch.no_grad():
            made = self.call()
        first = made if isinstance(made, torch.Tensor) else made[0]
        self.facts = {"shape": list(first.shape)}

    def _made(self, x: dict[str, Any]) -> Any:
        """An input of the given shape and strides, its values repeated as often as needed."""
        torch = self.torch
        some = torch.frombuffer(bytearray(base64.b64decode(x["values"])), dtype=getattr(torch, x["dtype"]))
        extent = 1 + sum((n - 1) * step for n, step in zip(x["shape"], x["strides"], strict=True))
        flat = some.to(self.device).repeat(-(-extent // len(some)))[:extent]
        return flat.as_strided(x["shape"], x["strides"])

    def _on_stream(self) -> Any:
        return self.torch.cuda.stream(self.stream)  # nothing where there is none

    def sampler(self, what: str) -> Callable[[], float]:
        """What gives the seconds of a call, "forward" or "backward", time after time."""
        if what not in self.samplers:
            call = self._plain if what == "forward" else self._backward()
            self.samplers[what] = self._of_graph(call) if self.clock == "GPU" else self._of_wall(call)
        return self.samplers[what]

    def noted(self) -> dict[str, Any]:
        """What else an answer holds."""
        return {}

    def _plain(self) -> Any:
        with self.torch.no_grad():
            return self.call()

    def _backward(self) -> Callable[[], Any]:
        """The backward pass of one recorded call."""
        torch = self.torch
        for leaf in self.leaves:
            leaf.requires_grad_()
        with self._on_stream(), torch.enable_grad():
            made = self.call()
        tensors = made if isinstance(made, tuple) else (made,)
        outputs = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
        arriving = [torch.ones_like(x) for x in outputs]
        return lambda: torch.autograd.grad(outputs, self.leaves, arriving, retain_graph=True, allow_unused=True)

    def _wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def _timed(self, call: Callable[[], Any], count: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return (time.perf_counter() - start) / count

    def _of_wall(self, call: Callable[[], Any]) -> Callable[[], float]:
        self._timed(call, 3)
        count = min(max(int(WALL_SAMPLE / self._timed(call, 3)), 1), MOST_CALLS)
        return lambda: self._timed(call, count)

    def _of_graph(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Replays of a graph that holds so many calls that its start and end do not count."""
        torch = self.torch
        with self._on_stream():
            self._timed(call, 3)
            count = min(max(int(REPLAY / self._timed(call, 10)), GRAPH_CALLS[0]), GRAPH_CALLS[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(count):
                call()
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


def opened(torch: Any, device: str, **job: Any) -> Job:
    """The job of a request."""
    return Job(torch, device, **job)

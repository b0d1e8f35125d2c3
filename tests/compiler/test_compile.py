"""genesis.compile: results and gradients as eager, another trace for every change of what a function reads, errors."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import watching_launches
from genesis.compiler import explain, fuse, reset, source
from genesis.errors import DeviceError, GradientError, ShapeError, UsageError
from genesis.nn import functional as F
from tests.compiler.programs import WORLDS, compare

FACTOR = 2.0
TABLE = {"scale": 1.0}


def traces(compiled: Any) -> int:
    return sum(map(len, compiled.entries.values()))


def ramp(*shape: int, grad: bool = False) -> Any:
    values = np.linspace(-1, 2, math.prod(shape), dtype=np.float32).reshape(shape)
    return genesis.tensor(values).requires_grad_(grad)


def equal(a: Any, b: Any) -> bool:
    return bool((a == b).all())


def gradients(function: Any, x: Any) -> np.ndarray:
    """The gradients of the sum of a function's result, eager and compiled."""
    grads = []
    for each in (function, genesis.compile(function, fullgraph=True)):
        leaf = x.detach().requires_grad_()
        each(leaf).float().sum().backward()
        grads.append(leaf.grad.float().numpy(force=True))
    return np.stack(grads)


@pytest.mark.parametrize("first", range(0, 480, 60))
def test_random_programs_give_eager_results(first: int) -> None:
    for seed in range(first, first + 60):  # every program again in the same world, or after one of two changes
        worlds = WORLDS if first == 0 else (WORLDS[0], WORLDS[2 + seed % 3])
        assert compare(seed, "cpu", worlds) == ""


def test_random_programs_in_kernels() -> None:
    assert [text for seed in range(1000, 1020) if (text := compare(seed, "cuda", WORLDS[:2]))] == []


@pytest.mark.full
def test_random_programs_that_pass_over_rows_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((fuse, "ROW_LIMIT", 4), (source, "ROW_LIMIT", 4), (fuse, "LOOP_ROWS", 1),
                                (source, "LOOP_TILE", 32)):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert [text for seed in range(3000, 3012) if (text := compare(seed, "cuda", WORLDS[:2]))] == []


# --- Guards -----------------------------------------------------------------------------------------------------------


def test_one_trace_for_equal_calls() -> None:
    compiled = genesis.compile(lambda x, n: x * n)
    for _ in range(3):
        compiled(ramp(3, 4), 2)
    assert traces(compiled) == 1
    for change in (ramp(4, 3), ramp(3, 4).double(), ramp(4, 3).t(), ramp(3, 4, grad=True)):
        before = traces(compiled)
        assert equal(compiled(change, 2), change * 2)
        assert traces(compiled) == before + 1
    assert equal(compiled(ramp(3, 4), 3), ramp(3, 4) * 3)
    assert compiled(ramp(3, 4), 3.0).dtype is genesis.float32
    with genesis.no_grad():
        compiled(ramp(3, 4, grad=True), 2)
    assert traces(compiled) == 8


def test_a_global_a_cell_and_a_default_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = 1.0

    def shift(x: Any, table: dict[str, float] = TABLE) -> Any:
        return x * FACTOR + offset + table["scale"]

    compiled, x = genesis.compile(shift), ramp(5)
    assert equal(compiled(x), x * 2 + 1 + 1)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert equal(compiled(x), x * 3 + 1 + 1)
    offset = 5.0
    assert equal(compiled(x), x * 3 + 5 + 1)
    monkeypatch.setitem(TABLE, "scale", 7.0)
    assert equal(compiled(x), x * 3 + 5 + 7)
    monkeypatch.setitem(globals(), "FACTOR", 3)  # another type
    compiled(x)
    assert traces(compiled) == 5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 1.0
        self.powers = [1, 2]
        self.settings = SimpleNamespace(bias=0.5)
        self.register_buffer("shift", genesis.zeros(4))

    def forward(self, x: Any) -> Any:
        y = self.inner(x) * self.scale + self.shift + self.settings.bias
        for power in self.powers:
            y = y + y**power
        return y if self.training else -y


CHANGES = {
    "an attribute": lambda m: setattr(m, "scale", 2.0),
    "a list": lambda m: m.powers.append(3),
    "an item of a list": lambda m: m.powers.__setitem__(0, 4),
    "an attribute of an object": lambda m: setattr(m.settings, "bias", 3.0),
    "the mode": lambda m: m.eval(),
    "a parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(genesis.ones(4, 4))),
    "a buffer": lambda m: setattr(m, "shift", genesis.ones(4)),
    "a module": lambda m: setattr(m, "inner", nn.Linear(4, 4, bias=False)),
    "a frozen parameter": lambda m: m.inner.weight.requires_grad_(False),
    "a hook": lambda m: m.inner.register_forward_hook(lambda module, args, out: out * 2),
}
SAME_TRACE = {
    "values of a parameter": lambda m: m.inner.weight.data.mul_(2),
    "values of a buffer": lambda m: m.shift.add_(1),
    "the data of a parameter": lambda m: setattr(m.inner.weight, "data", genesis.ones(4, 4)),
}


@pytest.mark.parametrize("name", [*CHANGES, *SAME_TRACE])
def test_a_change_of_a_module_is_seen(name: str) -> None:
    genesis.manual_seed(0)
    module = Scaled()
    compiled, x = genesis.compile(module), ramp(3, 4)
    assert equal(compiled(x), module(x))
    with genesis.no_grad():
        (CHANGES | SAME_TRACE)[name](module)
    assert equal(compiled(x), module(x))
    assert traces(compiled._compiled) == (1 if name in SAME_TRACE else 2)
    assert not compiled._compiled.breaks


def test_a_module_is_compiled_in_place_and_copied() -> None:
    module, x = Scaled(), ramp(3, 4)
    want, names = module(x), list(module.state_dict())
    module.register_forward_hook(lambda m, args, out: out * 2)
    module.compile(fullgraph=True)
    other = copy.deepcopy(module)
    other.scale = 3.0
    assert equal(module(x), want * 2) and not equal(other(x), want * 2)
    assert [traces(m.forward) for m in (module, other)] == [1, 1] and list(other.state_dict()) == names
    both = copy.deepcopy(genesis.compile(module))
    assert both._compiled.function is both._orig_mod is not module and equal(both(x), want * 2)


def test_gradients_reach_parameters_and_frozen_ones_stay() -> None:
    genesis.manual_seed(0)
    module, x = Scaled(), ramp(3, 4, grad=True)
    module.inner.bias.requires_grad_(False)
    found = []
    for function in (module, genesis.compile(module)):
        for p in (*module.parameters(), x):
            p.grad = None
        for _ in range(2):  # gradients accumulate
            function(x).square().sum().backward()
        found.append([x.grad, module.inner.weight.grad])
        assert module.inner.bias.grad is None
    assert all(equal(a, b) for a, b in zip(*found, strict=True))


def test_a_change_in_place_reaches_the_argument_and_a_buffer() -> None:
    count = genesis.zeros(3)

    def step(p: Any, g: Any) -> Any:
        count.add_(1)
        p.mul_(0.9).sub_(g, alpha=0.1)
        return p.sum()

    compiled, p, g = genesis.compile(step), ramp(3), ramp(3)
    with genesis.no_grad():
        for _ in range(3):
            compiled(p, g)
        q = ramp(3)
        for _ in range(3):
            q.mul_(0.9).sub_(g, alpha=0.1)
    assert equal(p, q)
    assert count.tolist() == [3, 3, 3]
    assert traces(compiled) == 1


def test_dropout_draws_what_eager_draws() -> None:
    def drop(x: Any) -> Any:
        return F.dropout(x * 2, 0.5) + F.dropout(x, 0.25)

    compiled, x, found = genesis.compile(drop), ramp(4, 50), []
    for function in (drop, compiled):
        genesis.manual_seed(7)
        found.append([function(x), function(x), genesis.rand(3)])
    assert all(equal(a, b) for a, b in zip(*found, strict=True))
    assert not equal(found[1][0], found[1][1])
    assert compiled(ramp(0, 50)).shape == compiled(ramp(0, 50)).shape == (0, 50)  # draws of no elements


def test_nested_with_autocast_checkpoint_and_itself() -> None:
    @genesis.compile
    def half(x: Any) -> Any:
        return x.tanh() * 0.5

    @genesis.compile
    def whole(x: Any, w: Any) -> Any:
        with genesis.autocast("cpu", dtype=genesis.bfloat16):
            y = half(x) @ w
        return genesis.autograd.checkpoint(lambda z: z.float().exp(), y).sum()

    x, w = ramp(4, 4, grad=True), ramp(4, 4, grad=True)
    whole(x, w).backward()
    got = [x.grad, w.grad]
    x.grad = w.grad = None
    whole.function(x, w).backward()
    assert not whole.breaks
    for a, b in zip(got, (x.grad, w.grad), strict=True):
        assert np.allclose(a.numpy(), b.numpy(), rtol=2e-2, atol=1e-3)


def test_results_keep_their_structure_and_their_identity() -> None:
    def parts(x: Any, y: Any) -> Any:
        return {"sum": x + y, "same": x, "pair": (y.t(), [3, None, "a"])}

    x, y = ramp(2, 3), ramp(2, 3)
    got = genesis.compile(parts)(x, y)
    assert got["same"] is x
    assert got["pair"][1] == [3, None, "a"]
    assert equal(got["pair"][0], y.t())
    assert equal(got["sum"], x + y)


def test_a_method() -> None:
    class Model:
        factor = 3.0

        def __init__(self, shift: float) -> None:
            self.shift = shift

        @genesis.compile
        def run(self, x: Any) -> Any:
            return x * 2 + self.shift

    x, one, other = ramp(3), Model(1.0), Model(2.0)
    for model in (one, other, one):
        assert equal(model.run(x), x * 2 + model.shift)
    one.shift = 9.0
    assert equal(one.run(x), x * 2 + 9)


def momentum(p: Any, g: Any, m: Any) -> Any:
    m.mul_(0.9).add_(g, alpha=0.1)
    old = p * 1
    p.sub_(m.sign() * 0.01)
    return old + p


def swapped(p: Any, g: Any, m: Any) -> None:
    a = p + g
    m.copy_(p * 2 - m.flip(0))
    p.copy_(F.silu((a + p).t(), inplace=True).t())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("function", [momentum, swapped])
def test_inputs_change_in_place(device: str, function: Any) -> None:
    compiled, found = genesis.compile(function, fullgraph=True), []
    for each in (function, compiled):
        tensors = [(ramp(6, 8) * (i + 1)).sin().to(device) for i in range(3)]
        for _ in range(2):
            result = each(*tensors)
        found.append([*tensors, tensors[0] if result is None else result])
    assert all(np.allclose(a.cpu().numpy(), b.cpu().numpy(), atol=1e-6) for a, b in zip(*found, strict=True))
    if function is momentum:
        (entry,) = compiled.entries.values()
        assert [len(step.calls) > 4 for step in entry[0].region.programs[0].steps] == [True]
        assert len(entry[0].region.programs[0].in_place) == 2


def halves(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * cos + genesis.cat([-b, a], -1) * sin


def middle(x: Any, cos: Any, sin: Any) -> Any:
    y = (x * cos).tanh()
    z = y[1:-1] * 2 - y[2:] * y[:-2]
    return genesis.cat([z, x[:1] * sin[:1], z.exp()], 0)


def stacked(x: Any, cos: Any, sin: Any) -> Any:
    pair = genesis.stack([x * cos, sin], 1)
    return pair + pair.flip(0)


@pytest.mark.parametrize(("function", "kernels"), [(halves, 1), (middle, 1), (stacked, None)])
def test_parts_of_arrays_stay_in_one_kernel(function: Any, kernels: int | None) -> None:
    compiled, found = genesis.compile(function, fullgraph=True), []
    for each in (function, compiled):
        x, cos, sin = ((ramp(6, 40) * (i + 1)).sin().cuda().detach().requires_grad_() for i in range(3))
        y = each(x, cos, sin)
        (y * y).sum().backward()
        found.append([t.detach().cpu().numpy() for t in (y, x.grad, cos.grad, sin.grad)])
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    (entry,) = compiled.entries.values()
    assert kernels is None or len(entry[0].region.programs[0].steps) == kernels


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_negative", [False, True])
def test_the_gradient_of_picks_fuses_with_its_readers(device: str, is_negative: bool) -> None:
    labels = genesis.tensor([3, 0, 49, 7, 7, 48]).to(device) - 50 * is_negative

    def function(x: Any) -> Any:
        picked = x.log_softmax(-1)[genesis.arange(6, device=device), labels]
        return -picked.mean() + x.exp().mean()

    x = (ramp(6, 50) * 0.01).to(device).requires_grad_()
    want, found = gradients(function, x)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)
    kernels = genesis.compile.explain(function)(x).backward
    assert (device == "cpu") == any("index_get_backward" in k.ops for k in kernels)
    later = labels[1:]
    assert gradients(lambda x: x.exp()[genesis.arange(0, device=device), later[:0]], x[:0]).shape == (2, 0, 50)


@pytest.mark.parametrize("columns", [257, 515, 1001, 1025, 2051])
def test_rows_of_uneven_length_repeat_a_bias(columns: int) -> None:
    x, bias, scale = (ramp(*shape).to("cuda") for shape in ((5, columns), (columns,), (5, 1)))
    tiles = []

    def note(launch: Any, stream: int) -> None:
        tiles.append(launch.constants.get("WRAPS"))
        launch.run(stream)

    with watching_launches(note):
        found = genesis.compile(lambda x, b, s: (x + b) * s)(x, bias, scale)
        genesis.cuda.synchronize()
    assert equal(found, (x + bias) * scale) and tiles == [(columns + 1022) // columns]


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("dtype", [genesis.bfloat16, genesis.float32, genesis.float64])
@pytest.mark.parametrize("total", ["mean", "sum", "amax", "amin"])
def test_totals_of_rows_read_once(dtype: Any, total: str) -> None:
    def function(x: Any) -> Any:
        y = x.log_softmax(-1) * 3
        return getattr(y, total)(), y.amax(-1)

    x = (genesis.randn(4, 3, 50, generator=genesis.Generator().manual_seed(0)) * 9).to("cuda", dtype)
    compiled, want = genesis.compile(function, fullgraph=True), function(x.double())
    for got, exact in zip(compiled(x), want, strict=True):
        assert got.dtype is dtype and got.shape == exact.shape
        limit = {2: 2**-8, 4: 1e-6, 8: 1e-14}[dtype.itemsize] * max(30, exact.abs().max().item())
        assert (got.double() - exact).abs().max().item() < limit
    kernels = genesis.compile.explain(compiled)(x).forward
    assert sum(k.reads + k.writes for k in kernels if "amax" in k.ops[:1]) < 1.2 * x.numel() * dtype.itemsize


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("extreme", [
    lambda y: y.amax(-1), lambda y: y.amin(0), lambda y: y.float().amax(), lambda y: y[:, 1:].amax(-1),
    lambda y: genesis.linalg.vector_norm(y, math.inf, -1), lambda y: genesis.where(y == y.amax(-1, keepdim=True), y, 0),
    lambda y: genesis.where(y - y.topk(3)[0][:, 2:] >= 0, y, 0),
])  # fmt: skip
def test_backward_finds_the_extreme_that_forward_found(device: str, extreme: Any) -> None:
    # Were y computed again in backward without rounding, no element would equal the rounded extreme.
    x = genesis.randn(4, 40, generator=genesis.Generator().manual_seed(0)).bfloat16().to(device)
    want, found = gradients(lambda x: extreme(x * 0.3 + x.tanh()), x)
    assert ((want != 0) == (found != 0)).all() and np.abs(want - found).max() < 2**-5


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(ramp(6, 6).detach() * 0.3)

    def forward(self, x: Any) -> Any:
        for _ in range(6):
            x = F.dropout(x @ self.weight, 0.2).tanh() + 0.1
        return x


@pytest.mark.parametrize("shape", ((50, 70), (3, 40, 48), (33, 17), (70, 9)))
def test_an_operand_with_its_own_contiguous_dimension_is_read_in_square_tiles(shape: tuple[int, ...]) -> None:
    """Along rows that are as long as a tile is high, so that both dimensions load as vectors."""
    rng = np.random.default_rng(0)
    x = genesis.tensor(rng.standard_normal(shape).astype(np.float32), device="cuda")
    y = genesis.tensor(rng.standard_normal((*shape[:-2], *shape[:-3:-1])).astype(np.float32), device="cuda")

    def function(x: Any, y: Any) -> Any:
        return (x + 1) * y.transpose(-1, -2).exp() - x

    tiles = []

    def note(launch: Any, stream: int) -> None:
        tiles.append((launch.constants.get("R"), launch.constants.get("C")))
        launch.run(stream)

    with watching_launches(note):
        found = genesis.compile(function)(x, y)
        genesis.cuda.synchronize()  # launches wait for their kernels' compilation
    assert tiles == ([(32, 32)] if min(shape[-2:]) >= 16 else [(None, None)])
    near = 0 if is_interpreted() else 1e-5  # a GPU rounds a product and a sum once if they are in one kernel
    np.testing.assert_allclose(found.numpy(force=True), function(x, y).numpy(force=True), rtol=near, atol=near)


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reduced_overhead_gives_the_same(device: str) -> None:
    deep = Deep().to(device)
    compiled, found, kept = genesis.compile(deep, mode="reduce-overhead", fullgraph=True), [], []
    weight = deep.weight.data
    for each in (deep, compiled):
        genesis.manual_seed(5)
        for i in range(8):
            x = (ramp(8, 6) * (i + 1)).to(device).detach().requires_grad_()
            kept.append(each(x))
            kept[-1].sum().backward()
            found.append([kept[-1].detach().cpu().numpy(), x.grad.cpu().numpy(), deep.weight.grad.cpu().numpy()])
            if i == 5:  # the parameter is elsewhere in memory
                deep.weight.data = weight * 0.5
        deep.weight.data, deep.weight.grad = weight, None
    for eager, got in zip(found[:8], found[8:], strict=True):
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(eager, got, strict=True))
    assert all(np.array_equal(y.detach().cpu().numpy(), got[0]) for y, got in zip(kept[8:], found[8:], strict=True))
    (entry,) = compiled._compiled.entries.values()
    assert (entry[0].region.runners[0].graph is not None) == (device == "cuda")


# --- Breaks and errors ------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    if x.sum().item() > 0:
        return x + 1
    return x - 1


def prints(x: Any) -> Any:
    print("called")
    return x + 1


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


def test_a_function_with_breaks_runs_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = genesis.compile(branches)
    assert equal(compiled(ramp(3)), ramp(3) + 1)
    assert equal(compiled(-ramp(3)), -ramp(3) - 1)
    genesis.compile(prints)(ramp(3))
    assert capsys.readouterr().out == "called\n"
    compiled_module = genesis.compile(Counts())
    assert [compiled_module(genesis.ones(1)).item() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("function", [branches, prints])
def test_fullgraph_names_the_line(function: Any) -> None:
    with pytest.raises(UsageError, match=r"fullgraph=True") as caught:
        genesis.compile(function, fullgraph=True)(ramp(3))
    assert "test_compile.py" in caught.value.where


def test_an_exception_leaves_the_state_of_eager() -> None:
    def fails(x: Any, seen: list[int]) -> Any:
        seen.append(1)
        x.add_(1)
        F.dropout(x, 0.5)
        return x @ genesis.ones(7, 7)

    found = []
    for each in (fails, genesis.compile(fails), genesis.compile(fails, fullgraph=True)):
        genesis.manual_seed(3)
        x, seen = ramp(3), []
        with pytest.raises(ShapeError):
            each(x, seen)
        found.append((x.tolist(), seen, genesis.random.default_generator.offset))
    assert found[0] == found[1] == found[2]
    assert equal(genesis.compile(lambda x: x + 1)(ramp(3)), ramp(3) + 1)


def test_mixed_devices_and_recursion() -> None:
    compiled = genesis.compile(lambda x, y: (x + y).tanh())
    with pytest.raises(DeviceError, match=r"cpu and on cuda"):
        compiled(ramp(3), ramp(3).cuda())
    assert equal(compiled(ramp(3), ramp(3)), (ramp(3) * 2).tanh())

    @genesis.compile
    def power(x: Any, n: int) -> Any:
        return x if n == 0 else power(x * 2, n - 1)

    @genesis.compile
    def endless(x: Any) -> Any:
        return endless(x + 1)

    assert equal(power(ramp(3), 3), ramp(3) * 8)
    with pytest.raises(RecursionError):
        endless(ramp(3))
    assert equal(power(ramp(3), 2), ramp(3) * 4)


TWICE = {
    "a power": lambda x, y: (x**3 * y).sum(),
    "a matmul": lambda x, y: ((x * y).tanh() @ y.t()).exp().mean(),
    "softmax": lambda x, y: F.softmax(x * y, -1).square().sum() + x.var(-1).sum(),
    "slices": lambda x, y: (x[:, 1:] * y[:, :-1]).sigmoid().logsumexp(-1).sum(),
    "layer_norm": lambda x, y: F.layer_norm(x * y, (5,)).pow(3).sum(),
    "dropout": lambda x, y: F.dropout(x * y * x, 0.5).sum(),
    "views of a transposed result": lambda x, y: ((x.t() * 2).tanh()[:2] * y.t()[:2]).sum(),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name: str) -> None:
    found = []
    for each in (TWICE[name], genesis.compile(TWICE[name], fullgraph=True)):
        genesis.manual_seed(0)
        x, y = ramp(3, 5, grad=True), (-ramp(3, 5)).requires_grad_()
        gx, gy = genesis.autograd.grad(each(x, y), [x, y], create_graph=True)
        ((gx * gx).sum() + (gy * x).sum()).backward()
        found.append([t.detach().numpy() for t in (gx, x.grad, y.grad)])
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def test_a_second_derivative_needs_the_inputs() -> None:
    x, compiled = ramp(3, grad=True), genesis.compile(lambda x: x.exp() * 2)
    kept = x * 1
    (g,) = genesis.autograd.grad(compiled(kept).sum(), [x], create_graph=True)
    assert np.allclose(genesis.autograd.grad(g.sum(), [x])[0].numpy(), 2 * np.exp(x.detach().numpy()))
    y = compiled(x * 1)  # backward needs only the result, and nothing else keeps the argument
    with pytest.raises(GradientError, match="freed or changed"):
        genesis.autograd.grad(y.sum(), [x], create_graph=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids: Any) -> Any:
        return F.cross_entropy((self.memory(self.embed(ids))[0] @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


def test_weights_that_are_used_twice() -> None:
    genesis.manual_seed(0)
    model, ids, found = Tied(), genesis.tensor([[1, 2, 3], [3, 3, 0]]), []
    for each in (model, genesis.compile(model, fullgraph=True)):
        model.zero_grad()
        each(ids).backward()
        found.append([p.grad.numpy() for p in model.parameters()])
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_values_that_change_are_not_kept() -> None:
    scale, x = genesis.tensor(2.0), ramp(3)

    def constant(x: Any) -> Any:
        t = genesis.tensor([1.0, 2.0, 3.0])
        t.add_(x)
        return t, genesis.tensor([1.0, 2.0])

    read, made = genesis.compile(lambda x: x * scale.item()), genesis.compile(constant, fullgraph=True)
    assert equal(read(x), x * 2)
    scale.fill_(5.0)
    assert equal(read(x), x * 5)
    for _ in range(2):
        t, pair = made(x)
        assert equal(t, x + genesis.tensor([1.0, 2.0, 3.0]))
        assert pair.tolist() == [1, 2]
        pair.add_(1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_made_inside_stays_in_the_trace(device: str) -> None:
    def work(x: Any) -> Any:
        picked = (x * 2).gather(-1, genesis.tensor([[0, 1, 1]], device=device).expand(3, 3))
        return picked.tanh() * genesis.tensor([1.0, 2.0, 3.0], device=device)

    assert np.allclose(*gradients(work, ramp(3, 5).to(device)), atol=1e-6)


def test_equal_results_have_their_own_memory() -> None:
    a, b, c = genesis.compile(lambda x: (x + 1, x + 1, (x + 1)[0]))(ramp(3))
    a.mul_(2)
    assert equal(b, ramp(3) + 1)
    assert equal(c, ramp(3)[0] + 1)


def test_verify_sees_what_guards_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = genesis.compile(lambda x: x * FACTOR, verify=2)
    for _ in range(3):
        compiled(ramp(3))
    monkeypatch.setattr("genesis.compiler.state.State.holds", lambda self: True)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    compiled(ramp(3))
    with pytest.raises(UsageError, match=r"mul\(in0, 3.0\), .* mul\(in0, 2.0\)"):
        compiled(ramp(3))


def test_machine_code_is_found_by_content() -> None:
    def written(factor: float) -> tuple[str, str]:
        (step,) = explain(lambda x: (x * factor + 1).tanh())(ramp(4, 4).cuda()).forward
        return step.source.split("(")[0], step.source.split("(", 1)[1]

    assert written(2.0) == written(2.0)
    first, other = written(2.0), written(3.0)
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="not a mode"):
        genesis.compile(branches, mode="fastest")
    with pytest.raises(UsageError, match="cannot be called"):
        genesis.compile(3)
    assert genesis.compile(branches, disable=True) is branches


def test_the_cache_has_a_limit() -> None:
    compiled = genesis.compile(lambda x, n: x * n)
    for n in range(64):
        compiled(ramp(2), n)
    with pytest.warns(UserWarning, match="was traced 64 times"):
        result = compiled(ramp(2), 64)
    assert equal(result, ramp(2) * 64)
    assert equal(compiled(ramp(2), 3), ramp(2) * 3)
    reset()
    assert traces(compiled) == 0


def test_explain_shows_kernels_and_breaks() -> None:
    found = explain(lambda x: (x * 2 + 1).tanh())(ramp(4, 4))
    assert [kernel.ops for kernel in found.forward] == [("mul", "add", "tanh")]
    assert (found.forward[0].reads, found.forward[0].writes) == (64, 64)
    assert "test_compile.py" in str(genesis.compile.explain(branches)(ramp(3)))


def drop(x: Any) -> Any:
    y = F.dropout(x * 3, 0.25)
    return F.dropout(y + y.sum(-1, keepdim=True), 0.5), F.dropout(x.t(), 0.5) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(4, 16), (3, 7), (40,), (5, 2)])
def test_draws_are_those_of_eager_code(device: str, shape: tuple[int, ...]) -> None:
    compiled, x = genesis.compile(drop, fullgraph=True), genesis.ones(shape).to(device).requires_grad_()
    found = []
    for function in (drop, compiled):
        genesis.manual_seed(3)
        for _ in range(2):
            x.grad = None
            results = function(x)
            sum(y.sum() for y in results).backward()
            found += [*results, x.grad, genesis.tensor(genesis.random.default_generator.offset)]
    assert all(map(equal, found[:8], found[8:]))


def test_draws_in_a_cuda_graph_are_those_of_eager_code() -> None:
    compiled, x = genesis.compile(drop), genesis.ones(4, 16, device="cuda")
    for each in (drop, compiled):
        each(x)
    genesis.manual_seed(7)
    want = [drop(x)[0] for _ in range(4)][1:]
    graph = genesis.cuda.CUDAGraph()
    genesis.manual_seed(7)
    drop(x)
    with genesis.cuda.graph(graph):
        y, _ = compiled(x)
    for expected in want:
        graph.replay()
        assert equal(y, expected)


def test_a_generator_of_its_own_is_a_break() -> None:
    generator = genesis.Generator().manual_seed(1)
    compiled = genesis.compile(lambda x: F.dropout(x, 0.5, generator=generator))
    x = genesis.ones(100)
    assert not equal(compiled(x), compiled(x))
    assert compiled.breaks

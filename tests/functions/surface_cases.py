"""Lines as scripts have them, for torch and for Genesis: `lib` is the one or the other, the other names are inputs.

`make_fixtures.py` writes what torch answers to fixtures/torch_surface.json; test_surface.py compares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Bounds, weights and the like are leaves as well: their gradients are compared.
FLOATS = {
    "x": [[0.5, -1.25, 2.0], [3.5, -0.75, 0.25]],
    "row": [0.75, -1.0, 1.5],
    "column": [[0.6], [-0.4]],
    "one": 0.8,
    "low": [[-1.5, 0.1, 2.5], [0.3, -2.0, 1.0]],  # beside "high" some bounds are crossed
    "high": [[1.0, 0.2, 2.25], [0.4, -1.0, 0.5]],
}
OTHERS = {
    "half": ("float16", [1.5, -2.0]),
    "wide": ("float64", [1.25, -3.0]),
    "i": ("int64", [3, -1, 2]),
    "u": ("uint8", [200, 100, 3]),
    "b": ("bool", [True, False, True]),
    "n": ("int64", 1),
    "f": ("float32", 2.0),
    "steps": ("int64", [[2, 1, 3], [1, 2, 1]]),
    "empty": ("float32", [[], []]),
    "nans": ("float32", [1.0, float("nan"), 3.0]),
}

CASES: dict[str, tuple[str, ...]] = {
    "clamp": (
        "x.clamp(row)", "x.clamp(max=row)", "x.clamp(column, row)", "x.clamp(low, high)", "x.clamp(high, low)",
        "x.clamp(one)", "x.clamp(max=one)", "lib.clamp(x, max=high)", "i.clamp(row)", "i.clamp(1.5)",
        "i.clamp(max=n)", "half.clamp(wide)", "half.clamp(min=f)", "u.clamp(min=i)", "i.clamp(u, i)",
        "row.clamp(nans)", "row.clamp(max=nans)", "nans.clamp(0.0, 2.0)", "row.clamp(float('nan'))",
        "empty.clamp(column[:, 0, None])", "x.clip(row)", "x.clamp_min(row)", "x.clamp_max(0.5)",
        "x.clone().clamp_(row)", "i.clone().clamp_(1.5)", "i.clone().clamp_(row)", "row.clone().clamp_(x)",
        "x.clamp()", "x.clamp(np.float32(0.5))", "i.clamp(np.float64(0.5), np.int64(2))",
    ),
    "dtype": (
        "x.detach().sum(dtype=lib.uint8)", "x.detach().sum(1, dtype=lib.bool)", "i.sum(dtype=lib.int8)",
        "steps.sum(0, dtype=lib.int16)", "u.sum(dtype=lib.uint8)", "u.sum(dtype=lib.float16)",
        "i.prod(dtype=lib.uint8)", "b.prod(dtype=lib.bool)", "steps.prod(1, dtype=lib.int32)",
        "u.cumsum(0, dtype=lib.uint8)", "x.detach().cumsum(1, dtype=lib.int32)", "i.mean(dtype=lib.float16)",
        "i.mean(dtype=lib.uint8)", "i.softmax(0, dtype=lib.float16)", "i.log_softmax(0, dtype=lib.float64)",
        "i.softmax(0, dtype=lib.int32)", "x.norm(dtype=lib.float64)", "x.norm(dtype=lib.int64)",
        "x.sum(dtype=lib.float64)", "lib.arange(3, dtype=lib.uint8)", "lib.arange(3, dtype=lib.float16)",
        "lib.arange(3, dtype=lib.bool)", "lib.linspace(0, 5, 3, dtype=lib.int64)", "lib.eye(2, dtype=lib.bool)",
        "lib.full((2,), 2.7, dtype=lib.uint8)", "lib.zeros(2, dtype=lib.bfloat16)",
        "lib.ones_like(x, dtype=lib.int8)", "lib.randperm(3, dtype=lib.float32).sort()[0]", "u.to(lib.int8)",
        "lib.zeros(2, dtype=lib.half)", "lib.zeros(2, dtype=lib.float)", "lib.zeros(2, dtype=lib.double)",
        "lib.zeros(2, dtype=lib.short)", "lib.zeros(2, dtype=lib.int)", "lib.zeros(2, dtype=lib.long)", "x.short()",
    ),
    "integers": (
        "x.narrow(1, n, 2)", "x.narrow(1, i, 2)", "x.narrow(1, f, 2)", "x.narrow(1, 1, n)", "x.narrow(n, 1, 2)",
        "x.narrow(1, np.int64(1), 2)", "x.narrow(1, 1.0, 2)", "x.narrow(1, True, 2)", "x.select(0, n)",
        "x.select(0, True)", "x.select(0, 1.0)", "x.roll(n, 0)", "x.roll(True, 0)", "x.roll(1.0, 0)",
        "x.roll((n, 1), (0, 1))", "x.repeat(n, 2)", "x.repeat(2, 1.0)", "x.view(np.int64(3), 2)", "x.view(n, 6)",
        "x.view(3.0, 2)", "x.view(True, 6)", "x.reshape(i)", "x.reshape(n, 6)", "lib.zeros(n, 2)", "lib.zeros(i)",
        "lib.zeros(2.0)", "lib.zeros(True)", "lib.zeros(np.int64(2), np.int32(3))", "x.topk(n)", "x.topk(True)",
        "x.topk(2.0)", "x.topk(np.int64(2))", "x.chunk(n)", "x.chunk(True)", "x.chunk(2.0)", "x.split(n)",
        "x.split(True)", "x.split(1.0)", "x.split([n, 1])", "x.unflatten(1, [3, n])", "x.movedim(n, 0)",
        "x.movedim(True, 0)", "x.repeat_interleave(n)", "x.repeat_interleave(2.0)", "x.repeat_interleave(True)",
        "x.repeat_interleave(np.int64(2))", "x.squeeze(n)", "x.squeeze(0.0)", "x.squeeze(True)", "x.sum(n)",
        "x.sum(0.0)", "x.sum(True)", "x.sum(np.int64(0))", "x.sum((n, 0))", "x.sum(0, keepdim='no')", "lib.eye(n)",
        "lib.eye(2.0)", "lib.eye(True)", "lib.randperm(n)", "lib.randperm(3.0)", "x.unsqueeze(n)", "x.unsqueeze(0.0)",
        "x.transpose(n, 0)", "x.tril(n)", "x.tril(1.0)", "x.tril(np.int64(1))", "x.diagonal(n)", "x.diagonal(1.0)",
        "x.flatten(n)", "x.unfold(1, n, 1)", "x.unfold(1, 2.0, 1)", "lib.cat([x, x], n)", "lib.stack([x, x], 0.0)",
        "x.as_strided((2, 2), (1, 1), n)", "x.as_strided((n, 2), (1, 1))", "x.cumsum(n)", "x.cumsum(0.0)",
        "lib.bincount(u, minlength=5.0)", "lib.linspace(0, 1, np.int64(3))", "lib.linspace(0, 1, 3.0)", "x.size(n)",
        "x.size(0.0)", "x.size(2)", "x.stride(-1)", "x.permute(n, 0)", "x.expand(n, 2, 3)", "x.flip(n)",
        "x.flip(np.int64(0))", "x.argmax(1.0)", "x.argmax(n)", "i.max(n)", "x.max(np.int64(1))", "x.max(1.0)",
        "x.index_select(np.int64(1), n)", "x.gather(True, steps - 1)", "x.softmax(n)", "x.softmax(1.0)", "x.sort(n)",
        "x.unbind(n)", "x.std(dim=0.0)", "x.var(n)", "x.var(False)", "x.any(n)", "x.logsumexp(1.0)",
        "lib.randint(5.0, (2,))", "lib.randint(True, (2,))", "lib.randint(n, (2,))", "x.norm(2, n)",
    ),
    "numbers": (
        "row * np.sqrt(2)", "np.sqrt(2) * row", "np.float32(2) * x", "np.float64(1.5) - i", "np.int64(2) / i",
        "np.int64(2) ** row.abs()", "i * np.float32(2)", "u + np.int64(1)", "half * np.float64(1.5)",
        "b * np.int8(2)", "i // np.float64(2)", "np.float64(7) % i.abs()", "i / np.int32(2)",
        "np.float32(1) < x", "x == np.float64(0.5)", "row + np.float64(2.0)", "x.pow(np.int64(2))",
        "x.masked_fill(x > 1, np.float32(3))", "lib.where(b, np.float32(3), row)", "x.add(x, alpha=np.float32(2))",
        "x.add(x, alpha=f)", "x.sub(row, alpha=n)", "x.add(x, alpha=i)", "i.add(i, alpha=2.5)",
        "lib.full((2,), np.float32(3))", "lib.full((2,), np.int32(3))", "lib.full((2,), f)", "lib.full((2,), i)",
        "lib.arange(np.int64(3))", "lib.arange(np.float32(3))", "lib.arange(f)", "lib.linspace(np.float32(0), f, 3)",
        "x.lerp(x * 2, np.float32(0.5))", "x.lerp(x * 2, one)", "x.lerp(high, row)", "x.norm(np.float64(2))",
        "x.norm(f)", "x.var(correction=np.int64(1))", "x.var(correction=n)", "x.clone().fill_(np.float32(3))",
        "x.clone().fill_(f)", "x.clone().fill_(one)", "x.clone().fill_(row)", "i.masked_fill(b, 2.5)",
        "i.masked_fill(b, f)", "i.masked_fill(b, i)", "i.clone().masked_fill_(b, 2.5)",
        "i.clone().masked_fill_(b, f)", "row.masked_fill(b, one)", "row.clone().masked_fill_(b, one)",
        "(i + 2**53).masked_fill(b, 0.5)", "u.masked_fill(b, 300)", "u.masked_fill(b, -1)", "lib.where(b, u, 300)",
        "u.clamp(max=300)", "u.fill_(300)", "lib.full((2,), 300, dtype=lib.uint8)",
        "lib.tensor([300], dtype=lib.uint8)", "lib.full((2,), float('nan'), dtype=lib.int64)",
        "lib.tensor(-1, dtype=lib.uint8)", "lib.full_like(u, 300)", "lib.tensor(np.array([300]), dtype=lib.uint8)",
        "lib.tensor([2.7], dtype=lib.int32)", "row == None", "row != None", "row == 'a'",
        "lib.addmm(x, x @ x.T, x, alpha=np.float32(2), beta=f)",
    ),
    "keywords": (
        "lib.add(input=x, other=row)", "x.add(other=row)", "lib.add(x, row, alpah=2)", "lib.pow(x, exponent=2)",
        "x.pow(exponent=2)", "lib.mul(input=x, exponent=2)", "lib.flip(x, dims=(0,))", "x.flip(dims=[0, 1])",
        "lib.permute(input=x, dims=(1, 0))", "x.permute(dims=(1, 0))", "lib.roll(x, shifts=1, dims=0)",
        "x.sum(axis=0)", "x.sum(axis=0, keepdims=True)", "x.mean(dim=1, keepdim=True)", "lib.softmax(input=x, dim=1)",
        "x.softmax(axis=1)", "lib.cat(tensors=[x, x], dim=1)", "lib.stack(tensors=[x, x], dim=1)",
        "lib.where(condition=x > 0, input=x, other=0.0)", "x.where(condition=x > 0, other=row)",
        "x.where(x > 0, 1.0)", "lib.matmul(input=x, other=x.T)", "lib.mm(input=x, mat2=x.T)",
        "lib.mv(input=x, vec=row)", "lib.outer(input=row, vec2=row)", "lib.dot(input=row, tensor=row)",
        "x.reshape(shape=(3, 2))", "x.view(size=(3, 2))", "row.expand(size=(2, 3))", "row.repeat(repeats=(2, 1))",
        "lib.zeros(size=(2,))", "lib.ones(size=(2,), dtype=lib.int8)", "lib.full(size=(2,), fill_value=3)",
        "lib.full_like(input=x, fill_value=3)", "lib.arange(start=1, end=7, step=2)", "lib.arange(end=3)",
        "lib.arange(1, end=4)", "lib.arange(3, stpe=1)", "lib.linspace(start=0, end=1, steps=3)", "lib.eye(n=2, m=3)",
        "lib.clamp(input=x, min=low, max=row)", "lib.transpose(input=x, dim0=0, dim1=1)",
        "x.transpose(dim0=0, dim1=1)", "lib.squeeze(input=x, dim=0)", "lib.unsqueeze(input=x, dim=0)",
        "lib.split(x, split_size_or_sections=1)", "x.split(split_size=1)", "lib.chunk(input=x, chunks=2)",
        "lib.topk(input=x, k=1, dim=0)", "lib.sort(input=x, dim=0, descending=True)",
        "lib.gather(input=x, dim=1, index=steps - 1)", "lib.index_select(input=x, dim=0, index=n)",
        "x.scatter(dim=1, index=steps - 1, value=2.0)", "x.clone().copy_(other=row)",
        "lib.lerp(input=x, end=high, weight=0.5)", "lib.masked_fill(input=x, mask=x > 0, value=1.0)",
        "x.narrow(dim=1, start=0, length=2)", "x.to(dtype=lib.half)", "lib.max(input=x, dim=0)",
        "lib.max(input=x, other=high)", "x.argmax(dim=0, keepdim=True)", "x.sum(kepdim=True)",
        "lib.var(input=x, dim=0, correction=0)", "lib.norm(input=x, p=1, dim=0)",
        "lib.tril(input=x, diagonal=1)",
        "x.unfold(dimension=1, size=2, step=1)", "x.size(dim=0)", "x.zero_(3)", "lib.zeros(2, dtpye=lib.int8)",
        "lib.randn(2, devcie='cpu')", "x.softmax(dimm=0)", "x.abs(foo=1)", "x.unflatten(dim=1, sizes=(3, 1))",
        "lib.addmm(input=x, mat1=x @ x.T, mat2=x, beta=0.5)", "x.cumsum(dim=0)",
        "lib.movedim(x, source=0, destination=1)", "lib.div(x, row, rounding_mode='floor')",
        "x.nonzero(as_tuple=True)", "x.clone().div_(row, rounding_mode='trunc')", "x.clone().div_(other=2.0)",
        "lib.repeat_interleave(input=x, repeats=2, dim=0)", "lib.exp(input=row)",
    ),
    "refusals": (
        "lib.cat(None)", "lib.einsum(x, x)", "lib.rand(2, generator=3)", "x.flip()",
        "lib.promote_types(1, 2)",
        "lib.promote_types(1, 1)", "x.requires_grad_('no')", "x.requires_grad_(requires_grad=False)", "x.flip(None)",
        "lib.Generator().manual_seed(1.5)", "lib.where(b, 1, 2)", "lib.where(b, row, None)",
        "x.to('foo')", "x.view('a')", "x.reshape(None)", "lib.zeros('2')", "lib.tensor(None)", "lib.tensor([1, 'a'])",
        "lib.full((2,), 'a')", "lib.full((2,), None)", "x.add('a')", "x + None", "x + [1, 2, 3]", "x.pow(None)",
        "x.clamp('a')", "x.clamp(min=[1, 2, 3])", "x.lerp(x, 'a')", "x.masked_fill(i, 1)", "x.masked_fill(b, 'a')",
        "x.clone().fill_('a')", "x.clone().copy_(None)", "x.sum('a')", "x.max('a')", "x.topk(None)", "x.norm('a')",
        "x.gather(0, None)", "x.index_select(0, None)", "x.scatter(0, i, None)", "x.matmul(None)", "x.split(None)",
        "x.repeat_interleave(None)", "x.narrow(0, None, 1)", "x.softmax('a')", "x.size('a')", "x['a']",
        "x.allclose(1)", "lib.finfo('a')", "lib.result_type(i, 'a')", "lib.set_grad_enabled('a')",
    ),
    "comparing": (
        "lib.allclose(x, x + 1e-9)", "lib.allclose(x, row)", "lib.allclose(nans, nans)",
        "x.allclose(x + 0.1, atol=0.2)", "lib.allclose(nans, nans, equal_nan=True)", "lib.allclose(x, half)",
        "lib.isclose(x, row)", "i.isclose(i + 1)", "i.isclose(i + 1, rtol=0.5)", "b.isclose(b)",
        "x.isclose(x + 1e-3, rtol=0, atol=1e-2)", "nans.isclose(nans)", "lib.isclose(nans, nans, equal_nan=True)",
        "lib.equal(x, x)", "x.equal(row)", "x.equal(x.clone())", "nans.equal(nans)",
        "empty.equal(empty)", "lib.allclose(empty, empty)", "u.isclose(u)", "lib.isclose(nans / 0, nans / 0)",
        "lib.isclose(row, row / 0)",
    ),
    "names": (
        "f'{one:.4f}'", "f'{one.detach():8.2e}'", "f'{n:3d}'", "f'{row:.4f}'", "'%.3f' % one", "f'{n}'",
        "x.shape.numel()", "x.shape[1:].numel()", "tuple(x.shape + (1,))", "tuple(x.size())",
        "lib.Size([2, 3]) == x.shape", "x.shape == (2, 3)", "isinstance(x.shape[:1], lib.Size)",
        "lib.finfo(lib.float16).max", "lib.finfo().eps", "lib.finfo(lib.bfloat16).eps",
        "lib.finfo(lib.bfloat16).tiny", "lib.finfo(lib.float32).resolution", "lib.finfo(lib.float16).smallest_normal",
        "lib.finfo(lib.float64).min", "lib.finfo(lib.float32).bits", "lib.finfo(lib.bfloat16).dtype",
        "lib.finfo(lib.bfloat16).resolution", "lib.finfo(lib.int8)", "lib.iinfo(lib.uint8).max",
        "lib.iinfo(lib.int64).min", "lib.iinfo(lib.int16).bits", "lib.iinfo(lib.int32).dtype",
        "lib.iinfo(lib.float32)", "lib.iinfo(lib.bool)", "str(lib.device('cpu'))", "str(lib.device('cuda:1'))",
        "str(lib.device('cuda', 1))", "lib.device('cuda:1').index", "lib.device('cpu').type",
        "lib.device('cpu') == x.device", "lib.device('gpu')", "lib.device('cuda:1', 1)",
        "isinstance(x.device, lib.device)", "lib.zeros(2, device=lib.device('cpu'))", "lib.Tensor([1.0, 2.0])",
        "lib.Tensor([[1, 2], [3, 4]])", "lib.Tensor()", "tuple(lib.Tensor(2, 3).shape)", "lib.Tensor(np.ones(2))",
        "lib.Tensor('a')", "lib.Tensor(1.5)", "lib.Tensor(n, 2).shape.numel()", "lib.Tensor(row).detach()",
        "lib.Tensor(half)", "lib.Tensor([1.0], [2.0])", "lib.Tensor(None)",
        "str(lib.result_type(i, 2.5)).split('.')[1]", "str(lib.result_type(half, 2)).split('.')[1]",
    ),
}  # fmt: skip


KINDS = (IndexError, TypeError, RuntimeError, ValueError)


def inputs_of(make: Any) -> dict[str, Any]:
    """All inputs, made by `make(values, dtype)`."""
    made = {name: make(np.array(values, np.float32), "float32") for name, values in FLOATS.items()}
    return made | {name: make(np.array(values, dtype), dtype) for name, (dtype, values) in OTHERS.items()}


def answer(lib: Any, line: str, make: Any, errors: tuple[type[Exception], ...]) -> dict[str, Any]:
    """What a line gives: its outputs and the gradients of the leaves that it reaches, or that it is refused."""
    names = inputs_of(make)
    for name in FLOATS:
        names[name].requires_grad_()
    try:
        result = eval(line, {"lib": lib, "np": np, **names})
    except errors as error:
        return {
            "errors": [k.__name__ for k in (IndexError, TypeError, RuntimeError, ValueError) if isinstance(error, k)]
        }
    tensor = type(names["x"])
    outs = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(v, tensor)]
    if not outs:
        return {"value": _plain(result)}
    if outs[0].requires_grad:
        count = outs[0].numel()
        outs[0].backward(make(np.arange(1, count + 1).reshape(outs[0].shape), str(outs[0].dtype).split(".")[1]))
    grads = {name: names[name].grad.tolist() for name in FLOATS if names[name].grad is not None}
    seen = [{"dtype": str(o.dtype).split(".")[1], "shape": list(o.shape), "values": o.tolist()} for o in outs]
    return {"outs": seen, **({"grads": grads} if grads else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

"""The fused ops of a language model against torch, at the shapes of Qwen2.5-0.5B (8 sequences of 1024), bf16.

    python -m benchmarks.gpu.fused [--out JSON] [--only attention swiglu gated mlp finished quantized …]
    python -m benchmarks.gpu.fused --sweep forward|dq|dkdv [--head 64] [--tokens 1024] [--batch 8]

The first form times each op and torch's, on the GPU by graph replay; torch's attention is the faster of cuDNN and
flash. The second tries tiles of one attention kernel (`genesis.kernels.attention.tiles.TILES`), fastest first.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ops import Row, measure, random, recorded
from benchmarks.gpu.timing import backend, environment, gpu_us, shared
from benchmarks.result_files import write_result
from genesis.autograd.record import TensorBase
from genesis.dtypes import bfloat16
from genesis.kernels.attention.attention import backward_into, forward_into
from genesis.kernels.attention.tiles import AttentionTile, tiles_of
from genesis.op import registry
from genesis.ops.rounding import Noise

BATCH, TOKENS, HIDDEN, FFN, VOCABULARY, PARAMETERS = 8, 1024, 896, 4864, 151_936, 494_032_768
BF16 = torch.bfloat16
ATTENTION = [  # batch, tokens, query heads, key heads, head size
    (8, 1024, 14, 2, 64),
    (4, 4096, 14, 2, 64),
    (16, 2048, 14, 2, 64),
    (8, 1024, 14, 14, 64),
    (4, 4096, 14, 14, 64),
    (2, 8192, 16, 16, 128),
    (1, 128, 14, 2, 64),
    (1, 512, 14, 2, 64),
    (4, 512, 14, 2, 64),
]


def ran(name: str, *inputs: Any, result: int = 0, **attrs: Any) -> Callable[[], Any]:
    """An op on the arrays of tensors; the call gives its output number `result`."""
    arrays = [x.array if isinstance(x, TensorBase) else x for x in inputs]

    def call() -> Any:
        found = registry[name](*arrays, **attrs)
        return TensorBase.wrap(found[result] if isinstance(found, tuple) else found)

    return call


# --- Rows -------------------------------------------------------------------------------------------------------------


def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: SDPBackend) -> torch.Tensor:
    """torch's attention of [B, T, H, D], causal."""
    group = q.shape[2] != k.shape[2]
    with sdpa_kernel(kind):
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=group)
    return o.transpose(1, 2)


def usable(q: torch.Tensor, k: torch.Tensor) -> list[SDPBackend]:
    """The backends that take these shapes, forward and backward."""
    found = []
    for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            a, b = q[:, :64].detach().requires_grad_(), k[:, :64].detach().requires_grad_()
            peer(a, b, b, kind).sum().backward()
            found.append(kind)
        except RuntimeError:
            continue
    return found


def attention_rows() -> Iterator[Row]:
    """Forward, and backward, of causal attention; also with the start of one document, as training gives it."""
    for b, t, hq, hk, d in ATTENTION:
        (q, p), (k, r), (v, s), (g, h) = (random(b, t, n, d, dtype=BF16) for n in (hq, hk, hk, hq))
        starts = shared(torch.zeros(b, t, dtype=torch.int64, device="cuda"))
        attrs = {"scale": d**-0.5, "causal": True}
        flops = 2 * b * hq * t * t * d
        o, lse = (TensorBase.wrap(x) for x in registry["attention"](q.array, k.array, v.array, **attrs))
        for kind, rest in itertools.product(usable(p, r), ((), (starts,))):
            name = f"({b},{t},{hq}/{hk},{d}) {kind.name.split('_')[0].lower()}{' starts' if rest else ''}"
            leaves = [x.detach().requires_grad_() for x in (p, r, s)]
            out = recorded(lambda leaves=leaves, kind=kind: peer(*leaves, kind))
            yield Row(
                f"attention {name}", ran("attention", q, k, v, *rest, **attrs),
                lambda p=p, r=r, s=s, kind=kind: peer(p, r, s, kind), flops=flops, tolerance=1e-2,
            )  # fmt: skip
            yield Row(
                f"attention backward {name}", ran("attention_backward", g, q, k, v, o, lse, *rest, result=1, **attrs),
                lambda out=out, leaves=leaves, h=h: torch.autograd.grad(out, leaves, h, retain_graph=True)[1],
                flops=5 * flops // 2, tolerance=1e-2,
            )  # fmt: skip


def swiglu_rows() -> Iterator[Row]:
    """silu(gate)·up and its gradients."""
    (a, p), (b, q), (g, h) = (random(BATCH * TOKENS, FFN, dtype=BF16) for _ in range(3))
    size = 2 * p.numel()
    yield Row("swiglu", ran("swiglu", a, b), lambda: F.silu(p) * q, 3 * size, tolerance=1e-2)
    leaves = [p.detach().requires_grad_(), q.detach().requires_grad_()]
    out = recorded(lambda: F.silu(leaves[0]) * leaves[1])
    yield Row(
        "swiglu backward", ran("swiglu_backward", g, a, b),
        lambda: torch.autograd.grad(out, leaves, h, retain_graph=True)[0], 5 * size, tolerance=1e-2,
    )  # fmt: skip


def gated_rows() -> Iterator[Row]:
    """The same with gate and up side by side."""
    for rows in (BATCH * TOKENS, 128):
        (x, r), (g, h) = random(rows, 2 * FFN, dtype=BF16), random(rows, FFN, dtype=BF16)
        size = 2 * h.numel()
        leaf = r.detach().requires_grad_()
        out = recorded(lambda leaf=leaf: F.silu(leaf[:, :FFN]) * leaf[:, FFN:])
        yield Row(
            f"swiglu_packed {rows}", ran("swiglu_packed", x), lambda r=r: F.silu(r[:, :FFN]) * r[:, FFN:], 3 * size,
            tolerance=1e-2,
        )  # fmt: skip
        yield Row(
            f"swiglu_packed backward, and forward again {rows}",
            ran("swiglu_packed_backward", g, x, result=0, with_result=True),
            lambda out=out, leaf=leaf, h=h: torch.autograd.grad(out, leaf, h, retain_graph=True)[0], 6 * size,
            tolerance=1e-2,
        )  # fmt: skip


def mlp_rows() -> Iterator[Row]:
    """The whole MLP with norm and residual, gate and up neighbours in memory, as in an optimizer's buffers."""
    for rows in (BATCH * TOKENS, 128):
        (x, p), (w, v), (d, s), (c, r) = (
            random(*shape, dtype=BF16) for shape in ((rows, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN), (HIDDEN,))
        )
        v.mul_(HIDDEN**-0.5)
        s.mul_(FFN**-0.5)

        def whole(p: torch.Tensor = p, v: torch.Tensor = v, s: torch.Tensor = s, r: torch.Tensor = r) -> torch.Tensor:
            n = F.rms_norm(p, r.shape, r, 1e-6)
            return p + F.linear(F.silu(F.linear(n, v[:FFN])) * F.linear(n, v[FFN:]), s)

        yield Row(
            f"norm_mlp {rows}", ran("norm_mlp", x, c, d, None, w, eps=1e-6, keep=True), whole,
            flops=6 * rows * HIDDEN * FFN, tolerance=2e-2,
        )  # fmt: skip


def finished_rows() -> Iterator[Row]:
    """Matmuls with what follows them in one kernel, and torch's matmul and pass."""
    n = BATCH * TOKENS
    for inner, outer in ((HIDDEN, HIDDEN), (FFN, HIDDEN)):
        (x, p), (w, v), (r, q) = (random(*s, dtype=BF16) for s in ((n, inner), (outer, inner), (n, outer)))
        v.mul_(inner**-0.5)
        yield Row(
            f"linear {inner} to {outer} + residual", ran("linear", x, w, None, r),
            lambda p=p, v=v, q=q: F.linear(p, v) + q, flops=2 * n * inner * outer, tolerance=2e-2,
        )  # fmt: skip
    (g, h), (w, v), (x, r) = (random(*s, dtype=BF16) for s in ((n, HIDDEN), (HIDDEN, FFN), (n, 2 * FFN)))
    v.mul_(HIDDEN**-0.5)
    leaf = r.detach().requires_grad_()
    out = recorded(lambda: F.silu(leaf[:, :FFN]) * leaf[:, FFN:])
    for kept in (False, True):
        yield Row(
            "swiglu_linear_backward" + ", and h again" * kept,
            ran("swiglu_linear_backward", g, w, x, result=0, with_result=kept),
            lambda: torch.autograd.grad(out, leaf, h @ v, retain_graph=True)[0], flops=2 * n * HIDDEN * FFN,
            tolerance=2e-2,
        )  # fmt: skip


def quantized_rows() -> Iterator[Row]:
    """The pass that quantizes, and matmuls in 8-bit floats with it, next to torch's in bf16."""
    n = BATCH * TOKENS
    for width in (HIDDEN, FFN, 2 * FFN):
        x, p = random(n, width, dtype=BF16)

        def scales(p: torch.Tensor = p) -> torch.Tensor:
            return torch.exp2(torch.ceil(torch.log2(p.abs().amax(-1).float() / 448)))

        yield Row(f"quantize_rows {width}", ran("quantize_rows", x, result=1), scales, 3 * p.numel())
    for inner, outer in ((HIDDEN, 2 * FFN), (FFN, HIDDEN), (HIDDEN, HIDDEN)):
        (x, p), (w, v), (g, h) = (random(*s, dtype=BF16) for s in ((n, inner), (outer, inner), (n, outer)))
        flops = 2 * n * inner * outer
        yield Row(
            f"linear {inner} to {outer}, fp8", ran("linear", x, w, fp8=1), lambda p=p, v=v: F.linear(p, v),
            flops=flops, tolerance=0.1,
        )  # fmt: skip
        yield Row(
            f"quantized_matmul {outer} to {inner}", ran("quantized_matmul", g, w), lambda h=h, v=v: h @ v, flops=flops,
            tolerance=0.1,
        )  # fmt: skip


def norm_rows() -> Iterator[Row]:
    """RMSNorm, and its gradient with the residual's added."""
    for rows in (BATCH * TOKENS, 512, 128):
        (x, p), (g, h), (r, q) = (random(rows, HIDDEN, dtype=BF16) for _ in range(3))
        w, v = random(HIDDEN, dtype=BF16)
        rstd = TensorBase.wrap(registry["rms_norm"](x.array, w.array, eps=1e-6)[1])
        size = 2 * p.numel()
        yield Row(
            f"rms_norm {rows}", ran("rms_norm", x, w, eps=1e-6), lambda p=p, v=v: F.rms_norm(p, v.shape, v, 1e-6),
            2 * size, tolerance=1e-2,
        )  # fmt: skip
        leaf = p.detach().requires_grad_()
        out = recorded(lambda leaf=leaf, v=v: F.rms_norm(leaf, v.shape, v.detach().requires_grad_(), 1e-6))
        yield Row(
            f"rms_norm backward + residual {rows}", ran("rms_norm_backward", g, x, w, rstd, r),
            lambda out=out, leaf=leaf, h=h, q=q: torch.autograd.grad(out, leaf, h, retain_graph=True)[0] + q, 4 * size,
            tolerance=1e-2,
        )  # fmt: skip


def rope_rows() -> Iterator[Row]:
    """RoPE of queries and keys packed with values, and with the norms by head."""
    heads, turned = 18, 16
    for batch, tokens, size in ((BATCH, TOKENS, 64), (1, 128, 64), (BATCH, TOKENS, 128)):
        angles = torch.rand(tokens, size // 2, device="cuda") * 6
        cos, sin = angles.cos(), angles.sin()
        x, p = random(batch, tokens, heads, size, dtype=BF16)
        (w, v), (u, z) = random(size, dtype=BF16), random(size, dtype=BF16)

        def rotate(p: torch.Tensor = p, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
            c, s = (torch.cat((t, t), -1)[None, :, None].to(BF16) for t in (cos, sin))
            half = p.shape[-1] // 2
            q = p[:, :, :turned]
            q = q * c + torch.cat((-q[..., half:], q[..., :half]), -1) * s
            return torch.cat((q, p[:, :, turned:]), 2)

        def normed(p: torch.Tensor = p, v: torch.Tensor = v, z: torch.Tensor = z, rotate: Any = rotate) -> torch.Tensor:
            q, k = F.rms_norm(p[:, :, :14], v.shape, v, 1e-6), F.rms_norm(p[:, :, 14:turned], z.shape, z, 1e-6)
            return rotate(torch.cat((q, k, p[:, :, turned:]), 2))

        name = f"({batch},{tokens},{heads},{size})"
        tables = shared(cos), shared(sin)
        yield Row(f"rope {name}", ran("rope", x, *tables, heads=turned), rotate, 4 * p.numel(), tolerance=2e-2)
        yield Row(
            f"norm_rope {name}", ran("norm_rope", x, w, u, *tables, heads=14, key_heads=2, eps=1e-6), normed,
            4 * p.numel(), tolerance=2e-2,
        )  # fmt: skip
        rstd = TensorBase.wrap(
            registry["norm_rope"](
                x.array, w.array, u.array, *(t.array for t in tables), heads=14, key_heads=2, eps=1e-6
            )[1]
        )
        g, h = random(batch, tokens, heads, size, dtype=BF16)
        leaf = p.detach().requires_grad_()
        out = recorded(lambda normed=normed, leaf=leaf: normed(leaf))
        yield Row(
            f"norm_rope backward {name}",
            ran("norm_rope_backward", g, x, w, u, *tables, rstd, heads=14, key_heads=2),
            lambda out=out, leaf=leaf, h=h: torch.autograd.grad(out, leaf, h, retain_graph=True)[0], 6 * p.numel(),
            tolerance=2e-2,
        )  # fmt: skip


def loss_rows() -> Iterator[Row]:
    """Cross entropy of logits and its gradient."""
    rows = BATCH * TOKENS
    labels = torch.randint(0, VOCABULARY, (rows,), device="cuda")
    attrs: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    x, p = random(rows, VOCABULARY, dtype=BF16)
    y = shared(labels)
    size = 2 * p.numel()
    yield Row(
        "cross_entropy", ran("cross_entropy", x, y, **attrs),
        lambda: F.cross_entropy(p, labels, reduction="none").float(), size, tolerance=1e-2, calls=5,
    )  # fmt: skip
    lse = TensorBase.wrap(registry["cross_entropy"](x.array, y.array, **attrs)[1])
    g = torch.ones(rows, device="cuda")
    leaf = p.detach().requires_grad_()
    out = recorded(lambda: F.cross_entropy(leaf, labels, reduction="none"))
    yield Row(
        "cross_entropy backward", ran("cross_entropy_backward", shared(g), x, y, lse, **attrs),
        lambda: torch.autograd.grad(out, leaf, g.to(BF16), retain_graph=True)[0], 2 * size, tolerance=2e-2, calls=5,
    )  # fmt: skip


def head_rows() -> Iterator[Row]:
    """The head's matmul with cross entropy: the mean with all gradients, and the loss alone."""
    (h, a), (w, b) = random(BATCH * TOKENS, HIDDEN, dtype=BF16), random(VOCABULARY, HIDDEN, dtype=BF16)
    b.mul_(0.05)
    for rows in (BATCH * TOKENS, 512, 128):
        labels = torch.randint(0, VOCABULARY, (rows,), device="cuda")
        x, p, y = h[:rows], a[:rows], shared(labels)

        def whole(p: torch.Tensor = p, labels: torch.Tensor = labels) -> torch.Tensor:
            leaves = [p.detach().requires_grad_(), b.detach().requires_grad_()]
            return torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].T, labels), leaves)[0]

        def alone(p: torch.Tensor = p, labels: torch.Tensor = labels) -> torch.Tensor:
            return F.cross_entropy(p @ b.T, labels).float()

        attrs, flops = {"ignore_index": -100, "mean": True}, 2 * rows * HIDDEN * VOCABULARY
        yield Row(
            f"linear_cross_entropy with gradients, {rows} tokens",
            ran("linear_cross_entropy", x, w, y, result=1, with_grads=True, **attrs), whole,
            flops=3 * flops, tolerance=3e-2, calls=3,
        )  # fmt: skip
        yield Row(
            f"linear_cross_entropy, {rows} tokens", ran("linear_cross_entropy", x, w, y, with_grads=False, **attrs),
            alone, flops=flops, tolerance=1e-2, calls=3,
        )  # fmt: skip


def embedding_rows() -> Iterator[Row]:
    """The gradient of a batch's embeddings added to the head's; a third of the tokens are one and the same."""
    for rows in (128, BATCH * TOKENS):
        ids = (torch.rand(rows, device="cuda") ** 3 * VOCABULARY).long()
        ids[::3] = 11
        p, total = (torch.randn(n, HIDDEN, device="cuda", dtype=BF16) for n in (rows, VOCABULARY))
        theirs = total.clone()
        moved = 2 * (p.numel() + 2 * ids.unique().numel() * HIDDEN)
        yield Row(
            f"embedding_add_, {rows} tokens", ran_in_place("embedding_add_", total, p, ids),
            lambda theirs=theirs, ids=ids, p=p: theirs.index_add_(0, ids, p), moved, tolerance=2e-2,
        )  # fmt: skip


def adamw_row(name: str, theirs: torch.dtype, nbytes: int, *ours: torch.Tensor, **attrs: Any) -> Row:
    """An AdamW step over all parameters as one buffer, its scalars on the device, next to torch's fused one.

    Args:
        theirs: the type of torch's parameters, gradients and averages.
        nbytes: a parameter.
        ours: what the op takes before the scalars; a bfloat16 weight comes first, and the gradient last but two.
    """
    op = "adamw_split_step" if ours[1].dtype is torch.int16 else "adamw_step"
    leaf = ours[0].to(theirs).clone().requires_grad_()
    leaf.grad = ours[-3].to(theirs)
    optimizer = torch.optim.AdamW([leaf], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=True)
    scalars = [torch.tensor(x, device="cuda", dtype=torch.float64) for x in (1e-4, 1.0, 1.0)]
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, **attrs}

    def peer_step() -> torch.Tensor:
        optimizer.step()
        return leaf.detach()

    tolerance = 1e-4 if ours[0].dtype is torch.float32 else 1e-2
    return Row(
        name, ran_in_place(op, *ours, *scalars, **settings), peer_step, nbytes * PARAMETERS, 0, tolerance, calls=3
    )


def optimizer_rows() -> Iterator[Row]:
    """AdamW as values may be kept; the gradients' norm; norm, clip factor and guard."""
    weight, grad = (torch.randn(PARAMETERS, device="cuda", dtype=BF16) * 0.02 for _ in range(2))

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(PARAMETERS, device="cuda", dtype=dtype)

    wide, noise = torch.float32, Noise(0, 0, PARAMETERS // 8)
    yield adamw_row("adamw 494M fp32", wide, 28, weight.float(), grad.float(), zeros(wide), zeros(wide))
    yield adamw_row(
        "adamw 494M bf16, split masters", wide, 26, weight.clone(), zeros(torch.int16), grad, zeros(wide), zeros(wide)
    )
    yield adamw_row(
        "adamw 494M bf16, split masters, bf16 moments", wide, 18, weight.clone(), zeros(torch.int16), grad,
        zeros(BF16), zeros(BF16), noise=noise,
    )  # fmt: skip
    yield adamw_row("adamw 494M all bf16", BF16, 14, weight.clone(), grad, zeros(BF16), zeros(BF16), noise=noise)
    yield Row(
        "total_norm 494M bf16", ran("total_norm", shared(grad), ord=2.0),
        lambda: torch.linalg.vector_norm(grad, dtype=torch.float32), 2 * PARAMETERS, tolerance=1e-4, calls=5,
    )  # fmt: skip
    report, loss = torch.zeros(4, device="cuda"), torch.tensor(2.5, device="cuda")

    def clip() -> torch.Tensor:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        return torch.stack([loss, norm, torch.clamp(1.0 / (norm + 1e-6), max=1.0), (loss + norm) * 0.0])

    yield Row(
        "clip_factor 494M bf16", ran_in_place("clip_factor", report, loss, grad, max_norm=1.0), clip,
        2 * PARAMETERS, tolerance=1e-4, calls=5,
    )  # fmt: skip


def ran_in_place(name: str, *inputs: torch.Tensor, **attrs: Any) -> Callable[[], Any]:
    """An op that changes its first input; the call gives that."""
    arrays = [shared(x).array for x in inputs]

    def call() -> Any:
        registry[name](*arrays, **attrs)
        return TensorBase.wrap(arrays[0])

    return call


def random_rows() -> Iterator[Row]:
    """Dropout by bytes; its random values are Genesis's own, so only p = 0 can be compared."""
    x, p = random(8192, 4864, dtype=BF16)
    yield Row(
        "dropout p=0", ran("dropout", x, p=0.0, seed=1, offset=2), lambda: F.dropout(p, 1e-30), 4 * p.numel(),
        tolerance=1e-2,
    )  # fmt: skip


GROUPS = {
    "attention": attention_rows,
    "swiglu": swiglu_rows,
    "gated": gated_rows,
    "mlp": mlp_rows,
    "finished": finished_rows,
    "quantized": quantized_rows,
    "norm": norm_rows,
    "rope": rope_rows,
    "loss": loss_rows,
    "head": head_rows,
    "embedding": embedding_rows,
    "optimizer": optimizer_rows,
    "random": random_rows,
}


# --- Tiles of attention -----------------------------------------------------------------------------------------------


def candidates(kernel: str) -> Iterator[AttentionTile]:
    """Tiles to try."""
    queries = (32, 64, 128) if kernel == "dkdv" else (64, 128)
    for m, n, warps, stages, registers in itertools.product(queries, (32, 64, 128), (4, 8), (2, 3), (0, 128, 168)):
        if 64 * warps <= 4 * max(m, n) and (registers == 0) != (registers == {4: 168, 8: 128}[warps]):
            yield AttentionTile(m, n, warps, stages, registers)


def sweep(kernel: str, batch: int, tokens: int, heads: int, key_heads: int, head: int) -> None:
    """Print the microseconds of forward or backward with group_part candidate, fastest first."""
    counts = (heads, key_heads, key_heads, heads)
    q, k, v, g = (random(batch, tokens, n, head, dtype=BF16)[0].array for n in counts)
    scale = head**-0.5
    o, lse = registry["attention"](q, k, v, scale=scale)
    grads = registry["attention_backward"](g, q, k, v, o, lse, scale=scale)
    properties = backend.driver.properties
    tiles = tiles_of(bfloat16, head, tokens, tokens, properties.shared_memory, properties.capability[0] == 9)
    best = {"dq": tiles[1], "dkdv": tiles[2]}
    found = []
    for tile in candidates(kernel):
        for group_part in (1, 2, 4, heads // key_heads) if kernel == "dkdv" else (0,):

            def call(tile: AttentionTile = tile, group_part: int = group_part) -> None:
                if kernel == "forward":
                    forward_into(o, lse, q, k, v, None, scale, True, 0, tile)
                else:
                    chosen = {**best, kernel: tile}
                    rows = max(chosen["dq"].queries, chosen["dkdv"].queries)  # dkdv blocks divide dq blocks
                    pair = chosen["dq"]._replace(queries=rows), chosen["dkdv"]
                    backward_into(grads, g, q, k, v, o, lse, None, scale, True, 0, pair, group_part or None)

            try:
                found.append((gpu_us(call, 5, 5), tile, group_part))
            except Exception as failure:  # too much shared memory, say
                print(f"{tuple(tile)}: {type(failure).__name__}", file=sys.stderr, flush=True)
    work = (2 if kernel == "forward" else 5) * batch * heads * tokens * tokens * head
    for us, tile, group_part in sorted(found)[:12]:
        print(f"{us:9.1f} us {work / us / 1e6:7.1f} TFLOP/s  {tuple(tile)} heads a program {group_part or '-'}")


def main() -> None:
    """Measure or sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--sweep", choices=["forward", "dq", "dkdv"])
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--heads", type=int, nargs=2, default=(14, 2))
    options = parser.parse_args()
    if options.sweep:
        sweep(options.sweep, options.batch, options.tokens, *options.heads, options.head)
        return
    some = ["--only", *options.only] if options.only != list(GROUPS) else []
    command = " ".join(["python -m benchmarks.gpu.fused", *some])
    about = {"date": datetime.date.today().isoformat(), "command": command, **environment()}
    found = []
    for group in options.only:
        for row in GROUPS[group]():
            found.append(measure(row))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        backend.pool.empty_cache()
        if options.out:  # of each group as soon as it is there
            write_result(options.out, {**about, "rows": found})
    for r in found:
        rest = r.get("failed") or f"{r['genesis_us']:9.1f} {r['torch_us']:9.1f} {r['ratio']:6.2f}"
        print(f"{r['op']:48s} {rest} {r.get('TB/s', r.get('TFLOP/s', ''))}")


if __name__ == "__main__":
    main()

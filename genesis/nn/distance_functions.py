"""Distances, similarities and products of vectors, one-hot vectors and bags of embeddings, under torch's names."""

from __future__ import annotations

import numpy as np

from genesis.autograd import apply
from genesis.autograd.modes import no_grad
from genesis.dtypes import INTEGER, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import reduce
from genesis.functions.create import arange, full, ones, tensor, zeros
from genesis.functions.index import index_add, index_put, index_select, repeat_interleave
from genesis.functions.linalg import einsum
from genesis.functions.surface import Dims, array_of, layer_function, public
from genesis.nn.activation_functions import check_float, wide
from genesis.ops import index as index_ops
from genesis.tensor import Tensor


@layer_function
def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """x / max(‖x‖_p, eps) over `dim`."""
    check_float("normalize", input)
    return ew.div(input, ew.clamp_min(reduce.norm(input, p, dim, True), eps), out=out)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """x1·x2 / (max(‖x1‖, eps)·max(‖x2‖, eps)) over `dim`; the operands broadcast."""
    for x in (x1, x2):
        check_float("cosine_similarity", x)
    kind = ew.result_type(x1, x2)
    a, b = (ew.to_dtype(x, kind) for x in (x1, x2))
    shape = (a + b).shape if a.shape != b.shape else a.shape
    unit = [x.expand(shape) / ew.clamp_min(reduce.norm(x.expand(shape), 2.0, dim, True), eps) for x in (a, b)]
    return reduce.sum(unit[0] * unit[1], dim)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """‖x1 - x2 + eps‖_p over the last dimension; the operands broadcast."""
    array_of(x1, "pairwise_distance"), array_of(x2, "pairwise_distance")
    return reduce.norm(x1 - x2 + eps, p, -1, keepdim)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """‖x_i - x_j‖_p of all pairs of rows i < j of x = `input` `[N, M]`: `[N·(N-1)/2]`."""
    check_float("pdist", input)
    if input.ndim != 2 or p < 0:
        raise ShapeError(f"pdist takes [N, M] and p >= 0, got shape {input.shape} and p = {p}")
    first, second = (tensor(each, device=input.device) for each in np.triu_indices(input.shape[0], 1))
    pairs = index_select(input, 0, first) - index_select(input, 0, second)
    return reduce.norm(pairs, p, -1)  # type: ignore[no-any-return]


@layer_function
def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Vectors `[…, num_classes]` of int64 with a 1 at each label and 0 elsewhere.

    The default of `num_classes` is the largest label plus 1; finding it waits for a device.
    """
    if array_of(tensor, "one_hot").dtype is not int64:
        raise DTypeError(f"one_hot takes int64 labels, got {tensor.dtype.name}", next="cast with .long()")
    if not tensor.numel() and num_classes <= 0:
        raise ShapeError("one_hot: no labels, and num_classes is not given", next="pass num_classes")
    classes = arange(int(reduce.amax(tensor).item()) + 1 if num_classes == -1 else num_classes, device=tensor.device)
    try:
        labels = apply(index_ops.embedding, tensor, classes.unsqueeze(-1))  # [..., 1]; its kernel checks the labels
    except IndexRangeError:
        raise IndexRangeError(f"one_hot: a label is not between 0 and {len(classes) - 1}") from None
    return (labels == classes).to(int64)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_ij x1_i·weight_oij·x2_j + bias_o for inputs `[…, in1]` and `[…, in2]` and weight `[out, in1, in2]`."""
    array_of(input1, "bilinear"), array_of(input2, "bilinear")
    fits = input1.shape[:-1] == input2.shape[:-1] and weight.shape[1:] == (input1.shape[-1], input2.shape[-1])
    if not fits:
        shapes = f"{input1.shape}, {input2.shape} and {weight.shape}"
        raise ShapeError(f"bilinear: the shapes {shapes} do not match", next="pass [..., A], [..., B] and [O, A, B]")
    y = einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias  # type: ignore[no-any-return]


# --- Embeddings -------------------------------------------------------------------------------------------------------


def limit_rows(ids: Tensor, weight: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows of `weight` that `ids` name to a norm of at most `max_norm`, in place."""
    with no_grad():
        chosen = reduce.unique(ids)
        rows = index_select(weight, 0, chosen)
        norms = reduce.norm(rows, norm_type, -1, True)
        weight[chosen] = ew.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


def embedded(ids: Tensor, weight: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
    """Look up rows; `padding_idx` gets no gradient, and with `scale_grad_by_freq` others are divided by their count."""
    rows = apply(index_ops.embedding, ids, weight)
    if not rows.requires_grad:
        return rows  # type: ignore[no-any-return]
    if scale_grad_by_freq:
        counts = reduce.bincount(ids.reshape(-1), minlength=weight.shape[0])
        share = 1 / index_select(counts, 0, ids.reshape(-1)).to(rows.dtype).reshape(*ids.shape, 1)
        rows = rows.detach() + (rows - rows.detach()) * share
    if padding_idx is None:
        return rows  # type: ignore[no-any-return]
    return ew.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)  # type: ignore[no-any-return]


def padding_row(padding_idx: int | None, weight: Tensor) -> int | None:
    """Return the index from 0. Raises ShapeError if the row does not exist."""
    if padding_idx is None:
        return None
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ShapeError(f"padding_idx {padding_idx} is not one of the {weight.shape[0]} rows")
    return padding_idx % int(weight.shape[0])


@layer_function
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Reduce the rows of `weight` that each bag of ids names: `[bags, width]`. An empty bag gives 0.

    Args:
        input: ids `[bags, size]`, or `[n]` with `offsets`.
        offsets: first position of each bag, `[bags]`; with `include_last_offset` also the end of the last one.
        max_norm, norm_type: scale the rows used to this norm first, in place.
        scale_grad_by_freq: divide a row's gradient by the number of its ids.
        mode: "sum", "mean" or "max".
        sparse: no effect; the gradient is dense.
        per_sample_weights: factor of each id, for "sum".
        padding_idx: id that does not count and gets no gradient.
    """
    ids, starts, factors = _bags(input, offsets, per_sample_weights, mode, include_last_offset)
    padding = padding_row(padding_idx, weight)
    if max_norm is not None:
        limit_rows(ids, weight, max_norm, norm_type)
    ends = [*starts[1:].tolist(), ids.shape[0]] if starts.numel() else []
    sizes = [end - start for start, end in zip(starts.tolist(), ends, strict=True)]
    if include_last_offset and offsets is not None:
        sizes.pop()
    count, total = len(sizes), sum(sizes)
    ids = ids[:total]
    rows = wide(embedded(ids, weight, padding, scale_grad_by_freq))
    bag = repeat_interleave(arange(count, device=ids.device), tensor(sizes, dtype=int64, device=ids.device))
    kept = ones(total, dtype="bool", device=ids.device) if padding is None else ids != padding
    if mode == "max":
        return ew.to_dtype(_largest(rows, bag, kept, sizes), weight.dtype)  # type: ignore[no-any-return]
    if factors is not None:
        rows = rows * factors[:total].unsqueeze(-1)
    rows = ew.where(kept.unsqueeze(-1), rows, 0.0)
    sums = index_add(zeros(count, weight.shape[1], dtype=rows.dtype, device=rows.device), 0, bag, rows)
    if mode == "sum":
        return ew.to_dtype(sums, weight.dtype)  # type: ignore[no-any-return]
    members = index_add(zeros(count, dtype=rows.dtype, device=rows.device), 0, bag, kept.to(rows.dtype))
    return ew.to_dtype(sums / ew.clamp_min(members, 1).unsqueeze(-1), weight.dtype)  # type: ignore[no-any-return]


def _bags(
    input: Tensor, offsets: Tensor | None, factors: Tensor | None, mode: str, include_last_offset: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids `[n]`, the first position of each bag, and factors `[n]`."""
    if array_of(input, "embedding_bag").dtype.category != INTEGER:
        raise DTypeError(f"embedding_bag takes integer ids, got {input.dtype.name}")
    if mode not in ("sum", "mean", "max"):
        raise UsageError(f"embedding_bag: mode is {mode!r}", next='use "sum", "mean" or "max"')
    if factors is not None and (mode != "sum" or factors.shape != input.shape):
        raise UsageError(
            f"embedding_bag: per_sample_weights of shape {factors.shape} with mode {mode!r}",
            next=f'pass shape {tuple(input.shape)} with mode "sum"',
        )
    flat = None if factors is None else factors.reshape(-1)
    if input.ndim == 2:
        if offsets is not None:
            raise UsageError("embedding_bag: input is 2-D, so offsets must be None")
        bags, size = input.shape
        return input.reshape(-1), arange(bags, device=input.device) * size, flat
    if input.ndim != 1 or offsets is None or offsets.ndim != 1:
        raise ShapeError(f"embedding_bag takes [bags, size], or [n] with offsets [bags]; got {tuple(input.shape)}")
    if include_last_offset and not offsets.numel():
        raise ShapeError("embedding_bag: include_last_offset needs at least one offset")
    if offsets.numel() and int(offsets[0].item()) != 0:
        raise UsageError(f"embedding_bag: offsets[0] is {int(offsets[0].item())}, and must be 0")
    return input, offsets, flat


def _largest(rows: Tensor, bag: Tensor, kept: Tensor, sizes: list[int]) -> Tensor:
    """The largest element of each column in each bag; the first of equal ones gets the gradient."""
    count, longest = len(sizes), max(sizes, default=0)
    if not longest:
        return zeros(count, rows.shape[-1], dtype=rows.dtype, device=rows.device)  # type: ignore[no-any-return]
    place = tensor(np.concatenate([np.arange(n) for n in sizes]), device=rows.device)
    table = full((count, longest, rows.shape[-1]), float("-inf"), dtype=rows.dtype, device=rows.device)
    table = index_put(table, (bag, place), ew.where(kept.unsqueeze(-1), rows, float("-inf")))
    top = reduce.max(table, 1).values
    return ew.where(top == float("-inf"), 0.0, top)  # type: ignore[no-any-return]

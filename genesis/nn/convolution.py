"""One-dimensional convolutions as windows and one matmul, and paddings that repeat elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import linalg
from genesis.functions import shape as shapes
from genesis.functions.create import tensor, zeros
from genesis.functions.index import index_select
from genesis.functions.surface import Sizes, array_of, layer_function, public
from genesis.tensor import Tensor


@layer_function
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Return x with elements added; `pad` lists (before, after) from the last dimension on; negative widths crop.

    Args:
        mode: "constant" adds `value` (0 by default); "reflect" mirrors at the border elements, "replicate" repeats
            them, "circular" continues at the other end.
    """
    if mode == "constant":
        return shapes.pad(input, pad, mode, 0.0 if value is None else value)  # type: ignore[no-any-return]
    shape, count = array_of(input, "pad").shape, len(pad) // 2
    if mode not in ("reflect", "replicate", "circular"):
        raise UsageError(f"pad: mode is {mode!r}", next='use "constant", "reflect", "replicate" or "circular"')
    if value:
        raise UsageError(f"pad: mode {mode!r} takes no value")
    if len(pad) % 2 or not count or len(shape) - count not in (1, 2):
        raise ShapeError(
            f"pad: mode {mode!r} with widths {tuple(pad)} does not fit shape {shape}",
            next="pad the last dimensions of [C, ...] or [N, C, ...]",
        )
    for i in range(count):
        before, after, dim = pad[2 * i], pad[2 * i + 1], len(shape) - 1 - i
        size = shape[dim]
        limit = {"reflect": size - 1, "circular": size}.get(mode)
        if (limit is not None and max(before, after) > limit) or not size or size + before + after < 0:
            raise ShapeError(f"pad: mode {mode!r} with widths {tuple(pad)} does not fit dimension {dim} of {shape}")
        place = np.arange(-before, size + after)
        if mode == "reflect":
            place = np.abs(place)
            place = np.where(place < size, place, 2 * (size - 1) - place)
        if mode == "replicate":
            place = place.clip(0, size - 1)
        elif mode == "circular":  # wraps around in the part that negative widths keep
            first, kept = max(-before, 0), size - max(-before, 0) - max(-after, 0)
            place = (place - first) % max(kept, 1) + first
        input = index_select(input, dim, tensor(place, device=input.device))
    return input


def one_size(value: Any, function: str, name: str) -> int:
    """Return an integer from an integer or a sequence of one."""
    values = (value,) if isinstance(value, int) else tuple(value)
    if len(values) != 1:
        raise UsageError(f"{function}: {name} is {value}", next="pass one integer")
    return int(values[0])


def _check(name: str, input: Any, weight: Any, bias: Any, groups: int, channels: int, out: int) -> None:
    if array_of(input, name).dtype is not array_of(weight, name).dtype:
        raise DTypeError(f"{name}: the input is {input.dtype.name}, and the weight is {weight.dtype.name}")
    fits = input.ndim in (2, 3) and weight.ndim == 3 and groups > 0
    if not fits or input.shape[-2] != channels or weight.shape[0] % groups or 0 in weight.shape[2:]:
        raise ShapeError(
            f"{name}: input {input.shape}, weight {weight.shape} and groups {groups} do not match",
            next="pass an input [N, C, L] or [C, L]",
        )
    if bias is not None and bias.shape != (out,):
        raise ShapeError(f"{name}: the bias has shape {bias.shape}, expected ({out},)")


@public(method=False, nn=True)
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """y[o, i] = Σ weight[o, c, k]·x[c, stride·i + dilation·k - padding] + bias[o].

    Args:
        input: x, `[N, C, L]` or `[C, L]`.
        weight: `[O, C/groups, K]`.
        padding: zeros on each side; "valid" is 0, and "same" keeps the length (with stride 1).
    """
    name = "conv1d"
    channels = weight.shape[1] * groups if array_of(weight, name).ndim == 3 else 0
    _check(name, input, weight, bias, groups, channels, weight.shape[0])
    step, spacing = one_size(stride, name, "stride"), one_size(dilation, name, "dilation")
    span = spacing * (weight.shape[2] - 1) + 1
    if padding in ("same", "valid"):
        if padding == "same" and step != 1:
            raise UsageError(f'{name}: padding "same" needs stride 1, got {step}')
        before, after = ((span - 1) // 2, span // 2) if padding == "same" else (0, 0)
    elif isinstance(padding, str):
        raise UsageError(f"{name}: padding is {padding!r}", next='use an integer, "same" or "valid"')
    else:
        before = after = one_size(padding, name, "padding")
    if step < 1 or spacing < 1 or before < 0:
        raise UsageError(f"{name}: stride {step}, dilation {spacing} and padding {before} must be positive")
    x = input if input.ndim == 3 else input.unsqueeze(0)
    if before or after:
        x = shapes.pad(x, (before, after))
    if x.shape[2] < span:
        raise ShapeError(f"{name}: the padded input has {x.shape[2]} positions, and the kernel spans {span}")
    windows = shapes.unfold(x, 2, span, step)
    y = _product(windows if spacing == 1 else windows[..., ::spacing], weight, groups)
    y = y if bias is None else y + bias.unsqueeze(1)
    return y if input.ndim == 3 else y.squeeze(0)


def _product(windows: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Multiply windows `[N, C, L, K]` by weight `[O, C/groups, K]`: `[N, O, L]`."""
    batch, channels, length, size = windows.shape
    out, each = weight.shape[0] // groups, channels // groups * size
    rows = windows.reshape(batch, groups, channels // groups, length, size)
    rows = rows.permute(1, 0, 3, 2, 4).reshape(groups, batch * length, each)
    y = linalg.bmm(rows, weight.reshape(groups, out, each).transpose(1, 2))  # [groups, N·L, O/groups]
    y = y.reshape(groups, batch, length, out).permute(1, 0, 3, 2)
    return y.reshape(batch, groups * out, length)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The gradient of `conv1d` with respect to its input, as a layer: `[N, C, L]` to `[N, O, …]`.

    Args:
        weight: `[C, O/groups, K]`.
        padding: positions cut off on each side.
        output_padding: positions added at the end, fewer than `stride` or `dilation`.
    """
    name = "conv_transpose1d"
    out = weight.shape[1] * groups if array_of(weight, name).ndim == 3 else 0
    _check(name, input, weight, bias, groups, weight.shape[0], out)
    step, cut = one_size(stride, name, "stride"), one_size(padding, name, "padding")
    more, spacing = one_size(output_padding, name, "output_padding"), one_size(dilation, name, "dilation")
    if step < 1 or spacing < 1 or cut < 0 or not 0 <= more < max(step, spacing):
        raise UsageError(f"{name}: stride {step}, dilation {spacing}, padding {cut} and output_padding {more}")
    x = input if input.ndim == 3 else input.unsqueeze(0)
    if step > 1:  # zeros between the positions
        gaps = zeros(*x.shape, step - 1, dtype=x.dtype, device=x.device)
        x = shapes.cat([x.unsqueeze(3), gaps], 3).flatten(2)[..., : (x.shape[2] - 1) * step + 1]
    channels, each, size = weight.shape
    kernel = weight.reshape(groups, channels // groups, each, size).transpose(1, 2).reshape(out, -1, size).flip(2)
    edge = spacing * (size - 1) - cut
    y = conv1d(shapes.pad(x, (edge, edge + more)), kernel, bias, 1, 0, spacing, groups)
    return y if input.ndim == 3 else y.squeeze(0)

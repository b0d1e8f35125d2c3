"""Fusion: an expression written op by op passes over memory once for each op, a fused one once in all.

Both do the same arithmetic. On large tensors the passes are what takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import genesis
from genesis import Tensor
from genesis.backend import CPU
from genesis.demos.comparing import CLOSE, Setting, Way, compare, passes
from genesis.demos.schema import DemoRow, Section
from genesis.errors import DeviceError
from genesis.profile.format import format_ratio


def gelu_by_hand(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), op by op: each makes a tensor of x's size and reads it again."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + inner.tanh())


def softmax_by_hand(x: Tensor) -> Tensor:
    """e^x / Σ e^x over rows in five passes: maximum, difference, exponential, sum, quotient."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def sections(setting: Setting) -> Iterator[Section]:
    """GELU, then softmax, on a square of float32."""
    width = setting.square()
    x = genesis.randn(width, width, device=setting.device)
    yield _gelu(x, setting)
    yield _softmax(x, setting)


def _gelu(x: Tensor, setting: Setting) -> Section:
    ways = [Way("by hand", lambda: gelu_by_hand(x)), Way("fused", lambda: genesis.gelu_tanh(x))]
    notes = []
    if setting.device == CPU:
        notes.append("the kernels in CUDA C++ and in Triton need a GPU")
    else:
        more, notes = _kernels(x)
        ways += more
    rows = compare(ways, setting)
    sentences = [passes(*rows[:2]), *_languages(rows)]
    return Section(title=f"GELU of {_shape(x)}", rows=rows, sentences=sentences, notes=notes)


def _kernels(x: Tensor) -> tuple[list[Way], list[str]]:
    """The kernels of `kernels.py`, and why one is left out."""
    from genesis.demos.kernels import in_cuda, in_triton

    triton = in_triton()
    ways, notes = [Way("in Triton", lambda: triton(x))], []
    try:
        cuda = in_cuda()
        cuda(x)
        ways.insert(0, Way("in CUDA C++", lambda: cuda(x)))
    except DeviceError as error:
        notes.append(f"no row for CUDA C++: {error.what}; {error.next}")
    return ways, notes


def _softmax(x: Tensor, setting: Setting) -> Section:
    ways = [Way("by hand", lambda: softmax_by_hand(x)), Way("fused", lambda: genesis.softmax(x, -1))]
    rows = compare(ways, setting)
    return Section(title=f"softmax of the rows of {_shape(x)}", rows=rows, sentences=[passes(*rows)], notes=[])


def _shape(x: Tensor) -> str:
    return f"{'x'.join(map(str, x.shape))} {x.dtype.name}"


def _languages(rows: list[DemoRow]) -> list[str]:
    """How the kernels in other languages compare with the built-in one."""
    fused, others = rows[1], rows[2:]
    if not others:
        return []
    ratios = {row.name: row.seconds / fused.seconds for row in others}
    listed = " and ".join(f"{name} {format_ratio(ratio)}" for name, ratio in ratios.items())
    alike = all(abs(ratio - 1) <= CLOSE for ratio in ratios.values())
    end = "what a kernel is written in matters less here than how often memory is passed" if alike else "kernels differ"
    return [f"Of the fused op's time it takes {listed}: {end}."]

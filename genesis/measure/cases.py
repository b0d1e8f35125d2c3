"""What an op is called with when only a shape is given: the kinds of ops, their shapes, and the names of ops.

Every other module here is generic over the registry. A kind is found by the op's name, by what its record says
(elementwise ops), or from the op whose gradient it is; an op of a new form takes a name in a row and its factory.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.cuda import get_device_capability
from genesis.custom import load_op, user_ops
from genesis.dtypes import DType, bool_, float32, int32
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError, nearest
from genesis.measure import factories
from genesis.measure.factories import Arguments, Axes, Request
from genesis.op import Op, registry
from genesis.ops.fp8 import lacking
from genesis.shapes import Shape

# What decoding and ranks run is registered when it is imported.
from genesis.ops import attention_step, gradients, quantized_linear, sample  # noqa: F401  isort: skip

CATEGORIES = ("element", "activation", "reduction", "matmul", "memory", "optimizer")
# Size classes, in the order of the work they are; "batch" is a batch of a language model's tokens.
SIZES = ("small", "medium", "batch", "large", "xlarge")


@dataclass(frozen=True)
class Case:
    """An op and what it is called with.

    Attributes:
        name, shape, axes: as they were asked for; axes is None for ops that have none, and for all of them.
        label: both, for people.
    """

    name: str
    op: Op
    shape: Shape
    axes: Axes
    label: str
    dtype: DType
    device: Device
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]

    @property
    def arrays(self) -> list[Array]:
        """The inputs that are arrays."""
        return [x for x in self.inputs if isinstance(x, Array)]


@dataclass(frozen=True)
class Kind:
    """Ops that take inputs of the same form.

    Attributes:
        shape: what the numbers of a shape mean, for people.
        make: the arguments of a call.
        shapes: one for each of `SIZES`.
        category: one of `CATEGORIES`.
        counts: how many numbers a shape may have; none means any count.
        names: the ops, where they are not recognized by their record.
        axes: the axes to measure when none are given; none where the ops have no axis.
        multiplies: the FLOPs are those of matrix products.
    """

    shape: str
    make: Callable[[Request], Arguments]
    shapes: tuple[Shape, ...]
    category: str = "element"
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    axes: tuple[Axes, ...] = ()
    multiplies: bool = False

    def shape_of(self, size: str) -> Shape:
        """The shape of a size class."""
        return self.shapes[SIZES.index(size)]


# --- The table --------------------------------------------------------------------------------------------------------

SQUARES = ((256, 256), (1024, 1024), (32, 512, 896), (4096, 4096), (8192, 8192))
MATRICES = ((256, 256), (896, 896), (4864, 896), (2048, 2048), (4096, 4096))
REDUCED = ((4, 64, 256), (4, 512, 896), (32, 512, 896), (8, 1024, 2048), (16, 2048, 4864))
TOKENS = ((1, 128, 896), (4, 512, 896), (32, 512, 896), (8, 2048, 896), (16, 4096, 896))
HEADS = ((1, 128, 14, 64), (1, 512, 14, 64), (32, 512, 14, 64), (4, 1024, 14, 64), (4, 4096, 14, 64))
PRODUCTS = ((256,), (1024,), (2048, 896, 4864), (4096,), (8192,))
LAYERS = ((256,), (2048, 896, 896), (8192, 4864, 896), (2048, 896, 4864), (8192, 896, 4864))
GATES = ((128, 4864), (512, 4864), (32, 512, 4864), (2048, 4864), (8192, 4864))
ROWS = ((1024, 896), (4096, 896), (16384, 896), (32768, 896), (151936, 896))
LOGITS = ((128, 4096), (256, 16384), (4096, 32768), (256, 151936), (2048, 151936))
HEAD = ((128, 256, 4096), (256, 896, 4096), (2048, 896, 151936), (512, 896, 32768), (8192, 896, 151936))
REDUCTIONS = (
    "sum", "mean", "count_nonzero", "var", "std", "prod", "amax", "amin", "any", "all", "logsumexp", "norm"
)  # fmt: skip
ALONG_AXIS = (
    "argmax", "argmin", "max_with_indices", "min_with_indices", "cumsum", "sort", "topk", "put_along_axis"
)  # fmt: skip
ALL_AXES: tuple[Axes, ...] = (None, -1, (0, 1))
OVER_WHOLE = "any, summed over the axes, which stay as 1"
F = factories
# Categories of ops by the file that defines them, where their kind does not say.
FAMILIES = {
    "shape": "memory", "create": "memory", "index": "memory", "activation": "activation", "elementwise": "element",
    "random": "element", "sort": "reduction", "gradients": "optimizer", "rounding": "optimizer",
    "matrix_optimizers": "optimizer", "rank_sum": "optimizer",
}  # fmt: skip
MOVING = ("copy", "overwrite", "cast", "fill")  # elementwise ops that compute nothing

KINDS: dict[str, Kind] = {
    "elementwise": Kind("any", F.elementwise, SQUARES),
    "transpose": Kind(
        "rows,columns", F.transposed, tuple((x[0], x[-1]) for x in SQUARES), "memory", (2,), ("transpose",)
    ),
    "reduction": Kind("any", F.reduction, REDUCED, "reduction", (), REDUCTIONS, ALL_AXES),
    "sum to a shape": Kind(OVER_WHOLE, F.sum_to_shape, REDUCED, "reduction", (), ("sum_to_shape",), ALL_AXES),
    "along one axis": Kind("any", F.along_axis, REDUCED, "reduction", (), ALONG_AXIS, (-1,)),
    "softmax": Kind(
        "any", F.along_axis, (*SQUARES[:4], (16384, 16384)), "activation", (), ("softmax", "log_softmax"), (-1,)
    ),
    "matmul": Kind(
        "N, or M,K,N for [M, K] x [K, N]", F.product("mk", "kn"), PRODUCTS, "matmul", (1, 3),
        ("matmul", "mixed_matmul", "matmul_add", "add_matmul", "matmul_sum", "quantized_matmul"), multiplies=True,
    ),
    "linear": Kind(
        "N, or M,K,N for x [M, K] and a weight [N, K]", F.product("mk", "nk"), LAYERS, "matmul", (1, 3),
        ("linear", "packed_linear", "norm_linear", "norm_mlp", "swiglu_linear_backward", "quantized_linear",
         "low_rank_backward"), multiplies=True,
    ),
    "norm": Kind(
        "any, normed over the last", F.rms_norm, TOKENS, "reduction", (),
        ("rms_norm", "layer_norm", "quantize_rows", "rms_norm_scale", "scale_columns"),
    ),
    "attention": Kind(
        "B,T,heads,size", F.attention, HEADS, "matmul", (4,), ("attention", "attention_packed", "attention_step"),
        multiplies=True,
    ),
    "rope": Kind("B,T,heads,size", F.rope, HEADS, "element", (4,), ("rope", "norm_rope")),
    "swiglu": Kind(
        "any, of gate and of up", F.swiglu, GATES, "activation", (), ("swiglu", "swiglu_packed", "geglu_packed")
    ),
    "rows by index": Kind(
        "rows,width", F.index_put, ROWS, "memory", (2,),
        ("embedding", "embedding_add_", "index_get", "index_put", "index_put_"),
    ),
    "classes": Kind(
        "rows,classes", F.cross_entropy, LOGITS, "reduction", (2,),
        ("cross_entropy", "sample", "next_tokens", "multinomial"),
    ),
    "linear cross entropy": Kind(
        "rows,width,classes", F.linear_cross_entropy, HEAD, "matmul", (3,), ("linear_cross_entropy",), multiplies=True
    ),
    "step of a matrix": Kind(
        "rows,columns", F.adafactor_step, MATRICES, "optimizer", (2,),
        ("newton_schulz", "muon_step", "adafactor_step", "dora_factors", "dequantize_rows", "scale_rows"),
        multiplies=True,
    ),
    "step of a rule": Kind(
        "any", F.rule_step, SQUARES, "optimizer",
        names=tuple(f"{rule}{split}_step" for rule in F.RULES for split in ("", "_split")),
    ),
}  # fmt: skip

# Names that people know an op by.
ALIASES = {
    **{f"reduce_{name}": name for name in REDUCTIONS},
    "reduce_max": "amax",
    "reduce_min": "amin",
    "max": "amax",
    "min": "amin",
    "sum_to_size": "sum_to_shape",
    "clip": "clamp",
    "clone": "copy",
    "contiguous": "copy",
    "transpose": "copy",
}


@functools.cache
def kind_of(name: str) -> Kind | None:
    """The kind of an op or an alias; None where there is no such op, or nothing says how to call it."""
    meant = ALIASES.get(name, name)
    op, make = registry.get(meant), factories.CALLS.get(meant)
    for key in (name, meant):  # an alias may be of a kind of its own, as a transpose is a copy
        for kind in KINDS.values():
            if key in kind.names:
                return replace(kind, make=make or kind.make)
    if op is None:
        return None
    if make is not None or (op.elementwise and op.family in ("elementwise", "activation")):
        category = "memory" if meant in MOVING else FAMILIES.get(op.family, "element")
        return replace(KINDS["elementwise"], make=make or factories.elementwise, category=category)
    forward = kind_of(meant.removesuffix("_backward")) if meant.endswith("_backward") else None
    return None if forward is None else replace(forward, make=functools.partial(factories.backward_of, forward.make))


def supported() -> list[str]:
    """Every name that `op_named` takes, sorted."""
    return sorted(name for name in {*registry, *ALIASES} if kind_of(name) is not None)


def op_named(name: str) -> tuple[Op, Kind]:
    """The op meant by a name of the registry, an alias, or "module:name" of a user's op; and its kind.

    Raises:
        UsageError: there is no such op.
    """
    user = load_op(name) if ":" in name else user_ops.get(name)
    if user is not None:
        return user.op, replace(KINDS["elementwise"], make=functools.partial(factories.of_user, user))
    if (kind := kind_of(name)) is not None:
        return registry[ALIASES.get(name, name)], kind
    near, listed = nearest(name, supported(), 0.5), textwrap.fill(" ".join(supported()), 90)
    what = f"there is no op {name}"
    raise UsageError(what, where="--op", next=f"did you mean {near}?" if near else f"ops: {listed}")


# --- Cases ------------------------------------------------------------------------------------------------------------


def default_sizes(device: Device, *, is_fast: bool = False) -> tuple[str, ...]:
    """What is measured when no size is asked for: what shows the limit of a GPU takes a CPU too long."""
    if is_fast:
        return ("medium",) if device == CPU else ("large",)
    return ("small", "medium", "large") if device == CPU else SIZES


def choices(
    name: str, device: Device, shapes: Sequence[Shape] = (), axes: Sequence[Axes] = ()
) -> Iterator[tuple[Shape, Axes]]:
    """The shapes and axes to measure: those that are given, else those of the default sizes.

    A given shape without an axis is measured over the first of the kind's axes.

    Raises:
        UsageError: there is no such op, or it has no axis.
    """
    kind = op_named(name)[1]
    if axes and not kind.axes:
        raise UsageError(f"{name} has no axis", where="--axis", next="leave --axis out")
    over = axes or (kind.axes[:1] if shapes else kind.axes) or (None,)
    for shape in shapes or [kind.shape_of(size) for size in default_sizes(device)]:
        for each in over:
            yield shape, each


def make_case(name: str, shape: Shape, axes: Axes, dtype: DType | None, device: Device) -> Case:
    """The op called `name` with its inputs.

    Args:
        shape, axes: see the kind.
        dtype: None takes the first of float32, int32 and bool that the op takes.

    Raises:
        UsageError: the op does not take this shape, axis or dtype, or the device lacks what it needs.
    """
    op, kind = op_named(name)
    if kind.counts and len(shape) not in kind.counts:
        raise UsageError(f"{name} takes the shape {kind.shape}; got {_numbers(shape)}", where="--shape")
    if op.family == "fp8" and device != CPU and (lack := lacking(get_device_capability(device), device)):
        raise UsageError(f"{name} {lack}", where="--device", next="measure another op, or this one on the CPU")
    refused: UsageError | None = None
    for each in (float32, int32, bool_) if dtype is None else (dtype,):
        try:
            call = _approved(kind, Request(op, shape, axes, each, device))
            return Case(name, op, shape, axes, label_of(name, shape, axes), each, device, *call)
        except DTypeError as error:
            refused = refused or UsageError(error.what, where="--dtype", next=error.next)
        except IndexRangeError as error:
            raise UsageError(error.what, where="--axis", next=error.next) from error
        except ShapeError as error:
            where = "--shape" if axes is None else "--shape and --axis"
            raise UsageError(error.what, where=where, next=error.next) from error
    assert refused is not None
    raise refused


def _approved(kind: Kind, request: Request) -> Arguments:
    """The arguments, which the op's own rule has seen."""
    call = kind.make(request)
    request.op.infer(*call.inputs, **{name: value for name, value in call.attrs.items() if name != "device"})
    return call


def label_of(name: str, shape: Shape, axes: Axes) -> str:
    """Shape and axes for people: "4x512x896 over -1"."""
    label = "x".join(map(str, shape))
    if not op_named(name)[1].axes:
        return label
    return f"{label} over " + ("all" if axes is None else _numbers(axes) if isinstance(axes, tuple) else str(axes))


def _numbers(shape: Shape) -> str:
    return ",".join(map(str, shape))

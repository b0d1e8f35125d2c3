"""What an op is called with when only a shape is given: the kinds of ops, their typical shapes, and the names of ops.

Every other module here is generic over the registry. An op of a new kind takes one row of `KINDS` and its factory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.cuda import get_device_capability
from genesis.custom import load_op, user_ops
from genesis.dtypes import DType, bool_, float32, int32
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError, nearest
from genesis.op import Op, registry
from genesis.ops.fp8 import lacking
from genesis.profile import factories
from genesis.profile.factories import Arguments, Axes, Request
from genesis.shapes import Shape


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
        typical: shapes to measure when none is given.
        large: further ones that only a GPU is given.
        sizes: how many numbers a shape may have; none means any count.
        names: the ops, where they are not recognized by their family.
        axes: the axes to measure when none are given; none where the ops have no axis.
        multiplies: the FLOPs are those of matrix products.
    """

    shape: str
    make: Callable[[Request], Arguments]
    typical: tuple[Shape, ...]
    large: tuple[Shape, ...] = ()
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    axes: tuple[Axes, ...] = ()
    multiplies: bool = False


# --- The table --------------------------------------------------------------------------------------------------------

SQUARES = ((256, 256), (512, 512), (2048, 2048), (4096, 4096))
REDUCED = ((4, 512, 896),)
TOKENS = ((1, 512, 896), (4, 512, 896))
HEADS = ((1, 256, 14, 64), (1, 512, 14, 64))
LONG_HEADS = ((4, 2048, 14, 64),)
REDUCTIONS = (
    "sum", "mean", "count_nonzero", "var", "std", "prod", "amax", "amin", "any", "all", "logsumexp", "norm"
)  # fmt: skip
ALONG_AXIS = ("argmax", "argmin", "max_with_indices", "min_with_indices", "cumsum", "sort", "topk")

KINDS: dict[str, Kind] = {
    "elementwise": Kind("any", factories.elementwise, SQUARES, ((8192, 8192),)),
    "fill": Kind("any", factories.fill, SQUARES, ((8192, 8192),), names=("fill",)),
    "transpose": Kind(
        "rows,columns", factories.transposed, SQUARES[1:], ((8192, 8192),), sizes=(2,), names=("transpose",)
    ),
    "reduction": Kind("any", factories.reduction, REDUCED, names=REDUCTIONS, axes=(None, -1, (0, 1))),
    "sum to a shape": Kind(
        "any, summed over the axes, which stay as 1",
        factories.sum_to_shape,
        REDUCED,
        names=("sum_to_shape",),
        axes=(None, -1, (0, 1)),
    ),
    "along one axis": Kind("any", factories.along_axis, REDUCED, names=ALONG_AXIS, axes=(-1,)),
    "softmax": Kind(
        "any",
        factories.along_axis,
        ((512, 512), (2048, 2048)),
        ((16384, 16384),),
        names=("softmax", "log_softmax"),
        axes=(-1,),
    ),
    "matmul": Kind(
        "N, or M,K,N for [M, K] x [K, N]",
        factories.matmul,
        ((512,), (1024,)),
        ((2048,), (4096,)),
        sizes=(1, 3),
        names=("matmul", "quantized_matmul"),
        multiplies=True,
    ),
    "linear": Kind(
        "N, or M,K,N for x [M, K] and a weight [N, K]",
        factories.linear,
        ((512,), (2048, 896, 896)),
        ((8192, 896, 4864),),
        sizes=(1, 3),
        names=("linear", "packed_linear"),
        multiplies=True,
    ),
    "norm": Kind(
        "any, normed over the last",
        factories.norm,
        TOKENS,
        ((8, 2048, 896),),
        names=("rms_norm", "layer_norm", "quantize_rows"),
    ),
    "attention": Kind(
        "B,T,heads,size",
        factories.attention,
        HEADS,
        LONG_HEADS,
        sizes=(4,),
        names=("attention", "attention_packed"),
        multiplies=True,
    ),
    "rope": Kind("B,T,heads,size", factories.rope, HEADS, LONG_HEADS, sizes=(4,), names=("rope",)),
    "swiglu": Kind(
        "any, of gate and of up",
        factories.swiglu,
        ((512, 4864),),
        ((8192, 4864),),
        names=("swiglu", "swiglu_packed", "geglu_packed"),
    ),
    "embedding": Kind(
        "rows,width",
        factories.embedding,
        ((4096, 896), (16384, 896)),
        ((151936, 896),),
        sizes=(2,),
        names=("embedding",),
    ),
    "cross entropy": Kind(
        "rows,classes",
        factories.cross_entropy,
        ((256, 4096), (128, 151936)),
        ((8192, 151936),),
        sizes=(2,),
        names=("cross_entropy",),
    ),
    "linear cross entropy": Kind(
        "rows,width,classes",
        factories.linear_cross_entropy,
        ((256, 896, 4096),),
        ((8192, 896, 151936),),
        sizes=(3,),
        names=("linear_cross_entropy",),
        multiplies=True,
    ),
}

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


def _is_elementwise(op: Op) -> bool:
    """Whether all inputs are arrays of the result's shape."""
    return op.elementwise and op.family in ("elementwise", "activation")


def kind_of(name: str) -> Kind | None:
    """The kind of an op or an alias; None where it is in no row."""
    meant = ALIASES.get(name, name)
    for key in (name, meant):  # an alias may be of a kind of its own, as a transpose is a copy
        for kind in KINDS.values():
            if key in kind.names:
                return kind
    return KINDS["elementwise"] if meant in registry and _is_elementwise(registry[meant]) else None


def supported() -> list[str]:
    """Every name that `op_named` takes, sorted."""
    return sorted(name for name in {*registry, *ALIASES} if kind_of(name) is not None)


def op_named(name: str) -> tuple[Op, Kind]:
    """The op meant by a name of the registry, an alias, or "module:name" of a user's op; and its kind.

    Raises:
        UsageError: there is no such op, or no row says how to make its inputs.
    """
    user = load_op(name) if ":" in name else user_ops.get(name)
    if user is not None:
        return user.op, Kind("any", functools.partial(factories.of_user, user), SQUARES, ((8192, 8192),))
    kind, key = kind_of(name), ALIASES.get(name, name)
    if kind is not None:
        return registry[key], kind
    if key in registry:
        raise UsageError(
            f"the inputs of {name} cannot be made from a shape", where="--op", next=f"ops that can: {_listed()}"
        )
    near = nearest(name, supported(), 0.5)
    what = f"there is no op {name}"
    raise UsageError(what, where="--op", next=f"did you mean {near}?" if near else f"ops: {_listed()}")


def _listed() -> str:
    """The supported ops in lines."""
    lines, line = [], ""
    for name in supported():
        if len(line) + len(name) > 90:
            lines.append(line)
            line = ""
        line += name + " "
    return "\n".join([*lines, line]).replace(" \n", "\n").rstrip()


# --- Cases ------------------------------------------------------------------------------------------------------------


def choices(
    name: str, device: Device, shapes: Sequence[Shape] = (), axes: Sequence[Axes] = ()
) -> Iterator[tuple[Shape, Axes]]:
    """The shapes and axes to measure: those that are given, else the kind's.

    A given shape without an axis is measured over the first of the kind's axes.

    Raises:
        UsageError: there is no such op, or it has no axis.
    """
    kind = op_named(name)[1]
    if axes and not kind.axes:
        raise UsageError(f"{name} has no axis", where="--axis", next="leave --axis out")
    over = axes or (kind.axes[:1] if shapes else kind.axes) or (None,)
    for shape in shapes or (*kind.typical, *(() if device == CPU else kind.large)):
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
    if kind.sizes and len(shape) not in kind.sizes:
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

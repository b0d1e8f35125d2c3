"""What every group checks of the arrays of a call, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from genesis.array import Array
from genesis.backend import Device
from genesis.dtypes import BOOL, FLOAT, float8_e4m3fn, float32
from genesis.errors import DeviceError, DTypeError, ShapeError

ALIGNMENT = 32  # elements


class Member(Protocol):
    """A rank of a group, whose arrays are on `device`."""

    rank: int
    size: int
    device: Device


def parts_of(group: Member, whole: Array, part: Array, parts: Sequence[int] | None) -> list[int]:
    """The elements of each rank of `whole`, checked against this rank's `part`."""
    check_array(group, whole)
    check_array(group, part)
    if parts is None:
        each, rest = divmod(whole.size, group.size)
        if rest or each % ALIGNMENT:
            what = f"{whole.size} elements are not {group.size} parts of a multiple of {ALIGNMENT}"
            raise ShapeError(what, next="pad the array, or give the parts")
        cut = [each] * group.size
    else:
        cut = [int(each) for each in parts]
    if len(cut) != group.size or min(cut) < 0 or sum(cut) != whole.size:
        what = f"the parts {cut} are not those of {whole.size} elements for {group.size} ranks"
        raise ShapeError(what, next="give one size for each rank, which add up to the whole")
    if part.size != cut[group.rank]:
        what = f"rank {group.rank} has an array of {part.size} elements for its part of {cut[group.rank]}"
        raise ShapeError(what, next="give an array of the size of the part")
    return cut


def check_array(group: Member, x: Array) -> None:
    """Refuse what no collective takes."""
    if x.device != group.device:
        raise DeviceError(f"this group is for arrays on {group.device}, and one is on {x.device}", next="move it there")
    if x.ndim != 1 or not x.is_contiguous:
        what = f"a collective takes contiguous arrays of one dimension, not shape {x.shape}, strides {x.strides}"
        raise ShapeError(what, next="give a slice of a flat buffer")


def check_reduction(group: Member, source: Array, out: Array) -> None:
    """Refuse what cannot be added, and dtypes to which a sum does not go."""
    check_array(group, source)
    if source.dtype.category == BOOL or source.dtype is float8_e4m3fn:
        raise DTypeError(f"{source.dtype} cannot be added over ranks", next="convert it to int64 or float32")
    is_wider = out.dtype is float32 and source.dtype.category == FLOAT and source.dtype.itemsize < float32.itemsize
    if out.dtype is not source.dtype and not is_wider:
        what = f"a sum of {source.dtype} goes to {source.dtype}, or from a narrower float to float32, not {out.dtype}"
        raise DTypeError(what, next="give an array of that dtype")


def check_gather(part: Array, out: Array) -> None:
    """Refuse parts of another dtype."""
    if part.dtype is not out.dtype:
        raise DTypeError(f"parts of {part.dtype} do not make an array of {out.dtype}", next="give them one dtype")


def check_root(group: Member, root: int) -> None:
    """Refuse a rank that the group does not have."""
    if not 0 <= root < group.size:
        raise ShapeError(f"there is no rank {root} among {group.size}", next=f"give 0 to {group.size - 1}")

"""Which of many signatures are compiled ahead of time: a part in which every kernel shows each of its features."""

from __future__ import annotations

import heapq
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from genesis.backend.cuda.compile import Signature

__all__ = ["PARTS", "Kernels", "covering", "features", "rotated"]

Kernels = list[tuple[Any, Signature]]
PARTS = 32


def _kinds(signature: Signature) -> tuple[Any, ...]:
    """What of a signature is not mere layout: pointer and number types, functions and types among the constants, and
    flags. Tuples count by their elements, tiles that are read through a descriptor by their type.
    """
    types = tuple(re.split(r"[:\[]", t)[0] for t in signature.types if isinstance(t, str) and t[0] in "*ft")
    constants = list(_elements(signature.constants))
    functions = tuple((k, repr(c)) for k, c in constants if not isinstance(c, (bool, int)))
    flags = tuple((k, c) for k, c in constants if isinstance(c, bool))
    groups = ((at, group) for at, group in enumerate(signature.types) if isinstance(group, tuple))
    absent = ((at, i, t == ("constexpr", None)) for at, group in groups for i, t in enumerate(group))
    return types, functions, (*flags, *absent)


def _elements(constants: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Each constant; instead of a tuple, its elements."""
    for name, value in constants:
        if isinstance(value, tuple) and not all(type(each) is int for each in value):
            yield from (((name, i), each) for i, each in enumerate(value))
        elif not isinstance(value, tuple) or not name.startswith("TILE"):
            yield name, value


def features(signature: Signature) -> list[Any]:
    """The combination of a signature's types, that of its functions, and each flag."""
    types, functions, flags = _kinds(signature)
    return [("types", types), ("functions", functions), *flags]


def _part_of(feature: Any) -> int:
    return zlib.crc32(repr(feature).encode()) % PARTS


def covering(kernels: Kernels, part: int | None = None) -> Kernels:
    """A part of these kernels in which every kernel has each of its features at least once.

    Always the one next that adds most. Kernels with other numbers of parameters (some were None) count as others.

    Args:
        part: below PARTS, asks for one part of the features, with whichever parameters, and for half of the kernels.
    """
    held = []
    for kernel, signature in kernels:
        same = (kernel, len(_kinds(signature)[0])) if part is None else kernel
        asked = ((same, f) for f in features(signature) if part in (None, _part_of(f)))
        held.append({*asked, *([same] if part is None or _part_of(repr(kernel)) % 2 == part % 2 else [])})
    heap = [(-len(has), i) for i, has in enumerate(held)]
    heapq.heapify(heap)
    seen: set[Any] = set()
    chosen = []
    while heap:
        _, i = heapq.heappop(heap)
        gain = len(held[i] - seen)
        if heap and -gain > heap[0][0]:  # others may add more by now
            heapq.heappush(heap, (-gain, i))
        elif gain:
            chosen.append(i)
            seen |= held[i]
        else:
            break
    return [kernels[i] for i in sorted(chosen)]


def rotated(kernels: dict[int, Kernels], first: int) -> dict[int, Kernels]:
    """Of signatures that several architectures have, each for one of them: the first for the `first`-th that has it."""
    owners: dict[str, list[int]] = {}
    for arch, some in kernels.items():
        for each in some:
            owners.setdefault(repr(each), []).append(arch)
    takers = {each: arches[i % len(arches)] for i, (each, arches) in enumerate(owners.items(), first)}
    return {arch: [each for each in some if takers[repr(each)] == arch] for arch, some in kernels.items()}

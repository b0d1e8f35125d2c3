"""Which of many signatures are compiled ahead of time: a part in which every kernel shows each of its features."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable
from typing import Any

from genesis.backend.cuda.signature import Signature

__all__ = ["Kernels", "combinations", "covering", "each"]

Kernels = list[tuple[Any, Signature]]
INTEGERS = re.compile(r"\bu?int\d+\b")


def _kinds(signature: Signature) -> tuple[Any, ...]:
    """What of a signature is not mere layout: pointer and number types, functions and types among the constants, and
    flags.
    """
    types = tuple(t.partition(":")[0] for t in signature.types if isinstance(t, str) and t[0] in "*ft")
    functions = tuple((k, repr(c)) for k, c in signature.constants if not isinstance(c, (bool, int)))
    flags = tuple((k, c) for k, c in signature.constants if isinstance(c, bool))
    return types, functions, flags


def combinations(signature: Signature) -> Iterable[Any]:
    """Features of a signature: its types, its functions, each flag."""
    types, functions, flags = _kinds(signature)
    return [("types", types), ("functions", functions), *flags]


def each(signature: Signature) -> Iterable[Any]:
    """Fewer features: each type, its functions where integer types are alike, each function, each flag."""
    types, functions, flags = _kinds(signature)
    alike = tuple((name, INTEGERS.sub("integer", text)) for name, text in functions)
    return [("functions", alike), *functions, *flags, *enumerate(types)]


def covering(kernels: Kernels, features: Callable[[Signature], Iterable[Any]]) -> Kernels:
    """A part of these kernels in which every kernel has each of its features at least once.

    Always the one next that adds most. Kernels with other numbers of parameters (some were None) count as others.
    """
    held = []
    for kernel, signature in kernels:
        same = (kernel, len(_kinds(signature)[0]))
        held.append({same, *((same, feature) for feature in features(signature))})
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

"""What backward keeps of forward, and what it computes again: the cut of the joint graph that moves the fewest bytes.

This is min-cut rematerialization (PyTorch's AOTAutograd): a value that backward needs is either stored by
forward, or computed again by elementwise ops from values that are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from genesis.compiler.graph import Call, Graph, Value

# Elementwise ops that numpy computes about as fast as it copies. On the CPU others are not computed again.
CHEAP = frozenset((
    "copy", "cast", "fill", "add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "eq", "ne",
    "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "sign", "relu",
))  # fmt: skip
_ENDLESS = 1 << 62


def saved_values(
    joint: Graph, inputs: Sequence[Value], outputs: Sequence[Value], gradients: Sequence[Value]
) -> tuple[list[Value], list[Call]]:
    """Return the roots that forward stores for backward, and the calls of backward.

    Args:
        joint: the calls of both passes; its inputs are `inputs` and the incoming gradients.
        inputs: inputs of forward.
        outputs: outputs of forward.
        gradients: the results of backward.
    """
    # Split the calls by whether they depend on an incoming gradient.
    own = set(inputs)
    forward: set[Value] = set(inputs)
    for call in joint.calls:
        if all(v in forward for v in call.reads):
            forward.update(call.outputs)
    live = {v.root for v in gradients}
    needed: set[Value] = live & forward
    for call in reversed(joint.calls):
        if any(v in live for v in call.outputs) and not all(v in forward for v in call.outputs):
            live.update(call.reads)
            needed.update(v for v in call.reads if v in forward)
    stored = own | {v.root for v in outputs}
    # Calls that forward does not need are computed in backward in any case.
    own_results, own_calls = {v.root for v in outputs}, set()
    for call in reversed(joint.calls):
        if any(v in own_results for v in call.outputs):
            own_calls.add(call)
            own_results.update(call.reads)
    fixed = {call for call in own_calls if not can_repeat(call)}
    saved = _cut(joint.calls, forward, needed, stored, own, fixed)
    # The calls of backward: everything that the gradients need, down to what is saved.
    later: list[Call] = []
    wanted = {v.root for v in gradients} - saved
    for call in reversed(joint.calls):
        if any(v in wanted for v in call.outputs):
            later.append(call)
            wanted.update(v for v in call.reads if v not in saved)
    order = [v for v in (*inputs, *(o for call in joint.calls for o in call.outputs)) if v in saved]
    return order, later[::-1]


def can_repeat(call: Call) -> bool:
    """Whether backward may compute a call of forward again."""
    if call.op.name == "fill":
        return True
    if not call.op.elementwise or len(call.outputs) != 1:
        return False
    return call.outputs[0].device.type != "cpu" or call.op.name in CHEAP


def _cut(
    calls: Sequence[Call], forward: Collection[Value], needed: Collection[Value], stored: Collection[Value],
    inputs: Collection[Value], fixed: Collection[Call],
) -> set[Value]:  # fmt: skip
    """Return the values of the cheapest cut between what cannot be computed again and what backward needs.

    Each value is a pair of nodes joined by an edge whose capacity is its bytes: written and read, or only read if
    forward stores it anyway. Calls in `fixed` are not computed again.
    """
    flow: dict[object, dict[object, int]] = {}

    def edge(a: object, b: object, capacity: int) -> None:
        flow.setdefault(a, {})[b] = capacity
        flow.setdefault(b, {}).setdefault(a, 0)

    def enter(v: Value) -> object:
        return ("in", v)

    def leave(v: Value) -> object:
        return ("out", v)

    made_by = {v: call for call in calls for v in call.outputs if v in forward}
    stack, seen = list(needed), set()
    for v in needed:
        edge(leave(v), "sink", _ENDLESS)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        edge(enter(v), leave(v), max(1, v.nbytes) * (1 if v in stored else 2))
        call = made_by.get(v)
        if v in inputs or call is None or call in fixed:
            edge("source", enter(v), _ENDLESS)
            continue
        for u in call.reads:
            edge(leave(u), enter(v), _ENDLESS)
            stack.append(u)
    if "source" not in flow or "sink" not in flow:
        return set()
    while (path := _path(flow)) is not None:
        amount = min(flow[a][b] for a, b in path)
        for a, b in path:
            flow[a][b] -= amount
            flow[b][a] += amount
    reached = _reached(flow)
    return {v for v in seen if enter(v) in reached and leave(v) not in reached}


def _reached(flow: dict[object, dict[object, int]]) -> dict[object, object]:
    """The nodes that the source still reaches, each with the node before it."""
    before: dict[object, object] = {"source": None}
    queue = deque(["source"])
    while queue:
        a = queue.popleft()
        for b, capacity in flow[a].items():
            if capacity > 0 and b not in before:
                before[b] = a
                queue.append(b)  # type: ignore[arg-type]
    return before


def _path(flow: dict[object, dict[object, int]]) -> list[tuple[object, object]] | None:
    """A shortest path from source to sink with capacity left, as pairs of nodes; None if there is none."""
    before = _reached(flow)
    if "sink" not in before:
        return None
    path, node = [], "sink"
    while before[node] is not None:
        path.append((before[node], node))
        node = before[node]  # type: ignore[assignment]
    return path  # type: ignore[return-value]

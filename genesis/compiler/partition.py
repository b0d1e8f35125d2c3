"""What backward keeps of forward, and what it computes again: the cut of the joint graph that moves the fewest bytes.

This is min-cut rematerialization (PyTorch's AOTAutograd): a value that backward needs is either stored by
forward, or computed again by elementwise ops from values that are stored.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from genesis.compiler.graph import Call, Graph, Value

# Elementwise ops that numpy computes about as fast as it copies. On the CPU others are not computed again.
CHEAP = frozenset((
    "copy", "cast", "fill", "add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "eq", "ne",
    "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "sign", "relu",
))  # fmt: skip
_ENDLESS = 1 << 62
_Node = tuple[Value | None, int]
_SOURCE: _Node = (None, 0)
_SINK: _Node = (None, 1)


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
    if call.op.name in ("fill", "arange"):
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
    flow: defaultdict[_Node, dict[_Node, int]] = defaultdict(dict)

    def edge(a: _Node, b: _Node, capacity: int) -> None:
        flow[a][b] = capacity
        flow[b].setdefault(a, 0)

    # A value v enters at (v, 0) and leaves at (v, 1).
    made_by = {v: call for call in calls for v in call.outputs if v in forward}
    stack, seen = list(needed), set()
    for v in needed:
        edge((v, 1), _SINK, _ENDLESS)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        edge((v, 0), (v, 1), max(1, v.nbytes) * (1 if v in stored else 2))
        call = made_by.get(v)
        if v in inputs or call is None or call in fixed:
            edge(_SOURCE, (v, 0), _ENDLESS)
            continue
        for u in call.reads:
            edge((u, 1), (v, 0), _ENDLESS)
            stack.append(u)
    # Augment shortest paths until the source does not reach the sink.
    while _SINK in (before := _reached(flow)):
        path, node = [], _SINK
        while (previous := before[node]) is not None:
            path.append((previous, node))
            node = previous
        amount = min(flow[a][b] for a, b in path)
        for a, b in path:
            flow[a][b] -= amount
            flow[b][a] += amount
    return {v for v in seen if (v, 0) in before and (v, 1) not in before}


def _reached(flow: Mapping[_Node, dict[_Node, int]]) -> dict[_Node, _Node | None]:
    """The nodes that the source still reaches, each with the node before it."""
    before: dict[_Node, _Node | None] = {_SOURCE: None}
    queue = deque([_SOURCE])
    while queue:
        a = queue.popleft()
        for b, capacity in flow[a].items():
            if capacity > 0 and b not in before:
                before[b] = a
                queue.append(b)
    return before

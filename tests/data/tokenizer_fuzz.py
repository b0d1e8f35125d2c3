"""A program for `test_tokenizer_files`: loads mutations of a tokenizer.json, each of which must load or be refused.

Usage: tokenizer_fuzz.py FOLDER SEED COUNT; FOLDER holds the valid tokenizer.json. Prints the counts as JSON.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError

MEMORY = 4 << 30
STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**32, 2**64, 1.5, "", "a", "\x1b[2J", "\ud800", [], {}, [[]], [None], [["a", "b"]],
    {"type": "BPE"}, {"type": "Sequence"}, {"type": "ByteLevel"}, {"type": "FixedLength", "length": 0},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}, {"Regex": "(?=)"}, {"String": ""},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside `value`; of long lists and objects the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, child) in enumerate(items):
        if number < 12:
            yield (*path, key)
            yield from places(child, (*path, key))


def mutated(valid: dict[str, Any], rng: random.Random) -> bytes:
    """One mutation: a value replaced, removed or doubled somewhere in the tree, or the text cut or flipped."""
    kind = rng.random()
    if kind < 0.15:
        data = bytearray(json.dumps(valid).encode())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.randrange(len(data))] if kind < 0.05 else data)
    tree = copy.deepcopy(valid)
    for _ in range(rng.randrange(1, 3)):
        *parents, key = rng.choice(list(places(tree)))
        holder = tree
        for parent in parents:
            holder = holder[parent]
        if kind < 0.35:
            del holder[key]
        elif kind < 0.5 and isinstance(holder, dict):
            holder[rng.choice(["type", "a", "ab", "<x>", "pattern"])] = holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return json.dumps(tree).encode()


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    path = folder / "tokenizer.json"
    valid = json.loads(path.read_bytes())
    rng = random.Random(seed)
    outcome = {"loaded": 0, "refused": 0}
    for _ in range(count):
        path.write_bytes(mutated(valid, rng))
        try:
            Tokenizer.load(folder).encode_batch(["def f(a):\n    return 'ab'", "<x> é漢"])
        except ModelError:
            outcome["refused"] += 1
        else:
            outcome["loaded"] += 1
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()

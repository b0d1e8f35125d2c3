"""Regular expressions out of files over the names of a model's modules: one that backtracks without end is stopped.

Python's `re` takes exponential time for some patterns and has no limit, so whatever repeats or branches runs in a child
process with a second of processor time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from genesis.errors import GenesisError
from genesis.files.paths import quote

MAX_PATTERNS, MAX_CHARACTERS = 4096, 4096
CPU_SECONDS, WALL_SECONDS = 1, 60  # the second for a machine that is busy
# Neither repeats nor branches: takes time in proportion to the name.
_PLAIN = re.compile(r"[\w.^$-]*")
_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
is_whole, expressions, names = json.load(sys.stdin)
found = []
for expression in map(re.compile, expressions):
    match = expression.fullmatch if is_whole else expression.match
    found.append([None if (m := match(name)) is None else m.groupdict().get("idx") or "" for name in names])
json.dump(found, sys.stdout)
"""


def match_names(
    form: str, patterns: Sequence[str], names: Sequence[str], *, kind: type[GenesisError], where: str
) -> list[list[str | None]]:
    """For each pattern what it gives for each of `names`: the group `idx` or "" where it matches, None where not.

    Args:
        form: what is matched, from the name's start on, with `{}` for the pattern; a bare `{}` is the whole name.
        kind, where: of the error.

    Raises:
        GenesisError: of class `kind`; a pattern that is no regular expression, too long, or does not end in time.
    """
    if len(patterns) > MAX_PATTERNS:
        raise kind(f"{len(patterns):,} patterns, over {MAX_PATTERNS:,}", where=where, next="name the layers by suffix")
    whole = [form.replace("{}", pattern) for pattern in patterns]
    for pattern, embedded in zip(patterns, whole, strict=True):
        _check(pattern, embedded, kind, where)
    if not all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return _in_child(form == "{}", whole, patterns, names, kind, where)
    matches = [re.compile(each).fullmatch if form == "{}" else re.compile(each).match for each in whole]
    return [
        [None if (m := match(name)) is None else m.groupdict().get("idx") or "" for name in names] for match in matches
    ]


def _check(pattern: str, embedded: str, kind: type[GenesisError], where: str) -> None:
    next = "write a regular expression of Python's, or names"
    if len(pattern) > MAX_CHARACTERS:
        raise kind(f"a pattern of {len(pattern):,} characters, over {MAX_CHARACTERS:,}", where=where, next=next)
    try:
        re.compile(pattern)
        re.compile(embedded)
    except (re.error, RecursionError, OverflowError) as error:
        raise kind(f"{quote(pattern)} is no regular expression: {error}", where=where, next=next) from None


def _in_child(
    is_whole: bool,
    expressions: Sequence[str],
    patterns: Sequence[str],
    names: Sequence[str],
    kind: type[GenesisError],
    where: str,
) -> list[list[str | None]]:
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(CPU_SECONDS)]
    given = json.dumps([is_whole, expressions, names])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=WALL_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        shown = max(patterns, key=len)
        what = f"matching {quote(shown)} with the names of the model's layers takes over {CPU_SECONDS} s"
        raise kind(what, where=where, next="write it without nested repetition, or name the layers") from None
    found: list[list[str | None]] = json.loads(done.stdout)
    return found

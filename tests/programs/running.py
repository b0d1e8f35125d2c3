"""How the programs of this folder run: as files written for torch, whose imports name Genesis instead."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.json"  # what torch printed, by program
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)(?![\w.])")


def programs(prefix: str = "") -> list[Path]:
    """Return the programs, in order of their names."""
    return [p for p in sorted(FOLDER.glob(f"{prefix}*.py")) if not p.stem.startswith(("test_", "running", "__"))]


def for_genesis(source: str) -> str:
    """Return a program's source with `import torch` replaced; nothing else changes."""
    source = re.sub(r"^import torch$", "import genesis as torch", source, flags=re.M)
    return re.sub(r"^(import|from) torch\b", r"\1 genesis", source, flags=re.M)


def output_of(path: Path, *, genesis: bool) -> str:
    """Run a program in this process and return what it printed."""
    source = path.read_text(encoding="utf-8")
    printed = io.StringIO()
    code = compile(for_genesis(source) if genesis else source, str(path), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__", "__file__": str(path)})  # the program itself, as a user would run it
    return printed.getvalue().replace("genesis.", "torch.")


def difference(expected: str, found: str, *, rtol: float = 2e-4, atol: float = 2e-4) -> str:
    """Return the first line that differs in words or in numbers beyond the tolerance; empty if none does."""
    lines, others = expected.splitlines(), found.splitlines()
    for one, other in zip(lines, others, strict=False):
        if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
            return f"{other!r}, expected {one!r}"
        for a, b in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True):
            x, y = float(a), float(b)
            if not (math.isclose(x, y, rel_tol=rtol, abs_tol=atol) or (math.isnan(x) and math.isnan(y))):
                return f"{b}, expected {a} in {one!r}"
    return "" if len(lines) == len(others) else f"{len(others)} lines, expected {len(lines)}"


def stored() -> dict[str, str]:
    """Return what torch printed, by program."""
    return json.loads(EXPECTED.read_text(encoding="utf-8"))

"""The budget of lines for each area of the product, for its tests and for its benchmarks.

A number rises only in a commit that says what users gain. It falls when code is deleted. In the product an area counts
lines of code; docstrings and comments have one budget each, so that an explanation never competes with code.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import PurePosixPath

from tests.packaging.tree import REPOSITORY, repository_files, statements

MEASURING = (
    "genesis/measure/", "genesis/profiler.py",
    "cli/session/bench_", "cli/measured.py",
)  # fmt: skip
# A file belongs to the first area with a prefix of its path.
AREAS: dict[str, tuple[int, tuple[str, ...]]] = {
    "measuring": (5_046, MEASURING),
    "kernels": (15_555, ("genesis/kernels/",)),
    "CUDA runtime and custom": (5_853, ("genesis/backend/cuda/", "genesis/cuda/", "genesis/custom/")),
    "files": (3_570, ("genesis/files/", "genesis/saving.py")),
    "optim": (3_440, ("genesis/optim/",)),
    "train": (6_661, ("genesis/train/",)),
    "data": (6_113, ("genesis/data/",)),
    "distributed": (2_680, ("genesis/distributed/",)),
    "compiler": (2_797, ("genesis/compiler/",)),
    "core and nn": (28_226, ("genesis/",)),
    "generation and serving": (
        3_480,
        ("models/engine/", "models/generate.py", "cli/session/serving/", "cli/session/generation.py"),
    ),
    "models and commands": (9_743, ("models/", "cli/", "configs/")),
    "docstrings": (15_446, ()),
    "comments": (2_280, ()),
    "benchmarks": (4_161, ("benchmarks/",)),
    "tests": (93_449, ("tests/",)),
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NOT_PRODUCT = {"benchmarks", "tests"}  # every line of these counts
LONGEST = 700
LONGER = {"genesis/train/config.py"}  # the schema of a configuration is one file


def area_of(path: str) -> str | None:
    """The area of a file, or None if no area contains it."""
    return next((area for area, (_, prefixes) in AREAS.items() if path.startswith(prefixes)), None)


def count_lines(source: str) -> tuple[int, int, int]:
    """The lines of code (blank ones included), docstrings and comments of a module."""
    docstrings = 0
    for node in statements(source):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    lines = source.splitlines()
    comments = sum(line.lstrip().startswith("#") for line in lines)
    return len(lines) - docstrings - comments, docstrings, comments


def over_budget(files: dict[str, str]) -> dict[str, str]:
    """The excess of every area and file in a tree, given as the source of each path."""
    counts = Counter[str]()
    faults = {}
    for path, source in files.items():
        area, total = area_of(path), source.count("\n")
        code, docstrings, comments = (total, 0, 0) if area in NOT_PRODUCT else count_lines(source)
        counts.update({area or path: code, "docstrings": docstrings, "comments": comments})
        if area is None and PurePosixPath(path).parts[0] != "docs":
            faults[path] = "belongs to no area"
        if total > LONGEST and path not in LONGER:
            faults[path] = f"{total} lines; the limit is {LONGEST}"
    over = {area: counts[area] - most for area, (most, _) in AREAS.items() if counts[area] > most}
    return faults | {area: f"{more} lines over its budget" for area, more in over.items()}


def test_every_area_keeps_its_budget() -> None:
    files = [path for path in repository_files() if path.suffix == ".py"]
    assert len(files) > 700
    assert not over_budget({path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in files})


def test_an_excess_is_noticed() -> None:
    most = AREAS["optim"][0]
    page = "x = 1\n" * LONGEST
    files = {f"genesis/optim/part_{i}.py": page for i in range(most // LONGEST)}
    assert not over_budget(files)
    assert over_budget({**files, "genesis/optim/more.py": page}).keys() == {"optim"}
    assert over_budget({"genesis/tensor.py": page + "\n"}).keys() == {"genesis/tensor.py"}
    assert over_budget({"elsewhere/a.py": "x = 1\n"}).keys() == {"elsewhere/a.py"}
    comments = {f"genesis/optim/part_{i}.py": "# why\n" * LONGEST for i in range(AREAS["comments"][0] // LONGEST + 1)}
    assert over_budget(comments).keys() == {"comments"}
    assert count_lines('"""A module."""\n\n# why\ndef f():\n    """One.\n\n    Two.\n    """\n') == (2, 5, 1)

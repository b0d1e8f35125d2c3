"""The budget of lines: what each area of the product, its tests and its benchmarks may take.

A number rises only with a commit that says what users get for it. It falls with what is deleted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

from tests.packaging.tree import REPOSITORY, repository_files

MEASURING = (
    "genesis/measure/",
    "cli/session/bench/", "cli/bench", "cli/demo.py", "cli/measured.py", "cli/profile.py", "cli/profile_run.py",
)  # fmt: skip
# The first area that has a file counts it; a name stands for the files that begin with it.
AREAS: dict[str, tuple[int, tuple[str, ...]]] = {
    "measuring": (9_350, MEASURING),
    "kernels": (16_850, ("genesis/kernels/",)),
    "CUDA runtime and custom": (5_690, ("genesis/backend/cuda/", "genesis/cuda/", "genesis/custom/")),
    "files": (4_300, ("genesis/files/", "genesis/saving.py")),
    "optim": (3_450, ("genesis/optim/",)),
    "train": (6_600, ("genesis/train/",)),
    "data": (6_850, ("genesis/data/",)),
    "distributed": (2_650, ("genesis/distributed/",)),
    "core and nn": (19_200, ("genesis/",)),
    "generation and serving": (
        3_850,
        ("models/engine/", "models/generate.py", "cli/session/serving/", "cli/session/generation.py"),
    ),
    "models and commands": (11_150, ("models/", "cli/", "configs/")),
    "benchmarks": (3_500, ("benchmarks/",)),
    "tests": (80_150, ("tests/",)),
}
LONGEST = 700
LONGER = {"genesis/train/config.py"}  # the schema of a configuration is one file


def area_of(path: str) -> str | None:
    """The area that counts a file; None for one that none does."""
    return next((area for area, (_, begins) in AREAS.items() if path.startswith(begins)), None)


def over_budget(lines: dict[str, int]) -> dict[str, str]:
    """What is over its budget in a tree of these files: areas, files that are too long, and files of no area."""
    counts = Counter[str]()
    faults = {}
    for path, count in lines.items():
        area = area_of(path)
        counts[area or path] += count
        if area is None and PurePosixPath(path).parts[0] != "docs":
            faults[path] = "is in no area"
        if count > LONGEST and path not in LONGER:
            faults[path] = f"{count} lines, {LONGEST} are the most"
    over = {area: counts[area] - most for area, (most, _) in AREAS.items() if counts[area] > most}
    return faults | {area: f"{more} lines over its budget" for area, more in over.items()}


def test_every_area_keeps_its_budget() -> None:
    files = [path for path in repository_files() if path.suffix == ".py"]
    lines = {path.relative_to(REPOSITORY).as_posix(): path.read_bytes().count(b"\n") for path in files}
    assert len(lines) > 700
    assert not over_budget(lines)


def test_what_is_over_a_budget_is_noticed() -> None:
    most = AREAS["optim"][0]
    files = {f"genesis/optim/part_{i}.py": LONGEST for i in range(most // LONGEST)}
    assert not over_budget(files)
    assert over_budget({**files, "genesis/optim/more.py": LONGEST}).keys() == {"optim"}
    assert over_budget({"genesis/tensor.py": LONGEST + 1}).keys() == {"genesis/tensor.py"}
    assert over_budget({"elsewhere/a.py": 1}).keys() == {"elsewhere/a.py"}

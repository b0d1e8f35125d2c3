"""The repository as the packaging tests see it: its root, its package folders, and the wheel they should become."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# folder in the repository -> name it is imported under
PACKAGES = {"genesis": "genesis", "cli": "genesis_cli", "models": "genesis_models", "configs": "genesis_configs"}


def package_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of the package folders below `root`, and its path in a wheel."""
    for folder, name in PACKAGES.items():
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, f"{name}/{path.relative_to(root / folder).as_posix()}"


def copy_project(to: Path) -> Path:
    """A copy with all that a build reads, so that neither an old build folder nor the build itself touches the tree."""
    for folder in PACKAGES:
        shutil.copytree(REPOSITORY / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, to / name)
    return to


def build_wheel(project: Path, out: Path) -> Path:
    """Build the wheel of `project` into `out`, with the setuptools of this environment."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def difference(project: Path, wheel: Path) -> tuple[set[str], set[str]]:
    """Paths that the wheel lacks, and paths that it holds without a file in the tree; its metadata left aside."""
    expected = {path for _, path in package_files(project)}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    return expected - found, found - expected

"""The repository as the packaging tests see it: its root, its package folders, and the wheel they should become."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

# folder in the repository -> name it is imported under
PACKAGES = {"genesis": "genesis", "cli": "genesis_cli", "models": "genesis_models", "configs": "genesis_configs"}


# What stands beside the files of the repository where git cannot tell: environments, caches, and what builds leave.
MADE = re.compile(r"\..*|__pycache__|build|dist|runs|.*\.egg-info")


def repository_files(*folders: str, root: Path = REPOSITORY) -> list[Path]:
    """The files that git has in these folders of the checkout `root` (all unless given), whatever else lies there.

    Elsewhere, as in a source archive, those that nothing but an editor or a build put there.
    """
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--", *folders]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
        found = [root / name for name in listed.split("\0") if name]
    else:
        found = [root / name for name in folders if (root / name).is_file()]
        for top in folders or (".",):
            for folder, below, names in os.walk(root / top):
                below[:] = [name for name in below if not MADE.fullmatch(name)]
                found += [Path(folder, name) for name in names if not MADE.fullmatch(name)]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def package_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of the package folders below `root`, and its path in a wheel."""
    for folder, name in PACKAGES.items():
        for path in repository_files(folder, root=root):
            yield path, f"{name}/{path.relative_to(root / folder).as_posix()}"


def statements(source: str) -> Iterator[ast.stmt | ast.mod]:
    """The module and every statement in it; expressions, which are most nodes, are left out."""
    left: list[Any] = [ast.parse(source)]
    for node in left:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, name, ())


def copy_project(to: Path) -> Path:
    """A copy with all that a build reads, so that neither an old build folder nor the build itself touches the tree."""
    for path in repository_files(*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = to / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
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

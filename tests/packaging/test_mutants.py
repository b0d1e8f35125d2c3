"""What plants mistakes: it tells one that is noticed from one that is not, in a copy alone, and its areas exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mutants import AREAS, ROOT, TINY, Copy, Mutant, MutantsError, judged, suite_of, tiny_project, tracked

SOURCE = TINY["tiny.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    tiny_project(folder)
    return folder


def planted(old: str, new: str) -> Mutant:
    assert SOURCE.count(old) == 1
    return Mutant("tiny", "tiny.py", "comparison", "test_tiny.py", "", SOURCE, SOURCE.replace(old, new))


def test_a_mistake_that_a_test_sees_is_caught_and_another_survives(project: Path) -> None:
    mutants = [planted("x < low", "x > low"), planted("x < low", "x <= low")]
    verdicts = [verdict for _, verdict in judged(project, mutants, Path(sys.executable), 1)]
    assert verdicts == ["caught", "survived"]
    assert mutants[1].change() == (2, ["-    if x < low:", "+    if x <= low:"])
    assert (project / "tiny.py").read_text() == SOURCE


def test_a_mistake_without_an_end_is_caught_by_time_and_a_sample_needs_tests(project: Path, tmp_path: Path) -> None:
    copy = Copy(project, tmp_path / "copy", Path(sys.executable), ())
    assert copy.verdict(planted("return x", "\n    while True:\n        pass"), 0.2) == "caught by time"
    assert (copy.tree / "tiny.py").read_text() == SOURCE
    with pytest.raises(MutantsError, match=r"test_missing\.py"):
        copy.seconds_of("test_missing.py")


def test_every_area_has_files_and_tests() -> None:
    files = [name for name in tracked(ROOT) if name.endswith(".py")]
    for areas in AREAS.values():
        used = {suite_of(file, areas) for file in files}
        for begin, tests in areas.items():
            assert any(file.startswith(begin) for file in files), begin
            assert tests in used, f"{begin} comes after a shorter one"
            for word in tests.split():
                assert (ROOT / word.removeprefix("--ignore=")).exists(), word

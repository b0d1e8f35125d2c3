"""The words of docs/glossary.md: those that the field does not use for what they meant here do not come back.

A row of the glossary is checked by its own patterns, or named in `READ_BY_PEOPLE` because its words have other meanings
as well (a "place" in a file, a "walk" through folders). Both lists together cover every row.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.packaging.tree import REPOSITORY

GLOSSARY = "docs/glossary.md"
OWN_FILES = (GLOSSARY, "tests/packaging/test_vocabulary.py")
NOT_TEXT = ("benchmarks/results/",)  # measured: kernels have the names that they had then

# The right column of each row -> what is looked for. Upper and lower case differ, but for the first letter of a word.
GONE: dict[str, tuple[str, ...]] = {
    "twin": (r"\btwins?\b",),
    "the copy engine": (r"\bcopy engine",),
    "a GPU's processor, second-level cache, page-locked, branch / beside": (
        r"second-level cache",
        r"third-level cache",
        r"page-locked",
        r"\bProcessorFacts\b",
        r"\bprocessor_facts\b",
    ),
    "product, factor, second factor": (r"\b(second|right|left|smaller) factor\b",),
    "k innermost / outermost, lying along": (r"\bk (innermost|outermost)\b", r"\b(innermost|outermost) k\b"),
    "turned, turned over": (r"\b(turn|turns|turned|turning) (it |them |\w+ factor )?over\b",),
    "turned back": (r"\bturned[ _]back\b",),
    "crosswise": (r"crosswise",),
    "warps that divide the work, finishing warps, finishers": (
        r"\bfinishers?\b",
        r"\bfinishing warps?\b",
        r"\bwarps (that )?divided?\b",
    ),
    "programs that stay": (r"\bprograms? that stays?\b",),
    "lay down, settled, unfolded, uniform": (r"\blay_down\b", r"\b(lays|laid) down\b", r"\bunfolded\b"),
    "row numbers, query / key kernel, left behind, gathered": (
        r"\brow numbers\b",
        r"\bleft behind\b",
        r"\bkernel of the (queries|keys)\b",
    ),
    "who sees whom, starts": (r"\bsees whom\b",),
    "fold, Recipe, extremes, still, race, tournament": (
        r"\btournaments?\b",
        r"\bcolumn_extremes\b",
        r"\bextremes\(",
        r"\bfold_tile\b",
    ),
    "slope": (r"\bslopes?\b",),
    "walk, arrivals, home, place, lend, borrow": (
        r"\barrivals?\b",
        r"\bHomeUse\b",
        r"\bhomes\b",
        r"\b(lend|lends|lent)\b",
        r"\b(borrow|borrows|borrowed)\b",
        r"\bwalks? backward\b",
    ),
    "lowered, widened, WIDE / LOW": (r"\bwidened\b",),
    "lower half, further 16 bits, low": (r"\bfurther 16\b", r"\blower half\b"),
    "make again": (r"\b(make|makes|made|making) again\b",),
    "rehearse": (r"\brehears(e|es|ed|al)\b",),
    "recording, written out, a call that comes back": (r"\bcalls? (that comes|written) (back|out)\b",),
    "dry, void": (r"\bDryDriver\b", r"\bVoidDriver\b", r"\bdry_device\b", r"\bdry (driver|device|run of)\b"),
    "the host's part": (r"\bhost's part\b",),
    "aside": (r"\bfed_aside\b", r"\bimport aside\b"),
    "makers, readable, told, lines of, words": (r"\bmakers?\b", r"\breadable_\w+", r"\blines_of\b"),
    "in place of (what is in place stays there: an in-place op)": (r"\bin place of\b",),
    "by turns; here / there; rounds apart": (r"\bby turns\b", r"\brounds apart\b"),
}

# Rows whose words have other meanings, too.
READ_BY_PEOPLE = {
    "how tiles fill the processors",
    "the next kernel let in at once",
    "Unit, numbers, wanted",
    "pays, gains",
    "add to what is there",
    "H",
    "lasting",
    "place, where the four differ",
    "stands, stands beside, lies",
    "number (for a tensor element), numbers",
    "a wait of the host",
    "floor, the least that an op takes",
}

# A word in a line that says what it is.
ALLOWED = re.compile(r"negative_slope|leaky_?relu", re.IGNORECASE)
BEGIN = r"\b"
PATTERNS = [pattern for patterns in GONE.values() for pattern in patterns]
# What begins with a word is tried where words begin alone: 12 times as fast as everywhere.
PATTERN = re.compile(
    "|".join(
        [
            rf"\b(?:{'|'.join(p.removeprefix(BEGIN) for p in PATTERNS if p.startswith(BEGIN))})",
            *(p for p in PATTERNS if not p.startswith(BEGIN)),
        ]
    )
)


def words_that_went(text: str) -> list[str]:
    """What is found in `text`, each with its line's number."""
    uncapitalized = re.sub(r"\b[A-Z](?=[a-z]+\b)", lambda letter: letter[0].lower(), text)
    lines = text.split("\n")
    found = [(text.count("\n", 0, match.start()), match[0]) for match in PATTERN.finditer(uncapitalized)]
    return [f"{at + 1}: {word}" for at, word in found if not ALLOWED.search(lines[at])]


def tracked_files() -> list[str]:
    """Names of the files that git tracks, but for those that the test leaves out."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [name for name in names if name not in OWN_FILES and not name.startswith(NOT_TEXT)]


def test_words_that_went_do_not_come_back() -> None:
    found = {}
    for name in tracked_files():
        path = REPOSITORY / name
        try:
            text = path.read_text()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
        if words := [*words_that_went(name.replace("/", " ")), *words_that_went(text)]:
            found[name] = words
    assert not found


def test_words_are_noticed() -> None:
    text = "Twins are\nturned over by turns, not by a nice turn or an overturned twinkle\nlines_of(report)"
    assert words_that_went(text) == ["1: twins", "2: turned over", "2: by turns", "3: lines_of"]
    assert words_that_went("the slope of a line") and not words_that_went("slope: leaky_relu's negative_slope")


def test_every_row_of_the_glossary_is_checked_or_read_by_people() -> None:
    rows = re.findall(r"^\| .+ \| (.+) \|$", (REPOSITORY / GLOSSARY).read_text(), re.MULTILINE)
    words = [row for row in rows if row != "In place of"]
    assert len(words) > 30 and len(set(words)) == len(words)
    assert set(words) == {*GONE, *READ_BY_PEOPLE}
    assert not GONE.keys() & READ_BY_PEOPLE

"""A large tokenizer is checked once: what its checks made is found again for the same bytes, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genesis.data import tokenizer_files
from genesis.data.tokenizer import Tokenizer
from genesis.data.tokenizer_files import CheckedTokenizer, cached_tokenizer, user_cache
from genesis.errors import ModelError
from tests.data.test_tokenizer_files import byte_level, sentence_piece, write

TEXT = "Hello <|endoftext|> world, ünï\ud7ff 漢字\n"


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tokenizer_files, "MIN_BYTES", 0)
    user_cache.cache_clear()
    yield tmp_path / "xdg/genesis/tokenizers"
    user_cache.cache_clear()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one at each check of a tokenizer's files."""
    seen: list[str] = []
    check = tokenizer_files._checked

    def counted(*args: object) -> CheckedTokenizer:
        seen.append("checked")
        return check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer_files, "_checked", counted)
    return seen


def facts(folder: Path) -> dict[str, object]:
    """What one sees of the tokenizer in `folder`."""
    found = Tokenizer.load(folder)
    return {
        "ids": [found.encode(TEXT, parse_special=special).tolist() for special in (False, True)],
        "continued": [each.tolist() for each in found.encode_batch([TEXT, TEXT], follows=[False, True])],
        "texts": [found.decode(range(found.vocab_size), skip_special=False), found.puts_prefix, found.normalizes],
        "around": [found.prompt("a"), found.start_ids, found.document_end_ids, found.prompt_end_ids, found.special_ids],
        "roles": [found.vocab_size, found.eos_id, found.bos_id, found.pad_id, found.added_tokens, found.is_byte_level],
        "files": found.files(),
        "pieces": found.pieces(TEXT * 3, 4, 16),
        "print": found.fingerprint,
    }


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_an_entry_gives_the_tokenizer_that_its_files_give(
    tmp_path: Path, tokenizer: Tokenizer, kind: str, checks: list[str]
) -> None:
    content = byte_level(tokenizer) if kind == "byte level" else sentence_piece()
    folder = write(tmp_path / "model", content, config={"eos_token_id": 2 if kind == "sentence piece" else 0})
    first = facts(folder)
    assert facts(folder) == first and checks == ["checked"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_other_bytes_are_checked_again(tmp_path: Path, tokenizer: Tokenizer, name: str, checks: list[str]) -> None:
    folder = write(tmp_path / "model", byte_level(tokenizer))
    Tokenizer.load(folder)
    path = folder / name
    path.write_text((path.read_text() if path.exists() else "{}") + "\n")
    Tokenizer.load(folder)
    assert checks == ["checked"] * 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


BROKEN: dict[str, Callable[[Path], object]] = {
    "one bit": flip,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a link": link,
    "writable by others": lambda path: path.chmod(0o622),
    "a second name": lambda path: path.with_name("second").hardlink_to(path),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_entry_is_made_again(
    tmp_path: Path, tokenizer: Tokenizer, entries: Path, how: str, checks: list[str]
) -> None:
    folder = write(tmp_path / "model", byte_level(tokenizer))
    first = facts(folder)
    (entry,) = entries.iterdir()
    BROKEN[how](entry)
    assert facts(folder) == first and checks == ["checked"] * 2
    assert facts(folder) == first and checks == ["checked"] * 2


def test_an_entry_of_another_tokenizer_is_not_taken(
    tmp_path: Path, tokenizer: Tokenizer, entries: Path, checks: list[str]
) -> None:
    one, two = (
        write(tmp_path / "one", byte_level(tokenizer)),
        write(tmp_path / "two", sentence_piece(), config={"eos_token_id": 2}),
    )
    Tokenizer.load(one)
    (kept,) = entries.iterdir()
    expected = facts(two)
    (other,) = set(entries.iterdir()) - {kept}
    other.write_bytes(kept.read_bytes())
    assert facts(two) == expected and checks == ["checked"] * 3


def test_what_other_code_made_is_made_again(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    made = CheckedTokenizer("{}", {"model": {}}, {"eos": "a"}, 3)
    seen: list[str] = []

    def check() -> CheckedTokenizer:
        seen.append(code.read_text())
        return made

    for text in ("1", "1", "2"):
        code.write_text(text)
        assert cached_tokenizer({"tokenizer.json": b"{}"}, [code], check) == made
    assert seen == ["1", "2"]


def test_what_is_refused_leaves_no_entry(tmp_path: Path, tokenizer: Tokenizer, entries: Path) -> None:
    content = byte_level(tokenizer)
    content["model"]["type"] = "Unigram"
    folder = write(tmp_path / "model", content)
    for _ in range(2):
        with pytest.raises(ModelError, match="Genesis reads BPE"):
            Tokenizer.load(folder)
    assert not list(entries.iterdir())


def test_small_files_are_not_worth_an_entry(
    tmp_path: Path, tokenizer: Tokenizer, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    Tokenizer.load(write(tmp_path / "model", byte_level(tokenizer)))
    assert not entries.exists()


def test_a_folder_that_cannot_be_used_is_passed_over(
    tmp_path: Path, tokenizer: Tokenizer, checks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "xdg").write_text("no folder")
    folder = write(tmp_path / "model", byte_level(tokenizer))
    assert facts(folder) == facts(folder) and checks
    assert "is not used: " in capsys.readouterr().err

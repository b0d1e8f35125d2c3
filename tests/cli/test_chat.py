"""`genesis chat`: messages, commands, what is said of what went wrong, and an answer that is stopped."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import genesis_cli.chat as chat_module
from genesis.data.tokenizer import Tokenizer
from genesis.errors import UsageError
from genesis_cli.session.inference import Speaker
from genesis_models.engine import Piece, Request
from tests.cli.command import printed

QUIET = ("--device", "cpu", "--max-tokens", "4", "--temperature", "0")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What is asked of the model, which answers "one ", "two " and so on."""
    found: list[Request] = []

    def answer(self: Speaker, request: Request) -> Iterator[Piece]:
        found.append(request)
        yield Piece(0, "number ", 1)
        yield Piece(0, str(len(found)), 2, "stop")

    monkeypatch.setattr(Speaker, "answer", answer)
    return found


def said(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str, words: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a chat whose lines come from a pipe."""
    data = "".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    return printed("chat", folder, *QUIET, *words)


def turns(folder: Path, requests: list[Request]) -> list[str]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.decode(request.ids, skip_special=False) for request in requests]


def test_each_message_sees_those_before_it(
    chat_model: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--system", "Be brief.")
    code, out, told = said(monkeypatch, chat_model, "words?", "", "more<|endoftext|>", "/regenerate", words=words)
    assert (code, out.splitlines()) == (0, ["number 1", "number 2", "number 3"])
    assert told == f"model {chat_model}\n"
    end = "<|endoftext|>"
    first = f"system: Be brief.{end}user: words?{end}"
    second = f"{first}assistant: number 1{end}user: more{end}{end}assistant: "
    assert turns(chat_model, asked) == [f"{first}assistant: ", second, second]
    assert [request.sequence for request in asked] == [0, 1, 2]
    assert list(asked[1].ids).count(0) == 4  # a special token in a message's text stays text
    assert all(request.stop >= {0} and request.max_tokens == 4 for request in asked)


def test_commands(chat_model: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, other = tmp_path / "c.jsonl", tmp_path / "other.jsonl"
    other.write_text("{}\n")
    begin = ["/help", "/system", "/system S", "/system", "a", f"/save {file}", f"/save {other}", "//b"]
    again = [f"/save {file}", "/reset", "/tokens", f"/load {file}", "/tokens", f"/load {other}"]
    lines = [*begin, *again, "/nope", "/load", "/quit", "never"]
    code, out, told = said(monkeypatch, chat_model, *lines)
    assert code == 0
    tokenizer = Tokenizer.load(chat_model)
    head = [*tokenizer.encode("system: S"), 0, *tokenizer.encode("assistant: ")]
    whole = [*asked[1].ids, *tokenizer.encode("number 2"), 0, *tokenizer.encode("assistant: ")]
    listed, rest = out.split("no system message\n")
    assert all(name in listed for name in chat_module.COMMANDS)
    sizes = [f"{len(ids)} of 128 tokens" for ids in (head, whole)]
    assert rest.splitlines() == ["S", "number 1", "number 2", *sizes]
    saved = json.loads(file.read_text())
    assert saved == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "number 1"},
            {"role": "user", "content": "/b"},
            {"role": "assistant", "content": "number 2"},
        ]
    }
    assert other.read_text() == "{}\n"
    for wanted in (f"{other} exists", "loaded 5 messages", 'the file has no "messages"', "/nope is not a command",
                   "a file is missing"):  # fmt: skip
        assert wanted in told, wanted


def test_what_is_saved_can_be_loaded_whatever_was_drawn(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def answer(self: Speaker, request: Request) -> Iterator[Piece]:
        yield Piece(0, 'a\0"\u2028\x7f\n', 1, "stop")

    monkeypatch.setattr(Speaker, "answer", answer)
    file = tmp_path / "said.jsonl"
    code, _, told = said(monkeypatch, chat_model, "x\0y", f"/save {file}", "/reset", f"/load {file}", "/tokens")
    assert code == 0 and "error" not in told and "loaded 2 messages" in told
    [user, drawn] = json.loads(file.read_text())["messages"]
    assert (user["content"], drawn["content"]) == ("x\ufffdy", 'a\ufffd"\u2028\x7f\n')


def test_a_full_context_takes_the_message_back(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, told = said(monkeypatch, chat_model, "words " * 200, "/tokens", "/regenerate", "a", "/tokens")
    first, answer, last = out.splitlines()
    assert code == 0 and first == "0 of 128 tokens" and answer
    assert int(last.split()[0]) > 10
    assert "the model's context holds 128" in told and "there is no message to answer" in told
    assert "/reset starts a new conversation" in told and "shorten it" not in told
    assert "cut off after 4 tokens" in told


def test_a_model_without_a_template_continues_text(
    chat_model: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(chat_model, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    code, out, told = said(monkeypatch, folder, "some", " words", "/system S")
    assert (code, out) == (0, "number 1\nnumber 2\n")
    assert "no chat template: it continues your text" in told and "no system message" in told
    assert turns(folder, asked) == [f"<|endoftext|>{text}" for text in ("some", "somenumber 1 words")]
    assert said(monkeypatch, folder, "a", words=("--system", "S"))[0] == 2


def test_what_ends_a_chat(chat_model: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, told = said(monkeypatch, chat_model, "a\udcff")
    assert code == 2 and "line 1 is not UTF-8: its byte 1 is invalid" in told
    assert said(monkeypatch, chat_model, "a", words=("--kv-cache", "int4"))[0] == 2
    assert said(monkeypatch, chat_model, "a", words=("--max-tokens", "0"))[0] == 2


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([["begun ", KeyboardInterrupt()], [KeyboardInterrupt()], ["whole"]])
    seen: list[Request] = []

    def answer(self: Speaker, request: Request) -> Iterator[Piece]:
        seen.append(request)
        for part in next(answers):
            if isinstance(part, KeyboardInterrupt):
                raise part
            yield Piece(0, str(part), 1)

    monkeypatch.setattr(Speaker, "answer", answer)
    monkeypatch.setattr(chat_module, "_typed", lambda: iter(["a", "b", "c"]))
    monkeypatch.setattr(chat_module, "_is_typed", lambda: True)
    code, out, told = printed("chat", chat_model, *QUIET)
    assert code == 0 and told.count("stopped") == 2 and out == "begun \n\nwhole\n"
    last = turns(chat_model, seen)[-1]  # what had come of the first answer is kept; the second message had none
    assert "assistant: begun <|endoftext|>user: c<|endoftext|>" in last and "user: b" not in last


def test_a_stopped_engine_is_not_used_again(chat_model: Path) -> None:
    """Tokens after an interrupt are those of a new process."""
    from genesis_models.engine import Sampling
    from genesis_models.source import find_source

    request = Request([1, 2, 3], Sampling(0.0), 6)
    with Speaker(find_source(str(chat_model)), device="cpu", dtype="auto") as speaker:
        whole = [piece.id for piece in speaker.answer(request)]
        stopped = speaker.answer(request)
        next(stopped)
        with pytest.raises(KeyboardInterrupt):
            stopped.throw(KeyboardInterrupt())
        assert [piece.id for piece in speaker.answer(request)] == whole


def test_every_command_that_is_listed_does_something() -> None:
    for name in {name.split()[0] for name in chat_module.COMMANDS} - {"/quit"}:
        talk = MagicMock()
        talk.size.return_value = 1, 2
        chat_module._process(talk, f"{name} word", MagicMock(), MagicMock())
    with pytest.raises(UsageError, match="is not a command"):
        chat_module._process(MagicMock(), "/other", MagicMock(), MagicMock())

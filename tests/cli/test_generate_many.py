"""`genesis generate` with a file of prompts, stop strings and stdin; what it says at the end, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import DataError, OutOfMemoryError, UsageError
from genesis.train.output import printable
from genesis_cli import app
from genesis_cli.main import main
from genesis_cli.session import generate, generation
from genesis_models import Sampling
from genesis_models.engine import Engine, Piece, Request, Token, continue_texts
from genesis_models.engine.text import StopText
from tests.cli.command import printed
from tests.models.golden import golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), folder, tokenizer=tokenizer)
    return folder


def run(folder: Path, prompt: str | None, **changed: Any) -> str:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "top_k": None, "top_p": None, "seed": 0}
    return "".join(generate(str(folder), prompt, **options | {"device": "cpu", "dtype": "auto"} | changed))


def lines(path: Path, *prompts: object) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    return str(path)


def test_results_are_in_the_files_order_and_each_prompts_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["words", "some more words to learn and to learn", "w", "learn"]
    found = [
        json.loads(x)
        for x in run(folder, None, prompts=lines(tmp_path / "p", *({"prompt": t} for t in texts))).splitlines()
    ]
    assert [each["prompt"] for each in found] == texts
    model, tokenizer = genesis_models.load(folder), Tokenizer.load(folder)
    assert found[0]["completion"] == run(folder, "words")
    ids = model.generate(tokenizer.prompt("words"), temperature=1.0, max_tokens=12).ids
    assert (found[0]["tokens"], found[0]["finish"]) == (len(ids), "length")
    assert found[0]["completion"] == tokenizer.decode(ids)
    count = sum(each["tokens"] for each in found)
    assert f"{count} tokens in " in capsys.readouterr().err


def test_a_stop_string_ends_a_text_before_itself(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, "words")
    stop = whole[4:6]
    assert run(folder, "words", stop=[stop, "never there"]) == whole[: whole.index(stop)]
    source = lines(tmp_path / "p", {"prompt": "words"}, {"prompt": "learn"})
    first, second = (json.loads(x) for x in run(folder, None, prompts=source, stop=[stop]).splitlines())
    assert (first["completion"], first["finish"]) == (whole[: whole.index(stop)], "stop")
    assert second["prompt"] == "learn"


def test_stop_text_holds_back_what_may_be_a_stop() -> None:
    text = StopText(["END", "\n\n", ""])
    assert text.push("a\n") == ("a", False)
    assert text.push("bE") == ("\nb", False)
    assert text.push("N") == ("", False)
    assert text.push("e EN") == ("ENe ", False)
    assert text.push("D more") == ("", True)
    assert text.finish() == ""
    assert text.push("xE") == ("x", False)
    assert text.finish() == "E"
    assert StopText([]).push("all") == ("all", False)


def test_lines_about_a_text_begin_below_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where both streams go to one terminal or file, and where the text comes at once."""
    for words in ([], ["--no-stream"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", sys.stdout)
            assert main(["generate", str(folder), "--prompt", "words", "--max-tokens", "5", *words]) == 0
        assert re.fullmatch(r"[^\n]*\n5 tokens in [^\n]+\n", capsys.readouterr().out)


def test_the_contexts_end_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "words", max_tokens=1000)
    assert "the text ends at the end of the model's context" in capsys.readouterr().err
    run(folder, "words")
    assert "context" not in capsys.readouterr().err


def test_an_empty_text_is_said(folder: Path, tmp_path: Path) -> None:
    def last_lines(*words: str | Path) -> list[str]:
        return [
            printed("generate", folder, *words, "--max-tokens", "3")[2].splitlines()[-1] for folder in (ends, speaks)
        ]

    text, speaks, ends = run(folder, "words", temperature=0.0), folder, tmp_path / "ends"
    shutil.copytree(folder, ends)
    first = Tokenizer.load(folder).encode(text)[0]
    (ends / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": int(first)}))
    empty, said = last_lines("--prompt", "words", "--temperature", "0")
    assert "empty" in empty and "--chat" in empty and "empty" not in said
    empty, said = last_lines("--prompts", lines(tmp_path / "p", {"prompt": "words"}), "--temperature", "0")
    assert "empty" in empty and "empty" not in said


@pytest.mark.parametrize(
    "content,what,line",
    [
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "the prompt is not a text", "2: prompt"),
        (b'{"prompt": "a"}\n{"prompt": ""}\n', "the prompt is empty", "2: prompt"),
        (b'\n{"text": "a"}\n', 'the line has no "prompt"', "2"),
        (b'{"prompt": "a", "messages": []}\n', "both a prompt and messages", "1"),
        (b'{"prompt": "a"}\n["a"]\n', "not a JSON object", "2"),
        (b'{"prompt": "a"\n', "not a JSON object", "1"),
        (b'{"prompt": "\xff"}\n', "not UTF-8", "1"),
        (b"\n", "no prompts", ""),
        (b'{"messages": []}\n', "the conversation has no messages", "1: messages"),
        (b'{"messages": "a"}\n', "the string is not JSON", "1: messages"),
        (b'{"messages": [{"role": "usr", "content": "a"}]}\n', "the role is 'usr'", "1: messages[0].role"),
        (b'{"messages": [{"role": "user"}]}\n', "the content is", "1: messages[0].content"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "needs no answer", "1: messages[0].role"),
    ],
)
def test_a_bad_line_is_named(folder: Path, tmp_path: Path, content: bytes, what: str, line: str) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        run(folder, None, prompts=str(tmp_path / "p"))
    assert caught.value.exit_code == 4
    assert caught.value.where == str(tmp_path / "p") + (f":{line}" if line else "")
    assert "data." not in caught.value.next


def test_a_prompt_beyond_the_context_is_refused_before_any_runs(folder: Path, tmp_path: Path) -> None:
    source = lines(tmp_path / "p", {"prompt": "words"}, {"prompt": "words " * 500})
    with pytest.raises(UsageError, match="the model's context holds 128") as caught:
        run(folder, None, prompts=source)
    assert caught.value.where == f"{source}:2"
    with pytest.raises(UsageError, match="min_p"):
        run(folder, "words", min_p=2.0)


def test_a_prompt_from_stdin(folder: Path) -> None:
    options = ["--max-tokens", "12", "--temperature", "1", "--device", "cpu", "--top-k", "1000"]
    found = CliRunner().invoke(app.app, ["generate", str(folder), "--prompt", "-", *options], input="words\n")
    assert found.stdout == printable(run(folder, "words", top_k=1000)) + "\n"
    wrong = CliRunner().invoke(app.app, ["generate", str(folder), "--prompt", "-"], input=b"\xff")
    assert isinstance(wrong.exception, UsageError)


def test_results_go_to_a_file(folder: Path, tmp_path: Path) -> None:
    source, options = lines(tmp_path / "p", {"prompt": "words"}, {"prompt": "learn"}), ["--device", "cpu"]
    out = tmp_path / "out.jsonl"
    out.write_text("something that was there before\n" * 99)
    code, shown, told = printed("generate", folder, "--prompts", source, "--out", out, "--max-tokens", "5", *options)
    assert (code, shown) == (0, "")
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["words", "learn"]
    assert "10 tokens in" in told and "the first after" in told
    code, _, told = printed("generate", folder, "--prompts", source, "--out", tmp_path)
    assert code == 2 and "is not a file" in told
    code, _, told = printed("generate", folder, "--prompt", "words", "--out", out)
    assert code == 2 and "--out needs --prompts" in told
    code, _, told = printed("generate", folder, "--prompts", source, "--out", tmp_path / "no" / "out", *options)
    assert code == 8


def test_an_empty_prompt(folder: Path) -> None:
    code, _, told = printed("generate", folder, "--prompt", "")
    assert code == 2 and "the prompt is empty" in told and "where: --prompt" in told


def test_a_prompt_that_fills_the_context(folder: Path) -> None:
    code, _, told = printed("generate", folder, "--prompt", "w" * 400)
    assert code == 2 and "the model's context holds 128" in told and "where: --prompt" in told


def test_a_cache_in_8_bits_is_for_gpus(folder: Path) -> None:
    code, _, told = printed("generate", folder, "--prompt", "words", "--device", "cpu", "--kv-cache", "fp8")
    assert code == 2 and "the KV cache is fp8 on the CPU" in told
    code, _, told = printed("generate", folder, "--prompt", "words", "--kv-cache", "int4")
    assert code == 2 and "use auto or fp8" in told


def test_special_tokens_are_shown_on_request(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert "".join(p.text for p in shown(tokenizer, special=True)).count("<|endoftext|>") == 2
    assert "<|endoftext|>" not in "".join(p.text for p in shown(tokenizer, special=False))


def shown(tokenizer: Tokenizer, *, special: bool) -> list[Piece]:
    class Known:
        """An engine whose tokens are known."""

        def run(self, requests: Iterable[Request]) -> Iterator[Token]:
            yield from (Token(0, token) for token in (tokenizer.eos_id, 40, tokenizer.eos_id))
            yield Token(0, None, finish="length")

        def cancel(self, request: int) -> None:
            raise AssertionError

    return list(continue_texts(Known(), [Request([1], Sampling(0.0), 3)], tokenizer, special=special))


def test_a_full_device_keeps_what_is_done(folder: Path, tmp_path: Path) -> None:
    """Memory that ends while prompts wait: the results so far are there, and the advice is the command's."""
    source, out = lines(tmp_path / "p", *({"prompt": text} for text in ("words", "learn", "more"))), tmp_path / "out"
    steps = iter(range(9))

    class Full(Engine):
        def run(self, requests: Iterable[Request]) -> Iterator[Token]:
            for token in super().run(requests):
                yield token
                if next(steps) == 8:
                    raise OutOfMemoryError("no room for a row", next=OutOfMemoryError.ADVICE)

    def full(model: genesis_models.CausalLM, requests: list[Request], **how: Any) -> Engine:
        return Full(model, rows=1, capacity=40)  # the others wait

    with mock.patch.object(generation, "engine_for", full):
        how = ("--max-tokens", "5", "--device", "cpu", "--out", out)
        code, _, told = printed("generate", folder, "--prompts", source, *how)
    assert code == 7
    assert "no room for a row" in told and "lower --max-tokens" in told and "train." not in told
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["words"]
    assert printed("generate", folder, "--prompts", source, *how)[0] == 0, "no part of a file stays"

"""`genesis eval --task`: choices by log-probability, answers by generation, and what is wrong with a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis_cli.session import tasks
from genesis_cli.session.inference import PACKED, scores
from genesis_cli.session.tasks import matches
from genesis_models.blocks import CausalLM
from tests.cli.command import printed
from tests.data.test_tokenizer_files import metaspace, sentence_piece, write
from tests.models.golden import FIXTURES

QUIET = ("--device", "cpu", "--json")


def written(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in items))
    return path


def alone(model: CausalLM, ids: list[int], first: int) -> float:
    """The sum of log-probabilities of ids from `first` on, by a forward pass of this sequence alone."""
    with genesis.no_grad():
        logits = model(genesis.tensor([ids], dtype="int64")).numpy()[0].astype(np.float64)
    high = logits.max(1, keepdims=True)
    chances = logits - high - np.log(np.exp(logits - high).sum(1, keepdims=True))
    return float(sum(chances[at - 1, ids[at]] for at in range(first, len(ids))))


def test_choices_are_scored_as_by_the_model_alone(chat_model: Path, tmp_path: Path) -> None:
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    items = [
        {"prompt": "some words to ", "choices": ["learn", "words and", "x"], "answer": 0},
        {"prompt": "more", "choices": [" words", " to"], "answer": " to"},
        {"messages": [{"role": "user", "content": "words?"}], "choices": ["learn", "some"], "answer": 1},
    ]
    out = tmp_path / "items.jsonl"
    code, printed_, told = printed(
        "eval", chat_model, "--task", written(tmp_path / "t.jsonl", *items), "--out", out, *QUIET
    )
    assert code == 0, told
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    start = [*tokenizer.encode("user: words?"), 0, *tokenizer.encode("assistant: ")]
    wanted = [
        [alone(model, ids, first) for ids, first in pairs]
        for pairs in (
            [
                (tokenizer.prompt("some words to " + each), len(tokenizer.prompt("some words to")))
                for each in items[0]["choices"]
            ],
            [(tokenizer.prompt("more" + each), len(tokenizer.prompt("more"))) for each in items[1]["choices"]],
            [([*start, *tokenizer.encode(each)], len(start)) for each in items[2]["choices"]],
        )
    ]
    right = [0, 1, 1]
    for row, sums, answer, item in zip(rows, wanted, right, items, strict=True):
        assert row["scores"] == pytest.approx(sums, abs=1e-4)
        assert row["chosen"] == int(np.argmax(sums)) and row["right"] == (row["chosen"] == answer)
        lengths = [len(each) for each in item["choices"]]
        assert row["right_by_length"] == (int(np.argmax(np.divide(sums, lengths))) == answer)
    found = json.loads(printed_)
    assert found["task/accuracy"] == pytest.approx(sum(row["right"] for row in rows) / 3)
    assert found["task/accuracy_by_length"] == pytest.approx(sum(row["right_by_length"] for row in rows) / 3)
    assert found["task/items"] == 3 and found["settings"]["match"] == "exact"


def test_sequences_of_one_pass_do_not_see_each_other(chat_model: Path) -> None:
    model, draw = genesis_models.load(chat_model), np.random.default_rng(0)
    sequences = [
        (draw.integers(1, 262, length).tolist(), first) for length, first in ((9, 1), (2, 1), (30, 20), (5, 5))
    ]
    found = [sum(score.log_prob for score in each) for each in scores(model, sequences)]
    assert found == pytest.approx([alone(model, *each) for each in sequences], abs=1e-4)
    assert [len(each) for each in scores(model, sequences)] == [8, 1, 10, 0]
    many = [(draw.integers(1, 262, 120).tolist(), 119) for _ in range(PACKED // 120 + 3)]
    assert [len(each) for each in scores(model, many)] == [1] * len(many)


@pytest.mark.parametrize("name", ["phi3-beyond", "dynamic"])
def test_sequences_whose_angles_depend_on_their_length_are_scored_as_if_alone(name: str) -> None:
    if name == "dynamic":
        raw = json.loads((FIXTURES / "phi3" / "config.json").read_text()) | {"model_type": "llama"}
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model = genesis_models.build(
            raw | {"rope_parameters": rope, "max_position_embeddings": 12, "initializer_range": 0.3}, seed=1
        )
    else:
        model = genesis_models.load(FIXTURES / "extra" / name)
    drawn = np.random.default_rng(0).integers(0, 90, (4, 30)).tolist()
    sequences = [(ids[:length], 1) for ids, length in zip(drawn, (5, 30, 8, 13), strict=True)]
    alone = [next(iter(scores(model, [each]))) for each in sequences]
    for together, expected in zip(scores(model, sequences), alone, strict=True):
        assert [s.log_prob for s in together] == pytest.approx([s.log_prob for s in expected], abs=1e-5)
    [row] = scores(model, [(sequences[0][0], 1)], 3)
    assert all(each.top[0][1] >= each.log_prob and len(each.top) == 3 for each in row)


def test_answers_are_generated_greedily(chat_model: Path, tmp_path: Path) -> None:
    model = genesis_models.load(chat_model)
    texts = [model.generate(prompt, max_tokens=6).text for prompt in ("words", "some words")]
    items = [{"prompt": "words", "answer": f" {texts[0]}\n"}, {"prompt": "some words", "answer": "never"},
             {"messages": [{"role": "user", "content": "a"}], "answer": "never"}]  # fmt: skip
    how = ("--max-tokens", "6", "--out", tmp_path / "o")
    code, out, told = printed("eval", chat_model, "--task", written(tmp_path / "t", *items), *how, *QUIET)
    assert code == 0 and "items: done" in told
    rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert [row["right"] for row in rows] == [True, False, False]
    assert [row["text"] for row in rows[:2]] == texts
    assert json.loads(out)["task/accuracy"] == pytest.approx(1 / 3)
    code, out, _ = printed(
        "eval", chat_model, "--task", written(tmp_path / "t", items[0]), "--max-tokens", "6", "--device", "cpu"
    )
    assert (code, out) == (0, "task/accuracy  1\ntask/items     1\n")


@pytest.mark.parametrize(
    "match, text, answer, is_right",
    [
        ("exact", " a b\n", "a b", True),
        ("exact", "A b", "a b", False),
        ("number", "so 3 + 4 is 1,007.50", "#### 1007.5", True),
        ("number", "it is -2", "2", False),
        ("number", "none", "2", False),
        ("number", ".5", "0.5", True),
        ("regex", "the answer is (B)", r"\([Bb]\)$", True),
        ("regex", "the answer is (B).", r"\([Bb]\)$", False),
    ],
)
def test_what_matches(match: Any, text: str, answer: str, is_right: bool) -> None:
    assert matches(text, answer, match) is is_right


@pytest.mark.parametrize(
    "line, words, what",
    [
        ({"prompt": "a"}, (), "t:2: answer"),
        ({"answer": "a"}, (), '"prompt" or "messages"'),
        ({"prompt": "", "answer": "a"}, (), "t:2: prompt"),
        ({"prompt": "a", "choices": ["b"], "answer": 0}, (), "t:2: choices"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, (), "t:2: answer"),
        ({"prompt": "a", "choices": ["b", "b"], "answer": "b"}, (), "t:2: answer"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": True}, (), "t:2: answer"),
        ({"prompt": "a", "answer": "("}, ("--match", "regex"), "the answer is not a pattern"),
        ({"prompt": "a", "answer": "b"}, ("--match", "number"), "has no number"),
        ({"messages": [{"role": "king", "content": "a"}], "answer": "b"}, (), "role"),
        ("text", (), "not a JSON object"),
    ],
)
def test_lines_that_are_no_items(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Any, words: tuple[str, ...], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("t"), {"prompt": "1 + 1", "answer": "2"}, line)
    code, _, told = printed("eval", chat_model, "--task", "t", *words, *QUIET)
    assert code == 4 and what in told, told


def test_commands_that_ask_for_nothing_or_too_much(chat_model: Path, tmp_path: Path) -> None:
    assert printed("eval", chat_model)[0] == 2
    task = written(tmp_path / "t", {"prompt": "words " * 100, "choices": ["a", "b"], "answer": 0})
    assert printed("eval", chat_model, "--task", task, "--match", "nearly")[0] == 2
    task.write_text("\n")
    code, _, told = printed("eval", chat_model, "--task", task, *QUIET)
    assert code == 4 and "the file has no items" in told


def rule_of_lm_eval(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[list[int], int]:
    """lm-eval's `_encode_pair`; a choice that it would score on no ids is encoded apart."""
    asked = prompt.rstrip()
    before, rest = tokenizer.prompt(asked), prompt[len(asked) :] + choice
    after = tokenizer.prompt(asked + rest)[len(before) :]
    return [*before, *(after or tokenizer.encode(rest).tolist())], len(before)


def test_a_choice_that_merges_with_the_prompt_is_scored_as_in_lm_eval(chat_model: Path, tmp_path: Path) -> None:
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    assert len(tokenizer.prompt("lea")) > len(tokenizer.prompt("lear"))
    items = [
        {"prompt": "lea", "choices": ["r", "rn", "rn to learn"], "answer": 0},  # none to many ids are left
        {"prompt": "  ", "choices": ["x", "xy"], "answer": 0},
        {"prompt": "", "choices": ["some", " some"], "answer": 0},
    ]
    out = tmp_path / "rows"
    code, _, told = printed("eval", chat_model, "--task", written(tmp_path / "t", *items), "--out", out, *QUIET)
    assert code == 0, told
    for row, item in zip(map(json.loads, out.read_text().splitlines()), items, strict=True):
        wanted = [
            alone(model, *rule_of_lm_eval(tokenizer, str(item["prompt"]), each))
            for each in item["choices"]  # type: ignore[attr-defined]
        ]
        assert row["scores"] == pytest.approx(wanted, abs=1e-4) and all(each < 0 for each in row["scores"])


def test_a_choice_that_is_encoded_apart_has_no_space_put_before_it(tmp_path: Path) -> None:
    """SentencePiece's tokenizers put a space before each text; a choice is not a text of its own."""
    for name, content in (("old", sentence_piece()), ("new", metaspace())):
        tokenizer = Tokenizer.load(write(tmp_path / name, content))
        speaker: Any = SimpleNamespace(encode=tokenizer.prompt, tokenizer=tokenizer)
        for prompt, wanted in (("da", ["<s>", "▁", "d", "a", "b"]), ("a", ["<s>", "▁a", "b"])):
            ids, begin = tasks._pair(speaker, tasks.Item(prompt, ("b",), 0, ""), "b")
            assert [tokenizer.token(id) for id in ids] == wanted and begin == len(wanted) - 1


def test_a_long_question_is_cut_from_the_left(chat_model: Path, tmp_path: Path) -> None:
    """As in lm-eval: a choice's input is the context's last ids, an answer leaves room for its tokens."""
    tokenizer, model = Tokenizer.load(chat_model), genesis_models.load(chat_model)
    long = "words to learn " * 60 + "some"
    items = [
        {"prompt": long, "choices": [" words", " more words"], "answer": 0},
        {"prompt": long, "answer": "never"},
        {"prompt": "some", "choices": [" words", " more"], "answer": 0},
    ]
    task, out = written(tmp_path / "t", *items), tmp_path / "rows"
    words = ("eval", chat_model, "--task", task, "--max-tokens", "8", "--out", out)
    code, _, told = printed(*words, *QUIET)
    assert code == 0 and "2 of 3 questions" in told, told
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    begin, whole = len(tokenizer.prompt(long)), [tokenizer.prompt(long + each) for each in (" words", " more words")]
    wanted = [alone(model, ids[-129:], begin - len(ids) + 129) for ids in whole]
    assert rows[0]["scores"] == pytest.approx(wanted, abs=1e-4)
    assert rows[1]["text"] == model.generate(tokenizer.prompt(long)[-120:], max_tokens=8).text
    code, _, told = printed(*words, "--strict", *QUIET)
    assert code == 4 and f"{task}:1" in told, told
    written(task, {"prompt": "a", "choices": ["b", "words to " * 200], "answer": 0})
    code, _, told = printed(*words, *QUIET)
    assert code == 4 and f"{task}:1: choices[1]" in told, told


@pytest.mark.full
def test_a_base_model_is_measured_on_chats_by_a_named_template(chat_model: Path, tmp_path: Path) -> None:
    chat = {"role": "user", "content": "words?"}, {"role": "assistant", "content": "some words"}
    data = written(tmp_path / "d.jsonl", {"messages": chat})
    task = written(tmp_path / "t", {"messages": chat[:1], "choices": ["learn", "some"], "answer": 1})
    base = tmp_path / "base"
    shutil.copytree(chat_model, base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    for words in (("--data", data), ("--task", task)):
        code, _, told = printed("eval", base, *words, *QUIET)
        assert code == 5 and "--template" in told, told
    file = tmp_path / "own.jinja"
    file.write_text((chat_model / "chat_template.jinja").read_text())
    both = ("--data", data, "--task", task)
    found = [printed("eval", *words, *both, *QUIET) for words in ((chat_model,), (base, "--template", file))]
    assert [code for code, *_ in found] == [0, 0], found
    own, named = (json.loads(out) for _, out, _ in found)
    assert own["eval/loss"] == named["eval/loss"] and named["settings"]["template"] == str(file)
    code, out, told = printed("eval", base, "--template", "chatml", *both, *QUIET)
    assert code == 0 and json.loads(out)["eval/loss"] != own["eval/loss"], told
    assert "evaluate: done" in told

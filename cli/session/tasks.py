"""`genesis eval --task`: questions with one right answer, chosen by log-probability or generated."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from genesis.data.messages import read_messages, read_tools
from genesis.data.records import Conversation, Position
from genesis.errors import DataError, ModelError, UsageError, escape
from genesis.train.output import Output
from genesis.train.progress import tokenizing
from genesis_cli.session.inference import found_source
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.prompts import read_lines
from genesis_cli.session.scoring import scores
from genesis_cli.session.speaker import Speaker
from genesis_models.engine import Request, Sampling, continue_texts
from genesis_models.engine.engine import check_prompt
from genesis_models.generate import engine_for

__all__ = ["MATCHES", "Item", "Match", "evaluate_task", "matches", "read_items"]

Match = Literal["exact", "number", "regex"]
MATCHES: tuple[Match, ...] = ("exact", "number", "regex")
EXAMPLES = 'write a line as {"prompt": "2 + 2 =", "answer": "4"} or {"prompt": "…", "choices": ["a", "b"], "answer": 1}'
MEMORY = "choose --dtype bf16, lower --max-tokens, or take a smaller model"
OPTIONS = {"train.device": "--device", "model.dtype": "--dtype", "model.path": "FOLDER", "data.train": "--task"}
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Item:
    """A question.

    Attributes:
        asked: a text that the answer continues, or a conversation that it answers.
        choices: of which one is right; None where the answer is generated.
        answer: the number of the right choice, or what the generated text must match.
        where: its file and line.
    """

    asked: str | Conversation
    choices: tuple[str, ...] | None
    answer: int | str
    where: str


def read_items(path: str, match: Match) -> list[Item]:
    """The items of a JSONL file. Raises: DataError, with file, line and field."""
    return [_item(*line, match) for line in read_lines(path, "items", EXAMPLES)]


def _item(value: Mapping[str, Any], position: Position, where: str, match: Match) -> Item:
    """Raises: DataError."""
    if ("prompt" in value) == ("messages" in value):
        raise DataError('the line needs either "prompt" or "messages"', where=where, next=EXAMPLES)
    asked: str | Conversation
    if "messages" in value:
        asked = Conversation(read_messages(value["messages"], position), read_tools(value.get("tools"), position))
    elif isinstance(value["prompt"], str) and value["prompt"]:
        asked = value["prompt"]
    else:
        raise DataError("the prompt is no text, or an empty one", where=f"{where}: prompt", next=EXAMPLES)
    answer, choices = value.get("answer"), value.get("choices")
    if choices is None:
        if not isinstance(answer, str) or (match == "regex" and not _is_pattern(answer)):
            kind = "pattern" if match == "regex" else "text"
            raise DataError(f"the answer is no {kind}", where=f"{where}: answer", next=EXAMPLES)
        if match == "number" and _number(answer) is None:
            raise DataError("the answer holds no number", where=f"{where}: answer", next="choose another --match")
        return Item(asked, None, answer, where)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise DataError("the choices are no list of two or more texts", where=f"{where}: choices", next=EXAMPLES)
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError("the answer is no choice, nor the number of one", where=f"{where}: answer", next=EXAMPLES)
    return Item(asked, tuple(choices), answer, where)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _number(text: str) -> float | None:
    """The last number in a text."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def matches(text: str, answer: str, match: Match) -> bool:
    """Whether a generated text is right.

    "exact": the same but for white space around it. "number": the last number of both is the same. "regex": the
    pattern is found in it.
    """
    if match == "exact":
        return text.strip() == answer.strip()
    if match == "regex":
        return re.search(answer, text) is not None
    given, wanted = _number(text), _number(answer)
    return given is not None and wanted is not None and math.isclose(given, wanted, rel_tol=1e-9)


def evaluate_task(
    folder: str,
    path: str,
    *,
    match: str,
    max_tokens: int,
    stop: Sequence[str],
    device: str,
    dtype: str,
    base: str | None = None,
) -> tuple[dict[str, float | int], list[dict[str, Any]]]:
    """How many questions a model answers: figures, and a row for each item.

    A choice's score is the sum of its ids' log-probabilities after the question; `task/accuracy_by_length` divides it
    by the choice's characters. Texts are generated greedily.

    Raises:
        DataError: the file. UsageError: an item longer than the context, or no such way to match.
    """
    with phrased_for(OPTIONS, memory=MEMORY):
        how = next((each for each in MATCHES if each == match), None)
        if how is None:
            known = ", ".join(MATCHES)
            raise UsageError(f"--match is {escape(match)!r}", where="command line", next=f"use one of: {known}")
        items = read_items(path, how)
        source = found_source(folder, base)
        with Speaker(source, device=device, dtype=dtype) as speaker, tokenizing("items", Output(sys.stderr)) as report:
            if speaker.template is None and any(isinstance(each.asked, Conversation) for each in items):
                raise ModelError("the model has no chat template", where=str(source), next="use items with a prompt")
            rows: dict[int, dict[str, Any]] = {}
            for number, row in _chosen(speaker, items):
                rows[number] = row
                report(len(rows), len(items))
            for number, row in _generated(speaker, items, how, max_tokens, stop):
                rows[number] = row
                report(len(rows), len(items))
    ordered = [rows[number] for number in sorted(rows)]
    return _figures(ordered), ordered


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int]:
    found: dict[str, float | int] = {"task/accuracy": sum(row["right"] for row in rows) / len(rows)}
    chosen = [row for row in rows if "scores" in row]
    if chosen:
        found["task/accuracy_by_length"] = sum(row["right_by_length"] for row in rows if "scores" in row) / len(chosen)
    return {**found, "task/items": len(rows)}


def _pair(speaker: Speaker, item: Item, choice: str) -> tuple[list[int], int]:
    """The ids of a question and a choice, and where they begin to differ from the question's alone.

    White space at the end of a text belongs to the choice, as tokenizers have it at the beginning of words; and so does
    the end of a question that is one token with the beginning of the choice.
    """
    if isinstance(item.asked, Conversation):
        ids = speaker.encode(item.asked)
        return [*ids, *speaker.tokenizer.encode(choice).tolist()], len(ids)
    asked = item.asked.rstrip()
    before, whole = speaker.encode(asked), speaker.encode(asked + item.asked[len(asked) :] + choice)
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole, max(sum(1 for _ in shared), 1)


def _chosen(speaker: Speaker, items: Sequence[Item]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, item in enumerate(items):
        if item.choices is None:
            continue
        pairs = [_pair(speaker, item, choice) for choice in item.choices]
        begin = min(start for _, start in pairs)  # of all choices, so that the same part of the question counts
        found = scores(speaker.model, [(ids, begin) for ids, _ in pairs])
        sums = [sum(score.log_prob for score in each) for each in found]
        by_length = [each / len(choice) for each, choice in zip(sums, item.choices, strict=True)]
        best, best_by_length = sums.index(max(sums)), by_length.index(max(by_length))
        right = {"right": best == item.answer, "right_by_length": best_by_length == item.answer}
        yield number, {"answer": item.answer, "chosen": best, **right, "scores": sums}


def _generated(
    speaker: Speaker, items: Sequence[Item], match: Match, max_tokens: int, stop: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    numbers = [number for number, item in enumerate(items) if item.choices is None]
    requests = []
    for number in numbers:
        ids = speaker.encode(items[number].asked)
        check_prompt(speaker.model, ids)
        requests.append(Request(ids, Sampling(0.0), max_tokens, speaker.ends))
    if not requests:
        return
    texts = [""] * len(requests)
    for piece in continue_texts(engine_for(speaker.model, requests), requests, speaker.tokenizer, stop):
        texts[piece.request] += piece.text
        if piece.finish is not None:
            number, text = numbers[piece.request], texts[piece.request]
            answer = str(items[number].answer)
            yield number, {"answer": answer, "text": text, "right": matches(text, answer, match)}

"""`genesis eval --task`: questions with one right answer, chosen by log-probability or generated."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from genesis.data.record_formats import read_messages, read_tools
from genesis.data.records import Conversation, Position
from genesis.errors import DataError, ModelError, UsageError, escape
from genesis.train.output import Output
from genesis.train.progress import tokenizing
from genesis_cli.session.generation import read_lines
from genesis_cli.session.inference import COMMON, Speaker, found_source, scores
from genesis_cli.session.phrases import phrased_for
from genesis_models.engine import Request, Sampling, continue_texts
from genesis_models.engine.engine import check_prompt
from genesis_models.generate import engine_for

Match = Literal["exact", "number", "regex"]
MATCHES: tuple[Match, ...] = ("exact", "number", "regex")
EXAMPLES = 'write a line as {"prompt": "2 + 2 =", "answer": "4"} or {"prompt": "…", "choices": ["a", "b"], "answer": 1}'
MEMORY = "choose --dtype bf16, lower --max-tokens, or use a smaller model"
OPTIONS = COMMON | {"data.train": "--task", "data.template": "--template"}
Scored = tuple[list[int], int]  # the ids of a question and a choice, and the position of the choice
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Item:
    """A question.

    Attributes:
        asked: a text that the answer continues, or a conversation that it answers.
        choices: possible answers; None if the answer is generated.
        answer: index of the right choice, or what the generated text must match.
        where: its file and line.
    """

    asked: str | Conversation
    choices: tuple[str, ...] | None
    answer: int | str
    where: str


def read_items(path: str, match: Match) -> list[Item]:
    """Read the items of a JSONL file. Raises: DataError: it names file, line and field."""
    return [_item(*line, match) for line in read_lines(path, "items", EXAMPLES)]


def _item(value: Mapping[str, Any], position: Position, where: str, match: Match) -> Item:
    if ("prompt" in value) == ("messages" in value):
        raise DataError('the line needs either "prompt" or "messages"', where=where, next=EXAMPLES)
    asked: str | Conversation
    if "messages" in value:
        asked = Conversation(read_messages(value["messages"], position), read_tools(value.get("tools"), position))
    elif isinstance(value["prompt"], str) and (value["prompt"] or value.get("choices")):
        asked = value["prompt"]
    else:
        raise DataError("the prompt is not a text, or is empty", where=f"{where}: prompt", next=EXAMPLES)
    answer, choices = value.get("answer"), value.get("choices")
    if choices is None:
        if not isinstance(answer, str) or (match == "regex" and not _is_pattern(answer)):
            kind = "pattern" if match == "regex" else "text"
            raise DataError(f"the answer is not a {kind}", where=f"{where}: answer", next=EXAMPLES)
        if match == "number" and _number(answer) is None:
            raise DataError("the answer has no number", where=f"{where}: answer", next="choose another --match")
        return Item(asked, None, answer, where)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise DataError("the choices are not a list of two or more texts", where=f"{where}: choices", next=EXAMPLES)
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError("the answer is neither a choice nor its number", where=f"{where}: answer", next=EXAMPLES)
    return Item(asked, tuple(choices), answer, where)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def matches(text: str, answer: str, match: Match) -> bool:
    """Whether a generated text is right.

    "exact": both are equal except for surrounding white space. "number": the last numbers of both are equal. "regex":
    the text contains a match of the pattern.
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
    template: str | None = None,
    strict: bool = False,
) -> tuple[dict[str, float | int], list[dict[str, Any]]]:
    """Return the share of questions that a model answers as metrics, and a row for each item.

    A choice's score is the sum of its ids' log-probabilities after the question; `task/accuracy_by_length` divides it
    by the choice's characters. Texts are generated greedily. A question that exceeds the context is cut from the left,
    as in lm-eval, and counted.

    Args:
        template: `chatml`, or a file or folder with the chat template, instead of the model's own.
        strict: refuse a question that exceeds the context.

    Raises:
        DataError: the file is malformed, or an item does not fit. UsageError: `match` is unknown.
    """
    with phrased_for(OPTIONS, memory=MEMORY):
        how = next((each for each in MATCHES if each == match), None)
        if how is None:
            known = ", ".join(MATCHES)
            raise UsageError(f"--match is {escape(match)!r}", where="command line", next=f"use one of: {known}")
        items = read_items(path, how)
        source, console = found_source(folder, base), Output(sys.stderr)
        with Speaker(source, device=device, dtype=dtype, template=template) as speaker:
            if speaker.template is None and any(isinstance(each.asked, Conversation) for each in items):
                next_ = "use items with a prompt, or name a template: --template chatml"
                raise ModelError("the model has no chat template", where=str(source), next=next_)
            # Encode the questions, and cut those that exceed the context.
            asked, cut = [_encoded(speaker, item, max_tokens) for item in items], 0
            for item, (_, dropped) in zip(items, asked, strict=True):
                if dropped and strict:
                    what = f"the question is {dropped:,} tokens too long for the model's context"
                    raise DataError(what, where=item.where, next="shorten it; without --strict its beginning is cut")
                cut += dropped > 0
            if cut:
                console.line(f"warning: {cut:,} of {len(items):,} questions do not fit; their beginnings are cut off")
            # Score choices, and generate the other answers.
            sequences, rows = [each for each, _ in asked], dict[int, dict[str, Any]]()
            answered = _generated(speaker, items, sequences, how, max_tokens, stop)
            with tokenizing("items", console) as report:
                for number, row in itertools.chain(_chosen(speaker, items, sequences), answered):
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


def _encoded(speaker: Speaker, item: Item, max_tokens: int) -> tuple[list[Scored], int]:
    """Return the ids to score or to continue, and how many were cut from the left of the longest.

    As in lm-eval, a choice leaves the rest of the context to its question. So does an answer of `max_tokens`, which
    takes at most half of the context.

    Raises:
        DataError: a choice alone exceeds the context.
    """
    longest = speaker.model.config.context_length
    if item.choices is None:
        sequences = [(ids := speaker.encode(item.asked, item.where), len(ids))]
        room = longest - min(max_tokens, longest // 2)
    else:
        sequences, room = [_pair(speaker, item, choice) for choice in item.choices], longest + 1
        for number, (ids, begin) in enumerate(sequences):
            if len(ids) - begin > longest:
                what = f"the choice has {len(ids) - begin:,} tokens, but the model's context holds {longest:,}"
                raise DataError(what, where=f"{item.where}: choices[{number}]", next="shorten it")
    kept = [(ids[-room:], begin - max(len(ids) - room, 0)) for ids, begin in sequences]
    return kept, max(0, *(len(ids) - room for ids, _ in sequences))


def _pair(speaker: Speaker, item: Item, choice: str) -> Scored:
    """Return the ids of a question and a choice, and the position of the choice: the end of the question's own ids.

    This is lm-eval's rule. White space at the end of a text belongs to the choice, because tokenizers put it at the
    beginning of words. If the tokenizer merges the question's end with the whole choice, the choice is encoded
    separately; without ids it would score as certain. A chat's prompt is always encoded separately, as in training.
    """
    added: list[int] = []
    if isinstance(item.asked, Conversation):
        before, rest = speaker.encode(item.asked, item.where), choice
    else:
        text = item.asked.rstrip()
        before, rest = speaker.encode(text), item.asked[len(text) :] + choice
        added = speaker.encode(text + rest)[len(before) :] if text else speaker.tokenizer.encode(rest).tolist()
    if not added:
        [apart] = speaker.tokenizer.encode_batch([rest], follows=[True])
        added = apart.tolist()
    return [*before, *added], len(before)


def _chosen(
    speaker: Speaker, items: Sequence[Item], sequences: Sequence[list[Scored]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, item in enumerate(items):
        if item.choices is None:
            continue
        sums = [sum(score.log_prob for score in each) for each in scores(speaker.model, sequences[number])]
        by_length = [each / len(choice) for each, choice in zip(sums, item.choices, strict=True)]
        best, best_by_length = sums.index(max(sums)), by_length.index(max(by_length))
        right = {"right": best == item.answer, "right_by_length": best_by_length == item.answer}
        yield number, {"answer": item.answer, "chosen": best, **right, "scores": sums}


def _generated(
    speaker: Speaker,
    items: Sequence[Item],
    sequences: Sequence[list[Scored]],
    match: Match,
    max_tokens: int,
    stop: Sequence[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    numbers = [number for number, item in enumerate(items) if item.choices is None]
    requests = [Request(sequences[number][0][0], Sampling(0.0), max_tokens, speaker.ends) for number in numbers]
    if not requests:
        return
    for request in requests:
        check_prompt(speaker.model, request.ids)
    texts = [""] * len(requests)
    for piece in continue_texts(engine_for(speaker.model, requests), requests, speaker.tokenizer, stop):
        texts[piece.request] += piece.text
        if piece.finish is not None:
            number, text = numbers[piece.request], texts[piece.request]
            answer = str(items[number].answer)
            yield number, {"answer": answer, "text": text, "right": matches(text, answer, match)}

"""Converts documents to samples: token ids, and a mask of the targets.

The targets of an assistant's turn are what its render adds to the generation prompt before it, up to and including the
token that ends the turn. Prompts and targets are encoded separately, as in serving: a server encodes only the prompt,
and the model's own tokens follow. Turns share a sample if the later prompt begins with the ids of the earlier prompt
and target. If a template renders earlier turns differently (Qwen3 drops reasoning before the last question), turns have
separate samples.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from genesis.data.chat.marks import Marked, MarksError, Part, TextParts, text_ids, unmarked
from genesis.data.chat.renderer import Job, Limits, Rendered, Renderer, RenderError
from genesis.data.chat.template import NO_TEMPLATE, ChatTemplate, template_variables
from genesis.data.chat.turns import (
    Loss,
    NoPromptError,
    Turn,
    TurnError,
    TurnNote,
    TurnReader,
    probes,
    read_ends,
    remarks,
    template_messages,
    wanted_turns,
)
from genesis.data.records import (
    EQUAL,
    NO_TARGET,
    Completion,
    Conversation,
    Defect,
    Document,
    Judged,
    Message,
    Pair,
    Remark,
)
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError, GenesisError, ModelError, escape
from genesis.files.strict_json import canonical_bytes

Ids = npt.NDArray[np.int64]

_BATCH_DOCUMENTS = 128
_BATCH_CHARS = 1 << 20
# Minimum memory of a render per byte of its conversation: JSON, characters of up to four bytes, and the output.
_MEMORY_A_BYTE = 16
_FORMAT = 3  # of the rules that convert a record to ids and targets


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Token ids and the mask of the targets.

    Attributes:
        ids: int64 `[n]`.
        is_target: bool `[n]`; never true for the first.
        target_bytes: UTF-8 bytes of text that the targets encode; special tokens encode none.
        notes: turns that cannot be learned and remarks about others; only in a conversation's first sample.
        split: for a pair, the number of tokens of the first sequence, the prompt with the chosen answer; otherwise 0.
        is_good: whether a judged answer is good.
        margin: the margin of a pair.
    """

    ids: Ids
    is_target: npt.NDArray[np.bool_]
    target_bytes: int
    notes: tuple[Defect | Remark, ...] = ()
    split: int = 0
    is_good: bool = False
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class _Piece:
    parts: Sequence[Part]
    target_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Prompts and targets in order: one pair per turn, or one pair for a document in which every token is a target."""

    turns: Sequence[tuple[_Piece, _Piece]]
    is_all_target: bool = False
    notes: tuple[Defect | Remark, ...] = ()


@dataclass(frozen=True, slots=True)
class _Request:
    """A conversation to render: its job, its messages and tools, and the characters that mark special tokens."""

    document: Document
    job: Job
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    marks: str


class _Chats:
    """The process that renders a model's conversations, and its tokenizer's parts; a context manager."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: Limits | None) -> None:
        self._tokenizer, self._parts = tokenizer, TextParts(tokenizer)
        self._limits = Limits() if limits is None else limits
        self._avoid: tuple[str, ...] = ()
        self._renderer: Renderer | None = None
        if template is not None:
            self._avoid = tuple(template.texts.values())
            texts, variables = template.texts_with_defaults, template_variables(tokenizer)
            self._renderer = Renderer(texts, variables, where=template.where, limits=self._limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that renders."""
        if self._renderer is not None:
            self._renderer.close()

    def _job(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, turns: Sequence[int]
    ) -> tuple[Job, str]:
        """Return the job of a conversation with marked special tokens, and the two marking characters, or "".

        Args:
            turns: messages whose prompts are requested; the index after the last one requests the prompt for
                generation.

        Raises:
            TurnError: the conversation is too large for a template. MarksError: no characters are left for marks.
            ValueError, RecursionError: see `Job.of`.
        """
        named = template_messages(messages)
        # Roles are not marked: many templates make a special token of one, `'<|' + message.role + '|>'`.
        (bare, tools), marks = self._parts.marker.marked([[{**m, "role": ""} for m in named], tools], self._avoid)
        shown = [{**message, "role": known.get("role")} for message, known in zip(bare, named, strict=True)]
        job = Job.of(shown, tools, turns)
        if len(job.data) > self._limits.memory_bytes // _MEMORY_A_BYTE:
            what = f"the conversation has {len(job.data):,} bytes, more than a template may be given"
            raise TurnError("huge conversation", what, "split it")
        return job, marks

    def _rendered(self, batches: Iterable[Sequence[Job]]) -> Iterator[list[Rendered | RenderError]]:
        if self._renderer is not None:
            yield from self._renderer.render_batches(batches)
            return
        for jobs in batches:
            if jobs:
                what = "the data holds conversations, but no chat template is given"
                raise ModelError(what, where="data.template", next=NO_TEMPLATE)
            yield []


class ChatEncoder(_Chats):
    """Converts documents of all kinds to samples.

    Attributes:
        fingerprint: equal ones give equal samples.
        end_of_turn_ids: ids that end an assistant's turn, the usual one first; empty without a template.
        learns_all: whether every token is a target.
        split: number of conversations so far that became several samples.

    Args:
        template: renders conversations; None without conversations.
        loss: which turns are targets. `all_assistant`; `last`; `completion`: those after a record's prompt, or else
            after the last user message; `all`: every token except for the first.

    Raises:
        ModelError: the template is not valid Jinja, or ends an assistant's turn with no special token.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, loss: Loss, limits: Limits | None = None
    ) -> None:
        super().__init__(tokenizer, template, limits)
        self._loss: Loss = loss
        self.learns_all = loss == "all"
        self.split = 0
        decisive = {
            "format": _FORMAT,
            "tokenizer": tokenizer.fingerprint,
            "template": None if template is None else template.fingerprint,
            "jinja2": version("jinja2"),
            "loss": loss,
        }
        self.fingerprint = hashlib.sha256(canonical_bytes(decisive)).hexdigest()
        self._reader = TurnReader(self._parts.marker)
        self.end_of_turn_ids: tuple[int, ...] = ()
        if template is not None:
            [found] = self._rendered([probes()])
            ends = read_ends(found, self._parts.marker)
            if "" in ends.tokens:
                what = "the chat template ends an assistant's turn with no special token, so the model would never stop"
                next = "use the tokenizer that the template was made for, or end the turn with {{ eos_token }}"
                raise ModelError(what, where=template.where, next=next)
            self.end_of_turn_ids = tuple(map(self._parts.special_id, ends.tokens))
            switch = "enable_thinking" * ("enable_thinking" in template.texts["default"])
            self._reader = TurnReader(self._parts.marker, template.where, ends, switch)

    def encode(self, documents: Sequence[Document]) -> list[list[Sample] | Defect]:
        """Return the samples of each document, or its defect. A preference has one sample.

        Raises:
            ModelError: a conversation has no template, or the template can no longer be run.
        """
        sides = [_sides(document) for document in documents]
        found = iter(self._encode([side for each in sides for side in each]))
        return [_joined(d, [next(found) for _ in each]) for d, each in zip(documents, sides, strict=True)]

    def _encode(self, documents: Sequence[Document]) -> list[list[Sample] | Defect]:
        batches = list(_batched(documents))
        started: deque[list[_Plan | _Request | Defect]] = deque()
        results: list[list[Sample] | Defect] = []
        for batch, found in zip(batches, self._rendered(self._start_plans(batches, started)), strict=True):
            renders = iter(found)
            plans = [
                self._plan(plan, next(renders)) if isinstance(plan, _Request) else plan for plan in started.popleft()
            ]
            for document, samples in zip(batch, self._encoded(plans), strict=True):
                self.split += not isinstance(samples, Defect) and len(samples) > 1
                results.append(samples or _defect(document, _NO_TARGET))
        return results

    def _start_plans(
        self, batches: Iterable[Sequence[Document]], started: deque[list[_Plan | _Request | Defect]]
    ) -> Iterator[list[Job]]:
        """Yield the jobs of each batch's conversations; add the unfinished plans of its documents to `started`."""
        for batch in batches:
            started.append([self._start_plan(document) for document in batch])
            yield [plan.job for plan in started[-1] if isinstance(plan, _Request)]

    def _start_plan(self, document: Document) -> _Plan | _Request | Defect:
        try:
            with _encodable("record"):
                document.text.encode("utf-8")
                if isinstance(document.record, Conversation):
                    return self._request(document, document.record)
                return self._plain_plan(document)
        except (TurnError, MarksError) as error:
            return _defect(document, error)

    def _encoded(self, plans: Sequence[_Plan | Defect]) -> Iterator[list[Sample] | Defect]:
        pieces = [piece for plan in plans if isinstance(plan, _Plan) for turn in plan.turns for piece in turn]
        ids_of = text_ids(self._tokenizer, (part for piece in pieces for part in piece.parts))
        return (plan if isinstance(plan, Defect) else self._samples(plan, ids_of) for plan in plans)

    def _request(self, document: Document, conversation: Conversation) -> _Request:
        turns = wanted_turns(conversation, self._loss)
        messages = conversation.messages
        if self._loss != "all":
            if not turns:
                raise _NO_TARGET
            messages = messages[: turns[-1] + 1]
        job, marks = self._job(messages, conversation.tools, turns)
        return _Request(document, job, messages, conversation.tools, marks)

    def _plan(self, asked: _Request, rendered: Rendered | RenderError) -> _Plan | Defect:
        try:
            return self._read(asked, rendered)
        except (TurnError, MarksError) as error:
            return _defect(asked.document, error)

    def _read(self, asked: _Request, rendered: Rendered | RenderError) -> _Plan:
        if isinstance(rendered, RenderError):
            raise TurnError("template", f"the template cannot render it: {rendered.what}", "check what it requires")
        turns: list[Turn] = []
        notes: list[TurnNote] = []
        with suppress(*[NoPromptError] * (self._loss == "all")):  # everything is learned, also without prompts
            turns, notes = self._reader.read(rendered, asked.messages, asked.job.turns, asked.marks)
        shown = [turn.prompt.text + turn.target.text for turn in reversed(turns)]
        pairs = [self._pair(turn.prompt, turn.target) for turn in turns]
        if self._loss == "all":
            whole = unmarked(rendered.whole, asked.marks)
            if not turns or not shown[0].startswith(whole.text):  # otherwise the last turn has all of it and the end
                cut = len(turns[-1].prompt.text) if turns and whole.text.startswith(shown[0]) else len(whole.text)
                pairs, shown = [self._pair(whole[:cut], whole[cut:])], [whole.text]
            notes = []
        ends = [turn for turn, (_, end) in zip(asked.job.turns, rendered.turns, strict=True) if isinstance(end, str)]
        messages = asked.messages if self._loss == "all" else asked.messages[: ends[-1] + 1]
        notes += remarks(messages, asked.tools, [*shown, rendered.whole])
        return _Plan(
            pairs,
            self._loss == "all",
            tuple(note if isinstance(note, Remark) else _defect(asked.document, note, _TURNS) for note in notes),
        )

    def _pair(self, prompt: Marked, target: Marked) -> tuple[_Piece, _Piece]:
        bytes_of = self._parts.text_bytes
        before, after = self._parts.parts(prompt, follows=False), self._parts.parts(target, follows=bool(prompt.text))
        return _Piece(before, bytes_of(prompt) if self._loss == "all" else 0), _Piece(after, bytes_of(target))

    def _plain_plan(self, document: Document) -> _Plan:
        start, end = self._tokenizer.start_ids, self._tokenizer.document_end_ids
        if not isinstance(document.record, Completion):
            text: tuple[Part, ...] = ((document.text, False, False),)
            piece = _Piece((*start, *text, *end), len(document.text.encode("utf-8")))
            return _Plan([(piece, _Piece(()))], is_all_target=True)
        prompt, completion = document.record.prompt, document.record.completion
        before: tuple[Part, ...] = ((prompt, False, False),) if prompt else ()
        after: tuple[Part, ...] = ((completion, bool(prompt), False),) if completion else ()
        is_all = self._loss == "all"
        asked = _Piece((*start, *before), len(prompt.encode("utf-8")) if is_all else 0)
        return _Plan([(asked, _Piece((*after, *end), len(completion.encode("utf-8"))))], is_all)

    def _samples(self, plan: _Plan, ids_of: Callable[[Sequence[Part]], Ids]) -> list[Sample]:
        """Return the samples of a plan, in the order of their turns."""
        pairs = [(ids_of(prompt.parts), ids_of(target.parts)) for prompt, target in plan.turns]
        left = list(range(len(pairs)))
        samples: list[Sample] = []
        # The last turn's sample takes in all earlier turns with which its prompt begins; repeat with the others.
        while left:
            last = left.pop()
            prompt, target = pairs[last]
            ids = np.concatenate([prompt, target])
            is_target = np.full(len(ids), plan.is_all_target)
            is_target[len(prompt) :] = True
            total = plan.turns[last][1].target_bytes + (plan.turns[last][0].target_bytes if plan.is_all_target else 0)
            for turn in [turn for turn in left if _begins(prompt, *pairs[turn])]:
                left.remove(turn)
                start = len(pairs[turn][0])
                is_target[start : start + len(pairs[turn][1])] = True
                total += plan.turns[turn][1].target_bytes
            if is_target[:1].any():  # the first token has no predecessor
                is_target[0], first = False, int(ids[0])
                total -= 0 if first in self._tokenizer.special_ids else self._tokenizer.text_bytes(first)
            if is_target.any():
                samples.append(Sample(ids, is_target, max(total, 0)))
        if samples:
            samples[-1] = replace(samples[-1], notes=plan.notes)
        return samples[::-1]


_TURNS = "turns are read but not learned: "
_NO_TARGET = TurnError(NO_TARGET, "no message of it is a target", "see data.loss")


def _sides(document: Document) -> list[Document]:
    """Return the documents to encode: for a preference, one for each answer, preceded by the prompt."""
    record = document.record
    if isinstance(record, Pair):
        return [replace(document, record=record.chosen), replace(document, record=record.rejected)]
    return [replace(document, record=record.answer)] if isinstance(record, Judged) else [document]


def _joined(document: Document, sides: list[list[Sample] | Defect]) -> list[Sample] | Defect:
    """Combine the samples of a document's sides into the document's samples."""
    if not isinstance(document.record, Pair | Judged):
        return sides[0]
    found = list[Sample]()
    for side in sides:
        if isinstance(side, Defect):
            return side
        if len(side) != 1:
            what = "the template renders a turn of the answer differently when others follow, so it is not one sequence"
            return _defect(document, TurnError("several samples", what, "write an answer of one turn"))
        found += side
    first, last = found[0], found[-1]
    if isinstance(document.record, Judged):
        return [replace(first, is_good=document.record.is_good)]
    if np.array_equal(first.ids, last.ids):
        return _defect(document, TurnError(EQUAL, "the two answers have equal tokens", "remove the record"))
    ids, is_target = (np.concatenate([getattr(each, name) for each in found]) for name in ("ids", "is_target"))
    notes = tuple(dict.fromkeys(note for each in found for note in each.notes))
    size, margin = first.target_bytes + last.target_bytes, document.record.margin
    return [Sample(ids, is_target, size, notes, split=len(first.ids), margin=margin)]


def _batched(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    start = chars = 0
    for index, document in enumerate(documents):
        chars += len(document.text)
        if chars >= _BATCH_CHARS or index - start + 1 >= _BATCH_DOCUMENTS:
            yield documents[start : index + 1]
            start, chars = index + 1, 0
    if start < len(documents):
        yield documents[start:]


def _begins(ids: Ids, prompt: Ids, target: Ids) -> bool:
    middle, stop = len(prompt), len(prompt) + len(target)
    return bool(len(ids) >= stop and np.array_equal(ids[middle:stop], target) and np.array_equal(ids[:middle], prompt))


def _defect(document: Document, error: TurnError | MarksError, which: str = "") -> Defect:
    return Defect(which + error.kind, escape(error), document.file, document.line, error.next)


@contextmanager
def _encodable(what: str) -> Iterator[None]:
    """Guard a block that converts `what` to JSON, which may fail. Raises: TurnError."""
    try:
        yield
    except (TurnError, MarksError, GenesisError):  # some are ValueErrors
        raise
    except UnicodeEncodeError:
        text = "the text holds half a surrogate pair, which is not a character"
        raise TurnError("bad text", text, "decode the text with errors='replace'") from None
    except (ValueError, RecursionError):
        text = f"the {what} is nested too deep, or holds a number with thousands of digits"
        raise TurnError("bad record", text, "simplify it") from None


# --- Conversations to prompts -----------------------------------------------------------------------------------------
# The ids from which a chat model answers; training uses the same ids before an answer.


class ChatPrompts(_Chats):
    """Renders conversations with a model's template in a child process; a context manager.

    Attributes:
        end_of_turn_ids: ids with which the template ends an assistant's turn; empty if it uses none.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, limits: Limits | None = None) -> None:
        super().__init__(tokenizer, template, limits)
        [found] = self._rendered([probes()])
        ends = read_ends(found, self._parts.marker)
        self.end_of_turn_ids = tuple(self._parts.special_id(token) for token in ends.tokens if token)

    def encode(
        self, conversation: Conversation | Sequence[Mapping[str, Any]], *, where: str = "", most: int | None = None
    ) -> list[int]:
        """Return the ids before the answer to a conversation; special tokens in its messages remain text.

        Args:
            conversation: a conversation, or its messages such as `[{"role": "user", "content": "…"}]`.
            where: name of the conversation in errors.
            most: limit of tokens; a conversation with many more is refused before it is encoded.

        Raises:
            DataError: the template cannot render it, or it cannot be encoded.
            ModelError: the template cannot be used.
        """
        if not isinstance(conversation, Conversation):
            conversation = Conversation(tuple(dict(message) for message in conversation))
        try:
            with _encodable("conversation"):
                return self._ids(conversation, most)
        except (TurnError, MarksError) as error:
            raise DataError(escape(error), where=where, next=error.next) from error

    def _ids(self, conversation: Conversation, most: int | None) -> list[int]:
        job, marks = self._job(conversation.messages, conversation.tools, [len(conversation.messages)])
        [[rendered]] = self._rendered([[job]])
        prompt = rendered.turns[0][0] if isinstance(rendered, Rendered) else rendered
        if isinstance(prompt, RenderError):
            raise TurnError("template", f"the chat template cannot render it: {prompt.what}", "check what it requires")
        if most is not None and self._tokenizer.is_beyond(prompt, most, parse_special=True):
            raise TurnError("too long", f"the conversation has more than {most:,} tokens", "shorten it")
        wanted = self._parts.parts(unmarked(prompt, marks), follows=False)
        ids: list[int] = text_ids(self._tokenizer, wanted)(wanted).tolist()
        return ids

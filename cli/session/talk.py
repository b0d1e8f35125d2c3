"""A conversation with a model: messages, answers and commands. It does not depend on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from genesis.data.record_formats import read_messages
from genesis.data.records import Conversation, Message, Position, content_text
from genesis.errors import DataError, DiskError, ModelError, UsageError, escape
from genesis.files.atomic import write_file
from genesis.files.boundary import boundary
from genesis.files.paths import exists
from genesis.files.strict_json import parse_object, read_limited
from genesis.train.output import Output
from genesis_cli.session.generation import GENERATE, GENERATE_MEMORY, chosen_sampling
from genesis_cli.session.inference import Speaker
from genesis_cli.session.phrases import phrased_for
from genesis_models.engine import Finish, Request, Sampling
from genesis_models.source import find_source

LARGEST = 64 << 20  # the most bytes of a file for `load`
SYSTEM = ("system", "developer")


class Talk:
    """Messages to a model and its answers. Without a chat template the model continues all text so far.

    Args:
        max_tokens: the most tokens of an answer.
        system: system message.

    Attributes:
        messages: messages so far.
        finish: why the last answer ended; None if it was stopped.
        tokens: number of the last answer's tokens.

    Raises:
        UsageError: a system message for a model without a template.
    """

    def __init__(self, speaker: Speaker, sampling: Sampling, max_tokens: int, system: str | None = None) -> None:
        self._speaker, self._sampling, self._max_tokens = speaker, sampling, max_tokens
        self._drawn, self._own_file = 0, ""
        self.messages: list[Message] = []
        self.finish: Finish | None = None
        self.tokens = 0
        if system is not None:
            self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else None
        return content_text(first) if first is not None and first["role"] in SYSTEM else None

    def set_system(self, text: str) -> None:
        """Make `text` the system message of the whole conversation; an empty text removes it. Raises: UsageError."""
        if self._speaker.template is None:
            what = "the model has no chat template, so it accepts no system message"
            raise UsageError(what, next="put it in front of your text")
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [] if self.system is None else self.messages[:1]

    def say(self, text: str) -> Iterator[str]:
        """Add a message, and yield the answer piece by piece; the yielded part of a stopped answer is kept.

        Raises:
            UsageError: the context is full. DataError: the template refuses the messages. The message is removed again.
        """
        return self._answer([*self.messages, {"role": "user", "content": _plain(text)}])

    def regenerate(self) -> Iterator[str]:
        """Yield another answer in place of the last. Raises: UsageError: there is none; and as in `say`."""
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not asked or asked[-1]["role"] in SYSTEM:
            raise UsageError("there is no message to answer", next="write one")
        return self._answer(asked)

    def _answer(self, asked: list[Message]) -> Iterator[str]:
        text, self.finish, self.tokens = "", None, 0
        # `sequence` makes each answer a different draw of the same seed.
        request = Request(self._ids(asked), self._sampling, self._max_tokens, self._speaker.ends, sequence=self._drawn)
        self._drawn += 1
        try:
            for piece in self._speaker.answer(request):
                text, self.finish, self.tokens = text + piece.text, piece.finish, piece.tokens
                yield piece.text
        finally:
            if text or self.finish is not None:
                self.messages = [*asked, {"role": "assistant", "content": _plain(text)}]

    def _ids(self, messages: list[Message]) -> list[int]:
        if self._speaker.template is None:
            return self._speaker.encode("".join(map(content_text, messages)))
        return self._speaker.encode(Conversation(tuple(messages)))

    def size(self) -> tuple[int, int]:
        """Return the tokens of the conversation before the next answer, and the tokens of the model's context."""
        return len(self._ids(self.messages)) if self.messages else 0, self._speaker.model.config.context_length

    def save(self, path: str) -> None:
        """Write the messages as a JSONL record, which can be loaded and trained on.

        Raises:
            UsageError: there is no message, or the file exists already. DiskError: it cannot be written.
        """
        if not self.messages:
            raise UsageError("there are no messages to save", next="write one")
        with boundary(DiskError, "saving the chat", path):
            is_there = exists(path)
        if is_there and os.path.abspath(path) != self._own_file:
            raise UsageError(f"{escape(path)} exists already", next="give another name")
        write_file(path, (json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n").encode())
        self._own_file = os.path.abspath(path)

    def load(self, path: str) -> None:
        """Replace the messages with a file's.

        Raises:
            DataError: the file does not exist, or is not a conversation.
        """
        data = read_limited(path, LARGEST, DataError)
        try:
            value = parse_object(data, where=escape(path))
        except ModelError as error:
            what = f"the file is not a JSON object: {error.what}"
            raise DataError(what, where=escape(path), next="load what /save wrote") from error
        if "messages" not in value:
            raise DataError('the file has no "messages"', where=escape(path), next="load what /save wrote")
        messages = [*read_messages(value["messages"], Position(path, 1))]
        if self._speaker.template is None and any(each["role"] in SYSTEM for each in messages):
            what = "the file has a system message, but the model has no chat template"
            raise DataError(what, where=escape(path), next="remove it")
        self.messages, self._own_file = messages, os.path.abspath(path)


def _plain(text: str) -> str:
    """Return the text without NUL: byte-level models may draw it, but a record with it could not be loaded again."""
    return text.replace("\0", "\ufffd")


@contextmanager
def talk(
    folder: str,
    *,
    system: str | None,
    max_tokens: int,
    seed: int,
    base: str | None,
    device: str,
    dtype: str,
    kv_cache: Literal["auto", "fp8"],
    **drawing: Any,
) -> Iterator[Talk]:
    """Open a conversation with the model in `folder`, which a line reports; `drawing` is as in `chosen_sampling`."""
    with phrased_for(GENERATE, memory=GENERATE_MEMORY), ExitStack() as stack:
        source, console = find_source(folder, base), Output(sys.stderr)
        speaker = stack.enter_context(Speaker(source, device=device, dtype=dtype, kv_cache=kv_cache))
        console.line(str(source))
        sampling = chosen_sampling(source, drawing, seed, console)
        if speaker.template is None:
            console.line("the model has no chat template: it continues your text")
        yield Talk(speaker, sampling, max_tokens, system)

"""A conversation's turns as texts: which are targets, the prompt before each, what the model says in it, and how the
template ends it, which renders of small conversations reveal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from genesis.data.chat.child import common_start
from genesis.data.chat.marks import Marked, Marker, MarksError, unmarked
from genesis.data.chat.renderer import Job, Rendered, RenderError
from genesis.data.records import REASONING, Conversation, Message, Remark, content_text, is_learned
from genesis.files.paths import quote

Loss = Literal["all_assistant", "last", "completion", "all"]

_SHOWN_CHARS = 40
_NO_LETTERS = re.compile(r"[\W_]+")


class TurnError(ValueError):
    """A turn whose targets are undefined; `kind` is the name under which such conversations are counted."""

    def __init__(self, kind: str, what: str, next: str) -> None:
        self.kind, self.what, self.next = kind, what, next
        super().__init__(what)


class NoPromptError(TurnError):
    """A turn without a prompt that leads to it."""

    def __init__(self, what: str, next: str) -> None:
        super().__init__("template", what, next)


class _UnaskedError(NoPromptError):
    """A turn that is read but not learned, because no prompt asks for it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt that a server sends to the model, and the answer that it should give.

    Attributes:
        prompt: the messages before the turn, with the generation prompt.
        target: the answer up to and including the end of the turn.
        end: the special token that ends it, or "".
    """

    prompt: Marked
    target: Marked
    end: str


def wanted_turns(conversation: Conversation, loss: Loss) -> list[int]:
    """Return the indices of the target messages under `loss`, ascending; under `all` the last assistant message.

    A turn whose `weight` is 0 or whose `train` is false is not a target, except under `all`.
    """
    roles = [message.get("role") for message in conversation.messages]
    turns = [index for index, role in enumerate(roles) if role == "assistant"]
    if loss == "all":
        return turns[-1:]
    if loss == "last":
        turns = turns[-1:]
    if loss == "completion":
        users = [index for index, role in enumerate(roles) if role == "user"]
        first = conversation.prompt_messages or (users[-1] + 1 if users else 0)
        turns = [index for index in turns if index >= first]
    return [index for index in turns if is_learned(conversation.messages[index])]


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages as transformers passes them to a template: without nulls, and with reasoning under the names
    that templates read.
    """
    result: list[Mapping[str, Any]] = []
    for original in messages:
        message = {key: value for key, value in original.items() if value is not None}
        reasoning = next((message[key] for key in REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


TurnNote = TurnError | MarksError | Remark


@dataclass(frozen=True)
class Ends:
    """How a template ends turns.

    Attributes:
        tokens: special tokens that end turns, the usual one first; "" among them if a turn ends without one.
        closing: text that only a complete render has after the turn's own end (Phi-3's end of text), or "".
        opening: text that only prompts have before an answer (DeepSeek-R1's start of its reasoning), or "".
        following: texts that end an answer and a call without their own special token: the start of the next message,
            up to and including its first special token (GLM-4's `<|user|>` and `<|observation|>`), or "".
    """

    tokens: tuple[str, ...] = ()
    closing: str = ""
    opening: str = ""
    following: Sequence[str] = ("", "")


@dataclass(frozen=True, slots=True)
class TurnReader:
    """Reads turns from the renders of one template.

    Attributes:
        where: name of the template in errors.
        switch: the argument that makes the template's prompts ask for reasoning, or "".
    """

    marker: Marker
    where: str = ""
    ends: Ends = Ends()
    switch: str = ""

    def read(
        self, rendered: Rendered, messages: Sequence[Message], turns: Sequence[int], marks: str
    ) -> tuple[list[Turn], list[TurnNote]]:
        """Return the turns whose targets are defined, and the defects and remarks of turns.
        Raises: TurnError, MarksError: the first error, if no turn can be learned.
        """
        found: list[Turn] = []
        notes: list[TurnNote] = []
        unasked: TurnError | None = None
        for number, (prompt, end) in zip(turns, rendered.turns, strict=True):
            try:
                turn, remark = self._read(number, messages, prompt, end, marks)
            except _UnaskedError as error:
                kind = "turns are read but not learned: no prompt leads to them"
                notes.append(Remark(kind, error.what))
                unasked = error
            except (TurnError, MarksError) as error:
                notes.append(error)
            else:
                found.append(turn)
                notes += [remark] if remark else []
        if not found and turns:
            raise next(note for note in (*notes, unasked) if isinstance(note, TurnError | MarksError))
        return found, notes

    def _read(
        self, number: int, messages: Sequence[Message], prompt: str | RenderError, end: str | RenderError, marks: str
    ) -> tuple[Turn, Remark | None]:
        """Return a turn, and how its prompt differs from its render. Raises: TurnError, MarksError."""
        if number == 0:
            raise _UnaskedError("no message comes before it, so it has no prompt", "begin with a message of the user")
        if isinstance(end, RenderError):
            raise TurnError("template", f"the template cannot render it: {end.what}", "check what it requires")
        if isinstance(prompt, RenderError):
            raise _UnaskedError(f"the template gives no prompt for it: {prompt.what}", "check what it requires")
        prompt, said, remark = self._apart(number, messages, prompt, end, marks)
        more = self.ends.following[bool(messages[number].get("tool_calls"))]
        turn = self._turn(unmarked(prompt, marks), unmarked(said.removesuffix(self.ends.closing), marks), more)
        _check_said(turn, messages[number], number)
        if not turn.end and messages[number].get("tool_calls"):
            what = f"the template ends the calls of messages[{number}] with no special token, so a model would not stop"
            raise TurnError("template", what, "use a template that ends them")
        return turn, remark

    def _apart(
        self, number: int, messages: Sequence[Message], prompt: str, end: str, marks: str
    ) -> tuple[str, str, Remark | None]:
        """Return the prompt, and what the render adds to it, even if the render does not begin with the prompt.
        Raises: NoPromptError: the added part cannot be determined.
        """
        if end.startswith(prompt):
            return prompt, end[len(prompt) :], None
        plain = prompt.removesuffix(self.ends.opening)
        if end.startswith(plain):
            kind = f"turns are learned without {quote(self.ends.opening)}, which the template only adds to prompts"
            return plain, end[len(plain) :], Remark(kind, f"messages[{number}]")
        same = common_start(prompt, end)
        before, asked, said = (
            quote(text[:_SHOWN_CHARS].translate(str.maketrans("", "", marks)), 4 * _SHOWN_CHARS)
            for text in (prompt[:same][-_SHOWN_CHARS:], prompt[same:], end[same:])
        )
        differ = f"after {before} the prompt has {asked} and the render {said}"
        # Find the last message and what follows it in both. Earlier text may differ, because a server sends the prompt.
        start = prompt.rfind(content_text(messages[number - 1]).strip())
        tail = prompt[start:] if start >= 0 else ""
        begin = end.find(tail, max(0, same - len(tail) + 1))
        if tail and begin >= 0 and end.find(tail, begin + 1) < 0:
            kind = "turns are learned after prompts in which the template renders earlier messages differently"
            return prompt, end[begin + len(tail) :], Remark(kind, f"messages[{number}]: {differ}")
        raise self._no_prefix(number, messages, f"at character {same:,}, {differ}")

    def _no_prefix(self, number: int, messages: Sequence[Message], differ: str) -> NoPromptError:
        next = "use another template: data.template=FILE"
        if messages[number - 1]["role"] == "assistant":
            next = "join consecutive messages of the assistant"
        elif reasoning(messages[number]):
            on = f" to {{{self.switch}: true}}" * bool(self.switch)
            next = f"remove the reasoning from the data, or change data.template_args{on}"
        elif self.switch:
            next = f"for data without reasoning, set data.template_args={{{self.switch}: false}}"
        what = f"the render of messages[{number}] does not begin with its prompt by the template {self.where}: {differ}"
        return NoPromptError(what, next)

    def _turn(self, prompt: Marked, rest: Marked, more: str) -> Turn:
        """Return the turn whose render adds `rest` to `prompt`, cut at its end; without one it ends with `more`."""
        end, stop = end_token(self.marker, rest)
        rest = rest[:stop] if end else Marked(rest.text + more, rest.plain)
        return Turn(prompt, rest, end or more.strip())


def end_token(marker: Marker, text: Marked) -> tuple[str, int]:
    """Return the special token that only white space follows in `text`, and its stop; "" without one."""
    specials = marker.specials(text)
    if specials and not text.text[specials[-1][1] :].strip():
        start, stop = specials[-1]
        return text.text[start:stop], stop
    return "", len(text.text)


def reasoning(message: Message) -> str:
    """Return the reasoning of a message, from its own field or before `</think>` in the content; "" without any."""
    named = next((str(message[key]) for key in REASONING if message.get(key) is not None), "")
    before, end, _ = content_text(message).rpartition("</think>")
    return (named or before.replace("<think>", "") * bool(end)).strip()


def remarks(messages: Sequence[Message], tools: Sequence[Any] | None, shown: Sequence[str]) -> Iterator[Remark]:
    """Yield remarks about contents that no render in `shown` has (reasoning, messages, tools), and about arguments in a
    string of JSON that the template writes as a quoted string.
    """
    held = [("tools are", f"tools[{n}]", str(t.get("function", t).get("name", ""))) for n, t in enumerate(tools or ())]
    # Collect the texts that a render should contain.
    for number, message in enumerate(messages):
        place, text, calls = f"messages[{number}]", content_text(message), message.get("tool_calls") or ()
        if message["role"] != "assistant":
            held.append((f"{message['role']} messages are", place, text))
            continue
        held.append(("turns have reasoning that is", place, reasoning(message)))
        held += [("texts next to calls are", place, text)] * bool(calls)
        for call in calls:
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str) and any(json.dumps(arguments, ensure_ascii=False) in each for each in shown):
                kind = "calls have a string as arguments, which the template writes in quotes: make it an object"
                yield Remark(kind, f"{place}: {quote(arguments, _SHOWN_CHARS)}")
    # Report those that no render contains.
    letters: list[str] | None = None
    for kind, place, text in held:
        if any(text.strip() in each for each in shown):
            continue
        # Templates may trim lines, escape quotes, or reformat JSON.
        letters = letters or [_NO_LETTERS.sub("", each) for each in shown]
        forms = (_NO_LETTERS.sub("", form) for form in (text, json.dumps(text, ensure_ascii=False)))
        if not any(form in each for form in forms for each in letters):
            yield Remark(f"{kind} left out by the template", f"{place}: {quote(text, _SHOWN_CHARS)}")


def _check_said(turn: Turn, message: Message, number: int) -> None:
    """Check that the render has the message's calls or content, which some templates drop. Raises: TurnError."""
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name")
        if isinstance(name, str) and name not in turn.target.text:
            what = f"the template leaves out the call of {name!r} in messages[{number}]"
            raise TurnError("template", what, "use a template that supports tools")
    if not message.get("tool_calls"):
        content = message.get("content")
        texts = [part["text"] for part in content] if isinstance(content, list) else [content_text(message)]
        # Many templates reformat the reasoning.
        if not all(text.rpartition("</think>")[2].strip() in turn.target.text for text in texts):
            what = f"the template leaves out or changes the content of messages[{number}]"
            raise TurnError("template", what, "use a template that keeps a message's text unchanged")


# --- How a template ends turns ----------------------------------------------------------------------------------------


_ANSWER = "Fine, thanks."
_QUESTION = {"role": "user", "content": "How are you?"}
_TOOL: dict[str, Any] = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "now", "arguments": {}}}
_RESULT = {"role": "tool", "name": "now", "tool_call_id": "call00001", "content": "12:00"}
_ANSWERED = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
_CALLED: list[dict[str, Any]] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


def probes() -> list[Job]:
    """Return the jobs for `read_ends`: an answer at the end, one that is followed, and the same for a call."""
    tools = [{"type": "function", "function": _TOOL}]
    return [
        Job.of(_ANSWERED, None, [1]),
        Job.of([*_ANSWERED, _QUESTION], None, []),
        Job.of(_CALLED, tools, [1]),
        Job.of([*_CALLED, _RESULT], tools, []),
    ]


def read_ends(found: Sequence[Rendered | RenderError], marker: Marker) -> Ends:
    """Derive the ends from the renders of `probes`; no tokens if the template renders none of them."""
    last, followed, call, answered = found
    closing = opening = ""
    if isinstance(last, Rendered) and isinstance(followed, Rendered):
        closing = _closing(last.whole, followed.whole, marker)
    if isinstance(last, Rendered) and isinstance(asked := last.turns[0][0], str):
        before = last.whole.rpartition(_ANSWER)[0]
        opening = asked[len(before) :] if before and asked.startswith(before) else ""
    tokens: list[str] = []
    following = ["", ""]
    for kind, (each, longer, text) in enumerate(((last, followed, _ANSWER), (call, answered, _TOOL["name"]))):
        # A template without support for calls renders at most the tool, which the prompt also has.
        prompt = each.turns[0][0] if isinstance(each, Rendered) else each
        if isinstance(each, Rendered) and isinstance(prompt, str) and each.whole.count(text) > prompt.count(text):
            end = end_token(marker, Marked(each.whole.removesuffix(closing)))[0]
            if not end:
                following[kind] = _following(each, longer, marker) or following[0]
            end = end or following[kind].strip()
            tokens += [end] if end or kind == 0 else []  # data with calls raises an error if calls have no end
    return Ends(tuple(dict.fromkeys(tokens)), closing, opening, following)


def _following(whole: Rendered, longer: Rendered | RenderError, marker: Marker) -> str:
    """Return what a longer conversation has after `whole`, up to and including an immediate special token; or ""."""
    if not isinstance(longer, Rendered) or not longer.whole.startswith(whole.whole):
        return ""
    rest = longer.whole[len(whole.whole) :]
    start, stop = next(iter(marker.specials(Marked(rest))), (0, 0))
    return "" if rest[:start].strip() else rest[:stop]


def _closing(last: str, followed: str, marker: Marker) -> str:
    """Return what follows the end of the turn only in `last`, if both end it with the same special token."""
    tails = [text.rpartition(_ANSWER)[2] for text in (last, followed)]
    same = marker.specials(Marked(os.path.commonprefix(tails)))  # noqa: RUF071 - texts, not paths
    rest = tails[0][same[-1][1] :] if same else ""
    return rest if rest.strip() else ""

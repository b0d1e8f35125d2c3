"""A conversation's turns as texts: which of them are wanted, what comes before each, and what a model says in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from genesis.data.chat.marks import Marked, Marker, unmarked
from genesis.data.chat.renderer import Rendered, RenderError
from genesis.data.records import Conversation, is_learned

__all__ = ["Loss", "NoPromptError", "Turn", "TurnError", "TurnReader", "template_messages", "wanted_turns"]

Loss = Literal["all_assistant", "last", "completion", "all"]

# The names of a message's reasoning; templates read the first one.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SHOWN_CHARS = 40


class TurnError(ValueError):
    """A turn whose targets are not defined; `kind` is the name under which such conversations are counted."""

    def __init__(self, kind: str, what: str, next: str) -> None:
        self.kind, self.what, self.next = kind, what, next
        super().__init__(what)


class NoPromptError(TurnError):
    """A turn that no prompt leads to."""

    def __init__(self, what: str, next: str) -> None:
        super().__init__("template", what, next)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a server would give the model, and what the model should answer.

    Attributes:
        prompt: the messages before the turn, with the generation prompt.
        target: up to and with the end of the turn.
        end: the special token that ends it, or "".
    """

    prompt: Marked
    target: Marked
    end: str


def wanted_turns(conversation: Conversation, loss: Loss) -> list[int]:
    """The indices of the messages that are targets under `loss`, ascending; under `all` the last that could be one.

    A turn whose `weight` is 0 or whose `train` is false is none, but under `all`.
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
    """The messages as transformers hands them to a template: their reasoning has the names that templates read."""
    result: list[Mapping[str, Any]] = []
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


@dataclass(frozen=True, slots=True)
class TurnReader:
    """Reads turns from the renders of one template.

    Attributes:
        closing: what the template adds at the end of a whole render, after the turn's own end.
    """

    marker: Marker
    closing: str

    def read(self, rendered: Rendered, messages: Mapping[int, Mapping[str, Any]], marks: str) -> list[Turn]:
        """The turns that a model could have been asked for: those for which the template gives a prompt.

        Args:
            messages: each turn's message by its index, as found.

        Raises:
            NoPromptError: there is none, or the render of one does not begin with its prompt.
            TurnError: the render of one lacks what it says.
            MarksError: special tokens in messages can no longer be told from the template's.
        """
        turns: list[Turn] = []
        refused: RenderError | None = None
        for (number, message), (prompt, end) in zip(messages.items(), rendered.turns, strict=True):
            failed = next((part for part in (prompt, end) if isinstance(part, RenderError)), None)
            if failed is not None:
                refused = refused or failed
                continue
            assert isinstance(prompt, str) and isinstance(end, str)
            if not end.startswith(prompt):
                raise _no_prefix(number, prompt, end, marks)
            said = end[len(prompt) :].removesuffix(self.closing)
            turn = self._turn(unmarked(prompt, marks), unmarked(said, marks))
            _check_said(turn, message, number)
            turns.append(turn)
        if not turns and refused is not None:
            raise NoPromptError(f"the template gives no prompt for it: {refused.what}", "see what it asks for")
        return turns

    def _turn(self, prompt: Marked, rest: Marked) -> Turn:
        """The turn whose render adds `rest` to `prompt`: after its last special token there is only white space."""
        specials = self.marker.specials(rest)
        if specials and not rest.text[specials[-1][1] :].strip():
            start, stop = specials[-1]
            return Turn(prompt, rest[:stop], rest.text[start:stop])
        return Turn(prompt, rest, "")


def _check_said(turn: Turn, message: Mapping[str, Any], number: int) -> None:
    """See that the render has the message's calls or else its content, which some templates drop. Raises: TurnError."""
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name")
        if isinstance(name, str) and name not in turn.target.text:
            what = f"the template leaves out the call of {name!r} in messages[{number}]"
            raise TurnError("template", what, "take a template that knows tools")
    content = message.get("content")
    if isinstance(content, str) and not message.get("tool_calls"):
        answer = content.rpartition("</think>")[2].strip()  # many templates write the reasoning before it anew
        if answer not in turn.target.text:
            what = f"the template leaves out or changes the content of messages[{number}]"
            raise TurnError("template", what, "take a template that writes a message's text as it is")


def _no_prefix(number: int, prompt: str, end: str, marks: str) -> NoPromptError:
    same = next((i for i, (a, b) in enumerate(zip(prompt, end, strict=False)) if a != b), min(len(prompt), len(end)))
    unmark = str.maketrans("", "", marks)
    asked, said = (text[same : same + _SHOWN_CHARS].translate(unmark) for text in (prompt, end))
    what = f"the render of messages[{number}] does not begin with its prompt: it has {said!r}, the prompt {asked!r}"
    way_out = "join messages of the assistant that follow one another, or change data.template_args or the reasoning"
    return NoPromptError(what, way_out)

"""Conversations to prompts: the ids from which a chat model answers, the same as before an answer in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genesis.data.chat.marks import MarksError, TextIds, TextParts, unmarked
from genesis.data.chat.renderer import Limits, Rendered, Renderer, RenderError
from genesis.data.chat.template import ChatTemplate, template_variables
from genesis.data.chat.turns import TurnError, marked_job, probes, read_ends
from genesis.data.records import Conversation
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError, GenesisError, escape


class ChatPrompts:
    """Renders conversations with a model's template, in a child process; a context manager.

    Attributes:
        end_of_turn_ids: the ids with which the template ends an assistant's turn; none where it ends it with none.

    Raises:
        ModelError: the template is no valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, limits: Limits | None = None) -> None:
        self._tokenizer, self._limits = tokenizer, Limits() if limits is None else limits
        self._parts = TextParts(tokenizer)
        self._avoid = tuple(template.texts.values())
        texts, variables = template.texts_with_defaults, template_variables(tokenizer)
        self._renderer = Renderer(texts, variables, where=template.where, limits=self._limits)
        ends = read_ends(self._renderer.render(probes()), self._parts.marker)
        self.end_of_turn_ids = tuple(self._parts.special_id(token) for token in ends.tokens if token)

    def __enter__(self) -> ChatPrompts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that renders."""
        self._renderer.close()

    def encode(
        self, conversation: Conversation | Sequence[Mapping[str, Any]], *, where: str = "", most: int | None = None
    ) -> list[int]:
        """The ids before the answer to a conversation; special tokens in its messages stay text.

        Args:
            conversation: or its messages, such as `[{"role": "user", "content": "…"}]`.
            where: how an error names it.
            most: the tokens that it may have; one that has many more is refused before it is encoded.

        Raises:
            DataError: the template cannot render it, or it cannot be encoded. ModelError: the template cannot be used.
        """
        if not isinstance(conversation, Conversation):
            conversation = Conversation(tuple(dict(message) for message in conversation))
        try:
            return self._ids(conversation, most)
        except (TurnError, MarksError) as error:
            next = error.next if isinstance(error, TurnError) else "take the special token out of the text"
            raise DataError(escape(error), where=where, next=next) from error
        except GenesisError:  # some are ValueErrors
            raise
        except UnicodeEncodeError:
            what = "the text holds half a surrogate pair, which is no character"
            raise DataError(what, where=where, next="decode the text with errors='replace'") from None
        except (ValueError, RecursionError):
            what = "the conversation is nested too deep, or holds a number of thousands of digits"
            raise DataError(what, where=where, next="write it in a simpler form") from None

    def _ids(self, conversation: Conversation, most: int | None) -> list[int]:
        """Raises: TurnError, MarksError, ValueError, RecursionError."""
        turn, parts, marker = len(conversation.messages), self._parts, self._parts.marker
        job, marks = marked_job(
            conversation.messages, conversation.tools, [turn], marker=marker, avoid=self._avoid, limits=self._limits
        )
        [rendered] = self._renderer.render([job])
        prompt = rendered.turns[0][0] if isinstance(rendered, Rendered) else rendered
        if isinstance(prompt, RenderError):
            raise TurnError("template", f"the chat template cannot render it: {prompt.what}", "see what it asks for")
        if most is not None and self._tokenizer.is_beyond(prompt, most, parse_special=True):
            raise TurnError("too long", f"the conversation has more than {most:,} tokens", "shorten it")
        wanted, known = parts.parts(unmarked(prompt, marks), follows=False), TextIds(self._tokenizer)
        known.want(wanted)
        known.fetch()
        return [int(token) for token in known.ids(wanted)]

"""A model that is opened to answer: its template, its ends of turn, and an engine that stays between answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.records import Conversation
from genesis.data.tokenizer import Tokenizer
from genesis.files.hf import read_chat_templates
from genesis_cli.session.inference import opened
from genesis_cli.session.preparation import resolve_device
from genesis_models.chat_files import stop_ids
from genesis_models.engine import Piece, Request, continue_texts
from genesis_models.engine.engine import check_prompt, length_of
from genesis_models.engine.text import Runner
from genesis_models.generate import engine_for
from genesis_models.source import ModelSource

SMALLEST = 1024  # tokens of a cache that grows with a conversation


class Speaker(ExitStack):
    """A model that answers one request after the other; a context manager.

    Args:
        kv_cache: the type of keys and values, as of `engine_for`.
        template: `chatml`, or a file or folder with the chat template, instead of the model's own.

    Attributes:
        template: renders conversations; None for a model without a chat template, which continues texts.
        ends: the ids that end an answer.

    Raises:
        ModelError: a folder, a tokenizer or a template that cannot be used.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        device: str,
        dtype: str,
        kv_cache: Literal["auto", "fp8"] = "auto",
        template: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self._cache = source, kv_cache
        self.model, self.tokenizer = opened(source, resolve_device(device), dtype)
        self.template, self.ends = chat_prompts(source, self.tokenizer, self, template)
        self._engine: Runner | None = None
        self._capacity = 0

    def encode(self, asked: str | Conversation, where: str = "") -> list[int]:
        """The ids of a text, or those before the answer to a conversation; `where` it is, for an error.

        Raises:
            DataError: the template cannot render the conversation.
        """
        if isinstance(asked, str):
            return self.tokenizer.prompt(asked)
        assert self.template is not None
        return self.template.encode(asked, where=where)

    def answer(self, request: Request) -> Iterator[Piece]:
        """What continues a prompt, a piece for each token.

        Raises:
            UsageError: an empty prompt, or one that fills the context. NumericError: logits that are not finite.
        """
        check_prompt(self.model, request.ids)
        longest = length_of(self.model, request)
        if longest > self._capacity:  # doubled, so that a cache and its graphs last for several turns
            self._capacity = min(max(SMALLEST, 1 << (longest - 1).bit_length()), self.model.config.context_length)
            whole = Request(request.ids, request.sampling, self._capacity - len(request.ids))
            self._engine = engine_for(self.model, [whole], cache=self._cache)
        assert self._engine is not None
        try:
            yield from continue_texts(self._engine, [request], self.tokenizer)
        except BaseException:
            self._capacity = 0  # an engine that was stopped in the middle is not used again
            raise


def chat_prompts(
    source: ModelSource, tokenizer: Tokenizer, stack: ExitStack, template: str | None = None
) -> tuple[ChatPrompts | None, frozenset[int]]:
    """What renders chats, until the stack ends, None for a model without a template; and the ids that end an answer.

    Args:
        template: as of `Speaker`.
    """
    folder, ends = template_folder(source), stop_ids(source.folders, tokenizer)
    if template is None and not read_chat_templates(folder):
        return None, ends
    chats = stack.enter_context(ChatPrompts(tokenizer, ChatTemplate.named(template or str(folder), tokenizer)))
    return chats, ends | {*chats.end_of_turn_ids}


def template_folder(source: ModelSource) -> Path:
    """The first folder with a chat template; the model's where none has one."""
    return next((folder for folder in source.folders if read_chat_templates(folder)), source.folder)

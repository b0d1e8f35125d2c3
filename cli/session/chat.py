"""Turns a run's conversations into samples: the template, its encoder, and what is saved with the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genesis.data.chat import ChatEncoder, ChatTemplate, Loss
from genesis.data.documents import TokenSet
from genesis.data.record_formats import CHATS, PREFERENCES
from genesis.data.records import Learns
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError
from genesis.files.boundary import boundary
from genesis.files.hf import read_chat_templates
from genesis.files.paths import is_folder
from genesis.train.config import Config, DataConfig

LOOKED_AT = 1 << 18  # the most tokens to search; all conversations end their turns alike


@dataclass(frozen=True)
class ChatFormat:
    """The chat format that a model learned.

    Attributes:
        ends: ids that end its turns, the most frequent first; empty for a model of texts.
        templates: name -> text of the chat template, if it differs from the tokenizer's own.
        template: renders its chats; None for a model of texts.
    """

    ends: tuple[int, ...] = ()
    templates: Mapping[str, str] | None = None
    template: ChatTemplate | None = None


TEXTS = ChatFormat()


class EncoderFactory:
    """Creates and remembers the encoder of records, which determines the learned format.

    Args:
        data: settings that determine samples.
        folder: model folder, whose template is used if `data` names neither a template nor a tokenizer.
        learns: what the objective learns from. The targets of preferences are always the answers, not `data.loss`.
    """

    def __init__(self, data: DataConfig, folder: str | os.PathLike[str] | None, learns: Learns = "tokens") -> None:
        self._data, self._folder = data, folder
        self._loss: Loss = data.loss if learns == "tokens" else "completion"
        self._encoder: ChatEncoder | None = None
        self._template: ChatTemplate | None = None

    def __call__(self, tokenizer: Tokenizer) -> ChatEncoder:
        """Return the encoder; the caller closes it.

        Raises:
            ModelError: the template cannot be read or used. ConfigError: a template argument is invalid or unused.
        """
        self._template = self._read(tokenizer)
        if self._template is not None:
            self._template.check_args()
        self._encoder = ChatEncoder(tokenizer, self._template, loss=self._loss)
        return self._encoder

    def _read(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        data = self._data
        if data.template is not None:
            return ChatTemplate.named(data.template, tokenizer, data.template_args)
        path = _folder(data.tokenizer or self._folder)
        if path is None or not read_chat_templates(path):
            return None  # the encoder raises if it meets a conversation
        return ChatTemplate.read(path, data.template_args)

    def learned(self, tokens: TokenSet, tokenizer: Tokenizer, formats: Iterable[str] = ()) -> ChatFormat:
        """Return the format that a model learns from `tokens`, encoded from records of these formats."""
        if self._encoder is None:
            return TEXTS
        learned = _targets(tokens)
        turn_ends = tuple(token for token in self._encoder.end_of_turn_ids if token in learned)
        ends = tuple(dict.fromkeys((*turn_ends, *({tokenizer.eos_id} & learned))))
        is_changed = self._data.template is not None or bool(self._data.template_args)
        texts = self._template.texts_with_defaults if self._template is not None and turn_ends and is_changed else None
        # Prompts and completions count as chats if they are messages: the end of their turns is not a text's.
        may_be_chats = {"prompt_completion", *PREFERENCES} & {*formats}
        is_chat = CHATS & {*formats} or (may_be_chats and {*turn_ends} - {tokenizer.eos_id})
        return ChatFormat(ends, texts, self._template if is_chat else None)


def unused_settings(config: Config, tokens: TokenSet) -> str | None:
    """Return a warning about settings of records if the data have no records; otherwise None."""
    if tokens.index.is_record.any():
        return None
    fields = DataConfig.model_fields
    given = [
        f"data.{key}"
        for key in ("template", "template_args", "loss")
        if getattr(config.data, key) != fields[key].get_default(call_default_factory=True)
    ]
    return f"warning: the data have no records, so these settings have no effect: {', '.join(given)}" if given else None


def _folder(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of a tokenizer given by its folder or file. Raises: ModelError: it cannot be accessed."""
    if path is None:
        return None
    with boundary(ModelError, "looking for the tokenizer", path):
        return Path(path) if is_folder(path) else Path(path).parent


def _targets(tokens: TokenSet) -> frozenset[int]:
    """Return the ids that are targets in the first samples."""
    count = max(1, int(np.searchsorted(np.cumsum(tokens.lengths), LOOKED_AT)))
    found: set[int] = set()
    for start, length in zip(tokens.starts[:count].tolist(), tokens.lengths[:count].tolist(), strict=True):
        part = slice(start + 1, start + length)
        ids = tokens.stream[part]
        found.update(np.unique(ids if tokens.mask is None else ids[tokens.mask[part] != 0]).tolist())
    return frozenset(found)

"""How a run's conversations become samples: the template, its encoder, and what of them is saved with the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genesis.data.chat import ChatEncoder, ChatTemplate
from genesis.data.documents import TokenSet
from genesis.data.record_formats import CHATS
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError
from genesis.files.boundary import boundary
from genesis.files.hf import read_chat_templates
from genesis.files.paths import is_folder
from genesis.train.config import Config, DataConfig

LOOKED_AT = 1 << 18  # tokens, at the most: every conversation ends its turns alike


@dataclass(frozen=True)
class ChatFormat:
    """The format of chats that a model learned.

    Attributes:
        ends: the ids that end its turns, the usual one first; none where it learned texts.
        templates: name -> text of the chat template, where it is not the tokenizer's own as it was.
        template: renders its chats; None where it learned none.
    """

    ends: tuple[int, ...] = ()
    templates: Mapping[str, str] | None = None
    template: ChatTemplate | None = None


TEXTS = ChatFormat()


class EncoderFactory:
    """Makes the encoder of records, and remembers it, for the format that it teaches.

    Args:
        data: the settings that decide samples.
        folder: of the model, whose template is used where `data` names neither a template nor a tokenizer.
    """

    def __init__(self, data: DataConfig, folder: str | os.PathLike[str] | None) -> None:
        self._data, self._folder = data, folder
        self._encoder: ChatEncoder | None = None
        self._template: ChatTemplate | None = None

    def __call__(self, tokenizer: Tokenizer) -> ChatEncoder:
        """The encoder; the caller closes it.

        Raises:
            ModelError: the template cannot be read or used. ConfigError: an argument that no template could take, or
                that this one does not read.
        """
        self._template = self._read(tokenizer)
        if self._template is not None:
            self._template.check_args()
        self._encoder = ChatEncoder(tokenizer, self._template, loss=self._data.loss)
        return self._encoder

    def _read(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        data = self._data
        if data.template is not None:
            return ChatTemplate.named(data.template, tokenizer, data.template_args)
        path = _folder(data.tokenizer or self._folder)
        if path is None or not read_chat_templates(path):
            return None  # the encoder says so where there is a conversation
        return ChatTemplate.read(path, data.template_args)

    def learned(self, tokens: TokenSet, tokenizer: Tokenizer, formats: Iterable[str] = ()) -> ChatFormat:
        """What a model learns from `tokens`, which the encoder made of records of these formats."""
        if self._encoder is None:
            return TEXTS
        learned = _targets(tokens)
        turn_ends = tuple(token for token in self._encoder.end_of_turn_ids if token in learned)
        ends = tuple(dict.fromkeys((*turn_ends, *({tokenizer.eos_id} & learned))))
        is_changed = self._data.template is not None or bool(self._data.template_args)
        texts = self._template.texts_with_defaults if self._template is not None and turn_ends and is_changed else None
        # Prompts and completions are chats where they are messages, whose turns end as no text does.
        is_chat = CHATS & {*formats} or ("prompt_completion" in formats and {*turn_ends} - {tokenizer.eos_id})
        return ChatFormat(ends, texts, self._template if is_chat else None)


def unused_settings(config: Config, tokens: TokenSet) -> str | None:
    """A warning about settings of records that were given where the data hold none; None where there is none."""
    if tokens.index.is_record.any():
        return None
    fields = DataConfig.model_fields
    given = [
        f"data.{key}"
        for key in ("template", "template_args", "loss")
        if getattr(config.data, key) != fields[key].get_default(call_default_factory=True)
    ]
    return f"warning: the data hold no records, for which {', '.join(given)} would be" if given else None


def _folder(path: str | os.PathLike[str] | None) -> Path | None:
    """The folder of a tokenizer that is named by its folder or its file. Raises: ModelError where it cannot be seen."""
    if path is None:
        return None
    with boundary(ModelError, "looking for the tokenizer", path):
        return Path(path) if is_folder(path) else Path(path).parent


def _targets(tokens: TokenSet) -> frozenset[int]:
    """The ids that occur as targets in the first samples."""
    count = max(1, int(np.searchsorted(np.cumsum(tokens.lengths), LOOKED_AT)))
    found: set[int] = set()
    for start, length in zip(tokens.starts[:count].tolist(), tokens.lengths[:count].tolist(), strict=True):
        part = slice(start + 1, start + length)
        ids = tokens.stream[part]
        found.update(np.unique(ids if tokens.mask is None else ids[tokens.mask[part] != 0]).tolist())
    return frozenset(found)

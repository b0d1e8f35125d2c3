"""Text while it is generated: ids go in one by one, whole characters come out. Sampling and printing live elsewhere."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache

from genesis.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so what is still open after so many tokens will never become one.
_LONGEST_CHARACTER = 4


class StreamDecoder:
    """Decodes a growing sequence of ids. All pieces and `finish` joined are what `decode` gives for all ids; of ids
    that continue others, what they add to the text of those.

    A character whose bytes are spread over several tokens comes out with its last one.

    Args:
        skip_special: whether special tokens give no text.
        after: the ids of the text that is continued. Behind a special token a text of its own begins, as an answer
            behind a chat's template does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._before = _last_ids(tokenizer, after)
        self._context, self._open = self._before, list[int]()

    def push(self, token_id: int) -> str:
        """The text that became whole with `token_id`; often empty."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._bytes is not None:
            return self._bytes.decode(_level_bytes(self._tokenizer, token_id))
        self._open.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._open) < _LONGEST_CHARACTER:
            return ""
        # Spaces at a token's start depend on the token before it, so the last ones stay as context.
        self._context, self._open = self._open, []
        return text

    def finish(self) -> str:
        """The rest, with U+FFFD for a character that was never completed; the decoder is as new afterwards."""
        text = self._new_text() if self._bytes is None else self._bytes.decode(b"", final=True)
        self._context, self._open = self._before, []
        if self._bytes is not None:
            self._bytes.reset()
        return text

    def _new_text(self) -> str:
        """What the open tokens add to the text of those before them."""
        before = self._tokenizer.decode(self._context, skip_special=self._skip_special)
        return self._tokenizer.decode(self._context + self._open, skip_special=self._skip_special)[len(before) :]


def _last_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The last of `ids` on which the text behind them depends: of a special token none, else whole characters."""
    start = len(ids)
    while start and ids[start - 1] not in tokenizer.special_ids:
        start -= 1
        if tokenizer.fallback_byte(ids[start]) is None:
            break
    return list(ids[start:])


@cache
def _byte_of() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes stand for themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def token_text(tokenizer: Tokenizer, token_id: int, *, begins: bool) -> str:
    """The text of a token by itself, special ones too.

    Args:
        begins: a text begins with it, where some tokenizers put a space that is not shown.
    """
    first = tokenizer.decode([token_id], skip_special=False)
    if begins or tokenizer.is_byte_level:
        return first
    return tokenizer.decode([token_id, token_id], skip_special=False)[len(first) :]


def token_bytes(tokenizer: Tokenizer, token_id: int, *, begins: bool) -> bytes:
    """The bytes of a token; those of its `token_text` for one that has no bytes."""
    if tokenizer.is_byte_level:
        return _level_bytes(tokenizer, token_id)
    byte = tokenizer.fallback_byte(token_id)
    return token_text(tokenizer, token_id, begins=begins).encode() if byte is None else byte


def _level_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token of a byte-level tokenizer; those of its text for an added one."""
    token = tokenizer.token(token_id) or ""
    try:
        return bytes(map(_byte_of().__getitem__, token))
    except KeyError:
        return token.encode("utf-8")

"""Text while it is generated: ids go in one by one, whole characters come out. Sampling and printing live elsewhere."""

from __future__ import annotations

import codecs
from functools import cache

from genesis.data.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "token_bytes"]

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so what is still open after so many tokens will never become one.
_LONGEST_CHARACTER = 4


class StreamDecoder:
    """Decodes a growing sequence of ids. All pieces and `finish` joined are the text that `decode` gives for all ids.

    A character whose bytes are spread over several tokens comes out with its last one.

    Args:
        skip_special: whether special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._context: list[int] = []
        self._open: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became whole with `token_id`; often empty."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._bytes is not None:
            return self._bytes.decode(token_bytes(self._tokenizer, token_id))
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
        self._context, self._open = [], []
        if self._bytes is not None:
            self._bytes.reset()
        return text

    def _new_text(self) -> str:
        """What the open tokens add to the text of those before them."""
        before = self._tokenizer.decode(self._context, skip_special=self._skip_special)
        return self._tokenizer.decode(self._context + self._open, skip_special=self._skip_special)[len(before) :]


@cache
def _byte_of() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes stand for themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token of a byte-level tokenizer; those of its text for an added one, which has no bytes."""
    token = tokenizer.token(token_id) or ""
    try:
        return bytes(map(_byte_of().__getitem__, token))
    except KeyError:
        return token.encode("utf-8")

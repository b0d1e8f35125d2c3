"""Rendered text to token ids: the template's special tokens become their ids, those in messages stay text.

Between special tokens that take nothing from the text around them a text is encoded part by part, each part once for a
batch however many prompts begin with it. A tokenizer with other special tokens, or one that puts something before each
text, gets every text whole; marked texts it cannot encode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from genesis.data.chat.marks import Marked, Marker, MarksError
from genesis.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
# A special token's id; or a text, whether it follows another, and whether special tokens in it are to be parsed.
Part = int | tuple[str, bool, bool]


class TextParts:
    """How one tokenizer's texts are taken apart.

    Attributes:
        marker: knows the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # The end of text is one, whether its tokenizer calls it special or not.
        specials = [t for t in tokenizer.added_tokens if t.get("special") or t["id"] == tokenizer.eos_id]
        self._ids = {token["content"]: token["id"] for token in specials}
        self.marker = Marker(self._ids)
        flags = ["lstrip", "rstrip", "single_word"] + ["normalized"] * tokenizer.normalizes
        takes_more = any(token.get(flag) for token in specials for flag in flags)
        self._is_simple = not takes_more and not tokenizer.puts_prefix and all(t.get("special") for t in specials)

    def parts(self, text: Marked, *, follows: bool) -> list[Part]:
        """The parts of `text`. Raises: MarksError."""
        if not self._is_simple:
            if text.plain:
                raise MarksError("this tokenizer cannot take the special tokens in a message's text as text")
            return [(text.text, follows, True)] if text.text else []
        parts: list[Part] = []
        done = 0
        for start, stop in self.marker.specials(text):
            if done < start:
                parts.append((text.text[done:start], False, False))
            parts.append(self._ids[text.text[start:stop]])
            done = stop
        if done < len(text.text):
            parts.append((text.text[done:], False, False))
        return parts

    def special_id(self, text: str) -> int:
        """The id of a special token."""
        return int(self._ids[text])

    def text_bytes(self, text: Marked) -> int:
        """UTF-8 bytes of `text` without the special tokens."""
        specials = sum(len(text.text[a:b].encode("utf-8")) for a, b in self.marker.specials(text))
        return len(text.text.encode("utf-8")) - specials


class TextIds:
    """The ids of many parts, each encoded once: `want` all of them, `fetch`, then ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[Part, Ids | None] = {}

    def want(self, parts: Sequence[Part]) -> None:
        """See that `fetch` encodes these."""
        for part in parts:
            if not isinstance(part, int):
                self._ids.setdefault(part, None)

    def fetch(self) -> None:
        """Encode what is wanted and not there yet."""
        for parse_special in (False, True):
            new = [part for part, ids in self._ids.items() if ids is None and part[2] is parse_special]  # type: ignore[index]
            texts, follows = [part[0] for part in new], [part[1] for part in new]  # type: ignore[index]
            found = self._tokenizer.encode_batch(texts, parse_special=parse_special, follows=follows)
            self._ids.update(zip(new, found, strict=True))

    def ids(self, parts: Sequence[Part]) -> Ids:
        """The ids of the parts, one after another."""
        arrays = [np.array([part], np.int64) if isinstance(part, int) else self._ids[part] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *arrays])

"""Marks special tokens that a message's text spells out before the render, so that they remain text after it.

A mark is a pair of private use characters that occur neither in the conversation nor in the template. It encloses each
special token inside a text, and also the start or end of a text that a template could complete to one (`<|im_end|`
before the template's `>`). Templates get the text itself, with two characters around such a token. In the rendered text
the template's own special tokens become their ids, and those in messages remain text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from genesis.data.tokenizer import Tokenizer

_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
_MAX_KEYS = 4096


class MarksError(ValueError):
    """A text that cannot be marked, or a render whose marks no longer enclose a message's text."""

    kind, next = "special token", "remove the special token from the text"  # see `TurnError`


@dataclass(frozen=True, slots=True)
class Marked:
    """A text, and the parts of it that come from messages and therefore contain no special tokens.
    `plain` holds ordered, disjoint pairs of start and stop.
    """

    text: str
    plain: tuple[tuple[int, int], ...] = ()

    def __getitem__(self, part: slice) -> Marked:
        start, stop, _ = part.indices(len(self.text))
        cut = ((max(a, start) - start, min(b, stop) - start) for a, b in self.plain if a < stop and b > start)
        return Marked(self.text[part], tuple(cut))


class Marker:
    """Marks the special tokens of one tokenizer, which are given as `specials`, their texts."""

    def __init__(self, specials: Iterable[str]) -> None:
        texts = sorted({text for text in specials if text}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._heads = frozenset(text[i:] for text in texts for i in range(1, len(text)))
        self._tails = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._head_starts = frozenset(head[0] for head in self._heads)
        self._tail_ends = frozenset(tail[-1] for tail in self._tails)
        self._plain_keys: set[str] = set()  # of mappings seen, so that each is checked once
        self._longest = max(map(len, texts), default=1) - 1

    def specials(self, text: Marked) -> list[tuple[int, int]]:
        """Return start and stop of the template's own special tokens in `text`."""
        found = [match.span() for match in self._pattern.finditer(text.text)]
        if text.plain:
            starts, stops = zip(*text.plain, strict=True)
            after = [bisect_right(stops, a) for a, _ in found]  # the first plain part that ends after each
            found = [(a, b) for (a, b), i in zip(found, after, strict=True) if i == len(starts) or b <= starts[i]]
        return found

    def marked(self, value: Any, avoid: Sequence[str]) -> tuple[Any, str]:
        """Return `value` with marks in its strings, and the two marking characters; "" if it needs no marks.

        Args:
            value: a JSON value.
            avoid: other texts that must not contain the characters.

        Raises:
            MarksError: every possible character occurs.
        """
        if not self._needs_marks(value):
            return value, ""
        texts = [*_strings(value), *avoid]
        used = {char for text in texts for char in text if "\ue000" <= char <= "\uf8ff"}
        used |= {chr(int(code, 16)) for text in texts for code in re.findall(r"\\u([eEfF][0-9a-fA-F]{3})", text)}
        free = [chr(code) for code in range(_FIRST_MARK, _LAST_MARK + 1) if chr(code) not in used][:2]
        if len(free) < 2:
            raise MarksError("the conversation holds every character of Unicode's private use area")
        return self._with_marks(value, *free), "".join(free)

    def _needs_marks(self, value: Any) -> bool:
        left = [value]
        while left:
            part = left.pop()
            if isinstance(part, str):
                if self._needs_text(part):
                    return True
            elif isinstance(part, Mapping):
                if not self._plain_keys.issuperset(part):
                    if any(map(self._needs_text, part)):
                        return True
                    self._plain_keys.update(islice(part, _MAX_KEYS - len(self._plain_keys)))
                left += part.values()
            elif isinstance(part, (list, tuple)):
                left += part
        return False

    def _needs_text(self, text: str) -> bool:
        return self._pattern.search(text) is not None or self._head(text) > 0 or self._tail(text) > 0

    def _with_marks(self, value: Any, start: str, stop: str) -> Any:
        if isinstance(value, str):
            return self._enclosed(value, start, stop)
        if isinstance(value, Mapping):
            return {self._with_marks(key, start, stop): self._with_marks(v, start, stop) for key, v in value.items()}
        return [self._with_marks(v, start, stop) for v in value] if isinstance(value, (list, tuple)) else value

    def _enclosed(self, text: str, start: str, stop: str) -> str:
        spans = [match.span() for match in self._pattern.finditer(text)]
        if head := self._head(text):
            spans.append((0, head))
        if tail := self._tail(text):
            spans.append((len(text) - tail, len(text)))
        parts, done = [], 0
        for a, b in _merged(spans):
            parts += [text[done:a], start, text[a:b], stop]
            done = b
        return "".join([*parts, text[done:]])

    def _head(self, text: str) -> int:
        """Return the length of the longest start of `text` that is the end of a special token."""
        if not text or text[0] not in self._head_starts:
            return 0
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._heads), 0)

    def _tail(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the start of a special token."""
        if not text or text[-1] not in self._tail_ends:
            return 0
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._tails), 0)


def unmarked(text: str, marks: str) -> Marked:
    """Return a render without its marks, and the parts that they enclosed.
    Raises: MarksError: a mark lost its partner or was rewritten, so that the message's text cannot be located.
    """
    if not marks:
        return Marked(text)
    for mark in marks:
        code = ord(mark)
        for form in (f"\\u{code:04x}", f"\\u{code:04X}", f"&#{code};", f"&#x{code:x};", quote(mark)):
            if form in text:
                raise MarksError("the template escapes the characters of a message that holds a special token")
    # Every second piece of the split is a mark; the marks must alternate between start and stop.
    pieces = re.split(f"([{marks}])", text)
    found = "".join(pieces[1::2])
    if found != marks * (len(found) // 2):
        raise MarksError("the template splits a message's text at a special token inside it")
    stops = list(accumulate(map(len, pieces[::2])))
    return Marked("".join(pieces[::2]), tuple(zip(stops[:-1:2], stops[1::2], strict=True)))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order, with overlapping ones merged."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start < result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


# --- Rendered text to token ids ---------------------------------------------------------------------------------------
# A text is split at its special tokens, and each part is encoded only once per batch, however many prompts begin with
# it. This requires special tokens that match no surrounding text, and no prefix before texts. Other tokenizers get
# complete texts and cannot encode marked ones.


Ids = npt.NDArray[np.int64]
# A special token's id; or a text, whether it follows another, and whether special tokens in it are parsed.
Part = int | tuple[str, bool, bool]


class TextParts:
    """Splits one tokenizer's texts into parts; `marker` marks its special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # The end of text counts as special, whether its tokenizer calls it special or not.
        specials = [t for t in tokenizer.added_tokens if t.get("special") or t["id"] == tokenizer.eos_id]
        self._ids = {token["content"]: token["id"] for token in specials}
        self.marker = Marker(self._ids)
        flags = ["lstrip", "rstrip", "single_word"] + ["normalized"] * tokenizer.normalizes
        takes_more = any(token.get(flag) for token in specials for flag in flags)
        self._is_simple = not takes_more and not tokenizer.puts_prefix and all(t.get("special") for t in specials)

    def parts(self, text: Marked, *, follows: bool) -> list[Part]:
        """Return the parts of `text`. Raises: MarksError."""
        if not self._is_simple:
            if text.plain:
                raise MarksError("this tokenizer cannot encode the special tokens in a message as plain text")
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
        """Return the id of a special token."""
        return int(self._ids[text])

    def text_bytes(self, text: Marked) -> int:
        """Return the UTF-8 bytes of `text` without the special tokens."""
        specials = sum(len(text.text[a:b].encode("utf-8")) for a, b in self.marker.specials(text))
        return len(text.text.encode("utf-8")) - specials


def text_ids(tokenizer: Tokenizer, parts: Iterable[Part]) -> Callable[[Sequence[Part]], Ids]:
    """Encode each of `parts` once; return a function that returns the concatenated ids of any of them."""
    texts = list(dict.fromkeys(part for part in parts if not isinstance(part, int)))
    known: dict[Part, Ids] = {}
    for parse_special in (False, True):
        new = [text for text in texts if text[2] is parse_special]
        follows = [text[1] for text in new]
        found = tokenizer.encode_batch([text[0] for text in new], parse_special=parse_special, follows=follows)
        known.update(zip(new, found, strict=True))

    def joined(wanted: Sequence[Part]) -> Ids:
        arrays = [np.array([part], np.int64) if isinstance(part, int) else known[part] for part in wanted]
        return np.concatenate([np.zeros(0, np.int64), *arrays])

    return joined

"""Facts from a tokenizer.json before a text is encoded: where the text may be cut, and which ids surround it.

A long document is cut where its pieces, encoded separately, give the same ids as the whole.

A cut requires a proof from the tokenizer's parts. There are two:

- The pre-tokenizer is listed here and ends a token after every line end and before every space that occurs between
  other characters. The normalizer is absent or NFC, which acts within such borders.
- Only the line end's own token contains a line end, so no merge crosses one. A prefix of the normalizer or
  pre-tokenizer (SentencePiece's space) is omitted in all pieces except for the first.

A document without such a point, or of any other tokenizer, is encoded in one piece.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# `/` may belong to the line end before it (GPT-4o), and some treat U+180E as white space.
_AFTER_LINE = re.compile(r"(?<=[^\s\u180e])\n(?=[^\s\u180e/])")
_BEFORE_SPACE = re.compile(r"(?<=[^\s\u180e])(?= [^\s\u180e])")
_LINE_END = re.compile(r"\n")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# BPE merges within these pieces. As in GPT-2's pattern, a word includes only a space before it, so that it is the same
# token after any sign. As in GPT-4's, numbers are cut after three digits and contractions are found in capitals too.
# A 4M-parameter model has 1.66 bits per byte on held-out files of the standard library with this pattern, 1.70 with
# words that include signs (GPT-4's), and 1.72 with line ends that include the indentation (with 5 % fewer tokens).
PATTERN = rf"{_CONTRACTIONS}| ?[\p{{L}}\p{{M}}]+| ?\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# Patterns whose cost is known from use. Qwen3 uses Qwen2's, GPT-4 uses Llama 3's.
KNOWN = frozenset([PATTERN, _GPT2, _QWEN2, _LLAMA3])
# Patterns that end a token at a line end and begin one at a space, between characters that are not white space.
_SPLITTING = {
    *KNOWN,
    # DeepSeek V3 and R1.
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    # Mistral's Tekken; GPT-4o.
    rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    rf"{_CASED[0]}{_ENGLISH}|{_CASED[1]}{_ENGLISH}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
}
# Patterns that match neither line ends nor spaces.
_HARMLESS = {r"\p{N}", r"\p{N}{1,3}", r"[0-9]", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}


@dataclass(frozen=True)
class CutRule:
    """The cut points in texts of a tokenizer.

    Attributes:
        cut_points: patterns that end at such points, in order of preference; empty without a proof.
        blocks: added tokens whose presence in a text invalidates the proof.
        drops_prefix: whether all pieces except for the first need a tokenizer `without_prefix`.
    """

    cut_points: tuple[re.Pattern[str], ...]
    blocks: tuple[str, ...]
    drops_prefix: bool

    def pieces(self, text: str, size: int, window: int) -> Iterator[str]:
        """Yield `text` in pieces of up to about `size` characters, each cut in its last `window` characters.

        A piece whose window has no cut point continues to the next one, or to the end of the text.
        """
        start = 0
        if len(text) > size and self.cut_points and not any(block in text for block in self.blocks):
            while len(text) - start > size:
                stop = self._cut_point(text, max(start + 1, start + size - window), start + size)
                if stop is None:
                    break
                yield text[start:stop]
                start = stop
        yield text[start:]

    def _cut_point(self, text: str, begin: int, limit: int) -> int | None:
        for pattern in self.cut_points:
            # Look at one more character, because the validity of a point depends on what follows it.
            cut_points = [match.end() for match in pattern.finditer(text, begin, limit + 2) if match.end() <= limit]
            if cut_points:
                return cut_points[-1]
        later = (pattern.search(text, limit) for pattern in self.cut_points)
        return min((match.end() for match in later if match and match.end() < len(text)), default=None)


_NO_CUTS = CutRule((), (), False)


def cut_rule(content: Mapping[str, Any], *, parse_special: bool) -> CutRule:
    """Return the rule for a tokenizer.json; with `parse_special`, special tokens are recognized in text."""
    added = [token for token in content.get("added_tokens") or [] if parse_special or not token.get("special")]
    if _splits(content):
        flags = ("lstrip", "rstrip", "single_word")
        blocks = [t["content"] for t in added if any(map(t.get, flags)) or any(map(str.isspace, t["content"]))]
        return CutRule((_AFTER_LINE, _BEFORE_SPACE), tuple(blocks), False)
    if _keeps_line_ends(content):
        return CutRule((_LINE_END,), tuple(token["content"] for token in added), True)
    return _NO_CUTS


def without_prefix(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json for pieces after the first, which does not put a prefix before the text."""
    changed = copy.deepcopy(dict(content))
    normalizers = [n for n in _parts(changed.get("normalizer"), "normalizers") if n.get("type") != "Prepend"]
    changed["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    for part in _parts(changed.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            part.pop("add_prefix_space", None)
            part["prepend_scheme"] = "never"
        elif part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return changed


def puts_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json puts a prefix before each text, which `without_prefix` removes."""
    if any(part.get("type") == "Prepend" for part in _parts(content.get("normalizer"), "normalizers")):
        return True
    for part in _parts(content.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return bool(part.get("add_prefix_space", True))
        if part.get("type") == "ByteLevel" and part.get("add_prefix_space", True):
            return True
    return False


def _splits(content: Mapping[str, Any]) -> bool:
    """Whether the first proof holds."""
    if any(part.get("type") != "NFC" for part in _parts(content.get("normalizer"), "normalizers")):
        return False
    found = False
    for part in _parts(content.get("pre_tokenizer"), "pretokenizers"):
        kind = part.get("type")
        if kind == "ByteLevel":
            if part.get("add_prefix_space", True):
                return False
            found |= part.get("use_regex", True)
        elif kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            # DeepSeek's pattern contains the line ends themselves.
            pattern = str((part.get("pattern") or {}).get("Regex")).replace("\r", r"\r").replace("\n", r"\n")
            if pattern not in _SPLITTING | _HARMLESS:
                return False
            found |= pattern in _SPLITTING
        elif kind != "Digits":
            return False
    return found


def _keeps_line_ends(content: Mapping[str, Any]) -> bool:
    """Whether the second proof holds."""
    for part in _parts(content.get("normalizer"), "normalizers"):
        pattern = (part.get("pattern") or {}).get("String", "") if part.get("type") == "Replace" else "?"
        if part.get("type") != "Prepend" and (len(pattern) != 1 or pattern == "\n"):
            return False
        if "\n" in str(part.get("prepend", "")) + str(part.get("content", "")):
            return False
    if any(part.get("type") != "Metaspace" for part in _parts(content.get("pre_tokenizer"), "pretokenizers")):
        return False
    model = content["model"]
    vocab = model["vocab"]
    known = "\n" in vocab or (model.get("byte_fallback") and "<0x0A>" in vocab)
    return bool(known) and not model.get("ignore_merges") and not any("\n" in token for token in vocab if token != "\n")


def _parts(part: Any, key: str) -> Iterable[dict[str, Any]]:
    if isinstance(part, dict) and part.get("type") == "Sequence":
        return [inner for member in part.get(key) or [] for inner in _parts(member, key)]
    return [part] if isinstance(part, dict) else []


# --- Around a text ----------------------------------------------------------------------------------------------------
# Genesis reads the ids that the post-processor adds to a single sequence and adds them itself; the library never runs
# one. As in transformers, a tokenizer.json overrides `add_bos_token` and `add_eos_token` of tokenizer_config.json.


Affixes = tuple[tuple[int, ...], tuple[int, ...]]
MAX_IDS = 1024  # around a text; a template can repeat lists of ids without limit


def post_processor_affixes(post_processor: Any) -> Affixes:
    """Return the ids before and after a text. Raises: ValueError, if the post-processor is malformed."""
    if post_processor is None:
        return (), ()
    kind = post_processor.get("type") if isinstance(post_processor, dict) else None
    if kind == "ByteLevel":  # moves offsets only
        return (), ()
    if kind == "TemplateProcessing":
        return _template_affixes(post_processor)
    if kind in ("RobertaProcessing", "BertProcessing"):
        return (_pair_id(post_processor, "cls"),), (_pair_id(post_processor, "sep"),)
    if kind == "Sequence" and isinstance(post_processor.get("processors"), list):
        adding = [found for part in post_processor["processors"] if any(found := post_processor_affixes(part))]
        if len(adding) > 1:
            raise ValueError("two of its parts add special tokens")
        return adding[0] if adding else ((), ())
    raise ValueError(f"its type {str(kind)[:40]!r} is not supported")


def start_template(token: str, number: int) -> dict[str, Any]:
    """Return a post-processor that puts one special token before a text."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _template_affixes(template: Mapping[str, Any]) -> Affixes:
    pieces, named = template.get("single"), template.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(named, dict):
        raise ValueError("its template has no `single` or no `special_tokens`")
    sides: list[tuple[int, ...]] = [()]
    left = MAX_IDS
    for piece in pieces:
        if isinstance(piece, dict) and isinstance(piece.get("Sequence"), dict):
            sides.append(())
            continue
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        entry = (
            named.get(special.get("id")) if isinstance(special, dict) and isinstance(special.get("id"), str) else None
        )
        ids = entry.get("ids") if isinstance(entry, dict) else None
        if not isinstance(ids, list) or not all(type(number) is int for number in ids[:MAX_IDS]):
            raise ValueError("its template names a special token without ids")
        if (left := left - len(ids)) < 0:
            raise ValueError(f"its template adds more than {MAX_IDS:,} ids")
        sides[-1] += tuple(ids)
    if len(sides) != 2:
        raise ValueError(f"its template for one text holds {len(sides) - 1} texts")
    return sides[0], sides[1]


def _pair_id(post_processor: Mapping[str, Any], key: str) -> int:
    pair = post_processor.get(key)
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) is not int:
        raise ValueError(f"its `{key}` is not a pair of a token and its id")
    number: int = pair[1]
    return number

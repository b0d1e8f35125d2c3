"""The special tokens that a tokenizer.json puts around a text: what its post-processor adds to a single sequence.

They are read here and set by Genesis, so that the library never runs a post-processor. This is transformers' rule too:
where there is a tokenizer.json, `add_bos_token` and `add_eos_token` of tokenizer_config.json have no say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Affixes = tuple[tuple[int, ...], tuple[int, ...]]
MAX_IDS = 1024  # around a text: a template names lists of ids as often as it likes


def post_processor_affixes(post_processor: Any) -> Affixes:
    """The ids before and after a text. Raises: ValueError with what is wrong with the post-processor."""
    if post_processor is None:
        return (), ()
    kind = post_processor.get("type") if isinstance(post_processor, dict) else None
    if kind == "ByteLevel":  # moves offsets only
        return (), ()
    if kind == "TemplateProcessing":
        return _of_template(post_processor)
    if kind in ("RobertaProcessing", "BertProcessing"):
        return (_pair_id(post_processor, "cls"),), (_pair_id(post_processor, "sep"),)
    if kind == "Sequence" and isinstance(post_processor.get("processors"), list):
        adding = [found for part in post_processor["processors"] if any(found := post_processor_affixes(part))]
        if len(adding) > 1:
            raise ValueError("two of its parts add special tokens")
        return adding[0] if adding else ((), ())
    raise ValueError(f"it is of the type {str(kind)[:40]!r}, which is not supported")


def start_template(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts one special token before a text."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _of_template(template: Mapping[str, Any]) -> Affixes:
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
        entry = named.get(special.get("id")) if isinstance(special, dict) and _is_name(special.get("id")) else None
        ids = entry.get("ids") if isinstance(entry, dict) else None
        if not isinstance(ids, list) or not all(type(number) is int for number in ids[:MAX_IDS]):
            raise ValueError("its template names a special token without ids")
        if (left := left - len(ids)) < 0:
            raise ValueError(f"its template adds more than {MAX_IDS:,} ids")
        sides[-1] += tuple(ids)
    if len(sides) != 2:
        raise ValueError(f"its template for one text holds {len(sides) - 1} texts")
    return sides[0], sides[1]


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _pair_id(post_processor: Mapping[str, Any], key: str) -> int:
    pair = post_processor.get(key)
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) is not int:
        raise ValueError(f"its `{key}` is no pair of a token and its id")
    number: int = pair[1]
    return number

"""Generation as a part of a report: what a token costs, beside what its weights and its cache take to read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from genesis.profile.format import aligned, format_bytes, format_rate, format_seconds, format_share
from genesis.profile.schema import StrictModel, Time

WIDTH = 100


class GenerationRow(StrictModel):
    """Sequences that are continued together."""

    batch: int
    """Sequences."""
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens drawn for each."""
    engine: str
    """What generated."""
    first: Time
    """From the request until every sequence has its first token; with one sequence the time to first token."""
    token: Time
    """Between two tokens of a sequence, by the difference of all tokens and the first alone."""
    tokens_per_second: float
    """Of all sequences, once each has its first token."""
    weight_bytes: int
    """That a token reads: all parameters as they are stored; of an embedding that is not the head, its rows alone."""
    cache_bytes: int
    """Keys and values that a token of each sequence reads, in the mean."""
    bytes_per_second: float
    share: float
    """Of the rate of a copy, measured in the same process."""

    @property
    def label(self) -> str:
        """Sequences, and tokens before and after, for people."""
        return f"{self.batch}x{self.prompt}+{self.new}"


def render_generation(rows: Sequence[GenerationRow]) -> Iterator[str]:
    """A table with a line for each row, and how to read it."""
    yield from aligned([_cells(row) for row in rows], ("case", "note"))
    yield ""
    legend = (
        "case: sequences x prompt + new tokens; first: until each sequence has a token; token: between two tokens of a"
        " sequence; weights and cache: what a step reads of them; copy: their rate, as a share of a copy's"
    )
    yield from textwrap.wrap(legend, WIDTH)


def _cells(row: GenerationRow) -> Mapping[str, str]:
    half_width = row.token.half_width
    return {
        "case": row.label,
        "first": format_seconds(row.first.seconds),
        "token ±": f"{format_seconds(row.token.seconds)} {'?' if half_width is None else format_share(half_width):>5}",
        "tokens/s": f"{row.tokens_per_second:,.1f}",
        "weights": format_bytes(row.weight_bytes),
        "cache": format_bytes(row.cache_bytes),
        "byte/s": format_rate(row.bytes_per_second, "").strip(),
        "copy": format_share(row.share),
        "note": "noisy" if row.token.is_noisy else "",
    }

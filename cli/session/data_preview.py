"""`genesis data preview`: shows the samples, lengths and rows of a run without weights or a GPU. It keeps nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from genesis import exact
from genesis.data.corpus import Corpus
from genesis.data.documents import Ints, TokenSet
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import Prepared
from genesis.data.records import ONLY_PROMPT, Completion, Conversation, Defect, content_text
from genesis.data.tokenizer import StreamDecoder, Tokenizer
from genesis.errors import escape
from genesis.files.atomic import temporary_folder
from genesis.train.config import Config
from genesis.train.output import Output
from genesis.train.progress import draws
from genesis_cli.session.model import model_config
from genesis_cli.session.preparation import file_lines, prepare_data

BINS, BAR = 10, 40
SHOWN = 1000  # the most printed tokens of a sample


def preview(config: Config, *, samples: int, output: Output, progress: Output) -> None:
    """Print what `config` trains on: `samples` evenly spaced samples, and statistics of all of them.

    Args:
        output: receives the preview; on a terminal with colours, unless NO_COLOR is set.
        progress: receives the progress of slow stages.
    """
    shape = model_config(config)
    with temporary_folder() as cache:
        try:
            data = prepare_data(config, shape, progress, cache)
        except Defect as defect:
            if defect.kind != ONLY_PROMPT:
                raise
            _show_prompts(config, samples, output)
            return
        for line in _figures(config, data):
            output.line(line)
        page = _Page(output, data.tokenizer)
        if samples:
            page.legend()
        for sample in _spaced(len(data.train), samples):
            page.show(data.train, sample)


def _spaced(count: int, samples: int) -> list[int]:
    """Return evenly spaced numbers below `count`."""
    return np.unique(np.linspace(0, count - 1, samples).round().astype(np.int64)).tolist()  # type: ignore[no-any-return]


def _show_prompts(config: Config, samples: int, output: Output) -> None:
    """Print records that hold only a prompt, which no objective learns from."""
    how: dict[str, Any] = {"on_error": config.data.on_error, "max_line_bytes": config.data.max_line_bytes}
    found = [*Corpus(config.data.train, fields=config.data.fields, learns="prompts", **how).documents()]
    output.line(
        f"records that hold only a prompt: {len(found):,}; reinforcement learning needs them, no objective does"
    )
    for number in _spaced(len(found), samples):
        output.line(f"\nprompt {number + 1:,} from {escape(found[number].name)}:")
        record = found[number].record
        if isinstance(record, Conversation):
            lines = [f"{message['role']}: {content_text(message)}" for message in record.messages]
        else:
            lines = [record.prompt] if isinstance(record, Completion) else []
        output.line("\n".join(escape(line) for text in lines for line in text.split("\n")))


def _figures(config: Config, data: Prepared) -> Iterator[str]:
    yield from file_lines(data)
    if formats := sorted(data.report.formats.items(), key=lambda item: -item[1]):
        yield "formats: " + ", ".join(f"{count:,} {name}" for name, count in formats)
    found = [("", data.report.defects)] + ([("held out: ", data.held_out.defects)] if data.held_out else [])
    for which, defects in found:
        for kind, count in defects.counts.items():
            yield f"{which}{count:,} records are skipped: {kind}; the first: {escape(defects.examples[kind])}"
    train = data.train
    share = f"{100 * train.num_targets / train.num_tokens:.1f} %"
    yield f"{_size(train)}, {train.num_tokens:,} tokens, {train.num_targets:,} of them targets ({share})"
    if data.held_out is not None:
        yield f"held out {_size(data.held_out.tokens)}"
    if train.weights is not None:
        yield f"weights: an epoch has about {train.weights.sum():,.0f} samples"
    yield from _histogram(data.report.lengths, config.data.seq_len)
    length = config.data.seq_len
    with exact(config.train.exact):
        packing = PackedLoader(train, batch_size=1, seq_len=length, seed=config.train.seed).packing(0)
    yield f"packed: rows of {length:,} tokens: {packing.num_rows:,}, {100 * packing.fill_rate:.1f} % filled"


def _size(tokens: TokenSet) -> str:
    return f"samples: {len(tokens):,} from {tokens.num_documents:,} documents"


def _histogram(lengths: Ints, seq_len: int) -> Iterator[str]:
    middle, most = np.quantile(lengths, [0.5, 0.95], method="higher").tolist()
    yield (
        f"lengths: {lengths.min():,} to {lengths.max():,} tokens; half of the samples have at most {middle:,}, 95 % at"
        f" most {most:,}; {int((lengths > seq_len).sum()):,} have more than the {seq_len:,} of data.seq_len"
    )
    first = int(lengths.min())
    width = -(-(int(lengths.max()) - first + 1) // BINS)
    counts = np.bincount((lengths - first) // width)
    digits = len(f"{first + len(counts) * width:,}")
    for place, count in enumerate(counts.tolist()):
        begin, bar = first + place * width, "#" * -(-BAR * count // int(counts.max()))
        yield f"  {begin:>{digits},} to {begin + width - 1:>{digits},}  {bar:<{BAR}} {count:,}"


class _Span(NamedTuple):
    """Adjacent tokens of one kind as text."""

    text: str
    is_target: bool
    is_special: bool

    @property
    def style(self) -> str:
        return " ".join(["green"] * self.is_target + ["bold"] * self.is_special)


class _Page:
    """Prints samples: in colour on a terminal, otherwise with marks."""

    def __init__(self, output: Output, tokenizer: Tokenizer) -> None:
        from rich.console import Console

        self._output, self._tokenizer = output, tokenizer
        self._in_colour = draws(output) and not os.environ.get("NO_COLOR")
        self._console = Console(
            file=output,  # type: ignore[arg-type]
            force_terminal=self._in_colour,
            color_system="standard" if self._in_colour else None,
            highlight=False,
            emoji=False,
            markup=False,
        )
        specials = {tokenizer.token(token_id) or "" for token_id in tokenizer.special_ids} - {""}
        marks = set() if self._in_colour else {"[[", "]]"}
        ordered = sorted(specials | marks, key=len, reverse=True)
        self._lookalike = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def legend(self) -> None:
        """Explain how to read the samples."""
        shown = "targets are [[in brackets]], special tokens are shown verbatim"
        if self._in_colour:
            self._print([("special tokens", "bold"), (", ", ""), ("targets", "green")])
            shown = "special tokens and targets have the colours above"
        self._output.line(f"{shown}; a \\ marks text that only spells a special token")

    def show(self, tokens: TokenSet, sample: int) -> None:
        """Print a sample. A pair is printed as the prompt with the chosen answer, then the rejected answer."""
        begin, length = int(tokens.starts[sample]), int(tokens.lengths[sample])
        name = escape(tokens.index.name(int(tokens.documents[sample])))
        title = f"\nsample {sample + 1:,} from {name}"
        if tokens.splits is None:
            targets = int(tokens.target_counts[sample])
            self._output.line(f"{title}: {length:,} tokens, {targets:,} targets")
            self._show(tokens, begin, length)
            return
        assert tokens.mask is not None
        middle, end = begin + int(tokens.splits[sample]), begin + length
        first, second = int(tokens.mask[begin:middle].sum()), int(tokens.mask[middle:end].sum())
        if tokens.is_good is not None:
            self._output.line(f"{title}: a {'good' if tokens.is_good[sample] else 'bad'} answer of {first:,} tokens")
            self._show(tokens, begin, middle - begin)
            return
        self._output.line(f"{title}: a chosen answer of {first:,} tokens, a rejected one of {second:,}\nchosen:")
        self._show(tokens, begin, middle - begin)
        self._output.line("rejected:")
        answer = middle + int(np.argmax(tokens.mask[middle:end]))
        self._show(tokens, answer, end - answer, follows=True)

    def _show(self, tokens: TokenSet, begin: int, length: int, *, follows: bool = False) -> None:
        """Print a part of a sample. Without `follows` it begins a sequence, whose first token is never a target."""
        spans, parts = list(self._spans(tokens, begin, min(length, SHOWN), follows)), list[tuple[str, str]]()
        if self._in_colour:
            self._print([(span.text, span.style) for span in spans])
        else:
            for is_target, group in groupby(spans, lambda span: span.is_target):
                text = "".join(span.text for span in group)
                parts.append((f"[[{text}]]" if is_target else text, ""))
            self._print(parts)
        if length > SHOWN:
            self._output.line(f"… and {length - SHOWN:,} more tokens")

    def _print(self, parts: list[tuple[str, str]]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*parts), soft_wrap=True)

    def _spans(self, tokens: TokenSet, begin: int, length: int, follows: bool) -> Iterator[_Span]:
        """Yield the beginning of the sample as printable text."""
        decoder = StreamDecoder(self._tokenizer, skip_special=False)
        ids = tokens.stream[begin : begin + length].tolist()
        is_target = [True] * length if tokens.mask is None else (tokens.mask[begin : begin + length] != 0).tolist()
        is_target[0] &= follows
        text, kind = "", (False, False)
        for token_id, target in zip(ids, is_target, strict=True):
            found = (target, token_id in self._tokenizer.special_ids)
            if found != kind:
                yield from self._span(text, *kind)
                text, kind = "", found
            text += decoder.push(token_id)
        yield from self._span(text + decoder.finish(), *kind)

    def _span(self, text: str, is_target: bool, is_special: bool) -> Iterator[_Span]:
        if text:
            plain = text if is_special else self._lookalike.sub(lambda found: "\\" + found[0], text)
            yield _Span("\n".join(escape(line) for line in plain.split("\n")), is_target, is_special)

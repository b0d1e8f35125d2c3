"""The tokenizer: converts between text and ids. It is read from a folder or trained; the tokenizers library encodes.

As in transformers, a text is surrounded by the special tokens of the tokenizer's own post-processor (`affixes`). A
training document also ends with the end-of-text token; a prompt does not, because it is continued. Both therefore begin
alike, and without a start token, training predicts from a document's first token on.

The text `<|endoftext|>` inside a document is encoded as plain characters unless special tokens are parsed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import chain, count, takewhile
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.backend.host import usable_cores
from genesis.data.pieces import (
    PATTERN,
    CutRule,
    cut_rule,
    post_processor_affixes,
    puts_prefix,
    start_template,
    without_prefix,
)
from genesis.data.tokenizer_files import (
    MAPPING_NAME,
    MAX_VOCAB,
    ROLES,
    TOKENIZER_NAME,
    TokenizerFiles,
    check_bounded,
    checked_content,
    read_tokenizer,
    refused,
)
from genesis.data.worker_thread import call_in_thread, feed_in_thread
from genesis.errors import ConfigError, DataError, InterruptedRun, ModelError, escape
from genesis.files.atomic import FolderUpdate
from genesis.files.hf import TOKENIZER_CONFIG
from genesis.files.strict_json import canonical_bytes, is_unicode, parse_object

_ENCODING = threading.Lock()  # each call, from any thread, first sets how the library treats special tokens

Ids = npt.NDArray[np.int64]

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # all bytes and the end of text
_MAX_THREADS = 8
_PROBE = "Probe: 0123 äß漢字\n\tend. "


class Tokenizer:
    """Converts text to ids and back.

    Attributes:
        vocab_size: the largest id + 1.
        eos_id: id that ends a text.
        bos_id: id that starts a text, or None.
        pad_id: id at the ends of rows; it may equal `eos_id`.
        special_ids: ids without a text.
        start_ids: ids before each text, document or prompt.
        document_end_ids: ids after a document; the last one is `eos_id`.
        prompt_end_ids: ids after a prompt; the last one is not `eos_id`.
    """

    def __init__(self, source: TokenizerFiles) -> None:
        """Build the library's tokenizer and check it. Raises: ModelError."""
        self._source, checked = source, source.checked
        self._parts = checked.parts  # tokenizer.json without vocabulary and merges
        self.vocab_size = checked.vocab_size
        self._cut_rules: dict[bool, CutRule] = {}
        with _guard(source.where):
            check_bounded(self._parts, checked.runnable, source.where, _library())
            self._library = _library().Tokenizer.from_str(checked.runnable)
            # Otherwise the library would parse a special token's text inside a document.
            self._library.encode_special_tokens = True
            self._check()
        self.special_ids = frozenset(token["id"] for token in self.added_tokens if token.get("special"))
        ids = {role: None if (token := checked.specials[role]) is None else self.token_id(token) for role in ROLES}
        assert ids["eos"] is not None
        self.eos_id: int = ids["eos"]
        self.bos_id = ids["bos"]
        self.pad_id: int = self.eos_id if ids["pad"] is None else ids["pad"]
        self._role_ids = ids
        self._set_affixes()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Load the tokenizer of a folder, or a tokenizer.json with the files next to it.

        Raises:
            ModelError: the tokenizer is missing, malformed or not supported.
            DiskError: reading failed.
        """
        return cls(read_tokenizer(path))

    def _set_affixes(self) -> None:
        try:
            self.start_ids, after = post_processor_affixes(self._parts.get("post_processor"))
        except ValueError as error:
            raise refused(f"the post_processor cannot be used: {escape(error)}", self._source.where) from None
        if any(self.token(number) is None for number in self.start_ids + after):
            raise refused("the post_processor adds an id that is not in the vocabulary", self._source.where)
        self.document_end_ids = after if after[-1:] == (self.eos_id,) else (*after, self.eos_id)
        while after[-1:] == (self.eos_id,):
            after = after[:-1]
        self.prompt_end_ids = after

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over everything that determines a document's ids, in any file layout.

        It contains the affixes only if they differ from the first versions, which put the start token, or else the end
        token, before a text. Runs of these versions can therefore be resumed if their ids are the same.
        """
        content: dict[str, Any] = {"tokenizer": dict(self._source.content), "ids": self._role_ids}
        first = (self.eos_id if self.bos_id is None else self.bos_id,)
        if self.bos_id is None and self.start_ids == first:
            content["tokenizer"]["post_processor"] = None  # Genesis' own tokenizers had none
        if (self.start_ids, self.document_end_ids) != (first, (self.eos_id,)):
            content["document"] = [list(self.start_ids), list(self.document_end_ids)]
        return hashlib.sha256(canonical_bytes(content)).hexdigest()

    def difference(self, other: Tokenizer) -> str | None:
        """Describe the first difference in ids or merges from `other`; None if there is none."""
        if self.fingerprint == other.fingerprint:
            return None
        one, two = (each._source.content for each in (self, other))
        mine, theirs = (
            {**each["model"]["vocab"], **{token["content"]: token["id"] for token in each["added_tokens"]}}
            for each in (one, two)
        )
        for token in sorted(mine.keys() | theirs.keys(), key=lambda token: (mine.get(token, MAX_VOCAB), token)):
            if mine.get(token) != theirs.get(token):
                ids = (f"has the id {each[token]:,}" if token in each else "is missing" for each in (mine, theirs))
                return "the token {!r} {} here and {} there".format(escape(token), *ids)
        pairs = ([p.split(" ") if isinstance(p, str) else p for p in each["model"]["merges"]] for each in (one, two))
        return None if next(pairs) == next(pairs) else "the merges differ"

    def _check(self) -> None:
        """Refuse a tokenizer to which the library gives other ids, or that cannot encode or decode."""
        for token in self.added_tokens:
            if self._library.token_to_id(token["content"]) != token["id"]:
                raise refused(f"the added token {escape(token['content'])!r} does not get its id", self._source.where)
        ids = self._library.encode(_PROBE, add_special_tokens=False).ids
        self._library.decode(ids, skip_special_tokens=False)
        if max(ids, default=0) >= self.vocab_size:
            raise refused("it returns ids beyond its vocabulary", self._source.where)

    def encode(self, text: str, *, parse_special: bool = False) -> Ids:
        """Return the ids of `text`, int64 `[n]`, without those around a document or prompt.

        Args:
            parse_special: whether special tokens spelled out in the text become their ids.
        """
        return self.encode_batch([text], parse_special=parse_special)[0]

    def prompt(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids from which a model continues `text`; an empty text has at least one, which starts a text."""
        ids = [*self.start_ids, *self.encode(text, parse_special=parse_special).tolist(), *self.prompt_end_ids]
        return ids or [self.eos_id if self.bos_id is None else self.bos_id]

    def is_beyond(self, text: str, most: int, *, parse_special: bool = False) -> bool:
        """Whether `text` has more than `most` tokens, as far as its length and the tokens of its start show cheaply.

        If its start alone has more than twice as many, the answer is true: later text cannot remove half of the tokens.
        Raises the errors of `encode_batch`.
        """
        if len(text) > most * self.longest:
            return True
        sizes = takewhile(lambda size: size < len(text), (4 * most << doublings for doublings in count(0, 2)))
        return any(len(self.encode(text[:size], parse_special=parse_special)) > 2 * most for size in sizes)

    @cached_property
    def longest(self) -> int:
        """The maximum number of characters of a text per token.

        NFC combines at most three characters. If no proof covers the parts, which may drop white space or join unknown
        characters, it is sixteen times the longest token.
        """
        rule, model = self._cut_rule(parse_special=False), self._parts["model"]
        is_proven = rule.cut_points and not rule.blocks and (model.get("byte_fallback") or not rule.drops_prefix)
        return max(map(len, self._library.get_vocab())) * (16 if not is_proven else 3 if self.normalizes else 1)

    def pieces(self, text: str, size: int, window: int, *, parse_special: bool = False) -> list[str]:
        """Return `text` in pieces for `encode_batch`, of about `size` characters if the tokenizer allows it."""
        return list(self._cut_rule(parse_special).pieces(text, size, window))

    def special_text(self, text: str) -> str | None:
        """Return the first special token that `text` spells out, or None."""
        found = self._special_pattern.search(text)
        return found.group() if found else None

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool = False, follows: Sequence[bool] | None = None
    ) -> list[Ids]:
        """Return the ids of each text, encoded in parallel.

        Args:
            parse_special: whether special tokens spelled out in the texts become their ids.
            follows: which texts follow another of the same document, so that they get no prefix.

        Raises:
            DataError: a text holds half a surrogate pair.
            ModelError: the tokenizer failed on a text.
        """
        for index, text in enumerate(texts):
            if not is_unicode(text):
                what = "the text holds half a surrogate pair, which is not a character"
                where = f"text {index} of {len(texts)}"
                raise DataError(what, where=where, next="decode the text with errors='replace'")
        if follows is None or not any(follows) or not self.puts_prefix:
            return self._encoded(self._library, texts, parse_special)
        # Two library tokenizers encode first and following texts; then the order is restored.
        order = sorted(range(len(texts)), key=follows.__getitem__)
        firsts = follows.count(False)
        ordered = [texts[i] for i in order]
        found = self._encoded(self._library, ordered[:firsts], parse_special)
        found += self._encoded(self._continuing, ordered[firsts:], parse_special)
        return [ids for _, ids in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]

    def _encoded(self, library: Any, texts: Sequence[str], parse_special: bool) -> list[Ids]:
        with _guard(self._source.where), _ENCODING:
            library.encode_special_tokens = not parse_special
            encodings = call_in_thread(lambda: library.encode_batch_fast(list(texts), add_special_tokens=False))
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def _cut_rule(self, parse_special: bool) -> CutRule:
        if parse_special not in self._cut_rules:
            self._cut_rules[parse_special] = cut_rule(self._source.content, parse_special=parse_special)
        return self._cut_rules[parse_special]

    @cached_property
    def puts_prefix(self) -> bool:
        """Whether the tokenizer puts a prefix before each text, such as SentencePiece's space."""
        return puts_prefix(self._parts)

    @property
    def normalizes(self) -> bool:
        """Whether texts are normalized before they are encoded."""
        return self._parts.get("normalizer") is not None

    @property
    def added_tokens(self) -> Sequence[Mapping[str, Any]]:
        """The added tokens of tokenizer.json: `content`, `id`, `special` and matching flags."""
        return self._parts.get("added_tokens") or []

    @cached_property
    def named_tokens(self) -> Mapping[str, str]:
        """The special tokens that the files name (`bos_token`, `image_token`, …), name -> text, as in transformers. A
        map next to a config without `added_tokens_decoder` overrides the config.
        """
        named: dict[str, str] = {f"{role}_token": text for role, text in self._source.checked.specials.items() if text}
        configs = [self._config(), self._config(MAPPING_NAME)]
        for config in configs[: 1 if "added_tokens_decoder" in configs[0] else 2]:
            extra = config.get("extra_special_tokens")
            tokens = {key: value for key, value in config.items() if key.endswith("_token")}
            for key, value in (tokens | (extra if isinstance(extra, dict) else {})).items():
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    named[key] = text
        return named

    @cached_property
    def _continuing(self) -> Any:
        with _guard(self._source.where):
            return _library().Tokenizer.from_str(json.dumps(without_prefix(json.loads(self._source.checked.runnable))))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted((token["content"] for token in self.added_tokens if token.get("special")), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; ids beyond the vocabulary have none, bytes that are not UTF-8 become U+FFFD."""
        with _guard(self._source.where):
            text: str = self._library.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of the token whose text is exactly `token`, or None."""
        number: int | None = self._library.token_to_id(token) if is_unicode(token) else None
        return number

    def token(self, token_id: int) -> str | None:
        """Return the token's text in the vocabulary (byte-level tokenizers use their byte alphabet), or None."""
        token: str | None = self._library.id_to_token(token_id) if 0 <= token_id < MAX_VOCAB else None
        return token

    def fallback_byte(self, token_id: int) -> bytes | None:
        """Return the byte of a token such as `<0xE6>`; None for other tokens and byte-level tokenizers."""
        found = None if self.is_byte_level else re.fullmatch(r"<0x([0-9A-F]{2})>", self.token(token_id) or "")
        return bytes.fromhex(found[1]) if found else None

    def text_bytes(self, token_id: int) -> int:
        """Return the UTF-8 bytes of text that a document's first token encodes (without a space put before it)."""
        token = self.token(token_id) or ""
        if token in self._added_texts:
            return len(token.encode("utf-8"))
        if self.is_byte_level:
            return len(token)  # a character of GPT-2's alphabet is a byte
        if self.fallback_byte(token_id) is not None:
            return 1
        return len(token.removeprefix("▁").replace("▁", " ").encode("utf-8"))

    @cached_property
    def _added_texts(self) -> frozenset[str]:
        return frozenset(token["content"] for token in self.added_tokens)

    @property
    def is_byte_level(self) -> bool:
        """Whether every token encodes bytes that are simply joined."""
        decoder = self._parts.get("decoder")
        return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"

    @cached_property
    def level_bytes(self) -> _LevelBytes:
        """Id -> bytes of a byte-level tokenizer's tokens."""
        return _LevelBytes(self._library)

    def files(self) -> dict[str, bytes]:
        """Return name and bytes of the files to save: the original ones, and a config that names the special tokens.

        transformers' AutoTokenizer reads the same ids from them.
        """
        files = dict(self._source.files)
        old = self._config()
        config = {**(old or _FRESH_CONFIG)}
        for role in ROLES:
            config.setdefault(f"{role}_token", self._source.checked.specials[role])
        if config != old:
            files[TOKENIZER_CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
        return files

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `files` into `folder`. Raises: DiskError."""
        with FolderUpdate(folder) as update:
            for name, data in self.files().items():
                update.write(name, data)

    def _config(self, name: str = TOKENIZER_CONFIG) -> dict[str, Any]:
        data = self._source.files.get(name)
        return {} if data is None else parse_object(data, where=name)


_FRESH_CONFIG: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
}


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on `texts`, with `<|endoftext|>` as id 0. The same texts give the same bytes.

    Few texts give fewer tokens than requested, because a merge needs a pair that occurs twice.

    Raises:
        ConfigError: `vocab_size` has no room for all bytes.
        DataError: `texts` is empty.
    """
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        what = f"a vocabulary of {vocab_size:,} tokens cannot be trained: {MIN_VOCAB} to {MAX_VOCAB:,} are possible"
        raise ConfigError(what, where="data.vocab_size", next="4096 suits small models, 32768 larger ones")
    library = _library()
    parts, alphabet = library.pre_tokenizers, library.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = library.Tokenizer(library.models.BPE())
    split = parts.Split(library.Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = parts.Sequence([split, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    texts = iter(texts)
    if (first := next(texts, None)) is None:
        raise DataError("the data has no text to train a tokenizer on", next="check data.train")
    feed_in_thread(lambda fed: tokenizer.train_from_iterator(fed, trainer), chain([first], texts))
    return Tokenizer(trained_files((tokenizer.to_str(pretty=True) + "\n").encode("utf-8")))


def trained_files(raw: bytes) -> TokenizerFiles:
    """Return the files of a tokenizer that `train_bpe` trained, from its tokenizer.json."""
    where = "the trained tokenizer"
    content = parse_object(raw, where=where)
    # Documents and prompts begin with the end-of-text token, so that a model can start from an empty prompt.
    content["post_processor"] = start_template(END_OF_TEXT, content["model"]["vocab"][END_OF_TEXT])
    raw = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    specials, ids = {"bos": None, "eos": END_OF_TEXT, "pad": END_OF_TEXT}, content["model"]["vocab"]
    return TokenizerFiles(checked_content(content, specials, max(ids.values())), {TOKENIZER_NAME: raw}, where)


def library_version() -> str:
    """Return the version of the tokenizers library, which determines the result of training."""
    return str(_library().__version__)


@cache
def _library() -> ModuleType:
    """Return the tokenizers library, with bounded threads and safe after a fork.

    It reads these settings only from the environment, at its first parallel call.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("RAYON_NUM_THREADS", str(min(_MAX_THREADS, usable_cores())))
    import tokenizers

    # A forked child has none of the parent's threads and must not wait for them.
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))
    return tokenizers


@contextmanager
def _guard(where: str) -> Iterator[None]:
    """Turn the library's failures into a ModelError; its panics derive from BaseException and have no public name."""
    try:
        yield
    except (InterruptedRun, MemoryError, ModelError):  # a signal may arrive while the library works
        raise
    except Exception as error:
        raise refused(escape(error)[:300], where) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException" or type(error).__module__ != "pyo3_runtime":
            raise
        raise refused(escape(error)[:300], where) from None


class _LevelBytes(dict[int, bytes]):
    """Id -> bytes of a byte-level tokenizer's token, or of the text of an added one, computed at its first use."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library

    def __missing__(self, token_id: int) -> bytes:
        token = (self._library.id_to_token(token_id) if 0 <= token_id < MAX_VOCAB else None) or ""
        try:
            found = bytes(map(_byte_of().__getitem__, token))
        except KeyError:
            found = token.encode("utf-8")
        self[token_id] = found
        return found


# --- Text while it is generated ---------------------------------------------------------------------------------------
# A decoder takes ids one by one and returns complete characters. It neither samples nor prints.


_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so an incomplete one after so many tokens never becomes valid.
_LONGEST_CHARACTER = 4


class StreamDecoder:
    """Decodes a growing sequence of ids. All returned texts joined equal `decode` of all ids. If the ids continue
    `after`, they equal the text that the ids add to it.

    A character whose bytes span several tokens is returned with the last one.

    Args:
        skip_special: whether special tokens are omitted.
        after: ids of the text that is continued. A separate text begins after a special token, like an answer after a
            chat's template.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._before = _last_ids(tokenizer, after)
        self._context, self._open = self._before, list[int]()

    def push_all(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""
        if self._bytes is None:
            return "".join(map(self.push, ids))
        if self._skip_special:
            special = self._tokenizer.special_ids
            ids = [each for each in ids if each not in special]
        return self._bytes.decode(b"".join(map(self._tokenizer.level_bytes.__getitem__, ids)))

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; often empty."""
        if self._bytes is not None:
            return self.push_all((token_id,))
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        self._open.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._open) < _LONGEST_CHARACTER:
            return ""
        # Spaces at a token's start depend on the token before it, so the last tokens remain as context.
        self._context, self._open = self._open, []
        return text

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character, and reset the decoder."""
        text = self._new_text() if self._bytes is None else self._bytes.decode(b"", final=True)
        self._context, self._open = self._before, []
        if self._bytes is not None:
            self._bytes.reset()
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special=self._skip_special)
        return self._tokenizer.decode(self._context + self._open, skip_special=self._skip_special)[len(before) :]


def _last_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the last of `ids` that the next text depends on: none after a special token, else one character's."""
    start = len(ids)
    while start and ids[start - 1] not in tokenizer.special_ids:
        start -= 1
        if tokenizer.fallback_byte(ids[start]) is None:
            break
    return list(ids[start:])


@cache
def _byte_of() -> dict[str, int]:
    """Return character -> byte of GPT-2's alphabet: printable bytes map to themselves, others to U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def token_text(tokenizer: Tokenizer, token_id: int, *, begins: bool) -> str:
    """Return the text of a single token, also of a special one. If it `begins` a text, some tokenizers put a space
    there, which is not shown.
    """
    first = tokenizer.decode([token_id], skip_special=False)
    if begins or tokenizer.is_byte_level:
        return first
    return tokenizer.decode([token_id, token_id], skip_special=False)[len(first) :]


def token_bytes(tokenizer: Tokenizer, token_id: int, *, begins: bool) -> bytes:
    """Return the bytes of a token, or of its `token_text` if it has no bytes."""
    if tokenizer.is_byte_level:
        return tokenizer.level_bytes[token_id]
    byte = tokenizer.fallback_byte(token_id)
    return token_text(tokenizer, token_id, begins=begins).encode() if byte is None else byte

"""Data: sources of text become packed batches of tokens. Everything is in numpy; the caller creates tensors.

`prepare` reads, splits and tokenizes; `PackedLoader` yields batches; `Tokenizer` and `StreamDecoder` convert between
text and ids. The tokenizers library is imported when a tokenizer is first used.
"""

from __future__ import annotations

from genesis.data.corpus import Corpus
from genesis.data.documents import DocumentIndex, TokenSet
from genesis.data.loader import IGNORE_INDEX, Batch, PackedLoader
from genesis.data.pipeline import DataReport, HeldOut, Prepared, StageProgress, prepare, prepare_held_out
from genesis.data.records import Completion, Conversation, Defects, Document
from genesis.data.tokenizer import StreamDecoder, Tokenizer, train_bpe

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Completion",
    "Conversation",
    "Corpus",
    "DataReport",
    "Defects",
    "Document",
    "DocumentIndex",
    "HeldOut",
    "PackedLoader",
    "Prepared",
    "StageProgress",
    "StreamDecoder",
    "TokenSet",
    "Tokenizer",
    "prepare",
    "prepare_held_out",
    "train_bpe",
]

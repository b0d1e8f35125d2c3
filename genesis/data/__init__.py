"""Data: sources of text become packed batches of tokens. Everything works on numpy; tensors are made by the caller.

`prepare` reads, splits and tokenizes; `PackedLoader` gives the batches; `Tokenizer` and `StreamDecoder` turn text into
ids and back. The tokenizers library is imported when a tokenizer is first used.
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

"""The number to beat: bits per byte that `gzip -9` gets on held-out documents, those of a file compressed together."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable

import numpy as np

from genesis.data.documents import DocumentIndex
from genesis.data.records import Document
from genesis.files.cache import Cache
from genesis.files.entry import EntryWriter

FORMAT = 2
SIZES_NAME = "sizes.bin"
_PIECE = 1 << 20


def gzip_bytes(texts: Iterable[str]) -> int:
    """The size of the texts' UTF-8 bytes, one after the other, after `gzip -9`, with gzip's header and checksum."""
    packer, packed = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS), 0
    for text in texts:
        data = memoryview(text.encode("utf-8"))
        # In pieces, between which signals are seen; the result is that of the whole.
        packed += sum(len(packer.compress(data[start : start + _PIECE])) for start in range(0, len(data), _PIECE))
    return packed + len(packer.flush())


def gzip_bits_per_byte(documents: Iterable[Document], index: DocumentIndex, cache: Cache) -> float:
    """8 × compressed bytes / bytes of `documents`, of which `index` was made; read only if the cache has no result."""
    key = {"format": FORMAT, "documents": index.fingerprint(), "zlib": zlib.ZLIB_RUNTIME_VERSION}

    def make(folder: EntryWriter) -> None:
        files = itertools.groupby(documents, key=lambda document: document.file)
        sizes = [gzip_bytes(document.text for document in of_file) for _, of_file in files]
        folder.write(SIZES_NAME, np.array(sizes, "<u8").tobytes())

    sizes = np.frombuffer(cache.get("gzip", key, make).entry.part(SIZES_NAME), "<u8")
    return 8 * int(sizes.sum()) / index.total_bytes

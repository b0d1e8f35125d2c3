"""Safetensors files made by hand for tests: a valid header as plain values, and its bytes after any change."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from genesis.files.atomic import atomic_file
from genesis.files.filesystem import DEFAULT, FileSystem
from genesis.files.safetensors import DEFAULT_METADATA, DTYPES, write_tensors

DATA = bytes(range(33))


def header() -> dict[str, Any]:
    """A valid header over `DATA`: a matrix, a bf16 vector, an empty tensor, a scalar."""
    return {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
        "scalar": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    }


def file_bytes(head: dict[str, Any] | str | bytes, data: bytes = DATA, *, length: int | None = None) -> bytes:
    """A file of this header, given as values or as text, that claims `length` bytes for it."""
    if isinstance(head, dict):
        head = json.dumps(head)
    if isinstance(head, str):
        head = head.encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def library_read(content: bytes) -> dict[str, npt.NDArray[Any]]:
    """The tensors that the format's library finds in a file's bytes; it raises where it refuses them."""
    found = {}
    for name, info in safetensors.deserialize(content):  # type: ignore[no-untyped-call]
        raw = np.frombuffer(bytes(info["data"]), np.uint8)
        found[name] = raw.view(DTYPES[info["dtype"]]).reshape(info["shape"])
    return found


def save_file(
    tensors: Mapping[str, npt.NDArray[Any]],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] = DEFAULT_METADATA,
    *,
    fs: FileSystem = DEFAULT,
) -> None:
    """Write `tensors` to `path` durably and all at once: an older file there stays whole until the new one is.

    Equal tensors and metadata give equal bytes, whatever their order. Errors as in `write_tensors`.
    """
    with atomic_file(path, fs=fs) as file:
        write_tensors(file, tensors, metadata)

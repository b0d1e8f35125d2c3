"""The safetensors format: a strict header parser, positional reads without mmap, and a deterministic writer.

A file consists of the header length (8 bytes, little-endian), a JSON header, and the tensors' bytes without gaps. Every
value in the header is checked against the file's size before memory is allocated for a tensor. This is stricter than
the safetensors library, which accepts duplicate names, unknown fields and `../` in names. `hf` handles folders.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from genesis.errors import DTypeError, ModelError, OutOfMemoryError, ShapeError, escape
from genesis.files.boundary import boundary, close_read
from genesis.files.filesystem import Writer
from genesis.files.paths import open_regular, quote
from genesis.files.strict_json import check_structure, is_unicode

# The library reads headers of up to 100 MB. The largest published checkpoints have 40,000 tensors at about 130 bytes
# each, which is 5 MB in a single file. The cap is three times that: parsing a hostile header then takes at most a few
# hundred MiB of memory.
HEADER_SIZE_CAP = 16 << 20
MAX_TENSORS = 1 << 16
MAX_DIMS = 32
# A valid header has three levels. A few more are parsed, so that an error can name the tensor.
MAX_DEPTH = 8
MAX_NAME_CHARS = 1024

# In the library's sort order of dtypes. The last is written first, so that wide types are aligned.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "I16": np.dtype(np.int16),
        "U16": np.dtype(np.uint16),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "I32": np.dtype(np.int32),
        "U32": np.dtype(np.uint32),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "I64": np.dtype(np.int64),
        "U64": np.dtype(np.uint64),
    }
)
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_FIELDS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_PREFIX = 8
_LARGEST = (1 << 63) - 1
_WRITE_BYTES = 16 << 20
_NEXT = "download or convert the file again"
DEFAULT_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the header; `start` and `stop` are the byte range of its elements in the file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor whose values are read only while it is saved: its dtype, its shape, and a function that reads them."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafeTensors:
    """An open safetensors file, with `names`, `entries` and `metadata` from its checked header.

    Args:
        path: a trusted path of a regular file or a link to one; names from files go through `safe_join`.
        content: bytes of the file, where they are in memory; `path` is then only its name in errors.
        header_size_cap: the largest header accepted, in bytes.

    Raises:
        ModelError: the file is not valid or cannot be read; the message names the file and, if possible, the tensor.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, content: bytes | None = None, header_size_cap: int = HEADER_SIZE_CAP
    ) -> None:
        self.path = Path(path)
        self._descriptor: int | bytes | None = open_regular(path) if content is None else content
        try:
            with boundary(ModelError, "reading", path):
                size = os.fstat(self._descriptor).st_size if isinstance(self._descriptor, int) else len(content or b"")
            header = _read_header(self._descriptor, size, header_size_cap, escape(path))
            self.metadata, self.entries = _parse_header(header, size - _PREFIX - len(header), escape(path))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the header's order."""
        return tuple(self.entries)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read the tensor `name` into new memory.
        Raises OutOfMemoryError, or ModelError if the tensor is missing, damaged or cannot be read.
        """
        entry = self._entry(name)
        array = self._allocated(entry, entry.shape)
        self._fill(entry, array)
        return array

    def read_elements(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Read the elements [start, stop) of `name`, in row-major order, into new memory. Errors as in `read_part`."""
        array = self._allocated(self._entry(name), (stop - start,))
        self.read_part(name, start, array)
        return array

    def read_into(self, name: str, buffer: npt.NDArray[Any]) -> None:
        """Read the tensor `name` into `buffer`, a writable C-contiguous array of the tensor's shape and dtype. Raises
        ShapeError or DTypeError if the buffer does not fit, and ModelError if the file ends early.
        """
        entry = self._entry(name, buffer.dtype)
        if buffer.shape != entry.shape or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            what = f"{quote(name)} of shape {entry.shape} needs a writable contiguous buffer, got {buffer.shape}"
            raise ShapeError(what, where=escape(self.path))
        self._fill(entry, buffer)

    def read_part(self, name: str, start: int, buffer: npt.NDArray[Any]) -> None:
        """Read elements from index `start` on, in row-major order, into the contiguous `buffer` `[n]`.
        Raises ShapeError beyond the tensor's end, DTypeError for another dtype, ModelError if the file ends early.
        """
        entry = self._entry(name, buffer.dtype)
        size = entry.nbytes // entry.dtype.itemsize
        if buffer.ndim != 1 or not buffer.flags.c_contiguous or not 0 <= start <= start + buffer.size <= size:
            what = f"{buffer.shape} elements from index {start} exceed {quote(name)}, which has {size}"
            raise ShapeError(what, where=escape(self.path))
        self._fill(entry, buffer, start * entry.dtype.itemsize)

    def close(self) -> None:
        """Close the file. Reading from it afterwards raises ValueError."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            if isinstance(descriptor, int):
                close_read(descriptor)

    def _entry(self, name: str, dtype: np.dtype[Any] | None = None) -> TensorEntry:
        """The entry of a tensor. Raises DTypeError if `dtype` is another one."""
        entry, where = self.entries.get(name), escape(self.path)
        if entry is None:
            raise ModelError(f"the file has no tensor {quote(name)}", where=where, next="check the name")
        if dtype not in (None, entry.dtype):
            raise DTypeError(f"{quote(name)} has dtype {entry.dtype}, the buffer has {dtype}", where=where)
        return entry

    def _allocated(self, entry: TensorEntry, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        try:
            return np.empty(shape, entry.dtype)
        except MemoryError as error:
            size = math.prod(shape) * entry.dtype.itemsize
            what = f"the host has no room for {size:,} bytes of the tensor {quote(entry.name)}"
            raise OutOfMemoryError(what, where=escape(self.path), next="free memory, or use a smaller model") from error

    def _fill(self, entry: TensorEntry, array: npt.NDArray[Any], skip: int = 0) -> None:
        """Read an array from the bytes that start `skip` bytes into the tensor."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        if array.nbytes == 0:
            return
        raw = array.reshape(-1).view(np.uint8)
        _read_exactly(self._descriptor, raw.data, entry.start + skip, escape(self.path), quote(entry.name))
        # numpy sometimes treats any non-zero byte as True, and sometimes compares it with 1.
        if entry.dtype == np.bool_ and raw.max() > 1:
            raise _bad(entry.name, "is BOOL but has bytes other than 0 and 1", escape(self.path))

    def __enter__(self) -> SafeTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load_file(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Read all tensors of a file, by name. Raises the errors of `SafeTensors`."""
    with SafeTensors(path) as file:
        return {name: file.read(name) for name in file.names}


def write_tensors(
    sink: Writer,
    tensors: Mapping[str, npt.NDArray[Any] | TensorSource],
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> None:
    """Write `tensors` to `sink` in the safetensors format, one at a time: wide dtypes first, then by name.

    The values of a `TensorSource` are in memory only while they are written.

    Raises:
        DTypeError: the format has no code for a dtype. ModelError: reading would refuse a name or the metadata.
        DiskError: writing failed.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _RANKS:
            raise DTypeError(f"safetensors has no code for the dtype {tensor.dtype} of {quote(name)}", next="cast it")
    order = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header = _header(order, tensors, metadata)
    sink.write(len(header).to_bytes(_PREFIX, "little") + header)
    for name in order:
        tensor = tensors[name]
        for block in _blocks(tensor.read() if isinstance(tensor, TensorSource) else tensor):
            sink.write(block.reshape(-1).view(np.uint8).data)


def _header(
    order: list[str], tensors: Mapping[str, npt.NDArray[Any] | TensorSource], metadata: Mapping[str, str]
) -> bytes:
    """The JSON header, padded with spaces so that the tensors start at a multiple of 8 bytes."""
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for name in order:
        array = tensors[name]
        stop = start + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    json_text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = json_text.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_SIZE_CAP:
        what = f"the header would have {len(text):,} bytes, more than {HEADER_SIZE_CAP:,}"
        raise ModelError(what, next="use several files")
    # The reader must accept whatever is written.
    _parse_header(text, start, "the tensors to save")
    return text


def _blocks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield `array` in C-contiguous pieces along its first axis, so that a strided view is not copied at once."""
    if array.flags.c_contiguous:
        yield array
        return
    rows = max(1, _WRITE_BYTES // max(1, array[0].nbytes))
    for first in range(0, len(array), rows):
        yield np.ascontiguousarray(array[first : first + rows])


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, which keeps duplicate keys for the error message."""


class _Odd:
    """A JSON number that is not a plain integer: a fraction, a negative number, NaN, or more than 19 digits."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text[:40]


def _integer(text: str) -> int | _Odd:
    return int(text) if len(text) <= 19 and text[0] != "-" else _Odd(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=_integer, parse_float=_Odd, parse_constant=_Odd)


def _read_header(descriptor: int | bytes, size: int, cap: int, where: str) -> bytes:
    if size < _PREFIX:
        raise ModelError(f"the file has {size} bytes, too few for a safetensors header", where=where, next=_NEXT)
    prefix = bytearray(_PREFIX)
    _read_exactly(descriptor, memoryview(prefix), 0, where, "the header's length")
    length = int.from_bytes(prefix, "little")
    if length > min(cap, size - _PREFIX) or length < 2:
        what = f"the header's length is {length:,} bytes; it must be between 2 and {min(cap, size - _PREFIX):,}"
        raise ModelError(what, where=where, next=_NEXT)
    header = bytearray(length)
    _read_exactly(descriptor, memoryview(header), _PREFIX, where, "the header")
    return bytes(header)


def _parse_header(header: bytes, data_bytes: int, where: str) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Check a header for `data_bytes` bytes of elements, and return its metadata and tensors."""
    pairs = _decode(header, where)
    if len(pairs) > MAX_TENSORS + 1:
        what = f"the header has {len(pairs):,} entries, more than {MAX_TENSORS:,} tensors"
        raise ModelError(what, where=where, next=_NEXT)
    metadata: dict[str, str] | None = None
    entries: dict[str, TensorEntry] = {}
    for name, value in pairs:
        if name == _METADATA:
            if metadata is not None:
                raise _bad(name, "appears twice in the header", where)
            metadata = _check_metadata(value, where)
            continue
        if name in entries:
            raise _bad(name, "appears twice in the header", where)
        # Some names could control a terminal, or be used as a path elsewhere.
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise _bad(name, f"has a name that is empty, over {MAX_NAME_CHARS} characters or not printable", where)
        if "\\" in name or name.startswith("/") or ".." in name.split("/"):
            raise _bad(name, "has a name that is a path outside its folder", where)
        entries[name] = _check_entry(name, value, data_bytes, _PREFIX + len(header), where)
    _check_cover(entries, _PREFIX + len(header), _PREFIX + len(header) + data_bytes, where)
    return metadata or {}, entries


def _decode(header: bytes, where: str) -> _Pairs:
    """Parse the header's JSON, with objects as pairs. Only spaces may follow it."""
    if header[:1] != b"{":
        raise ModelError("this is not a safetensors file: the header does not start with '{'", where=where, next=_NEXT)
    check_structure(header, where=where, max_depth=MAX_DEPTH, max_containers=4 * MAX_TENSORS)
    try:
        text = header.decode("utf-8")
        pairs, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        reason = escape(error)[:200]
        raise ModelError(f"the header is not JSON in UTF-8: {reason}", where=where, next=_NEXT) from error
    if text[end:].strip(" "):
        raise ModelError(f"the header has text after its JSON, which ends at byte {end:,}", where=where, next=_NEXT)
    assert isinstance(pairs, _Pairs)
    return pairs


def _check_metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, _Pairs):
        raise _bad(_METADATA, "is not a JSON object", where)
    result: dict[str, str] = {}
    for key, text in value:
        if not isinstance(text, str) or not (is_unicode(key) and is_unicode(text)):
            raise _bad(_METADATA, f"has the key {quote(key)}, whose value is not plain text", where)
        if key in result:
            raise _bad(_METADATA, f"has the key {quote(key)} twice", where)
        result[key] = text
    return result


def _check_entry(name: str, value: object, data_bytes: int, base: int, where: str) -> TensorEntry:
    if not isinstance(value, _Pairs):
        raise _bad(name, "is not described by a JSON object", where)
    fields = dict(value)
    if len(fields) != len(value) or fields.keys() != _FIELDS:
        names = ", ".join(quote(key, 40) for key, _ in value[:8])
        raise _bad(name, f"has the fields {names or 'none'} instead of dtype, shape and data_offsets", where)
    # Each field has the right type and range.
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise _bad(name, f"has the unknown dtype {quote(code, 40)}, which is not one of {', '.join(DTYPES)}", where)
    if type(shape) is not list or len(shape) > MAX_DIMS or not all(_is_count(size) for size in shape):
        listed = f"a list of at most {MAX_DIMS} whole numbers"
        raise _bad(name, f"has a shape that is not {listed}: {quote(shape, 60)}", where)
    if type(offsets) is not list or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise _bad(name, f"has data_offsets that are not two whole numbers: {quote(offsets, 60)}", where)
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise _bad(name, f"claims bytes {start:,} to {stop:,} of {data_bytes:,}", where)
    dtype = DTYPES[code]
    # Sizes next to a 0 count too: numpy refuses an empty array whose other sizes overflow.
    if math.prod(size for size in shape if size) * dtype.itemsize > _LARGEST:
        raise _bad(name, f"has a shape too large for any memory: {quote(shape, 60)}", where)
    # Shape, dtype and byte range agree.
    needed = math.prod(shape) * dtype.itemsize
    if needed != stop - start:
        raise _bad(name, f"has {stop - start:,} bytes, but {code} {quote(shape, 60)} needs {needed:,}", where)
    return TensorEntry(name, dtype, tuple(shape), base + start, base + stop)


def _check_cover(entries: dict[str, TensorEntry], start: int, stop: int, where: str) -> None:
    """Refuse overlaps, gaps and trailing bytes: sorted by offset, the tensors must cover `start` to `stop` exactly."""
    reached = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != reached:
            kind = "overlaps the tensor before it" if entry.start < reached else "leaves a gap before it"
            raise _bad(entry.name, f"{kind}: it starts at byte {entry.start:,} of the file, not {reached:,}", where)
        reached = entry.stop
    if reached != stop:
        raise ModelError(f"{stop - reached:,} bytes follow the last tensor", where=where, next=_NEXT)


def _is_count(value: object) -> bool:
    """Whether `value` is an integer from 0 to 2^63 - 1; true and false are not."""
    return type(value) is int and value <= _LARGEST


def _read_exactly(descriptor: int | bytes, view: memoryview, offset: int, where: str, what: str) -> None:
    """Fill `view` with the file's bytes from `offset` on, continuing after short reads."""
    if isinstance(descriptor, bytes):
        view[:] = descriptor[offset : offset + len(view)]
        return
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ModelError(f"cannot read {what}: {error.strerror}", where=where, next="check the disk") from error
        if count == 0:
            raise ModelError(f"the file ended while reading {what}", where=where, next=_NEXT)
        done += count


def _bad(name: str, problem: str, where: str) -> ModelError:
    return ModelError(f"the tensor {quote(name)} {problem}", where=where, next=_NEXT)

"""Readers of file formats, and the kind of a file: text or records, or else a picture, archive or program.

A reader yields the contents of one file, as a text or as rows with their line (row number in Parquet) and value, or
defects. It implements a file format and its limits; `genesis.data.record_formats` interprets the values.

The kind of a file depends on its name, then on its first bytes: text may have any name, but a picture is not text under
any name. Both checks refuse binary formats that are not supported. `FORMATS` lists the supported formats, which
their readers declare.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from genesis.data.readers.csv_table import CSV
from genesis.data.readers.json_records import JSON, JSONL
from genesis.data.readers.parquet import PARQUET
from genesis.data.readers.stream import TEXT, FileFormat

FORMATS: Sequence[FileFormat] = (TEXT, JSONL, JSON, CSV, PARQUET)

_BINARY, _TEXTUAL = ([f.title for f in FORMATS if (f.magic is not None) is is_binary] for is_binary in (True, False))
READ = f"{', '.join(_TEXTUAL)}, each also as .gz, and {', '.join(_BINARY)}"
SUPPORTED = f"Genesis reads {READ}"
# Text has almost no control characters; a tenth of random bytes are.
_MAX_CONTROL_SHARE = 0.05

_BY_ENDING = {ending: format for format in FORMATS for ending in format.endings}
# Displayed kind -> the suffixes of such files.
_BY_NAME: Mapping[str, str] = {
    "table": "psv",
    "json": "json5 geojson",
    "spreadsheet": "xls xlsx xlsm xlsb ods numbers",
    "arrow": "arrow feather ipc",
    "orc": "orc",
    "avro": "avro",
    "safetensors": "safetensors",
    "gguf": "gguf ggml ggjt",
    "weights": "bin pt pth ckpt onnx pb tflite h5 hdf5 keras msgpack mlmodel caffemodel",
    "pickle": "pkl pickle joblib dill",
    "numpy": "npy npz",
    "data file": "mat rds rdata sav dta sas7bdat lmdb mdb tfrecord dbf fits",
    "database": "db db3 sqlite sqlite3 duckdb",
    "png": "png apng",
    "jpeg": "jpg jpeg jpe jfif jp2 jxl",
    "gif": "gif",
    "picture": "bmp webp tif tiff ico icns heic heif avif psd xcf cr2 nef dng exr tga pbm pgm ppm dcm",
    "pdf": "pdf",
    "document": "doc docx docm ppt pptx pptm odt odp rtf epub mobi azw azw3 djvu pages chm",
    "sound": "mp3 wav flac ogg oga opus m4a aac wma aif aiff mid midi amr",
    "video": "mp4 m4v mkv avi mov webm wmv flv mpg mpeg 3gp",
    "archive": "zip tar tgz tbz tbz2 txz tzst gz bz2 xz zst zstd 7z rar lz lz4 lzma br z cab iso dmg jar war whl egg"
    " apk deb rpm cpio crx",
    "program": "exe dll so dylib o a lib sys msi class pyc pyo pyd wasm elf node",
    "font": "ttf otf ttc woff woff2 eot",
}
_KINDS = {ending: kind for kind, endings in _BY_NAME.items() for ending in endings.split() if ending not in _BY_ENDING}

# Beginnings that text never has by accident. Formats with NUL bytes at the start need no row. If a text could begin
# like a format, its row includes bytes that text cannot contain.
_BY_CONTENT: tuple[tuple[re.Pattern[bytes], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), kind)
    for pattern, kind in (
        (rb"\x89PNG\r\n\x1a\n", "png"),
        (rb"\xff\xd8\xff", "jpeg"),
        (rb"GIF8[79]a", "gif"),
        (rb"RIFF.{4}WEBP|BM.{4}\0\0\0\0|II\*\0|MM\0\*|\0\0\x01\0|8BPS\0|.{4}ftyp(heic|heix|mif1|avif)", "picture"),
        (rb"%PDF-\d", "pdf"),
        (rb"\{\\rtf1|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "document"),
        (rb"RIFF.{4}WAVE|ID3[\x02-\x04][\0-\x0f]|fLaC\0|OggS\0|\xff[\xf2\xf3\xfa\xfb]|MThd\0", "sound"),
        (rb"RIFF.{4}AVI |\x1a\x45\xdf\xa3|\0\0\0.ftyp|FLV\x01|\0\0\x01[\xb3\xba]", "video"),
        (rb"ARROW1\0\0|FEA1", "arrow"),
        (rb"Obj\x01", "avro"),
        (rb"GGUF[\x01-\xff]\0\0\0|(ggml|ggmf|ggjt|lmgg|fmgg|tjgg)[\0-\x09]", "gguf"),
        (rb".{5}\0\0\0\s*\{\s*\"", "safetensors"),
        (rb"\x80[\x02-\x05]", "pickle"),
        (rb"\x93NUMPY", "numpy"),
        (rb"\x89HDF\r\n\x1a\n", "weights"),
        (rb"SQLite format 3\0", "database"),
        (rb"PK(\x03\x04|\x05\x06|\x07\x08)|\x1f\x8b\x08|BZh[1-9](1AY&SY|\x17rE8P\x90)|\xfd7zXZ\0", "archive"),
        (rb"\x28\xb5\x2f\xfd", "archive"),
        (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x04\x22\x4d\x18|LZIP\x01|MSCF\0|!<arch>\n|\xed\xab\xee\xdb", "archive"),
        (rb".{257}ustar[\0 ]|\x1f[\x9d\xa0]", "archive"),
        (rb"\x7fELF|MZ.{0,62}\0|\0asm|\xca\xfe\xba\xbe|[\xce\xcf]\xfa\xed\xfe|.{2}\r\n.{0,4}\0\0\0", "program"),
        (rb"wOF[F2](\0|OTTO|true)|\0\x01\0\0\0|OTTO\0", "font"),
    )
)
_READ_BY_CONTENT = tuple((format.magic, format.name) for format in FORMATS if format.magic is not None)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# Suffixes that only imply text. Others, such as .ipynb, are known to hold JSON.
_PLAIN = ("", "txt", "text", "dat", "data")
_OBJECT = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*\"[^\"\r\n]*\"\s*:")
_HEADER = re.compile(rb"(\xef\xbb\xbf)?\s*\"?[A-Za-z_]\w*\"?([,;\t]\"?[A-Za-z_]\w*\"?)+\r?\n")
# Escape colours logs, and form feeds separate pages.
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b")) + b"\x7f"

_WAYS_OUT: Mapping[str, str] = {
    "table": "write the table as CSV",
    "spreadsheet": "write the table as CSV",
    "json": "write one JSON object per line and name the file .jsonl",
    "arrow": "write its rows as Parquet",
    "pdf": "extract its text",
    "document": "extract its text",
    "archive": "unpack it",
    **{format.name: format.way_out for format in FORMATS if format.way_out},
}


def format_by_name(name: str) -> FileFormat:
    """Return the format that reads a file of this name, by default text. `x.csv.gz` has the format of `x.csv`."""
    return _BY_ENDING.get(_ending(name), TEXT)


def kind_by_name(name: str) -> str | None:
    """Return the unsupported kind of file that the suffix of `name` implies; None if the file may be read."""
    format = format_by_name(name)
    if format.magic is not None and name.lower().endswith(".gz"):
        return format.name
    return _KINDS.get(_ending(name))


def _ending(name: str) -> str:
    _, dot, ending = name.lower().rpartition("/")[2].removesuffix(".gz").rpartition(".")
    return ending if dot else ""


def kind_by_content(head: bytes) -> str | None:
    """Return the kind of a file that begins with `head` (its first `HEAD_BYTES`); None for text, even invalid text.

    UTF-16 counts as text: reading it fails with the advice to save it as UTF-8.
    """
    if head.startswith(_UTF16) and head[2:4] != b"\0\0":
        return None
    for pattern, kind in (*_READ_BY_CONTENT, *_BY_CONTENT):
        if pattern.match(head):
            return kind
    controls = len(head) - len(head.translate(None, _CONTROL))
    if b"\0" in head or controls > _MAX_CONTROL_SHARE * len(head):
        return "binary"
    return None


def looks_like_records(name: str, head: bytes, fields: Collection[str]) -> bool:
    """Whether a file that is read as text begins like JSON or CSV and may have lost its suffix: with an object, or with
    a line of names without spaces, at least two of them in `fields`.
    """
    if _ending(name) not in _PLAIN:
        return False
    header = _HEADER.match(head)
    names = re.findall(r"\w+", header.group().decode("utf-8-sig")) if header else []
    return len(set(names) & set(fields)) > 1 or _OBJECT.match(head) is not None


def way_out(kind: str) -> str:
    """Return the advice for a file of `kind`, and the supported formats."""
    return f"{_WAYS_OUT[kind]}; {SUPPORTED}" if kind in _WAYS_OUT else SUPPORTED

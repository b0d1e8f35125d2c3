"""`genesis.save` and `genesis.load`: dicts and lists of tensors, numbers and strings in one safetensors file.

Tensors are stored under names made of their key paths ("state.0.exp_avg"), so every safetensors reader finds them.
The structure and all other values are stored as JSON in the metadata. Nothing is pickled, and loading cannot run code.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from genesis.array import from_numpy
from genesis.backend import CPU, Device, as_device
from genesis.dtypes import as_dtype, float8_e4m3fn
from genesis.errors import DiskError, DTypeError, GenesisError, MissingFileError, ModelError, UsageError, escape
from genesis.files.atomic import atomic_file
from genesis.files.boundary import boundary, closed_after
from genesis.files.filesystem import DEFAULT, FileSystem
from genesis.files.paths import open_regular, quote
from genesis.files.safetensors import MAX_NAME_CHARS, SafeTensors, write_tensors
from genesis.files.strict_json import is_unicode, parse_object
from genesis.keywords import check_calls
from genesis.tensor import Tensor

__all__ = ["load", "save", "write_object"]

KEY = "genesis"  # metadata key of the JSON
VERSION = 1
MAX_LEVELS = 40
MAX_DEPTH = 3 * MAX_LEVELS + 8  # nesting of the JSON: each level takes an object, a list and a pair
MAX_BITS = 1024  # of an integer value
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Scalar = str | int | float | bool | None


# --- Saving -----------------------------------------------------------------------------------------------------------


def save(obj: Any, f: str | os.PathLike[str] | IO[bytes]) -> None:
    """Save tensors, numbers, strings and None, and dicts, lists and tuples of them, such as state dicts.

    Every safetensors reader can read the tensors; `load` restores the whole object. A named file is written atomically.
    A tensor that appears several times is saved once and loaded as one object. Views that share only part of their
    memory are saved separately.

    Args:
        obj: object to save. Numpy arrays become tensors; dict keys are strings, numbers or None.
        f: path of the file, by convention `*.safetensors`, or a binary file object, such as BytesIO.

    Raises:
        UsageError: for a value of any other type; names its place in the object.
        DTypeError: for a tensor whose dtype the format lacks.
        DiskError: if writing fails; an older file stays intact.
    """
    write_object(obj, f)


def write_object(obj: Any, f: str | os.PathLike[str] | IO[bytes], *, fs: FileSystem = DEFAULT) -> None:
    """Save as `save` does, through a given file system."""
    path = None if _is_file("save", "write", f) else _path("save", f)
    if path is not None and os.path.isdir(path):
        raise DiskError(f"{quote(str(path), 400)} is a folder, not a file", next="name a file in it")
    saved = _SavedTensors()
    text = json.dumps({"version": VERSION, "value": _node(obj, (), saved)}, allow_nan=False, separators=(",", ":"))
    parse_object(text.encode(), where="the object to save", max_depth=MAX_DEPTH)  # fail now rather than in load
    metadata = {"format": "pt", KEY: text}
    if path is None:
        with boundary(DiskError, "saving to a file object"):
            write_tensors(_Sink(f), saved.arrays, metadata)  # type: ignore[arg-type]
        return
    with atomic_file(path, fs=fs) as file:
        write_tensors(file, saved.arrays, metadata)


class _Sink:
    """Writes to a user's file object, which may take a part of the bytes at a time."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest.nbytes:
            taken = self.file.write(rest)
            rest = rest[taken if isinstance(taken, int) else rest.nbytes :]


class _SavedTensors:
    """The tensors found in the object: arrays by name, and names by memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.names: dict[Any, str] = {}
        self.held: list[Any] = []  # keeps storages alive so that their ids stay unique

    def name(self, value: Tensor | npt.NDArray[Any], key_path: tuple[Any, ...]) -> str:
        """Return the name under which a tensor is saved; the same memory always has the same name."""
        if isinstance(value, Tensor):
            array = value.array
            key: Any = (id(array.storage), array.offset, array.shape, array.strides, array.dtype)
        else:
            key = (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype)
        if key in self.names:
            return self.names[key]
        self.held.append(value.array.storage if isinstance(value, Tensor) else value)
        name = self.names[key] = self._free_name(".".join(map(str, key_path)) or "tensor")
        self.arrays[name] = value.array.numpy() if isinstance(value, Tensor) else value
        return name

    def _free_name(self, wanted: str) -> str:
        """Return `wanted`, or another name if the format reserves or refuses it, or if it is taken."""
        is_path = "\\" in wanted or wanted.startswith("/") or ".." in wanted.split("/")
        fits = wanted.isprintable() and len(wanted) <= MAX_NAME_CHARS and not is_path and wanted != "__metadata__"
        if fits and wanted not in self.arrays:
            return wanted
        number = len(self.arrays)
        while f"tensor.{number}" in self.arrays:
            number += 1
        return f"tensor.{number}"


def _node(value: Any, key_path: tuple[Any, ...], saved: _SavedTensors) -> Any:
    """Return a value as JSON: scalars unchanged, everything else as an object that names its kind."""
    if len(key_path) > MAX_LEVELS:
        raise UsageError(f"save: {_shown(key_path[:4])}… is nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, np.ndarray):
            _known_dtype(value.dtype, f"save: {_shown(key_path)}")
        node = {"tensor": saved.name(value, key_path)}
        return {**node, "grad": True} if isinstance(value, Tensor) and value.requires_grad else node
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, key_path), _node(v, (*key_path, k), saved)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_node(v, (*key_path, i), saved) for i, v in enumerate(value)]}
    return _scalar(value, key_path)


def _known_dtype(dtype: np.dtype[Any], what: str, where: str = "") -> None:
    try:
        known = as_dtype(dtype)
    except GenesisError:
        known = None
    if known is None or known is float8_e4m3fn:
        raise DTypeError(f"{what} has the dtype {dtype}, which tensors do not have", where=where, next="cast it")


def _key(value: Any, key_path: tuple[Any, ...]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if not (value is None or isinstance(value, (str, int, float))):
        what = f"save: {_shown(key_path)} has a key of the type {type(value).__name__}"
        raise UsageError(what, next="use strings, numbers or None as keys")
    return _scalar(value, key_path)


def _scalar(value: Any, key_path: tuple[Any, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise UsageError(f"save: {_shown(key_path)} is an integer of more than {MAX_BITS} bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, str):
        if not is_unicode(value):
            raise UsageError(f"save: {_shown(key_path)} is a string with a lone surrogate, which UTF-8 cannot encode")
        return str(value)
    next = "save tensors, numbers, strings, None, and dicts, lists and tuples of them"
    if callable(getattr(value, "state_dict", None)):
        next = "save its state_dict(), and load that into a new object"
    raise UsageError(f"save: {_shown(key_path)} is a {type(value).__name__}, which cannot be saved", next=next)


def _shown(key_path: tuple[Any, ...]) -> str:
    return "obj" + "".join(f"[{escape(repr(key))[:60]}]" for key in key_path)


# --- Loading ----------------------------------------------------------------------------------------------------------


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Device | str | Mapping[str, Any] | Callable[[Tensor, str], Any] | None = None,
    *,
    device: Device | str | None = None,
    weights_only: bool = True,
) -> Any:
    """Load an object that `save` wrote; from any other safetensors file, return a dict of tensors by name.

    Args:
        f: path of the file, or a binary file object, which is read from its position to its end.
        map_location: device for the tensors, under torch's name; None means the CPU. As files hold no devices, a dict
            gives it for the key "cpu", and a function is called with each tensor and "cpu".
        device: the same under our name; give at most one of the two.
        weights_only: has no effect, as loading never runs code.

    Raises:
        ModelError: for a file that is damaged or not a safetensors file, such as a pickle of `torch.save`.
        UsageError: for two devices, or for an argument that is not a device.
        DTypeError: for a tensor whose dtype Genesis lacks.
    """
    content = None
    if _is_file("load", "read", f):
        with boundary(ModelError, "reading a file object"):
            content = f.read()  # type: ignore[union-attr]
        f = "file object"
    path = _path("load", f)
    if map_location is not None and device is not None:
        raise UsageError("load takes map_location or device, not both", next="give one; they mean the same")
    target: Any = map_location if device is None else device
    if isinstance(target, Mapping):
        target = target.get("cpu")
    if not (target is None or isinstance(target, (str, Device)) or callable(target)):
        raise UsageError(f"load takes a device, not a {type(target).__name__}", next='pass "cpu" or "cuda:0"')
    place = target if callable(target) else None
    device = CPU if target is None or place else as_device(target)
    _refuse_other_formats(path, content)
    with SafeTensors(path, content=content) as file:
        tensors = {}
        for name, entry in file.entries.items():
            _known_dtype(entry.dtype, f"the tensor {quote(name)}", escape(path))
            tensor = Tensor(from_numpy(file.read(name))).to(device=device)
            tensors[name] = tensor if place is None or (placed := place(tensor, "cpu")) is None else placed
        if KEY not in file.metadata:
            return tensors
        root = parse_object(file.metadata[KEY].encode(), where=escape(path), max_depth=MAX_DEPTH)
    return _Reader(tensors, escape(path)).rebuild(root)


class _Reader:
    """Rebuilds the object from the JSON of `_node`; every part of the JSON is checked."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.tensors, self.where = tensors, where
        self.used: set[str] = set()
        self.trained: dict[str, Tensor] = {}  # tensors that require a gradient; they share memory with the others

    def rebuild(self, root: dict[str, Any]) -> Any:
        """Return the object. Raises ModelError unless it contains every tensor of the file."""
        if set(root) != {"version", "value"} or root["version"] != VERSION:
            raise self._bad(f"its version is {quote(root.get('version'), 40)}, not {VERSION}")
        value = self.value(root["value"])
        unused = sorted(self.tensors.keys() - self.used)
        if unused:
            raise self._bad(f"the tensor {quote(unused[0])} does not appear in the object")
        return value

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return self.scalar(node)
        kind = next(iter(node), None)
        if kind == "tensor" and set(node) <= {"tensor", "grad"} and node.get("grad", True) is True:
            return self.tensor(node["tensor"], "grad" in node)
        if len(node) == 1 and kind in ("list", "tuple") and isinstance(node[kind], list):
            items = [self.value(item) for item in node[kind]]
            return items if kind == "list" else tuple(items)
        if len(node) == 1 and kind == "dict" and isinstance(node["dict"], list):
            return self.mapping(node["dict"])
        return self.scalar(node)

    def mapping(self, pairs: list[Any]) -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self._bad("an entry of a dict is not a pair")
            key = self.scalar(pair[0])
            if key in entries:
                raise self._bad(f"the key {quote(key)} appears twice in a dict")
            entries[key] = self.value(pair[1])
        return entries

    def tensor(self, name: Any, requires_grad: bool) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise self._bad(f"the tensor {quote(name)} does not exist")
        self.used.add(name)
        loaded = self.tensors[name]
        if not requires_grad:
            return loaded
        if not loaded.is_floating_point():
            raise self._bad(f"the integer tensor {quote(name)} requires a gradient")
        if name not in self.trained:
            self.trained[name] = Tensor(loaded.array, requires_grad=True)
        return self.trained[name]

    def scalar(self, node: Any) -> Scalar:
        if isinstance(node, dict):
            if set(node) != {"float"} or node["float"] not in FLOATS:
                raise self._bad(f"an object {quote(node, 60)} is not a value")
            return FLOATS[node["float"]]
        if isinstance(node, list):
            raise self._bad("a list appears where a scalar is expected")
        return node  # type: ignore[no-any-return]

    def _bad(self, problem: str) -> ModelError:
        return ModelError(
            f"the structure that genesis.save wrote into the file is damaged: {problem}",
            where=self.where,
            next="save it again, or read only the tensors with the safetensors library",
        )


# --- Paths and other formats ------------------------------------------------------------------------------------------


def _is_file(function: str, method: str, f: Any) -> bool:
    """Whether `f` is a file object. Raises UsageError for one that is open for text."""
    if isinstance(f, io.TextIOBase):
        mode = method[0] + "b"
        raise UsageError(f"{function} got a file that is open for text", next=f'open it in binary mode: "{mode}"')
    return not isinstance(f, (str, os.PathLike)) and hasattr(f, method)


def _path(function: str, f: Any) -> Path:
    if not isinstance(f, (str, os.PathLike)):
        raise UsageError(f"{function} takes a path or a binary file object, not a {type(f).__name__}")
    name = os.fspath(f)
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(f"{function}: {quote(name)} is not a file path", next="give the file's name")
    return Path(name)


def _refuse_other_formats(path: Path, content: bytes | None) -> None:
    """Raise ModelError for folders, pickles, numpy archives and everything else that is not a safetensors file."""
    if content is not None:
        start, size = content[:8], len(content)
        if not size:
            raise ModelError("the file object has no bytes after its position", next="call its seek(0) before load")
    elif os.path.isdir(path):
        raise ModelError(f"{quote(str(path), 400)} is a folder", next="genesis_models.load reads model folders")
    else:
        with closed_after(open_regular(path, ModelError if os.path.lexists(path) else MissingFileError)) as descriptor:
            start, size = os.pread(descriptor, 8, 0), os.fstat(descriptor).st_size
    if start.startswith(b"PK\x03\x04") and path.suffix == ".npz":
        raise ModelError("this is an archive of numpy arrays", where=escape(path), next="numpy.load reads it")
    # The length in a header may begin like a pickle, but a pickle's first bytes never give a length that fits the file.
    is_other = len(start) < 8 or int.from_bytes(start, "little") > size - 8
    if start.startswith(b"PK\x03\x04") or (is_other and re.match(b"\x80[\x02-\x05]", start)):
        raise ModelError(
            "this is a pickle, as torch.save writes; reading it would run code from it",
            where=escape(path),
            next="with torch: safetensors.torch.save_file(torch.load(path, weights_only=True), 'new.safetensors')",
        )
    if is_other:
        begin = quote(start.decode("latin-1"))
        what = f"this is not a complete safetensors file: it has {size:,} bytes and starts with {begin}"
        raise ModelError(what, where=escape(path), next="give a file that genesis.save or safetensors wrote")


check_calls(globals(), ("load", "save"))

"""`genesis.save` and `genesis.load`: dicts and lists of tensors, numbers and texts in one safetensors file.

The tensors are the file's own, under names made of their key paths ("state.0.exp_avg"), so that every reader of the
format has them. What the format does not know (where each belongs, and all that is no tensor) is JSON in the metadata.
Nothing is pickled, and nothing that is read can run code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.array import from_numpy
from genesis.backend import CPU, Device, as_device
from genesis.dtypes import as_dtype, float8_e4m3fn
from genesis.errors import DiskError, DTypeError, GenesisError, ModelError, UsageError, escape
from genesis.files.atomic import atomic_file
from genesis.files.boundary import closed_after
from genesis.files.filesystem import DEFAULT, FileSystem
from genesis.files.paths import open_regular, quote
from genesis.files.safetensors import MAX_NAME_CHARS, SafeTensors, write_tensors
from genesis.files.strict_json import is_unicode, parse_object
from genesis.keywords import check_calls
from genesis.tensor import Tensor

__all__ = ["load", "save", "write_object"]

KEY = "genesis"  # of the metadata
VERSION = 1
MAX_LEVELS = 40
MAX_DEPTH = 3 * MAX_LEVELS + 8  # of the JSON: an object, a list and a pair for each level
MAX_BITS = 1024  # of an integer
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Scalar = str | int | float | bool | None


# --- Saving -----------------------------------------------------------------------------------------------------------


def save(obj: Any, f: str | os.PathLike[str]) -> None:
    """Save tensors, and dicts, lists and tuples of them with numbers, texts and None: state dicts, for instance.

    Every reader of safetensors files has the tensors, `load` has the rest as well. The file appears whole or not at
    all. A tensor that appears several times is saved once, and `load` gives one object for all of them; views that
    share only a part of their memory are saved apart.

    Args:
        obj: numpy arrays become tensors; keys of dicts are texts, numbers or None.
        f: the file, by convention `*.safetensors`.

    Raises:
        UsageError: for an object of another kind, saying where it is.
        DTypeError: for a tensor of a type that the format has not.
        DiskError: writing failed; an older file is intact.
    """
    write_object(obj, f)


def write_object(obj: Any, f: str | os.PathLike[str], *, fs: FileSystem = DEFAULT) -> None:
    """`save` through a file system."""
    path = _path("save", f)
    if os.path.isdir(path):
        raise DiskError(f"{quote(str(path), 400)} is a folder, not a file", next="name a file in it")
    found = _Found()
    text = json.dumps({"version": VERSION, "value": _node(obj, (), found)}, allow_nan=False, separators=(",", ":"))
    parse_object(text.encode(), where="the object to save", max_depth=MAX_DEPTH)  # what load would refuse
    with atomic_file(path, fs=fs) as file:
        write_tensors(file, found.arrays, {"format": "pt", KEY: text})


class _Found:
    """The tensors that were met: arrays by name, and names by memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.names: dict[Any, str] = {}
        self.held: list[Any] = []  # so that no other storage gets the id of one

    def name(self, value: Tensor | npt.NDArray[Any], key_path: tuple[Any, ...]) -> str:
        """The name under which a tensor is saved; another path to the same memory has the same."""
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

    def _free_name(self, asked: str) -> str:
        """`asked`, or another name where the format reserves or refuses it or where it is taken."""
        is_path = "\\" in asked or asked.startswith("/") or ".." in asked.split("/")
        fits = asked.isprintable() and len(asked) <= MAX_NAME_CHARS and not is_path and asked != "__metadata__"
        if fits and asked not in self.arrays:
            return asked
        number = len(self.arrays)
        while f"tensor.{number}" in self.arrays:
            number += 1
        return f"tensor.{number}"


def _node(value: Any, key_path: tuple[Any, ...], found: _Found) -> Any:
    """A value as JSON: scalars as they are, all else as an object that says what it is."""
    if len(key_path) > MAX_LEVELS:
        raise UsageError(f"save: {_shown(key_path[:4])}… is nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, np.ndarray):
            _known_dtype(value.dtype, f"save: {_shown(key_path)}")
        node = {"tensor": found.name(value, key_path)}
        return {**node, "grad": True} if isinstance(value, Tensor) and value.requires_grad else node
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, key_path), _node(v, (*key_path, k), found)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_node(v, (*key_path, i), found) for i, v in enumerate(value)]}
    return _scalar(value, key_path)


def _known_dtype(dtype: np.dtype[Any], what: str, where: str = "") -> None:
    """Raise DTypeError unless tensors have this dtype."""
    try:
        known = as_dtype(dtype)
    except GenesisError:
        known = None
    if known is None or known is float8_e4m3fn:
        raise DTypeError(f"{what} is of {dtype}, which tensors do not have", where=where, next="cast it")


def _key(value: Any, key_path: tuple[Any, ...]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if not (value is None or isinstance(value, (str, int, float))):
        what = f"save: {_shown(key_path)} has a key of the kind {type(value).__name__}"
        raise UsageError(what, next="use texts, numbers or None as keys")
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
            raise UsageError(f"save: {_shown(key_path)} is a text with half a surrogate pair, which no encoding writes")
        return str(value)
    next = "save tensors, numbers, texts, None, and dicts, lists and tuples of them"
    if callable(getattr(value, "state_dict", None)):
        next = "save its state_dict(), and load that into an object made anew"
    raise UsageError(f"save: {_shown(key_path)} is a {type(value).__name__}, which is not saved", next=next)


def _shown(key_path: tuple[Any, ...]) -> str:
    """Where a value is in the object, as Python would write it."""
    return "obj" + "".join(f"[{escape(repr(key))[:60]}]" for key in key_path)


# --- Loading ----------------------------------------------------------------------------------------------------------


def load(
    f: str | os.PathLike[str],
    map_location: Device | str | None = None,
    *,
    device: Device | str | None = None,
    weights_only: bool = True,
) -> Any:
    """What `save` saved; the tensors of any other safetensors file as a dict by name.

    Args:
        map_location, device: where the tensors go, under torch's name or ours; None means the CPU.
        weights_only: True, as for torch; a file never runs code here.

    Raises:
        ModelError: for what is no safetensors file, such as a pickle of `torch.save`, and for a damaged one.
        UsageError: for two devices.
        DTypeError: for a tensor of a type that is not offered here.
    """
    path = _path("load", f)
    if map_location is not None and device is not None:
        raise UsageError("load takes map_location or device, not both", next="they mean the same: give one")
    if not weights_only:
        raise UsageError("load never runs code from a file, as weights_only=False would", next="leave it out")
    target = map_location if device is None else device
    if not (target is None or isinstance(target, (str, Device))):
        raise UsageError(f"load: a device is meant, not a {type(target).__name__}", next='write "cpu" or "cuda:0", say')
    device = CPU if target is None else as_device(target)
    _refuse_other_formats(path)
    with SafeTensors(path) as file:
        tensors = {}
        for name, entry in file.entries.items():
            _known_dtype(entry.dtype, f"the tensor {quote(name)}", escape(path))
            tensors[name] = Tensor(from_numpy(file.read(name))).to(device=device)
        if KEY not in file.metadata:
            return tensors
        root = parse_object(file.metadata[KEY].encode(), where=escape(path), max_depth=MAX_DEPTH)
    return _Reader(tensors, escape(path)).whole(root)


class _Reader:
    """Makes the object anew from the JSON of `_node`, of which nothing is believed."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.tensors, self.where = tensors, where
        self.used: set[str] = set()
        self.trained: dict[str, Tensor] = {}  # those that require a gradient; they share memory with the others

    def whole(self, root: dict[str, Any]) -> Any:
        """The object; it contains every tensor of the file."""
        if set(root) != {"version", "value"} or root["version"] != VERSION:
            raise self._bad(f"its version is {quote(root.get('version'), 40)}, not {VERSION}")
        value = self.value(root["value"])
        left = sorted(self.tensors.keys() - self.used)
        if left:
            raise self._bad(f"the tensor {quote(left[0])} appears nowhere in the object")
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
        found: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self._bad("an entry of a dict is no pair")
            key = self.scalar(pair[0])
            if key in found:
                raise self._bad(f"the key {quote(key)} appears twice in a dict")
            found[key] = self.value(pair[1])
        return found

    def tensor(self, name: Any, requires_grad: bool) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise self._bad(f"there is no tensor {quote(name)}")
        self.used.add(name)
        found = self.tensors[name]
        if not requires_grad:
            return found
        if not found.is_floating_point():
            raise self._bad(f"the tensor {quote(name)} of integers requires a gradient")
        if name not in self.trained:
            self.trained[name] = Tensor(found.array, requires_grad=True)
        return self.trained[name]

    def scalar(self, node: Any) -> Scalar:
        if isinstance(node, dict):
            if set(node) != {"float"} or node["float"] not in FLOATS:
                raise self._bad(f"an object is {quote(node, 60)}")
            return FLOATS[node["float"]]
        if isinstance(node, list):
            raise self._bad("a list is where a value is expected")
        return node  # type: ignore[no-any-return]

    def _bad(self, problem: str) -> ModelError:
        return ModelError(
            f"the structure that genesis.save wrote into the file is damaged: {problem}",
            where=self.where,
            next="save it again, or read the tensors alone with the safetensors library",
        )


# --- Paths and other formats ------------------------------------------------------------------------------------------


def _path(function: str, f: Any) -> Path:
    if not isinstance(f, (str, os.PathLike)):
        raise UsageError(f"{function} takes a path, not a {type(f).__name__}", next="write to a file, then copy it")
    name = os.fspath(f)
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(f"{function}: {quote(name)} is no path of a file", next="give the file's name")
    return Path(name)


def _refuse_other_formats(path: Path) -> None:
    """One clear sentence for pickles and all else that people take for a file of tensors."""
    if os.path.isdir(path):
        raise ModelError(f"{quote(str(path), 400)} is a folder", next="genesis_models.load reads model folders")
    with closed_after(open_regular(path)) as descriptor:
        start, size = os.pread(descriptor, 8, 0), os.fstat(descriptor).st_size
    if start.startswith(b"PK\x03\x04") and path.suffix == ".npz":
        raise ModelError("this is an archive of numpy arrays", where=escape(path), next="numpy.load reads it")
    # A header's length may begin like a pickle, whose first bytes make no length that the file could hold.
    is_other = len(start) < 8 or int.from_bytes(start, "little") > size - 8
    if start.startswith(b"PK\x03\x04") or (is_other and re.match(b"\x80[\x02-\x05]", start)):
        raise ModelError(
            "this is a pickle, as torch.save writes, and to read one is to run code from it",
            where=escape(path),
            next="where torch is: safetensors.torch.save_file(torch.load(path, weights_only=True), 'new.safetensors')",
        )
    if is_other:
        begin = quote(start.decode("latin-1"))
        what = f"this is no safetensors file, or only a part of one: it has {size:,} bytes and starts with {begin}"
        raise ModelError(what, where=escape(path), next="give a file that genesis.save or safetensors wrote")


check_calls(globals(), ("load", "save"))

"""Hugging Face model folders as files: JSON, weights whole or in shards, side files, chat template. No model code."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from genesis.errors import ModelError, escape
from genesis.files.atomic import FolderWriter
from genesis.files.boundary import boundary, closed_after
from genesis.files.paths import check_name, exists, list_folder, open_regular, quote, safe_join
from genesis.files.safetensors import SafeTensors, TensorEntry, TensorSource, write_tensors
from genesis.files.strict_json import indented_bytes, parse_object, read_limited

WEIGHTS_NAME = "model.safetensors"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
# A checkpoint in the folder of a run, and its step.
CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,11})")
# Open files of one model; published ones have up to about 200, and a process may usually open 1,024.
MAX_SHARDS = 512
MAX_JSON_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_NAMES_SHOWN = 10

# Files that go with a model unchanged, and the most bytes each may have.
SIDE_FILES: Mapping[str, int] = MappingProxyType(
    {
        "tokenizer.json": 256 << 20,
        TOKENIZER_CONFIG: MAX_JSON_BYTES,
        CHAT_TEMPLATE: MAX_TEMPLATE_BYTES,
        GENERATION_CONFIG: MAX_JSON_BYTES,
        "special_tokens_map.json": MAX_JSON_BYTES,
        "added_tokens.json": MAX_JSON_BYTES,
        "vocab.json": 64 << 20,
        "merges.txt": 64 << 20,
        "tokenizer.model": 64 << 20,
    }
)
# Those of them that are of the tokenizer; `generation_config.json` and the license are not.
TOKENIZER_FILES = re.compile(
    r"tokenizer(_config)?\.json|chat_template\.jinja|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|tokenizer\.model|additional_chat_templates/.*"
)
MAX_TEMPLATES = 64

# The terms of a model, under the names that publishers give them.
_TERMS = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)([-._ ][\w. -]{1,40})?", re.IGNORECASE)
_TEMPLATE = re.compile(r"\w[\w.-]{0,95}\.jinja")
# Larger counts have more digits: model-000001-of-000163.safetensors.
_WEIGHT_FILE = re.compile(r"model(-\d{5,8}-of-\d{5,8})?\.safetensors|model\.safetensors\.index\.json")
_COPY_BYTES = 1 << 20
README = "README.md"
_MAX_README = 8 << 20
_NEXT = "the model folder is incomplete or mixed up: download or save it again"


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path` of at most `limit` bytes.

    The path is the caller's own; for a file of a model folder give `safe_join(folder, name)`.

    Raises:
        ModelError: no regular file, too large, not UTF-8, not an object, duplicate keys, not finite, too deep.
    """
    return parse_object(read_limited(path, limit), where=escape(Path(path)))


def index_name(stem: str) -> str:
    """The name of the index of the shards of `stem`.safetensors."""
    return f"{stem}.safetensors.index.json"


INDEX_NAME = index_name("model")


def shard_name(stem: str, number: int, count: int) -> str:
    """The name of shard `number` of `count`, counted from 0, as transformers writes it."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(writer: FolderWriter, stem: str, weight_map: Mapping[str, str], total: int) -> None:
    """Write the index of shards: which file has a tensor, and the bytes of all tensors. Errors as of `writer`."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    writer.write(index_name(stem), indented_bytes(index))


def list_names(names: Iterable[str], limit: int = MAX_NAMES_SHOWN) -> str:
    """The count of `names` and the first `limit` of them in order, escaped, for an error message."""
    ordered = sorted(names)
    shown = ", ".join(quote(name) for name in ordered[:limit])
    return f"{len(ordered):,} ({shown}{', …' if len(ordered) > limit else ''})"


class WeightFolder:
    """The weights of a model folder, in `model.safetensors` or in the shards that its index names.

    All headers are read and compared with the index when it is opened; tensors are read one at a time. It keeps its
    files open until `close`.

    Args:
        stem: what is in the place of "model" in these names: of a checkpoint also "optimizer".

    Raises:
        ModelError: no weights, both forms at once, unsafe file names, tensors missing, extra, or in two files.
    """

    def __init__(self, folder: str | os.PathLike[str], stem: str = "model") -> None:
        self.folder, single_name, self._index = Path(folder), f"{stem}.safetensors", index_name(stem)
        self._files: dict[str, SafeTensors] = {}
        self._owner: dict[str, SafeTensors] = {}
        self._stored: dict[str, str] = {}  # name -> the one that the file has, where it is another
        with boundary(ModelError, "looking for weights", self.folder):
            single, index = (exists(self.folder / name) for name in (single_name, self._index))
        if single and index:
            what = f"the folder holds both {single_name} and {self._index}"
            raise ModelError(what, where=escape(folder), next="remove the one that is out of date")
        if not single and not index:
            what = f"the folder holds neither {single_name} nor {self._index}"
            next = "give a model folder with safetensors weights; no other form is read"
            raise ModelError(what, where=escape(folder), next=next)
        try:
            if single:
                self._open(single_name, escape(folder))
            else:
                self._open_shards()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, sorted."""
        return tuple(sorted(self._owner))

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors by other names than their files do: `names` has the new one of each, which nothing else has."""
        self._stored = {new: old for old, new in names.items()}
        self._owner = {names.get(name, name): file for name, file in self._owner.items()}

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the weight files, sorted."""
        return tuple(sorted(self._files))

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and offset of the tensor `name`; the byte range is that of its own file."""
        return self._owner_of(name).entries[self._stored.get(name, name)]

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor `name` in fresh memory; errors as in `SafeTensors.read`."""
        return self._owner_of(name).read(self._stored.get(name, name))

    def read_into(self, name: str, out: npt.NDArray[Any]) -> None:
        """Read the tensor `name` into `out`; errors as in `SafeTensors.read_into`."""
        self._owner_of(name).read_into(self._stored.get(name, name), out)

    def read_part(self, name: str, start: int, buffer: npt.NDArray[Any]) -> None:
        """Read elements of the tensor `name` from number `start` on; errors as in `SafeTensors.read_part`."""
        self._owner_of(name).read_part(self._stored.get(name, name), start, buffer)

    def read_elements(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """The elements [start, stop) of the tensor `name`; errors as in `SafeTensors.read_elements`."""
        return self._owner_of(name).read_elements(self._stored.get(name, name), start, stop)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _open(self, name: str, where: str) -> None:
        """Open one weight file; a tensor that two files hold belongs to the first here."""
        file = SafeTensors(safe_join(self.folder, name, where=where))
        self._files[name] = file
        for tensor in file.names:
            self._owner.setdefault(tensor, file)

    def _open_shards(self) -> None:
        where = escape(self.folder / self._index)
        weight_map = read_weight_map(safe_join(self.folder, self._index, where=where), where)
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            self._open(shard, where)
        held = Counter(tensor for file in self._files.values() for tensor in file.names)
        problems = {
            "missing": [name for name, shard in weight_map.items() if name not in self._files[shard].entries],
            "extra": [name for name in held if name not in weight_map],
            "in two files": [name for name, count in held.items() if count > 1],
        }
        found = {kind: names for kind, names in problems.items() if names}
        if found:
            limit = MAX_NAMES_SHOWN // len(found)
            counts = "; ".join(f"{kind}: {list_names(names, limit)}" for kind, names in found.items())
            raise ModelError(f"the index and the weight files disagree on tensors: {counts}", where=where, next=_NEXT)

    def _owner_of(self, name: str) -> SafeTensors:
        if name not in self._owner:
            what = f"no tensor {quote(name)} among the {len(self._owner):,} of the folder"
            raise ModelError(what, where=escape(self.folder), next="check that the folder holds this kind of model")
        return self._owner[name]

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def save_weights(
    writer: FolderWriter, tensors: Mapping[str, npt.NDArray[Any] | TensorSource], max_shard_bytes: int
) -> list[str]:
    """Write `tensors` as `model.safetensors`, or as numbered shards and an index where they exceed `max_shard_bytes`.

    Shards are filled in the mapping's order; a tensor larger than a shard gets its own. Weight files of an earlier save
    in the same folder are removed when `writer` commits.

    Returns:
        the names of the files written.
    Raises:
        ModelError, DTypeError: as in `write_tensors`. DiskError: writing failed.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in tensors.items():
        if shards[-1] and size + array.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += array.nbytes
    names = [shard_name("model", i, len(shards)) for i in range(len(shards))] if len(shards) > 1 else [WEIGHTS_NAME]
    for name, shard in zip(names, shards, strict=True):
        with writer.create(name) as file:
            write_tensors(file, {tensor: tensors[tensor] for tensor in shard})
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_index(writer, "model", weight_map, sum(array.nbytes for array in tensors.values()))
        names.append(INDEX_NAME)
    for old in writer.existing():
        if _WEIGHT_FILE.fullmatch(old) and old not in names:
            writer.remove(old)
    return names


def file_limit(name: str) -> int | None:
    """The most bytes that the file `name` of a model folder may have; None for weights, and what no model has."""
    if name in ("config.json", "adapter_config.json"):
        return MAX_JSON_BYTES
    folder, _, last = name.rpartition("/")
    is_ours = _TERMS.fullmatch(name) or (folder == TEMPLATE_FOLDER and _TEMPLATE.fullmatch(last))
    return SIDE_FILES.get(name, MAX_TEMPLATE_BYTES if is_ours else None)


def side_files(source: str | os.PathLike[str]) -> list[str]:
    """The names of the files in the folder `source` that go with a model unchanged.

    These are the ones of `SIDE_FILES`, its license and notices, and additional chat templates; of the latter two, what
    is no plain file remains.

    Raises:
        ModelError: the folder cannot be listed.
    """
    with boundary(ModelError, "listing the model folder", source):
        names = [name for name in SIDE_FILES if exists(Path(source) / name)]
        terms = [name for name in _listed(source, "") if _TERMS.fullmatch(name)]
        found = _listed(source, TEMPLATE_FOLDER)
    templates = [f"{TEMPLATE_FOLDER}/{name}" for name in found if _TEMPLATE.fullmatch(name)]
    return names + [name for name in (terms + templates)[:MAX_TEMPLATES] if _is_plain(source, name)]


@boundary(ModelError, "reading the model folder")
def copy_side_files(
    source: str | os.PathLike[str], writer: FolderWriter, names: Iterable[str] | None = None
) -> list[str]:
    """Copy those of `names` (of `side_files`) that the folder `source` has, byte for byte; returns their names.
    Raises: ModelError: one cannot be read, is not a regular file or is too large. DiskError: writing failed.
    """
    copied = []
    for name in side_files(source) if names is None else names:
        if exists(Path(source) / name):
            path, limit = safe_join(source, name, where=escape(source)), SIDE_FILES.get(name, MAX_TEMPLATE_BYTES)
            with boundary(ModelError, "reading", path), closed_after(open_regular(path)) as descriptor:
                size = os.fstat(descriptor).st_size
                if size > limit:
                    what = f"{quote(name)} has {size:,} bytes, more than the {limit:,} allowed"
                    raise ModelError(what, where=escape(path))
                with writer.create(name) as target:
                    while part := os.read(descriptor, _COPY_BYTES):
                        target.write(part)
            copied.append(name)
    return copied


def _listed(source: str | os.PathLike[str], folder: str) -> list[str]:
    """The names in a folder of `source`, sorted; none where there is no such folder, or a link. Raises: OSError."""
    path = Path(source) / folder
    return [] if folder and path.is_symlink() else list_folder(path)


def _is_plain(source: str | os.PathLike[str], name: str) -> bool:
    with suppress(ModelError, OSError):
        return os.stat(safe_join(source, name)).st_size <= MAX_TEMPLATE_BYTES
    return False


@boundary(ModelError, "reading the chat template")
def read_chat_templates(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name -> text of a model folder's chat templates: `default` first, and further ones such as `tool_use`; or none.

    They are in `chat_template.jinja` and the folder `additional_chat_templates`, or else in `tokenizer_config.json`.

    Raises:
        ModelError: a file is unsafe or too large, not UTF-8, or the entry is neither text nor a list with a default.
    """
    if exists(Path(folder) / CHAT_TEMPLATE):
        names = [n for n in _listed(folder, TEMPLATE_FOLDER) if _TEMPLATE.fullmatch(n)][:MAX_TEMPLATES]
        files = {n.removesuffix(".jinja"): f"{TEMPLATE_FOLDER}/{n}" for n in names} | {"default": CHAT_TEMPLATE}
        return {n: read_template(safe_join(folder, file), escape(Path(folder) / file)) for n, file in files.items()}
    name = TOKENIZER_CONFIG
    if not exists(Path(folder) / name):
        return {}
    found = read_json(safe_join(folder, name)).get("chat_template")
    if found is None:
        return {}
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    texts: dict[Any, Any] = {t.get("name"): t.get("template") for t in named[:MAX_TEMPLATES] if isinstance(t, dict)}
    if "default" not in texts or not all(map(_is_template, texts.items())):
        what = "chat_template is neither a text nor a list of named texts, one of them 'default'"
        raise ModelError(what, where=escape(Path(folder) / name), next=f"put the template into {CHAT_TEMPLATE}")
    return texts


def _is_template(item: tuple[Any, Any]) -> bool:
    name, text = item
    is_name = isinstance(name, str) and _TEMPLATE.fullmatch(f"{name}.jinja")
    return bool(is_name) and isinstance(text, str) and len(text) <= MAX_TEMPLATE_BYTES


def read_template(path: str | os.PathLike[str], where: str) -> str:
    """The text of the chat template in the file `path`. Raises: ModelError."""
    try:
        return read_limited(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the chat template is not UTF-8: byte {error.start:,} is invalid"
        raise ModelError(what, where=where, next="save it as UTF-8") from error


def read_weight_map(path: Path, where: str) -> dict[str, str]:
    """An index's map from tensor to file name: at most `MAX_SHARDS` safe ones, which end in .safetensors."""
    weight_map = parse_object(read_limited(path, MAX_INDEX_BYTES), where=where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index has no weight_map from tensors to files", where=where, next=_NEXT)
    shards: set[str] = set()
    for shard in weight_map.values():
        if isinstance(shard, str) and shard in shards:
            continue
        if not check_name(shard, where=where).endswith(".safetensors"):
            raise ModelError(f"the index names {quote(shard)}, no safetensors file", where=where, next=_NEXT)
        shards.add(shard)
        if len(shards) > MAX_SHARDS:
            raise ModelError(f"the index names over {MAX_SHARDS} files", where=where, next=_NEXT)
    return weight_map


# --- The head of a README ---------------------------------------------------------------------------------------------
# YAML between two lines of three dashes, which says what a model or data set is.


def read_head(folder: Path) -> Mapping[str, Any]:
    """The values in the head of a folder's README; none where it has no head, or one that cannot be read.
    Raises: ModelError: it is no regular file, a link or too large.
    """
    import yaml

    data = read_limited(safe_join(folder, README), _MAX_README) if exists(folder / README) else b""
    text = data.decode("utf-8", "replace")
    begin, _, rest = text.removeprefix("\ufeff").replace("\r\n", "\n").partition("---\n")
    head, end, _ = rest.partition("\n---\n")
    if begin or not end:
        return {}
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head, loader)):
            return {}  # a few of them are as large as a million values
        found = yaml.load(head, loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def with_head(values: Mapping[str, Any], text: str) -> bytes:
    """A README with these values in its head; those that are None or empty are left out."""
    import yaml

    kept = {key: value for key, value in values.items() if value}
    return f"---\n{yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)}---\n\n{text}".encode()

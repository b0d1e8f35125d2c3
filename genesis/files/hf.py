"""Hugging Face model folders as files: JSON, weights in one file or in shards, side files, chat templates."""

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
# The name of a checkpoint in the folder of a run, with its step.
CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,11})")
# Shards are open files. Published models have up to about 200, and a process may usually open 1,024 files.
MAX_SHARDS = 512
MAX_JSON_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_NAMES_SHOWN = 10

# Files that are copied with a model unchanged, and the largest size of each in bytes.
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
# The files of the tokenizer, without `generation_config.json` and the license.
TOKENIZER_FILES = re.compile(
    r"tokenizer(_config)?\.json|chat_template\.jinja|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|tokenizer\.model|additional_chat_templates/.*"
)
MAX_TEMPLATES = 64

# License and policy files, under the names that publishers use.
_TERMS = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)([-._ ][\w. -]{1,40})?", re.IGNORECASE)
_TEMPLATE = re.compile(r"\w[\w.-]{0,95}\.jinja")
# From 100,000 shards on, names have more digits: model-000001-of-000163.safetensors.
_WEIGHT_FILE = re.compile(r"model(-\d{5,8}-of-\d{5,8})?\.safetensors|model\.safetensors\.index\.json")
_COPY_BYTES = 1 << 20
README = "README.md"
_MAX_README = 8 << 20
_NEXT = "download or save the model folder again"


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path` of at most `limit` bytes.

    The path is trusted; for a file of a model folder pass `safe_join(folder, name)`.

    Raises:
        ModelError: the file is not regular or too large, or not a strict JSON object; see `parse_object`.
    """
    return parse_object(read_limited(path, limit), where=escape(Path(path)))


def index_name(stem: str) -> str:
    """The name of the index of a sharded `stem`.safetensors."""
    return f"{stem}.safetensors.index.json"


INDEX_NAME = index_name("model")


def shard_name(stem: str, number: int, count: int) -> str:
    """The name of shard `number`, counted from 0, of `count` shards, in transformers' format."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(writer: FolderWriter, stem: str, weight_map: Mapping[str, str], total: int) -> None:
    """Write the index of shards: the file of each tensor, and the total bytes. Raises the errors of `writer`."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    writer.write(index_name(stem), indented_bytes(index))


def list_names(names: Iterable[str], limit: int = MAX_NAMES_SHOWN) -> str:
    """The number of `names` and the first `limit` of them in order, escaped, for an error message."""
    ordered = sorted(names)
    shown = ", ".join(quote(name) for name in ordered[:limit])
    return f"{len(ordered):,} ({shown}{', …' if len(ordered) > limit else ''})"


class WeightFolder:
    """The weights of a model folder, in `model.safetensors` or in the shards that its index names.

    Opening reads all headers and compares them with the index; tensors are read one at a time. Files remain open until
    `close`.

    Args:
        stem: replaces "model" in the file names; a checkpoint also has "optimizer".

    Raises:
        ModelError: weights are missing, stored in both forms or under unsafe file names, or disagree with the index.
    """

    def __init__(self, folder: str | os.PathLike[str], stem: str = "model") -> None:
        self.folder, single_name, self._index = Path(folder), f"{stem}.safetensors", index_name(stem)
        self._files: dict[str, SafeTensors] = {}
        self._owner: dict[str, SafeTensors] = {}
        self._stored: dict[str, str] = {}  # name -> its name in the file, if it was renamed
        with boundary(ModelError, "looking for weights", self.folder):
            single, index = (exists(self.folder / name) for name in (single_name, self._index))
        if single and index:
            what = f"the folder contains both {single_name} and {self._index}"
            raise ModelError(what, where=escape(folder), next="remove the outdated one")
        if not single and not index:
            what = f"the folder contains neither {single_name} nor {self._index}"
            next = "use a model folder with safetensors weights"
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
        """The names of the tensors, sorted."""
        return tuple(sorted(self._owner))

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors: `names` maps names in the files to new, unique names."""
        self._stored = {new: old for old, new in names.items()}
        self._owner = {names.get(name, name): file for name, file in self._owner.items()}

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the weight files, sorted."""
        return tuple(sorted(self._files))

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and byte range of the tensor `name`; the range refers to the tensor's own file."""
        return self._owner_of(name).entries[self._stored.get(name, name)]

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor `name` in new memory. Raises the errors of `SafeTensors.read`."""
        return self._owner_of(name).read(self._stored.get(name, name))

    def read_into(self, name: str, out: npt.NDArray[Any]) -> None:
        """Read the tensor `name` into `out`. Raises the errors of `SafeTensors.read_into`."""
        self._owner_of(name).read_into(self._stored.get(name, name), out)

    def read_part(self, name: str, start: int, buffer: npt.NDArray[Any]) -> None:
        """Read elements of `name` into `buffer` from index `start` on. Raises the errors of `SafeTensors.read_part`."""
        self._owner_of(name).read_part(self._stored.get(name, name), start, buffer)

    def read_elements(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """The elements [start, stop) of the tensor `name`. Raises the errors of `SafeTensors.read_elements`."""
        return self._owner_of(name).read_elements(self._stored.get(name, name), start, stop)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _open(self, name: str, where: str) -> None:
        """Open one weight file. If two files contain a tensor, the first one provides it."""
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
        # Compare the index with the headers of all shards.
        held = Counter(tensor for file in self._files.values() for tensor in file.names)
        problems = {
            "missing": [name for name, shard in weight_map.items() if name not in self._files[shard].entries],
            "extra": [name for name in held if name not in weight_map],
            "in two files": [name for name, count in held.items() if count > 1],
        }
        faults = {kind: names for kind, names in problems.items() if names}
        if faults:
            limit = MAX_NAMES_SHOWN // len(faults)
            counts = "; ".join(f"{kind}: {list_names(names, limit)}" for kind, names in faults.items())
            raise ModelError(f"the index and the weight files disagree on tensors: {counts}", where=where, next=_NEXT)

    def _owner_of(self, name: str) -> SafeTensors:
        if name not in self._owner:
            what = f"the folder has {len(self._owner):,} tensors, but none is named {quote(name)}"
            raise ModelError(what, where=escape(self.folder), next="check that the folder contains this kind of model")
        return self._owner[name]

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def save_weights(
    writer: FolderWriter, tensors: Mapping[str, npt.NDArray[Any] | TensorSource], max_shard_bytes: int
) -> list[str]:
    """Write `tensors` as `model.safetensors`, or as numbered shards with an index if they exceed `max_shard_bytes`.

    Shards are filled in the mapping's order; a tensor larger than a shard gets a shard of its own. Weight files of an
    earlier save in the same folder are removed when `writer` commits.

    Returns:
        The names of the files written.

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
    # Write the shards, then the index, and remove files of an earlier save.
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
    """The largest size in bytes of the file `name` in a model folder; None for weights and for unknown files."""
    if name in ("config.json", "adapter_config.json"):
        return MAX_JSON_BYTES
    folder, _, last = name.rpartition("/")
    is_ours = _TERMS.fullmatch(name) or (folder == TEMPLATE_FOLDER and _TEMPLATE.fullmatch(last))
    return SIDE_FILES.get(name, MAX_TEMPLATE_BYTES if is_ours else None)


def side_files(source: str | os.PathLike[str]) -> list[str]:
    """The names of the files in the folder `source` that are copied with a model unchanged: `SIDE_FILES`, license and
    notice files, and additional chat templates. Of the latter two, files that are not plain are left out.
    Raises ModelError if the folder cannot be listed.
    """
    with boundary(ModelError, "listing the model folder", source):
        names = [name for name in SIDE_FILES if exists(Path(source) / name)]
        terms = [name for name in _listed(source, "") if _TERMS.fullmatch(name)]
        listed = _listed(source, TEMPLATE_FOLDER)
    templates = [f"{TEMPLATE_FOLDER}/{name}" for name in listed if _TEMPLATE.fullmatch(name)]
    return names + [name for name in (terms + templates)[:MAX_TEMPLATES] if _is_plain(source, name)]


@boundary(ModelError, "reading the model folder")
def copy_side_files(
    source: str | os.PathLike[str], writer: FolderWriter, names: Iterable[str] | None = None
) -> list[str]:
    """Copy the `names` (by default the side files) that the folder `source` has; return the names of the copies.
    Raises ModelError if a file cannot be read, is not regular or is too large, and DiskError if writing fails.
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
    path = Path(source) / folder
    return [] if folder and path.is_symlink() else list_folder(path)


def _is_plain(source: str | os.PathLike[str], name: str) -> bool:
    with suppress(ModelError, OSError):
        return os.stat(safe_join(source, name)).st_size <= MAX_TEMPLATE_BYTES
    return False


@boundary(ModelError, "reading the chat template")
def read_chat_templates(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The chat templates of a model folder by name: `default`, and others such as `tool_use`; empty if it has none.

    They are stored in `chat_template.jinja` and the folder `additional_chat_templates`, or in `tokenizer_config.json`.

    Raises:
        ModelError: a file is unsafe, too large or not UTF-8, or the entry is not a text or a list with a default.
    """
    if exists(Path(folder) / CHAT_TEMPLATE):
        names = [n for n in _listed(folder, TEMPLATE_FOLDER) if _TEMPLATE.fullmatch(n)][:MAX_TEMPLATES]
        files = {n.removesuffix(".jinja"): f"{TEMPLATE_FOLDER}/{n}" for n in names} | {"default": CHAT_TEMPLATE}
        return {n: read_template(safe_join(folder, file), escape(Path(folder) / file)) for n, file in files.items()}
    name = TOKENIZER_CONFIG
    if not exists(Path(folder) / name):
        return {}
    entry = read_json(safe_join(folder, name)).get("chat_template")
    if entry is None:
        return {}
    named = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    texts: dict[Any, Any] = {t.get("name"): t.get("template") for t in named[:MAX_TEMPLATES] if isinstance(t, dict)}
    if "default" not in texts or not all(map(_is_template, texts.items())):
        what = "chat_template is neither a text nor a list of named texts that includes 'default'"
        raise ModelError(what, where=escape(Path(folder) / name), next=f"put the template into {CHAT_TEMPLATE}")
    return texts


def _is_template(item: tuple[Any, Any]) -> bool:
    name, text = item
    is_name = isinstance(name, str) and _TEMPLATE.fullmatch(f"{name}.jinja")
    return bool(is_name) and isinstance(text, str) and len(text) <= MAX_TEMPLATE_BYTES


def read_template(path: str | os.PathLike[str], where: str) -> str:
    """The text of the chat template in the file `path`. Raises ModelError if it cannot be read or is not UTF-8."""
    try:
        return read_limited(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the chat template is not UTF-8: byte {error.start:,} is invalid"
        raise ModelError(what, where=where, next="save the template as UTF-8") from error


def read_weight_map(path: Path, where: str) -> dict[str, str]:
    """The index's map from tensors to files: at most `MAX_SHARDS` safe names that end in .safetensors."""
    weight_map = parse_object(read_limited(path, MAX_INDEX_BYTES), where=where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index has no weight_map from tensors to files", where=where, next=_NEXT)
    shards: set[str] = set()
    for shard in weight_map.values():
        if isinstance(shard, str) and shard in shards:
            continue
        if not check_name(shard, where=where).endswith(".safetensors"):
            raise ModelError(f"the index names {quote(shard)}, not a safetensors file", where=where, next=_NEXT)
        shards.add(shard)
        if len(shards) > MAX_SHARDS:
            raise ModelError(f"the index names more than {MAX_SHARDS} files", where=where, next=_NEXT)
    return weight_map


# --- The head of a README ---------------------------------------------------------------------------------------------
# YAML between two lines of three dashes, which describes a model or data set.


def read_head(folder: Path) -> Mapping[str, Any]:
    """The values in the head of a folder's README; empty if the head is missing or cannot be read.
    Raises ModelError if the README is a link, is not a regular file or is too large.
    """
    import yaml

    data = read_limited(safe_join(folder, README), _MAX_README) if exists(folder / README) else b""
    text = data.decode("utf-8", "replace")
    begin, _, body = text.removeprefix("\ufeff").replace("\r\n", "\n").partition("---\n")
    head, end, _ = body.partition("\n---\n")
    if begin or not end:
        return {}
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head, loader)):
            return {}  # a few aliases can expand to a million values
        head_values = yaml.load(head, loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return head_values if isinstance(head_values, dict) else {}


def with_head(values: Mapping[str, Any], text: str) -> bytes:
    """A README with these values in its head; values that are None or empty are left out."""
    import yaml

    present = {key: value for key, value in values.items() if value}
    return f"---\n{yaml.safe_dump(present, sort_keys=False, allow_unicode=True)}---\n\n{text}".encode()

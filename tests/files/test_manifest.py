"""The manifest against bit rot: whatever changes in a committed folder, the file is named."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis.errors import ModelError
from genesis.files.atomic import MANIFEST_NAME, AtomicFolder, FileRecord, Manifest, read_manifest, verify_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A committed folder of three files."""
    with AtomicFolder(tmp_path / "checkpoint-7", metadata={"step": 7, "loss": 0.1, "name": "é"}) as folder:
        folder.write("model.safetensors", random.Random(0).randbytes(5000))
        folder.write("trainer_state.json", b'{"step": 7}')
        folder.write("empty", b"")
    return folder.target


def refused(folder: Path, name: str) -> ModelError:
    """The error of verifying, which must name the file."""
    with pytest.raises(ModelError) as caught:
        verify_manifest(folder)
    assert caught.value.exit_code == 5
    assert name in f"{caught.value.what} {caught.value.where}"
    assert caught.value.next
    return caught.value


def test_one_bit_flipped_at_1000_places(folder: Path) -> None:
    rng = random.Random(1)
    sizes = {name: (folder / name).stat().st_size for name in os.listdir(folder)}
    places = [(name, byte, bit) for name, size in sizes.items() for byte in range(size) for bit in range(8)]
    originals = {name: (folder / name).read_bytes() for name in sizes}
    # The small files, the manifest among them, come whole; the large one fills up to 1,000 places and more.
    small = [place for place in places if sizes[place[0]] < 100]
    manifest = rng.sample([place for place in places if place[0] == MANIFEST_NAME], 450)
    large = rng.sample([place for place in places if place[0] == "model.safetensors"], 500)
    chosen = [*small, *manifest, *large]
    assert len(chosen) >= 1000
    for name, byte, bit in chosen:
        damaged = bytearray(originals[name])
        damaged[byte] ^= 1 << bit
        (folder / name).write_bytes(damaged)
        refused(folder, name)
        (folder / name).write_bytes(originals[name])
    verify_manifest(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 4,999 bytes; manifest.json says 5,000"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 5,001 bytes"),
        (lambda path: path.write_bytes(bytes(5000)), "sha256"),
        (lambda path: (path.rename(path.parent.parent / "x"), path.symlink_to("../x")), "is a symbolic link"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
    ],
)
def test_a_changed_file_is_named(folder: Path, change: Callable[[Path], object], message: str) -> None:
    change(folder / "model.safetensors")
    assert message in refused(folder, "model.safetensors").what


def test_an_extra_file_is_named_and_escaped(folder: Path) -> None:
    (folder / "x\x1b[31m").write_text("theirs")
    assert "is not in manifest.json" in refused(folder, "x\\x1b[31m").what


def test_an_uncommitted_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, MANIFEST_NAME)
    refused(tmp_path / "nothing", MANIFEST_NAME)


def rewritten(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["files"].update({"../secret": c["files"]["empty"]}),
        lambda c: c["files"].pop("empty"),
        lambda c: c["files"]["empty"].update(bytes=True),
        lambda c: c["files"]["empty"].update(bytes="0"),
        lambda c: c["files"]["empty"].pop("sha256"),
        lambda c: c.update(files=[]),
        lambda c: c.update(metadata=None),
        lambda c: c["metadata"].update(step=8),
        lambda c: c.update(more=1),
        lambda c: c.update(genesis_manifest=2),
        lambda c: c.pop("manifest_sha256"),
        lambda c: c.clear(),
    ],
)
def test_an_edited_manifest_is_refused(folder: Path, edit: Callable[[dict[str, object]], object]) -> None:
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    assert rewritten(content) == path.read_bytes()
    edit(content)
    path.write_bytes(rewritten(content))
    refused(folder, MANIFEST_NAME)


def test_another_layout_of_the_same_content_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    refused(folder, MANIFEST_NAME)


def test_equal_content_gives_equal_bytes(folder: Path) -> None:
    records = {"b": FileRecord(1, "0" * 64), "a": FileRecord(2, "1" * 64)}
    one = Manifest(records, {"x": 1, "y": 2})
    other = Manifest(dict(reversed(records.items())), {"y": 2, "x": 1})
    assert one.to_bytes() == other.to_bytes()
    assert read_manifest(folder).to_bytes() == (folder / MANIFEST_NAME).read_bytes()

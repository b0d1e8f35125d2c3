"""Hugging Face folders: whole and sharded weights, every disagreement of index and files, side files, templates."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from genesis.errors import DiskError, ModelError
from genesis.files import hf
from genesis.files.atomic import AtomicFolder, FolderUpdate, verify_manifest
from genesis.files.filesystem import FileSystem
from genesis.files.hf import (
    INDEX_NAME,
    SIDE_FILES,
    WEIGHTS_NAME,
    WeightFolder,
    copy_side_files,
    list_names,
    read_chat_templates,
    read_json,
    save_weights,
)
from genesis.files.paths import safe_join
from genesis.files.safetensors import SafeTensors
from tests.files.faults import FailAt, Recorder
from tests.files.test_paths import HOSTILE, SPECIAL, make_special

Arrays = dict[str, npt.NDArray[Any]]
KIB = 1 << 10


def weights() -> Arrays:
    """Six tensors of 1 to 4 KiB, in an order that is not the alphabet's."""
    rng = np.random.default_rng(0)
    sizes = {"model.embed": 4, "model.1.w": 1, "model.0.w": 2, "model.0.b": 1, "model.norm": 1, "lm_head": 4}
    arrays: Arrays = {name: rng.standard_normal((size, 256)).astype(np.float32) for name, size in sizes.items()}
    arrays["model.norm"] = rng.standard_normal(512).astype(ml_dtypes.bfloat16)
    return arrays


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A committed folder of three shards."""
    with AtomicFolder(tmp_path / "model") as folder:
        save_weights(folder, weights(), 5 * KIB)
    return folder.target


def index_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / INDEX_NAME).read_text()))


def put_index(folder: Path, index: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refused(folder: Path, *fragments: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        WeightFolder(folder)
    error = caught.value
    assert error.exit_code == 5
    assert error.next
    assert str(error).isprintable() and len(str(error)) < 2500
    for fragment in fragments:
        assert fragment in error.what, error.what
    return error


class TestSaving:
    """Weights as the ecosystem writes them."""

    def test_one_file(self, tmp_path: Path) -> None:
        with AtomicFolder(tmp_path / "model") as folder:
            assert save_weights(folder, weights(), 13 * KIB) == [WEIGHTS_NAME]
        assert set(verify_manifest(folder.target).files) == {WEIGHTS_NAME}
        found = safetensors.numpy.load_file(folder.target / WEIGHTS_NAME)
        assert {name: array.tobytes() for name, array in found.items()} == {
            n: a.tobytes() for n, a in weights().items()
        }

    def test_shards_and_index(self, sharded: Path) -> None:
        files = [f"model-0000{i}-of-00003.safetensors" for i in range(1, 4)]
        assert sorted(os.listdir(sharded)) == sorted([*files, INDEX_NAME, "manifest.json"])
        index = index_of(sharded)
        assert index["metadata"] == {"total_size": 13 * KIB}
        # Filled in the mapping's order up to the limit.
        assert index["weight_map"] == {
            "model.embed": files[0],
            "model.1.w": files[0],
            "model.0.w": files[1],
            "model.0.b": files[1],
            "model.norm": files[1],
            "lm_head": files[2],
        }
        assert list(index["weight_map"]) == sorted(index["weight_map"])
        for name, array in weights().items():
            found = safetensors.numpy.load_file(sharded / index["weight_map"][name])
            assert found[name].tobytes() == array.tobytes()
        verify_manifest(sharded)

    def test_limits_of_a_shard(self, tmp_path: Path) -> None:
        def shards(limit: int) -> list[list[str]]:
            with AtomicFolder(tmp_path / str(limit)) as folder:
                save_weights(folder, weights(), limit)
            weight_map = index_of(folder.target)["weight_map"]
            return [sorted(n for n, f in weight_map.items() if f == file) for file in sorted(set(weight_map.values()))]

        assert len(shards(1)) == 6
        assert shards(4 * KIB) == [
            ["model.embed"],
            ["model.0.b", "model.0.w", "model.1.w"],
            ["model.norm"],
            ["lm_head"],
        ]
        assert shards(13 * KIB - 1)[-1] == ["lm_head"]

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        with AtomicFolder(tmp_path / "model") as folder:
            assert save_weights(folder, {}, 1) == [WEIGHTS_NAME]
        with WeightFolder(folder.target) as found:
            assert found.names == ()

    def test_an_earlier_save_in_the_same_folder_goes(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.gguf").write_text("theirs")
        for limit in (5 * KIB, 100 * KIB, 1, 13 * KIB):
            with FolderUpdate(tmp_path) as update:
                names = save_weights(update, weights(), limit)
            assert sorted(os.listdir(tmp_path)) == sorted(["config.json", "model.gguf", *names])
            with WeightFolder(tmp_path) as found:
                assert found.names == tuple(sorted(weights()))

    def test_every_call_failing_in_turn_keeps_the_older_model(self, tmp_path: Path, sharded: Path) -> None:
        recorder = Recorder()
        with AtomicFolder(tmp_path / "probe", fs=FileSystem(recorder)) as folder:
            save_weights(folder, weights(), 5 * KIB)
        before = {path.name: path.read_bytes() for path in sharded.iterdir()}
        for n in range(1, len(recorder.calls) + 1):
            with (
                pytest.raises(DiskError),
                AtomicFolder(tmp_path / f"new-{n}", fs=FileSystem(FailAt(n))) as folder,
            ):
                save_weights(folder, weights(), 5 * KIB)
            assert {path.name: path.read_bytes() for path in sharded.iterdir()} == before
            assert (tmp_path / f"new-{n}").exists() == (n == len(recorder.calls))


class TestLoading:
    """Whole and sharded weights, read one tensor at a time."""

    @pytest.mark.parametrize("limit", [1, 5 * KIB, 100 * KIB])
    def test_tensors_come_back(self, tmp_path: Path, limit: int) -> None:
        arrays = weights()
        with AtomicFolder(tmp_path / "model") as folder:
            save_weights(folder, arrays, limit)
        with WeightFolder(folder.target) as found:
            assert found.names == tuple(sorted(arrays))
            assert sum(found.entry(name).nbytes for name in found.names) == 13 * KIB
            assert len(found.files) == {1: 6, 5 * KIB: 3, 100 * KIB: 1}[limit]
            for name, array in arrays.items():
                assert (found.entry(name).dtype, found.entry(name).shape) == (array.dtype, array.shape)
                assert found.read(name).tobytes() == array.tobytes()
                buffer = np.zeros_like(array)
                found.read_into(name, buffer)
                assert buffer.tobytes() == array.tobytes()
            with SafeTensors(folder.target / found.files[0]) as file:
                assert file.metadata == {"format": "pt"}
            with pytest.raises(ModelError, match="6 tensors, but none is named 'x'"):
                found.read("x")

    def test_shards_of_the_library(self, tmp_path: Path) -> None:
        arrays = weights()
        names = list(arrays)
        for i, part in enumerate((names[:2], names[2:])):
            safetensors.numpy.save_file(
                {n: arrays[n] for n in part}, tmp_path / f"model-0000{i + 1}-of-00002.safetensors"
            )
        weight_map = {n: f"model-0000{1 + (n in names[2:])}-of-00002.safetensors" for n in names}
        put_index(tmp_path, {"metadata": {"total_size": 1.0}, "weight_map": weight_map, "more": None})
        with WeightFolder(tmp_path) as found:
            assert {name: found.read(name).tobytes() for name in found.names} == {
                n: a.tobytes() for n, a in arrays.items()
            }

    def test_shards_in_the_hub_cache(self, tmp_path: Path, sharded: Path) -> None:
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        for i, path in enumerate(sorted(sharded.iterdir())):
            path.rename(repository / "blobs" / f"{i:064x}")
            (snapshot / path.name).symlink_to(f"../../blobs/{i:064x}")
        with WeightFolder(snapshot) as found:
            assert found.names == tuple(sorted(weights()))

    def test_peak_memory_is_about_one_tensor(self, tmp_path: Path) -> None:
        arrays = {f"layer.{i}": np.full((512, 512), i, np.float32) for i in range(16)}
        with AtomicFolder(tmp_path / "model") as folder:
            save_weights(folder, arrays, 4 << 20)
        with WeightFolder(folder.target) as found:
            assert len(found.files) == 4
            tracemalloc.start()
            for name in found.names:
                assert found.read(name)[0, 0] == int(name.split(".")[1])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < (1 << 20) * 1.25

    def test_descriptors_are_closed_also_after_a_refusal(self, sharded: Path) -> None:
        before = len(os.listdir("/dev/fd"))
        with WeightFolder(sharded) as found:
            assert len(os.listdir("/dev/fd")) == before + len(found.files)
        assert len(os.listdir("/dev/fd")) == before
        (sharded / "model-00003-of-00003.safetensors").unlink()
        refused(sharded, "'model-00003-of-00003.safetensors' is missing")
        assert len(os.listdir("/dev/fd")) == before


class TestHostileFolders:
    """Whatever index and files disagree on is refused whole, with counts and at most ten names."""

    def test_no_weights_or_both_kinds(self, tmp_path: Path, sharded: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_text("x")
        refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")
        refused(tmp_path / "nothing", "neither")
        (sharded / WEIGHTS_NAME).write_bytes(b"")
        refused(sharded, "both model.safetensors and model.safetensors.index.json")

    @pytest.mark.parametrize(
        "name", [n for n in HOSTILE if isinstance(n, str | int | None)], ids=lambda n: ascii(n)[:40]
    )
    def test_unsafe_names_in_the_index(self, sharded: Path, name: object) -> None:
        (sharded.parent / "secret").write_text("secret")
        index = index_of(sharded)
        index["weight_map"]["lm_head"] = name
        put_index(sharded, index)
        # Half surrogate pairs end the reading of the index before its names are looked at.
        assert refused(sharded).what.startswith("the JSON contains" if "\ud800" in str(name) else "the file name")

    @pytest.mark.parametrize("kind", SPECIAL)
    def test_special_files_in_the_index(self, sharded: Path, kind: str) -> None:
        make_special(sharded, kind)
        (sharded / "x").rename(sharded / "x.safetensors")
        index = index_of(sharded)
        index["weight_map"]["lm_head"] = "x.safetensors"
        put_index(sharded, index)
        refused(sharded, "'x.safetensors' is a")

    def test_the_index_or_the_single_file_as_a_link(self, tmp_path: Path, sharded: Path) -> None:
        for name in (INDEX_NAME, WEIGHTS_NAME):
            folder = tmp_path / f"linked-{name}"
            folder.mkdir()
            (folder / name).symlink_to(sharded / "model-00001-of-00003.safetensors")
            refused(folder, f"'{name}' is a symbolic link")

    @pytest.mark.parametrize(
        "index",
        [
            {},
            {"weight_map": None},
            {"weight_map": {}},
            {"weight_map": []},
            {"weight_map": {"a": "model.bin"}},
            {"weight_map": {"a": INDEX_NAME}},
            {"weight_map": {f"{i}": f"{i}.safetensors" for i in range(513)}},
            [],
        ],
        ids=range(8),
    )
    def test_an_index_of_another_form(self, sharded: Path, index: object) -> None:
        put_index(sharded, index)
        assert str(sharded / INDEX_NAME) in refused(sharded).where

    def test_an_index_of_many_tensors_is_checked_file_by_file(
        self, sharded: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: list[object] = []
        real = hf.check_name
        monkeypatch.setattr(hf, "check_name", lambda name, **where: checked.append(name) or real(name, **where))
        for files, count in ((2, 2), (2000, 513)):
            put_index(sharded, {"weight_map": {f"{i}": f"{i % files}.safetensors" for i in range(5000)}})
            checked.clear()
            refused(sharded)
            assert len([name for name in checked if name != INDEX_NAME]) == count

    def test_an_index_with_duplicates_or_too_large(self, sharded: Path) -> None:
        text = (
            (sharded / INDEX_NAME).read_text().replace('"weight_map": {', '"weight_map": {"lm_head": "x.safetensors",')
        )
        (sharded / INDEX_NAME).write_text(text)
        refused(sharded, "'lm_head' appears twice")
        os.truncate(sharded / INDEX_NAME, 1 << 40)
        refused(sharded, "more than the 67,108,864 allowed")

    def test_each_tensor_dropped_from_the_index_in_turn(self, sharded: Path) -> None:
        original = index_of(sharded)
        for name in weights():
            index = json.loads(json.dumps(original))
            shard = index["weight_map"].pop(name)
            alone = shard not in index["weight_map"].values()
            put_index(sharded, index)
            if alone:
                # Its whole file is unknown then: a file that no name leads to is not read, and the tensor not there.
                with WeightFolder(sharded) as found:
                    assert name not in found.names
            else:
                refused(sharded, f"extra: 1 ('{name}')")

    def test_each_tensor_dropped_from_its_file_in_turn(self, sharded: Path) -> None:
        weight_map = index_of(sharded)["weight_map"]
        for name, shard in weight_map.items():
            content = (sharded / shard).read_bytes()
            kept = {n: a for n, a in safetensors.numpy.load_file(sharded / shard).items() if n != name}
            safetensors.numpy.save_file(kept, sharded / shard)
            refused(sharded, f"missing: 1 ('{name}')")
            (sharded / shard).write_bytes(content)
        WeightFolder(sharded).close()

    def test_a_tensor_in_another_file_than_the_index_says(self, sharded: Path) -> None:
        index = index_of(sharded)
        other = next(file for file in index["weight_map"].values() if file != index["weight_map"]["model.0.w"])
        index["weight_map"]["model.0.w"] = other
        put_index(sharded, index)
        refused(sharded, "missing: 1 ('model.0.w')")

    def test_a_tensor_in_two_files(self, sharded: Path) -> None:
        weight_map = index_of(sharded)["weight_map"]
        shard = next(file for file in weight_map.values() if file != weight_map["lm_head"])
        arrays = safetensors.numpy.load_file(sharded / shard)
        safetensors.numpy.save_file(arrays | {"lm_head": np.zeros(1)}, sharded / shard)
        refused(sharded, "in two files: 1 ('lm_head')")

    def test_at_most_ten_names_and_the_counts(self, tmp_path: Path) -> None:
        many = {f"t{i:03}\x1b"[:4]: np.zeros(1, np.float32) for i in range(300)}
        safetensors.numpy.save_file(many, tmp_path / "a.safetensors")
        put_index(tmp_path, {"weight_map": {f"x\x1b{i:03}": "a.safetensors" for i in range(200)}})
        error = refused(tmp_path, "missing: 200 ('x\\x1b000', ", "extra: 300 ('t000', ", ", …)")
        assert error.what.count("'") == 20
        put_index(tmp_path, {"weight_map": dict.fromkeys([*many, "y"], "a.safetensors")})
        refused(tmp_path, "missing: 1 ('y')")

    def test_a_damaged_shard_is_named(self, sharded: Path) -> None:
        path = sharded / "model-00002-of-00003.safetensors"
        path.write_bytes(path.read_bytes() + b"x")
        assert path.name in refused(sharded, "1 bytes follow").where


class TestSideFiles:
    """Tokenizer and generation files go along byte for byte."""

    def test_all_are_copied_byte_for_byte(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        contents = {name: f"{name}\r\n\0\xff".encode("latin-1") * 1000 for name in SIDE_FILES}
        for name, data in (contents | {"config.json": b"{}", "modeling.py": b"import os"}).items():
            (source / name).write_bytes(data)
        with AtomicFolder(tmp_path / "out") as folder:
            assert copy_side_files(source, folder) == list(SIDE_FILES)
        assert {n: (tmp_path / "out" / n).read_bytes() for n in SIDE_FILES} == contents
        assert set(verify_manifest(tmp_path / "out").files) == set(SIDE_FILES)

    def test_what_is_not_there_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        with AtomicFolder(tmp_path / "out") as folder:
            assert copy_side_files(tmp_path, folder, ["vocab.json", "tokenizer.json"]) == ["vocab.json"]

    @pytest.mark.parametrize("kind", ["link outside", "link to a device", "folder", "FIFO"])
    def test_special_files_are_refused(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "source").mkdir()
        (tmp_path / "secret").write_text("secret")
        make_special(tmp_path / "source", kind)
        (tmp_path / "source" / "x").rename(tmp_path / "source" / "tokenizer.json")
        with pytest.raises(ModelError, match=r"'tokenizer\.json' is a"), AtomicFolder(tmp_path / "out") as folder:
            copy_side_files(tmp_path / "source", folder)
        assert not (tmp_path / "out").exists()

    def test_files_too_large_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "merges.txt").write_text("")
        os.truncate(tmp_path / "merges.txt", (64 << 20) + 1)
        with (
            pytest.raises(ModelError, match=r"'merges\.txt' has 67,108,865 bytes"),
            AtomicFolder(tmp_path / "o") as folder,
        ):
            copy_side_files(tmp_path, folder)

    def test_a_full_disk_is_a_disk_error(self, tmp_path: Path) -> None:
        (tmp_path / "merges.txt").write_text("a b")
        full = FileSystem(FailAt(7))
        with pytest.raises(DiskError, match="needed 3 bytes"), AtomicFolder(tmp_path / "out", fs=full) as folder:
            copy_side_files(tmp_path, folder)


class TestChatTemplate:
    """The two files of a template."""

    TEXT = "{% for m in messages %}{{ m.content }}é\n{% endfor %}"

    def put(self, folder: Path, entry: object) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))

    def test_none(self, tmp_path: Path) -> None:
        assert read_chat_templates(tmp_path) == {}
        (tmp_path / "tokenizer_config.json").write_text("{}")
        assert read_chat_templates(tmp_path) == {}
        self.put(tmp_path, None)
        assert read_chat_templates(tmp_path) == {}

    def test_each_home_and_the_file_first(self, tmp_path: Path) -> None:
        self.put(tmp_path, self.TEXT)
        assert read_chat_templates(tmp_path) == {"default": self.TEXT}
        self.put(tmp_path, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": self.TEXT}])
        assert read_chat_templates(tmp_path) == {"tool_use": "t", "default": self.TEXT}
        (tmp_path / "chat_template.jinja").write_bytes(self.TEXT.encode() + b"\r\n")
        assert read_chat_templates(tmp_path) == {"default": self.TEXT + "\r\n"}
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("u")
        (tmp_path / "additional_chat_templates" / "no template").write_text("x")
        assert read_chat_templates(tmp_path) == {"tool_use": "u", "default": self.TEXT + "\r\n"}

    @pytest.mark.parametrize(
        "entry", [1, True, {"default": "x"}, [], [{"name": "rag", "template": "x"}], ["x"], "x" * (2 << 20)]
    )
    def test_other_entries_are_refused(self, tmp_path: Path, entry: object) -> None:
        self.put(tmp_path, entry)
        with pytest.raises(ModelError, match="chat_template is"):
            read_chat_templates(tmp_path)

    def test_hostile_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "chat_template.jinja"
        path.write_bytes(b"ab\xff")
        with pytest.raises(ModelError, match="not UTF-8: byte 2"):
            read_chat_templates(tmp_path)
        os.truncate(path, 2 << 20)
        with pytest.raises(ModelError, match="more than the 1,048,576 allowed"):
            read_chat_templates(tmp_path)
        path.unlink()
        path.symlink_to("/etc/hostname")
        with pytest.raises(ModelError, match="symbolic link"):
            read_chat_templates(tmp_path)


def test_read_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 1e6}')
    assert read_json(safe_join(tmp_path, "config.json")) == {"rope_theta": 1e6}
    with pytest.raises(ModelError, match="more than the 4 allowed"):
        read_json(tmp_path / "config.json", limit=4)


@pytest.mark.parametrize(
    "count, text", [(0, "0 ()"), (1, "1 ('t0')"), (10, "'t9')"), (11, ", …)"), (5000, "5,000 ('t0', 't1', ")]
)
def test_list_names(count: int, text: str) -> None:
    listed = list_names(f"t{i}" for i in range(count))
    assert text in listed
    assert listed.count("'") == 2 * min(count, 10)


@pytest.mark.parametrize("shard", [["a.safetensors"], {}, 7, None, "a.bin", "../a.safetensors", ""])
def test_an_index_whose_files_are_no_names(shard: object, tmp_path: Path) -> None:
    from genesis.files.hf import read_weight_map

    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"x": "good.safetensors", "y": shard}}))
    with pytest.raises(ModelError):
        read_weight_map(path, "here")

"""`genesis pull --data`, and sources `hf:ORG/NAME`: the files of a configuration and a split, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis.data.corpus import Corpus
from genesis.data.sources import expand, hub_files
from genesis.errors import DataError
from genesis.files.hub import HubName, cache_folder, in_cache
from genesis.train.config import WeightedSource
from tests.cli.command import printed
from tests.hub import COMMIT, Hub, served, used

NAME = "org/set"
CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: ["data/test.jsonl", "data/more/**"]
- config_name: extra
  data_dir: extra
---
# About it
"""


def filled(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def row(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


FILES = {
    "README.md": CARD,
    "LICENSE": "free",
    "load.py": "raise SystemExit",
    "data/train-00000-of-00002.jsonl": row("one"),
    "data/train-00001-of-00002.jsonl": row("two"),
    "data/test.jsonl": row("three"),
    "data/more/deep/part.jsonl": row("four"),
    "data/picture.png": "no text",
    "extra/dev.jsonl": json.dumps({"body": "five"}) + "\n",
    "extra/dataset_info.json": "{}",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with served({f"datasets/{NAME}": filled(tmp_path / "upstream", FILES)}) as found:
        used(found, tmp_path / "cache", monkeypatch)
        yield found


def pulled(name: str = NAME) -> str:
    code, out, told = printed("pull", "--data", name)
    assert code == 0, told
    return out


def texts(*sources: Any) -> list[str]:
    return [each.text for each in Corpus(sources, on_error="fail", max_line_bytes=1 << 20).documents()]


def test_files_of_data_come_and_splits_are_those_of_the_readme(hub: Hub) -> None:
    assert "hf:org/set" in pulled()
    snapshot = cache_folder() / "datasets--org--set" / "snapshots" / COMMIT
    assert in_cache(HubName(NAME, is_data=True)) == snapshot
    there = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}
    assert there == {name for name in FILES if name.endswith(".jsonl") or name == "README.md"}
    assert texts("hf:org/set") == ["one", "two"]
    assert texts("hf:org/set:test", f"hf:org/set@{COMMIT}:train") == ["four", "three", "one", "two"]
    assert [file.name for file in expand(["hf:org/set:test"])][1] == "hf:org/set/data/test.jsonl"
    body = WeightedSource.model_validate(
        {"path": "hf:org/set", "config": "extra", "split": "validation", "fields": {"text": "body"}, "weight": 2.0}
    )
    assert texts("hf:org/set", body) == ["one", "two", "five"]
    corpus = Corpus([body], on_error="fail", max_line_bytes=99)
    assert corpus.weights == {"hf:org/set/extra/dev.jsonl": 2.0}
    hub.asked.clear()
    pulled()
    assert len(hub.asked) == 1, "the list of files"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("hf:org/set:dev", ["split", "'train', 'test'"]),
        ("hf:org/set/none", ["config", "'main', 'extra'"]),
        ("hf:org/set/extra", ["split", "'validation'"]),
        ("hf:org/other", ["genesis pull --data org/other"]),
        ("hf:org/set@v2", ["genesis pull --data org/set@v2", f"org/set@{COMMIT}"]),
        ("hf:set", ["hf:ORG/NAME"]),
        ("hf:../x", ["hf:ORG/NAME"]),
    ],
)
def test_what_a_data_set_does_not_have_is_named_with_what_it_has(hub: Hub, source: str, named: list[str]) -> None:
    pulled()
    hub.asked.clear()
    with pytest.raises(DataError) as caught:
        expand([source])
    said = f"{caught.value.where} {caught.value.what} {caught.value.next}"
    assert not [each for each in named if each not in said], said
    assert not hub.asked, "nothing is downloaded unasked"


def test_settings_that_do_not_fit_are_refused_with_their_key(hub: Hub, tmp_path: Path) -> None:
    pulled()
    start = "model: {preset: qwen3-0.6B}\ntrain: {steps: 1, output_dir: out}\ndata: {train: "
    for item, code, key in (
        ("[{path: a.txt, split: test}]", 3, "data.train has split"),
        ("[{path: hf:org/set:test, split: test}]", 3, "data.train has split"),
        ("[{path: 'hf:org/set/main', config: main}]", 3, "data.train has config"),
        ("[{path: hf:org/set, split: nowhere}]", 4, "split of 'hf:org/set'"),
        ("[{path: hf:org/set, fields: {text: words}}]", 4, "words"),
        ("[{path: hf:org/set, columns: {}}]", 3, "columns"),
    ):
        (tmp_path / "c.yaml").write_text(f"{start}{item}}}\n")
        found, _, told = printed("train", tmp_path / "c.yaml")
        assert (found, key in told) == (code, True), told


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["data/train-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet", "x/val.csv"],
         {"train": ["data/train-00000-of-00001.parquet"], "test_sft": ["data/test_sft-00000-of-00001.parquet"]}),
        (["train.jsonl", "my-validation.jsonl", "eval.jsonl", "notes.jsonl"],
         {"train": ["train.jsonl"], "validation": ["my-validation.jsonl"], "test": ["eval.jsonl"]}),
        (["dev/train-like.csv", "dev/b.csv", "Test/c.csv"],
         {"train": ["dev/train-like.csv"], "validation": ["dev/b.csv"], "test": ["Test/c.csv"]}),
        (["a.jsonl", "b.jsonl", "c.csv"], {"train": ["a.jsonl", "b.jsonl"]}),
        (["trainer.jsonl", "contest.jsonl"], {"train": ["contest.jsonl", "trainer.jsonl"]}),
        (["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
         {"train": ["main/train-00000-of-00001.parquet"], "test": ["main/test-00000-of-00001.parquet"]}),
        (["train.jsonl.gz", "train.txt", "train.ndjson", "train.json"], {"train": ["train.jsonl.gz", "train.ndjson"]}),
    ],
)  # fmt: skip
def test_splits_by_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], splits: Any) -> None:
    cached(tmp_path, monkeypatch, dict.fromkeys(names, "x"))
    for split, files in splits.items():
        assert [name for name, _ in hub_files("hf:org/set", split=split)] == [f"hf:org/set/{name}" for name in files]
    with pytest.raises(DataError, match="no split 'nowhere'") as caught:
        hub_files("hf:org/set:nowhere")
    assert all(f"'{split}'" in caught.value.what for split in splits)


@pytest.mark.parametrize(
    ("head", "chosen"),
    [
        ("configs:\n- {config_name: default, data_files: '*.jsonl'}", ["a.jsonl", "b.jsonl"]),
        ("configs:\n- {config_name: x, data_files: ['b.*', a.jsonl]}", ["a.jsonl", "b.jsonl"]),
        ("configs:\n- {data_files: {train: b.jsonl, test: a.jsonl}}", ["b.jsonl"]),
        ("configs:\n- {config_name: x, data_dir: sub}", ["sub/c.jsonl"]),
        ("configs:\n- {config_name: x, data_dir: ./sub/, data_files: '**'}", ["sub/c.jsonl", "sub/d/e.jsonl"]),
        ("configs: 7", ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
        ("a: &a [1]\nb: *a", ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
        ("x: [", ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
        ("[" * 5000, ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
    ],
)
def test_heads_of_readmes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, chosen: list[str]) -> None:
    names = ["a.jsonl", "b.jsonl", "sub/c.jsonl"] + (["sub/d/e.jsonl"] if "**" in head else [])
    cached(tmp_path, monkeypatch, {**dict.fromkeys(names, "x"), "README.md": f"---\n{head}\n---\n"})
    assert [name.removeprefix("hf:org/set/") for name, _ in hub_files("hf:org/set")] == chosen


def cached(cache: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    """The cache after a pull of these files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    root = cache / "datasets--org--set"
    filled(root, {"refs/main": COMMIT, f".genesis/{COMMIT}": "".join(f"{name}\n" for name in files)})
    return filled(root / "snapshots" / COMMIT, files)


def test_a_pull_that_ended_early_and_links_out_of_the_cache_are_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path, monkeypatch, {"train.jsonl": row("x"), "README.md": "about"})
    assert texts("hf:org/set") == ["x"]
    (snapshot / "train.jsonl").unlink()
    with pytest.raises(DataError, match="not on this machine"):
        expand(["hf:org/set"])
    (tmp_path / "secret.jsonl").write_text(row("secret"))
    (snapshot / "train.jsonl").symlink_to(tmp_path / "secret.jsonl")
    code, _, told = printed("data", "preview", "hf:org/set", "--model", tmp_path)
    assert code != 0 and "secret" not in told
    with pytest.raises(Exception, match="symbolic link"):
        expand(["hf:org/set"])
    os.unlink(tmp_path / "datasets--org--set" / ".genesis" / COMMIT)
    with pytest.raises(DataError, match="not on this machine"):
        expand(["hf:org/set"])


def test_other_files_of_any_name_and_number_do_not_matter(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Hub.listing

    def longer(self: Hub, name: str) -> dict[str, Any]:
        found = listing(self, name)
        return {**found, "siblings": [*found["siblings"], *[{"rfilename": f"../{n}: .png"} for n in range(10_001)]]}

    monkeypatch.setattr(Hub, "listing", longer)
    pulled()
    assert texts("hf:org/set") == ["one", "two"]


def test_a_data_set_without_data(hub: Hub, tmp_path: Path) -> None:
    hub.models["datasets/org/empty"] = filled(tmp_path / "empty", {"README.md": "x", "a.png": "x", "load.py": "x"})
    code, _, told = printed("pull", "--data", "org/empty")
    assert code == 4 and "refs/convert/parquet" in told
    code, _, told = printed("pull", "--data", "org/none")
    assert code == 5 and "no data set org/none" in told
    assert printed("pull", "--data", "x")[0] == 2

"""`genesis pull` against a hub on loopback: whole, cut off, wrong, refused; and names on the hub for folders."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genesis.files.hub
import genesis_models
from genesis.errors import ModelError
from genesis.files import filesystem
from genesis.files.hub import TRIES, HubName, cache_folder, hub_name, in_cache, local_path
from tests.cli.command import printed
from tests.hub import COMMIT, Hub, served, used
from tests.models.golden import golden

NAME = "org/tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    model = tmp_path / "upstream"
    shutil.copytree(golden("qwen3-tied").folder, model)
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    (model / "README.md").write_text("about it")
    (model / "LICENSE").write_text("free")
    (model / "modeling_evil.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with served({NAME: model}) as found:
        used(found, tmp_path / "cache", monkeypatch)
        yield found


def pulled(name: str = NAME) -> str:
    code, out, told = printed("pull", name)
    assert code == 0, told
    return out


def refused(code: int, name: str = NAME) -> str:
    found, _, told = printed("pull", name)
    assert found == code, told
    return told


def snapshot() -> Path:
    return cache_folder() / "models--org--tiny" / "snapshots" / COMMIT


def requests(hub: Hub, file: str) -> list[str | None]:
    return [span for path, span, _ in hub.asked if path.endswith(f"/{file}")]


def test_a_model_comes_whole_without_pickles_and_code(hub: Hub) -> None:
    out = pulled()
    names = sorted(os.listdir(snapshot()))
    assert {WEIGHTS, "config.json", "LICENSE"} <= set(names)
    assert not {"pytorch_model.bin", "README.md", "modeling_evil.py"} & set(names)
    for name in names:
        assert (snapshot() / name).read_bytes() == hub.bytes_of(NAME, name)
    assert "pytorch_model.bin" in out and str(snapshot()) in out
    asked = [path for path, _, _ in hub.asked]
    assert asked[0] == f"/api/models/{NAME}/revision/main", "nothing else is asked of the hub"
    assert all(path.startswith(f"/{NAME}/resolve/{COMMIT}/") for path in asked[1:])
    assert in_cache(HubName(NAME)) == snapshot()
    model = genesis_models.load(NAME)
    assert len(list(model.parameters())) > 0


def test_a_second_pull_fetches_nothing_and_repairs_what_the_disk_changed(hub: Hub) -> None:
    pulled()
    hub.asked.clear()
    assert "all files were present" in pulled()
    assert len(hub.asked) == 1  # the list of files
    blob = (snapshot() / WEIGHTS).resolve()
    blob.write_bytes(b"\0" + blob.read_bytes()[1:])
    pulled()
    assert blob.read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_a_cut_is_gone_over_within_a_pull(hub: Hub) -> None:
    hub.cuts[WEIGHTS] = [1000, 500, 0, 0]
    pulled()
    assert requests(hub, WEIGHTS) == [None, "bytes=1000-", *["bytes=1500-"] * 3]


def test_cuts_count_from_the_last_one_after_which_bytes_came(hub: Hub) -> None:
    """Five in a row without a byte end a pull, however many with some bytes came before them."""
    hub.cuts[WEIGHTS] = [1000] * 7 + [0, 0, 0, 1000, 0, 0, 0]
    pulled()
    starts = [f"bytes={1000 * n}-" for n in range(1, 7)]
    assert requests(hub, WEIGHTS) == [None, *starts, *["bytes=7000-"] * 4, *["bytes=8000-"] * 4]
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_a_pull_goes_on_where_an_earlier_one_ended(hub: Hub) -> None:
    hub.cuts[WEIGHTS] = [1000, 0, 0, 0, 0, 0]
    told = refused(6)
    assert "bytes have arrived" in told and "run the command again" in told
    assert in_cache(HubName(NAME)) is None, "what is there in part is no model"
    hub.asked.clear()
    hub.cuts.clear()
    pulled()
    assert requests(hub, WEIGHTS) == ["bytes=1000-"]
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_a_hub_that_knows_no_ranges_sends_all_again(hub: Hub) -> None:
    hub.cuts[WEIGHTS], hub.ranges = [1000], False
    pulled()
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_hash_leaves_nothing(hub: Hub, name: str) -> None:
    hub.changed.add(name)
    assert f"'{name}' does not have the hash" in refused(5)
    assert in_cache(HubName(NAME)) is None
    assert not list((cache_folder() / "models--org--tiny").rglob("*.incomplete"))
    hub.changed.clear()
    pulled()


def test_a_wrong_beginning_is_fetched_again(hub: Hub) -> None:
    hub.cuts[WEIGHTS] = [1000, 0, 0, 0, 0, 0]
    refused(6)
    (part,) = (cache_folder() / "models--org--tiny").rglob("*.incomplete")
    part.write_bytes(bytes(1000))
    hub.cuts.clear()
    pulled()
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "GatedRepo", "is gated"),
        (403, "GatedRepo", "no access to org/tiny"),
        (403, "", "no access to org/tiny"),
        (401, "RepoNotFound", "has no model org/tiny, or it is private"),
    ],
)
@pytest.mark.parametrize("path", [f"/api/models/{NAME}/revision/main", f"/{NAME}/resolve/{COMMIT}/config.json"])
def test_what_needs_a_token_says_so(hub: Hub, path: str, status: int, code: str, said: str) -> None:
    hub.refusals[path] = status, code
    told = refused(5)
    assert said in told and "hf auth login" in told


def test_a_token_is_sent_and_nowhere_else(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    hub.refusals[f"/{NAME}/resolve/{COMMIT}/{WEIGHTS}"] = 403, "GatedRepo"
    code, out, told = printed("--debug", "pull", NAME)
    assert code == 5 and "canary" not in out + told
    hub.refusals.clear()
    assert "canary" not in pulled()
    assert {token for _, _, token in hub.asked} == {"Bearer hf_canary"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"canary" in path.read_bytes()]


def test_a_token_does_not_follow_to_another_host(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    with served(hub.models) as storage:
        hub.elsewhere = storage.endpoint
        hub.cuts[WEIGHTS] = []
        storage.cuts[WEIGHTS] = [1000]
        pulled()
    path = f"/{NAME}/resolve/{COMMIT}/{WEIGHTS}"
    assert storage.asked == [(path, None, None), (path, "bytes=1000-", None)]
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_revisions(hub: Hub) -> None:
    assert "has no revision 'v9'" in refused(5, f"{NAME}@v9")
    pulled(f"{NAME}@v1.0")
    assert local_path(f"{NAME}@v1.0") == local_path(f"{NAME}@{COMMIT}") == str(snapshot())
    with pytest.raises(ModelError, match=f"genesis pull {NAME}; the cache has {NAME}@v1.0"):
        genesis_models.load(NAME)  # main was not asked for


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    told = refused(6)
    assert "the hub cannot be reached" in told and "check the network" in told
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(6)


@pytest.mark.parametrize("status", [500, 503, 429, 418])
def test_a_hub_that_does_not_answer_as_one(hub: Hub, status: int) -> None:
    hub.refusals[f"/api/models/{NAME}/revision/main"] = status, ""
    assert f"status {status}" in refused(6)


def test_a_list_that_is_none(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for listing in ({"sha": "short", "siblings": []}, {"sha": COMMIT}, {"sha": COMMIT, "siblings": [{}]}, {}):
        monkeypatch.setattr(Hub, "listing", lambda *_, listing=listing: listing)
        assert "does not answer like a hub" in refused(6)
    outside = {"rfilename": "../../x", "size": 1, "blobId": "a" * 40}
    monkeypatch.setattr(Hub, "listing", lambda *_: {"sha": COMMIT, "siblings": [outside]})
    assert "does not answer like a hub" in refused(6)


def test_a_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_free_bytes", lambda path: 10)
    told = refused(8)
    assert "needed" in told and "free 10 bytes" in told
    monkeypatch.undo()


def test_a_disk_that_fills_on_the_way(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = os.write, []

    def failing(descriptor: int, data: bytes) -> int:
        if len(data) > 3000 and not full:
            full.append(True)
            write(descriptor, data[:3000])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        assert "No space left on device" in refused(8)
    assert full and in_cache(HubName(NAME)) is None
    pulled()
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_models_that_cannot_be_trained_are_refused_before_their_weights_come(hub: Hub) -> None:
    config = hub.models[NAME] / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"mamba"'))
    assert "mamba" in refused(5)
    assert not requests(hub, WEIGHTS)
    (hub.models[NAME] / WEIGHTS).unlink()
    assert "only pickles ('pytorch_model.bin')" in refused(5)
    config.unlink()
    assert "has no config.json" in refused(5)


def test_shards_are_those_of_the_index(hub: Hub, tmp_path: Path) -> None:
    from genesis_models import folder

    model, sharded = genesis_models.load(hub.models[NAME]), tmp_path / "sharded"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "MAX_SHARD_BYTES", 20_000)
        genesis_models.save(model, sharded)
    (sharded / "consolidated.safetensors").write_bytes(b"the same again")
    hub.models[NAME] = sharded
    pulled()
    assert "consolidated.safetensors" not in os.listdir(snapshot())
    assert genesis_models.load(NAME).state_dict().keys() == model.state_dict().keys()


def cut_short(data: bytes, start: int) -> tuple[int, dict[str, str], bytes]:
    """All of the file, whatever was asked for, and 5 bytes short."""
    return 200, {"Content-Length": str(len(data))}, data[:-5]


def shifted(data: bytes, start: int) -> tuple[int, dict[str, str], bytes]:
    return 206, {"Content-Range": f"bytes {start + 1}-{len(data) - 1}/{len(data)}"}, data[start + 1 :]


def test_a_body_that_is_always_cut_short_ends_the_pull(hub: Hub) -> None:
    hub.odd[WEIGHTS] = cut_short
    size = len(hub.bytes_of(NAME, WEIGHTS))
    code, out, told = printed("pull", NAME)
    assert code == 6 and f"'{WEIGHTS}'" in told
    assert f"{size - 5:,} of {size:,} bytes" in told
    (part,) = (cache_folder() / "models--org--tiny").rglob("*.incomplete")
    assert part.stat().st_size == size - 5, "what came is kept"
    asked = requests(hub, WEIGHTS)
    assert asked.count(f"bytes={size - 5}-") in (TRIES - 1, TRIES) and len(asked) < 2 * TRIES
    assert out.count(f"'{WEIGHTS}'") == len(asked) - 1, "a line for each wait"
    del hub.odd[WEIGHTS]
    hub.asked.clear()
    pulled()
    assert requests(hub, WEIGHTS) == [f"bytes={size - 5}-"]


def test_a_hub_without_ranges_that_cuts_gets_further_each_time(hub: Hub) -> None:
    hub.ranges, hub.cuts[WEIGHTS] = False, [1000 * count for count in range(1, TRIES + 4)]
    pulled()
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


@pytest.mark.parametrize(
    ("answer", "tries", "said"),
    [
        (lambda data, start: (200, {"Content-Encoding": "gzip"}, gzip.compress(data)), 1, "encoded as 'gzip'"),
        (lambda data, start: (200, {"Content-Length": "9"}, b"<html>..."), 1, "9 bytes"),
        (lambda data, start: (206, {"Content-Range": f"bytes 0-8/{len(data) + 1}"}, data[:9]), 1, "lists"),
        (lambda data, start: (416, {}, b""), 1, "status 416"),
        (lambda data, start: (200, {}, b""), TRIES, " 0 of"),
        (lambda data, start: (200, {}, data + b"more"), 1, "more than the"),
        (shifted, TRIES, "sent others"),
        (lambda data, start: (302, {"Location": f"/{NAME}/resolve/{COMMIT}/{WEIGHTS}"}, b""), 20 * TRIES, "redirect"),
        (lambda data, start: (302, {"Location": "http://[::/x"}, b""), TRIES, "is incomplete"),
        (lambda data, start: (302, {"Location": "file:///etc/passwd"}, b""), TRIES, "is incomplete"),
        (lambda data, start: (429, {"Retry-After": "9999"}, b""), 1, "wait 9,999 s"),
    ],
)
def test_answers_that_are_no_file(hub: Hub, answer: Any, tries: int, said: str) -> None:
    hub.odd[WEIGHTS] = answer
    told = refused(6)
    assert WEIGHTS in told and said in told
    # What the network hands over before an end may be less than what was sent, and come with the next try.
    assert tries <= len(requests(hub, WEIGHTS)) <= tries * 21 // 20 + (tries > 1) * 2 * TRIES
    assert in_cache(HubName(NAME)) is None


def test_a_part_at_another_place_than_was_asked_for(hub: Hub) -> None:
    hub.cuts[WEIGHTS] = [1000]
    hub.odd[WEIGHTS] = lambda data, start: (
        (200, {"Content-Length": str(len(data))}, data[:1000])
        if not start
        else (206, {"Content-Range": f"bytes {start - 7}-{len(data) - 1}/{len(data)}"}, data[start - 7 :])
    )
    pulled()
    assert (snapshot() / WEIGHTS).read_bytes() == hub.bytes_of(NAME, WEIGHTS)


def test_a_busy_hub_is_waited_for_as_long_as_it_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        del hub.odd[WEIGHTS]

    monkeypatch.setattr(genesis.files.hub, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    hub.odd[WEIGHTS] = lambda data, start: (503, {"Retry-After": "17"}, b"")
    assert f"'{WEIGHTS}'" in pulled() and pauses == [17]


def test_a_body_that_dribbles_ends_the_pull(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genesis.files.hub, "WINDOW_S", 0.002)
    monkeypatch.setattr(genesis.files.hub, "MIN_WINDOW_BYTES", 1 << 40)
    hub.drips = 0.01
    code, out, told = printed("pull", NAME)
    assert code == 6 and "bytes came in 0.002 s" in told
    assert out.count("trying again") == TRIES - 1, "each gets further, and stands still"


def test_a_list_that_is_encoded_or_dribbles(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genesis.files.hub, "LISTING_S", -1.0)
    assert "too slowly" in refused(6)
    monkeypatch.setattr(Hub, "listing", lambda *_: {"sha": COMMIT, "siblings": [{"rfilename": "x"}] * 10_001})
    monkeypatch.setattr(genesis.files.hub, "LISTING_S", 60.0)
    assert "10,001 files" in refused(6)


@pytest.mark.parametrize("endpoint", ["nowhere", "http://[::", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_address(hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert "HF_ENDPOINT" in refused(6)


def test_two_at_once(hub: Hub) -> None:
    from genesis.files.lock import FolderLock

    with FolderLock(cache_folder() / ".locks" / "models--org--tiny"):
        told = refused(11)
        assert "holds" in told and "that pull" in told


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../up", "org/na me", "org/tiny@", "org/tiny@../x", "https://x/y"])
def test_names_that_are_none(hub: Hub, name: str) -> None:
    assert "is not the name of a model on the hub" in refused(2, name)
    assert not hub.asked


def test_what_looks_like_a_path_is_one(hub: Hub, tmp_path: Path) -> None:
    pulled()
    assert hub_name(NAME) is not None
    (tmp_path / "org").mkdir()
    assert hub_name(NAME) is None and local_path(NAME) == NAME


def test_the_cache_is_that_of_huggingface_hub(tmp_path: Path) -> None:
    script = """
import importlib, os
from huggingface_hub import constants
from genesis.files.hub import cache_folder
for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "nothing"):
    os.environ[name] = "/x"
    importlib.reload(constants)
    assert str(cache_folder()) == constants.HF_HUB_CACHE, (name, cache_folder(), constants.HF_HUB_CACHE)
    del os.environ[name]
"""
    variables = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    clean = {key: value for key, value in os.environ.items() if key not in variables}
    subprocess.run([sys.executable, "-c", script], env=clean, check=True)

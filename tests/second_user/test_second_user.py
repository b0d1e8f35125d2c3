"""What another user of the machine may do to us: planted, replaced and linked files run no code, change no result and
keep nobody waiting. Each way is a shell script that a second user runs, and what we do after it.

Root starts the scripts as that user; elsewhere there is no second user, and the tests say that they did not run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genesis.backend.cuda import compilations, compile
from genesis.backend.cuda.compile import Binary
from genesis.errors import BusyError, ConfigError, DiskError, ModelError
from genesis.files import trust as trust_module
from genesis.files.cache import Cache, EntryWriter
from genesis.files.lock import FolderLock
from genesis.files.trust import private_folder
from genesis_cli import recipes
from tests.train.runs import load, make, train

ATTACKER = 65534
LIMIT_S = 10

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can start processes of a second user"),
    pytest.mark.xdist_group("second user"),
]

KEY, OURS, THEIRS = {"format": 1}, b"ours", b"theirs"
KERNEL = Binary(OURS, "kernel", 0, 4, 3)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody may write, sticky as /tmp is; whatever happens in it ends within seconds."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    # What the attacker plants is right in every byte: made by the code itself, for other content.
    theirs = folder / "theirs"
    compilations._store(Cache(theirs, own=1), "k.kernel", KERNEL._replace(image=THEIRS))
    Cache(theirs).get("tokens", KEY, lambda writer: writer.write("ids", THEIRS))
    (folder / "precious").write_text("kept")
    subprocess.run(["chown", "-R", str(ATTACKER), str(theirs)], check=True)
    monkeypatch.setattr(trust_module, "_private", {})  # a private folder of this test's own
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"nothing came of it within {LIMIT_S} s"))
    signal.alarm(LIMIT_S)
    try:
        yield folder
        assert (folder / "precious").read_text() == "kept"
        assert not (folder / "code ran").exists()
    finally:
        signal.alarm(0)
        shutil.rmtree(folder)


def attack(place: Path, script: str) -> None:
    """Runs the script as the second user, in `place`."""
    subprocess.run(
        ["/bin/sh", "-ec", script],
        cwd=place, user=ATTACKER, group=ATTACKER, extra_groups=[], check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def entries(place: Path, folder: str, mode: int) -> Path:
    """A cache of ours with a kernel and tokens, whose folder has this mode."""
    cache = Cache(place / folder)
    compilations._store(cache, "k.kernel", KERNEL)
    cache.get("tokens", KEY, lambda writer: writer.write("ids", OURS))
    cache.folder.chmod(mode)
    return cache.folder


def check_kernel(place: Path, folder: str = "genesis/kernels") -> None:
    """No kernel but ours comes out, at the first start and at the next one in this process."""
    cache = Cache(place / folder, own=2, optional=True, setting="XDG_CACHE_HOME", tell=lambda line: None)
    assert compilations._cached_binary(cache, "k.kernel") in (None, KERNEL)
    compilations._store(cache, "k.kernel", KERNEL)
    assert (
        compilations._cached_binary(
            Cache(place / folder, own=2, optional=True, setting="XDG_CACHE_HOME", tell=lambda line: None), "k.kernel"
        )
        == KERNEL
    )


def check_tokens(place: Path, folder: str = "cache") -> None:
    def make(writer: EntryWriter) -> None:
        writer.write("ids", OURS)

    for _ in range(2):
        found = Cache(place / folder, tell=lambda line: None).get("tokens", KEY, make)
        assert bytes(found.entry.part("ids")) == OURS


def tokens_name(place: Path) -> str:
    (name,) = (path.name for path in (place / "theirs").glob("tokens-*"))
    return name


# Way -> the state before, the attack, what we do then.
CACHES: dict[str, tuple[Callable[[Path], object], str, Callable[[Path], None]]] = {
    "01 the cache's folder made by them before us": (
        lambda place: None,
        "mkdir -p genesis/kernels; cp theirs/k.kernel genesis/kernels/; chmod -R a+rwX genesis",
        check_kernel,
    ),
    "02 a kernel put into a folder that others may write": (
        lambda place: ((place / "genesis").mkdir(mode=0o755), entries(place, "genesis/kernels", 0o777)),
        "rm genesis/kernels/k.kernel; cp theirs/k.kernel genesis/kernels/",
        check_kernel,
    ),
    "03 a kernel put there while others might, which they no longer may": (
        lambda place: ((place / "genesis").mkdir(mode=0o755), entries(place, "genesis/kernels", 0o777)),
        "rm genesis/kernels/k.kernel; cp theirs/k.kernel genesis/kernels/",
        lambda place: ((place / "genesis/kernels").chmod(0o700), check_kernel(place))[1],
    ),
    "04 a link in the place of the cache's folder": (
        lambda place: None,
        "mkdir theirs/kernels; cp theirs/k.kernel theirs/kernels; ln -s theirs genesis",
        check_kernel,
    ),
    "05 a link in the place of an entry": (
        lambda place: ((place / "genesis").mkdir(mode=0o755), entries(place, "genesis/kernels", 0o777)),
        "rm genesis/kernels/k.kernel; ln -s ../../theirs/k.kernel genesis/kernels/k.kernel",
        lambda place: ((place / "genesis/kernels").chmod(0o700), check_kernel(place))[1],
    ),
    "06 a hard link in the place of an entry": (
        lambda place: ((place / "genesis").mkdir(mode=0o755), entries(place, "genesis/kernels", 0o777)),
        "rm genesis/kernels/k.kernel; ln theirs/k.kernel genesis/kernels/k.kernel",
        lambda place: ((place / "genesis/kernels").chmod(0o700), check_kernel(place))[1],
    ),
    "07 a FIFO in the place of an entry": (
        lambda place: ((place / "genesis").mkdir(mode=0o755), entries(place, "genesis/kernels", 0o777)),
        "rm genesis/kernels/k.kernel; mkfifo genesis/kernels/k.kernel",
        lambda place: ((place / "genesis/kernels").chmod(0o700), check_kernel(place))[1],
    ),
    "08 tokens replaced by others of right checksum": (
        lambda place: entries(place, "cache", 0o777),
        "rm cache/tokens-*; cp theirs/tokens-* cache/",
        check_tokens,
    ),
    "09 an entry of an older version, with its manifest": (
        lambda place: entries(place, "cache", 0o777),
        "n=$(basename cache/tokens-*); rm cache/$n; mkdir cache/$n;"
        " echo '{}' >cache/$n/manifest.json; echo x >cache/$n/tokens.bin",
        lambda place: ((place / "cache").chmod(0o700), check_tokens(place))[1],
    ),
    "10 the lock of an entry is a FIFO": (
        lambda place: (entries(place, "cache", 0o777), (place / "cache" / tokens_name(place)).unlink()),
        "mkfifo cache/.lock-$(basename theirs/tokens-*)",
        lambda place: ((place / "cache").chmod(0o700), check_tokens(place))[1],
    ),
    "11 the lock of an entry is a link to another file": (
        lambda place: (entries(place, "cache", 0o777), (place / "cache" / tokens_name(place)).unlink()),
        "ln -s ../precious cache/.lock-$(basename theirs/tokens-*)",
        lambda place: ((place / "cache").chmod(0o700), check_tokens(place))[1],
    ),
    "12 the lock of an entry is held by their process": (
        lambda place: (entries(place, "cache", 0o777), (place / "cache" / tokens_name(place)).unlink()),
        "l=cache/.lock-$(basename theirs/tokens-*); : >$l;"
        " (flock $l sleep 4 >held 2>&1 &) ; until [ -e held ]; do :; done",
        check_tokens,
    ),
    "13 names of temporary files taken in advance": (
        lambda place: entries(place, "cache", 0o777),
        "n=$(basename theirs/tokens-*); for i in 0 1 2 0000000000000000; do ln -s ../precious cache/.tmp-$n-$i; done",
        lambda place: ((place / "cache").chmod(0o700), check_tokens(place))[1],
    ),
}


@pytest.mark.parametrize("way", CACHES)
def test_caches(place: Path, way: str) -> None:
    before, script, check = CACHES[way]
    before(place)
    attack(place, script)
    check(place)


def test_14_a_folder_for_temporary_files_of_theirs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack(place, "mkdir -m 777 temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
    assert place not in private_folder().parents and private_folder().stat().st_uid == 0


def test_15_a_cache_of_tritons_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    attack(place, "mkdir -m 777 triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "triton"))
    assert knobs.cache.dir == str(place / "triton")
    with compile._own_settings():
        assert place not in Path(knobs.cache.dir).parents
    assert knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == str(place / "triton")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with compile._own_settings():
        pass
    assert "TRITON_CACHE_DIR" not in os.environ and knobs.cache.dir != str(place / "triton")


def test_17_a_file_with_the_name_of_a_recipe(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack(place, "echo 'train: {output_dir: /tmp/theirs}' >quickstart")
    monkeypatch.chdir(place)
    with pytest.raises(ConfigError, match="belongs to user 65534, and a recipe has the same name"):
        recipes.load("quickstart", ())


def test_18_modules_in_the_current_folder(place: Path) -> None:
    attack(
        place,
        "for n in genesis genesis_cli sitecustomize typer; do mkdir $n;"
        ' echo \'open("code ran", "w")\' >$n/__init__.py;'
        " done; cp genesis/__init__.py usercustomize.py; echo 'import genesis' >x.pth",
    )
    script = Path(sys.executable).parent / "genesis"
    if not script.exists():
        pytest.skip("no script is installed beside this interpreter")
    done = subprocess.run(
        [script, "--version"], cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("genesis "), done.stderr


# --- A run whose output folder others may write -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished() -> Iterator[tuple[Path, str]]:
    """A folder with a recipe and a run of two steps in `run`, and its state hash."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    digest = train(load(make(folder), "run", *SETTINGS)).state_hash
    yield folder, digest
    shutil.rmtree(folder)


SETTINGS = ("train.steps=2", "eval.every=null", "checkpoint.every=1", "data.cache_dir=null")


@pytest.fixture
def run(place: Path, finished: tuple[Path, str]) -> Path:
    """A copy of the run that others may write; `place` has its recipe."""
    shutil.copytree(finished[0], place / "work")
    recipe = place / "work/config.yaml"
    recipe.write_text(recipe.read_text().replace(str(finished[0]), str(recipe.parent)))
    record = place / "work/run/config.resolved.yaml"
    record.write_text(record.read_text().replace(str(finished[0]), str(recipe.parent)))
    (place / "work/run").chmod(0o777)
    return place / "work/run"


def resumed(run: Path) -> str:
    return train(load(run.parent / "config.yaml", "run", *SETTINGS), resume=True).state_hash


def test_the_run_itself_resumes(run: Path, finished: tuple[Path, str]) -> None:
    assert resumed(run) == finished[1]


# Way -> the attack in the run's folder, and the error; none: the run ends where it would have ended.
RUNS: dict[str, tuple[str, type[Exception] | None]] = {
    "19 a newer checkpoint": ("cp -r checkpoint-2 checkpoint-999999", ModelError),
    "20 a checkpoint replaced": ("mv checkpoint-2 aside; cp -r aside checkpoint-2", ModelError),
    "21 the record of the run replaced": (
        "cp config.resolved.yaml c; rm config.resolved.yaml; mv c config.resolved.yaml",
        ConfigError,
    ),
    "22 the record of the run a FIFO": ("rm config.resolved.yaml; mkfifo config.resolved.yaml", ConfigError),
    "23 metrics linked to another file": (
        "rm metrics.jsonl; ln -s ../../precious metrics.jsonl",
        DiskError,
    ),
    "24 metrics a FIFO": ("rm metrics.jsonl; mkfifo -m 666 metrics.jsonl", DiskError),
    "25 the lock a FIFO": ("rm -f .lock; mkfifo -m 666 .lock", DiskError),
    "26 the lock linked to another file": ("rm -f .lock; ln -s ../../precious .lock", DiskError),
    "27 the cache of tokens and tokenizer replaced": (
        "mv cache old; cp -r old cache; for f in cache/*; do echo x >>$f; done",
        None,
    ),
    "28 the picture and the model linked to another file": (
        "rm -f loss.svg model.safetensors; ln -s ../../precious loss.svg; ln -s ../../precious model.safetensors",
        None,
    ),
}


@pytest.mark.parametrize("way", RUNS)
def test_runs(run: Path, finished: tuple[Path, str], way: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, error = RUNS[way]
    subprocess.run(["chmod", "-R", "a+rX", str(run)], check=True)
    attack(run, script)
    if error is None:
        assert resumed(run) == finished[1]
        return
    with pytest.raises(error):
        resumed(run)


def test_29_the_lock_of_a_run_is_another_files_name(run: Path) -> None:
    """Made by us in their place: where hard links to others' files are forbidden, they cannot."""
    (run / ".lock").unlink(missing_ok=True)
    os.link(run.parents[1] / "precious", run / ".lock")
    with pytest.raises(DiskError, match="another name as well"):
        resumed(run)


def test_30_the_lock_of_a_run_is_held_by_their_process(run: Path) -> None:
    said = '{"pid": 1, "host": "theirs"}'
    hold = "(flock .lock sleep 5 >held 2>&1 &) ; until [ -e held ]; do :; done; sleep 0.1"
    attack(run, f"rm -f .lock; echo '{said}' >.lock; {hold}")
    begun = time.monotonic()
    with pytest.raises(BusyError, match="process 1 on host theirs"), FolderLock(run):
        pass
    assert time.monotonic() - begun < LIMIT_S


def test_the_attacks_are_real(place: Path) -> None:
    """What is planted would be taken, were it not for owners and modes."""
    cache = place / "cache"
    shutil.copytree(place / "theirs", cache)
    cache.chmod(0o700)
    for path in cache.iterdir():
        path.chmod(0o600)
    found = compilations._cached_binary(Cache(cache), "k.kernel")
    assert found is not None and found.image == THEIRS
    assert json.dumps(KEY) and Cache(cache).get("tokens", KEY, lambda w: w.write("ids", OURS)).state == "found"

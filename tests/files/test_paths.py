"""Safe paths: hostile names and hostile files are refused with the name shown, honest ones are found."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from genesis.errors import ModelError
from genesis.files.paths import check_name, open_regular, quote, safe_join

ABSOLUTE = ["/", "//", "/etc/passwd", "//etc/passwd", "///secret", "/dev/null", "/proc/self/environ", "~", "~/secret"]
CLIMBING = [
    *(
        "..",
        "../",
        "../secret",
        "../../secret",
        "../../../../../../etc/passwd",
        "..//secret",
        "./../secret",
        "../root/x",
    ),
    *("sub/..", "sub/../..", "sub/../../secret", "sub/../model.safetensors", ".././secret", "sub/./../../secret"),
    *("a/b/../../../secret", "sub/sub/../../../secret", ".../.."),
]
DOTS = ["", ".", "./", "./model.safetensors", "sub/.", "sub/./x", "sub//x", "sub/", "sub//", "model.safetensors/"]
WINDOWS = [
    *(r"C:\secret", "C:/secret", "c:secret", "C:", r"D:..\secret", r"\secret", r"\\server\share\x", r"\\?\C:\secret"),
    *(r"\\.\pipe\x", r"..\secret", r"..\..\secret", r"sub\..\..\secret", r"sub\x", "model.safetensors:", "NUL:"),
    *("model.safetensors:stream", "file:///etc/passwd", "http://host/model", "a:b"),
]
# C0, DEL and C1; line and paragraph separators; right-to-left override, zero-width space, BOM; half a surrogate pair.
CONTROLS = [0, 1, 7, 8, 9, 10, 11, 12, 13, 27, 31, 127, 0x85, 0x9B, 0x2028, 0x2029, 0x202E, 0x200B, 0xFEFF, 0xD800]
CONTROL_NAMES = [pattern.format(chr(c)) for c in CONTROLS for pattern in ("model{}.safetensors", "{}x", "sub/x{}")]
UNICODE = [
    "\uff0e\uff0e/secret",
    "\u2025/secret",
    "sub\uff0fx",
    "\ufb01le",
    "e\u0301.safetensors",
    "\uff2dodel",
    "x\u2024\u2024",
]
SPACES = [" ", " model.safetensors", "model.safetensors ", "sub /x", "sub/ x", ".. /secret", "\u00a0x"]
LONG = ["a" * 256, "é" * 128, "/".join("a" * 17), "/".join(["a" * 100] * 11), "a" * 100_000]
NOT_TEXT = [None, 1, 1.5, True, b"model.safetensors", ["model.safetensors"], {"name": "x"}]
HOSTILE = [*ABSOLUTE, *CLIMBING, *DOTS, *WINDOWS, *CONTROL_NAMES, *UNICODE, *SPACES, *LONG, *NOT_TEXT]

HONEST = [
    "model.safetensors",
    "model-00001-of-00010.safetensors",
    "sub/model.safetensors",
    "sub/sub/x",
    "with space.json",
    "模型.safetensors",
    "é.json",
    "..data",
    "a..b",
    "x.",
    "-rf",
    "%2e%2e",
    "$HOME",
    "a" * 255,
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model folder with honest files, beside a secret."""
    root = tmp_path / "root"
    (root / "sub" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    for name in HONEST:
        (root / name).write_text("honest")
    return root


def test_corpus_is_large_enough() -> None:
    assert len({repr(name) for name in HOSTILE}) >= 100


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:40])
def test_hostile_name_is_refused_and_escaped(root: Path, name: object) -> None:
    for call in (lambda: safe_join(root, name, where="index"), lambda: check_name(name, where="index")):
        with pytest.raises(ModelError) as caught:
            call()
        assert caught.value.exit_code == 5
        assert quote(name) in caught.value.what
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
        assert caught.value.where == "index" and caught.value.next


@pytest.mark.parametrize("name", HONEST, ids=lambda name: name[:20])
def test_honest_name_is_found(root: Path, name: str) -> None:
    path = safe_join(root, name)
    assert path.read_text() == "honest"
    assert path == root.resolve() / name


def test_missing_file_is_named(root: Path) -> None:
    with pytest.raises(ModelError, match=r"'model-00002.safetensors' is missing"):
        safe_join(root, "model-00002.safetensors")


SPECIAL = ["link outside", "absolute link outside", "link inside", "dangling link", "link loop", "link to a device"]
SPECIAL += ["folder", "FIFO"]


def make_special(root: Path, kind: str) -> None:
    """Put a file of this kind at root/x."""
    path = root / "x"
    if kind == "link outside":
        path.symlink_to("../secret")
    elif kind == "absolute link outside":
        path.symlink_to(root.parent / "secret")
    elif kind == "link inside":
        path.symlink_to("model.safetensors")
    elif kind == "dangling link":
        path.symlink_to("nothing")
    elif kind == "link loop":
        path.symlink_to("x")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_is_refused(root: Path, kind: str) -> None:
    make_special(root, kind)
    with pytest.raises(ModelError, match=r"the file 'x' is a (symbolic link|folder|FIFO)"):
        safe_join(root, "x")


def test_linked_folder_and_file_as_folder_are_refused(root: Path) -> None:
    (root / "up").symlink_to("..")
    (root / "inside").symlink_to("sub")
    for name in ("up/secret", "inside/model.safetensors", "model.safetensors/x"):
        with pytest.raises(ModelError, match="not a plain folder"):
            safe_join(root, name)


def test_device_and_socket_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="is a device"):
        safe_join("/dev", "null")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x")
        with pytest.raises(ModelError, match="is a socket"):
            safe_join(tmp_path, "x")


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert safe_join(tmp_path / "link", "model.safetensors") == root.resolve() / "model.safetensors"


class TestHubCache:
    """Snapshots of the Hugging Face cache are links into `blobs`; that and nothing else is followed."""

    revision = "0123456789abcdef" * 2 + "01234567"
    blob = "ab" * 32

    @pytest.fixture
    def snapshot(self, tmp_path: Path) -> Path:
        repository = tmp_path.resolve() / "models--org--name"
        snapshot = repository / "snapshots" / self.revision
        (snapshot / "sub").mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "blobs" / self.blob).write_text("weights")
        (repository / "secret").write_text("secret")
        (repository / "blobs" / "secret").write_text("secret")
        return snapshot

    def test_links_to_blobs_are_followed(self, snapshot: Path) -> None:
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{self.blob}")
        (snapshot / "sub" / "x").symlink_to(f"../../../blobs/{self.blob}")
        (snapshot / "absolute").symlink_to(snapshot.parent.parent / "blobs" / self.blob)
        for name in ("model.safetensors", "sub/x", "absolute"):
            path = safe_join(snapshot, name)
            assert path.read_text() == "weights"
            assert not path.is_symlink()

    @pytest.mark.parametrize(
        "target",
        [
            "../../secret",
            "../../blobs/secret",
            "../../blobs/../secret",
            "../../blobs",
            "/etc/passwd",
            "../../../models--org--name/snapshots/x",
            "sub",
        ],
    )
    def test_other_links_are_refused(self, snapshot: Path, target: str) -> None:
        (snapshot / "x").symlink_to(target)
        with pytest.raises(ModelError, match="'x' is a symbolic link"):
            safe_join(snapshot, "x")

    def test_a_blob_must_be_a_regular_file(self, snapshot: Path) -> None:
        blobs = snapshot.parent.parent / "blobs"
        os.mkfifo(blobs / ("cd" * 20))
        (blobs / ("ef" * 20)).symlink_to("../secret")
        for name, digits, kind in (("fifo", "cd", "a FIFO"), ("link", "ef", "a symbolic link")):
            (snapshot / name).symlink_to(f"../../blobs/{digits * 20}")
            with pytest.raises(ModelError, match=f"links to {kind}"):
                safe_join(snapshot, name)

    @pytest.mark.parametrize("change", ["revision", "snapshots", "models--"])
    def test_the_folder_must_be_a_snapshot(self, snapshot: Path, change: str) -> None:
        (snapshot / "x").symlink_to(f"../../blobs/{self.blob}")
        repository = snapshot.parent.parent
        if change == "revision":
            root = snapshot.rename(snapshot.parent / "main")
        elif change == "snapshots":
            root = snapshot.parent.rename(repository / "versions") / snapshot.name
        else:
            root = repository.rename(repository.parent / "org--name") / "snapshots" / snapshot.name
        with pytest.raises(ModelError, match="'x' is a symbolic link"):
            safe_join(root, "x")


def test_open_regular_reads_files_and_refuses_the_rest_without_waiting(root: Path) -> None:
    descriptor = open_regular(root / "model.safetensors")
    assert os.read(descriptor, 100) == b"honest"
    os.close(descriptor)
    os.mkfifo(root / "fifo")
    for path, problem in ((root / "fifo", "a FIFO"), (root / "sub", "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ModelError, match=problem):
            open_regular(path)
    for missing in (root / "nothing", root / "nul\0"):
        with pytest.raises(ModelError, match="cannot open"):
            open_regular(missing)


def test_quote_escapes_and_cuts() -> None:
    assert quote("a\x1b[31mb") == "'a\\x1b[31mb'"
    assert quote(None) == "'null'"
    assert len(quote("x" * 1000)) < 130


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "'null'"),
        (True, "'true'"),
        ({"a": 1}, "'an object of 1 keys'"),
        ({}, "'{}'"),
        ([1, 2], "'[1, 2]'"),
        ([True, "a"], "'[true, \"a\"]'"),
        ([10**400], "'a list of 1'"),
        ([None] * 9, "'a list of 9'"),
        (Path("a/b"), "'a/b'"),
        (7, "'7'"),
    ],
)
def test_values_are_quoted_without_words_of_python(value: object, shown: str) -> None:
    assert quote(value) == shown

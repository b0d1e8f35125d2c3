"""Errors of the operating system end a command with the class of what was being done; exit codes tell the truth."""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from genesis.errors import ConfigError, DataError, DiskError, GenesisError, ModelError, UsageError
from genesis.files.boundary import boundary
from genesis_cli.errors import exit_code
from genesis_cli.main import main
from genesis_cli.measured import show
from tests.cli.command import fake_session, genesis, genesis_with, here

LONG = "x" * 300  # more than a file system takes
CONFIGURATION = """
model: {preset: qwen3-0.6B}
data: {train: [DATA], seq_len: 8}
train: {output_dir: OUTPUT, steps: 1, device: cpu}
"""


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of a command in this process."""
    code = main(words)
    return code, capsys.readouterr().err


def documents(folder: Path) -> str:
    (folder / "data").mkdir()
    for number in range(20):
        (folder / "data" / f"{number}.txt").write_text(f"some words, the {number}th time\n" * 9)
    return str(folder / "data")


def config(folder: Path, data: str = "data", output: str = "run") -> str:
    path = folder / "config.yaml"
    path.write_text(CONFIGURATION.replace("DATA", data).replace("OUTPUT", str(folder / output)))
    return str(path)


def test_no_error_of_the_system_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    for code in errno.errorcode:
        assert exit_code(OSError(code, "because", "/run/x\x1b"), debug=False) == 8
        told = capsys.readouterr().err
        assert "because" in told and "where: /run/x\\x1b\n" in told and "bug" not in told


@pytest.mark.parametrize(
    "error, code",
    [
        (UnicodeEncodeError("ascii", "f\xe9", 1, 2, "no"), 2),
        (ModuleNotFoundError("No module named triton", name="triton.language"), 6),
        (ModuleNotFoundError("No module named ctypes", name="ctypes"), 6),
        (BrokenPipeError(32, "Broken pipe"), 8),
        (MemoryError(), 7),
        (RecursionError(), 70),
        (ModuleNotFoundError("No module named genesis.x", name="genesis.x"), 70),
    ],
)
def test_what_else_is_no_bug(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(error, debug=False) == code
    assert ("bug" in capsys.readouterr().err) == (code == 70)


def raise_in(block: AbstractContextManager[None], error: Exception) -> None:
    with block:
        raise error


class TestBoundary:
    @pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError])
    def test_the_class_is_that_of_the_work(self, kind: type[GenesisError]) -> None:
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with pytest.raises(kind, match="reading it failed: Permission denied") as caught:
            raise_in(boundary(kind, "reading it", "a\x1bb"), error)
        assert caught.value.where == "a\\x1bb"
        assert "permissions" in caught.value.next

    def test_the_path_of_the_error_goes_before_that_of_the_work(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught, boundary(DataError, "reading it", "elsewhere"):
            (tmp_path / "missing").read_bytes()
        assert caught.value.where == str(tmp_path / "missing")

    def test_ours_pass(self) -> None:
        with pytest.raises(ConfigError, match="mine"), boundary(DataError, "reading it"):
            raise ConfigError("mine")

    @pytest.mark.parametrize("raised", ["ShapeError", "DTypeError", "IndexRangeError"])
    def test_tensors_that_do_not_fit_are_the_fault_of_what_is_read(self, raised: str) -> None:
        from genesis import errors

        with pytest.raises(ModelError, match="loading it failed: two by three"), boundary(ModelError, "loading it"):
            raise getattr(errors, raised)("two by three")

    def test_recursion_without_end(self) -> None:
        def again(depth: int) -> int:
            return again(depth + 1)

        with pytest.raises(ModelError, match="nested too deep"), boundary(ModelError, "loading it"):
            again(0)


@pytest.mark.parametrize(
    "name, words",
    [
        ("train", ("train", "quickstart")),
        ("validate", ("validate", "quickstart")),
        ("evaluate", ("eval", "folder", "--data", "x")),
        ("generate", ("generate", "folder", "--prompt", "x")),
    ],
)
@pytest.mark.parametrize("error", ["ShapeError", "DTypeError", "IndexRangeError"])
def test_tensors_that_do_not_fit_are_the_model_folder_s(name: str, words: tuple[str, ...], error: str) -> None:
    source = f"import genesis.errors as e\ndef {name}(*args, **kw): raise e.{error}('id 7 is not between 0 and 5')"
    done = here(*words, session=source)
    assert done.returncode == 5
    assert "the model failed: id 7 is not between 0 and 5" in done.stderr


class TestNames:
    """A name that the system does not take, at every place where a name can stand."""

    @pytest.mark.parametrize(
        "words, code",
        [
            (("train", LONG), 3),
            (("generate", LONG, "--prompt", "a"), 5),
            (("eval", LONG, "--data", "x"), 5),
            (("bench-model", "--size", LONG), 5),
            (("profile", LONG), 3),
        ],
    )
    def test_too_long(self, words: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
        found, told = ended(capsys, *words)
        assert found == code
        assert "File name too long" in told and LONG in told

    @pytest.mark.parametrize(
        "override, code",
        [("train.output_dir={}", 8), ("data.train=[{}]", 4), ("data.tokenizer={}", 5), ("data.cache_dir={}", 8)],
    )
    def test_too_long_in_a_setting(
        self, tmp_path: Path, override: str, code: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found, told = ended(capsys, "train", config(tmp_path, documents(tmp_path)), override.format(LONG))
        assert found == code
        assert "File name too long" in told and LONG in told

    def test_a_file_on_the_path(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("")
        found, told = ended(capsys, "train", config(tmp_path, output="file/run"))
        assert (found, "file" in told) == (8, True)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    here_before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here_before)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


class TestKinds:
    """What is no file where a file is expected is refused at once; opening a FIFO would wait for ever."""

    @pytest.mark.parametrize("make", [fifo, listening, device, Path.mkdir])
    def test_as_configuration(
        self, tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        make(tmp_path / "it")
        found, told = ended(capsys, "train", str(tmp_path / "it"))
        assert (found, str(tmp_path / "it") in told) == (3, True)

    @pytest.mark.parametrize("make", [fifo, listening, device])
    def test_as_data(self, tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
        make(tmp_path / "it")
        found, told = ended(capsys, "train", config(tmp_path, str(tmp_path / "it")))
        assert (found, str(tmp_path / "it") in told) == (4, True)

    @pytest.mark.parametrize("make", [fifo, listening, device])
    def test_as_tokenizer(
        self, tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        make(tmp_path / "it")
        words = ("train", config(tmp_path, documents(tmp_path)), f"data.tokenizer={tmp_path / 'it'}")
        found, told = ended(capsys, *words)
        assert (found, "'it'" in told) == (5, True)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
    def test_in_a_model_folder(self, tmp_path: Path, name: str) -> None:
        from genesis.data.tokenizer import Tokenizer
        from genesis.files.hf import WeightFolder, read_chat_templates, read_json

        fifo(tmp_path / name)
        readers: dict[str, Callable[[], object]] = {
            "config.json": lambda: read_json(tmp_path / name),
            "model.safetensors": lambda: WeightFolder(tmp_path),
            "tokenizer.json": lambda: Tokenizer.load(tmp_path),
            "chat_template.jinja": lambda: read_chat_templates(tmp_path),
        }
        with pytest.raises(ModelError, match="FIFO"):
            readers[name]()


class TestData:
    """What cannot be listed is an error: data that are passed over change a run in silence."""

    @pytest.mark.parametrize("source", ["{}", "{}/**/*.txt", "{}/*/*.txt"])
    def test_a_folder_that_cannot_be_read(self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from genesis.data.sources import expand

        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "text.txt").write_text("words")
        assert len(expand([source.format(tmp_path)])) == 2
        scan = os.scandir

        def refuse(path: str) -> object:
            if os.fspath(path).endswith("b"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match="Permission denied") as caught:
            expand([source.format(tmp_path)])
        assert caught.value.where == str(tmp_path / "b")


GENERATE = "def generate(folder, prompt, **kw):\n for i in range({}): yield 'word '\n"
VALIDATE = "def validate(config, console):\n for i in range({}): console.line('valid')\n"
EVALUATE = "def evaluate(folder, data, **kw): return {{'eval/loss': 1.0}}\n#{}"
COMMANDS = {
    "generate": (GENERATE, ("generate", "folder", "--prompt", "a")),
    "eval": (EVALUATE, ("eval", "folder", "--data", "x")),
}


class Empty:
    """A report with nothing in it."""

    def to_json(self) -> bytes:
        return b"{}\n"


class Full(io.StringIO):
    """A stream on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestOutput:
    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_full_stdout_is_exit_8(self, name: str) -> None:
        source, words = COMMANDS[name]
        with open("/dev/full", "w") as full:
            done = genesis_with(source.format(5000), *words, stdout=full)
        assert done.returncode == 8
        assert done.stderr.startswith("error: writing failed: No space left on device\n")

    @pytest.mark.full
    @pytest.mark.parametrize("name", ["generate"])
    def test_a_reader_that_has_enough_is_no_error(self, name: str) -> None:
        source, words = COMMANDS[name]
        reader, writer = os.pipe()
        os.close(reader)
        done = genesis_with(source.format(5000), *words, stdout=writer)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")

    def test_validate_is_its_output(self) -> None:
        session = ModuleType("genesis_cli.session")
        exec(VALIDATE.format(3), session.__dict__)
        with fake_session(session), redirect_stdout(Full()):
            assert main(["validate", "quickstart"]) == 8

    def test_an_ascii_terminal(self) -> None:
        """The schema has characters beyond ASCII."""
        environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
        done = genesis("schema", env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\\u2026" in done.stdout or "\\xd7" in done.stdout or done.stdout.isascii()

    def test_a_report_into_a_device(self, tmp_path: Path) -> None:
        """A file renamed to a device or a FIFO would replace it."""
        link = tmp_path / "full"
        link.symlink_to("/dev/full")
        with pytest.raises(DiskError, match="No space left on device"):
            show(Empty(), (), str(link))
        assert link.is_symlink()
        reader, writer = os.pipe()
        show(Empty(), (), f"/dev/fd/{writer}")
        os.close(writer)
        assert os.read(reader, 100) == b"{}\n"
        os.close(reader)

    def test_a_report_into_a_folder_or_under_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is a folder"):
            show(Empty(), (), str(tmp_path))
        with pytest.raises(DiskError, match="File name too long"):
            show(Empty(), (), str(tmp_path / LONG))


# The handler is there before anything else of ours is imported: each import is a place where Ctrl-C can come.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import importlib.abc
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from genesis_cli.errors import exit_code
from genesis_cli.main import main
from genesis_cli.measured import show
sys.exit(main())
"""


class TestInterruption:
    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("name", ["genesis_cli.app", "genesis_cli.environment"])
    def test_ctrl_c_while_modules_are_imported(self, name: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED.format(name=name), "env"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")

    @pytest.mark.full
    def test_ctrl_c_in_a_finalizer(self) -> None:
        """Python prints and forgets an exception there."""
        source = """
import os, signal
class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100): pass
def train(config, **kw):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Closing()
    print("went on")
"""
        done = genesis_with(
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + source, "train", "quickstart"
        )
        assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


class TestInstallation:
    def test_a_source_tree_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib import metadata

        from genesis_cli import environment

        def missing(name: str) -> None:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        monkeypatch.setattr(metadata, "requires", missing)
        monkeypatch.setattr(environment, "_probe_cuda", lambda: {"device_nodes": [], "devices": [], "problem": "no"})
        done = here("env")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("genesis   0.")
        assert here("--version").stdout.startswith("genesis 0.")


@pytest.mark.parametrize(
    "ratio, text",
    [(0.0045, "0.0045"), (0.000123, "0.00012"), (0.05, "0.050"), (0.1, "0.10"), (1.25, "1.25"), (0.0, "0.00")],
)
def test_ratios_keep_two_digits(ratio: float, text: str) -> None:
    from genesis.measure.record import format_ratio

    assert format_ratio(ratio) == text


def test_a_path_in_an_error_is_no_repr(tmp_path: Path) -> None:
    from genesis.files.paths import safe_join

    with pytest.raises(ModelError) as caught:
        safe_join(tmp_path, "config.json")
    assert "PosixPath" not in str(caught.value) and f"'{tmp_path}'" in str(caught.value)

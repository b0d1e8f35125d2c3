"""Whatever ends a command becomes one block on stderr and the exit code of its class."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from genesis import errors
from genesis.train import signals
from genesis_cli.errors import block, exit_code
from tests.cli.command import FAKE_SESSION, genesis, genesis_with, here

CODES = {
    "ConfigError": 3,
    "DataError": 4,
    "ModelError": 5,
    "DeviceError": 6,
    "OutOfMemoryError": 7,
    "DiskError": 8,
    "NumericError": 9,
    "DistributedError": 10,
    "BusyError": 11,
    "UsageError": 2,
    "GenesisError": 70,
}
# One process shows every class: starting one takes half a second.
EVERY_CLASS = """
import sys, typer
from genesis import errors
from genesis_cli.errors import exit_code
for name in sys.argv[1:]:
    print(name, exit_code(getattr(errors, name)("what", where="where", next="next"), debug=False))
print("InterruptedRun", exit_code(errors.InterruptedRun("saved", signal=15), debug=False))
print("KeyboardInterrupt", exit_code(KeyboardInterrupt(), debug=False))
print("MemoryError", exit_code(MemoryError("8 GiB"), debug=False))
print("OSError", exit_code(OSError(28, "No space left on device", "x"), debug=False))
print("Exit", exit_code(typer.Exit(4), debug=False))
"""


def test_the_block() -> None:
    assert block("what", "file:1", "do") == "error: what\n  where: file:1\n  next: do\n"
    assert block("what", "", "") == "error: what\n"
    assert block("a\nb", "", "c\nd") == "error: a\n        b\n  next: c\n        d\n"
    assert block("\x1b[31m", "\x07", "\x00") == "error: \\x1b[31m\n  where: \\x07\n  next: \\x00\n"


def test_every_class_has_its_code_and_its_block() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_CLASS, *CODES], capture_output=True, text=True, timeout=60, check=True
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    others = {"InterruptedRun": 143, "KeyboardInterrupt": 130, "MemoryError": 7, "OSError": 8, "Exit": 4}
    assert {name: int(code) for name, code in found.items()} == {**CODES, **others}
    assert done.stderr.count("error: what\n  where: where\n  next: next\n") == len(CODES)
    assert "stopped: saved" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_codes_are_those_of_the_classes() -> None:
    assert {name: getattr(errors, name).exit_code for name in CODES} == CODES


CONFIG = "import genesis.errors as e\ndef train(config, **kw): "


def test_an_error_of_a_command(tmp_path: Path) -> None:
    source = CONFIG + "raise e.DataError('bad line \\x1b[2J', where='a.jsonl:3', next='mend it')"
    done = genesis_with(source, "train", "quickstart")
    assert done.returncode == 4
    assert done.stderr == "error: bad line \\x1b[2J\n  where: a.jsonl:3\n  next: mend it\n"
    assert done.stdout == ""


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place: int) -> None:
    words = ["train", "quickstart"]
    words.insert(place, "--debug")
    done = genesis_with(CONFIG + "raise e.DataError('bad \\x1b line')", *words)
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: bad \\x1b line\n")
    assert "\x1b" not in done.stderr


def test_an_unexpected_error_is_our_bug() -> None:
    done = genesis_with(CONFIG + "{}['missing']", "train", "quickstart")
    assert done.returncode == 70
    assert done.stderr.startswith("error: this is a bug in Genesis: KeyError: 'missing'\n")
    assert "--debug" in done.stderr
    assert "Traceback" not in done.stderr
    again = genesis_with(CONFIG + "{}['missing']", "train", "quickstart", "--debug")
    assert again.returncode == 70
    assert "Traceback" in again.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), ""),
        (("train",), "Missing argument 'CONFIG'"),
        (("trane",), "No such command 'trane'"),
        (("train", "quickstart", "--resum"), "No such option: --resum"),
        (("train", "quickstart", "--batch-size", "8"), "No such option: --batch-size"),
        (("--nonsense",), "No such option: --nonsense"),
        (("train", "quickstart", "steps"), "'steps'"),
        (("generate", "folder"), "give either --prompt or --prompts"),
        (("eval", "folder"), "neither data nor a task is given"),
        (("generate", "f", "--prompt", "x", "--min-p", "2"), "--min-p is 2.0"),
        (("generate", "f", "--prompt", "x", "--repetition-penalty", "nan"), "--repetition-penalty is nan"),
        (("generate", "f", "--prompt", "x", "--seed", "-1"), f"--seed must be an integer from 0 to {2**63 - 1}, not"),
        (("generate", "f", "--prompt", "x", "--top-k", "0"), "--top-k must be an integer from 1 to 1000000, not"),
        (("chat", "f", "--max-tokens", "0"), "--max-tokens is 0"),
        (("generate", "f", "--prompt", "x", "--max-tokens", "many"), "Invalid value for '--max-tokens'"),
    ],
)
def test_a_wrong_command_line_is_exit_2(words: tuple[str, ...], what: str) -> None:
    done = here(*words)
    if not words:
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: genesis" in done.stdout
        return
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {what}")
    assert "\n  where: command line\n  next: " in done.stderr
    assert "train.batch_size=VALUE" in done.stderr or "--batch-size" not in words
    assert "Traceback" not in done.stderr


def test_a_control_character_on_the_command_line_is_escaped() -> None:
    for words in (
        ("\x1b[2J",),
        ("train", "\x1b[2J"),
        ("train", "quickstart", "--\x1b"),
        ("train", "quickstart", "a\x1b=1"),
    ):
        done = here(*words)
        assert done.returncode in (2, 3)
        assert "\x1b" not in done.stderr


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(
    "work",
    [
        "time.sleep(30)",
        "threading.Thread(target=time.sleep, args=(30,)).start(), time.sleep(30)",
    ],
    ids=["code", "threads"],
)
def test_an_interruption_is_exit_130(work: str, tmp_path: Path) -> None:
    # A shell may have started the tests with SIGINT ignored, which children inherit.
    heard = "import signal, threading, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source = f"{heard}def train(config, **kw):\n open({str(tmp_path / 'on')!r}, 'w').close()\n {work}"
    command = [sys.executable, "-c", FAKE_SESSION.format(source=source), "train", "quickstart"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (tmp_path / "on").exists() and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.05)  # from the file to the work
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (130, "interrupted\n")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_a_library_makes_an_error_of_is_no_bug(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imports do so: numpy says that its C extensions are broken."""
    monkeypatch.setattr(signals, "_raised", [])
    wrapped = errors.ModelError("the tokenizer cannot be used")
    wrapped.__cause__ = ImportError("interrupted")
    made = (ImportError("no C extension"), ModuleNotFoundError(name="typing"), SystemError("NULL"), wrapped)
    assert {exit_code(error, debug=False) for error in made} == {70, 6, 5}
    raises = signals.raise_interrupt if number == signal.SIGINT else signals.Interrupts()._on_signal
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    with pytest.raises((KeyboardInterrupt, errors.InterruptedRun)):
        raises(number, None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert {exit_code(error, debug=False) for error in made} == {code}
    assert exit_code(errors.DataError("bad"), debug=False) == 4
    monkeypatch.setattr(signals, "_RECENT_SECONDS", 0.0)  # a chat went on after it
    assert exit_code(SystemError("NULL"), debug=False) == 70
    capsys.readouterr()


@pytest.mark.full
def test_an_error_beside_a_thread_in_a_library_keeps_its_code() -> None:
    """Python's own end would abort the process in such a thread: 134."""
    source = """
import threading, time, tokenizers
from genesis.errors import DataError
def texts():
    while True:
        yield "some words"
        time.sleep(1e-4)
def train(config, **kw):
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False)
    for _ in range(12):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        threading.Thread(target=tokenizer.train_from_iterator, args=(texts(), trainer), daemon=True).start()
    raise DataError("bad")
"""
    assert genesis_with(source, "train", "quickstart").returncode == 4


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("hard, code", [(7, 6), (1024, 0)])
def test_a_limit_on_open_files_is_raised_or_named(hard: int, code: int) -> None:
    done = genesis("--version", preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (7, hard)))
    assert (done.returncode, "ulimit -n" in done.stderr) == (code, code == 6)


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("command", ["schema", "--version", "--help"])
def test_a_full_disk_behind_stdout_is_exit_8(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = genesis(command, stdout=full)
    assert done.returncode == 8
    assert done.stderr.startswith("error: writing failed: No space left on device")


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("command", ["schema", "env"])
def test_a_reader_that_has_enough_is_no_error(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = genesis(command, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_a_broken_pipe_that_is_not_stdout_is_no_success() -> None:
    done = genesis_with(CONFIG + "raise BrokenPipeError(32, 'Broken pipe')", "train", "quickstart")
    assert done.returncode == 8
    assert "Broken pipe" in done.stderr


@pytest.mark.full
def test_a_closed_stderr_does_not_change_the_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = genesis("train", "nowhere.yaml", stderr=writer)
    os.close(writer)
    assert done.returncode == 3


CLOSED = """
import os
import re
def train(config, console, **kw):
    descriptor = os.open(os.path.join(os.environ["FOLDER"], "checkpoint"), os.O_WRONLY | os.O_CREAT)
    assert descriptor > 2, descriptor
    console.line("progress")
    os.write(descriptor, b"saved")
"""


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("closing", ["0<&- 1>&- 2>&-", "1>&-", "2>&-"])
def test_files_never_take_the_place_of_closed_streams(tmp_path: Path, closing: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", FAKE_SESSION.format(source=CLOSED)]
    done = subprocess.run(
        [*shell, "train", "quickstart"], env={**os.environ, "FOLDER": str(tmp_path)}, timeout=60, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "checkpoint").read_bytes() == b"saved"


LONG = """
def train(config, console, **kw):
    for step in range(3000):
        console.line("a line of progress that fills buffers")
    open(config.train.output_dir, "w").write("trained")
"""


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("sink", ["head", "/dev/full"])
def test_training_goes_on_when_stdout_fails(tmp_path: Path, sink: str) -> None:
    words = ("train", "quickstart", f"train.output_dir={tmp_path / 'done'}")
    if sink == "head":
        reader, writer = os.pipe()
        os.close(reader)
        done = genesis_with(LONG, *words, stdout=writer)
        os.close(writer)
    else:
        with open("/dev/full", "w") as full:
            done = genesis_with(LONG, *words, stdout=full)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "done").read_text() == "trained"


@pytest.mark.full
def test_a_disk_error_of_a_library_is_exit_8() -> None:
    done = genesis_with(CONFIG + f"raise OSError({errno.ENOSPC}, 'No space left', '/run/x')", "train", "quickstart")
    assert done.returncode == 8
    assert "where: /run/x" in done.stderr


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_labels_have_colours_on_a_terminal(
    variables: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    exit_code(errors.UsageError("what\nmore\x1b", where="where", next="next"), debug=False)
    plain = block("what\nmore\x1b", "where", "next")
    assert ("\x1b[1;31merror:" in stream.getvalue()) == is_coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) == plain

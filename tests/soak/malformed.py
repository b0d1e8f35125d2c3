"""Malformed files, read by the commands that read them, under 3 GiB and 20 s of CPU each: `make malformed`.

    python -m tests.soak.malformed --times 40
    python -m tests.soak.malformed --files tokenizer.json --commands generate --times 1000 --seed 1

Each of the files is changed in one place: a key of JSON gets a value of another kind or size, is gone or comes twice; a
line or a run of bytes is replaced; the file is empty, cut, nested too deep or no text. Whatever comes, a command must
end in time with the exit code of a class, without a traceback, and without taking gigabytes. Prints what failed; the
exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.sweep import ALLOWED, ENVIRONMENT, workers

MEMORY = 3 << 30
PEAK = 1 << 30  # of the memory that is used, beside what the warm process has
CPU_S, PATIENCE_S = 20, 120.0
NUMBERS = (0, 1, -1, 7, 5_000_000, 2**31, 2**53 + 1, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e300, 1e308)
TEXTS = ("", "abc", "1", "\0", "../../etc/passwd", "/dev/zero", "x" * 100_000, "\ud800", "🤗\u202e\x1b[2J")
BAD: tuple[Any, ...] = (
    *(None, True, False, *NUMBERS, float("nan"), float("inf"), *TEXTS, [], [1], [None] * 1000, [[]], {}, {"a": 1}),
    *({"type": "Sequence"}, {"type": "Replace"}, ["x"] * 100_000, {str(n): n for n in range(10_000)}),
)
_CPU = ("--device", "cpu")
_TUNED = ("train.output_dir=tuned", "train.steps=1", "eval.prompts=[]")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "base", "--prompt", "alpha", "--max-tokens", "2", *_CPU),
    "generate shards": ("generate", "shards", "--prompt", "alpha", "--max-tokens", "2", *_CPU),
    "generate an adapter": ("generate", "adapter", "--base", "base", "--prompt", "alpha", "--max-tokens", "2", *_CPU),
    "generate a file": ("generate", "base", "--prompts", "questions.jsonl", "--max-tokens", "2", *_CPU),
    "generate a run": ("generate", "run", "--prompt", "alpha", "--max-tokens", "2", *_CPU),
    "eval": ("eval", "base", "--data", "docs", "--seq-len", "32", *_CPU),
    "eval --task": ("eval", "base", "--task", "task.jsonl", "--max-tokens", "2", *_CPU),
    "export": ("export", "base", "--out", "exported", "--dtype", "bf16", "--check"),
    "export a run": ("export", "run", "--out", "exported"),
    "export --merge": ("export", "adapter", "--base", "base", "--out", "exported", "--merge"),
    "train a folder": (
        *("train", "config.yaml", "model.config=null", "model.path=base", "data.tokenizer=null", *_TUNED),
        *("data.seq_len=16", "data.train=[docs]"),
    ),
    "train data": ("train", "config.yaml", "data.train=[data]", *_TUNED),
    "train chats": ("train", "chats.yaml", *_TUNED),
    "train --resume": ("train", "config.yaml", "--resume"),
    "preview": ("data", "preview", "config.yaml", "data.train=[data]"),
    "preview chats": ("data", "preview", "chats.yaml", *_TUNED),
    "validate": ("validate", "config.yaml", "model.config=null", "model.path=base", "data.tokenizer=null"),
    "estimate": ("estimate", "config.yaml", "model.config=null", "model.path=base", "--gpu-memory", "24"),
    "init": ("init", "new.yaml", "--model", "base", "--data", "docs", "--goal", "lora"),
    "report": ("report", "run", "--out", "page.html"),
    "chat": ("chat", "base", "--temperature", "0", "--max-tokens", "2", *_CPU),
    "bench-model": ("bench-model", "--size", "base", "--batch-size", "1", "--seq-len", "8", "--fast", *_CPU),
}
_READS_A_MODEL = ("generate", "eval", "export", "train a folder", "chat", "init", "validate")
FILES: dict[str, tuple[str, ...]] = {
    "base/config.json": (*_READS_A_MODEL, "estimate", "bench-model"),
    "base/tokenizer.json": _READS_A_MODEL,
    "base/tokenizer_config.json": _READS_A_MODEL,
    "base/generation_config.json": ("generate", "chat", "export", "train a folder"),
    "base/chat_template.jinja": ("chat", "generate", "export", "train chats", "init"),
    "base/model.safetensors": ("generate", "export", "train a folder", "estimate"),
    "shards/model.safetensors.index.json": ("generate shards",),
    "adapter/adapter_config.json": ("generate an adapter", "export --merge"),
    "adapter/adapter_model.safetensors": ("generate an adapter", "export --merge"),
    "run/config.resolved.yaml": ("report", "train --resume", "generate a run", "export a run"),
    "run/metrics.jsonl": ("report", "train --resume"),
    "run/samples.jsonl": ("report", "train --resume"),
    "run/checkpoint-1/manifest.json": ("train --resume", "export a run"),
    "run/checkpoint-1/trainer_state.json": ("train --resume",),
    "run/checkpoint-1/optimizer.safetensors": ("train --resume",),
    "data/more.jsonl": ("train data", "preview"),
    "data/table.csv": ("train data", "preview"),
    "data/list.json": ("train data", "preview"),
    "data/table.parquet": ("train data", "preview"),
    "chats.jsonl": ("train chats", "preview chats"),
    "questions.jsonl": ("generate a file",),
    "task.jsonl": ("eval --task",),
    "talk.jsonl": ("chat",),
    "config.yaml": ("validate", "train data", "estimate"),
}


@dataclass(frozen=True)
class Change:
    """New content of a file, and in words what it is."""

    what: str
    data: bytes


# --- Changes ---------------------------------------------------------------------------------------------------------


def change_of(name: str, data: bytes, chance: random.Random) -> Change:
    """One change of a file."""
    if chance.random() < 0.15:
        return _whole(data, chance)
    if name.endswith((".json", ".index.json")):
        return _changed_json(data, chance)
    if name.endswith(".safetensors"):
        return _changed_header(data, chance)
    if name.endswith(".jsonl"):
        lines = data.splitlines()
        number = chance.randrange(len(lines))
        change = _changed_json(lines[number], chance) if chance.random() < 0.8 else _whole(lines[number], chance)
        return Change(
            f"line {number + 1}: {change.what}",
            b"\n".join([*lines[:number], change.data, *lines[number + 1 :]]) + b"\n",
        )
    return _changed_text(data, chance)


def _whole(data: bytes, chance: random.Random) -> Change:
    ways = {
        "empty": b"",
        "cut": data[: chance.randrange(len(data) or 1)],
        "nested": b"[" * 100_000,
        "nested objects": b'{"a":' * 50_000,
        "no text": b"\xff\xfe\x00" * 1000,
        "zeros": bytes(len(data)),
        "huge": b'{"a": "' + b"x" * (80 << 20) + b'"}',
        "spaces": b" " * (40 << 20),
        "a scalar": b"1" * 5000,
        "null": b"null",
        "a list": b"[]",
        "BOM": b"\xef\xbb\xbf" + data,
        "UTF-16": data.decode("utf-8", "replace").encode("utf-16"),
        "twice": data + data,
        "quotes": b'"' * 99_999,
        "braces": b"{{" * 30_000,
        "anchors": b"a: &a [x,x,x]\n" + b"".join(b"a%d: &a%d [*a,*a,*a,*a]\n" % (n, n) for n in range(30)),
    }
    what = chance.choice([*ways])
    return Change(what, ways[what])


def _changed_json(data: bytes, chance: random.Random) -> Change:
    try:
        value = json.loads(data)
    except ValueError:
        return _whole(data, chance)
    places = list(_places(value))
    if not places:
        return _whole(data, chance)
    path = chance.choice(places)
    changed = copy.deepcopy(value)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    way = chance.random()
    if way < 0.05:
        del inside[path[-1]]
        return Change(f"{path} is gone", _dumped(changed))
    new = chance.choice(BAD)
    if way < 0.1 and isinstance(inside, dict):
        inside["added"] = new
        return Change(f"{path} gets another: {repr(new)[:60]}", _dumped(changed))
    if way < 0.15 and isinstance(inside, list) and len(inside) < 100_000:
        inside *= 100_000 // (len(inside) or 1)
        return Change(f"{path[:-1]} is repeated to {len(inside)}", _dumped(changed))
    inside[path[-1]] = new
    return Change(f"{path} = {repr(new)[:60]}", _dumped(changed))


def _dumped(value: Any) -> bytes:
    sys.set_int_max_str_digits(0)
    return json.dumps(value).encode()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, and of a few where there are very many alike."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, each in pairs if len(pairs) <= 60 else [*pairs[:2], *pairs[-2:]]:
        yield (*path, key)
        yield from _places(each, (*path, key))


def _changed_header(data: bytes, chance: random.Random) -> Change:
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.2:
        length = chance.choice((0, 1, size - 1, size + 1, len(data), 100_000_001, 2**31, 2**63, 2**64 - 1))
        return Change(f"header of {length}", length.to_bytes(8, "little") + data[8:])
    change = _changed_json(data[8 : 8 + size], chance)
    return Change(change.what, len(change.data).to_bytes(8, "little") + change.data + data[8 + size :])


def _changed_text(data: bytes, chance: random.Random) -> Change:
    """Of YAML, CSV, templates and anything else: a line's value, a line, or some bytes."""
    way = chance.random()
    if way < 0.5:
        lines = data.split(b"\n")
        number = chance.randrange(len(lines))
        new = chance.choice(BAD)
        text = (repr(new) if isinstance(new, float) else json.dumps(new)).encode()[:2_000_000]
        name = lines[number].partition(b":")[0]
        lines[number] = name + b": " + text if b":" in lines[number] else text
        return Change(f"line {number + 1} = {text[:60]!r}", b"\n".join(lines))
    at = chance.randrange(len(data) or 1)
    if way < 0.75:
        pieces = (
            b"{%",
            b"{{ 9**9**9 }}",
            b"{% for a in range(10**9) %}x{% endfor %}",
            b"\0",
            b'"',
            b",",
            b"\n",
            b"&a ",
            b"*a",
            b"!!python/object:os.system x",
            b"{{ messages * 10**9 }}",
            b"{{ ''.__class__ }}",
        )
        new_bytes = chance.choice(pieces) * chance.choice((1, 1, 1, 1000, 100_000))
        return Change(f"at {at}: {new_bytes[:40]!r} of {len(new_bytes)}", data[:at] + new_bytes + data[at:])
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 1, 4, 30))):
        flipped[chance.randrange(len(data))] = chance.randrange(256)
    return Change(f"bytes replaced (first of {at})", bytes(flipped))


# --- Runs ------------------------------------------------------------------------------------------------------------


def make_files(done: Path) -> None:
    """What the commands read beside what the sweep's world has."""
    shards, data = done / "shards", done / "data"
    shutil.copytree(done / "base", shards)
    name = "model-00001-of-00001.safetensors"
    (shards / "model.safetensors").rename(shards / name)
    raw = (shards / name).read_bytes()
    tensors = [key for key in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if key != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (done / "base" / "manifest.json").unlink(missing_ok=True)
    (shards / "manifest.json").unlink(missing_ok=True)
    data.mkdir()
    rows = [{"text": f"alpha beta {n} gamma delta epsilon zeta eta theta", "id": n} for n in range(20)]
    (data / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "list.json").write_text(json.dumps(rows))
    (data / "table.csv").write_text("text,id\n" + "".join(f'"{row["text"]}",{row["id"]}\n' for row in rows))
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data / "table.parquet")
    (done / "talk.jsonl").write_text(
        json.dumps({"role": "user", "content": "alpha"})
        + "\n"
        + json.dumps({"role": "assistant", "content": "beta"})
        + "\n"
    )
    (done / "load.txt").write_text("/load talk.jsonl\nalpha\n")
    shutil.rmtree(done / "run" / "checkpoint-2", ignore_errors=True)
    for name in ("generation_config.json", "tokenizer_config.json"):
        path = done / "base" / name
        if not path.exists():
            path.write_text("{}")


def run(folder: Path, words: tuple[str, ...]) -> tuple[int | None, str, float, int]:
    """Run a command in a fork: exit code (None: no end in time), stderr, seconds and peak bytes."""
    start = time.monotonic()
    told = folder / "told"
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            os.chdir(folder)
            os.environ.update(
                {**ENVIRONMENT, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PWD": str(folder)}
            )
            stdin = "load.txt" if words[0] == "chat" else os.devnull
            for number, (path, flags) in enumerate(
                (
                    (stdin, os.O_RDONLY),
                    ("stdout", os.O_WRONLY | os.O_CREAT),
                    (told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                )
            ):
                os.dup2(os.open(path, flags, 0o600), number)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            from genesis_cli.main import main

            code = main(list(words))
        except BaseException as error:
            os.write(2, f"Traceback (out of main): {error!r}\n".encode())
        finally:
            os._exit(code)
    descriptor = os.pidfd_open(pid)
    is_over = bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    os.close(descriptor)
    if not is_over:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status) if is_over else None
    return (
        code,
        told.read_text(errors="replace") if told.exists() else "",
        time.monotonic() - start,
        usage.ru_maxrss * 1024,
    )


def problems(code: int | None, told: str, peak: int) -> Iterator[str]:
    """What is wrong with an end."""
    if code is None:
        yield f"no end within {PATIENCE_S:g} s"
    elif code not in ALLOWED | {7}:
        yield f"exit code {code}"
    if "Traceback" in told or "a bug in Genesis" in told:
        yield "a traceback or a bug report"
    if peak > PEAK:
        yield f"{peak / 2**30:.1f} GiB"
    if len(told) > 10_000:
        yield f"{len(told)} characters of errors"


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", nargs="*", default=[*FILES], metavar="NAME", help="of: " + ", ".join(FILES))
    parser.add_argument("--commands", nargs="*", metavar="NAME", help="of: " + ", ".join(COMMANDS))
    parser.add_argument("--times", type=int, default=10, help="changes of each file for each command")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    from tests.faults.server import warm_up

    total, failed, codes = 0, 0, Counter[str]()
    with workers(1, 60) as (world, [worker]):
        done, here = world.folder / "done", worker.folder / "here"
        make_files(done)
        warm_up()
        for name, command in (
            (n, c) for n in asked.files for c in FILES[n] if not asked.commands or c in asked.commands
        ):
            source = (done / name).read_bytes()
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(done, here)
            code, told, _, _ = run(here, COMMANDS[command])
            assert code == 0, f"{command} with the files as they were: exit {code}\n{told}"
            wrong, begin = 0, time.monotonic()
            for number in range(asked.times):
                change = change_of(name, source, random.Random(f"{asked.seed} {name} {command} {number}"))
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(done, here)
                (here / name).write_bytes(change.data)
                code, told, seconds, peak = run(here, COMMANDS[command])
                total, codes[str(code)] = total + 1, codes[str(code)] + 1
                if found := list(problems(code, told, peak)):
                    wrong += 1
                    print(
                        f"{name}, {command}, number {number}: {change.what}: exit {code} in {seconds:.1f} s: "
                        f"{'; '.join(found)}\n    " + told.strip()[-1500:].replace("\n", "\n    ")
                    )
            failed += wrong
            print(
                f"{name:<38} {command:<20} {asked.times:>5} in {time.monotonic() - begin:5.1f} s; {wrong} wrong",
                flush=True,
            )
    print(f"{total} malformed files, {failed} wrong; exit codes {dict(codes)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

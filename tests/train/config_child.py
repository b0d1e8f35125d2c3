"""A process that loads configurations, each in a child that may take two seconds and 256 MiB more than it starts with.

Reads requests from stdin (four bytes of length, then the bytes) and answers each with a line: `ok`, `refused`, or what
went wrong. `python config_child.py misbehave` acts up instead of loading, for the test of this guard.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

SECONDS = 2
MEMORY = 256 * 2**20
ANSWERS = {0: "ok", 10: "refused", 11: "memory", 12: "exception"}


def load(source: bytes) -> int:
    from genesis.errors import ConfigError, UsageError
    from genesis.train.config_file import parse_config

    text, _, overrides = source.partition(b"\xfe\xfe")
    words = [word.decode("utf-8", "replace") for word in overrides.split(b"\xfe")] if overrides else []
    try:
        config = parse_config(text, "fuzz.yaml", words)
    except (ConfigError, UsageError) as error:
        return 10 if well_formed(error.what, error.where, error.next) else 12
    assert parse_config(config.resolved_yaml(), "again.yaml") == config
    return 0


def well_formed(*parts: str) -> bool:
    """Whether each part of an error says something, in characters that a terminal shows."""
    return all(part and all(line.isprintable() for line in part.split("\n")) for part in parts)


def misbehave(source: bytes) -> int:
    if source == b"spin":
        while True:
            pass
    if source == b"hog":
        bytearray(MEMORY * 2)
    if source == b"raise":
        raise KeyError("planted")
    return 0


def guarded(work: object, source: bytes, pages: int) -> str:
    """What became of `work(source)` in a child under limits."""
    child = os.fork()
    if child == 0:
        code = 12
        try:
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            code = work(source)  # type: ignore[operator]
        except MemoryError:
            code = 11
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else f"signal {os.WTERMSIG(status)}"
    return ANSWERS.get(os.WEXITSTATUS(status), "exception")


def main() -> None:
    work = misbehave if sys.argv[1:] == ["misbehave"] else load
    load(b"warm: up")
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    while head := sys.stdin.buffer.read(4):
        print(guarded(work, sys.stdin.buffer.read(int.from_bytes(head, "big")), pages), flush=True)


if __name__ == "__main__":
    main()

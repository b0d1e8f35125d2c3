"""Whether the tokenizers library may run what a tokenizer.json asks for: known to be bounded, or tried in a child.

A kilobyte of normalizers can double a text forty times, and then the library ends the process: an allocation that
fails in it is no exception. Most tokenizers have only parts whose cost is known from their structure. Any other is
loaded and tried in a child process with limits on time and memory before this process lets it in. What the child found
is remembered by the content's hash, so that a start pays for it once.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from genesis.data.tokenizer_cache import user_cache
from genesis.errors import ModelError

MAX_PARTS = 32  # of a sequence of normalizers, pre-tokenizers or decoders
MAX_GROWTH = 16.0  # bytes after all replacements for a byte before them
MAX_PREPENDED = 64  # characters
MAX_ADDED, MAX_ADDED_CHARS = 1 << 15, 1 << 20

MEMORY_BYTES = 2 << 30  # and 32 for every byte of the file
CPU_SECONDS = 2  # and one more for every 2 MiB of the file
GROWTH_TRIED = 64  # what the child lets pass

# Patterns of GPT-2, Llama 3 and Qwen2: what they cost is known from use.
_KNOWN = frozenset(
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
_MEMBERS = ("normalizers", "pretokenizers", "decoders")


def check_bounded(
    content: Mapping[str, Any], runnable: str, where: str, *, library: Path, version: str, patterns: Collection[str]
) -> None:
    """Return if the library may be given `runnable`, the tokenizer.json `content` as it gets it.

    Args:
        library: the folder that the library is imported from. version: the library's.
        patterns: those of the caller's own, besides the well-known ones.

    Raises:
        ModelError: a child that tried it came to the limits, or the library ended it.
    """
    if is_bounded(content, patterns):
        return
    name = f"{hashlib.sha256(f'1 {version} {runnable}'.encode()).hexdigest()}.tried"
    cache = user_cache()
    if cache.find(name, limit=4096) is not None:
        return
    if reason := _tried(runnable, library):
        next = "take the tokenizer again from its source, or leave data.tokenizer out to train one on the data"
        raise ModelError(f"the tokenizer cannot be used: {reason}", where=where, next=next)
    cache.put(name, {"ok": b""})


def is_bounded(content: Mapping[str, Any], patterns: Collection[str]) -> bool:
    """Whether the parts' cost is known from their structure: linear in the text, with a small factor."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        leaves = list(_leaves(content.get(part)))
        growth, prepended = 1.0, 0
        for leaf in leaves:
            pattern = leaf.get("pattern")
            if isinstance(pattern, dict):
                kind, text = next(iter(pattern.items()), ("", ""))
                if not isinstance(text, str) or not text or len(pattern) != 1 or kind not in ("String", "Regex"):
                    return False
                if kind == "Regex" and not (leaf.get("type") == "Split" and (text in _KNOWN or text in patterns)):
                    return False
                growth *= max(1.0, len(str(leaf.get("content", "")).encode(errors="replace")) / len(text.encode()))
            elif pattern is not None:
                return False
            prepended += len(str(leaf.get("prepend", "")))
        if len(leaves) > MAX_PARTS or growth > MAX_GROWTH or prepended > MAX_PREPENDED:
            return False
    added = content.get("added_tokens")
    tokens = (
        [str(token.get("content")) for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    )
    return len(tokens) <= MAX_ADDED and sum(map(len, tokens)) <= MAX_ADDED_CHARS


def _leaves(part: Any) -> Iterator[dict[str, Any]]:
    """The parts below `part`, with sequences opened; their depth is limited by the JSON's."""
    if not isinstance(part, dict):
        return
    for key in _MEMBERS:
        if part.get("type") == "Sequence" and isinstance(part.get(key), list):
            for member in part[key]:
                yield from _leaves(member)
            return
    yield part


# Runs without site and environment. Texts are tried that repeat what the parts replace, and runs of common characters.
_CHILD = """
import json, resource, sys
memory, seconds, growth = map(int, sys.argv[2:])
for what, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
    try:
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    except (OSError, ValueError):
        pass
sys.path.insert(0, sys.argv[1])
import tokenizers
text = sys.stdin.buffer.read().decode()
found, left = [], [json.loads(text)[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
while left:
    part = left.pop()
    left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if isinstance(part, str) and len(found) < 64:
        found.append(part[:256])
tokenizer = tokenizers.Tokenizer.from_str(text)
tokenizer.encode_special_tokens = True
runs = ["a" * 4096, " " * 4096, "1" * 4096, "\\n" * 1024, "aA1 -\\n" * 512, "a" * 512 + "!", "\\ufdfa" * 256]
probes = ["Probe: 0123 \\xe4\\xdf\\u6f22\\u5b57\\n\\tend. ", *runs]
probes = [*found, *probes, *(one * (1 + 1024 // len(one)) for one in found if one)]
for probe in probes:
    room = growth * len(probe) + 4096
    if tokenizer.normalizer is not None and len(tokenizer.normalizer.normalize_str(probe)) > room:
        sys.exit("grows")
    ids = tokenizer.encode(probe, add_special_tokens=False).ids
    plain = sum(len(tokenizer.id_to_token(i) or "") for i in ids)
    if len(tokenizer.decode(ids, skip_special_tokens=False)) > growth * plain + 4096:
        sys.exit("grows")
print("ok")
"""


def _tried(runnable: str, library: Path) -> str:
    """Why the library may not have it; an empty text where a child had no trouble."""
    data = runnable.encode()
    seconds, memory = CPU_SECONDS + (len(data) >> 21), MEMORY_BYTES + 32 * len(data)
    environment = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    words = [sys.executable, "-I", "-S", "-c", _CHILD, str(library), str(memory), str(seconds), str(GROWTH_TRIED)]
    limits = f"{seconds} s and {memory >> 30} GiB"
    try:
        done = subprocess.run(
            words, input=data, env=environment, capture_output=True, check=False, timeout=10 * seconds, close_fds=True
        )
    except subprocess.TimeoutExpired:
        return f"it does not encode a few lines of text within {limits}"
    except OSError as error:
        return f"it has parts that must be tried in a child process, which cannot be started: {error.strerror}"
    if done.returncode == 0 and done.stdout == b"ok\n":
        return ""
    if done.stderr.startswith(b"grows"):
        return f"its parts make a text more than {GROWTH_TRIED} times as long"
    if done.returncode < 0 or b"MemoryError" in done.stderr:
        return f"it does not encode a few lines of text within {limits}"
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last[:300] or f"the library ends with code {done.returncode}"

"""The programs of tests/programs with torch and with Genesis: what they print must agree.

    .venv-peers/bin/python -m tests.peers.programs [--device cuda] [--only name,name] [--write]

Each runs in a process of its own, once as it is and once with its imports renamed. Programs whose names begin with
`cuda_` need a GPU. `--write` stores what torch printed on the CPU in tests/programs/expected.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.programs import running

RUN = "import sys; from tests.programs import running; from pathlib import Path; " \
    "sys.stdout.write(running.output_of(Path(sys.argv[1]), genesis=sys.argv[2] == 'genesis'))"  # fmt: skip


def printed(path: Path, library: str, device: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the last line of the errors of one program."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(path), library],
        capture_output=True, text=True, timeout=300, env={**os.environ, **hidden}, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout, (run.stderr.strip().splitlines() or [""])[-1]


def main(argv: list[str] | None = None) -> int:
    """Run the programs and print which of them differ; the exit code is 1 if one does."""
    parser = argparse.ArgumentParser(description="Programs written for torch, with torch and with Genesis.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help=f"store torch's output in {running.EXPECTED.name}")
    options = parser.parse_args(argv)
    known = running.stored() if running.EXPECTED.exists() else {}
    equal = total = 0
    for path in running.programs():
        if (options.only and path.stem not in options.only.split(",")) or (
            options.device == "cpu" and path.stem.startswith("cuda_")
        ):
            continue
        total += 1
        code, expected, error = printed(path, "torch", options.device)
        if code:
            print(f"{path.stem}: torch fails: {error}", flush=True)
            continue
        known[path.stem] = expected
        code, found, error = printed(path, "genesis", options.device)
        reason = f"fails: {error}" if code else running.difference(expected, found)
        equal += not reason
        if reason:
            print(f"{path.stem}: {reason}"[:400], flush=True)
    print(f"{equal} of {total} programs agree with torch on {options.device}")
    if options.write and options.device == "cpu":
        running.EXPECTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(equal != total)


if __name__ == "__main__":
    sys.exit(main())

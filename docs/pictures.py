"""The pictures of the README: commands run in a terminal of 100 columns, and a run's report page in a browser.

python -m docs.pictures trains the quickstart in a temporary folder (minutes on a CPU) and writes docs/images. The page
needs `chromium` on the PATH.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
COLUMNS = 100


def in_terminal(command: str, folder: str) -> str:
    """What a terminal receives from the command."""
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    words = [sys.executable, "-m", "genesis_cli", *command.split()[1:]]
    process = subprocess.Popen(words, cwd=folder, stdout=slave, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    received = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux reports the closed end of a terminal as an error
            piece = b""
        if not piece:
            break
        received += piece
    os.close(master)
    if process.wait() != 0:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return received.decode()


def lasting_lines(output: str) -> list[str]:
    """The lines that remain on the screen: a progress line is erased and overwritten."""
    lines = (re.split(r"\r|\x1b\[2K", line.rstrip("\r"))[-1] for line in output.split("\n"))
    return [re.sub(r"\x1b\[\?25[lh]|\x1b\[[0-9]*[ABCDJK]", "", line) for line in lines]


def draw(command: str, lines: list[str], file: str) -> None:
    """Write the terminal as an SVG picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join([f"\x1b[1m$ {command}\x1b[0m", *lines]).rstrip()))
    # Without fonts from the network.
    drawn = console.export_svg(title="", font_aspect_ratio=0.61)
    (IMAGES / file).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


def main() -> int:
    """Run the commands and write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = "genesis train quickstart"
        lines = lasting_lines(in_terminal(command, folder))
        draw(command, [*lines[:12], "…", *lines[-12:]], "train.svg")
        command = "genesis profile --op softmax --shape 8192,4096"
        draw(command, lasting_lines(in_terminal(command, folder)), "profile.svg")
        in_terminal("genesis report runs/quickstart", folder)
        if browser := shutil.which("chromium"):
            options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,900"]
            page = f"file://{folder}/runs/quickstart/report.html"
            subprocess.run(
                [browser, *options, f"--screenshot={IMAGES}/report.png", page], check=True, capture_output=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

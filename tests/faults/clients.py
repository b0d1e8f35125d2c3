"""What the sweep asks of the commands that serve: a few requests to a child of the server of forks, then SIGINT."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CLIENTS", "Answer", "ask"]

Answer = list[Any]  # [what was asked, status (None: no answer came), the body or why there is none]
_ADDRESS = re.compile(r"http://(127\.0\.0\.1:\d+)/")
_TEXT = {"model": "base", "max_tokens": 2, "temperature": 0}
_SAID = [{"role": "user", "content": "beta?"}]


def _serve(request: Callable[..., None]) -> None:
    request("POST", "/v1/completions", {**_TEXT, "prompt": "alpha", "logprobs": 1})
    request("POST", "/v1/chat/completions", {**_TEXT, "messages": _SAID})
    request("POST", "/v1/chat/completions", {**_TEXT, "messages": _SAID, "stream": True})
    request("GET", "/health")


def _watch(request: Callable[..., None], folder: Path) -> None:
    request("GET", "/")
    os.utime(folder / "run" / "metrics.jsonl", ns=(0, 0))  # as if a step was written
    request("GET", "/")
    request("GET", "/")


CLIENTS: dict[str, Callable[[Callable[..., None], Path], None]] = {
    "serve": lambda request, folder: _serve(request),
    "watch": _watch,
}


def ask(name: str, pid: int, folder: Path, written: list[str], patience: float) -> list[Answer]:
    """Wait for the address in one of the files `written`, send the requests of the client `name`, and then SIGINT.

    Returns the answers; none where the process ended before it told an address.
    """
    deadline = time.monotonic() + patience
    ended = os.pidfd_open(pid)
    try:
        while (found := _ADDRESS.search("".join(map(_text, written)))) is None:
            if time.monotonic() > deadline or select.select([ended], [], [], 0.005)[0]:
                return []
        answers: list[Answer] = []

        def request(method: str, path: str, body: dict[str, Any] | None = None) -> None:
            answers.append([f"{method} {path}", *_answer(found[1], method, path, body, patience)])

        CLIENTS[name](request, folder)
        if any(status is not None for _, status, _ in answers):  # else it is about to end by itself
            signal.pidfd_send_signal(ended, signal.SIGINT)
        return answers
    except ProcessLookupError:
        return answers
    finally:
        os.close(ended)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _answer(host: str, method: str, path: str, body: dict[str, Any] | None, patience: float) -> Answer:
    connection = http.client.HTTPConnection(host, timeout=patience)
    data = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return [answer.status, answer.read().decode("utf-8", "replace")]
    except (OSError, http.client.HTTPException) as error:
        return [None, repr(error)]
    finally:
        connection.close()

"""A hub on loopback that serves model folders as huggingface.co does, and misbehaves where a test asks it to."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

__all__ = ["Hub", "served", "used"]

COMMIT = "c" * 40


@dataclass
class Hub:
    """Models by `ORG/NAME`, data sets by `datasets/ORG/NAME`, and what went over the wire.

    Attributes:
        refusals: path of a request -> status and X-Error-Code of the answer.
        cuts: bytes after which a file's next answers end, by file name.
        changed: names of files of which one byte comes wrong.
        elsewhere: the address of the host that large files are on, as on the real hub; they are at this one.
        ranges: whether the hub honours Range.
        drips: seconds between parts of a file's body, where it is above 0.
        odd: makes status, headers and body of a file's answers from its bytes and the first byte asked for, by file
            name; a body shorter than its Content-Length ends the connection.
        asked: (path, Range, Authorization) of each request.
    """

    models: dict[str, Path]
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    elsewhere: str = ""
    ranges: bool = True
    drips: float = 0.0
    odd: dict[str, Callable[[bytes, int], tuple[int, dict[str, str], bytes]]] = field(default_factory=dict)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def bytes_of(self, name: str, file: str) -> bytes:
        return (self.models[name] / file).read_bytes()

    def listing(self, name: str) -> dict[str, Any]:
        """What the hub says of a model: large files by their sha256, small ones by the hash that git gives them."""
        siblings = []
        for path in sorted(each for each in self.models[name].rglob("*") if each.is_file()):
            data = path.read_bytes()
            entry: dict[str, Any] = {
                "rfilename": str(path.relative_to(self.models[name])),
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if path.suffix in (".safetensors", ".bin", ".parquet"):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": name, "sha": COMMIT, "siblings": siblings}


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((path, self.headers["Range"], self.headers["Authorization"]))
        if path in self.hub.refusals:
            return self._refuse(*self.hub.refusals[path])
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) == 6:
            return self._list("/".join(parts[2:4] if parts[1] == "models" else parts[1:4]), parts[5])
        count = 3 if parts[0] == "datasets" else 2
        if len(parts) < count + 3:
            return self._refuse(404, "EntryNotFound")
        name, revision, file = "/".join(parts[:count]), parts[count + 1], "/".join(parts[count + 2 :])
        if name not in self.hub.models or revision != COMMIT or not (self.hub.models[name] / file).is_file():
            return self._refuse(404, "EntryNotFound")
        if self.hub.elsewhere and file.endswith(".safetensors"):
            return self._redirect(self.hub.elsewhere + path)
        return self._send(file, self.hub.bytes_of(name, file))

    def _redirect(self, address: str) -> None:
        self.send_response(302)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, name: str, revision: str) -> None:
        if name not in self.hub.models:
            return self._refuse(401, "RepoNotFound")
        if revision not in ("main", "v1.0", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        data = json.dumps(self.hub.listing(name)).encode()
        self._head(200, len(data))
        self.wfile.write(data)
        return None

    def _send(self, file: str, data: bytes) -> None:
        if file in self.hub.changed:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers["Range"] if self.hub.ranges else None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if file in self.hub.odd:
            status, headers, body = self.hub.odd[file](data, start)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
            return None
        self._head(206 if asked else 200, len(data) - start)
        cuts = self.hub.cuts.get(file)
        end = start + cuts.pop(0) if cuts else len(data)
        for at in range(start, end, 64 if self.hub.drips else max(end - start, 1)):
            self.wfile.write(data[at : min(at + 64, end)] if self.hub.drips else data[start:end])
            time.sleep(self.hub.drips)
        if end < len(data):
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, 0, code)

    def _head(self, status: int, length: int, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(models: dict[str, Path]) -> Iterator[Hub]:
    """A hub that answers on loopback inside the block."""
    hub = Hub(models)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client that has gone
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def used(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks `hub` with no token, keeps what it pulls in `cache`, and does not wait before it tries again.

    Its variables are read when huggingface_hub is imported, which another test may have done.
    """
    import huggingface_hub.constants

    import genesis.files.hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.setattr(genesis.files.hub, "PAUSE_S", 0.0)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)

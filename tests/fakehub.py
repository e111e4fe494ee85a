"""A model hub on loopback: one repository, its commits, ranges, and lines that are cut."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "tiny/llama"


@dataclass
class FakeHub:
    """files: what it serves. asked: (file, Range header) of each GET. lies: a false digest."""

    url: str
    files: dict[str, bytes]
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    lies: bool = False

    @property
    def fetched(self) -> set[str]:
        """Names of the files that somebody asked for."""
        return {name for name, _ in self.asked}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            if self.path.startswith(f"/api/models/{NAME}"):
                siblings = [{"rfilename": name} for name in hub.files]
                found = {"id": NAME, "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(found).encode(), {}, body=True)
                return
            name = self.path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            data = hub.files.get(name)
            if data is None:
                self._send(404, b"no", {"X-Error-Code": "EntryNotFound"}, body=body)
                return
            digest = hashlib.sha256(b"another" if hub.lies else data).hexdigest()
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            wanted = self.headers.get("Range")
            if body:
                hub.asked.append((name, wanted))
            if wanted is None:
                self._send(200, data, headers, body=body)
                return
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers, body=body)

        def _send(self, code: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(code)
            for key, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    return Handler


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Serve a folder's files as the repository tiny/llama."""
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    hub = FakeHub("", files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

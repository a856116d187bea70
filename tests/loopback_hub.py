"""A small Hugging Face hub on the loopback interface: what its client asks of it to download models."""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"


@dataclass
class Model:
    """Files by name. One that is gated, or private, is given for `TOKEN` only."""

    files: dict[str, bytes]
    is_gated: bool = False
    is_private: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


@dataclass
class LoopbackHub:
    """Serves models, each with the branch `main`; use it as a context manager.

    `downloads` has the path and the range of each file that was asked for. The first answer for a file in `breaks` ends
    after so many bytes; that for one in `fails` is an error.
    """

    models: Mapping[str, Model]
    downloads: list[tuple[str, str | None]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)

    def __enter__(self) -> "LoopbackHub":
        hub = self

        class Handler(_Handler):
            shared = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    shared: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        if len(parts) < 4:
            return self._refuse(404, "EntryNotFound", "Not found")
        owner, name, kind, *rest = parts[2:] if is_api else parts
        model = self.shared.models.get(f"{owner}/{name}")
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if model is None or (model.is_private and not has_token):
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if rest[0] not in ("main", model.commit):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if is_api and kind == "revision":
            return self._json({"id": f"{owner}/{name}", "sha": model.commit, "siblings": []})
        if is_api:
            return self._json([_entry(path, data) for path, data in model.files.items()])
        path = "/".join(rest[1:])
        if model.is_gated and not has_token:
            return self._refuse(401, "GatedRepo", "Access to this model is restricted")
        if path not in model.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(path, model.files[path], model.commit)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, path: str, data: bytes, commit: str) -> None:
        hub = self.shared
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if self.command == "GET":
            hub.downloads.append((path, asked))
            if path in hub.fails:
                hub.fails.remove(path)
                return self._refuse(500, "Broken", "The disk of the hub is full")
        if asked is not None:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[begin:], headers)
        return self._send(200, data, headers, hub.breaks.pop(path, None) if self.command == "GET" else None)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], end: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:end])
        if end is not None:
            self.close_connection = True


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

"""A hub on this machine: the parts of its protocol that listing a data set and reading its files need.

`huggingface_hub` and `datasets` themselves talk to it; they read its address from HF_ENDPOINT when they are imported, so that
a test runs them in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """One data set at one revision.

    Attributes:
        files: content by path; small files of text stay in git, others are kept as LFS objects.
        sent: what is sent in the place of a file's content.
        asked: the paths of all requests.
    """

    def __init__(self, name: str, revision: str, files: dict[str, bytes]) -> None:
        self.name, self.revision, self.files = name, revision, files
        self.sent: dict[str, bytes] = {}
        self.asked: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if not path.endswith((".md", ".txt")):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def info(self) -> dict[str, Any]:
        siblings = []
        for entry in map(self.entry, sorted(self.files)):
            sibling = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
            if "lfs" in entry:
                sibling["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130}
            siblings.append(sibling)
        return {"id": self.name, "sha": self.revision, "siblings": siblings, "private": False, "tags": []}

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted(self.files):
            parts = path.removeprefix(prefix).split("/")
            if not path.startswith(prefix):
                continue
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = prefix + "/".join(parts[:depth])
                found[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                found[path] = self.entry(path)
        return list(found.values())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.asked.append(path)
        api = re.escape(f"/api/datasets/{self.hub.name}")
        file = re.fullmatch(rf"/datasets/{re.escape(self.hub.name)}/resolve/[^/]+/(.+)", path)
        if re.fullmatch(rf"{api}(/revision/[^/]+)?", path):
            self._json(self.hub.info())
        elif tree := re.fullmatch(rf"{api}/tree/[^/]+/?(.*)", path):
            listing = self.hub.tree(tree[1], parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true")
            self._json(listing) if listing else self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif file and file[1] in self.hub.files:
            data = self.hub.sent.get(file[1], self.hub.files[file[1]])
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.hub.revision}
            start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if start:
                headers["Content-Range"] = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[int(start[1]) :] if start else data, headers)
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound" if file else "RepoNotFound"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

"""Data sets of a hub that answers: a small server in this process speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from mkd.data.files.hub_sets import list_files
from mkd.data.files.named_files import named_files
from tests.reported import refused

COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
FILES = {
    "README.md": b"# no header",
    "data/train-00000-of-00002.jsonl": b'{"text": "a"}\n',
    "data/train-00001-of-00002.jsonl": b'{"text": "b"}\n',
    "data/test-00000-of-00001.jsonl": b'{"text": "c"}\n',
}


class Hub(BaseHTTPRequestHandler):
    """Knows one data set, org/web. `sent` lists the files that were downloaded."""

    sent: list[str] = []

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        file = path.removeprefix(f"/datasets/org/web/resolve/{COMMIT}/")
        if file in FILES:
            if self.command == "GET":
                self.sent.append(file)
            self._send(FILES[file], ETag=f'"{hashlib.sha1(FILES[file]).hexdigest()}"')
        elif path == "/api/datasets/org/web/revision/main":
            self._send(json.dumps({"id": "org/web", "sha": COMMIT}).encode())
        elif path == f"/api/datasets/org/web/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self._send(json.dumps([{"type": "directory", "path": "data", "oid": "0"}, *entries]).encode())
        else:
            known = "/org/web/" in path
            self._send(b"{}", 404, **{"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    names = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in names.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    Hub.sent.clear()
    yield server
    server.shutdown()
    server.server_close()


def test_only_what_is_needed_is_downloaded_and_then_read_without_the_hub(hub):
    found = named_files("hub:org/web", "--data-path")
    train = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
    assert list(found.names) == train and found.text_bytes == 28 and Hub.sent == ["README.md"]
    assert "at commit fedcba987654" in found.describe() and "not reached" not in found.describe()
    (first,) = found.at_hand()
    assert Path(first).read_bytes() == FILES[train[0]] and Hub.sent[1:] == train[:1]
    assert [Path(one).read_bytes() for one in found.local()] == [FILES[name] for name in train]
    assert found.at_hand() == found.local() and Hub.sent[1:] == train
    with refused("data-set-part-unknown: splits of default: test, train"):
        named_files("hub:org/web:valid", "--data-path")
    for path in ("hub:org/other", "hub:org/web@none"):
        with refused("data-set-not-found: there is no data set org/"):
            named_files(path, "--data-path")
    hub.shutdown()
    hub.server_close()
    list_files.cache_clear()
    again = named_files("hub:org/web", "--data-path")
    assert again.local() == found.local() and "the hub was not reached" in again.describe()
    with refused("data-set-not-found: test-00000-of-00001.jsonl is missing"):
        named_files("hub:org/web:test", "--data-path")

"""A hub on this machine: the few HTTP endpoints that an upload calls, with one account."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test"


class FakeHub:
    """Repositories: name -> file -> bytes. `account` is what whoami answers."""

    def __init__(self):
        self.account = {"name": "ann", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        self.repositories, self.stored, self.may_write, self.calls = {}, {}, True, []
        self.private, self.fails = {}, False
        self.url = ""


@contextmanager
def running_hub():
    """Yield a `FakeHub` that listens on loopback."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_call(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, hub = self.path.partition("?")[0], self.hub
        hub.calls.append(f"{self.command} {path}")
        if path.startswith("/stored/"):  # the place of large files, without the hub's token
            hub.stored[path.rpartition("/")[2]] = body
            return self.answer(b"")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "invalid token"}, 401)
        if hub.fails and "/commit/" in path:
            return self.answer({"error": "the storage of ann is full"}, 413)
        if path == "/api/whoami-v2":
            return self.answer(hub.account)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or hub.account['name']}/{wanted['name']}"
            hub.repositories.setdefault(name, {})
            hub.private.setdefault(name, wanted.get("private", wanted.get("visibility") == "private"))
            return self.answer({"url": f"{hub.url}/{name}", "name": name})
        return self.of_repository(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_call

    def of_repository(self, path, body):
        found = re.match(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(\.git)?(/.*)?$", path)
        files = self.hub.repositories.get(found.group(1))
        rest = found.group(3) or ""
        if files is None:
            return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
        if rest.startswith("/auth-check"):
            return self.answer({}, 200 if self.hub.may_write else 403)
        if rest.startswith("/preupload/"):
            asked = json.loads(body)["files"]
            modes = ["lfs" if one["path"].endswith(".safetensors") else "regular" for one in asked]
            answers = [
                dict(path=one["path"], uploadMode=mode, shouldIgnore=False)
                for one, mode in zip(asked, modes, strict=True)
            ]
            return self.answer({"files": answers})
        if rest == "/info/lfs/objects/batch":
            return self.answer(
                {"transfer": "basic", "objects": [*map(self.place, json.loads(body)["objects"])]}
            )
        if rest.startswith("/commit/"):
            return self.commit(found.group(1), [json.loads(line) for line in body.splitlines() if line])
        if rest.startswith("/resolve/"):
            content = files[rest.split("/", 3)[3]]
            tag = hashlib.sha1(content).hexdigest()
            return self.answer(content, ETag=f'"{tag}"', X_Repo_Commit="a" * 40)
        if rest.startswith("/tree/"):
            return self.answer(
                [dict(type="file", path=name, size=len(one), oid="0") for name, one in files.items()]
            )
        siblings = [{"rfilename": name} for name in files]
        return self.answer({"id": found.group(1), "sha": "a" * 40, "siblings": siblings})

    def place(self, one):
        upload = {"href": f"{self.hub.url}/stored/{one['oid']}"}
        return {"oid": one["oid"], "size": one["size"], "actions": {"upload": upload}}

    def commit(self, name, operations):
        files = self.hub.repositories[name]
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        url = f"https://huggingface.co/{name}/commit/{'b' * 40}"
        return self.answer({"success": True, "commitUrl": url, "commitOid": "b" * 40})

"""Speak with a vLLM server over HTTP: timeouts, retries, and what counts as lost, refused or wrong.

The protocol is vLLM's OpenAI-compatible server with VLLM_SERVER_DEV_MODE=1, which adds the requests that
exchange its weights. A server is asked from rank 0 alone.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mkd.errors import ServerLost, UsageError

TOKEN = "MKD_ROLLOUT_SERVER_TOKEN"  # environment variable with the server's API key
TRIES = 4  # of a request: the first one and 3 retries
WAIT_S = 1.0  # before the first retry; then twice as long each time
BUSY = frozenset({408, 429})  # HTTP statuses that mean "later", besides those from 500 on
SHOWN_CHARACTERS = 300  # of an answer, in messages


@dataclass(frozen=True)
class Refused(Exception):
    """The server refuses a request."""

    path: str
    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.path} answers {self.status}: {self.text}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead, with the token, to another machine."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _build_opener() -> urllib.request.OpenerDirector:
    """Return an opener that uses no proxy of the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


@dataclass(frozen=True)
class ServerClient:
    """One server. Safe to use from several threads."""

    url: str  # http://HOST:PORT
    timeout_s: float
    wait_s: float = WAIT_S
    _opener: urllib.request.OpenerDirector = field(default_factory=_build_opener, repr=False)

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET request. Raises as `post`."""
        return self._ask(path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer to a POST request, None if it is empty. All requests may be repeated.

        Raises `ServerLost` after the last try without an answer, and `Refused` for a status below 500.
        """
        return self._ask(path, json.dumps(dict(body or {})).encode())

    def _ask(self, path: str, data: bytes | None) -> Any:
        failure: Exception | None = None
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self.wait_s * 2 ** (attempt - 1))
            try:
                return self._ask_once(path, data)
            except urllib.error.HTTPError as error:
                text = _text_of(error)
                failure = Refused(path, error.code, text)
                if error.code < 500 and error.code not in BUSY:
                    raise failure from None
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                failure = error
        raise ServerLost(
            f"the rollout server {self.url} does not answer: {failure}",
            f"{path} was tried {TRIES} times",
            "start it again, then the same command",
            code="rollout-server-lost",
        )

    def _ask_once(self, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with self._opener.open(request, timeout=self.timeout_s) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def _text_of(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode("utf-8", "replace")[:SHOWN_CHARACTERS].strip()
    except (OSError, http.client.HTTPException):
        return ""


@dataclass(frozen=True)
class ServerModel:
    """The model of a server that can sample for a run."""

    name: str
    max_tokens: int  # of a prompt and its completion


def find_model(client: ServerClient, seq_length: int) -> ServerModel:
    """Return the server's model. Raises UsageError if the server cannot serve this run."""
    start = (
        "start it with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model STUDENT "
        "--port PORT (docs/on-policy.md)"
    )
    try:
        models = client.get("/v1/models")["data"]
        client.get("/weight_info")
    except ServerLost as error:
        what = f"there is no rollout server at {client.url}"
        raise UsageError(what, error.what, start, code="rollout-server-not-ready") from None
    except Refused as error:
        if error.status in (401, 403):
            what, do = f"the rollout server {client.url} refuses the token", f"set {TOKEN} to its --api-key"
            raise UsageError(what, str(error), do, code="rollout-server-token") from None
        what = f"the rollout server {client.url} cannot exchange its weights"
        raise UsageError(what, str(error), start, code="rollout-server-not-ready") from None
    bases = [one for one in models if not one.get("parent")]  # adapters have a parent
    if len(bases) != 1:
        what = f"the rollout server {client.url} serves {len(bases)} models"
        raise UsageError(what, "it must have the student alone", start, code="rollout-server-not-ready")
    name, longest = bases[0]["id"], bases[0].get("max_model_len") or seq_length
    if longest < seq_length:
        what = f"the rollout server {client.url} takes {longest} tokens, --seq-length is {seq_length}"
        why, do = "it would cut completions", f"start it with --max-model-len {seq_length} or more"
        raise UsageError(what, why, do, code="rollout-server-not-ready")
    return ServerModel(name, longest)

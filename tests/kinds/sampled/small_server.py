"""Serve a tiny model over HTTP as vLLM does: real weights, real sampling, and failures on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from mkd.tokenizers.load import open_tokenizer


@dataclass
class Behaviour:
    """Mistakes and failures of the server."""

    dies_after: int | None = None  # completions; then it closes all connections and is gone
    fails: int = 0  # requests for completions that it answers with 500, at first
    hangs_s: float = 0.0  # it waits so long before each of the first `fails` answers, and does not fail
    keeps_weights: bool = False  # it says that it has read new weights, and has not
    forgets_version: int | None = None  # after so many completions it has another version
    api_key: str | None = None
    max_model_len: int = 4096
    has_dev_mode: bool = True
    tokenizer: Path | None = None  # default: the model's


class SmallServer:
    """One server on a free port of 127.0.0.1. The model reads weights from safetensors files."""

    def __init__(self, folder: Path, port: int = 0, **behaviour: Any):
        from transformers import AutoModelForCausalLM

        self.behaviour = Behaviour(**behaviour)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = open_tokenizer(str(self.behaviour.tokenizer or folder))
        self.version, self.asked = "default", Counter[str]()
        self.prompts: list[tuple[str, tuple[int, ...]]] = []  # (version, prompt) of every completion
        self.lock, self.is_paused, self.is_dead = threading.Lock(), False, False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                server.answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                server.answer(self, json.loads(self.rfile.read(length) or b"{}"))

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stop at once, as a process that is killed."""
        self.is_dead = True
        threading.Thread(target=self.http.shutdown, daemon=True).start()
        self.http.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: dict | None) -> None:
        path = handler.path.partition("?")[0]
        self.asked[path] += 1
        if self.is_dead:
            handler.close_connection = True
            return
        key = self.behaviour.api_key
        if key is not None and handler.headers.get("Authorization") != f"Bearer {key}":
            return _send(handler, 401, {"error": "Unauthorized"})
        dev = ("/pause", "/collective_rpc", "/resume", "/weight_info", "/update_weight_version")
        if path in (*dev, "/reset_prefix_cache") and not self.behaviour.has_dev_mode:
            return _send(handler, 404, {"detail": "Not Found"})
        name = "_" + path.strip("/").replace("/", "_")
        if not hasattr(self, name):
            return _send(handler, 404, {"detail": "Not Found"})
        status, found = getattr(self, name)(body)
        if status:
            _send(handler, status, found)
        else:
            handler.close_connection = True

    def _v1_models(self, body: Any) -> tuple[int, Any]:
        length = self.behaviour.max_model_len
        return 200, {"data": [{"id": "student", "parent": None, "max_model_len": length}]}

    def _health(self, body: Any) -> tuple[int, Any]:
        return 200, None

    def _weight_info(self, body: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.version}

    def _tokenize(self, body: Any) -> tuple[int, Any]:
        return 200, {"tokens": list(self.tokenizer.encode_continuation(body["prompt"]))}

    def _pause(self, body: Any) -> tuple[int, Any]:
        self.is_paused = True
        return 200, {"status": "paused"}

    def _resume(self, body: Any) -> tuple[int, Any]:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def _reset_prefix_cache(self, body: Any) -> tuple[int, Any]:
        return 200, {"success": True}

    def _update_weight_version(self, body: Any) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {"success": True}

    def _collective_rpc(self, body: Any) -> tuple[int, Any]:
        from safetensors.torch import load_file

        assert self.is_paused, "weights are exchanged between completions"
        if not self.behaviour.keeps_weights:
            files = list(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
            try:
                with self.lock:
                    self.model.load_state_dict(weights, strict=False)
            except RuntimeError as error:
                return 500, {"error": str(error)[:200]}
            if not files:
                return 500, {"error": "no weights"}
        return 200, {"results": [None]}

    def _v1_completions(self, body: Any) -> tuple[int, Any]:
        if body["model"] != "student":
            return 404, {"error": "The model does not exist."}
        if "prompt_logprobs" in body:
            with self.lock:
                return 200, {"choices": [{"prompt_logprobs": self._scores(body["prompt"])}]}
        behaviour = self.behaviour
        if behaviour.fails > 0:
            behaviour.fails -= 1
            if not behaviour.hangs_s:
                return 500, {"error": "out of memory"}
            time.sleep(behaviour.hangs_s)
        with self.lock:
            if behaviour.dies_after is not None and len(self.prompts) >= behaviour.dies_after:
                if not self.is_dead:
                    self.stop()
                return 0, None
            if behaviour.forgets_version is not None and len(self.prompts) >= behaviour.forgets_version:
                self.version = "default"
            self.prompts.append((self.version, tuple(body["prompt"])))
            return 200, {"choices": [self._complete(body)]}

    @torch.no_grad()
    def _log_p(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(1)

    def _scores(self, ids: list[int]) -> list[dict | None]:
        log_p = self._log_p(ids)
        scores = [{str(ids[i]): {"logprob": log_p[i - 1, ids[i]].item()}} for i in range(1, len(ids))]
        return [None, *scores]

    def _complete(self, body: dict) -> dict:
        """Sample token by token. The seed alone decides, so that a request twice has one answer."""
        generator = torch.Generator().manual_seed(body["seed"])
        allowed = body.get("allowed_token_ids")
        ids, logp = list(body["prompt"]), []
        while len(logp) < body["max_tokens"]:
            log_p = self._log_p(ids)[-1]
            logits = log_p / (body["temperature"] or 1)
            if allowed is not None:
                mask = torch.full_like(logits, -torch.inf)
                mask[allowed] = 0
                logits = logits + mask
            token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            ids.append(token)
            logp.append(log_p[token].item())
            if token in body["stop_token_ids"]:
                break
        count = len(logp)
        finish = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        return {
            "token_ids": ids[-count:],
            "prompt_token_ids": body["prompt"],
            "finish_reason": finish,
            "logprobs": {"token_logprobs": logp},
        }


def _send(handler: BaseHTTPRequestHandler, status: int, content: Any) -> None:
    data = b"" if content is None else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def small_server(folder: Path, port: int = 0, **behaviour: Any) -> Iterator[SmallServer]:
    """Run a server inside the block."""
    server = SmallServer(folder, port, **behaviour)
    try:
        yield server
    finally:
        server.stop()

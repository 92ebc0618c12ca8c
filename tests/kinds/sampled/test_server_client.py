"""Check what a client makes of a server's answers, and what the record of completions keeps."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from mkd.errors import ServerAnswer, ServerLost
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout, Sampling
from mkd.kinds.sampled.server.rollout_record import RolloutRecord
from mkd.kinds.sampled.server.sampling_job import limits_of, read_completion
from mkd.kinds.sampled.server.server_client import Refused, ServerClient, find_model
from tests.reported import refused

SAMPLING = Sampling(max_new_tokens=3, stop_ids=frozenset({0, 9}), vocab_size=10)
REQUEST = Request(4, 1, np.array([5, 6]))


def answer(ids, logp=None, finish="stop", **more):
    logp = [-0.5] * len(ids) if logp is None else logp
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": logp}, "finish_reason": finish}
    return {"choices": [choice | {"prompt_token_ids": [5, 6]} | more]}


@pytest.mark.parametrize("ids, finish", [([3, 9], STOP), ([3, 4, 0], STOP), ([1, 2, 3], LENGTH)])
def test_completions(ids, finish):
    found = read_completion(answer(ids), REQUEST, SAMPLING, 1)
    assert found.ids.tolist() == ids and found.finish == finish and found.lag == 1
    assert found.logp.tolist() == [-0.5] * len(ids) and found.request is REQUEST


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"choices": []},
        {"choices": [{"text": "a"}]},
        answer([]),
        answer([3, 9], prompt_token_ids=[5, 7]),
        answer([3, 9], logp=[-0.5]),
        answer([3, 9], logp=[None, -0.5]),
        answer([3, 9], logp=[float("nan"), -0.5]),
        answer([3, 10, 9]),
        answer([3, 4]),  # neither stopped nor long enough
        answer([3, 0, 4]),  # went on after a stop
        answer([1, 2, 3, 9]),  # too long
    ],
)
def test_answers_that_are_no_completion(wrong):
    with refused("rollout-server-answer: the rollout server's answer is not", ServerAnswer):
        read_completion(wrong, REQUEST, SAMPLING, 0)


def test_the_server_is_kept_from_ids_without_a_token():
    with_holes = replace(SAMPLING, unused_ids=frozenset({4, 7}))
    assert limits_of(SAMPLING, 10) == {}
    assert limits_of(SAMPLING, 12) == {"allowed_token_ids": list(range(10))}
    assert limits_of(with_holes, 11) == {"allowed_token_ids": [0, 1, 2, 3, 5, 6, 8, 9]}
    large = replace(with_holes, vocab_size=150_000)
    assert limits_of(large, 150_002) == {"logit_bias": dict.fromkeys(("4", "7", "150000", "150001"), -100.0)}
    with refused("rollout-server-answer: the rollout server's answer is not", ServerAnswer) as caught:
        read_completion(answer([3, 4, 7]), REQUEST, with_holes, 0)
    assert "2 of its 3 ids, such as 4," in caught.value.why


class Scripted(HTTPServer):
    """Answers requests with the given (status, headers, content) in turn; "drop" closes the connection."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                scripted.asked.append((self.path, dict(self.headers)))
                found = scripted.answers.pop(0)
                if found == "drop":
                    self.close_connection = True
                    return
                status, headers, content = found
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def client(self) -> ServerClient:
        return ServerClient(f"http://127.0.0.1:{self.server_address[1]}", timeout_s=5, wait_s=0.001)


GOOD = 200, {}, b'{"a": 1}'


def test_three_retries(monkeypatch):
    cut = (200, {"Content-Length": "100"}, b'{"a"')
    server = Scripted("drop", (503, {}, b"busy"), cut, GOOD)
    assert server.client().get("/x") == {"a": 1} and len(server.asked) == 4
    server = Scripted(*[(429, {}, b"")] * 4, GOOD)
    with refused("rollout-server-lost", ServerLost):
        server.client().get("/x")
    assert len(server.asked) == 4


def test_refusals_are_not_repeated():
    server = Scripted((400, {}, b"no such field"), GOOD)
    with pytest.raises(Refused) as caught:
        server.client().get("/x")
    assert (caught.value.status, caught.value.text) == (400, "no such field") and len(server.asked) == 1


def test_a_redirect_is_not_followed_and_no_proxy_is_used(monkeypatch):
    """Both would send the token and the prompts elsewhere."""
    other = Scripted(GOOD)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{other.server_address[1]}")
    monkeypatch.setenv("MKD_ROLLOUT_SERVER_TOKEN", "secret")
    server = Scripted((307, {"Location": f"http://127.0.0.1:{other.server_address[1]}/x"}, b""))
    with pytest.raises(Refused):
        server.client().get("/x")
    assert not other.asked and server.asked[0][1]["Authorization"] == "Bearer secret"


def test_a_server_with_two_models_is_refused():
    models = {"data": [{"id": "a", "parent": None}, {"id": "b", "parent": None}]}
    server = Scripted((200, {}, json.dumps(models).encode()), GOOD)
    with refused("rollout-server-not-ready: serves"):
        find_model(server.client(), 10)


def completion(place: int) -> Rollout:
    logp = np.array([-0.1, -1e-7 * place - 0.3], dtype=np.float32)
    return Rollout(Request(place, 0, np.array([5])), np.array([3, 9]), logp, -logp, STOP, lag=1)


def test_a_record_returns_what_was_written(tmp_path):
    """Also after the process died in a line; and nothing for other requests, settings or steps."""
    ours = [completion(place) for place in range(3)]
    requests = [one.request for one in ours]
    record = RolloutRecord(tmp_path, "settings")
    assert record.open(2, requests) == {}
    for one in ours[:2]:
        record.add(one, version=0)
    record.close()
    path = tmp_path / "step_0000002.jsonl"
    path.write_bytes(path.read_bytes() + b'{"prompt": 2, "sam')
    found = record.open(2, requests)
    assert found.keys() == {0, 1}
    for place, one in found.items():
        assert one.ids.tolist() == ours[place].ids.tolist() and one.lag == 1 and one.finish == STOP
        assert one.logp.tobytes() == ours[place].logp.tobytes()
    record.add(ours[2], version=0)
    record.close()
    assert record.open(2, requests).keys() == {0, 1, 2}
    assert RolloutRecord(tmp_path, "settings").open(3, requests) == {}
    assert RolloutRecord(tmp_path, "others").open(2, requests) == {}
    assert record.open(2, requests) == {}, "they were replaced"


def test_records_of_steps_in_a_checkpoint_are_removed(tmp_path):
    record = RolloutRecord(tmp_path, "settings", oldest_checkpoint=lambda: 2)
    for iteration in (1, 2, 3, 4):
        record.open(iteration, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000003.jsonl", "step_0000004.jsonl"]

"""Data by a server that has the teacher: restarts, its context, and what is refused."""

from __future__ import annotations

import pytest

from mkd.tokenizers.load import open_tokenizer
from tests.generate.written_data import generated, make_teacher, records_in
from tests.kinds.sampled.small_server import SmallServer, small_server
from tests.reported import reported_codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("served"))


def test_a_server_writes_and_a_lost_one_is_resumed(folder, ranks):
    """A killed server ends the job with 75; the next start asks only for what is missing."""
    samples = ("--samples-per-prompt", 3, "--slots", 2)
    with small_server(folder / "teacher") as server:
        url = server.url
        (whole,) = ranks.run(generated, 1, folder, "whole.jsonl", *samples, "--server-url", url)
        asked = len(server.prompts)
        (again,) = ranks.run(generated, 1, folder, "whole.jsonl", *samples, "--server-url", url)
        (short,) = ranks.run(
            generated, 1, folder, "short.jsonl", "--server-url", url, "--max-new-tokens", 300
        )
        refused = [
            generated_on(ranks, folder, "--server-url", url, "--server-model", "other"),
            generated_on(
                ranks, folder, "--server-url", url, "--tensor-model-parallel-size", 2, "--dtype", "bf16"
            ),
        ]
    assert whole[0] == again[0] == 0 and asked == 12, whole
    assert "is complete already" in again[1] and again[3] == whole[3] and len(records_in(whole[3])) > 6
    ends = [one["generated"] for one in records_in(short[3])]
    assert short[0] == 0 and ends and all(one["end"] in ("stop", "context") for one in ends), short
    assert reported_codes(refused[0][2]) == ["rollout-server-not-ready: not other"]
    assert reported_codes(refused[1][2]) == ["remove-flag: --tensor", "remove-flag: --dtype"]
    with small_server(folder / "teacher", dies_after=5) as server:
        port = server.http.server_address[1]
        argv = (*samples, "--server-url", server.url, "--server-timeout-s", 5)
        (lost,) = ranks.run(generated, 1, folder, "lost.jsonl", *argv)
    with small_server(folder / "teacher", port) as server:
        (resumed,) = ranks.run(generated, 1, folder, "lost.jsonl", *argv)
        asked = len(server.prompts)
    assert reported_codes(lost[2]) == ["rollout-server-lost"] and lost[0] == 75, lost
    assert resumed[0] == 0 and "of an earlier start are kept" in resumed[1] and 0 < asked < 12
    assert records_in(resumed[3]) == records_in(whole[3])


def generated_on(ranks, folder, *more):
    (found,) = ranks.run(generated, 1, folder, "none.jsonl", *more)
    return found


def test_texts_are_those_of_the_server(folder, ranks):
    """The file has the text that the server has sampled, up to completions that no text can hold."""
    with small_server(folder / "teacher") as server:
        made = []
        complete = SmallServer._complete

        def remembered(body: dict) -> dict:
            answer = complete(server, body)
            made.append((body["prompt"], answer["token_ids"]))
            return answer

        server._complete = remembered
        (found,) = ranks.run(generated, 1, folder, "texts.jsonl", "--server-url", server.url, "--slots", 1)
    tokenizer = open_tokenizer(folder / "teacher")
    texts = [one.get("completion") or one["messages"][-1]["content"] for one in records_in(found[3])]
    sampled = [tokenizer.decode(ids[:-1] if ids[-1] in (0, 2) else ids) for _, ids in made]
    assert found[0] == 0 and texts and [one for one in sampled if one in texts] == texts


@pytest.mark.parametrize(
    "more, code",
    [
        ("--server-url http://10.0.0.1:80", "rollout-server-not-loopback: --server-remote"),
        ("--server-url nowhere", "value-not-valid: --server-url"),
        ("--server-model x", "remove-flag: --server-model"),
        ("--server-url http://127.0.0.1:80 --nproc-per-node 2", "number-of-processes"),
    ],
)
def test_refused_early(more, code, folder):
    from tests.chat.small_pair import run_directly
    from tests.generate.written_data import arguments

    exit_code, stderr = run_directly("generate", [*arguments(folder, "none.jsonl"), *more.split()])
    assert exit_code == 64 and reported_codes(stderr) == [code], stderr

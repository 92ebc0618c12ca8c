"""Check runs whose completions come from a server: refits, failures, staleness, records and resuming."""

from __future__ import annotations

import json

import pytest
import torch

from tests.kinds.sampled.small_server import small_server
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, read_weights, run_main
from tests.train.rollout_run import EOS, argv, make_files

STEPS, PER_STEP = 4, 10  # of a run: steps, completions of each


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("rollout_server"))


def on_server(files, server, run: str, *more: object) -> list[str]:
    words = ("--rollout-source", "server", "--rollout-server-url", server.url, "--save", files / run)
    return argv(files, run, *words, "--log-interval", 1, "--max-new-tokens", 8, *more)


def trained(files, run: str) -> list[dict]:
    return [line for line in read_metrics(files / run) if "split" not in line]


def steps(files, run: str) -> list[list[float]]:
    names = ("loss", "rollout/length", "rollout/teacher_nll", "rollout/version_lag", "consumed_prompts")
    return [[line[name] for name in names] for line in trained(files, run)]


@pytest.fixture(scope="module")
def unbroken(files, ranks):
    """Return the server of a whole run, in `files / unbroken`."""
    with small_server(files / "student") as server:
        more = ("--export-hf", files / "unbroken hf")
        (result,) = run_main(ranks, on_server(files, server, "unbroken", *more))
        assert result.exit_code == 0, result.stderr
        return server


def test_the_server_has_the_weights_of_every_step(unbroken, files):
    lines = trained(files, "unbroken")
    assert len(lines) == STEPS and all(line["rollout/logp_gap"] < 1e-5 for line in lines)
    assert all(line["rollout/version_lag"] == 0 for line in lines)
    versions = [version.rpartition("-")[2] for version, _ in unbroken.prompts]
    assert versions == [str(step) for step in range(STEPS) for _ in range(PER_STEP)]
    assert unbroken.asked["/collective_rpc"] == STEPS
    weights = list((files / "unbroken" / "rollout_weights").iterdir())
    assert [one.name for one in weights] == ["step_0000003"], "older weights are removed"


@pytest.mark.parametrize("other", ["pipeline-model", pytest.param("context", marks=pytest.mark.slow)])
def test_layouts_train_on_the_same_completions(other, unbroken, files, ranks):
    with small_server(files / "student") as server:
        flags = ("--tensor-model-parallel-size", 2, f"--{other}-parallel-size", 2)
        results = run_main(ranks, on_server(files, server, other, *flags), 4)
        assert [one.exit_code for one in results] == [0] * 4, results[0].stderr
    for ours, theirs in zip(steps(files, other), steps(files, "unbroken"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert all(line["rollout/logp_gap"] < 1e-5 for line in trained(files, other))


def test_a_server_killed_in_a_step_ends_with_75_and_the_run_goes_on(unbroken, files, ranks):
    """It dies in the third step; what it had sampled there is not sampled again."""
    with small_server(files / "student", dies_after=2 * PER_STEP + 3) as server:
        arguments = on_server(files, server, "killed", "--rollout-slots", 2)
        (result,) = run_main(ranks, arguments)
    assert result.exit_code == 75, result.stderr
    assert "iteration 2 is saved" in result.stderr and "does not answer" in result.stderr
    recorded = (files / "killed" / "rollouts" / "step_0000003.jsonl").read_text().splitlines()
    kept = len(recorded) - 1
    assert 1 <= kept <= 3, "its last answers may come without the version of its weights"
    with small_server(files / "student") as server:
        more = ("--load", files / "killed", "--export-hf", files / "killed hf")
        (result,) = run_main(ranks, on_server(files, server, "killed", "--rollout-slots", 2, *more))
        assert result.exit_code == 0, result.stderr
        assert len(server.prompts) == 2 * PER_STEP - kept
    assert steps(files, "killed") == steps(files, "unbroken")
    expected, found = read_weights(files / "unbroken hf"), read_weights(files / "killed hf")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_recorded_completions_are_replayed_without_the_server(unbroken, files, ranks):
    """A run that lost its last checkpoint reads all completions of the steps after it."""
    with small_server(files / "student") as server:
        arguments = on_server(files, server, "replayed", "--save-interval", 2)
        (result,) = run_main(ranks, arguments)
        assert result.exit_code == 0, result.stderr
        before = len(server.prompts)
        again = [*arguments, "--load", str(files / "replayed"), "--ckpt-step", "2"]
        (result,) = run_main(ranks, again)
        assert result.exit_code == 0, result.stderr
        assert len(server.prompts) == before and server.asked["/collective_rpc"] == STEPS
    assert steps(files, "replayed") == steps(files, "unbroken")
    damaged = files / "replayed" / "rollouts" / "step_0000003.jsonl"
    damaged.write_text(damaged.read_text().replace('"finish": "', '"finish": "x', 1))
    with small_server(files / "student") as server:
        again = on_server(files, server, "replayed", "--load", files / "replayed", "--ckpt-step", 2)
        (result,) = run_main(ranks, again)
    assert result.exit_code == 65 and reported_codes(result.stderr) == ["cached-file-damaged: is damaged"]


def test_staleness_1_trains_on_completions_of_the_weights_before(files, ranks):
    with small_server(files / "student") as server:
        arguments = on_server(files, server, "stale", "--max-staleness", 1)
        (result,) = run_main(ranks, [*arguments, "--exit-interval", "2"])
        assert result.exit_code == 0, result.stderr
        (result,) = run_main(ranks, [*arguments, "--load", str(files / "stale")])
        assert result.exit_code == 0, result.stderr
        versions = [version.rpartition("-")[2] for version, _ in server.prompts]
        (result,) = run_main(ranks, on_server(files, server, "stale whole", "--max-staleness", 1))
        assert result.exit_code == 0, result.stderr
    assert versions == ["0"] * 2 * PER_STEP + ["1"] * PER_STEP + ["2"] * PER_STEP
    lines = trained(files, "stale")
    assert [line["rollout/version_lag"] for line in lines] == [0, 1, 1, 1]
    assert lines[0]["rollout/logp_gap"] < 1e-5 < 1e-4 < lines[1]["rollout/logp_gap"]
    assert steps(files, "stale") == steps(files, "stale whole")


def refusal(files, ranks, run: str, server, *more: object) -> tuple[int, list[str]]:
    (result,) = run_main(ranks, on_server(files, server, run, *more))
    return result.exit_code, reported_codes(result.stderr)


@pytest.mark.parametrize(
    "behaviour, code",
    [
        (dict(has_dev_mode=False), "rollout-server-not-ready: cannot exchange its weights"),
        (dict(max_model_len=47), "rollout-server-not-ready: tokens, --seq-length is"),
        (dict(api_key="secret"), "rollout-server-token"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_before_training(behaviour, code, files, ranks):
    with small_server(files / "student", **behaviour) as server:
        assert refusal(files, ranks, "refused", server) == (64, [code])


def test_no_server(files, ranks):
    with small_server(files / "student") as server:
        pass
    assert refusal(files, ranks, "none", server) == (
        64,
        ["rollout-server-not-ready: there is no rollout server at"],
    )


def test_another_tokenizer_is_refused(files, ranks, tmp_path):
    add_tokenizer(tmp_path, 280, "the quack brawn fix ")
    with small_server(files / "student", tokenizer=tmp_path) as server:
        assert refusal(files, ranks, "tokenizer", server) == (
            64,
            ["rollout-server-not-ready: has another tokenizer than the"],
        )


def test_another_model_is_refused(files, ranks, tmp_path):
    """One that cannot read the weights, and one that says it has read them."""
    sizes = dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2)
    add_tokenizer(make_model(tmp_path / "other", "llama", **sizes, **EOS))
    with small_server(tmp_path / "other") as server:
        assert refusal(files, ranks, "other", server) == (
            1,
            ["rollout-server-weights: the rollout server cannot read the"],
        )
        assert not server.is_paused
    with small_server(tmp_path / "other", keeps_weights=True) as server:
        assert refusal(files, ranks, "kept", server) == (
            1,
            ["rollout-server-weights: the rollout server does not have"],
        )


def test_weights_that_stay_those_of_the_step_before_are_noticed(files, ranks):
    """The first exchange changes nothing, so only the second one shows it."""
    with small_server(files / "student", keeps_weights=True) as server:
        assert refusal(files, ranks, "stuck", server) == (
            1,
            ["rollout-server-weights: the rollout server does not have"],
        )
    assert len(trained(files, "stuck")) == 1


def test_a_server_that_was_started_again_is_noticed(files, ranks):
    with small_server(files / "student", forgets_version=PER_STEP + 2) as server:
        assert refusal(files, ranks, "again", server, "--rollout-slots", 1) == (
            1,
            ["rollout-server-weights: the rollout server has weights"],
        )
    lines = (files / "again" / "rollouts" / "step_0000002.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2, "its completions are not kept"


def test_failures_that_pass_are_tried_again_and_the_token_is_sent(unbroken, files, ranks):
    with small_server(files / "student", fails=2, api_key="secret") as server:
        (result,) = ranks.run(with_token, 1, on_server(files, server, "fails"))
    assert result[0] == 0, result[2]
    assert steps(files, "fails") == steps(files, "unbroken")
    config = (files / "fails" / "config.yaml").read_text()
    assert "secret" not in config + json.dumps(trained(files, "fails")) + result[1]


def with_token(arguments):
    import os

    from tests.train.command import call_main

    os.environ["MKD_ROLLOUT_SERVER_TOKEN"] = "secret"
    try:
        return call_main(arguments)
    finally:
        del os.environ["MKD_ROLLOUT_SERVER_TOKEN"]


def test_a_server_that_hangs_is_given_up_after_the_time(files, ranks):
    with small_server(files / "student", fails=1, hangs_s=2.5) as server:
        arguments = on_server(files, server, "hangs", "--rollout-server-timeout-s", 1, "--train-iters", 1)
        (result,) = run_main(ranks, arguments)
    assert result.exit_code == 0, result.stderr

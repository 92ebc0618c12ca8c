"""Check what rollouts refuse before anything is loaded."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from tests.plan.checks.test_problems import BASE, codes, shape
from tests.reported import reports
from tests.run_facts import problems_of
from tests.tiny_models import config_of

ON = (
    "--on-policy-fraction",
    "1",
    "--prompt-data-path",
    "p.jsonl",
    "--kd-ratio",
    "1",
    "--max-new-tokens",
    "8",
)


def test_a_sound_run_needs_no_stored_text():
    assert codes(*ON, student=shape(), teacher=shape()) == []
    assert problems_of(load_config([*BASE[:4], *BASE[6:], *ON]).config, 1) == []
    without_data = load_config([*BASE[:4], *BASE[6:]]).config
    assert reports(problems_of(without_data, 1)) == ["data-path-missing: no training data is given"]


@pytest.mark.parametrize(
    "flags, code",
    [
        (("--kd-ratio", "0.5"), "rollouts-exclude: kd-ratio"),
        (("--max-new-tokens", "64"), "numbers-contradict: leaves no room for a prompt in"),
        (("--teacher-topk", "cache", "--kd-divergence", "forward_kl"), "rollouts-exclude: a stored teacher"),
        (("--teacher-prefetch", "4"), "teacher-prefetch-not-possible: teacher-prefetch"),
        (("--rollout-temperature", "-1"), "out-of-range: must be"),
        (("--on-policy-fraction", "1.5"), "out-of-range: must be"),
        (("--samples-per-prompt", "0"), "out-of-range: must be"),
        (("--on-policy-fraction", "0"), "remove-flag: no effect"),
    ],
)
def test_refused_settings(flags, code):
    assert code in codes(*ON, *flags, world_size=2)


@pytest.mark.parametrize("more", [(), ("--xtoken-loss", "p_kl")], ids=["same tokens", "other tokenizer"])
@pytest.mark.parametrize(
    "source",
    [
        (),
        ("--rollout-source", "server", "--rollout-server-url", "http://127.0.0.1:1"),
        ("--rollout-source", "records", "--rollout-records", "in"),
    ],
    ids=["in process", "server", "records"],
)
def test_every_source_works_with_context_parallelism(source, more):
    words = ON[:2] + ON[4:6] if "records" in source else ON
    assert codes(*words, *source, *more, "--context-parallel-size", "2", world_size=2) == []


SERVER = "--rollout-source", "server", "--rollout-server-url"


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://127.0.0.1:8000", []),
        ("http://localhost:8000/", []),
        ("http://[::1]:8000", []),
        ("http://10.0.0.7:8000", ["rollout-server-not-loopback"]),
        ("http://127.0.0.1.example.org:8000", ["rollout-server-not-loopback"]),
        ("http://user@127.0.0.1:8000", ["value-not-valid: is not an address"]),
        ("127.0.0.1:8000", ["value-not-valid: is not an address"]),
        ("http://127.0.0.1:8000/v1", ["value-not-valid: is not an address"]),
        ("http://127.0.0.1:notaport", ["value-not-valid: is not an address"]),
        ("file:///etc/passwd", ["value-not-valid: is not an address"]),
    ],
)
def test_addresses_of_servers(url, expected):
    assert codes(*ON, *SERVER, url) == expected
    if expected == ["rollout-server-not-loopback"]:
        assert codes(*ON, *SERVER, url, "--rollout-server-remote") == []


@pytest.mark.parametrize(
    "flags, code",
    [
        (SERVER[:2], "add-flag: rollout-source is server, but"),
        ((*SERVER, "http://127.0.0.1:1", "--max-staleness", "2"), "out-of-range: must be"),
        (("--max-staleness", "1"), "remove-flag: no effect"),
        (
            (
                *SERVER,
                "http://127.0.0.1:1",
                "--max-staleness",
                "1",
                "--reward",
                "m:f",
                "--kd-ratio",
                "0.5",
                "--samples-per-prompt",
                "2",
            ),
            "reward-needs: max-staleness is 1 with a reward",
        ),
        (SERVER[2:] + ("http://127.0.0.1:1",), "remove-flag: no effect"),
    ],
)
def test_settings_of_servers(flags, code):
    assert codes(*ON, *flags) == [code]


RECORDS = "--on-policy-fraction", "1", "--rollout-source", "records"
FOLDER = *RECORDS, "--rollout-records", "in"


@pytest.mark.parametrize(
    "flags, code",
    [
        (RECORDS, "add-flag: rollout-source is records, but"),
        ((*FOLDER, "--prompt-data-path", "p.jsonl"), "remove-flag: no effect"),
        ((*FOLDER, "--max-new-tokens", "8"), "remove-flag: no effect"),
        ((*FOLDER, "--rollout-server-remote"), "remove-flag: no effect"),
        ((*FOLDER, "--max-staleness", "-1"), "out-of-range: must be"),
        ((*FOLDER, "--rollout-records-timeout-s", "0"), "out-of-range: must be"),
        ((*FOLDER, "--reward", "m:f", "--samples-per-prompt", "2"), "reward-needs: reward is m:f"),
        ((*ON, "--rollout-records", "in"), "remove-flag: no effect"),
        ((*ON, "--reward", "records", "--samples-per-prompt", "2"), "reward-needs: reward is records, but"),
    ],
)
def test_settings_of_records(flags, code):
    ratio = ("--kd-ratio", "0.5" if "--reward" in flags else "1")
    assert codes(*flags, *ratio, world_size=2) == [code]


def test_records_need_no_prompts_and_no_sampler():
    assert codes(*FOLDER, "--kd-ratio", "1", "--max-staleness", "5", student=shape(), teacher=shape()) == []
    judged = ("--kd-ratio", "0.1", "--reward", "records", "--clip-range", "0.1")
    assert codes(*FOLDER, *judged, "--kd-divergence", "reverse_kl") == []


def test_experts_over_processes():
    moe = shape(**{k: v for k, v in config_of("qwen3_moe").items() if k not in ("num_hidden_layers",)})
    found = codes(*ON, "--expert-model-parallel-size", "2", world_size=2, student=moe, teacher=moe)
    assert found == []


def test_prompts_are_required():
    assert codes(*ON[:2], *ON[4:]) == ["data-path-missing: but there are no prompts"]


@pytest.mark.parametrize("family", ["deepseek", "gpt_oss", "phi4-long"])
def test_students_that_cannot_sample(family):
    from mkd.plan.models.model_shape import ModelShape

    student = ModelShape.from_hf_config(json.loads(json.dumps(config_of(family))))
    assert codes(*ON, student=student, teacher=student) == [
        "rollouts-exclude: with which mkd cannot sample yet"
    ]

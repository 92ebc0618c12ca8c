"""Check what rollouts refuse before anything is loaded."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from tests.plan.checks.test_problems import BASE, codes, shape
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
    assert [one.code for one in problems_of(load_config([*BASE[:4], *BASE[6:]]).config, 1)] == [
        "data-path-missing"
    ]


@pytest.mark.parametrize(
    "flags, code",
    [
        (("--kd-ratio", "0.5"), "rollout-with-cross-entropy"),
        (("--max-new-tokens", "64"), "max-new-tokens-too-many"),
        (("--teacher-topk", "cache", "--kd-divergence", "forward_kl"), "rollout-with-stored-teacher"),
        (("--context-parallel-size", "2"), "rollout-with-context-parallel"),
        (("--teacher-prefetch", "4"), "rollout-with-teacher-prefetch"),
        (("--rollout-temperature", "-1"), "value-out-of-range"),
        (("--on-policy-fraction", "1.5"), "value-out-of-range"),
        (("--samples-per-prompt", "0"), "value-out-of-range"),
        (("--on-policy-fraction", "0"), "setting-without-effect"),
    ],
)
def test_refused_settings(flags, code):
    assert code in codes(*ON, *flags, world_size=2)


SERVER = "--rollout-source", "server", "--rollout-server-url"


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://127.0.0.1:8000", []),
        ("http://localhost:8000/", []),
        ("http://[::1]:8000", []),
        ("http://10.0.0.7:8000", ["rollout-server-not-loopback"]),
        ("http://127.0.0.1.example.org:8000", ["rollout-server-not-loopback"]),
        ("http://user@127.0.0.1:8000", ["rollout-server-url-invalid"]),
        ("127.0.0.1:8000", ["rollout-server-url-invalid"]),
        ("http://127.0.0.1:8000/v1", ["rollout-server-url-invalid"]),
        ("http://127.0.0.1:notaport", ["rollout-server-url-invalid"]),
        ("file:///etc/passwd", ["rollout-server-url-invalid"]),
    ],
)
def test_addresses_of_servers(url, expected):
    assert codes(*ON, *SERVER, url) == expected
    if expected == ["rollout-server-not-loopback"]:
        assert codes(*ON, *SERVER, url, "--rollout-server-remote") == []


@pytest.mark.parametrize(
    "flags, code",
    [
        (SERVER[:2], "rollout-server-url-missing"),
        ((*SERVER, "http://127.0.0.1:1", "--max-staleness", "2"), "value-out-of-range"),
        (("--max-staleness", "1"), "setting-without-effect"),
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
            "staleness-without-ratio",
        ),
        (SERVER[2:] + ("http://127.0.0.1:1",), "setting-without-effect"),
    ],
)
def test_settings_of_servers(flags, code):
    assert codes(*ON, *flags) == [code]


def test_experts_over_processes():
    moe = shape(**{k: v for k, v in config_of("qwen3_moe").items() if k not in ("num_hidden_layers",)})
    found = codes(*ON, "--expert-model-parallel-size", "2", world_size=2, student=moe, teacher=moe)
    assert found == []


def test_prompts_are_required():
    assert codes(*ON[:2], *ON[4:]) == ["prompt-data-path-missing"]


@pytest.mark.parametrize("family", ["deepseek", "gpt_oss", "phi4-long"])
def test_students_that_cannot_sample(family):
    from mkd.plan.model_shape import ModelShape

    student = ModelShape.from_hf_config(json.loads(json.dumps(config_of(family))))
    assert codes(*ON, student=student, teacher=student) == ["rollout-architecture"]

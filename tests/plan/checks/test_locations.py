from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.locations import check_log


def problems(*argv: str) -> list[tuple[str, str]]:
    """Return (code, first word) of each problem."""
    found = check_log(load_config(["--train-iters", "100", *argv]).config)
    return [(error.code, error.what.split()[0]) for error in found]


@pytest.mark.parametrize(
    ("argv", "code", "setting"),
    [
        ("--wandb-entity me", "setting-without-effect", "wandb-entity"),
        ("--use-pytorch-profiler", "setting-without-effect", "use-pytorch-profiler"),
        ("--profile-ranks 0 1", "setting-without-effect", "profile-ranks"),
        ("--profile-step-end 20", "setting-without-effect", "profile-step-end"),
        ("--profile --profile-step-start 12", "profile-steps-empty", "profile-step-end"),
        (
            "--profile --profile-step-start 100 --profile-step-end 101",
            "setting-without-effect",
            "profile-step-start",
        ),
        ("--profile --profile-ranks 0 all", "profile-ranks-not-valid", "profile-ranks"),
    ],
)
def test_contradictions_are_named(argv, code, setting):
    assert problems(*argv.split()) == [(code, setting)]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--wandb-project x --wandb-entity me",
        "--profile --use-pytorch-profiler --profile-ranks 0 3",
        "--record-memory-history --profile-step-start 0 --profile-step-end 1",
    ],
)
def test_sound_settings_are_accepted(argv):
    assert problems(*argv.split()) == []

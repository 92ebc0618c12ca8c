from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.locations import check_log
from tests.reported import Reported
from tests.run_facts import facts_of


def problems(*argv: str) -> list[tuple[Reported, str]]:
    """Return (code, first word) of each problem."""
    found = check_log(facts_of(load_config(["--train-iters", "100", *argv]).config))
    return [(Reported.of(error), error.what.split()[0]) for error in found]


@pytest.mark.parametrize(
    ("argv", "code", "setting"),
    [
        ("--wandb-entity me", "remove-flag: no effect", "wandb-entity"),
        ("--profile-ranks 0 1", "remove-flag: no effect", "profile-ranks"),
        ("--profile-steps 11 20", "remove-flag: no effect", "profile-steps"),
        ("--profile --profile-steps 12 11", "value-not-valid: is not a first and a last", "profile-steps"),
        ("--profile --profile-steps 0 1", "value-not-valid: is not a first and a last", "profile-steps"),
        ("--profile --profile-steps 5", "value-not-valid: is not a first and a last", "profile-steps"),
        ("--profile --profile-steps a b", "value-not-valid: is not a first and a last", "profile-steps"),
        ("--profile --profile-steps 101 102", "remove-flag: no effect", "profile-steps"),
        ("--profile --profile-ranks 0 all", "value-not-valid: profile-ranks", "profile-ranks"),
    ],
)
def test_contradictions_are_named(argv, code, setting):
    assert problems(*argv.split()) == [(code, setting)]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--wandb-project x --wandb-entity me",
        "--profile --profile-ranks 0 3",
        "--record-memory-history --profile-steps 1 1",
        "--profile --profile-steps 100 100",
    ],
)
def test_sound_settings_are_accepted(argv):
    assert problems(*argv.split()) == []

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.log import check_log


def problems(*argv: str) -> list[str]:
    return [error.what for error in check_log(load_config(["--train-iters", "100", *argv]).config)]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ("--wandb-entity me", "wandb-entity me would have no effect"),
        ("--use-pytorch-profiler", "use-pytorch-profiler would have no effect"),
        ("--profile-ranks 0 1", "profile-ranks would have no effect"),
        ("--profile-step-end 20", "profile-step-end would have no effect"),
        ("--profile --profile-step-start 12", "profile-step-end 12 is not above profile-step-start 12"),
        (
            "--profile --profile-step-start 100 --profile-step-end 101",
            "profile-step-start 100 would have no effect",
        ),
        ("--profile --profile-ranks 0 all", "profile-ranks all are not ranks"),
    ],
)
def test_what_contradicts_itself_is_named(argv, what):
    assert problems(*argv.split()) == [what]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--wandb-project x --wandb-entity me",
        "--profile --use-pytorch-profiler --profile-ranks 0 3",
        "--record-memory-history --profile-step-start 0 --profile-step-end 1",
    ],
)
def test_what_makes_sense_is_accepted(argv):
    assert problems(*argv.split()) == []

from __future__ import annotations

import re

import pytest

from mkd.config.flags import known_flags, parse_command_line
from mkd.config.megatron_flags import NOT_YET, SAFE_TO_DROP, USE_INSTEAD, unsupported
from tests.reported import Reported


def test_tables_are_large_disjoint_and_not_flags_of_mkd():
    tables = [set(USE_INSTEAD), set(SAFE_TO_DROP), set(NOT_YET)]
    assert len(USE_INSTEAD) + len(SAFE_TO_DROP) >= 80
    assert len(set.union(*tables)) == sum(map(len, tables))
    assert not set.union(*tables) & set(known_flags())


def test_every_flag_that_is_recommended_exists():
    files = {"--no-shuffle", "--no-append-eod"}
    for advice in [*USE_INSTEAD.values(), *NOT_YET.values()]:
        named = set(re.findall(r"--[a-z][a-z0-9-]+", advice))
        assert named - files <= set(known_flags()), advice


@pytest.mark.parametrize(
    ("argv", "code", "advice"),
    [
        (["--fp16"], "flag-replaced: known, not supported: use", "use --bf16"),
        (
            ["--profile-step-start", "5"],
            "flag-replaced: known, not supported: use",
            "use --profile-steps FIRST LAST",
        ),
        (["--use-pytorch-profiler"], "remove-flag: known, not supported: safe to drop", ""),
        (
            ["--lr-warmup-fraction", "0.1"],
            "flag-replaced: known, not supported: use",
            "use --lr-warmup-iters",
        ),
        (["--num-layers", "12"], "flag-replaced: known, not supported: use", "use --student-hf"),
        (["--train-samples", "1000"], "flag-replaced: known, not supported: use", "use --train-iters"),
        (["--use-mcore-models"], "remove-flag: known, not supported: safe to drop", ""),
        (["--transformer-impl=local"], "remove-flag: known, not supported: safe to drop", ""),
        (["--rampup-batch-size", "16", "16", "1000"], "flag-replaced: known, not supported: use", "use one"),
        (["--wandb-exp-name", "x"], "flag-replaced: known, not supported: use", "use --name"),
        (["--num-experts", "8"], "flag-replaced: known, not supported: use", "use --student-hf"),
        (["--mtp-num-layers", "1"], "flag-not-yet", ""),
    ],
)
def test_known_flags_get_advice(argv, code, advice):
    (error,) = parse_command_line(argv).errors
    assert Reported.of(error) == code and error.what.startswith(argv[0].partition("=")[0] + ": ")
    assert advice in error.what


def test_advice_for_a_place_in_a_file():
    assert unsupported("--fp16", "x.yaml:3: fp16").what.startswith("x.yaml:3: fp16: ")
    assert unsupported("--fp61", "") is None

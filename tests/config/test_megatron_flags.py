from __future__ import annotations

import re

import pytest

from mkd.config.flags import known_flags, parse_command_line
from mkd.config.megatron_flags import NOT_YET, SAFE_TO_DROP, USE_INSTEAD, unsupported


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
    ("argv", "what"),
    [
        (["--fp16"], "--fp16: known, not supported: use --bf16"),
        (["--num-layers", "12"], "--num-layers: known, not supported: use --student-hf"),
        (["--train-samples", "1000"], "--train-samples: known, not supported: use --train-iters"),
        (["--use-mcore-models"], "--use-mcore-models: known, not supported: safe to drop"),
        (["--transformer-impl=local"], "--transformer-impl: known, not supported: safe to drop"),
        (["--rampup-batch-size", "16", "16", "1000"], "--rampup-batch-size: known, not supported: use one"),
        (["--wandb-exp-name", "x"], "--wandb-exp-name: known, not supported: use --name"),
        (["--num-experts", "8"], "--num-experts: not supported yet"),
    ],
)
def test_known_flags_get_advice(argv, what):
    (error,) = parse_command_line(argv).errors
    assert error.what.startswith(what)


def test_advice_for_a_place_in_a_file():
    assert unsupported("--fp16", "x.yaml:3: fp16").what == "x.yaml:3: fp16: known, not supported: use --bf16"
    assert unsupported("--fp61", "") is None

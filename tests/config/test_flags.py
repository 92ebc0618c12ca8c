from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mkd.config import other_names
from mkd.config.divergence import DIVERGENCES
from mkd.config.flags import (
    FIRST_FLAGS,
    NUM_RANKS,
    FlagParser,
    build_parser,
    known_flags,
    parse_command_line,
    require_new_file,
)
from mkd.config.megatron_flags import unsupported
from mkd.config.options import all_options
from mkd.errors import UsageError
from tests.reported import Reported, refused, reports

PUBLIC_CONTRACT = """
--tensor-model-parallel-size --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage
--num-virtual-stages-per-pipeline-rank --context-parallel-size --expert-model-parallel-size
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--micro-batch-size --global-batch-size --seq-length --train-iters --lr --min-lr --lr-decay-style
--lr-warmup-iters --weight-decay --clip-grad --adam-beta1 --adam-beta2 --adam-eps --bf16 --seed
--data-path --valid-data-path --split --tokenizer-type --tokenizer-model --save --load --save-interval
--ckpt-step --eval-interval --eval-iters --log-interval --tensorboard-dir --recompute-granularity
--recompute-method --recompute-num-layers --exit-duration-in-mins --exit-interval
--distributed-timeout-minutes --num-workers --student-hf --teacher-hf --student-load --teacher-load
--kd-ratio --kd-temperature --kd-temperature-scaling --kd-divergence --teacher-pipeline-layout
--student-pipeline-layout --xtoken-loss --xtoken-alignment --xtoken-seq-length --xtoken-projection
--xtoken-top-k --xtoken-relaxed-map --no-xtoken-reasoning
--teacher-residency --teacher-combination --teacher-weighting --teacher-weighting-temperature
--optimizer-residency --eval-multiple-choice --eval-completions
--eval-num-fewshot --export-hf --dry-run --pack --overlong --append-eod --no-append-eod --no-shuffle
"""


def values(*argv: str) -> dict:
    result = parse_command_line(argv)
    assert not result.errors, result.errors
    return {path: value for path, (value, _) in result.values.items()}


def problem(*argv: str):
    (error,) = parse_command_line(argv).errors
    return error


def test_the_public_contract_is_known():
    assert not set(PUBLIC_CONTRACT.split()) - set(known_flags())
    assert set(known_flags()) <= set(build_parser()._option_string_actions)


def test_values_have_their_types_and_origins():
    argv = [
        "--lr",
        "1e-5",
        "--seq-length=64",
        "--bf16",
        "--no-append-eod",
        "--teacher-hf",
        "T",
        "--exit-interval",
        "3",
    ]
    result = parse_command_line(argv)
    assert result.values == {
        "optimizer.lr": (1e-5, "--lr"),
        "training.seq_length": (64, "--seq-length"),
        "training.bf16": (True, "--bf16"),
        "data.append_eod": (False, "--no-append-eod"),
        "teachers[0].hf": ("T", "--teacher-hf"),
        "training.exit_interval": (3, "--exit-interval"),
    }


def test_lists_stop_at_the_next_flag():
    assert values("--data-path", "0.3", "a", "0.7", "b", "--seed", "1")["data.data_path"] == (
        "0.3",
        "a",
        "0.7",
        "b",
    )
    assert values("--data-path", "a.jsonl")["data.data_path"] == ("a.jsonl",)


def test_config_file_is_not_a_setting():
    result = parse_command_line(["--config", "x.yaml"])
    assert result.config_file == "x.yaml" and not result.values


def test_unknown_flag_names_the_nearest():
    error = problem("--tensor-parallel-size", "2")
    assert error.code == "flag-unknown" and error.what.startswith("--tensor-parallel-size ")
    assert "--tensor-model-parallel-size?" in error.do
    assert problem("--xyzzy").do == "see `mkd train --help-all`"


@pytest.mark.parametrize(
    "flag, hint",
    [
        ("--learning-rate", "did you mean --lr?"),
        ("--lmbda", "did you mean --on-policy-fraction?"),
        ("--fp32", "use --no-bf16, which is the default"),
        ("--characters-per-sample", "use one record for each document; --pack bfd, the default, "),
        ("--xtoken-exact-token-match-only", "use --xtoken-loss partition_kl, the default: "),
        ("--warmup_ratio", "use --lr-warmup-iters: warm-up is given in steps"),
        ("--beta", "use --kd-jsd-beta for the jsd divergence, or --dpo-beta for "),
        ("--output-dir", "did you mean --save?"),
        ("--per_device_train_batch_size", "did you mean --micro-batch-size?"),
        ("--model_name_or_path", "did you mean --student-hf?"),
        ("--num-train-epochs", "use --train-iters: "),
        ("--gradient-accumulation-steps", "use --global-batch-size: "),
    ],
)
def test_names_of_other_trainers_lead_to_ours(flag, hint):
    """Also where another flag is spelt more alike."""
    assert problem(flag, "3").do.startswith(hint)


def test_an_unknown_flag_explains_what_is_missing():
    """A flag of another command stands where the required one should: it comes first, and leads to ours."""
    parser = FlagParser("mkd data preview")
    parser.add_argument("--input")
    parser.add_argument("--student", required=True)
    parser.add_argument("--seq-length")
    for flag, do in (("student-hf", "did you mean --student?"), ("data-path", "did you mean --input?")):
        with pytest.raises(UsageError) as caught:
            parser.parse_args([f"--{flag}", "x"])
        assert (caught.value.code, caught.value.do) == ("flag-unknown", do)
    for words in ([], ["--seq", "64"]):  # argparse takes short forms of flags
        with pytest.raises(UsageError) as caught:
            parser.parse_args(words)
        assert caught.value.code == "command-line-not-valid"
        assert caught.value.do == "see `mkd data preview --help`"


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ("run.yaml", "name a file of settings with --config run.yaml"),
        ("--lr 1e-4 conf/run.yml --bf16", "name a file of settings with --config conf/run.yml"),
        ("--bf16 true", "--bf16 takes no value: leave true out, or give --no-bf16"),
        ("--no-shuffle false", "--no-shuffle takes no value: leave false out"),
        ("--teacher-hf my model", "--teacher-hf takes one value; a value with blanks needs quotes"),
        ("model", "see `mkd train --help`"),
    ],
)
def test_a_word_that_no_flag_takes_gets_its_place(words, do):
    (error,) = parse_command_line(words.split()).errors
    assert error.code == "command-line-not-valid" and error.do == do


def test_hints_name_flags_that_exist_and_names_that_do_not():
    for name in (*other_names.OURS, *other_names.HINTS):
        assert f"--{name}" not in known_flags() and unsupported(f"--{name}", "") is None
    hinted = re.findall("--[a-z0-9-]+", " ".join(other_names.HINTS.values())) + [
        f"--{name}" for name in other_names.OURS.values()
    ]
    assert set(hinted) - set(known_flags()) == {"--nproc-per-node"}


def test_files_are_not_replaced_and_devices_and_pipes_are_written_to(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "new", tmp_path / "pipe", Path("/dev/null")):
        require_new_file("--out", path, overwrite=False)
    for path in (tmp_path / "file", tmp_path):
        with refused("already-exists: exists"):
            require_new_file("--out", path, overwrite=False)
        require_new_file("--out", path, overwrite=True)


def test_no_abbreviations():
    assert problem("--seq", "3").code == "flag-unknown"


def test_a_misspelt_flag_with_values_does_not_hide_the_others():
    result = parse_command_line(
        ["--data-paths", "a", "b", "--lr", "3e-4", "--num-layers", "12", "--seq-length", "x"]
    )
    assert result.values == {"optimizer.lr": (3e-4, "--lr")}
    assert reports(result.errors) == [
        "flag-unknown",
        "flag-replaced: known, not supported: use",
        "value-not-valid",
    ]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--seq-length", "abc"], "value-not-valid"),
        (["--seq-length", "1.5"], "value-not-valid"),
        (["--lr", "fast"], "value-not-valid"),
        (["--lr", "nan"], "value-not-valid"),
        (["--pack", "ffd"], "value-unknown: is not a known value"),
        (["--kd-divergence", "tvd"], "value-unknown: is not a known value"),
        (["--lr"], "command-line-not-valid"),
        (["--bf16", "true"], "command-line-not-valid"),
        (["stray"], "command-line-not-valid"),
        (["-x"], "command-line-not-valid"),
    ],
)
def test_wrong_values(argv, code):
    error = problem(*argv)
    assert Reported.of(error) == code and error.do and error.exit_code == 64
    assert argv[-1] in error.what


def test_choices_are_listed():
    assert problem("--pack", "ffd").do == "use bfd or none"
    assert all(name in problem("--kd-divergence", "tvd").do for name in DIVERGENCES)


def test_short_help_has_the_first_flags_in_full_and_names_the_others(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--help"])
    assert caught.value.code == 0
    head, _, rest = capsys.readouterr().out.partition("all flags by section")
    assert re.findall(r"^  (--[a-z0-9-]+)", head, re.MULTILINE) == list(FIRST_FLAGS)
    flags = {option.flag for option in all_options() if option.has_flag}
    assert set(re.findall(r"--[a-z0-9-]+", rest)) == flags | {"--help-all", "--config", NUM_RANKS}
    assert len((head + rest).splitlines()) < 150


def test_long_help_is_grouped_and_ends_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--help-all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for title in (
        "student",
        "teacher",
        "xtoken",
        "parallel",
        "kd",
        "training",
        "data",
        "optimizer",
        "checkpoint",
        "log",
    ):
        assert f"\n{title}:\n" in text
    assert "(default: 2048)" in text and "%" not in text.replace("%%", "")
    assert "(default: on)" in text and "(default: False)" not in text and "(default: True)" not in text

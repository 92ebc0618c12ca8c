"""Check that --bf16 gives bf16 logits in the training loss by default, and fp32 without a gradient."""

from __future__ import annotations

import json

import pytest

from tests.train.command import flags, make_files, read_metrics, run_main
from tests.train.topk_files import DATA, exported, offline

EVALUATED = ("--bf16", "--eval-interval", 2, "--eval-iters", 2)
LOSSES = ("loss", "ce_loss", "kd_loss", "teacher_ce", "teacher_entropy")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("precision"))


def records(ranks, files, argv) -> list[dict]:
    """Return records of an evaluation, two steps and an evaluation."""
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    return read_metrics(files / argv[argv.index("--log-dir") + 1])


def write_teachers(files) -> str:
    """Write a file that names the same teacher twice; each then has a separate pass over the heads."""
    teachers = [
        {"name": name, "hf": str(files / "teacher"), "weight": weight}
        for name, weight in (("one", 1), ("two", 3))
    ]
    (files / "teachers.yaml").write_text(json.dumps({"teachers": teachers}), encoding="utf-8")
    return str(files / "teachers.yaml")


def command(files, run, number, *more) -> list[str]:
    """Return the command line of a run with one or two teachers."""
    argv = flags(files, run, *DATA, *EVALUATED, *more, **({"teacher_hf": None} if number == 2 else {}))
    return argv + (["--config", write_teachers(files)] if number == 2 else [])


@pytest.fixture(scope="module")
def trained(ranks, files):
    return records(ranks, files, flags(files, "bf16", *DATA, *EVALUATED))


@pytest.mark.parametrize("number", [1, 2])
def test_evaluation_is_that_of_fp32_logits(number, files, ranks):
    plain, other = (
        records(ranks, files, command(files, f"{number} {more}", number, *more))
        for more in ((), ("--kd-fp32-logits",))
    )
    for key in LOSSES:
        assert plain[0][key] == other[0][key], key
    assert plain[1]["grad_norm"] != other[1]["grad_norm"], "another way in training"


def test_a_stored_teacher_has_fp32_logits(trained, files, ranks):
    """If a bf16 export stores all of the vocabulary, the evaluation is that with the teacher itself."""
    pytest.importorskip("pyarrow")
    exported(ranks, files, "all", "--k", 307, "--bf16")
    stored = records(ranks, files, offline(files, "stored", "all", *EVALUATED))
    for key in LOSSES:
        assert stored[0][key] == pytest.approx(trained[0][key], rel=1e-5), key

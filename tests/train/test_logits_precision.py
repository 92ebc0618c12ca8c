"""Under --bf16 logits are bf16 in the training loss, unless asked for otherwise, and fp32 wherever there is no gradient."""

from __future__ import annotations

import pytest

from tests.train.command import flags, make_files, read_metrics, run_main
from tests.train.topk_files import DATA, exported, offline

EVALUATED = ("--bf16", "--eval-interval", 2, "--eval-iters", 2)
LOSSES = ("loss", "ce_loss", "kd_loss", "teacher_ce", "teacher_entropy")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("precision"))


def records(ranks, files, argv) -> list[dict]:
    """Of an evaluation, two steps and an evaluation."""
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    return read_metrics(files / argv[argv.index("--log-dir") + 1])


@pytest.fixture(scope="module")
def trained(ranks, files):
    return records(ranks, files, flags(files, "bf16", *DATA, *EVALUATED))


def test_evaluation_is_that_of_fp32_logits(trained, files, ranks):
    exact = records(ranks, files, flags(files, "fp32 logits", *DATA, *EVALUATED, "--kd-fp32-logits"))
    evaluation, step = ([one[i] for one in (trained, exact)] for i in (0, 1))
    for key in LOSSES:
        assert evaluation[0][key] == evaluation[1][key], key
    assert step[0]["kd_loss"] != step[1]["kd_loss"], "bf16 logits would be seen"


def test_a_stored_teacher_has_fp32_logits(trained, files, ranks):
    """All of the vocabulary stored by a bf16 export: the evaluation is the one with the teacher itself."""
    pytest.importorskip("pyarrow")
    exported(ranks, files, "all", "--k", 307, "--bf16")
    stored = records(ranks, files, offline(files, "stored", "all", *EVALUATED))
    for key in LOSSES:
        assert stored[0][key] == pytest.approx(trained[0][key], rel=1e-5), key

"""A teacher on a GPU of its own, over NCCL: the results are those of a teacher beside the student."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train import context_rollout_run, rollout_run
from tests.train.sides_text import SIDES, Compared

pytestmark = pytest.mark.gpu
EXACT = ("--bf16", "--deterministic-mode")


def test_completions_of_the_student(gpu_ranks, tmp_path):
    skip_unless_gpus_take(2)
    files = rollout_run.make_files(tmp_path)

    def argv(run, *flags):
        return rollout_run.argv(files, run, *EXACT, *flags, fraction=0.5)

    (folder := tmp_path / "run").mkdir()
    Compared(gpu_ranks, tmp_path / "compared", argv).check(folder, SIDES["1 from 1"])


@pytest.mark.parametrize("kind", ["context", "xtoken"])
def test_completions_in_a_row_of_the_teacher(kind, gpu_ranks, tmp_path):
    """Its length differs from that of the student's row."""
    skip_unless_gpus_take(2)
    files = context_rollout_run.make_rollout_files(tmp_path)
    teacher = context_rollout_run.knowing({"hf": str(files / "teacher")})
    teacher |= {"xtoken": {}} if kind == "xtoken" else {}
    config = context_rollout_run.write_teachers(files / "run.yaml", teacher)

    def argv(run, *flags):
        return context_rollout_run.argv(files, run, config, *EXACT, *flags)

    (folder := tmp_path / "run").mkdir()
    Compared(gpu_ranks, tmp_path / "compared", argv).check(folder, SIDES["1 from 1"])

"""The share of a step in which teachers on processes of their own have nothing to do."""

from __future__ import annotations

import json

import pytest

from mkd.errors import EXIT_DONE
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, make_files
from tests.train.processes import run_processes


def test_a_replica_is_as_busy_as_its_busiest_stage():
    from mkd.train.teacher_idle import TeacherIdle

    said = {2: {"rows": 10, "busy_ms": 1000.0}, 3: {"rows": 10, "busy_ms": 400.0}}
    idle = TeacherIdle(lambda: said, [[[2, 3]], [[4], [5]]])
    assert idle.share([10, 10], 2000.0) is None, "the second teacher has said nothing"
    said |= {rank: {"rows": 4, "busy_ms": 100.0} for rank in (4, 5)}
    # 10 rows of 100 ms in one replica; 10 of 25 ms in each of two
    assert idle.share([10, 20], 2000.0) == pytest.approx((2 * (1 - 0.5) + 2 * (1 - 0.125)) / 4)
    said[2] = {"rows": 20, "busy_ms": 4000.0}  # rows now take 300 ms
    assert idle.share([10, 0], 2000.0) == pytest.approx((0 + 2 * 1) / 4), "never less than nothing"


def test_the_replicas_of_teachers_in_a_launch():
    from mkd.config.load import load_config
    from mkd.run.student_side import teacher_replicas

    argv = ["--student-hf", "s", "--teacher-hf", "t", "--teacher-processes", "8"]
    argv += ["--teacher-tensor-model-parallel-size", "2", "--teacher-pipeline-model-parallel-size", "2"]
    assert teacher_replicas(load_config(argv).config, 10) == [[[2, 3, 6, 7], [4, 5, 8, 9]]]


@pytest.mark.slow
@pytest.mark.parametrize("slower", ["student", "teacher"])
def test_the_faster_side_waits(tmp_path, slower):
    """One side has many times the layers: only the other one waits. The line and metrics.jsonl say so."""
    files, faster = make_files(tmp_path), {"student": "teacher", "teacher": "student"}[slower]
    sizes = dict(num_hidden_layers=24, hidden_size=96, seed=3)
    add_tokenizer(make_model(tmp_path / "large", family="llama", **sizes))
    paths = {f"{slower}_hf": "large", f"{faster}_hf": faster}
    argv = flags(files, "run", "--train-iters", 16, "--seq-length", 64, "--teacher-processes", 1, **paths)
    ended = run_processes(tmp_path, argv, 2)
    assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    records = [json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [one for one in records if one["iteration"] > 8]
    waits = sorted(one["teacher_wait_ms"] / one["step_time_ms"] for one in last)[len(last) // 2]
    idle = sorted(one["teacher_idle_share"] for one in last)[len(last) // 2]
    assert (idle > 0.4 and waits < 0.1) if slower == "student" else (idle < 0.3 and waits > 0.3)
    assert "  idle 0." in ended[0].output and "top1" not in ended[0].output.splitlines()[-10]

"""Check splits that `--pipeline-layout auto` may choose, on the real schedule.

Stages without a layer train the same model too.
"""

from __future__ import annotations

import pytest

from tests.train.command import flags, make_files, read_metrics, read_weights, run_main

PP2, PP3 = (["--pipeline-model-parallel-size", n] for n in (2, 3))
EMPTY_LAST = ["--student-pipeline-layout", "2,0", "--teacher-pipeline-layout", "3,0"]
EMPTY_ENDS = ["--student-pipeline-layout", "0,2,0", "--teacher-pipeline-layout", "1,1,1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="module")
def one_process(files, ranks):
    return train(files, ranks, "one", [])


def train(files, ranks, name: str, layout: list, world_size: int = 1):
    """Return (records, weights, output) of two steps."""
    argv = flags(files, name, "--lr", 1e-4, "--export-hf", files / f"{name} hf", *layout)
    results = run_main(ranks, argv, world_size)
    assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
    return read_metrics(files / name), read_weights(files / f"{name} hf"), results[0].stdout


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [([*PP2, "--pipeline-layout", "auto"], 2), ([*PP2, *EMPTY_LAST], 2), ([*PP3, *EMPTY_ENDS], 3)],
    ids=["auto", "empty last stage", "empty first and last stage"],
)
def test_layouts_train_like_one_process(layout, world_size, files, ranks, one_process):
    records, weights, _ = train(files, ranks, "-".join(map(str, layout)), layout, world_size)
    for record, expected in zip(records, one_process[0], strict=True):
        for key in ("loss", "ce_loss", "kd_loss", "grad_norm"):
            assert record[key] == pytest.approx(expected[key], rel=1e-5), key
    for name, expected in one_process[1].items():
        assert (weights[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_auto_splits_what_even_refuses(files, ranks):
    """The teacher's three layers go on two stages; the start shows both splits and their cost."""
    argv = flags(files, "dry", "--dry-run", *PP2, "--pipeline-layout", "auto")
    first, _ = run_main(ranks, argv, world_size=2)
    assert first.exit_code == 0, first.stderr
    for text in (
        "student layers by stage: (",
        "teacher layers by stage: (",
        "predicted step: ",
        "memory of pipeline rank 1: ",
    ):
        assert text in first.stdout
